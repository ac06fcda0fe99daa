"""What steps have to tell, one by one and over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.autocast import outside_autocast
from .._tree import tree as _tree
from .._tree.scalars import short_repr
from .._tree.stack import stacked


class StepInfo(NamedTuple):
    """What a step has to tell: 0-d tensors, so that infos can be stacked. Reading one syncs; do it
    when you log.
    """

    # float32 (float64 for a float64 loss): unscaled, the weighted mean of the microbatches that
    # count
    loss: Tensor
    found_inf: Tensor  # bool: the step was skipped
    scale: Tensor  # float32: the scale that was used
    # float32, before clipping; not finite where found_inf, unless rejected; () where max_norm is
    # None
    grad_norm: Any
    # float32, as grad_norm, the largest magnitude; () where the rule does not take amax
    grad_amax: Any
    retries: Tensor  # int32: how often the window was gone through again
    aux: Any  # what loss_fn returned third, one a microbatch; () where it returns two
    # bool: the guard skipped the step, and nothing else did; () without a guard
    rejected: Any = ()


@outside_autocast()
def stack_infos(infos: Sequence[StepInfo]) -> StepInfo:
    """Equal to `StepInfo(*(torch.stack(values) for values in zip(*infos)))`, leaf by leaf: a run as
    one value, each tensor with one dimension more, [T] in front.

    What is absent stays `()`. `aux` is stacked as everything else: the same nesting of tensors of
    the same shapes in each step. Reads no value, so keep infos as they come and look at them now
    and then:

        infos += [info]                                             # each step
        if step % 100 == 0:
            run = stack_infos(infos)
            print(f"{step}: loss {run.loss[-100:].mean():.4f}, scale {run.scale[-1]:g}, "
                  f"{run.found_inf.sum()} skipped, norm {run.grad_norm[-1]:.3g}")

    and to see what the scale follows, five lines:

        run = stack_infos(infos)
        plt.semilogy(run.scale, base=2, drawstyle="steps-post", label="scale")
        plt.semilogy(65504 / run.grad_amax, base=2, label="above this float16 overflows")
        plt.vlines(torch.where(run.found_inf)[0], *plt.ylim(), linestyles=":", label="skipped")
        plt.xlabel("step"), plt.legend(), plt.savefig("scale.png")

    Raises `ValueError` for an empty list and for infos that differ in what they have or in shapes,
    `TypeError` for what is no StepInfo and for an `aux` that holds something else than tensors.

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
                f"infos[{index}] is {short_repr(info)}; expected a StepInfo. Fix: what train_step "
                "returns second; for a state, `infos += [info]` and not `infos += info`."
            )
        for place, leaf in enumerate(_tree.flatten(info)[0]):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{_tree.path(info, f'infos[{index}]', place)} is {short_repr(leaf)}; only "
                    "tensors are stacked. Fix: `torch.tensor(...)` of it in loss_fn, or "
                    "`info._replace(aux=())`."
                )
    cause = (
        "Likely cause: a last batch that is smaller. Fix: a mean or a sum in loss_fn, or "
        "`info._replace(aux=())` before they are stacked."
    )
    run: StepInfo = stacked("infos", infos, cause)
    return run
