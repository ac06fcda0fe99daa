"""The classes for which torch has no fused kernel, after backward: GradScaler over torch's own
step, and `unscale_and_step`. Then a partition of two against one AdamW. Run `make bench`.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import SIZES, Rows, compare, options
from post_backward import GradScaler, Purescale

import purescale as ps

CLASSES = ("RMSprop", "Rprop", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam")
PARTED = {"20 x 512^2": [(512, 512)] * 20, "300 small": [(16, 16)] * 300}


class Partition(Purescale):
    """Every second parameter with an AdamW of its own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        both = {key: ps.from_torch(torch.optim.AdamW, lr=1e-4) for key in ("even", "odd")}
        self.optimizer: Any = ps.partition(both, lambda name, _: "odd" if int(name) % 2 else "even")
        self.state = self.optimizer.init(self.params)


def main() -> None:
    given = options(__doc__, rounds=9)
    for size in ("transformer-like, 27M in 147", "small conv net, 0.2M in 60"):
        for name in CLASSES:
            cls = getattr(torch.optim, name)
            rows: Rows = {
                f"GradScaler + {name}": lambda s=SIZES[size], cls=cls: GradScaler(
                    s, given.device, False, cls
                ),
                "purescale, donate=True": lambda s=SIZES[size], cls=cls: Purescale(
                    s, given.device, False, donate=True, cls=cls
                ),
                "purescale": lambda s=SIZES[size], cls=cls: Purescale(
                    s, given.device, False, donate=False, cls=cls
                ),
            }
            compare(f"{size} tensors, {name}", rows, given, size=size, optimizer=name)
    for size, shapes in PARTED.items():
        for clip in (False, True):
            rows = {
                "one AdamW": lambda s=shapes, c=clip: Purescale(s, given.device, c, donate=True),
                "a partition of two": lambda s=shapes, c=clip: Partition(
                    s, given.device, c, donate=True
                ),
            }
            title = f"{size} tensors, donate=True, {'max_norm' if clip else 'no clipping'}"
            compare(title, rows, given, size=size, clip=clip)


if __name__ == "__main__":
    main()
