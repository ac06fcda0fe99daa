"""Wrong answers of other libraries, as they were measured, each with the right answer."""

import contextlib
import math

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import AsOnAnAccelerator, at, batch, job, same_bits, small_net
from torch import nn

import purescale as ps


def test_the_scale_never_reaches_zero_and_params_never_become_nan():
    # torch: 2**-149 backs off to 0, then 0 * inf = NaN steps into the parameters.
    rule = ps.DynamicScale(2.0**-149, min_scale=2.0**-149)
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    params, state = {"w": torch.ones(1)}, rule.init()
    for grad in [math.inf, math.inf, 1.0, 1.0]:
        scaled = {"w": torch.tensor([grad]) * state.scale}
        out = ps.unscale_and_step(sgd, state, params, scaled, sgd.init(params))
        params, state = out.params, rule.update(state, out.found_inf)
        assert state.scale > 0
        assert torch.isfinite(params["w"]).all()


@pytest.mark.parametrize(
    ("scale", "grad"),
    [(2.0**-140, torch.tensor([1e10 * 2.0**-140])), (2.0**-2, torch.tensor([3e38]))],
)
def test_a_finite_scaled_gradient_that_unscales_to_inf_is_found(scale, grad):
    # torch and apex look at their input only; the parameter becomes -inf.
    state = at(scale)
    true = grad.double() / scale
    unscaled, found_inf = ps.unscale_and_check(state, {"w": grad})
    assert found_inf.item() is (not torch.isfinite(true.float()).all().item())
    assert found_inf or torch.isfinite(unscaled["w"]).all()
    sgd = ps.from_torch(torch.optim.SGD, lr=1e-30)
    params = {"w": torch.ones(1)}
    for donate in (False, True):
        out = ps.unscale_and_step(
            sgd, state, params, {"w": grad.clone()}, sgd.init(params), donate=donate
        )
        assert out.found_inf == found_inf
        assert torch.isfinite(out.params["w"]).all()


def test_finite_gradients_whose_sum_or_norm_overflows_are_no_overflow():
    # DeepSpeed sums each gradient; 4 * 3e38 is inf. A foreach_norm squares 1e30.
    for grad in (torch.full((4,), 3e38), torch.full((4,), 1e30)):
        assert not ps.unscale_and_check(at(1.0), [grad])[1]


def test_float16_gradients_are_taken_and_do_not_underflow():
    # torch refuses them, or unscales in float16, where 1e-3 * 2**-16 is 0.
    unscaled, found_inf = ps.unscale_and_check(
        at(2.0**16), [torch.tensor([1e-3], dtype=torch.float16)]
    )
    assert unscaled[0].dtype is torch.float32
    assert unscaled[0].item() == torch.tensor(1e-3, dtype=torch.float16).item() * 2.0**-16
    assert not found_inf


def test_a_float16_loss_of_shape_1_does_not_overflow():
    # torch: 2 * 65536 in float16 is inf.
    assert ps.scale_loss(at(2.0**16), torch.tensor([2.0], dtype=torch.float16)).tolist() == [
        2.0**17
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_duplicate_sparse_indices_that_overflow_together_are_found(dtype):
    # torch checks the stored values only; coalesced they are inf and the parameter becomes -inf.
    big = torch.finfo(torch.float32).max * 0.8 if dtype is torch.float32 else 6e4
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([big, big], dtype=dtype), (3,), check_invariants=True
    )
    unscaled, found_inf = ps.unscale_and_check(at(1.0), [grad])
    # 120000 fits in float32, into which float16 is unscaled
    assert found_inf.item() is (dtype is torch.float32)
    assert found_inf or unscaled[0].to_dense().tolist() == [
        0,
        2 * torch.tensor(6e4, dtype=dtype).item(),
        0,
    ]


@pytest.mark.parametrize("value", [1e38, 3e38])
def test_duplicate_sparse_indices_are_summed_before_unscaling(value):
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([value, value]), (3,), check_invariants=True
    )
    unscaled, found_inf = ps.unscale_and_check(at(4.0), [grad])
    assert found_inf.item() is (value == 3e38)
    assert found_inf or unscaled[0][1].item() == pytest.approx(0.5e38)


@pytest.mark.parametrize("bad", [None, complex(math.inf, 0), complex(0, math.nan)])
def test_complex_gradients_are_taken(bad):
    # torch: not implemented.
    grad = torch.tensor([4 + 8j, 4 if bad is None else bad], dtype=torch.complex64)
    unscaled, found_inf = ps.unscale_and_check(at(4.0), [grad])
    assert found_inf.item() is (bad is not None)
    assert unscaled[0].dtype is torch.complex64
    assert unscaled[0][0] == 1 + 2j


@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_bfloat16_gradients_are_taken(bad):
    unscaled, found_inf = ps.unscale_and_check(
        at(2.0**16), [torch.tensor([3.0, bad], dtype=torch.bfloat16)]
    )
    assert unscaled[0][0].item() == 3.0 * 2.0**-16
    assert found_inf.item() is not math.isfinite(bad)


@pytest.mark.parametrize("grads", [{"a": None, "b": [None]}, {}, ()])
def test_no_gradient_at_all_is_no_error_and_no_overflow(grads):
    # torch: AssertionError "No inf checks were recorded".
    unscaled, found_inf = ps.unscale_and_check(at(8.0), grads)
    assert unscaled == grads
    assert not found_inf


