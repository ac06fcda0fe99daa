"""Checks of single laws: equal bits, unchanged arguments, no host sync, one graph, vmap; and the
shared parts of the batteries: the report of a broken law, quirks, and the checks that all have.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._checkpoint import from_state_dict, load, save, to_state_dict
from .._torch import private, tracing
from .._torch.donation import storage_pointer
from .._torch.reads import is_read
from .._tree import pytree
from .._tree.leaves import versions
from .._tree.matching import matching_leaves
from .._tree.pytree import join_names
from .._tree.scalars import protocol_violation
from .._tree.stacking import stack_states

# ---- bits and memory -----------------------------------------------------------------------------


def same_bits(a: Any, b: Any) -> bool:
    """Return True if structure, dtypes, shapes and bits are equal. A NaN equals the same NaN, and
    0.0 differs from -0.0.

    Args:
        a: A pytree.
        b: A pytree.

    Example:
        >>> import torch
        >>> same_bits({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
        False
    """
    leaves_a, spec_a = private.pytree.tree_flatten(a)
    leaves_b, spec_b = private.pytree.tree_flatten(b)
    return bool(spec_a == spec_b) and all(map(_same, leaves_a, leaves_b))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return type(x) is type(y) and bool(x == y)
    if not isinstance(y, Tensor) or (x.dtype, x.shape, x.layout) != (y.dtype, y.shape, y.layout):
        return False
    if x.is_meta or y.is_meta:  # no bits to compare
        return x.device == y.device
    if x.layout is not torch.strided:
        x, y = x.to_sparse().coalesce(), y.to_sparse().coalesce()
        return _same(x.indices(), y.indices()) and _same(x.values(), y.values())
    x, y = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (x, y))
    if x.is_complex():
        x, y = torch.view_as_real(x).contiguous(), torch.view_as_real(y).contiguous()
    if not x.is_floating_point():
        return torch.equal(x, y)
    # Of one size, because a DTensor with uneven shards cannot be flattened.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.view(bits), y.view(bits))


def _named(tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in private.pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            yield private.pytree.keystr(path), leaf


class Untouched:
    """A context manager that fails on exit if a tensor of `tree` was written to inside. It compares
    values, and versions, which also count a write that was undone.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __enter__(self) -> None:
        self.values = pytree.clone(self.tree)
        self.versions = versions([leaf for _, leaf in _named(self.tree)])

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            return
        now, before = list(_named(self.tree)), list(_named(self.values))
        changed = [name for name, _ in now] if len(now) != len(before) else []
        counts = zip(self.versions, versions([leaf for _, leaf in now]), strict=False)
        changed += [
            name
            for (name, leaf), (_, copy), (old, new) in zip(now, before, counts, strict=False)
            if not _same(leaf, copy) or old != new
        ]
        assert not changed, (
            f"an argument was written into: {join_names(changed)}. Fix: `x = x + 1` in place of "
            "`x += 1` and of methods that end in `_`; return the new value."
        )


def _storages(tree: Any) -> dict[int, str]:
    """Return the address of each storage of a tree, with the path of its tensor. Of a sparse tensor
    these are those of its values and indices.
    """
    parts = [(name, leaf.detach()) for name, leaf in _named(tree)]
    parts += [(n, t.indices()) for n, t in parts if t.is_sparse and t.is_coalesced()]
    pairs = [(storage_pointer(part), name) for name, part in parts if part.numel()]
    return {pointer: name for pointer, name in pairs if pointer}  # a meta tensor has none


def shares_memory(a: Any, b: Any) -> bool:
    """Return True if a tensor of `a` shares memory with one of `b`."""
    return bool(_storages(a).keys() & _storages(b).keys())


# ---- laws ----------------------------------------------------------------------------------------


def assert_pure(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)` and check that `fn` is pure: it does not write into arguments,
    gives the same bits when called again, does not draw from torch's generator, and returns tensors
    that share no memory with arguments.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result of the first call.

    Raises:
        AssertionError: `fn` is not pure.

    Example:
        >>> import torch
        >>> assert_pure(torch.add, torch.ones(1), 1)
        tensor([2.])
    """
    inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    generator = torch.get_rng_state()
    with Untouched(inputs):
        first = fn(*args, **kwargs)
    arguments = _storages(inputs)
    shared = [(name, arguments[key]) for key, name in _storages(first).items() if key in arguments]
    assert not shared, (
        f"result{shared[0][0]} shares memory with argument{shared[0][1]}. Fix: `.clone()` what is "
        "passed through, such as the other fields of `state._replace(...)`."
    )
    assert torch.equal(torch.get_rng_state(), generator), (
        "torch's global random generator was used, which is hidden state. Fix: pass a "
        "torch.Generator, or its state, as an argument."
    )
    second = fn(*args, **kwargs)
    assert same_bits(first, second), (
        f"the same arguments gave {short(first)}, and then {short(second)}. Fix: keep it in the "
        "state, and return the next state."
    )
    return first


def assert_sync_free(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)` and check that `fn` does not read a tensor's value on the host:
    `.item()`, `float(t)`, `bool(t)`, `if t:`, `.tolist()`, `.numpy()`, `print(t)`, `torch.equal`,
    or a result whose shape depends on values (`nonzero`, `unique`, boolean indexing, `coalesce`,
    `to_sparse`).

    Works on a CPU too, where such a read costs nothing. purescale's own code runs as on an
    accelerator, so a step does not read its flag.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result.

    Raises:
        AssertionError: A value was read; with the line that read it.

    Example:
        >>> import torch
        >>> assert_sync_free(torch.where, torch.tensor(True), 1.0, 2.0)
        tensor(1.)
    """
    reads: list[str] = []
    # On a CPU a kernel may read, which does not wait. Here all run as on an accelerator.
    dispatched, called = _noting(reads)
    with tracing.as_on_an_accelerator(), dispatched, called:
        result = fn(*args, **kwargs)
    assert not reads, (
        f"a tensor's value was read: {join_names(list(dict.fromkeys(reads)))}. Fix: "
        "`torch.where(flag, a, b)` in place of `if flag:` and of boolean indexing; read values "
        "where you log."
    )
    return result


def _noting(reads: list[str]) -> tuple[Any, Any]:
    """Return a mode that notes operators with a result on the host or a shape that depends on
    values, and one that notes reads without an operator.
    """

    class Dispatched(private.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if is_read(func, args, kwargs):
                _note(reads, func.overloadpacket.__name__)
            return func(*args, **kwargs)

    class Called(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__):
                _note(reads, func.__name__)
            return func(*args, **(kwargs or {}))

    return Dispatched(), Called()


_TORCH = os.path.dirname(torch.__file__)
_READS = {"_local_scalar_dense": "item, float, bool or int", "index": "boolean indexing"}


def _note(reads: list[str], what: str) -> None:
    """Add a read and the line of the user's code that made it."""
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(name, line).strip()
    reads.append(f"{_READS.get(what, what)} in {os.path.basename(name)}:{line}, `{code}`")


def assert_single_graph(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Any]:
    """Return `[fn(*call) for call in calls]`, with `fn` under `torch.compile(fullgraph=True)`, and
    check that it is traced without a break, once for all calls. Resets torch.compiler.

    Args:
        fn: The function.
        calls: The arguments of each call, as tuples.

    Returns:
        The results.

    Raises:
        AssertionError: Tracing fails, or a call is traced again.

    Example:
        >>> import torch
        >>> assert_single_graph(torch.neg, (torch.ones(1),), (torch.zeros(1),))
        [tensor([-1.]), tensor([-0.])]
    """
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    results = []
    for index, call in enumerate(calls):
        try:
            results.append(compiled(*call))
        except Exception as error:
            raise AssertionError(
                f"call {index} is not one graph: {str(error).splitlines()[0]} (see above). Fix: "
                "torch.where in place of `if`; do not read or print; no containers new to torch."
            ) from error
        assert len(graphs) <= 1, (
            f"call {index} was traced again. Fix: keep the number as a 0-d tensor; one dtype, one "
            "shape and one order of keys."
        )
    return results


def assert_vmap_equals_loop(
    fn: Callable[..., Any], *stacked: Any, rtol: float = 0.0, atol: float = 0.0
) -> Any:
    """Return `torch.vmap(fn)(*stacked)` and check that it equals `fn` of each member.

    Args:
        fn: The function.
        stacked: Its arguments; every tensor in them has a leading dimension of members.
        rtol: The relative tolerance; 0 with `atol` 0 for equal bits.
        atol: The absolute tolerance.

    Returns:
        The stacked results.

    Raises:
        AssertionError: torch.vmap fails, or a member differs.

    Example:
        >>> import torch
        >>> assert_vmap_equals_loop(torch.sum, torch.ones(2, 3))
        tensor([3., 3.])
    """
    tree = private.pytree
    sizes = {leaf.shape[0] for _, leaf in _named(stacked)}
    assert len(sizes) == 1, f"the arguments have leading dimensions {sorted(sizes)}, expected one"
    try:
        batched = torch.vmap(fn)(*stacked)
    except Exception as error:
        raise AssertionError(
            f"torch.vmap does not take it: {str(error).splitlines()[0]} (see above). Fix: "
            "torch.where in place of `if`; do not read values or write into an argument."
        ) from error
    for index in range(sizes.pop()):
        single = fn(*tree.tree_map_only(Tensor, lambda t, i=index: t[i], stacked))
        member = tree.tree_map_only(Tensor, lambda t, i=index: t[i], batched)
        if rtol or atol:
            torch.testing.assert_close(member, single, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert same_bits(member, single), (
                f"member {index} is {short(member)} under torch.vmap, {short(single)} by itself. "
                "Fix: count dimensions from the end; pass rtol= if only the order of sums differs."
            )
    return batched


def short(value: Any) -> str:
    """Return the `repr` on one line, cut after 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- batteries, each of which checks all laws of one object --------------------------------------

# The fixes for the laws that several batteries check.
FIXES = {
    "reads": "`torch.where(flag, a, b)` in place of `if flag:`; no `.item()`.",
    "pure": "new tensors in place of methods that end in `_`; keep what changes in the state.",
    "round_trip": "keep only tensors in the state: a loaded state has other tensor objects.",
    "compile": "torch.where in place of `if`; no attribute that changes; counts as 0-d tensors.",
    "vmap": "operations that torch.vmap has rules for: no `out=`, no `torch._foreach_*`.",
}


class Battery:
    """The checks of one object. A broken law that is among the quirks is noted without an error,
    and the check goes on.
    """

    kind: ClassVar[str]  # the name of the argument
    methods: ClassVar[dict[str, str]] = {}  # required method -> its arguments
    fixes: ClassVar[dict[str, str]]  # by law
    labels: ClassVar[tuple[str, ...]] = ()  # of the arguments of a call, for the report
    # The methods that check, each after those that it relies on. One that returns False is the last
    # one that runs.
    order: tuple[str, ...]

    def __init__(self, subject: Any, quirks: Sequence[str]) -> None:
        if what := protocol_violation(subject, *self.methods):
            expected = " and ".join(f"`{name}({args})`" for name, args in self.methods.items())
            raise TypeError(
                f"{self.kind} is {what}; expected an object with {expected}. Fix: an instance of a "
                "class with these methods; `from_torch` for a class of torch.optim."
            )
        self.subject, self.quirks = subject, frozenset(quirks)
        self.name = type(subject).__name__
        self.broken: set[str] = set()
        unknown = sorted(self.quirks - set(self.fixes))
        if unknown:
            raise ValueError(
                f"quirks has {unknown}; expected some of {', '.join(self.fixes)}. Fix: remove it."
            )

    def run(self) -> None:
        """Run all checks, then check that each quirk was seen."""
        for name in self.order:
            if getattr(self, name)() is False:
                break
        unbroken = sorted(self.quirks - self.broken)
        assert not unbroken, (
            f"{self.name} keeps {', '.join(unbroken)}, which quirks says it breaks. Fix: remove it."
        )

    def fail(
        self, law: str, came: str, should: str, *call: Any, cause: Any = None, fix: str = ""
    ) -> None:
        """Report that `law` is broken, with the arguments `call` of the method."""
        if law in self.quirks:
            self.broken.add(law)
            return
        arguments = dict(zip(self.labels, map(short, call), strict=False))
        rows = {**arguments, "came": came, "should": should}
        lines = [f"  {label:6}  {value}" for label, value in rows.items()]
        fix = fix or self.fixes[law]
        raise AssertionError(
            "\n".join([f"{self.name} breaks the law `{law}`", *lines, f"  Fix: {fix}"])
        ) from cause

    def attempt(self, law: str, should: str, function: Callable[..., Any], *call: Any) -> Any:
        """Return the function's result, or None if it raises and that is a quirk."""
        try:
            return function(*call)
        except Exception as error:
            came, _, fix = str(error).partition(" Fix: ")
            if not isinstance(error, AssertionError):
                came, fix = f"{type(error).__name__}: {error}", ""
            self.fail(law, " ".join(came.split()), should, *call, cause=error, fix=fix)
            return None

    # ---- what all have

    def check_alike(self, law: str, name: str, old: Any, new: Any, *call: Any) -> bool:
        """Return True if `new` is like `old` except for values."""
        try:
            matching_leaves(old, new, name, "what came", "")
        except (TypeError, ValueError) as error:
            came = str(error).partition(" Fix:")[0]
            self.fail(law, came, "as before, except for values", *call, cause=error)
            return False
        return True

    def check_bits(
        self, law: str, expected: Any, what: str, function: Callable[..., Any], *call: Any
    ) -> None:
        """Check that a function gives the expected bits, which are `what`."""
        should = f"{what}, {short(expected)}"
        result = self.attempt(law, should, function, *call)
        if result is not None and not same_bits(result, expected):
            self.fail(law, short(result), should, *call)

    def check_purity(self, function: Callable[..., Any], *calls: Any) -> None:
        """Check that the function does not read values or change arguments."""
        for law, check in (("reads", assert_sync_free), ("pure", assert_pure)):
            for call in calls:
                self.attempt(law, "not that", functools.partial(check, function), *call)

    def check_transforms(
        self,
        function: Callable[..., Any],
        calls: list[Any],
        compared: Callable[[Any], Any] = lambda result: result,
        rtol: float = 0.0,
        atol: float = 0.0,
    ) -> None:
        """Check that the function, compiled and under vmap, gives what it gives for each call.
        `compared` returns what of a result is compared.
        """

        def compiled(*_: Any) -> None:
            results = list(map(compared, assert_single_graph(function, *calls)))
            expected = [compared(function(*call)) for call in calls]
            torch.testing.assert_close(results, expected, rtol=rtol, atol=atol, equal_nan=True)

        def mapped(*_: Any) -> None:
            def of_member(*call: Any) -> Any:
                return compared(function(*call))

            assert_vmap_equals_loop(of_member, *stack_states(calls), rtol=rtol, atol=atol)

        self.attempt("compile", "the same as eager", compiled, *calls[0])
        self.attempt("vmap", "each member as by itself", mapped, *calls[0])


def saved_and_loaded(state: Any, like: Any) -> list[Any]:
    """Return three copies of the state: a clone, one through a dict and one through a file."""
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/state.pt", state)
        return [
            pytree.clone(state),
            from_state_dict(to_state_dict(state), like=like),
            load(f"{folder}/state.pt", like=like),
        ]
