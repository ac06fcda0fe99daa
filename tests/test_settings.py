"""Settings by parameter, learning rates, schedules, and a rate in the state."""

import re

import hypothesis.strategies as st
import pytest
import torch
from helpers import examples, same_bits
from hypothesis import given
from test_torch_optim import OPTIM, SETTINGS, grads_at, implementation, make_params, ours, table
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR

import purescale as ps
from purescale.testing import assert_sync_free

# ---- learning rates and overrides


NUMBERS = st.sampled_from([0.25, 0.5, 0.125])


def halved(start):
    return lambda count: start * 0.5**count


@examples(25)
@given(st.data())
def test_a_setting_is_that_of_its_last_override_else_of_the_state_times_its_schedule_else_its_own(
    data,
):
    """Every home of two settings at once, by arithmetic in float64."""
    names = "lr", "weight_decay"
    start, stored = {}, data.draw(st.sets(st.sampled_from(names)))
    for name in names:
        kinds = [False, True] if name == "lr" or name in stored else [False]
        start[name] = data.draw(NUMBERS), data.draw(st.sampled_from(kinds))
    pattern, kind = st.sampled_from(["a", "b", "*", ("a", "b")]), st.tuples(NUMBERS, st.booleans())
    extra = st.fixed_dictionaries({}, optional={"lr": kind, "weight_decay": st.tuples(NUMBERS)})
    overrides = data.draw(st.dictionaries(pattern, extra, max_size=3))

    def given_as(value, scheduled=False):
        return halved(value) if scheduled else value

    optimizer = ps.from_torch(
        OPTIM.SGD,
        in_state=tuple(stored),
        overrides={p: {n: given_as(*v) for n, v in e.items()} for p, e in overrides.items()},
        **{name: given_as(*value) for name, value in start.items()},
    )
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.randn(5, generator=generator, dtype=torch.float64) for n in ("a", "b")}
    state, expected = optimizer.init(params), dict(params)
    for step in range(3):
        numbers = {name: data.draw(NUMBERS) for name in stored}
        state = ps.replace_settings(state, **numbers)
        for parameter in params:
            now = {n: v * 0.5**step if scheduled else v for n, (v, scheduled) in start.items()}
            for name in stored:
                now[name] = numbers[name] * (now[name] if start[name][1] else 1.0)
            for patterns, settings in overrides.items():
                if patterns == "*" or parameter in patterns:
                    for name, (value, *scheduled) in settings.items():
                        now[name] = value * (0.5**step if any(scheduled) else 1.0)
            p = expected[parameter]
            expected[parameter] = p - now["lr"] * (1.0 + now["weight_decay"] * p)
        ones = {name: torch.ones_like(p) for name, p in params.items()}
        params, state = optimizer.step(params, ones, state)
        torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_no_kind_of_setting_is_read(name):
    params = make_params()
    rates = 0.1, torch.tensor(0.1), lambda applied: 0.1 + 0.0 * applied
    overrides = {"head.*": {"lr": torch.tensor(0.2)}, "gain": {"lr": 0.2}}
    others = {"in_state": ("lr", "weight_decay")}, {"overrides": overrides}
    for settings in (*({"lr": rate} for rate in rates), *others):
        optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
        state = optimizer.init(params)
        assert_sync_free(optimizer.step, params, grads_at(0, params), state)


def test_overrides_equal_parameter_groups():
    params = {n: p.requires_grad_() for n, p in make_params().items()}
    groups = [
        {"params": [params["conv.weight"]]},
        {"params": [params["head.weight"]], "lr": 0.5},
        {"params": [params["gain"]], "weight_decay": 0.0, "betas": (0.5, 0.6)},
    ]
    optimizer = OPTIM.AdamW(groups, lr=0.1, weight_decay=0.3, fused=True)
    for step in range(5):
        for p, g in zip(params.values(), grads_at(step, params).values(), strict=True):
            p.grad = g
        optimizer.step()
    overrides = {"head.*": {"lr": 0.5}, "gain": {"weight_decay": 0.0, "betas": (0.5, 0.6)}}
    adamw = ps.from_torch(OPTIM.AdamW, lr=0.1, weight_decay=0.3, overrides=overrides)
    assert same_bits(ours(adamw, steps=5)[0], {n: p.detach() for n, p in params.items()})


