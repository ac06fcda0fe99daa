"""The step of torch's fused kernel, in place, which unscales the gradients and skips by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._optim.fused import Columns, can_launch, fused_update, kernel_of
from .._optim.in_state import as_number, each_number
from .._optim.opt_state import OptState, Slots, Tensors
from .._optim.param_groups import OptimizerSettings, Tables
from .._optim.step_inputs import StepInputs, inputs_of_dict
from .._torch import private
from .._torch.foreach import MAX_INLINE_LEAVES
from .._torch.tensor_list import TensorList
from .._torch.tracing import is_on_a_graph, under_transform
from .._tree.gradients import Gradients


class FusedStep:
    """The step of a class of torch.optim by torch's fused kernel, if it has one."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings, self._layout = settings, settings.layout
        self.kernel: Any = kernel_of(settings.formula)
        self._key = settings.key()
        self._opaque = private.Opaque(
            lambda *args: self._traced(*args), lambda: torch.compiler.allow_in_graph
        )

    def is_right_for(self, inputs: StepInputs) -> bool:
        """Return True if the kernel makes this step."""
        if self.kernel is None or self._layout.first_step_differs or under_transform():
            return False
        if self._settings.flag_named and not self._settings.settings.get("fused"):
            return False
        if inputs.opt_state.hyper and not self._settings.are_readable(inputs.opt_state):
            return False
        params, grads = inputs.present_params, inputs.grads.tensor_list
        if torch.compiler.is_dynamo_compiling() and (
            len(params.tensors) <= MAX_INLINE_LEAVES
            or is_on_a_graph([*params.tensors, *grads.tensors])
        ):
            return False
        return can_launch(params, grads)

    def __call__(self, skip: Tensor | None, inputs: StepInputs, current: Tables) -> None:
        """Update the parameters and slots of `inputs` in place, unless the step is skipped."""
        params, slots, grads = inputs.named_params, inputs.opt_state.slots, inputs.grads
        if torch.compiler.is_dynamo_compiling():
            pending = grads.divisor, grads.factor, grads.clip_value, skip
            self._opaque(self._key, params, inputs.named_grads, slots, pending, current)
            return
        # The kernel takes a rate that is a tensor, and reads none.
        numbers = [
            {n: v if n == "lr" else each_number(as_number, {n: v})[n] for n, v in table.items()}
            for table in current
        ]
        self._launch(numbers, inputs, skip)

    def _traced(
        self,
        key: str,
        params: Tensors,
        grads: Tensors,
        slots: Slots,
        pending: tuple[Any, ...],
        current: Tables,
    ) -> None:
        """Make the step from a compiled one, which is guarded by `key`."""
        divisor, factor, clip_value, skip = pending
        likes, tensor_list = list(map(grads.get, params)), TensorList(list(grads.values()))
        gradients = Gradients(
            tensor_list, likes, False, divisor=divisor, factor=factor, clip_value=clip_value
        )
        state = OptState((), slots)  # type: ignore[arg-type]
        inputs = inputs_of_dict(params, gradients, state, dense_off_graph=False)
        self._launch(current, inputs, skip)

    def _launch(self, current: Tables, inputs: StepInputs, skip: Tensor | None) -> None:
        """Launch a kernel for each group, device and dtype."""
        params, slots = inputs.present_params, inputs.opt_state.slots
        grads, names = inputs.grads.with_one_divisor(), list(inputs.named_params)
        gradient_of = {name: index for index, name in enumerate(inputs.grad_names)}
        for group in self._settings.torch_groups(tuple(names), current):
            settings = group.settings
            stepped = {name for name in group.names if name in gradient_of}
            for kind in params.kinds:
                indices = [index for index in kind if names[index] in stepped]
                if not indices:
                    continue
                of_kind = [names[index] for index in indices]
                columns = Columns(
                    params.picked(indices),
                    grads.picked([gradient_of[name] for name in of_kind]),
                    [self._column(slots, of_kind, key) for key in self.kernel.slots(settings)],
                )
                fused_update(self.kernel, settings, columns, skip)

    def _column(self, slots: Slots, names: list[str], key: str) -> list[Tensor]:
        try:
            return [slots[name][key] for name in names]
        except KeyError:
            raise self._layout.foreign(key) from None
