"""The classes of torch.optim as mathematics: the specification of a step.

A formula is a function as `from_formula` takes it, `step(param, grad, slots, settings, t)`, with
torch's names of slots and settings. It reads no value and writes into nothing, so each setting may
be a tensor, and a step can be compiled, mapped and differentiated. Half leaves come in float32,
complex ones as reals, counts in float64 where the device has it. Unlike one of `from_formula`, it
may leave out a slot, which then stays as it was, and it returns nothing that it was given.

`t` is the number of the step, 1 in the first. Several leaves can be stepped as one
(`formula_step.py`), with `t` and other numbers of each in a vector, so a number that follows from
them, such as `1 - beta1**t`, goes through `_expand` before it meets the elements of a leaf.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tracing import is_on_a_graph, under_derivative, under_transform

Settings = Mapping[str, Any]
LeafSlots = dict[str, Tensor]  # the slots of one parameter
NewLeaf = tuple[Tensor, LeafSlots]

# Of leaves that are stepped as one and have numbers of their own: the number of elements of each.
SIZES = "sizes"


# ---- the formulas --------------------------------------------------------------------------------


def sgd(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Sutskever et al., On the importance of initialization and momentum (2013), as torch has it:
    the first buffer is the gradient.
    """
    grad, momentum = _add_l2_penalty(param, grad, settings), settings["momentum"]
    if _is_static_zero(momentum):
        return param - settings["lr"] * grad, {}
    dampening = settings["dampening"]
    if isinstance(momentum, Tensor):  # without momentum there is no dampening
        dampening = dampening * (momentum != 0)
    m = momentum * slots["momentum_buffer"] + (1 - dampening) * grad
    if not _is_static_zero(settings["dampening"]):  # ignored in the step that makes the buffer
        m = torch.where(_expand(t == 1, param, slots), grad, m)
    direction = grad + momentum * m if settings["nesterov"] else m
    return param - settings["lr"] * direction, {"momentum_buffer": m}