def test_a_tuple_of_names_and_globs_is_one_override(way):
    no_decay = {"weight_decay": 0.0}
    settings = {"lr": 0.1, "weight_decay": 0.1, **implementation("SGD", {}, way)}
    one, several = (
        ps.from_torch(OPTIM.SGD, overrides=overrides, **settings)
        for overrides in (
            {("conv.bias", "norm.*"): no_decay},
            {"conv.bias": no_decay, "norm.*": no_decay},
        )
    )
    params = {"conv.weight": 1, "conv.bias": 2, "norm.weight": 3, "norm.bias": 4, "head": 5}
    params = {name: torch.full((2,), float(value)) for name, value in params.items()}
    grads = {name: torch.ones(2) for name in params}
    state = one.init(params)
    assert len(one.to_state_dict(state)["param_groups"]) == 2
    new, _ = one.step(params, grads, state)
    assert same_bits(new, several.step(params, grads, several.init(params))[0])
    kept = {name for name in params if same_bits(new[name], params[name] - 0.1)}
    assert kept == {"conv.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("missing", ["c", "c*"])
def test_every_name_of_a_tuple_must_be_there(missing):
    optimizer = ps.from_torch(OPTIM.SGD, overrides={("a", missing, "b"): {"lr": 0.1}})
    with pytest.raises(ValueError, match=rf"'{re.escape(missing)}' matches no parameter"):
        optimizer.init({"a": torch.ones(1), "b": torch.ones(1)})


def test_the_lookup_that_the_words_recommend_has_a_rule_under_vmap():
    with pytest.raises(TypeError, match=r"rates\.gather") as refused:
        ps.from_torch(OPTIM.SGD, lr=lambda applied: [0.1, 0.2][int(applied)])
    (advice,) = re.findall(r"rates\.gather\S*(?: \S+)*?\)\)\[0\]", str(refused.value))
    rates = torch.tensor([0.1, 0.2, 0.3])
    optimizer = ps.from_torch(
        OPTIM.SGD, lr=lambda applied: eval(advice, {"rates": rates, "applied": applied})
    )
    params = {"w": torch.zeros(1)}
    states = [optimizer.init(params)._replace(applied=torch.tensor(n)) for n in (0, 1, 2, 9)]
    params = {"w": torch.zeros(4, 1)}
    new, _ = torch.vmap(optimizer.step)(params, {"w": torch.ones(4, 1)}, ps.stack_states(states))
    assert same_bits(new["w"].flatten(), -torch.tensor([0.1, 0.2, 0.3, 0.3]))


def ours_of_ones(optimizer, params, state, steps=3):
    ones = {name: torch.ones_like(param) for name, param in params.items()}
    for _ in range(steps):
        params, state = optimizer.step(params, ones, state)
    return params, state


def after_four_steps(**settings):
    optimizer, params = ps.from_torch(torch.optim.AdamW, **settings), {"w": torch.ones(3)}
    return optimizer, *ours_of_ones(optimizer, params, optimizer.init(params), steps=4)


# ---- a rate in the state

RATES_OF_STEPS = [0.3, 0.2, 0.25, 0.15]


def by_groups(name, settings, params, grads, lr_of_a_group):
    """torch's own optimizer, whose first group follows RATES_OF_STEPS."""
    weights = {key: torch.nn.Parameter(param.clone()) for key, param in params.items()}
    groups = [
        {"params": [weights["conv.weight"], weights["gain"]]},
        {"params": [weights["head.weight"]], "lr": 0.5},
    ]
    theirs = getattr(OPTIM, name)(groups, lr=1.0, **settings)
    for step, rate in enumerate(RATES_OF_STEPS):
        theirs.param_groups[0]["lr"] = rate
        theirs.param_groups[1]["lr"] = lr_of_a_group[step]
        for key, weight in weights.items():
            weight.grad = grads[step][key]
        theirs.step()
    return {key: weight.detach() for key, weight in weights.items()}


@pytest.mark.parametrize(("scheduled", "late"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("name", "settings", "in_state"),
    [
        *((name, many[-1], False) for name, many in SETTINGS.items()),
        *((name, many[-1], True) for name, many in SETTINGS.items() if name != "Rprop"),  # refused
    ],
)
def test_rates_of_the_state_and_of_overrides_are_those_of_torchs_groups(
    name, settings, in_state, scheduled, late
):
    """In each step, and in the first of a parameter whose gradient comes late."""
    params = {
        "conv.weight": torch.randn(2, 5),
        "gain": torch.randn(3, 33, dtype=torch.float64),
        "head.weight": torch.randn(2, 300),
    }
    grads = [{key: torch.randn_like(p) for key, p in params.items()} for _ in RATES_OF_STEPS]
    if late:
        grads[0] |= {"conv.weight": None, "head.weight": None}
    of_a_group = [0.4, 0.35, 0.45, 0.05] if scheduled else [0.5] * 4
    optimizer = ps.from_torch(
        getattr(OPTIM, name),
        lr=1.0 if in_state else table(RATES_OF_STEPS),
        in_state=("lr",) if in_state else (),
        overrides={"head.*": {"lr": table(of_a_group) if scheduled else 0.5}},
        counts="each" if late else "one",
        **settings,
    )
    stepped, state = params, optimizer.init(params)
    for step, rate in enumerate(RATES_OF_STEPS):
        if in_state:
            state = state._replace(lr=torch.tensor(rate))
        stepped, state = optimizer.step(stepped, grads[step], state)
    expected = by_groups(name, settings, params, grads, of_a_group)
    torch.testing.assert_close(stepped, expected, rtol=1e-4, atol=1e-5)


def test_a_state_dict_has_the_rate_in_the_state_times_its_schedule_and_that_alone_as_the_initial():
    optimizer = ps.from_torch(OPTIM.SGD, lr=lambda applied: 0.5**applied, in_state=("lr",))
    params = {"w": torch.ones(3)}
    state = ps.replace_settings(optimizer.init(params), lr=0.3)
    _, after = ours_of_ones(optimizer, params, state)
    sd = optimizer.to_state_dict(after)
    assert sd["param_groups"][0]["lr"] == torch.tensor(0.3) / 8
    assert same_bits(optimizer.from_state_dict(sd, params, applied=3), after)
    del sd["param_groups"][0]["initial_lr"]
    with pytest.raises(ValueError, match=r"no initial_lr.*Fix"):
        optimizer.from_state_dict(sd, params, applied=3)


# ---- the way back to torch


def falling(applied):
    return 1e-2 * 0.9**applied


def cosine(applied):
    return 5e-3 * (1 + torch.cos(torch.pi * applied / 20))


def loaded(optimizer, params, state, flags=None, **named):
    """torch's AdamW with this state."""
    leaves = [param.clone().requires_grad_() for param in params.values()]
    theirs = torch.optim.AdamW(leaves, lr=1.0, **(flags or {}))
    theirs.load_state_dict(optimizer.to_state_dict(state, **named))
    return theirs, leaves


def test_a_rate_that_moves_is_a_number_of_python_in_a_state_dict():
    params = {"w": torch.ones(3), "v": torch.ones(2)}
    for rate in (
        {"lr": falling, "in_state": ("lr",)},
        {"lr": 0.01, "in_state": ("lr",)},
        {"lr": 0.01, "overrides": {"w": {"lr": falling}}},
    ):
        optimizer = ps.from_torch(torch.optim.AdamW, **rate)
        for group in optimizer.to_state_dict(optimizer.init(params))["param_groups"]:
            assert type(group["lr"]) is float
            assert type(group.get("initial_lr", 0.0)) is float


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (falling, lambda theirs, at: LambdaLR(theirs, lambda k: 0.9**k, last_epoch=at)),
        (falling, lambda theirs, at: ExponentialLR(theirs, 0.9, last_epoch=at)),
        (cosine, lambda theirs, at: CosineAnnealingLR(theirs, 20, last_epoch=at)),
    ],
    ids=["LambdaLR", "ExponentialLR", "CosineAnnealingLR"],
)
def test_a_new_scheduler_of_torch_goes_on_where_a_schedule_was(schedule, make):
    optimizer, params, state = after_four_steps(lr=schedule)
    theirs, (leaf,) = loaded(optimizer, params, state)
    scheduler = make(theirs, int(state.applied) - 1)
    for _ in range(5):
        assert scheduler.get_last_lr()[0] == pytest.approx(float(schedule(state.applied)), rel=1e-5)
        leaf.grad = torch.ones(3)
        theirs.step()
        scheduler.step()
        params, state = ours_of_ones(optimizer, params, state, steps=1)
    torch.testing.assert_close(leaf.detach(), params["w"], rtol=1e-6, atol=1e-7)


