"""Batch-norm statistics as a value: accumulated, merged, reduced over ranks, written to buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._batch_norm.bn_inputs import ApplyFn, BatchNormCall, calls_of, key_of, layers_of
from .._distributed.process_group import Group, all_reduce, is_single_process
from .._module.registered import Tensors
from .._torch.dtypes import widest_float
from .._tree import pytree, scalars
from .._tree.hints import document_fields
from .._tree.matching import matching_leaves

Estimator = Literal["pooled", "within"]


@document_fields
class BNLayerStats(NamedTuple):
    """Statistics of the inputs of one layer, per channel.

    Attributes:
        count: float64 []. The number of values per channel.
        mean: float64 [C]. The mean.
        m2: float64 [C]. The sum of the squared deviations from `mean`.
        within: float64 [C]. The sum of the squared deviations from the mean of each call.
        calls: float64 []. The number of calls.
    """

    count: Tensor  # type: ignore[assignment]  # shadows tuple.count
    mean: Tensor
    m2: Tensor
    within: Tensor
    calls: Tensor


@document_fields
class BNStatsState(NamedTuple):
    """Statistics of the inputs of all batch norms of a model. Make it with `init_bn_stats`; it can
    be saved, merged and reduced over ranks.

    Attributes:
        layers: The `BNLayerStats` of each batch norm, by its dotted name.
        num_batches: int64 []. The number of batches accumulated.
        num_skipped: int64 []. The number of batches left out, because a value was not finite.
    """

    layers: dict[str, BNLayerStats]
    num_batches: Tensor
    num_skipped: Tensor


def init_bn_stats(buffers: Tensors) -> BNStatsState:
    """Equal to `BNStatsState({layer: zeros for each layer with a running_mean}, num_batches=0,
    num_skipped=0)`.

    The statistics are kept in float64 (float32 on a device without it): three vectors and two
    scalars per layer, 1 MB for a ResNet-50.

    Args:
        buffers: From `make_functional`, a flat dict by dotted name.

    Returns:
        An empty `BNStatsState`.

    Raises:
        ValueError: No layer has running statistics.
        TypeError: `buffers` is not a flat dict of tensors.

    Example:
        >>> from torch import nn
        >>> from purescale import make_functional
        >>> _, _, buffers = make_functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        >>> list(init_bn_stats(buffers).layers)
        ['1']
    """
    check_flat_buffers(buffers)
    names = layers_of(buffers)
    if not names:
        raise ValueError(
            f"no layer with a running_mean and a running_var among {len(buffers)} buffers: "
            f"{pytree.join_names(list(buffers))}. Fix: leave this call out."
        )
    layers = {}
    for name in names:
        mean = buffers[key_of(name, "running_mean")]
        zeros = torch.zeros_like(mean, dtype=widest_float(mean.device))
        zero = zeros.new_zeros(())
        layers[name] = BNLayerStats(zero, zeros, zeros.clone(), zeros.clone(), zero.clone())
    count = torch.zeros((), dtype=torch.int64, device=mean.device)
    return BNStatsState(layers, count, count.clone())


def accumulate_bn_stats(
    stats: BNStatsState,
    apply: ApplyFn,
    params: Tensors,
    buffers: Tensors,
    *args: Any,
    **kwargs: Any,
) -> BNStatsState:
    """Equal to running `apply(params, buffers, *args, **kwargs)` and merging the statistics of each
    batch norm's input into `stats`.

    Runs one forward under `no_grad`, at little more cost, and changes neither model nor buffers.
    Each layer in train mode normalises with the statistics of this batch, in float32 for half
    inputs. A layer that is called several times pools its calls; frozen layers and those without
    running statistics are left alone. The dropout of torch.nn.functional is off, as in eval mode,
    where the statistics are used; the dropout inside an LSTM stays on.

    If a layer sees inf or NaN, or numbers whose variance float32 cannot hold, the batch is left out
    for all layers and counted in `num_skipped`. A batch of one value per channel counts.

    Args:
        stats: From `init_bn_stats`, or the state that the last call returned.
        apply: From `make_functional` or `with_policy`, or any function whose `new_buffers` are the
            tensors that its batch norms were given.
        params: The parameters.
        buffers: The buffers.
        args, kwargs: The other arguments of `apply`.

    Returns:
        The next `BNStatsState`.

    Raises:
        ValueError: A layer is not in `stats`.
        TypeError: `apply` does not return `(out, new_buffers)`.

    Example:
        >>> from torch import nn
        >>> from purescale import make_functional
        >>> apply, params, buffers = make_functional(nn.BatchNorm1d(1))
        >>> stats = init_bn_stats(buffers)
        >>> for batch in ([[1.0], [3.0]], [[5.0]]):
        ...     stats = accumulate_bn_stats(stats, apply, params, buffers, torch.tensor(batch))
        >>> precise = bn_buffers(stats, buffers)
        >>> precise["running_mean"], precise["running_var"]
        (tensor([3.]), tensor([4.]))

    Source of the rule: Chan, Golub, LeVeque (1979); fvcore's update_bn_stats, whose difference of
    E[x^2] and E[x]^2 in float32 goes negative.
    """
    return add_batch(stats, calls_of(apply, params, buffers, args, kwargs)[1])


def merge_bn_stats(a: BNStatsState, b: BNStatsState) -> BNStatsState:
    """Equal to the statistics over the batches of both: associative and commutative up to the
    rounding of float64.

    Args:
        a: The statistics of some batches.
        b: The statistics of others. `init_bn_stats(buffers)` is the neutral element.

    Returns:
        The `BNStatsState` of all batches.

    Raises:
        ValueError: The layers or their numbers of channels differ.

    Example:
        >>> stats = init_bn_stats({"running_mean": torch.zeros(1), "running_var": torch.ones(1)})
        >>> merge_bn_stats(stats, stats).num_batches
        tensor(0)

    Source of the rule: Chan, Golub, LeVeque (1979).
    """
    matching_leaves(a, b, "a", "b", "Only statistics of the same layers can be merged.")
    layers = {name: _merge_layer(layer, b.layers[name]) for name, layer in a.layers.items()}
    return BNStatsState(layers, a.num_batches + b.num_batches, a.num_skipped + b.num_skipped)


def bn_buffers(
    stats: BNStatsState, buffers: Tensors, estimator: Estimator = "pooled", correction: int = 1
) -> Tensors:
    """Equal to `{**buffers, "l.running_mean": mean, "l.running_var": m2 / (count - correction)}`
    for each layer `l` of `stats`.

    Args:
        stats: The statistics.
        buffers: The buffers that `init_bn_stats` was given.
        estimator: `"pooled"`: the variance of all values together. `"within"`: the mean of the
            variances of the batches, weighted by degrees of freedom, without the variance between
            batches; with batches of equal size mmpretrain's PreciseBNHook and `swa_utils.update_bn`
            compute the same.
        correction: 1 for the unbiased variance, as torch keeps it in running_var; 0 for that of the
            population, which fvcore writes.

    Returns:
        All of `buffers`, in their dtypes and in fresh memory. Variances are never negative. A layer
        without a degree of freedom, `count <= correction`, keeps its buffers, and
        `num_batches_tracked` stays.

    Raises:
        TypeError: `correction` is not whole.
        ValueError: `estimator` is another one, `correction` is negative, or the buffers belong to
            another model.

    Example:
        >>> buffers = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
        >>> bn_buffers(init_bn_stats(buffers), buffers)
        {'running_mean': tensor([0.]), 'running_var': tensor([1.])}
    """
    if estimator not in ("pooled", "within"):
        raise ValueError(f"estimator must be 'pooled' or 'within', got {estimator!r}.")
    scalars.checked_whole("correction", correction, most=None)
    _check_layers(stats, buffers)
    new: Tensors = pytree.clone(buffers)
    for name, layer in stats.layers.items():
        m2, degrees = layer.m2, layer.count - correction
        if estimator == "within":
            m2, degrees = layer.within, layer.count - correction * layer.calls
        has_variance = degrees > 0
        var = m2.clamp(min=0) / torch.where(has_variance, degrees, 1)
        for key, value in zip(_keys_of(name), (layer.mean, var), strict=True):
            new[key] = torch.where(has_variance, value.to(new[key].dtype), new[key])
    return new


def _keys_of(name: str) -> tuple[str, str]:
    """Return the dotted names of the two statistics of a layer."""
    return key_of(name, "running_mean"), key_of(name, "running_var")


def all_reduce_bn_stats(stats: BNStatsState, group: Group | None = None) -> BNStatsState:
    """Equal to `functools.reduce(merge_bn_stats, [stats on rank for rank in group])`, on every
    rank, from two reductions.

    Communicates, but reads no value on the host.

    Args:
        stats: A `BNStatsState` with the same layers on every rank. A rank without data adds
            nothing.
        group: The process group, by default that of all ranks. Without a process group the result
            is a copy.

    Returns:
        The `BNStatsState` of all ranks, in fresh memory.

    Example:
        >>> buffers = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
        >>> all_reduce_bn_stats(init_bn_stats(buffers)).num_batches
        tensor(0)

    Source of the rule: Chan, Golub, LeVeque (1979). mmpretrain averages means and variances of
    ranks, which drops the variance between their means; fvcore and `swa_utils.update_bn` reduce
    nothing.
    """
    if is_single_process(group):
        return pytree.clone(stats)
    return _reduce(stats, [], group)[0]


def _reduce(
    stats: BNStatsState, extra: list[Tensor], group: Group | None
) -> tuple[BNStatsState, list[Tensor]]:
    """`all_reduce_bn_stats`, and the sums of `extra` scalars in the same message."""
    # Each field in one row, of layers or of all their channels.
    fields = zip(*stats.layers.values(), strict=True)
    count, mean, m2, within, calls = (torch.cat([t.reshape(-1) for t in field]) for field in fields)
    channels = [layer.mean.numel() for layer in stats.layers.values()]

    def per_channel(values: Tensor) -> Tensor:
        return torch.cat([v.expand(n) for v, n in zip(values, channels, strict=True)])

    weight = per_channel(count)
    others = torch.stack([stats.num_batches, stats.num_skipped, *extra]).to(count.dtype)
    rows = [count, calls, others, mean * weight, within]
    sums = all_reduce(torch.cat(rows), "sum", group)
    count, calls, others, total, within = torch.split(sums, list(map(len, rows)))
    new_weight = per_channel(count)
    new_mean = total / torch.where(new_weight > 0, new_weight, 1)
    # Squared deviations from the common mean need a second reduction, because a difference of sums
    # would cancel.
    m2 = all_reduce(m2 + weight * (mean - new_mean).square(), "sum", group)
    parts = zip(
        count, *(torch.split(row, channels) for row in (new_mean, m2, within)), calls, strict=True
    )
    layers = {
        name: BNLayerStats(*(t.clone().view_as(old) for t, old in zip(new, layer, strict=True)))
        for (name, layer), new in zip(stats.layers.items(), parts, strict=True)
    }
    num_batches, num_skipped, *extra = others
    return BNStatsState(layers, num_batches.to(torch.int64), num_skipped.to(torch.int64)), extra


# ---- one batch -----------------------------------------------------------------------------------


def add_batch(
    stats: BNStatsState, calls: list[tuple[str, BatchNormCall]], num_final: int = 0
) -> BNStatsState:
    """Return `stats` with the calls of one batch merged in, if all of them are finite. The first
    `num_final` calls are only checked.
    """
    channels = {name: layer.mean.shape for name, layer in stats.layers.items()}
    for name, call in calls[num_final:]:
        if channels.get(name) != call.mean.shape:
            raise ValueError(
                f"the stats do not belong to this model: layer {name!r} with {len(call.mean)} "
                "channels is not in them. Fix: stats = init_bn_stats(buffers)."
            )
    called = {name for name, _ in calls[num_final:]}
    layers = {
        name: layer if name in called else pytree.clone(layer)
        for name, layer in stats.layers.items()
    }
    finite = torch.ones((), dtype=torch.bool, device=stats.num_batches.device)
    if calls:
        vectors = [vector.reshape(-1) for _, call in calls for vector in (call.mean, call.var)]
        values = torch.cat(vectors)
        finite = torch.isfinite(values).all()
        wide = torch.where(finite, values, 0).to(next(iter(layers.values())).mean.dtype)
        means_and_vars = torch.split(wide, [vector.numel() for vector in vectors])[2 * num_final :]
        weight = finite.to(wide.dtype)  # 0 leaves the whole batch out
        parts = zip(calls[num_final:], means_and_vars[::2], means_and_vars[1::2], strict=True)
        for (name, call), mean, var in parts:
            m2 = (var * max(call.values - 1, 0)).view_as(call.var)
            batch = BNLayerStats(weight * call.values, mean.view_as(call.mean), m2, m2, weight)
            layers[name] = _merge_layer(layers[name], batch)
    return BNStatsState(layers, stats.num_batches + finite, stats.num_skipped + ~finite)


def _merge_layer(a: BNLayerStats, b: BNLayerStats) -> BNLayerStats:
    """Return the statistics of all values, by the formula of Chan, Golub and LeVeque."""
    count = a.count + b.count
    divisor = torch.where(count > 0, count, 1)
    delta = b.mean - a.mean
    return BNLayerStats(
        count=count,
        mean=a.mean + delta * (b.count / divisor),
        m2=a.m2 + b.m2 + delta.square() * (a.count * b.count / divisor),
        within=a.within + b.within,
        calls=a.calls + b.calls,
    )


# ---- a window of a step --------------------------------------------------------------------------

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def restore_running_stats(new_buffers: Tensors, before: Tensors, names: Iterable[str]) -> Tensors:
    """Return `new_buffers` with the statistics of these layers from `before`."""
    restored = {key_of(name, buffer) for name in names for buffer in _BUFFERS}
    return {key: before[key] if key in restored else buffer for key, buffer in new_buffers.items()}


def reduce_stats_and_momenta(
    stats: BNStatsState, momenta: dict[str, float], group: Group | None
) -> tuple[BNStatsState, dict[str, Tensor]]:
    """Reduce statistics and momenta over the ranks of a group.

    A rank knows a momentum only if the layer ran there, so the result is the mean over all calls.
    """
    weighted = [layer.calls * momenta.get(name, 0.0) for name, layer in stats.layers.items()]
    stats, sums = _reduce(stats, weighted, group)
    parts = zip(stats.layers.items(), sums, strict=True)
    return stats, {name: total / layer.calls.clamp(min=1) for (name, layer), total in parts}


def update_running_stats(
    buffers: Tensors, stats: BNStatsState, momenta: Mapping[str, float | Tensor]
) -> Tensors:
    """Return `buffers` after one update of the running averages, by torch's rule, with the pooled
    statistics of a window.
    """
    pooled = bn_buffers(stats, buffers)
    new = dict(buffers)
    for name, momentum in momenta.items():
        has_variance = stats.layers[name].count > 1
        for key in _keys_of(name):
            new[key] = torch.where(
                has_variance, (1 - momentum) * buffers[key] + momentum * pooled[key], buffers[key]
            ).to(buffers[key].dtype)
        tracked = key_of(name, "num_batches_tracked")
        if tracked in buffers:
            new[tracked] = buffers[tracked] + has_variance
    return new


# ---- checks --------------------------------------------------------------------------------------


def check_flat_buffers(buffers: Any) -> None:
    """Refuse buffers that are not a flat dict, because layers have no names in them."""
    if not isinstance(buffers, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in buffers.items()
    ):
        raise TypeError(
            f"buffers is {pytree.describe_argument(buffers)}; expected the flat dict of tensors by "
            "dotted name that make_functional returns. Fix: for several models, merge the dicts "
            "under a prefix."
        )


def _check_layers(stats: BNStatsState, buffers: Tensors) -> None:
    for name, layer in stats.layers.items():
        for key in _keys_of(name):
            shape = tuple(buffers[key].shape) if key in buffers else None
            if shape != tuple(layer.mean.shape):
                raise ValueError(
                    f"the buffers do not belong to the stats: the shape of {key} is {shape}, "
                    f"expected {tuple(layer.mean.shape)}. Fix: the buffers of init_bn_stats."
                )
