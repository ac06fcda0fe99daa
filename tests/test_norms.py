"""Norms in float32, whatever the dtype of their input."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF, batch, same_bits, small_net
from test_policy import bf16, f16, f32
from torch import nn
from torch.overrides import TorchFunctionMode

import purescale as ps

# ---- with_policy


class Seen(TorchFunctionMode):
    """The dtypes that reach each function."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.conv2d, F.batch_norm, F.linear):
            self.dtypes[func.__name__] = [a.dtype for a in args if isinstance(a, torch.Tensor)] + [
                a.dtype for a in (kwargs or {}).values() if isinstance(a, torch.Tensor)
            ]
        return func(*args, **(kwargs or {}))


def test_compute_is_half_and_norms_and_masters_are_float32():
    apply, params, buffers = ps.make_functional(small_net())
    with Seen() as seen:
        out, new_buffers = ps.with_policy(apply, HALF)(params, buffers, batch()[0])
    assert set(seen.dtypes["linear"]) == {f16}
    assert out.dtype is f32
    assert new_buffers["1.running_mean"].dtype is f32
    grads = torch.func.grad(lambda p: ps.with_policy(apply, HALF)(p, buffers, batch()[0])[0].sum())(
        params
    )
    assert {g.dtype for g in grads.values()} == {f32}


def spectral_net(norm):
    return nn.Sequential(nn.ReLU(), norm(nn.Linear(5, 5)))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.:FutureWarning")
@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["old", "new"]
)
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float64"])
def test_a_spectral_norm_whose_weight_would_be_cast_is_refused_and_the_cure_works(norm, compute):
    apply, params, buffers = ps.make_functional(spectral_net(norm))
    with pytest.raises(
        ValueError,
        match=rf"compute={compute} does not fit.*1\S* is a spectral norm.*"
        r"Fix: compute=autocast\(float16\)",
    ):
        ps.with_policy(apply, f"params=float32,compute={compute}")
    for cure in ("compute=autocast(float16)", "params=float32"):
        ps.with_policy(apply, cure)(params, buffers, torch.ones(2, 5))


# ---- norms


NORMS = {
    "batch": (nn.BatchNorm1d(4), 16),
    "layer": (nn.LayerNorm(4), 0),
    "group": (nn.GroupNorm(2, 4), 0),
    "rms": (nn.RMSNorm(4), 0),
    "instance": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 0),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_norms_in_float32_equals_upcasting_by_hand(name, dtype):
    shape = (3, 4, 5) if name == "instance" else (3, 4)
    x = (torch.randn(shape) * 100).to(dtype)
    module, oracle = (
        type(NORMS[name][0])(*((2, 4) if name == "group" else (4,))) for _ in range(2)
    )
    with ps.norms_in_float32():
        out = module(x)
    assert same_bits(out.detach(), oracle(x.float()).to(dtype).detach())
    assert same_bits(dict(module.named_buffers()), dict(oracle.named_buffers()))


def test_norms_in_float32_leaves_float32_and_other_functions_alone():
    x = torch.randn(3, 4)
    expected = F.layer_norm(x, (4,)), F.linear(x.half(), x.half())
    with ps.norms_in_float32():
        assert same_bits((F.layer_norm(x, (4,)), F.linear(x.half(), x.half())), expected)


def test_half_running_statistics_are_updated_and_stay_half():
    module = nn.BatchNorm1d(4).half()
    with ps.norms_in_float32():
        module(torch.randn(8, 4).half() + 2)
    assert module.running_mean.dtype is f16
    assert module.running_mean.min() > 0.1


@pytest.mark.parametrize("norms", ["float32", "float16"])
def test_a_half_policy_with_norms_in_either_dtype_keeps_running_statistics_as_stored(norms):
    apply, params, buffers = ps.make_functional(small_net())
    out, new_buffers = ps.with_policy(apply, HALF + f",norms={norms}")(params, buffers, batch()[0])
    assert new_buffers["1.running_var"].dtype is f32
    expected = apply(params, buffers, batch()[0])
    torch.testing.assert_close(
        new_buffers["1.running_var"], expected[1]["1.running_var"], rtol=1e-2, atol=1e-3
    )
    torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norms", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("train", [True, False])
def test_norms_in_another_dtype_than_a_float32_net(norms, train):
    """The weights of norms are cast whatever the net computes in, and so must their inputs be."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.RMSNorm(8))
    apply, params, buffers = ps.make_functional(module)
    x = torch.randn(16, 8)
    expected, expected_buffers = apply(params, buffers, x, train=train)
    mixed = ps.with_policy(apply, f"compute=float32,norms={norms}")
    out, new_buffers = mixed(params, buffers, x, train=train)
    assert out.dtype is f32
    close = {"rtol": 1e-5, "atol": 1e-6} if norms == "float64" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(new_buffers, expected_buffers, **close)


@pytest.mark.parametrize(
    "policy",
    [
        HALF,
        "compute=autocast(float16),output=float32",
        "compute=autocast(bfloat16),output=float32",
        HALF + ",norms=float16",
    ],
)
def test_a_policy_under_vmap_equals_a_loop(policy):
    apply, params, buffers = ps.make_functional(small_net())
    half = ps.with_policy(apply, policy)
    stacks = [
        {n: torch.stack([t, t if t.dtype is torch.int64 else t * 1.5]) for n, t in tree.items()}
        for tree in (params, buffers)
    ]
    x = batch()[0]
    batched = torch.vmap(lambda p, b: half(p, b, x))(*stacks)
    for index in range(2):
        one = [{n: t[index] for n, t in tree.items()} for tree in stacks]
        expected = half(*one, x)
        torch.testing.assert_close(batched[0][index], expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(
            {n: t[index] for n, t in batched[1].items()}, expected[1], rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(
    "policy", [HALF, "compute=autocast(float16),output=float32", HALF + ",norms=float16"]
)
def test_a_policy_compiles_in_one_graph(policy):
    apply, params, buffers = ps.make_functional(small_net())
    half = ps.with_policy(apply, policy)
    compiled = torch.compile(lambda p, b, x: half(p, b, x), fullgraph=True, backend="aot_eager")
    expected = half(params, buffers, batch()[0])
    out, new_buffers = compiled(params, buffers, batch()[0])
    torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(new_buffers, expected[1], rtol=2e-2, atol=2e-2)


def test_half_norms_do_not_change_running_statistics_in_eval_mode():
    apply, params, buffers = ps.make_functional(small_net())
    buffers["1.running_var"].fill_(112345.0)
    _, new_buffers = ps.with_policy(apply, HALF + ",norms=float16")(
        params, buffers, batch()[0], train=False
    )
    assert same_bits(new_buffers, buffers)


def test_further_norm_weights_can_be_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return F.rms_norm(x.float(), (2,)) * self.gamma, self.gamma.dtype

    apply, params, buffers = ps.make_functional(Scale())
    named = dataclasses.replace(apply, norm_params=apply.norm_params | {"gamma"})
    assert ps.with_policy(apply, HALF)(params, buffers, torch.ones(1, 2))[0][1] is f16
    assert ps.with_policy(named, HALF)(params, buffers, torch.ones(1, 2))[0][1] is f32


# ---- edges that a careless change would break


def test_torchs_own_batch_norm_updates_half_running_statistics():
    x, mean, var = torch.randn(8, 4).half() + 2, torch.zeros(4).half(), torch.ones(4).half()
    with ps.norms_in_float32():
        torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
    assert mean.min() > 0.1
