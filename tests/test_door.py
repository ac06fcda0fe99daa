"""What is remembered of the columns of a step is pure: warm, cold or stale, a step has the same
bits, and nothing is kept alive.
"""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from helpers import Untouched, clone, same_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale._optim import door as _door

ADAMW = {"lr": 0.1, "weight_decay": 0.1}
SCALER = ps.DynamicScale(init_scale=8.0).init()


# by torch's fused kernel, and by its formula
BOTH_WAYS = pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam])


def start(count=3, size=4, cls=torch.optim.AdamW):
    params = {f"w{i}": torch.linspace(-1, 1, size) + i for i in range(count)}
    return params, ps.from_torch(cls, **ADAMW)


def grads_at(step, params):
    return {name: torch.full_like(p, 8.0 * (step + 1)) for name, p in params.items()}


def stepped(optimizer, params, state, step, forget=False, **settings):
    if forget:
        optimizer._memo.clear()
    out = ps.unscale_and_step(optimizer, SCALER, params, grads_at(step, params), state, **settings)
    return out.params, out.opt_state


def is_warm(optimizer, params, state, **settings):
    asked = optimizer.ask(params, grads_at(0, params), state, **settings)
    return (asked.plan or asked.formula) is not None


def runs(**size):
    """Whether a step forgets, is donated, by what it is bounded, and of what kind a gradient is."""
    bounds = st.sampled_from([{}, {"max_norm": 0.5}, {"clip_value": 0.1}])
    kinds = st.sampled_from(["finite", "finite", "absent", "inf", "half"])
    return st.lists(st.tuples(st.booleans(), st.booleans(), bounds, kinds), **size)


@BOTH_WAYS
@given(runs(min_size=1, max_size=8), st.integers(1, 4))
def test_to_forget_at_any_moment_changes_no_bit(cls, steps, count):
    """Donated and not, clipped and not, with gradients that are missing, inf or half, in any
    order.
    """
    results = []
    for forgetting in (True, False):
        params, optimizer = start(count, cls=cls)
        state, told = optimizer.init(params), []
        for index, (forget, donate, bound, kind) in enumerate(steps):
            if forget or forgetting:
                optimizer._memo.clear()
            grads = grads_at(index, params)
            first = grads["w0"]
            kinds = {"finite": first, "absent": None, "inf": first / 0, "half": first.half()}
            grads["w0"] = kinds[kind]
            with contextlib.nullcontext() if donate else Untouched((params, grads, state)):
                out = ps.unscale_and_step(
                    optimizer, SCALER, params, grads, state, amax=True, **bound, donate=donate
                )
            params, state = out.params, out.opt_state
            told.append(clone(tuple(out[2:])))
        results.append((params, state, told))
    assert same_bits(*results)


@BOTH_WAYS
def test_a_second_step_is_known_again(cls):
    for donate in (True, False):
        params, optimizer = start(cls=cls)
        params, state = stepped(optimizer, params, optimizer.init(params), 0, donate=donate)
        assert is_warm(optimizer, params, state, donate=donate, spent=donate)
        optimizer._memo.clear()
        assert not is_warm(optimizer, params, state, donate=donate, spent=donate)


def other_data(t):
    t.data = torch.full_like(t, 3.0)


def other_memory(t):
    t.set_(torch.full((4,), 3.0))


def other_size(t):
    t.resize_(2)


def transposed(t):
    t.t_()


def watched(t):
    t.requires_grad_()


@BOTH_WAYS
@pytest.mark.parametrize("change", [other_data, other_memory, watched])
@pytest.mark.parametrize("which", ["parameter", "slot"])
@pytest.mark.parametrize("donate", [True, False])
def test_what_is_changed_in_place_is_stepped_as_it_is_now(cls, change, which, donate):
    params, optimizer = start(cls=cls)
    params, state = stepped(optimizer, params, optimizer.init(params), 0, donate=donate)
    change(params["w1"] if which == "parameter" else state.slots["w1"]["exp_avg"])
    if which == "slot" and change is watched:
        state.slots["w1"]["exp_avg"].requires_grad_(False)
    _, fresh = start(cls=cls)
    expected = stepped(
        fresh, *clone(torch.utils._pytree.tree_map(lambda t: t.detach(), (params, state))), 1
    )
    new = stepped(optimizer, params, state, 1, donate=donate)
    assert same_bits(new, expected)


