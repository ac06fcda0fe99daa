"""Gradients for a loop by hand: the bits of a step and of torch's own backward, and nothing of
theirs in the memory of others.
"""

import contextlib
import copy
import functools
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HALF,
    Keeps,
    OldDouble,
    OwnBackward,
    at,
    batch,
    clone,
    cross_entropy_of,
    function_of,
    in_float32,
    job,
    scaled_by,
    small_net,
    stack,
    started,
    tensors,
    unstack,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import purescale as ps
from purescale._torch import tracing
from purescale.testing import Untouched, assert_pure, assert_single_graph, same_bits, shares_memory

OPTIM = torch.optim
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)
AUTOCAST = "params=float32,compute=autocast({}),output=float32"
SCALER = at(8.0)
SGD = ps.from_torch(OPTIM.SGD, lr=0.1)


def linear(params, buffers, x):
    return (params["w"] * x).sum(), buffers


def net(policy=HALF, model=None):
    """(loss_fn, params, buffers) of a net with BatchNorm, unless another is given."""
    apply, params, buffers = ps.make_functional(model or small_net())
    apply = ps.with_policy(apply, policy) if policy else apply
    return cross_entropy_of(apply), params, buffers


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_it_is_the_backward_of_torchs_own_loop(dtype, scale):
    policy = AUTOCAST.format(str(dtype).removeprefix("torch.")) if dtype else None
    model, (x, y) = small_net(), batch()
    if dtype:  # under which norms are computed in float32 here
        model[1] = nn.Sigmoid()
    loss_fn, params, buffers = net(policy, model)
    scaler = scale and at(scale)
    (loss, new_buffers), grads = ps.value_and_grad(loss_fn)(params, buffers, (x, y), scaler=scaler)

    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(x)
    theirs = F.cross_entropy(logits.float(), y)
    (theirs * (scale or 1.0)).backward()
    assert same_bits(loss, theirs.detach())
    assert same_bits(grads, {name: p.grad for name, p in model.named_parameters()})
    assert same_bits(new_buffers, dict(model.named_buffers()))


def by_hand(loss_fn, optimizer, rule, max_norm=1.0):
    """`step(state, batch)`, the loop by hand as a function of a TrainState."""
    fn = ps.value_and_grad(loss_fn)

    def step(state, batch):
        (loss, buffers), grads = fn(state.params, state.buffers, batch, scaler=state.scaler)
        params, opt_state, bad, *_ = ps.unscale_and_step(
            optimizer, state.scaler, state.params, grads, state.opt_state, max_norm
        )
        buffers = ps.select(bad, state.buffers, buffers)
        scaler = rule.update(state.scaler, bad)
        new = ps.TrainState(params, buffers, opt_state, scaler, state.step + ~bad, ())
        return new, loss, bad

    return step


WAYS = {"on the host": contextlib.nullcontext, "as on an accelerator": tracing.as_on_an_accelerator}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [OPTIM.AdamW, OPTIM.RMSprop])
def test_the_loop_by_hand_is_train_step_bit_for_bit(cls, way):
    """Ten steps, the first of which overflow."""
    optimizer = ps.from_torch(cls, lr=1e-2)
    ours, composed = job(optimizer, RULE, max_norm=1.0)
    step = by_hand(composed.keywords["loss_fn"], optimizer, RULE)
    ours = theirs = scaled_by(ours, 2.0**25)
    skipped = 0
    with WAYS[way]():
        for index in range(10):
            ours, loss, bad = step(ours, batch(index))
            theirs, info = composed(theirs, [batch(index)])
            assert same_bits((ours, loss, bad), (theirs, info.loss, info.found_inf))
            skipped += int(bad)
    assert 0 < skipped < 10


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_unscaled_in_no_dimension_and_at_least_float32(dtype, shape):
    def loss_fn(params, buffers, x):
        return (params["w"] * x).sum().to(dtype).reshape(shape), buffers

    (loss, _), grads = ps.value_and_grad(loss_fn)({"w": torch.ones(2)}, {}, 3.0, at(2.0**10))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert same_bits(loss, torch.tensor(6.0, dtype=wide))
    assert same_bits(grads["w"], torch.full((2,), 3 * 2.0**10))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128],
    ids=str,
)
def test_gradients_are_those_of_autograd_in_the_dtype_of_each_leaf_and_0_if_it_is_unused(dtype):
    params = {
        "w": torch.randn(3, 2).to(dtype),
        "nest": (torch.randn(2), None),
        "unused": [torch.ones(3).half(), {"empty": torch.ones(0)}],
    }
    x = torch.randn(4, 3).to(dtype)

    def loss_fn(params, buffers, x):
        loss = (x @ params["w"]).abs().square().float().sum() + params["nest"][0].exp().sum()
        return loss, [None, buffers[1] + 1]

    (_, buffers), grads = ps.value_and_grad(loss_fn)(params, [None, torch.zeros(())], x, SCALER)
    assert same_bits(buffers, [None, torch.ones(())])
    leaves = tree_map(lambda p: p if p is None else p.clone().requires_grad_(), params)
    (8 * loss_fn(leaves, buffers, x)[0]).backward()

    def gradient(leaf):
        return None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    assert same_bits(grads, tree_map(gradient, leaves))


