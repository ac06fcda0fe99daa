"""A report on an update: the share of the wanted update that arrived in each parameter;
and that update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.optimizer import AdaptedOptimizer, Optimizer, as_flat_optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._optim.partition import PartitionOptimizer
from .._reports.printing import Row, bars, leaf_names, read_rows, table
from .._torch.autocast import outside_autocast
from .._torch.dtensor import from_local_like, full_tensor, local_shard
from .._torch.dtypes import widest_float
from .._torch.tracing import current_context
from .._torch_optim.param_group_optimizer import KernelOrFormulaOptimizer, ParamGroupOptimizer
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.hints import document_fields
from .._tree.leaves import check_leaf, explicit_values
from .._tree.matching import check_parameters, leaves_like
from .._tree.pytree import FlatTree, Leaves, Tree, TreeT
from .._wrappers.wrapper import Wrapper


@document_fields
class UpdateRow(NamedTuple):
    """Statistics of one parameter, as 0-d tensors.

    Attributes:
        quality: float64 []. 1 if all of the wanted update arrived, 0 if none of it.
        lost: float32 []. The share of elements with a wanted update that did not move.
        wanted: bool []. False if the wanted update is 0 in each element: quality is 1 then, and
            lost is 0.
    """

    quality: Tensor
    lost: Tensor
    wanted: Tensor


@document_fields
class UpdateReport(NamedTuple):
    """An `UpdateRow` for each parameter. `print(report)` syncs and prints a table, the worst first;
    `report.plot()` makes a figure.

    Attributes:
        rows: A dict, from the dotted name of a parameter to its `UpdateRow`.
    """

    rows: dict[str, UpdateRow]

    def __str__(self) -> str:
        rows = _read_worst_first(self.rows)
        bad = sum(not abs(quality - 1) <= 0.5 for _, quality, *_ in rows)
        verdict = "every leaf is within half of the wanted update"
        if bad:
            verdict = f"{bad} of {len(rows)} leaves miss the wanted update by more than half of it"
        elif not any(wanted for *_, wanted in rows):
            verdict = _NOTHING
        cells = [
            (name, f"{quality:.4f}", f"{lost:.0%}") if wanted else (name, _NOTHING, "")
            for name, quality, lost, wanted in rows
        ]
        return "\n".join([verdict, *table(("leaf", "quality", "did not move"), cells)])

    def plot(self) -> Any:
        """Syncs with the host. Draw a matplotlib Figure with bars for the columns of the table."""
        rows = [
            (name if wanted else f"{name} ({_NOTHING})", *numbers)
            for name, *numbers, wanted in _read_worst_first(self.rows)
        ]
        return bars(rows, "quality (1: it has arrived)", "did not move")


_NOTHING = "no update wanted"


def _read_worst_first(rows: dict[str, UpdateRow]) -> list[Row]:
    """Read all rows, those farthest from a quality of 1 first, those without a wanted update last.
    Syncs with the host. A stacked report gives its worst values.
    """
    worst = {n: row._replace(quality=_farthest_from_1(row.quality)) for n, row in rows.items()}
    unsorted = read_rows(worst)
    # NaN first
    return sorted(unsorted, key=lambda row: (row[1] == row[1], -abs(row[1] - 1), -row[2], -row[3]))


def _farthest_from_1(quality: Tensor) -> Tensor:
    return quality.flatten()[(quality - 1).abs().argmax()]


@outside_autocast()
def update_report(old: Tree, new: Tree, wanted: Tree) -> UpdateReport:
    """Equal to, for each leaf in float64, `quality = dot(new - old, wanted) / dot(wanted, wanted)`
    and `lost = ((new == old) & (wanted != 0)).sum() / (wanted != 0).sum()`.

    An update smaller than half the distance between two numbers of the parameter's dtype is lost
    without a warning. The quality is 1 if the update arrived and 0 if nothing moved. Rounding to
    nearest makes a small update 0 or far too large; stochastic rounding has quality 1 on average
    over steps, not in each step.

    Args:
        old: Parameters before the step, in any floating dtype. With master weights, give
            `master_weights` before and after; the half weights show what they alone lose.
        new: Parameters after the step.
        wanted: The update without rounding, a tree like `old`:
            `wanted_update(optimizer, old, grads, opt_state)` of the same step. None has no row.

    Returns:
        An `UpdateReport` of tensors on the device of each leaf; only printing it reads values. A
        leaf with a wanted update of 0 has quality 1 and lost 0, and is printed as "no update
        wanted". Complex leaves count with both
        parts, and DTensors are gathered. Reports can be returned from `torch.vmap` and stacked;
        then the worst of each is printed.

    Raises:
        TypeError: A leaf is not a floating or complex tensor.
        ValueError: The trees differ in structure, shapes or devices, or have no tensors.

    Example:
        >>> import torch
        >>> old = {"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(1)}
        >>> wanted = {"w": torch.full((2,), -1e-3), "b": torch.full((1,), -1e-3)}
        >>> new = {name: (old[name] + wanted[name]).to(old[name].dtype) for name in old}
        >>> print(update_report(old, new, wanted))
        1 of 2 leaves miss the wanted update by more than half of it
        leaf  quality  did not move
        w      0.0000          100%
        b      1.0000            0%

    Source of the rule: effective descent quality, Collage (arXiv 2405.03637).
    """
    flat = FlatTree.of(old)
    check_parameters(flat, "old")
    news, updates = (_leaves_like(flat, name, t) for name, t in (("new", new), ("wanted", wanted)))
    rows = {}
    with torch.no_grad():
        for name, *columns in zip(leaf_names(old, "old"), flat.leaves, news, updates, strict=True):
            if not any(leaf is None for leaf in columns):
                before, after, update = (explicit_values(full_tensor(leaf)) for leaf in columns)
                rows[name] = _row(before, after, update)
    if not rows:
        raise ValueError(
            "wanted holds no tensor. Fix: `wanted_update(optimizer, old, grads, opt_state)`."
        )
    return UpdateReport(rows)


def _leaves_like(old: pytree.FlatTree, name: str, tree: Tree) -> Leaves:
    leaves = leaves_like(name, tree, "old", old.tree, old.structure)
    for index, (leaf, before) in enumerate(zip(leaves, old.leaves, strict=True)):
        if leaf is None and (name == "wanted" or before is None):
            continue
        at = pytree.path(old.tree, name, index)
        check_leaf(leaf, at, "parameter")
        if before is None or leaf.shape != before.shape or leaf.device != before.device:
            beside = "None" if before is None else f"{tuple(before.shape)} on {before.device}"
            raise ValueError(
                f"{at} is {tuple(leaf.shape)} on {leaf.device}, old is {beside}. Fix: pass old, "
                "new and wanted of one model."
            )
    return leaves


_CHUNK = 2**22  # elements at a time, as three float64 copies of them are made


def _row(old: Tensor, new: Tensor, wanted: Tensor) -> UpdateRow:
    """Return the statistics of one parameter, summed over chunks."""
    wide = widest_float(old.device)
    zero = torch.zeros((), dtype=wide, device=old.device)
    moved_wanted = wanted_wanted = zero  # the two dot products
    num_unmoved = num_wanted = zero
    if old.numel():
        # Divided by the largest update, squares cannot overflow, nor can all of them underflow.
        unit = wanted.abs().amax().to(wide)
        unit = torch.where(unit > 0, unit, 1)
        parts = (torch.split(values.reshape(-1), _CHUNK) for values in (old, new, wanted))
        for before, after, update in zip(*parts, strict=True):
            step = update.to(wide) / unit
            moved = (after.to(wide) - before.to(wide)) / unit
            moved_wanted = moved_wanted + (moved * step).sum()
            wanted_wanted = wanted_wanted + (step * step).sum()
            is_wanted = update != 0
            num_unmoved = num_unmoved + (is_wanted & (after == before)).sum()
            num_wanted = num_wanted + is_wanted.sum()
    quality = torch.where(wanted_wanted == 0, 1, moved_wanted / wanted_wanted)
    lost = (num_unmoved / num_wanted.clamp(min=1)).to(torch.float32)
    return UpdateRow(quality, lost, num_wanted > 0)


# ---- the update that was wanted ------------------------------------------------------------------


@outside_autocast()
def wanted_update(optimizer: Optimizer, params: TreeT, grads: Tree, opt_state: Tree) -> TreeT:
    """Equal to `optimizer.step(wide, grads, wide_state)[0] - wide`, with `wide` the parameters (or
    their masters) in float64, and `wide_state` the state for them.

    This is the update that a step adds to the parameters before rounding, for
    `update_report(old, new, wanted)`.

    Args:
        optimizer: Any optimizer. For wrappers that round it is the update of the optimizer within;
            a `partition` has that of each part. One that computes in half itself, as Muon does,
            does so here too.
        params: The parameters before the step. Nothing is changed.
        grads: Unscaled and clipped gradients, as `optimizer.step` takes them. None gives an update
            of 0.
        opt_state: The state of the optimizer before the step.

    Returns:
        A tree like `params` in float64 or complex128; in float32 or complex64 on a device without
        float64.

    Raises:
        TypeError: An argument is of the wrong type, as for `optimizer.step`.
        ValueError: The arguments do not belong together, as for `optimizer.step`.

    Example:
        >>> import torch
        >>> from purescale import from_torch, update_report
        >>> sgd = from_torch(torch.optim.SGD, lr=2.0**-10)
        >>> old = {"w": torch.ones(2, dtype=torch.bfloat16)}
        >>> opt_state = sgd.init(old)
        >>> wanted = wanted_update(sgd, old, old, opt_state)
        >>> wanted
        {'w': tensor([-0.0010, -0.0010], dtype=torch.float64)}
        >>> new, _ = sgd.step(old, old, opt_state)
        >>> print(update_report(old, new, wanted))
        1 of 1 leaves miss the wanted update by more than half of it
        leaf  quality  did not move
        w      0.0000          100%

    Source of the rule: the exact update of Collage (arXiv 2405.03637).
    """
    flat_optimizer = as_flat_optimizer(optimizer)
    trees = params, grads, opt_state
    _, inputs, gradients = flat_optimizer.flatten_by_hand(current_context(), *trees)
    flat_optimizer.plan(inputs)  # refuses what does not fit
    with torch.no_grad():
        return inputs.param_structure.unflatten(_wanted(flat_optimizer, inputs, gradients))


def _wanted(optimizer: Any, inputs: OptimizerInputs, grads: Gradients) -> list[Any]:
    """Return the update of each parameter, as a DTensor for one."""
    if isinstance(optimizer, Wrapper):
        inner = optimizer.decode(inputs)
        wanted = _wanted(optimizer.flat_optimizer, inner, grads)
        if optimizer.rounds:
            return wanted
        pairs = list(zip(inner.params, wanted, strict=True))
        stepped = [_wide(param) + local_shard(update) for param, update in pairs]
        old = list(map(_wide, inputs.params))
        wide = inputs.with_params_and_state(old, inputs.opt_state)
        new = optimizer.encode(wide, stepped, inner.opt_state)[0]
        rows = zip(wanted, new, old, strict=True)
        return [from_local_like(update, after - before) for update, after, before in rows]
    if isinstance(optimizer, PartitionOptimizer):
        updates: list[Any] = list(inputs.params)
        for key, part in optimizer.plan(inputs).items():
            of_part = optimizer.inputs_of(key, part, inputs)
            grads_of_part = optimizer.grads_of(of_part, part, grads)
            of_members = _wanted(optimizer.flat_optimizers[key], of_part, grads_of_part)
            for index, update in zip(part.param_indices, of_members, strict=True):
                updates[index] = update
        return updates
    old = list(map(_wide, inputs.params))
    wide_grads = grads.with_tensors(list(map(_wide, grads.tensors)), owned=False)
    wide = inputs.with_params_and_state(old, _wide_state(optimizer, inputs))
    new = _stepped(optimizer, wide, wide_grads)
    rows = zip(inputs.global_params, new, old, strict=True)
    return [from_local_like(like, after - before) for like, after, before in rows]


def _stepped(optimizer: Any, inputs: OptimizerInputs, grads: Gradients) -> list[Tensor]:
    if not isinstance(optimizer, AdaptedOptimizer):
        return optimizer.step_or_skip(optimizer.with_plan_and_settings(inputs), grads)[0]
    # The optimizer itself is called, as it may keep its state in a dtype of its own.
    params, opt_state = inputs.local_trees
    grad_tree = inputs.param_structure.unflatten(inputs.grads_of_params(grads))
    return inputs.param_structure.flatten_up_to(
        optimizer.optimizer.step(params, grad_tree, opt_state)[0]
    )


def _wide(leaf: Any) -> Any:
    """Cast floating and complex tensors to at least float64, or to float32 on a device without."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.detach().to(torch.promote_types(leaf.dtype, widest_float(leaf.device)))


def _wide_state(optimizer: Any, inputs: OptimizerInputs) -> Tree:
    """Return the state for the wide parameters. Numbers that the steps of a formula count keep
    their dtype.
    """
    opt_state = inputs.opt_state
    if not isinstance(optimizer, ParamGroupOptimizer):
        return pytree.map(_wide, opt_state)
    slots = {
        key: tree
        if isinstance(optimizer, KernelOrFormulaOptimizer) and optimizer.slot_spec.is_scalar(key)
        else pytree.map(_wide, tree)
        for key, tree in opt_state.slots.items()
    }
    return opt_state._replace(slots=slots)
