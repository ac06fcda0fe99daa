"""A graph that ends with operators of the library: the results of the function, whoever else sees
the memory that an operator writes into.
"""

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import assert_close, clone, same_bits, started, tensors
from test_foreach import Launched, WithoutDriver, fake_cuda

import purescale as ps
from purescale._grads import local_stats
from purescale._jit.cut import compiled_in_stages
from purescale._jit.jit import FlatFunction
from purescale._jit.pure_graph import trace
from purescale._torch import tracing
from purescale._tree import pytree as tree

in_order = functools.partial(ps.jit, backend="aot_eager")
adamw = functools.partial(ps.from_torch, torch.optim.AdamW)


@pytest.fixture(autouse=True, scope="module")
def many_leaves():
    """Few leaves count as many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tracing, local_stats):
            patch.setattr(module, "MAX_INLINE_LEAVES", 0)
        yield


OPTIMIZERS = {
    "AdamW": adamw(lr=0.1),
    "amsgrad": ps.from_torch(torch.optim.Adam, lr=0.1, amsgrad=True, maximize=True),
    "SGD": ps.from_torch(torch.optim.SGD, lr=0.1),
    "momentum": ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": ps.from_torch(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "groups": adamw(lr=0.1, overrides={"b": {"weight_decay": 0.5}, "c": {"lr": 0.01}}),
    "schedule": adamw(lr=lambda count: 0.1 / (count + 1), schedule_by="iteration"),
    "in the state": adamw(lr=0.1, in_state=("lr",)),
    "a formula": ps.from_torch(torch.optim.NAdam, lr=0.1),
    "a scheduled formula": ps.from_torch(
        torch.optim.ASGD, lr=lambda count: 0.1 / (count + 1), overrides={"a": {"lr": 0.2}}
    ),
    "of one's own": ps.from_formula(
        lambda p, g, slots, h, t: (p - h["lr"] * g.sign(), slots), elementwise=True, lr=0.01
    ),
    "RMSprop": ps.from_torch(
        torch.optim.RMSprop, lr=0.1, overrides={("b", "c"): {"momentum": 0.9, "centered": True}}
    ),
    "masters": ps.with_master_weights(adamw(lr=0.1)),
    "narrow": ps.with_state_dtype(adamw(lr=0.1), {"exp_avg": torch.bfloat16}),
    "partition": ps.partition(
        {"adamw": adamw(lr=0.1), "nadam": ps.from_torch(torch.optim.NAdam, lr=0.1)},
        lambda name, leaf: "nadam" if leaf.ndim == 2 else "adamw",
    ),
    "masters of parts": ps.partition(
        {"a": ps.with_master_weights(adamw(lr=0.1)), "b": ps.from_torch(torch.optim.SGD, lr=0.1)},
        lambda name, leaf: "b" if name == "b" else "a",
    ),
}
RULES = {
    "grows in each step": ps.DynamicScale(2.0**4, growth_interval=1),
    "headroom": ps.HeadroomScale(),
    "none": ps.NoScale(),
}
SIZES = {"a": (3, 11), "b": (300,), "c": (), "d": (0,), "unused": (5,)}


def problem(optimizer, rule, mixed):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(size, generator=generator)
        for name, size in SIZES.items()
        if not (mixed and size == (0,))
    }
    if mixed:
        params["b"] = params["b"].double()
    if "masters" in optimizer:
        params["a"] = params["a"].bfloat16()
    optimizer, rule = OPTIMIZERS[optimizer], RULES[rule]
    return ps.init_train_state(params, {"seen": torch.zeros(3)}, optimizer, rule)


def loss_fn(params, buffers, x):
    # b and c have gradients that are views of one another
    loss = (params["a"].float() @ x).square().sum() + params["b"].sum().float() * params["c"]
    return loss + params["c"], {"seen": buffers["seen"] + x[:3]}


SETTINGS = [{}, {"max_norm": 1.0}, {"clip_value": 0.1}, {"max_norm": 1.0, "clip_value": 0.1}]
USES = [{"average", "old"}, {"difference", "twice"}, {"view", "swap"}, {"old", "twice", "view"}]


def program(index):
    """Return the name of an optimizer and of a rule, settings of a step, whether dtypes are mixed,
    and what is done with the state after it: of each optimizer one program.
    """
    name, rule = list(OPTIMIZERS)[index], list(RULES)[index % 3]
    return name, rule, SETTINGS[index // 3 % 4], index % 2 == 1, USES[(index + index // 4) % 4]


def step_of(optimizer, rule, settings, uses):
    step = functools.partial(
        ps.train_step,
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS[optimizer],
        rule=RULES[rule],
        **settings,
    )

    def fn(carry, x):
        state, other = carry
        new, info = step(state, [x])
        more = {"info": info, "buffers": new.buffers}
        if "average" in uses:
            other = pytree.tree_map(lambda a, b: a.lerp(b.to(a.dtype), 0.5), other, new.params)
        if "difference" in uses:
            more["difference"] = pytree.tree_map(torch.sub, new.params, state.params)
        if "view" in uses:
            more["view"] = new.params["a"].T, state.params["a"].T
        if "old" in uses:  # numbers that the step has replaced
            more["old"] = new.params["b"] * state.scaler.scale + state.buffers["seen"].sum()
        if "twice" in uses:
            more["twice"] = new.params, new.scaler.scale
        if "swap" in uses:
            other = pytree.tree_map(lambda a, b: b.to(a.dtype), other, new.params)
        return (new, other), more

    return fn


def run(fn, carry, count=4):
    """Return the carry after some steps, of which the third overflows, and what they return."""
    generator, outs = torch.Generator().manual_seed(1), []
    for index in range(count):
        x = torch.randn(11, generator=generator) * (torch.inf if index == 2 else 1)
        carry, more = fn(carry, x)
        outs.append(clone(more))
    return carry, outs


def check(program, jit, donate):
    """Compare a program with itself under `jit`."""
    optimizer, rule, settings, mixed, uses = program
    state = problem(optimizer, rule, mixed)
    fn = step_of(optimizer, rule, settings, uses)
    expected = run(fn, (state, state.params))
    found = run(jit(fn, donate=donate), clone((state, state.params)))
    for result, other in zip(tensors(found), tensors(expected), strict=True):
        if result.dtype is not torch.int16:  # the last bits of masters
            assert_close(result, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    return found


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_a_step_has_the_results_of_the_eager_one_donated_or_not(index):
    donated = check(program(index), in_order, 0)
    if index % 4 == 0:
        assert same_bits(check(program(index), in_order, ()), donated)


KINDS = ["apart", "one tensor twice", "expanded", "views", "parameters", "overlapping", "sums"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_arguments_stay_as_they_are(kind):
    """Whether some share memory, or elements of one do."""
    for name, donate in (("AdamW", (0, 1)), ("SGD", ()), ("momentum", (0, 1))):
        check_gradients(name, kind, donate)


def check_gradients(name, kind, donate):
    optimizer, params = OPTIMIZERS[name], {"a": torch.ones(33), "b": torch.ones(33)}
    memory = torch.arange(66.0)
    grads = {
        "apart": {"a": torch.ones(33), "b": torch.arange(33.0)},
        "one tensor twice": dict.fromkeys("ab", torch.arange(33.0)),
        "expanded": {"a": torch.ones(()).expand(33), "b": torch.arange(33.0)},
        "views": {"a": memory[:33], "b": memory[33:]},
        "parameters": params,
        "overlapping": {"a": torch.arange(34.0), "b": torch.arange(34.0)},
        "sums": {"a": torch.arange(33.0), "b": torch.arange(33.0)},
    }[kind]
    state, scaler = optimizer.init(params), ps.DynamicScale(4.0, growth_interval=1).init()

    def step(params, state, scaler, grads):
        if kind == "parameters":
            grads = params
        if kind == "overlapping":
            grads = {name: (2 * g).unfold(0, 2, 1)[:, 0] for name, g in grads.items()}
            grads["b"] = grads["a"].as_strided((33,), (1,), 0)
        if kind == "sums":  # whose elements are one
            grads = {name: g.sum().expand(33) for name, g in grads.items()}
        stepped = ps.unscale_and_step(optimizer, scaler, params, grads, state, max_norm=1.0)
        return stepped, pytree.tree_map(torch.add, grads, stepped.params)

    arguments = params, state, scaler, grads
    before = clone(arguments)
    jitted = in_order(step, donate=donate)
    assert_close(jitted(*clone(arguments)), step(*arguments), rtol=1e-6, atol=1e-6)
    assert_close(jitted(*clone(arguments[:3]), grads), step(*arguments), rtol=1e-6, atol=1e-6)
    assert same_bits(arguments, before)


def launched(optimizer, number, donate, **settings):
    """Return the operators of a jitted step over a number of tensors on a GPU that are not in its
    compiled graph. A read of a value raises.
    """
    rule = RULES["grows in each step"]

    def step(state, grads):
        params, opt_state, scaler = state
        new = ps.unscale_and_step(optimizer, scaler, params, grads, opt_state, **settings)
        return new.params, new.opt_state, rule.update(scaler, new.found_inf)

    with fake_cuda():
        params, grads = ({str(i): torch.empty(8, 4) for i in range(number)} for _ in range(2))
        args = (params, optimizer.init(params), rule.init("cuda")), grads
    leaves, structure = tree.flatten(args)

    def not_counted(module, inputs):
        results = [node.meta["val"] for node in module.graph.output_node().args[0]]
        return lambda *inputs: results

    donated = range(len(leaves) - number) if donate else ()
    with WithoutDriver():
        graph = trace(FlatFunction(step, structure, leaves), leaves, donated)
        run = compiled_in_stages(graph.module, graph.examples, not_counted)
        with graph.examples[0].fake_mode, Launched() as mode:
            run(*graph.examples)
    return mode.ops


@pytest.mark.parametrize(
    ("name", "max_norm", "donate"),
    [("AdamW", None, False), ("momentum", 1.0, True), ("masters", 1.0, True)],
)
def test_on_a_gpu_few_operators_stand_beside_the_graph_whatever_the_number_of_tensors(
    name, max_norm, donate
):
    few, many = (launched(OPTIMIZERS[name], n, donate, max_norm=max_norm) for n in (3, 12))
    assert few == many
    assert 0 < len(few) <= 20


def check_jit(function, *arguments, donate=(), rtol=1e-5):
    """Compare a function with itself under jit, over copies of these."""
    expected = function(*arguments)
    assert_close(
        in_order(function, donate=donate)(*clone(arguments)), expected, rtol=rtol, atol=1e-6
    )


def test_inside_of_a_transform_the_graph_has_operators_with_derivatives():
    name = "AdamW"
    state = problem(name, "none", False)
    step = step_of(name, "none", {}, set())

    def moved(scale, x):
        return step((state, state.params), x * scale)[0][0].params["a"].square().sum()

    x, one = torch.ones(11), torch.ones(())
    rows = torch.stack([x, torch.randn(11)])
    check_jit(torch.vmap(torch.func.grad(moved), (None, 0)), one, rows, rtol=1e-4)
    jvp = functools.partial(torch.func.jvp, lambda scale: moved(scale, x), (one,), (one,))
    check_jit(lambda: jvp(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 5, 14])  # Adam makes chaos of weights in bfloat16
def test_a_compiled_step_has_the_results_of_the_eager_one(index):
    check(program(index), ps.jit, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "a formula"])
def test_scanned_steps_are_the_loop_and_leave_the_state_of_the_caller(name):
    fn = step_of(name, "grows in each step", {"max_norm": 1.0}, {"average"})
    state = problem(name, "grows in each step", False)
    carry, rows = (state, state.params), torch.randn(5, 11)
    rows[2] = torch.inf
    before = clone(carry)
    expected = ps.scan_steps(fn, carry, rows)
    scanned = ps.scan_steps(ps.jit(fn, donate=0), carry, rows)
    assert_close(scanned, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert same_bits(carry, before)


def test_one_gradient_of_several_parameters_is_unscaled_once_for_each():
    params = {name: torch.full((33,), 1.0) for name in "abc"}
    rule = RULES["grows in each step"]
    state, step = started(params, lambda p, x: (sum(p.values()) * x).sum(), OPTIMIZERS["SGD"], rule)
    x = torch.arange(33.0)
    check_jit(lambda state, x: step(state, [x])[0].params, state, x, donate=0, rtol=1e-6)


def twenty():
    return {str(index): torch.randn(5) for index in range(20)}


def stepped(params, state, factor):
    """A step of AdamW by gradients that are made inside."""
    grads = {name: (leaf * factor).sin() for name, leaf in params.items()}
    return OPTIMIZERS["AdamW"].step(params, grads, state)


@pytest.mark.parametrize("donate", [(), 0])
def test_two_steps_in_one_function_are_one_after_the_other(donate):
    def function(state, factor):
        return stepped(*stepped(*state, factor), factor)

    params = twenty()
    expected = params, OPTIMIZERS["AdamW"].init(params)
    result, jitted = clone(expected), in_order(function, donate=donate)
    for factor in (torch.tensor(0.5), torch.tensor(2.0)):
        expected, result = function(expected, factor), jitted(result, factor)
        assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("donate", [(), 0])
def test_one_tensor_under_several_names_is_stepped_once_for_each(donate):
    optimizer = OPTIMIZERS["AdamW"]

    def function(leaves, factor):
        params = {name + str(copy): leaf for name, leaf in leaves.items() for copy in range(2)}
        grads = {name: factor * int(name[-1]) + leaf for name, leaf in params.items()}
        return optimizer.step(params, grads, optimizer.init(params))[0]

    check_jit(function, twenty(), torch.tensor(0.5), donate=donate)


def test_parameters_that_are_made_inside_are_returned_as_they_were_beside_the_new_ones():
    def function(x):
        params = {str(index): x * index for index in range(20)}
        return params, stepped(params, OPTIMIZERS["AdamW"].init(params), x)

    check_jit(function, torch.randn(5))


@pytest.mark.parametrize("turned", ["parameters", "slots"])
def test_slots_may_have_another_memory_order_than_parameters(turned):
    optimizer, w, g = OPTIMIZERS["AdamW"], torch.randn(5, 3), torch.randn(5, 3)
    params, state = optimizer.step({"w": w}, {"w": g}, optimizer.init({"w": w}))

    def transposed(leaf):
        return leaf.T.contiguous().T if leaf.ndim == 2 else leaf

    if turned == "parameters":
        params = pytree.tree_map(transposed, params)
    else:
        state = pytree.tree_map(transposed, state)
    check_jit(optimizer.step, params, {"w": g}, state)


@pytest.mark.parametrize("by", ["slot", "scale", "max_norm", "clip_value"])
def test_a_derivative_by_a_number_of_the_step_is_that_of_torch_func(by):
    optimizer = OPTIMIZERS["AdamW"]
    params, grads = {"a": torch.randn(7)}, {"a": torch.randn(7)}
    params, state = optimizer.step(params, grads, optimizer.init(params))

    def moved(x):
        scaler, slots, settings = ps.StaticScale(2.0).init(), state, {}
        if by == "slot":
            key = next(key for key, slot in state.slots.items() if slot["a"].ndim)
            slots = state._replace(slots={**state.slots, key: {"a": x * grads["a"]}})
        elif by == "scale":
            scaler = scaler._replace(scale=x)
        else:
            settings = {by: x}
        stepped = ps.unscale_and_step(optimizer, scaler, params, grads, slots, **settings)
        return stepped.params["a"].square().sum()

    def derivative(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(moved(x), x)[0]

    x = torch.tensor(0.5)
    assert_close(in_order(derivative)(x), torch.func.grad(moved)(x), rtol=1e-4, atol=1e-6)