def aliasing(params, buffers, x):
    """Returns what it was given, in every place where it may return anything."""
    loss = params["w"].view(-1)[0]
    new_buffers = {"old": params["w"], "x": x, "again": x, "loss": loss}
    return loss, new_buffers, [buffers["x"], x, loss, params["w"][1:], new_buffers["x"]]


def arguments():
    buffers = {"old": torch.ones(3), "x": torch.ones(3), "again": torch.ones(3)}
    return (
        {"w": torch.arange(3.0), "none": None},
        {**buffers, "loss": torch.ones(())},
        torch.full((3,), 5.0),
    )


def of_one_another_in_aux(params, buffers, x):
    loss, twice = params["w"].sum(), x * 2
    new_buffers = {"old": twice, "x": x * 3, "again": x * 4, "loss": loss * 2}
    again = new_buffers["again"]
    return loss, new_buffers, [twice[1:], loss, again, {"again": again, "none": None}, "name", 3]


@pytest.mark.parametrize(
    ("loss_fn", "way"),
    [
        (aliasing, lambda fn: fn),
        (of_one_another_in_aux, lambda fn: fn),
        (aliasing, functools.partial(torch.compile, fullgraph=True, backend="aot_eager")),
    ],
)
def test_no_result_shares_memory_with_an_argument_or_another_result(loss_fn, way):
    result = assert_pure(way(ps.value_and_grad(loss_fn)), *arguments(), SCALER)
    assert same_bits(result[0], loss_fn(*arguments()))
    leaves = tensors(result)
    assert not any(tensor.requires_grad for tensor in leaves)
    for index, tensor in enumerate(leaves):
        assert not shares_memory([tensor], leaves[:index])


def test_gradients_that_a_custom_backward_keeps_are_copied():
    kept, fn = torch.ones(3), ps.value_and_grad(lambda p, b, x: (Keeps.apply(p["w"], x), b))
    _, grads = fn({"w": torch.ones(3)}, {}, kept)
    assert same_bits(grads["w"], kept)
    assert not shares_memory(grads, kept)


@pytest.mark.parametrize("numel", [1, 5])
@pytest.mark.parametrize("window", [1, 2])
def test_a_backward_that_writes_into_its_argument_leaves_the_scale_as_it_is(numel, window):
    double = function_of(lambda ctx, loss: loss.clone(), lambda ctx, grad: grad.mul_(2))
    params, x = {"w": torch.ones(numel)}, torch.full((numel,), 3.0)

    def loss_fn(params, buffers, x):
        return double((params["w"] * x).sum()), buffers

    _, grads = ps.value_and_grad(loss_fn)(params, {}, x, scaler=SCALER)
    assert same_bits(grads, {"w": 8.0 * 2 * x})
    assert float(SCALER.scale) == 8.0
    state, step = started(params, None, SGD, ps.StaticScale(8.0), loss_fn=loss_fn)
    state, info = step(state, [x] * window)
    assert float(info.scale) == float(state.scaler.scale) == 8.0
    assert torch.allclose(state.params["w"], params["w"] - 0.1 * 2 * x)


