"""An optimizer from a formula: that of a class of torch, with all that such a class has here."""

import functools
import itertools

import hypothesis.strategies as st
import pytest
import torch
from helpers import (
    Untouched,
    assert_close,
    batch,
    clone,
    examples,
    job,
    same_bits,
    slots_of,
    stack,
    tensors,
)
from hypothesis import given

import purescale as ps
from purescale._torch.tracing import as_on_an_accelerator
from purescale.testing import assert_optimizer, assert_pure

SIZES = (5, 33, 300)


def lion_step(param, grad, slots, settings, t):
    """Chen et al., Symbolic discovery of optimization algorithms (2023)."""
    beta1, beta2 = settings["betas"]
    momentum = slots["exp_avg"]
    direction = (beta1 * momentum + (1 - beta1) * grad).sign()
    param = param - settings["lr"] * (direction + settings["weight_decay"] * param)
    return param, {"exp_avg": beta2 * momentum + (1 - beta2) * grad}


def adam_step(param, grad, slots, settings, t):
    beta1, beta2 = settings["betas"]
    param = param * (1 - settings["lr"] * settings["weight_decay"])
    m = beta1 * slots["exp_avg"] + (1 - beta1) * grad
    v = beta2 * slots["exp_avg_sq"] + (1 - beta2) * grad * grad
    denominator = (v / (1 - beta2**t)).sqrt() + settings["eps"]
    step = settings["lr"] / (1 - beta1**t) * m / denominator
    return param - step, {"exp_avg": m, "exp_avg_sq": v}


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
lion = functools.partial(ps.from_formula, lion_step, ("exp_avg",), True, **SETTINGS)
adamw = functools.partial(
    ps.from_formula, adam_step, ("exp_avg", "exp_avg_sq"), True, eps=1e-8, **SETTINGS
)
of_torch = functools.partial(ps.from_torch, torch.optim.AdamW, **SETTINGS)


def params_of(dtype=torch.float32):
    return {f"layer.{n}": torch.linspace(-1, 1, n, dtype=torch.float64).to(dtype) for n in SIZES}


def grads_of(params, index):
    return {n: torch.cos(3 * index + 7 * torch.arange(p.numel())).to(p) for n, p in params.items()}


def lion_in_float64(params, runs, lr, betas, weight_decay):
    """Return Lion's parameters, by its authors' two lines in place, in float64."""
    params = {name: leaf.double().clone() for name, leaf in params.items()}
    momenta = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for grads in runs:
        for name, p in params.items():
            g, m = grads[name].double(), momenta[name]
            p.mul_(1 - lr * weight_decay).add_(m.lerp(g, 1 - betas[0]).sign(), alpha=-lr)
            m.lerp_(g, 1 - betas[1])
    return params


def stepped(optimizer, params, runs, skips=(), *, donate=False):
    state = optimizer.init(params)
    if donate:
        params = clone(params)
    for index, grads in enumerate(runs):
        found_inf = torch.tensor(index in skips)
        params, state = ps.maybe_step(optimizer, params, grads, state, found_inf, donate=donate)
    return params, state


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_is_that_of_its_authors(dtype, donate):
    params = params_of(dtype)
    runs = [grads_of(params, index) for index in range(5)]
    expected = lion_in_float64(params, [runs[i] for i in (0, 1, 3, 4)], **SETTINGS)
    result, state = stepped(lion(), params, runs, skips={2}, donate=donate)
    assert_close({k: v.double() for k, v in result.items()}, expected, rtol=1e-5, atol=1e-6)
    assert state.applied == 4


def test_a_half_parameter_is_stepped_in_float32_and_rounded_once():
    params = params_of(torch.bfloat16)
    grads = grads_of(params, 0)
    result, _ = stepped(lion(), params, [grads])
    wide = lion_in_float64(params, [grads], **SETTINGS)
    assert_close(result, {name: leaf.bfloat16() for name, leaf in wide.items()}, rtol=0, atol=0)


