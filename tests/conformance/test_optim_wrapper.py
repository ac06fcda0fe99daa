"""MMEngine's OptimWrapper itself as the oracle for windows of accumulation, where it is right; and
where it is not.
"""

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import purescale as ps

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mmengine")
    from mmengine.optim import OptimWrapper

# its own, also about what an unaligned resume loses
pytestmark = pytest.mark.filterwarnings("ignore")


def trace(every, total, start=0, last=None):
    """(should_sync, divisor, should_update) of each microbatch, and the parameter after it, from
    OptimWrapper.
    """
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1.0), accumulative_counts=every)
    wrapper.initialize_count_status(model, start, total)
    rows = []
    for index in range(start, total if last is None else last):
        sync = wrapper.should_sync()
        divisor = round(1 / wrapper.scale_loss(torch.tensor(1.0)).item())
        loss = model(torch.full((1, 1), float(index + 1), dtype=torch.float64)).sum()
        wrapper.update_params(loss)
        rows.append((sync, divisor, wrapper.should_update(), model.weight.item()))
    return rows


def ours(every, total, start=0):
    sgd, params = ps.from_torch(torch.optim.SGD, lr=1.0), torch.zeros(1, 1, dtype=torch.float64)
    state, accum = sgd.init(params), ps.init_accum(params)
    rows = []
    for index in range(start, total):
        window = ps.accumulation_window(index, every, total, start)
        accum = ps.accumulate_grads(accum, torch.full_like(params, index + 1))
        if window.should_update:
            grads, found_inf = ps.accumulated_grads(accum)
            params, state = ps.maybe_step(sgd, params, grads, state, found_inf)
            accum = ps.init_accum(params)
        rows.append((window.should_sync, window.divisor, window.should_update, params.item()))
    return rows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 25), st.integers(0, 4))
def test_windows_divisors_and_steps_equal_those_of_optim_wrapper_after_an_aligned_start(
    every, total, windows
):
    start = min(every * windows, total)
    expected = trace(every, total, start)
    for row, (sync, divisor, update, weight) in zip(
        ours(every, total, start), expected, strict=True
    ):
        assert row[:3] == (sync, divisor, update)
        assert row[3] == pytest.approx(weight)


def test_an_unaligned_resume_makes_optim_wrapper_take_two_thirds_of_a_step():
    # microbatches 97 and 98 of gradient 98 and 99: their mean is 98.5
    assert trace(3, 103, start=97)[1][3] == pytest.approx(-(98 + 99) / 3)
    assert ours(3, 103, start=97)[1][3] == pytest.approx(-(98 + 99) / 2)


def test_beyond_its_total_optim_wrapper_divides_by_one_or_fails():
    # windows of three, three times as far
    assert [divisor for _, divisor, _, _ in trace(3, 4, last=7)][4:] == [1, 1, 1]
    with pytest.raises(AssertionError):
        trace(3, 3, last=4)
    for total in (3, 4):
        with pytest.raises(ValueError, match="is beyond total"):
            ps.accumulation_window(total, 3, total)


def test_training_code_moved_from_mmengine_and_mmpose_gives_the_same_parameters(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import from_mmengine

    assert all(apart < 1e-6 for apart in from_mmengine.main().values())
    assert from_mmengine.new_amp_optim_wrapper()["the scale"] != 2.0**24