def test_a_backward_is_off_the_graph_of_the_scale():
    seen = []
    total = function_of(
        lambda ctx, w: w.sum(), lambda ctx, grad: seen.append(grad) or grad.expand(5)
    )
    scaler = SCALER._replace(scale=torch.tensor(8.0, requires_grad=True))
    _, grads = ps.value_and_grad(lambda p, b, x: (total(p), b))(torch.ones(5), {}, None, scaler)
    assert same_bits(grads, torch.full((5,), 8.0))
    assert not seen[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_gradient_of_a_loss_that_is_a_parameter_is_the_scale(dtype, shape):
    params = {"w": torch.ones(shape, dtype=dtype)}
    _, grads = ps.value_and_grad(lambda p, b, x: (p["w"], b))(params, {}, None, scaler=SCALER)
    assert same_bits(grads, {"w": torch.full(shape, 8.0, dtype=dtype)})
    assert not shares_memory(grads, SCALER)


def test_parameters_that_require_a_gradient_get_none_of_their_own():
    w = torch.ones(2, requires_grad=True)
    _, grads = ps.value_and_grad(linear)({"w": w}, {}, torch.ones(2))
    assert w.grad is None
    assert not grads["w"].requires_grad


def test_the_backward_frees_what_was_saved_as_it_goes():
    saved, alive = [], []

    def forward(ctx, w):
        activation = w * 2
        ctx.save_for_backward(activation)
        saved.append(weakref.ref(activation))
        return w * 3

    def backward(ctx, grad):
        alive.append([activation() is not None for activation in saved])
        return grad

    saving = function_of(forward, backward)

    def loss_fn(params, buffers, x):
        return saving(saving(params["w"])).sum(), buffers

    ps.value_and_grad(loss_fn)({"w": torch.ones(2)}, {}, None)
    assert alive == [[True, True], [True, False]]


@pytest.mark.slow
def test_a_compiled_loop_is_the_loop_in_one_graph_over_overflow_and_growth():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)
    state, composed = job(sgd, RULE, "float32")
    step = by_hand(composed.keywords["loss_fn"], sgd, RULE)
    calls = [(scaled_by(state, 2.0**scale), batch(scale)) for scale in (4, 127, 5)]
    for compiled, call in zip(assert_single_graph(step, *calls), calls, strict=True):
        torch.testing.assert_close(
            tensors(compiled), tensors(step(*call)), rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_mapped_over_samples_it_gives_the_gradients_of_each():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    loss_fn, params, buffers = net(None, model)
    fn, (x, y) = ps.value_and_grad(loss_fn), batch()
    (losses, _), grads = torch.vmap(fn, in_dims=(None, None, 0))(
        params, buffers, (x[:, None], y[:, None])
    )
    for index in range(len(x)):
        (loss, _), one = fn(params, buffers, (x[index : index + 1], y[index : index + 1]))
        torch.testing.assert_close((losses[index], unstack(grads, index)), (loss, one))


def test_it_is_a_graph_of_make_fx_in_which_parameters_are_inputs():
    loss_fn, params, buffers = net("float32")
    fn = ps.value_and_grad(loss_fn)
    graph = make_fx(fn)(params, buffers, batch(), SCALER)
    call = tree_map(lambda p: p + 1, params), buffers, batch(), at(2.0)
    torch.testing.assert_close(graph(*call), fn(*call))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_what_a_custom_backward_adds_to_grad_is_part_of_the_gradient(twice, before):
    def loss_fn(params, buffers, x):
        weight = params["w"]
        if before:  # a backward of its own, which is no part of the loss
            (weight * 7).sum().backward()
        out = OwnBackward.apply(x * params["v"], weight)
        return (out * weight if twice else out).square().sum(), buffers

    params, x = {"v": torch.full((3,), 2.0), "w": torch.arange(1.0, 4.0)}, torch.ones(3)
    _, grads = ps.value_and_grad(loss_fn)(params, {}, x)
    v, w = (p.clone().requires_grad_() for p in params.values())
    power = 4 if twice else 2
    (v.square() * w**power).sum().backward()
    torch.testing.assert_close(grads, {"v": v.grad, "w": w.grad})


def test_an_autograd_function_of_the_older_form_and_checkpointing_are_taken():
    def loss_fn(params, buffers, x):
        out = checkpoint(lambda w: OldDouble.apply(w).square(), params["w"], use_reentrant=False)
        return out.sum(), buffers

    _, grads = ps.value_and_grad(loss_fn)({"w": torch.ones(2)}, {}, None)
    assert same_bits(grads["w"], torch.full((2,), 8.0))


def test_under_no_grad_and_of_what_was_made_in_inference_mode_it_gives_the_same():
    loss_fn, params, buffers = net()
    fn = ps.value_and_grad(loss_fn)
    expected = fn(params, buffers, batch(), SCALER)
    with torch.no_grad():
        assert same_bits(fn(params, buffers, batch(), SCALER), expected)
    with torch.inference_mode():
        params, buffers, scaler = clone((params, buffers, SCALER))
    assert same_bits(fn(params, buffers, batch(), scaler), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss_fn", [in_float32, lambda p, b, x: ((x @ p["w"]).float().square().sum(), b)]
)
def test_in_the_callers_autocast_the_loss_is_computed_under_it_and_the_backward_is_not(
    loss_fn, dtype
):
    """As torch asks of its own loops: `backward` outside of the context."""
    w, x = torch.randn(33, 5), torch.randn(5, 33)
    with torch.autocast("cpu", dtype):
        (loss, _), grads = ps.value_and_grad(loss_fn)({"w": w}, {}, x, SCALER)
    leaf = w.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        theirs, _ = loss_fn({"w": leaf}, {}, x)
    (8 * theirs).backward()
    assert same_bits((loss, grads["w"]), (theirs.detach(), leaf.grad))


def test_it_can_be_copied_and_pickled():
    for copied in (copy.deepcopy, lambda fn: pickle.loads(pickle.dumps(fn))):
        fn = copied(ps.value_and_grad(linear))
        assert same_bits(fn({"w": torch.ones(2)}, {}, torch.ones(2))[1], {"w": torch.ones(2)})


def call(params=None, buffers=None, scaler=None, loss_fn=linear):
    params = {"w": torch.ones(2)} if params is None else params
    return ps.value_and_grad(loss_fn)(params, buffers or {}, torch.ones(2), scaler=scaler)


ON_A_GRAPH = torch.ones(2, requires_grad=True) * 2
NO_TENSOR = r"params has no tensor.*Fix: `apply, params, buffers"
NO_STATE = r"(?s)scaler is .*expected the state of one scaler.*rule.init\(device\).*state\.scaler"
STACKED = stack([at(1.0), at(2.0)])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"loss_fn": torch.ones(())}, TypeError, r"takes a function, .*Fix: `\(loss, buffers\), g"),
        *(
            ({"scaler": scaler}, TypeError, NO_STATE)
            for scaler in (RULE, torch.amp.GradScaler("cpu"), 8.0, torch.tensor(8.0), STACKED)
        ),
        *(({"params": params}, ValueError, NO_TENSOR) for params in ({}, {"w": None}, ())),
        ({"params": {"w": torch.ones(2).long()}}, TypeError, r"'w'\] has dtype torch.int64"),
        ({"params": {"w": [1.0]}}, TypeError, r"params\['w'\]\[0\] is float 1.0"),
        ({"params": {"w": torch.ones(2), "m": ON_A_GRAPH.to("meta")}}, ValueError, r"'m'\] is"),
        ({"params": {"w": ON_A_GRAPH}}, ValueError, r"params\['w'\] is a result .*torch\.func\."),
        ({"buffers": {"b": ON_A_GRAPH}}, ValueError, r"buffers\['b'\] is a result of torch\.auto"),
    ],
)
def test_what_cannot_be_differentiated_is_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        call(**{"scaler": SCALER, **arguments})


