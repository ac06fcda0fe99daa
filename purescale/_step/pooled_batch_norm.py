"""The stage `accumulate_microbatches` with `bn_update="window"`: batch norm is updated once, by the
statistics of all microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._batch_norm.bn_inputs import CaptureBatchNorm, layers_of, named_calls
from .._batch_norm.bn_stats import (
    add_batch,
    check_flat_buffers,
    init_bn_stats,
    reduce_stats_and_momenta,
    restore_running_stats,
    update_running_stats,
)
from .._step.forward_backward import check_container, checked_returned
from .._step.memory import ArgumentMemory
from .._step.microbatches import accumulate_microbatches
from .._step.prepare import PreparedStep
from .._step.window_result import WindowResult
from .._tree import pytree
from .._tree.pytree import FlatTree, Tree


def accumulate_with_pooled_statistics(
    prepared: PreparedStep, scale: Tensor, memory: ArgumentMemory
) -> WindowResult:
    """Return `accumulate_microbatches`, with buffers in which batch norm is updated once, by the
    statistics of all microbatches that count.
    """
    buffers, options = prepared.flat_state.buffers, prepared.options
    any_buffer = buffers.tree is not None and len(buffers.leaves) > 0
    if any_buffer:
        check_flat_buffers(buffers.tree)
    if not (any_buffer and layers_of(buffers.tree)):
        return accumulate_microbatches(prepared, scale, memory)
    momenta: dict[str, float] = {}

    @functools.wraps(options.loss_fn, updated=())  # errors quote its signature
    def loss_and_stats(params: Tree, buffers_with_stats: Tree, microbatch: Any) -> Any:
        buffers, stats = buffers_with_stats
        with CaptureBatchNorm() as captured:
            returned = options.loss_fn(params, buffers, microbatch)
        loss, new_buffers, *aux = checked_returned(returned)
        check_container(new_buffers, buffers)
        calls = named_calls(captured, new_buffers)
        for name, call in calls:
            momenta.setdefault(name, call.momentum)
        return (
            loss,
            (restore_running_stats(new_buffers, buffers, momenta), add_batch(stats, calls)),
            *aux,
        )

    # The statistics travel with the buffers, so that a dropped microbatch leaves both unchanged.
    buffers_and_stats = FlatTree.of((buffers.tree, init_bn_stats(buffers.tree)))
    window = accumulate_microbatches(
        prepared, scale, memory, loss_fn=loss_and_stats, flat_buffers=buffers_and_stats
    )
    new_buffers, stats = buffers_and_stats.structure.unflatten(window.buffers)
    momentum_of: Mapping[str, float | Tensor] = momenta
    if options.group is not None:
        stats, momentum_of = reduce_stats_and_momenta(stats, momenta, options.group)
    updated = update_running_stats(new_buffers, stats, momentum_of)
    return window._replace(buffers=pytree.flatten(updated)[0])
