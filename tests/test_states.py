"""Copies of states, many states as one, one of them again, and averages over time."""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Dispatched,
    Untouched,
    any32,
    assert_close,
    batch,
    generator_of,
    job,
    same_bits,
    shares_memory,
    tensors,
    trees,
)
from hypothesis import given

import purescale as ps
from purescale._torch import memory_order
from purescale.testing import (
    assert_pure,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
)

HALF = torch.float16, torch.bfloat16
FLOATS = *HALF, torch.float32, torch.float64
TWO = torch.bfloat16, torch.float32  # where each leaf is compiled
OTHERS = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool
SIZES = (), (0,), (5,), (33,), (300,), (3, 7)


def tree_of(seed, dtypes=FLOATS + OTHERS):
    """Each dtype in each size, and what is no tensor."""
    g = generator_of(seed)

    def leaf_of(dtype, size):
        x = torch.randn(size, generator=g)
        return (x * 50).to(torch.int32).to(dtype) if dtype in OTHERS else x.to(dtype)

    rest = {"none": None, "nothing": (), "kind": "sgd", "inner": ps.StaticScale(8.0).init()}
    return {**{str(dtype): [leaf_of(dtype, size) for size in SIZES] for dtype in dtypes}, **rest}


def states():
    for optimizer in (
        ps.from_torch(torch.optim.AdamW, lr=1e-3, in_state=("lr",)),
        ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    ):
        for rule in (ps.DynamicScale(), ps.HeadroomScale(window=3)):
            state, step = job(optimizer, rule)
            after = [state]
            for index in range(3):
                after.append(step(after[-1], [batch(index)])[0])
            yield after


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [tree_of(0), *(after[-1] for after in states())])
def test_a_copy_has_the_bits_of_a_state_and_shares_no_memory_with_it(tree):
    copy = assert_pure(ps.clone, tree)
    assert same_bits(copy, tree)
    assert not shares_memory(copy, tree)


def test_one_tensor_under_two_names_becomes_two_that_can_be_donated():
    row = torch.arange(6.0)
    tree = {"a": row, "b": row, "view": row[2:], "row": row.expand(2, 6), "t": row.view(2, 3).t()}
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tree |= {"gaps": row[::2], "images": images, "half": row[1:].half()}
    copy = ps.clone(tree)
    assert same_bits(copy, tree)
    storages = {leaf.untyped_storage().data_ptr() for leaf in copy.values()}
    assert len(storages) == len(copy)
    assert all(map(memory_order.is_gapless, copy.values()))
    for name in ("t", "images"):
        assert copy[name].stride() == tree[name].stride()


def test_a_copy_is_off_the_graph():
    weight = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        made_inside = torch.ones(2)
    tree = {"w": weight, "on": weight * 2, "inside": made_inside}
    copy = ps.clone(tree)
    assert not any(leaf.requires_grad or leaf.is_inference() for leaf in tensors(copy))
    assert {type(leaf) for leaf in tensors(copy)} == {torch.Tensor}
    copy["w"].add_(1.0)
    assert same_bits(weight.detach(), torch.ones(3))


def test_what_is_no_dense_real_tensor_is_copied_too():
    sparse, row = torch.eye(3).to_sparse(), torch.randn(5, dtype=torch.complex64)
    rows = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    parts = {"sparse": sparse, "complex": row.conj(), "negative": torch.imag(row.conj())}
    tree = {**parts, "nested": [nested], "kind": "sgd", "number": 3, "none": None}
    before, copy = ps.clone(tree), ps.clone(tree)
    assert not copy["negative"].is_neg()
    assert (copy["kind"], copy["number"], copy["none"]) == ("sgd", 3, None)
    for leaf in (sparse.coalesce().values(), nested, row):
        leaf.mul_(2)
    assert same_bits([copy[key] for key in parts], [before[key] for key in parts])
    assert same_bits(list(copy["nested"][0].unbind()), rows)


