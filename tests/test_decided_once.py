"""What a step remembers of earlier calls changes no result, no refusal and no read, wherever it
runs. All kernels agree. A callable that raises leaves everything as it was.
"""

import contextlib
import functools
import threading

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from helpers import clone, examples, in_processes, same_bits, shares_memory, started, tensors
from hypothesis import given
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import purescale as ps
from purescale._loss_scale import rules
from purescale._step import value_and_grad
from purescale._torch.tracing import as_on_an_accelerator
from purescale._tree.cache import TreeCache
from purescale._wrappers import pieces

# torch says so of leaves that a step refuses.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Sparse CSR tensor support", "The PyTorch API of nested tensors")
]

# ---- one call, of which each fact can be changed -------------------------------------------------


GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    name: torch.rand(shape, generator=GENERATOR) + 1
    for name, shape in {"w": (5, 3), "k": (2, 3, 2, 2), "b": (33,)}.items()
}


class Call:
    """A step that is made anew, from parameters in float32 and a batch."""

    def __init__(self):
        self.params = {name: value.clone() for name, value in PARAMS.items()}
        self.buffers = {"calls": torch.zeros(())}
        self.batches = [torch.tensor(0.5)]
        self.options, self.context = {}, contextlib.nullcontext
        self.optimizer, self.rule = ADAMW, ps.DynamicScale(2.0**4, growth_interval=2)
        self.restore = lambda state: state

    def outcome(self):
        """What the caller sees: bits, forms, memory and reads, or the error."""
        with HostReads() as reads, self.context():
            try:
                guard = self.options.get("guard")
                state = ps.init_train_state(
                    self.params, self.buffers, self.optimizer, self.rule, guard=guard
                )
                state = self.restore(state._replace(params=self.params))
                step = functools.partial(ps.train_step, optimizer=self.optimizer, rule=self.rule)
                result = step(state, self.batches, loss_fn=loss_fn, **self.options)
            except Exception as error:
                return type(error), str(error), reads.count
        leaves, form = pytree.tree_flatten(result)
        metadata = [
            (x.dtype, x.shape, x.stride(), x.requires_grad) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        in_place = [shares_memory(leaf, state) for leaf in tensors(result)]
        bits = [x.detach().resolve_conj().clone() for x in tensors(result)]
        return bits, metadata, str(form), in_place, reads.count


def loss_fn(params, buffers, x):
    leaves = [leaf for leaf in pytree.tree_leaves(params) if leaf is not None]
    loss = sum([(leaf * x).abs().square().sum().float() for leaf in leaves])
    return loss, {key: buffer + 1 for key, buffer in buffers.items()}


class HostReads:
    """Counts the values that Python asks of tensors."""

    names = ("item", "tolist", "__bool__", "__float__", "__int__")

    def __enter__(self):
        self.count, self.patch = 0, pytest.MonkeyPatch()
        for name in self.names:
            self.patch.setattr(Tensor, name, self.counting(getattr(Tensor, name)))
        return self

    def counting(self, method):
        def read(tensor, *args):
            self.count += 1
            return method(tensor, *args)

        return read

    def __exit__(self, *raised):
        self.patch.undo()


def cold():
    """Forget what earlier calls have left, and leave out no plan from here on."""
    for optimizer in (ADAMW, GROUPS):
        vars(optimizer)["cache"] = TreeCache(None)
    value_and_grad._cache = TreeCache(None)
    rules._CHECKED.clear()


adamw = functools.partial(ps.from_torch, torch.optim.AdamW)
ADAMW = adamw(lr=0.1)
GROUPS = adamw(lr=lambda t: 0.1 / (t + 1), overrides={"b": {"weight_decay": 0.5}})


# ---- the facts -----------------------------------------------------------------------------------


def leaf(change, name="w"):
    """A fact of one parameter, whatever else is changed."""

    def apply(call):
        if name in call.params:
            call.params = {**call.params, name: change(PARAMS[name])}

    return apply


def option(**options):
    return lambda call: call.options.update(options)


def attribute(name, make):
    return lambda call: setattr(call, name, make())


optimizer = functools.partial(attribute, "optimizer")


def params(change):
    def apply(call):
        call.params = change(call.params)

    return apply


def slot(change):
    """A fact of the state that a call is given."""

    def apply(call):
        def restore(state):
            old = state.opt_state
            fits = isinstance(old, ps.OptState) and "exp_avg" in old.slots
            return state._replace(opt_state=change(old)) if fits else state

        call.restore = restore

    return apply


def with_slot(value):
    def change(opt_state):
        column = opt_state.slots["exp_avg"]
        if not isinstance(column, dict):
            return opt_state
        column = {**column, next(iter(column)): value}
        return opt_state._replace(slots={**opt_state.slots, "exp_avg": column})

    return slot(change)


class Subclass(Tensor):
    pass


OF_LEAVES = {
    "float64": leaf(Tensor.double),
    "float16": leaf(Tensor.half),
    "bfloat16": leaf(Tensor.bfloat16, "b"),
    "complex": leaf(lambda t: torch.complex(t, t)),
    "conjugated": leaf(lambda t: torch.complex(t, t).conj()),
    "negated": leaf(lambda t: torch.complex(t, t).conj().imag),
    "whole numbers": leaf(Tensor.int),
    "another shape": leaf(lambda t: t[:4].clone()),
    "another rank": leaf(lambda t: t[None].clone()),
    "0-d": leaf(Tensor.sum),
    "empty": leaf(lambda t: t[:0].clone()),
    "transposed": leaf(lambda t: t.t().contiguous().t()),
    "channels last": leaf(lambda t: t.to(memory_format=torch.channels_last), "k"),
    "a slice": leaf(lambda t: t.repeat(1, 2)[:, ::2]),
    "expanded": leaf(lambda t: t[:1].expand(5, 3)),
    "requires a gradient": leaf(lambda t: t.clone().requires_grad_()),
    "a Parameter": leaf(nn.Parameter),
    "on a graph": leaf(lambda t: t.clone().requires_grad_() * 1),
    "inference": leaf(lambda t: torch.inference_mode()(Tensor.clone)(t)),
    "a subclass": leaf(lambda t: t.clone().as_subclass(Subclass)),
    "sparse": leaf(Tensor.to_sparse),
    "compressed": leaf(Tensor.to_sparse_csr),
    "nested": leaf(lambda t: torch.nested.nested_tensor([t[0], t[1, :2]])),
    "on meta": leaf(lambda t: t.to("meta")),
}
FACTS = {
    "nothing": lambda call: None,
    **OF_LEAVES,
    # the tree
    "None": params(lambda tree: {**tree, "w": None}),
    "a leaf more": params(lambda tree: {**tree, "v": torch.ones(3)}),
    "a leaf less": params(lambda tree: {key: tree[key] for key in list(tree)[1:]}),
    "another order": params(lambda tree: dict(reversed(tree.items()))),
    "another name": params(lambda tree: {f"{key}_": value for key, value in tree.items()}),
    "a list": params(lambda tree: list(tree.values())),
    "a nested dict": params(lambda tree: {"net": tree}),
    "tied": params(lambda tree: {**tree, "v": next(iter(tree.values()))}),
    # the state
    "a slot in float64": with_slot(torch.zeros(5, 3, dtype=torch.float64)),
    "a transposed slot": with_slot(torch.zeros(3, 5).t()),
    "a slot of another shape": with_slot(torch.zeros(2)),
    "no slots": slot(lambda state: state._replace(slots={})),
    "no state": slot(lambda state: ()),
    "later": slot(lambda state: state._replace(applied=torch.tensor(7))),
    # the batch
    "a batch in float64": attribute("batches", lambda: [torch.tensor(0.5, dtype=torch.float64)]),
    "an overflow": attribute("batches", lambda: [torch.tensor(float("inf"))]),
    "two microbatches": attribute("batches", lambda: [torch.tensor(0.5), torch.tensor(0.25)]),
    "one of them bad": attribute("batches", lambda: [torch.tensor(0.5), torch.tensor(1e30)]),
    "no microbatches": attribute("batches", list),
    # options
    "max_norm": option(max_norm=0.5),
    "max_norm=inf": option(max_norm=float("inf")),
    "a bound that is a tensor": option(max_norm=torch.tensor(0.5)),
    "a bound of 0": option(max_norm=torch.tensor(0.0)),
    "norm_type": option(max_norm=0.5, norm_type=1.0),
    "clip_value": option(clip_value=0.01),
    "weights": option(weight_fn=lambda batch: 2.0),
    "a weight that is a tensor": option(weight_fn=lambda batch: torch.tensor(2.0)),
    "drop_microbatch": option(on_nonfinite="drop_microbatch"),
    "window_size": option(window_size=4),
    "retries": option(max_retries=1),
    "a guard": option(guard=ps.SpikeGuard(warmup=2), max_norm=1.0),
    "donated": option(donate=True),
    # settings
    "groups": optimizer(lambda: GROUPS),
    "a formula": optimizer(lambda: ps.from_torch(torch.optim.NAdam, lr=0.1)),
    "an equal optimizer": optimizer(lambda: adamw(lr=0.1)),
    "another rate": optimizer(lambda: adamw(lr=0.2)),
    "a rate in the state": optimizer(lambda: adamw(lr=0.1, in_state=("lr",))),
    "masters": optimizer(lambda: ps.with_master_weights(ADAMW)),
    "a partition": optimizer(
        lambda: ps.partition({"a": ADAMW, "b": GROUPS}, lambda n, leaf: "ab"[leaf.ndim < 2])
    ),
    "another rule": attribute("rule", lambda: ps.HeadroomScale(2.0**4)),
    # where it runs
    "no_grad": attribute("context", lambda: torch.no_grad),
    "inference_mode": attribute("context", lambda: torch.inference_mode),
    "autocast": attribute(
        "context", lambda: functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    ),
    "on an accelerator": attribute("context", lambda: as_on_an_accelerator),
}


def made(names):
    call = Call()
    for name in sorted(names, key=list(FACTS).index):  # of leaves, then of trees
        FACTS[name](call)
    return call


def assert_same_outcome(warm, expected, facts):
    assert warm[1:] == expected[1:], facts
    is_error = isinstance(expected[0], type)
    assert warm[0] == expected[0] if is_error else same_bits(warm[0], expected[0]), facts


def cold_outcome(fact):
    cold()
    return made([fact]).outcome()


def test_a_call_is_the_first_call_also_after_each_other_one_that_differs_in_a_fact():
    expected = {fact: cold_outcome(fact) for fact in FACTS}
    cold()
    for fact in FACTS:
        for name in (fact, "nothing"):
            assert_same_outcome(made([name]).outcome(), expected[name], fact)


some_facts = st.lists(st.sampled_from(sorted(FACTS)), max_size=3)


@examples(25)
@given(before=st.lists(some_facts, min_size=1, max_size=4), facts=some_facts)
def test_a_call_after_any_others_is_the_first_call(before, facts):
    cold()
    expected = made(facts).outcome()
    cold()
    for earlier in before:
        made(earlier).outcome()
    assert_same_outcome(made(facts).outcome(), expected, facts)


# ---- where a call runs ---------------------------------------------------------------------------

DIFFERENTIABLE = ps.from_torch(torch.optim.AdamW, lr=0.1, differentiable=True)


def state_of(tree, optimizer=ADAMW):
    return ps.init_train_state(tree, {"calls": torch.zeros(())}, optimizer, ps.StaticScale(2.0**4))


def step_of(state, x=None, optimizer=ADAMW, **options):
    batches = [torch.tensor(0.5, dtype=torch.float64) if x is None else x]
    return ps.train_step(
        state, batches, loss_fn=loss_fn, optimizer=optimizer, rule=ps.StaticScale(2.0**4), **options
    )


def total(tree, optimizer=ADAMW):
    """A number of the state after a step, to be differentiated."""
    state = state_of(wide(), optimizer)
    new, info = step_of(state._replace(params=tree), optimizer=optimizer, max_norm=0.5)
    return sum([leaf.double().square().sum() for leaf in tensors(new.params)]) + info.grad_norm


def wide():
    return {name: value.double() for name, value in PARAMS.items()}


def by_func():
    return torch.func.grad(total)(wide())


def by_backward():
    leaves = {name: x.requires_grad_() for name, x in wide().items()}
    total(leaves, DIFFERENTIABLE).backward()
    return {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("how", [by_func, by_backward])
def test_a_derivative_after_eager_steps_is_the_first_one(how):
    for optimizer in (ADAMW, DIFFERENTIABLE):
        vars(optimizer)["cache"] = TreeCache(None)
    expected = how()
    for optimizer in (ADAMW, DIFFERENTIABLE):
        total(wide(), optimizer)
    assert same_bits(how(), expected)


def vmapped(state):
    return ps.member(torch.vmap(step_of)(ps.stack_states([state, state])), 1)


def recorded(state):
    leaves, form = pytree.tree_flatten(state)

    def flat(*leaves):
        return tensors(step_of(pytree.tree_unflatten(list(leaves), form)))

    return make_fx(flat)(*leaves)(*leaves)


def jitted(state):
    return ps.jit(step_of, backend="aot_eager")(state)


@pytest.mark.parametrize("where", [vmapped, recorded, as_on_an_accelerator()(step_of), jitted])
def test_a_step_elsewhere_reads_nothing_and_agrees_with_the_eager_ones_around_it(where):
    """To 1e-6: other kernels."""
    state = state_of(PARAMS)
    cold()
    expected = step_of(state)
    for _ in range(2):
        with HostReads() as reads:
            result = where(state)
        assert reads.count == 0
        torch.testing.assert_close(tensors(result), tensors(expected), rtol=1e-6, atol=1e-6)
        by_func()
        assert same_bits(step_of(state), expected)


# ---- kernels -------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "channels last": lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t,
    "a slice": lambda t: torch.stack([t, t], -1)[..., 0],
    "at an offset": lambda t: (
        torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape) if t.numel() else t
    ),
}
layouts = st.sampled_from(sorted(LAYOUTS))
DTYPES = {"float32": 1e-5, "float64": 1e-5, "float16": 1e-2, "bfloat16": 1e-1, "complex64": 1e-5}
SHAPES = [(), (0,), (5,), (33,), (300,), (3, 5), (2, 3, 2, 2), (7, 1, 1, 5)]
OPTIMIZERS = {
    "AdamW": functools.partial(ps.from_torch, torch.optim.AdamW, amsgrad=True),
    "SGD": functools.partial(ps.from_torch, torch.optim.SGD, momentum=0.9),
    "Adagrad": functools.partial(ps.from_torch, torch.optim.Adagrad),
    "NAdam": functools.partial(ps.from_torch, torch.optim.NAdam),
}
leaves = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from(sorted(DTYPES)), layouts, layouts, layouts
)


