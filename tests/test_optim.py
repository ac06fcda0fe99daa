"""Optimizers as pure functions, against the real ones."""

import functools
import inspect
import sys
import types

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Dispatched, Untouched, clone, same_bits, shares_memory

import purescale as ps

OPTIM = torch.optim
nan = float("nan")

# Each class in a plain and in its richest setting.
SETTINGS = {
    "Adadelta": [{}, {"rho": 0.8, "weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.01, "weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}],
    "Muon": [{}, {"nesterov": False}],
    "Adafactor": [{"foreach": False}, {"foreach": True, "weight_decay": 0.1}],
}
CASES = [pytest.param(name, settings, id=f"{name}-{i}") for name, many in SETTINGS.items() for i, settings in enumerate(many)]
NO_READS = [case for case in CASES if case.values[0] != "Adafactor"]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CAPTURABLE = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (4, 3), "head.weight": (2, 4), "gain": (1, 1)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def grads_at(step, params):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}


@pytest.fixture
def capturable_on_cpu(monkeypatch):
    """torch refuses its capturable formula where there is no graph capture; as an oracle it is right there too."""
    for name in CAPTURABLE:
        module = sys.modules[getattr(OPTIM, name).__module__]
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *a, **k: ["cpu"])


def implementation(name, settings):
    """The flags that name, on the real class, the implementation that runs by default here."""
    if name in FUSED and not settings.get("dampening"):
        return {"fused": True}
    return {"capturable": True, "foreach": False} if name in CAPTURABLE else {"foreach": False} if name == "SGD" else {}


def real(name, settings, flags, steps=20, dtype=torch.float32):
    params = make_params(dtype)
    optimizer = getattr(OPTIM, name)(params.values(), **settings, **flags)
    for step in range(steps):
        for p, g in zip(params.values(), grads_at(step, params).values(), strict=True):
            p.grad = g
        optimizer.step()
    return params, optimizer


def ours(optimizer, steps=20, params=None, state=None, start=0):
    params = make_params() if params is None else params
    state = optimizer.init(params) if state is None else state
    for step in range(start, start + steps):
        params, state = optimizer.step(params, grads_at(step, params), state)
    return params, state


# ---- agreement with torch


@pytest.mark.usefixtures("capturable_on_cpu")
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_twenty_steps_equal_the_real_optimizer_bit_for_bit(name, settings):
    expected, optimizer = real(name, settings, implementation(name, settings))
    params, state = ours(ps.from_torch(getattr(OPTIM, name), **settings))
    assert same_bits(params, expected)
    for slot, p in zip(state.slots.values(), optimizer.param_groups[0]["params"], strict=True):
        assert same_bits(slot, {k: v.detach() for k, v in optimizer.state[p].items() if v is not None})


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"differentiable": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_named_flag_is_kept(name, settings, flags):
    accepted = inspect.signature(getattr(OPTIM, name)).parameters
    if not flags.keys() <= accepted.keys() or (name == "Adafactor"):
        flags = {}
    if not flags and name != "Adafactor":
        flags = {"foreach": False} if "foreach" in accepted else {}
    expected, _ = real(name, settings, flags)
    params, _ = ours(ps.from_torch(getattr(OPTIM, name), **settings, **flags))
    assert same_bits(params, expected)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_default_agrees_with_the_for_loop(name, settings):
    accepted = inspect.signature(getattr(OPTIM, name)).parameters
    flags = {"foreach": False} if "foreach" in accepted and "foreach" not in settings else {}
    expected, _ = real(name, settings, flags)
    torch.testing.assert_close(ours(ps.from_torch(getattr(OPTIM, name), **settings))[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), NO_READS)