def test_a_state_of_many_tensors_is_copied_by_one_operator():
    state = ps.StepInfo(*[[torch.ones(3) for _ in range(50)], None] * 3, ())
    with Dispatched() as run:
        ps.clone(state)
    assert len(run.ops) == 1


# ---- many states as one ----------------------------------------------------------------------


@pytest.mark.parametrize("trees", [[tree_of(i) for i in range(3)], *states()])
def test_members_of_what_was_stacked_are_the_states(trees):
    stacked = assert_pure(ps.stack_states, trees)
    for index, tree in enumerate(trees):
        for i in (index, index - len(trees), torch.tensor(index), torch.tensor(index - len(trees))):
            assert same_bits(assert_pure(ps.member, stacked, i), tree)
    assert all(leaf.shape[0] == len(trees) for leaf in tensors(stacked))


W = torch.ones(2)


@pytest.mark.parametrize(
    ("given_states", "error", "words"),
    [
        ([], ValueError, "states is an empty list"),
        ({"w": W}, TypeError, "got one dict. Fix"),
        (ps.StaticScale(8.0).init(), TypeError, "got one ScalerState. Fix"),
        ([{"w": W}, {"w": W, "b": W}], ValueError, r"states\[1\] does not match states\[0\].*'b'"),
        (
            [{"w": W}, {"w": torch.ones(3)}],
            ValueError,
            r"states\[1\]\['w'\] is torch.float32 \(3,\), but torch.float32 \(2,\) in states\[0\].*"
            r"a shorter last batch.*drop_last=True",
        ),
        ([{"w": W}, {"w": W.to("meta")}], ValueError, r"states\[1\]\['w'\] is .* on meta, but"),
        ([{"w": W}, {"w": None}], ValueError, r"states\[1\]\['w'\] is None, but torch.float32"),
        ([{"lr": 0.1}, {"lr": 0.2}], ValueError, r"states\[1\]\['lr'\] is 0.2, but 0.1.*tensor\("),
    ],
    ids=str,
)
def test_states_that_cannot_be_stacked_are_refused_by_their_leaf(given_states, error, words):
    with pytest.raises(error, match=words):
        ps.stack_states(given_states)


@pytest.mark.parametrize(
    ("tree", "i", "error", "words"),
    [
        ({"w": W, "step": torch.tensor(1)}, 0, ValueError, r"states\['step'\] has shape \(\)"),
        ({"w": W, "b": torch.ones(3)}, 0, ValueError, r"states\['b'\] has .*\(3,\).*\[2, ...\]"),
        ({"w": W}, 2, IndexError, "i is 2, and there are 2 states. Fix: from 0 to 1"),
        ({"w": W}, 1.0, TypeError, "i must be a whole number"),
        ({"w": W}, torch.tensor(1.0), TypeError, "i is torch.float32"),
        ({"w": W}, torch.tensor([1]), TypeError, "torch.vmap` over i"),
        ({"none": None}, 0, ValueError, "has no tensor"),
    ],
    ids=str,
)
def test_what_has_no_such_member_is_refused(tree, i, error, words):
    with pytest.raises(error, match=words):
        ps.member(tree, i)


# ---- averages over time ------------------------------------------------------------------------


def by_hand(old, new, decay):
    wide = torch.float64
    return (decay * old.to(wide) + (1 - decay) * new.to(wide)).to(old.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0, torch.tensor(0.3), torch.tensor(0.999)])
def test_an_average_equals_its_definition_in_every_dtype_and_size(decay):
    old, new = tree_of(0), tree_of(1)
    average = assert_pure(ps.ema, old, new, decay)
    for dtype in FLOATS:
        ours, olds, news = (tree[str(dtype)] for tree in (average, old, new))
        for a, o, n in zip(ours, olds, news, strict=True):
            assert (a.dtype, a.shape) == (o.dtype, o.shape)
            loose = {} if dtype in HALF else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(a, by_hand(o, n, decay), **loose)
    for dtype in OTHERS:
        assert same_bits(average[str(dtype)], new[str(dtype)])
    assert (average["none"], average["nothing"], average["kind"]) == (None, (), "sgd")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0, torch.tensor(0.9)])
