"""What is kept of a step, for steps like it, changes no result and keeps nothing alive."""

import concurrent.futures
import gc
import weakref

import optree
import pytest
import torch
from helpers import find_no_plans, same_bits, started
from torch import nn

import purescale as ps
from purescale._torch import private
from purescale._torch.private import guard_one_by_one
from purescale._torch.tensor_list import ListMetadata, TensorList
from purescale._tree.cache import MetadataCache

RULE = ps.DynamicScale(init_scale=2.0**4)


FACTS = {
    "num_elements": 9,
    "any_empty": True,
    "dtypes": {torch.float32, torch.float64},
    "devices": {torch.device("cpu")},
    "are_on_cpu": True,
    "indices_by_kind": [[0, 2, 3], [1]],
    "are_gapless": True,
    "any_requires_grad": True,
}


def test_a_fact_is_the_same_of_lists_that_share_a_cache():
    def tensors():
        transposed, empty = torch.zeros(3, 2).t(), torch.zeros(0)
        return [transposed, torch.zeros(2).double(), empty, torch.zeros(1, requires_grad=True)]

    for fact, expected in FACTS.items():
        metadata, picked = ListMetadata(), TensorList(tensors()[1:3])
        for _ in range(2):
            assert getattr(TensorList(tensors(), metadata), fact) == expected
            shared = TensorList(tensors(), metadata).take([1, 2])
            assert getattr(shared, fact) == getattr(picked, fact)


# ---- plans ---------------------------------------------------------------------------------------

LIKE = torch.zeros(2, 3)
OTHERS = [
    *(torch.zeros(3, 2), torch.zeros(3, 2).t(), LIKE.double(), LIKE.clone().requires_grad_()),
    *(nn.Parameter(LIKE), LIKE.to("meta"), LIKE.to_sparse(), None, 0.0),
]


@pytest.mark.parametrize("guard", ["torch's", "ours"])
def test_a_plan_is_found_for_equal_metadata_and_an_equal_key_alone(guard, monkeypatch):
    if guard == "ours":
        monkeypatch.setattr(private, "metadata_guard", guard_one_by_one, raising=False)
    structures = [optree.tree_flatten(tree)[1] for tree in ({"a": 0}, {"a": 0}, {"b": 0})]
    plans = MetadataCache()
    plans.add([LIKE], structures[0], "old")
    plans.add([LIKE], structures[0], "new")
    assert list(plans.matching([LIKE + 1], structures[1])) == ["new", "old"]
    for tensor, key in ((LIKE, structures[2]), *((other, structures[1]) for other in OTHERS)):
        assert list(plans.matching([tensor], key)) == []


@pytest.mark.parametrize("size", [1, 8, None])
def test_the_oldest_plan_goes_where_there_are_too_many(size):
    plans = MetadataCache(size)
    for length in range(100):
        plans.add([torch.zeros(length)], "key", length)
    assert list(plans) == list(range(99, 99 - (size or 100), -1))


def test_threads_that_add_and_look_find_whole_plans():
    plans = MetadataCache(4)

    def work(length):
        for _ in range(100):
            plans.add([torch.zeros(length)], "key", length)
            assert set(plans.matching([torch.zeros(length)], "key")) <= {length}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 1 <= len(plans) <= 4


# ---- whole steps ---------------------------------------------------------------------------------


def parameters(dtype=torch.float32, size=3):
    torch.manual_seed(0)
    return {name: torch.randn(size, 2, dtype=dtype) for name in "abc"}


def steps(params, **settings):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.1)
    state = optimizer.init(params)
    for value in (1.0, -1.0):
        grads = {name: torch.full_like(p, value) for name, p in params.items()}
        out = ps.unscale_and_step(optimizer, RULE.init(), params, grads, state, **settings)
        params, state = out.params, out.opt_state
    return state


