"""Derivatives through a step: torch.func, forward mode, and in words what cannot be had."""

import functools

import pytest
import torch
from helpers import CLASSES, at, on_an_accelerator, started, tensors
from torch.autograd import forward_ad

import purescale as ps

OPTIM = torch.optim
RULE = ps.DynamicScale(init_scale=2.0**4)
EVERY = {name: CLASSES[name] for name in CLASSES if name not in ("Adafactor", "Muon")}
EVERY |= {"SGD": {"momentum": 0.9, "dampening": 0.5}}
WEIGHT = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], dtype=torch.float64)
GRAD = torch.tensor([[1.0, 2.0, -0.5], [-1.0, 0.25, 3.0]], dtype=torch.float64)


def stepped(name, lr, weight, grad, steps=7, **settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=lr, **settings)
    params = {"w": weight}
    state = optimizer.init(params)
    for step in range(steps):
        params, state = ps.maybe_step(
            optimizer, params, {"w": grad * (step + 1)}, state, torch.tensor(step == 2)
        )
    return params["w"].sum()


def difference(fn, x, width):
    """The derivative of `fn` in the direction of ones, by differences in float64."""
    return (fn(x + width) - fn(x - width)) / (2 * width)


each_class = pytest.mark.parametrize(("name", "settings"), [*EVERY.items(), ("Muon", {})])


@each_class
def test_derivatives_by_rate_parameters_and_gradients_are_those_of_differences(name, settings):
    """Muon's in float32 and by its rate: torch orthogonalises in bfloat16, where gradients have no
    useful differences. Rprop looks at their signs alone.
    """
    dtype, width, near = torch.float64, 1e-5, {"rtol": 1e-3, "atol": 1e-6}
    if name == "Muon":
        dtype, width, near = torch.float32, 5e-3, {"rtol": 1e-2, "atol": 1e-2}
    of = functools.partial(stepped, name, **settings)
    rate, weight, grad = torch.tensor(0.01, dtype=dtype), WEIGHT.to(dtype), GRAD.to(dtype)
    by_rate, by_weight, by_grad = torch.func.grad(of, argnums=(0, 1, 2))(rate, weight, grad)
    expected = difference(lambda rate: of(rate, weight, grad), rate, width)
    torch.testing.assert_close(by_rate, expected, **near)
    if name != "Muon":
        torch.testing.assert_close(by_weight, torch.ones_like(weight), rtol=1e-2, atol=1e-2)
    if name not in ("Muon", "Rprop"):
        expected = difference(lambda grad: of(rate, weight, grad), grad, 1e-6)
        torch.testing.assert_close(by_grad.sum(), expected, rtol=1e-3, atol=1e-6)


@each_class
def test_no_derivative_is_nan_where_an_element_of_the_gradient_is_zero(name, settings):
    grad = GRAD.clone()
    grad[0, 1] = 0.0
    found = torch.func.grad(functools.partial(stepped, name, **settings), argnums=(0, 1, 2))(
        torch.tensor(0.01).double(), WEIGHT, grad
    )
    assert all(tensor.isfinite().all() for tensor in found)


def trained(weight, x, count=1, **settings):
    def loss_fn(params, buffers, x):
        return (params["w"] * x).sin().sum(), {"seen": buffers["seen"] + x.sum()}

    adamw = ps.from_torch(OPTIM.AdamW, lr=0.1)
    state, step = started(
        {"w": weight}, None, adamw, RULE, loss_fn=loss_fn, buffers={"seen": x.sum()}, **settings
    )
    for _ in range(2):
        state, info = step(state, [x] * count)
    return state.params["w"].sum() + state.buffers["seen"] + info.loss


def loss_with_overflow(params, buffers, factor):
    """A loss whose gradient is inf or NaN where its factor is, and its second derivative is not."""
    loss = (params["w"] * GRAD).sum() * factor + params["w"].square().sum()
    return loss + params["empty"].sum(), buffers


SKIPPED = [
    *EVERY.items(),
    *(("Muon", {}), ("Adafactor", {"foreach": False})),
    *[("Adam", {"by": "backward"})] * 2,
]


