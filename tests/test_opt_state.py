"""The state of a class of torch: slots as trees like the parameters, and one count of steps."""

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import CLASSES, Untouched, assert_close, clone, same_bits, slots_of, tensors

import purescale as ps
from purescale._torch import private
from purescale._torch.tracing import as_on_an_accelerator

OPTIM = torch.optim
# torch's Muon takes matrices alone, and its state has no count.
COUNTING = [name for name in CLASSES if name not in ("Muon", "SGD")]


def made(name, **settings):
    return ps.from_torch(getattr(OPTIM, name), lr=0.1, **{**CLASSES[name], **settings})


def params_of():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


SHAPES = {"a": (5, 3), "b": (33, 2), "c": (7, 4)}
# In the second step `a` has no gradient, in the third `b`.
ABSENT = [(), ("a",), ("b",), ()]


def grads_of(step, params):
    generator = torch.Generator().manual_seed(step + 1)
    return {
        name: None if name in ABSENT[step] else torch.randn(p.shape, generator=generator)
        for name, p in params.items()
    }


# ---- columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_each_slot_is_a_tree_like_the_parameters(name):
    optimizer = made(name)
    tree = {"net": [torch.ones(3, 2), (torch.ones(2, 3), None)], "head": {"w": torch.ones(5, 4)}}
    state = optimizer.init(tree)
    moved, after = optimizer.step(tree, tree, state)
    assert moved["net"][1][1] is None
    for each in (state, after):
        for column in each.slots.values():
            assert column.keys() == tree.keys()
            assert column["net"][1][1] == ()
            assert isinstance(column["net"][1], tuple)
    assert pytree.tree_structure(after) == pytree.tree_structure(state)


def test_a_parameter_that_lacks_a_slot_is_a_hole():
    optimizer = made("SGD", overrides={"b": {"momentum": 0.0}})
    params = params_of()
    state = optimizer.init(params)
    for _ in range(2):
        params, state = ps.maybe_step(optimizer, params, params, state, False, donate=True)
        assert {key: slot != () for key, slot in state.slots["momentum_buffer"].items()} == {
            "a": True,
            "b": False,
            "c": True,
        }


def test_a_state_without_slots_knows_its_parameters():
    optimizer, params = made("SGD", momentum=0), params_of()
    state = optimizer.init(params)
    assert tensors(state.slots) == []
    assert optimizer.to_state_dict(state)["param_groups"][0]["param_names"] == list(SHAPES)
    with pytest.raises(ValueError, match="opt_state knows the parameters a, b, c, params has a, b"):
        optimizer.step(*[{name: params[name] for name in "ab"}] * 2, state)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_slots_in_another_order_of_keys_are_those_of_their_parameters(name, donate):
    optimizer, params = made(name), params_of()
    params, state = optimizer.step(params, params, optimizer.init(params))
    expected = optimizer.step(params, params, state)
    turned = {key: dict(reversed(column.items())) for key, column in state.slots.items()}
    turned = clone(state._replace(slots=turned))
    found = ps.maybe_step(optimizer, clone(params), params, turned, False, donate=donate)
    assert same_bits(found[0], expected[0])
    for name in SHAPES:
        assert same_bits(slots_of(found[1], name), slots_of(expected[1], name))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_slots_in_another_order_of_keys_come_back_in_one_order_donated_or_not(name):
    optimizer, params = made(name), params_of()
    state = optimizer.init(params)
    turned = {key: dict(reversed(column.items())) for key, column in state.slots.items()}
    returned = [
        ps.maybe_step(
            *(optimizer, clone(params), params, clone(state._replace(slots=turned)), False),
            donate=donate,
        )[1]
        for donate in (False, True)
    ]
    assert ps.fingerprint(returned[0]) == ps.fingerprint(returned[1])


class Subclass(torch.Tensor):
    pass


def test_the_count_beside_a_parameter_of_a_subclass_is_of_none():
    optimizer, params = made("AdamW"), {"a": torch.ones(2).as_subclass(Subclass)}
    _, state = optimizer.step(params, {"a": torch.ones(2)}, optimizer.init(params))
    assert type(state.applied) is torch.Tensor


# ---- counts --------------------------------------------------------------------------------------


def torchs(name, **settings):
    """The parameters after the steps of torch, and its optimizer."""
    leaves = {key: p.clone().requires_grad_() for key, p in params_of().items()}
    theirs = getattr(OPTIM, name)(leaves.values(), lr=0.1, **{**CLASSES[name], **settings})
    for step in range(len(ABSENT)):
        for key, grad in grads_of(step, leaves).items():
            leaves[key].grad = grad
        theirs.step()
    return {key: p.detach() for key, p in leaves.items()}, theirs


def stepped(optimizer, step):
    params = params_of()
    state = optimizer.init(params)
    for index in range(len(ABSENT)):
        params, state = step(params, grads_of(index, params), state)
    return params, state