def test_what_does_not_move_keeps_its_bits_and_a_zero_its_sign(dtype, decay):
    x = {"w": torch.randn(300).to(dtype), "b": torch.tensor(0.1, dtype=dtype)}
    x["zeros"] = torch.tensor([-0.0, 0.0]).to(dtype)
    assert same_bits(ps.ema(x, x, decay), x)
    other = torch.randn(300).to(dtype) * 100
    assert same_bits(ps.ema(other, x["w"], 1), other)
    assert same_bits(ps.ema(other, x["w"], 0), x["w"])


def test_an_average_in_float32_follows_half_weights_and_half_is_computed_in_float32():
    old, new = torch.zeros(5), torch.ones(5, dtype=torch.bfloat16)
    average = ps.ema(old, new, 0.999)
    assert average.dtype is torch.float32
    assert_close(average, torch.full((5,), 1e-3))
    large = torch.full((5,), 60000.0, dtype=torch.float16)
    assert same_bits(ps.ema(large, large, 0.5), large)
    small = torch.full((33,), 2.0**-24, dtype=torch.float16)
    assert same_bits(ps.ema(small, small * 3, 0.5), small * 2), "in float16 half of it is 0"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("decay", [0.1, torch.tensor(0.5)])
def test_what_is_infinite_in_both_stays_and_what_is_finite_in_both_stays_finite(dtype, decay):
    """As the -inf of a causal mask among the buffers."""
    largest = torch.finfo(dtype).max
    old = torch.tensor([-math.inf, math.inf, largest, -largest, math.inf, 1.0], dtype=dtype)
    new = torch.tensor([-math.inf, math.inf, -largest, largest, 1.0, -math.inf], dtype=dtype)
    average = ps.ema(old, new, decay)
    assert same_bits(average[:2], old[:2])
    assert average[2:4].isfinite().all()
    assert same_bits(average[4:], torch.tensor([math.inf, -math.inf], dtype=dtype))


def test_a_nan_goes_on_unless_it_is_selected_away():
    old, new = {"w": torch.ones(5)}, {"w": torch.full((5,), math.nan)}
    bad = torch.tensor(True)
    assert same_bits(ps.select(bad, old, ps.ema(old, new, 0.9)), old)
    assert ps.ema(old, new, 0.9)["w"].isnan().all()


@pytest.mark.parametrize(
    ("old", "new", "decay", "error", "words"),
    [
        ({"w": W}, {"w": W}, 1.5, ValueError, "decay must lie between 0 and 1, got 1.5. Fix"),
        ({"w": W}, {"w": W}, "0.9", TypeError, "decay must be a number"),
        ({"w": W}, {"w": W}, torch.ones(2), TypeError, r"decay is .* \(2,\);.*torch.vmap"),
        ({"w": W}, {"w": W}, torch.tensor(True), TypeError, "decay is torch.bool"),
        ({"w": W}, {"v": W}, 0.9, ValueError, r"new does not match old: missing \['w'\]"),
        ({"w": W}, {"w": torch.ones(3)}, 0.9, ValueError, r"new\['w'\] is torch.float32 \(3,\)"),
        ({"w": W}, {"w": None}, 0.9, ValueError, r"new\['w'\] is None, but .* in old"),
        ({"w": W}, {"w": W.int()}, 0.9, ValueError, r"new\['w'\] is torch.int32 \(2,\), but"),
        ({"w": W.int()}, {"w": W.long()}, 0.9, ValueError, "kind of number"),
        ({"w": W}, {"w": W * 1j}, 0.9, ValueError, "kind of number"),
        ({"w": W}, {"w": W.to_sparse()}, 0.9, ValueError, "expected dense tensors"),
        ({"w": W}, {"w": W.to("meta")}, 0.9, ValueError, "on meta, but .* in old"),
    ],
    ids=str,
)
def test_what_has_no_average_is_refused_by_its_leaf(old, new, decay, error, words):
    with pytest.raises(error, match=words):
        ps.ema(old, new, decay)


