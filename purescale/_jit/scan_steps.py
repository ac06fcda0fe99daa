"""Many steps in one call: over a jitted step one graph, whatever the number of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._jit.jit import FlatFunction, Jitted, Program, check_arguments, form_of, resolved
from .._jit.pure_graph import scanned, trace
from .._torch.tracing import traced_or_recorded
from .._tree import pytree
from .._tree.leaves import is_constant
from .._tree.matching import matching_leaves
from .._tree.pytree import Leaves, Tree, TreeDef
from .._tree.stacking import num_members, stacked

Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


def scan_steps(step: Step, state: Tree, batches: Tree) -> tuple[Tree, Tree]:
    """Equal to the loop below: many steps over stacked batches, in order.

        infos = []
        for i in range(number_of_batches):
            state, info = step(state, tree_map(lambda leaf: leaf[i], batches))
            infos.append(info)
        return state, tree_map(lambda *leaves: torch.stack(leaves), *infos)

    If `step` was made by `jit`, all steps run in one graph, by torch's `scan`. It is compiled once
    for any number of steps, with inductor's default mode, and a step within it costs less than a
    call of `step`. Any other step, one of `jit(..., backend="aot_eager")`, and all of them under
    `torch.vmap`, torch.compile and jit, run as that loop. For an ensemble map the step:
    `scan_steps(jit(torch.vmap(step)), states, batches)`.

    Args:
        step: A pure function of `(state, batch)` that returns `(state, info)`: the state with its
            structure, shapes, strides and dtypes, and a tree of tensors.
        state: The state before the first step. It is not changed, also if `step` donates.
        batches: A tree of tensors [number of steps, ...], such as `stack_states(list_of_batches)`.
            A list in it is a part of each batch, as a window of microbatches. `None` stays `None`.

    Returns:
        The state after the last step, and the infos stacked, [number of steps, ...]. What is not a
        tensor in them and the same in all steps is returned once.

    Raises:
        ValueError: Naming the leaf, if tensors of `batches` differ in their first dimension, or the
            step returns a state that differs in more than values.
        TypeError: `step` does not return a pair.

    Example:
        >>> import torch
        >>> def step(total, x):
        ...     return total + x, {"total": total + x}
        >>> scan_steps(step, torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
        (tensor(6.), {'total': tensor([1., 3., 6.])})

    Source of the form: `jax.lax.scan`.
    """
    leaves, structure = pytree.flatten(batches)
    number = _num_batches(batches, leaves)
    try:
        if isinstance(step, Jitted) and step.backend == "inductor" and not traced_or_recorded():
            stacks = [leaf for leaf in leaves if leaf is not None]
            return _in_one_graph(step, state, batches, len(stacks))
        return _in_a_loop(step, state, leaves, structure, number)
    except Exception as error:
        if isinstance(batches, list):
            error.add_note(
                f"batches is a list of {len(batches)}, and each of {number} steps was given a list "
                "of as many rows. If they are batches, stack them, `scan_steps(step, state, "
                "stack_states(batches))`; for one step over all, `train_step(state, batches, ...)`."
            )
        raise


def _in_a_loop(
    step: Step, state: Tree, leaves: Leaves, structure: TreeDef, number: int
) -> tuple[Tree, Tree]:
    # A step may overwrite the state that it is given.
    state = pytree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
    infos = []
    for index in range(number):
        batch = structure.unflatten(
            [leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        )
        state, info = _checked(step, state, batch)
        infos.append(info)
    cause = (
        "Likely cause: an info whose shape depends on the step, or a number of Python that differs "
        "between steps. Fix: for a number `torch.tensor(number)`."
    )
    return state, stacked("infos", infos, cause)


def _in_one_graph(step: Jitted, state: Tree, batches: Tree, num_stacks: int) -> tuple[Tree, Tree]:
    leaves, structure = pytree.flatten((state, batches))
    tensors = resolved(check_arguments((state, batches), leaves))
    carried = len(tensors) - num_stacks
    stacks = [stack.contiguous() for stack in tensors[carried:]]
    first = [*tensors[:carried], *(stack[0] for stack in stacks)]

    def make() -> Program:
        flat = FlatFunction(functools.partial(_checked, step.fn), structure, leaves)
        graph = trace(flat, first, literals=False)
        return Program(first, graph, scanned(graph, first, carried), flat.results)

    program = step.scans.of(first, form_of(structure, leaves, tensors), make)
    return program([*tensors[:carried], *stacks])


def _checked(step: Step, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Return the results of one step, the tensors of the state with the strides of the old ones."""
    new_state, info = pair_of(step(state, batch))
    old, new, structure = matching_leaves(
        state, new_state, "state", "the state that the step returned", _REASON
    )
    new = [
        b if is_constant(a) or a.stride() == b.stride() else torch.empty_like(a).copy_(b)
        for a, b in zip(old, new, strict=True)
    ]
    return structure.unflatten(new), info


_REASON = "The state after a step is the state before the next one: both must match."


def _num_batches(batches: Tree, leaves: Leaves) -> int:
    """Return the first dimension of all tensors. Refuse what has no batch, or no number of them."""
    if not any([isinstance(leaf, Tensor) for leaf in leaves]):
        raise ValueError(
            f"batches is {pytree.describe_argument(batches)} without a tensor; the first dimension "
            "of its tensors is the number of steps. Fix: `stack_states(list_of_batches)`, of a "
            "loader `stack_states(itertools.islice(loader, 100))`, of arrays `tree_map("
            "torch.as_tensor, batches)`; for n steps without data `torch.arange(n)`."
        )
    cause = (
        "Likely cause: batches that are not stacked, or a tensor that is the same in all steps. "
        "Fix: `stack_states(list_of_batches)`, all of one size, or a loop, `for batch in "
        "list_of_batches: state, info = step(state, batch)`; for the same in all steps, a tensor "
        "that `step` closes over."
    )
    number = num_members(batches, leaves, "batches", cause)
    if not number:
        raise ValueError("batches has no batch: its tensors have a first dimension of 0.")
    return number


def pair_of(returned: Tree) -> tuple[Tree, Tree]:
    """Refuse what is not a pair of a state and an info."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"the step returned {pytree.describe_argument(returned)}; expected a pair, the next "
            "state and an info. Fix: `return state, info`, with `info = ()` for none."
        )
    return returned
