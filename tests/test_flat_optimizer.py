"""The methods of an optimizer that a step calls: the applied step, or the old state."""

import pytest
import torch
from helpers import Untouched, clone, on_an_accelerator, same_bits, tensors
from torch.testing import assert_close

import purescale as ps
from purescale._optim.optimizer import FlatOptimizer
from purescale._torch_optim import kernels
from purescale._wrappers import pieces


class StepAlone:
    """An optimizer with `init` and `step`, and nothing else."""

    def init(self, params):
        return {"count": torch.tensor(0)}

    def step(self, params, grads, state):
        new = {name: (p - 0.5 * grads[name]).to(p.dtype) for name, p in params.items()}
        return new, {"count": state["count"] + 1}


class OwnStep(torch.optim.Optimizer):
    """A class with a `step` of its own, which counts in its state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                p.add_(p.grad, alpha=-group["lr"])


def of(cls, **settings):
    return ps.from_torch(getattr(torch.optim, cls), lr=0.1, **settings)


def in_two(first, second):
    return ps.partition({"a": first, "b": second}, lambda name, param: "ba"[name in ("3", "half")])


OPTIMIZERS = {
    "AdamW": of("AdamW"),
    "amsgrad": of("Adam", amsgrad=True),
    "SGD": of("SGD", momentum=0.9),
    "Adagrad": of("Adagrad"),
    "by a formula": of("RMSprop"),
    "a step of its own": ps.from_torch(OwnStep),
    "step alone": StepAlone(),
    "masters": ps.with_master_weights(of("AdamW")),
    "rounding": ps.with_stochastic_rounding(of("NAdam")),
    "narrow state": ps.with_state_dtype(of("AdamW"), {"exp_avg": torch.bfloat16}),
    "around step alone": ps.with_master_weights(StepAlone()),
    "partition": in_two(ps.with_master_weights(StepAlone()), of("AdamW")),
    "around a partition": ps.with_stochastic_rounding(in_two(of("AdamW"), of("RAdam"))),
}


@pytest.mark.parametrize(
    ("factor", "overflow", "donate"),
    [
        *((None, False, True), (0.25, False, False), (0.25, False, True)),
        *((None, True, False), (0.25, True, True)),
    ],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_scaled_gradients_is_that_of_unscaled_and_clipped_ones_or_the_old_state(
    kind, factor, overflow, donate
):
    """Bit for bit: the scale and the factor of clipping are powers of two, the norm is 12."""
    optimizer, scaler = OPTIMIZERS[kind], ps.StaticScale(4.0).init()
    params = {str(n): torch.linspace(-1, 1, n) for n in (3, 33, 70)}
    params["half"] = torch.linspace(-1, 1, 40).bfloat16()
    first = {name: torch.full_like(leaf, 0.5) for name, leaf in params.items()}
    params, state = optimizer.step(params, first, optimizer.init(params))
    grads = {name: torch.where(leaf > 0, 1, -1).to(leaf) for name, leaf in params.items()}
    grads["3"] = torch.tensor([1.0, 0.0, 0.0])
    scaled, max_norm = {name: 4 * grad for name, grad in grads.items()}, None
    if factor is not None:
        max_norm = factor * (12 + 1e-6)
        grads = {name: factor * grad for name, grad in grads.items()}
    expected = clone((params, state)) if overflow else optimizer.step(params, grads, state)
    if overflow:
        scaled["33"][7] = torch.inf
    with Untouched(() if donate else (params, scaled, state)):
        out = ps.unscale_and_step(optimizer, scaler, params, scaled, state, max_norm, donate=donate)
    assert out.found_inf == overflow
    assert same_bits(out[:2], expected)


def test_two_leaves_of_one_dotted_name_are_refused_by_the_step_of_any_optimizer():
    params, optimizer = {"a.b": torch.ones(5), "a": {"b": torch.ones(5)}}, StepAlone()
    with pytest.raises(ValueError, match="two leaves have the same dotted name"):
        ps.maybe_step(optimizer, params, params, optimizer.init(params), found_inf=False)


class Descent(FlatOptimizer):
    """An optimizer that steps the lists of a step, as one of the library's own would."""

    agreed_settings = "Descent"

    def init(self, params):
        return {}

    def compute_step(self, inputs, grads):
        pairs = zip(inputs.params, inputs.grads_of_params(grads), strict=True)
        return [p.clone() if g is None else p - 0.5 * g for p, g in pairs], {}


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_optimizer_is_given_unscaled_and_clipped_gradients(max_norm):
    scaler = ps.DynamicScale(init_scale=8.0).init()
    params = {"5": torch.randn(5), "33": torch.randn(33)}
    grads = {name: 8 * torch.randn_like(leaf) for name, leaf in params.items()}
    steps = [
        ps.unscale_and_step(optimizer, scaler, params, grads, optimizer.init(params), max_norm)
        for optimizer in (Descent(), ps.from_torch(torch.optim.SGD, lr=0.5))
    ]
    assert_close(steps[0].params, steps[1].params)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("cls", ["SGD", "RMSprop"])
