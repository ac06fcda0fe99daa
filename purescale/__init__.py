"""Functional mixed-precision training: pure functions over immutable pytrees of tensors, listed in
the order of a step.

A module as a function:
    make_functional       a module as `apply`, its parameters and its buffers
    load_into             copy parameters and buffers back into a module

What runs in which dtype:
    Policy                the dtypes of parameters, computation, output and norms
    policy                a Policy from text: "params=float32,compute=float16,output=float32"
    with_policy           `apply` under a policy
    norms_in_float32      a scope in which half inputs of norms are computed in float32

The loss scale:
    Rule                  the protocol of a rule: `init(device)` and `update(scaler, found_inf)`
    HasScale              the protocol of the state of a rule: tensors, one of them `scale`
    DynamicScale          a rule: halve on an overflow, double after clean steps
    StaticScale           a rule: a scale that never changes
    NoScale               a rule: a scale of 1
    ScalerState           the state of these three rules
    scale_loss            the loss times the scale, in float32
    unscale_and_check     gradients divided by the scale, and `found_inf`
    check_scaler          raise if training has stopped moving; syncs
    HeadroomScale         a rule: follow the largest gradient, some bits below an overflow
    grad_amax             the largest magnitude in gradients, for HeadroomScale

Reports:
    probe_scales          one batch at many scales: which overflow, which leaf underflows; syncs
    ScaleProbe            the result of probe_scales: a table, a figure, the safe window
    grad_report           amax, zeros, subnormals and nonfinite values of each leaf
    GradReport            the result of grad_report: a table when printed
    forward_report        what each module returned, and in which inf or NaN arose
    ForwardReport         the result of forward_report: a table, a figure, `.first`
    update_report         how much of a wanted update has arrived in each parameter
    UpdateReport          the result of update_report: a table, a figure
    wanted_update         the update of a step before it is rounded, for update_report

Over ranks:
    all_reduce_grads      the mean of all ranks' gradients, in buckets
    all_reduce_found_inf  True on every rank if one rank overflowed
    all_reduce_bn_stats   batch-norm statistics of all ranks

Accumulation:
    AccumState            a running weighted mean of gradients
    init_accum            an empty AccumState
    accumulate_grads      add the gradients of one microbatch
    accumulated_grads     the mean of the window, and whether to skip the step
    merge_accum           merge two workers' halves of a window
    accumulation_window   the position of a microbatch in its window

Clipping:
    clip_by_global_norm   clip gradients by their global norm, and return the norm
    clip_by_value         clip each element of gradients
    check_grad_norm       raise if a norm is not finite; syncs

Optimizers:
    Optimizer             the protocol of an optimizer: pure `init` and `step`
    from_torch            an optimizer from a class of torch.optim
    from_formula          an optimizer from ten lines of mathematics of your own
    from_torch_optimizer  an optimizer and its state from a live one of torch, by name
    to_torch_optimizer    a state back into it
    from_transformation   an optimizer from an optax-style (init, update) pair
    to_transformation     an optax-style pair from an optimizer
    schedule_from_torch   a learning rate by step from any scheduler of torch
    partition             one optimizer made of several, each for a kind of parameter
    replace_settings      replace a learning rate or another setting that a state holds
    with_schedule_free    an optimizer whose average needs no schedule
    averaged              that average, the parameters to evaluate
    OptState              the state of a torch optimizer

The update of half parameters:
    with_master_weights   an optimizer that steps float32 copies of half parameters
    master_weights        the float32 copies in a state
    split_masters         float32 weights as bfloat16 and the 16 bits that it lacks
    join_masters          float32 weights from both parts
    with_stochastic_rounding  an optimizer that rounds half parameters by chance
    stochastic_round      round a tree to half precision by chance, without a generator
    with_state_dtype      an optimizer that keeps chosen parts of its state in a narrow dtype

Batch-norm statistics:
    BNStatsState          statistics accumulated over batches
    init_bn_stats         an empty BNStatsState
    accumulate_bn_stats   add the statistics of one batch
    merge_bn_stats        merge two workers' statistics
    bn_buffers            buffers with these statistics
    precise_bn            buffers with the statistics of a whole loader; syncs

The step:
    LossFn                the protocol of `loss_fn(params, buffers, microbatch)`
    value_and_grad        loss, new buffers and scaled gradients, for a loop by hand
    maybe_step            the optimizer's step, unless `found_inf`
    unscale_and_step      unscale, check, clip and step in the fewest passes
    Stepped               the result of unscale_and_step
    init_train_state      a new TrainState
    TrainState            everything that a step changes, as one value
    train_step            a whole step over a list of microbatches
    StepInfo              loss, found_inf, scale, grad_norm, grad_amax of a step
    stack_infos           the StepInfo of many steps as one value
    Guard                 the protocol of a guard: `init(device)` and `update(state, loss, norm)`
    SpikeGuard            a guard: reject a step whose loss or norm spikes
    check_guard           raise if a guard has rejected too many steps in a row; syncs

One graph:
    jit                   a function of trees as one compiled graph, without Dynamo
    scan_steps            many steps in one call: a loop as one graph
    capture               a whole step as one CUDA graph, found by its shapes

A whole run:
    vjp_through           the derivative of a run, by replay; syncs
    RunGradient           the result of vjp_through
    fingerprint           one number that any flipped bit of a state changes

Checkpoints:
    to_state_dict         any state as nested dicts of tensors
    from_state_dict       a state from nested dicts of tensors
    save                  save a state to a file, whole or not at all; syncs
    load                  load a state from a file without running code from it; syncs

Other:
    select                the old tree if `found_inf`, else the new one
    clone                 a copy of a state, to keep before a step that donates it
    stack_states          many states as one, for `torch.vmap`
    member                one of the stacked states
    ema                   one step of an exponential moving average
    simulate              a rule over flags or over gradients, without training
    interop               the scalers of other libraries as rules, their state dicts both ways; a
                          running job of torch.amp taken over and given back

Beside it: purescale.types, the records that only annotations name; purescale.testing, for tests.
"""

