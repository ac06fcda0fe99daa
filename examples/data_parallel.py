"""Data parallel by values: `train_step` with a group. Ranks may hold different numbers of
microbatches, of different sizes.

`torchrun --standalone --nproc-per-node 2 examples/data_parallel.py`
"""

import torch.distributed as dist
from digits_on_ranks import (
    EVERY,
    MAX_NORM,
    OPTIMIZER,
    RULE,
    check,
    loss_of,
    microbatches,
    ranks,
    samples,
    start,
)

import purescale as ps

POLICY = "params=float32,compute=float16,output=float32"


def main(rank: int, count: int) -> None:
    # dealt out one by one: in the last window some ranks hold more than others
    shares = [microbatches()[other::count] for other in range(count)]
    mine, state, loss_fn = shares[rank], start(), loss_of(POLICY)
    for first in range(0, len(shares[0]), EVERY):
        state, _ = ps.train_step(
            state,
            mine[first : first + EVERY],
            loss_fn=loss_fn,
            optimizer=OPTIMIZER,
            rule=RULE,
            weight_fn=samples,
            max_norm=MAX_NORM,
            group=dist.group.WORLD,
            donate=True,
        )
    check(state.params, state.opt_state, state.scaler, shares, POLICY)


if __name__ == "__main__":
    with ranks() as place:
        main(*place)
