"""Edges that a careless change would break: each test fails when the line it guards is wrong."""

import math

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Untouched, at, batch, clone, job, same_bits, shares_memory
from torch import nn

import purescale as ps

OPTIM = torch.optim
SGD = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)


def test_a_lazy_buffer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"running_mean is not initialised yet"):
        ps.make_functional(nn.LazyBatchNorm1d(affine=False))


@pytest.mark.parametrize("grad", [torch.tensor([4 + 8j]).conj(), torch.tensor([4 - 8j]).conj().imag * 1j], ids=["conj", "neg"])
def test_a_gradient_with_the_conjugate_or_negative_bit_is_taken(grad):
    unscaled, found_inf = ps.unscale_and_check(at(4.0), [grad])
    assert same_bits(unscaled[0], grad.resolve_conj().resolve_neg() / 4)
    assert not found_inf
    _, norm = ps.clip_by_global_norm([grad], 1.0)
    assert norm.item() == pytest.approx(grad.abs().item())


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}], ids=["one pass", "clipped"])
def test_a_window_of_weight_zero_moves_no_momentum(settings):
    state = ps.init_train_state({"w": torch.tensor(1.0)}, {}, SGD, RULE)
    state, _ = ps.train_step(state, [1.0], loss_fn=lambda p, b, x: (p["w"] * x, b), optimizer=SGD, rule=RULE)
    new, _ = ps.train_step(
        state, [1.0], loss_fn=lambda p, b, x: (p["w"] * x, b), optimizer=SGD, rule=RULE, weight_fn=lambda x: 0.0, **settings
    )
    assert same_bits(new, state)


def test_a_coalesced_sparse_gradient_shares_no_indices_with_its_result():
    grad = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,), check_invariants=True).coalesce()
    assert not shares_memory(grad, ps.unscale_and_check(at(2.0), [grad])[0])


def test_unscaled_sparse_gradients_are_coalesced():
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,), check_invariants=True)
    assert ps.unscale_and_check(at(2.0), [grad])[0][0].is_coalesced()


def test_donation_when_gradients_are_other_parameters_gives_the_same_bits():
    def given():
        a, b = torch.arange(4.0), torch.full((4,), 2.0)
        return {"a": a, "b": b}, {"a": b, "b": a}

    results = []
    for donate in (False, True):
        params, grads = given()
        results.append(ps.maybe_step(SGD, params, grads, SGD.init(params), torch.tensor(False), donate=donate))
    assert same_bits(*results)


def test_a_negative_weight_tensor_in_a_positive_total_skips_the_step():
    state = ps.init_train_state({"w": torch.tensor(0.0)}, {}, SGD, RULE)
    new, info = ps.train_step(
        state,
        [torch.tensor(1.0), torch.tensor(2.0)],
        loss_fn=lambda p, b, g: (p["w"] * g, b),
        optimizer=SGD,
        rule=RULE,
        weight_fn=lambda g: torch.where(g > 1, -0.5, 1.0),
    )
    assert info.found_inf
    assert same_bits(new, state)


def test_donation_of_one_tensor_in_two_places_gives_the_same_bits_where_the_updates_differ():
    optimizer = ps.from_torch(OPTIM.SGD, lr=1.0, foreach=False)
    results = []
    for donate in (False, True):
        t = torch.full((4,), 8.0)
        params, grads = {"a": t, "b": t}, {"a": torch.ones(4), "b": 2 * torch.ones(4)}
        results.append(ps.maybe_step(optimizer, params, grads, optimizer.init(params), torch.tensor(False), donate=donate))
    assert same_bits(*results)


def test_donation_to_an_optimizer_that_swaps_its_parameters_gives_the_same_bits():
    class Swap:
        init = staticmethod(lambda params: ())
        step = staticmethod(lambda params, grads, s: ({"a": params["b"], "b": params["a"]}, s))

    results = [ps.maybe_step(Swap, {"a": torch.zeros(2), "b": torch.ones(2)}, {}, (), torch.tensor(False), donate=d) for d in (False, True)]
    assert same_bits(*results)


