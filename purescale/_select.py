"""Old or new: a tree as it was where the step is bad, else as it became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _columns, _dtensor, _leaf, _tree
from ._autocast import outside_autocast
from ._leaf import parts
from ._torch import foreach
from ._tree import Flat, Leaves, Tree


@outside_autocast()
def select(found_inf: Tensor | bool, old: Tree, new: Tree) -> Tree:
    """Equal to `tree_map(lambda o, n: torch.where(found_inf, o, n), old, new)`: `old` where the
    step is bad, else `new`.

    For anything of your own that must stand still on a skipped step: an EMA of the weights,
    buffers, a schedule's state. It selects and never multiplies, so a NaN in `new` cannot leak
    through (`0 * nan` is `nan`).

    Shapes and dtypes: `found_inf` is 0-d bool, True = bad. The leaves of `old` and `new` agree in
    shape, dtype and layout, sparse ones in how many values they hold too (torch takes those in
    eager mode only). A leaf that is no tensor must be the same in both. The result shares no memory
    with either.

    Raises `ValueError` when the trees differ in structure or two leaves in shape or dtype.

    >>> import torch
    >>> select(torch.tensor(True), {"ema": torch.tensor(1.0)}, {"ema": torch.tensor(float("nan"))})
    {'ema': tensor(1.)}

    Source of the rule: `select_tree` of jmp.
    """
    return where(found_inf, old, new, donate=False)


def where(
    found_inf: Tensor | bool,
    old: Tree,
    new: Tree,
    *,
    donate: bool,
    keep: Sequence[Tensor] = (),
    spent: bool = False,
    flat: Flat | None = None,
) -> Tree:
    """`select` that may write its result into the tensors of `old`, but for those in the memory of
    `keep`.

    `spent`: every tensor of `new` stands in memory that nobody else sees, and may hold anything
    afterwards. `flat`: of `old`, where it is known.
    """
    leaves, others, structure = _tree.paired(old, new, "old", "new", flat=flat)
    return structure.unflatten(
        choose(found_inf, leaves, others, donate=donate, keep=keep, spent=spent)
    )


def choose(
    found_inf: Tensor | bool,
    old: Leaves,
    new: Leaves,
    *,
    donate: bool,
    keep: Sequence[Tensor] = (),
    spent: bool = False,
) -> Leaves:
    """`where` of leaves that are paired already. Nothing is chosen where `found_inf` is not a
    tensor but False.
    """
    shards = _dtensor.shards(old)
    leaves, others = shards.local, _dtensor.shards(new).local

    replacements = [b for a, b in zip(leaves, others, strict=True) if b is not a]
    mine = _tree.writable(leaves, [*replacements, *keep]) if donate else [False] * len(leaves)
    plain = _tree.traced() or (
        torch.is_grad_enabled()
        and any(isinstance(t, Tensor) and t.requires_grad for t in (*leaves, *others))
    )
    if found_inf is False and not plain:
        return shards.back(_taken(leaves, others, mine, spent=spent))
    bad = _tree.flag(found_inf, like=next((leaf for leaf in old if isinstance(leaf, Tensor)), None))
    compiling = torch.compiler.is_compiling()
    results = list(leaves)
    columns: dict[Any, list[int]] = {}
    in_place: list[tuple[int, Tensor]] = []
    # Whatever is not written in place comes first: it may read what is about to be overwritten.
    spent = spent and not plain
    for index, (a, b, own) in enumerate(zip(leaves, others, mine, strict=True)):
        if not isinstance(a, Tensor) or (own and b is a and not compiling):
            continue
        kind = None
        if not plain and (spent or _columns.counts_launches(a)):
            kind = _columns.chosen_together(a, b, own=own and spent)
        if kind is not None:
            columns.setdefault(kind, []).append(index)
        elif not compiling and (own or (spent and _columns.is_plain(b))):
            in_place.append((index, a if own else b))
        else:
            results[index] = _either(bad, a, b)
            if own and b is not a:
                in_place.append((index, a))
    for index, target in in_place:
        if compiling:
            results[index] = target.copy_(results[index])
        else:
            results[index] = torch.where(bad, leaves[index], others[index], out=target)
    for places in columns.values():
        pairs = [leaves[i] for i in places], [others[i] for i in places]
        chosen = _columns.choose(bad, *pairs, [mine[i] for i in places], spent=spent)
        for index, leaf in zip(places, chosen, strict=True):
            results[index] = leaf
    return shards.back(results)


def _taken(old: Sequence[Any], new: Sequence[Any], mine: Sequence[bool], *, spent: bool) -> Leaves:
    """`new` in memory of its own, which is that of `old` where it is `mine`, and where it is
    `spent` its own already.
    """
    if spent:
        return list(new)
    results, listed = list(old), _columns.are_plain([*old, *new])
    moved = [
        index
        for index, (a, b) in enumerate(zip(old, new, strict=True))
        if isinstance(b, Tensor) and not (mine[index] and b is a)
    ]
    into = [index for index in moved if mine[index] and listed]
    apart = [index for index in moved if not (mine[index] and listed)]
    if into:
        foreach.copy_([old[index] for index in into], [new[index] for index in into])
    for index, copy in zip(apart, _columns.clone([new[i] for i in apart]), strict=True):
        results[index] = copy
    return results


def _either(bad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.where(bad, a, b)`, of sparse tensors part by part."""
    if a.layout not in _leaf.SPARSE:
        return torch.where(bad, a, b)
    if _tree.under_transform():
        raise ValueError(
            f"a tensor of layout {a.layout} cannot be chosen under torch.func or vmap, where torch "
            "cannot put sparse tensors together. Likely cause: a buffer like a graph's adjacency. "
            "Cure: keep it dense, or out of the module and hand it to the forward."
        )
    *indices, values = (torch.where(bad, x, y) for x, y in zip(parts(a), parts(b), strict=True))
    # To check what is consistent already would read it.
    if a.layout is torch.sparse_coo:
        together = a.is_coalesced() and b.is_coalesced()
        return torch.sparse_coo_tensor(
            indices[0], values, a.shape, is_coalesced=together, check_invariants=False
        )
    return torch.sparse_compressed_tensor(
        indices[0], indices[1], values, a.shape, layout=a.layout, check_invariants=False
    )