@pytest.mark.parametrize(
    ("name", "settings", "factor", "max_norm"),
    [
        (name, settings, *[(float("inf"), 1.0), (float("nan"), None)][index % 2])
        for index, (name, settings) in enumerate(SKIPPED)
    ],
)
def test_a_skipped_step_is_left_out_of_the_derivative(name, settings, factor, max_norm):
    """It was NaN, as for `torch.where` over numbers that are not finite."""
    by_backward = "by" in settings
    settings = {"differentiable": True} if by_backward else settings
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, **settings)
    given = {"loss_fn": loss_with_overflow, "max_norm": max_norm}
    params = {"w": WEIGHT, "empty": torch.zeros(0, 3)}
    begun, step = started(params, None, optimizer, ps.StaticScale(2.0), **given)

    def end(weight, factors):
        state = begun._replace(params={**params, "w": weight})
        for one in factors:
            state, _ = step(state, [torch.tensor(one).double()])
        return (state.params["w"] * GRAD).sum()

    def derivative(factors):
        if not by_backward:
            return torch.func.grad(end)(WEIGHT, factors)
        weight = WEIGHT.clone().requires_grad_()
        return torch.autograd.grad(end(weight, factors), weight)[0]

    torch.testing.assert_close(derivative((1.0, factor, 1.0)), derivative((1.0, 1.0)))


@pytest.mark.parametrize("bound", [0.0, float("nan"), 1.0], ids="bound {}".format)
@pytest.mark.parametrize("around", ["nothing", "schedule", "masters", "partition"])
def test_the_derivatives_of_a_skipped_step_by_gradients_and_bound_are_zero(around, bound):
    adamw = ps.from_torch(OPTIM.AdamW, lr=0.1)
    optimizer = {
        "nothing": lambda: adamw,
        "schedule": lambda: ps.with_schedule_free(adamw),
        "masters": lambda: ps.with_master_weights(adamw),
        "partition": lambda: ps.partition({"all": ps.with_schedule_free(adamw)}, lambda *_: "all"),
    }[around]()
    params, scaler = {"w": torch.ones(5)}, ps.StaticScale(2.0).init()
    state, last = optimizer.init(params), float("inf") if bound == 1.0 else 1.0

    def end(grad, bound):
        grads = {"w": grad}
        out = ps.unscale_and_step(optimizer, scaler, params, grads, state, max_norm=bound)
        return (out.params["w"] * torch.arange(5.0)).sum()

    grad = torch.tensor([1.0, -2.0, 3.0, 4.0, last])
    slopes = torch.func.grad(end, argnums=(0, 1))(grad, torch.tensor(bound))
    assert [slope.tolist() for slope in slopes] == [[0.0] * 5, 0.0]


@pytest.mark.parametrize("num_leaves", [2, 20])  # measured one by one, and joined
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("norm_type", [2.0, 5.0, float("inf")])
def test_the_derivatives_of_a_skipped_and_clipped_step_by_scale_and_gradient_are_zero(
    norm_type, bad, num_leaves
):
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, differentiable=True)
    params = [torch.ones(5) for _ in range(num_leaves)]
    rest = [torch.full((5,), 3.0) for _ in range(num_leaves - 1)]

    def end(scale, grad):
        scaler = ps.NoScale().init()._replace(scale=scale)
        out = ps.unscale_and_step(
            *(sgd, scaler, params, [grad, *rest], sgd.init(params)),
            max_norm=1.0,
            norm_type=norm_type,
        )
        return sum(param.sum() for param in out.params)

    arguments = torch.tensor(4.0), torch.tensor([1.0, bad, -2.0, 0.0, 3.0])
    for slopes in (
        torch.func.grad(end, argnums=(0, 1))(*arguments),
        torch.autograd.grad(end(*(x.requires_grad_() for x in arguments)), arguments),
    ):
        assert [slope.tolist() for slope in slopes] == [0.0, [0.0] * 5]


def accumulated(grad):
    accum = ps.init_accum({"w": grad})
    accum = ps.accumulate_grads(accum, {"w": grad})
    accum = ps.accumulate_grads(accum, {"w": grad * 2}, weight=3, found_inf=torch.tensor(False))
    accum = ps.merge_accum(accum, ps.accumulate_grads(ps.init_accum({"w": grad}), {"w": grad * 3}))
    return ps.accumulated_grads(accum)[0]["w"].square().sum()


