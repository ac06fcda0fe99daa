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
    forward_report        what each module returned, and the first that is not finite
    ForwardReport         its result: a table, a figure, `.first`
    ModuleReport          one row of it
    update_report         how much of a wanted update has arrived in each parameter
    UpdateReport          its result: a table, a figure
    UpdateRow             one row of it

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
    interop               the scalers of other libraries as rules, their state dicts both ways
"""

from ._module.functional import (
    make_functional as make_functional,
    load_into as load_into,
)

from ._module.policy import (
    Policy as Policy,
    policy as policy,
    with_policy as with_policy,
)
from ._module.norms import norms_in_float32 as norms_in_float32

from ._loss_scale.rule_protocol import Rule as Rule, HasScale as HasScale
from ._loss_scale.rules import (
    DynamicScale as DynamicScale,
    StaticScale as StaticScale,
    NoScale as NoScale,
    ScalerState as ScalerState,
)
from ._loss_scale.scaling import (
    scale_loss as scale_loss,
    unscale_and_check as unscale_and_check,
    check_scaler as check_scaler,
)
from ._loss_scale.headroom import (
    HeadroomScale as HeadroomScale,
    HeadroomState as HeadroomState,
    grad_amax as grad_amax,
)

from ._reports.probe import (
    probe_scales as probe_scales,
    ScaleProbe as ScaleProbe,
)
from ._reports.grad_report import (
    grad_report as grad_report,
    GradReport as GradReport,
    LeafReport as LeafReport,
)
from ._reports.forward_report import (
    forward_report as forward_report,
    ForwardReport as ForwardReport,
    ModuleReport as ModuleReport,
)
from ._reports.update_report import (
    update_report as update_report,
    UpdateReport as UpdateReport,
    UpdateRow as UpdateRow,
)

from ._distributed.collectives import (
    all_reduce_grads as all_reduce_grads,
    all_reduce_found_inf as all_reduce_found_inf,
)
from ._batch_norm.bn_stats import all_reduce_bn_stats as all_reduce_bn_stats

from ._grads.accumulate import (
    AccumState as AccumState,
    init_accum as init_accum,
    accumulate_grads as accumulate_grads,
    accumulated_grads as accumulated_grads,
    merge_accum as merge_accum,
    accumulation_window as accumulation_window,
    Window as Window,
)

from ._grads.clip import (
    clip_by_global_norm as clip_by_global_norm,
    clip_by_value as clip_by_value,
    check_grad_norm as check_grad_norm,
)

from ._optim.protocol import Optimizer as Optimizer, from_transformation as from_transformation
from ._optim.torch_optim import from_torch as from_torch

from ._optim.opt_state import OptState as OptState

from ._optim.master_weights import (
    with_master_weights as with_master_weights,
    MasterState as MasterState,
    master_weights as master_weights,
    split_masters as split_masters,
    join_masters as join_masters,
)
from ._optim.stochastic_rounding import (
    with_stochastic_rounding as with_stochastic_rounding,
    RoundingState as RoundingState,
    stochastic_round as stochastic_round,
)
from ._optim.state_dtype import with_state_dtype as with_state_dtype

from ._batch_norm.bn_stats import (
    BNStatsState as BNStatsState,
    BNLayerStats as BNLayerStats,
    init_bn_stats as init_bn_stats,
    accumulate_bn_stats as accumulate_bn_stats,
    merge_bn_stats as merge_bn_stats,
    bn_buffers as bn_buffers,
)
from ._batch_norm.precise_bn import precise_bn as precise_bn

from ._step.value_and_grad import LossFn as LossFn

from ._step.optimizer_step import (
    maybe_step as maybe_step,
    unscale_and_step as unscale_and_step,
    Stepped as Stepped,
)

from ._step.train_step import (
    init_train_state as init_train_state,
    train_step as train_step,
    TrainState as TrainState,
)
from ._step.step_info import StepInfo as StepInfo, stack_infos as stack_infos
from ._step.spike_guard import (
    Guard as Guard,
    SpikeGuard as SpikeGuard,
    SpikeState as SpikeState,
)

from ._checkpoint import (
    to_state_dict as to_state_dict,
    from_state_dict as from_state_dict,
    save as save,
    load as load,
)

from ._tree.select import select as select
from ._tree.stack import (
    stack_states as stack_states,
    member as member,
    ema as ema,
)

from . import simulate as simulate
from . import interop as interop

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
