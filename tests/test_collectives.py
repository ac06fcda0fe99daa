"""Several processes on one machine: one rank's overflow is every rank's skipped step, and all their
data one sample.
"""

import dataclasses
import functools
import itertools
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from helpers import Untouched, assert_close, in_processes, small_net
from hypothesis import given
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import purescale as ps
from purescale._distributed.collectives import describe_setting
from purescale._distributed.process_group import object_device
from purescale._grads import clip
from purescale._step import options as options_of_step

RULE = ps.DynamicScale(init_scale=4.0)


def _flags(rank):
    for bad_rank in (None, 0, 1):
        flag = torch.tensor(rank == bad_rank)
        for group in (None, dist.group.WORLD):
            assert ps.all_reduce_found_inf(flag, group).item() is (bad_rank is not None)
            assert ps.all_reduce_found_inf(rank == bad_rank, group).item() is (bad_rank is not None)
        assert flag.item() is (rank == bad_rank)
    number = torch.tensor(math.nan if rank else 0.0)  # GradScaler keeps its flags as numbers
    assert ps.all_reduce_found_inf(number).item() is True
    for wrong in (torch.tensor([True]), torch.tensor([]), None, "bad"):  # before anyone waits
        with pytest.raises((TypeError, ValueError), match=r"found_inf (must be|has shape)"):
            ps.all_reduce_found_inf(wrong)


def _steps(rank):
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    params = {"w": torch.ones(2)}
    grads = {"w": torch.tensor([4.0, math.inf if rank == 1 else 4.0])}
    assert ps.unscale_and_check(RULE.init(), grads)[1].item() is (rank == 1)
    assert ps.unscale_and_check(RULE.init(), grads, group=dist.group.WORLD)[1]
    for donate, max_norm in itertools.product((False, True), (None, 1.0)):
        arguments = (sgd, RULE.init(), params, {"w": grads["w"].clone()}, sgd.init(params))
        out = ps.unscale_and_step(*arguments, max_norm, group=dist.group.WORLD, donate=donate)
        assert out.found_inf
        assert out.params["w"].tolist() == [1, 1]


def _amaxes(rank):
    world = dist.group.WORLD
    for mine, all_ranks in (((1.0, 3.0), 3.0), ((0.0, 0.0), 0.0), ((math.inf, 1.0), math.inf)):
        grads = {"w": torch.tensor([0.5, -1.0]) * mine[rank]} if mine[rank] < 9 else mine[0]
        grads = grads if isinstance(grads, dict) else {"w": torch.tensor([math.inf])}
        assert ps.grad_amax(grads, group=world).item() == all_ranks
        assert ps.grad_amax(grads).item() == mine[rank]
    for bad_rank in (0, 1):
        grads = {"w": torch.tensor([math.nan if rank == bad_rank else math.inf])}
        assert ps.grad_amax(grads, group=world).isnan()
    assert ps.grad_amax({"w": torch.ones(2)} if rank else {}, group=world) == 1
    sgd, params = ps.from_torch(torch.optim.SGD, lr=1.0), {"w": torch.ones(2)}
    for values, bad in (((4.0, 16.0), False), ((4.0, math.inf), True)):
        grads = {"w": torch.tensor([2.0, values[rank]])}
        out = ps.unscale_and_step(
            sgd, RULE.init(), params, grads, sgd.init(params), group=world, amax=True
        )
        assert out.found_inf.item() is bad
        assert out.grad_amax.item() == (math.inf if bad else 4.0)


def test_the_flag_and_the_largest_gradient_of_one_rank_are_those_of_all():
    in_processes((_flags, _steps, _amaxes))


def test_without_a_process_group_the_flag_is_copied_as_one_of_torch():
    for flag in (True, False):
        number = torch.tensor(float(flag))
        for told in (flag, torch.tensor(flag), number):
            reduced = ps.all_reduce_found_inf(told)
            assert reduced.dtype is torch.bool
            assert reduced.item() is flag
            assert not isinstance(told, torch.Tensor) or reduced.data_ptr() != told.data_ptr()


# ---- batch-norm statistics


def bn_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.SyncBatchNorm(3)
    )


