"""Operators of the library in graphs: a function that writes into a list, and its pure form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# By the pure form: the function that a caller may run instead, on operands that are its own.
IN_PLACE: dict[Any, Callable[..., None]] = {}


def define_operators(name: str, function: Callable[..., None]) -> None:
    """Define the operators `name_` and `name`. `function(targets, *operands, owned)` writes into
    the list of `targets`; the pure form returns new ones. With `owned` the operands too may be
    overwritten.
    """

    def write(targets: list[Tensor], *operands: Any) -> None:
        function(targets, *operands, owned=False)

    def pure(targets: list[Tensor], *operands: Any) -> list[Tensor]:
        new = [target.clone() for target in targets]
        write(new, *operands)
        return new

    schema = torch.library.infer_schema(function, mutates_args=("targets",))
    schema = schema.replace(", bool owned", "")
    torch.library.custom_op(f"purescale::{name}_", write, mutates_args=("targets",), schema=schema)
    schema = schema.replace("Tensor(a0!)[]", "Tensor[]").replace("-> ()", "-> Tensor[]")
    operator = torch.library.custom_op(f"purescale::{name}", pure, mutates_args=(), schema=schema)
    operator.register_fake(lambda targets, *operands: list(map(torch.empty_like, targets)))
    overload = getattr(torch.ops.purescale, name).default
    IN_PLACE[overload] = lambda targets, *operands: function(targets, *operands, owned=True)
