"""An `nn.Module` as a pure function of its parameters and buffers."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Set
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._module.after_forward import (
    check_registrations,
    check_writes,
    keep_modes_for_rerun,
    new_buffers,
    versions_and_addresses,
)
from .._module.lost_state import NewTensors, warn_of_attributes, watch_backward
from .._module.recipe import ModelCopy, Recipe
from .._module.registered import (
    RegisteredTensors,
    Tensors,
    check_dicts,
    registered_tensors,
    state_in_attributes,
)
from .._module.walk import recipe_of
from .._torch import foreach, private
from .._torch.tracing import PLAIN_TYPES, host_can_read, under_transform
from .._tree import pytree
from .._tree.leaves import is_constant

Method = str | Callable[..., Any] | None


class Call(NamedTuple):
    """The arguments of a call of the model, beside its tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    train: bool
    method: Method


@dataclasses.dataclass
class CallHistory:
    """The facts about a model that its calls have shown, on which no result depends."""

    # By `train`. Once a forward has filled what copies share, or a call began before another one
    # had ended, those whose copies share nothing.
    recipes: tuple[Recipe, Recipe]
    # A lock that can be copied: a call takes the token out, and puts one back at its end.
    tokens: list[bool] = dataclasses.field(default_factory=lambda: [True])
    compares_values: bool = True  # of parameters: only the first call in training does
    # By `train`, until its first calls have shown if attributes hold state
    first_calls: dict[bool, NewTensors] = dataclasses.field(
        default_factory=lambda: {False: {}, True: {}}
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """The function that `make_functional` returns: `apply(params, buffers, *args, train=True,
    method=None, **kwargs) -> (out, new_buffers)`.
    """

    _history: CallHistory
    _param_names: frozenset[str]
    _buffer_names: frozenset[str]
    norm_params: frozenset[str]  # the weights and biases of normalisation layers
    # parameters with requires_grad=False, which are among the buffers
    frozen_params: frozenset[str]
    _constants: frozenset[str]  # buffers that are not dense, such as a sparse adjacency matrix
    _renormalised: frozenset[str]  # weights of embeddings with max_norm, which write into them

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        *args: Any,
        train: bool = True,
        method: Method = None,
        **kwargs: Any,
    ) -> tuple[Any, Tensors]:
        if not (
            type(params) is type(buffers) is dict
            and params.keys() == self._param_names
            and buffers.keys() == self._buffer_names
            and set(map(type, (*params.values(), *buffers.values()))) <= PLAIN_TYPES
        ):
            self._check_trees(params, buffers)
        if method is not None:
            _refuse_live(method)
        call = Call(args, kwargs, bool(train), method)
        if torch.compiler.is_dynamo_compiling():
            # If the graph breaks inside a `try`, Dynamo gives up this frame and runs it eagerly,
            # so the condition is read again.
            try:
                if torch.compiler.is_dynamo_compiling():
                    return self._compiled(params, buffers, call)
            except Exception:
                raise
        return self._eager(params, buffers, call)

    @private.only_inlined
    def _compiled(self, params: Tensors, buffers: Tensors, call: Call) -> tuple[Any, Tensors]:
        own_buffers = _copies(buffers, self._constants, one_by_one=True)
        # Writes into these copies do not reach params. The compiler removes unused copies.
        tensors = {name: param.clone() for name, param in params.items()} | own_buffers
        return self._forward(self._history.recipes[call.train], tensors, own_buffers, call)[1:]

    @private.only_inlined
    def _eager(self, params: Tensors, buffers: Tensors, call: Call) -> tuple[Any, Tensors]:
        """Run the forward eagerly, and put back what it changed of what other calls read."""
        history, train = self._history, call.train
        transformed, has_graph = under_transform(), torch.is_grad_enabled()
        constants = {name for name in self._constants if is_constant(buffers[name])}
        # List kernels have no vmap rule.
        own_buffers = _copies(buffers, constants, one_by_one=transformed)
        tensors = {**params, **own_buffers}
        for name in self._renormalised:
            tensors[name] = params[name].clone()
        watched = params | {name: buffers[name] for name in constants} if constants else params
        is_first = has_graph and train and history.compares_values and not transformed
        before = versions_and_addresses(watched.values(), transformed, addresses=is_first)
        values: Tensors = {}  # to find writes through `.data`, once
        if is_first:
            history.compares_values = False
            values = _detached_copies(params) if host_can_read(list(params.values())) else {}

        try:
            history.tokens.pop()  # succeeds in one thread only
        except IndexError:
            history.recipes = _with_own_empty(history.recipes)
        recipes, flags = history.recipes, list(map(_requires_grad, tensors.values()))
        try:
            copy, out, new = self._forward(recipes[train], tensors, own_buffers, call)
        finally:
            if filled := any(recipes[train].shared_empty):
                history.recipes = _with_own_empty(recipes)
            history.tokens = [True]
            if list(map(_requires_grad, tensors.values())) != flags:
                for tensor, flag in zip(tensors.values(), flags, strict=True):
                    if tensor.is_leaf:
                        tensor.requires_grad_(flag)

        if filled:
            check_registrations(copy)
        after = versions_and_addresses(watched.values(), transformed, addresses=is_first)
        if after != before or values:
            check_writes(watched, before, after, values)
        if train in history.first_calls and not callable(call.method):
            warn_of_attributes(history.recipes[train], copy, train, history.first_calls)
        if has_graph:
            if is_first:
                watch_backward(copy, own_buffers.keys() - self.frozen_params - constants)
            # The graph has saved those of the copy, and a second run, as of a batch norm or a
            # codebook, writes into them.
            new = _copies(new, constants, one_by_one=transformed)
            if modes := private.function_modes():
                keep_modes_for_rerun(modes, copy.modules())
        return out, new

    @private.only_inlined
    def _forward(
        self, recipe: Recipe, tensors: Tensors, own_buffers: Tensors, call: Call
    ) -> tuple[ModelCopy, Any, Tensors]:
        """Run the forward in a copy of the model, and read the buffers that it leaves there."""
        args, kwargs, _, method = call
        copy = recipe.make_copy(tensors)
        if method is None:
            out = copy.root(*args, **kwargs)
        elif isinstance(method, str):
            out = getattr(copy.root, method)(*args, **kwargs)
        else:
            out = method(copy.root, *args, **kwargs)
        return copy, out, new_buffers(copy, own_buffers)

    def _check_trees(self, params: Tensors, buffers: Tensors) -> None:
        """Refuse what is not a dict of tensors, and wrong names."""
        check_dicts(params, buffers)
        if params.keys() != self._param_names or buffers.keys() != self._buffer_names:
            rows = (("params", params, self._param_names), ("buffers", buffers, self._buffer_names))
            faults = [
                f"{which} has the wrong names: missing "
                f"{pytree.join_names(sorted(names - {*tree}))}; not in the model: "
                f"{pytree.join_names([str(n) for n in tree if n not in names])}"
                for which, tree, names in rows
                if tree.keys() != names
            ]
            raise RuntimeError(
                f"{'; '.join(faults)}. Likely cause: they belong to another model or are swapped. "
                "A parameter with requires_grad=False belongs in buffers; if no parameter requires "
                "a gradient, as in a frozen teacher, all belong in params. Fix: `apply, params, "
                "buffers = make_functional(model)`, all three from one call."
            )


