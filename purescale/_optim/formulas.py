"""Every class of torch.optim as mathematics: the specification of a step.

A formula is a function of one leaf, `(p, g, entry, h) -> (p, entry)`: parameter, gradient, slots by
torch's names, and `Hyperparameters`. It reads no value and writes into nothing, so each
hyperparameter may be a tensor, and a step can be compiled, mapped and differentiated. Half leaves
come in float32, complex ones as reals, counts in float64 where the device has it.

A number that follows from a count, such as `1 - beta1**t`, goes through `h.expand` before it meets
the elements of a leaf, because several leaves can be stepped as one (`formula_step.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tracing import is_on_a_graph, under_derivative, under_transform

Entry = dict[str, Tensor]
NewLeaf = tuple[Tensor, Entry]

# A slot of SGD, which torch does not have: True until the parameter has a momentum buffer.
FIRST_STEP = "is_first_step"


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The numbers that a formula reads beside a leaf. Each setting is an attribute, by its name."""

    settings: Mapping[str, Any]
    t: Tensor  # the number of the step: one more than were applied
    expand: Callable[[Any], Tensor]  # from numbers of leaves to numbers of their elements

    def __getattr__(self, name: str) -> Any:
        try:
            return self.settings[name]
        except KeyError:
            raise AttributeError(name) from None


# ---- the formulas --------------------------------------------------------------------------------


