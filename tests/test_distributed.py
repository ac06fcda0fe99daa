"""Two processes on one machine: one rank's overflow is every rank's skipped step."""

import functools
import math
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import purescale as ps

RULE = ps.DynamicScale(init_scale=4.0)


def in_two_processes(body):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, body), nprocs=2, join=True)


def _rank(rank, port, body):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    body(rank)
    dist.barrier()
    # gloo's threads of torch 2.11 now and then abort a process that ends in the ordinary way.
    os._exit(0)


def _flags(rank):
    for bad_rank in (None, 0, 1):
        flag = torch.tensor(rank == bad_rank)
        for group in (None, dist.group.WORLD):
            assert ps.all_reduce_found_inf(flag, group).item() is (bad_rank is not None)
        assert flag.item() is (rank == bad_rank)


def test_the_flag_of_one_rank_is_the_flag_of_all():
    in_two_processes(_flags)


def _steps(rank):
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    params = {"w": torch.ones(2)}
    grads = {"w": torch.tensor([4.0, math.inf if rank == 1 else 4.0])}
    assert ps.unscale_and_check(RULE.init(), grads)[1].item() is (rank == 1)
    assert ps.unscale_and_check(RULE.init(), grads, group=dist.group.WORLD)[1]
    for donate in (False, True):
        arguments = (sgd, RULE.init(), params, {"w": grads["w"].clone()}, sgd.init(params))
        out = ps.unscale_and_step(*arguments, group=dist.group.WORLD, donate=donate)
        assert out.found_inf
        assert out.params["w"].tolist() == [1, 1]


def test_with_a_group_every_rank_skips():
    in_two_processes(_steps)


def _sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for bad in (False, True):
        whole = torch.tensor([4.0, 8.0, 12.0, math.inf if bad else 16.0])  # the last one lies on rank 1
        # torch looks at the placement of the first gradient only.
        grads = {"replicated": distribute_tensor(torch.ones(2), mesh, [Replicate()]), "sharded": distribute_tensor(whole, mesh, [Shard(0)])}
        unscaled, found_inf = ps.unscale_and_check(RULE.init(), grads)
        assert found_inf.item() is bad
        assert unscaled["sharded"].full_tensor().tolist()[:3] == [1, 2, 3]
    clipped, norm = ps.clip_by_global_norm({"sharded": distribute_tensor(torch.tensor([3.0, 0.0, 0.0, 4.0]), mesh, [Shard(0)])}, 1.0)
    assert norm == 5
    torch.testing.assert_close(clipped["sharded"].full_tensor(), torch.tensor([0.6, 0.0, 0.0, 0.8]))


def test_an_overflow_in_another_ranks_shard_is_found():
    in_two_processes(_sharded)


def _checkpointed(folder, rank):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def tree(values, number):
        sharded = distribute_tensor(values, mesh, [Shard(0)])
        return {"params": {"w": sharded, "b": values * 2}, "step": torch.tensor(number), "none": None}

    saved, like = tree(torch.arange(6.0), 3), tree(torch.zeros(6), 0)
    dcp.save(ps.to_state_dict(saved), checkpoint_id=folder)
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=folder)
    restored = ps.from_state_dict(d, like)
    like["params"]["w"].zero_()
    w = restored["params"]["w"]
    assert isinstance(w, DTensor)
    assert w.placements == (Shard(0),)
    assert w.to_local().tolist() == [[0, 1, 2], [3, 4, 5]][rank]
    assert w.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]
    assert restored["params"]["b"].tolist() == [0, 2, 4, 6, 8, 10]
    assert restored["step"] == 3

    with pytest.raises(ValueError, match=r"\['w'\] is torch.float32 \(6,\) DTensor \(Shard\(dim=0\),\), expected torch.float32 \(6,\)\. "):
        ps.from_state_dict(d, {**like, "params": {"w": torch.zeros(6), "b": torch.zeros(6)}})
    with pytest.raises(TypeError, match=r"tree\['params'\]\['w'\] is a DTensor: .*Cure: `torch.distributed.checkpoint.save\("):
        ps.save(os.path.join(folder, "state.pt"), saved)


def test_sharded_states_go_through_distributed_checkpoint(tmp_path):
    in_two_processes(functools.partial(_checkpointed, str(tmp_path)))


def test_without_a_process_group_the_flag_is_copied():
    flag = torch.tensor(True)
    reduced = ps.all_reduce_found_inf(flag)
    assert reduced
    assert reduced.data_ptr() != flag.data_ptr()