def drawn(rows, name, hole):
    """Parameters, gradients and a state after one step, in drawn dtypes and layouts."""
    generator = torch.Generator().manual_seed(1)
    params, grads = ({"none": None} if hole else {} for _ in range(2))
    for index, (shape, dtype, *_) in enumerate(rows):
        values = torch.rand(2, *shape, generator=generator, dtype=torch.float64) + 0.5
        values = values.to(getattr(torch, dtype))
        params[f"p{index}"], grads[f"p{index}"] = values[0], values[1]
    optimizer = OPTIMIZERS[name](lr=0.1)
    state = optimizer.step(params, grads, optimizer.init(params))[1]
    for index, (_, _, of_param, of_grad, of_slot) in enumerate(rows):
        key = f"p{index}"
        params[key] = LAYOUTS[of_param](params[key])
        grads[key] = LAYOUTS[of_grad](grads[key] * 16)
        for column in state.slots.values():
            if column[key].shape == params[key].shape:
                column[key] = LAYOUTS[of_slot](column[key])
    return optimizer, params, grads, state


def stepped(optimizer, params, grads, state, scale=16.0, **options):
    scaler = ps.StaticScale(scale).init()
    return ps.unscale_and_step(optimizer, scaler, params, grads, state, **options)


def mapped(optimizer, params, grads, state, **options):
    args = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), (params, state, grads))

    def step(some, state, others):
        return tuple(stepped(optimizer, some, others, state, **options))

    results = torch.vmap(step)(*args)
    return pytree.tree_map(lambda leaf: leaf[1], results)


