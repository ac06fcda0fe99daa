"""The fields of a public NamedTuple, each with what the docstring of its class says of it."""

from __future__ import annotations

import inspect
import re
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def document_fields(cls: Class) -> Class:
    """Decorate a NamedTuple: `help(cls.field)` is the entry under `Attributes:` in its docstring,
    where Python says "Alias for field number 6".
    """
    attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.M):
        getattr(cls, name).__doc__ = " ".join(text.split())
    return cls