@pytest.mark.parametrize("way", ["step", "maybe_step", "donated", "accelerator", "formula"])
@pytest.mark.parametrize("name", COUNTING)
def test_counts_of_each_parameter_make_torchs_steps_where_gradients_are_none(name, way):
    settings = {"foreach": False} if way == "formula" else {}
    optimizer = made(name, counts="each", **settings)

    def step(params, grads, state):
        if way in ("step", "formula"):
            return optimizer.step(params, grads, state)
        if way == "accelerator":
            with as_on_an_accelerator():
                return ps.maybe_step(optimizer, params, grads, state, torch.tensor(False))
        return ps.maybe_step(optimizer, params, grads, state, False, donate=way == "donated")

    params, state = stepped(optimizer, step)
    expected, theirs = torchs(name)
    assert_close(params, expected, rtol=1e-4, atol=1e-5)
    counts = [theirs.state[p]["step"].item() for p in theirs.param_groups[0]["params"]]
    assert [count.item() for count in state.counts.values()] == counts == [3, 3, 4]
    assert state.applied == 4


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
def test_counts_of_each_parameter_move_under_a_transform_and_in_a_graph(name, mapped):
    settings = {"dampening": 0.5} if name == "SGD" else {}
    optimizer, params = made(name, counts="each", **settings), params_of()
    call = params, params, optimizer.init(params)
    expected = optimizer.step(*call)
    if mapped:
        stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), call)
        found = pytree.tree_map(lambda leaf: leaf[1], torch.vmap(optimizer.step)(*stacked))
    else:
        found = ps.jit(optimizer.step, backend="aot_eager")(*call)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert [count.item() for count in found[1].counts.values()] == [1, 1, 1]


def test_counts_of_each_of_many_parameters_move_in_a_graph_with_an_operator():
    optimizer = made("AdamW", counts="each")
    params = {str(index): torch.full((3,), 1.0 + index) for index in range(20)}
    call = params, params, optimizer.init(params)
    found = ps.jit(optimizer.step, backend="aot_eager")(*call)
    assert_close(found, optimizer.step(*call), rtol=1e-6, atol=1e-6)


def test_a_skipped_step_is_not_counted():
    optimizer, params = made("AdamW", counts="each"), params_of()
    state = optimizer.init(params)
    for donate in (False, True):
        for skip in (torch.tensor(True), True):
            old = clone((params, state))
            assert same_bits(ps.maybe_step(optimizer, *old[:1], params, old[1], skip, donate), old)


@pytest.mark.parametrize("around", [lambda o: o, ps.with_master_weights], ids=["alone", "masters"])
@pytest.mark.parametrize("call", ["step", "maybe_step", "unscale_and_step", "part"])
@pytest.mark.parametrize("name", COUNTING)
def test_one_count_refuses_a_gradient_that_is_none_before_any_work(name, call, around):
    optimizer, params = around(made(name)), params_of()
    if call == "part":  # of which no gradient is there
        parts = {"one": around(made("SGD")), "other": optimizer}
        optimizer = ps.partition(parts, lambda name, _: "other" if name == "b" else "one")
    state, grads = optimizer.init(params), {**params, "b": None}
    step = {
        "step": optimizer.step,
        "maybe_step": functools.partial(
            ps.maybe_step, optimizer, found_inf=torch.tensor(False), donate=True
        ),
    }
    step["part"] = step["maybe_step"]
    step["unscale_and_step"] = lambda params, grads, opt_state: ps.unscale_and_step(
        optimizer, ps.NoScale().init(), params, grads, opt_state, donate=True
    )
    with Untouched((params, state)), pytest.raises(ValueError, match=r"of b is None.*counts="):
        step[call](params, grads, opt_state=state) if call != "step" else step[call](
            params, grads, state
        )


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_a_class_without_counts_leaves_alone_what_has_no_gradient(name):
    optimizer, params = made(name), params_of()
    state = optimizer.init(params)
    moved, after = optimizer.step(params, {**params, "b": None}, state)
    assert same_bits(moved["b"], params["b"])
    assert same_bits(slots_of(after, "b"), slots_of(state, "b"))
    assert not same_bits(moved["a"], params["a"])


@pytest.mark.parametrize("name", COUNTING)
def test_a_state_dict_has_a_count_for_each_parameter_only_where_they_differ(name):
    params, theirs = torchs(name)
    optimizer = made(name)
    names = theirs.param_groups[0]["params"]
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    assert [count.item() for count in state.counts.values()] == [3, 3, 4]
    assert state.applied == 4
    for key, p in zip(SHAPES, names, strict=True):
        assert same_bits(slots_of(state, key, theirs.state[p]), dict(theirs.state[p]))
    sd = theirs.state_dict()
    for entry in sd["state"].values():
        entry["step"] = torch.tensor(4.0)
    assert optimizer.from_state_dict(sd, params).counts == ()
    assert optimizer.from_state_dict(sd, params, applied=2).counts["a"] == 4
    each = made(name, counts="each").from_state_dict(sd, params)
    assert [count.item() for count in each.counts.values()] == [4, 4, 4]


def test_counts_are_refused_that_are_neither_one_nor_each():
    with pytest.raises(ValueError, match=r'counts is \'all\', expected "one" or "each"'):
        ps.from_torch(OPTIM.AdamW, counts="all")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_without_torchs_kernels_the_formula_makes_the_steps(name, monkeypatch):
    params = params_of()
    expected = made(name).step(params, params, made(name).init(params))
    monkeypatch.setattr(private, "fused_kernel", lambda name: None)
    optimizer = made(name)
    found = optimizer.step(params, params, optimizer.init(params))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [tuple, list])
def test_each_parameter_of_a_tuple_is_counted(make):
    optimizer = ps.from_torch(torch.optim.RAdam, lr=0.1, counts="each")
    params = make([torch.ones(5), torch.ones(33)])
    state = optimizer.init(params)
    for donate in (False, True):
        grads = make([torch.ones(5), None])
        params, state = ps.maybe_step(
            optimizer, params, grads, state, torch.tensor(False), donate=donate
        )
    assert [int(count) for count in state.counts] == [2, 0]
