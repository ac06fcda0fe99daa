"""Many steps in one call: the loop, as one graph for any number of steps."""

import functools

import numpy as np
import pytest
import torch
from helpers import assert_close, clone, job, same_bits, stack, tensors, trained

import purescale as ps

ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
RULE = ps.DynamicScale(2.0**10, growth_interval=2)


WIDE = "params=float32,compute=float32,output=float32"


def step_and_batches(number=5, **settings):
    """(state, step, batches): a step over one batch, and stacked batches, of which the second
    overflows.
    """
    state, over_window = job(ADAMW, RULE, WIDE, max_norm=1.0, **settings)
    x = torch.randn(number, 8, 1, 6, 6)
    x[1:2] = torch.inf
    batches = x, torch.randint(0, 3, (number, 8))
    return state, lambda state, batch: over_window(state, [batch]), batches


def looped(step, state, batches, number):
    unstacked = [tuple(leaf[index] for leaf in batches) for index in range(number)]
    state, infos = trained(state, step, unstacked)
    return state, stack(infos)


in_order = functools.partial(ps.jit, backend="aot_eager")


@pytest.mark.parametrize(
    "wrap", [lambda step: step, pytest.param(in_order, marks=pytest.mark.slow)]
)
def test_it_has_the_bits_of_the_loop(wrap):
    state, step, batches = step_and_batches()
    step = wrap(step)
    expected = looped(step, state, batches, 5)
    assert same_bits(ps.scan_steps(step, state, batches), expected)
    assert expected[1].found_inf.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("donating", ["a step", "jit"])
def test_the_state_of_the_caller_is_not_changed_by_a_step_that_donates(donating):
    state, step, batches = step_and_batches()
    expected = looped(step, state, batches, 5)
    if donating == "jit":
        step = in_order(step, donate=0)
    else:
        _, step, _ = step_and_batches(donate=True)
    before = clone(state)
    result = ps.scan_steps(step, state, batches)
    assert same_bits(state, before)
    assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
def test_over_a_jitted_step_it_is_one_graph_for_any_number_of_steps():
    state, step, batches = step_and_batches(7)
    jitted = ps.jit(step, donate=0)
    before = clone(state)
    for number in (3, 7, 1):
        some = tuple(leaf[:number] for leaf in batches)
        result = ps.scan_steps(jitted, state, some)
        expected = looped(step, state, some, number)
        assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (len(jitted.scans), len(jitted.programs)) == (1, 0)
    assert same_bits(state, before)