LIVE = nn.Linear(3, 1)
GRAPH = torch.ones(3, requires_grad=True)
# losses that no parameter has a part in: of each, what is added to the right one by mistake
APART = {
    "the live module": lambda p, x: LIVE(x).square().sum(),
    "another graph": lambda p, x: (GRAPH * x).sum(),
    "detached parameters": lambda p, x: (p["weight"].detach() * x * GRAPH).sum(),
}
LIVE_PARAMS = {name: p.detach().clone() for name, p in LIVE.named_parameters()}


def by_value_and_grad(loss_fn):
    fn = ps.value_and_grad(loss_fn)
    return lambda params, x: fn(params, {}, x, scaler=SCALER)[1]


def by_a_step(loss_fn, window=lambda x: [x], **settings):
    differentiable = settings.pop("differentiable", False)
    optimizer = ps.from_torch(OPTIM.AdamW, differentiable=differentiable)

    def stepped(params, x):
        state, step = started(params, None, optimizer, loss_fn=loss_fn, **settings)
        if differentiable:  # by torch.autograd
            on_a_graph = {name: p * GRAPH[0] for name, p in params.items()}
            state = state._replace(params=on_a_graph)
        return step(state, window(x))[0].params

    return stepped


def derived(fn):
    return lambda params, x: torch.func.grad(
        lambda p: sum(map(torch.sum, tensors(fn(p, x)))), has_aux=False
    )(params)