@BOTH_WAYS
@pytest.mark.parametrize("change", [other_size, transposed])
@pytest.mark.parametrize("which", ["parameter", "slot"])
def test_another_shape_in_place_is_refused(cls, change, which):
    params = {"w": torch.ones(2, 4)}
    optimizer = ps.from_torch(cls, **ADAMW)
    params, state = stepped(optimizer, params, optimizer.init(params), 0, donate=True)
    grads = grads_at(1, params)
    change(params["w"] if which == "parameter" else state.slots["w"]["exp_avg"])
    with pytest.raises(ValueError, match=r"shape|exp_avg of w is"):
        ps.unscale_and_step(optimizer, SCALER, params, grads, state, donate=True)


def test_another_layout_of_the_same_memory_is_seen():
    params = {"w": torch.arange(9.0).view(3, 3)}
    optimizer = ps.from_torch(torch.optim.AdamW, **ADAMW)
    params, state = stepped(optimizer, params, optimizer.init(params), 0, donate=True)
    params["w"].t_()
    grads = {"w": torch.arange(9.0).view(3, 3)}
    expected = ps.from_torch(torch.optim.AdamW, **ADAMW).step(
        {"w": params["w"].clone()}, grads, clone(state)
    )
    new = ps.maybe_step(optimizer, params, grads, state, False, donate=True)
    torch.testing.assert_close(new[0]["w"], expected[0]["w"], rtol=0, atol=0)


def test_memory_that_is_used_again_is_known_for_what_it_is():
    """Tensors are freed and others made in a loop, so that ids and addresses come back."""
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0)
    for index in range(200):
        size = 1 + index % 7
        params = {
            "w": torch.full((size,), float(index)),
            "v": torch.zeros(size, 2 if index % 3 else 1),
        }
        grads = {"w": torch.ones(size), "v": torch.ones_like(params["v"])}
        new, _ = ps.maybe_step(
            optimizer, params, grads, optimizer.init(params), False, donate=bool(index % 2)
        )
        assert new["w"].tolist() == [index - 1.0] * size
        assert new["v"].tolist() == [[-1.0] * new["v"].shape[1]] * size


@BOTH_WAYS
def test_nothing_is_kept_alive(cls):
    params, optimizer = start(cls=cls)
    state = optimizer.init(params)
    for index in range(3):
        params, state = stepped(optimizer, params, state, index, donate=True)
    references = [weakref.ref(tensor) for tensor in tensors((params, state))]
    assert optimizer._memo._known
    del params, state
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_no_more_is_remembered_than_a_few():
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0)
    for size in range(1, 20):
        params = {"w": torch.ones(size)}
        optimizer.step(params, params, optimizer.init(params))
    assert len(optimizer._memo._known) == _door.Memo.KEPT


def test_a_state_that_is_not_given_up_is_known_again_wherever_it_stands():
    params, optimizer = start(count=2)
    state = optimizer.init(params)
    optimizer.plan(params, grads_at(0, params), state, spent=True)
    params, state = clone((params, state))
    assert is_warm(optimizer, params, state, spent=True)
    shared = {**grads_at(0, params), "w0": params["w1"].detach()}
    assert optimizer.ask(params, shared, state, spent=True).plan is None


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adamax])
@pytest.mark.parametrize("where", ["parameter", "gradient"])
@pytest.mark.parametrize("bound", ["clip_value", "max_norm"])
def test_a_bound_may_stand_in_memory_that_is_given_up(cls, where, bound):
    """Every group has a launch of its own, and each looks at the bound."""
    optimizer = ps.from_torch(cls, lr=1.0, overrides={"w1": {"lr": 0.5}})
    results = []
    for donate in (False, True):
        params, _ = start(count=3)
        grads = {name: torch.full_like(p, 8.0) for name, p in params.items()}
        limit = (params if where == "parameter" else grads)["w0"][:1].fill_(0.25)[0]
        state = optimizer.init(params)
        settings = {bound: limit, "donate": donate}
        out = ps.unscale_and_step(optimizer, SCALER, params, grads, state, **settings)
        results.append(clone(tuple(out)))
    assert same_bits(*results)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adamax])
