"""Checkpoints: trees as state dicts and as files, atomic, loaded without running code; and where
a state dict differs from the expected one.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from ._torch.donation import can_write
from ._tree import pytree
from ._tree.leaves import describe
from ._tree.pytree import Tree, TreeT

Path: TypeAlias = str | os.PathLike[str]

_VERSION = 1
_VERSION_KEY = "purescale_version"


def to_state_dict(tree: Tree) -> dict[str, Any]:
    """Equal to `{"purescale_version": tensor(1), "tree": {...}}`: `tree` as nested dicts of tensors
    with string keys.

    A field of a NamedTuple has its name as key, an item of a list or tuple its position, an item of
    a dict its key: `d["tree"]["opt_state"]["slots"]["exp_avg"]["conv.weight"]`. `None` and
    containers without a tensor are left out; `from_state_dict` takes them from `like`. The tensors
    are those of `tree`, detached and in the same memory, so that
    `torch.distributed.checkpoint.load` loads in place, into a tree that you give up. The version is
    a tensor too, because anything else in a dict is restored by running a pickle.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: Two keys of a dict are the same string.

    Example:
        >>> from purescale import StaticScale
        >>> to_state_dict(StaticScale(8.0).init())["tree"]["scale"]
        tensor(8.)

    Source of the form: flax.serialization.to_state_dict.
    """
    return _to_state_dict(tree, "tree")


def _to_state_dict(tree: Tree, name: str) -> dict[str, Any]:
    d: dict[str, Any] = {_VERSION_KEY: torch.tensor(_VERSION, device="cpu")}
    for index, (keys, leaf) in enumerate(
        zip(pytree.key_paths(tree), pytree.flatten(tree)[0], strict=True)
    ):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.is_mkldnn:
            raise TypeError(
                f"{pytree.path(tree, name, index)} is {kind_of(leaf)}; a checkpoint holds dense, "
                "sparse and distributed tensors, in dicts, lists, tuples and NamedTuples. Fix: "
                "`torch.tensor(...)` for a number, `.to_dense()` for a tensor in mkldnn's layout; "
                "keep settings in the code that makes the state."
            )
        node: Any = d
        *outer, last = ("tree", *keys)
        for key in outer:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"{pytree.path(tree, name, index)} has the name of another leaf, "
                f"{'.'.join(keys)!r}. Likely cause: a dict with a key and its string, such as 0 "
                "and '0'. Fix: rename one."
            )
        node[last] = pytree.detach_unless_transformed(leaf)
    d.setdefault("tree", {})
    return d


def from_state_dict(d: Mapping[str, Any], like: TreeT) -> TreeT:
    """Equal to the `tree` of `d = to_state_dict(tree)`, in fresh memory, on the devices of `like`.
    Syncs with the host to read the version.

    Args:
        d: The state dict. Its values are not checked: NaN is loaded as NaN.
        like: A tree of the structure, shapes and dtypes of the saved one, such as a new state; its
            values are not used. Containers and `None` come from it, because `d` holds names and no
            types.

    Raises:
        ValueError: `d` does not match `like`. One error lists missing and unexpected entries and
            all differences in type, shape, dtype, layout or version, before anything is copied.

    Example:
        >>> from purescale import StaticScale
        >>> d = to_state_dict(StaticScale(8.0).init())
        >>> from_state_dict(d, like=StaticScale(1.0).init()).scale
        tensor(8.)

    Source of the form: flax.serialization.from_state_dict, which takes any shape and dtype.
    """
    return _from_state_dict("d", d, like, donate=False)


def _from_state_dict(name: str, d: Any, like: Tree, *, donate: bool) -> Tree:
    expected = _to_state_dict(like, "like")
    _check_version(name, d, expected[_VERSION_KEY])
    check_equal(name, d, expected)
    leaves, structure = pytree.flatten(like)
    loaded = [
        None
        if leaf is None
        else pytree.detach_unless_transformed(functools.reduce(operator.getitem, keys, d["tree"]))
        for keys, leaf in zip(pytree.key_paths(like), leaves, strict=True)
    ]
    # Two leaves of a file may share memory, as tied weights do: a later donation of one leaf would
    # reach the other.
    writable = donate and can_write([leaf for leaf in loaded if leaf is not None])
    return structure.unflatten(
        [
            None if leaf is None else leaf.to(like_leaf.device, copy=not writable)
            for leaf, like_leaf in zip(loaded, leaves, strict=True)
        ]
    )


def save(path: Path, tree: Tree) -> None:
    """Equal to `torch.save(to_state_dict(tree), path)`, whole or not at all. Syncs with the host
    and with the disk. Call it on one rank.

    A kill, a full disk or an error at any moment leaves either the old file or the new one, and an
    error leaves the old one. When the call returns, the new file also survives a power failure, if
    the disk can sync a directory. Each tensor has a checksum, the CRC-32 that `torch.save` writes,
    unless `torch.serialization.set_crc32_options(False)` was called.

    Args:
        path: `str` or `os.PathLike`; a link is followed. A new file takes the permission bits of
            the one that it replaces.
        tree: Any tree of tensors. An `nn.Parameter` is stored as a plain tensor.

    Raises:
        FileNotFoundError: The directory does not exist.
        ValueError: The path is not that of a file.
        TypeError: `path` is not a path, or a leaf is a `DTensor`, another subclass of tensors or a
            tensor without values, or `to_state_dict` refuses it.
        RuntimeError: Torch's own, inside of torch.vmap or torch.func.grad.
        OSError: The disk refuses it.

    Example:
        >>> import tempfile
        >>> from purescale import StaticScale
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/scaler.pt", StaticScale(8.0).init())
        ...     load(f"{folder}/scaler.pt", like=StaticScale(1.0).init()).scale
        tensor(8.)

    Source of the rule: Pillai et al., All File Systems Are Not Created Equal (OSDI 2014).
    """
    _check_path("save(path, tree)", path)
    target = _target(path)
    folder = os.path.dirname(target)
    d = _to_state_dict(tree, "tree")
    for leaf_path, leaf in zip(pytree.paths(tree, "tree"), pytree.flatten(tree)[0], strict=True):
        if leaf is not None and (type(leaf.detach()) is not Tensor or leaf.is_meta):
            raise TypeError(
                f"{leaf_path} is a {type(leaf).__name__}, {kind_of(leaf)}; a file holds plain "
                "tensors, because `load` runs no code from it. Fix: for a DTensor, of which this "
                "rank stores only a part, `torch.distributed.checkpoint.save(to_state_dict(tree), "
                f"checkpoint_id={os.fspath(path)!r})`; for another subclass the tensors that it "
                "wraps; for a tensor without values one that is filled."
            )

    temporary = os.path.join(folder, f".purescale-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):  # a new file, or a disk without permissions
                shutil.copymode(target, temporary)
            _write_file(d, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(folder)


def load(path: Path, like: TreeT) -> TreeT:
    """Equal to `from_state_dict(torch.load(path, weights_only=True), like)`: the tree that `save`
    wrote. Syncs with the host and the disk.

    Runs no code from the file, and compares every tensor with its checksum first. A file of
    `torch.save(to_state_dict(tree), path)` has the same checksums. `like` is as in
    `from_state_dict`; its tensors are not written to.

    Raises:
        ValueError: The file is damaged, truncated or of another kind, or it does not match `like`
            (the error lists the paths that differ).
        OSError: The file cannot be opened.

    Example:
        >>> import tempfile
        >>> from purescale import StaticScale
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/scaler.pt", {"scaler": StaticScale(8.0).init(), "none": None})
        ...     like = {"scaler": StaticScale(1.0).init(), "none": None}
        ...     load(f"{folder}/scaler.pt", like=like)["scaler"].scale
        tensor(8.)
    """
    _check_path("load(path, like=tree)", path)
    name = os.fsdecode(path)
    with open(name, "rb") as file:
        d = _read_file(name, file)
    return _from_state_dict(f"torch.load({name!r})", d, like, donate=True)


# ---- reading a state dict ------------------------------------------------------------------------


def _check_version(name: str, d: Any, expected: Tensor) -> None:
    """Refuse a dict that `to_state_dict` did not make, or that of another version."""
    version = d.get(_VERSION_KEY) if isinstance(d, Mapping) else None
    if not isinstance(version, Tensor) or kind_of(version) != kind_of(expected):
        raise ValueError(
            f"{name} is not a state dict of purescale: it is {pytree.describe_argument(d)}, "
            f"expected {_VERSION_KEY!r} (a 0-d int64 tensor) and 'tree'. Likely cause: the state "
            "dict of a module or a torch optimizer. Fix: the dict that `to_state_dict(tree)` "
            "returned; for a torch optimizer's, `optimizer.from_state_dict(d, params)`."
        )
    if int(version) != _VERSION:
        raise ValueError(
            f"{name}[{_VERSION_KEY!r}] is {int(version)}, this purescale reads version {_VERSION}. "
            "Likely cause: a newer purescale wrote it. Fix: `pip install .` in a newer copy of the "
            "repository."
        )


# ---- the file ------------------------------------------------------------------------------------


def _write_file(d: dict[str, Any], file: BinaryIO) -> None:
    """`torch.save(d, file)` of the values alone, which raises the error of the disk."""
    storages: set[int] = set()
    d = pytree.map(lambda leaf: _without_other_values(leaf, storages), d)
    try:
        torch.save(d, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's own error does not say "disk full"
            raise error.__context__ from None
        raise


def _without_other_values(leaf: Tensor, storages: set[int]) -> Tensor:
    """Return a copy of a view of more memory, and of a leaf whose memory is in `storages`; add the
    memory of another leaf to it. torch.save writes the whole memory behind a view, which for a
    member of an ensemble is the ensemble, and refuses one memory in two dtypes.
    """
    if leaf.layout is torch.strided:
        storage = leaf.untyped_storage()
        if storage.nbytes() <= leaf.nbytes and storage.data_ptr() not in storages:
            storages.add(storage.data_ptr())
            return leaf
    return leaf.clone()


def _read_file(name: str, file: BinaryIO) -> Any:
    """Return what `file` holds. Refuse one in which a record differs from its checksum."""
    try:
        archive = zipfile.ZipFile(file)
        records = archive.infolist()
        damaged = [record.filename for record in records if _is_misread(record)]
        if not damaged and any(record.CRC for record in records):
            damaged += filter(None, [archive.testzip()])
        if not damaged:
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Warning:  # of torch about the tensors, where warnings are errors
        raise
    except Exception as error:
        raise ValueError(
            f"load: {name!r} is not a file that purescale.save wrote ({type(error).__name__}). "
            "Likely cause: a truncated or damaged file, another kind of file, or a pickle with "
            "code in it, which is never run. Fix: the file that `save(path, tree)` wrote, another "
            "copy of it, or the checkpoint before it."
        ) from error
    raise ValueError(
        f"load: {name!r} is damaged: its record {damaged[0]} is not what was saved. Likely "
        "cause: bits that changed on the disk, in memory or in a copy. Fix: another copy of the "
        "file, or the checkpoint before it."
    )


_IS_DIRECTORY = 0x10  # of the attributes of MS-DOS


def _is_misread(record: zipfile.ZipInfo) -> bool:
    """Return True if torch alone takes a record for a directory. It would return memory into which
    nothing was read, and zipfile goes by the name.
    """
    return bool(record.external_attr & _IS_DIRECTORY) and not record.is_dir()


def _check_path(call: str, path: Any) -> None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"path is {type(path).__name__}, expected a str or an os.PathLike. Fix: `{call}`, the "
            "path first."
        )


def _target(path: Path) -> str:
    """Return the absolute path of the file, with links followed. Refuse what is not a file."""
    name = os.fsdecode(path)
    target = os.path.realpath(name)
    # "runs/", "runs/.", "": names of directories, of missing ones too.
    if os.path.basename(name) in ("", os.curdir, os.pardir) or (
        os.path.exists(target) and not os.path.isfile(target)
    ):
        raise ValueError(
            f"save: {path!r} is a directory or a device; expected the name of a file. "
            f"Fix: `save(os.path.join({name!r}, 'state.pt'), tree)`."
        )
    return target


def _sync_directory(folder: str) -> None:
    """Sync the rename, which a power failure could undo, where the system allows it: Windows, some
    network disks and directories that may not be read do not.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- where two state dicts differ ----------------------------------------------------------------