def share(rank):
    """Uneven, shifted data; the last rank of three has none."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(n, 1, 8, 8, generator=generator) * (1 + rank) + 3 * rank
        for n in ((7, 4), (2,), ())[rank]
    ]


def _bn_stats(rank):
    apply, params, buffers = ps.make_functional(bn_net())
    world, ranks = dist.group.WORLD, dist.get_world_size()

    def gathered(batches):
        stats = ps.init_bn_stats(buffers)
        for x in batches:
            stats = ps.accumulate_bn_stats(stats, apply, params, buffers, x)
        return stats

    everything = [x for r in range(ranks) for x in share(r)]
    mine = gathered(share(rank))
    with Untouched(mine):
        for group in (None, world):
            assert_close(
                ps.all_reduce_bn_stats(mine, group), gathered(everything), rtol=1e-12, atol=1e-12
            )
    measure = functools.partial(ps.precise_bn, apply, params, buffers)
    new = measure(share(rank), group=world)
    assert_close(new, ps.bn_buffers(gathered(everything), buffers), rtol=1e-6, atol=1e-6)
    assert_close(new, measure(everything), rtol=1e-6, atol=1e-6)
    in_turn = functools.partial(measure, normalize="sequential")
    assert_close(in_turn(share(rank), group=world), in_turn(everything), rtol=1e-5, atol=1e-6)
    # seven samples of rank 0, counted over all ranks: one batch each, whatever they hold
    few = measure(share(rank), num_samples=8, group=world)
    firsts = measure([x for r in range(ranks) for x in share(r)[:1]])
    assert_close(few["1.running_mean"], firsts["1.running_mean"], rtol=1e-6, atol=1e-6)
    taken, twos = [], [torch.ones(2, 1, 8, 8)] * 8
    call = lambda f, x: taken.append(f(x))  # noqa: E731
    measure(twos, num_samples=8 * ranks, group=world, call=call)
    assert len(taken) == 4  # eight samples of each rank
    taken.clear()
    odd = [torch.ones(2 * rank, 1, 8, 8), *twos]  # none of the first rank, another number on each
    measure(odd, num_samples=8 * ranks, group=world, call=call)
    assert len(taken) == (5 if rank == 0 else 4 if rank == 1 else 3)
    skips = mine._replace(num_skipped=torch.tensor(rank + 1))
    assert ps.all_reduce_bn_stats(skips).num_skipped == sum(r + 1 for r in range(ranks))


STATISTICS = ("running_mean", "running_var")


def _any_stats(rank):
    """No two numbers are equal, so that none can stand in for another. The last rank of three knows
    one layer only, and none knows `d`.
    """
    generator = torch.Generator().manual_seed(rank)
    f64 = functools.partial(torch.tensor, dtype=torch.float64)

    def vector(size):
        return torch.rand(size, dtype=torch.float64, generator=generator) + rank

    sizes = {"a": 2, "b": 3, "c": 2, "d": 1}
    empty = ps.init_bn_stats(
        {f"{n}.{key}": torch.zeros(size) for n, size in sizes.items() for key in STATISTICS}
    )
    layers = {
        name: type(layer)(
            count=f64(10.0 + index + 100 * rank),
            mean=vector(layer.mean.shape),
            m2=vector(layer.mean.shape) + 7,
            within=vector(layer.mean.shape) + 3,
            calls=f64(4.0 + index + 20 * rank),
        )
        for index, (name, layer) in enumerate(empty.layers.items())
        if name in ("abc" if rank < 2 else "b")
    }
    counts = torch.tensor(1000 + rank), torch.tensor(2000 + 3 * rank)
    return type(empty)({**empty.layers, **layers}, *counts)


def _bn_reduced(rank):
    everybody = [_any_stats(other) for other in range(dist.get_world_size())]
    mine = _any_stats(rank)
    with Untouched(mine):
        reduced = ps.all_reduce_bn_stats(mine)
    assert_close(reduced, functools.reduce(ps.merge_bn_stats, everybody), rtol=1e-12, atol=1e-12)
    assert list(reduced.layers) == list(mine.layers)
    kinds = [[type(layer) for layer in stats.layers.values()] for stats in (reduced, mine)]
    assert kinds[0] == kinds[1]


def test_uneven_data_on_several_ranks_reduce_to_the_statistics_of_one_process():
    """To 1e-12, with SyncBatchNorm in the model, and with a rank that has no data."""
    in_processes((_bn_stats, _bn_reduced), 3)


def _bn_failures(rank):
    apply, params, buffers = ps.make_functional(bn_net())
    measure = functools.partial(ps.precise_bn, apply, params, buffers, group=dist.group.WORLD)
    once = [torch.randn(4, 1, 8, 8)] * 2

    def broken():
        yield once[0]
        raise OSError("disk")

    raised = (OSError, "disk") if rank else (RuntimeError, "failed on another rank of the group")
    with pytest.raises(raised[0], match=raised[1]):
        measure(broken() if rank else once)
    raised = (
        (ValueError, "iterated only once") if rank else (RuntimeError, "failed on another rank")
    )
    with pytest.raises(raised[0], match=raised[1]):
        measure(iter(once) if rank else once, normalize="sequential")
    for name, pair in (
        ("normalize", ("batch", "sequential")),  # else one waits for ever
        ("estimator", ("pooled", "within")),
        ("correction", (0, 1)),
    ):
        with pytest.raises(ValueError, match=rf"rank 0 has {name}=.*rank 1 has {name}="):
            measure(once, **{name: pair[rank]})
    with pytest.raises(ValueError, match=r"normalize must be|rank 1 refused its arguments: Value"):
        measure(once, normalize=("batch", "bad")[rank])
    with pytest.raises(ValueError, match="the loader gave no batch on any rank"):
        measure([])


def test_a_rank_that_fails_or_has_no_data_leaves_nobody_waiting():
    in_processes(_bn_failures)


def test_without_a_process_group_the_statistics_are_copied():
    stats = ps.init_bn_stats({"running_mean": torch.zeros(2), "running_var": torch.ones(2)})
    reduced = ps.all_reduce_bn_stats(stats)
    assert_close(reduced, stats, rtol=0, atol=0)
    assert reduced.layers[""].mean.data_ptr() != stats.layers[""].mean.data_ptr()


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl,cpu:gloo", "cpu"), ("cuda:nccl", "cuda")],
)
def test_ranks_exchange_objects_on_the_cpu_if_their_group_has_a_backend_for_it(
    backends, device, monkeypatch
):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert object_device(None) == device


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_ranks_exchange_objects_on_the_device_that_torch_takes(backend):
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        for group in (None, dist.group.WORLD, dist.new_group([0])):
            theirs = dist.distributed_c10d._get_object_coll_device(group)
            assert object_device(group) == theirs
    finally:
        dist.destroy_process_group()


GROUP_THAT_ENDS = """
import weakref, torch, purescale as ps
import torch.distributed as dist

