"""Kinds of tensors that a tree may hold: lazily negated ones, subclasses, constants, other devices;
what is taken and what is refused.
"""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import AsOnAnAccelerator, at, batch, clone, job, same_bits, tensors

import purescale as ps

RULE = ps.DynamicScale(init_scale=2.0**10)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
BAD = torch.tensor(False)
BOTH_WAYS = pytest.mark.parametrize(
    "way", [contextlib.nullcontext, AsOnAnAccelerator], ids=["read", "unread"]
)


def stepped(loss_fn, params=None, buffers=None, rule=RULE, **settings):
    """A step of SGD with one microbatch, None, from a state of these parameters and buffers."""
    params = {"w": torch.ones(2)} if params is None else params
    state = ps.init_train_state({n: torch.ones(2) for n in params}, {}, SGD, rule)
    state = state._replace(params=params, buffers=buffers or {})
    return ps.train_step(state, [None], loss_fn=loss_fn, optimizer=SGD, rule=rule, **settings)


def sum_of_w(params, buffers, _):
    return params["w"].sum(), buffers


# ---- lazily negated and conjugated views, as autograd gives them

VIEWS = {
    "conj": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conj and neg": lambda: torch._neg_view(torch.tensor([1 + 2j, 3 - 4j])).conj(),
    "large neg": lambda: torch._neg_view(torch.linspace(-1, 1, 10_000)),
    "half neg": lambda: torch._neg_view(torch.tensor([1.0, -2.0]).half()),
}

GRADIENT_FUNCTIONS = {
    "unscale_and_check": lambda g, d: ps.unscale_and_check(at(4.0), g, donate=d),
    "clip_by_global_norm": lambda g, d: ps.clip_by_global_norm(g, 1.0, donate=d),
    "clip_by_value": lambda g, d: ps.clip_by_value(g, 1.0, donate=d),
    "accumulate_grads": lambda g, d: ps.accumulate_grads(ps.init_accum(g), g, donate=d),
    "the mean is a view": lambda g, d: ps.accumulate_grads(
        ps.init_accum(g)._replace(grads=g), ps.select(True, g, g), donate=d
    ),
    "accumulated_grads": lambda g, d: ps.accumulated_grads(
        ps.accumulate_grads(ps.init_accum(g), g), donate=d
    ),
    "merge_accum": lambda g, d: ps.merge_accum(
        *[ps.accumulate_grads(ps.init_accum(g), g, weight=w) for w in (1, 3)], donate=d
    ),
    "select": lambda g, d: ps.select(torch.tensor(False), ps.select(True, g, g), g),
    "unscale_and_step": lambda g, d: ps.unscale_and_step(
        SGD, at(4.0), ps.select(True, g, g), g, SGD.init(g), max_norm=1.0, donate=d
    ),
    "the parameters are views": lambda g, d: ps.unscale_and_step(
        SGD, at(4.0), g, ps.select(True, g, g), SGD.init(g), donate=d
    ),
}


@pytest.mark.parametrize("name", GRADIENT_FUNCTIONS)
def test_a_lazily_negated_or_conjugated_view_is_taken_as_what_it_stands_for(name):
    def resolved(tree):
        return [t.resolve_conj().resolve_neg() for t in tensors(tree)]

    for kind, view in VIEWS.items():
        if (name == "clip_by_value" and view().is_complex()) or (
            name == "the mean is a view" and view().dtype is torch.float16
        ):
            continue  # complex numbers have no order, and no mean is kept in float16
        for donate in (False, True):
            given = {"v": view(), "w": torch.ones(3)}
            plain = {"v": view().resolve_conj().resolve_neg().clone(), "w": torch.ones(3)}
            before = resolved(clone(given))
            result, expected = (GRADIENT_FUNCTIONS[name](tree, donate) for tree in (given, plain))
            assert same_bits(resolved(result), tensors(expected)), kind
            assert donate or same_bits(resolved(given), before), kind


# ---- what was made under inference_mode


