"""An `nn.Module` as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import _get_current_function_mode_stack

from . import _tree

Tensors = dict[str, Tensor]

NORM_MODULES: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """`apply(params, buffers, *args, train=True, **kwargs) -> (out, new_buffers)`; made by `make_functional`."""

    _training: nn.Module
    _evaluating: nn.Module
    norm_params: frozenset[str]  # the weights and biases of normalisation layers
    frozen_params: frozenset[str]  # parameters with requires_grad=False; they stand among the buffers
    _renormed: frozenset[str]  # weights of embeddings with max_norm, which write into them
    _tied: bool  # a tensor has several names; to look for them takes functional_call a while

    def __call__(self, params: Tensors, buffers: Tensors, *args: Any, train: bool = True, **kwargs: Any) -> tuple[Any, Tensors]:
        # functional_call leaves updated buffers in the dict it is given: written in place, or replaced.
        tensors = {
            **{name: param.clone() if name in self._renormed else param for name, param in params.items()},
            **{name: buffer.clone() for name, buffer in buffers.items()},
        }
        versions = {} if _tree.traced() else {name: param._version for name, param in params.items() if not param.is_inference()}
        out = functional_call(self._training if train else self._evaluating, tensors, args, kwargs, tie_weights=self._tied, strict=True)
        for name, version in versions.items():
            if params[name]._version != version:
                raise RuntimeError(
                    f"the forward of the model wrote into its parameter {name}, so params[{name!r}] has changed. "
                    f"A parameter is an argument here. Cure: compute with a changed copy in forward, or change params between steps."
                )
        return out, {name: tensors[name] for name in buffers}


def make_functional(model: nn.Module) -> tuple[Apply, Tensors, Tensors]:
    """Equal to `apply = lambda params, buffers, *args: (functional_call(model, {**params, **(b := copy(buffers))}, args), b)`.

    Returns `apply, params, buffers`, the last two as dicts of detached copies by dotted name.
    `out, new_buffers = apply(params, buffers, *args, train=True, **kwargs)` changes neither `params` nor `buffers` and works
    under `torch.compile`, `torch.vmap` and `torch.func.grad`.

    - The model is copied without its tensors (they lie on the meta device), so later changes to `model` cannot reach `apply`
      and `apply` cannot reach `model`. Tied weights stay tied and have one name, their first.
    - `train` is the mode of every module, except that a module in eval mode inside a model in train mode was frozen and
      stays so. In a model that is in eval mode as a whole, `train` decides for all.
    - A parameter with `requires_grad=False` is not trained: it stands in `buffers`, unless no parameter requires a gradient.
    - Buffers, whether persistent or not, are state. Attributes of other kinds that `forward` sets are not: they stay in the copy.
    - `out` is what the module returns, which may be an argument or a view of one.
    - `apply.norm_params` names the weights of torch's own normalisation layers, for `with_policy`. For a class of your own:
      `dataclasses.replace(apply, norm_params=apply.norm_params | {"my_norm.weight"})`.
    - Random numbers (dropout) come from torch's global generator, unless `train_step` is given an `rng`.

    Raises `TypeError` for what is no module, `ValueError` for lazy parameters that have not seen a batch; `apply` raises
    `RuntimeError` for a module that writes into its own parameters.

    >>> from torch import nn, ones
    >>> apply, params, buffers = make_functional(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    >>> out, new_buffers = apply(params, buffers, ones(4, 3))
    >>> buffers["1.num_batches_tracked"], new_buffers["1.num_batches_tracked"]
    (tensor(0), tensor(1))

    Source: torch.func.functional_call, which writes into the buffers it is given and keeps hold of the live module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"make_functional takes an nn.Module, got {type(model).__name__}. Cure: a plain function of tensors is pure already."
        )
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, tensor in (*params.items(), *buffers.items()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialised yet: a lazy module learns its shapes from the first batch. "
                f"Cure: run `model(example_batch)` once before make_functional(model)."
            )
    frozen = {name for name, p in params.items() if not p.requires_grad}
    if len(frozen) == len(params):
        frozen = set()
    # By identity: a tied weight is known by its first name, wherever else it stands.
    names = {id(parameter): name for name, parameter in params.items()}
    norms = {names[id(p)] for module in model.modules() if isinstance(module, NORM_MODULES) for p in module.parameters()}
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    renormed = {names[id(module.weight)] for module in embeddings if module.max_norm is not None}
    tied = any(
        len(list(every)) > len(once)
        for every, once in (
            (model.named_parameters(remove_duplicate=False), params),
            (model.named_buffers(remove_duplicate=False), buffers),
        )
    )
    training = _skeleton(model)
    if not model.training:
        for module in training.modules():
            module.training = True  # and not training.train(), which a class may have replaced
    evaluating = copy.deepcopy(training).eval()
    return (
        Apply(training, evaluating, frozenset(norms), frozenset(frozen), frozenset(renormed), tied),
        {name: p.detach().clone() for name, p in params.items() if name not in frozen},
        {name: t.detach().clone() for name, t in ({n: params[n] for n in params if n in frozen} | buffers).items()},
    )


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers lie on the meta device; what was one tensor in two places stays one."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            # Left by torch.nn.utils.weight_norm and its kind, computed anew in each forward; deepcopy refuses such tensors.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().to("meta")
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _SyncBatchNorm
    return skeleton


class _SyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that can be told to look at this rank alone: its statistics are then gathered here and reduced afterwards."""

    def forward(self, input: Tensor) -> Tensor:
        if any(getattr(mode, "local_statistics", False) for mode in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        return super().forward(input)
