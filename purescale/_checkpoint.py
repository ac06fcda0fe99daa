"""A tree of tensors as a plain dict, and as a file that is written whole or not at all and read
without running anything.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._torch import private as _torch
from ._torch.donation import can_write
from ._tree import tree as _tree
from ._tree.mismatch import check_equal, key_of, kind_of
from ._tree.tree import Tree

Path: TypeAlias = str | os.PathLike[str]

_VERSION = 1
_VERSION_KEY = "purescale_version"
_ABANDONED = 3600.0  # seconds without a write
_MARK = b"purescale crc32 "  # and four bytes: the comment of the zip that torch.save writes
_END = b"PK\5\6"  # where a zip without a comment has its last 22 bytes
_SOUND = 0x2144DF1C  # the CRC-32 of anything that ends with its CRC-32


def to_state_dict(tree: Tree) -> dict[str, Any]:
    """Equal to `{"purescale_version": tensor(1), "tree": {...}}`: `tree` as nested dicts of tensors
    with string keys.

    A field of a NamedTuple stands under its name, an item of a list or tuple under its position,
    one of a dict under its key: `d["tree"]["opt_state"]["slots"]["conv.weight"]["exp_avg"]`. `None`
    and containers without a tensor are left out; `from_state_dict` takes them from `like`.

    The tensors are those of `tree`, off the graph and in the same memory, so that
    `torch.distributed.checkpoint.load(d, checkpoint_id=...)` loads in place, into a tree that you
    give up, on any number of ranks. It casts where dtypes differ and passes over what `d` has not,
    before `from_state_dict` can see it; of a plain leaf it keeps what one rank has, so that what
    differs needs a name on each: `{rank: rng}`. The version is a tensor too, since it restores
    anything else in a dict by running a pickle.

    Raises `TypeError` for a leaf that is no tensor, `ValueError` where two keys of a dict are one
    string.

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
                "sparse and distributed tensors. Fix: `torch.tensor(...)` of a number, "
                "`.to_dense()` of a tensor in mkldnn's layout; settings belong to the code that "
                "makes the state. dict, list, tuple and NamedTuple are looked into, other "
                "containers are not."
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