def widened(leaf):
    return leaf if leaf is None else leaf.to(torch.promote_types(leaf.dtype, torch.float64))


@examples(40)
@given(
    rows=st.lists(leaves, min_size=1, max_size=4),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    hole=st.booleans(),
    max_norm=st.sampled_from([None, 0.25, 1e3]),
    bad=st.booleans(),
)
def test_all_kernels_agree_with_the_formula_in_float64(rows, name, hole, max_norm, bad):
    """To the rounding of each dtype, for the layouts of parameters, gradients and slots."""
    optimizer, params, grads, state = drawn(rows, name, hole)
    if bad:
        grads["p0"] = torch.full_like(grads["p0"], float("inf"))
    bad = bad and grads["p0"].numel() > 0
    options = {"max_norm": max_norm}
    formula = OPTIMIZERS[name](lr=0.1, foreach=False)
    slots = {
        slot: column if slot == "mu_product" else pytree.tree_map(widened, column)
        for slot, column in state.slots.items()
    }
    exact = stepped(
        formula,
        {key: widened(x) for key, x in params.items()},
        {key: widened(x) for key, x in grads.items()},
        state._replace(slots=slots),
        **options,
    )
    before = clone((params, state))
    with as_on_an_accelerator():
        to_device = stepped(optimizer, params, grads, state, **options)
    results = {
        "host": stepped(optimizer, params, grads, state, **options),
        "device": to_device,
        "formula": stepped(formula, params, grads, state, **options),
        "donated": stepped(optimizer, *clone((params, grads, state)), donate=True, **options),
    }
    if not hole:  # torch.vmap maps no None
        results["mapped"] = mapped(optimizer, params, grads, state, **options)
    for way, result in results.items():
        assert bool(result[2]) == bad, way
        for index, (_, dtype, *_) in enumerate(rows):
            key, tolerance = f"p{index}", DTYPES[dtype]
            new, expected = result[0][key], exact.params[key]
            torch.testing.assert_close(
                new.to(expected.dtype), expected, rtol=tolerance, atol=tolerance, msg=way
            )
    assert same_bits((params, state), before)