def test_an_embedding_bag_that_renormalises_its_weight_leaves_params_alone():
    module = nn.EmbeddingBag(3, 2, max_norm=0.1)
    apply, params, buffers = ps.make_functional(module)
    with Untouched(params):
        out, _ = apply(params, buffers, torch.tensor([[0, 2]]))
    torch.testing.assert_close(out, module(torch.tensor([[0, 2]])).detach())


def test_an_expanded_gradient_is_donated_safely():
    grad = torch.full((1,), 8.0).expand(3)
    assert ps.unscale_and_check(at(2.0), [grad], donate=True)[0][0].tolist() == [4, 4, 4]


def test_float64_gradients_of_float32_parameters_give_the_same_bits_donated():
    sgd = ps.from_torch(OPTIM.SGD, lr=1e-30)
    params = {"w": torch.ones(2)}
    grads = {"w": torch.full((2,), 1e40, dtype=torch.float64)}
    outs = [ps.unscale_and_step(sgd, at(2.0**16), clone(params), clone(grads), sgd.init(params), donate=d) for d in (False, True)]
    assert same_bits(*outs)


def test_apply_holds_no_memory_of_the_model():
    apply, _, _ = ps.make_functional(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    held = [t for m in (apply._training, apply._evaluating) for t in (*m.parameters(), *m.buffers())]
    assert {t.device.type for t in held} == {"meta"}


@pytest.mark.parametrize("rule", [RULE, ps.StaticScale(2.0), ps.NoScale()])
def test_update_of_every_rule_shares_no_memory(rule):
    state = rule.init()
    assert not shares_memory(state, rule.update(state, torch.tensor(False)))


def test_unscaling_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    assert shares_memory(ps.unscale_and_check(at(2.0), grads, donate=True)[0], grads)


def test_clipping_by_norm_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    assert shares_memory(ps.clip_by_global_norm(grads, 1.0, donate=True)[0], grads)


def test_clipping_by_value_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    assert shares_memory(ps.clip_by_value(grads, 1.0, donate=True), grads)


@pytest.mark.parametrize(
    "tx",
    [
        (lambda p: {"prev": p}, lambda g, s, p: (pytree.tree_map(torch.neg, g), {"prev": p})),
        (lambda p: {"g": p}, lambda g, s, p: (g, {"g": g})),
        (lambda p: {"s": pytree.tree_map(torch.zeros_like, p)}, lambda g, s, p: (g, s)),
    ],
)
def test_a_transformation_gives_fresh_memory(tx):
    optimizer = ps.from_transformation(tx)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    state = optimizer.init(params)
    assert not shares_memory(params, state)
    assert not shares_memory((params, grads, state), optimizer.step(params, grads, state))


def test_an_update_of_none_leaves_the_parameter_in_fresh_memory():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: ({"w": None}, s)))
    params = {"w": torch.ones(2)}
    stepped, _ = optimizer.step(params, {"w": None}, ())
    assert same_bits(stepped, params)
    assert not shares_memory(stepped, params)


def test_a_transformation_keeps_the_parameters_dtype():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: ({"w": -g["w"].float()}, s)))
    params = {"w": torch.ones(2, dtype=torch.float16)}
    stepped, _ = ps.maybe_step(optimizer, params, params, (), torch.tensor(False))
    assert stepped["w"].dtype is torch.float16


def test_a_transformation_refuses_gradients_of_other_parameters():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: (p, s)))
    with pytest.raises(ValueError, match="grads does not match params"):
        optimizer.step({"w": torch.ones(1)}, {}, ())


def test_a_pair_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="pair of functions"):
        ps.from_transformation((1, 2))


@pytest.mark.parametrize("clip", [ps.clip_by_global_norm, ps.clip_by_value])
def test_a_bound_that_is_no_0d_tensor_is_refused(clip):
    with pytest.raises(ValueError, match=r"0-d tensor, got shape \(2,\)"):
        clip([torch.ones(2)], torch.ones(2))


