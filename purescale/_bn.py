"""Batch-norm statistics as a value: gathered by a forward that changes nothing, merged exactly, read as buffers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import _foreach, _tree
from ._collectives import all_reduce, all_reduce_bn_stats, all_reduce_found_inf
from ._functional import Apply, Tensors

Estimator = Literal["pooled", "within"]
Normalize = Literal["batch", "sequential"]
ApplyFn = Callable[..., tuple[Any, Tensors]]

_FEW = 32  # values per channel and call, below which a batch's own statistics say little of the whole


class BNLayerStats(NamedTuple):
    """The values that one layer has seen, a channel at a time."""

    count: Tensor  # type: ignore[assignment]  # float64 []: values a channel; covers tuple.count
    mean: Tensor  # float64 [C]
    m2: Tensor  # float64 [C]: squared deviations from `mean`, summed
    within: Tensor  # float64 [C]: squared deviations from the mean of each call, summed
    calls: Tensor  # float64 []


class BNStatsState(NamedTuple):
    """What the batch norms of a model have seen. Make it with `init_bn_stats`; save it, merge it, reduce it over ranks."""

    layers: dict[str, BNLayerStats]
    num_batches: Tensor  # int64 []: that counted
    num_skipped: Tensor  # int64 []: not finite somewhere, left out as a whole


def init_bn_stats(buffers: Tensors) -> BNStatsState:
    """Equal to `BNStatsState({layer: zeros for each layer with a running_mean}, num_batches=0, num_skipped=0)`.

    `buffers`: from `make_functional`, a flat dict by dotted name. The statistics are kept in float64 (float32 on a device
    that has none): two vectors and a half a layer, 1 MB for a ResNet-50.

    Raises `ValueError` when no layer has running statistics.

    >>> from purescale import make_functional
    >>> _, _, buffers = make_functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    >>> list(init_bn_stats(buffers).layers)
    ['1']
    """
    names = _layers(buffers)
    if not names:
        raise ValueError(
            f"no layer with a running_mean and a running_var among {len(buffers)} buffers: {_tree.some(list(buffers))}. Likely cause: a "
            f"model without BatchNorm, or with track_running_stats=False; there is nothing to compute. Cure: leave this call out."
        )
    layers = {}
    for name in names:
        mean = buffers[_key(name, "running_mean")]
        zeros = torch.zeros_like(mean, dtype=_foreach.widest_float(mean.device))
        nothing = zeros.new_zeros(())
        layers[name] = BNLayerStats(nothing, zeros, zeros.clone(), zeros.clone(), nothing.clone())
    none = torch.zeros((), dtype=torch.int64, device=mean.device)
    return BNStatsState(layers, none, none.clone())


def accumulate_bn_stats(stats: BNStatsState, apply: ApplyFn, params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> BNStatsState:
    """Equal to running `apply(params, buffers, *args, **kwargs)` and merging what each batch norm was given into `stats`.

    One forward under `no_grad`; it costs little more than that forward alone, and changes neither model nor buffers. Each
    layer in train mode normalises with the statistics of this batch, in float32 for half inputs. A layer that is called several
    times pools its calls; frozen layers and those without running statistics are left alone. Dropout is off, as it will be
    where the statistics are used, so no random numbers are drawn for it.

    A batch in which a layer sees inf or NaN is left out for all layers and counted in `num_skipped`. A batch of one value a
    channel counts. `apply` is that of `make_functional`, `with_policy` of it, or any function whose `new_buffers` are the
    tensors that its batch norms were given.

    Raises `ValueError` for layers that are not in `stats`; `TypeError` for an `apply` that returns something else.

    >>> from purescale import make_functional
    >>> apply, params, buffers = make_functional(nn.BatchNorm1d(1))
    >>> stats = accumulate_bn_stats(init_bn_stats(buffers), apply, params, buffers, torch.tensor([[1.0], [3.0]]))
    >>> stats = accumulate_bn_stats(stats, apply, params, buffers, torch.tensor([[5.0]]))
    >>> bn_buffers(stats, buffers)
    {'running_mean': tensor([3.]), 'running_var': tensor([4.]), 'num_batches_tracked': tensor(0)}

    Source of the rule: Chan, Golub, LeVeque (1979); fvcore's update_bn_stats, whose float32 E[x^2] - E[x]^2 goes negative.
    """
    return absorb(stats, _forward(apply, params, buffers, args, kwargs)[1])


def merge_bn_stats(a: BNStatsState, b: BNStatsState) -> BNStatsState:
    """Equal to the statistics over the batches of both, exactly: associative and commutative up to float64's rounding.

    `init_bn_stats(buffers)` changes nothing.

    Raises `ValueError` when the two are of different layers or channels.

    >>> stats = init_bn_stats({"running_mean": torch.zeros(1), "running_var": torch.ones(1)})
    >>> merge_bn_stats(stats, stats).num_batches
    tensor(0)

    Source of the rule: Chan, Golub, LeVeque (1979).
    """
    leaves, others = _tree.flatten(a)[0], _tree.leaves_like("b", b, "a", a)
    for index, (x, y) in enumerate(zip(leaves, others, strict=True)):
        _tree.check_pair(x, y, a, index, "a", "b", "Only statistics of the same layers can be merged.")
    return BNStatsState(
        layers={name: _merged(layer, b.layers[name]) for name, layer in a.layers.items()},
        num_batches=a.num_batches + b.num_batches,
        num_skipped=a.num_skipped + b.num_skipped,
    )


def bn_buffers(stats: BNStatsState, buffers: Tensors, estimator: Estimator = "pooled", correction: int = 1) -> Tensors:
    """Equal to `{**buffers, "l.running_mean": mean, "l.running_var": m2 / (count - correction)}` for each layer `l` of `stats`.

    - `estimator="pooled"`: the variance of all values together. `"within"`: the mean of the variances of the batches, each
      weighted by its degrees of freedom; between batches that differ it is too small. On equal batches it is what mmpretrain's
      PreciseBNHook and `swa_utils.update_bn` compute.
    - `correction=1` is the unbiased variance, as torch keeps it in running_var; 0 that of the population, which fvcore writes.
    - A layer with no degree of freedom left, `count <= correction`, keeps its buffers. Never negative; in the buffers' dtypes.

    Returns all of `buffers`, in fresh memory. `num_batches_tracked` stays.

    Raises `ValueError` for another `estimator` or a negative `correction`, and for buffers of another model.

    >>> buffers = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
    >>> bn_buffers(init_bn_stats(buffers), buffers)
    {'running_mean': tensor([0.]), 'running_var': tensor([1.])}
    """
    if estimator not in ("pooled", "within"):
        raise ValueError(f"estimator must be 'pooled' or 'within', got {estimator!r}.")
    if isinstance(correction, bool) or not isinstance(correction, int) or correction < 0:
        raise ValueError(f"correction must be 0 or a positive whole number, got {correction!r}: 1 for torch's running_var.")
    _check_layers(stats, buffers)
    new: Tensors = _tree.clone(buffers)
    for name, layer in stats.layers.items():
        m2, freedom = layer.m2, layer.count - correction
        if estimator == "within":
            m2, freedom = layer.within, layer.count - correction * layer.calls
        known = freedom > 0
        var = m2.clamp(min=0) / torch.where(known, freedom, 1)
        for key, value in ((_key(name, "running_mean"), layer.mean), (_key(name, "running_var"), var)):
            new[key] = torch.where(known, value.to(new[key].dtype), new[key])
    return new


def precise_bn(
    apply: ApplyFn,
    params: Tensors,
    buffers: Tensors,
    loader: Iterable[Any],
    num_samples: int = 8192,
    call: Callable[[Callable[..., Any], Any], Any] | None = None,
    estimator: Estimator = "pooled",
    correction: int = 1,
    normalize: Normalize = "batch",
    group: Any = None,
    progress: bool = False,
) -> Tensors:
    """Equal to `bn_buffers(stats, buffers)` with `stats = accumulate_bn_stats(stats, apply, params, buffers, batch)` over the loader.

    The statistics of the weights as they are now, in place of the running average over weights long gone. Syncs with the host
    at the end, for its report to the logger "purescale": layers, samples, skipped batches, what was left alone.

    Arguments:
    - `loader`: any iterable of batches. As many are taken as make up `num_samples` over all ranks, rounded down by the size
      of the first, and at least one; a shorter loader is fine.
    - `call(forward, batch)` feeds one batch: `call=lambda forward, batch: forward(batch[0].to(device))`. The default passes
      a tuple or list as arguments, a dict as keyword arguments, anything else as the one argument.
    - `estimator`, `correction`: as in `bn_buffers`.
    - `normalize="batch"`: each layer sees activations that were normalised with the statistics of their batch, in one pass;
      use large batches. `"sequential"`: with the final statistics of the layers before it, exactly what it will see at
      eval. It takes one pass over the loader a layer, so the loader must be re-iterable and should give the same data.
    - `group`: ranks whose data are one sample; all get the same buffers. `None`: this rank alone.
    - `progress`: a bar, on rank 0 (needs tqdm).

    Raises `ValueError` for settings, a model without batch norm, a loader without a batch on any rank; in `"sequential"` for a
    one-shot iterator or a layer called several times; `TypeError` when the default cannot feed a batch. What the
    loader raises goes through, on every rank of the group. Nothing is changed by any of it.

    >>> from purescale import make_functional
    >>> apply, params, buffers = make_functional(nn.BatchNorm1d(1))
    >>> precise_bn(apply, params, buffers, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])])["running_mean"]
    tensor([3.])

    Source of the rule: Wu and Johnson (arXiv 2105.07576); mmpretrain's PreciseBNHook and fvcore's precise_bn. `"sequential"`
    has no source that we know.
    """
    _check_settings(loader, num_samples, normalize)
    gather = functools.partial(
        _gather, apply, params, loader=loader, num_samples=num_samples, call=call, group=group, progress=progress,
        once=normalize == "sequential",
    )  # fmt: skip
    bn_buffers(init_bn_stats(buffers), buffers, estimator, correction)  # raises for what it would refuse at the end
    stats, order = gather(buffers)
    new = bn_buffers(stats, buffers, estimator, correction)
    if normalize == "sequential":
        new = buffers
        for settled, name in enumerate(order):
            if settled:
                stats, _ = gather(new, order=order, settled=settled)
            new = bn_buffers(stats._replace(layers={name: stats.layers[name]}), new, estimator, correction)
    _report(stats, apply, normalize)
    return new


# ---- one forward -----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a batch norm in train mode."""

    running_mean: Tensor  # the tensor that it was given: which layer it is
    mean: Tensor
    var: Tensor  # unbiased; 0 for a single value
    values: int  # a channel
    momentum: float


