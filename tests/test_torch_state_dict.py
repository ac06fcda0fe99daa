"""torch's state dicts in and out: by name, or one group in the order of the parameters."""

import re

import hypothesis.strategies as st
import pytest
import torch
from helpers import assert_close, examples, same_bits, shares_memory, slots_of
from hypothesis import given
from test_torch_optim import CASES, FUSED, OPTIM, grads_at, implementation, ours, real
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import purescale as ps


def assert_continues(got, expected, name):
    """To the bit by torch's kernels, to rounding by a formula."""
    if name not in FUSED:
        return assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert same_bits(got, expected)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_state_comes_from_torch_continues_here_and_goes_on_there(name, settings, way):
    flags = implementation(name, settings, way)
    params, theirs = real(name, settings, flags, steps=4)
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    assert state.applied == (4 if name not in ("SGD", "Muon") else int(bool(theirs.state)))
    assert state.counts == ()  # all parameters made as many steps
    params, state = ours(optimizer, steps=2, params=params, state=state, start=4)
    assert_continues(params, real(name, settings, flags, steps=6)[0], name)

    moved = {key: p.clone().requires_grad_() for key, p in params.items()}
    theirs = getattr(OPTIM, name)(moved.values(), **settings, **flags)
    theirs.load_state_dict(optimizer.to_state_dict(state, like=theirs.state_dict()))
    for step in (6, 7):
        for key, grad in grads_at(step, params).items():
            moved[key].grad = grad
        theirs.step()
    expected, _ = ours(optimizer, steps=2, params=params, state=state, start=6)
    assert_continues(expected, {key: p.detach() for key, p in moved.items()}, name)


def test_a_state_dict_shares_no_memory():
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    assert not shares_memory(state, sd)
    assert not shares_memory(sd, optimizer.from_state_dict(sd, params))


def without_names(sd):
    del sd["param_groups"][0]["param_names"]
    sd["param_groups"][0]["params"].pop()


def with_slot(index, **slot):
    return lambda sd: sd["state"][index].update(slot)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda sd: sd["state"][0].pop("exp_avg"), r"conv.weight has \['exp_avg_sq', 'step'\]"),
        (with_slot(1, exp_avg=torch.zeros(3)), r"of head.weight has exp_avg of shape \(3,\)"),
        (with_slot(0, step=torch.tensor(torch.nan)), "a step count that is inf or NaN"),
        (with_slot(0, exp_avg=torch.ones(4, 3) * 1j), "of shape .*, torch.complex64, expected"),
        (with_slot(0, exp_avg="no"), "exp_avg = str; expected a tensor"),
        (without_names, r"has groups of \[2\] parameters and no names, this optimizer has 3 "),
    ],
)
def test_a_state_dict_of_something_else_is_refused(spoil, message):
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    spoil(sd)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.from_state_dict(sd, params)


