"""What a scale that looks ahead costs: HeadroomScale, which needs the largest gradient of each
step, against DynamicScale, which needs a flag. Run `python benchmarks/headroom.py`.

AdamW, `donate=True`; the figures that count are of 27M parameters: all that happens after backward,
and a whole step of a stack of linear layers, forward and backward included.
"""

from __future__ import annotations

import functools
from typing import Any

import models
import torch
import torch.nn.functional as F
from harness import SIZES, Call, Rows, compare, options
from post_backward import RULE, SCALE, Purescale
from torch import Tensor

import purescale as ps

RULES: dict[str, ps.Rule[Any]] = {
    "DynamicScale": RULE,
    "HeadroomScale": ps.HeadroomScale(init_scale=SCALE, min_scale=SCALE, max_scale=SCALE),
}
DEPTH, WIDTH, BATCH = 26, 1024, 64  # 27M parameters


def whole_step(rule: Any, device: str, max_norm: float | None) -> Call:
    torch.manual_seed(0)
    model = models.mlp(WIDTH, DEPTH).to(device)
    batch = models.batch(BATCH, WIDTH, device=device)
    apply, params, buffers = ps.make_functional(model)
    optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-4)
    state = ps.init_train_state(params, buffers, optimizer, rule)

    def loss_fn(params: Any, buffers: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        logits, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(logits, batch[1]), buffers

    def once() -> None:
        nonlocal state
        state, _ = ps.train_step(
            state,
            [batch],
            loss_fn=loss_fn,
            optimizer=optimizer,
            rule=rule,
            max_norm=max_norm,
            donate=True,
        )

    return Call(once)


def main() -> None:
    given = options(__doc__)
    for max_norm in (None, 1.0):
        clipped = "no clipping" if max_norm is None else "max_norm"
        for size, shapes in SIZES.items():
            after: Rows = {
                name: functools.partial(
                    Purescale, shapes, given.device, max_norm is not None, True, rule
                )
                for name, rule in RULES.items()
            }
            compare(f"After backward, {size} tensors, {clipped}", after, given, size=size)
        whole: Rows = {
            name: functools.partial(whole_step, rule, given.device, max_norm)
            for name, rule in RULES.items()
        }
        described = models.describe(models.mlp(WIDTH, DEPTH))
        compare(f"Whole step, MLP, {described}, {clipped}", whole, given)


if __name__ == "__main__":
    main()
