"""Error messages for the differences between a state dict and the expected one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._tree import tree as _tree
from .._tree.leaves import describe


class _Difference(NamedTuple):
    kind: str
    keys: tuple[Any, ...]  # its path
    detail: str


# The likely cause by the field of a state that differs. The first match is named.
_CAUSES = {
    "params": "another model",
    "buffers": "another model",
    "opt_state": "another optimizer, or other settings of it,",
    "scaler": "another rule",
    "guard": "another guard, or none,",
}

_OTHER_DTYPE = "of another dtype"


def check_equal(name: str, d: Any, expected: dict[str, Any]) -> None:
    """Refuse a `d` whose keys, shapes or dtypes differ from `expected`, listing all such paths."""
    differences = list(_differences((), d, expected))
    if not differences:
        return
    kinds = dict.fromkeys(difference.kind for difference in differences)
    texts = {kind: _grouped(name, [d for d in differences if d.kind == kind]) for kind in kinds}
    lists = "; ".join(f"{kind}: {_tree.join_names(listed, 20)}" for kind, listed in texts.items())
    if set(texts) == {_OTHER_DTYPE}:
        raise ValueError(
            f"{name} does not match like: {lists}. Likely cause: the same tree in another dtype, "
            "such as a model in half precision on one side only. Fix: make `like` in the dtypes "
            "that were saved, and cast what was loaded, `params = {name: p.to(dtype) for name, p "
            "in state.params.items()}`; moments likewise."
        )
    fields = {difference.keys[1] for difference in differences if len(difference.keys) > 1}
    other = "another model, optimizer or settings"
    cause = next((_CAUSES[field] for field in _CAUSES if field in fields), other)
    if {"params", "buffers"} <= fields:
        cause = "another model, or of this one with other parameters frozen,"
    raise ValueError(
        f"{name} does not match like: {lists}. Likely cause: the state of {cause} than `like`. "
        "Fix: make `like` as the saved tree was made, `init_train_state(params, buffers, "
        "optimizer, rule, rng)` with the same arguments; change what was loaded afterwards."
    )


def _differences(keys: tuple[Any, ...], got: Any, expected: Any) -> Iterator[_Difference]:
    """Yield all differences. Only paths of `expected` are followed, because a dict from a file may
    contain itself.
    """
    if isinstance(got, Mapping) and isinstance(expected, dict):
        for key, child in expected.items():
            if key in got:
                yield from _differences((*keys, key), got[key], child)
            else:
                yield _Difference("missing", (*keys, key), "")
        yield from (
            _Difference("not in like", (*keys, key), "") for key in got if key not in expected
        )
    elif isinstance(expected, dict):
        names = _tree.join_names([key_of(key) for key in expected])
        yield _Difference("different", keys, f" is {kind_of(got)}, expected a dict of {names}")
    elif kind_of(got) != kind_of(expected):
        kind = _OTHER_DTYPE if _without_dtype(got) == _without_dtype(expected) else "different"
        yield _Difference(kind, keys, f" is {kind_of(got)}, expected {kind_of(expected)}")


def _without_dtype(value: Any) -> str:
    return kind_of(value).removeprefix(str(getattr(value, "dtype", "")))


def _grouped(name: str, differences: list[_Difference]) -> list[str]:
    """Return a text for each difference. If more than three are in one field, such as `exp_avg` of
    every parameter, only the first and the number of the others are given.
    """
    groups: dict[Any, list[_Difference]] = {}
    # Groups ignore the name of a parameter, which is the last key or the one before.
    for difference in differences:
        groups.setdefault((difference.keys[:-2], difference.keys[-1:]), []).append(difference)
    for field, group in list(groups.items()):
        if len(group) == 1:
            del groups[field]
            groups.setdefault((group[0].keys[:-1], None), []).extend(group)
    texts: dict[_Difference, str] = {}
    for (_, last), group in groups.items():
        first, shown = group[0], group if len(group) <= 3 else group[:1]
        texts |= {one: f"{_code(name, one.keys)}{one.detail}" for one in shown}
        if len(group) > len(shown):
            place = "".join([f"in {key_of(key)}" for key in first.keys[-2:-1]])
            more = key_of(last[0]) if last else place
            texts[first] += f" and {len(group) - 1} more {more}".rstrip()
    return [texts[one] for one in differences if one in texts]


def _code(name: str, keys: tuple[Any, ...]) -> str:
    return name + "".join(f"[{key_of(key)}]" for key in keys)


def kind_of(value: Any) -> str:
    """Return dtype, shape, layout and placements of a tensor, or the type of another object, whose
    repr may be endless or raise.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    return describe(value)


def key_of(key: Any) -> str:
    return repr(key) if isinstance(key, str) else f"<{type(key).__name__}>"
