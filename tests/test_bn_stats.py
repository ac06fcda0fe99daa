"""Batch-norm statistics: exact over any batches, never touching the model."""

import functools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    assert_close,
    batch,
    cross_entropy_of,
    examples,
    in_one_graph,
    job,
    mean_square_of,
    module_of,
    same_bits,
    shares_memory,
    small_net,
    stack,
    tensors,
)
from hypothesis import given
from torch import nn

import purescale as ps
from purescale.testing import assert_pure, assert_vmap_equals_loop

INF = math.inf


def gathered(model, batches, policy=None):
    """(BNStatsState, params, buffers, apply) of some batches."""
    apply, params, buffers = ps.make_functional(model)
    apply = apply if policy is None else ps.with_policy(apply, policy)
    stats = ps.init_bn_stats(buffers)
    for x in batches:
        stats = ps.accumulate_bn_stats(stats, apply, params, buffers, x)
    return stats, params, buffers, apply


def truth(batches):
    """float64 mean and unbiased variance a channel of everything together."""
    values = torch.cat([x.double().transpose(0, 1).reshape(x.shape[1], -1) for x in batches], 1)
    return values.mean(1), values.var(1)


def assert_layer(layer, mean, var, rtol=1e-5, atol=1e-5):
    """Mean and unbiased variance that were gathered of a layer."""
    torch.testing.assert_close(layer.mean, mean.double(), rtol=rtol, atol=atol)
    var_of_layer = layer.m2 / (layer.count - 1)
    torch.testing.assert_close(var_of_layer, var.double(), rtol=rtol, atol=atol, equal_nan=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5), nn.BatchNorm1d(5),
    )  # fmt: skip


def images(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 1, 8, 8, generator=generator) * (1 + i) + i for i, n in enumerate(sizes)]


# ---- exact


def normal(*shape, mean=0.0, sigma=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * sigma + mean


CASES = {
    "batch means shift": [
        normal(32, 16, 8, 8, mean=float(normal(1, seed=100 + i)), seed=i) for i in range(8)
    ],
    "batches of two": [normal(2, 16, seed=i) for i in range(300)],
    "last of 1": [*(normal(32, 16, 8, 8, seed=i) for i in range(4)), normal(1, 16, 8, 8, mean=2.0)],
    "last of 1, no space": [*(normal(64, 16, seed=i) for i in range(4)), normal(1, 16, mean=2.0)],
    "lengths": [normal(8, 16, 100), normal(8, 16, 10, mean=2.0)],
    "half at mean 100": [normal(32, 16, 8, 8, mean=100.0, seed=i).half() for i in range(8)],
    "mean 100": [normal(32, 16, 8, 8, mean=100.0, sigma=0.1, seed=i) for i in range(8)],
    "mean 10_000": [normal(32, 16, 8, 8, mean=1e4, sigma=0.1, seed=i) for i in range(8)],
}
MOST = {"mean 100": 1e-5, "mean 10_000": 2e-4}  # fvcore's variances are negative there


@pytest.mark.parametrize("case", CASES)
def test_the_buffers_are_the_float64_truth(case):
    """Relative error of the variance at most 1e-6; fvcore, update_bn and mmpretrain are off by up
    to 1.1 on these.
    """
    batches, most = CASES[case], MOST.get(case, 1e-6)
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[batches[0].ndim](16)
    stats, _, buffers, _ = gathered(layer, batches)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in buffers.items()}
    new = ps.bn_buffers(stats, wide)
    mean, var = truth(batches)
    assert case in MOST or ((new["running_mean"] - mean).abs() / var.sqrt()).max() < 1e-6
    assert (new["running_var"] / var - 1).abs().max() < most


@examples(10)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.sampled_from([(), (3,), (2, 2)]),
)
def test_how_the_data_is_cut_and_ordered_does_not_matter(sizes, seed, space):
    x = normal(sum(sizes) + 1, 4, *space, mean=3.0, seed=seed)
    cut = [*x[1:].split(sizes), x[:1]]
    bn = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(space)](4)
    whole, parts, shuffled = (gathered(bn, b)[0].layers[""] for b in ([x], cut, cut[::-1]))
    for other in (parts, shuffled):
        assert other.count == whole.count == x.numel() / 4
        torch.testing.assert_close(other.mean, whole.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other.m2, whole.m2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 3, 1)])
