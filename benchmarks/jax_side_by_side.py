"""Whole steps under `jit` and `scan_steps` against JAX: flax's DynamicScale and optax under
`jax.jit`, from the same parameters to the same losses. Then GPTs of growing width, eager and
compiled.

Run: `python benchmarks/jax_side_by_side.py --jax-python PATH`, the Python of an environment of its
own with JAX in it: `python -m venv build/jax && build/jax/bin/pip install jax flax optax`. Each way
is a process of its own with one thread; the processes run in turn. Microseconds are of CPU time, on
a GPU of the clock until a call has its result; float32 is no TF32 there, on either side.

The seconds are those to the first result, of CPU time, compilers included, and of the clock: with
an empty cache of compiled code, and in a second process with what the first one left. JAX has such
a cache by request only. Imports, those of the compilers too, are a column of their own. Inductor's
probe of the processor is skipped on all sides (docs/guide.md, "The first call").
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax_cases
import torch
import torch.nn.functional as F
from harness import options, record
from jax_cases import Case, cases, serve, stacked
from torch import Tensor

import purescale as ps

GROWING = ("gpt64", "gpt256", "gpt512")
WAYS = ("eager", "loss_fn compiled", "jit", "torch.compile")
# Seconds of CPU to the first result of jit: with an empty cache, and in a second process.
BUDGETS = {
    "tensors4": (8, 1.2),
    "tensors20": (8, 1.2),
    "tensors50": (11, 1.8),
    "tensors150": (20, 3.5),
}

# ---- our side ------------------------------------------------------------------------------------


def mlp(params: Any, buffers: Any, x: Tensor) -> Any:
    depth = len(params) // 2
    for index in range(depth):
        x = torch.addmm(params[f"b{index:02}"], x, params[f"w{index:02}"])
        x = x if index == depth - 1 else F.relu(x)
    return x, buffers


def conv(params: Any, buffers: Any, x: Tensor) -> Any:
    new = {}
    for index, stride in enumerate(jax_cases.STRIDES):
        x = F.conv2d(x, params[f"conv{index}"], stride=stride, padding=1)
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        count = x.numel() // x.shape[1]
        for name, value in (("mean", mean), ("var", var * (count / (count - 1)))):
            new[f"{name}{index}"] = buffers[f"{name}{index}"].lerp(
                value.detach(), jax_cases.MOMENTUM
            )
        x = F.batch_norm(
            x, None, None, params[f"scale{index}"], params[f"shift{index}"], training=True
        ).relu()
    return x.mean((2, 3)) @ params["head"], new


def norm(params: Any, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.scale"], params[f"{name}.shift"])


def gpt(params: Any, buffers: Any, tokens: Tensor) -> Any:
    x = F.embedding(tokens, params["token"]) + params["position"]
    for index in range(sum(name.startswith("qkv") for name in params)):
        qkv = norm(params, f"attend{index}", x) @ params[f"qkv{index}"]
        q, k, v = (
            part.unflatten(-1, (jax_cases.HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ params[f"out{index}"]
        up = norm(params, f"think{index}", x) @ params[f"up{index}"]
        x = x + F.gelu(up, approximate="tanh") @ params[f"down{index}"]
    return x @ params["token"].T, buffers


MODELS: dict[str, Callable[..., Any]] = {"mlp": mlp, "conv": conv, "gpt": gpt}


def make(way: str, case: Case) -> Callable[[], Any]:
    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(array).to(jax_cases.DEVICE)

    params = {name: tensor(value) for name, value in case.params.items()}
    buffers = {name: tensor(value) for name, value in case.buffers.items()}
    batch = tuple(map(tensor, case.batch))
    model, rule = MODELS[case.model], ps.DynamicScale(2.0**16, growth_interval=2000)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = model(params, buffers, batch[0])
        return F.cross_entropy(out.flatten(0, -2), batch[1].flatten()), buffers

    def train_step(state: Any, batch: Any, optimizer: Any, **settings: Any) -> Any:
        settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule, **settings}
        return ps.train_step(state, [batch], **settings)

    def init(optimizer: Any) -> Any:
        return ps.init_train_state(params, buffers, optimizer, rule)

    sgd = ps.from_torch(torch.optim.SGD, lr=jax_cases.INNER_LR, in_state=("lr",))
    if case.program == "maml":

        def after(params: Any, batch: Any) -> Tensor:
            state = ps.init_train_state(params, buffers, sgd, rule)
            for _ in range(jax_cases.INNER_STEPS):
                state, _ = train_step(state, batch, sgd)
            return loss_fn(state.params, buffers, batch)[0]

        fn: Any = ps.jit(torch.func.grad_and_value(after))
        return lambda: fn(params, batch)[1]

    if case.program == "derivative":

        def after_lr(lr: Tensor, state: Any, batch: Any) -> Tensor:
            state = ps.replace_settings(state, lr=lr)
            for _ in range(jax_cases.SCANNED):
                state, info = train_step(state, batch, sgd)
            return info.loss

        fn = ps.jit(torch.func.grad(after_lr))
        lr, start = torch.tensor(jax_cases.INNER_LR, device=jax_cases.DEVICE), init(sgd)
        return lambda: fn(lr, start, batch)

    sweeps = case.program == "sweep"
    adamw = ps.from_torch(
        torch.optim.AdamW,
        lr=jax_cases.LR,
        weight_decay=jax_cases.WEIGHT_DECAY,
        in_state=("lr",) if sweeps else (),
    )
    step = functools.partial(train_step, optimizer=adamw, max_norm=jax_cases.MAX_NORM)
    state = init(adamw)
    if sweeps:
        members = torch.arange(case.members, device=jax_cases.DEVICE)
        lrs = jax_cases.LR * (1 + members / case.members)
        state = ps.stack_states([ps.replace_settings(state, lr=lr) for lr in lrs])
        fn = ps.jit(torch.vmap(step, in_dims=(0, None)), donate=0)
    elif case.program == "scan":
        batch = tuple(tensor(stacked(array, jax_cases.SCANNED)) for array in case.batch)
        fn = functools.partial(ps.scan_steps, ps.jit(step))
    elif way == "jit":
        fn = ps.jit(step, donate=0)
    elif way == "torch.compile":
        fn = torch.compile(functools.partial(step, donate=True), fullgraph=True)
    else:
        if way == "loss_fn compiled":
            loss_fn = torch.compile(loss_fn, fullgraph=True)
        fn = functools.partial(step, donate=True)
    states = [state]

    def run() -> Tensor:
        states[0], info = fn(states[0], batch)
        loss: Tensor = info.loss
        return loss

    return run


# ---- the driver ----------------------------------------------------------------------------------


@contextlib.contextmanager
def process(device: str, cache: str, python: str, script: str, *arguments: str) -> Iterator[Any]:
    """Start one way, with one thread and a folder for compiled code."""
    settings = {
        "DEVICE": device,
        "JAX_PLATFORMS": device,
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [python, str(Path(__file__).with_name(script)), *arguments]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **settings}, **pipes) as started:
        yield started
        started.stdin.close()


def answer(started: Any) -> Any:
    return json.loads(started.stdout.readline())


def compare(name: str, ways: dict[str, tuple[str, ...]], given: Any) -> None:
    """Print each way of a case against the first way, and check that all have its losses."""
    title = cases()[name]().title
    firsts, seconds, started = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for way, command in ways.items():
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            with process(given.device, cache, *command) as first:
                firsts[way] = answer(first)
            started[way] = stack.enter_context(process(given.device, cache, *command))
            seconds[way] = answer(started[way])
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(given.rounds):
            for way, running in started.items():
                print(file=running.stdin, flush=True)
                times[way].append(answer(running))
    baseline = next(iter(ways))
    expected = firsts[baseline]["losses"]
    print(f"### {title}\n")
    print(f"| way | us | against {baseline} | quartiles | imports | first | second process |")
    print("|---|---|---|---|---|---|---|")
    for way, values in times.items():
        for loss, other in zip(firsts[way]["losses"], expected, strict=True):
            assert math.isclose(loss, other, rel_tol=1e-3), (way, firsts[way]["losses"], expected)
        ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        us, imports = statistics.median(values), firsts[way]["imports"]
        (cpu, wall), (cpu2, wall2) = firsts[way]["first"], seconds[way]["first"]
        print(
            f"| {way} | {us:.0f} | {ratio:.2f} | {low:.2f} to {high:.2f} | {imports:.1f} | "
            f"{cpu:.1f} ({wall:.1f}) | {cpu2:.1f} ({wall2:.1f}) |"
        )
        record(given, title=title, row=way, baseline=baseline, us=us, ratio=ratio, low=low,
               high=high, imports=imports, first=[cpu, wall], second=[cpu2, wall2])  # fmt: skip
    if name in BUDGETS:
        most = 1.5 * firsts["loss_fn compiled"]["first"][0] + 3
        first_budget, second_budget = BUDGETS[name]
        print(
            f"\nBudgets of jit: first {first_budget}, and {most:.1f}, which is 1.5 of loss_fn "
            f"compiled and 3 seconds; second process {second_budget}."
        )
    print(flush=True)


def main() -> None:
    given = options(
        __doc__,
        **{
            "jax-python": {"default": "build/jax/bin/python", "help": "of an environment with JAX"},
            "case": {"nargs": "*", "default": list(cases()), "help": "some of the cases"},
        },
    )
    for name in given.case:
        budgeted = ("loss_fn compiled", "jit") if name in BUDGETS else ("jit",)
        ours = {
            way: (sys.executable, Path(__file__).name, "--way", way, name)
            for way in (WAYS if name in GROWING else budgeted)
        }
        jax = {} if name in GROWING else {"JAX": (given.jax_python, "jax_side.py", name)}
        compare(name, {**jax, **ours}, given)


if __name__ == "__main__":
    if "--way" in sys.argv:
        import torch._inductor.compile_fx  # an import, as JAX's compiler is

        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = False

        def finished(case: Case) -> Callable[[], Any]:
            run = make(sys.argv[2], case)
            return (
                run if jax_cases.DEVICE == "cpu" else lambda: (run(), torch.cuda.synchronize())[0]
            )

        serve(finished)
    else:
        main()