def test_the_floor_survives_a_tree_map():
    # jmp keeps min_loss_scale in the state and forgets it when flattening: 0.25 becomes 1.
    rule = ps.DynamicScale(0.25, min_scale=0.125)
    state = rule.init()
    for _ in range(4):
        state = rule.update(pytree.tree_map(lambda t: t.clone(), state), torch.tensor(True))
    assert state.scale == 0.125


def test_gradients_and_loss_are_right_on_a_step_where_the_scale_grows():
    # mpx and DeepSpeed unscale with the new scale: both are halved on every growth step.
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    rule = ps.DynamicScale(8.0, growth_interval=1)
    state = ps.init_train_state({"w": torch.tensor(5.0)}, {}, sgd, rule)
    for _ in range(3):
        before = state
        state, info = ps.train_step(
            state, [None], loss_fn=lambda p, b, _: (p["w"] * 2.0, b), optimizer=sgd, rule=rule
        )
        assert before.params["w"] - state.params["w"] == 2.0
        assert info.loss == 2.0 * before.params["w"]
        assert state.scaler.scale == 2 * info.scale


def test_running_statistics_do_not_keep_the_inf_of_a_skipped_step():
    # pytorch#88474: the forward has updated them before the overflow is found.
    optimizer, rule = ps.from_torch(torch.optim.SGD, lr=0.1), ps.DynamicScale()
    state, step = job(optimizer, rule)
    x, y = batch()
    new, info = step(state, [(x * 1e6, y)])
    assert info.found_inf
    assert same_bits(new.buffers, state.buffers)
    assert all(torch.isfinite(t).all() for t in new.buffers.values())


@pytest.mark.parametrize("reads", [True, False])
def test_a_schedule_does_not_advance_on_a_skipped_step(reads):
    # pytorch#55585, #67590: torch cannot tell the caller, so the schedule moves on.
    seen = []

    def schedule(applied):
        seen.append(applied.clone())
        return 0.5**applied

    sgd = ps.from_torch(torch.optim.SGD, lr=schedule)
    params = {"w": torch.tensor([8.0])}
    opt_state = sgd.init(params)
    seen.clear()
    with contextlib.nullcontext() if reads else AsOnAnAccelerator() as counted:
        for bad in [False, True, True, False]:
            params, opt_state = ps.maybe_step(
                sgd, params, {"w": torch.ones(1)}, opt_state, torch.tensor(bad)
            )
    assert [s.item() for s in seen] == [0, 1, 1, 1]
    assert reads or counted.reads == 0
    assert params["w"].item() == 8.0 - 1.0 - 0.5
    assert opt_state.applied == 2


def test_a_skipped_step_does_not_count_for_bias_correction():
    # OLMo-core#317: a step counter that moves on skipped steps gave 2.2 times the learning rate.
    adam = ps.from_torch(torch.optim.Adam, lr=0.1)
    params = {"w": torch.ones(3)}
    opt_state = adam.init(params)
    skipped = ps.maybe_step(
        adam, params, {"w": torch.full((3,), math.nan)}, opt_state, torch.tensor(True)
    )
    assert same_bits(skipped, (params, opt_state))


def test_a_growth_that_would_overflow_float32_stops_at_the_ceiling():
    # Megatron-LM, Keras and ShardedGradScaler go to inf and never come back.
    rule = ps.DynamicScale(2.0**127, max_scale=2.0**127, growth_interval=1)
    state = rule.init()
    for bad in [False, False, True]:
        state = rule.update(state, torch.tensor(bad))
    assert state.scale == 2.0**126


def test_two_optimizers_skip_together():
    # torch steps the clean optimizer and skips the other: a GAN silently loses one side's steps.
    state = at(4.0)
    _, found_inf = ps.unscale_and_check(
        state, {"generator": [torch.ones(2)], "critic": [torch.tensor([math.inf])]}
    )
    assert found_inf


def _fp16_optimizer_hook(model, batches, loss_of, lr, loss_scale=512.0):
    """mmpose's algorithm, written anew: half model, float32 copies, copy gradients over, step, copy
    back.
    """
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    model = model.half()
    optimizer = torch.optim.SGD(masters, lr=lr, momentum=0.9, fused=True)
    for x, y in batches:
        model.zero_grad()
        (loss_of(model(x.half()), y) * loss_scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float().div_(loss_scale)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return [m.detach() for m in masters]


def test_master_weights_need_no_copying_code():
    """Same numbers as copy to float32, step, copy back, with mmpose's static scale of 512."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(10)]

    def loss_of(logits, y):
        return nn.functional.cross_entropy(logits.float(), y)

    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, "params=float32,compute=float16,output=float32")
    sgd, rule = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9), ps.StaticScale(512.0)

    def loss_fn(params, buffers, microbatch):
        logits, buffers = apply(params, buffers, microbatch[0])
        return loss_of(logits, microbatch[1]), buffers

    state = ps.init_train_state(params, buffers, sgd, rule)
    for b in batches:
        state, _ = ps.train_step(state, [b], loss_fn=loss_fn, optimizer=sgd, rule=rule)
    masters = _fp16_optimizer_hook(model, batches, loss_of, lr=0.1)
    assert same_bits(list(state.params.values()), masters)


def test_the_users_module_is_never_changed():
    model = small_net()
    before = {name: (t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    apply, params, buffers = ps.make_functional(model)
    half = ps.with_policy(apply, "params=float32,compute=float16,output=float32")
    half(params, buffers, batch()[0])
    for name, t in model.state_dict(keep_vars=True).items():
        assert same_bits(t, before[name][0])
        assert t._version == before[name][1]
    assert all(module.training for module in model.modules())
