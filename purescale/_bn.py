"""Batch-norm statistics as a value: gathered by a forward that changes nothing, merged exactly, read as buffers."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
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
    check_flat(buffers)
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
    times pools its calls; frozen layers and those without running statistics are left alone. The dropout of
    torch.nn.functional is off, as it will be where the statistics are used, and draws nothing; that inside an LSTM is not.

    A batch in which a layer sees inf or NaN, or numbers whose variance float32 cannot hold, is left out for all layers and
    counted in `num_skipped`. A batch of one value a channel counts. `apply` is that of `make_functional`, `with_policy` of it,
    or any function whose `new_buffers` are the tensors that its batch norms were given.

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
    _tree.paired(a, b, "a", "b", "Only statistics of the same layers can be merged.")
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
    """Syncs with the host at the end. Equal to `bn_buffers(stats, buffers)`, `stats` those of `accumulate_bn_stats` over the loader.

    The statistics of the weights as they are now, in place of the running average over weights long gone. It reads them for its
    report to the logger "purescale": layers, batches, skipped batches, what was left alone.

    Arguments:
    - `loader`: any iterable of batches. As many are taken as make up `num_samples` over all ranks, rounded down: none once
      another of the size of the last would be too many. At least one; a shorter loader is fine. What counts is what `forward`
      was given, in all its calls: the first dimension of the first array among the arguments. Each rank counts its own.
    - `call(forward, batch)` feeds one batch: `call=lambda forward, batch: forward(batch[0].to(device))`. The default passes
      a tuple or list as arguments, a dict as keyword arguments, anything else as the one argument.
    - `estimator`, `correction`: as in `bn_buffers`.
    - `normalize="batch"`: each layer sees activations that were normalised with the statistics of their batch, in one pass;
      use large batches. `"sequential"`: with the final statistics of the layers before it, exactly what it will see at
      eval. It takes one pass over the loader a layer, so the loader must be re-iterable and should give the same data.
    - `group`: ranks whose data are one sample; all get the same buffers. `None`: this rank alone.
    - `progress`: a bar, on rank 0 (needs tqdm); where no terminal would show it, a line a minute.

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
    _check_settings(num_samples, normalize)
    bn_buffers(init_bn_stats(buffers), buffers, estimator, correction)  # raises for what it would refuse at the end
    sequential = normalize == "sequential"
    gather = functools.partial(
        _gather, apply, params, loader=loader, num_samples=num_samples, call=call, group=group, progress=progress, once=sequential
    )
    stats, order = gather(buffers)
    if not sequential:
        new = bn_buffers(stats, buffers, estimator, correction)
    else:
        new = _tree.clone(buffers)
        final = dict(stats.layers)
        for settled, name in enumerate(order):
            stats, _ = gather(new, order=order, settled=settled) if settled else (stats, order)
            final[name] = stats.layers[name]
            new = bn_buffers(stats._replace(layers={name: final[name]}), new, estimator, correction)
        stats = stats._replace(layers=final)
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
    """Puts what each batch norm in train mode was given into `calls`.

    `evaluating`: for statistics to be used at eval. Running statistics are left alone, half inputs computed in float32, dropout
    is off, a single value a channel is taken, SyncBatchNorm is local, and the first `settled` calls normalise with their
    running statistics. Otherwise everything is as without the mode.
    """

    def __init__(self, evaluating: bool, settled: int = 0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.clones: list[tuple[Tensor, Tensor]] = []
        self.local_statistics = evaluating
        self.evaluating = evaluating
        self.settled = settled

    def __enter__(self) -> CatchBatchNorm:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ or func is Tensor.clone:
            return self._followed(func, args, kwargs)
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

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow running statistics: a policy casts them and stores them back, a second `apply` clones those of the first."""
        out = func(*args, **kwargs)
        if func is Tensor.clone and any(call.running_mean is args[0] for call in self.calls):
            self.clones.append((args[0], out))
        if func is Tensor.copy_ and len(args) > 1:
            self.calls = [call._replace(running_mean=args[0]) if call.running_mean is args[1] else call for call in self.calls]
        return out

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
        if input.numel() == 0 and self.evaluating:
            return input.clone()
        kept = running_mean.dtype if running_mean is not None else input.dtype
        wide = torch.promote_types(input.dtype, torch.float32)
        if self.evaluating:
            kept, x, w, b = wide, input.to(wide), _to(weight, wide), _to(bias, wide)
            frozen = _to(running_mean, wide), _to(running_var, wide)
        else:
            x, w, b, frozen = input, weight, bias, (running_mean, running_var)
        if not training or running_mean is None or running_var is None:
            return _normalized(x, w, b, *frozen, training, momentum, eps).to(input.dtype)

        values = input.numel() // input.shape[1]
        mean, var = torch.zeros_like(running_mean, dtype=kept), torch.zeros_like(running_var, dtype=kept)
        if len(self.calls) < self.settled:
            mean, var = torch.aminmax(x.detach())  # only whether they are finite will be asked
            out = _normalized(x, w, b, *frozen, False, momentum, eps)
        elif values == 1 and self.evaluating:
            mean = x.detach().reshape(-1).clone()
            out = _normalized(x, w, b, mean, var, False, momentum, eps)
        else:
            # With a momentum of 1 the statistics of this batch come out beside its result, at no cost.
            out = _normalized(x, w, b, mean, var, True, 1.0, eps)
        if not self.evaluating:
            for running, now in ((running_mean, mean), (running_var, var)):
                running.mul_(1 - momentum).add_(now * momentum)
        self.calls.append(Call(running_mean, mean, var, values, momentum))
        return out.to(input.dtype)


def _normalized(x: Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Tensor:
    # Not by the names that are caught: a forward compiled by the backend "eager" runs this while the mode is still on.
    out: Tensor = torch.ops.aten.batch_norm.default(x, w, b, mean, var, training, momentum, eps, torch.backends.cudnn.enabled)
    return out


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def named_calls(caught: CatchBatchNorm, new_buffers: Tensors) -> list[tuple[str, Call]]:
    """Each call with the name of its layer, known by the identity of its running mean.

    What has no name is refused where statistics are gathered. In training it is a batch norm with statistics of its own.
    """
    named = []
    layers = [(name, new_buffers[_key(name, "running_mean")]) for name in _layers(new_buffers)]
    for call in caught.calls:
        same = [call.running_mean]
        for old, new in caught.clones:
            same += [new] if any(old is one for one in same) else []
        found = next((name for name, mean in layers if any(mean is one for one in same)), None)
        if found is not None:
            named.append((found, call))
        elif caught.evaluating:
            raise ValueError(
                "a batch norm was given running statistics that are not among the new_buffers of apply, so its layer cannot be known. "
                "Likely cause: new_buffers were copied or cast on the way out. Cure: return them as they are, or use make_functional."
            )
    return named


def absorb(stats: BNStatsState, calls: list[tuple[str, Call]], settled: int = 0) -> BNStatsState:
    """`stats` with the calls of one batch merged in, but for the `settled` ones, where all of them are finite."""
    for name, call in calls[settled:]:
        layer = stats.layers.get(name)
        if layer is None or layer.mean.shape != call.mean.shape:
            have = f"has {tuple(layer.mean.shape)} channels there" if layer is not None else "is not in them"
            raise ValueError(
                f"the stats do not belong to this model: layer {name!r} with {len(call.mean)} channels {have}. "
                f"Cure: stats = init_bn_stats(buffers) with the buffers that apply is given."
            )
    called = {name for name, _ in calls[settled:]}
    layers = {name: layer if name in called else _tree.clone(layer) for name, layer in stats.layers.items()}
    counts = torch.ones((), dtype=torch.bool, device=stats.num_batches.device)
    if calls:
        facts = [fact.reshape(-1) for _, call in calls for fact in (call.mean, call.var)]
        together = torch.cat(facts)
        counts = torch.isfinite(together).all()
        wide = torch.where(counts, together, 0).to(next(iter(layers.values())).mean.dtype)
        values = torch.split(wide, [fact.numel() for fact in facts])[2 * settled :]
        n = counts.to(wide.dtype)
    for (name, call), mean, var in zip(calls[settled:], values[::2], values[1::2], strict=True) if calls else ():
        m2 = (var * max(call.values - 1, 0)).view_as(call.var)
        layers[name] = _merged(layers[name], BNLayerStats(n * call.values, mean.view_as(call.mean), m2, m2, n))
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
    with torch.no_grad(), CatchBatchNorm(evaluating=True, settled=settled) as caught:
        returned = apply(params, buffers, *args, **kwargs)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise TypeError(
            f"apply returned {type(returned).__name__}; expected (out, new_buffers). Cure: apply, params, buffers = make_functional(model)."
        )
    return returned[0], named_calls(caught, returned[1])


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
    """Syncs with the host at its end. The statistics of one pass over the loader and all ranks, and the layers in the order of their calls.

    `once`: a layer that is called several times in a forward is refused.
    """
    stats = init_bn_stats(buffers)
    called: list[list[str]] = []
    rows = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal stats, rows
        rows += _rows(args, kwargs)
        out, calls = _forward(apply, params, buffers, args, kwargs, settled)
        called.append([name for name, _ in calls])
        if once and calls:
            _check_order(called[-1], order or next(names for names in called if names))
        stats = absorb(stats, calls, settled)
        return out

    failure: Exception | None = None
    try:
        _check_loader(loader, once)
        most = num_samples // (1 if group is None else dist.get_world_size(group))
        for batch in _taken(loader, most, lambda: rows, _bar(group) if progress else None):
            before = len(called)
            _feed(forward, batch) if call is None else call(forward, batch)
            if len(called) == before:
                raise ValueError("call(forward, batch) did not call forward. Cure: call=lambda forward, batch: forward(batch[0]).")
    except Exception as error:
        if group is None:
            raise
        failure = error
    first = next((names for names in called if names), [])
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


def _check_order(called: list[str], order: list[str]) -> None:
    if len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(
            f"normalize='sequential' settles one layer after the other, but {twice!r} is called {called.count(twice)} times in a "
            f"forward. Cure: normalize='batch', or a layer of its own for each call."
        )
    if called != order:
        raise ValueError(
            f"normalize='sequential' needs the same layers in the same order in every forward; got {_tree.some(called)} after "
            f"{_tree.some(order)}. Cure: normalize='batch'."
        )


def _taken(loader: Iterable[Any], most: int, rows: Callable[[], int], bar: Any) -> Iterator[Any]:
    """Batches of the loader, one at least, until another like the last would bring `rows()` above `most`."""
    try:
        for index, batch in enumerate(loader):
            before = rows()
            yield batch
            size = rows() - before
            if bar is not None and index == 0:
                bar.reset(total=min(max(1, most // max(1, size)), _length(loader)))
            if bar is not None:
                bar.update()
            if rows() + size > most:
                return
    finally:
        if bar is not None:
            bar.close()


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:  # also of a DataLoader over an IterableDataset
        return math.inf


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many samples a forward is given: the first dimension of the first array; without one, the length of the first argument."""
    for leaf in torch_pytree.tree_leaves((args, kwargs)):
        if getattr(leaf, "shape", ()):
            return int(leaf.shape[0])
    first: Any = next(iter((*args, *kwargs.values())), None)
    return len(first) if hasattr(first, "__len__") else 1


def _bar(group: Any) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm. Cure: pip install 'purescale[progress]', or progress=False.") from error
    rank = dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
    bar = tqdm(desc="precise_bn", unit="batch", disable=rank != 0)
    if not bar.disable and not bar.gui and not bar.fp.isatty():
        bar.mininterval = 60.0  # seconds: in a log each refresh stays, as a line
    return bar


def _feed(forward: Callable[..., Any], batch: Any) -> Any:
    try:
        if isinstance(batch, dict):
            return forward(**batch)
        return forward(*batch) if isinstance(batch, (tuple, list)) else forward(batch)
    except TypeError as error:
        if "argument" not in str(error):  # not of the call, but of something in the model
            raise
        if isinstance(batch, (tuple, list)):
            how = f"a {type(batch).__name__} of {len(batch)}, passed as {len(batch)} arguments"
        else:
            how = f"a {type(batch).__name__}, passed as {'keyword arguments' if isinstance(batch, dict) else 'the one argument'}"
        raise TypeError(
            f"the model could not be fed a batch that is {how}: {error}. Likely cause: the loader gives labels too. "
            f"Cure: call=lambda forward, batch: forward(batch[0]), or batch['image'], or whatever the model takes."
        ) from error


def _report(stats: BNStatsState, apply: ApplyFn, normalize: str) -> None:
    """Syncs with the host: says what was gathered."""
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


def check_flat(buffers: Any) -> None:
    """Refuse buffers in which layers cannot be known by name."""
    if not isinstance(buffers, dict) or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in buffers.items()):
        what = f"a dict of {_tree.some([repr(key) for key in buffers])}" if isinstance(buffers, dict) else type(buffers).__name__
        raise TypeError(
            f"buffers is {what}; expected the flat dict of tensors by dotted name that make_functional returns. Cure: of several models "
            f"merge the dicts under a prefix, {{f'generator.{{name}}': t for name, t in generator_buffers.items()}}."
        )


def has_layers(buffers: Tensors) -> bool:
    """Whether these are the buffers of a model with batch norm."""
    return bool(_layers(buffers))


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


def _check_settings(num_samples: Any, normalize: Any) -> None:
    if normalize not in ("batch", "sequential"):
        raise ValueError(f"normalize must be 'batch' or 'sequential', got {normalize!r}.")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples must be a whole number above 0, got {num_samples!r}; less than one batch means one batch.")


def _check_loader(loader: Any, several_passes: bool) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader is {type(loader).__name__}; expected an iterable of batches. Cure: [batch] for a single one.")
    if several_passes and isinstance(loader, Iterator):
        raise ValueError(
            f"normalize='sequential' goes through the loader once a layer, but {type(loader).__name__} can be gone through once only. "
            f"Cure: a DataLoader, or list(batches)."
        )