def from_state_dict(d: Mapping[str, Any], like: Tree) -> Tree:
    """Reads the version on the host. Equal to `tree` where `d = to_state_dict(tree)`, in fresh
    memory, on the devices of `like`.

    `like` is any tree of the structure, shapes and dtypes of the one that was saved, such as a new
    state; its values are not looked at. What it has in containers, `None` and empty ones, the
    result has too: `d` knows names, not types. The result shares memory with neither, and is off
    the graph. Values are not judged: NaN is loaded as NaN. The one number read is the version.

    Raises one `ValueError` that lists what is missing, what is too much, and where type, shape,
    dtype, layout or version differ, before anything is copied.

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
    # Two leaves of a file may stand in one piece of memory, as tied weights do: a later donation of
    # the one would reach the other.
    mine = donate and can_write([leaf for leaf in found if leaf is not None])
    return structure.unflatten(
        [
            None if leaf is None else leaf.to(old.device, copy=not mine)
            for leaf, old in zip(found, leaves, strict=True)
        ]
    )


def save(path: Path, tree: Tree) -> None:
    """Syncs with the host and with the disk. Equal to `torch.save(to_state_dict(tree), path)` with
    a checksum, whole or not at all.

    A kill, a full disk or an error at any moment leaves the old file or the new one. Once the call
    is back the new one survives a power failure too, where the disk can sync a directory and this
    user may read it. It is written beside `path`, as `.purescale-*.tmp`, synced, and renamed. Only
    a kill leaves such a file behind: it is harmless, and a later save into that directory removes
    those that nobody wrote to for an hour.

    `path`: `str` or `os.PathLike`; a link is followed. A file that is replaced hands on its
    permissions, and its owner where this user may give it; a new one has those of any new file.
    Call it on one rank. `torch.load` reads the file too: the checksum, of every byte, stands in the
    comment of the zip that `torch.save` writes.

    Raises `FileNotFoundError` for a missing directory, `ValueError` for a path that is no file,
    `TypeError` for a `DTensor`, for another subclass of tensors (an `nn.Parameter` is stored as a
    plain one), for a tensor without values, and for what `to_state_dict` refuses, `OSError` as the
    disk has it.

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
    to_state_dict(tree)  # raises for what it would refuse below
    for where, leaf in zip(_tree.paths(tree, "tree"), _tree.flatten(tree)[0], strict=True):
        if leaf is not None:
            _check_storable(where, leaf, path)
    d = to_state_dict(_tree.map(_compact, tree))

    temporary = os.path.join(folder, f".purescale-{secrets.token_hex(8)}.tmp")
    old = os.stat(target) if os.path.exists(target) else None
    allowed = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    try:
        # Never open to more than the file that it will be.
        with open(
            temporary,
            "x+b",
            opener=lambda name, flags: os.open(name, flags, allowed & 0o666 | 0o600),
        ) as file:
            _remove_abandoned(folder, temporary)
            if old is not None:
                _inherit(temporary, target, old)
            _write(d, file)
            _seal(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(folder)


def load(path: Path, like: Tree) -> Tree:
    """Syncs with the host and the disk. Equal to
    `from_state_dict(torch.load(path, weights_only=True), like)`: what `save` wrote.

    Nothing in the file is run, whatever it holds. `like` as in `from_state_dict`; its tensors are
    not written to. Of a file that `save` wrote every byte is checked first; one without a checksum,
    from `torch.save(to_state_dict(tree), path)` or an older purescale, is loaded with a line to the
    logger "purescale".

    Raises `ValueError` for a file that is damaged, with the leaf in which it is; that is truncated
    or no checkpoint; and for one that does not match `like`, with the paths in which it differs;
    `OSError` where it cannot be opened.

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
        except Exception as error:
            raise _foreign(name, type(error).__name__) from error
    if not checked:
        logging.getLogger("purescale").warning(
            "load: %r has no checksum, so whether it is damaged is not known; `save` writes one",
            name,
        )
    return _from_state_dict(f"torch.load({name!r})", d, like, donate=True)


# ---- what differs --------------------------------------------------------------------------------


def _check_version(name: str, d: Any, expected: Tensor) -> None:
    version = d.get(_VERSION_KEY) if isinstance(d, Mapping) else None
    if not isinstance(version, Tensor) or kind_of(version) != kind_of(expected):
        what = (
            f"has the keys {_tree.some([key_of(key) for key in d])}"
            if isinstance(d, Mapping)
            else f"is {kind_of(d)}"
        )
        raise ValueError(
            f"{name} is no state dict of purescale: it {what}, expected {_VERSION_KEY!r} (a 0-d "
            "int64 tensor) and 'tree'. Likely cause: the state dict of a module or a torch "
            "optimizer. Fix: what `to_state_dict(tree)` returned; for a torch optimizer's, "
            "`optimizer.from_state_dict(d, params)`."
        )
    if int(version) != _VERSION:
        raise ValueError(
            f"{name}[{_VERSION_KEY!r}] is {int(version)}, this purescale reads version {_VERSION}. "
            "Likely cause: written by a newer purescale. Fix: `pip install --upgrade purescale`."
        )


def _at(node: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        node = node[key]
    return node


# ---- what a file can hold ------------------------------------------------------------------------


def _check_storable(where: str, leaf: Tensor, path: Path) -> None:
    """Refuse what `load` would: it makes plain tensors and runs no code to make others."""
    if isinstance(leaf, DTensor):
        raise TypeError(
            f"{where} is a DTensor: this rank has a part of it, and one file is written by one "
            "rank. Fix: `torch.distributed.checkpoint.save(to_state_dict(tree), "
            f"checkpoint_id={os.fspath(path)!r})`."
        )
    kind = type(leaf.detach())
    if kind is not Tensor:
        raise TypeError(
            f"{where} is a {kind.__name__}, a subclass of tensors; a file holds plain ones, since "
            f"`load` runs no code that it finds there. Fix: `{where}.as_subclass(torch.Tensor)`, "
            "or of one that wraps others those others, each with its name."
        )
    if leaf.is_meta:
        raise TypeError(
            f"{where} is {kind_of(leaf)}; a file holds values. Fix: `torch.empty_like({where}, "
            "device='cpu')`, and fill it."
        )
    try:
        for part in _parts(leaf):
            part.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise TypeError(
            f"{where} has no memory of its own. Likely cause: `save` inside torch.vmap, "
            "torch.func.grad or a trace. Fix: return the state from the transformed function and "
            "save it there."
        ) from error


def _parts(leaf: Tensor) -> list[Tensor]:
    """The dense tensors that make up `leaf`."""
    if leaf.layout is torch.strided:
        return [leaf]
    if leaf.layout is torch.sparse_coo:
        return [_torch.indices(leaf), _torch.values(leaf)]
    by_row = leaf.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer, inner = (
        (leaf.crow_indices(), leaf.col_indices())
        if by_row
        else (leaf.ccol_indices(), leaf.row_indices())
    )
    return [outer, inner, leaf.values()]


def _compact(leaf: Any) -> Any:
    """torch.save writes all of the memory that a tensor is a view of: for one member of an
    ensemble, the whole ensemble.
    """
    if leaf.layout is not torch.strided:
        return leaf
    return (
        leaf
        if leaf.untyped_storage().nbytes() <= leaf.numel() * leaf.element_size()
        else leaf.detach().clone()
    )


# ---- the checksum --------------------------------------------------------------------------------


def _seal(file: BinaryIO) -> None:
    """Give the zip in `file` a comment that ends with the CRC-32 of all before it."""
    file.seek(-2, os.SEEK_END)
    file.write((len(_MARK) + 4).to_bytes(2, "little") + _MARK)
    file.write(_crc32(file).to_bytes(4, "little"))


def _check_seal(name: str, file: BinaryIO) -> bool:
    """Whether `file` has a checksum; refused unless it is sound, or a whole zip without one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 22))
    tail = file.read()
    if tail[-len(_MARK) - 4 : -4] != _MARK:
        if not tail.startswith(_END):
            raise _foreign(name, "no zip of torch.save")
        return False
    if _crc32(file) != _SOUND:
        raise ValueError(
            f"load: {name!r} is damaged: {_damaged(name, file)} is not what was saved. Likely "
            "cause: a disk, a memory or a copy that changed bits. Fix: another copy of the file, "
            "or the checkpoint before it."
        )
    return True