# ---- a call --------------------------------------------------------------------------------------


_requires_grad = operator.attrgetter("requires_grad")


def _with_own_empty(recipes: tuple[Recipe, Recipe]) -> tuple[Recipe, Recipe]:
    evaluating, training = recipes
    return evaluating.with_own_empty(), training.with_own_empty()


def _copies(buffers: Tensors, kept: Set[str], *, one_by_one: bool) -> Tensors:
    """Return copies of the buffers, but for those that `kept` names."""
    copied = {n: b for n, b in buffers.items() if n not in kept} if kept else buffers
    values = list(copied.values())
    if one_by_one or not values or any(map(_requires_grad, values)):
        clones = [value.clone() for value in values]
    else:
        clones = foreach.clone_list(values)
    copies = dict(zip(copied, clones, strict=True))
    return {**buffers, **copies} if kept else copies


def _refuse_live(method: Any) -> None:
    """Refuse a method that is bound to a live module, which would run on its own tensors."""
    if isinstance(method, MethodType) and isinstance(method.__self__, nn.Module):
        raise TypeError(
            f"method is {method.__qualname__}, bound to a live module; expected the name of a "
            "method of the model, or a function whose first argument is the module. Fix: "
            f"method={method.__name__!r}."
        )


# ---- make_functional -----------------------------------------------------------------------------


