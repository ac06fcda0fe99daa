"""Precise batch-norm statistics of a whole loader, over all ranks, as buffers."""

from __future__ import annotations

import dataclasses
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist

from .._batch_norm import bn_stats
from .._batch_norm.bn_inputs import ApplyFn, calls_of
from .._batch_norm.bn_stats import BNStatsState, Estimator
from .._distributed.collectives import agree_on_all_ranks, all_reduce_found_inf, meets_on_cpu
from .._distributed.process_group import Group, all_reduce, as_group
from .._module.registered import Tensors
from .._torch import private
from .._tree import pytree, scalars
from .._tree.progress import progress_bar

Normalize = Literal["batch", "sequential"]


_FEW = 32  # values per channel; the statistics of a smaller batch are too noisy


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
    group: Group | None = None,
    progress: bool = False,
) -> Tensors:
    """Equal to `bn_buffers(stats, buffers)`, with the `stats` of `accumulate_bn_stats` over the
    loader. Syncs with the host at the end.

    The statistics belong to the current weights; a running average mixes in those of older weights.
    The logger "purescale" reports layers, batches, skipped batches and what was left out. No
    argument is changed, even if an error is raised.

    Args:
        apply, params, buffers: From `make_functional`, or `apply` from `with_policy`.
        loader: Any iterable of at least one batch.
        num_samples: The number of samples over all ranks. The loop ends before a batch that would
            exceed it if it is as large as the last; a shorter loader is fine. Each rank counts its
            own, as the first dimension of the first array that `forward` is given.
        call: A function `call(forward, batch)` that feeds one batch, for example
            `lambda forward, batch: forward(batch[0].to(device))`. By default a tuple or list is
            passed as arguments, a dict as keyword arguments, anything else as the one argument.
        estimator, correction: As in `bn_buffers`.
        normalize: `"batch"`: each layer sees activations that were normalised with the statistics
            of their batch, in one pass, so use large batches. `"sequential"`: with the final
            statistics of the layers before it, as in eval mode, in one pass per layer over a
            re-iterable loader that should give the same data each time.
        group: The ranks whose data are one sample; all get the same buffers. By default this rank
            alone. If the ranks meet on a CPU (gloo), different settings raise on every rank.
        progress: Show a progress bar on rank 0 (needs tqdm); without a terminal, one line a minute.

    Returns:
        The buffers with the new statistics, in fresh memory.

    Raises:
        ValueError: A setting is wrong, the model has no batch norm, or no rank has a batch; with
            `"sequential"` also for a one-shot iterator or a layer that is called several times.
        TypeError: A number is not whole, or a batch cannot be fed without `call`.
        RuntimeError: Another rank of the group failed.

    Example:
        >>> from torch import nn
        >>> from purescale import make_functional
        >>> apply, params, buffers = make_functional(nn.BatchNorm1d(1))
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])]
        >>> precise_bn(apply, params, buffers, batches)["running_mean"]
        tensor([3.])

    Source of the rule: Wu and Johnson (arXiv 2105.07576); mmpretrain's PreciseBNHook and fvcore's
    precise_bn. `"sequential"` has no source that we know.
    """

    def check() -> None:
        if normalize not in ("batch", "sequential"):
            raise ValueError(f"normalize must be 'batch' or 'sequential', got {normalize!r}.")
        scalars.checked_whole("num_samples", num_samples, least=1, most=None)
        # Raises now, not after the last batch.
        bn_stats.bn_buffers(bn_stats.init_bn_stats(buffers), buffers, estimator, correction)

    settings = [f"{estimator=}", f"{correction=}", f"{normalize=}"]
    sync = group is not None and meets_on_cpu(as_group(group))
    agree_on_all_ranks(group, check, lambda _: settings, sync=sync)
    sequential = normalize == "sequential"
    first = _Pass(apply, params, buffers, sequential, loader, num_samples, call, group, progress)
    stats, order = first.over_all_batches()
    final, new = dict(stats.layers), pytree.clone(buffers)
    for num_final, names in enumerate([[name] for name in order] if sequential else [list(final)]):
        if num_final:
            later = dataclasses.replace(first, buffers=new, order=order, num_final=num_final)
            stats, _ = later.over_all_batches()
        stats = stats._replace(layers={name: stats.layers[name] for name in names})
        final |= stats.layers
        new = bn_stats.bn_buffers(stats, new, estimator, correction)
    _log_summary(stats._replace(layers=final), normalize)
    return new