def gradients_and_loss(x):
    (loss, buffers), grads = ps.value_and_grad(
        lambda p, b, x: ((p["w"] * x).sin().sum(), {"seen": b["seen"] * x.sum()})
    )({"w": x}, {"seen": x.sum()}, x, scaler=at(8.0))
    return loss + buffers["seen"] + grads["w"].square().sum()


ADAMW = ps.from_torch(OPTIM.AdamW, lr=0.1)
STATS = "running_mean", "running_var"


def unscaled_and_stepped(x):
    given = {"w": x}, {"w": x * 16}, ADAMW.init({"w": x})
    return ps.unscale_and_step(ADAMW, at(8.0), *given, 1.0).params["w"].sum()


def batch_norms(x):
    stats = ps.init_bn_stats(dict.fromkeys(STATS, x))
    return ps.bn_buffers(stats, {"running_mean": x * 2, "running_var": x * 3})["running_mean"].sum()


def loaded(x):
    return ps.from_state_dict(ps.to_state_dict({"w": x * 2}), like={"w": x})["w"].sum()


def norm_and_clipped(x):
    return sum(t.sum() for t in ps.clip_by_global_norm([x.square(), x], 1.0)[0])


FUNCTIONS = {
    "scale_loss": lambda x: ps.scale_loss(at(8.0), x.square().sum()),
    "unscale_and_check": lambda x: ps.unscale_and_check(at(8.0), {"w": x.square()})[0]["w"].sum(),
    "clip_by_global_norm": norm_and_clipped,
    "clip_by_value": lambda x: ps.clip_by_value([x.square()], 2.0)[0].sum(),
    "accumulation": accumulated,
    "select": lambda x: ps.select(torch.tensor(True), x * 2, x * 3).sum(),
    "unscale_and_step": unscaled_and_stepped,
    "value_and_grad": gradients_and_loss,
    "step": lambda x: ADAMW.step({"w": x}, {"w": x}, ADAMW.init({"w": x}))[0]["w"].sum(),
    "train_step": lambda x: trained(x, GRAD),
    "train_step of two": lambda x: trained(x, GRAD, 2, max_norm=1.0),
    "train_step, clipped": lambda x: trained(x, GRAD, max_norm=1.0),
    "train_step by data": lambda x: trained(WEIGHT, x),
    "train_step of two by data": lambda x: trained(WEIGHT, x, 2),
    "bn_buffers": batch_norms,
    "from_state_dict": loaded,
}
RATE = torch.tensor(0.1, requires_grad=True)
X = torch.tensor([0.5, 1.5, 3.0], dtype=torch.float64)
Y = {name: GRAD if "train_step" in name else X for name in FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_differentiated_backward_and_forward(name):
    fn, x = FUNCTIONS[name], Y[name]
    total = torch.func.grad(fn)(x).sum()
    assert total.abs() > 1e-3
    torch.testing.assert_close(total, difference(fn, x, 1e-6), rtol=1e-4, atol=1e-6)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(tangent, total)


@pytest.mark.parametrize("name", list(FUNCTIONS)[:6])
def test_backward_goes_through_every_function_before_the_step(name):
    assert_backward_is_that_of_func(FUNCTIONS[name], X)


def on_a_graph(where):
    leaf = torch.ones(3, requires_grad=True)
    given = {"params": {"w": torch.ones(3)}, "grads": {"w": torch.ones(3)}}
    given["opt_state"] = ADAMW.init({"w": leaf})
    place = given["opt_state"].slots["exp_avg"] if where == "opt_state" else given[where]
    place["w"] = leaf * 2
    return given.values()


TRANSFORMATION = ps.from_transformation((lambda p: (), lambda grads, state, params: (grads, state)))
CALLS = {
    "step": ADAMW.step,
    "maybe_step": lambda *trees: ps.maybe_step(ADAMW, *trees, False),
    "unscale_and_step": lambda *trees: ps.unscale_and_step(ADAMW, at(1.0), *trees),
    "a transformation": lambda p, g, s: ps.maybe_step(TRANSFORMATION, p, g, (), False),
    "a first state": lambda params, grads, opt_state: started(params)[0],
}
ON_A_GRAPH = r"{}.*is a result of torch\.autograd.*torch\.func\.grad"


@pytest.mark.parametrize(
    ("call", "where"),
    [
        *(("step", "params"), ("step", "opt_state"), ("maybe_step", "grads")),
        *(("unscale_and_step", "params"), ("unscale_and_step", "grads")),
        *(("a transformation", "grads"), ("a first state", "params")),
    ],
)
def test_a_step_on_a_graph_of_autograd_says_that_torch_func_is_the_way(call, where):
    trees = on_a_graph(where)
    with pytest.raises(ValueError, match=ON_A_GRAPH.format(where)):
        CALLS[call](*trees)
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in tensors(CALLS[call](*trees)))


