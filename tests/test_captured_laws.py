"""The laws of a step, with each step captured: recorded on a CPU, and replayed."""

import functools

import pytest
from laws import LAWS
from test_capture import on_graphs
from test_laws_of_a_step import OF_NUMPY

import purescale as ps

pytestmark = pytest.mark.slow
globals().update(LAWS)


def replayed(step, state, *others):
    """What a captured step returns, and the step where its arguments are refused: leaves that
    require a gradient, numbers, tensors without values.
    """
    try:
        return ps.capture(step)(state, *others)
    except TypeError as error:
        if "capture" not in str(error):
            raise
        return step(state, *others)


@functools.wraps(train_step := ps.train_step)
def captured_train_step(state, microbatches, **settings):
    step = functools.partial(train_step, **settings)
    return replayed(step, state, microbatches)


@functools.wraps(unscale_and_step := ps.unscale_and_step)
def captured_unscale_and_step(optimizer, scaler, params, grads, opt_state, *bounds, **settings):
    def step(state, scaler, grads):
        params, opt_state = state
        return unscale_and_step(optimizer, scaler, params, grads, opt_state, *bounds, **settings)

    return replayed(step, (params, opt_state), scaler, grads)


@pytest.fixture(autouse=True)
def _captured(request, monkeypatch):
    if "how" in request.fixturenames and request.getfixturevalue("how") in OF_NUMPY:
        pytest.skip("NumPy reads what a graph computes")
    monkeypatch.setattr(ps, "train_step", captured_train_step)
    monkeypatch.setattr(ps, "unscale_and_step", captured_unscale_and_step)
    with on_graphs():
        yield
