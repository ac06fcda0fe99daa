"""Rows of reports and states of parts, for annotations and `isinstance`: `from purescale.types
import MasterState`. The functions that make them are in `purescale`.
"""

from ._batch_norm.bn_stats import BNLayerStats
from ._grads.accumulate import Window
from ._loss_scale.headroom import HeadroomState
from ._reports.forward_report import ModuleReport
from ._reports.grad_report import LeafReport
from ._reports.update_report import UpdateRow
from ._step.spike_guard import SpikeState
from ._wrappers.master_weights import MasterState
from ._wrappers.stochastic_rounding import RoundingState

__all__ = [
    "BNLayerStats",
    "HeadroomState",
    "LeafReport",
    "MasterState",
    "ModuleReport",
    "RoundingState",
    "SpikeState",
    "UpdateRow",
    "Window",
]
