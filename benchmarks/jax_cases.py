"""The jobs that purescale and JAX both train in `jax_side_by_side.py`, as NumPy arrays, and the
process that times one of them. Imports neither torch nor JAX.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LR, WEIGHT_DECAY, MAX_NORM, MOMENTUM = 1e-3, 1e-2, 1.0, 0.1
INNER_LR, INNER_STEPS = 0.1, 3  # of MAML
SCANNED = 10
HEADS = 4
DEVICE = os.environ.get("DEVICE", "cpu")  # which the driver sets
STRIDES = (2, 1, 2, 1)  # of the conv net


class Case(NamedTuple):
    """A model, a batch, and what is made of a step."""

    title: str
    model: str  # "mlp", "conv" or "gpt"
    params: dict[str, Any]
    buffers: dict[str, Any]
    batch: tuple[Any, Any]
    program: str = "step"  # or "sweep", "scan", "maml", "derivative"
    members: int = 1


def _dense(rng: Any, before: int, after: int) -> Any:
    return (rng.standard_normal((before, after)) / before**0.5).astype(np.float32)


def _mlp(*widths: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {}
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        params[f"w{index:02}"] = _dense(rng, before, after)
        params[f"b{index:02}"] = np.zeros(after, np.float32)
    x = rng.standard_normal((32, widths[0])).astype(np.float32)
    return params, (x, rng.integers(0, widths[-1], 32))


def _conv() -> tuple[dict[str, Any], dict[str, Any], tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    widths = (3, 16, 32, 64, 64)
    params, buffers = {}, {}
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        kernel = rng.standard_normal((after, before, 3, 3)) * (2 / (9 * before)) ** 0.5
        params[f"conv{index}"] = kernel.astype(np.float32)
        params[f"scale{index}"] = np.ones(after, np.float32)
        params[f"shift{index}"] = np.zeros(after, np.float32)
        buffers[f"mean{index}"] = np.zeros(after, np.float32)
        buffers[f"var{index}"] = np.ones(after, np.float32)
    params["head"] = _dense(rng, widths[-1], 10)
    x = rng.standard_normal((16, 3, 32, 32)).astype(np.float32)
    return params, buffers, (x, rng.integers(0, 10, 16))


def _gpt(width: int, depth: int, length: int = 64) -> tuple[dict[str, Any], tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    vocabulary = 128
    params: dict[str, Any] = {"token": 0.02 * rng.standard_normal((vocabulary, width))}
    params["position"] = 0.02 * rng.standard_normal((length, width))
    for index in range(depth):
        for name in ("attend", "think"):
            params[f"{name}{index}.scale"] = np.ones(width)
            params[f"{name}{index}.shift"] = np.zeros(width)
        params[f"qkv{index}"] = _dense(rng, width, 3 * width)
        params[f"out{index}"] = _dense(rng, width, width)
        params[f"up{index}"] = _dense(rng, width, 4 * width)
        params[f"down{index}"] = _dense(rng, 4 * width, width)
    tokens = rng.integers(0, vocabulary, (8, length + 1))
    params = {name: value.astype(np.float32) for name, value in params.items()}
    return params, (tokens[:, :-1], tokens[:, 1:])


def cases() -> dict[str, Callable[[], Case]]:
    """Return all cases, each made when it is called."""

    def mlp(title: str, *widths: int, program: str = "step", members: int = 1) -> Case:
        params, batch = _mlp(*widths)
        return Case(title, "mlp", params, {}, batch, program, members)

    def conv() -> Case:
        return Case("conv net, 4 convolutions with batch norm", "conv", *_conv())

    def gpt(width: int, depth: int) -> Case:
        params, batch = _gpt(width, depth)
        size = sum(value.size for value in params.values()) / 1e6
        title = f"GPT of width {width}, {depth} layers, {size:.1f}M"
        return Case(title, "gpt", params, {}, batch)

    tiny = (64, 128, 10)
    return {
        "mlp": lambda: mlp("tiny MLP 64-128-10", *tiny),
        "conv": conv,
        "gpt": lambda: gpt(128, 2),
        "sweep16": lambda: mlp("sweep of 16 tiny MLPs", *tiny, program="sweep", members=16),
        "sweep64": lambda: mlp("sweep of 64 tiny MLPs", *tiny, program="sweep", members=64),
        "scan": lambda: mlp("ten steps of the tiny MLP in one call", *tiny, program="scan"),
        "maml": lambda: mlp("MAML, three inner steps", *tiny, program="maml"),
        "derivative": lambda: mlp("d loss / d lr of ten steps", *tiny, program="derivative"),
        "tensors4": lambda: mlp("MLP of width 32, 4 tensors", *[32] * 3),
        "tensors20": lambda: mlp("MLP of width 32, 20 tensors", *[32] * 11),
        "tensors50": lambda: mlp("MLP of width 32, 50 tensors", *[32] * 26),
        "tensors150": lambda: mlp("MLP of width 32, 150 tensors", *[32] * 76),
        "gpt64": lambda: gpt(64, 4),
        "gpt256": lambda: gpt(256, 4),
        "gpt512": lambda: gpt(512, 4),
    }


def stacked(array: Any, count: int) -> Any:
    """Return an array [count, ...] of different rows, of a batch for each of many steps."""
    return np.stack([np.roll(array, index, axis=0) for index in range(count)])


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it started."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def serve(make: Callable[[Case], Callable[[], Any]]) -> None:
    """Run the case of the command line. `make` returns a function that makes one call, waits for
    its results, and returns the losses. Print the seconds of the imports, those of CPU and of the
    clock to the first result, and the losses of three calls; then, for each line of the input, the
    microseconds of a call: of CPU time, on a GPU of the clock.
    """
    imports = cpu_seconds()
    clock = time.process_time if DEVICE == "cpu" else time.perf_counter
    case = cases()[sys.argv[-1]]()
    start = cpu_seconds(), time.monotonic()
    run = make(case)
    results = [run()]
    first = cpu_seconds() - start[0], time.monotonic() - start[1]
    results += [run(), run()]
    losses = [float(np.asarray(result.tolist()).ravel()[-1]) for result in results]
    print(json.dumps({"imports": imports, "first": first, "losses": losses}), flush=True)
    began = clock()
    run()
    calls = max(3, min(300, int(0.2 / (clock() - began + 1e-6))))
    for _ in sys.stdin:
        began = clock()
        for _ in range(calls):
            run()
        print(1e6 * (clock() - began) / calls, flush=True)