@pytest.mark.parametrize("settings", [{"donate": True, "max_norm": 1.0}, {"bn_update": "window"}])
def test_a_state_made_in_inference_mode_trains_outside_of_it(settings):
    expected_state, step = job(SGD, RULE)
    with torch.inference_mode():
        state, _ = job(SGD, RULE)
    assert state.params["0.weight"].is_inference()
    window = [batch(0), batch(1)] if "bn_update" in settings else [batch()]
    expected, _ = step(expected_state, window, **{**settings, "donate": False})
    assert same_bits(step(state, window, **settings)[0], expected)


def test_a_buffer_made_in_inference_mode_may_be_multiplied_with():
    with torch.inference_mode():
        buffers = {"b": torch.full((2,), 3.0)}
    new, _ = stepped(
        lambda p, b, _: ((p["w"] * b["b"]).sum(), b), buffers=buffers, rule=ps.NoScale()
    )
    torch.testing.assert_close(new.params["w"], torch.full((2,), 0.7))
    assert not any(t.is_inference() for t in tensors(new))


# ---- kinds that no operator takes


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, which stands for another."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t):
            return t.inner if isinstance(t, Wrapper) else t

        tree_map = torch.utils._pytree.tree_map
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, out)


def inner(tree):
    return [t.inner if isinstance(t, Wrapper) else t for t in tensors(tree)]


@pytest.mark.parametrize("donate", [False, True])
def test_a_subclass_without_memory_of_its_own_is_computed_with_and_never_written_to(donate):
    given = [Wrapper(torch.tensor([3.0, 4.0]))]
    accum = ps.accumulate_grads(ps.init_accum(given), given, donate=donate)
    for result in (
        ps.unscale_and_check(at(1.0), given, donate=donate),
        ps.clip_by_global_norm(given, 10.0, donate=donate),
        accum.grads,
    ):
        assert inner(result)[0].tolist() == [3.0, 4.0]
    assert inner(ps.clip_by_value(given, 1.0, donate=donate))[0].tolist() == [1.0, 1.0]
    assert given[0].inner.tolist() == [3.0, 4.0]