# ---- a state as one number -----------------------------------------------------------------------


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
]


def tree(dtype, size, seed):
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
    return {"x": bytes_.to(torch.uint8).view(dtype), "count": torch.tensor(seed), "none": None}


@given(st.sampled_from(DTYPES), st.sampled_from([1, 5, 33, 300]), st.integers(0, 99), st.data())
def test_one_flipped_bit_changes_it(dtype, size, seed, data):
    state = tree(dtype, size, seed)
    place = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    words = state["x"].clone().view(torch.uint8)
    words[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
    flipped = {**state, "x": words.view(dtype)}
    assert ps.fingerprint(flipped) != ps.fingerprint(state)


@given(st.permutations(range(6)))
def test_other_orders_of_leaves_and_of_elements_have_others(order):
    leaves = [torch.arange(33) + 100 * index for index in range(6)]
    mixed = [leaves[index] for index in order]
    same = list(order) == list(range(6))
    assert (ps.fingerprint(mixed) == ps.fingerprint(leaves)).item() is same
    columns = torch.stack(leaves)
    assert (ps.fingerprint(columns[list(order)]) == ps.fingerprint(columns)).item() is same


@pytest.mark.slow
def test_it_is_the_same_compiled():
    state = next(states())[-1]
    assert ps.jit(ps.fingerprint)(state) == ps.fingerprint(state)


def test_strides_and_lazy_bits_do_not_count():
    z = torch.randn(5, 33, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, z.mT):
        assert ps.fingerprint(lazy) == ps.fingerprint(lazy.clone().contiguous().resolve_conj())


def test_a_fingerprint_changes_nothing():
    result = assert_pure(ps.fingerprint, next(states())[-1])
    assert (result.dtype, result.shape) == (torch.int64, ())


@pytest.mark.parametrize("leaf", [1.0, torch.eye(3).to_sparse()], ids=["a number", "sparse"])
def test_what_is_no_dense_tensor_is_refused_by_name(leaf):
    with pytest.raises(TypeError, match=r"state\['x'\] is .*; a fingerprint is of dense tensors"):
        ps.fingerprint({"x": leaf})


def test_an_empty_tree_has_the_fingerprint_0():
    assert ps.fingerprint({"none": None, "empty": torch.zeros(0)}) == 0


# ---- old or new ----------------------------------------------------------------------------------


@given(trees(any32), st.booleans())
def test_select_takes_one_tree_whole(tree, bad):
    other = pytree.tree_map(lambda t: None if t is None else t + 1, tree)
    for _ in range(2):  # the second call is planned
        with Untouched((tree, other)):
            picked = ps.select(torch.tensor(bad), tree, other)
        assert same_bits(picked, tree if bad else other)
        assert not shares_memory((tree, other), picked)


@pytest.mark.parametrize("bad", [True, False])
def test_select_matches_by_name_and_keeps_the_order_of_the_old_tree(bad):
    old = {"a": torch.ones(2), "b": torch.zeros(2)}
    for new in ({"a": old["a"] + 1, "b": old["b"] + 1}, {"b": old["b"] + 1, "a": old["a"] + 1}):
        for _ in range(2):
            picked = ps.select(torch.tensor(bad), old, new)
            assert list(picked) == ["a", "b"]
            assert same_bits(picked["a"], old["a"] if bad else new["a"])


ONE, FLAG = torch.ones(1), torch.tensor(True)
A = {"a": ONE}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((FLAG, A, {"b": ONE}), ValueError, r"match old: missing \['a'\]; not in old: \['b'\]"),
        (
            (FLAG, A, {"a": torch.ones(2)}),
            ValueError,
            r"'\] is torch.float32 \(1,\) on cpu, but torch.float32 \(2,\) on cpu in new",
        ),
        ((FLAG, A, {"a": ONE.half()}), ValueError, r"torch.float16 \(1,\) on cpu in new"),
        ((FLAG, {"a": 1}, {"a": True}), ValueError, r"old\['a'\] is 1, but True in new"),
        ((FLAG, A, {"a": None}), ValueError, r"old\['a'\] is .*, but None in new"),
        ((torch.tensor([True]), ONE, ONE), ValueError, "one flag decides"),
        ((None, ONE, ONE), TypeError, "found_inf must be a 0-d bool tensor"),
        ((A, A, True), TypeError, r"Fix: `select\(found_inf, old, new\)`"),
        ((A, A, FLAG), TypeError, r"Fix: `select\(found_inf, old, new\)`"),
    ],
)
def test_select_refuses_trees_that_differ_and_what_is_no_flag(arguments, error, message):
    with pytest.raises(error, match=message):
        ps.select(*arguments)


