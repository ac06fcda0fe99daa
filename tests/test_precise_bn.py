"""precise_bn: the statistics of a whole loader, in one pass or layer by layer."""

import itertools
import logging

import hypothesis.strategies as st
import pytest
import torch
from helpers import Untouched, examples, module_of, same_bits, shares_memory
from hypothesis import given
from test_bn_stats import INF, Rescaled, gathered, images, labelled, net, normal, truth
from torch import nn

import purescale as ps


def precise(model, data, **settings):
    """Return the buffers of `precise_bn` over the model's own, and those."""
    apply, params, buffers = ps.make_functional(model)
    with Untouched((params, buffers)):
        new = ps.precise_bn(apply, params, buffers, data, **settings)
    assert not shares_memory((params, buffers), new)
    return new, buffers


def first(forward, batch):
    return forward(batch[0])


def loader(*sizes):
    return [(x, torch.zeros(len(x))) for x in images(*sizes)]


@pytest.mark.parametrize("settings", [{}, {"estimator": "within", "correction": 0}])
def test_precise_bn_is_the_small_functions_over_a_loader(settings):
    data = loader(8, 8, 3)
    new, buffers = precise(net(), data, call=first, **settings)
    stats, *_ = gathered(net(), [x for x, _ in data])
    assert same_bits(new, ps.bn_buffers(stats, buffers, **settings))


def taken(batches, num_samples, **settings):
    """How many of these batches precise_bn takes."""
    seen = []

    def counted():
        for x in batches:
            seen.append(x)
            yield x

    precise(nn.BatchNorm1d(3), counted(), num_samples=num_samples, **settings)
    return len(seen)


@pytest.mark.parametrize(
    ("sizes", "num_samples", "expected"),
    [
        ([0, *[64] * 9], 128, 3),  # the empty one and two more
        ([1, *[64] * 9], 128, 2),
        ([1, *[64] * 9], 129, 3),
        ([64, 8, *[64] * 9], 128, 3),
    ],
)
def test_an_odd_batch_is_no_measure_of_the_others(sizes, num_samples, expected):
    assert taken([torch.ones(size, 3) for size in sizes], num_samples) == expected


@examples(15)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 40))
def test_of_batches_that_do_not_grow_as_many_are_taken_as_fit_and_one_at_least(sizes, num_samples):
    sizes.sort(reverse=True)
    count = taken([torch.ones(size, 3) for size in sizes], num_samples)
    assert count == 1 or sum(sizes[:count]) <= num_samples
    assert count == len(sizes) or sum(sizes[:count]) + sizes[count - 1] > num_samples


def test_a_sample_is_a_row_that_forward_was_given():
    parts = lambda forward, x: [forward(part) for part in x.split(2)]  # noqa: E731
    assert taken([normal(8, 3)] * 9, 16, call=parts) == 2
    assert taken(["a text"] * 9, 6, call=lambda forward, text: forward(torch.ones(1, 3))) == 6


@pytest.mark.parametrize("batch", [torch.ones(4, 3), (torch.ones(4, 3),), {"x": torch.ones(4, 3)}])
def test_the_default_feeds_tensors_tuples_and_dicts(batch):
    assert precise(labelled(), [batch])[0]["bn.running_mean"].tolist() == [1, 1, 1]


def test_the_report_names_layers_skipped_batches_and_what_was_left_alone(caplog):
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.BatchNorm2d(4).eval()
    )
    with caplog.at_level(logging.INFO, logger="purescale"):
        precise(model, [normal(4, 4, 8, 8), normal(4, 4, 8, 8) * INF])
    assert "1 batches, 1 more skipped as not finite; of 2 layers no data for: 3" in caplog.text
    assert "fewer" not in caplog.text
    assert same_bits(*precise(net(), [x * INF for x in images(4)]))
    assert "all batches were skipped as not finite" in caplog.text


def test_too_few_values_for_the_batch_regime_are_warned_about(caplog):
    precise(net(), images(4, 4))
    assert (
        "fewer than 32 values per channel in a batch, too noisy to normalise with, in: 9"
        in caplog.text
    )
    assert "normalize='sequential'" in caplog.text
    caplog.clear()
    precise(net(), images(4, 4), normalize="sequential")
    assert not caplog.text


def test_a_bar_is_shown_on_demand(capfd):
    quiet = precise(net(), images(4, 4))
    assert "precise_bn" not in capfd.readouterr().err
    assert same_bits(precise(net(), images(4, 4), progress=True), quiet)
    assert "precise_bn: 100%" in capfd.readouterr().err


# ---- sequential


