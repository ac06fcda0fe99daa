"""Data parallel over gloo processes: the ranks of a group make the step that one process makes with
all their data, and what one of them cannot do none of them does.
"""

import functools
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import (
    Dispatched,
    assert_close,
    batch,
    clone,
    function_of,
    in_one_graph,
    in_processes,
    on_all_ranks,
    small_net,
    started,
    tensors,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import purescale as ps
from purescale._torch import tracing
from purescale.testing import Untouched, same_bits

SGD = ps.from_torch(torch.optim.SGD, lr=1.0)
ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
RULE = ps.DynamicScale()


# ---- the mean of gradients -----------------------------------------------------------------------


def grads_of(rank):
    """Every kind of leaf; no two numbers alike."""
    g = torch.Generator().manual_seed(rank)
    layout = torch.channels_last if rank else torch.contiguous_format
    return {
        "conv": torch.randn(4, 3, 2, 2, generator=g).contiguous(memory_format=layout),
        "none": None,
        "half": [torch.randn(5, generator=g).half(), torch.randn(3, generator=g).bfloat16()],
        "double": torch.randn(7, generator=g, dtype=torch.float64),
        "complex": torch.randn(3, generator=g, dtype=torch.complex64),
        "nothing": torch.zeros(0),
        "number": torch.randn((), generator=g),
        "sparse": torch.eye(3)[rank % 3].to_sparse(),
        "more": (torch.randn(6, 5, generator=g).t(), torch.randn(2, generator=g)),
    }


def oracle(trees):
    """In float64, leaf by leaf."""
    means = []
    for column in zip(*(tensors(tree) for tree in trees), strict=True):
        wide = torch.complex128 if column[0].is_complex() else torch.float64
        mean = sum(leaf.to_dense().to(wide) for leaf in column) / len(column)
        means.append(mean.to(column[0].dtype))
    return means


def _means(rank):
    ranks = dist.get_world_size()
    mine, every = grads_of(rank), [grads_of(other) for other in range(ranks)]
    with Untouched({key: leaf for key, leaf in mine.items() if key != "sparse"}):
        with Dispatched() as few:
            means = ps.all_reduce_grads(mine, check=False)
        with Dispatched() as many:
            each = ps.all_reduce_grads(mine, bucket_size_mb=1e-9, check=False)
    assert means["none"] is None
    assert [t.dtype for t in tensors(means)] == [t.dtype for t in tensors(mine)]
    torch.testing.assert_close(tensors(means), oracle(every), rtol=1e-3, atol=1e-6)
    exact = {key: leaf for key, leaf in means.items() if key != "half"}
    torch.testing.assert_close(tensors(exact), oracle([{k: t[k] for k in exact} for t in every]))
    double = [t["double"] for t in every]
    torch.testing.assert_close(means["double"], sum(double) / ranks, rtol=1e-12, atol=1e-12)
    if ranks == 2:  # a sum of two is the same in either order
        assert same_bits(means, each)
    torch.testing.assert_close(tensors(means), tensors(each), rtol=1e-3, atol=1e-6)
    assert (few.reductions, many.reductions) == (3, len(tensors(mine)) - 1)  # one a dtype; not of
    # what is empty
    assert same_bits(ps.all_reduce_grads(clone(mine), check=False, donate=True), means)
    leaf = torch.full((2,), float(rank), requires_grad=True)
    [mean] = ps.all_reduce_grads([leaf], check=False, donate=True)
    assert mean.tolist() == [(ranks - 1) / 2] * 2
    assert same_bits(tensors(ps.all_reduce_grads(mine, None, math.inf)), tensors(means))
    assert the_same_everywhere(tensors(means))
    huge = {"w": torch.tensor([3e38, 1.0 if rank else math.inf, 1.0 if rank else math.nan])}
    mean = ps.all_reduce_grads(huge)["w"]
    assert torch.isfinite(mean[0])
    assert mean[1:].isfinite().tolist() == [False, False]
    with Dispatched() as checked:
        ps.all_reduce_grads(huge)
    assert checked.reductions == 1

    over_world = functools.partial(ps.all_reduce_grads, group=dist.group.WORLD)
    dense, expected = ({k: t for k, t in tree.items() if k != "sparse"} for tree in (mine, means))
    torch.testing.assert_close(tensors(in_one_graph(over_world)(dense)), tensors(expected))


# ---- a step --------------------------------------------------------------------------------------


def task(dtype, optimizer=SGD, scale=2.0**10):
    net = small_net()
    net.register_buffer("mask", torch.tensor([-math.inf, 0.1, 1 / 3]))  # which nothing changes
    apply, params, buffers = ps.make_functional(net.to(dtype))

    def loss_fn(params, buffers, microbatch):
        (x, y), limit = microbatch
        if limit == "dies":  # in the middle: the others wait for its gradients
            params["5.bias"].register_hook(lambda g: os._exit(0))
        elif limit is not None:  # in one leaf only, and the loss stays finite
            params["5.bias"].register_hook(
                lambda g: torch.where(g.abs() > limit, torch.inf, g) if limit else g * torch.nan
            )
        out, buffers = apply(params, buffers, x.to(dtype))
        return F.cross_entropy(out, y), buffers

    rule = ps.DynamicScale(init_scale=scale)
    return started(params, None, optimizer, rule, loss_fn=loss_fn, buffers=buffers)


def share(rank, bad=None, limit=0.0):
    """Another number of microbatches on each rank, of other sizes; `bad` overflows."""
    return [
        (batch(10 * rank + i, 4 + 2 * rank + i), limit if (rank, i) == bad else None)
        for i in range(1 + rank)
    ]


def samples(microbatch):
    return len(microbatch[0][1])


WEIGHTS = {
    "equal": None,
    "numbers": samples,
    "tensors": lambda m: torch.tensor(float(samples(m))),
    "none on the first rank": lambda m: 0 if samples(m) == 4 else samples(m),
    "none on the first rank, as a tensor": lambda m: torch.tensor(samples(m)) * (samples(m) > 4),
}


def the_same_everywhere(*trees):
    first, *others = on_all_ranks(trees)
    return all(same_bits(first, other) for other in others)


EXACT = {"rtol": 1e-12, "atol": 1e-12}


def ranks_and_one(step, state, shares, close=EXACT, **settings):
    """Check that the ranks make the step that one process makes with the shares of all, and that
    each holds it. Return state and info of the ranks, then of the one process.
    """
    mine, every = shares[dist.get_rank()], [m for share in shares for m in share]
    new, info = step(state, mine, group=dist.group.WORLD, **settings)
    if settings.get("window_size"):
        settings["window_size"] *= len(shares)
    alone, told = step(state, every, **settings)
    torch.testing.assert_close(new.params, alone.params, **close)
    torch.testing.assert_close(info.loss, told.loss, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(tensors(info.grad_norm), tensors(told.grad_norm))
    assert info.found_inf == told.found_inf
    assert same_bits(new.scaler, alone.scaler)
    assert the_same_everywhere(new, info)
    return new, info, alone, told


def _steps(rank):
    shares = [share(other) for other in range(dist.get_world_size())]
    for dtype, close, weights in (
        (torch.float64, EXACT, WEIGHTS.values()),
        (torch.float32, {"rtol": 2e-6, "atol": 2e-6}, [None, samples]),
    ):
        for number, weight_fn in enumerate(weights):
            settings = {"weight_fn": weight_fn, "max_norm": 0.1 if weight_fn else None}
            settings["on_nonfinite"] = ("drop_window", "drop_microbatch")[number % 2]
            state, step = task(dtype)
            with Untouched(state):
                new, info, *_ = ranks_and_one(step, state, shares, close, **settings)
            assert not info.found_inf
            settings |= {"group": dist.group.WORLD, "donate": True}
            assert same_bits(step(clone(state), shares[rank], **settings), (new, info))


FALLS = [1e30, -1e30, 1e4, 3.0, -0.0, 1.0, -3e38, math.inf, -math.inf, math.nan, 1.0]


def _buffers(rank):
    """The mean of what a buffer became, against float64, whatever it was before. One that counts
    stays whole, and what no rank has changed keeps its bits.
    """
    ranks = dist.get_world_size()

    def became(rank, old):
        new = [1e-5, 2.0, 0.1, 0.0, -0.0, 0.3, 3e38, 1.5, -math.inf, math.nan, math.inf]
        add = [1e-6, 1.0, 0.1, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
        return (torch.tensor(new).double() + rank * torch.tensor(add).double()).to(old.dtype)

    def loss_fn(params, buffers, x):
        new = {"b": became(rank, buffers["b"]), "steps": buffers["steps"] + 1}
        return (params["w"] * x).sum(), new

    steps = torch.arange(1.0, 1000.0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        old = torch.tensor(FALLS).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        for weights in ([1, 1, 1, 1], [0, 1, 1, 1], [1, 5, 7, 9]):
            shares = list(enumerate(weights[:ranks]))
            every = [w * became(other, old).to(wide) for other, w in shares if w]
            state, step = started(
                {"w": torch.ones(1)},
                rule=ps.NoScale(),
                loss_fn=loss_fn,
                buffers={"b": old, "steps": steps},
                weight_fn=lambda x, weights=weights: weights[rank],
            )
            new, _ = step(state, [torch.ones(1)], group=dist.group.WORLD)
            mean, expected = new.buffers["b"], (sum(every) / sum(weights[:ranks])).to(dtype)
            most = 7 if dtype.is_complex else None  # where inf has no direction
            close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(mean[:most], expected[:most], **close)
            assert same_bits(new.buffers["steps"], steps + 1)
            kept = [4, 8, 9] if not dtype.is_complex else [4]
            assert same_bits(mean[kept], old[kept])
            assert the_same_everywhere(new)


class Branches(nn.Module):
    """Which layers run is data: the stem with all, one of the branches, and one with none."""

    def __init__(self):
        super().__init__()
        self.stem, self.odd = nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=0.4)
        self.even, self.never = nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2)
        self.frozen = nn.BatchNorm1d(2).eval()

    def forward(self, x, branch):
        x = self.stem(x)
        return (self.odd(self.odd(x) + 1) if branch else self.even(self.frozen(x))).square().mean()


def _branches(rank):
    """A layer that runs on some ranks only, for what counts or for what is dropped."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    apply, params, buffers = ps.make_functional(Branches())
    buffers = {**buffers, "even.num_batches_tracked": torch.tensor(3)}

    def loss_fn(params, buffers, microbatch):
        x, branch, bad = microbatch
        if bad:
            params["stem.weight"].register_hook(lambda g: g * torch.inf)
        return apply(params, buffers, x, branch)

    state, step = started(
        params, rule=ps.DynamicScale(init_scale=8.0), loss_fn=loss_fn, buffers=buffers,
        bn_update="window",
    )  # fmt: skip
    for odd, bad in itertools.product(range(ranks), (None, 0)):
        data = [
            [
                (batch(7 * other + i, 5)[0][:, 0, 0, :2] + i, other == odd, (other, i) == (bad, 0))
                for i in range(1 + other)
            ]
            for other in range(ranks)
        ]
        for settings in (
            {},
            {"on_nonfinite": "drop_microbatch"},
            {"weight_fn": lambda m, odd=odd: 1 if m[1] else 2},
            {"weight_fn": lambda m: 0 if m[1] else 1},
            {"weight_fn": lambda m: torch.tensor(0 if m[1] else 1)},
        ):
            close = {"rtol": 1e-6, "atol": 1e-7}
            new, _, alone, _ = ranks_and_one(step, state, data, close, **settings)
            torch.testing.assert_close(new.buffers, alone.buffers, **close)


def _overflows(rank):
    world, ranks = dist.group.WORLD, dist.get_world_size()
    state, step = task(torch.float64)
    for bad_rank in range(ranks):
        bad = bad_rank, 0
        shares = [share(other, bad) for other in range(ranks)]
        for weight_fn in (None, samples, WEIGHTS["tensors"]):
            new, info = step(state, shares[rank], group=world, weight_fn=weight_fn)
            assert info.found_inf
            assert new.scaler.scale == state.scaler.scale / 2
            assert same_bits(new._replace(scaler=state.scaler), state)
            assert the_same_everywhere(new, info)
            settings = {"weight_fn": weight_fn, "on_nonfinite": "drop_microbatch"}
            for size in (None, ranks + 1):  # shorter on each rank, and by another number
                _, info, *_ = ranks_and_one(step, state, shares, window_size=size, **settings)
                assert not info.found_inf
        # weight 0 counts for nothing, be it NaN
        weight_fn = functools.partial(_unless, samples(share(bad_rank)[0]))
        new, info = step(state, shares[rank], group=world, weight_fn=weight_fn)
        assert not info.found_inf
        assert new.step == 1
        nobody, info = step(state, share(rank), group=world, weight_fn=lambda m: 0)
        assert info.found_inf
        assert same_bits(nobody, state)
        # what overflows on one rank above a limit is tried again by all, at the scale that fits
        limited = [share(other, bad, limit=4.0) for other in range(ranks)]
        for on_nonfinite in ("drop_window", "drop_microbatch"):
            settings = {"max_retries": 12, "on_nonfinite": on_nonfinite}
            _, info, _, told = ranks_and_one(step, state, limited, **settings)
            assert not info.found_inf
            assert info.retries == told.retries > 0


def _norms(rank):
    """Norm and largest magnitude are those of one process, whatever is inf, -inf or NaN on which
    rank, and however many microbatches each has.
    """
    inf, nan, ranks = math.inf, math.nan, dist.get_world_size()
    cases = [  # by rank the gradient of each microbatch; the norm
        ([[inf], [-inf]], inf),
        ([[-inf], [2.0]], inf),
        ([[inf, -inf], [2.0]], inf),
        ([[-inf, 2.0], [inf]], inf),
        ([[nan], [2.0]], inf),
        ([[nan], [-inf]], inf),
        ([[nan], [2.0, 2.0]], inf),
        ([[2.0], [2.0]], 2.0),
    ]
    for size in (2, 2**19):  # the larger one is sent in memory of its own
        for (grads, norm), retries in itertools.product(cases, (0, 1)):
            shares = [
                [torch.tensor([g] + [0.0] * (size - 1)) for g in of_rank]
                for of_rank in (grads + [[2.0]] * ranks)[:ranks]
            ]
            for rule in (ps.DynamicScale(), ps.HeadroomScale()):
                state, step = started(
                    {"v": torch.ones(size)}, lambda params, g: (params["v"] * g).sum(), rule=rule
                )
                settings = {"max_norm": 1e30, "max_retries": retries}
                new, info = step(state, shares[rank], group=dist.group.WORLD, **settings)
                _, told = step(state, list(itertools.chain.from_iterable(shares)), **settings)
                assert info.grad_norm == told.grad_norm == norm
                if isinstance(rule, ps.HeadroomScale):
                    torch.testing.assert_close(info.grad_amax, told.grad_amax, equal_nan=True)
                assert info.found_inf == (norm != 2.0)
                assert same_bits(new.params["v"][1:], state.params["v"][1:])
                assert the_same_everywhere(new, info)


def _unless(size, microbatch):
    return 0 if samples(microbatch) == size else 1


def _everything(rank):
    for part in (_means, _steps, _buffers, _branches, _overflows, _norms):
        part(rank)
    if dist.get_world_size() == 2:  # as a GPU would, with numbers
        with tracing.as_on_an_accelerator():
            for part in (_steps, _buffers, _branches, _overflows, _norms):
                part(rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_make_the_step_of_one_process_with_all_their_data(ranks):
    """Means, steps in float64 to 1e-12 and float32 to 2e-6, buffers, skips, retries."""
    in_processes(_everything, ranks)


# ---- compiled ------------------------------------------------------------------------------------


def _compiled(rank):
    """As one graph, with an overflow of one rank in the middle."""
    settings = {"group": dist.group.WORLD, "bn_update": "window", "max_norm": 0.1, "donate": True}
    state, step = task(torch.float32, ADAMW)
    step = functools.partial(step, **settings)
    compiled, eager = in_one_graph(step), clone(state)
    for index in range(3):
        x, y = batch(10 * rank + index)
        data = [((x * math.inf if (index, rank) == (1, 1) else x, y), None)]
        eager, told = step(eager, data)
        state, info = compiled(state, data)
        assert info.found_inf == told.found_inf == (index == 1)
        close = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(tensors(state), tensors(eager), **close)
        torch.testing.assert_close(tensors(info), tensors(told), **close)
        assert the_same_everywhere(state, info)


def by_a_function(params, buffers, x):
    """The sum of two products, whose backward gives None for the second."""
    without_second = function_of(
        lambda ctx, a, b: (a * x + b * x).sum(), lambda ctx, grad: (grad * x, None)
    )
    return without_second(params["a"], params["b"]), buffers


def by_one_parameter(params, buffers, x):
    return (params["a"] * x).square().sum(), buffers


def _none(with_compiled, rank):
    """A gradient that a backward leaves None is 0, for each optimizer and each rank."""
    world = dist.group.WORLD
    data = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])]
    compiled = torch.compile(by_one_parameter, backend="aot_eager")
    params = {"b": torch.ones(2), "a": torch.full((2,), 2.0)}
    state, step = started(params, None, ADAMW, max_norm=1.0)
    losses = [(by_a_function, by_a_function), (by_one_parameter, compiled)]
    for plain, loss_fn in losses if with_compiled else losses[:1]:
        for number in (1, 2):
            new, info = step(state, [data[rank]] * number, loss_fn=loss_fn, group=world)
            alone, told = step(state, data * number, loss_fn=plain)
            torch.testing.assert_close(new, alone)
            torch.testing.assert_close(info, told)
            assert the_same_everywhere(new, info)
    # on one rank only
    loss_fn = by_one_parameter if rank else by_a_function
    new, _ = step(state, [data[rank]], loss_fn=loss_fn, group=world)
    assert the_same_everywhere(new)
    assert same_bits(new.params["b"], torch.ones(2) * (1 - 1e-2 * 1e-2))


@pytest.mark.parametrize("with_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_gradient_that_is_none_in_a_backward_over_ranks_is_zero(with_compiled):
    in_processes(functools.partial(_none, with_compiled))


# ---- refusals ------------------------------------------------------------------------------------

TREES = {
    "shape": ({"a": torch.ones(3), "b": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(4)}),
    "name": ({"a": torch.ones(3), "b": torch.ones(2)}, {"a": torch.ones(3), "c": torch.ones(2)}),
    "order": ({"b": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(2)}),
    "dtype": ({"b": torch.ones(2)}, {"b": torch.ones(2).half()}),
    "none": ({"b": None}, {"b": torch.ones(2)}),
    "nothing": ({"b": torch.ones(2)}, {}),
    "layout": ({"b": torch.ones(2)}, {"b": torch.ones(2).to_sparse()}),
}


REFUSED = "rank 1 refused its arguments"


def _refusals(rank):
    for trees in TREES.values():
        with pytest.raises(ValueError, match=r"rank 0 has .*grads '(a|b)'.*, rank 1 has .*Fix: "):
            ps.all_reduce_grads(trees[rank])
    own = (TypeError, r"grads\['a'\] has dtype torch.int64") if rank else (ValueError, REFUSED)
    with pytest.raises(own[0], match=own[1]):
        ps.all_reduce_grads({"a": torch.ones(2, dtype=torch.int64 if rank else None)})
    words = r"rank 0 has bucket_size_mb=1, rank 1 has bucket_size_mb=2"
    with pytest.raises(ValueError, match=words):
        ps.all_reduce_grads({"a": torch.ones(2)}, bucket_size_mb=1 + rank)
    for size in (0, -1, math.nan):
        with pytest.raises(ValueError, match=r"bucket_size_mb must be above 0, got .*Fix: 25"):
            ps.all_reduce_grads({"a": torch.ones(2)}, bucket_size_mb=size)
    with pytest.raises(TypeError, match=r"group is 'all'.*expected a process group"):
        ps.all_reduce_grads({"a": torch.ones(2)}, "all")

    first = dist.new_group([0])
    state, step = task(torch.float32)
    data = share(0)
    if rank == 0:  # a group of one is one process
        assert same_bits(step(state, data, group=first), step(state, data))
    else:
        for call in (
            lambda: ps.all_reduce_grads({"a": torch.ones(2)}, first),
            lambda: ps.all_reduce_found_inf(torch.tensor(True), first),
            lambda: ps.unscale_and_check(state.scaler, state.params, group=first),
            lambda: step(state, data, group=first),
        ):
            with pytest.raises(ValueError, match=r"this rank is not in group"):
                call()
    world = dist.group.WORLD
    for name, values, words in (
        ("max_retries", (0, 1), r"rank 0 has max_retries=0.*rank 1 has max_retries=1"),
        ("max_norm", (1.0, -1.0), r"max_norm must be above 0|rank 1 refused its arguments"),
        ("max_norm", (1.0, None), r"rank 0 has .*max_norm=1,.*rank 1 has .*max_norm=None"),
        ("rule", (RULE, ps.StaticScale(4.0)), r"rank 0 .*=DynamicScale.*rank 1 .*=StaticScale"),
        ("weight_fn", (lambda m: 1, lambda m: -1), rf"returned -1|{REFUSED}: Value"),
        ("weight_fn", (lambda m: 1, lambda m: {0: 1}[1]), rf"^1$|{REFUSED}: Key"),
        ("weight_fn", (None, samples), r"rank 0 has weight_fn=None, rank 1 has weight_fn='"),
    ):
        with pytest.raises((ValueError, KeyError), match=words):
            step(state, data, group=world, **{name: values[rank]})
    weights = iter((rank + 1, 7, 7, 7))  # a microbatch is weighed once, as in one process
    assert same_bits(
        step(state, data, group=world, weight_fn=lambda m: next(weights)),
        step(state, data, group=world, weight_fn=lambda m: rank + 1),
    )
    assert next(weights) == 7
    assert list(weights) == [7, 7]
    with pytest.raises(ValueError, match=rf"an empty list|{REFUSED}: ValueError"):
        step(state, [] if rank else data, group=world)
    other = state._replace(params={**state.params, "5.bias": torch.zeros(3 + rank)})
    with pytest.raises(ValueError, match=r"rank 0 has params '5.bias': .*\(3,\).*, rank 1 has"):
        step(other, data, group=world)
    mesh = init_device_mesh("cpu", (2,))
    for name, key in (("params", "5.weight"), ("buffers", "1.running_mean")):
        tree = getattr(state, name)
        spread = distribute_tensor(tree[key], mesh, [Shard(0)])
        sharded = state._replace(**{name: {**tree, key: spread}})
        told = rf"state.{name}\['{key}'\] is a DTensor, \(Shard\(dim=0\),\) over.*Fix: leave group"
        with Untouched(data), pytest.raises(ValueError, match=told):
            step(sharded, data, group=world)
        other = sharded if rank else state
        with pytest.raises(ValueError, match=told if rank else f"{REFUSED}: Val"):
            step(other, data, group=world)
    sparse = state._replace(buffers={**state.buffers, "s": torch.eye(2).to_sparse()})
    with pytest.raises(ValueError, match=r"state.buffers\['s'\] is torch.sparse_coo; .*Fix: "):
        step(sparse, data, group=world)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"is a DTensor.*Fix: leave group"):
        torch.compile(step, fullgraph=True, backend="eager")(sharded, data, group=world)
    new, info = step(state, data, group=world)  # and nothing is left behind
    assert the_same_everywhere(new, info)

    both = dist.new_group([0, 1])
    dist.destroy_process_group(both)
    for gone in (
        lambda: ps.all_reduce_grads({"a": torch.ones(2)}, both),
        lambda: step(state, data, group=both),
    ):
        with pytest.raises(ValueError, match=r"group no longer exists.*Fix: "):
            gone()


def _settings(rank):
    """An optimizer or a rule of other settings, and a state of another structure or rate."""
    world, data = dist.group.WORLD, share(rank)
    plain, step = task(torch.float32)
    own = {"lr": 0.1 + rank}  # tests/test_collectives.py has all settings
    with pytest.raises(ValueError, match=r"rank 0 has optimizer=.*rank 1 has optimizer="):
        step(plain, data, optimizer=ps.from_torch(torch.optim.SGD, **own), group=world)
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1, in_state=("lr",))
    state = plain._replace(opt_state=sgd.init(plain.params))
    slots = state.opt_state.slots
    rates = state.opt_state._replace(lr=torch.tensor(0.1 + rank))
    more = state.opt_state._replace(slots={**slots, "extra": {"5.bias": torch.ones(1)}})
    applied = state.opt_state._replace(applied=torch.tensor(3 + rank))
    halved = plain.scaler._replace(scale=plain.scaler.scale / 2)
    rng = torch.Generator().get_state()
    for other, told in (
        (state._replace(opt_state=rates), r"opt_state.lr = torch.float32 \(\) "),
        (state._replace(opt_state=applied), r"opt_state.applied = torch.int64 \(\) "),
        (state._replace(scaler=halved if rank else state.scaler), "scaler.scale = "),
        (state._replace(step=torch.tensor(rank)), "step = torch.int64 "),
        (state._replace(rng=rng if rank else ()), "rng: torch.uint8"),
    ):
        with pytest.raises(ValueError, match=f"the ranks do not hold the same.*{told}"):
            step(other, data, optimizer=sgd, group=world)
    foreign = state._replace(opt_state=more if rank else state.opt_state)
    with pytest.raises(ValueError, match="opt_state knows the parameters"):
        step(foreign, data, optimizer=sgd, group=world)
    own_weights = {"weight_fn": [samples, lambda m: 1.0][rank]}  # of its own data
    step(state, data, optimizer=sgd, group=world, **own_weights)
    both = {"max_norm": torch.tensor(1.0 + rank)}, {"max_norm": torch.tensor(1.0)}
    with pytest.raises(ValueError, match=r"max_norm=torch.float32 \(\) 1.0, rank 1 .* 2.0"):
        step(state, data, optimizer=sgd, group=world, **both[0])
    own = torch.Generator().manual_seed(rank).get_state()  # each rank has random numbers of its own
    step(state._replace(rng=own), data, optimizer=sgd, group=world, **both[1])


@pytest.mark.slow
def test_what_one_rank_refuses_every_rank_refuses_and_a_step_is_one_graph():
    in_processes((_compiled, _refusals, _settings))


def test_without_a_process_group_gradients_are_copied():
    grads = {"a": torch.ones(2), "n": None}
    with Untouched(grads):
        reduced = ps.all_reduce_grads(grads)
    assert same_bits(reduced, grads)
    assert reduced["a"].data_ptr() != grads["a"].data_ptr()
    assert ps.all_reduce_grads(grads, donate=True)["a"].data_ptr() == grads["a"].data_ptr()
    with pytest.raises(ValueError, match=r"bucket_size_mb must be above 0"):
        ps.all_reduce_grads(grads, bucket_size_mb=0)
    with pytest.raises(TypeError, match=r"grads\['a'\] has dtype torch.int64"):
        ps.all_reduce_grads({"a": torch.tensor([1])})
    with pytest.raises(ValueError, match=r"group is given, but there is no process group"):
        ps.all_reduce_grads(grads, dist.group.WORLD or "all")


# ---- many ranks, on paper ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_sends_what_is_claimed_on_2_to_512_ranks():
    script = Path(__file__).parents[1] / "benchmarks" / "scaling.py"
    subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=300)


# ---- a rank that dies ----------------------------------------------------------------------------

PATIENCE = 12  # seconds


def _trained(path, dies_at, rank):
    """From the last checkpoint on to step 5, one after each step."""
    state, step = task(torch.float32, ADAMW)
    state = ps.load(path, like=state) if path.exists() else state
    dist.barrier()

    while state.step < 5:
        began = time.monotonic()
        index = int(state.step)
        limit = "dies" if (rank, index) == (1, dies_at) else None
        data = [(batch(100 * index + 10 * rank + i, 4 + rank), limit) for i in range(1 + rank)]
        alone = None
        try:
            state, _ = step(state, data, group=dist.group.WORLD)
        except RuntimeError as error:
            alone = error
        if alone is not None:
            assert index == dies_at
            assert "another rank has raised" in alone.__notes__[0]
            assert "--redirects" in alone.__notes__[0]
            assert time.monotonic() - began < PATIENCE + 10
            os._exit(0)
        if rank == 0:
            ps.save(path, state)
    assert dies_at is None


def test_a_rank_that_dies_is_an_error_on_the_others_and_a_restart_goes_on_bit_for_bit(tmp_path):
    torn, whole = tmp_path / "torn.pt", tmp_path / "whole.pt"
    in_processes(functools.partial(_trained, torn, 3), 3, PATIENCE)
    like, _ = task(torch.float32, ADAMW)
    assert ps.load(torn, like=like).step == 3
    both = tuple(functools.partial(_trained, path, None) for path in (torn, whole))
    in_processes(both, 3, PATIENCE)
    assert same_bits(ps.load(torn, like=like), ps.load(whole, like=like))


# ---- leaves of other forms, and refusals ---------------------------------------------------------


def _measured_windows(rank):
    """A microbatch is measured before its gradients are sent: None and strides stay as they are."""
    weight = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    params = {"w": weight.to(memory_format=torch.channels_last), "none": None}
    data = [torch.full((2, 3, 2, 2), x) for x in (1.0, math.inf, 3.0, 4.0)]
    settings = {"loss": lambda p, x: (p["w"] * x).sum(), "on_nonfinite": "drop_microbatch"}
    state, step = started(params, **settings)
    expected, _ = step(state, data)
    new, info = step(state, data[2 * rank : 2 * rank + 2], group=dist.group.WORLD)
    assert_close(new.params["w"], expected.params["w"])
    assert new.params["w"].stride() == weight.to(memory_format=torch.channels_last).stride()
    assert new.params["none"] is None
    assert not info.found_inf


def _transforms_and_derivatives_over_a_group(rank):
    """torch has no rule for a collective there: a mapped step would read sums too early."""
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0, differentiable=True)
    state, step = started({"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), optimizer)

    def total(x):
        return step(state, [x], group=dist.group.WORLD)[0].params["w"].sum()

    def mean(x):
        return ps.all_reduce_grads({"w": x}, dist.group.WORLD)

    x = torch.ones(3, 2)
    for transformed in (torch.func.grad(total), torch.vmap(total), torch.vmap(mean)):
        with pytest.raises(ValueError, match=r"a group inside of torch\.vmap.*Fix: a loop over"):
            transformed(x)
    with pytest.raises(ValueError, match="a derivative is taken through a step over a group"):
        total(x.requires_grad_())


def _outside_of_a_mesh(rank):
    """A rank outside of the mesh of a gradient decides for itself, without waiting."""
    local = torch.full((2,), math.inf if rank == 0 else 1.0)
    gradient = DTensor.from_local(local, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)
    _, found_inf = ps.unscale_and_check(ps.DynamicScale().init(), {"w": gradient})
    assert bool(found_inf) == (rank == 0)


def _plain_beside_sharded(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    accum = ps.init_accum({"w": torch.ones(4)})
    with pytest.raises(ValueError, match="is a DTensor, and a plain tensor"):
        ps.accumulate_grads(accum, {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})


@pytest.mark.slow
def test_over_a_group_leaves_keep_their_form_and_what_cannot_be_is_refused():
    in_processes(
        (
            _measured_windows,
            _transforms_and_derivatives_over_a_group,
            _outside_of_a_mesh,
            _plain_beside_sharded,
        )
    )