@pytest.mark.parametrize("where", ["element", "parameter", "gradient", "moment", "own"])
@pytest.mark.parametrize("by", ["maybe_step", "unscale_and_step"])
def test_a_rate_may_stand_in_memory_that_is_given_up(cls, where, by):
    """Every group has a launch of its own, and each looks at the rate."""
    results = []
    for donate in (False, True):
        now = {}
        momentum = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        optimizer = ps.from_torch(
            cls,
            lr=lambda applied, now=now: now.get("rate", 0.125 * 0.5**applied),
            overrides={"w1": {"weight_decay": 0.1}},
            **momentum,
        )
        params, _ = start(count=3)
        params["w"] = torch.tensor(0.5)
        state, results_of_one = optimizer.init(params), []
        for step in range(3):
            grads = {name: torch.full_like(p, 8.0 + step) for name, p in params.items()}
            now["rate"] = {
                "element": params["w0"][0],
                "parameter": params["w"],
                "gradient": grads["w0"][1],
                "moment": next(s for s in state.slots["w0"].values() if s.ndim)[2],
                "own": torch.tensor(0.1),
            }[where]
            if by == "maybe_step":
                params, state = ps.maybe_step(
                    optimizer, params, grads, state, torch.tensor(step == 1), donate=donate
                )
            else:
                params, state, *_ = ps.unscale_and_step(
                    optimizer, SCALER, params, grads, state, donate=donate
                )
            results_of_one.append(clone((params, state)))
        results.append(results_of_one)
    assert same_bits(*results)


def test_a_cold_step_asks_what_is_remembered_once(monkeypatch):
    asked = []
    find = _door.Memo.find
    monkeypatch.setattr(_door.Memo, "find", lambda *args: asked.append(1) or find(*args))
    params, optimizer = start()
    state = optimizer.init(params)
    for step, donate in enumerate((False, False, True)):
        params, state = stepped(optimizer, params, state, step, donate=donate)
        assert len(asked) == step + 1
    ps.maybe_step(optimizer, params, grads_at(0, params), state, torch.tensor(False))
    assert len(asked) == 4


@pytest.mark.parametrize("remembered", [True, False])
def test_a_step_by_the_formula_is_checked_before_it_and_by_it_and_not_once_it_is_remembered(
    remembered,
):
    params, optimizer = start(cls=torch.optim.NAdam)
    params = params if remembered else {name: torch.nn.Parameter(p) for name, p in params.items()}
    state, checked, check = optimizer.init(params), [], optimizer.check
    optimizer.check = lambda *given: checked.append(1) or check(*given)
    for step in range(3):
        checked.clear()
        _, state = stepped(optimizer, params, state, step, donate=True)
        assert len(checked) == (2 if step == 0 or not remembered else 0)


def test_a_schedule_is_asked_once_a_step():
    asked = []
    params, _ = start()
    optimizer = ps.from_torch(torch.optim.AdamW, lr=lambda applied: asked.append(1) or 1e-3)
    state = optimizer.init(params)
    for step in range(3):
        asked.clear()
        params, state = stepped(optimizer, params, state, step)
        assert len(asked) == 1