def mapped(fn):
    return lambda params, x: torch.vmap(fn, (0, None))(stack([params, params]), x)


MODES = {
    "by hand": by_value_and_grad,
    "as on an accelerator": lambda loss_fn: tracing.as_on_an_accelerator()(
        by_a_step(loss_fn, donate=True)
    ),
    "dropped": lambda loss_fn: by_a_step(
        loss_fn, lambda x: [x] * 2, on_nonfinite="drop_microbatch"
    ),
    "on a graph": lambda loss_fn: by_a_step(loss_fn, differentiable=True),
    "vmap": lambda loss_fn: mapped(by_a_step(loss_fn)),
    "a derivative of a map": lambda loss_fn: derived(mapped(by_value_and_grad(loss_fn))),
    "make_fx": lambda loss_fn: lambda *args: make_fx(by_value_and_grad(loss_fn))(*args)(*args),
    "jit": lambda loss_fn: ps.jit(by_a_step(loss_fn), backend="aot_eager"),
    "compiled": lambda loss_fn: torch.compile(by_value_and_grad(loss_fn), backend="aot_eager"),
}
COMPILED = pytest.param("compiled", "the live module", marks=pytest.mark.slow)


@pytest.mark.parametrize(("mode", "what"), [*itertools.product(list(MODES)[:-1], APART), COMPILED])
def test_a_loss_that_no_parameter_has_a_part_in_is_refused_in_each_mode(mode, what):
    def loss_fn(params, buffers, x):
        return APART[what](params, x), buffers

    params, x = clone(LIVE_PARAMS), torch.ones(3)
    words = r"does not depend on params.*calls the module"
    with Untouched((params, LIVE_PARAMS)), pytest.raises(ValueError, match=words):
        MODES[mode](loss_fn)(params, x)
    assert LIVE.weight.grad is None


def a_step(loss_fn, **settings):
    norm = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
    buffers = {**norm, "num_batches_tracked": torch.tensor(0)}
    state, step = started({"w": torch.ones(2)}, None, SGD, loss_fn=loss_fn, buffers=buffers)
    with Untouched(state):
        step(state, [None], **settings)


TWO_ARGUMENTS = {
    "value_and_grad": ps.value_and_grad,
    "train_step": a_step,
    "a window of batch norms": lambda fn: a_step(fn, bn_update="window"),
    "jit": lambda fn: a_step(ps.jit(fn, backend="aot_eager")),
}


@pytest.mark.parametrize("way", TWO_ARGUMENTS)
def test_a_loss_fn_of_two_arguments_is_refused_before_it_runs(way):
    def loss_fn(params, batch):
        raise AssertionError("it ran")

    words = (
        r"loss_fn takes \(params, batch\); it is called as loss_fn\(params, buffers, microbatch\)"
        r"\. Fix: .*`return loss, buffers`"
    )
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast), pytest.raises(TypeError, match=words):
            TWO_ARGUMENTS[way](loss_fn)


def test_a_type_error_inside_of_loss_fn_stays_as_it_is():
    def loss_fn(params, buffers, x):
        return params["w"] + "x", buffers

    for function in (call, a_step):
        with pytest.raises(TypeError, match="unsupported operand") as caught:
            function(loss_fn=loss_fn)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("window", ["each", "window"])