def make_functional(
    model: nn.Module, state_attributes: tuple[str, ...] = ()
) -> tuple[Apply, Tensors, Tensors]:
    """Equal to `apply = lambda params, buffers, *args: (functional_call(model,
    {**params, **(b := copy(buffers))}, args), b)`.

    Call it as `out, new_buffers = apply(params, buffers, *args, train=True, method=None,
    **kwargs)`. It changes neither `params` nor `buffers`, and works under `torch.compile`,
    `torch.vmap` and `torch.func.grad`.

    - Each call of `apply` makes the modules anew, with the tensors of the call in them, and drops
      them afterwards. It does not change `model`, and later changes to `model` do not change
      `apply`. What cannot be made anew, all calls share with `model`: a lock, a logger, an object
      whose class derives from a list or a dict, or has `__slots__`, and what a class has as an
      attribute, such as a list in the body of a module's class.
    - Tied weights stay tied and have one name, their first. This holds for one parameter in several
      places, a parameter that is also a buffer, and two parameters over the same elements of
      memory. Their gradient is the sum over all places.
    - `train` sets the modes that `model.train(train)` would set, also where a class overrides that
      method. If `model` is in train mode, its modules in eval mode stay in eval mode.
    - `method` names what is called instead of `forward`: a method of the model ("decode"), or
      one of its parts. It may be a function of the module too: `method=lambda vae, x:
      vae.decode(vae.encode(x))`. As in torch, hooks of a module run if the module itself is called.
    - A parameter with `requires_grad=False` is in `buffers`, unless no parameter requires a
      gradient.
    - Buffers, persistent or not, are returned as new ones, except what is not a dense tensor: it
      is returned as it is. Other changes made by `forward`
      (attributes, tensors in them, hooks, lists, dicts, helper objects) end with the call, so a
      cache is made anew in each call. The first calls warn, once, of attributes that hold state,
      and of buffers into which only a backward writes, which is lost too. A region that
      torch.utils.checkpoint runs again in the backward still sees them.
    - `apply` may be called inside of itself, again in the backward pass (checkpointing around it)
      and from several threads.
    - A parameter or buffer that is also in a list, a tuple, a dict or an attribute of the model is
      replaced there too.
    - `out` is what the module returns. It may be an argument or a view of one.
    - `train` and `method` do not reach the forward by keyword. One that has an argument of that
      name takes it by position, or by `method=lambda m, x: m(x, train=True)`.
    - `apply.norm_params` names the weights of normalisation layers, for `with_policy`: those of
      torch and of classes that derive from them.
      Add those of your own class with
      `dataclasses.replace(apply, norm_params=apply.norm_params | {"my_norm.weight"})`.
    - Dropout draws from torch's global generator, unless `train_step` is given an `rng`.

    Args:
        model: The module. It is not changed.
        state_attributes: Names or globs of tensors in plain attributes that are state, such as
            `("*.mem",)` for the membranes of a spiking net. They are among the buffers. In a list
            or dict, the name is `layer.attribute.key`; the forward may replace it by one with the
            same keys.

    Returns:
        `apply, params, buffers`. The last two are dicts of detached copies by dotted name.

    Raises:
        TypeError: `model` is not a module, or contains a torch.jit module, a
            DistributedDataParallel, or a module with `__slots__`. From `apply`: `method` is bound
            to a live module.
        ValueError: A lazy parameter has not seen a batch; a parameter has a hook on its gradient or
            is in a class attribute; a parameter or buffer shares memory with a tensor that is not
            tied to it, such as a view of it; a name of `state_attributes` matches nothing, or what
            is not a tensor; or a closure, a hook, a patched or compiled forward, a set, a key, an
            object with `__slots__`, of a class derived from a container or written in C holds a
            part of the live model.
        RuntimeError: From `apply`: the names are of another model, or the forward does one of the
            following. It registers a parameter, buffer or module, replaces or removes a parameter,
            removes a buffer or replaces it in only one of two places, writes into a parameter, or
            into a plain tensor that shares memory with another one, or leaves another structure in
            a list or dict of state.
            Writes into `.data` are found in the first call in training on a CPU, and a new `.data`
            in that call on any device. Under `torch.compile` all writes change a copy and are
            dropped.

    Example:
        >>> from torch import nn, ones
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> apply, params, buffers = make_functional(model)
        >>> out, new_buffers = apply(params, buffers, ones(4, 3))
        >>> buffers["1.num_batches_tracked"], new_buffers["1.num_batches_tracked"]
        (tensor(0), tensor(1))

    Source: torch.func.functional_call, which writes into the buffers it is given and keeps hold of
    the live module; `method` is that of flax's Module.apply.
    """
    _check_module(model)
    registered = registered_tensors(model, state_in_attributes(model, state_attributes))
    frozen = {name: p for name, p in registered.params.items() if not p.requires_grad}
    if len(frozen) == len(registered.params):
        frozen = {}
    params = {name: p for name, p in registered.params.items() if name not in frozen}
    buffers = frozen | registered.buffers
    _check_tensors(registered, params)
    recipe = recipe_of(model, registered)
    evaluating, training = _modes_of(model, recipe, params | buffers)
    apply = Apply(
        CallHistory((recipe.with_modes(evaluating), recipe.with_modes(training))),
        _param_names=frozenset(params),
        _buffer_names=frozenset(buffers),
        frozen_params=frozenset(frozen),
        norm_params=_norm_params(model, registered.first_name_of),
        _constants=frozenset(name for name, b in buffers.items() if is_constant(b)),
        _renormalised=_renormalised_params(model, registered.first_name_of) & params.keys(),
    )
    return apply, _detached_copies(params), _detached_copies(buffers)


