"""What the `purescale` logger says of making graphs: if it takes long, and if it happens often."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from torch import Size

SECONDS = 5.0  # that a first call may take in silence
GRAPHS = 8  # that a function may have in silence
_log = logging.getLogger("purescale")


class SlowCall:
    """A scope that says what a first call does if it takes longer than some seconds."""

    def __init__(self, name: str) -> None:
        self._name, self._doing = name, "tracing"
        self._timer = threading.Timer(SECONDS, self._say)
        self._timer.daemon = True

    def __enter__(self) -> SlowCall:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def compiles(self, number: int) -> None:
        """Take note that the graph has this number of operators, and is being compiled."""
        self._doing = f"compiling {number} operators"

    def _say(self) -> None:
        _log.warning(
            "jit(%s): %s for more than %g seconds. Later calls with arguments of the same shapes "
            "do not wait. In a new cache folder inductor first probes a CPU for some 8 seconds; "
            "TORCHINDUCTOR_VEC_ISA_OK=1 skips that check.",
            *(self._name, self._doing, SECONDS),
        )


def warn_of_graphs(name: str, shapes: Sequence[Sequence[Size]]) -> None:
    """Say once that a function has many graphs, and which argument they differ in. `shapes`: those
    of the tensors of each graph.
    """
    if len(shapes) != GRAPHS + 1:
        return
    _log.warning(
        "jit(%s) has made %d graphs, one for each kind of arguments, and each was compiled. Likely "
        "cause: %s. Fix: pad to a few lengths and drop the last, smaller batch; or compile loss_fn "
        "alone, `torch.compile(loss_fn)`, which takes any length.",
        *(name, len(shapes), _cause(shapes)),
    )


def warn_of_freed_graph(name: str, shapes: Sequence[Sequence[Size]]) -> None:
    """Say that a graph was freed to record another one, as `warn_of_graphs`."""
    _log.warning(
        "capture(%s) has %d graphs, and frees one to record another, which takes longer than three "
        "steps. Likely cause: %s. Fix: pad to a few lengths and drop the last, smaller batch; or "
        "max_graphs=%d.",
        *(name, len(shapes), _cause(shapes), 2 * len(shapes)),
    )


def _cause(shapes: Sequence[Sequence[Size]]) -> str:
    """Return in what the arguments of graphs differ."""
    columns = [set(column) for column in zip(*shapes, strict=False)]
    most = max(map(len, columns), default=0)
    if most <= 1:
        return "arguments that differ in structure, dtype or strides"
    varying = next(column for column in columns if len(column) == most)
    return f"shapes that vary, such as {', '.join(map(str, sorted(map(tuple, varying))[:3]))}"