def _crc32(file: BinaryIO) -> int:
    """Of all of `file`, which is left at its end."""
    file.seek(0)
    crc = 0
    while block := file.read(2**20):
        crc = zlib.crc32(block, crc)
    return crc


def _damaged(name: str, file: BinaryIO) -> str:
    """What in a damaged file is damaged: torch.save writes each piece of memory as a record with a
    CRC-32, numbered as they come.
    """
    with contextlib.suppress(Exception):
        number = int((zipfile.ZipFile(file).testzip() or "").rpartition("/data/")[2])
        d = _read(file)
        records: dict[Any, str] = {}
        for where, leaf in zip(
            _tree.paths(d, f"torch.load({name!r})"), _tree.flatten(d)[0], strict=True
        ):
            for part in _parts(leaf):
                records.setdefault(part.untyped_storage(), where)
        return list(records.values())[number]
    return "something beside the values, a name, a shape or an index,"


def _read(file: BinaryIO) -> Any:
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _foreign(name: str, what: str) -> ValueError:
    return ValueError(
        f"load: {name!r} is not a file that purescale.save wrote ({what}). Likely cause: another "
        "kind of file, one that was cut off when it was copied, or a pickle with code in it, "
        "which is never run. Fix: the file that `save(path, tree)` wrote."
    )


# ---- the disk ------------------------------------------------------------------------------------


def _target(path: Path) -> str:
    """The file that `path` means, refused where it can be none."""
    name = os.fsdecode(path)
    if "\0" in name:
        raise ValueError(
            f"save: {path!r} has a NUL in it, which no name of a file has. Fix: "
            "`path.replace('\\0', '')`."
        )
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"save: there is no directory {folder!r} for {path!r}. Fix: `os.makedirs({folder!r}, "
            "exist_ok=True)`."
        )
    # "runs/", "runs/.", "": each is the name of a directory, also where there is none.
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
    """What `target` has and this user may give: permissions, owner, access lists. Where not, less
    is allowed and never more.
    """
    mode, mine, lists = stat.S_IMODE(old.st_mode), os.stat(temporary), hasattr(os, "listxattr")
    if (mine.st_uid, mine.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):
            os.chown(temporary, old.st_uid, -1)
        try:
            os.chown(temporary, -1, old.st_gid)
        except OSError:
            # what its group was allowed is not for another
            mode, lists = mode & ~0o070 | (mode & 0o007) << 3, False
    with contextlib.suppress(OSError):
        os.chmod(temporary, mode)
        for name in os.listxattr(target) if lists else ():
            with contextlib.suppress(OSError):
                os.setxattr(temporary, name, os.getxattr(target, name))


class _Disk:
    """A file that remembers why it could not be written to."""

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
    """`torch.save(d, file)`, which on a full disk raises a RuntimeError about positions: here what
    the disk said.
    """
    disk = _Disk(file)
    try:
        torch.save(d, disk)  # type: ignore[arg-type]  # it only writes
    except RuntimeError:
        if disk.failure is None:
            raise
        raise disk.failure from None


def _remove_abandoned(folder: str, mine: str) -> None:
    """What killed saves left in `folder`. By age, since whose a file is cannot be seen on a network
    disk, and by the disk's clock.
    """
    now = os.stat(mine).st_mtime
    for other in glob.glob(os.path.join(glob.escape(folder), ".purescale-*.tmp")):
        with contextlib.suppress(OSError):
            if now - os.stat(other).st_mtime > _ABANDONED:
                os.unlink(other)


def _sync_directory(folder: str) -> None:
    """Until this a power failure may bring the old name back. Windows has no such call, some
    network disks refuse it.
    """
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # one that may be written to and not be read; the new file is in place
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