@pytest.mark.parametrize("clip", [ps.clip_by_global_norm, ps.clip_by_value])
def test_a_bound_of_nan_is_refused(clip):
    with pytest.raises(ValueError, match="must be above 0"):
        clip([torch.ones(2)], math.nan)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_compressed_sparse_gradients_are_taken(layout):
    dense = torch.tensor([[4.0, 0.0, 0.0, 8.0], [0.0, 0.0, 2.0, 2.0]])
    grad = dense.to_sparse(layout=layout, **({"blocksize": (1, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}))
    unscaled, found_inf = ps.unscale_and_check(at(2.0), [grad])
    assert unscaled[0].layout is layout
    assert torch.equal(unscaled[0].to_dense(), dense / 2)
    assert not found_inf


def _compressed_parts(t):
    return (
        (t.crow_indices(), t.col_indices(), t.values()) if t.layout is torch.sparse_csr else (t.ccol_indices(), t.row_indices(), t.values())
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compressed_sparse_gradient_shares_no_indices_with_its_result():
    grad = torch.eye(2).to_sparse_csr()
    unscaled, _ = ps.unscale_and_check(at(2.0), [grad])
    assert not shares_memory(_compressed_parts(grad), _compressed_parts(unscaled[0]))


@pytest.fixture
def one_rank_overflows(monkeypatch):
    """A group whose other rank has found inf."""
    monkeypatch.setattr("purescale._scaler.all_reduce_found_inf", lambda found_inf, group: torch.ones_like(found_inf))


@pytest.mark.usefixtures("one_rank_overflows")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_follows_the_flag_of_the_group(donate, max_norm):
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    out = ps.unscale_and_step(SGD, at(2.0), clone(params), grads, SGD.init(params), max_norm, group="all", donate=donate)
    assert out.found_inf
    assert same_bits(out.params, params)


@pytest.mark.usefixtures("one_rank_overflows")
def test_unscaling_follows_the_flag_of_the_group():
    assert ps.unscale_and_check(at(2.0), [torch.ones(2)], group="all")[1]


def test_an_empty_gradient_is_finite():
    unscaled, found_inf = ps.unscale_and_check(at(2.0), [torch.ones(0, 3), torch.ones(1)])
    assert unscaled[0].shape == (0, 3)
    assert not found_inf


def test_an_empty_gradient_counts_nothing_in_the_norm():
    assert ps.clip_by_global_norm([torch.ones(0, 3), torch.ones(1)], 5.0)[1] == 1


def test_the_one_pass_step_trusts_nothing_scaled_by_a_damaged_scale():
    for scale in (0.0, -1.0, math.inf, math.nan):
        params = {"w": torch.ones(2)}
        out = ps.unscale_and_step(SGD, at(scale), clone(params), {"w": torch.ones(2)}, SGD.init(params), donate=True)
        assert out.found_inf
        assert same_bits(out.params, params)


def test_a_scale_of_zero_is_bad_even_without_a_gradient():
    assert ps.unscale_and_check(at(0.0), [torch.zeros(0)])[1]
    assert ps.unscale_and_check(at(0.0), {"frozen": None})[1]


def test_check_scaler_is_silent_at_the_floor_without_an_overflow():
    rule = ps.DynamicScale(1.0, min_scale=1.0)
    ps.check_scaler(rule.init(), rule)


def test_the_tolerance_never_falls_below_zero():
    rule, state = RULE, RULE.init()
    for _ in range(3):
        state = rule.update(state, torch.tensor(True))
    assert state.hysteresis_tracker == 0


def test_every_rule_makes_its_state_on_the_device_named():
    for rule in (RULE, ps.StaticScale(2.0), ps.NoScale()):
        assert {t.device.type for t in rule.init("meta")} == {"meta"}


def test_a_damaged_count_is_brought_back():
    assert ps.DynamicScale(8.0, growth_interval=1).update(at(8.0, growth_tracker=-5, hysteresis_tracker=1), torch.tensor(False)).scale == 16


def test_float8_gradients_come_back_in_float32():
    dtype = torch.float8_e5m2
    unscaled, _found_inf = ps.unscale_and_check(at(4.0), [torch.tensor([4.0, 8.0]).to(dtype)])
    assert unscaled[0].dtype is torch.float32
    assert unscaled[0].tolist() == [1, 2]


def test_bfloat16_gradients_stay_bfloat16():
    unscaled, _ = ps.unscale_and_check(at(2.0), [torch.ones(2, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)])
    assert [t.dtype for t in unscaled] == [torch.bfloat16] * 2


def test_leaves_that_are_no_tensors_agree_in_type():
    with pytest.raises(ValueError, match=r"old\['a'\] is 1, but True in new"):
        ps.select(torch.tensor(True), {"a": 1}, {"a": True})


def test_a_flag_may_be_a_number_tensor():
    assert ps.select(torch.tensor(1.0), torch.zeros(1), torch.ones(1)) == 0
    assert ps.select(torch.tensor(2), torch.zeros(1), torch.ones(1)) == 0


def test_a_weight_that_is_a_bool_is_refused():
    state, step = job(SGD, RULE)
    with pytest.raises(TypeError, match="weight_fn returned True"):
        step(state, [batch()], weight_fn=lambda b: True)


def test_aux_shares_no_memory_with_the_microbatch():
    state = ps.init_train_state({"w": torch.ones(3)}, {}, SGD, RULE)
    x = torch.ones(3)
    step = ps.train_step(state, [x], loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, x), optimizer=SGD, rule=RULE)
    assert not shares_memory(x, step[1].aux)


def test_one_saved_group_is_taken_in_the_order_of_params():
    overrides = {"conv.weight": {"weight_decay": 0.5}}
    params = {"conv.weight": torch.randn(2, 2), "gain": torch.randn(2, 2)}
    theirs = OPTIM.AdamW([p.clone().requires_grad_() for p in params.values()])
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.full_like(p, p.sum().item())
    theirs.step()
    state = ps.from_torch(OPTIM.AdamW, overrides=overrides).from_state_dict(theirs.state_dict(), params)
    for slot, p in zip(state.slots.values(), theirs.param_groups[0]["params"], strict=True):
        assert same_bits(slot["exp_avg"], theirs.state[p]["exp_avg"])


def test_the_first_momentum_keeps_the_sign_of_zero():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.9)
    params = {"w": torch.zeros(1)}
    _, state = sgd.step(params, {"w": torch.tensor([-0.0])}, sgd.init(params))
    assert same_bits(state.slots["w"]["momentum_buffer"], torch.tensor([-0.0]))