def _check_tensors(registered: RegisteredTensors, params: Tensors) -> None:
    """Refuse a tensor that has no shape yet, and a trained one with a hook on its gradient."""
    for name, tensor in (*registered.params.items(), *registered.buffers.items()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialised yet. Fix: run `model(example_batch)` once before "
                "make_functional(model)."
            )
    for name, param in (*params.items(), *registered.aliases.items()):
        if private.has_gradient_hook(param):
            raise ValueError(
                f"{name} has a hook on its gradient, which would never run: gradients are values "
                "here. Fix: remove it, and do its work on the gradients between value_and_grad "
                "and the step."
            )


def _detached_copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"make_functional takes an nn.Module, got {type(model).__name__}. Fix: pass the "
            "module; a plain function of tensors is pure already."
        )
    for path, module in model.named_modules():
        what = f"{path or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{what} of torch.jit, which cannot be copied without its tensors. Fix: pass the "
                "module that it was made from, and compile the step for speed."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{what}, which waits for gradients of the live parameters. Fix: "
                "`make_functional(wrapper.module)`, and `train_step(..., group=...)` for the ranks."
            )


def _norm_params(model: nn.Module, first_name_of: dict[int, str]) -> frozenset[str]:
    """Return the names of the weights and biases of normalisation layers."""
    norms = filter(_is_norm, model.modules())
    return frozenset(first_name_of[id(p)] for norm in norms for p in norm.parameters())


def _is_norm(module: nn.Module) -> bool:
    # The second holds for batch and instance norms, also those that other libraries derive from
    # torch's own base class.
    return isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or (
        hasattr(module, "track_running_stats") and hasattr(module, "running_mean")
    )


def _renormalised_params(model: nn.Module, first_name_of: dict[int, str]) -> frozenset[str]:
    """Return the names of what embeddings with `max_norm` write into."""
    return frozenset(
        first_name_of[id(param)]
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        for param in module.parameters(recurse=False)
    )


# ---- which modules train, as `model.train()` and `model.eval()` decide ---------------------------


def _modes_of(model: nn.Module, recipe: Recipe, tensors: Tensors) -> tuple[list[bool], list[bool]]:
    """Return the modes of `model.modules()` after `model.eval()` and after `model.train()`. If
    `model` is in train mode, what it has in eval mode stays there.

    A class may override `train`, to freeze a batch norm or to merge weights, so it is called on a
    copy.
    """
    modules = list(model.modules())

    def modes_after(change: Callable[[nn.Module], Any]) -> list[bool]:
        # With its own containers, because it may install hooks.
        copy = recipe.with_own_empty().make_copy(_detached_copies(tensors))
        change(copy.root)
        return [module.training for module in copy.modules()]

    evaluating, training = [False for _ in modules], [True for _ in modules]
    has_own_eval = type(model).eval is not nn.Module.eval
    if has_own_eval or any(type(module).train is not nn.Module.train for module in modules):
        evaluating = modes_after(lambda m: m.eval() if has_own_eval else _set_mode(m, False))
        training = modes_after(lambda m: _set_mode(m, True))
    if model.training:
        training = [t and module.training for t, module in zip(training, modules, strict=True)]
    return evaluating, training


def _set_mode(module: nn.Module, mode: bool) -> None:
    """Equal to `module.train(mode)`, where a `train` that takes something else is left alone."""
    if type(module).train is not nn.Module.train and _takes_mode(module):
        module.train(mode)
        return
    module.training = mode
    for child in module.children():
        _set_mode(child, mode)


def _takes_mode(module: nn.Module) -> bool:
    signature = inspect.signature(module.train)
    try:
        signature.bind(True)
    except TypeError:
        return False
    first = next(iter(signature.parameters.values()))
    return first.name == "mode" or isinstance(first.default, bool)