@pytest.mark.slow
def test_what_a_scanned_step_closes_over_is_an_input_and_a_literal_the_number_that_it_is():
    shift = torch.tensor(1.0)
    step = ps.jit(lambda total, x: (total * torch.tensor(1.5) + x * shift, None))
    for value in (1.0, 2.0):
        shift.fill_(value)
        total, infos = ps.scan_steps(step, torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
        assert total.item() == ((1.0 * 1.5 + 2.0) * 1.5 + 3.0) * value
        assert infos is None


@pytest.mark.slow
def test_a_state_of_one_memory_is_scanned_as_in_the_loop():
    shared, x = torch.ones(3), torch.randn(4, 3)

    def step(state, x):
        a, b = state
        return (a * 2 + x, b + a * shared), a.sum()

    jitted = ps.jit(step, donate=0)
    for state in ((shared, shared), (torch.zeros(3), x[0]), (x[0], x[0])):
        before = clone(state)
        state_now, sums = ps.scan_steps(jitted, state, x)
        expected, loop_sums = trained(state, step, x)
        assert_close((state_now, sums), (expected, torch.stack(loop_sums)), rtol=1e-6, atol=1e-6)
        assert same_bits(state, before)


@pytest.mark.slow
def test_the_first_call_draws_what_later_calls_draw():
    step = ps.jit(lambda total, x: (total + torch.randn(3), torch.rand(2) + x))
    draws = []
    for _ in range(3):
        torch.manual_seed(0)
        draws.append(ps.scan_steps(step, torch.zeros(3), torch.zeros(4)))
        draws.append(ps.scan_steps(step, torch.zeros(3), torch.zeros(4)))
    assert same_bits(draws[0], draws[2])
    assert same_bits(draws[1], draws[3])
    assert not same_bits(draws[0], draws[1])


def test_an_info_of_python_that_differs_between_steps_is_refused_by_its_cause():
    seconds = iter(range(5))
    step = lambda total, x: (total + x, {"s": next(seconds)})  # noqa: E731
    words = r"infos\[1\].*a number of Python that differs.*torch.tensor"
    with pytest.raises(ValueError, match=words):
        ps.scan_steps(step, torch.zeros(()), torch.zeros(5))


def test_it_can_be_mapped_and_traced():
    def sums(start, xs):
        return ps.scan_steps(lambda total, x: (total + x, {"total": total}), start, xs)

    starts, xs = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 2.0])
    expected = [torch.tensor([3.0, 13.0]), torch.tensor([[0.0, 1.0], [10.0, 11.0]])]
    assert same_bits(tensors(torch.vmap(sums, in_dims=(0, None))(starts, xs)), expected)
    derivative = torch.func.grad(lambda start: sums(start, xs)[0])(starts[0])
    assert derivative.item() == 1.0
    jitted = ps.jit(torch.vmap(sums, in_dims=(0, None)), backend="aot_eager")
    assert same_bits(tensors(jitted(starts, xs)), expected)


def test_none_and_constants_come_back():
    def step(state, batch):
        assert batch["y"] is None
        return {**state, "w": state["w"] + 1, "none": None}, {"x": batch["x"], "name": "a"}

    state = {"w": torch.tensor(0), "none": None, "n": 3}
    state, infos = ps.scan_steps(step, state, {"x": torch.arange(3), "y": None})
    assert state == {"w": torch.tensor(3), "none": None, "n": 3}
    assert infos["x"].tolist() == [0, 1, 2]
    assert infos["name"] == "a"


@pytest.mark.parametrize("wrap", [lambda step: step, in_order])
def test_an_error_of_a_step_over_a_list_of_batches_names_the_cure(wrap):
    state, step, (x, y) = step_and_batches()
    with pytest.raises(ValueError, match="too many values") as raised:
        ps.scan_steps(wrap(step), state, list(zip(x, y, strict=True)))
    assert "`scan_steps(step, state, stack_states(batches))`" in raised.value.__notes__[0]


TWO_LENGTHS = r"batches\[1\] has shape \(2,\); expected \[3, ...\].*stack_states\(list_of_batches\)"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (None, r"batches is .* without a tensor.*torch\.arange\(n\)"),
        (torch.utils.data.DataLoader([1.0]), r"without a tensor.*stack_states\(itertools.islice"),
        ((np.ones(2), np.ones(2)), r"arrays `tree_map\(torch.as_tensor, batches\)`"),
        (torch.ones(0, 2), "batches has no batch"),
        (torch.tensor(1.0), r"batches has shape \(\)"),
        ((torch.ones(3), torch.ones(2)), TWO_LENGTHS),
    ],
)
def test_what_is_no_stack_of_batches_is_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        ps.scan_steps(lambda s, b: (s, s), torch.ones(1), batches)


@pytest.mark.parametrize("wrap", [lambda step: step, ps.jit])
@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (lambda s, b: s, TypeError, r"the step returned .*Fix: `return state, info`"),
        (lambda s, b: ({"w": s["w"].double()}, ()), ValueError, r"state\['w'\] is torch.float32"),
    ],
    ids=["no pair", "another kind of state"],
)
def test_what_a_step_must_not_return_is_refused(step, error, words, wrap):
    with pytest.raises(error, match=words):
        ps.scan_steps(wrap(step), {"w": torch.ones(2)}, torch.ones(3))
