"""A mixed-precision training step as a value: pure functions over immutable pytrees of tensors. In
the order of a step:

A module as a function:
    make_functional       a module as `apply`, its parameters and its buffers
    load_into             parameters and buffers copied back into a module

What runs in which dtype:
    Policy                dtypes of parameters, computation, output and norms
    policy                a Policy from text: "params=float32,compute=float16,output=float32"
    with_policy           `apply` under a policy
    norms_in_float32      a scope in which half inputs of norms are computed in float32

The loss scale:
    Rule                  the protocol of a rule: `init(device)` and `update(scaler, found_inf)`
    HasScale              the protocol of its state: tensors, one of them `scale`
    DynamicScale          the rule: halve on an overflow, double after clean steps
    StaticScale           the rule: a scale that never moves
    NoScale               the rule: a scale of 1
    ScalerState           the state of these three
    scale_loss            the loss times the scale, in float32
    unscale_and_check     gradients over the scale, and `found_inf`
    check_scaler          syncs; raises if training has stopped moving
    HeadroomScale         the rule: follow the largest gradient, some bits below an overflow
    HeadroomState         its state
    grad_amax             the largest magnitude in gradients, which it follows

Reports:
    probe_scales          syncs; one batch at many scales: which overflow, which leaf underflows
    ScaleProbe            its result: a table, a figure, the safe window
    grad_report           amax, zeros, subnormals and nonfinite values of each leaf
    GradReport            its result: a table when printed
    LeafReport            one row of it
    forward_report        what each module returned, and in which inf or NaN arose
    ForwardReport         its result: a table, a figure, `.first`
    ModuleReport          one row of it
    update_report         how much of a wanted update has arrived in each parameter
    UpdateReport          its result: a table, a figure
    UpdateRow             one row of it
    wanted_update         the update of a step before it is rounded, for that report

Over ranks:
    all_reduce_grads      the mean of all ranks' gradients, in buckets
    all_reduce_found_inf  one rank's overflow is every rank's
    all_reduce_bn_stats   batch-norm statistics of all ranks

Accumulation:
    AccumState            a running weighted mean of gradients
    init_accum            the empty one
    accumulate_grads      one microbatch more
    accumulated_grads     the mean, and whether to skip
    merge_accum           two workers' halves of a window as one
    accumulation_window   the position of a microbatch in its window
    Window                its result

Clipping:
    clip_by_global_norm   gradients within a norm, and the norm that they had
    clip_by_value         gradients between two bounds
    check_grad_norm       syncs; raises if a norm is not finite

Optimizers:
    Optimizer             anything with pure `init` and `step`
    from_torch            a class of torch.optim as one
    from_transformation   an optax-style (init, update) pair as one
    schedule_from_torch   any scheduler of torch as a rate by step
    partition             one optimizer for each kind of parameter, as one
    replace_settings      a rate or another setting that a state holds, replaced
    OptState              the state of a torch optimizer

The update of half parameters:
    with_master_weights   an optimizer that steps float32 masters of them
    MasterState           its state
    master_weights        the masters of a state
    split_masters         float32 weights as bfloat16 and the 16 bits that it lacks
    join_masters          the float32 weights again
    with_stochastic_rounding  an optimizer that rounds them by chance
    RoundingState         its state
    stochastic_round      a tree rounded to half precision by chance, without a generator
    with_state_dtype      an optimizer that keeps chosen parts of its state in a narrow dtype

Batch-norm statistics:
    BNStatsState          statistics accumulated over batches
    BNLayerStats          those of one layer
    init_bn_stats         the empty ones
    accumulate_bn_stats   one batch more
    merge_bn_stats        two workers' statistics as one
    bn_buffers            buffers with these statistics
    precise_bn            buffers with the statistics of a whole loader

The step:
    LossFn                `loss_fn(params, buffers, microbatch)`, what a step differentiates
    value_and_grad        its loss, new buffers and scaled gradients, for a loop by hand
    maybe_step            the optimizer's step, unless `found_inf`
    unscale_and_step      unscale, check, clip and step in the fewest passes
    Stepped               its result
    init_train_state      everything that a step changes, as one value
    train_step            a whole step over a list of microbatches
    TrainState            the state that it maps to the next one
    StepInfo              loss, found_inf, scale, grad_norm, grad_amax of a step
    stack_infos           those of many steps as one value
    Guard                 the protocol of a guard: `init(device)` and `update(state, loss, norm)`
    SpikeGuard            the guard: reject a step whose loss or norm spikes
    SpikeState            its state
    check_guard           syncs; raises if it has rejected too many steps in a row

Checkpoints:
    to_state_dict         any state as nested dicts of tensors
    from_state_dict       the state again
    save                  a state as a file, whole or not at all
    load                  the state again; no code from the file is run

Besides:
    select                the old tree if `found_inf`, else the new one
    stack_states          many states as one, for `torch.vmap`
    member                one of them again
    ema                   one step of an exponential moving average
    simulate              a rule over flags or over gradients, without training
    interop               the scalers of other libraries as rules, their state dicts both ways; a
                          running job of torch.amp taken over and given back
"""