def test_a_state_in_another_layout_trains_the_same():
    weight = torch.randn(3, 4).t()
    adam = ps.from_torch(OPTIM.AdamW, lr=0.1)
    state = adam.init({"w": weight})
    contiguous = pytree.tree_map(lambda t: t.contiguous(), state)
    slot = {k: torch.randn(4, 3).abs() if v.ndim else v for k, v in contiguous.slots["w"].items()}
    g = torch.randn(4, 3)
    results = [adam.step({"w": w}, {"w": g}, state._replace(slots={"w": slot}))[0]["w"].contiguous() for w in (weight, weight.contiguous())]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_two_leaves_of_one_dotted_name_are_refused():
    with pytest.raises(ValueError, match="two leaves have the same dotted name"):
        SGD.init({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_dampening_in_an_override_spares_the_first_step():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.5, overrides={"b": {"dampening": 0.5}})
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    stepped, _ = sgd.step(params, {"a": torch.ones(1), "b": torch.ones(1)}, sgd.init(params))
    assert (stepped["a"], stepped["b"]) == (-1, -1)


def test_applied_is_the_largest_step_count():
    sd = {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)},
            1: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)},
        },
        "param_groups": [{"params": [0, 1]}],
    }
    assert ps.from_torch(OPTIM.Adam).from_state_dict(sd, {"a": torch.ones(1), "b": torch.ones(1)}).applied == 5


def test_a_state_dict_has_the_rate_as_it_is_now():
    sgd = ps.from_torch(OPTIM.SGD, lr=lambda applied: 0.5**applied)
    state = sgd.init({"w": torch.ones(1)})
    assert sgd.to_state_dict(state._replace(applied=torch.tensor(2)))["param_groups"][0]["lr"] == 0.25


def test_an_inf_gradient_stays_inf_in_a_narrower_parameter():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    params = {"w": torch.ones(1, dtype=torch.float16)}
    stepped, _ = sgd.step(params, {"w": torch.tensor([math.inf])}, sgd.init(params))
    assert stepped["w"] == -math.inf