def loss_fn(params, buffers, x):
    return (params["w"] * x).sum(), buffers

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
sgd, rule = ps.from_torch(torch.optim.SGD, lr=0.1), ps.DynamicScale()
state = ps.init_train_state({"w": torch.ones(3)}, {}, sgd, rule)
parts = {"loss_fn": loss_fn, "optimizer": sgd, "rule": rule}
for _ in range(2):
    state, info = ps.train_step(state, [torch.ones(3)] * 2, **parts, group=dist.group.WORLD)
assert ps.all_reduce_found_inf(True)
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_an_eager_step_keeps_no_process_group_that_was_destroyed():
    subprocess.run([sys.executable, "-c", GROUP_THAT_ENDS], check=True)


@pytest.fixture
def world():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_derivative_of_clipping_is_the_same_with_a_group(world):
    slopes = []
    for group in (None, world):
        w = torch.tensor([3.0, 4.0], requires_grad=True)
        clipped, _ = ps.clip_by_global_norm([w], 1.0, group=group)
        slopes += torch.autograd.grad(clipped[0].sum(), w)
    assert_close(slopes[1], slopes[0])
    assert_close(slopes[0], torch.tensor([0.032, -0.024]), atol=1e-5, rtol=0)


def test_a_recorded_reduction_waits_for_its_result(world):
    def reduced(flag, grad):
        return ps.all_reduce_found_inf(flag, world), ps.all_reduce_grads([grad], world, check=False)

    recorded = make_fx(reduced)(torch.tensor(True), torch.ones(33))
    names = [str(node.target) for node in recorded.graph.nodes]
    assert sum("wait_tensor" in name for name in names) == 2
    assert not any("c10d.allreduce_" in name for name in names)
    found_inf, [mean] = recorded(torch.tensor(False), torch.full((33,), 3.0))
    assert not found_inf
    assert_close(mean, torch.full((33,), 3.0))


# ---- settings as text ----------------------------------------------------------------------------


class Doubling:
    def __init__(self, start):
        self.start = start

    def rate(self, applied):
        return self.start * 2**applied

    def __call__(self, applied):
        return self.rate(applied)


class Rate(float):
    """A schedule that is an object."""

    def __call__(self, applied):
        return decayed(self, applied)


def decayed(lr, applied):
    return lr * 0.9**applied


def schedule(start):
    return lambda applied: start * 2**applied


@dataclasses.dataclass
class Unset:
    there: int = 1
    missing: int = dataclasses.field(init=False)


class Own:
    """An optimizer of a user, with a setting and an attribute that is not a setting."""

    def __init__(self, lr, name):
        self.lr, self.me = lr, self
        self.log, self.lock, self.net = logging.getLogger(name), threading.Lock(), nn.Linear(1, 1)

    def step(self, params, grads, opt_state): ...