COUNTLESS = [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Muon", {})]


def migrated(name, settings, steps=5):
    """Parameters and torch's own optimizer after some steps under a cosine, and its scheduler."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    theirs = getattr(OPTIM, name)([weight], lr=0.1, **settings)
    scheduler = OPTIM.lr_scheduler.CosineAnnealingLR(theirs, T_max=10)
    for _ in range(steps):
        weight.grad = torch.ones(2, 3)
        theirs.step()
        scheduler.step()
    return {"w": weight.detach().clone()}, theirs, scheduler


def cosine(applied):
    return 0.05 * (1 + torch.cos(torch.pi * applied / 10))


@pytest.mark.parametrize(("name", "settings"), COUNTLESS)
def test_a_schedule_is_refused_a_state_dict_that_does_not_tell_how_many_steps_were_made(
    name, settings
):
    params, theirs, _ = migrated(name, settings)
    for rate in ({"lr": cosine}, {"lr": 0.1, "overrides": {"w": {"lr": cosine}}}):
        optimizer = ps.from_torch(getattr(OPTIM, name), **rate, **settings)
        words = r"schedule.*no step count.*applied=scheduler.last_epoch"
        with pytest.raises(ValueError, match=words):
            optimizer.from_state_dict(theirs.state_dict(), params)


@pytest.mark.parametrize(("name", "settings"), [*COUNTLESS, ("AdamW", {})])
def test_a_schedule_goes_on_from_the_count_that_is_told(name, settings):
    params, theirs, scheduler = migrated(name, settings)
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=cosine, **settings)
    applied = torch.tensor(scheduler.last_epoch)
    state = optimizer.from_state_dict(theirs.state_dict(), params, applied=applied)
    assert same_bits(state.applied, torch.tensor(5))
    stepped, _ = optimizer.step(params, {"w": torch.ones(2, 3)}, state)
    (weight,) = theirs.param_groups[0]["params"]
    theirs.step()
    torch.testing.assert_close(stepped["w"], weight.detach())


@pytest.mark.parametrize("applied", [-1, 0.5, torch.ones(2)])
def test_a_count_that_is_none_is_refused(applied):
    params, theirs, _ = migrated("SGD", {})
    with pytest.raises((TypeError, ValueError), match="applied"):
        ps.from_torch(OPTIM.SGD).from_state_dict(theirs.state_dict(), params, applied=applied)


def test_the_rate_of_a_state_is_that_of_the_groups_that_take_it():
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    groups = [{"params": [("a", params["a"])], "lr": 0.25}, {"params": [("b", params["b"])]}]
    sd = OPTIM.SGD(groups, lr=0.5).state_dict()
    own = ps.from_torch(OPTIM.SGD, in_state=("lr",), overrides={"a": {"lr": 0.25}, "b": {}})
    assert own.from_state_dict(sd, params).lr == 0.5
    one = ps.from_torch(OPTIM.SGD, in_state=("lr",), overrides={"b": {"momentum": 0.0}})
    with pytest.raises(ValueError, match=r"lr = \[0.25, 0.5\], .*Fix: .*overrides="):
        one.from_state_dict(sd, params)


def two_layers():
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 3)})


def step_of_torch(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
    optimizer.step()


def step_here(optimizer, params, state, step):
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
    return optimizer.step(params, grads, state)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def head_first(model, extra, *, named, **settings):
    """torch's own AdamW with the groups [head, body]."""
    parts = [
        part.named_parameters(name) if named else part.parameters()
        for name, part in (("head", model["head"]), ("body", model["body"]))
    ]
    groups = [{"params": list(parts[0]), **extra}, {"params": list(parts[1])}]
    return OPTIM.AdamW(groups, lr=0.1, weight_decay=0.5, fused=True, **settings)


def assert_moments_of(theirs, named, state):
    for name, p in named:
        assert same_bits(slots_of(state, name, theirs.state[p]), dict(theirs.state[p]))


def two_groups(extra, **settings):
    settings = {"lr": 0.1, "weight_decay": 0.5, "overrides": {"head.*": extra}, **settings}
    return ps.from_torch(OPTIM.AdamW, **settings)


def after_three_steps(extra, *, named, **settings):
    model = two_layers()
    theirs = head_first(model, extra, named=named, **settings)
    for step in range(3):
        step_of_torch(model, theirs, step)
    return model, theirs


def test_the_groups_of_a_dict_make_the_optimizer_that_loads_it():
    optimizer, params = two_groups({"lr": 0.25}), weights(two_layers())
    state = optimizer.init(params)
    for step in range(3):
        params, state = step_here(optimizer, params, state, step)
    model = two_layers()
    ps.load_into(model, params, {})
    sd = optimizer.to_state_dict(state)
    groups = [[(n, model.get_parameter(n)) for n in g["param_names"]] for g in sd["param_groups"]]
    theirs = OPTIM.AdamW([{"params": named} for named in groups], fused=True)
    theirs.load_state_dict(
        sd | {"param_groups": [{**g, "fused": True} for g in sd["param_groups"]]}
    )
    step_of_torch(model, theirs, 3)
    params, _ = step_here(optimizer, params, state, 3)
    assert same_bits(params, weights(model))


# ---- any groups, in any order

SHAPES = {"a": (2, 2), "b": (2, 2), "c": (2, 2), "d": (3,), "e": (2, 2)}
SETTINGS = ({}, {"lr": 0.25}, {"weight_decay": 0.0}, {"lr": 0.25, "weight_decay": 0.0})


@st.composite
def optimizers(draw):
    """One optimizer here, and torch's with the same groups in another order, after one step."""
    kinds = {name: draw(st.integers(0, 3)) for name in SHAPES}
    overrides = {n: SETTINGS[kind] for n, kind in kinds.items() if kind}
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1, weight_decay=0.5, overrides=overrides)
    live = {name: torch.ones(shape, requires_grad=True) for name, shape in SHAPES.items()}
    groups = [
        {"params": [(n, live[n]) for n in live if kinds[n] == kind], **extra}
        for kind, extra in enumerate(SETTINGS)
    ]
    groups = draw(st.permutations([group for group in groups if group["params"]]))
    theirs = OPTIM.AdamW(groups, lr=0.1, weight_decay=0.5)
    for index, p in enumerate(live.values()):
        p.grad = torch.full_like(p, 1.0 + index)
    theirs.step()
    return optimizer, live, theirs


@examples(20)
@given(optimizers())
def test_groups_of_other_settings_may_come_in_any_order(drawn):
    optimizer, live, theirs = drawn
    state = optimizer.from_state_dict(theirs.state_dict(), {n: p.detach() for n, p in live.items()})
    assert_moments_of(theirs, live.items(), state)