def test_bad_settings_are_refused_before_loss_fn_is_called():
    state, _step = job(SGD, RULE)
    called = []
    for settings in ({"max_norm": 0.0}, {"clip_value": -1.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            ps.train_step(state, [batch()], loss_fn=lambda *a: called.append(1), optimizer=SGD, rule=RULE, **settings)
    assert not called


def test_one_gradient_in_two_places_is_unscaled_once():
    results = []
    for donate in (False, True):
        g = torch.full((4,), 4.0)
        params = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2)}
        results.append(ps.unscale_and_step(SGD, at(2.0), params, {"a": g, "b": g, "c": g[:2]}, SGD.init(params), donate=donate))
    assert same_bits(*results)


def test_a_parameter_that_is_missing_is_refused():
    apply, params, buffers = ps.make_functional(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="bias"):
        apply({"weight": params["weight"]}, buffers, torch.ones(1, 2))


def test_norm_params_of_a_norm_alone():
    apply, _, _ = ps.make_functional(nn.LayerNorm(2))
    assert apply.norm_params == {"weight", "bias"}


def test_apply_takes_inference_tensors():
    apply, params, buffers = ps.make_functional(nn.Linear(2, 1))
    with torch.inference_mode():
        params = {n: p.clone() for n, p in params.items()}
        apply(params, buffers, torch.ones(1, 2))


def test_init_train_state_leaves_the_graph_behind():
    w = torch.ones(2, requires_grad=True)
    state = ps.init_train_state({"w": w}, {"b": w.detach() * 2}, SGD, RULE)
    assert not any(t.requires_grad for t in pytree.tree_leaves(state))


def test_a_compiled_step_shares_no_memory():
    state = ps.init_train_state({"w": torch.ones(3)}, {"x": torch.zeros(3)}, SGD, RULE)
    x = torch.ones(3)
    compiled = torch.compile(
        lambda s, x: ps.train_step(s, [x], loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, (p["w"], x)), optimizer=SGD, rule=RULE),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not shares_memory((state, x), compiled(state, x))


def test_a_frozen_parameter_comes_back_in_fresh_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    apply, params, buffers = ps.make_functional(model)
    _, new_buffers = ps.with_policy(apply, "compute=float16")(params, buffers, torch.ones(1, 2))
    assert not shares_memory(buffers, new_buffers)


def test_torchs_own_batch_norm_updates_half_running_statistics():
    x, mean, var = torch.randn(8, 4).half() + 2, torch.zeros(4).half(), torch.ones(4).half()
    with ps.norms_in_float32():
        torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
    assert mean.min() > 0.1


def test_clipping_has_torchs_epsilon():
    clipped, _ = ps.clip_by_global_norm([torch.zeros(2)], 1.0)
    assert clipped[0].tolist() == [0, 0]
    clipped, _ = ps.clip_by_global_norm([torch.tensor([1e-6])], 1e-6)
    assert clipped[0].item() == pytest.approx(5e-7)


def test_half_weights_do_not_overflow_together():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.tensor(0.0)}, {}, sgd, ps.NoScale())
    new, info = ps.train_step(
        state,
        [torch.tensor(1.0), torch.tensor(3.0)],
        loss_fn=lambda p, b, g: (p["w"] * g, b),
        optimizer=sgd,
        rule=ps.NoScale(),
        weight_fn=lambda g: torch.tensor(6e4, dtype=torch.float16),
    )
    assert not info.found_inf
    assert new.params["w"] == -2


def test_inputs_are_cast_before_the_model_sees_them():
    seen = {}

    def apply(params, buffers, *args, **kwargs):
        seen.update(args=args, kwargs=kwargs)
        return args[0][0], buffers

    ps.with_policy(apply, "compute=float16,output=float32")({}, {}, [torch.ones(1)], tokens=torch.tensor([1]), deep={"x": (torch.ones(1),)})
    assert seen["args"][0][0].dtype is torch.float16
    assert seen["kwargs"]["tokens"].dtype is torch.int64
    assert seen["kwargs"]["deep"]["x"][0].dtype is torch.float16