def test_under_no_grad_no_result_of_a_differentiable_step_is_on_a_graph(cls, forced):
    optimizer, scaler = of(cls, differentiable=True), ps.DynamicScale(init_scale=8.0).init()
    params = {"5": torch.ones(5, requires_grad=True)}
    grads, state = {"5": torch.ones(5)}, optimizer.init(params)
    with torch.no_grad(), on_an_accelerator(forced):
        results = [
            optimizer.step(params, grads, state),
            ps.maybe_step(optimizer, params, grads, state, torch.tensor(False)),
            ps.unscale_and_step(optimizer, scaler, params, grads, state)[:2],
        ]
    assert not any(leaf.requires_grad for result in results for leaf in tensors(result))


class ByNormOfAll(FlatOptimizer):
    """Steps by the gradients over the norm of all of them, in a state as torch's classes have."""

    agreed_settings = "ByNormOfAll"

    def init(self, params):
        return ps.from_torch(torch.optim.SGD, lr=1.0).init(params)

    def compute_step(self, inputs, grads):
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.tensors]))
        pairs = zip(inputs.params, inputs.grads_of_params(grads), strict=True)
        return [p - g / norm for p, g in pairs], inputs.opt_state


def test_a_wrapper_gives_an_optimizer_of_ones_own_all_parameters_at_once(monkeypatch):
    params = {"5": torch.ones(5).bfloat16(), "33": torch.ones(33).bfloat16()}
    grads = {name: torch.randn_like(leaf) for name, leaf in params.items()}
    state = ps.with_master_weights(ByNormOfAll()).init(params)
    whole = ps.with_master_weights(ByNormOfAll()).step(params, grads, state)
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 20)
    optimizer = ps.with_master_weights(ByNormOfAll())
    assert same_bits(optimizer.step(params, grads, state), whole)
    no_skip = torch.tensor(False)
    assert same_bits(ps.maybe_step(optimizer, *clone((params, grads, state)), no_skip, True), whole)


@pytest.mark.parametrize("counts", ["one", "each"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_donated_step_whose_kernel_raises_has_counted_nothing(kind, counts, monkeypatch):
    optimizer = ps.from_torch(
        kind, lr=lambda t: 0.1 / (t + 1), counts=counts, schedule_by="iteration"
    )
    params = {"w": torch.ones(5), "v": torch.ones(33, dtype=torch.float64)}
    state = optimizer.init(params)
    before = clone((params, state))

    def without_memory(kernel, call, skip):
        raise MemoryError

    monkeypatch.setattr(kernels.FusedKernel, "run", without_memory)
    with pytest.raises(MemoryError):
        ps.maybe_step(optimizer, params, clone(params), state, torch.tensor(False), donate=True)
    assert same_bits((params, state), before)