@pytest.mark.parametrize("aux", [{"accuracy": torch.ones(())}, torch.ones(2)])
def test_aux_in_the_place_of_the_buffers_is_refused_with_its_cure(aux, window):
    words = r"where the new buffers belong.*Fix: `return loss, new_buffers, aux`"
    with pytest.raises(ValueError, match=words):
        a_step(lambda p, b, x: (p["w"].sum(), aux), bn_update=window)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda b, x: b["mean"].mul_(0.9), r"into buffers\['mean'\]; .*new tensor"),
        (lambda b, x: b["mean"].detach()[0].zero_(), r"into buffers\['mean'\]; "),
        (lambda b, x: x[0].div_(255), r"into its microbatch, into tensor 0 of 2; .*`x = x / 255`"),
        (lambda b, x: F.relu(x[1]["y"], inplace=True), "into its microbatch, into tensor 1 of 2; "),
    ],
    ids=["a buffer", "a view of a buffer", "an input", "a layer in place"],
)
@pytest.mark.parametrize("flags", [{}, {"bn_update": "window"}, {"max_retries": 1}])
def test_a_loss_fn_that_writes_into_its_other_arguments_is_refused(write, words, flags):
    """A skipped step would keep the write, and a retry would make it again."""

    def loss_fn(params, buffers, x):
        write(buffers, x)
        return (params["w"] * x[0]).sum() * float("nan"), buffers

    params, buffers = {"w": torch.ones(2)}, {"mean": torch.ones(2)}
    x = (torch.ones(2), {"y": torch.ones(2)}, "a word")
    with pytest.raises(RuntimeError, match=f"loss_fn wrote {words}"):
        ps.value_and_grad(loss_fn)(params, {"none": None, **buffers}, x)
    state, step = started(params, loss_fn=loss_fn, buffers=buffers)
    with pytest.raises(RuntimeError, match="loss_fn wrote into "):
        step(state, [x, x], **flags)


def test_a_loss_fn_may_write_into_what_it_made_itself():
    def loss_fn(params, buffers, x):
        mean = buffers["mean"].clone().mul_(0.9)
        return (params["w"] * (x * 1).div_(255)).sum(), {"mean": mean.add_(1)}

    (_, new), _ = call(loss_fn=loss_fn, buffers={"mean": torch.ones(2)})
    assert same_bits(new, {"mean": torch.full((2,), 0.9) + 1})


def test_a_slope_by_autograd_in_a_mapped_loss_is_refused_with_the_cure():
    def loss_fn(params, buffers, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((params["w"] * x).sum(), x, create_graph=True)
        return (slope**2).sum(), buffers

    fn = ps.value_and_grad(loss_fn)
    params = {"w": torch.ones(2)}
    assert torch.equal(fn(params, {}, torch.ones(2))[1]["w"], torch.full((2,), 2.0))
    with pytest.raises(RuntimeError) as raised:
        torch.vmap(lambda x: fn(params, {}, x))(torch.ones(3, 2))
    assert "torch.func.grad(function)(x)" in raised.value.__notes__[0]


def test_a_loss_whose_signature_python_does_not_know_raises_its_own_error():
    with pytest.raises(TypeError, match="'>' not supported"):
        ps.value_and_grad(max)({"w": torch.ones(1)}, {}, torch.ones(1))


def test_in_a_compiled_function_a_compiled_loss_is_taken():
    def loss_fn(params, buffers, x):
        return (params["w"] * x).sum(), buffers

    inner = torch.compile(loss_fn, backend="eager")

    def step(params, x):
        return ps.value_and_grad(inner)(params, {}, x)[1]

    args = {"w": torch.ones(2)}, torch.tensor([2.0, 3.0])
    assert torch.compile(step, backend="eager", fullgraph=True)(*args)["w"].equal(args[1])


def test_under_autocast_no_weight_fn_may_be_given_by_its_name():
    state, step = started({"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), weight_fn=None)
    with torch.autocast("cpu"):
        new, _ = step(state, [torch.ones(2)])
    assert new.params["w"].equal(torch.zeros(2))