@BOTH_WAYS
@pytest.mark.parametrize("spoil", ["microbatch", "gradient", "scaler"])
@pytest.mark.parametrize("before", [1, 2])
def test_what_shares_memory_with_the_state_today_is_not_written_over(cls, spoil, before):
    """The memo is warm from steps in which everything stood apart."""
    params, optimizer = start(count=2, cls=cls)
    state = optimizer.init(params)
    for step in range(before):
        params, state = stepped(optimizer, params, state, step, donate=True)
    scaler, grads = SCALER, grads_at(1, params)
    if spoil == "gradient":
        grads["w0"] = params["w1"].detach()
    elif spoil == "scaler":
        params["w0"].fill_(8.0)
        scaler = SCALER._replace(scale=params["w0"][0])
    else:
        grads["w0"] = grads["w1"].detach()
    expected = ps.unscale_and_step(optimizer, clone(scaler), *clone((params, grads, state)))
    out = ps.unscale_and_step(optimizer, scaler, params, grads, state, donate=True)
    assert same_bits((out.params, out.opt_state), (expected.params, expected.opt_state))


@BOTH_WAYS
def test_parameters_that_overlap_are_not_written_in_place(cls):
    memory = torch.ones(8)
    params, optimizer = {"a": memory[:5], "b": memory[3:]}, ps.from_torch(cls, **ADAMW)
    state = optimizer.init(params)
    before = clone((params, state))
    expected = stepped(optimizer, *clone(before), 0)
    for _ in range(3):
        new = clone(stepped(optimizer, params, state, 0, donate=True))
        assert same_bits(new, expected)
        for tensor, old in zip(tensors((params, state)), tensors(before), strict=True):
            tensor.copy_(old)


def test_parameters_in_one_piece_of_memory_are_written_in_place_where_they_do_not_overlap():
    flat = torch.zeros(8)
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0)
    params = {"a": flat[:4], "b": flat[4:], "c": flat[2:6]}
    grads = {name: torch.full((4,), float(index + 1)) for index, name in enumerate(params)}
    expected, _ = optimizer.step(clone(params), grads, optimizer.init(params))
    for _ in range(2):
        given = torch.zeros(8)
        new, _ = ps.maybe_step(
            optimizer,
            {"a": given[:4], "b": given[4:], "c": given[2:6]},
            clone(grads),
            optimizer.init(params),
            False,
            donate=True,
        )
        assert same_bits(new, expected)


@BOTH_WAYS
def test_threads_step_their_own_models_with_one_optimizer(cls):
    optimizer = ps.from_torch(cls, **ADAMW)
    expected = []
    for number in range(4):
        params, _ = start(count=1 + number)
        state = optimizer.init(params)
        for index in range(20):
            params, state = stepped(optimizer, params, state, index)
        expected.append((params, state))
    found = [None] * 4

    def work(number):
        params, _ = start(count=1 + number)
        state = optimizer.init(params)
        for index in range(20):
            params, state = stepped(
                optimizer, params, state, index, donate=bool(index % 2), forget=index % 5 == 4
            )
        found[number] = (params, state)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@BOTH_WAYS
def test_a_step_under_inference_mode_is_not_taken_for_one_outside(cls):
    params, optimizer = start(cls=cls)
    state = optimizer.init(params)
    for index in range(4):
        if index == 2:
            with torch.inference_mode():
                params, state = stepped(optimizer, params, state, index)
        else:
            params, state = stepped(optimizer, params, state, index)
    expected, _ = start()
    other = optimizer.init(expected)
    for index in range(4):
        expected, other = stepped(optimizer, expected, other, index, forget=True)
    assert same_bits((params, state), (expected, other))


def test_nothing_is_remembered_where_it_is_traced():
    params, optimizer = start()
    state = optimizer.init(params)
    torch.compile(optimizer.step, fullgraph=True, backend="eager")(params, params, state)
    torch.func.vmap(lambda p: optimizer.step(p, p, optimizer.init(p)))(
        {name: torch.stack([p, p]) for name, p in params.items()}
    )
    assert optimizer._memo._known == ()