@dataclasses.dataclass
class _Pass:
    """A pass over the loader, and its statistics so far."""

    apply: ApplyFn
    params: Tensors
    buffers: Tensors
    sequential: bool
    loader: Iterable[Any]
    limit: int  # of samples over all ranks
    call: Callable[[Callable[..., Any], Any], Any] | None
    group: Group | None
    progress: bool
    # the layers in the order of their calls, known from the first forward that has any
    order: list[str] = dataclasses.field(default_factory=list)
    num_final: int = 0  # how many of them have final statistics in `buffers`

    def __post_init__(self) -> None:
        self.stats, self.num_forwards, self.num_samples = bn_stats.init_bn_stats(self.buffers), 0, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as `call` gets it, and add the statistics of its batch norms."""
        self.num_samples += _num_samples(args, kwargs)
        out, calls = calls_of(self.apply, self.params, self.buffers, args, kwargs, self.num_final)
        self.num_forwards += 1
        names = [name for name, _ in calls]
        self.order = self.order or names
        if self.sequential and calls:
            _check_order(names, self.order)
        self.stats = bn_stats.add_batch(self.stats, calls, self.num_final)
        return out

    def over_all_batches(self) -> tuple[BNStatsState, list[str]]:
        """Return the statistics over the loader and all ranks, and the layers in the order of their
        calls. Syncs with the host at the end.
        """
        failure: Exception | None = None
        try:
            self._feed_batches()
        except Exception as error:
            if self.group is None:
                raise
            failure = error
        stats, order = self.stats, self.order
        if self.group is not None:
            stats, order = _over_ranks(stats, order, failure, self.group)
        if not stats.num_batches + stats.num_skipped:
            where = "" if self.group is None else " on any rank"
            raise ValueError(f"the loader gave no batch{where}: it is empty, or used up.")
        return stats, order

    def _feed_batches(self) -> None:
        """Feed at least one batch, until another like the last would exceed the limit."""
        if self.sequential and isinstance(self.loader, Iterator):
            raise ValueError(
                "normalize='sequential' iterates over the loader once per layer, but a "
                f"{type(self.loader).__name__} can be iterated only once. Fix: list(batches)."
            )
        call = self.call or _feed
        limit = self.limit // (1 if self.group is None else dist.get_world_size(self.group))
        with _bar(self.group) if self.progress else nullcontext() as bar:
            for index, batch in enumerate(self.loader):
                forwards, samples = self.num_forwards, self.num_samples
                call(self.forward, batch)
                if self.num_forwards == forwards:
                    raise ValueError(
                        "call(forward, batch) did not call forward. Fix: call=lambda forward, "
                        "batch: forward(batch[0])."
                    )
                size = self.num_samples - samples
                if bar is not None and index == 0:
                    length = operator.length_hint(self.loader, sys.maxsize)
                    bar.reset(total=min(max(1, limit // max(1, size)), length))
                if bar is not None:
                    bar.update()
                if self.num_samples + size > limit:
                    return


def _over_ranks(
    stats: BNStatsState, order: list[str], failure: Exception | None, group: Group | None
) -> tuple[BNStatsState, list[str]]:
    """Return the statistics of all ranks, and the layers that any rank saw, in the order of their
    calls. A rank that failed or had no data takes part, because the others would wait for it.
    """
    device = stats.num_batches.device
    failed = all_reduce_found_inf(torch.tensor(failure is not None, device=device), group)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("precise_bn failed on another rank of the group: see its error.")
    stats = bn_stats.all_reduce_bn_stats(stats, group)
    names = list(stats.layers)
    indices = [order.index(name) if name in order else -1 for name in names]
    indices = all_reduce(torch.tensor(indices, device=device), "max", group).tolist()
    return stats, [name for index, name in sorted(zip(indices, names, strict=True)) if index >= 0]


def _num_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of samples in a forward: the first dimension of the first array, or without
    an array the length of the first argument.
    """
    for leaf in private.pytree.tree_leaves((args, kwargs)):
        if getattr(leaf, "shape", ()):
            return int(leaf.shape[0])
    first: Any = next(iter((*args, *kwargs.values())), None)
    return len(first) if hasattr(first, "__len__") else 1


def _bar(group: Group | None) -> Any:
    """Return a progress bar, which shows on rank 0."""
    rank = dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
    return progress_bar("precise_bn", "batch", disable=rank != 0)


def _feed(forward: Callable[..., Any], batch: Any) -> Any:
    """Call `forward` with a batch of any kind."""
    try:
        if isinstance(batch, dict):
            return forward(**batch)
        return forward(*batch) if isinstance(batch, (tuple, list)) else forward(batch)
    except TypeError as error:
        error.add_note(
            f"precise_bn fed the model a {type(batch).__name__}. Fix, if it takes something else: "
            "call=lambda forward, batch: forward(batch[0])."
        )
        raise


def _log_summary(stats: BNStatsState, normalize: str) -> None:
    """Log how much data the statistics are from, and what was left out. Syncs with the host."""
    log = logging.getLogger("purescale")
    counts = {name: (int(layer.count), int(layer.calls)) for name, layer in stats.layers.items()}
    unseen = [name for name, (count, _) in counts.items() if not count]
    log.info(
        "precise_bn: %d batches, %d more skipped as not finite; of %d layers no data for: %s",
        *(int(stats.num_batches), int(stats.num_skipped), len(counts), pytree.join_names(unseen)),
    )
    if not int(stats.num_batches):
        log.warning("precise_bn: all batches were skipped as not finite; the buffers stay")
    few = [name for name, (count, calls) in counts.items() if count < _FEW * calls]
    if few and normalize == "batch":
        log.warning(
            "precise_bn: fewer than %d values per channel in a batch, too noisy to normalise with, "
            "in: %s. Fix: larger batches, or normalize='sequential'.",
            *(_FEW, pytree.join_names(few)),
        )


def _check_order(called: list[str], order: list[str]) -> None:
    """Refuse a forward that calls its layers twice, or in another order than the first."""
    if called != order or len(set(called)) < len(called):
        raise ValueError(
            "normalize='sequential' needs each layer once and in one order in every forward; got "
            f"{pytree.join_names(called)} after {pytree.join_names(order)}. Fix: normalize='batch'."
        )