def test_within_is_the_weighted_mean_of_the_batch_variances(sizes):
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    batches = [normal(n, 4, mean=float(i), seed=i) for i, n in enumerate(sizes)]
    stats, _, buffers, _ = gathered(nn.BatchNorm1d(4), batches)
    within = ps.bn_buffers(stats, buffers, estimator="within")
    variances = torch.stack(
        [x.double().var(0) if len(x) > 1 else torch.zeros(4).double() for x in batches]
    )
    freedom = torch.tensor([n - 1 for n in sizes]).double()[:, None]
    summed = (variances * freedom).sum(0)
    close(within["running_var"].double(), summed / freedom.sum())
    biased = ps.bn_buffers(stats, buffers, estimator="within", correction=0)["running_var"]
    close(biased.double(), summed / sum(sizes))
    if len(set(sizes)) == 1:  # what mmpretrain and swa_utils.update_bn compute
        close(within["running_var"].double(), variances.mean(0))
        model = nn.BatchNorm1d(4)
        torch.optim.swa_utils.update_bn(batches, model)
        close(within["running_var"], model.running_var)
        close(within["running_mean"], model.running_mean)


# ---- pure


def test_gathering_changes_nothing_also_when_the_forward_raises():
    model = net()
    model[4].eval()  # which comes out in fresh memory too
    apply, params, buffers = ps.make_functional(model)
    params = {name: p.requires_grad_() for name, p in params.items()}
    stats = ps.init_bn_stats(buffers)
    (x,) = images(4)
    before = torch.get_rng_state()
    with Untouched((params, buffers, stats, x, dict(model.named_buffers()))):
        new = ps.accumulate_bn_stats(stats, apply, params, buffers, x)
        with pytest.raises(RuntimeError):
            ps.accumulate_bn_stats(stats, apply, params, buffers, x[:, :, :1])
    assert not shares_memory((params, buffers, stats, x), new)
    assert not any(t.requires_grad for t in tensors(new))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.overrides._get_current_function_mode_stack()
    read = assert_pure(ps.bn_buffers, new, buffers)
    assert same_bits(read["1.num_batches_tracked"], buffers["1.num_batches_tracked"])
    assert set(read) == set(buffers)


# and the dimensions they want
DROPOUTS = {
    **{F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5},
    **{F.alpha_dropout: 2, F.feature_alpha_dropout: 5},
}


@pytest.mark.filterwarnings("ignore:dropout1d:UserWarning", "ignore:dropout2d:UserWarning")
def test_dropout_is_off_and_draws_nothing():
    def forward(m, x):
        x = F.dropout(m.drop(x), 0.5, training=True)
        others = [f(x.reshape(*x.shape, *[1] * (n - 2)), 0.5, True) for f, n in DROPOUTS.items()]
        y = (x + 0 * (m.leak(x) + sum(other.sum() for other in others)))[None]
        attended = F.scaled_dot_product_attention(y, y, y, None, 0.5)
        return m.bn((y + 0 * m.attention(y, y, y, need_weights=False)[0] + 0 * attended)[0])

    model = module_of(
        forward,
        bn=nn.BatchNorm1d(3),
        drop=nn.Dropout(0.5),
        leak=nn.RReLU(),
        attention=nn.MultiheadAttention(3, 1, dropout=0.5, batch_first=True),
    )
    before, x = torch.get_rng_state(), normal(64, 3)
    stats, *_ = gathered(model, [x])
    assert torch.equal(torch.get_rng_state(), before)
    assert_layer(stats.layers["bn"], x.double().mean(0), x.double().var(0))


def test_a_batch_with_inf_or_nan_is_left_out_for_all_layers_and_counted():
    x, y, z = images(8, 8, 8)
    bad, beyond_float32 = y.clone(), y.clone()
    bad[0, 0, 0, 0], beyond_float32[0, 0, 0, 0] = INF, 1e30
    model = net()
    for statistic in (model[1].running_mean, model[1].running_var):
        statistic.fill_(math.nan)  # fvcore and mmpretrain: 0 * nan + x is nan
    stats, _, buffers, _ = gathered(model, [x, bad, z, bad * 0, beyond_float32])
    clean, *_ = gathered(net(), [x, z])
    assert same_bits(stats.layers, clean.layers)
    assert (stats.num_batches, stats.num_skipped) == (2, 3)
    assert all(torch.isfinite(t).all() for t in ps.bn_buffers(stats, buffers).values())


