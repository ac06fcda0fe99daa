"""An optimizer from a class of torch.optim."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from .._torch_optim.formulas import formula_of
from .._torch_optim.param_group_optimizer import KernelOrFormulaOptimizer, ParamGroupOptimizer
from .._torch_optim.schedule import Schedule, ScheduleBy
from .._torch_optim.settings import Counts, OptimizerConfig, OptimizerSpec, Overrides
from .._torch_optim.user_class import UserClassOptimizer


def from_torch(
    cls: type[torch.optim.Optimizer],
    lr: float | Tensor | Schedule | None = None,
    overrides: Overrides | None = None,
    in_state: Sequence[str] = (),
    schedule_by: ScheduleBy = "applied",
    counts: Counts = "one",
    **settings: Any,
) -> ParamGroupOptimizer:
    """Equal to `opt = cls(params, lr=lr, **settings); opt.step()` on copies of everything: bit for
    bit where torch's fused kernel runs, to 1e-6 where the class's formula does. For half
    parameters it is equal to that step in float32, rounded to the dtypes that are kept.

    The result has `init(params)`, `step(params, grads, opt_state)`, `to_state_dict(opt_state)` and
    `from_state_dict(sd, params)`, in torch.optim's format, for any pytree of parameters. Step hooks
    do not run. `.backward()` can go through a step only with `differentiable=True`; without it, it
    is refused.

    A step uses torch's fused kernel if the class has one for the dtypes and device, in eager mode
    on a CPU torch's function of lists for five others (`torch.optim.nadam.nadam`), and otherwise
    the class's formula, which never syncs and can be compiled, mapped and differentiated. These
    agree to 1e-6 (Muon, which iterates in bfloat16, to 1e-2 of the update).

    Args:
        cls: A class of torch.optim, a subclass, or a class of your own. A class with a `step` of
            its own is called eagerly, on copies. It makes its slots in its first step. What changes
            must be in its `state`: a list or a dict that is an attribute is as before in each step.
            A step reads the flag of such a class, and waits for it on an accelerator.
        lr: A number, a 0-d tensor (which can be differentiated), or a schedule: a function from a
            count of steps, a 0-d int64 tensor, to the learning rate. `schedule_from_torch` makes
            one from a scheduler of torch. A negative number is refused, also from a schedule where
            the host can read it (on a CPU, in eager mode). A tensor that is given here, in
            `overrides` or in the state is not checked: a step with a negative rate goes up the
            gradient, which finite differences at 0 need.
        overrides: Settings for some parameters, by dotted name or glob, or by a tuple of these.
            `{("*.bias", "norm*"): {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}}`. A setting of a
            parameter is that of its last override with such a name, else the number in the state
            times its schedule, if it has these, else what is given here.
        in_state: Names of settings to keep in the state as 0-d float32 tensors, so that one
            compiled step serves every value and they can be vmapped, saved and differentiated. The
            rate is `opt_state.lr`, the others are in `opt_state.hyper`;
            `replace_settings(state, lr=...)` changes them. Each of these numbers may be a schedule,
            as `weight_decay=lambda count: 0.04 + 1e-4 * count`; the state then holds a factor of
            it, which starts at 1.
        schedule_by: What schedules count: `"applied"` steps, or by `"iteration"`, that is skipped
            steps too, as a loop of torch does that calls `scheduler.step()` once a batch or once an
            epoch. The count is `opt_state.iteration`, and a skipped step changes nothing else.
        counts: `"one"` counts the steps of all parameters together, in `opt_state.applied`, and a
            step refuses a gradient that is None if the class counts steps. `"each"` counts those of
            each parameter as torch does, in `opt_state.counts`: one whose gradient is None makes
            none, as where one optimizer trains two models in turn.
        settings: The settings of the class. If a flag of torch's implementations is named
            (`foreach`, `capturable`, `fused=False`), no fused kernel runs; with
            `differentiable=True` the formula does.

    Returns:
        An optimizer that holds settings and no state.

    Raises:
        TypeError, ValueError: If torch refuses a setting; if a schedule reads the value of the
            count, or stands for a setting that is not in the state; if a name in `in_state` is not
            a number of the formula. Also for parameters (give them to `init`), LBFGS and
            SparseAdam. `init` and `step` raise if a pattern in `overrides` matches no parameter;
            `step` raises before any work if the state does not fit the parameters.

    Example:
        >>> import torch
        >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
        >>> params = {"w": torch.tensor([1.0])}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.step(params, {"w": torch.tensor([1.0])}, state)
        >>> params, state.applied
        ({'w': tensor([0.5000])}, tensor(1))

    Source of the rules: torch.optim.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "from_torch was called inside of a compiled function, where torch's optimizers cannot "
            "be made. Fix: make the optimizer outside; a rate that the function is given goes "
            "through from_torch(..., in_state=('lr',)) and replace_settings(opt_state, lr=...)."
        )
    spec = spec_of_class(cls)
    return optimizer_of(
        OptimizerConfig(
            spec,
            lr,
            overrides or {},
            settings,
            in_state=in_state,
            schedule_by=schedule_by,
            counts=counts,
        )
    )


def optimizer_of(config: OptimizerConfig) -> ParamGroupOptimizer:
    """Return the optimizer with these settings."""
    return KernelOrFormulaOptimizer(config) if config.spec.formula else UserClassOptimizer(config)


# ---- the class -----------------------------------------------------------------------------------

_ANY_LR = 1e-3  # for torch to check in place of a schedule or a tensor


def spec_of_class(cls: Any) -> OptimizerSpec:
    """Return the spec of a class of torch.optim, or refuse what has no pure step."""
    _check_class(cls)
    parameters = inspect.signature(cls).parameters
    names = [name for name in parameters if name != "params"]
    default = parameters["lr"].default if "lr" in parameters else inspect.Parameter.empty

    def construct(probes: list[Tensor], settings: Mapping[str, Any]) -> Any:
        arguments = {name: value for name, value in settings.items() if name in names}
        if isinstance(arguments["lr"], Tensor) or callable(arguments["lr"]):
            arguments["lr"] = _ANY_LR
        with torch.device("cpu"):  # torch keeps step counts there, whatever the default device is
            return private.without_compiler(cls)(probes, **arguments)

    default_lr = None if default is inspect.Parameter.empty else default
    formula = formula_of(cls)
    return OptimizerSpec(cls.__name__, "from_torch", formula, cls, names, default_lr, construct)


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        got = repr(cls) if isinstance(cls, type) else f"an instance of {type(cls).__name__}"
        raise TypeError(
            f"from_torch takes a class of torch.optim, got {got}. Fix: "
            "from_torch(torch.optim.AdamW, lr=1e-3); for a live optimizer with its groups and its "
            "state `optimizer, opt_state = from_torch_optimizer(torch_optimizer, model)`."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss again in its step, so it is not a function of gradients. "
            "Fix: torch.optim.AdamW, or your own loop around LBFGS."
        )
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only and counts its steps in Python. Fix: SGD or "
            "Adagrad, which take sparse gradients here."
        )
