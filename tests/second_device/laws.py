"""The laws of a step and its four ways, for a device on which a step that waits is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_four_ways
import test_laws_of_a_step
import torch
from test_laws_of_a_step import OF_NUMPY

import purescale as ps


def is_slow(law: Any) -> bool:
    return any(mark.name == "slow" for mark in getattr(law, "pytestmark", ()))


# Without what takes seconds, because it compiles, and what runs in processes of its own.
LAWS = {
    name: law
    for module in (test_laws_of_a_step, test_four_ways)
    for name, law in vars(module).items()
    if name.startswith("test_") and "over_ranks" not in name and not is_slow(law)
}


def refuse_waiting(
    request: Any, monkeypatch: pytest.MonkeyPatch, waiting: Callable[..., Any]
) -> None:
    """Run the steps of a law within `waiting(refused=True)`, unless they retry. Skip what NumPy
    computes.
    """
    if "how" in request.fixturenames and request.getfixturevalue("how") in OF_NUMPY:
        pytest.skip("NumPy has no memory of the device")
    for name in ("train_step", "unscale_and_step", "maybe_step"):
        monkeypatch.setattr(ps, name, _without_waiting(getattr(ps, name), waiting))


def _without_waiting(step: Any, waiting: Callable[..., Any]) -> Any:
    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(*args, **kwargs)
        with waiting(refused=not kwargs.get("max_retries")):
            return step(*args, **kwargs)

    return call