def test_a_layer_with_too_few_values_keeps_its_buffers_and_an_empty_batch_counts_for_nothing():
    stats, _, buffers, _ = gathered(nn.BatchNorm1d(2), [torch.ones(1, 2), torch.ones(0, 2)])
    assert same_bits(ps.bn_buffers(stats, buffers), buffers)
    assert ps.bn_buffers(stats, buffers, correction=0)["running_mean"].tolist() == [1, 1]


def test_a_shared_layer_pools_all_its_calls():
    # mmpretrain keeps the last call, fvcore asserts.
    x = normal(8, 3)
    model = module_of(lambda m, x: m.bn(x) + m.bn(2 * x[:3] + 5).sum(), bn=nn.BatchNorm1d(3))
    stats, *_ = gathered(model, [x])
    mean, var = truth([x, 2 * x[:3] + 5])
    layer = stats.layers["bn"]
    torch.testing.assert_close(layer.mean, mean)
    torch.testing.assert_close(layer.m2 / (layer.count - 1), var, rtol=1e-6, atol=0)
    assert layer.calls == 2


def test_frozen_unused_and_untracked_layers_keep_their_buffers():
    def forward(m, x):
        return m.instance(m.frozen(m.untracked(m.used(x)))[..., None].expand(-1, -1, 2))

    model = module_of(
        forward,
        used=nn.SyncBatchNorm(3),  # on this rank alone
        frozen=nn.BatchNorm1d(3).eval(),
        unused=nn.BatchNorm1d(3),
        untracked=nn.BatchNorm1d(3, track_running_stats=False),
        instance=nn.InstanceNorm1d(3, track_running_stats=True),
    )
    stats, _, buffers, _ = gathered(model, [normal(8, 3, mean=4.0)])
    new = ps.bn_buffers(stats, buffers)
    assert new["used.running_mean"].mean() > 3
    assert "untracked" not in stats.layers
    names = [name for name in new if not name.startswith("used")]
    assert {name.partition(".")[0] for name in names} == {"frozen", "unused", "instance"}
    assert all(same_bits(new[name], buffers[name]) for name in names)


def test_hand_written_batch_norms_are_caught():
    fresh = {"mean": 0.0, "var": 1.0}

    def apply(params, buffers, x):
        new = {name: t.clone() for name, t in buffers.items()}
        x = F.batch_norm(x, new["a.running_mean"], new["a.running_var"], None, None, True)
        of_b = new["b.running_mean"], new["b.running_var"]
        return torch.batch_norm(x, None, None, *of_b, True, 0.1, 1e-5, False), new

    buffers = {f"{n}.running_{k}": torch.full((3,), v) for n in "ab" for k, v in fresh.items()}
    x = normal(8, 3, mean=2.0)
    stats = ps.accumulate_bn_stats(ps.init_bn_stats(buffers), apply, {}, buffers, x)
    torch.testing.assert_close(stats.layers["a"].mean, x.double().mean(0))
    torch.testing.assert_close(
        stats.layers["b"].m2 / 7, torch.ones(3).double() * 8 / 7, rtol=1e-4, atol=1e-4
    )


# ---- merged, compiled, vmapped


batches = st.lists(st.tuples(st.integers(1, 5), st.floats(-5, 5)), max_size=3).map(
    lambda parts: gathered(
        nn.BatchNorm1d(2), [normal(n, 2, mean=m, seed=i) for i, (n, m) in enumerate(parts)]
    )[0]
)


@examples(10)
@given(batches, batches, batches)
def test_merging_is_associative_and_commutative_with_the_empty_state_as_its_unit(a, b, c):
    close = {"rtol": 1e-10, "atol": 1e-10}
    merged = assert_pure(ps.merge_bn_stats, a, b)
    assert_close(merged, ps.merge_bn_stats(b, a), **close)
    assert_close(
        ps.merge_bn_stats(merged, c), ps.merge_bn_stats(a, ps.merge_bn_stats(b, c)), **close
    )
    empty = ps.init_bn_stats({"running_mean": torch.zeros(2), "running_var": torch.ones(2)})
    assert same_bits(ps.merge_bn_stats(a, empty), a)
    assert same_bits(ps.merge_bn_stats(empty, a), a)