def test_a_wrapped_models_own_parameters_are_written_in_place_off_the_graph():
    model = torch.nn.Linear(3, 2)
    optimizer = ps.from_torch(torch.optim.AdamW, **ADAMW)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW)
    state = optimizer.init(dict(model.named_parameters()))
    for _ in range(3):
        for net in (model, twin):
            net.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
        theirs.step()
        params = dict(model.named_parameters())
        _, state = ps.maybe_step(
            optimizer,
            params,
            {n: p.grad for n, p in params.items()},
            state,
            torch.tensor(False),
            donate=True,
        )
    assert same_bits(
        [p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()]
    )
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_a_formula_writes_into_a_modules_own_parameters_in_no_step():
    model = torch.nn.Linear(3, 2)
    optimizer = ps.from_torch(torch.optim.NAdam, **ADAMW)
    params, before = dict(model.named_parameters()), clone(model.state_dict())
    state = optimizer.init(params)
    for step in range(3):
        out = ps.unscale_and_step(
            optimizer, SCALER, params, grads_at(step, params), state, donate=True
        )
        state = out.opt_state
        assert same_bits(model.state_dict(), before)
        assert not same_bits(out.params, before)


def parts(optimizer, params, grads, state):
    """A step by the small functions, which remember nothing."""
    whole, found_inf = ps.unscale_and_check(SCALER, grads)
    return ps.maybe_step(optimizer, params, whole, state, found_inf)


@pytest.mark.parametrize(
    "params",
    [{"a": {"w": torch.ones(3)}}, {"a": [torch.ones(3)]}, {0: torch.ones(3)}, [torch.ones(3)]],
    ids=["nested", "a list inside", "keys that are no names", "a list"],
)
@BOTH_WAYS
def test_any_tree_of_parameters_steps_warm_as_by_its_parts(cls, params):
    optimizer = ps.from_torch(cls, **ADAMW)
    state = their_state = optimizer.init(params)
    theirs = params
    for _ in range(3):
        grads = clone(theirs)
        out = ps.unscale_and_step(optimizer, SCALER, params, clone(grads), state)
        params, state = out.params, out.opt_state
        theirs, their_state = parts(optimizer, theirs, grads, their_state)
        assert same_bits((params, state), (theirs, their_state))


@pytest.mark.parametrize("kind", ["another order", "on a graph"])
def test_a_norm_is_summed_warm_as_it_is_cold(kind):
    warm, cold = (ps.from_torch(torch.optim.NAdam, **ADAMW) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(37, generator=generator) for name in "abcdef"}
    state = warm.init(params)
    for _ in range(20):
        names = "abcdef" if kind == "on a graph" else "fedcba"
        size = 10 ** torch.randn(6, generator=generator)
        rows = torch.randn(6, 37, generator=generator) * size[:, None]
        grads = {name: row.clone() for name, row in zip(names, rows, strict=True)}
        for gradient in grads.values():
            gradient.requires_grad_(kind == "on a graph")
        cold._memo.clear()
        out, expected = (
            ps.unscale_and_step(optimizer, SCALER, params, grads, state, max_norm=1.0)
            for optimizer in (warm, cold)
        )
        assert same_bits(tuple(out), tuple(expected))
        params, state = out.params, out.opt_state


def windows(x):
    return x.unfold(0, 2, 1)  # its rows overlap


@pytest.mark.parametrize("of", [windows, lambda x: x[:1].expand(3, 2)], ids=["overlap", "expand"])
@pytest.mark.parametrize("donate", [False, True])
@BOTH_WAYS
def test_gradients_whose_elements_share_memory_are_divided_once(cls, donate, of):
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, gradient):
            return of(torch.arange(1.0, 5.0) * gradient)

    def loss_fn(params, buffers, _):
        return Sum.apply(params["w"]), buffers

    rule, results = ps.DynamicScale(init_scale=8.0), []
    for forget in (True, False):
        optimizer = ps.from_torch(cls, **ADAMW)
        state = ps.init_train_state({"w": torch.ones(3, 2)}, {}, optimizer, rule)
        for _ in range(3):
            if forget:
                optimizer._memo.clear()
            state, _ = ps.train_step(
                state, [None], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=donate
            )
        results.append(state)
    assert same_bits(*results)


