"""Schedule-free training: the published recurrence in float64, the laws of an optimizer, a run."""

import pytest
import torch
from torch import nn

import purescale as ps
from purescale.testing import same_bits

CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.0, 0.99)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
}
PARAMS = {"w": torch.ones(33)}
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
FREE = ps.with_schedule_free(SGD)


def reference(cls, settings, start, gradients, beta):
    """x, y and z kept apart, with torch's own class over z, in float64."""
    z = nn.Parameter(start.double())
    x, y = z.detach().clone(), z.detach().clone()
    inner = cls([z], **settings)
    for count, gradient in enumerate(gradients, start=1):
        z.grad = gradient(y)
        inner.step()
        x += (z.detach() - x) / count
        y = (1 - beta) * z.detach() + beta * x
    return y, x


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("size", "beta"), [(5, 0.1), (33, 0.9), (300, 0.98)])
def test_it_is_the_published_recurrence(name, size, beta):
    cls, settings = CLASSES[name]
    generator = torch.Generator().manual_seed(size)
    start, target = torch.randn(2, size, generator=generator)
    gradients = [lambda y: y - target] * 20
    optimizer = ps.with_schedule_free(ps.from_torch(cls, **settings), beta)
    params = {"w": start.double()}
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = optimizer.step(params, {"w": gradient(params["w"])}, state)
    y, x = reference(cls, settings, start, gradients, beta)
    torch.testing.assert_close(params["w"], y)
    torch.testing.assert_close(ps.averaged(params, state)["w"], x)


def test_a_backward_goes_through_a_step_of_a_differentiable_optimizer():
    params, grads = ({"w": torch.randn(33)} for _ in range(2))

    def loss(params, grads, optimizer):
        return optimizer.step(params, grads, optimizer.init(PARAMS))[0]["w"].square().sum()

    plain, told = (
        ps.with_schedule_free(ps.from_torch(torch.optim.SGD, lr=0.1, **settings))
        for settings in ({}, {"differentiable": True})
    )
    expected = torch.func.grad(loss, argnums=(0, 1))(params, grads, plain)
    leaves = [t["w"].clone().requires_grad_() for t in (params, grads)]
    loss(*({"w": leaf} for leaf in leaves), told).backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], [t["w"] for t in expected])


@pytest.mark.parametrize("beta", [0, 1, -0.1, float("nan")])
def test_a_beta_out_of_range_is_refused(beta):
    with pytest.raises(ValueError, match="expected a number above 0 and below 1"):
        ps.with_schedule_free(ps.from_torch(torch.optim.SGD, lr=0.1), beta)


FOREIGN = {
    "of another optimizer": (SGD.init(PARAMS), TypeError, "OptState, expected ScheduleFreeState"),
    "of no optimizer": ((), TypeError, "opt_state is tuple, expected ScheduleFreeState"),
    "of other names": (FREE.init({"v": torch.ones(33)}), ValueError, "iterate has another struct"),
    "of other shapes": (FREE.init({"w": torch.ones(5)}), TypeError, r"\(33,\), opt_state.iterate"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_state_of_another_is_refused_in_words(kind):
    state, error, words = FOREIGN[kind]
    for use in (
        lambda: FREE.step(PARAMS, PARAMS, state),
        lambda: ps.maybe_step(FREE, PARAMS, PARAMS, state, found_inf=False),
        lambda: ps.averaged(PARAMS, state),
    ):
        with pytest.raises(error, match=words):
            use()


def test_masters_in_it_are_those_of_the_iterate_and_of_no_parameters():
    wide = ps.from_torch(torch.optim.SGD, lr=0.1)
    optimizer = ps.with_schedule_free(ps.with_master_weights(wide))
    params = {"w": torch.linspace(1, 2, 33).bfloat16()}
    grads, masters = {"w": torch.linspace(0, 1, 33).bfloat16()}, {"w": params["w"].float()}
    state = optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.step(params, grads, state)
        masters, _ = wide.step(masters, {"w": grads["w"].float()}, wide.init(masters))
    assert same_bits(ps.master_weights(state.iterate, state.inner), masters)
    with pytest.raises(TypeError, match="opt_state is ScheduleFreeState, expected MasterState"):
        ps.master_weights(params, state)


def test_half_gradients_are_clipped_in_float32_for_masters_in_it():
    masters = ps.with_master_weights(ps.from_torch(torch.optim.SGD, lr=1.0))
    params = {"w": torch.ones(33, dtype=torch.bfloat16)}
    grads = {"w": torch.linspace(1, 2, 33).bfloat16()}
    scaler, parts = ps.NoScale().init(), ps.partition({"all": masters}, lambda name, p: "all")
    alone, inside, of_parts = (
        ps.unscale_and_step(each, scaler, params, grads, each.init(params), max_norm=1.0).opt_state
        for each in (masters, ps.with_schedule_free(masters), ps.with_schedule_free(parts))
    )
    assert same_bits(inside.inner, alone)
    assert same_bits(of_parts.inner["all"], alone)
