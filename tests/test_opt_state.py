"""The state of a class of torch: slots as trees like the parameters, and one count of steps."""

import contextlib
import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import CLASSES, Untouched, assert_close, clone, same_bits, slots_of, tensors

import purescale as ps
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


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_slots_in_another_order_of_keys_are_those_of_their_parameters(name):
    """Donated or not they come back in one order."""
    optimizer, params = made(name), params_of()
    params, state = optimizer.step(params, params, optimizer.init(params))
    expected, after = optimizer.step(params, params, state)
    turned = {key: dict(reversed(column.items())) for key, column in state.slots.items()}
    returned = []
    for donate in (False, True):
        call = clone(params), params, clone(state._replace(slots=turned)), False
        stepped, new = ps.maybe_step(optimizer, *call, donate=donate)
        assert same_bits(stepped, expected)
        for key in SHAPES:
            assert same_bits(slots_of(new, key), slots_of(after, key))
        returned.append(ps.fingerprint(new))
    assert returned[0] == returned[1]


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


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(("AdamW", "NAdam", "SGD"), ("mapped", "in a graph")),
        ("AdamW", "of an operator"),
    ],
)
def test_counts_of_each_parameter_move_under_a_transform_and_in_a_graph(name, way):
    settings = {"dampening": 0.5} if name == "SGD" else {}
    optimizer, params = made(name, counts="each", **settings), params_of()
    if way == "of an operator":  # for many parameters
        params = {str(index): torch.full((3, 2), 1.0 + index) for index in range(20)}
    call = params, params, optimizer.init(params)
    expected = optimizer.step(*call)
    if way == "mapped":
        found = ps.member(torch.vmap(optimizer.step)(*ps.stack_states([call, call])), 1)
    else:
        found = ps.jit(optimizer.step, backend="aot_eager")(*call)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert {count.item() for count in found[1].counts.values()} == {1}


@pytest.mark.parametrize("name", COUNTING)
def test_one_count_refuses_a_gradient_that_is_none_before_any_work(name):
    params, grads, scaler = params_of(), {**params_of(), "b": None}, ps.NoScale().init()
    masters = ps.with_master_weights(made(name))
    parts = {"one": made("SGD"), "other": masters}  # a part of which no gradient is there
    part = ps.partition(parts, lambda name, _: "other" if name == "b" else "one")
    for optimizer in (made(name), masters, part):
        state = optimizer.init(params)
        for step in (
            lambda o=optimizer, s=state: o.step(params, grads, s),
            lambda o=optimizer, s=state: ps.maybe_step(o, params, grads, s, False, donate=True),
            lambda o=optimizer, s=state: ps.unscale_and_step(o, scaler, params, grads, s),
        ):
            with (
                Untouched((params, state)),
                pytest.raises(ValueError, match=r"of b is None.*counts="),
            ):
                step()


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
    """torch's one group is read in the order of the parameters, which are in two groups here."""
    params, theirs = torchs(name)
    optimizer = made(name, overrides={"b": {"lr": 0.5}})
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
    told = optimizer.from_state_dict(sd, params, applied=2**31 - 1)
    assert (told.applied, told.counts["a"]) == (2**31 - 1, 4)
    each = made(name, counts="each").from_state_dict(sd, params)
    assert [count.item() for count in each.counts.values()] == [4, 4, 4]


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


# ---- states that do not fit ----------------------------------------------------------------------

# torch's kernels would write past the end of what is too short.
WRONG = {
    "0-d": lambda t: torch.tensor(1.0),
    "short": lambda t: torch.zeros(2),
    "long": lambda t: torch.zeros(t.numel() + 1),
    "reshaped": lambda t: torch.zeros(2, t.numel() // 2),
    "double": lambda t: t.double(),
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}
WRONG_NUMBERS = {
    "1-d": lambda t: t.reshape(1),
    "double": lambda t: t.double(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_a_slot_that_is_not_its_parameters_is_refused_before_any_work(name):
    optimizer, params = made(name, counts="each"), {"s": torch.ones(8)}
    scaler, fresh = ps.NoScale().init(), optimizer.init(params)
    for key, column in {**fresh.slots, "step": fresh.counts}.items():
        if not column:
            continue
        for spoil in (WRONG if column["s"].ndim else WRONG_NUMBERS).values():
            state = optimizer.init(params)
            {**state.slots, "step": state.counts}[key]["s"] = spoil(column["s"])
            expected = r"torch.float32 \(8,\)" if column["s"].ndim else r"one number, .* \(\)"
            call = params, {"s": torch.ones(8)}, state
            refused = rf"opt_state: {key} of s is .*; expected {expected}"
            with Untouched(params):
                with pytest.raises(ValueError, match=refused):
                    optimizer.step(*call)
                for donate in (False, True):
                    with pytest.raises(ValueError, match=refused):
                        ps.maybe_step(optimizer, *call, False, donate=donate)
                with pytest.raises(ValueError, match=refused):
                    ps.unscale_and_step(optimizer, scaler, *call, donate=True)


def in_a_partition(optimizer):
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)
    return ps.partition(
        {"sgd": sgd, "own": optimizer}, lambda name, _: "own" if "b" in name else "sgd"
    )


def columns_of(state):
    return (
        columns_of(state["own"])
        if isinstance(state, dict)
        else getattr(state, "inner", state).slots
    )


AROUND = {
    "alone": lambda optimizer: optimizer,
    "in a partition": in_a_partition,
    "under masters": ps.with_master_weights,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Rprop", "Adafactor"])
def test_a_step_whose_state_lacks_a_slot_changes_nothing(name, around):
    """Also if the slot is that of a later group, part or piece."""
    settings = {"lr": 0.1, "overrides": {"last b": {"lr": 0.01}}}
    optimizer = AROUND[around](ps.from_torch(getattr(OPTIM, name), **settings))
    shapes = {"first": (5,), "b": (33,), "last b": (3, 11)}
    dtype = torch.bfloat16 if around == "under masters" else torch.float32
    params = {key: torch.ones(shape, dtype=dtype) for key, shape in shapes.items()}
    state, grads = optimizer.init(params), clone(params)
    columns = columns_of(state)
    missing = [key for key, column in columns.items() if column["last b"] != ()][-1]
    columns[missing]["last b"] = ()
    for mode in (contextlib.nullcontext, as_on_an_accelerator):
        with (
            mode(),
            Untouched((params, state)),
            pytest.raises(ValueError, match=f"has no {missing}"),
        ):
            ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), donate=True)