@examples(20)
@given(optimizers())
def test_a_dict_like_torchs_is_the_one_that_torch_wrote(drawn):
    optimizer, live, theirs = drawn
    params = {name: p.detach() for name, p in live.items()}
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    sd = optimizer.to_state_dict(state, like=theirs.state_dict())
    assert same_bits(sd["state"], theirs.state_dict()["state"])
    assert sd["param_groups"] == theirs.state_dict()["param_groups"]
    again = optimizer.from_state_dict(optimizer.to_state_dict(state), params)
    assert same_bits(again, state)


def test_a_parameter_that_is_frozen_here_is_left_out():
    model, theirs = after_three_steps({"lr": 0.25}, named=True)
    model["body"].requires_grad_(False)
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1)
    params = weights(model)
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    assert list(state.slots["exp_avg"]) == ["head.weight", "head.bias"]
    sd = optimizer.to_state_dict(state, like=theirs.state_dict())
    assert same_bits(sd["state"], theirs.state_dict()["state"])


def test_names_in_place_of_positions_are_names():
    """The form of torch.distributed.checkpoint.state_dict."""
    model, theirs = after_three_steps({"lr": 0.25}, named=False)
    optimizer, params = two_groups({"lr": 0.25}), weights(model)
    sd = get_optimizer_state_dict(model, theirs)
    state = optimizer.from_state_dict(sd, params)
    assert_moments_of(theirs, model.named_parameters(), state)
    back = optimizer.to_state_dict(state, like=sd)
    assert same_bits(back["state"], sd["state"])
    assert back["param_groups"] == sd["param_groups"]


# ---- what is refused


def test_several_groups_without_names_are_refused_with_the_code_that_names_them():
    optimizer = two_groups({"lr": 0.25})
    model, torch_optimizer = after_three_steps({"lr": 0.25}, named=False)
    sd, params = torch_optimizer.state_dict(), weights(model)
    message = r"has groups of \[2, 2\] parameters and no names, this optimizer has 4 parameters"
    with pytest.raises(ValueError, match=message) as refusal:
        optimizer.from_state_dict(sd, params)
    with pytest.raises(ValueError, match=message):
        optimizer.to_state_dict(optimizer.init(params), like=sd)
    cure = re.search("For another one `(.*?)` and `(.*?)`", str(refusal.value), re.DOTALL).groups()
    exec("\n".join(cure), {"model": model, "sd": sd, "torch_optimizer": torch_optimizer})
    state = optimizer.from_state_dict(sd, params)
    assert_moments_of(torch_optimizer, model.named_parameters(), state)


def test_names_of_a_wrapped_model_are_refused_with_the_code_that_cures_them():
    model, theirs = after_three_steps({"lr": 0.25}, named=True)
    sd = theirs.state_dict()
    for group in sd["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    optimizer = two_groups({"lr": 0.25})
    with pytest.raises(ValueError, match=r"has no body.weight, .*it has module.head") as error:
        optimizer.from_state_dict(sd, weights(model))
    exec(re.search("Fix: `(.*?)`", str(error.value)).group(1), {"sd": sd})
    state = optimizer.from_state_dict(sd, weights(model))
    assert_moments_of(theirs, model.named_parameters(), state)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda groups: groups[0]["param_names"].append(groups[1]["param_names"].pop()),
        lambda groups: groups[0].pop("param_names"),
        lambda groups: groups[0].update(param_names=["body.bias", "head.bias"]),
    ],
    ids=["one too many, one too few", "for some only", "twice"],
)
def test_names_that_are_not_one_for_each_are_refused(spoil):
    model, theirs = after_three_steps({}, named=True)
    sd = theirs.state_dict()
    spoil(sd["param_groups"])
    with pytest.raises(ValueError, match=r"for groups of \[2, 2\] parameters. Fix: .*for each"):
        two_groups({"lr": 0.25}).from_state_dict(sd, weights(model))


def test_a_group_of_torchs_that_is_two_here_is_refused():
    model = two_layers()
    theirs = OPTIM.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.5)
    optimizer, params = two_groups({"lr": 0.25}), weights(model)
    state = optimizer.init(params)
    message = r"param_groups\[0\] has body.weight, .*head.bias, which are in several groups here"
    with pytest.raises(ValueError, match=message):
        optimizer.to_state_dict(state, like=theirs.state_dict())


def test_a_step_count_may_be_a_number():
    params = {"w": torch.ones(2)}
    entry = {"step": 3, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    sd = {"state": {0: entry}, "param_groups": [{"params": [0]}]}
    assert ps.from_torch(OPTIM.Adam, lr=0.1).from_state_dict(sd, params).applied == 3


def test_a_number_where_a_state_holds_several_is_refused():
    optimizer = ps.from_torch(OPTIM.Adam, lr=0.1, in_state=("betas",))
    sd = {"state": {}, "param_groups": [{"params": [0], "betas": 0.9}]}
    with pytest.raises(ValueError, match=r"has betas = 0.9; expected what Adam has there"):
        optimizer.from_state_dict(sd, {"w": torch.ones(2)})