def test_an_interval_beyond_int32_is_refused():
    with pytest.raises(ValueError, match="growth_interval must be from 1"):
        ps.DynamicScale(growth_interval=2**31)


def test_a_long_list_of_names_says_how_many_more():
    names = [f"p{i}" for i in range(7)]
    with pytest.raises(ValueError, match="and 2 more"):
        SGD.step({n: torch.ones(1) for n in names}, {}, SGD.init({n: torch.ones(1) for n in names}))


def test_compiled_donation_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    compiled = torch.compile(lambda s, g: ps.unscale_and_check(s, g, donate=True), fullgraph=True, backend="aot_eager")
    assert shares_memory(compiled(at(2.0), grads)[0], grads)


def test_clipping_an_expanded_gradient_donated_is_safe():
    assert ps.clip_by_value([torch.ones(1).expand(3)], 0.5, donate=True)[0].tolist() == [0.5] * 3


def test_a_differentiable_optimizer_keeps_the_graph():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.5, differentiable=True)
    w = torch.tensor([3.0], requires_grad=True)
    state = sgd.init({"w": w})
    for step in (lambda: sgd.step({"w": w}, {"w": w * 2}, state)[0], lambda: ps.maybe_step(sgd, {"w": w}, {"w": w * 2}, state, False)[0]):
        (derivative,) = torch.autograd.grad(step()["w"].sum(), w)
        assert derivative == 0


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_step_outside_of_maybe_step_grows_no_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    w = torch.ones(2, requires_grad=True)
    stepped, state = optimizer.step({"w": w}, {"w": w.detach() * 2}, optimizer.init({"w": w}))
    assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))


def test_donated_parameters_on_a_graph_come_back_off_it():
    w = torch.ones(2, requires_grad=True) * 1
    with torch.no_grad():
        stepped, state = ps.maybe_step(SGD, {"w": w}, {"w": torch.ones(2)}, SGD.init({"w": w}), torch.tensor(False), donate=True)
    assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))


def test_weight_decay_reaches_a_parameter_that_the_loss_does_not_use():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, weight_decay=0.5)
    state = ps.init_train_state({"used": torch.ones(1), "unused": torch.ones(1)}, {}, sgd, RULE)
    new, _ = ps.train_step(state, [None], loss_fn=lambda p, b, _: (p["used"].sum(), b), optimizer=sgd, rule=RULE)
    assert new.params["unused"] == 0.5


def test_half_gradients_of_half_parameters_give_the_same_bits_donated():
    sgd = ps.from_torch(OPTIM.SGD, lr=2.0**16)
    outs = []
    for donate in (False, True):
        params = {"w": torch.zeros(2, dtype=torch.float16)}
        grads = {"w": torch.full((2,), 1e-3, dtype=torch.float16)}
        outs.append(ps.unscale_and_step(sgd, at(2.0**16), params, grads, sgd.init(params), donate=donate))
    assert same_bits(*outs)


def test_train_step_clips_by_value():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.tensor(0.0)}, {}, sgd, RULE)
    new, _ = ps.train_step(state, [8.0], loss_fn=lambda p, b, x: (p["w"] * x, b), optimizer=sgd, rule=RULE, clip_value=0.5)
    assert new.params["w"] == -0.5


def test_a_donated_step_writes_into_the_state_given_up():
    state, step = job(SGD, RULE)
    new, _ = step(state, [batch()], donate=True)
    assert {t.data_ptr() for t in new.params.values()} == {t.data_ptr() for t in state.params.values()}
    assert {t.data_ptr() for t in new.buffers.values()} == {t.data_ptr() for t in state.buffers.values()}


def test_an_integer_parameter_has_no_dtype_to_keep():
    out, _ = ps.with_policy(lambda p, b: (p["n"], b), "compute=float16")({"n": torch.tensor([1])}, {})
    assert out.dtype is torch.int64


def test_the_path_of_a_refused_loss_is_its_own():
    with pytest.raises(ValueError, match=r"loss\['g'\] has shape"):
        ps.scale_loss(at(1.0), {"d": torch.tensor(1.0), "g": torch.ones(2)})


# ---- memory and state that do not belong together


