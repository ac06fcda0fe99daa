"""One microbatch added to the gradients of a window. Run `make bench`.

The baseline only adds, `torch._foreach_add_(sums, grads)`: no check, no weight. 1.33 is the physical limit with a check: 16 bytes
an element read and written in place of 12.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import SIZES, Job, compare, options

import purescale as ps


class Foreach:
    """What a loop without checks or weights pays."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self.sums = [torch.zeros(s, device=device) for s in shapes]
        self.grads = [torch.randn(s, device=device) for s in shapes]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        torch._foreach_add_(self.sums, self.grads)


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
        rows: dict[str, Callable[[], Job]] = {
            "foreach add": lambda s=shapes: Foreach(s, given.device),
            "flag known, donate=True": lambda s=shapes: Accumulate(s, given.device, known=True, donate=True),
            "with the check, donate=True": lambda s=shapes: Accumulate(s, given.device, known=False, donate=True),
            "with the check": lambda s=shapes: Accumulate(s, given.device, known=False, donate=False),
        }
        compare(f"{size} tensors", rows, given)


if __name__ == "__main__":
    main()