# ---- callables that raise ------------------------------------------------------------------------


class InterruptedStepError(Exception):
    pass


class Fails:
    """A callable that fails in one of its calls."""

    def __init__(self, function):
        self.function, self.left = function, None

    def __call__(self, *args):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise InterruptedStepError
        return self.function(*args)


class OwnSGD(torch.optim.SGD):
    fails = Fails(lambda: None)

    def step(self, closure=None):
        super().step(closure)
        self.fails()


class OwnRule(ps.DynamicScale):
    fails = Fails(lambda: None)

    def update(self, scaler, found_inf):
        self.fails()
        return super().update(scaler, found_inf)


class OwnGuard(ps.SpikeGuard):
    fails = Fails(lambda: None)

    def update(self, state, loss, grad_norm):
        self.fails()
        return super().update(state, loss, grad_norm)


SCHEDULES = [Fails(lambda t: 0.1 / (t + 1)) for _ in range(2)]


def label(name, leaf):
    return "second" if name == "b" else "first"


GROUPED = ps.from_torch(torch.optim.AdamW, lr=SCHEDULES[0], overrides={"b": {"lr": SCHEDULES[1]}})
FORMULA = Fails(lambda param, grad, slots, settings, t: (param - settings["lr"] * grad, {}))
OF_FORMULA = ps.from_formula(FORMULA, elementwise=False, lr=0.1)