def test_the_default_reads_no_tensor_value(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = make_params()
    state = optimizer.init(params)
    with Dispatched() as counted:
        ps.maybe_step(optimizer, params, grads_at(0, params), state, torch.tensor(False))
    assert counted.ops
    assert counted.reads == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_other_dtypes_equal_the_real_optimizer(name, dtype, capturable_on_cpu):
    expected, _ = real(name, {}, implementation(name, {}), dtype=dtype)
    assert same_bits(ours(ps.from_torch(getattr(OPTIM, name)), params=make_params(dtype))[0], expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_complex_parameters_equal_the_real_optimizer(name, capturable_on_cpu):
    flags = {"foreach": False, "differentiable": False, **({"capturable": True} if name == "RMSprop" else {})}
    expected, _ = real(name, {}, flags, dtype=torch.complex64)
    torch.testing.assert_close(ours(ps.from_torch(getattr(OPTIM, name)), params=make_params(torch.complex64))[0], expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own Adagrad
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_equal_the_real_optimizer(name):
    table = torch.randn(5, 3)
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), torch.randn(3, 3), (5, 3), check_invariants=True)
    p = table.clone().requires_grad_()
    p.grad = grad
    getattr(OPTIM, name)([p], lr=0.1, foreach=False).step()
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1)
    params, _ = optimizer.step({"t": table}, {"t": grad}, optimizer.init({"t": table}))
    assert same_bits(params["t"], p.detach())


# ---- laws


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_first_step_changes_no_structure(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = make_params()
    state = optimizer.init(params)
    _, after = optimizer.step(params, grads_at(0, params), state)
    facts = [[(t.shape, t.dtype) for t in pytree.tree_leaves(s)] for s in (state, after)]
    assert pytree.tree_structure(state) == pytree.tree_structure(after)
    assert facts[0] == facts[1]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_is_pure(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(ps.from_torch(getattr(OPTIM, name), **settings), steps=2)
    grads = grads_at(5, params)
    with Untouched((params, grads, state)):
        new = optimizer.step(params, grads, state)
    assert not shares_memory((params, grads, state), new)
    assert same_bits(new, optimizer.step(params, grads, state))
    assert all(p.grad is None for p in params.values())


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_skipped_step_returns_everything_bit_for_bit(name, settings, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=3)
    bad = {n: torch.full_like(g, nan) for n, g in grads_at(0, params).items()}
    skipped = ps.maybe_step(optimizer, clone(params), bad, clone(state), torch.tensor(True), donate=donate)
    assert same_bits(skipped, (params, state))


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_clean_maybe_step_is_the_step(name, settings, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=3)
    expected = optimizer.step(params, grads_at(3, params), state)
    stepped = ps.maybe_step(optimizer, clone(params), grads_at(3, params), clone(state), torch.tensor(False), donate=donate)
    assert same_bits(stepped, expected)


def test_donation_writes_into_the_tensors_given_up():
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    state = adam.init(params)
    new_params, new_state = ps.maybe_step(adam, params, grads_at(0, params), state, torch.tensor(False), donate=True)
    assert {t.data_ptr() for t in new_params.values()} == {t.data_ptr() for t in params.values()}
    assert shares_memory(state.slots, new_state.slots)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_a_parameter_without_gradient_stays(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = make_params()
    state = optimizer.init(params)
    grads = {**grads_at(0, params), "gain": None}
    new_params, new_state = optimizer.step(params, grads, state)
    assert same_bits((new_params["gain"], new_state.slots["gain"]), (params["gain"], state.slots["gain"]))
    assert not same_bits(new_params["conv.weight"], params["conv.weight"])


@pytest.mark.parametrize(("name", "settings"), NO_READS)
def test_a_step_under_vmap_equals_a_loop(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    runs = [ours(optimizer, steps=2, params=pytree.tree_map(lambda t, k=k: t * k, make_params())) for k in (1.0, 3.0)]
    stacked = pytree.tree_map(lambda *t: torch.stack(t), *runs)
    grads = {n: torch.stack([g, 2 * g]) for n, g in grads_at(7, make_params()).items()}
    params, state = torch.vmap(optimizer.step)(stacked[0], grads, stacked[1])
    tolerance = {"rtol": 2e-2, "atol": 1e-4} if name == "Muon" else {"rtol": 1e-5, "atol": 1e-6}  # Muon works in bfloat16
    for index, run in enumerate(runs):
        expected = optimizer.step(run[0], {n: g[index] for n, g in grads.items()}, run[1])
        torch.testing.assert_close(
            pytree.tree_leaves(pytree.tree_map(lambda t, i=index: t[i], (params, state))), pytree.tree_leaves(expected), **tolerance
        )


@pytest.mark.parametrize(("name", "settings"), [case for case in NO_READS if case.values[0] not in ("ASGD", "Muon")])
def test_a_step_differentiates(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = {n: p.double() for n, p in make_params().items()}
    _, state = ours(optimizer, steps=8, params=params)  # RAdam's formula has no derivative before its sixth step
    grads = {n: g.double() for n, g in grads_at(3, params).items()}

    def distance(w):
        stepped, _ = optimizer.step({**params, "gain": w}, {**grads, "gain": w * 3.0}, state)
        return stepped["gain"].sum()

    derivative = torch.func.grad(distance)(params["gain"])
    eps = 1e-6
    numeric = (distance(params["gain"] + eps) - distance(params["gain"] - eps)) / (2 * eps)
    torch.testing.assert_close(derivative.sum(), numeric.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "ASGD", "Muon", "Adagrad", "RMSprop"])
def test_a_step_compiles_in_one_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    compiled = torch.compile(functools.partial(ps.maybe_step, optimizer), fullgraph=True, backend="aot_eager")
    params, state = ours(optimizer, steps=2)
    for step, bad in enumerate([False, True]):
        arguments = (params, grads_at(step, params), state, torch.tensor(bad))
        got, expected = compiled(*arguments), ps.maybe_step(optimizer, *arguments)
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(expected), rtol=2e-3, atol=1e-4)


# ---- learning rates and overrides


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "NAdam", "Adagrad", "Adamax"])
def test_a_schedule_equals_setting_the_rate_by_hand(name, capturable_on_cpu):
    def schedule(applied):
        return 0.1 / (1.0 + applied)

    params = {n: p.requires_grad_() for n, p in make_params().items()}
    optimizer = getattr(OPTIM, name)(params.values(), lr=torch.tensor(0.1), **implementation(name, {}))
    for step in range(5):
        for p, g in zip(params.values(), grads_at(step, params).values(), strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = schedule(torch.tensor(step))
        optimizer.step()
    torch.testing.assert_close(
        ours(ps.from_torch(getattr(OPTIM, name), lr=schedule), steps=5)[0], {n: p.detach() for n, p in params.items()}
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "Adamax"])
def test_the_rate_differentiates(name):
    params = {"w": torch.ones(3, 2, dtype=torch.float64)}

    def total(lr):
        optimizer = ps.from_torch(getattr(OPTIM, name), lr=lr)
        p, state = params, optimizer.init(params)
        for _ in range(3):
            p, state = optimizer.step(p, {"w": p["w"] * 2.0}, state)
        return p["w"].sum()

    lr = torch.tensor(0.01, dtype=torch.float64)
    numeric = (total(lr + 1e-5) - total(lr - 1e-5)) / 2e-5
    torch.testing.assert_close(torch.func.grad(total)(lr), numeric, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), lambda applied: 0.1 + 0.0 * applied], ids=["number", "tensor", "schedule"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam"])
def test_no_kind_of_rate_is_read(name, lr):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=lr)
    params = make_params()
    state = optimizer.init(params)
    with Dispatched() as counted:
        optimizer.step(params, grads_at(0, params), state)
    assert counted.reads == 0


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
    got, _ = ours(ps.from_torch(OPTIM.AdamW, lr=0.1, weight_decay=0.3, overrides=overrides), steps=5)
    assert same_bits(got, {n: p.detach() for n, p in params.items()})