def test_under_vmap_it_equals_a_loop():
    """To 1e-6: other kernels."""
    apply, params, buffers = ps.make_functional(net())
    models = [pytree.tree_map(lambda t, i=i: t * (1 + i), params) for i in range(2)]

    def gathered_and_read(stats, params, buffers, x):
        new = ps.accumulate_bn_stats(stats, apply, params, buffers, x)
        return new, ps.bn_buffers(new, buffers)

    trees = stack([ps.init_bn_stats(buffers)] * 2), stack(models), stack([buffers] * 2)
    assert_vmap_equals_loop(gathered_and_read, *trees, stack(images(8, 8)), rtol=1e-6, atol=1e-6)


# ---- bad input


def labelled():
    return module_of(lambda m, x: m.bn(x), bn=nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loader": []}, ValueError, "the loader gave no batch: it is empty"),
        ({"call": lambda forward, batch: None}, ValueError, "did not call forward"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"normalize": "running"}, ValueError, "must be 'batch' or 'sequential', got 'running'"),
        ({"estimator": "mean"}, ValueError, "estimator must be 'pooled' or 'within', got 'mean'"),
        ({"correction": -1}, ValueError, "correction must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    apply, params, buffers = ps.make_functional(labelled())
    call = {"loader": [torch.ones(4, 3)], **settings}
    with Untouched((params, buffers)), pytest.raises(error, match=message):
        ps.precise_bn(apply, params, buffers, **call)


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2)]
)
def test_a_model_without_batch_norm_is_refused(model):
    apply, params, buffers = ps.make_functional(model)
    with pytest.raises(ValueError, match=r"no layer with a running_mean and .*Fix: leave this"):
        ps.precise_bn(apply, params, buffers, [torch.ones(4, 2)])


def test_stats_and_buffers_of_different_models_are_refused():
    stats, params, buffers, apply = gathered(labelled(), [normal(4, 3)])
    other = ps.init_bn_stats({"running_mean": torch.zeros(3), "running_var": torch.ones(3)})
    wide = ps.init_bn_stats({"bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(4)})
    for wrong in (other, wide):
        with pytest.raises(ValueError, match="do not belong to this model: layer 'bn' with 3 chan"):
            ps.accumulate_bn_stats(wrong, apply, params, buffers, normal(4, 3))
        with pytest.raises(ValueError, match="the buffers do not belong to the stats"):
            ps.bn_buffers(wrong, buffers)
        with pytest.raises(ValueError, match=r"b does not match a|but torch.float64 \(4,\)"):
            ps.merge_bn_stats(stats, wrong)


def test_buffers_that_apply_does_not_hand_back_are_refused():
    def copying(params, buffers, x):
        out, new = apply(params, buffers, x)
        return out, {name: t + 0 for name, t in new.items()}

    apply, params, buffers = ps.make_functional(labelled())
    with pytest.raises(ValueError, match="Fix: return them unchanged, not copied or cast"):
        ps.accumulate_bn_stats(ps.init_bn_stats(buffers), copying, params, buffers, normal(4, 3))
    with pytest.raises(TypeError, match=r"apply returned Tensor; expected \(out, new_buffers\)"):
        ps.accumulate_bn_stats(
            ps.init_bn_stats(buffers), lambda p, b, x: x, params, buffers, normal(4, 3)
        )


# ---- one update a window


RULE = ps.DynamicScale(init_scale=2.0**10)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)


def stepped(loss_fn, params, buffers, *batches, bn_update="window", rule=RULE):
    """The state after one step over these microbatches."""
    state = ps.init_train_state(params, buffers, SGD, rule)
    settings = {"loss_fn": loss_fn, "optimizer": SGD, "rule": rule, "bn_update": bn_update}
    return ps.train_step(state, list(batches), **settings)[0]


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("float32", (8,)),
        ("float32", (6, 2)),
        ("params=float32,compute=float16,output=float32", (4, 4, 4)),
    ],
)
def test_a_window_updates_the_running_statistics_once_with_the_pooled_ones(policy, sizes):
    state, step = job(SGD, RULE, policy=policy, bn_update="window")
    state, _ = step(state, [batch(9)])
    microbatches = [batch(i, n) for i, n in enumerate(sizes)]
    new, _ = step(state, microbatches)
    inputs = [F.conv2d(x, state.params["0.weight"], padding=1) for x, _ in microbatches]
    mean, var = truth(inputs)
    close = {"rtol": 1e-5, "atol": 1e-6} if policy == "float32" else {"rtol": 1e-2, "atol": 1e-3}
    for name, value in (("1.running_mean", mean), ("1.running_var", var)):
        expected = 0.9 * state.buffers[name] + 0.1 * value
        torch.testing.assert_close(new.buffers[name].double(), expected, **close)
    assert new.buffers["1.num_batches_tracked"] == 2