def test_two_models_do_not_disturb_each_other(monkeypatch):
    optimizer, scaler = ps.from_torch(torch.optim.AdamW, lr=0.1), RULE.init()

    def step(size):
        params, grads = parameters(size=size), parameters(size=size)
        ps.unscale_and_step(optimizer, scaler, params, grads, optimizer.init(params))

    for size in (3, 5):
        step(size)
    monkeypatch.setattr(type(optimizer), "plan", lambda *_: pytest.fail("planned anew"))
    for size in (3, 5):
        step(size)


WRONG = {
    "shape": lambda p, g, s: g.update(a=torch.zeros(2, 3)),
    "dtype": lambda p, g, s: g.update(a=torch.zeros(3, 2, dtype=torch.int32)),
    "device": lambda p, g, s: g.update(a=torch.zeros(3, 2, device="meta")),
    "graph": lambda p, g, s: g.update(a=torch.zeros(3, 2, requires_grad=True) * 2),
    "parameter": lambda p, g, s: p.update(a=p["a"].double(), b=p["b"].long()),
    "missing": lambda p, g, s: g.pop("a"),
    "slot": lambda p, g, s: s.slots["exp_avg"].update(a=torch.zeros(2, 3)),
    "other slots": lambda p, g, s: s.slots.pop("exp_avg_sq"),
    "a count": lambda p, g, s: s.slots["exp_avg"].update(a=s.applied),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_refused_with_the_same_words(what, monkeypatch):
    def refused():
        params = parameters()
        optimizer = ps.from_torch(torch.optim.AdamW, lr=0.1)
        grads = {name: torch.ones_like(p) for name, p in params.items()}
        state = optimizer.init(params)
        ps.unscale_and_step(optimizer, RULE.init(), params, grads, state)  # has a plan
        WRONG[what](params, grads, state)
        with pytest.raises((ValueError, TypeError)) as caught:
            ps.unscale_and_step(optimizer, RULE.init(), params, grads, state)
        return str(caught.value)

    remembering = refused()
    find_no_plans(monkeypatch)
    assert remembering == refused()


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD"])
def test_the_state_of_another_class_is_refused_also_where_its_metadata_is_known(name):
    params, scaler, momentum = parameters(), RULE.init(), {"momentum": 0.9} if name == "SGD" else {}
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    optimizer = ps.from_torch(getattr(torch.optim, name), lr=0.1, **momentum)
    adagrad = ps.from_torch(torch.optim.Adagrad, lr=0.1)
    pairs = (optimizer, adagrad, name), (adagrad, optimizer, "Adagrad")
    for _ in range(2):
        for each, other, kind in pairs:
            with pytest.raises(ValueError, match=rf"opt_state has no .* that {kind} keeps"):
                ps.unscale_and_step(each, scaler, params, grads, other.init(params))
        for each in (optimizer, adagrad):
            ps.unscale_and_step(each, scaler, params, grads, each.init(params))


def test_no_tensor_is_kept_alive():
    params = parameters()
    given = [weakref.ref(p) for p in params.values()]
    state = steps(params)
    given += [weakref.ref(leaf) for slot in state.slots.values() for leaf in slot.values()]
    del params, state
    gc.collect()
    assert not any(reference() for reference in given)


def test_shared_memory_is_seen_though_the_metadata_is_known():
    kept = []
    for _ in range(2):
        params = parameters()
        whole = torch.cat([params["a"], params["b"]])
        params.update(a=whole[:3], b=whole[3:])
        kept.append(whole.clone())
        steps(params, donate=True)
        assert torch.equal(whole, kept[-1])
        steps(parameters(), donate=True)


# ---- what is cached keeps nothing of a user's alive ----------------------------------------------


def own(base, model):
    """A class with an `update` of its own that holds a model."""
    return type("Own", (base,), {"of": model, "update": lambda *given: base.update(*given)})


ADAMW = torch.optim.AdamW
IN_TWO = dict.fromkeys("ab", ps.from_torch(ADAMW, lr=0.1))
HOLDERS = {  # the settings of a step that hold a model
    "loss_fn": lambda model: {},
    "label": lambda model: {
        "optimizer": ps.partition(IN_TWO, lambda _, leaf: "ab"[leaf.ndim < 2 and bool(model)])
    },
    "schedule": lambda model: {"optimizer": ps.from_torch(ADAMW, lr=lambda n: 0.1 if model else 1)},
    "weight_fn": lambda model: {"weight_fn": lambda x: 1.0 if model else 2.0},
    "rule": lambda model: {"rule": own(ps.DynamicScale, model)()},
    "guard": lambda model: {"guard": own(ps.SpikeGuard, model)()},
    "subclass": lambda model: {
        "optimizer": ps.from_torch(type("Own", (ADAMW,), {"of": model}), lr=0.1)
    },
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_model_is_freed_after_steps_with_any_setting_that_holds_it(holder):
    def trained():
        model = nn.Linear(3, 2)
        apply, params, buffers = ps.make_functional(model)

        def loss_fn(params, buffers, x):
            assert model is not None
            out, buffers = apply(params, buffers, x)
            return out.square().sum(), buffers

        settings = {"optimizer": ps.from_torch(torch.optim.AdamW, lr=0.1), "rule": RULE}
        settings |= {"loss_fn": loss_fn, "buffers": buffers, **holder(model)}
        state, step = started(params, **settings)
        for donate in (False, True, True):
            state, _ = step(state, [torch.ones(4, 3)] * 2, donate=donate)
        ps.value_and_grad(loss_fn)(state.params, buffers, torch.ones(4, 3))
        return weakref.ref(model)

    reference = trained()
    gc.collect()
    assert reference() is None


class Node:
    """A container of a user's, with an object beside its leaf."""

    def __init__(self, leaf, beside):
        self.leaf, self.beside = leaf, beside


optree.register_pytree_node(
    Node,
    lambda node: ((node.leaf,), node.beside, None),
    lambda beside, leaves: Node(leaves[0], beside),
    namespace="purescale",
)


@pytest.mark.parametrize("call", ["value_and_grad", "step"])
def test_what_a_container_of_ones_own_holds_is_freed(call):
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1)

    class Beside:
        pass

    def run(beside):
        params, grads = Node(torch.ones(3), beside), Node(torch.ones(3), beside)
        for _ in range(2):
            if call == "step":
                optimizer.step(params, grads, optimizer.init(params))
            else:
                function = ps.value_and_grad(lambda p, b, x: (p.leaf.sum() * x, b))
                function(params, {}, torch.ones(()), scaler=RULE.init())

    beside = Beside()
    alive = weakref.ref(beside)
    run(beside)
    del beside
    gc.collect()
    assert alive() is None


def test_keys_that_are_equal_and_have_other_names_are_other_parameters():
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0, overrides={"1": {"lr": 0.5}})
    params, grads = ({1: torch.ones(3), "z": torch.ones(3)} for _ in range(2))
    state = optimizer.init(params)
    for _ in range(2):
        optimizer.step(params, grads, state)
    with pytest.raises(ValueError, match="'1' matches no parameter"):
        optimizer.step({True: torch.ones(3), "z": torch.ones(3)}, grads, state)


def test_parameters_that_require_a_gradient_have_a_plan_and_results_of_autograd_none(monkeypatch):
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1)
    grads = {"w": torch.ones(3)}

    def step(change):
        params = {"w": change(torch.ones(3, requires_grad=True))}
        return optimizer.step(params, grads, optimizer.init({"w": torch.ones(3)}))

    plain, planned = step(lambda w: w), []
    plan = type(optimizer).plan
    monkeypatch.setattr(
        type(optimizer), "plan", lambda *of_step: planned.append(of_step) or plan(*of_step)
    )
    assert same_bits(step(lambda w: w), plain)
    assert not planned
    with pytest.raises(ValueError, match=r"params\['w'\]"):
        step(lambda w: w * 1)