def test_a_later_override_wins():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, overrides={"*": {"lr": 2.0}, "b": {"lr": 4.0}})
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    stepped, _ = sgd.step(params, {"a": torch.ones(1), "b": torch.ones(1)}, sgd.init(params))
    assert (stepped["a"], stepped["b"]) == (-2.0, -4.0)


def test_an_override_may_have_a_schedule():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, overrides={"b": {"lr": lambda applied: 10.0 * (applied + 1)}})
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    for _ in range(2):
        state = sgd.init(params) if params["a"] == 0 else state  # noqa: F821
        params, state = sgd.step(params, {"a": torch.ones(1), "b": torch.ones(1)}, state)
    assert (params["a"], params["b"]) == (-2.0, -30.0)


def test_parameters_may_be_any_tree():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.9, overrides={"layers.1.*": {"lr": 0.5}})
    params = {"layers": [{"w": torch.zeros(1)}, {"w": torch.zeros(1)}], "head": (torch.zeros(1), None)}
    state = sgd.init(params)
    assert set(state.slots) == {"layers.0.w", "layers.1.w", "head.0"}
    grads = pytree.tree_map(lambda t: None if t is None else torch.ones(1), params)
    stepped, _ = ps.maybe_step(sgd, params, grads, state, torch.tensor(False))
    assert stepped == {"layers": [{"w": torch.tensor([-1.0])}, {"w": torch.tensor([-0.5])}], "head": (torch.tensor([-1.0]), None)}