def net_of_two():
    return ps.make_functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
def test_what_a_window_drops_or_weighs_0_is_dropped_from_its_statistics_too(on_nonfinite):
    state, step = job(SGD, RULE, policy="float32", bn_update="window", on_nonfinite=on_nonfinite)
    x, y = batch(5)
    new, _ = step(state, [batch(1), (x * INF, y), batch(2)])
    clean, _ = step(state, [batch(1), batch(2)])
    assert same_bits(new.buffers, state.buffers if on_nonfinite == "drop_window" else clean.buffers)
    weigh = {"weight_fn": lambda b: len(b[1]) % 2}
    new, _ = step(state, [batch(1, 3), batch(2, 4)], **weigh)
    clean, _ = step(state, [batch(1, 3)], **weigh)
    assert same_bits(new.buffers, clean.buffers)


def test_a_window_threads_other_buffers_and_refuses_what_has_no_variance():
    model = module_of(
        lambda m, x: (m.calls.add_(1), m.net(x))[1], net=small_net(), calls=torch.tensor(0)
    )
    apply, params, buffers = ps.make_functional(model)
    new = stepped(cross_entropy_of(apply), params, buffers, batch(0), batch(1))
    assert new.buffers["calls"] == 2
    assert new.buffers["net.1.num_batches_tracked"] == 1
    loss_fn = lambda p, b, x: (apply(p, b, x[0])[0].square().mean(), b)  # noqa: E731
    assert same_bits(stepped(loss_fn, params, buffers, batch(0)).buffers, buffers)
    apply, params, buffers = net_of_two()
    for bn_update in ("each", "window"):
        with pytest.raises(ValueError, match=r"value.* per channel"):
            stepped(mean_square_of(apply), params, buffers, torch.randn(1, 3), bn_update=bn_update)


@pytest.mark.slow
def test_statistics_are_gathered_in_one_graph():
    """To 1e-5: other kernels."""
    apply, params, buffers = ps.make_functional(net())
    accumulate = lambda s, x: ps.accumulate_bn_stats(s, apply, params, buffers, x)  # noqa: E731
    stats, (x,) = ps.init_bn_stats(buffers), images(8)
    assert_close(in_one_graph(accumulate)(stats, x), accumulate(stats, x), rtol=1e-5, atol=1e-5)


def test_windows_under_vmap_equal_a_loop():
    """To 1e-5: other kernels."""
    state, step = job(SGD, RULE, policy="float32", bn_update="window")
    windows = stack([[batch(0), batch(1)]] * 2)
    assert_vmap_equals_loop(step, stack([state] * 2), windows, rtol=1e-5, atol=1e-5)


# ---- kinds of layers and policies


class Rescaled(nn.Module):
    """A batch norm whose output the next one sees, with an unusual eps."""

    def __init__(self, eps=0.5):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(3, eps=eps), nn.BatchNorm1d(3, eps=eps)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_hands_on_what_it_would_in_training(frozen):
    model, x = Rescaled(), normal(8, 3, mean=2.0)
    nn.init.constant_(model.a.bias, 3.0)
    nn.init.constant_(model.a.weight, 5.0)
    model.a.train(not frozen)
    stats, *_ = gathered(model, [x])
    seen = model.a(x).detach()
    assert_layer(stats.layers["b"], seen.mean(0), seen.var(0))
    of_one, *_ = gathered(model.train(), [x[:1]])
    assert_layer(of_one.layers["b"], torch.full((3,), 3.0), torch.full((3,), math.nan))


