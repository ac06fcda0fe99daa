"""A module under FSDP2, and a loop by hand: each rank steps the shards that it holds, one reduction
over the mesh tells all of them the flag, one the norm. Then the state as a sharded checkpoint, and
back.

`torchrun --standalone --nproc-per-node 2 examples/fsdp2.py`
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from digits_on_ranks import EVERY, MAX_NORM, OPTIMIZER, RULE, check, make_model, microbatches, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import purescale as ps

POLICY = "params=float32,compute=float16,output=float32"


def sharded(mesh):
    model = make_model()
    half = MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float32)
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh, mp_policy=half)
    return fully_shard(model, mesh=mesh, mp_policy=half)


def main(rank: int, count: int) -> None:
    each = len(microbatches()) // count
    shares = [microbatches()[other::count][:each] for other in range(count)]
    mesh = init_device_mesh("cpu", (count,))
    model = sharded(mesh)

    params = dict(model.named_parameters())  # DTensors
    opt_state, scaler = OPTIMIZER.init(params), RULE.init()
    for index, (x, y) in enumerate(shares[rank]):
        window = ps.accumulation_window(index, EVERY, total=each)
        model.set_requires_gradient_sync(window.should_sync)
        loss = F.cross_entropy(model(x).float(), y)
        ps.scale_loss(scaler, loss).backward()
        if window.should_update:
            # divided here and not in the loss, where float16 would lose more of the small ones
            grads = {name: p.grad / window.divisor for name, p in params.items()}
            grads, found_inf = ps.unscale_and_check(scaler, grads, donate=True)
            grads, _ = ps.clip_by_global_norm(grads, MAX_NORM, donate=True)
            _, opt_state = ps.maybe_step(
                OPTIMIZER, params, grads, opt_state, found_inf, donate=True
            )
            scaler = RULE.update(scaler, found_inf)
            model.zero_grad()
    check(params, opt_state, scaler, shares, POLICY)
    check(*restored((params, opt_state, scaler), sharded(mesh)), shares, POLICY)


def restored(state, model):
    """`state` by way of the disk, its parameters in a new `model`: the number of ranks may be
    another.
    """
    params = dict(model.named_parameters())
    new = params, OPTIMIZER.init(params), RULE.init()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # that of rank 0
        dcp.save(ps.to_state_dict(state), checkpoint_id=folder[0])
        dcp.load(ps.to_state_dict(new), checkpoint_id=folder[0])  # in place
        dist.barrier()
    return new


if __name__ == "__main__":
    with ranks() as place:
        main(*place)