@pytest.mark.parametrize("bad", [True, False])
def test_a_flag_may_be_selected_by_a_flag(bad):
    old, new = torch.tensor(False), torch.tensor(True)
    assert ps.select(torch.tensor(bad), old, new).item() is not bad


# ---- under transforms ----------------------------------------------------------------------------

TREES = [{k: t for k, t in tree_of(s, TWO).items() if k in map(str, TWO)} for s in range(4)]
PAIRS = [tuple(TREES[:2]), tuple(TREES[2:])]
CALLS = {  # each function, and arguments of some calls of it
    "clone": (ps.clone, [(each,) for each in TREES]),
    "stack_states": (lambda *trees: ps.stack_states(list(trees)), PAIRS),
    "member": (lambda tree: ps.member(tree, 1), [(ps.stack_states(list(pair)),) for pair in PAIRS]),
    "member, by a tensor": (
        lambda i: ps.member(ps.stack_states(TREES), i),
        [(torch.tensor(i),) for i in (0, 2, 3)],
    ),
    "ema": (ps.ema, [(*TREES[:2], torch.tensor(decay)) for decay in (0.1, 0.9, 0.999)]),
    "ema, by a number": (lambda *trees: ps.ema(*trees, 0.9), PAIRS),
    "select": (ps.select, [(torch.tensor(bad), *TREES[:2]) for bad in (True, False)]),
    "fingerprint": (ps.fingerprint, [(each,) for each in next(states())]),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_same_mapped_and_in_one_graph_and_reads_nothing(name):
    fn, calls = CALLS[name]
    near = {"rtol": 1e-6, "atol": 1e-7} if name == "ema" else {}
    assert_vmap_equals_loop(fn, *ps.stack_states(calls), **near)
    for call, came in zip(calls, assert_single_graph(fn, *calls), strict=True):
        assert same_bits(came, fn(*call))
    assert_sync_free(fn, *calls[0])


def test_derivatives_go_through_copies_stacks_and_averages():
    x = torch.tensor([2.0, 3.0])
    slope = torch.func.grad(lambda x: (ps.clone({"x": x})["x"] ** 2).sum())(x)
    assert same_bits(slope, 2 * x)
    _, tangent = torch.func.jvp(lambda x: ps.clone([x])[0] * 2, (x,), (x,))
    assert same_bits(tangent, 2 * x)
    slope = torch.func.grad(lambda x: ps.member(ps.stack_states([x, 3 * x]), 1).sum())(x)
    assert slope.tolist() == [3, 3]
    slopes = torch.func.grad(lambda *arguments: ps.ema(*arguments).sum(), argnums=(0, 1, 2))(
        torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor(0.75)
    )
    assert_close(slopes, (torch.tensor([0.75]), torch.tensor([0.25]), torch.tensor(-2.0)))
