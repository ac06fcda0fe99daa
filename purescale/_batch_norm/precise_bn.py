"""The batch-norm statistics of a whole loader, as buffers: feeding, counting and stopping, over all
ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from .._batch_norm.bn_stats import (
    BNStatsState,
    Estimator,
    absorb,
    all_reduce_bn_stats,
    bn_buffers,
    init_bn_stats,
)
from .._batch_norm.capture import ApplyFn, calls_of
from .._distributed.collectives import agree, all_reduce_found_inf, on_cpu
from .._distributed.process_group import all_reduce, check_group
from .._module.functional import Apply
from .._module.meta_module import Tensors
from .._torch import private as _torch
from .._tree import tree as _tree

Normalize = Literal["batch", "sequential"]


# values per channel and call, below which a batch's own statistics say little of the whole
_FEW = 32


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
    """Syncs with the host at the end. Equal to `bn_buffers(stats, buffers)`, `stats` those of
    `accumulate_bn_stats` over the loader.

    The statistics of the weights as they are now, in place of the running average over weights long
    gone. It reads them for its report to the logger "purescale": layers, batches, skipped batches,
    what was left alone.

    Arguments:
    - `loader`: any iterable of batches. As many are taken as make up `num_samples` over all ranks,
      rounded down: none once another of the size of the last would be too many. At least one; a
      shorter loader is fine. What counts is what `forward` was given, in all its calls: the first
      dimension of the first array among the arguments. Each rank counts its own.
    - `call(forward, batch)` feeds one batch:
      `call=lambda forward, batch: forward(batch[0].to(device))`. The default passes a tuple or list
      as arguments, a dict as keyword arguments, anything else as the one argument.
    - `estimator`, `correction`: as in `bn_buffers`.
    - `normalize="batch"`: each layer sees activations that were normalised with the statistics of
      their batch, in one pass; use large batches. `"sequential"`: with the final statistics of the
      layers before it, exactly what it will see at eval. It takes one pass over the loader a layer,
      so the loader must be re-iterable and should give the same data.
    - `group`: ranks whose data are one sample; all get the same buffers. `None`: this rank alone.
      Where the ranks communicate on a CPU (gloo), settings that differ are an error on every rank.
    - `progress`: a bar, on rank 0 (needs tqdm); where no terminal would show it, a line a minute.

    Raises `ValueError` for settings, a model without batch norm, a loader without a batch on any
    rank; in `"sequential"` for a one-shot iterator or a layer called several times; `TypeError`
    when the default cannot feed a batch. What the loader raises goes through, on every rank of the
    group. Nothing is changed by any of it.

    >>> from purescale import make_functional
    >>> apply, params, buffers = make_functional(nn.BatchNorm1d(1))
    >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])]
    >>> precise_bn(apply, params, buffers, batches)["running_mean"]
    tensor([3.])

    Source of the rule: Wu and Johnson (arXiv 2105.07576); mmpretrain's PreciseBNHook and fvcore's
    precise_bn. `"sequential"` has no source that we know.
    """

    def check() -> None:
        _check_settings(num_samples, normalize)
        # raises for what it would refuse at the end
        bn_buffers(init_bn_stats(buffers), buffers, estimator, correction)

    if group is not None and on_cpu(check_group(group)):
        settings = {"estimator": estimator, "correction": correction, "normalize": normalize}
        agree(group, check, lambda: [f"{key}={value!r}" for key, value in settings.items()])
    else:
        check()
    sequential = normalize == "sequential"
    gather = functools.partial(
        _gather,
        apply,
        params,
        loader=loader,
        num_samples=num_samples,
        call=call,
        group=group,
        progress=progress,
        once=sequential,
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
    """Syncs with the host at its end. The statistics of one pass over the loader and all ranks, and
    the layers in the order of their calls.

    `once`: a layer that is called several times in a forward is refused.
    """
    stats = init_bn_stats(buffers)
    called: list[list[str]] = []
    rows = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal stats, rows
        rows += _rows(args, kwargs)
        out, calls = calls_of(apply, params, buffers, args, kwargs, settled)
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
                raise ValueError(
                    "call(forward, batch) did not call forward. Fix: call=lambda forward, batch: "
                    "forward(batch[0])."
                )
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
            raise RuntimeError(
                "precise_bn failed on another rank of the group; its error says why."
            )
        stats = all_reduce_bn_stats(stats, group)
        names = list(stats.layers)
        places = torch.tensor(
            [first.index(name) if name in first else -1 for name in names], device=device
        )
        places = all_reduce(places, "max", group)
        first = [
            name for place, name in sorted(zip(places.tolist(), names, strict=True)) if place >= 0
        ]
    if not stats.num_batches + stats.num_skipped:
        where = "" if group is None else " on any rank"
        raise ValueError(
            f"the loader gave no batch{where}. Likely cause: it is empty, or an iterator that was "
            "used up before."
        )
    return stats, first


def _taken(loader: Iterable[Any], most: int, rows: Callable[[], int], bar: Any) -> Iterator[Any]:
    """Batches of the loader, one at least, until another like the last would bring `rows()` above
    `most`.
    """
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
    """How many samples a forward is given: the first dimension of the first array; without one, the
    length of the first argument.
    """
    for leaf in _torch.pytree.tree_leaves((args, kwargs)):
        if getattr(leaf, "shape", ()):
            return int(leaf.shape[0])
    first: Any = next(iter((*args, *kwargs.values())), None)
    return len(first) if hasattr(first, "__len__") else 1


def _bar(group: Any) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm. Fix: pip install 'purescale[progress]', or progress=False."
        ) from error
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
            passed = "keyword arguments" if isinstance(batch, dict) else "the one argument"
            how = f"a {type(batch).__name__}, passed as {passed}"
        raise TypeError(
            f"the model could not be fed a batch that is {how}: {error}. Likely cause: the loader "
            "gives labels too. Fix: call=lambda forward, batch: forward(batch[0]), or "
            "batch['image'], or whatever the model takes."
        ) from error


def _report(stats: BNStatsState, apply: ApplyFn, normalize: str) -> None:
    """Syncs with the host: says what was gathered."""
    log = logging.getLogger("purescale")
    counts = {name: (int(layer.count), int(layer.calls)) for name, layer in stats.layers.items()}
    unseen = [name for name, (count, _) in counts.items() if not count]
    log.info(
        "precise_bn: %d layers from %d batches, %d more skipped as not finite",
        *(len(counts) - len(unseen), int(stats.num_batches), int(stats.num_skipped)),
    )
    if unseen:
        some = _tree.some(unseen)
        log.info("precise_bn: %d layers saw no data and keep their buffers: %s", len(unseen), some)
    if not int(stats.num_batches):
        log.warning(
            "precise_bn: all %d batches were skipped as not finite; the buffers are as they were",
            int(stats.num_skipped),
        )
    few = {
        name: count // calls
        for name, (count, calls) in counts.items()
        if calls and count < _FEW * calls
    }
    if few and normalize == "batch":
        name = min(few, key=lambda name: few[name])
        log.warning(
            "precise_bn: layer %r has %d values per channel in a batch, %d layers fewer than %d: "
            "too few for statistics of the batch to normalise with. Larger batches, or "
            "normalize='sequential'.", name, few[name], len(few), _FEW,
        )  # fmt: skip
    inner = inspect.unwrap(apply)
    modules = inner._training.named_modules() if isinstance(inner, Apply) else ()
    others = [
        name for name, module in modules if isinstance(module, (_torch.InstanceNorm, nn.GroupNorm))
    ]
    if others:
        log.info(
            "precise_bn: instance and group norms have no statistics of the batch and are left "
            "alone: %s",
            _tree.some(others),
        )


def _check_order(called: list[str], order: list[str]) -> None:
    if len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(
            f"normalize='sequential' settles one layer after the other, but {twice!r} is called "
            f"{called.count(twice)} times in a forward. Fix: normalize='batch', or a layer of its "
            "own for each call."
        )
    if called != order:
        raise ValueError(
            "normalize='sequential' needs the same layers in the same order in every forward; got "
            f"{_tree.some(called)} after {_tree.some(order)}. Fix: normalize='batch'."
        )


def _check_settings(num_samples: Any, normalize: Any) -> None:
    if normalize not in ("batch", "sequential"):
        raise ValueError(f"normalize must be 'batch' or 'sequential', got {normalize!r}.")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(
            f"num_samples must be a whole number above 0, got {num_samples!r}; less than one batch "
            "means one batch."
        )


def _check_loader(loader: Any, several_passes: bool) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"loader is {type(loader).__name__}; expected an iterable of batches. Fix: [batch] "
            "for a single one."
        )
    if several_passes and isinstance(loader, Iterator):
        raise ValueError(
            "normalize='sequential' goes through the loader once a layer, but "
            f"{type(loader).__name__} can be gone through once only. Fix: a DataLoader, or "
            "list(batches)."
        )