# ---- torch's own format


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_state_moves_to_torch_and_continues_there(name, settings, capturable_on_cpu):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=4)
    moved = [p.clone().requires_grad_() for p in params.values()]
    theirs = getattr(OPTIM, name)(moved, **settings, **implementation(name, settings))
    sd = optimizer.to_state_dict(state)
    theirs.load_state_dict({**sd, "param_groups": [{**theirs.state_dict()["param_groups"][0], "lr": sd["param_groups"][0]["lr"]}]})
    for step in (4, 5):
        for p, g in zip(moved, grads_at(step, params).values(), strict=True):
            p.grad = g
        theirs.step()
    expected, _ = ours(optimizer, steps=2, params=params, state=state, start=4)
    assert same_bits(list(expected.values()), [p.detach() for p in moved])


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_state_comes_from_torch_and_continues_here(name, settings, capturable_on_cpu):
    params, theirs = real(name, settings, implementation(name, settings), steps=4)
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    continued, _ = ours(optimizer, steps=2, params=params, state=state, start=4)
    expected, _ = real(name, settings, implementation(name, settings), steps=6)
    assert same_bits(continued, expected)
    assert state.applied == (4 if name not in ("SGD", "Muon") else int(bool(theirs.state)))


def test_the_groups_of_a_state_dict_are_torchs():
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1, overrides={"gain": {"weight_decay": 0.0}})
    params = make_params()
    ours_ = optimizer.to_state_dict(optimizer.init(params))["param_groups"]
    theirs = OPTIM.AdamW(
        [{"params": [params["conv.weight"], params["head.weight"]]}, {"params": [params["gain"]], "weight_decay": 0.0}], lr=0.1
    )
    assert ours_ == theirs.state_dict()["param_groups"]


def test_a_state_dict_shares_no_memory():
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    assert not shares_memory(state, sd)
    assert not shares_memory(sd, optimizer.from_state_dict(sd, params))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda sd: sd["state"][0].pop("exp_avg"), r"the state of conv.weight has \['exp_avg_sq', 'step'\]"),
        (lambda sd: sd["state"][1].update(exp_avg=torch.zeros(3)), r"the state of head.weight has exp_avg of shape \(3,\)"),
        (lambda sd: sd["param_groups"][0]["params"].pop(), r"the state dict has groups of \[2\] parameters, this optimizer has \[3\]"),
    ],
)
def test_a_state_dict_of_something_else_is_refused(spoil, message):
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    spoil(sd)
    with pytest.raises(ValueError, match=message):
        optimizer.from_state_dict(sd, params)


# ---- (init, update) pairs


def momentum_transformation(rate, decay):
    def init(params):
        return {"trace": pytree.tree_map(torch.zeros_like, params), "count": torch.tensor(0)}

    def update(grads, state, params=None):
        trace = pytree.tree_map(lambda m, g: decay * m + g, state["trace"], grads)
        return pytree.tree_map(lambda m: -rate * m, trace), {"trace": trace, "count": state["count"] + 1}

    return types.SimpleNamespace(init=init, update=update)


@pytest.mark.parametrize("form", ["object", "tuple"])
def test_a_transformation_equals_torchs_sgd(form):
    tx = momentum_transformation(0.1, 0.9)
    optimizer = ps.from_transformation(tx if form == "object" else (tx.init, tx.update))
    torch.testing.assert_close(ours(optimizer, steps=5)[0], ours(ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9), steps=5)[0])


@pytest.mark.parametrize("donate", [False, True])
def test_a_transformations_state_stands_still_on_a_skipped_step(donate):
    optimizer = ps.from_transformation(momentum_transformation(0.1, 0.9))
    params, state = ours(optimizer, steps=2)
    bad = pytree.tree_map(lambda p: torch.full_like(p, nan), params)
    assert same_bits(ps.maybe_step(optimizer, clone(params), bad, clone(state), torch.tensor(True), donate=donate), (params, state))