def in_parts(second):
    return ps.partition({"first": ADAMW, "second": second}, label)


LOSS, WEIGHT = Fails(loss_fn), Fails(lambda batch: 1.0)
# the optimizer, what raises, and in which of its calls within a step
RAISING = {
    "the loss of the last microbatch": (ADAMW, LOSS, 1),
    "the weight of the last microbatch": (ADAMW, WEIGHT, 1),
    "the rule": (ADAMW, OwnRule.fails, 0),
    "the guard": (ADAMW, OwnGuard.fails, 0),
    "the schedule of an override": (GROUPED, SCHEDULES[1], 0),
    "the step of a class in a part": (in_parts(ps.from_torch(OwnSGD, lr=0.1)), OwnSGD.fails, 0),
    "the formula": (OF_FORMULA, FORMULA, 1),
    "the formula over masters": (ps.with_master_weights(OF_FORMULA), FORMULA, 1),
    "the step of a class": (ps.from_torch(OwnSGD, lr=0.1), OwnSGD.fails, 0),
}


@pytest.mark.parametrize("what", RAISING)
def test_nothing_is_changed_where_a_callable_raises(what):
    optimizer, callable, call = RAISING[what]
    settings = {"loss_fn": LOSS, "weight_fn": WEIGHT, "guard": OwnGuard(warmup=2), "max_norm": 0.5}
    settings["buffers"] = {"calls": torch.zeros(())}
    state, step = started(clone(PARAMS), None, optimizer, OwnRule(2.0**4), **settings)
    batches = [torch.tensor(0.5), torch.tensor(0.25)]
    for _ in range(2):
        state, _ = step(state, batches, donate=True)
    before, versions = clone(state), [leaf._version for leaf in tensors(state)]
    callable.left = call
    try:
        with pytest.raises(InterruptedStepError):
            step(state, batches, donate=True)
    finally:
        callable.left = None
    assert same_bits(state, before)
    assert [leaf._version for leaf in tensors(state)] == versions
    assert same_bits(step(state, batches, donate=True), step(before, batches))