def eval_inputs(model, buffers, batches):
    """What each batch norm of the model sees at eval."""
    model.load_state_dict(buffers, strict=False)
    seen = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.setdefault(name, []).append(args[0])
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    model.eval()
    with torch.no_grad():
        for x in batches:
            model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_sequential_statistics_are_those_that_the_model_sees_at_eval():
    """Self-consistent to 1e-6; the regime of the batch is off by more than 1e-3 here."""
    batches = images(6, 6, 3)
    model = nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(5, 4), nn.BatchNorm1d(4))
    worst = {}
    for normalize in ("sequential", "batch"):
        new, _ = precise(model.train(), batches, normalize=normalize)
        errors = []
        for name, inputs in eval_inputs(model, new, batches).items():
            mean, var = truth(inputs)
            errors += [
                (new[f"{name}.running_var"] / var - 1).abs().max(),
                ((new[f"{name}.running_mean"] - mean) / var.sqrt()).abs().max(),
            ]
        worst[normalize] = max(errors).item()
    assert worst["sequential"] < 1e-6
    assert worst["batch"] > 1e-3


class Squared(nn.Module):
    """Its second layer is finite only while the first one normalises by the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

    def forward(self, x):
        return self.second(torch.exp(self.first(x) ** 2))


def test_a_layer_that_a_later_pass_has_no_data_for_keeps_its_buffers(caplog):
    batches = [normal(16, 2) + 100 * (-1) ** index for index in range(4)]
    new, before = precise(Squared(), batches, normalize="sequential", estimator="within")
    assert not same_bits(new["first.running_mean"], before["first.running_mean"])
    for name in ("second.running_mean", "second.running_var"):
        assert same_bits(new[name], before[name])
    assert "all batches were skipped" in caplog.text


def test_sequential_refuses_a_one_shot_iterator_before_anything_is_drawn():
    once = iter(images(4))
    with pytest.raises(ValueError, match=r"over the loader once per layer.*list\(batches\)"):
        precise(net(), once, normalize="sequential")
    assert len(next(once)) == 4


def two_norms(forward):
    return module_of(forward, a=nn.BatchNorm1d(3), b=nn.BatchNorm1d(3))


def test_sequential_refuses_layers_that_are_called_twice_or_in_another_order():
    twice = two_norms(lambda m, x: m.a(m.a(x)))
    turned = two_norms(lambda m, x: m.a(m.b(x)) if len(x) % 2 else m.b(m.a(x)))
    for model, words in ((twice, "got a, a after a, a"), (turned, "got b, a after a, b")):
        with pytest.raises(ValueError, match=f"each layer once and in one order .*; {words}. Fix"):
            precise(model, [normal(8, 3), normal(7, 3)], normalize="sequential")


def test_a_loader_of_images_and_labels_that_the_default_cannot_feed_shows_the_cure():
    with pytest.raises(TypeError, match="takes 2 positional arguments") as refused:
        precise(labelled(), [(torch.ones(4, 3), torch.ones(4))])
    assert "call=lambda forward, batch: forward(batch[0])" in refused.value.__notes__[0]


def test_sequential_leaves_a_bad_or_empty_batch_out_of_every_layer():
    model = two_norms(lambda m, x: m.b(torch.relu(m.a(x))))
    x, bad = normal(64, 3), normal(64, 3, mean=3.0, seed=1)
    bad[0, 0] = -INF
    once, *others = (
        precise(model, data, normalize="sequential")
        for data in ([x], [x, bad], [x, x[:0]], [x[:0], x])
    )
    assert all(same_bits(other, once) for other in others)


def test_sequential_goes_through_the_loader_once_a_layer_with_its_own_estimator():
    passes = []

    class Loader:
        def __iter__(self):
            passes.append(1)
            return iter([normal(8, 3), normal(4, 3, mean=5.0, seed=1)])

    settings = {"normalize": "sequential", "estimator": "within", "correction": 0}
    within, _ = precise(Rescaled(), Loader(), **settings)
    assert len(passes) == 2
    pooled, _ = precise(Rescaled(), Loader(), normalize="sequential")
    assert (within["a.running_var"] < 0.5 * pooled["a.running_var"]).all()


def test_a_batch_without_an_array_has_as_many_samples_as_its_first_argument_has_entries():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, words, wide=None):
            return self.norm(torch.tensor([[float(len(word))] for word in words]))

    parts, taken = ps.make_functional(Words()), []
    loader = (taken.append(n) or ["a" * n, "bb"] for n in itertools.count(1))
    ps.precise_bn(*parts, loader, num_samples=4, call=lambda forward, words: forward(words))
    assert taken == [1, 2]
