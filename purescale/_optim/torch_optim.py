"""A class of torch.optim as pure functions: `init`, `step`, and the step that can skip."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .._optim.decision import APPLY, FRESH, Decision, Memory, unscale_and_clip
from .._optim.fused import Launch, can_launch, fused_update, kernel_of
from .._optim.in_state import each_number, names_in_state
from .._optim.opt_state import (
    OptState,
    SlotLayout,
    Slots,
    checked_state_dict,
    numbers_of,
    restored,
    slots_like,
    state_dict,
    values_of,
)
from .._optim.param_groups import PARAMETERS_GIVEN, OptimizerSettings, Overrides, Schedule
from .._optim.protocol import unchanged
from .._optim.step_inputs import StepInputs, flatten_step, working_copies
from .._optim.unfused import UnfusedStep, check_in_state
from .._torch import foreach, private
from .._torch.autocast import outside_autocast
from .._torch.donation import can_write_each
from .._torch.foreach import MAX_INLINE_LEAVES
from .._torch.tracing import host_can_read, is_on_a_graph, traced, under_transform
from .._tree import tree as _tree
from .._tree.scalars import whole
from .._tree.tree import Tree

P = ParamSpec("P")


def _without_parameters(make: Callable[P, TorchOptimizer]) -> Callable[P, TorchOptimizer]:
    """`from_torch`, with words for a call as that of torch's class, which begins with them."""

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> TorchOptimizer:
        if len(args) > 1 and "lr" in kwargs:
            raise TypeError(
                f"from_torch was given {type(args[1]).__name__} beside lr={kwargs['lr']!r}. "
                f"{PARAMETERS_GIVEN}"
            )
        return make(*args, **kwargs)

    return checked


