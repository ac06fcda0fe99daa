"""One microbatch added to the gradients of a window. Run `make bench`.

The baseline only adds, `torch._foreach_add_(sums, grads)`: no check, no weight. 1.33 is the physical limit with a check: 16 bytes
an element read and written in place of 12.
"""

from __future__ import annotations

import torch
from harness import SIZES, Call, Rows, compare, options

import purescale as ps


def foreach_add(shapes: list[tuple[int, ...]], device: str) -> Call:
    """What a loop without checks or weights pays."""
    sums = [torch.zeros(s, device=device) for s in shapes]
    grads = [torch.randn(s, device=device) for s in shapes]
    return Call(lambda: torch._foreach_add_(sums, grads))


class Accumulate:
    """`accumulate_grads`, with the flag at hand or with the check in it."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str, known: bool, donate: bool) -> None:
        self.grads = [torch.randn(s, device=device) for s in shapes]
        self.accum = ps.init_accum(self.grads)
        self.found_inf = torch.zeros((), dtype=torch.bool, device=device) if known else None
        self.donate = donate

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.accum = ps.accumulate_grads(self.accum, self.grads, 1.0, self.found_inf, donate=self.donate)


def main() -> None:
    given = options(__doc__)
    for size, shapes in SIZES.items():
        rows: Rows = {
            "foreach add": lambda s=shapes: foreach_add(s, given.device),
            "flag known, donate=True": lambda s=shapes: Accumulate(s, given.device, known=True, donate=True),
            "with the check, donate=True": lambda s=shapes: Accumulate(s, given.device, known=False, donate=True),
            "with the check": lambda s=shapes: Accumulate(s, given.device, known=False, donate=False),
        }
        compare(f"{size} tensors", rows, given, size=size)


if __name__ == "__main__":
    main()