DENSE = r"has the layout torch.{}.*Fix: `.to_dense\(\)`"
NESTED, NARROW = (
    "is a nested tensor.*Fix:",
    "has dtype torch.{}, in which torch cannot compute.*Fix:",
)
RAGGED = [torch.ones(2), torch.ones(3)]
STRANGE = {
    "csr": (lambda: torch.eye(2).to_sparse_csr(), DENSE.format("sparse_csr")),
    "nested": (lambda: torch.nested.nested_tensor(RAGGED), NESTED),
    "jagged": (lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), NESTED),
    "float8": (
        lambda: torch.ones(2).to(torch.float8_e4m3fn),
        NARROW.format("float8_e4m3fn") + ".*float32",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_no_step_is_taken_with_is_refused_by_path_before_any_work(kind):
    make, words = STRANGE[kind]
    grads, fine = {"b": torch.ones(2), "a": make()}, {"b": torch.ones(2), "a": torch.ones(2)}
    accum, opt_state = ps.init_accum(fine), SGD.init(fine)
    for donate in (False, True):
        for call in (
            lambda d: ps.unscale_and_check(at(1.0), grads, donate=d),
            lambda d: ps.clip_by_global_norm(grads, 1.0, donate=d),
            lambda d: ps.clip_by_value(grads, 1.0, donate=d),
            lambda d: ps.accumulate_grads(accum, grads, donate=d),
            lambda d: ps.maybe_step(SGD, fine, grads, opt_state, BAD, donate=d),
            lambda d: ps.unscale_and_step(SGD, at(1.0), fine, grads, opt_state, donate=d),
        ):
            with pytest.raises(TypeError, match=rf"grads\['a'\] {words}"):
                call(donate)
    with pytest.raises(TypeError, match=rf"params\['a'\] {words}"):
        ps.init_accum(grads)
    with pytest.raises(TypeError, match=rf"params\['a'\] {words}"):
        ps.maybe_step(SGD, grads, fine, opt_state, BAD)
    with pytest.raises(TypeError, match=rf"state.params\['a'\] {words}"):
        stepped(sum_of_w, grads)
    assert same_bits(fine, {"b": torch.ones(2), "a": torch.ones(2)})


def test_a_float8_loss_is_refused():
    with pytest.raises(TypeError, match=r"loss has dtype torch.float8_e5m2.*Fix:"):
        stepped(lambda p, b, _: (p["w"].sum().to(torch.float8_e5m2), b))


CONSTANTS = {
    **{kind: STRANGE[kind][0] for kind in ("csr", "nested")},
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CONSTANTS)
@BOTH_WAYS
def test_what_is_no_dense_tensor_is_a_constant_that_comes_back_as_the_same_object(way, kind):
    make = CONSTANTS[kind]
    old, new = {"a": make(), "b": torch.ones(2)}, {"b": torch.zeros(2)}
    words = r"old\['a'\] is .*, but another tensor.*the same object.*Fix:"
    with way():
        for flag in (True, False):
            chosen = ps.select(torch.tensor(flag), old, {**new, "a": old["a"]})
            assert chosen["a"] is old["a"]
            assert same_bits(chosen["b"], old["b"] if flag else new["b"])
            with pytest.raises(TypeError, match=words):
                ps.select(torch.tensor(flag), old, {**new, "a": make()})
        new_state, _ = stepped(sum_of_w, buffers=old)
    assert new_state.buffers["a"] is old["a"]
    assert same_bits(new_state.buffers["b"], old["b"])


def test_a_constant_that_is_an_array_is_itself_and_no_other():
    one, other = np.array([1, 2]), np.array([1, 2])
    assert ps.select(True, {"a": one}, {"a": one})["a"] is one
    with pytest.raises(ValueError, match=r"old\['a'\] is array.*Fix:"):
        ps.select(True, {"a": one}, {"a": other})
    with pytest.raises(ValueError, match=r"\['a'\] is array"):
        ps.stack_states([{"a": one}, {"a": other}])


def test_tensors_on_two_devices_are_refused_by_path():
    grads = {"b": torch.ones(2), "a": torch.ones(2, device="meta")}
    words = r"'a'\] is on meta.*A tensor on meta has no values.*Fix:"
    for call in (
        lambda: ps.unscale_and_check(at(1.0), grads),
        lambda: ps.clip_by_global_norm(grads, 1.0),
        lambda: ps.init_accum(grads),
        lambda: stepped(sum_of_w, grads),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match=r"old\['a'\] is .* on cpu, but .* on meta in new.*Fix:"):
        ps.select(BAD, {"a": torch.ones(2)}, {"a": grads["a"]})


def test_the_sparse_gradient_of_one_row_of_width_1_is_not_lost():
    """`to_dense` loses it, because its only value has stride 0 (torch 2.13)."""
    sgd, params = ps.from_torch(torch.optim.SGD, lr=1.0), {"w": torch.zeros(5, 1)}
    state = ps.init_train_state(params, {}, sgd, ps.NoScale())

    def loss_fn(params, buffers, rows):
        return F.embedding(rows, params["w"], sparse=True).sum(), buffers

    for rows in (torch.tensor([1]), torch.tensor([3])):
        state, _ = ps.train_step(state, [rows], loss_fn=loss_fn, optimizer=sgd, rule=ps.NoScale())
    assert state.params["w"].flatten().tolist() == [0, -1, 0, -1, 0]


# ---- wrong answers of other libraries, as they were measured, each with the right answer


def test_float16_gradients_are_taken_and_do_not_underflow():
    # torch refuses them, or unscales in float16, where 1e-3 * 2**-16 is 0.
    unscaled, found_inf = ps.unscale_and_check(
        at(2.0**16), [torch.tensor([1e-3], dtype=torch.float16)]
    )
    assert unscaled[0].dtype is torch.float32
    assert unscaled[0].item() == torch.tensor(1e-3, dtype=torch.float16).item() * 2.0**-16
    assert not found_inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_duplicate_sparse_indices_that_overflow_together_are_found(dtype):
    # torch checks the stored values only; coalesced they are inf and the parameter becomes -inf.
    big = torch.finfo(torch.float32).max * 0.8 if dtype is torch.float32 else 6e4
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([big, big], dtype=dtype), (3,), check_invariants=True
    )
    unscaled, found_inf = ps.unscale_and_check(at(1.0), [grad])
    # 120000 fits in float32, into which float16 is unscaled
    assert found_inf.item() is (dtype is torch.float32)
    assert found_inf or unscaled[0].to_dense().tolist() == [
        0,
        2 * torch.tensor(6e4, dtype=dtype).item(),
        0,
    ]