import sys as _sys

from ._module.functional import make_functional as make_functional
from ._module.load_into import load_into as load_into

from ._module.policy import Policy as Policy, policy as policy, with_policy as with_policy
from ._module.policy import norms_in_float32 as norms_in_float32

from ._loss_scale.rules import Rule as Rule, HasScale as HasScale
from ._loss_scale.rules import (
    DynamicScale as DynamicScale,
    StaticScale as StaticScale,
    NoScale as NoScale,
    ScalerState as ScalerState,
)
from ._loss_scale.scaling import scale_loss as scale_loss, unscale_and_check as unscale_and_check
from ._loss_scale.check_scaler import check_scaler as check_scaler
from ._loss_scale.headroom import HeadroomScale as HeadroomScale, grad_amax as grad_amax

from ._reports.probe import probe_scales as probe_scales, ScaleProbe as ScaleProbe
from ._reports.grad_report import grad_report as grad_report, GradReport as GradReport
from ._reports.forward_report import forward_report as forward_report
from ._reports.forward_report import ForwardReport as ForwardReport
from ._reports.update_report import update_report as update_report, UpdateReport as UpdateReport
from ._reports.update_report import wanted_update as wanted_update

from ._distributed.collectives import all_reduce_grads as all_reduce_grads
from ._distributed.collectives import all_reduce_found_inf as all_reduce_found_inf
from ._batch_norm.bn_stats import all_reduce_bn_stats as all_reduce_bn_stats

from ._grads.accumulate import AccumState as AccumState, init_accum as init_accum
from ._grads.accumulate import accumulate_grads as accumulate_grads
from ._grads.accumulate import accumulated_grads as accumulated_grads, merge_accum as merge_accum
from ._grads.accumulate import accumulation_window as accumulation_window

from ._grads.clip import clip_by_global_norm as clip_by_global_norm, clip_by_value as clip_by_value
from ._grads.clip import check_grad_norm as check_grad_norm

from ._optim.optimizer import Optimizer as Optimizer
from ._torch_optim.from_torch import from_torch as from_torch
from ._torch_optim.from_formula import from_formula as from_formula
from .interop._live_optimizer import from_torch_optimizer as from_torch_optimizer
from .interop._live_optimizer import to_torch_optimizer as to_torch_optimizer
from ._optim.transformation import (
    from_transformation as from_transformation,
    to_transformation as to_transformation,
)
from .interop._schedulers import schedule_from_torch as schedule_from_torch
from ._optim.partition import partition as partition
from ._torch_optim.in_state import replace_settings as replace_settings
from ._wrappers.schedule_free import with_schedule_free as with_schedule_free, averaged as averaged

from ._optim.opt_state import OptState as OptState

from ._wrappers.master_weights import with_master_weights as with_master_weights
from ._wrappers.master_weights import master_weights as master_weights
from ._wrappers.master_weights import split_masters as split_masters, join_masters as join_masters
from ._wrappers.stochastic_rounding import with_stochastic_rounding as with_stochastic_rounding
from ._wrappers.stochastic_rounding import stochastic_round as stochastic_round
from ._wrappers.state_dtype import with_state_dtype as with_state_dtype

from ._batch_norm.bn_stats import BNStatsState as BNStatsState, init_bn_stats as init_bn_stats
from ._batch_norm.bn_stats import accumulate_bn_stats as accumulate_bn_stats
from ._batch_norm.bn_stats import merge_bn_stats as merge_bn_stats, bn_buffers as bn_buffers
from ._batch_norm.precise_bn import precise_bn as precise_bn

from ._step.forward_backward import LossFn as LossFn
from ._step.value_and_grad import value_and_grad as value_and_grad

from ._step.unscale_and_step import maybe_step as maybe_step, unscale_and_step as unscale_and_step
from ._step.unscale_and_step import Stepped as Stepped

from ._step.train_state import init_train_state as init_train_state, TrainState as TrainState
from ._step.train_step import train_step as train_step
from ._step.step_info import StepInfo as StepInfo, stack_infos as stack_infos
from ._step.spike_guard import Guard as Guard, SpikeGuard as SpikeGuard, check_guard as check_guard
from ._jit.jit import jit as jit
from ._jit.scan_steps import scan_steps as scan_steps
from ._jit.capture import capture as capture
from ._runs.vjp_through import vjp_through as vjp_through, RunGradient as RunGradient
from ._tree.fingerprint import fingerprint as fingerprint

from ._checkpoint import to_state_dict as to_state_dict, from_state_dict as from_state_dict
from ._checkpoint import save as save, load as load

from ._tree.hints import hint_attributes as _hint_attributes
from ._tree.select import select as select
from ._tree.pytree import clone as clone
from ._tree.stacking import stack_states as stack_states, member as member
from ._tree.ema import ema as ema

from . import simulate as simulate
from . import interop as interop

__all__ = [  # in this order, but for the room that was imported with its functions
    *(name for name in globals() if not name.startswith("_") and name != "interop"),
    "interop",
]

from .types import *  # noqa: F403  purescale.MasterState works too

__version__ = "0.1.0"
_hint_attributes(_sys.modules[__name__])
