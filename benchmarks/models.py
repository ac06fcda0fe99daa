"""The models that are trained here, small enough for a CPU, with a batch for each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(channels: int, width: int, stages: int, blocks: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    for stage in range(stages):
        after = width * 2**stage
        for index in range(blocks):
            first = index == 0 and stage > 0
            layers.append(Block(after // 2 if first else after, after, 2 if first else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(after, CLASSES))


def conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in (
        (3, 16, 2),
        (16, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
        (128, 64, 1),
    ):
        layers += [
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads))
        self.think = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer(dim: int = 128, depth: int = 4, heads: int = 4) -> nn.Module:
    """Classifies a sequence of vectors."""
    layers = [Layer(dim, heads) for _ in range(depth)]
    return nn.Sequential(
        nn.Linear(32, dim), *layers, nn.LayerNorm(dim), Mean(), nn.Linear(dim, CLASSES)
    )


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def batch(*shape: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, device=device), torch.randint(CLASSES, shape[:1], device=device)


def describe(model: nn.Module) -> str:
    sizes = [p.numel() for p in model.parameters()]
    return f"{sum(sizes) / 1e6:.1f}M in {len(sizes)} tensors"
