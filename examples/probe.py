"""Three nets in float16, each under seventeen loss scales: which overflow, which leaf starves.

A net of which a part is starved raises no flag and trains on, without that part. Run
`python examples/probe.py --picture probe.png` (with `[notebooks]` installed); prints a verdict and
a table for each net, and what the seventeen scales cost in gradients.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import purescale as ps

HALF = "params=float32,compute=float16,output=float32"
TEXT = Path(__file__).read_text()  # what the transformer learns


class CharTransformer(nn.Module):
    def __init__(self, letters: int, width: int = 64, length: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        query, key, value = heads.transpose(-2, -3)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        x = x + self.mix(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def deep(depth: int, activation: type[nn.Module]) -> nn.Module:
    widths = [64] * depth
    layers = [layer for width in widths for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images[:64]).float() / 16, torch.as_tensor(labels[:64])


def sentences() -> tuple[Tensor, Tensor]:
    letters = {letter: index for index, letter in enumerate(sorted(set(TEXT)))}
    text = torch.tensor([letters[letter] for letter in TEXT])[: 16 * 65].view(16, 65)
    return text[:, :-1], text[:, 1:]


def nets() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    return {
        "char transformer": (CharTransformer(len(set(TEXT))), sentences()),
        "12 layers, ReLU": (deep(12, nn.ReLU), digits()),
        "16 layers, sigmoid": (deep(16, nn.Sigmoid), digits()),
    }


def probe(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[ps.ScaleProbe, float]:
    """What seventeen scales show, and what they cost, in gradients."""
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, HALF)

    def loss_fn(params, buffers, batch):
        inputs, labels = batch
        logits, buffers = apply(params, buffers, inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten()), buffers

    def gradient():
        torch.func.grad(lambda params: loss_fn(params, buffers, batch)[0])(params)

    def scales():
        return ps.probe_scales(loss_fn, params, buffers, batch)

    found = scales()  # and warm
    gradient()
    one, all_of_them = (min(map(seconds, [function] * 4)) for function in (gradient, scales))
    return found, all_of_them / one


def seconds(function) -> float:
    """Of all cores, whatever else they do."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> dict[str, ps.ScaleProbe]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--picture", type=Path, help="draw the leaves of the ReLU net into this file"
    )
    options = parser.parse_args(arguments)
    probes = {}
    for name, (model, batch) in nets().items():
        probes[name], cost = probe(model, batch)
        print(f"-- {name}: 17 scales for {cost:.1f} gradients\n{probes[name]}\n")
    if options.picture:
        probes["12 layers, ReLU"].plot().savefig(options.picture, dpi=150)
    return probes


if __name__ == "__main__":
    main()
