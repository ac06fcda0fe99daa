"""A mixed-precision training step as a value: pure functions over immutable pytrees of tensors. In the order of a step:"""

from ._functional import (
    make_functional as make_functional,
    load_into as load_into,
)

from ._precision import (
    Policy as Policy,
    policy as policy,
    with_policy as with_policy,
    norms_in_float32 as norms_in_float32,
)

from ._scaler import (
    DynamicScale as DynamicScale,
    StaticScale as StaticScale,
    NoScale as NoScale,
    ScalerState as ScalerState,
    scale_loss as scale_loss,
    unscale_and_check as unscale_and_check,
    check_scaler as check_scaler,
)

from ._collectives import (
    all_reduce_found_inf as all_reduce_found_inf,
    all_reduce_bn_stats as all_reduce_bn_stats,
)

from ._accum import (
    AccumState as AccumState,
    init_accum as init_accum,
    accumulate_grads as accumulate_grads,
    accumulated_grads as accumulated_grads,
    merge_accum as merge_accum,
    accumulation_window as accumulation_window,
    Window as Window,
)

from ._clip import (
    clip_by_global_norm as clip_by_global_norm,
    clip_by_value as clip_by_value,
    check_grad_norm as check_grad_norm,
)

from ._optim import (
    Optimizer as Optimizer,
    from_torch as from_torch,
    from_transformation as from_transformation,
)

from ._torch_optim import OptState as OptState

from ._bn import (
    BNStatsState as BNStatsState,
    BNLayerStats as BNLayerStats,
    init_bn_stats as init_bn_stats,
    accumulate_bn_stats as accumulate_bn_stats,
    merge_bn_stats as merge_bn_stats,
    bn_buffers as bn_buffers,
    precise_bn as precise_bn,
)

from ._step import (
    maybe_step as maybe_step,
    unscale_and_step as unscale_and_step,
    Stepped as Stepped,
    init_train_state as init_train_state,
    train_step as train_step,
    TrainState as TrainState,
    StepInfo as StepInfo,
)

from ._checkpoint import (
    to_state_dict as to_state_dict,
    from_state_dict as from_state_dict,
    save as save,
    load as load,
)

from ._tree import select as select

from . import interop as interop

__version__ = "0.1.0"
