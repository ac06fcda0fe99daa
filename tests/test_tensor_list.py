"""A list of tensors knows what an earlier list with the same metadata knew, and no other does."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers import same_bits
from torch import nn

import purescale as ps
from purescale._torch import tensor_list, tracing
from purescale._torch.tensor_list import TensorList
from purescale._tree.leaves import as_tensor_list

RULE = ps.DynamicScale(init_scale=2.0**4)


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(tensor_list, "_known_lists", {})


def forget(monkeypatch):
    """As if nothing were ever remembered."""
    monkeypatch.setattr(
        tensor_list,
        "lookup",
        lambda tensors, are_dense: TensorList(tensors, dense_off_graph=are_dense(tensors)),
    )


def is_known(tensors):
    """Return True if answers about an earlier list are taken for this one."""
    entries = tensor_list._known_lists.get(len(tensors), ())
    return as_tensor_list(tensors).cache in [entry.cache for entry in entries]


def inference_tensor():
    with torch.inference_mode():
        return torch.zeros(2, 3)


OTHERS = {
    "dtype": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "integer": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "shape": lambda: torch.zeros(3, 2),
    "dimensions": lambda: torch.zeros(6),
    "strides": lambda: torch.zeros(3, 2).t(),
    "overlap": lambda: torch.zeros(3).expand(2, 3),
    "device": lambda: torch.zeros(2, 3, device="meta"),
    "class": lambda: nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "requires_grad": lambda: torch.zeros(2, 3, requires_grad=True),
    "graph": lambda: torch.zeros(2, 3, requires_grad=True) * 2,
    "negation": lambda: torch._neg_view(torch.zeros(2, 3)),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "inference": inference_tensor,
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8),
    "None": lambda: None,
    "number": lambda: 1.0,
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_a_list_that_differs_in_one_thing_is_not_known(what):
    as_tensor_list([torch.zeros(4), torch.zeros(2, 3)])
    assert is_known([torch.ones(4), torch.ones(2, 3)])
    assert not is_known([torch.zeros(4), OTHERS[what]()])
    assert not is_known([torch.zeros(4), torch.zeros(2, 3), torch.zeros(2, 3)])
    assert not is_known([torch.zeros(2, 3), torch.zeros(4)])


def test_in_inference_mode_its_tensors_are_not_taken_for_others():
    with torch.inference_mode():
        assert not as_tensor_list([torch.zeros(2)]).dense_off_graph
    made_before = [torch.zeros(2)]
    with torch.inference_mode():
        assert as_tensor_list(made_before).dense_off_graph
        assert as_tensor_list(made_before).dense_off_graph
        assert not as_tensor_list([torch.zeros(2)]).dense_off_graph
    assert as_tensor_list(made_before).dense_off_graph
    assert not as_tensor_list([inference_tensor()]).dense_off_graph


def test_what_was_seen_in_inference_mode_is_not_taken_for_its_tensors_outside():
    optimizer = ps.from_torch(torch.optim.Adamax, lr=0.1)

    def stepped(params, state, **settings):
        grads = {name: torch.ones(3, 2) for name in params}
        return ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), **settings)

    with torch.inference_mode():
        made_inside = parameters(), optimizer.init(parameters())
    made_outside = parameters(), optimizer.init(parameters())
    with torch.inference_mode():
        expected = stepped(*made_outside)
    assert same_bits(stepped(*made_inside, donate=True), expected)
    with torch.inference_mode():
        as_tensor_list([torch.zeros(2)])
        assert not as_tensor_list([torch.zeros(2)]).dense_off_graph
    assert not as_tensor_list([inference_tensor()]).dense_off_graph


def test_a_result_of_autograd_is_not_taken_for_a_parameter():
    assert as_tensor_list([torch.zeros(2, requires_grad=True)]).dense_off_graph
    assert is_known([torch.zeros(2, requires_grad=True)])
    assert not as_tensor_list([torch.zeros(2, requires_grad=True) * 2]).dense_off_graph


def test_where_a_call_is_traced_or_transformed_nothing_is_known():
    recognised = []

    def looked_at(tensor):
        recognised.append(is_known([tensor]))
        return tensor

    as_tensor_list([torch.zeros(3)])
    torch.func.grad(lambda t: looked_at(t).sum())(torch.zeros(3))
    torch.vmap(looked_at)(torch.zeros(2, 3))
    with torch.autograd.forward_ad.dual_level():
        looked_at(torch.zeros(3))
    assert recognised == [False] * 3


def test_a_question_is_asked_once_of_lists_alike():
    asked = []

    def ask(tensors, other=None):
        answer = lambda: asked.append(len(tensors.tensors)) or len(tensors.tensors)  # noqa: E731
        return tensors.cached("numbers", answer, other)

    for _ in range(3):
        first = as_tensor_list([torch.zeros(2)])
        second = as_tensor_list([torch.zeros(3), torch.zeros(1)])
        assert (ask(first), ask(second), ask(first, second), ask(second, first)) == (1, 2, 1, 2)
        both = first.joined(second)
        assert [t.shape for t in both.tensors] == [(2,), (3,), (1,)]
        assert [t.shape for t in both.part(1, 3).tensors] == [(3,), (1,)]
        assert (ask(both), ask(both.part(0, 1)), ask(both.part(1, 3))) == (3, 1, 2)
    assert sorted(asked) == [1, 1, 1, 2, 2, 2, 3]
    assert ask(TensorList([torch.zeros(2)])) == ask(TensorList([torch.zeros(2)])) == 1
    assert sorted(asked) == [1, 1, 1, 1, 1, 2, 2, 2, 3]


FACTS = {
    "elements": [6, 2, 0, 1],
    "dtypes": {torch.float32, torch.float64},
    "devices": {torch.device("cpu")},
    "kinds": [[0, 2, 3], [1]],
    "are_contiguous": False,
    "are_gapless": True,
    "any_requires_grad": True,
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_the_same_of_a_list_that_is_recognised(fact):
    def tensors():
        transposed, empty = torch.zeros(3, 2).t(), torch.zeros(0)
        return [transposed, torch.zeros(2).double(), empty, torch.zeros(1, requires_grad=True)]

    for _ in range(2):
        assert getattr(as_tensor_list(tensors()), fact) == FACTS[fact]
    assert getattr(TensorList(tensors()), fact) == FACTS[fact]
    part = TensorList(tensors()).part(1, 3)
    expected = getattr(TensorList(tensors()[1:3]), fact)
    assert getattr(part, fact) == getattr(as_tensor_list(tensors()).part(1, 3), fact) == expected


@pytest.mark.parametrize("fact", FACTS)
def test_what_is_known_of_a_part_is_not_taken_for_what_is_picked(fact):
    tensors = [torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(3, 2).double()[:, :1]]
    both = as_tensor_list(tensors)
    assert getattr(both.part(0, 2), fact) == getattr(TensorList(tensors[:2]), fact)
    assert getattr(both.picked([0, 2]), fact) == getattr(TensorList(tensors[::2]), fact)


def test_memory_is_bounded():
    for count in range(1, 40):
        for size in range(9):
            tensors = as_tensor_list([torch.zeros(size)] * count)
    for question in range(500):
        tensors.cached(question, lambda: True)
    assert len(tensor_list._known_lists) == 16
    assert max(map(len, tensor_list._known_lists.values())) == 4
    assert len(tensors.cache.values) < 100


# ---- whole steps ---------------------------------------------------------------------------------


def parameters(dtype=torch.float32, size=3):
    torch.manual_seed(0)
    return {name: torch.randn(size, 2, dtype=dtype) for name in "abc"}


def a_step(cls, params, scale, **settings):
    """Three steps, the second with gradients that overflow; everything that they gave."""
    optimizer = ps.from_torch(cls, lr=0.1)
    scaler, state, told = RULE.init(), optimizer.init(params), []
    for value in (1.0, scale, -1.0):
        grads = {name: torch.full_like(p, value) for name, p in params.items()}
        out = ps.unscale_and_step(optimizer, scaler, params, grads, state, **settings)
        params, state = out.params, out.opt_state
        scaler = RULE.update(scaler, out.found_inf)
        told.append((out.found_inf, out.grad_norm, scaler))
    return params, state, told


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.ASGD])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_has_the_same_bits_with_what_was_seen_and_without(cls, donate, dtype, monkeypatch):
    def run():
        given = {"donate": donate, "max_norm": 1.0}
        return a_step(cls, parameters(dtype), float("inf"), **given)

    remembering = run()
    assert tensor_list._known_lists
    forget(monkeypatch)
    assert same_bits(remembering, run())


def test_two_models_do_not_disturb_each_other(monkeypatch):
    def run():
        small, large = a_step(torch.optim.AdamW, parameters(), 1.0), parameters(size=5)
        return small, a_step(torch.optim.AdamW, large, 1.0)

    run()
    looked = []
    monkeypatch.setattr(
        tensor_list,
        "KnownList",
        lambda tensors: looked.append(len(tensors)) or pytest.fail("looked anew"),
    )
    run()
    assert not looked


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
        a_step(torch.optim.AdamW, params, 1.0)  # all that is right is known
        grads = {name: torch.ones_like(p) for name, p in params.items()}
        state = optimizer.init(params)
        WRONG[what](params, grads, state)
        with pytest.raises((ValueError, TypeError)) as caught:
            ps.unscale_and_step(optimizer, RULE.init(), params, grads, state)
        return str(caught.value)

    remembering = refused()
    forget(monkeypatch)
    assert remembering == refused()


def test_the_state_of_another_class_is_refused_where_its_metadata_is_known():
    params, scaler = parameters(), RULE.init()
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    adamw, adagrad = (ps.from_torch(getattr(torch.optim, n), lr=0.1) for n in ("AdamW", "Adagrad"))
    for optimizer in (adamw, adagrad):
        ps.unscale_and_step(optimizer, scaler, params, grads, optimizer.init(params))
    for optimizer, other in ((adamw, adagrad), (adagrad, adamw)):
        state = other.init(params)
        with pytest.raises(ValueError, match="opt_state"):
            ps.unscale_and_step(optimizer, scaler, params, grads, state)


def test_no_tensor_is_kept_alive():
    params = parameters()
    given = [weakref.ref(p) for p in params.values()]
    state = a_step(torch.optim.AdamW, params, 1.0)[1]
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
        a_step(torch.optim.AdamW, params, 1.0, donate=True)
        assert torch.equal(whole, kept[-1])
        a_step(torch.optim.AdamW, parameters(), 1.0, donate=True)


# ---- what is cached keeps nothing of a user's alive ----------------------------------------------


def label_of(model, optimizer):
    names = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    one = ps.from_torch(torch.optim.SGD, lr=0.1)
    label = lambda name, param: "ab"[name in names and model is not None]  # noqa: E731
    return {"optimizer": ps.partition({"a": one, "b": optimizer}, label)}


def schedule_of(model, optimizer):
    return {"optimizer": ps.from_torch(torch.optim.AdamW, lr=lambda n: 0.1 if model else 0.2)}


def override_of(model, optimizer):
    overrides = {"*bias": {"lr": lambda n: 0.1 if model else 0.2}}
    return {"optimizer": ps.from_torch(torch.optim.RMSprop, lr=0.1, overrides=overrides)}


def weights_of(model, optimizer):
    return {"weight_fn": lambda x: 1.0 if model else 2.0}


def rule_of(model, optimizer):
    class Own(ps.DynamicScale):
        def update(self, scaler, found_inf):
            assert model is not None
            return super().update(scaler, found_inf)

    return {"rule": Own()}


def guard_of(model, optimizer):
    class Own(ps.SpikeGuard):
        def update(self, state, loss, grad_norm=()):
            assert model is not None
            return super().update(state, loss, grad_norm)

    return {"guard": Own()}


def transformation_of(model, optimizer):
    def update(grads, state, params):
        assert model is not None
        return {name: -0.1 * grad for name, grad in grads.items()}, state

    return {"optimizer": ps.from_transformation((lambda params: (), update))}


def subclass_of(base):
    def make(model, optimizer):
        class Own(base):
            of = model

        return {"optimizer": ps.from_torch(Own, lr=0.1)}

    return make


def wrapped(make):
    def around(model, optimizer):
        return {"optimizer": ps.with_master_weights(make(model, optimizer)["optimizer"])}

    return around


HOLDERS = {
    "loss_fn": lambda model, optimizer: {},
    "label": label_of,
    "label under masters": wrapped(label_of),
    "schedule": schedule_of,
    "schedule under masters": wrapped(schedule_of),
    "override": override_of,
    "weight_fn": weights_of,
    "rule": rule_of,
    "guard": guard_of,
    "transformation": transformation_of,
    "fused subclass": subclass_of(torch.optim.AdamW),
    "other subclass": subclass_of(torch.optim.RMSprop),
}


@pytest.mark.parametrize("forced", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_model_is_freed_after_steps_with_any_setting_that_holds_it(holder, forced):
    def trained():
        model = nn.Linear(3, 2)
        apply, params, buffers = ps.make_functional(model)

        def loss_fn(params, buffers, x):
            assert model is not None
            out, buffers = apply(params, buffers, x)
            return out.square().sum(), buffers

        settings = {"optimizer": ps.from_torch(torch.optim.AdamW, lr=0.1), "rule": RULE}
        settings |= holder(model, settings["optimizer"])
        guard = settings.get("guard")
        first = settings["optimizer"], settings["rule"]
        state = ps.init_train_state(params, buffers, *first, guard=guard)
        for donate in (False, True, True):
            batches = [torch.ones(4, 3)] * 2
            state, _ = ps.train_step(state, batches, loss_fn=loss_fn, donate=donate, **settings)
        ps.value_and_grad(loss_fn)(state.params, buffers, torch.ones(4, 3))
        return weakref.ref(model)

    with tracing.as_on_an_accelerator() if forced else contextlib.nullcontext():
        reference = trained()
    gc.collect()
    assert reference() is None
