"""The place of each parameter in its tree, by which trees like the parameters become lists."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._tree import pytree
from .._tree.matching import check_names, check_parameters
from .._tree.pytree import DictDef, FlatTree, Leaves, Tree, TreeDef


class ParamStructure(NamedTuple):
    """The place of each parameter in a tree, which may have None. Lists have an entry for each
    parameter that is not None.
    """

    structure: TreeDef
    num_leaves: int  # of this structure
    leaf_indices: Sequence[int]  # of the parameters among these leaves
    names: list[str]  # dotted
    grad_indices: Sequence[int | None]  # among the gradients; None for one without a gradient

    @classmethod
    def of(cls, flat_params: FlatTree) -> ParamStructure:
        """Return the structure of parameters that all have a gradient."""
        names, leaves = pytree.dotted_names(flat_params.tree), flat_params.leaves
        is_present = [leaf is not None for leaf in leaves]
        return cls.of_names(flat_params.structure, names, is_present, is_present)

    @classmethod
    def of_names(
        cls,
        structure: TreeDef,
        names: list[str],
        is_present: Sequence[bool],
        has_grad: Sequence[bool],
    ) -> ParamStructure:
        """Return the structure of a tree whose leaves have these names: those that are present are
        parameters, the others None.
        """
        indices = [index for index, present in enumerate(is_present) if present]
        numbers = itertools.count()
        return cls(
            structure,
            len(names),
            leaf_indices=indices,
            names=[names[index] for index in indices],
            grad_indices=[next(numbers) if has_grad[index] else None for index in indices],
        )

    def take(self, indices: Collection[int]) -> ParamStructure:
        """Return the structure of the parameters with these indices, in a flat dict."""
        names = [self.names[index] for index in indices]
        has_grad = [self.grad_indices[index] is not None for index in indices]
        all_present = [True] * len(names)
        return ParamStructure.of_names(DictDef(tuple(names)), names, all_present, has_grad)

    def flatten_up_to(self, tree: Tree) -> Leaves:
        """Return the leaves of a tree like the parameters, without those of a parameter None."""
        return self.pick_present(self.structure.flatten_up_to(tree))

    def pick_present(self, leaves: Leaves) -> Leaves:
        """Return those of all leaves that belong to a parameter that is not None."""
        if len(leaves) == len(self.leaf_indices):
            return leaves
        return [leaves[index] for index in self.leaf_indices]

    def with_none(self, values: Sequence[Any], like: Tree = None) -> Leaves:
        """Return a leaf for each one of the tree, the inverse of `pick_present`. In place of a
        parameter None it has what `like` has there, by default None.
        """
        if len(values) == self.num_leaves:
            return list(values)
        leaves = [None] * self.num_leaves
        if like is not None:
            others = self.structure.flatten_up_to(like)
            leaves = [None if isinstance(other, Tensor) else other for other in others]
        for index, value in zip(self.leaf_indices, values, strict=True):
            leaves[index] = value
        return leaves

    def unflatten(self, values: Sequence[Any], like: Tree = None) -> Tree:
        """Return a tree of `with_none(values, like)`, the inverse of `flatten_up_to`."""
        return self.structure.unflatten(self.with_none(values, like))


def named_params(params: Tree) -> dict[str, Tensor]:
    """Return the parameters that are not None by dotted name, or refuse a leaf that is not one."""
    flat, names = FlatTree.of(params), pytree.dotted_names(params)
    check_names(names)
    check_parameters(flat)
    pairs = zip(names, flat.leaves, strict=True)
    return {name: leaf for name, leaf in pairs if leaf is not None}


def foreign_parameters_error(in_state: list[str], in_params: list[str]) -> ValueError:
    """Return the error of a state for other parameters."""
    return ValueError(
        f"opt_state knows the parameters {pytree.join_names(in_state)}, params has "
        f"{pytree.join_names(in_params)}. Fix: `opt_state = optimizer.init(params)` for these "
        "params."
    )