def test_a_compiled_module_is_gathered():
    x = normal(64, 3, mean=3.0)
    apply, params, buffers = ps.make_functional(
        torch.compile(nn.Sequential(nn.BatchNorm1d(3)), backend="eager")
    )
    new = ps.precise_bn(apply, params, buffers, [x])
    torch.testing.assert_close(next(v for k, v in new.items() if "running_mean" in k), x.mean(0))


POLICIES = [
    "params=bfloat16,compute=bfloat16", "params=float16",
    "compute=autocast(bfloat16),norms=bfloat16", "params=float32,compute=float64",
    "params=float32,compute=float16,output=float32",
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_gathered_and_trained_through(policy):
    """Agreement with the values that the layer is given, to the precision of the policy's norms."""
    model = nn.Sequential(nn.BatchNorm1d(3)).to(ps.policy(policy).param_dtype)
    x = normal(64, 3, mean=2.0)
    stats, params, buffers, apply = gathered(model, [x], policy=policy)
    assert_layer(stats.layers["0"], x.mean(0), x.var(0), rtol=1e-2, atol=1e-2)
    assert all(b.dtype is buffers[name].dtype for name, b in ps.bn_buffers(stats, buffers).items())
    loss_fn = mean_square_of(apply)
    each = stepped(loss_fn, params, buffers, x, bn_update="each", rule=ps.NoScale())
    window = stepped(loss_fn, params, buffers, x, rule=ps.NoScale())
    assert_close(window.buffers, each.buffers, rtol=1e-2, atol=1e-2)


def test_nested_buffers_are_refused_with_the_cure():
    _, _, buffers = ps.make_functional(Rescaled())
    for wrong in ({"g": buffers}, None, {0: torch.ones(1)}):
        with pytest.raises(TypeError, match="expected the flat dict of tensors by dotted name"):
            ps.init_bn_stats(wrong)
    with pytest.raises(TypeError, match="Fix: for several models, merge the dicts under a prefix"):
        stepped(lambda p, b, x: (p["w"].sum(), b), {"w": torch.ones(1)}, {"g": buffers}, 1.0)


def test_a_window_takes_two_views_and_a_teacher_with_statistics_of_its_own():
    apply, params, buffers = net_of_two()
    teacher, teacher_params, teacher_buffers = ps.make_functional(nn.BatchNorm1d(3))

    def loss_fn(params, buffers, x):
        one, buffers = apply(params, buffers, x)
        two, buffers = apply(params, buffers, x + 1)
        target, _ = teacher(teacher_params, teacher_buffers, x)
        return (one - two).square().mean() + (one - target).square().mean(), buffers

    x = normal(16, 3)
    new = stepped(loss_fn, params, buffers, x).buffers
    hidden = torch.cat([F.linear(v, params["0.weight"], params["0.bias"]) for v in (x, x + 1)])
    found = new["1.running_mean"], new["1.running_var"]
    expected = 0.1 * hidden.mean(0), 0.9 + 0.1 * hidden.var(0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_a_window_uses_the_momentum_of_the_layer(momentum):
    model = module_of(
        lambda m, x: m.bn(x * m.w).square().mean() + m.bn(x + 1).mean(),
        w=nn.Parameter(torch.ones(())),
        bn=nn.BatchNorm1d(3, momentum=momentum),
    )
    x = normal(32, 3, mean=10.0)
    new = stepped(*ps.make_functional(model), x).buffers["bn.running_mean"]
    pooled = torch.cat([x, x + 1]).mean(0)
    torch.testing.assert_close(new, pooled * (momentum or 1.0), rtol=1e-5, atol=1e-5)


def test_a_window_is_pooled_without_a_count_of_batches():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model[0].num_batches_tracked = None
    apply, params, buffers = ps.make_functional(model)
    settings = {
        "loss_fn": mean_square_of(apply),
        "optimizer": ps.from_torch(torch.optim.SGD, lr=0.1),
        "rule": ps.DynamicScale(),
    }
    state = ps.init_train_state(params, buffers, settings["optimizer"], settings["rule"])
    window = [torch.randn(4, 2) for _ in range(2)]
    new, _ = ps.train_step(state, window, bn_update="window", **settings)
    mean = torch.cat(window).mean(0)
    torch.testing.assert_close(new.buffers, {**new.buffers, "0.running_mean": 0.1 * mean})
    assert new.buffers.keys() == buffers.keys()
