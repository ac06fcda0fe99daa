"""The classes for which torch has no fused kernel, after backward: GradScaler over torch's own
step, and `unscale_and_step`. Run `make bench`.
"""

from __future__ import annotations

import torch
from harness import SIZES, Rows, compare, options
from post_backward import GradScaler, Purescale

CLASSES = ("RMSprop", "Rprop", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam")


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


if __name__ == "__main__":
    main()