@BOTH_WAYS
@pytest.mark.parametrize("donate", [False, True])
def test_a_gradient_that_a_custom_backward_keeps_is_not_written_over(cls, donate):
    kept = torch.full((3,), 5.0)

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, gradient):
            return kept

    def loss_fn(params, buffers, _):
        return Constant.apply(params["w"]), buffers

    rule, optimizer = ps.DynamicScale(init_scale=8.0), ps.from_torch(cls, **ADAMW)
    state = ps.init_train_state({"w": torch.ones(3)}, {}, optimizer, rule)
    for _ in range(3):
        state, _ = ps.train_step(
            state, [None], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=donate
        )
        assert kept.tolist() == [5.0] * 3


@BOTH_WAYS
def test_another_parameter_that_is_none_is_another_step(cls):
    optimizer = ps.from_torch(cls, **ADAMW)
    w, g = torch.ones(3), torch.ones(3)
    state = optimizer.init({"a": w})
    for _ in range(2):
        ps.unscale_and_step(optimizer, SCALER, {"a": w, "b": None}, {"a": g, "b": None}, state)
    with pytest.raises(ValueError, match=r"grads\['a'\] has no parameter there"):
        ps.unscale_and_step(optimizer, SCALER, {"a": None, "b": w}, {"a": g, "b": None}, state)


def test_an_overflow_of_bfloat16_that_float32_would_hold_is_seen_warm():
    optimizer = ps.from_torch(torch.optim.NAdam, **ADAMW)
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    grads = {"w": torch.tensor([1.8e19, 0.0], dtype=torch.bfloat16)}
    scaler = SCALER._replace(scale=grads["w"][0].float() / 3.4e38)
    for _ in range(3):
        out = ps.unscale_and_step(optimizer, scaler, params, grads, optimizer.init(params))
        assert out.found_inf
        assert same_bits(out.params, params)


def test_what_is_kept_may_share_memory_with_itself():
    params, optimizer = start()
    params, state = stepped(optimizer, params, optimizer.init(params), 0, donate=True)
    kept = torch.ones(3)
    settings = {"donate": True, "spent": True, "keep": [kept, kept, kept[:1]]}
    assert optimizer.ask(params, grads_at(1, params), state, **settings).plan.spent


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=4),
)
def test_what_stands_beside_pieces_of_memory_overlaps_none_of_them(gaps, others):
    pieces, place = [], 0
    for gap, length in gaps:
        pieces.append((place + gap, place + gap + length))
        place += gap + length
    found = _door._Pieces([], *([end[k] for end in pieces] for k in (0, 1))).beside(
        *([other[k] for other in others] for k in (0, 1))
    )
    overlap = any(a < d and c < b for a, b in pieces for c, d in others)
    assert not (found and overlap)
    solid = all(a < b for a, b in [*pieces, *others])  # what is empty may be refused
    assert found or overlap or not solid


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("place", ["params", "grads", "slots"])
def test_a_nested_tensor_in_a_step_that_is_remembered_is_refused_in_words(cls, place, donate):
    adam = ps.from_torch(cls, lr=0.1)
    scaler, params = ps.DynamicScale().init(), {"a": torch.ones(2, 3), "b": torch.ones(4)}
    opt_state, grads = adam.init(params), clone(params)

    def step():
        return ps.unscale_and_step(adam, scaler, params, grads, opt_state, donate=donate)

    for _ in range(3):
        out = step()
        params, opt_state, grads = out.params, out.opt_state, clone(params)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    {"params": params, "grads": grads, "slots": opt_state.slots["a"]}[place].update(
        {"exp_avg" if place == "slots" else "a": nested}
    )
    with pytest.raises((TypeError, ValueError), match="nested"):
        step()