@_without_parameters
def from_torch(
    cls: type[torch.optim.Optimizer],
    lr: float | Tensor | Schedule | None = None,
    overrides: Overrides | None = None,
    in_state: Sequence[str] = (),
    lr_in_state: bool = False,
    **settings: Any,
) -> TorchOptimizer:
    """Equal to `opt = cls(params, lr=lr, **settings); opt.step()` on copies of everything, bit for
    bit; over half parameters to that step in float32, rounded to what is kept.

    Arguments:
    - `cls`: a class of torch.optim, or a subclass that keeps its `step`.
    - `lr`: a number, a 0-d tensor, or a schedule: a function from the number of steps applied so
      far, a 0-d int64 tensor, to the learning rate. A skipped step is not applied, so a schedule
      never advances on it. As a tensor it can be differentiated. A schedule is tried once, here,
      and refused where it reads the value of the count. Of a scheduler of torch:
      `schedule_from_torch`.
    - `in_state`: names of settings that steps take from the state, as 0-d float32 tensors that
      `init` makes of the numbers given: data, so that one compiled step serves every value, a
      vmapped ensemble has one a member, and they are saved and differentiated. The rate is
      `opt_state.lr`; a schedule beside it multiplies it, and it starts from 1. The others are in
      `opt_state.hyper`, by name, betas as a tuple of two; either is `()` where it holds nothing.
      `replace_settings(state, lr=...)` moves them. What `overrides` names stays a setting. With
      others than the rate a step is torch's formula, tensor by tensor, since its fused kernels and
      lists take Python numbers; how far the results agree stands below.
    - `lr_in_state=True`: `in_state=("lr",)`.
    - `overrides`: settings for some parameters, by dotted name or glob, or by a tuple of these;
      later ones win: `{("*.bias", "norm*"): {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}}`.
    - `settings`: the class's own. A flag named here (`foreach`, `fused`, `capturable`,
      `differentiable`) is kept.

    Which of torch's implementations runs, where no flag is named: the fused kernel where the class
    has one and everything is floating and dense; else torch's default on a CPU in eager mode, which
    reads its step counts there, and elsewhere the capturable formula, which reads no value, so that
    nothing syncs. Inside torch.func transforms it is the capturable and differentiable formula,
    inside torch.compile too up to 16 parameters, or where they are to be differentiated. These
    agree to 1e-6, Muon's under vmap to 1e-2 of the update, as it multiplies matrices in bfloat16.
    At a rate of 0 nothing moves in any of them: where torch's formula of Adam and Adamax divides by
    the rate, theirs for the host is taken. (Rprop's `lr` is only what its step sizes start from.)
    Each can be differentiated; where torch's square root has an infinite derivative, at a gradient
    of exactly 0, it is taken for 0. `.backward()` goes through a step only with
    `differentiable=True`, and is refused in words otherwise.

    `optimizer.init(params)`, `optimizer.step(params, grads, opt_state)`,
    `optimizer.to_state_dict(opt_state)` and `optimizer.from_state_dict(sd, params)` (torch.optim's
    own format) take any pytree of parameters. Step hooks do not run.

    Raises `TypeError` or `ValueError` when made, and in torch's own words for settings that the
    class refuses: for what is no number in `in_state`, or is read in Python by torch's formula,
    tried once; for parameters, which `init` takes; for LBFGS (needs a closure), SparseAdam (takes
    no dense gradients), Adafactor without a named `foreach` (each of torch's implementations reads
    three values per parameter, so name the one that may), classes outside of torch.optim's pattern.
    `init` and `step` raise for a pattern in `overrides` that matches no parameter; `step`
    for a state that is not that of these parameters (shapes, dtypes and devices of every slot),
    before torch's kernel is called.

    >>> import torch
    >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.step(params, {"w": torch.tensor([1.0])}, state)
    >>> params, state.applied
    ({'w': tensor([0.5000])}, tensor(1))

    Source of the rules: torch.optim.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "from_torch was called inside of a compiled function, where torch's optimizers cannot "
            "be made. Fix: make the optimizer outside; a rate that the function is given goes "
            "through from_torch(..., in_state=('lr',)) and replace_settings(opt_state, lr=...)."
        )
    names = names_in_state(in_state, lr_in_state)
    return TorchOptimizer(cls, lr, overrides or {}, settings, in_state=names)


class TorchOptimizer:
    """A torch.optim class as pure functions; made by `from_torch`. Holds settings, never state."""

    def __init__(
        self,
        cls: Any,
        lr: Any,
        overrides: Overrides,
        settings: dict[str, Any],
        *,
        in_state: Sequence[str] = (),
    ) -> None:
        self._groups = OptimizerSettings(cls, lr, overrides, settings, in_state=in_state)
        self._layout = self._groups.layout
        # torch's kernels take Python numbers.
        self._kernel = None if self._groups.hyper else kernel_of(cls)
        self.differentiable = self._groups.differentiable
        self.elementwise = is_elementwise(cls)
        # Dynamo will not trace a torch optimizer; the compiler behind it traces this plain Python.
        # Nothing in there is guarded, so a compiled step is guarded by `_key` instead: all that the
        # formula reads but for its arguments.
        self._unfused = UnfusedStep(self._groups)
        check_in_state(self._groups)
        self._opaque = private.nonstrict_trace(self._unfused.on_copies)
        # The same for the fused kernels.
        self._opaque_launches = private.allow_in_graph(lambda *args: self._launch_traced(*args))
        self._key = self._groups.key()
        self.summary = self._groups.summary

    def __repr__(self) -> str:
        return repr(self._groups)

    def init(self, params: Tree) -> OptState:
        """The state of an optimizer that has made no step, in fresh memory; no step changes its
        structure.
        """
        named = _by_name(params)
        self._groups.check_names(tuple(named))
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        lr, hyper = self._groups.initial_numbers(device)
        slots = self._groups.new_slots(named, self._groups.rates(applied, lr))
        return OptState(applied, slots, lr, hyper)

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: OptState) -> tuple[Tree, OptState]:
        """Parameters and state after one step, in fresh memory. A parameter whose gradient is None
        stays, as in torch.optim.
        """
        inputs = flatten_step(self, params, grads, opt_state)
        self.check(inputs)
        return inputs.restore(*self.conditional_step(inputs, APPLY))

    def check(self, inputs: StepInputs) -> None:
        """Refuse a state that is not that of these parameters."""
        opt_state = inputs.opt_state
        if not isinstance(opt_state, OptState):
            raise TypeError(
                f"opt_state is {type(opt_state).__name__}. Fix: `opt_state = "
                "optimizer.init(params)`, or what the last step returned."
            )
        weights = inputs.named_params
        if opt_state.slots.keys() != weights.keys():
            raise ValueError(
                f"opt_state knows the parameters {_tree.join_names(list(opt_state.slots))}, "
                "params has "
                f"{_tree.join_names(inputs.names)}. Fix: `opt_state = optimizer.init(params)` "
                "for these "
                "params."
            )
        self._layout.check(
            opt_state.slots, weights, inputs.known, dense_off_graph=inputs.dense_off_graph
        )
        self._groups.check(opt_state)
        self._groups.check_names(tuple(weights))

    def conditional_step(
        self, inputs: StepInputs, decision: Decision, memory: Memory = FRESH
    ) -> tuple[Tree, OptState]:
        """Parameters and state after the decided step, as in `Conditional`."""
        opt_state = inputs.opt_state
        if decision.skip_on_host:
            return unchanged(inputs, donate=memory.donate)
        lrs = self._groups.rates(opt_state.applied, opt_state.lr)
        donate, donate_grads, may_overwrite_grads, in_place, read_only = memory
        # A step that is captured leaves its numbers where they are; on the host nobody captures.
        captured = decision.skip_on_host is None and not self.differentiable
        numbers_in_place = in_place and captured
        if (donate or donate_grads) and not in_place:
            old, grads = inputs.old, inputs.grads.tensors
            numbers = [opt_state.applied, *numbers_of(opt_state)]
            lr = opt_state.lr
            others = [rate for rate in lrs if isinstance(rate, Tensor) and rate is not lr]
            others += read_only
            lists = (
                [old] if may_overwrite_grads else [old, grads]
            )  # scratch shares no memory with anything
            if captured:
                lists.append(numbers)
            else:
                others += numbers
            allowed = can_write_each(lists, others, dense_off_graph=inputs.dense_off_graph)
            in_place = donate and allowed[0]
            may_overwrite_grads = may_overwrite_grads or (donate_grads and allowed[1])
            numbers_in_place = captured and in_place and allowed[-1]
        if self._can_fuse(inputs):
            new_weights, new_slots = self._fused_step(
                inputs, decision, lrs, in_place=in_place, may_overwrite_grads=may_overwrite_grads
            )
        else:
            grads = unscale_and_clip(inputs.grads.tensors, decision, in_place=may_overwrite_grads)
            new_weights, new_slots = self._unfused_step(
                inputs, decision, grads, lrs, in_place=in_place
            )
        applied, lr, hyper = self._numbers_after(opt_state, decision, in_place=numbers_in_place)
        params = inputs.params_tree(list(map(new_weights.get, inputs.names)))
        return params, OptState(applied, new_slots, lr, hyper)

    def _numbers_after(
        self, opt_state: OptState, decision: Decision, *, in_place: bool
    ) -> tuple[Tensor, Any, Any]:
        """The steps applied, and the settings in the state, after the decided step."""
        applied, _, lr, hyper = opt_state
        count: Any = 1 if decision.skip_on_host is False else ~decision.skip  # type: ignore[operator]
        keep = Tensor.detach if in_place else self._unfused.copy
        return (
            applied.add_(count) if in_place else applied + count,
            keep(lr) if isinstance(lr, Tensor) else lr,
            hyper and each_number(keep, hyper),
        )

    def widened(self, opt_state: OptState, dtype: torch.dtype) -> OptState:
        """The state for parameters of at least this dtype; counts are what they are."""
        slots = {
            name: {
                key: value
                if self._layout.is_count(key)
                else value.to(torch.promote_types(value.dtype, dtype))
                for key, value in slot.items()
            }
            for name, slot in opt_state.slots.items()
        }
        return opt_state._replace(slots=slots)

    # ---- the fused kernel

    def _can_fuse(self, inputs: StepInputs) -> bool:
        """Whether torch's fused kernel can make this step."""
        if self._kernel is None or self._layout.first_step_differs or under_transform():
            return False
        if self._groups.flag_named and not self._groups.settings.get("fused"):
            return False
        weights, grads = _weights(inputs), inputs.grads.tensors
        if torch.compiler.is_dynamo_compiling() and (
            len(weights) <= MAX_INLINE_LEAVES or is_on_a_graph([*weights, *grads])
        ):
            return False
        return can_launch(weights, grads)

    def _fused_step(
        self,
        inputs: StepInputs,
        decision: Decision,
        lrs: list[Any],
        *,
        in_place: bool,
        may_overwrite_grads: bool,
    ) -> tuple[dict[str, Tensor], Slots]:
        weights, slots = working_copies(inputs, in_place=in_place)
        grads = inputs.named_grads
        if torch.compiler.is_dynamo_compiling() and _COMPILES_BEHIND_DYNAMO:
            self._opaque_launches(self._key, weights, grads, slots, tuple(decision), lrs)
        else:
            # `is` of two dicts is nothing that Dynamo of torch 2.11 can trace
            known = not torch.compiler.is_dynamo_compiling() and weights is inputs.named_params
            targets = _weights(inputs) if known else list(weights.values())
            lists = targets, inputs.grads.tensors
            self._launch(
                weights, slots, grads, decision, lrs, lists, may_overwrite_grads=may_overwrite_grads
            )
        return weights, slots

    def _launch_traced(
        self,
        key: str,
        weights: dict[str, Tensor],
        grads: dict[str, Tensor],
        slots: Slots,
        decision: tuple[Any, ...],
        lrs: list[Any],
    ) -> None:
        """`_launch` as a compiler takes it; `key`: what the compiled step is guarded by."""
        lists = list(weights.values()), list(grads.values())
        self._launch(
            weights, slots, grads, Decision(*decision), lrs, lists, may_overwrite_grads=False
        )

    def _launch(
        self,
        weights: dict[str, Tensor],
        slots: Slots,
        grads: dict[str, Tensor],
        decision: Decision,
        lrs: list[Any],
        lists: tuple[list[Tensor], list[Tensor]],
        *,
        may_overwrite_grads: bool,
    ) -> None:
        """Update `weights` and `slots` in place, a launch for each kind of tensors. `lists`: all
        weights and gradients, as they were looked at.
        """
        kernel: Any = self._kernel
        for names, settings in self._groups.torch_groups(tuple(weights), lrs):
            keys = kernel.slots(settings)
            present = [name for name in names if name in grads]
            whole = len(present) == len(weights)
            every = lists[0] if whole else [weights[name] for name in present]
            for indices in foreach.by_kind(every):
                some = [present[index] for index in indices]
                targets, sources = lists
                if len(some) < len(weights):
                    targets, sources = ([d[name] for name in some] for d in (weights, grads))
                columns = [_column(slots, some, key, self._layout) for key in keys]
                steps = [slots[name]["step"] for name in some if "step" in slots[name]]
                launch = Launch(sources, steps, [targets, *columns])
                fused_update(
                    kernel, settings, launch, decision, may_overwrite_grads=may_overwrite_grads
                )

    # ---- torch's own formula

    def _unfused_step(
        self,
        inputs: StepInputs,
        decision: Decision,
        grads: list[Tensor],
        lrs: list[Any],
        *,
        in_place: bool,
    ) -> tuple[dict[str, Tensor], Slots]:
        weights, slots = inputs.named_params, inputs.opt_state.slots
        present = inputs.grad_names
        leaves = [leaf for leaf in inputs.local_grads(grads) if leaf is not None]
        dtypes = [weights[name].dtype for name in present]
        given = dict(zip(present, _cast(leaves, dtypes), strict=True))
        old = inputs.old
        formula_only = self._groups.hyper or self.differentiable
        if decision.skip_on_host is False and not formula_only and host_can_read(old):
            new_weights, new_slots = working_copies(inputs, in_place=in_place, any_order=True)
            self._unfused.on_host(new_weights, given, new_slots, lrs)
            return new_weights, new_slots
        run = self._opaque if torch.compiler.is_dynamo_compiling() else self._unfused.on_copies
        moving = self._groups.moving(lrs, inputs.opt_state.applied)
        hyper = self._groups.numbers(inputs.opt_state) if self._groups.hyper else ()
        new_weights, new_slots = run(self._key, weights, given, slots, moving, hyper)
        if decision.skip_on_host is False:
            return new_weights, new_slots
        new = [*new_weights.values(), *values_of(new_slots)]
        if not (self.differentiable or traced()):  # parameters may require a gradient
            old = [leaf.detach() if leaf.requires_grad else leaf for leaf in old]
        chosen = iter(foreach.where(decision.skip, old, new, in_place=in_place))  # type: ignore[arg-type]
        return dict(zip(weights, chosen, strict=False)), slots_like(slots, chosen)

    def to_state_dict(self, opt_state: OptState, initial_lr: float | None = None) -> dict[str, Any]:
        """Equal to `cls(groups).state_dict()` of an optimizer that made the same steps: tensors
        copied, `lr` as it is now. Syncs.

        The groups are, in order: the parameters that no override matches, then those that the
        overrides match. `initial_lr`: the rate that a new scheduler of torch multiplies, such as
        `LambdaLR(theirs, f, last_epoch=...)`. Left out it is, of a schedule, the larger of its
        first rate and that of now, which is right for one that falls from its first rate: name the
        peak of one that warms up. Of a schedule beside a rate in the state it is `opt_state.lr`.

        torch takes the flags of a loaded optimizer from the dict: for `AdamW(params, fused=True)`
        make this one with `fused=True` too.
        """
        groups = self._groups.saved_groups(opt_state, initial_lr)
        return state_dict(opt_state.slots, groups)

    def from_state_dict(
        self, sd: Mapping[str, Any], params: Tree, applied: int | Tensor | None = None
    ) -> OptState:
        """Syncs. The state in `cls(groups).state_dict()`, copied; of its settings only the rate,
        and only with lr_in_state.

        `params` are taken in the order in which `to_state_dict` lists them, or in their own where
        `sd` has one group. `applied`: the steps that were applied, which a schedule goes on from,
        `scheduler.last_epoch` of a scheduler that stepped with the optimizer. Left out it is the
        largest step count in `sd`; where the class keeps none (SGD, Muon) it is 1 if `sd` holds any
        state, else 0, and an error where the rate is a schedule. Raises `ValueError` for another
        class's or another model's state, and for one with two rates where the state holds one.
        """
        saved_groups, states = checked_state_dict(sd)
        known = None if applied is None else _whole_count(applied)
        fresh = self.init(params)
        groups = [
            names for names, _ in self._groups.torch_groups(tuple(fresh.slots), self._groups.lrs)
        ]
        if len(saved_groups) == 1:
            groups = [list(fresh.slots)]
        sizes = [len(group["params"]) for group in saved_groups]
        if sizes != list(map(len, groups)):
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, this optimizer has "
                f"{list(map(len, groups))}. Likely cause: other params, or other overrides. Fix: "
                "overrides that match the groups of the optimizer that wrote it, in its order."
            )
        order = [name for names in groups for name in names]
        slots = fresh.slots  # replaced one by one, so that no two states are there at a time
        for name, index in zip(
            order, (index for group in saved_groups for index in group["params"]), strict=True
        ):
            saved = {
                key: value for key, value in states.get(index, {}).items() if value is not None
            }
            slots[name] = restored(name, saved, slots[name])
        steps = [slot["step"] for slot in slots.values() if "step" in slot]
        if steps and not bool(torch.isfinite(torch.stack(steps)).all()):
            raise ValueError(
                "the state dict has a step count that is inf or NaN. Likely cause: a damaged "
                "file, or a step that was taken with such a count. Fix: an older state dict."
            )
        if known is None and not steps and any(map(callable, self._groups.lrs)):
            raise ValueError(
                f"the rate is a schedule, and {self._groups.cls.__name__}'s state dict has no step "
                "count to go on from. Fix: `optimizer.from_state_dict(sd, params, "
                "applied=scheduler.last_epoch)`, the steps made so far; 0 of an optimizer that has "
                "made none."
            )
        if known is not None:
            count = torch.full_like(fresh.applied, known)
        elif steps:
            count = torch.stack(steps).max().to(torch.int64)
        else:
            count = fresh.applied + bool(states)
        return OptState(
            count, slots, *self._groups.numbers_from_dict(saved_groups, tuple(fresh.slots), fresh)
        )