def one_rank_is_warm(rank):
    """A rank that has made steps by itself beside one that has made none."""
    state, batches = state_of(wide()), [torch.tensor(0.5 + rank, dtype=torch.float64)]
    if rank == 0:
        for x in batches * 3:
            step_of(state, x, max_norm=0.5)
    together, info = step_of(state, batches[0], max_norm=0.5, group=dist.group.WORLD)
    fingerprints = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(fingerprints, ps.fingerprint((together, info)))
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.slow
def test_a_warm_rank_and_a_cold_one_make_equal_collectives():
    in_processes(one_rank_is_warm)


@pytest.mark.parametrize("around", ["nothing", "masters", "rounding", "narrow", "schedule"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "NAdam"])
@pytest.mark.parametrize("number", [3, 20])
def test_a_step_is_made_as_planned_while_another_thread_enters_a_transform(
    name, number, around, monkeypatch
):
    """torch keeps the level of forward mode for the whole process."""
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 50)
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.from_torch(getattr(torch.optim, name), lr=0.1, **momentum)
    slot = "momentum_buffer" if momentum else "square_avg" if name == "RMSprop" else "exp_avg"
    wraps = {
        **{"masters": ps.with_master_weights, "rounding": ps.with_stochastic_rounding},
        **{"nothing": lambda it: it, "schedule": ps.with_schedule_free},
        "narrow": lambda it: ps.with_state_dtype(it, {slot: torch.bfloat16}),
    }
    optimizer = wraps[around](optimizer)
    dtype = torch.bfloat16 if around in ("masters", "rounding") else torch.float32
    params = {str(k): torch.rand(33, generator=GENERATOR).to(dtype) for k in range(number)}
    state, step = started(params, loss_that_starts, optimizer, ps.StaticScale(8.0))
    state, _ = step(state, [None])
    expected, _ = step(state, [None])
    with beside_a_thread(in_forward_mode) as start:
        found, _ = step(state, [start])
    assert same_bits(found, expected)


def loss_that_starts(params, start):
    """A loss in which another thread is started."""
    if start is not None:
        start()
    return sum((param.float() ** 3).sum() for param in params.values())


@contextlib.contextmanager
def beside_a_thread(run):
    """Yield a function that starts a thread, which is in what `run` enters until the end."""
    inside, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=run, args=(inside, done))

    def start():
        thread.start()
        assert inside.wait(60)

    try:
        yield start
    finally:
        done.set()
        thread.join()


def in_forward_mode(inside, done):
    with forward_ad.dual_level():
        inside.set()
        done.wait(60)


def in_a_compiler(inside, done):
    def backend(module, _):
        inside.set()
        done.wait(60)
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def descend(param, grad, slots, settings, t):
    return param - settings["lr"] * grad, {}


OF_FORMULAS = {
    "formula": ps.from_formula(descend, elementwise=True, lr=0.1),
    "ASGD": ps.from_torch(torch.optim.ASGD, lr=0.1),
    "masters": ps.with_master_weights(ps.from_torch(torch.optim.Adafactor, lr=0.1)),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("run", [in_forward_mode, in_a_compiler])
@pytest.mark.parametrize("name", OF_FORMULAS)
def test_a_formula_stays_off_the_graph_while_another_thread_enters_a_transform(name, run, donate):
    params = {key: torch.rand(33, generator=GENERATOR) for key in "abc"}

    def stepped(start):
        own = {key: nn.Parameter(param.clone()) for key, param in params.items()}
        state, step = started(own, loss_that_starts, OF_FORMULAS[name], ps.StaticScale(8.0))
        return step(state._replace(params=own), [start], donate=donate)[0]

    expected = stepped(None)
    with beside_a_thread(run) as start:
        found = stepped(start)
    on_graph, expected_on = ([x.requires_grad for x in tensors(t)] for t in (found, expected))
    assert on_graph == expected_on
    assert all(leaf.grad_fn is None for leaf in tensors(found))
    torch.testing.assert_close(found.params, expected.params)


def test_a_formula_over_transposed_leaves_is_the_same_while_another_thread_compiles():
    with beside_a_thread(in_a_compiler) as start:
        starts = [start]

        def descend_after_start(param, grad, slots, settings, t):
            if is_second and starts:
                starts.pop()()
            return descend(param, grad, slots, settings, t)

        optimizer = ps.from_formula(descend_after_start, elementwise=True, lr=0.1)
        params = {"w": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(3, 2).t()}
        grads = {name: param.cos() for name, param in params.items()}
        is_second = False
        expected, _ = optimizer.step(params, grads, optimizer.init(params))
        is_second = True
        found, _ = optimizer.step(params, grads, optimizer.init(params))
    assert starts == []
    assert same_bits(found, expected)
