"""The fingerprint of a state: one flipped bit changes it, and nothing else does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
import purescale.testing

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


def test_two_flipped_signs_change_it():
    x = torch.ones(300)
    prints = set()
    for first in range(0, 300, 30):
        for second in range(first + 1, 300, 31):
            flipped = x.clone()
            flipped[[first, second]] *= -1
            prints.add(ps.fingerprint(flipped).item())
    assert len(prints) == sum(len(range(first + 1, 300, 31)) for first in range(0, 300, 30))
    assert ps.fingerprint(x).item() not in prints


def state_of_a_run():
    model = torch.nn.Sequential(torch.nn.Linear(3, 33), torch.nn.BatchNorm1d(33))
    _, params, buffers = ps.make_functional(model)
    optimizer, rule = ps.from_torch(torch.optim.AdamW), ps.DynamicScale()
    rng = torch.Generator().manual_seed(0).get_state()
    return ps.init_train_state(params, buffers, optimizer, rule, rng=rng)


def test_it_is_the_same_mapped():
    states = [state_of_a_run() for _ in range(3)]
    mapped = torch.vmap(ps.fingerprint)(ps.stack_states(states))
    assert mapped.tolist() == [ps.fingerprint(state).item() for state in states]


@pytest.mark.slow
def test_it_is_the_same_compiled():
    state = state_of_a_run()
    expected = ps.fingerprint(state)
    assert ps.jit(ps.fingerprint)(state) == expected
    assert torch.compile(ps.fingerprint, fullgraph=True)(state) == expected


def test_strides_and_lazy_bits_do_not_count():
    z = torch.randn(5, 33, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, z.mT):
        assert ps.fingerprint(lazy) == ps.fingerprint(lazy.clone().contiguous().resolve_conj())


def test_nothing_is_read_and_nothing_changes():
    state = state_of_a_run()
    versions = [x._version for x in state.params.values()]
    result = ps.testing.assert_sync_free(ps.fingerprint, state)
    assert (result.dtype, result.shape) == (torch.int64, ())
    assert [x._version for x in state.params.values()] == versions


NO_DENSE = {
    "a number": lambda: 1.0,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", NO_DENSE)
def test_what_is_no_dense_tensor_is_refused_by_name(name):
    with pytest.raises(TypeError, match=r"state\['x'\] is .*; a fingerprint is of dense tensors"):
        ps.fingerprint({"x": NO_DENSE[name]()})


def test_an_empty_tree_has_the_fingerprint_0():
    assert ps.fingerprint({"none": None, "empty": torch.zeros(0)}) == 0