from ._module.functional import make_functional, load_into

from ._module.policy import Policy, policy, with_policy
from ._module.norms import norms_in_float32

from ._loss_scale.rule_protocol import Rule, HasScale
from ._loss_scale.rules import DynamicScale, StaticScale, NoScale, ScalerState
from ._loss_scale.scaling import scale_loss, unscale_and_check, check_scaler
from ._loss_scale.headroom import HeadroomScale, HeadroomState, grad_amax

from ._reports.probe import probe_scales, ScaleProbe
from ._reports.grad_report import grad_report, GradReport, LeafReport
from ._reports.forward_report import forward_report, ForwardReport, ModuleReport
from ._reports.update_report import update_report, UpdateReport, UpdateRow
from ._reports.wanted_update import wanted_update

from ._distributed.collectives import all_reduce_grads, all_reduce_found_inf
from ._batch_norm.bn_stats import all_reduce_bn_stats

from ._grads.accumulate import (
    AccumState,
    init_accum,
    accumulate_grads,
    accumulated_grads,
    merge_accum,
    accumulation_window,
    Window,
)

from ._grads.clip import clip_by_global_norm, clip_by_value, check_grad_norm

from ._optim.protocol import Optimizer, from_transformation
from ._optim.torch_optim import from_torch
from ._optim.schedule import schedule_from_torch
from ._optim.partition import partition
from ._optim.in_state import replace_settings

from ._optim.opt_state import OptState

from ._optim.master_weights import (
    with_master_weights,
    MasterState,
    master_weights,
    split_masters,
    join_masters,
)
from ._optim.stochastic_rounding import with_stochastic_rounding, RoundingState, stochastic_round
from ._optim.state_dtype import with_state_dtype

from ._batch_norm.bn_stats import (
    BNStatsState,
    BNLayerStats,
    init_bn_stats,
    accumulate_bn_stats,
    merge_bn_stats,
    bn_buffers,
)
from ._batch_norm.precise_bn import precise_bn

from ._step.value_and_grad import LossFn, value_and_grad

from ._step.optimizer_step import maybe_step, unscale_and_step, Stepped

from ._step.train_step import init_train_state, train_step, TrainState
from ._step.step_info import StepInfo, stack_infos
from ._step.spike_guard import Guard, SpikeGuard, SpikeState, check_guard

from ._checkpoint import to_state_dict, from_state_dict, save, load

from ._tree.select import select
from ._tree.stack import stack_states, member, ema

from . import simulate
from . import interop

__all__ = [  # noqa: RUF022  in the order of a step
    "make_functional",
    "load_into",
    "Policy",
    "policy",
    "with_policy",
    "norms_in_float32",
    "Rule",
    "HasScale",
    "DynamicScale",
    "StaticScale",
    "NoScale",
    "ScalerState",
    "scale_loss",
    "unscale_and_check",
    "check_scaler",
    "HeadroomScale",
    "HeadroomState",
    "grad_amax",
    "probe_scales",
    "ScaleProbe",
    "grad_report",
    "GradReport",
    "LeafReport",
    "forward_report",
    "ForwardReport",
    "ModuleReport",
    "update_report",
    "UpdateReport",
    "UpdateRow",
    "wanted_update",
    "all_reduce_grads",
    "all_reduce_found_inf",
    "all_reduce_bn_stats",
    "AccumState",
    "init_accum",
    "accumulate_grads",
    "accumulated_grads",
    "merge_accum",
    "accumulation_window",
    "Window",
    "clip_by_global_norm",
    "clip_by_value",
    "check_grad_norm",
    "Optimizer",
    "from_torch",
    "from_transformation",
    "schedule_from_torch",
    "partition",
    "replace_settings",
    "OptState",
    "with_master_weights",
    "MasterState",
    "master_weights",
    "split_masters",
    "join_masters",
    "with_stochastic_rounding",
    "RoundingState",
    "stochastic_round",
    "with_state_dtype",
    "BNStatsState",
    "BNLayerStats",
    "init_bn_stats",
    "accumulate_bn_stats",
    "merge_bn_stats",
    "bn_buffers",
    "precise_bn",
    "LossFn",
    "value_and_grad",
    "maybe_step",
    "unscale_and_step",
    "Stepped",
    "init_train_state",
    "train_step",
    "TrainState",
    "StepInfo",
    "stack_infos",
    "Guard",
    "SpikeGuard",
    "SpikeState",
    "check_guard",
    "to_state_dict",
    "from_state_dict",
    "save",
    "load",
    "select",
    "stack_states",
    "member",
    "ema",
    "simulate",
    "interop",
]

__version__ = "0.1.0"