from_torch, optim = ps.from_torch, torch.optim
PAIRS = {
    "class": (from_torch(optim.SGD, lr=0.1), from_torch(optim.Rprop, lr=0.1)),
    "same state, other class": (from_torch(optim.Adam), from_torch(optim.AdamW)),
    "momentum": (from_torch(optim.SGD, momentum=0.9), from_torch(optim.SGD, momentum=0.8)),
    "rate": (from_torch(optim.SGD, lr=0.1), from_torch(optim.SGD, lr=0.2)),
    "rate as a tensor": [from_torch(optim.SGD, lr=torch.tensor(lr)) for lr in (0.1, 0.2)],
    "schedule": [from_torch(optim.SGD, lr=functools.partial(decayed, lr)) for lr in (0.1, 0.2)],
    "schedule, an object": [from_torch(optim.SGD, lr=Rate(lr)) for lr in (0.1, 0.2)],
    "a pair of numbers": [from_torch(optim.Adam, betas=(beta, 0.99)) for beta in (0.8, 0.9)],
    "a flag": [from_torch(optim.SGD, maximize=flag) for flag in (True, False)],
    "override": [from_torch(optim.SGD, overrides={"*.bias": {"lr": lr}}) for lr in (0.1, 0.2)],
    "where overrides match": [
        from_torch(optim.SGD, overrides={f"{n}.weight": {"lr": 1.0}}) for n in "15"
    ],
    "rule, a string": [
        ps.DynamicScale(hysteresis=2, refill=refill) for refill in ("clean", "growth")
    ],
    "rule, a number": (ps.DynamicScale(), ps.DynamicScale(growth_interval=7)),
    "rule, window": (ps.HeadroomScale(), ps.HeadroomScale(margin=7)),
    "strings": ("clean", "growth"),
    "bool and number": (True, 1),
    "None and its name": (None, "None"),
    "tensors": (torch.tensor([1.0]), torch.tensor([2.0])),
    "dtypes": (torch.float32, torch.float64),
    "keys": ({"a": 1}, {"b": 1}),
    "order of overrides": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "partials": (functools.partial(max, key=abs), functools.partial(max)),
    "names of functions": (max, min),
    "names of one's own functions": (small_net, in_processes),
    "methods": (Doubling(1).rate, Doubling(2).rate),
    "one's own class": (Own(0.1, "rank 0"), Own(0.2, "rank 0")),
    "functions of other names": (schedule(1), lambda applied: 2**applied),
}


@pytest.mark.parametrize("name", PAIRS)
def test_settings_that_differ_are_told_apart(name):
    one, other = PAIRS[name]
    assert describe_setting(one) == describe_setting(one)
    assert describe_setting(one) != describe_setting(other)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
    max_leaves=8,
)


@given(plain, plain)
def test_data_is_told_by_value(one, other):
    again = eval(repr(one), {"nan": float("nan"), "inf": float("inf")})
    assert describe_setting(again) == describe_setting(one)
    if one != other and repr(one) != repr(other):
        assert describe_setting(one) != describe_setting(other)


PROGRAM = """
from test_collectives import PAIRS, describe_setting
print([describe_setting(one) for pair in PAIRS.values() for one in pair])
"""


@pytest.mark.slow
def test_every_process_says_the_same():
    """With hashes and addresses of its own."""
    run = functools.partial(subprocess.check_output, text=True, cwd=Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM]
    one, other = (run(command, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in "12")
    assert one == other
    assert " at 0x" not in one


SAME = {
    "1 and 1.0": (ps.StaticScale(8), ps.StaticScale(8.0)),
    "a default that is named": (from_torch(optim.SGD, momentum=0, lr=1e-3), from_torch(optim.SGD)),
    "orders of a set": (frozenset("abc"), frozenset("cba")),
    "not a setting": (Own(0.1, "rank 0"), Own(0.1, "rank 1")),
    # their values are told if they are the fields of an object or of a partial
    "functions of one qualified name": (schedule(1), schedule(2)),
    "a function that was compiled": (torch.compile(decayed), decayed),
}


@pytest.mark.parametrize("name", SAME)
def test_settings_that_are_one_are_told_alike(name):
    one, other = SAME[name]
    assert describe_setting(one) == describe_setting(other)


def test_of_what_is_no_setting_the_kind_is_told():
    assert describe_setting(Unset()) == "Unset(there=1, missing=None)"
    assert describe_setting(torch.zeros(1000)) == "torch.float32 (1000,)"
    assert describe_setting(torch.zeros(2, device="meta")) == "torch.float32 (2,)"


def test_ranks_compare_each_setting_of_a_step_but_those_of_a_rank():
    """Two ranks that differ in one would take other steps, without a word."""
    own = {"loss_fn", "group", "donate", "rule_traits"}
    none = dict.fromkeys(options_of_step.TrainStepOptions._fields)
    options = options_of_step.TrainStepOptions(
        **none | {"clip": clip.as_clip_options(None, None, 2.0)}
    )
    agreed_settings = options.agreed_settings.keys()
    bounds = set(clip.ClipOptions._fields)
    assert set(options._fields) - own - {"clip"} == agreed_settings - bounds
    assert bounds <= agreed_settings
