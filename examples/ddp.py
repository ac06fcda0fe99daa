"""A module in DistributedDataParallel, and a loop by hand: torch reduces the gradients, purescale
decides and steps, in place, so that the wrapper sees the new weights.

`torchrun --standalone --nproc-per-node 2 examples/ddp.py`
"""

import contextlib

import torch
import torch.nn.functional as F
from digits_on_ranks import EVERY, MAX_NORM, OPTIMIZER, RULE, check, make_model, microbatches, ranks
from torch.nn.parallel import DistributedDataParallel

import purescale as ps


def main(rank: int, count: int) -> None:
    each = len(microbatches()) // count  # DDP wants as many backwards on every rank
    shares = [microbatches()[other::count][:each] for other in range(count)]
    model = DistributedDataParallel(make_model())

    params = dict(model.module.named_parameters())
    opt_state, scaler = OPTIMIZER.init(params), RULE.init()
    for index, (x, y) in enumerate(shares[rank]):
        window = ps.accumulation_window(index, EVERY, total=each)
        with contextlib.nullcontext() if window.should_sync else model.no_sync():
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            ps.scale_loss(scaler, loss).backward()
        if window.should_update:
            # divided here and not in the loss, where float16 would lose more of the small ones
            grads = {name: p.grad / window.divisor for name, p in params.items()}
            # no group: an inf of one rank stands in the mean, which all of them hold
            grads, found_inf = ps.unscale_and_check(scaler, grads, donate=True)
            grads, _ = ps.clip_by_global_norm(grads, MAX_NORM, donate=True)
            _, opt_state = ps.maybe_step(
                OPTIMIZER, params, grads, opt_state, found_inf, donate=True
            )
            scaler = RULE.update(scaler, found_inf)
            model.zero_grad()
    check(params, opt_state, scaler, shares, "compute=autocast(float16),output=float32")


if __name__ == "__main__":
    with ranks() as place:
        main(*place)