_SIGNATURES: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"),
}
# What draws random numbers in training: the argument that says so, where it stands, and its value at eval.
_RANDOM: dict[Any, tuple[int, str, Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), (2, "training", False)),
    **dict.fromkeys((torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout), (2, "train", False)),
    F.rrelu: (3, "training", False),
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (13, "training", False),
}


class CatchBatchNorm(TorchFunctionMode):
    """Batch norms in train mode leave their running statistics alone; what they were given stands in `calls`.

    `evaluating`: for statistics to be used at eval. Dropout is off, a single value a channel is taken, SyncBatchNorm is
    local, and the first `settled` calls normalise with their running statistics.
    """

    def __init__(self, evaluating: bool, settled: int = 0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.local_statistics = evaluating
        self.evaluating = evaluating
        self.settled = settled

    def __enter__(self) -> CatchBatchNorm:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.evaluating and func in _RANDOM:
            position, name, off = _RANDOM[func]
            if len(args) > position:
                args = (*args[:position], off, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: off}
        if func not in _SIGNATURES:
            return func(*args, **kwargs)
        given = {**dict(zip(_SIGNATURES[func], args, strict=False)), **kwargs}
        given.pop("cudnn_enabled", None)
        return self._batch_norm(**given)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        x, w, b = input.to(wide), _to(weight, wide), _to(bias, wide)
        if input.numel() == 0 and self.evaluating:
            return input.clone()
        if not training or running_mean is None or running_var is None:
            return F.batch_norm(x, _to(running_mean, wide), _to(running_var, wide), w, b, training, momentum, eps).to(input.dtype)

        count = input.numel() // input.shape[1]
        mean, var = torch.zeros_like(running_mean, dtype=wide), torch.zeros_like(running_var, dtype=wide)
        if len(self.calls) < self.settled:
            out = F.batch_norm(x, running_mean.to(wide), running_var.to(wide), w, b, False, momentum, eps)
        elif count == 1 and self.evaluating:
            mean = x.reshape(-1)
            out = F.batch_norm(x, mean, var, w, b, False, momentum, eps)
        else:
            # With a momentum of 1 the statistics of this batch come out beside its result, at no cost.
            out = F.batch_norm(x, mean, var, w, b, True, 1.0, eps)
        self.calls.append(Call(running_mean, mean, var, count, momentum))
        return out.to(input.dtype)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def named_calls(calls: list[Call], new_buffers: Tensors) -> list[tuple[str, Call]]:
    """Each call with the name of its layer, known by the identity of its running mean."""
    named = []
    for call in calls:
        name = next((name for name in _layers(new_buffers) if new_buffers[_key(name, "running_mean")] is call.running_mean), None)
        if name is None:
            raise ValueError(
                "a batch norm was given running statistics that are not among the new_buffers of apply, so its layer cannot be known. "
                "Likely cause: new_buffers were copied or cast on the way out. Cure: return them as they are, or use make_functional."
            )
        named.append((name, call))
    return named


def absorb(stats: BNStatsState, calls: list[tuple[str, Call]], good: Tensor | None = None) -> BNStatsState:
    """`stats` with the calls of one batch merged in, where all of them are finite and the batch is `good`."""
    layers = dict(stats.layers)
    seen = [fact for _, call in calls for fact in (call.mean, call.var)]
    finite = torch.isfinite(torch.cat(seen)).all() if seen else torch.ones((), dtype=torch.bool, device=stats.num_batches.device)
    counts = finite if good is None else finite & good
    for name, call in calls:
        layer = layers.get(name)
        if layer is None or layer.mean.shape != call.mean.shape:
            have = f"has {tuple(layer.mean.shape)} channels there" if layer is not None else "is not in them"
            raise ValueError(
                f"the stats do not belong to this model: layer {name!r} with {len(call.mean)} channels {have}. "
                f"Cure: stats = init_bn_stats(buffers) with the buffers that apply is given."
            )
        mean, var = (torch.where(counts, fact, 0).to(layer.mean.dtype) for fact in (call.mean, call.var))
        n = torch.where(counts, call.values, 0).to(layer.count.dtype)
        m2 = var * (n - 1).clamp(min=0)
        layers[name] = _merged(layer, BNLayerStats(n, mean, m2, m2, torch.where(counts, 1, 0).to(n.dtype)))
    return BNStatsState(layers, stats.num_batches + counts, stats.num_skipped + ~counts)


def without_update(new_buffers: Tensors, before: Tensors, names: Iterable[str]) -> Tensors:
    """`new_buffers` in which the statistics of these layers stand as they were `before`."""
    mine = {_key(name, buffer) for name in names for buffer in _BUFFERS}
    return {key: before[key] if key in mine else buffer for key, buffer in new_buffers.items()}


def updated_once(buffers: Tensors, stats: BNStatsState, momenta: dict[str, float]) -> Tensors:
    """`buffers` after one update of the running averages, by torch's rule, with the pooled statistics of a window."""
    pooled = bn_buffers(stats, buffers)
    new = dict(buffers)
    for name, momentum in momenta.items():
        known = stats.layers[name].count > 1
        for key in (_key(name, "running_mean"), _key(name, "running_var")):
            new[key] = torch.where(known, (1 - momentum) * buffers[key] + momentum * pooled[key], buffers[key]).to(buffers[key].dtype)
        tracked = _key(name, "num_batches_tracked")
        if tracked in buffers:
            new[tracked] = buffers[tracked] + known
    return new


def _forward(
    apply: ApplyFn, params: Tensors, buffers: Tensors, args: Any, kwargs: Any, settled: int = 0
) -> tuple[Any, list[tuple[str, Call]]]:
    # In float32, so that nothing casts them again on the way and hides which layer they belong to.
    wide = {
        name: buffer.to(torch.float32) if buffer.dtype in (torch.float16, torch.bfloat16) and "running_" in name else buffer
        for name, buffer in buffers.items()
    }
    mode = CatchBatchNorm(evaluating=True, settled=settled)
    with torch.no_grad(), mode:
        returned = apply(params, wide, *args, **kwargs)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise TypeError(
            f"apply returned {type(returned).__name__}; expected (out, new_buffers). Cure: apply, params, buffers = make_functional(model)."
        )
    return returned[0], named_calls(mode.calls, returned[1])


def _merged(a: BNLayerStats, b: BNLayerStats) -> BNLayerStats:
    count = a.count + b.count
    some = torch.where(count > 0, count, 1)
    apart = b.mean - a.mean
    return BNLayerStats(
        count=count,
        mean=a.mean + apart * (b.count / some),
        m2=a.m2 + b.m2 + apart.square() * (a.count * b.count / some),
        within=a.within + b.within,
        calls=a.calls + b.calls,
    )


# ---- a loader --------------------------------------------------------------------------------------------------------


def _gather(
    apply: ApplyFn,
    params: Tensors,
    buffers: Tensors,
    *,
    loader: Iterable[Any],
    num_samples: int,
    call: Callable[[Callable[..., Any], Any], Any] | None,
    group: Any,
    progress: bool,
    once: bool,
    order: list[str] | None = None,
    settled: int = 0,
) -> tuple[BNStatsState, list[str]]:
    """The statistics of one pass over the loader, reduced over the ranks, and the layers in the order of their calls.

    `once`: a layer that is called several times in a forward is refused.
    """
    stats = init_bn_stats(buffers)
    called: list[list[str]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal stats
        out, calls = _forward(apply, params, buffers, args, kwargs, settled)
        called.append([name for name, _ in calls])
        _check_order(called[-1], once, order)
        stats = absorb(stats, calls[settled:])
        return out

    failure: Exception | None = None
    try:
        for batch in _taken(loader, num_samples, 1 if group is None else dist.get_world_size(group), progress, group):
            before = len(called)
            _feed(forward, batch) if call is None else call(forward, batch)
            if len(called) == before:
                raise ValueError("call(forward, batch) did not call forward. Cure: call=lambda forward, batch: forward(batch[0]).")
    except Exception as error:
        if group is None:
            raise
        failure = error
    first = called[0] if called else []
    if group is not None:
        # A rank that failed, or had no data, must not leave the others waiting.
        device = stats.num_batches.device
        failed = all_reduce_found_inf(torch.tensor(failure is not None, device=device), group)
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError("precise_bn failed on another rank of the group; its error says why.")
        stats = all_reduce_bn_stats(stats, group)
        names = list(stats.layers)
        places = torch.tensor([first.index(name) if name in first else -1 for name in names], device=device)
        places = all_reduce(places, "max", group)
        first = [name for place, name in sorted(zip(places.tolist(), names, strict=True)) if place >= 0]
    if not stats.num_batches + stats.num_skipped:
        where = "" if group is None else " on any rank"
        raise ValueError(f"the loader gave no batch{where}. Likely cause: it is empty, or an iterator that was used up before.")
    return stats, first


def _check_order(called: list[str], once: bool, order: list[str] | None) -> None:
    if once and len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(
            f"normalize='sequential' settles one layer after the other, but {twice!r} is called {called.count(twice)} times in a "
            f"forward. Cure: normalize='batch', or a layer of its own for each call."
        )
    if order is not None and called != order:
        raise ValueError(
            f"normalize='sequential' needs the same layers in the same order in every forward; got {_tree.some(called)} after "
            f"{_tree.some(order)}. Cure: normalize='batch'."
        )


def _taken(loader: Iterable[Any], num_samples: int, world: int, progress: bool, group: Any) -> Iterator[Any]:
    """As many batches of the loader as make up `num_samples` over all ranks, and not one more."""
    bar = None
    wanted = 1
    try:
        for index, batch in enumerate(loader):
            if index == 0:
                wanted = max(1, num_samples // max(1, _rows(batch) * world))
                bar = _bar(min(wanted, len(loader)) if isinstance(loader, Sized) else wanted, group) if progress else None
            yield batch
            if bar is not None:
                bar.update()
            if index + 1 >= wanted:
                return
    finally:
        if bar is not None:
            bar.close()


def _rows(batch: Any) -> int:
    """How many samples a batch holds, by its first tensor."""
    for leaf in torch_pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return len(batch) if hasattr(batch, "__len__") else 1


def _bar(total: int, group: Any) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm. Cure: pip install 'purescale[progress]', or progress=False.") from error
    rank = dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
    return tqdm(total=total, desc="precise_bn", unit="batch", disable=rank != 0)


def _feed(forward: Callable[..., Any], batch: Any) -> Any:
    try:
        if isinstance(batch, dict):
            return forward(**batch)
        return forward(*batch) if isinstance(batch, (tuple, list)) else forward(batch)
    except TypeError as error:
        if isinstance(batch, (tuple, list)):
            how = f"a {type(batch).__name__} of {len(batch)}, passed as {len(batch)} arguments"
        else:
            how = f"a {type(batch).__name__}, passed as {'keyword arguments' if isinstance(batch, dict) else 'the one argument'}"
        raise TypeError(
            f"the model could not be fed a batch that is {how}: {error}. Likely cause: the loader gives labels too. "
            f"Cure: call=lambda forward, batch: forward(batch[0]), or batch['image'], or whatever the model takes."
        ) from error


def _report(stats: BNStatsState, apply: ApplyFn, normalize: str) -> None:
    log = logging.getLogger("purescale")
    counts = {name: (int(layer.count), int(layer.calls)) for name, layer in stats.layers.items()}
    unseen = [name for name, (count, _) in counts.items() if not count]
    log.info(
        "precise_bn: %d layers from %d batches, %d more skipped as not finite; %d layers saw no data and keep their buffers: %s",
        len(counts) - len(unseen), int(stats.num_batches), int(stats.num_skipped), len(unseen), _tree.some(unseen),
    )  # fmt: skip
    if not int(stats.num_batches):
        log.warning("precise_bn: all %d batches were skipped as not finite; the buffers are as they were", int(stats.num_skipped))
    few = {name: count // calls for name, (count, calls) in counts.items() if calls and count < _FEW * calls}
    if few and normalize == "batch":
        name = min(few, key=lambda name: few[name])
        log.warning(
            "precise_bn: layer %r has %d values per channel in a batch, %d layers fewer than %d: too few for statistics of the batch "
            "to normalise with. Larger batches, or normalize='sequential'.", name, few[name], len(few), _FEW,
        )  # fmt: skip
    inner = inspect.unwrap(apply)
    modules = inner._training.named_modules() if isinstance(inner, Apply) else ()
    others = [name for name, module in modules if isinstance(module, (nn.modules.instancenorm._InstanceNorm, nn.GroupNorm))]
    if others:
        log.info("precise_bn: instance and group norms have no statistics of the batch and are left alone: %s", _tree.some(others))


# ---- names and checks ------------------------------------------------------------------------------------------------


def _key(name: str, buffer: str) -> str:
    return f"{name}.{buffer}" if name else buffer


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def has_layers(buffers: Any) -> bool:
    """Whether these are the buffers of a model with batch norm."""
    return isinstance(buffers, dict) and bool(_layers(buffers))


def _layers(buffers: Tensors) -> list[str]:
    names = [key.removesuffix("running_mean").removesuffix(".") for key in buffers if key.split(".")[-1] == "running_mean"]
    return [name for name in names if _key(name, "running_var") in buffers]


def _check_layers(stats: BNStatsState, buffers: Tensors) -> None:
    for name, layer in stats.layers.items():
        for key in (_key(name, "running_mean"), _key(name, "running_var")):
            if key not in buffers or buffers[key].shape != layer.mean.shape:
                have = f"is {tuple(buffers[key].shape)} there" if key in buffers else "is not among them"
                raise ValueError(
                    f"the buffers do not belong to the stats: {key} {have}, expected {tuple(layer.mean.shape)}. "
                    f"Cure: the buffers that init_bn_stats was given."
                )


def _check_settings(loader: Any, num_samples: Any, normalize: Any) -> None:
    if normalize not in ("batch", "sequential"):
        raise ValueError(f"normalize must be 'batch' or 'sequential', got {normalize!r}.")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples must be a whole number above 0, got {num_samples!r}; less than one batch means one batch.")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader is {type(loader).__name__}; expected an iterable of batches. Cure: [batch] for a single one.")
    if normalize == "sequential" and iter(loader) is loader:
        raise ValueError(
            f"normalize='sequential' goes through the loader once a layer, but {type(loader).__name__} can be gone through once only. "
            f"Cure: a DataLoader, or list(batches)."
        )