@pytest.mark.parametrize("cls", [OPTIM.AdamW, OPTIM.Adadelta], ids=["fused", "formula"])
@pytest.mark.parametrize(
    "tie",
    [
        lambda s: s._replace(buffers={"e": s.params["w"]}),
        lambda s: s._replace(step=s.opt_state.applied),
        lambda s: s._replace(buffers={"e": next(iter(v for v in s.opt_state.slots["w"].values() if v.ndim))}),
    ],
    ids=["a buffer is the parameter", "step is the optimizer's count", "a buffer is a slot"],
)
def test_donation_of_a_state_whose_parts_share_memory_gives_the_same_bits(cls, tie):
    optimizer = ps.from_torch(cls, lr=0.1)
    call = {"loss_fn": lambda p, b, x: ((p["w"] * x).sum(), {"e": b["e"] + 1}), "optimizer": optimizer, "rule": RULE}
    state = ps.init_train_state({"w": torch.arange(4.0)}, {"e": torch.zeros(4)}, optimizer, RULE)
    expected = ps.train_step(tie(clone(state)), [torch.ones(4)], **call)
    assert same_bits(ps.train_step(tie(clone(state)), [torch.ones(4)], donate=True, **call), expected)


def test_a_gradient_that_is_the_microbatch_itself_is_not_written_into():
    class Dot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, x):
            ctx.save_for_backward(x)
            return (w * x).sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0], None

    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state, x = ps.init_train_state({"w": torch.ones(3)}, {}, sgd, RULE), torch.ones(3)
    with Untouched((state, x)):
        _, info = ps.train_step(state, [x], loss_fn=lambda p, b, x: (Dot.apply(p["w"], x), b, x * 2), optimizer=sgd, rule=RULE)
    assert info.aux[0].tolist() == [2, 2, 2]


def test_compiled_donation_of_gradients_that_are_the_parameters_gives_the_same_bits():
    sgd, scaler = ps.from_torch(OPTIM.SGD, lr=0.5), at(2.0)

    def step(params, grads, state):
        return ps.unscale_and_step(sgd, scaler, params, grads, state, max_norm=1e9, donate=True).params

    params = {"w": torch.tensor([2.0])}
    expected = step(clone(params), clone(params), sgd.init(params))
    assert same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(params, params, sgd.init(params)), expected)


def test_an_embedding_with_max_norm_that_is_tied_leaves_params_alone():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 5, bias=False)
            self.emb = nn.Embedding(5, 4, max_norm=0.5)
            self.emb.weight = self.head.weight

        def forward(self, tokens):
            return self.emb(tokens)

    apply, params, buffers = ps.make_functional(Tied())
    with Untouched(params):
        assert apply(params, buffers, torch.tensor([1]))[0].norm() <= 0.51


@pytest.mark.parametrize("cls", [OPTIM.AdamW, OPTIM.RMSprop], ids=["fused", "formula"])
def test_the_state_of_a_model_of_another_shape_is_refused(cls):
    optimizer = ps.from_torch(cls)
    params = {"w": torch.ones(300)}
    with pytest.raises(ValueError, match=r"exp_avg|square_avg of w is torch.float32 \(2,\), the parameter torch.float32 \(300,\)"):
        ps.maybe_step(optimizer, params, {"w": torch.ones(300)}, optimizer.init({"w": torch.ones(2)}), torch.tensor(False))


@pytest.mark.parametrize(("cls", "other"), [(OPTIM.AdamW, OPTIM.SGD), (OPTIM.RMSprop, OPTIM.Adagrad), (OPTIM.RMSprop, OPTIM.SGD)])
def test_the_state_of_another_class_is_refused(cls, other):
    optimizer, params = ps.from_torch(cls), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=rf"opt_state has no .* that {cls.__name__} keeps"):
        ps.maybe_step(optimizer, params, params, ps.from_torch(other).init(params), torch.tensor(False))
    with pytest.raises(TypeError, match=r"opt_state is dict. Cure: `opt_state = optimizer.init\(params\)`"):
        optimizer.step(params, params, {})


