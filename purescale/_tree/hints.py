"""What a user is told: of a wrong name what stands for it here, of a field what `help` says."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Never, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Class = TypeVar("Class", bound=type)

_OF_VALUE_AND_GRAD = {
    "has_aux": "an option of jax.value_and_grad. Fix: return aux as a third value, `return loss, "
    "new_buffers, aux`",
    "argnums": "an option of jax.value_and_grad. Fix: one tree of all that is differentiated as "
    "params, `{'net': params, 'lr': lr}`",
}
_OF_CLIPPING = dict.fromkeys(
    ("max_grad_norm", "clip_grad_norm", "gradient_clip_val"),
    "the clipping of another trainer. Fix: `max_norm=1.0`",
)
_CLIP = (
    "Fix: `max_norm=1.0` of train_step, or `grads, norm = "
    "purescale.clip_by_global_norm(grads, 1.0)`"
)
_CLASS = "Fix: `purescale.from_torch(torch.optim.{}, lr=1e-3)`"
_COPY = "Fix: `purescale.clone(state)`"
_STATE_DICT = "Fix: `purescale.save(path, state)`, or `purescale.to_state_dict(state)`"
# For each function the keywords that it has not, for a class and the package the attributes.
HINTS = {
    "value_and_grad": _OF_VALUE_AND_GRAD,
    "train_step": {**_OF_VALUE_AND_GRAD, **_OF_CLIPPING},
    "unscale_and_step": _OF_CLIPPING,
    "jit": {
        "donate_argnums": "an option of jax.jit. Fix: `donate=(0,)`, the positions of the "
        "arguments that are donated",
        "static_argnums": "an option of jax.jit. Fix: close over what is static, "
        "`jit(functools.partial(step, size=3))`",
        "fullgraph": "an option of torch.compile. Fix: leave it out; a jitted function is always "
        "one graph",
    },
    "StepInfo": {
        "skipped": "Fix: `info.found_inf`, True if the step was skipped",
        "lr": "Fix: the rate that from_torch was given; of a schedule `schedule(count)`, with "
        "`count = state.opt_state.applied` of the state before the step; with in_state=('lr',) "
        "`state.opt_state.lr`",
    },
    "TrainState": {
        "to": "Fix: `model.to(device)` before make_functional; of a state that there is, "
        "`torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), state)`",
        "state_dict": _STATE_DICT,
        "load_state_dict": "Fix: `state = purescale.load(path, like=state)`, or `state = "
        "purescale.from_state_dict(d, like=state)`",
        "copy": _COPY,
        "clone": _COPY,
    },
    "purescale": {
        "GradScaler": "Fix: `rule = purescale.DynamicScale()` for train_step; by hand scale_loss, "
        "unscale_and_step and `scaler = rule.update(scaler, found_inf)`",
        "autocast": "Fix: torch.autocast inside of loss_fn, or a policy, `apply = "
        "purescale.with_policy(apply, 'compute=autocast(float16),output=float32')`",
        "clip_grad_norm": _CLIP,
        "clip_grad_norm_": _CLIP,
        "Adam": _CLASS.format("Adam"),
        "AdamW": _CLASS.format("AdamW"),
        "SGD": _CLASS.format("SGD"),
        "EMA": "Fix: `average = purescale.clone(params)`, then after each step `average = "
        "purescale.ema(average, params, 0.999)`",
        "scan": "Fix: `state, infos = purescale.scan_steps(purescale.jit(step), state, batches)`",
        "state_dict": _STATE_DICT,
        "copy": _COPY,
        "testing": "Fix: `import purescale.testing`, which needs hypothesis",
    },
}


def hint_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: a keyword that it has not is refused with its cure, if there is
    one in `HINTS`, else by the function or by Python.
    """
    hints = HINTS[function.__name__]

    @functools.wraps(function)
    def hinted(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name in hints:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}, "
                    f"{hints[name]}."
                )
        return function(*args, **kwargs)

    return hinted


def hint_attributes(owner: T) -> T:
    """Decorate a class, or call with a module: an attribute that it has not is the error of Python,
    with the cure in `HINTS` if there is one. Type checkers do not see it, and go on to refuse them.
    """
    title, is_class = owner.__name__, isinstance(owner, type)  # type: ignore[attr-defined]
    kind, hints = f"{title!r} object" if is_class else f"module {title!r}", HINTS[title]

    def missing(*instance_and_name: Any) -> Never:
        name = instance_and_name[-1]
        cure = f". {hints[name]}." if name in hints else ""
        raise AttributeError(f"{kind} has no attribute {name!r}{cure}")

    owner.__getattr__ = missing  # type: ignore[attr-defined]
    return owner


def document_fields(cls: Class) -> Class:
    """Decorate a NamedTuple: `help(cls.field)` is the entry under `Attributes:` in its docstring,
    where Python says "Alias for field number 6".
    """
    attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.M):
        getattr(cls, name).__doc__ = " ".join(text.split())
    return cls