def check_equal(name: str, d: Any, expected: dict[str, Any]) -> None:
    """Refuse a `d` whose keys, shapes or dtypes differ from `expected`, listing such paths."""
    differences: dict[str, list[str]] = {}
    for kind, text in _differences(name, d, expected):
        differences.setdefault(kind, []).append(text)
    if not differences:
        return
    lists = "; ".join(f"{kind}: {pytree.join_names(x, 20)}" for kind, x in differences.items())
    raise ValueError(
        f"{name} does not match like: {lists}. Likely cause: the state of another model, of this "
        "one in another dtype or with other parameters frozen, of another optimizer, rule or "
        "guard, or of other settings. Fix: make `like` as the saved tree was made, "
        "`init_train_state(params, buffers, optimizer, rule, rng)` with the same arguments; change "
        "what was loaded afterwards."
    )


def _differences(path: str, got: Any, expected: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind of each difference, and its text. Only paths of `expected` are followed,
    because a dict from a file may contain itself.
    """
    if isinstance(got, Mapping) and isinstance(expected, dict):
        for key, child in expected.items():
            if key in got:
                yield from _differences(f"{path}[{key!r}]", got[key], child)
            else:
                yield "missing", f"{path}[{key!r}]"
        for key in got:
            if key not in expected:
                yield "not in like", f"{path}[{key!r}]"
    elif isinstance(expected, dict):
        names = pytree.join_names(list(map(repr, expected)))
        yield "different", f"{path} is {kind_of(got)}, expected a dict of {names}"
    elif kind_of(got) != kind_of(expected):
        yield "different", f"{path} is {kind_of(got)}, expected {kind_of(expected)}"


def kind_of(value: Any) -> str:
    """Return dtype, shape, layout and placements of a tensor, or the type of another object, whose
    repr may be endless or raise.
    """
    return describe(value) if isinstance(value, Tensor) else type(value).__name__
