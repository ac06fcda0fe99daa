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
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        dropped = [nn.Dropout(dropout)] * (dropout > 0)
        self.attend = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads, causal), *dropped)
        self.think = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), *dropped
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


class GPT(nn.Module):
    """Predicts the next character; the head is the embedding."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        dim: int,
        depth: int,
        heads: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        layers = [Layer(dim, heads, causal=True, dropout=dropout) for _ in range(depth)]
        self.body = nn.Sequential(nn.Dropout(dropout), *layers, nn.LayerNorm(dim))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.token(tokens) + self.position[: tokens.shape[1]])
        return F.linear(x, self.token.weight)


def decoder(vocabulary: int, length: int, dim: int, depth: int, heads: int) -> nn.Module:
    """A GPT without dropout, a row of logits for each token."""
    gpt = GPT(vocabulary, length, dim, depth, heads, dropout=0.0)
    return nn.Sequential(gpt, nn.Flatten(0, 1))


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def batch(*shape: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, device=device), torch.randint(CLASSES, shape[:1], device=device)


def tokens(vocabulary: int, *shape: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows of tokens, and for each token the next one."""
    drawn = torch.randint(vocabulary, (shape[0], shape[1] + 1), device=device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].flatten()


def describe(model: nn.Module) -> str:
    sizes = [p.numel() for p in model.parameters()]
    return f"{sum(sizes) / 1e6:.1f}M in {len(sizes)} tensors"