@examples(8)
@given(data=st.data())
def test_the_formula_of_adamw_is_torchs_whatever_is_skipped_or_set(data):
    params = params_of()
    options = {
        "in_state": data.draw(st.sampled_from([(), ("lr",), ("lr", "weight_decay", "betas")])),
        "schedule_by": data.draw(st.sampled_from(["applied", "iteration"])),
        "overrides": {"*.33": {"weight_decay": 0.0}},
    }
    if data.draw(st.booleans()):
        options["lr"] = lambda count: 1e-2 / (1 + count)
    ours, theirs = adamw(**options), of_torch(**options)
    results = [(params, optimizer.init(params)) for optimizer in (ours, theirs)]
    for index in range(4):
        grads = grads_of(params, index)
        found_inf = torch.tensor(data.draw(st.booleans()))
        results = [
            ps.maybe_step(optimizer, p, grads, state, found_inf)
            for optimizer, (p, state) in zip((ours, theirs), results, strict=True)
        ]
    (ours, state), (theirs, of_class) = results
    assert_close((ours, state), (theirs, of_class), rtol=2e-6, atol=1e-7)


def test_the_derivative_by_the_rate_is_that_of_finite_differences():
    params = {"w": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    optimizer = adamw()

    def loss(lr):
        own = adamw(lr=lr, differentiable=True)
        return (own.step(params, grads_of(params, 0), optimizer.init(params))[0]["w"] ** 2).sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    difference = (loss(lr + 1e-5) - loss(lr - 1e-5)) / 2e-5
    torch.testing.assert_close(torch.func.grad(loss)(lr), difference, rtol=1e-6, atol=1e-8)
    by_autograd = lr.clone().requires_grad_()
    loss(by_autograd).backward()
    torch.testing.assert_close(by_autograd.grad, difference, rtol=1e-6, atol=1e-8)


WRAPPERS = {
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "narrow": lambda optimizer: ps.with_state_dtype(optimizer, {"exp_avg": torch.bfloat16}),
    "partition": lambda optimizer: ps.partition(
        {"a": optimizer, "b": ps.from_torch(torch.optim.SGD, lr=0.1)},
        lambda name, leaf: "b" if "33" in name else "a",
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_inside_of_a_wrapper_it_is_the_class_of_torch(name):
    wrap = WRAPPERS[name]
    params = params_of(torch.bfloat16 if name in ("masters", "rounding") else torch.float32)
    runs = [grads_of(params, index) for index in range(4)]
    both = [stepped(wrap(make()), params, runs, skips={1}) for make in (adamw, of_torch)]
    ours, theirs = [ps.master_weights(*each) if name == "masters" else each[0] for each in both]
    # A different rounding of float32 may be another bfloat16.
    tolerance = {"masters": 1e-6, "rounding": 8e-3, "narrow": 1e-4, "partition": 1e-6}[name]
    assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_it_holds_the_laws_of_an_optimizer():
    assert_optimizer(lion(in_state=("lr",)))
    assert_optimizer(ps.from_formula(masked_step, ("m",), lr=0.1))


@pytest.mark.slow
def test_a_compiled_step_is_the_eager_one():
    state, step = job(lion(), ps.DynamicScale(2.0**10))
    expected = step(state, [batch(0)])[0].opt_state
    for compiled in (
        torch.compile(step, fullgraph=True, backend="aot_eager"),
        ps.jit(step, backend="aot_eager"),
    ):
        found = compiled(state, [batch(0)])[0].opt_state
        assert_close(found, expected, rtol=1e-2, atol=1e-3)


SLOTS = {
    "one for each matrix": lambda p: torch.zeros(p.shape[:-2]),
    "one for each kernel": lambda p: p.new_zeros(p.shape[:2]),
}


@pytest.mark.parametrize("shape", [(), (33,), (5, 33), (2, 5, 3, 33)], ids=str)
@pytest.mark.parametrize("slot", SLOTS)
def test_the_shape_of_a_slot_may_follow_from_any_dimensions(slot, shape):
    """An optimizer is made before it sees a parameter."""

    def step(param, grad, slots, settings, t):
        return param - settings["lr"] * grad, {"calls": slots["calls"] + 1}

    optimizer = ps.from_formula(step, {"calls": SLOTS[slot]}, lr=0.5)
    params, grads = {"w": torch.ones(shape)}, {"w": torch.full(shape, 0.5)}
    state = optimizer.init(params)
    expected = torch.full_like(state.slots["calls"]["w"], 2.0)
    for donate in (False, True):
        params, state = ps.maybe_step(optimizer, params, grads, state, False, donate=donate)
    assert_close(params["w"], torch.full(shape, 0.5))
    assert_close(state.slots["calls"]["w"], expected)
    state.slots["calls"]["w"] = torch.zeros(4, *expected.shape)
    with pytest.raises(ValueError, match=r"calls of w is .*Likely cause: .*stacked"):
        optimizer.step(params, grads, state)


REFUSED = [
    ({"step": lambda param, grad: param}, TypeError, "too many positional arguments"),
    ({"step": 1.0}, TypeError, "1.0 is not a callable object"),
    ({"slots": {"m": torch.zeros(())}}, TypeError, r"slots\['m'\] gives tensor.*zeros_like"),
    ({"slots": {"m": lambda p: 0.0}}, TypeError, r"slots\['m'\] gives 0.0"),
    (
        {"slots": {"m": torch.sum}, "elementwise": True},
        *(ValueError, r"slots\['m'\] is .*no `elementwise=True`"),
    ),
    ({"slots": {"m": lambda p: p.float()}}, ValueError, r"'m'\] is torch.float32 for .*bfloat16"),
    ({"slots": {"m": lambda p: p > 0}}, ValueError, r"slots\['m'\] is torch.bool .*zeros_like"),
    ({"slots": ("step",)}, ValueError, "slots have 'step'.*Fix: another name"),
    ({"slots": ("none",)}, ValueError, "slots have 'none'.*Fix: another name"),
    ({"slots": ("sizes",)}, ValueError, "slots have 'sizes'.*Fix: another name"),
    ({"in_state": ("beta",)}, ValueError, "has no setting 'beta'"),
    ({"overrides": {"*": {"beta": 1.0}}}, ValueError, "has no setting 'beta'"),
    ({"lr": -1.0}, ValueError, "expected a number that is not negative"),
    ({"lr": float("nan")}, ValueError, "expected a number that is not negative"),
    ({"overrides": {"*.5": {"lr": -1.0}}}, ValueError, "expected a number that is not negative"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_is_no_formula_is_refused_with_the_cure(options, error, message):
    arguments = {"step": lion_step, "slots": ("exp_avg",), **SETTINGS, **options}
    with pytest.raises(error, match=message):
        ps.from_formula(**arguments)


def test_it_says_what_it_was_made_of():
    assert repr(lion()) == ("from_formula(lion_step, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)")


def test_a_setting_with_a_name_that_means_something_else_is_refused_and_no_other():
    def step(param, grad, slots, settings, t):
        return param - settings[name] * grad, {}

    for name in ("maximize", "params", "foreach", "state", "param_names", "initial_lr", "self"):
        with pytest.raises(ValueError, match=f"settings have '{name}'"):
            ps.from_formula(step, **{name: True})
    params = {"w": torch.ones(3)}
    for name in ("expand", "t", "settings", "h"):
        optimizer = ps.from_formula(step, **{name: 0.5})
        stepped, _ = optimizer.step(params, params, optimizer.init(params))
        assert torch.equal(stepped["w"], torch.full((3,), 0.5))


RESULTS = {
    "no slots": lambda param, m: (param, {}),
    "another slot": lambda param, m: (param, {"m": m, "other": m}),
    "a typing error": lambda param, m: (param, {"n": m}),
    "a mean": lambda param, m: (param.sum(), {"m": m}),
    "a slot of another shape": lambda param, m: (param, {"m": m[:1] * 2}),
    "a number": lambda param, m: (param, {"m": 0.0}),
    "nothing": lambda param, m: None,
    "no pair": lambda param, m: param,
    "three": lambda param, m: (param, {"m": m}, 1),
    "no dict": lambda param, m: (param, m),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_that_is_not_a_parameter_and_its_slots_is_refused_with_the_cure(result):
    def step(param, grad, slots, settings, t):
        return result(param, slots["m"])

    optimizer, params = ps.from_formula(step, ("m",)), {"w": torch.ones(3)}
    words = r"step returned .*expected a new parameter, .*\(3,\).*'m'.*Fix: `return param"
    with pytest.raises(ValueError, match=words):
        optimizer.step(params, params, optimizer.init(params))


def norm_step(param, grad, slots, settings, t):
    return param - settings["lr"] * grad / grad.norm(), {}


def first_step(param, grad, slots, settings, t):
    return param - settings["lr"] * grad[:1], {}


def masked_step(param, grad, slots, settings, t):
    mask = (grad * slots["m"] >= 0).to(grad.dtype)
    m = 0.9 * slots["m"] + 0.1 * grad
    return param - settings["lr"] * m * mask / mask.mean().clamp(min=0.1), {"m": m}


def threshold_step(param, grad, slots, settings, t):
    return param - settings["lr"] * grad * (100 / grad.norm()).clamp(max=1), {}


def slot_step(param, grad, slots, settings, t):
    return param - settings["lr"] * grad, {"m": slots["m"] + grad.mean()}


def matrix_step(param, grad, slots, settings, t):
    decay = 0.1 if param.ndim > 1 else 0.0
    return param - settings["lr"] * (grad + decay * param), {}


NOT_ELEMENTWISE = dict.fromkeys((matrix_step, norm_step, threshold_step, first_step), ())
NOT_ELEMENTWISE |= {masked_step: ("m",), slot_step: ("m",)}


@pytest.mark.parametrize("step", NOT_ELEMENTWISE)
def test_a_promise_to_be_elementwise_that_is_broken_is_told_by_assert_optimizer(step):
    lr = 1e-6 if step in (norm_step, masked_step) else 1.0
    optimizer = ps.from_formula(step, NOT_ELEMENTWISE[step], elementwise=True, lr=lr)
    if step in (threshold_step, slot_step):
        optimizer = ps.with_master_weights(optimizer)
    with pytest.raises(AssertionError, match=r"(?s)law `elementwise`.*no `elementwise=True`"):
        assert_optimizer(optimizer)


@pytest.mark.parametrize("step", NOT_ELEMENTWISE)
@given(sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), seed=st.integers(0, 9))
@examples(5)
def test_a_formula_is_its_own_of_each_parameter_unless_it_is_said_to_be_elementwise(
    step, sizes, seed
):
    """One after another, and under vmap."""
    generator = torch.Generator().manual_seed(seed)
    params, grads = (
        {str(i): torch.randn(size, generator=generator) for i, size in enumerate(sizes)}
        for _ in range(2)
    )
    optimizer = ps.from_formula(step, NOT_ELEMENTWISE[step], lr=0.1)
    state = optimizer.init(params)
    for _ in range(2):
        old, before = params, state
        t = state.applied + 1
        expected = {
            name: step(old[name], grads[name], slots_of(before, name), {"lr": 0.1}, t)
            for name in old
        }
        stacked = stack([params]), stack([grads]), ps.stack_states([state])
        mapped = torch.vmap(optimizer.step)(*stacked)
        params, state = optimizer.step(params, grads, state)
        assert_close({name: (params[name], slots_of(state, name)) for name in params}, expected)
        assert_close(ps.member(mapped, 0), (params, state))


WRITES = {
    "param": lambda p, g, slots, settings, t: (p.sub_(g), slots),
    r"slots\['m'\]": lambda p, g, slots, settings, t: (p - slots["m"].mul_(0.9).add_(g), slots),
    "grad": lambda p, g, slots, settings, t: (p - g.mul_(0.1), slots),
    "t": lambda p, g, slots, settings, t: (p - g / t.add_(1), slots),
    r"settings\['lr'\]": lambda p, g, slots, settings, t: (p - g * settings["lr"].mul_(0.5), slots),
}


def skipped_without_a_read(optimizer, *trees):
    with as_on_an_accelerator():
        return ps.maybe_step(optimizer, *trees, True, donate=True)


MODES = {
    "step": lambda optimizer, *trees: optimizer.step(*trees),
    "maybe_step": lambda optimizer, *trees: ps.maybe_step(optimizer, *trees, False),
    "donated": lambda optimizer, *trees: ps.maybe_step(optimizer, *trees, False, donate=True),
    "skipped": lambda optimizer, *trees: skipped_without_a_read(optimizer, *trees),
    "vmap": lambda optimizer, *trees: torch.vmap(optimizer.step)(*map(ps.stack_states, zip(trees))),
    "grad": lambda optimizer, params, *trees: torch.func.grad(
        lambda p: sum(map(torch.sum, optimizer.step(p, *trees)[0].values()))
    )(params),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", WRITES)
def test_a_formula_that_writes_into_an_argument_is_refused_and_nothing_changes(what, mode):
    kinds = (False, torch.float32, SIZES), (True, torch.bfloat16, (1, *SIZES)), (True, None, (33,))
    for elementwise, dtype, sizes in kinds:
        optimizer = ps.from_formula(WRITES[what], ("m",), elementwise, lr=torch.tensor(0.1))
        params = {str(index): torch.ones(size, dtype=dtype) for index, size in enumerate(sizes)}
        trees = params, clone(params), optimizer.init(params)
        with Untouched(trees), pytest.raises(RuntimeError, match=rf"wrote into {what};"):
            MODES[mode](optimizer, *trees)


@pytest.mark.parametrize("donate", [False, True])
def test_a_skipped_step_on_a_cpu_calls_no_formula_and_counts_an_iteration(donate):
    calls = []

    def step(param, grad, slots, settings, t):
        calls.append(param)
        return param - grad, slots

    optimizer = ps.from_formula(
        step, ("m",), True, lr=lambda t: 0.1 / (t + 1), schedule_by="iteration"
    )
    params = {"a": torch.ones(5), "b": torch.ones(33)}
    old = clone((params, state := optimizer.init(params)))
    new, new_state = ps.maybe_step(optimizer, params, clone(params), state, True, donate=donate)
    assert calls == []
    assert new_state.iteration == 1
    assert same_bits((new, new_state._replace(iteration=old[1].iteration)), old)


def test_a_formula_that_begins_to_write_later_is_refused_too():
    calls = []

    def step(param, grad, slots, settings, t):
        calls.append(param)
        return (param - grad if len(calls) < 3 else param.sub_(grad)), slots

    optimizer, params = ps.from_formula(step), {"w": torch.ones(33)}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.step(params, params, state)
    with pytest.raises(RuntimeError, match=r"step wrote into param; .*Fix: a new tensor"):
        optimizer.step(params, params, state)


def test_a_formula_may_put_new_slots_into_the_dict_that_it_is_given():
    def step(param, grad, slots, settings, t):
        slots["m"] = slots["m"] + grad
        return param - slots["m"], slots

    optimizer, params = ps.from_formula(step, ("m",)), {"w": torch.ones(33)}
    params, state = assert_pure(optimizer.step, params, params, optimizer.init(params))
    assert torch.equal(state.slots["m"]["w"], torch.ones(33))


@pytest.mark.slow
def test_a_compiled_step_overwrites_nothing_by_a_formula_that_writes():
    optimizer, params = ps.from_formula(WRITES["param"], ("m",)), {"w": torch.ones(33)}
    trees = params, clone(params), optimizer.init(params)
    for compiler in (torch.compile, ps.jit):
        compiled = compiler(optimizer.step, backend="aot_eager")
        with Untouched(trees), pytest.raises((RuntimeError, ValueError), match=r"write|wrote"):
            compiled(*trees)


def test_slots_are_in_memory_of_their_own():
    def step(param, grad, slots, settings, t):
        return param - grad, {"anchor": slots["anchor"]}

    optimizer, params = ps.from_formula(step, {"anchor": lambda p: p}), {"w": torch.ones(3)}
    assert same_bits(assert_pure(optimizer.init, params).slots["anchor"], params)


def test_a_state_dict_without_the_count_that_a_formula_reads_is_refused():
    def step(param, grad, slots, settings, t):
        return param - grad / t.to(param.dtype), {"m": slots["m"] + grad}

    optimizer, params = ps.from_formula(step, ("m",), in_state=("lr",)), {"w": torch.ones(3)}
    _, state = stepped(optimizer, params, [params] * 3)
    sd = optimizer.to_state_dict(state)
    with pytest.raises(ValueError, match=r"step is given the number of the step.*applied="):
        optimizer.from_state_dict(sd, params)
    assert same_bits(optimizer.from_state_dict(sd, params, applied=state.applied), state)


HANDED_BACK = {
    "the parameter": lambda param, grad, slots, settings, t: (param, {"m": slots["m"] + grad}),
    "the gradient": lambda param, grad, slots, settings, t: (param - grad, {"m": grad}),
    "a slot": lambda param, grad, slots, settings, t: (param - grad, {"m": slots["m"]}),
    "a view": lambda param, grad, slots, settings, t: (param - grad, {"m": grad[:]}),
    "one tensor twice": lambda param, grad, slots, settings, t: (new := param - grad, {"m": new}),
}


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("step", HANDED_BACK.values(), ids=HANDED_BACK)
def test_results_are_in_memory_of_their_own_whatever_a_formula_hands_back(step, elementwise):
    optimizer = ps.from_formula(step, ("m",), elementwise)
    dtypes = torch.float32, torch.bfloat16, *([torch.complex64] if elementwise else [])
    for dtype, shapes in itertools.product(dtypes, ([()], [(33,), (300,)])):
        params = {str(index): torch.ones(shape, dtype=dtype) for index, shape in enumerate(shapes)}
        grads = {name: torch.full_like(leaf, 0.5) for name, leaf in params.items()}
        new = assert_pure(optimizer.step, params, grads, optimizer.init(params))
        pointers = [leaf.untyped_storage().data_ptr() for leaf in tensors(new)]
        assert len(set(pointers)) == len(pointers)
