"""The report of a step, and those of many steps as one value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.autocast import outside_autocast
from .._tree.hints import document_fields, hint_attributes
from .._tree.scalars import short_repr
from .._tree.stacking import stacked


@document_fields
@hint_attributes
class StepInfo(NamedTuple):
    """The report of a step: 0-d tensors, and what `loss_fn` returns as aux, so that infos can be
    stacked. Reading one syncs; do it when you log.

    Attributes:
        loss: float32 [], float64 for a float64 loss. Unscaled, the weighted mean of the
            microbatches that count and are not dropped; with `window_size`, their sum divided by
            it.
        found_inf: bool []. True if the step was skipped, for an overflow or something else. That
            of `rule.update` is an overflow alone.
        scale: float32 []. The loss scale of this step.
        grad_norm: float32 [], float64 for float64 gradients. The norm of the averaged, unscaled
            gradients before clipping. Not finite if `found_inf`, unless `rejected`; `()` if
            `max_norm` is None.
        grad_amax: float32 []. The largest magnitude in these gradients, of a complex number that of
            its larger part, finite or not as `grad_norm`; `()` if the rule does not take amax.
        retries: int32 []. How often the window was run again.
        aux: A tuple with one entry a microbatch: what `loss_fn` returned as its third value,
            `(aux,)` for one microbatch. `()` if it returns two values.
        rejected: bool []. True if the guard alone skipped the step; `()` without a guard.
    """

    loss: Tensor
    found_inf: Tensor
    scale: Tensor
    grad_norm: Tensor | Any
    grad_amax: Tensor | Any
    retries: Tensor
    aux: tuple[Any, ...]
    rejected: Tensor | Any = ()


@outside_autocast()
def stack_infos(infos: Sequence[StepInfo]) -> StepInfo:
    """Equal to `StepInfo(*(torch.stack(values) for values in zip(*infos)))`, leaf by leaf: a run as
    one value, each tensor with one dimension more, [T] in front.

    Reads no value, so keep infos as they come and look at them now and then:

        infos += [info]                                             # each step
        if step % 100 == 0:
            run = stack_infos(infos)
            print(f"{step}: loss {run.loss[-100:].mean():.4f}, scale {run.scale[-1]:g}, "
                  f"{run.found_inf.sum()} skipped, norm {run.grad_norm[-1]:.3g}")

    To see what the scale follows, five lines:

        run = stack_infos(infos)
        plt.semilogy(run.scale, base=2, drawstyle="steps-post", label="scale")
        plt.semilogy(65504 / run.grad_amax, base=2, label="above this float16 overflows")
        plt.vlines(torch.where(run.found_inf)[0], *plt.ylim(), linestyles=":", label="skipped")
        plt.xlabel("step"), plt.legend(), plt.savefig("scale.png")

    Args:
        infos: A list of `StepInfo`, alike in what they have: `aux` has the same nesting of tensors
            of the same shapes in each, and what is not a tensor is equal in all.

    Returns:
        A `StepInfo`. Fields that are `()` stay `()`.

    Raises:
        ValueError: The list is empty, or infos differ in what they have or in shapes.
        TypeError: An item is not a `StepInfo`.

    Example:
        >>> import torch
        >>> fields = dict(found_inf=torch.tensor(False), scale=torch.tensor(8.0), grad_norm=())
        >>> fields |= dict(grad_amax=(), retries=torch.tensor(0), aux=())
        >>> infos = [StepInfo(loss=torch.tensor(loss), **fields) for loss in (2.0, 1.0)]
        >>> run = stack_infos(infos)
        >>> run.loss, run.grad_norm
        (tensor([2., 1.]), ())
    """
    if isinstance(infos, StepInfo) or not isinstance(infos, Iterable):
        got = "one StepInfo" if isinstance(infos, StepInfo) else short_repr(infos)
        raise TypeError(f"stack_infos takes a list, got {got}. Fix: `infos += [info]`.")
    infos = list(infos)
    if not infos:
        raise ValueError("stack_infos got no infos. Fix: `infos += [info]` after each step.")
    for index, info in enumerate(infos):
        if not isinstance(info, StepInfo):
            raise TypeError(
                f"infos[{index}] is {short_repr(info)}; expected a StepInfo. Fix: `state, info = "
                "train_step(...)`, then `infos += [info]`, not `infos += info`."
            )
    cause = (
        "Likely cause: a smaller last batch. Fix: return a mean or a sum in loss_fn, or "
        "`info._replace(aux=())` before stacking."
    )
    run: StepInfo = stacked("infos", infos, cause)
    return run
