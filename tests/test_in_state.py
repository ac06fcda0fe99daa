"""Settings in the state of an optimizer: the numbers of the same settings, as data."""

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Untouched, clone, examples, same_bits, shares_memory, tensors
from hypothesis import given
from hypothesis import strategies as st
from test_torch_optim import OPTIM, make_params, ours
from torch.utils._python_dispatch import TorchDispatchMode

import purescale as ps
from purescale.testing import assert_vmap_equals_loop

# Every class with all that its formula takes as data.
NUMBERS = [
    ("SGD", {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.0, "dampening": 0.4, "weight_decay": 0.0}),
    ("Adam", {"betas": (0.8, 0.97), "weight_decay": 0.1, "eps": 1e-3}),
    ("AdamW", {"betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}),
    ("Adamax", {"betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-4}),
    ("ASGD", {"lambd": 0.01, "alpha": 0.6, "t0": 2.0, "weight_decay": 0.1}),
    ("NAdam", {"betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-3, "momentum_decay": 0.1}),
    ("RAdam", {"betas": (0.9, 0.9), "weight_decay": 0.1, "eps": 1e-3}),
    ("RMSprop", {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9}),
    ("RMSprop", {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.0, "momentum": 0.0}),
    ("Rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.05)}),
    ("Adagrad", {"lr_decay": 0.1, "eps": 1e-3, "weight_decay": 0.1}),
    ("Adadelta", {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    ("Muon", {"weight_decay": 0.1, "momentum": 0.9, "eps": 1e-6}),
    ("Adafactor", {"weight_decay": 0.1, "d": 1.5, "beta2_decay": -0.7}),
]
each_class = pytest.mark.parametrize(
    ("name", "settings"), NUMBERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(NUMBERS)]
)


def in_state(name, settings, **extra):
    rate = () if name == "Rprop" else ("lr",)
    return ps.from_torch(getattr(OPTIM, name), in_state=(*settings, *rate), **extra)


def shapes_of(name, dtype):
    shapes = [(1, 5), (3, 11)] if name == "Muon" else [(5,), (3, 11), (300,), ()]
    return {f"w{i}": torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}


def moved_to(state, settings):
    """The state of an optimizer that started elsewhere, with these settings in it."""
    hyper = {
        name: tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)
        for name, value in settings.items()
    }
    return state._replace(hyper=hyper)


def steps_of(optimizer, params, grads, state, step=None):
    for gradients in grads:
        params, state = (step or optimizer.step)(params, gradients, state)
    return params, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_class
def test_settings_in_the_state_give_the_numbers_of_the_same_settings(name, settings, dtype, way):
    """To 1e-6, in bfloat16 to two of its units in the last place: torch's own ways of one class
    differ by as much. The optimizer starts from torch's defaults.
    """
    params = shapes_of(name, dtype)
    grads = [{key: torch.randn_like(p) for key, p in params.items()} for _ in range(4)]
    fixed = ps.from_torch(getattr(OPTIM, name), lr=0.01, **settings)
    moving = in_state(name, settings, lr=0.01)
    state = moved_to(moving.init(params), settings)
    expected, _ = steps_of(fixed, params, grads, fixed.init(params))
    got, after = steps_of(moving, params, grads, state)
    tolerance = 2**-6 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert same_bits(after.hyper, state.hyper)

    donated = clone((params, state))
    for gradients in grads:
        donated = ps.maybe_step(moving, donated[0], gradients, donated[1], False, donate=True)
    assert same_bits(donated, (got, after))


@pytest.mark.parametrize("first", [0.5, lambda count: 0.5 * 0.9**count])
@pytest.mark.parametrize(("name", "setting"), [("Adamax", "betas"), ("Rprop", "etas")])
def test_a_setting_that_is_a_list_is_in_the_state_as_a_tuple(name, setting, first):
    params = {"w": torch.randn(33)}
    results = []
    for kind in (list, tuple):
        numbers = kind([first, 1.5 if name == "Rprop" else 0.75])
        optimizer = ps.from_torch(
            getattr(OPTIM, name), lr=0.1, in_state=(setting,), **{setting: numbers}
        )
        state = optimizer.init(params)
        results.append(steps_of(optimizer, params, [{"w": torch.ones(33)}] * 3, state))
    assert same_bits(*results)


@each_class
def test_settings_in_the_state_are_one_a_member_under_vmap(name, settings):
    """Also where nothing but they is batched. Muon's products in bfloat16 round otherwise."""
    params = shapes_of(name, torch.float32)
    grads = [{key: torch.randn_like(p) for key, p in params.items()} for _ in range(3)]
    optimizer = in_state(name, settings, lr=0.01)
    state = moved_to(optimizer.init(params), settings)
    halves = pytree.tree_map(lambda value: 0.5 * value, state.hyper)
    tolerance = 2e-3 if name == "Muon" else 1e-6
    assert_vmap_equals_loop(
        lambda hyper: steps_of(optimizer, params, grads, state._replace(hyper=hyper))[0],
        ps.stack_states([state.hyper, halves]),
        **{"rtol": tolerance, "atol": tolerance},
    )


def test_settings_in_the_state_are_saved_and_go_into_torchs_state_dict_and_back(tmp_path):
    params = make_params()
    overrides = {"gain": {"weight_decay": 0.0}}
    optimizer = in_state("AdamW", ["betas", "weight_decay"], overrides=overrides)
    _, state = ours(optimizer, steps=2)
    state = moved_to(state, {"betas": (0.75, 0.875), "weight_decay": 0.3})
    ps.save(tmp_path / "state.pt", state)
    assert same_bits(ps.load(tmp_path / "state.pt", like=optimizer.init(params)), state)

    sd = optimizer.to_state_dict(state)
    decays = [group["weight_decay"] for group in sd["param_groups"]]
    assert decays == [state.hyper["weight_decay"].item(), 0.0]
    assert same_bits(optimizer.from_state_dict(sd, params), state)
    weights = [params["conv.weight"], params["head.weight"]], [params["gain"]]
    theirs = OPTIM.AdamW([{"params": group} for group in weights])
    theirs.load_state_dict(sd)
    assert theirs.param_groups[0]["betas"] == (0.75, 0.875)
    assert same_bits(optimizer.from_state_dict(theirs.state_dict(), params), state)

    both = in_state("AdamW", ["weight_decay"], overrides={"gain": {"lr": 0.5}})
    with pytest.raises(ValueError, match=r"weight_decay = \[.*overrides="):
        both.from_state_dict(sd, params)


def test_a_checkpoint_from_before_there_were_settings_in_the_state_loads():
    optimizer, params = ps.from_torch(OPTIM.AdamW, lr=0.5, in_state=("lr",)), {"w": torch.ones(2)}
    state = optimizer.init(params)
    saved = ps.to_state_dict(state._replace(lr=torch.tensor(0.25)))
    assert saved["tree"].keys() == {"applied", "slots", "lr"}  # all that such a file has
    assert same_bits(ps.from_state_dict(saved, like=state), state._replace(lr=torch.tensor(0.25)))


@pytest.mark.parametrize(
    ("cls", "names", "message"),
    [
        ("AdamW", ("beta",), "AdamW has no setting 'beta'. It has: lr, betas"),
        ("AdamW", ("amsgrad",), "amsgrad of AdamW is False; expected a number.*leave amsgrad out"),
        ("AdamW", "lr", "in_state is 'lr', expected a tuple .*Fix: .* with a comma"),
        ("AdamW", {"lr", "eps"}, "expected a tuple of names of settings"),
        ("Muon", ("ns_steps",), "ns_steps of Muon is not read .* takes as data"),
        ("Adagrad", ("initial_accumulator_value",), "value of Adagrad is not read"),
        ("Adafactor", ("eps",), r"eps of Adafactor is \(None, 0.001\); expected a number"),
        ("Rprop", ("lr",), "lr of Rprop is .*leave lr out"),
    ],
)
def test_what_cannot_be_in_the_state_is_refused_when_made(cls, names, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ps.from_torch(getattr(OPTIM, cls), in_state=names)


PAIR = torch.tensor(0.9), torch.tensor(0.99)
LEAF = torch.tensor(0.1, requires_grad=True)


@pytest.mark.parametrize(
    ("in_state", "change", "message"),
    [
        (("betas",), {"hyper": ()}, r"holds the settings \{\}.*'betas': 2.*in_state="),
        (("betas",), {"hyper": {"betas": PAIR[0]}}, r"\{'betas': 'torch.float32 \(\)'\}"),
        (("betas",), {"hyper": {"betas": [torch.ones(2)] * 2}}, "floating 0-d.*torch.vmap"),
        (("betas",), {"hyper": {"betas": (0.9, 0.99)}}, r"\('0.9', '0.99'\)\}; expected float"),
        ((), {"hyper": {"betas": PAIR}}, r"holds the settings \{'betas'.*as in \{\}.*in_state="),
        (("lr",), {"lr": ()}, "as many as in {'lr': 1}.*in_state="),
        (("lr",), {"lr": torch.ones(2)}, "'lr': .*expected floating 0-d tensors"),
        ((), {"lr": torch.tensor(0.1)}, r"as many as in \{\}.*in_state="),
        ((), {"iteration": torch.tensor(1)}, r"schedule_by='applied'; expected \(\)"),
        (("eps",), {"hyper": {"eps": LEAF}}, r"opt_state.*requires a gradient.*torch.func.grad"),
    ],
)
def test_a_state_whose_settings_are_elsewhere_or_on_a_graph_is_refused(in_state, change, message):
    optimizer, params = ps.from_torch(OPTIM.AdamW, in_state=in_state), {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        optimizer.step(params, params, optimizer.init(params)._replace(**change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [case for case in NUMBERS if case[0] != "Muon"],  # takes matrices
)
def test_settings_in_the_state_move_a_parameter_without_dimensions_as_any(
    name, settings, dtype, way
):
    """A formula tells a parameter from a setting that is data by its dimensions."""
    optimizer = ps.from_torch(getattr(OPTIM, name), in_state=tuple(settings), **settings)
    results = []
    for shape in ((), (1,)):
        params = {"w": torch.full(shape, 0.7, dtype=dtype)}
        grads = [{"w": torch.full(shape, g, dtype=dtype)} for g in (0.3, -0.2, 0.4)]
        got, state = steps_of(optimizer, params, grads, optimizer.init(params))
        assert got["w"].shape == shape
        slots = [s["w"].reshape(1) for s in state.slots.values() if s["w"] != ()]
        results.append((got["w"].reshape(1), slots))
    assert same_bits(*results)


def test_bias_corrections_of_betas_in_the_state_are_not_those_of_float32():
    params = {"w": torch.randn(33)}
    settings = {"betas": (0.9, 0.999)}
    fixed = ps.from_torch(OPTIM.AdamW, lr=1.0, **settings)
    moving = in_state("AdamW", settings, lr=1.0)
    zeros = {"w": torch.zeros(33)}
    expected, _ = steps_of(fixed, zeros, [params] * 2, fixed.init(params))
    got, _ = steps_of(moving, zeros, [params] * 2, moving.init(params))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_half_tensors_meet_no_setting_that_an_accelerator_would_round_to_half():
    class Meetings(TorchDispatchMode):
        ops = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
            half = any(arg.ndim and arg.dtype is torch.bfloat16 for arg in inputs)
            if half and any(arg.ndim == 0 and arg.is_floating_point() for arg in inputs):
                self.ops += (func,)
            return func(*args, **(kwargs or {}))

    params = {"w": torch.randn(33, dtype=torch.bfloat16)}
    optimizer = in_state("SGD", {"momentum": 0.9, "weight_decay": 0.1})
    with Meetings() as meetings:
        optimizer.step(params, params, optimizer.init(params))
    assert not meetings.ops


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_setting_that_shares_memory_with_parameters_is_not_written_over(name, way):
    optimizer = ps.from_torch(getattr(torch.optim, name), lr=0.1, in_state=("weight_decay",))
    memory = torch.tensor([1.0, 2.0, 3.0, 0.5])
    params, grads = {"w": memory[:3]}, {"w": torch.ones(3)}
    state = optimizer.init(params)._replace(hyper={"weight_decay": memory[3]})
    call = optimizer, params, grads, state, torch.tensor(False)
    expected = ps.maybe_step(*call)
    assert same_bits(ps.maybe_step(*call, donate=True), expected)
    assert memory.tolist() == [1.0, 2.0, 3.0, 0.5]


# ---- schedules of settings in the state ----------------------------------------------------------

SCHEDULED = [case for case in NUMBERS if case[1].get("momentum") != 0.0]


def halving(value):
    """A schedule of this number, or a tuple of them: it is halved after two steps."""
    if isinstance(value, tuple):
        return tuple(map(halving, value))
    return lambda count: torch.where(count < 2, value, 0.5 * value)


def at(value, count):
    if isinstance(value, tuple):
        return tuple(at(one, count) for one in value)
    return value if count < 2 else 0.5 * value


@pytest.mark.parametrize(("name", "settings"), SCHEDULED, ids=[name for name, _ in SCHEDULED])
def test_a_schedule_stands_for_any_number_in_the_state(name, settings, way):
    """As a loop that writes the numbers of each step into the state."""
    scheduled = {key: halving(value) for key, value in settings.items()}
    optimizer = in_state(name, settings, lr=0.01, **scheduled)
    by_hand = in_state(name, settings, lr=0.01)
    params = shapes_of(name, torch.float32)
    (got, state), (wanted, other) = ((clone(params), o.init(params)) for o in (optimizer, by_hand))
    for count in range(4):
        grads = {key: torch.randn_like(p) for key, p in params.items()}
        got, state = ps.maybe_step(optimizer, got, grads, state, False, donate=count > 1)
        numbers = {key: at(value, count) for key, value in settings.items()}
        wanted, other = by_hand.step(wanted, grads, ps.replace_settings(other, **numbers))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert set(map(float, tensors(state.hyper))) == {1.0}


def test_a_state_dict_has_a_number_in_the_state_times_its_schedule():
    params, settings = make_params(), {"betas": (0.8, halving(0.9)), "weight_decay": halving(0.5)}
    overrides = {"gain": {"weight_decay": 0.0}}
    optimizer = in_state("AdamW", settings, overrides=overrides, **settings)
    state = optimizer.init(params)
    assert [b.item() for b in state.hyper["betas"]] == pytest.approx([0.8, 1.0])
    _, after = optimizer.step(params, params, ps.replace_settings(state, weight_decay=2.0))
    sd = optimizer.to_state_dict(after)
    decays = [group["weight_decay"] for group in sd["param_groups"]]
    assert decays == [1.0, 0.0]
    assert sd["param_groups"][0]["betas"] == pytest.approx((0.8, 0.9))
    assert same_bits(optimizer.from_state_dict(sd, params), after)
    for group in sd["param_groups"]:
        for key in [key for key in group if key.startswith("initial_")]:
            del group[key]  # as a dict of torch's own
    assert optimizer.from_state_dict(sd, params).hyper["weight_decay"] == 1.0


def test_members_have_schedules_at_their_own_counts():
    optimizer = ps.from_torch(
        OPTIM.SGD, lr=0.1, weight_decay=halving(0.5), in_state=("weight_decay",)
    )
    params = {"w": torch.linspace(-1, 1, 4)}
    states = [optimizer.init(params)._replace(applied=torch.tensor(n)) for n in (0, 5)]
    stacked = ps.stack_states([params] * 2)
    assert_vmap_equals_loop(optimizer.step, stacked, stacked, ps.stack_states(states))


def decay_by(schedule):
    return {"weight_decay": schedule, "in_state": ("weight_decay",)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight_decay": halving(0.1)}, r"weight_decay is <function .*in_state=\('weight_decay',"),
        ({"betas": (0.9, halving(0.9))}, r"betas holds <function .*in_state=\('betas',\)"),
        (
            decay_by(0.1) | {"overrides": {"w": {"weight_decay": halving(0.1)}}},
            r"overrides\['w'\]: weight_decay is .*and not in overrides",
        ),
        (decay_by(lambda n: torch.ones(3)), r"returned a tensor torch.float32 \(3,\); expected"),
        (decay_by(lambda n: 0.1 if n > 3 else 0.2), "the schedule .* reads the value of the step"),
        (decay_by(lambda n: -0.1), "Invalid weight_decay value: -0.1"),
    ],
)
def test_what_is_no_schedule_of_a_number_in_the_state_is_refused(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        ps.from_torch(OPTIM.AdamW, **settings)


# ---- replace_settings ----------------------------------------------------------------------------

BOTH = ps.from_torch(torch.optim.AdamW, lr=1e-3, in_state=("lr", "betas", "weight_decay"))
RATE = ps.from_torch(torch.optim.SGD, lr=0.5, in_state=("lr",))
PLAIN = ps.from_torch(torch.optim.SGD, lr=0.5)
WRAPPED = {
    "none": lambda optimizer: optimizer,
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "both": lambda optimizer: ps.with_state_dtype(
        ps.with_master_weights(optimizer), {"exp_avg": torch.bfloat16}
    ),
    "moments": lambda optimizer: ps.with_state_dtype(optimizer, {"exp_avg": torch.bfloat16}),
    "a partition": lambda optimizer: two_parts(optimizer, PLAIN),
    "masters around a partition": lambda optimizer: ps.with_master_weights(
        two_parts(optimizer, PLAIN)
    ),
    "a partition of masters": lambda optimizer: two_parts(ps.with_master_weights(optimizer), PLAIN),
}


def two_parts(body, head):
    return ps.partition(
        {"body": body, "head": head}, lambda name, _: "head" if name == "head" else "body"
    )


def body_and_head():
    return {"w": torch.ones(2, 3), "head": torch.ones(3)}


def of_torch(state):
    """The first state of torch's within another."""
    while not isinstance(state, ps.OptState):
        state = state["body"] if isinstance(state, dict) else state.inner
    return state


@pytest.mark.parametrize("kind", WRAPPED)
def test_settings_are_replaced_wherever_the_state_is(kind):
    optimizer, rule = WRAPPED[kind](BOTH), ps.DynamicScale()
    params = body_and_head()
    opt_state = optimizer.init(params)
    whole = ps.init_train_state(params, {}, optimizer, rule)
    with Untouched((opt_state, whole)):
        replaced = ps.replace_settings(opt_state, lr=0.25, betas=(0.5, 0.75))
        in_whole = ps.replace_settings(whole, lr=0.25, betas=(0.5, 0.75))
    inner, old = of_torch(replaced), of_torch(opt_state)
    by_hand = old._replace(
        lr=torch.tensor(0.25), hyper={**old.hyper, "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    )
    assert same_bits(inner, by_hand)
    assert same_bits(in_whole, whole._replace(opt_state=replaced))
    back = ps.replace_settings(replaced, lr=old.lr, betas=old.hyper["betas"])
    assert same_bits(back, opt_state)
    assert same_bits(
        optimizer.step(params, params, back), optimizer.step(params, params, opt_state)
    )
    assert type(replaced) is type(opt_state)


@examples(10)
@given(value=st.floats(-1e3, 1e3, width=32), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_what_is_replaced_keeps_its_dtype_and_has_memory_of_its_own(value, dtype):
    state = RATE.init(body_and_head())
    state = state._replace(lr=state.lr.to(dtype))
    for given_value in (value, torch.tensor(value), torch.tensor(value, dtype=torch.float64)):
        lr = ps.replace_settings(state, lr=given_value).lr
        assert same_bits(lr, torch.tensor(value, dtype=dtype))
        assert not shares_memory(lr, given_value)
    assert ps.replace_settings(state, lr=1).lr == 1


def test_each_part_has_a_setting_of_its_own_or_all_have_one():
    optimizer = two_parts(RATE, BOTH)
    state = optimizer.init(body_and_head())
    both = ps.replace_settings(state, lr=0.125)
    assert both["body"].lr == both["head"].lr == 0.125
    assert both["body"].lr is not both["head"].lr
    each = ps.replace_settings(state, lr={"body": 0.5, "head": 0.25}, weight_decay=0.75)
    assert (each["body"].lr, each["head"].lr) == (0.5, 0.25)
    assert each["head"].hyper["weight_decay"] == 0.75
    one = ps.replace_settings(state, lr={"head": 0.0625}, betas={"head": (0.1, 0.2)})
    assert same_bits(one["body"], state["body"])
    assert one["head"].lr == 0.0625
    assert torch.stack(one["head"].hyper["betas"]).tolist() == pytest.approx([0.1, 0.2])


def nested_parts():
    """A partition in another one."""
    return ps.partition({"a": two_parts(RATE, BOTH)}, lambda name, _: "a")


def test_a_dict_replaces_in_nested_parts_by_the_keys_from_the_outermost():
    state = nested_parts().init(body_and_head())
    assert ps.replace_settings(state, lr={"a": {"head": 0.25}})["a"]["head"].lr == 0.25
    assert ps.replace_settings(state, lr={"a": {"head": 0.25}})["a"]["body"].lr == 0.5
    both = ps.replace_settings(state, lr={"a": 0.25})["a"]
    assert both["body"].lr == both["head"].lr == 0.25


def test_a_stacked_state_takes_a_value_a_member_or_one_for_all():
    states = ps.stack_states([RATE.init(body_and_head())] * 3)
    rates = torch.tensor([0.1, 0.2, 0.3])
    assert same_bits(ps.replace_settings(states, lr=rates).lr, rates)
    for one in (0.5, torch.tensor(0.5)):
        replaced = ps.replace_settings(states, lr=one).lr
        assert same_bits(replaced, torch.full((3,), 0.5))
        assert replaced.is_contiguous()
    for state, rate in ((states, rates[:2]), (RATE.init(body_and_head()), rates)):
        with pytest.raises(ValueError, match=r"lr is torch.float32 \([23],\), the state holds"):
            ps.replace_settings(state, lr=rate)


def test_a_derivative_goes_through_what_is_replaced():
    params = {"w": torch.ones(2)}
    state = RATE.init(params)

    def after(rate):
        return RATE.step(params, params, ps.replace_settings(state, lr=rate))[0]["w"].sum()

    assert torch.func.grad(after)(torch.tensor(0.5)) == -2


@pytest.mark.parametrize(
    ("optimizer", "settings", "words"),
    [
        (BOTH, {"lr": 1.0, "eps": 1.0}, r"no setting 'eps'.*It holds: lr, betas, weight_decay\."),
        (PLAIN, {"lr": 0.1}, r"no setting 'lr'.*It holds: nothing.*in_state=\('lr',\)"),
        (two_parts(RATE, PLAIN), {"eps": 1.0}, r"It holds: body: lr; head: nothing\."),
        (two_parts(RATE, PLAIN), {"lr": {"head": 1.0}}, r"the part 'head' of the state holds no"),
        (RATE, {"lr": {"body": 1.0}}, r"the part 'body' of the state holds no setting 'lr'"),
        (
            nested_parts(),
            {"lr": {"a": {"body": 0.25, "tail": 0.25}}},
            r"the part 'a\.tail' of the state .*It holds: a\.body: lr; a\.head: lr",
        ),
        (nested_parts(), {"lr": {"a": {"body": {"a": 0.25}}}}, r"the part 'a\.body\.a' of"),
        (ps.from_transformation((dict, lambda g, s, p: (g, s))), {"lr": 1.0}, "It holds: not"),
    ],
)
def test_a_setting_that_is_not_in_the_state_is_refused_with_those_that_are(
    optimizer, settings, words
):
    state = optimizer.init(body_and_head())
    with Untouched(state), pytest.raises(ValueError, match=words):
        ps.replace_settings(state, **settings)
    assert same_bits(ps.replace_settings(state), state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": "0.1"}, r"lr is '0\.1'; expected a finite number"),
        ({"lr": True}, "lr is True"),
        ({"lr": torch.tensor(True)}, r"lr is tensor\(True\)"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": (0.1, 0.2)}, r"lr is \(0\.1, 0\.2\)"),
        ({"betas": 0.9}, r"betas is 0\.9; the state holds a tuple of 2.*betas=\(0\.9, 0\.9\)"),
        ({"betas": (0.9,)}, "a tuple of 2"),
    ],
)
def test_what_is_no_number_is_refused(settings, words):
    with pytest.raises(TypeError, match=words):
        ps.replace_settings(BOTH.init(body_and_head()), **settings)


def test_a_number_out_of_the_range_of_float32_is_refused():
    state = BOTH.init({"w": torch.ones(1)})
    for number in (1e39, -(10**39)):
        for name in ("lr", "weight_decay"):
            with pytest.raises(ValueError, match=rf"{name} is -?1e\+39, out of the range"):
                ps.replace_settings(state, **{name: number})
        wide = state._replace(lr=state.lr.double())
        assert ps.replace_settings(wide, lr=number).lr == float(number)
    with pytest.raises(ValueError, match=r"a setting in the state is 1e\+39, out of the range"):
        ps.from_torch(torch.optim.SGD, lr=1e39, in_state=("lr",))


@pytest.mark.parametrize("in_state", [(), ("momentum",), ("lr", "momentum")])
def test_a_restored_momentum_goes_on_where_the_count_starts_anew(in_state):
    settings = {"lr": 0.1, "momentum": 0.9}
    live = torch.nn.Parameter(torch.linspace(-1, 1, 33))
    theirs = torch.optim.SGD([live], **settings)
    optimizer = ps.from_torch(torch.optim.SGD, in_state=in_state, **settings)
    for step in range(4):
        if step == 2:
            params = {"w": live.detach().clone()}
            state = optimizer.from_state_dict(theirs.state_dict(), params, applied=0)
        live.grad = torch.cos(3 * live.detach())
        theirs.step()
        if step >= 2:
            params, state = optimizer.step(params, {"w": live.grad}, state)
    torch.testing.assert_close(params["w"], live.detach())


def test_a_rate_that_is_a_tensor_is_copied_into_the_state():
    rate = torch.tensor(0.1, dtype=torch.float64)
    state = ps.from_torch(OPTIM.SGD, lr=rate, in_state=("lr",)).init({"w": torch.ones(2)})
    assert state.lr.dtype is torch.float32
    rate.zero_()
    assert state.lr == torch.tensor(0.1)
