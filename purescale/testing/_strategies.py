"""Hypothesis strategies for rules, their states, runs of overflows, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from .._loss_scale.headroom import HeadroomScale
from .._loss_scale.rules import DynamicScale, NoScale, StaticScale, takes_amax
from .._tree import pytree
from .._tree.pytree import Tree
from .._tree.scalars import short_repr


def scale_rules(kind: type | None = None) -> st.SearchStrategy[Any]:
    """Return a strategy of purescale's rules with any legal settings and short intervals.

    Args:
        kind: The class of the rules; None for all of them except `HeadroomScale`, whose `update`
            takes the largest gradient too.

    Raises:
        ValueError: `kind` is another class.

    Example:
        >>> from purescale import StaticScale
        >>> isinstance(scale_rules(StaticScale).example(), StaticScale)  # doctest: +SKIP
        True
    """
    kinds: dict[type, st.SearchStrategy[Any]] = {
        DynamicScale: _within_bounds(
            DynamicScale,
            growth_interval=st.integers(1, 5),
            hysteresis=st.integers(1, 3),
            refill=st.sampled_from(["growth", "clean"]),
        ),
        StaticScale: st.builds(StaticScale, _powers(-24, 24)),
        NoScale: st.just(NoScale()),
    }
    if kind is None:
        return st.one_of(*kinds.values())
    kinds[HeadroomScale] = _within_bounds(
        HeadroomScale, margin=st.integers(0, 12), window=st.integers(1, 5)
    )
    if kind not in kinds:
        raise ValueError(
            f"kind is {short_repr(kind)}; expected one of {', '.join(k.__name__ for k in kinds)}, "
            "the class itself. Fix: `scale_rules(DynamicScale)`; `hypothesis.strategies.builds` "
            "for a rule of your own."
        )
    return kinds[kind]


def _within_bounds(
    rule: Callable[..., Any], **settings: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Return a strategy of rules whose first scale is between their bounds."""
    bounds = st.tuples(st.integers(-20, 20), st.integers(0, 20), st.integers(0, 20)).map(
        lambda drawn: {
            "init_scale": 2.0 ** drawn[0],
            "min_scale": 2.0 ** (drawn[0] - drawn[1]),
            "max_scale": 2.0 ** (drawn[0] + drawn[2]),
        }
    )
    return st.builds(lambda scales, **others: rule(**scales, **others), bounds, **settings)


def as_scale(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@st.composite
def scaler_states(draw: Any, rule: Any = None) -> Any:
    """Return a strategy of states that `rule`, by default `DynamicScale()`, may be given: after any
    run, or with a scale that a damaged checkpoint may hold (any power of two, 0, inf, NaN,
    negative).
    """
    rule = DynamicScale() if rule is None else rule
    state = rule.init()
    for bad, amax in draw(st.lists(rule_steps(rule), max_size=12)):
        state = rule.update(*update_arguments(state, bad, amax))
    scale = draw(st.none() | _powers(-149, 127) | st.sampled_from(DAMAGED))
    return state if scale is None else state._replace(scale=as_scale(scale))


def overflow_runs(size: int | None = None) -> st.SearchStrategy[list[bool]]:
    """Return a strategy of `found_inf` over a run of up to 40 steps, or of `size`, with bursts and
    long clean stretches.
    """
    limit = 40 if size is None else size

    def flags(gaps: list[int]) -> list[bool]:
        return [bad for gap in gaps for bad in [False] * gap + [True]]

    gaps = st.lists(st.integers(0, 25), max_size=max(1, limit // 8)).map(flags)
    if size is None:
        return st.lists(st.booleans(), min_size=1, max_size=limit) | gaps.map(
            lambda run: run[:limit] or [False]
        )
    return gaps.map(lambda run: (run + [False] * limit)[:limit])


def grad_trees(like: Tree = None) -> st.SearchStrategy[Tree]:
    """Return a strategy of gradients of any nesting, or in the structure, shapes and dtypes of
    `like`.

    They include float16, bfloat16, float32 and float64, 0-d and empty tensors and None, and
    elements that are zeros of both signs, subnormals, the largest numbers, inf and NaN.
    """
    if like is not None:
        leaves, structure = pytree.flatten(like)
        each = [st.none() if leaf is None else _leaf(leaf.dtype, leaf.shape) for leaf in leaves]
        return st.tuples(*each).map(lambda drawn: structure.unflatten(list(drawn)))
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    shapes = st.sampled_from([(3,), (), (0,), (2, 3), (1,)])
    leaf = st.none() | st.tuples(dtypes, shapes).flatmap(lambda kind: _leaf(*kind))
    return st.recursive(
        st.dictionaries(st.sampled_from("abc"), leaf, min_size=1),
        lambda inner: (
            st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=2)
            | st.lists(inner, min_size=1, max_size=2)
            | st.tuples(inner, leaf)
        ),
        max_leaves=3,
    )


@st.composite
def params_and_grads(draw: Any) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return a strategy of finite float32 parameters by name, with gradients as `grad_trees` draws
    them, or None.
    """
    shapes = draw(st.lists(st.sampled_from([(3,), (), (2, 3), (0,)]), min_size=1, max_size=4))
    finite = st.floats(-(2.0**20), 2.0**20, width=32)
    params = {
        f"layer{index}": draw(_leaf(torch.float32, shape, finite))
        for index, shape in enumerate(shapes)
    }
    grads = draw(grad_trees(params))
    return params, {name: draw(st.just(g) | st.none()) for name, g in grads.items()}


DAMAGED = (0.0, -0.0, math.inf, -math.inf, math.nan, -8.0)


def _powers(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def _elements(dtype: torch.dtype) -> st.SearchStrategy[float]:
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, limits.max, -limits.max, limits.tiny / 2]
    width: Any = {2: 16, 4: 32, 8: 64}[dtype.itemsize]
    return st.floats(width=width) | st.sampled_from(special)


def _leaf(
    dtype: torch.dtype, shape: Sequence[int], elements: st.SearchStrategy[float] | None = None
) -> st.SearchStrategy[Tensor]:
    if dtype.is_complex:
        return _leaf(dtype.to_real(), (*shape, 2), elements).map(torch.view_as_complex)
    count = math.prod(shape)
    each = _elements(dtype) if elements is None else elements
    values = st.lists(each, min_size=count, max_size=count)
    return values.map(lambda v: torch.tensor(v, dtype=torch.float64).to(dtype).reshape(shape))


def rule_steps(rule: Any) -> st.SearchStrategy[tuple[bool, float | None]]:
    """Return a strategy of `found_inf`, with the largest gradient if the rule takes it."""
    amax: st.SearchStrategy[Any] = st.none()
    if takes_amax(rule):
        amax = _powers(-120, 120) | st.sampled_from([0.0, 1.0, 3.0, math.inf, math.nan])
    return st.tuples(st.booleans(), amax)


def update_arguments(state: Any, bad: bool, amax: float | None) -> tuple[Any, ...]:
    """Return the arguments of `rule.update` as tensors."""
    arguments = (state, torch.tensor(bad))
    return arguments if amax is None else (*arguments, torch.tensor(amax, dtype=torch.float32))
