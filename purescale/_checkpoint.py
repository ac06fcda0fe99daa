"""Checkpoints: trees as state dicts and as files, atomic, loaded without running code."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import logging
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from ._torch import dtensor, private
from ._torch.donation import can_write
from ._tree import tree as _tree
from ._tree.mismatch import check_equal, key_of, kind_of
from ._tree.tree import Tree, TreeT

Path: TypeAlias = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")

_VERSION = 1
_VERSION_KEY = "purescale_version"
_ABANDONED = 3600.0  # seconds without a write
_MARK = b"purescale crc32 "  # with four bytes after it the comment of torch.save's zip
_END = b"PK\5\6"  # the start of the last 22 bytes of a zip without a comment
_NO_COMMENT = b"\0\0"  # its end, a length; any other length means that a comment was cut off
_SOUND = 0x2144DF1C  # the CRC-32 of anything that ends with its CRC-32


def _within_depth(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse trees nested more deeply than Python, optree or torch.save can follow."""

    @functools.wraps(function)
    def within_depth(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except RecursionError as error:
            raise ValueError(
                f"{function.__name__}: the tree has too many levels: {error}. A file holds about "
                "400, a dict about 900. Likely cause: a container that contains itself, or a list "
                "linked by tuples. Fix: a flat dict, with a name such as 'a.b.c' for each leaf."
            ) from None

    return within_depth


@_within_depth
def to_state_dict(tree: Tree) -> dict[str, Any]:
    """Equal to `{"purescale_version": tensor(1), "tree": {...}}`: `tree` as nested dicts of tensors
    with string keys.

    A field of a NamedTuple has its name as key, an item of a list or tuple its position, an item of
    a dict its key: `d["tree"]["opt_state"]["slots"]["conv.weight"]["exp_avg"]`. `None` and
    containers without a tensor are left out; `from_state_dict` takes them from `like`. The tensors
    are those of `tree`, detached and in the same memory, so that
    `torch.distributed.checkpoint.load` loads in place, into a tree that you give up. The version is
    a tensor too, because anything else in a dict is restored by running a pickle.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: Two keys of a dict are the same string, or the tree is nested too deeply.

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
        zip(_tree.keys(tree), _tree.flatten(tree)[0], strict=True)
    ):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.is_mkldnn:
            raise TypeError(
                f"{_tree.paths(tree, name)[index]} is {kind_of(leaf)}; a checkpoint holds dense, "
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
                f"{_tree.paths(tree, name)[index]} has the name of another leaf, "
                f"{'.'.join(keys)!r}. Likely cause: a dict with a key and its string, such as 0 "
                "and '0'. Fix: rename one."
            )
        node[last] = _tree.off_graph(leaf)
    d.setdefault("tree", {})
    return d


@_within_depth
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
    leaves, structure = _tree.flatten(like)
    found = [
        None if leaf is None else _tree.off_graph(_at(d["tree"], keys))
        for keys, leaf in zip(_tree.keys(like), leaves, strict=True)
    ]
    # Two leaves of a file may share memory, as tied weights do: a later donation of one leaf would
    # reach the other.
    writable = donate and can_write([leaf for leaf in found if leaf is not None])
    return structure.unflatten(
        [
            None if leaf is None else leaf.to(old.device, copy=not writable)
            for leaf, old in zip(found, leaves, strict=True)
        ]
    )


@_within_depth
def save(path: Path, tree: Tree) -> None:
    """Equal to `torch.save(to_state_dict(tree), path)` with a checksum, whole or not at all. Syncs
    with the host and with the disk. Call it on one rank.

    A kill, a full disk or an error at any moment leaves either the old file or the new one. When
    the call returns, the new file also survives a power failure, if the disk can sync a directory
    and this user may read it. `torch.load` reads the file too: the checksum, of every byte, is in
    the comment of the zip that `torch.save` writes.

    Args:
        path: `str` or `os.PathLike`; a link is followed. A new file takes the permissions of the
            one that it replaces, and its owner if this user may set it.
        tree: Any tree of tensors. An `nn.Parameter` is stored as a plain tensor.

    Raises:
        FileNotFoundError: The directory does not exist.
        ValueError: The path is not that of a file.
        TypeError: A leaf is a `DTensor`, another subclass of tensors or a tensor without values, or
            `to_state_dict` refuses it.
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
    target = _target(path)
    folder = os.path.dirname(target)
    d = _to_state_dict(tree, "tree")  # raises before anything is written
    for at, leaf in zip(_tree.paths(tree, "tree"), _tree.flatten(tree)[0], strict=True):
        if leaf is not None:
            _check_storable(at, leaf, path)

    temporary = os.path.join(folder, f".purescale-{secrets.token_hex(8)}.tmp")
    old = os.stat(target) if os.path.exists(target) else None
    allowed = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    try:
        # It must never be readable by more users than the final file.
        with open(
            temporary,
            "x+b",
            opener=lambda name, flags: os.open(name, flags, allowed & 0o666 | 0o600),
        ) as file:
            _remove_abandoned(folder, temporary)
            if old is not None:
                _inherit(temporary, target, old)
            _write(_tree.map(_separate_dtypes(), d), file)
            _seal(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(folder)


@_within_depth
def load(path: Path, like: TreeT) -> TreeT:
    """Equal to `from_state_dict(torch.load(path, weights_only=True), like)`: the tree that `save`
    wrote. Syncs with the host and the disk.

    Runs no code from the file, and checks every byte of it first. A file without a checksum, from
    `torch.save(to_state_dict(tree), path)` or an older purescale, is loaded with a warning to the
    logger "purescale". `like` is as in `from_state_dict`; its tensors are not written to.

    Raises:
        ValueError: The file is damaged (the error names the leaf), truncated or of another kind, or
            it does not match `like` (the error lists the paths that differ).
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
    name = os.fsdecode(path)
    with open(name, "rb") as file:
        checked = _check_seal(name, file)
        try:
            d = _read(file)
        except Warning:  # of torch about the tensors, where warnings are errors
            raise
        except Exception as error:
            raise _not_a_checkpoint(name, type(error).__name__) from error
    if not checked:
        logging.getLogger("purescale").warning(
            "load: %r has no checksum, so damage would go unnoticed; `save` writes one",
            name,
        )
    return _from_state_dict(f"torch.load({name!r})", d, like, donate=True)


# ---- reading a state dict ------------------------------------------------------------------------


def _check_version(name: str, d: Any, expected: Tensor) -> None:
    version = d.get(_VERSION_KEY) if isinstance(d, Mapping) else None
    if not isinstance(version, Tensor) or kind_of(version) != kind_of(expected):
        what = (
            f"has the keys {_tree.join_names([key_of(key) for key in d])}"
            if isinstance(d, Mapping)
            else f"is {kind_of(d)}"
        )
        raise ValueError(
            f"{name} is not a state dict of purescale: it {what}, expected {_VERSION_KEY!r} (a 0-d "
            "int64 tensor) and 'tree'. Likely cause: the state dict of a module or a torch "
            "optimizer. Fix: the dict that `to_state_dict(tree)` returned; for a torch "
            "optimizer's, `optimizer.from_state_dict(d, params)`."
        )
    if int(version) != _VERSION:
        raise ValueError(
            f"{name}[{_VERSION_KEY!r}] is {int(version)}, this purescale reads version {_VERSION}. "
            "Likely cause: a newer purescale wrote it. Fix: `pip install .` in a newer copy of the "
            "repository."
        )


def _at(node: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        node = node[key]
    return node


# ---- leaves that a file can hold -----------------------------------------------------------------


def _check_storable(at: str, leaf: Tensor, path: Path) -> None:
    """Refuse leaves that `load` cannot restore as plain tensors. `at`: the path of the leaf."""
    if dtensor.is_dtensor(leaf):
        raise TypeError(
            f"{at} is a DTensor: this rank stores only a part of it, and one rank writes the file. "
            "Fix: `torch.distributed.checkpoint.save(to_state_dict(tree), "
            f"checkpoint_id={os.fspath(path)!r})`."
        )
    kind = type(leaf.detach())
    if kind is not Tensor:
        raise TypeError(
            f"{at} is a {kind.__name__}, a subclass of tensors; a file holds plain ones, because "
            f"`load` runs no code from it. Fix: `{at}.as_subclass(torch.Tensor)`, or save the "
            "tensors that it wraps."
        )
    if leaf.is_meta:
        raise TypeError(
            f"{at} is {kind_of(leaf)}; a file holds values. Fix: `torch.empty_like({at}, "
            "device='cpu')`, and fill it."
        )
    try:
        for part in _parts(leaf):
            part.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise TypeError(
            f"{at} has no memory of its own. Likely cause: `save` inside torch.vmap, "
            "torch.func.grad or a trace. Fix: return the state from the transformed function and "
            "save it there."
        ) from error


def _parts(leaf: Tensor) -> list[Tensor]:
    """Return the dense tensors that `leaf` stores."""
    if leaf.layout is torch.strided:
        return [leaf]
    if leaf.layout is torch.sparse_coo:
        return [private.indices(leaf), private.values(leaf)]
    by_row = leaf.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer, inner = (
        (leaf.crow_indices(), leaf.col_indices())
        if by_row
        else (leaf.ccol_indices(), leaf.row_indices())
    )
    return [outer, inner, leaf.values()]


def _compact(leaf: Any) -> Any:
    """Return a copy of a tensor that is a view of more memory, because torch.save would write all
    of it: for one member of an ensemble, the whole ensemble.
    """
    if leaf.layout is torch.strided and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone()
    return leaf


def _separate_dtypes() -> Callable[[Tensor], Tensor]:
    """Return `_compact` for one file, in which torch.save takes a memory in one dtype only."""
    dtypes: dict[int, torch.dtype] = {}

    def separated(leaf: Tensor) -> Tensor:
        leaf = _compact(leaf)
        parts = [(part.untyped_storage().data_ptr(), part.dtype) for part in _parts(leaf)]
        if any(dtypes.get(memory, dtype) is not dtype for memory, dtype in parts):
            return leaf.clone()
        dtypes.update(parts)
        return leaf

    return separated


# ---- the checksum --------------------------------------------------------------------------------


def _seal(file: BinaryIO) -> None:
    """Append a comment to the zip in `file` that ends with the CRC-32 of all bytes before."""
    file.seek(-2, os.SEEK_END)
    file.write((len(_MARK) + 4).to_bytes(2, "little") + _MARK)
    file.write(_crc32(file).to_bytes(4, "little"))


def _check_seal(name: str, file: BinaryIO) -> bool:
    """Return True if `file` has a checksum; refuse a wrong checksum or a truncated zip."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 22))
    tail = file.read()
    if tail[-len(_MARK) - 4 : -4] != _MARK:
        if not (tail.startswith(_END) and tail.endswith(_NO_COMMENT)):
            raise _not_a_checkpoint(name, "not a zip of torch.save")
        return False
    if _crc32(file) != _SOUND:
        raise ValueError(
            f"load: {name!r} is damaged: {_damaged(name, file)} is not what was saved. Likely "
            "cause: bits that changed on the disk, in memory or in a copy. Fix: another copy of "
            "the file, or the checkpoint before it."
        )
    return True


def _crc32(file: BinaryIO) -> int:
    """Return the CRC-32 of the whole file; leave the position at its end."""
    file.seek(0)
    crc = 0
    while block := file.read(2**20):
        crc = zlib.crc32(block, crc)
    return crc


def _damaged(name: str, file: BinaryIO) -> str:
    """Return the path of the damaged leaf: torch.save numbers the records of storages in order."""
    with contextlib.suppress(Exception):
        number = int((zipfile.ZipFile(file).testzip() or "").rpartition("/data/")[2])
        d = _read(file)
        records: dict[Any, str] = {}
        for at, leaf in zip(
            _tree.paths(d, f"torch.load({name!r})"), _tree.flatten(d)[0], strict=True
        ):
            for part in _parts(leaf):
                records.setdefault(part.untyped_storage(), at)
        return list(records.values())[number]
    return "something beside the values, a name, a shape or an index,"


def _read(file: BinaryIO) -> Any:
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _not_a_checkpoint(name: str, what: str) -> ValueError:
    return ValueError(
        f"load: {name!r} is not a file that purescale.save wrote ({what}). Likely cause: another "
        "kind of file, an incomplete copy, or a pickle with code in it, which is never run. Fix: "
        "the file that `save(path, tree)` wrote."
    )


# ---- the disk ------------------------------------------------------------------------------------


def _target(path: Path) -> str:
    """Return the absolute path of the file, with links followed; refuse a path that is
    not a file.
    """
    name = os.fsdecode(path)
    if "\0" in name:
        raise ValueError(
            f"save: {path!r} has a NUL in it, which a file name cannot have. Fix: "
            "`path.replace('\\0', '')`."
        )
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"save: there is no directory {folder!r} for {path!r}. Fix: `os.makedirs({folder!r}, "
            "exist_ok=True)`."
        )
    # "runs/", "runs/.", "": names of directories, even if there is no such directory.
    if os.path.basename(name) in ("", os.curdir, os.pardir) or (
        os.path.exists(target) and not os.path.isfile(target)
    ):
        raise ValueError(
            f"save: {path!r} is a directory or a device; expected the name of a file. "
            f"Fix: `save(os.path.join({name!r}, 'state.pt'), tree)`."
        )
    if os.path.islink(target):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    return target


def _inherit(temporary: str, target: str, old: os.stat_result) -> None:
    """Copy permissions, owner and access lists of `target`, as far as this user may. If one cannot
    be copied, the new file gives less access, never more.
    """
    mode, new, lists = stat.S_IMODE(old.st_mode), os.stat(temporary), hasattr(os, "listxattr")
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):
            os.chown(temporary, old.st_uid, -1)
        try:
            os.chown(temporary, -1, old.st_gid)
        except OSError:
            # The new group must not get the permissions of the old one.
            mode, lists = mode & ~0o070 | (mode & 0o007) << 3, False
    with contextlib.suppress(OSError):
        os.chmod(temporary, mode)
        for name in os.listxattr(target) if lists else ():
            with contextlib.suppress(OSError):
                os.setxattr(temporary, name, os.getxattr(target, name))


class _Disk:
    """A file that keeps the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self.write_to, self.flush, self.fileno = file.write, file.flush, file.fileno
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.write_to(data)
        except OSError as error:
            self.failure = error
            raise


def _write(d: dict[str, Any], file: BinaryIO) -> None:
    """`torch.save(d, file)` that raises the error of the disk, not the RuntimeError of torch."""
    disk = _Disk(file)
    try:
        torch.save(d, disk)  # type: ignore[arg-type]  # torch.save only writes
    except RuntimeError:
        if disk.failure is None:
            raise
        raise disk.failure from None


def _remove_abandoned(folder: str, temporary: str) -> None:
    """Remove temporary files of killed saves in `folder`. They are known by their age, because the
    owner of a file on a network disk is not reliable. The clock is that of the disk.
    """
    now = os.stat(temporary).st_mtime
    for other in glob.glob(os.path.join(glob.escape(folder), ".purescale-*.tmp")):
        with contextlib.suppress(OSError):
            if now - os.stat(other).st_mtime > _ABANDONED:
                os.unlink(other)


def _sync_directory(folder: str) -> None:
    """Sync the rename, because a power failure could undo it. Windows has no such call, and some
    network disks refuse it.
    """
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a directory that may be written to but not read; the file is in place
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