def test_a_transformation_that_writes_by_default_is_told_not_to():
    def update(grads, state, *, params=None, inplace=True):
        assert params is not None
        return pytree.tree_map(lambda g: g.mul_(-1.0) if inplace else g * -1.0, grads), state

    optimizer = ps.from_transformation((lambda params: (), update))
    params = make_params()
    grads = grads_at(0, params)
    with Untouched(grads):
        optimizer.step(params, grads, optimizer.init(params))


def test_a_transformation_that_counts_in_python_cannot_be_skipped():
    optimizer = ps.from_transformation((lambda p: {"count": 0}, lambda g, s, p: (g, {"count": s["count"] + 1})))
    params = make_params()
    with pytest.raises(ValueError, match=r"is 0, but 1 in new. What changes in a step must be a tensor"):
        ps.maybe_step(optimizer, params, params, optimizer.init(params), torch.tensor(False))


# ---- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.from_torch(OPTIM.LBFGS), ValueError, "evaluates the loss again"),
        (lambda: ps.from_torch(OPTIM.SparseAdam), ValueError, "takes sparse gradients only"),
        (lambda: ps.from_torch(OPTIM.Adafactor), ValueError, r"from_torch\(Adafactor, foreach=False\)"),
        (lambda: ps.from_torch(OPTIM.AdamW([torch.zeros(1)])), TypeError, "the class and not an instance"),
        (lambda: ps.from_torch(torch.nn.Linear), TypeError, "takes a class of torch.optim"),
        (
            lambda: ps.from_torch(
                type("Mine", (OPTIM.Optimizer,), {"step": lambda self: None, "__init__": lambda self, params, lr=1: None})
            ),
            ValueError,
            "from_transformation",
        ),
        (lambda: ps.from_torch(OPTIM.SGD, learning_rate=1.0), ValueError, "SGD has no setting 'learning_rate'. It has: lr, momentum"),
        (lambda: ps.from_torch(OPTIM.SGD, lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda: ps.from_torch(OPTIM.SGD, lr="fast"), TypeError, "lr must be a number"),
        (lambda: ps.from_torch(OPTIM.SGD, lr=torch.ones(2)), TypeError, "lr is a tensor of shape"),
        (lambda: ps.from_torch(OPTIM.AdamW, weight_decay=torch.tensor(0.1)), TypeError, "only lr may be one"),
        (
            lambda: ps.from_torch(OPTIM.SGD, overrides={"*": {"momentun": 0.9}}),
            ValueError,
            r"overrides\['\*'\]: SGD has no setting 'momentun'",
        ),
        (lambda: ps.from_transformation(torch.nn.Linear(1, 1)), TypeError, "takes an \\(init, update\\) pair"),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_override_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'\*.biass' matches no parameter. The names are: conv.weight"):
        ps.from_torch(OPTIM.SGD, overrides={"*.biass": {"lr": 0.1}}).init(make_params())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: {n: t for n, t in g.items() if n != "gain"}, r"grads does not match params: missing \['gain'\]"),
        (lambda g: {**g, "extra": torch.ones(1)}, r"not in params: \['extra'\]"),
        (lambda g: {**g, "gain": {"deep": torch.ones(1)}}, r"\['gain'\]\['deep'\]"),
        (lambda g: list(g.values()), "grads does not match params"),
        (lambda g: {**g, "gain": torch.ones(7)}, r"grads\['gain'\] has shape \(7,\), its parameter \(1, 1\)"),
    ],
)
def test_gradients_that_do_not_match_the_parameters_are_refused_and_nothing_changes(spoil, message):
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    state, grads = adam.init(params), spoil(grads_at(0, params))
    with Untouched((params, state, grads)), pytest.raises(ValueError, match=message):
        ps.maybe_step(adam, params, grads, state, torch.tensor(False), donate=True)
    with Untouched((params, state, grads)), pytest.raises(ValueError, match=message):
        ps.unscale_and_step(adam, ps.StaticScale(4.0).init(), params, grads, state, max_norm=1.0, donate=True)


def test_a_state_of_other_parameters_is_refused():
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    with pytest.raises(ValueError, match=r"opt_state knows the parameters other, params has conv\.weight"):
        adam.step(params, grads_at(0, params), adam.init({"other": torch.ones(1)}))


