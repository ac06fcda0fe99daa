"""Policies: the grammar, and which tensors are cast where."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HALF,
    batch,
    in_one_graph,
    module_of,
    same_bits,
    shares_memory,
    small_net,
    with_its_double,
)
from torch import nn

import purescale as ps
from purescale.testing import assert_pure, assert_vmap_equals_loop

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# ---- the grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("params=float32,compute=float16,output=float32", ps.Policy(f32, f16, f32)),
        ("p=f32, c=bf16, o=f32", ps.Policy(f32, bf16, f32)),
        ("params=float16", ps.Policy(f16, f16, f16)),
        ("half", ps.Policy(f16, f16, f16)),
        ("p=fp32,c=fp16,o=fp64", ps.Policy(f32, f16, f64)),
        ("float64", ps.Policy(f64, f64, f64, norm_dtype=f64)),
        ("compute=float16,norms=float16", ps.Policy(f32, f16, f16, norm_dtype=f16)),
        ("compute=autocast(float16),output=float32", ps.Policy(f32, f16, f32, autocast=True)),
        ("compute=autocast(bf16)", ps.Policy(f32, bf16, None, autocast=True)),
    ],
)
def test_a_policy_string_means(text, expected):
    assert ps.policy(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float15", "unknown dtype 'float15'"),
        ("compute=", "unknown dtype ''"),
        ("weights=float16", "'weights=float16' is not understood"),
        ("compute=float16,c=float16", "'c=float16' is given twice"),
        ("params=autocast(float16)", "unknown dtype 'autocast(float16)'"),
        ("compute=autocast(float32)", "autocast computes in float16 or bfloat16"),
        ("", "unknown dtype"),
    ],
)
def test_an_unknown_policy_string_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        ps.policy(text)
    assert message in str(error.value)


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match=r"Policy.compute_dtype must be a floating .*torch.int8"):
        ps.Policy(compute_dtype=torch.int8)
    with pytest.raises(TypeError, match="takes a Policy or its string"):
        ps.with_policy(lambda p, b: (None, b), torch.float16)


@pytest.mark.parametrize(
    ("cast", "dtype"), [("cast_to_param", f64), ("cast_to_compute", f16), ("cast_to_output", bf16)]
)
def test_casting_a_tree_casts_floats_only_and_shares_nothing(cast, dtype):
    tree = {
        "x": torch.ones(2),
        "same": torch.ones(2, dtype=dtype),
        "n": [torch.tensor(1), None, "text"],
        "c": (torch.ones(1, dtype=torch.complex64),),
    }
    out = assert_pure(getattr(ps.Policy(f64, f16, bf16), cast), tree)
    assert out["x"].dtype is out["same"].dtype is dtype
    assert (out["n"][0].dtype, out["n"][1:], out["c"][0].dtype) == (
        torch.int64,
        [None, "text"],
        torch.complex64,
    )
    as_it_is = ps.policy("compute=autocast(float16)").cast_to_output(tree)
    assert (as_it_is["x"].dtype, as_it_is["same"].dtype) == (f32, dtype)
    assert not shares_memory(as_it_is, tree)


# ---- with_policy


def test_a_policy_is_pure_and_float32_throughout_equals_none():
    apply, params, buffers = ps.make_functional(small_net())
    args = params, buffers, batch()[0]
    assert same_bits(ps.with_policy(apply, "float32")(*args), apply(*args))
    out, new_buffers = assert_pure(ps.with_policy(apply, HALF), *args)
    assert out.dtype is new_buffers["1.running_mean"].dtype is f32


def test_inputs_in_any_container_are_cast_and_integers_are_not():
    seen = {}

    def apply(params, buffers, images, *, tokens, deep):
        seen.update(images=images[0].dtype, tokens=tokens.dtype, deep=deep["x"][0].dtype)
        return None, buffers

    call = ps.with_policy(apply, "compute=float16,output=float32")
    call({}, {}, [torch.ones(1)], tokens=torch.tensor([1]), deep={"x": (torch.ones(1),)})
    assert seen == {"images": f16, "tokens": torch.int64, "deep": f16}


def momentum():
    """Moves the first rows of a frozen copy towards its weight in each forward, as MoCo does."""

    def forward(m, x):
        with torch.no_grad():
            m.key.weight[:2].mul_(0.5).add_(m.query.weight[:2], alpha=0.5)
        return m.query(x) @ m.key(x).t()

    return module_of(forward, query=nn.Linear(3, 4), key=nn.Linear(3, 4).requires_grad_(False))


@pytest.mark.parametrize(
    ("rules", "tol", "how"),
    [
        ("params=float32,compute=autocast(bfloat16)", 0.0, lambda call: call),
        (HALF, 1e-3, lambda call: call),
        (HALF, 1e-3, lambda call: lambda *args: torch.vmap(lambda x: call(*args[:2], x))(args[2])),
    ],
)
def test_a_write_of_the_forward_into_a_frozen_parameter_arrives_in_the_dtype_kept(rules, tol, how):
    model, x = momentum(), torch.ones(1, 3)
    apply, params, buffers = ps.make_functional(model)
    _, new = how(ps.with_policy(apply, rules))(params, buffers, x)
    new = {name: new[name].reshape(old.shape) for name, old in buffers.items()}
    model(x)
    written, old = new["key.weight"], buffers["key.weight"]
    assert written.dtype is f32
    assert not shares_memory(new, buffers)
    assert same_bits(written[2:], old[2:])
    torch.testing.assert_close(written[:2], model.key.weight.detach()[:2], rtol=tol, atol=tol)
    assert same_bits(new["key.bias"], buffers["key.bias"])


def test_a_parameter_in_another_dtype_than_the_policy_keeps_is_refused_by_name():
    apply, params, buffers = ps.make_functional(nn.Linear(2, 1).half())
    with pytest.raises(TypeError, match=r"\['weight'\] is torch.float16; the policy keeps .*32"):
        ps.with_policy(apply, HALF)(params, buffers, torch.ones(1, 2))


def under_autocast(model, dtype, *inputs, scale=1.0):
    """Return the outputs, buffers and gradients of a scaled loss, the last output, by a policy of
    this autocast, and those by torch's own around the module.
    """
    apply, params, buffers = ps.make_functional(model)
    weights = {name: p.requires_grad_() for name, p in params.items()}
    name = str(dtype).removeprefix("torch.")
    out, new = ps.with_policy(apply, f"compute=autocast({name})")(weights, buffers, *inputs)
    with torch.autocast("cpu", dtype):
        expected = model(*inputs)
    ours = out, new, list(weights.values())
    for result, own_buffers, leaves in (
        ours,
        (expected, dict(model.named_buffers()), list(model.parameters())),
    ):
        outs = result if isinstance(result, tuple) else (result,)
        grads = torch.autograd.grad(outs[-1].float().sum() * scale, leaves)
        yield [x.detach() for x in outs], own_buffers, list(grads)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's rms norm
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_autocast_has_the_bits_of_torch_autocast_around_the_module(dtype):
    def forward(m, x):
        for norm in m.norms:
            x = norm(m.conv(x))
        return F.normalize(x, dim=1)

    norms = [nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)]
    norms += [nn.LayerNorm(33), nn.RMSNorm(33)]
    model = module_of(forward, conv=nn.Conv1d(4, 4, 3, padding=1), norms=nn.ModuleList(norms))
    assert same_bits(*under_autocast(model, dtype, torch.randn(5, 4, 33)))


def tiny_gpt():
    """Returns `(logits, loss)`, as nanoGPT and the models of transformers do."""

    def forward(m, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = m.head(m.block(m.embedding(tokens), mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())

    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    embedding, head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
    return module_of(forward, embedding=embedding, block=block, head=head)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_a_loss_computed_in_the_model_keeps_the_dtype_that_autocast_gave_it(dtype):
    ours, of_torch = under_autocast(tiny_gpt(), dtype, torch.randint(0, 7, (3, 5)), scale=2.0**16)
    assert [x.dtype for x in ours[0]] == [dtype, f32]
    assert same_bits(ours, of_torch)


def test_norms_that_are_written_out_are_taken_out_of_autocast():
    written_out = ps.Policy(compute_dtype=torch.bfloat16, norm_dtype=torch.float32, autocast=True)
    assert ps.policy("compute=autocast(bfloat16),output=float32,norms=float32") == written_out
    assert ps.policy("compute=autocast(bfloat16)").norm_dtype is None
    apply, params, buffers = ps.make_functional(nn.LayerNorm(33))
    x = torch.randn(5, 33).bfloat16()
    out, _ = ps.with_policy(apply, written_out)(params, buffers, x)
    assert same_bits(out, F.layer_norm(x.float(), (33,)).bfloat16().float())


# ---- norms


def by_a_function(m, x):
    return torch.batch_norm(x, None, None, m.mean, m.var, True, 0.1, 1e-5, False)


NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "layer": lambda: nn.LayerNorm(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "rms": lambda: nn.RMSNorm(4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "a function": lambda: module_of(by_a_function, mean=torch.zeros(4), var=torch.ones(4)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, f16) for name in NORMS), ("batch", bf16), ("layer", bf16)]
)
def test_norms_in_float32_equals_upcasting_by_hand(name, dtype):
    shape = (3, 4, 5) if name == "instance" else (3, 4)
    x = (torch.randn(shape) * 100).to(dtype)
    module, oracle = NORMS[name](), NORMS[name]()
    with ps.norms_in_float32():
        out = module(x)
    assert same_bits(out.detach(), oracle(x.float()).to(dtype).detach())
    assert same_bits(dict(module.named_buffers()), dict(oracle.named_buffers()))


def test_norms_in_float32_leaves_float32_and_other_functions_alone():
    x = torch.randn(3, 4)
    expected = F.layer_norm(x, (4,)), F.linear(x.half(), x.half())
    with ps.norms_in_float32():
        assert same_bits((F.layer_norm(x, (4,)), F.linear(x.half(), x.half())), expected)


def test_norms_in_float32_around_an_unflatten_is_one_graph():
    def half(x):
        with ps.norms_in_float32():
            return F.layer_norm(x.unflatten(-1, (2, 3)), (3,))

    x = torch.randn(4, 6, dtype=torch.float16)
    compiled = torch.compile(half, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), half(x))


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


@pytest.mark.parametrize(
    ("norms", "train"), [("float64", True), ("float16", True), ("bfloat16", False)]
)
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
    "policy", ["compute=autocast(bfloat16),output=float32", HALF + ",norms=float16"]
)
def test_a_policy_under_vmap_equals_a_loop(policy):
    apply, params, buffers = ps.make_functional(small_net())
    half, stacks = ps.with_policy(apply, policy), with_its_double((params, buffers, batch()[0]))
    assert_vmap_equals_loop(half, *stacks, rtol=2e-2, atol=2e-2)


def test_a_policy_compiles_in_one_graph():
    apply, params, buffers = ps.make_functional(small_net())
    half, args = ps.with_policy(apply, HALF), (params, buffers, batch()[0])
    compiled = in_one_graph(lambda *args: half(*args))
    torch.testing.assert_close(compiled(*args), half(*args), rtol=2e-2, atol=2e-2)


def test_half_norms_do_not_change_running_statistics_in_eval_mode():
    apply, params, buffers = ps.make_functional(small_net())
    buffers["1.running_var"].fill_(112345.0)
    _, new_buffers = ps.with_policy(apply, HALF + ",norms=float16")(
        params, buffers, batch()[0], train=False
    )
    assert same_bits(new_buffers, buffers)


def test_further_norm_weights_can_be_named():
    apply, params, buffers = ps.make_functional(
        module_of(
            lambda m, x: (F.rms_norm(x.float(), (2,)) * m.gamma, m.gamma.dtype),
            gamma=nn.Parameter(torch.ones(2)),
        )
    )
    named = dataclasses.replace(apply, norm_params=apply.norm_params | {"gamma"})
    for each, dtype in ((apply, f16), (named, f32)):
        assert ps.with_policy(each, HALF)(params, buffers, torch.ones(1, 2))[0][1] is dtype


def test_a_policy_that_is_not_a_string_is_refused():
    with pytest.raises(TypeError, match="policy takes a string, got 3"):
        ps.policy(3)
