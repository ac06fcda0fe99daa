"""One optimizer step: skip or apply, over gradients that are still scaled."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _dtensor, _foreach, _tree
from ._autocast import outside_autocast
from ._clip import Clip, check_ordered, checked, clip_by_value, clip_divisor, clip_to, told
from ._kernels import Treatment
from ._optim import Optimizer
from ._scaler import HasScale, check_grads
from ._select import where
from ._spread import Read, Spread, facts, read, spread
from ._tree import Tree


class Stepped(NamedTuple):
    """What `unscale_and_step` returns."""

    params: Tree
    opt_state: Any
    found_inf: Tensor  # bool []
    # float32 [], before clipping; not finite where found_inf; () where max_norm is None
    grad_norm: Any
    # float32 [], as grad_norm, the largest magnitude; () where it was not asked for
    grad_amax: Any = ()


@outside_autocast()
def maybe_step(
    optimizer: Optimizer,
    params: Tree,
    grads: Tree,
    opt_state: Any,
    found_inf: Tensor | bool,
    donate: bool = False,
) -> tuple[Tree, Any]:
    """Equal to `select(found_inf, (params, opt_state), optimizer.step(params, grads, opt_state))`.

    Where `found_inf` is True parameters, optimizer state and step count come back bit for bit as
    they were; no value is read to decide it. `found_inf`: 0-d bool. `donate`: `params` and
    `opt_state` may be overwritten; the caller gives them up. Same bits; only inside torch.compile,
    where that cannot be seen, no two donated tensors may share memory. Without `donate` the results
    share no memory with the arguments.

    Raises `ValueError`, naming the leaf, when `grads` do not match `params` or `opt_state` belongs
    to other parameters.

    >>> import torch
    >>> from purescale import from_torch
    >>> sgd = from_torch(torch.optim.SGD, lr=1.0)
    >>> params = {"w": torch.tensor([1.0])}
    >>> grads = {"w": torch.tensor([float("nan")])}
    >>> maybe_step(sgd, params, grads, sgd.init(params), torch.tensor(True))[0]
    {'w': tensor([1.])}

    Source of the rule: apply_if_finite of optax; the flag as a tensor from torch's fused
    optimizers.
    """
    bad = _tree.flag(found_inf, like=next(iter(_tree.tensors(params)), None))
    over = spread(optimizer, params, grads, opt_state)
    trees = (params, grads, opt_state) if over is None else over[:3]
    plan = _planned(optimizer, *trees, donate=donate)
    if plan is None:
        _check_step(optimizer, *trees)
    stepped = _maybe_step(optimizer, *trees, bad, donate=donate) if plan is None else plan.run(bad)
    stepped = stepped if over is None else over.back(*stepped)
    if donate:
        _tree.poison((params, opt_state), keep=(stepped, grads, found_inf))
    return stepped


def _planned(optimizer: Optimizer, *arguments: Any, **settings: Any) -> Any:
    """A step that skips and unscales by itself, from an optimizer that can plan one; else None."""
    plan = getattr(optimizer, "plan", None)
    return None if plan is None else plan(*arguments, **settings)


def _check_step(optimizer: Optimizer, params: Tree, grads: Tree, opt_state: Any) -> Any:
    """What an optimizer would refuse in `step`, refused before; one of your own may leave `check`
    out.
    """
    if not getattr(optimizer, "differentiable", False):
        _tree.refuse_graphs(params=params, grads=grads, opt_state=opt_state)
    check = getattr(optimizer, "check", None)
    return None if check is None else check(params, grads, opt_state)


def _maybe_step(
    optimizer: Optimizer,
    params: Tree,
    grads: Tree,
    opt_state: Any,
    bad: Tensor | bool,
    *,
    donate: bool,
    keep: Sequence[Tensor] = (),
) -> tuple[Tree, Any]:
    """`maybe_step` of what `_check_step` let through; writes into none of `keep`."""
    with _off_the_graph(optimizer):
        stepped = optimizer.step(params, grads, opt_state)
        apart = getattr(optimizer, "steps_apart", False) and not _tree.traced()
        new_params, new_opt_state = where(
            bad, (params, opt_state), stepped, donate=donate, keep=keep, spent=apart
        )
    return new_params, new_opt_state


def _off_the_graph(optimizer: Optimizer) -> contextlib.AbstractContextManager[Any]:
    """As torch.optim: a step over parameters that require a gradient would else hold on to every
    step before it.
    """
    if _tree.traced() or getattr(optimizer, "differentiable", False):
        return contextlib.nullcontext()
    return torch.no_grad()


@outside_autocast()
def unscale_and_step(
    optimizer: Optimizer,
    scaler: HasScale,
    params: Tree,
    scaled_grads: Tree,
    opt_state: Any,
    max_norm: float | Tensor | None = None,
    clip_value: float | Tensor | None = None,
    group: Any = None,
    donate: bool = False,
    norm_type: float = 2.0,
    amax: bool = False,
) -> Stepped:
    """Equal to `unscale_and_check`, `clip_by_global_norm`, `clip_by_value` and `maybe_step` in
    turn, in the fewest passes over memory.

    `from_torch`'s Adam, AdamW, SGD and Adagrad need one read of the gradients and one pass for the
    rest. Flags, skips and counts are those of the parts; values too, bit for bit, but to 1e-6 with
    `max_norm` and these classes: unscaling and clipping are then one division, and a divisor beyond
    float32 skips the step. The sum of squares and the scale are read on a CPU in eager mode only.

    `donate`: `params`, `scaled_grads` and `opt_state` may be overwritten; the caller gives them up.
    Same bits. `max_norm=None` and `clip_value=None` leave that clipping out; `norm_type` as in
    `clip_by_global_norm`, `group` as in `unscale_and_check`. `amax`: tell `grad_amax` of the
    unscaled gradients too, from the same read, over `group`; for a rule that takes it.

    Returns `Stepped(params, opt_state, found_inf, grad_norm, grad_amax)`; `grad_norm` is `()` where
    `max_norm` is None (`inf` measures without clipping), `grad_amax` without `amax`.

    >>> import torch
    >>> from purescale import DynamicScale, from_torch
    >>> sgd, scaler = from_torch(torch.optim.SGD, lr=1.0), DynamicScale(init_scale=4.0).init()
    >>> params = {"w": torch.tensor([1.0])}
    >>> unscale_and_step(sgd, scaler, params, {"w": torch.tensor([2.0])}, sgd.init(params)).params
    {'w': tensor([0.5000])}
    """
    clip = checked(max_norm, clip_value, norm_type)
    out = skip_or_step(
        optimizer,
        params,
        scaled_grads,
        opt_state,
        clip,
        scaler.scale,
        group,
        donate=donate,
        spent=donate,
        keep=_tree.tensors(scaler),
        amax=amax,
    )
    if donate:
        _tree.poison((params, scaled_grads, opt_state), keep=(out, scaler, max_norm, clip_value))
    return out


def skip_or_step(
    optimizer: Optimizer,
    params: Tree,
    grads: Tree,
    opt_state: Any,
    clip: Clip,
    scale: Tensor,
    group: Any = None,
    *,
    scaled: bool = True,
    donate: bool,
    spent: bool,
    keep: Sequence[Tensor],
    known: Read | None = None,
    amax: bool = False,
) -> Stepped:
    """`unscale_and_step` of gradients still `scaled` or not, which may be overwritten where they
    are `spent`; writes into none of `keep`.

    `known`: what is known of the gradients already, with a norm where clipping asks for one.
    """
    # Bounds are looked at again for each launch.
    keep = [*keep, *(bound for bound in clip[:2] if isinstance(bound, Tensor))]
    # Everything is refused here, before anything is written in place.
    settings: dict[str, Any] = {"donate": donate, "spent": spent, "keep": keep}
    ask = getattr(optimizer, "ask", None)
    asked = None if ask is None else ask(params, grads, opt_state, **settings)
    plan = None if asked is None else asked.plan  # one that need not check
    formula = None if asked is None else asked.formula
    if formula is not None and scaled and group is None:
        out = _by_formula(formula, clip, scale, known, amax)
        if out is not None:
            return out
    if plan is None or (plan.gradients[:1] and plan.gradients[0].device != scale.device):
        leaves, structure = _tree.flatten(grads)
        check_grads(scale, grads, leaves)
        if clip.value is not None:
            check_ordered(grads, leaves)
        over = spread(optimizer, params, grads, opt_state)
        if over is not None:
            return _over_shards(optimizer, over, clip, scale, group, known, scaled, amax, settings)
        asked_too = {} if asked is None else {"asked": asked}
        plan = _planned(optimizer, params, grads, opt_state, **settings, **asked_too)
    grad_norm: Any = ()
    if plan is not None:
        # The plan was made before the gradients are read, which drives from the cache what Python
        # looks at.
        found_inf, norm, most, finite = facts(
            *(plan.gradients, clip, scale, known, group), scaled=scaled, dense=True, amax=amax
        )
        divisor = scale if scaled else None
        if clip.max_norm is not None:
            divisor, grad_norm = clip_divisor(plan.gradients, norm, clip.max_norm, divisor)
            # One that is not finite would turn gradients into 0.
            found_inf, finite = found_inf | ~torch.isfinite(divisor), False
        stepped = plan.run(None if finite else found_inf, Treatment(divisor, clip.value))
        said = told(grad_norm, found_inf), told(most, found_inf)
        return Stepped(stepped[0], stepped[1], found_inf, *said)
    problem = _check_step(optimizer, params, grads, opt_state)
    if asked is not None:
        optimizer.remember(asked, problem)  # type: ignore[attr-defined]
    if scaled:
        # Unscaling in place must not reach parameters, state or a rate that stand in the gradients'
        # memory. While compiling that cannot be seen, and nothing is gained: what is computed in
        # between is fused.
        others = [*_tree.tensors((params, opt_state, asked and asked.rates)), *keep]
        in_place = (
            spent
            and not torch.compiler.is_compiling()
            and all(_tree.writable(_tree.tensors(grads), others))
        )
        shards = _dtensor.shards(leaves)
        leaves = shards.back(_foreach.divide(shards.local, scale, donate=in_place))
    found_inf, norm, most, finite = facts(
        leaves, clip, scale, known, group, scaled=False, amax=amax
    )
    grads = structure.unflatten(leaves)
    if clip.max_norm is not None:
        grads, grad_norm = clip_to(grads, norm, clip.max_norm, donate=True)
    if clip.value is not None:
        grads = clip_by_value(grads, clip.value, donate=True)
    bad = False if finite else found_inf
    stepped = _maybe_step(optimizer, params, grads, opt_state, bad, donate=donate, keep=keep)
    return Stepped(*stepped, found_inf, told(grad_norm, found_inf), told(most, found_inf))


def _by_formula(
    plan: Any, clip: Clip, scale: Tensor, known: Read | None, amax: bool
) -> Stepped | None:
    """`skip_or_step` of gradients still scaled that are known to be finite, so that nothing need be
    chosen; `None` of others.
    """
    grads = plan.gradients
    if grads[:1] and grads[0].device != scale.device:
        return None  # to be refused
    if known is None:
        known = read(grads, None, scale, scaled=True, dense=True, amax=amax)
    if not known.finite:
        return None
    norm: Any = ()
    grads = plan.unscaled(scale)
    if clip.max_norm is not None:
        found = facts(grads, clip, scale, known, None, scaled=False, dense=True).norm
        grads, norm = clip_to(grads, found, clip.max_norm, donate=True)
    if clip.value is not None:
        grads = clip_by_value(grads, clip.value, donate=True)
    stepped = plan.run(grads)
    return Stepped(stepped[0], stepped[1], known.found_inf, norm, known.largest)


def _over_shards(
    optimizer: Optimizer,
    over: Spread,
    clip: Clip,
    scale: Tensor,
    group: Any,
    known: Read | None,
    scaled: bool,
    amax: bool,
    settings: dict[str, Any],
) -> Stepped:
    """`skip_or_step` of DTensors: what all ranks must know first, then that of its own shards."""
    over, scaled = (over.unscaled(scale), False) if scaled and over.is_sparse else (over, scaled)
    known = facts(over.gradients, clip, scale, known, group, scaled=scaled, amax=amax)
    out = skip_or_step(optimizer, *over[:3], clip, scale, scaled=scaled, known=known, **settings)
    stepped = over.back(out.params, out.opt_state)
    return Stepped(*stepped, out.found_inf, out.grad_norm, told(known.largest, out.found_inf))