def adam(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Kingma and Ba, Adam (2015); Reddi et al., On the convergence of Adam and beyond (2018), with
    `amsgrad`; Loshchilov and Hutter, Decoupled weight decay regularization (2019), for AdamW.
    """
    beta1, beta2 = settings["betas"]
    param, grad = _apply_weight_decay(param, grad, settings)
    m = _ema(slots["exp_avg"], grad, beta1)
    v = _ema_square(slots["exp_avg_sq"], grad, beta2)
    new = {"exp_avg": m, "exp_avg_sq": v}
    if settings["amsgrad"]:
        new["max_exp_avg_sq"] = v = torch.maximum(slots["max_exp_avg_sq"], v)
    rate = _expand(settings["lr"] / (1 - beta1**t), param, slots)
    denominator = _safe_sqrt(v) / _expand((1 - beta2**t).sqrt(), param, slots) + settings["eps"]
    return param - rate * m / denominator, new


def adagrad(
    param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
) -> NewLeaf:
    """Duchi et al., Adaptive subgradient methods (2011), with a rate that decays."""
    grad = _add_l2_penalty(param, grad, settings)
    total = slots["sum"] + grad * grad
    rate = _expand(settings["lr"] / (1 + (t - 1) * settings["lr_decay"]), param, slots)
    return param - rate * grad / (_safe_sqrt(total) + settings["eps"]), {"sum": total}


def rmsprop(
    param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
) -> NewLeaf:
    """Tieleman and Hinton, lecture 6.5 (2012); `centered` by Graves (2013)."""
    grad = _add_l2_penalty(param, grad, settings)
    v = _ema_square(slots["square_avg"], grad, settings["alpha"])
    new, variance = {"square_avg": v}, v
    if settings["centered"]:
        new["grad_avg"] = mean = _ema(slots["grad_avg"], grad, settings["alpha"])
        variance = v - mean * mean
    direction = grad / (_safe_sqrt(variance) + settings["eps"])
    if not _is_static_zero(settings["momentum"]):
        direction = settings["momentum"] * slots["momentum_buffer"] + direction
        new["momentum_buffer"] = direction
    return param - settings["lr"] * direction, new


def adadelta(
    param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
) -> NewLeaf:
    """Zeiler, ADADELTA (2012)."""
    grad = _add_l2_penalty(param, grad, settings)
    v = _ema_square(slots["square_avg"], grad, settings["rho"])
    delta = (
        _safe_sqrt(slots["acc_delta"] + settings["eps"]) / _safe_sqrt(v + settings["eps"]) * grad
    )
    deltas = _ema_square(slots["acc_delta"], delta, settings["rho"])
    return param - settings["lr"] * delta, {"square_avg": v, "acc_delta": deltas}


def adamax(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Kingma and Ba, Adam (2015), section 7.1."""
    beta1, beta2 = settings["betas"]
    grad = _add_l2_penalty(param, grad, settings)
    m = _ema(slots["exp_avg"], grad, beta1)
    u = torch.maximum(beta2 * slots["exp_inf"], grad.abs() + settings["eps"])
    rate = _expand(settings["lr"] / (1 - beta1**t), param, slots)
    return param - rate * m / u, {"exp_avg": m, "exp_inf": u}


def nadam(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Dozat, Incorporating Nesterov momentum into Adam (2016)."""
    beta1, beta2 = settings["betas"]
    param, grad = _apply_weight_decay(param, grad, settings)
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (n * settings["momentum_decay"])) for n in (t, t + 1))
    product = slots["mu_product"] * mu
    m = _ema(slots["exp_avg"], grad, beta1)
    v = _ema_square(slots["exp_avg_sq"], grad, beta2)
    denominator = _safe_sqrt(v / _expand(1 - beta2**t, param, slots)) + settings["eps"]
    of_g = _expand(settings["lr"] * (1 - mu) / (1 - product), param, slots)
    of_m = _expand(settings["lr"] * mu_next / (1 - product * mu_next), param, slots)
    new = {"mu_product": product, "exp_avg": m, "exp_avg_sq": v}
    return param - of_g * (grad / denominator) - of_m * (m / denominator), new


def radam(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Liu et al., On the variance of the adaptive learning rate and beyond (2020)."""
    beta1, beta2 = settings["betas"]
    param, grad = _apply_weight_decay(param, grad, settings)
    m = _ema(slots["exp_avg"], grad, beta1)
    v = _ema_square(slots["exp_avg_sq"], grad, beta2)
    # The length of a simple moving average of the same centre, now and in the limit.
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * t * beta2**t / (1 - beta2**t)
    late = length > 5
    long = torch.where(late, length, 6.0)
    of_variance = (long - 4) * (long - 2) * limit / ((limit - 4) * (limit - 2) * long)
    rectified = (of_variance.abs() * (1 - beta2**t)).sqrt()
    rectified = _expand(rectified, param, slots) / (_safe_sqrt(v) + settings["eps"])
    scale = torch.where(_expand(late, param, slots), rectified, 1.0)
    rate = _expand(settings["lr"] / (1 - beta1**t), param, slots)
    return param - rate * m * scale, {"exp_avg": m, "exp_avg_sq": v}


def asgd(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992)."""
    lr, lambd, ax = settings["lr"], settings["lambd"], slots["ax"]
    grad = _add_l2_penalty(param, grad, settings)
    eta, mu = torch.where(t == 1, lr, slots["eta"]), _expand(slots["mu"], param, slots)
    shrink = _expand(1 - lambd * eta, param, slots)
    param = param * shrink - _expand(eta, param, slots) * grad
    ax = torch.where(mu == 1, param, ax + mu * (param - ax))
    eta = lr / (1 + lambd * lr * t) ** settings["alpha"]
    return param, {"eta": eta, "mu": 1 / torch.clamp(t - settings["t0"], min=1), "ax": ax}


def rprop(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Riedmiller and Braun, A direct adaptive method for faster backpropagation learning (1993)."""
    size, is_first = slots["step_size"], _expand(t == 1, param, slots)
    size = torch.where(is_first, torch.ones_like(size) * settings["lr"], size)
    shrink, grow = settings["etas"]
    least, most = settings["step_sizes"]
    turn = grad * slots["prev"]
    size = torch.where(turn > 0, size * grow, torch.where(turn < 0, size * shrink, size))
    size = torch.clamp(size, least, most)
    grad = torch.where(turn < 0, 0.0, grad)
    return param - grad.sign() * size, {"prev": grad, "step_size": size}


def muon(param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor) -> NewLeaf:
    """Jordan et al., Muon (2024): the momentum made orthogonal by Newton and Schulz, in
    bfloat16.
    """
    m = _ema(slots["momentum_buffer"], grad, settings["momentum"])
    x = (_ema(grad, m, 1 - settings["momentum"]) if settings["nesterov"] else m).bfloat16()
    rows, columns = param.shape
    x = x.mT if rows > columns else x
    x = x / x.norm().clamp(min=settings["eps"])
    a, b, c = settings["ns_coefficients"]
    for _ in range(settings["ns_steps"]):
        gram = x @ x.mT
        x = _scaled_sum(a, x, 1, _scaled_sum(b, gram, c, gram, gram), x)
    x = x.mT if rows > columns else x
    factor = {"match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}.get(
        settings["adjust_lr_fn"], max(1, rows / columns) ** 0.5
    )
    if not _is_static_zero(settings["weight_decay"]):
        param = param * (1 - settings["lr"] * settings["weight_decay"])
    return param - settings["lr"] * factor * x.to(param.dtype), {"momentum_buffer": m}


def adafactor(
    param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
) -> NewLeaf:
    """Shazeer and Stern, Adafactor (2018), without momentum, as torch has it."""
    eps = torch.finfo(param.dtype).eps if settings["eps"][0] is None else settings["eps"][0]
    size, beta = max(param.numel(), 1) ** 0.5, 1 - t ** settings["beta2_decay"]
    rate = torch.clamp(_safe_sqrt((param * param).sum()) / size, min=settings["eps"][1])
    rate = rate * torch.clamp(t**-0.5, max=settings["lr"])
    if not _is_static_zero(settings["weight_decay"]):
        param = param * (1 - settings["lr"] * settings["weight_decay"])
    if "variance" in slots:
        v = _ema(slots["variance"], grad * grad, beta.to(grad.dtype))
        new = {"variance": v}
    else:
        row = _ema(slots["row_var"], (grad * grad).mean(-1, keepdim=True), beta.to(grad.dtype))
        col = _ema(slots["col_var"], (grad * grad).mean(-2, keepdim=True), beta.to(grad.dtype))
        new = {"row_var": row, "col_var": col}
        v = row @ col / row.mean(-2, keepdim=True).clamp(min=eps)
    update = grad * v.clamp(min=eps * eps).rsqrt()
    length = _safe_sqrt((update * update).sum()) / (size * settings["d"])
    return param - (rate / length.clamp(min=1)).to(param.dtype) * update, new


# ---- what they share -----------------------------------------------------------------------------


def _expand(number: Tensor, param: Tensor, slots: LeafSlots) -> Tensor:
    """Return a number of each leaf as a number of each element, in the dtype of `param`."""
    number = number if number.dtype is torch.bool else number.to(param.dtype)
    if SIZES not in slots:
        return number
    return torch.repeat_interleave(number, slots[SIZES], output_size=param.numel())


def _is_static_zero(number: Any) -> bool:
    return not isinstance(number, Tensor) and number == 0


def _add_l2_penalty(param: Tensor, grad: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the loss with an L2 penalty."""
    weight_decay = settings["weight_decay"]
    return grad if _is_static_zero(weight_decay) else grad + weight_decay * param


def _apply_weight_decay(param: Tensor, grad: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return parameter and gradient after a weight decay of either kind."""
    if settings["decoupled_weight_decay"] and not _is_static_zero(settings["weight_decay"]):
        return param * (1 - settings["lr"] * settings["weight_decay"]), grad
    if settings["decoupled_weight_decay"]:
        return param, grad
    return param, _add_l2_penalty(param, grad, settings)


def _ema(old: Tensor, new: Tensor, beta: Any) -> Tensor:
    """Return an exponential moving average."""
    return beta * old + (1 - beta) * new


def _ema_square(old: Tensor, new: Tensor, beta: Any) -> Tensor:
    """Return an exponential moving average of squares. A square alone may be out of range."""
    return beta * old + (1 - beta) * new * new


def _safe_sqrt(square: Tensor) -> Tensor:
    """Return the square root, with the derivative 0 at 0: torch's is inf there, and 0 * inf is
    NaN.
    """
    if not (under_derivative() or is_on_a_graph([square])):
        return square.sqrt()
    is_zero = square == 0
    return torch.where(is_zero, square.detach(), torch.where(is_zero, 1, square).sqrt())


def _scaled_sum(beta: Any, x: Tensor, alpha: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return `beta * x + alpha * (a @ b)`, rounded once. vmap would round in between, which Muon's
    iteration amplifies to 3 to 9 % of its update.
    """
    if under_transform() or isinstance(beta, Tensor):
        return (beta * x.float() + alpha * (a.float() @ b.float())).to(x.dtype)
    return torch.addmm(x, a, b, beta=beta, alpha=alpha)


# ---- the classes ---------------------------------------------------------------------------------


class Formula(NamedTuple):
    """The mathematics of an optimizer."""

    step: Callable[[Tensor, Tensor, LeafSlots, Settings, Tensor], NewLeaf]
    # the slots of a parameter with these settings before its first step
    init_slots: Callable[[Tensor, Settings], LeafSlots]
    elementwise: bool = True  # elements update independently, so that a part can be stepped alone
    not_in_state: tuple[str, ...] = ()  # the settings that a state cannot hold
    has_step_slot: bool = False  # torch counts the steps of each parameter, in a slot `step`
    makes_buffer_in_first_step: bool = False  # torch takes a step without it for the first

    def needs_counts(self, settings: Settings) -> bool:
        """Return True if the number of a parameter's own steps is a part of its state."""
        if self.makes_buffer_in_first_step:
            return not (
                _is_static_zero(settings["momentum"]) or _is_static_zero(settings["dampening"])
            )
        return self.has_step_slot


def formula_of(cls: Any) -> Formula | None:
    """Return the formula of a class of torch.optim, or of a subclass that keeps its methods; None
    for any other class, which has a step of its own.
    """
    for base, formula in _FORMULAS.items():
        if issubclass(cls, base):
            classes = cls.__mro__[: cls.__mro__.index(base)]
            # AdamW is a subclass of Adam, and torch wraps `step` in each subclass.
            names = {name for each in classes for name in vars(each) if not name.startswith("__")}
            kept = all(_is_kept(name, cls, base) for name in names)
            return formula if kept else None
    return None


def _is_kept(name: str, cls: Any, base: Any) -> bool:
    method, original = getattr(cls, name), getattr(base, name, None)
    if original is None or not inspect.isfunction(inspect.unwrap(original)):
        return True
    return inspect.unwrap(method) is inspect.unwrap(original)


def filled_like(like: Tensor, number: Any) -> Tensor:
    """Return a tensor like this one, full of a number, which a complex one has in both parts."""
    if not isinstance(number, Tensor):
        return torch.full_like(like, complex(number, number) if like.is_complex() else number)
    filled = torch.ones_like(like.real) * number
    return (torch.complex(filled, filled) if like.is_complex() else filled).to(like.dtype)


def _slots(
    param: Tensor, moments: Mapping[str, Any], numbers: Mapping[str, Any] | None = None
) -> LeafSlots:
    """Return these moments in the shape of the parameter, and these numbers as 0-d tensors."""
    # A step of a rate that is a tensor can be differentiated.
    number = torch.zeros((), dtype=torch.float32, device=param.device)
    return {
        **{name: filled_like(number, first) for name, first in (numbers or {}).items()},
        **{name: filled_like(param, first) for name, first in moments.items()},
    }


def _with_moments(*names: str, **numbers: float) -> Callable[[Tensor, Settings], LeafSlots]:
    return lambda param, settings: _slots(param, dict.fromkeys(names, 0.0), numbers)


def _sgd_slots(param: Tensor, settings: Settings) -> LeafSlots:
    if settings["momentum"] == 0:
        return {}
    # `momentum * -0.0 + grad` is `grad`, as torch's first buffer is, also for -0.0.
    return _slots(param, {"momentum_buffer": -0.0})


def _adam_slots(param: Tensor, settings: Settings) -> LeafSlots:
    largest = ("max_exp_avg_sq",) if settings["amsgrad"] else ()
    return _with_moments("exp_avg", "exp_avg_sq", *largest)(param, settings)


def _adagrad_slots(param: Tensor, settings: Settings) -> LeafSlots:
    return _slots(param, {"sum": settings["initial_accumulator_value"]})


def _rmsprop_slots(param: Tensor, settings: Settings) -> LeafSlots:
    momentum = ("momentum_buffer",) if settings["momentum"] > 0 else ()
    mean = ("grad_avg",) if settings["centered"] else ()
    return _with_moments("square_avg", *momentum, *mean)(param, settings)


def _asgd_slots(param: Tensor, settings: Settings) -> LeafSlots:
    return _slots(param, {"ax": 0.0}, {"eta": settings["lr"], "mu": 1.0})


def _rprop_slots(param: Tensor, settings: Settings) -> LeafSlots:
    return _slots(param, {"prev": 0.0, "step_size": settings["lr"]})


def _adafactor_slots(param: Tensor, settings: Settings) -> LeafSlots:
    if param.ndim < 2:
        return _with_moments("variance")(param, settings)
    shapes = {"row_var": (*param.shape[:-1], 1), "col_var": (*param.shape[:-2], 1, param.shape[-1])}
    return {name: param.new_zeros(shape) for name, shape in shapes.items()}


_FORMULAS: dict[Any, Formula] = {
    torch.optim.SGD: Formula(sgd, _sgd_slots, makes_buffer_in_first_step=True),
    torch.optim.Adam: Formula(adam, _adam_slots, has_step_slot=True),  # and AdamW, its subclass
    torch.optim.Adagrad: Formula(
        adagrad, _adagrad_slots, not_in_state=("initial_accumulator_value",), has_step_slot=True
    ),
    torch.optim.RMSprop: Formula(rmsprop, _rmsprop_slots, has_step_slot=True),
    torch.optim.Adadelta: Formula(
        adadelta, _with_moments("square_avg", "acc_delta"), has_step_slot=True
    ),
    torch.optim.Adamax: Formula(adamax, _with_moments("exp_avg", "exp_inf"), has_step_slot=True),
    torch.optim.NAdam: Formula(
        nadam, _with_moments("exp_avg", "exp_avg_sq", mu_product=1.0), has_step_slot=True
    ),
    torch.optim.RAdam: Formula(radam, _with_moments("exp_avg", "exp_avg_sq"), has_step_slot=True),
    torch.optim.ASGD: Formula(asgd, _asgd_slots, has_step_slot=True),
    # Its rate is what its step sizes start from, which are in the state already.
    torch.optim.Rprop: Formula(rprop, _rprop_slots, not_in_state=("lr",), has_step_slot=True),
    torch.optim.Muon: Formula(
        muon, _with_moments("momentum_buffer"), elementwise=False, not_in_state=("ns_steps",)
    ),
    torch.optim.Adafactor: Formula(
        adafactor, _adafactor_slots, elementwise=False, has_step_slot=True
    ),
}