@pytest.mark.parametrize("around", [lambda it: it, ps.with_master_weights, ps.with_schedule_free])
@pytest.mark.parametrize("given", [{"lr": RATE}, {"lr": lambda applied: RATE * 1}])
def test_a_rate_that_requires_a_gradient_says_that_torch_func_is_the_way(given, around):
    sgd, params = around(ps.from_torch(OPTIM.SGD, **given)), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=r"learning rate requires a gradient.*torch\.func\.grad"):
        sgd.step(params, params, sgd.init(params))


def assert_backward_is_that_of_func(of, x, **near):
    leaf = x.clone().requires_grad_()
    of(leaf).backward()
    torch.testing.assert_close(leaf.grad, torch.func.grad(of)(x), **near)


INNER = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1, "eps": 1e-3},
    "RMSprop": {"lr": 0.1, "eps": 1e-3},
}


def adapted(name, policy="compute=float32", **settings):
    """A loss after three steps inside of it, as in MAML, of the parameters that they start from."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
    apply, params, buffers = ps.make_functional(model)
    apply, rule = ps.with_policy(apply, policy), ps.StaticScale(2.0**4)
    optimizer = ps.from_torch(getattr(OPTIM, name), **INNER[name], differentiable=True)
    x = torch.randn(12, 3)
    y = x.sin().sum(1, keepdim=True)

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch[0])
        return (out - batch[1]).square().mean(), buffers

    def after(params, buffers, batch):
        x, y = batch
        start = {name: p.detach() for name, p in params.items()}
        given = {"loss_fn": loss_fn, "buffers": buffers, **settings}
        state, step = started(start, None, optimizer, rule, **given)
        state = state._replace(params=params)
        for _ in range(3):
            state, _ = step(state, [(x[:4], y[:4]), (x[4:8], y[4:8])])
        return loss_fn(state.params, buffers, (x[8:], y[8:]))[0], buffers

    return after, params, buffers, (x, y)


@pytest.mark.parametrize(
    ("name", "settings", "forced"),
    [
        ("SGD", {"on_nonfinite": "drop_microbatch", "max_norm": 1.0}, False),
        ("SGD", {"on_nonfinite": "drop_microbatch", "max_norm": 1.0}, True),
        ("SGD", {"policy": "compute=float16,output=float32", "bn_update": "window"}, False),
        ("Adam", {"weight_fn": lambda batch: len(batch[0])}, True),
        ("RMSprop", {"clip_value": 0.5}, False),
    ],
)
def test_backward_goes_through_the_gradients_of_a_step_inside_of_a_loss(name, settings, forced):
    after, params, buffers, batch = adapted(name, **settings)
    expected = torch.func.grad(lambda params: after(params, buffers, batch)[0])(params)
    weights = {name: p.clone().requires_grad_() for name, p in params.items()}
    with on_an_accelerator(forced):
        loss = after(weights, buffers, batch)[0]
    found = torch.autograd.grad(loss, list(weights.values()))
    torch.testing.assert_close(list(found), list(expected.values()), rtol=2e-3, atol=2e-5)


def test_a_train_step_over_a_loss_of_train_steps_has_second_derivatives():
    after, params, buffers, batch = adapted("SGD")
    expected = torch.func.grad(lambda params: after(params, buffers, batch)[0])(params)
    state, step = started(params, None, rule=ps.NoScale(), loss_fn=after, buffers=buffers)
    new, _ = step(state, [batch])
    for name, before in params.items():
        torch.testing.assert_close(before - new.params[name], expected[name], rtol=1e-3, atol=1e-5)


# Rprop's rate is what its step sizes start from, and torch's ASGD reads what it makes of it.
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("Rprop", "ASGD")])
def test_backward_goes_to_the_rate_of_an_optimizer_that_was_told_to_be_differentiable(name):
    two_steps = functools.partial(stepped, name, steps=2, differentiable=True)
    of = functools.partial(two_steps, weight=torch.ones(3), grad=torch.tensor([1.0, 2.0, 3.0]))
    assert_backward_is_that_of_func(of, torch.tensor(0.1), rtol=1e-4, atol=1e-5)


def with_narrow_state(inner):
    return ps.with_state_dtype(inner, {"*": torch.bfloat16})


@pytest.mark.parametrize(
    "wrap", [ps.with_master_weights, ps.with_stochastic_rounding, with_narrow_state]
)
def test_a_derivative_through_a_step_that_rounds_is_refused(wrap):
    """Of integers it would be zeros. vmap alone takes none, and float32 weights are not rounded."""
    wrapped = wrap(ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, in_state=("lr",)))
    weight = torch.ones(3).bfloat16()

    def stepped(weight, grad, rate):
        state = ps.replace_settings(wrapped.init({"w": weight.detach()}), lr=rate)
        return wrapped.step({"w": weight}, {"w": grad}, state)[0]["w"].float().sum()

    call = weight, weight, torch.tensor(0.1)
    words = "which rounds to half precision and has no derivative.*Fix:"
    for argument in range(3):
        with pytest.raises(ValueError, match=words):
            torch.func.grad(stepped, argnums=argument)(*call)
    with pytest.raises(ValueError, match=words):
        torch.func.jvp(lambda grad: stepped(weight, grad, call[2]), (weight,), (weight,))
    stacked = [torch.stack([one, one]) for one in call]
    torch.testing.assert_close(torch.vmap(stepped)(*stacked)[0], stepped(*call))


def test_backward_goes_through_a_batch_and_a_rate_though_no_parameter_is_on_a_graph():
    torch.manual_seed(0)
    x, y, start = torch.randn(3, 9, 5), torch.randn(3, 9), {"w": torch.randn(5)}
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1, in_state=("lr",), differentiable=True)

    def loss(params, batch):
        x, y, weights = batch
        return (weights * (torch.tanh(x @ params["w"]) - y) ** 2).mean()

    begun, step = started(start, loss, sgd, ps.NoScale())

    def run(weights, rate):
        state = begun._replace(opt_state=begun.opt_state._replace(lr=rate))
        for index in range(3):
            state, _ = step(state, [(x[index], y[index], weights)])
        return state.params["w"].square().sum()

    arguments = torch.ones(9), torch.tensor(0.1)
    expected = torch.func.grad(run, (0, 1))(*arguments)
    leaves = [leaf.clone().requires_grad_() for leaf in arguments]
    grads = torch.autograd.grad(run(*leaves), leaves)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop"])
def test_a_backward_through_a_map_of_steps_is_the_sum_of_theirs_also_at_a_gradient_of_0(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, differentiable=True)
    weight = torch.ones(2, requires_grad=True)
    state, factors = optimizer.init({"w": weight.detach()}), torch.tensor([1.0, 2.0])

    def after(factor, weight):
        return optimizer.step({"w": weight}, {"w": weight * 0 * factor}, state)[0]["w"].sum()

    mapped = torch.autograd.grad(torch.vmap(after, (0, None))(factors, weight).sum(), weight)
    each = torch.autograd.grad(sum(after(factor, weight) for factor in factors), weight)
    torch.testing.assert_close(mapped, each)
    assert each[0].isfinite().all()


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_a_backward_through_a_map_of_skipped_steps_is_that_of_the_identity(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, weight_decay=0.1)
    weight = torch.ones(2, requires_grad=True)
    state, factors = optimizer.init({"w": weight.detach()}), torch.tensor([1.0, 2.0])
    grads = {"w": torch.tensor([float("inf"), 1.0])}

    def skipped(factor, weight):
        found_inf = torch.tensor(True)
        return ps.maybe_step(optimizer, {"w": weight}, grads, state, found_inf)[0]["w"].sum()

    total = torch.vmap(skipped, (0, None))(factors, weight).sum()
    assert torch.autograd.grad(total, weight)[0].tolist() == [2.0, 2.0]