def test_the_rate_that_a_new_scheduler_multiplies_can_be_named():
    def warm_up(applied):
        return 1e-2 * (applied / 10).clamp(max=1.0)

    optimizer, params, state = after_four_steps(lr=warm_up)
    assert optimizer.to_state_dict(state)["param_groups"][0]["initial_lr"] > 0
    theirs, _ = loaded(optimizer, params, state, initial_lr=1e-2)
    scheduler = LambdaLR(theirs, lambda k: min(k / 10, 1.0), last_epoch=int(state.applied) - 1)
    assert scheduler.get_last_lr()[0] == pytest.approx(4e-3)


def test_a_fused_optimizer_of_torch_trains_on_with_its_gradscaler():
    """torch takes the flags from the dict, also from another optimizer of torch's."""
    optimizer, params, state = after_four_steps(lr=falling, fused=True)
    theirs, (leaf,) = loaded(optimizer, params, state, {"fused": True})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(leaf.sum()).backward()
    scaler.step(theirs)
    scaler.update()
    params, _ = ours_of_ones(optimizer, params, state, steps=1)
    torch.testing.assert_close(leaf.detach(), params["w"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("where", ["lr", "overrides"])
def test_a_schedule_that_gives_what_torch_refuses_as_a_number_is_refused(as_tensor, where):
    rates = [0.5]

    def lr(applied):
        return torch.tensor(rates[0]) if as_tensor else rates[0]

    rate, overrides = (lr, None) if where == "lr" else (0.1, {"w": {"lr": lr}})
    optimizer = ps.from_torch(torch.optim.SGD, lr=rate, overrides=overrides)
    params = {"w": torch.ones(1)}
    call = params, {"w": torch.ones(1)}, optimizer.init(params)
    assert optimizer.step(*call)[0]["w"] == 0.5
    words = r"the rate that the schedule lr returned is .*maximize"
    for rates[0] in (-0.5, float("nan")):
        with pytest.raises(ValueError, match=words):
            optimizer.step(*call)
    with pytest.raises(ValueError, match=words):
        ps.from_torch(torch.optim.SGD, lr=rate, overrides=overrides)
    rates[0] = -1e-9  # a schedule to 0 in float32
    optimizer.step(*call)


@pytest.mark.parametrize("where", ["lr", "overrides", "state"])
@examples(10)
@given(rate=st.floats(-1, 1, width=32), size=st.sampled_from([5, 33, 300]))
def test_a_rate_that_is_a_tensor_moves_by_what_it_is_also_up_the_gradient(where, rate, size):
    settings = {
        "lr": {"lr": torch.tensor(rate)},
        "overrides": {"overrides": {"w": {"lr": torch.tensor(rate)}}},
        "state": {"in_state": ("lr",)},
    }[where]
    optimizer = ps.from_torch(torch.optim.SGD, **settings)
    params = {"w": torch.linspace(-1, 1, size, dtype=torch.float64)}
    state = optimizer.init(params)
    if where == "state":
        state = ps.replace_settings(state, lr=torch.tensor(rate))
    expected = params["w"] * (1 - rate)
    torch.testing.assert_close(optimizer.step(params, params, state)[0]["w"], expected)