def test_the_state_of_another_class_is_refused_by_sgd():
    sgd, params = ps.from_torch(OPTIM.SGD, momentum=0.9), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="opt_state has no momentum_buffer that SGD keeps"):
        sgd.step(params, params, ps.from_torch(OPTIM.AdamW).init(params))


def test_gradients_that_a_transformation_could_not_take_are_refused_before_they_are_donated():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: (g, s)))
    params, grads = {"w": torch.ones(3)}, {"w": torch.ones(2)}
    with Untouched((params, grads)), pytest.raises(ValueError, match=r"grads\['w'\] has shape \(2,\)"):
        ps.unscale_and_step(optimizer, at(4.0), params, grads, (), donate=True)


@pytest.mark.parametrize(
    ("settings", "grads", "state"),
    [({}, {"w": torch.ones(3)}, {"v": torch.ones(3)}), ({"clip_value": 1.0}, {"w": torch.ones(3, dtype=torch.complex64)}, None)],
    ids=["another state", "complex and clip_value"],
)
def test_what_is_refused_is_refused_before_gradients_are_donated(settings, grads, state):
    optimizer = ps.from_torch(OPTIM.Adadelta)
    params = {"w": torch.ones_like(grads["w"])}
    opt_state = optimizer.init(state or params)
    with Untouched((grads, params, opt_state)), pytest.raises((ValueError, TypeError)):
        ps.unscale_and_step(optimizer, at(4.0), params, grads, opt_state, donate=True, **settings)


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (torch.ones(2, dtype=torch.int64), TypeError, r"grads\['w'\] has dtype torch.int64"),
        (1.0, TypeError, r"grads\['w'\] is float"),
        (torch.ones(2, dtype=torch.complex64), ValueError, r"grads\['w'\] has dtype torch.complex64, its parameter torch.float32"),
        (torch.ones(2, device="meta"), ValueError, r"grads\['w'\] has device meta, its parameter cpu"),
    ],
)
def test_a_gradient_that_could_not_be_added_to_its_parameter_is_refused(grad, error, message):
    params = {"w": torch.ones(2)}
    with pytest.raises(error, match=message):
        ps.maybe_step(SGD, params, {"w": grad}, SGD.init(params), torch.tensor(False))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("batched", ["state", "params"])
def test_vmap_over_one_part_alone_equals_a_loop(name, batched):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.from_torch(getattr(OPTIM, name), weight_decay=0.1, **settings)
    params = {"w": torch.arange(1.0, 4.0)}
    grads = {"w": torch.tensor([0.1, -0.2, 0.3])}
    _, state = optimizer.step(params, grads, optimizer.init(params))
    given = state if batched == "state" else params
    stacked = pytree.tree_map(lambda t: torch.stack([t, t * 2]) if t.is_floating_point() and t.ndim else torch.stack([t, t]), given)

    def step(part):
        return optimizer.step(params, grads, part)[0] if batched == "state" else optimizer.step(part, grads, state)[0]

    out = torch.vmap(step)(stacked)["w"]
    for index in range(2):
        expected = step(pytree.tree_map(lambda t, i=index: t[i], stacked))["w"]
        torch.testing.assert_close(out[index], expected, rtol=1e-5, atol=1e-6)


def test_patterns_that_say_the_same_are_one_group():
    no_decay = {"weight_decay": 0.0}
    params = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2), "norm.weight": torch.ones(2), "norm.bias": torch.ones(2)}
    optimizer = ps.from_torch(OPTIM.AdamW, overrides={"*.bias": no_decay, "norm.*": no_decay})
    names, groups = list(params), optimizer.to_state_dict(optimizer.init(params))["param_groups"]
    assert [len(group["params"]) for group in groups] == [1, 3]
    theirs = OPTIM.AdamW([{"params": [params["fc.weight"]]}, {"params": [params[n] for n in names[1:]], **no_decay}])
    assert groups == theirs.state_dict()["param_groups"]


def test_a_rate_given_as_a_tensor_is_copied():
    lr = torch.tensor(1.0)
    sgd, params = ps.from_torch(OPTIM.SGD, lr=lr), {"w": torch.zeros(1)}
    lr.fill_(100.0)
    assert sgd.step(params, {"w": torch.ones(1)}, sgd.init(params))[0]["w"] == -1