def sgd(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Sutskever et al., On the importance of initialization and momentum (2013), as torch has it:
    the first buffer is the gradient.
    """
    g = _decayed(p, g, h)
    if _is_zero(h.momentum):
        return p - h.lr * g, {}
    new = {}
    dampening: Any = h.dampening
    if isinstance(h.momentum, Tensor):  # without momentum there is no dampening
        dampening = dampening * (h.momentum != 0)
    m = h.momentum * entry["momentum_buffer"] + (1 - dampening) * g
    if FIRST_STEP in entry:
        m = torch.where(h.expand(entry[FIRST_STEP]), g, m)
        new[FIRST_STEP] = torch.zeros_like(entry[FIRST_STEP])
    direction = g + h.momentum * m if h.nesterov else m
    return p - h.lr * direction, {"momentum_buffer": m, **new}


def adam(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Kingma and Ba, Adam (2015); Reddi et al., On the convergence of Adam and beyond (2018), with
    `amsgrad`; Loshchilov and Hutter, Decoupled weight decay regularization (2019), for AdamW.
    """
    beta1, beta2 = h.betas
    t = entry["step"] + 1
    p, g = _decoupled(p, g, h)
    m = _average(entry["exp_avg"], g, beta1)
    v = _average_square(entry["exp_avg_sq"], g, beta2)
    new = {"step": t, "exp_avg": m, "exp_avg_sq": v}
    if h.amsgrad:
        new["max_exp_avg_sq"] = v = torch.maximum(entry["max_exp_avg_sq"], v)
    denominator = _root(v) / h.expand((1 - beta2**t).sqrt()) + h.eps
    return p - h.expand(h.lr / (1 - beta1**t)) * m / denominator, new


def adagrad(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Duchi et al., Adaptive subgradient methods (2011), with a rate that decays."""
    t, g = entry["step"] + 1, _decayed(p, g, h)
    total = entry["sum"] + g * g
    rate = h.expand(h.lr / (1 + (t - 1) * h.lr_decay))
    return p - rate * g / (_root(total) + h.eps), {"step": t, "sum": total}


def rmsprop(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Tieleman and Hinton, lecture 6.5 (2012); `centered` by Graves (2013)."""
    g = _decayed(p, g, h)
    v = _average_square(entry["square_avg"], g, h.alpha)
    new, variance = {"step": entry["step"] + 1, "square_avg": v}, v
    if h.centered:
        new["grad_avg"] = mean = _average(entry["grad_avg"], g, h.alpha)
        variance = v - mean * mean
    direction = g / (_root(variance) + h.eps)
    if not _is_zero(h.momentum):
        direction = h.momentum * entry["momentum_buffer"] + direction
        new["momentum_buffer"] = direction
    return p - h.lr * direction, new


def adadelta(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Zeiler, ADADELTA (2012)."""
    g = _decayed(p, g, h)
    v = _average_square(entry["square_avg"], g, h.rho)
    delta = _root(entry["acc_delta"] + h.eps) / _root(v + h.eps) * g
    deltas = _average_square(entry["acc_delta"], delta, h.rho)
    return p - h.lr * delta, {"step": entry["step"] + 1, "square_avg": v, "acc_delta": deltas}


def adamax(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Kingma and Ba, Adam (2015), section 7.1."""
    beta1, beta2 = h.betas
    t, g = entry["step"] + 1, _decayed(p, g, h)
    m = _average(entry["exp_avg"], g, beta1)
    u = torch.maximum(beta2 * entry["exp_inf"], g.abs() + h.eps)
    return p - h.expand(h.lr / (1 - beta1**t)) * m / u, {"step": t, "exp_avg": m, "exp_inf": u}


def nadam(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Dozat, Incorporating Nesterov momentum into Adam (2016)."""
    beta1, beta2 = h.betas
    t = entry["step"] + 1
    p, g = _decoupled(p, g, h)
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (n * h.momentum_decay)) for n in (t, t + 1))
    product = entry["mu_product"] * mu
    m = _average(entry["exp_avg"], g, beta1)
    v = _average_square(entry["exp_avg_sq"], g, beta2)
    denominator = _root(v / h.expand(1 - beta2**t)) + h.eps
    of_g = h.expand(h.lr * (1 - mu) / (1 - product))
    of_m = h.expand(h.lr * mu_next / (1 - product * mu_next))
    new = {"step": t, "mu_product": product, "exp_avg": m, "exp_avg_sq": v}
    return p - of_g * (g / denominator) - of_m * (m / denominator), new


def radam(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Liu et al., On the variance of the adaptive learning rate and beyond (2020)."""
    beta1, beta2 = h.betas
    t = entry["step"] + 1
    p, g = _decoupled(p, g, h)
    m = _average(entry["exp_avg"], g, beta1)
    v = _average_square(entry["exp_avg_sq"], g, beta2)
    # The length of a simple moving average of the same centre, now and in the limit.
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * t * beta2**t / (1 - beta2**t)
    late = length > 5
    long = torch.where(late, length, 6.0)
    of_variance = (long - 4) * (long - 2) * limit / ((limit - 4) * (limit - 2) * long)
    rectified = (of_variance.abs() * (1 - beta2**t)).sqrt()
    scale = torch.where(h.expand(late), h.expand(rectified) / (_root(v) + h.eps), 1.0)
    step = h.expand(h.lr / (1 - beta1**t)) * m * scale
    return p - step, {"step": t, "exp_avg": m, "exp_avg_sq": v}


def asgd(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992)."""
    t, g = entry["step"] + 1, _decayed(p, g, h)
    eta, mu = torch.where(t == 1, h.lr, entry["eta"]), entry["mu"]
    p = p * h.expand(1 - h.lambd * eta) - h.expand(eta) * g
    ax = torch.where(h.expand(mu == 1), p, entry["ax"] + h.expand(mu) * (p - entry["ax"]))
    eta = h.lr / (1 + h.lambd * h.lr * t) ** h.alpha
    mu = 1 / torch.clamp(t - h.t0, min=1)
    return p, {"step": t, "eta": eta, "mu": mu, "ax": ax}


def rprop(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Riedmiller and Braun, A direct adaptive method for faster backpropagation learning (1993)."""
    t, size = entry["step"] + 1, entry["step_size"]
    size = torch.where(h.expand(t == 1), torch.ones_like(size) * h.lr, size)
    shrink, grow = h.etas
    least, most = h.step_sizes
    turn = g * entry["prev"]
    size = torch.where(turn > 0, size * grow, torch.where(turn < 0, size * shrink, size))
    size = torch.clamp(size, least, most)
    g = torch.where(turn < 0, 0.0, g)
    return p - g.sign() * size, {"step": t, "prev": g, "step_size": size}


def muon(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Jordan et al., Muon (2024): the momentum made orthogonal by Newton and Schulz, in
    bfloat16.
    """
    m = _average(entry["momentum_buffer"], g, h.momentum)
    x = (_average(g, m, 1 - h.momentum) if h.nesterov else m).bfloat16()
    rows, columns = p.shape
    x = x.mT if rows > columns else x
    x = x / x.norm().clamp(min=h.eps)
    a, b, c = h.ns_coefficients
    for _ in range(h.ns_steps):
        gram = x @ x.mT
        x = _scaled_sum(a, x, 1, _scaled_sum(b, gram, c, gram, gram), x)
    x = x.mT if rows > columns else x
    factor = {"match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}.get(
        h.adjust_lr_fn, max(1, rows / columns) ** 0.5
    )
    if not _is_zero(h.weight_decay):
        p = p * (1 - h.lr * h.weight_decay)
    return p - h.lr * factor * x.to(p.dtype), {"momentum_buffer": m}


def adafactor(p: Tensor, g: Tensor, entry: Entry, h: Any) -> NewLeaf:
    """Shazeer and Stern, Adafactor (2018), without momentum, as torch has it."""
    t = entry["step"] + 1
    eps = torch.finfo(p.dtype).eps if h.eps[0] is None else h.eps[0]
    size, beta = max(p.numel(), 1) ** 0.5, 1 - t**h.beta2_decay
    rate = torch.clamp(_root((p * p).sum()) / size, min=h.eps[1])
    rate = rate * torch.clamp(t**-0.5, max=h.lr)
    if not _is_zero(h.weight_decay):
        p = p * (1 - h.lr * h.weight_decay)
    if "variance" in entry:
        v = _average(entry["variance"], g * g, beta.to(g.dtype))
        new = {"step": t, "variance": v}
    else:
        row = _average(entry["row_var"], (g * g).mean(-1, keepdim=True), beta.to(g.dtype))
        col = _average(entry["col_var"], (g * g).mean(-2, keepdim=True), beta.to(g.dtype))
        new = {"step": t, "row_var": row, "col_var": col}
        v = row @ col / row.mean(-2, keepdim=True).clamp(min=eps)
    update = g * v.clamp(min=eps * eps).rsqrt()
    length = _root((update * update).sum()) / (size * h.d)
    return p - (rate / length.clamp(min=1)).to(p.dtype) * update, new


# ---- what they share -----------------------------------------------------------------------------


def _is_zero(number: Any) -> bool:
    return not isinstance(number, Tensor) and number == 0


def _decayed(p: Tensor, g: Tensor, h: Any) -> Tensor:
    """Return the gradient of the loss with an L2 penalty."""
    return g if _is_zero(h.weight_decay) else g + h.weight_decay * p


def _decoupled(p: Tensor, g: Tensor, h: Any) -> tuple[Tensor, Tensor]:
    """Return parameter and gradient after a weight decay of either kind."""
    if h.decoupled_weight_decay and not _is_zero(h.weight_decay):
        return p * (1 - h.lr * h.weight_decay), g
    return p, g if h.decoupled_weight_decay else _decayed(p, g, h)


def _average(old: Tensor, new: Tensor, beta: Any) -> Tensor:
    """Return an exponential moving average."""
    return beta * old + (1 - beta) * new


def _average_square(old: Tensor, new: Tensor, beta: Any) -> Tensor:
    """Return an exponential moving average of squares. A square alone may be out of range."""
    return beta * old + (1 - beta) * new * new


def _root(square: Tensor) -> Tensor:
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

    step: Callable[[Tensor, Tensor, Entry, Any], NewLeaf]
    # the slots of a parameter with these settings before its first step
    new_entry: Callable[[Tensor, Mapping[str, Any]], Entry]
    elementwise: bool = True  # elements update independently, so that a part can be stepped alone
    constants: tuple[str, ...] = ()  # the settings that cannot be tensors


def formula_of(cls: Any) -> Formula | None:
    """Return the formula of a class of torch.optim, of a subclass that keeps its methods, or of
    `from_formula`; None for any other class, which has a step of its own.
    """
    if isinstance(formula := vars(cls).get("formula"), Formula):
        return formula
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


def _slots(p: Tensor, counts: Mapping[str, Any], moments: Mapping[str, Any]) -> Entry:
    """Return these counts as 0-d tensors, and these moments in the shape of the parameter."""
    # A step of a rate that is a tensor can be differentiated.
    number = torch.zeros((), dtype=torch.float32, device=p.device)
    return {
        **{name: filled_like(number, first) for name, first in counts.items()},
        **{name: filled_like(p, first) for name, first in moments.items()},
    }


def _with_moments(*names: str) -> Callable[[Tensor, Mapping[str, Any]], Entry]:
    return lambda p, settings: _slots(p, {"step": 0.0}, dict.fromkeys(names, 0.0))


def _sgd_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    # `momentum * -0.0 + g` is g for every g, as torch's first buffer is.
    return _slots(p, {}, {"momentum_buffer": -0.0} if settings["momentum"] != 0 else {})


def _adam_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    largest = ("max_exp_avg_sq",) if settings["amsgrad"] else ()
    return _with_moments("exp_avg", "exp_avg_sq", *largest)(p, settings)


def _adagrad_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    return _slots(p, {"step": 0.0}, {"sum": settings["initial_accumulator_value"]})


def _rmsprop_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    momentum = ("momentum_buffer",) if settings["momentum"] > 0 else ()
    mean = ("grad_avg",) if settings["centered"] else ()
    return _with_moments("square_avg", *momentum, *mean)(p, settings)


def _nadam_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
    return _slots(p, {"step": 0.0, "mu_product": 1.0}, moments)


def _asgd_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    return _slots(p, {"step": 0.0, "eta": settings["lr"], "mu": 1.0}, {"ax": 0.0})


def _rprop_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    return _slots(p, {"step": 0.0}, {"prev": 0.0, "step_size": settings["lr"]})


def _muon_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    return _slots(p, {}, {"momentum_buffer": 0.0})


def _adafactor_slots(p: Tensor, settings: Mapping[str, Any]) -> Entry:
    if p.ndim < 2:
        return _with_moments("variance")(p, settings)
    shapes = {"row_var": (*p.shape[:-1], 1), "col_var": (*p.shape[:-2], 1, p.shape[-1])}
    factors = {name: p.new_zeros(shape) for name, shape in shapes.items()}
    return {**_slots(p, {"step": 0.0}, {}), **factors}


_FORMULAS: dict[Any, Formula] = {
    torch.optim.SGD: Formula(sgd, _sgd_slots),
    torch.optim.Adam: Formula(adam, _adam_slots),  # and AdamW, its subclass
    torch.optim.Adagrad: Formula(adagrad, _adagrad_slots, constants=("initial_accumulator_value",)),
    torch.optim.RMSprop: Formula(rmsprop, _rmsprop_slots),
    torch.optim.Adadelta: Formula(adadelta, _with_moments("square_avg", "acc_delta")),
    torch.optim.Adamax: Formula(adamax, _with_moments("exp_avg", "exp_inf")),
    torch.optim.NAdam: Formula(nadam, _nadam_slots),
    torch.optim.RAdam: Formula(radam, _with_moments("exp_avg", "exp_avg_sq")),
    torch.optim.ASGD: Formula(asgd, _asgd_slots),
    torch.optim.Rprop: Formula(rprop, _rprop_slots),
    torch.optim.Muon: Formula(muon, _muon_slots, elementwise=False, constants=("ns_steps",)),
    torch.optim.Adafactor: Formula(adafactor, _adafactor_slots, elementwise=False),
}