# Before, is_compiling() is false in what the compiler behind Dynamo traces.
_COMPILES_BEHIND_DYNAMO = torch.__version__ >= "2.13"


def _weights(inputs: StepInputs) -> list[Tensor]:
    """The parameters that are tensors, as they were looked at."""
    return inputs.params if inputs.known else list(inputs.named_params.values())


def _column(slots: Slots, names: list[str], key: str, layout: SlotLayout) -> list[Tensor]:
    try:
        return [slots[name][key] for name in names]
    except KeyError:
        raise layout.foreign(key) from None


def _cast(leaves: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Gradients in the dtype of their parameters; complex ones are not bounded by a range."""
    if any(leaf.is_complex() for leaf in leaves):
        return [leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return foreach.cast(leaves, dtypes)


def _whole_count(applied: Any) -> int:
    if isinstance(applied, Tensor) and applied.ndim == 0:
        applied = applied.item()
    return whole("applied", applied, least=0)


_ELEMENTWISE = "asgd|adadelta|adagrad|adam|adamax|adamw|nadam|radam|rmsprop|rprop|sgd"


def is_elementwise(cls: Any) -> bool:
    """Whether a step of a part of a parameter is that part of its step: so it is where the class
    keeps the step of torch's that moves each element by itself; of any other nobody knows.
    """
    module = inspect.unwrap(cls.step).__module__
    return re.fullmatch(rf"torch\.optim\.({_ELEMENTWISE})", module) is not None


def _by_name(params: Tree) -> dict[str, Tensor]:
    flat = _tree.flatten_once(params)
    leaves = flat.leaves
    names = _tree.names(params)
    _tree.check_names(names)
    named = dict(zip(names, leaves, strict=True))
    for name, leaf in named.items():
        if leaf is not None and not (
            isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ):
            what = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"params: {name} is {what}; a parameter is a floating or complex tensor. Fix: put "
                "it among the buffers."
            )
    _tree.check_parameters(flat)
    return {name: leaf for name, leaf in named.items() if leaf is not None}