def test_an_integer_parameter_is_refused():
    with pytest.raises(TypeError, match=r"steps is torch\.int64; a parameter is a floating"):
        ps.from_torch(OPTIM.SGD).init({"steps": torch.tensor(1)})


# ---- layouts, dtypes, absences


def layouts():
    g = torch.randn(7, 5)
    return {
        "transposed": (torch.randn(5, 7), g.t()),
        "sliced": (torch.randn(7, 5), torch.randn(14, 10)[::2, ::2]),
        "expanded": (torch.randn(7, 5), torch.randn(7, 1).expand(7, 5)),
        "transposed weight": (torch.randn(5, 7).t(), g),
        "expanded weight": (torch.randn(7, 1).expand(7, 5), g),
        "channels last weight": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)),
        "channels last gradient": (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("donate", [False, True])
def test_memory_layout_does_not_matter(name, layout, donate):
    """torch's fused kernels walk weights and gradients by one pointer, whatever their strides."""
    weight, grad = layouts()[layout]
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    results = []
    for w, g in ((weight, grad), (weight.contiguous().clone(), grad.contiguous().clone())):
        p, state = {"w": w.clone()}, optimizer.init({"w": w})
        for _ in range(2):
            p, state = ps.maybe_step(optimizer, p, {"w": g}, state, torch.tensor(False), donate=donate)
        results.append(p["w"].contiguous())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_gradient_in_another_dtype_is_cast_to_its_parameters(name, dtype):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = make_params()
    grads = {n: g.to(dtype) for n, g in grads_at(0, params).items()}
    expected = optimizer.step(params, {n: g.float() for n, g in grads.items()}, optimizer.init(params))
    assert same_bits(optimizer.step(params, grads, optimizer.init(params)), expected)


def test_dampening_takes_a_parameter_without_gradient():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    params = make_params()
    state = sgd.init(params)
    stepped, _ = sgd.step(params, {**grads_at(0, params), "gain": None}, state)
    assert same_bits(stepped["gain"], params["gain"])


def test_dampening_before_the_first_step_moves_to_torch():
    params = {"w": torch.ones(1)}
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    assert sgd.to_state_dict(sgd.init(params))["state"] == {}


def test_groups_of_other_sizes_are_refused():
    params = make_params()
    theirs = OPTIM.AdamW([{"params": [params["conv.weight"]]}, {"params": [params["head.weight"], params["gain"]], "lr": 0.1}])
    optimizer = ps.from_torch(OPTIM.AdamW, overrides={"gain": {"lr": 0.1}})
    with pytest.raises(ValueError, match=r"groups of \[1, 2\] parameters, this optimizer has \[2, 1\]"):
        optimizer.from_state_dict(theirs.state_dict(), params)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "Muon", "Adagrad"])
def test_vmap_over_gradients_alone_equals_a_loop(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params, state = ours(optimizer, steps=1)
    grads = [grads_at(3, params), grads_at(4, params)]
    stacked = pytree.tree_map(lambda *t: torch.stack(t), *grads)
    batched = torch.vmap(lambda g: optimizer.step(params, g, state)[0])(stacked)
    for index, g in enumerate(grads):
        expected = optimizer.step(params, g, state)[0]
        torch.testing.assert_close({n: t[index] for n, t in batched.items()}, expected, rtol=2e-2 if name == "Muon" else 1e-5, atol=1e-4)


def test_vmap_over_the_rate_alone_equals_a_loop():
    params = make_params()

    def step(lr):
        optimizer = ps.from_torch(OPTIM.AdamW, lr=lr)
        return optimizer.step(params, grads_at(0, params), INIT)[0]

    INIT = ps.from_torch(OPTIM.AdamW).init(params)
    batched = torch.vmap(step, randomness="same")(torch.tensor([0.1, 0.2]))
    for index, lr in enumerate((0.1, 0.2)):
        torch.testing.assert_close({n: t[index] for n, t in batched.items()}, step(torch.tensor(lr)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_parameters_that_require_a_gradient_grow_no_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = {n: p.requires_grad_() for n, p in make_params().items()}
    for donate in (False, True):
        stepped, state = ps.maybe_step(optimizer, params, grads_at(0, params), optimizer.init(params), torch.tensor(False), donate=donate)
        assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))
