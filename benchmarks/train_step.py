"""A whole training step, AdamW: forward, backward and everything after. Run `make bench`.

The baseline is the hand-written GradScaler loop with fused AdamW, eager against eager and
`torch.compile(model)` against the whole step compiled; Lightning Fabric and accelerate run the
loops of their own documentation. The loop by hand, with `value_and_grad`, on one thread:
`OMP_NUM_THREADS=1 python benchmarks/train_step.py --only by-hand`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import torch
import torch.nn.functional as F
from harness import DTYPES, Call, Job, Rows, compare, options, seconds
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import purescale as ps

LR = 1e-3
SCALE = 2.0**10  # low enough that no step overflows under float16: a skipped one would be cheaper
PRECISION = {  # what Fabric and accelerate call it
    "float32": ("32-true", "no"),
    "bfloat16": ("bf16-mixed", "bf16"),
    "float16": ("16-mixed", "fp16"),
}


Window = list[tuple[Tensor, Tensor]]  # microbatches


class Task(NamedTuple):
    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch
    layout: torch.memory_format = torch.contiguous_format  # of images and weights
    batch: Callable[..., tuple[Tensor, Tensor]] = models.batch

    def make(self, device: str, microbatches: int = 1) -> tuple[nn.Module, Window]:
        torch.manual_seed(0)
        x, y = self.batch(*self.shape, device=device)
        x, model = (
            x.to(memory_format=self.layout),
            self.model().to(device, memory_format=self.layout),
        )
        return model, list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))


TASKS = [
    Task("small conv net", models.conv_net, (32, 3, 32, 32)),
    Task("the same, 4 images (3 ms)", models.conv_net, (4, 3, 32, 32)),
    Task(
        "ResNet-18-like, width 16",
        lambda: models.resnet(3, width=16, stages=4, blocks=2),
        (32, 3, 32, 32),
    ),
    Task("small transformer", models.transformer, (16, 32, 32)),
]
BY_HAND = [  # where what is around the model is most of a step
    TASKS[1],
    Task("MLP", functools.partial(models.mlp, 256, 4), (64, 256)),
    Task("tiny MLP", functools.partial(models.mlp, 32, 3), (16, 32)),
]
COMPILED = [
    TASKS[0],
    TASKS[0]._replace(title="small conv net, channels_last", layout=torch.channels_last),
    BY_HAND[1],
]


# ---- the rows ------------------------------------------------------------------------------------


def torch_step(
    task: Task,
    given: argparse.Namespace,
    max_norm: float | None = None,
    microbatches: int = 1,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    **implementation: bool,
) -> tuple[Callable[[Window], None], Window]:
    """A step of the loop of torch's documentation, and microbatches for it."""
    model, data = task.make(given.device, microbatches)
    forward = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **implementation)
    scaler = torch.amp.GradScaler(given.device, init_scale=SCALE)

    def step(window: Window) -> None:
        optimizer.zero_grad(set_to_none=True)
        for x, y in window:
            with torch.autocast(
                given.device, DTYPES[given.dtype], enabled=given.dtype != "float32"
            ):
                loss = F.cross_entropy(forward(x), y)
            scaler.scale(loss / microbatches if microbatches > 1 else loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step, data


def grad_scaler(task: Task, given: argparse.Namespace, *args: Any, **settings: Any) -> Job:
    """The loop of torch's documentation."""
    return Call(functools.partial(*torch_step(task, given, *args, **settings)))


def refuse_float16_on_cpu(given: argparse.Namespace) -> None:
    """accelerate refuses it, Fabric takes bfloat16 in its place."""
    if (given.device, given.dtype) == ("cpu", "float16"):
        raise ValueError("it has no float16 on a CPU")


def fabric(task: Task, given: argparse.Namespace) -> Job:
    from lightning.fabric import Fabric

    refuse_float16_on_cpu(given)
    model, [(x, y)] = task.make(given.device)
    fabric = Fabric(accelerator=given.device, devices=1, precision=PRECISION[given.dtype][0])
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()

    return Call(step)


def accelerate(task: Task, given: argparse.Namespace) -> Job:
    from accelerate import Accelerator

    refuse_float16_on_cpu(given)
    model, [(x, y)] = task.make(given.device)
    accelerator = Accelerator(cpu=given.device == "cpu", mixed_precision=PRECISION[given.dtype][1])
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    )

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()

    return Call(step)


class Parts(NamedTuple):
    """What a step of this package is made of."""

    data: Window
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss_fn: Callable[..., Any]
    optimizer: Any
    rule: ps.DynamicScale


def made(task: Task, given: argparse.Namespace, microbatches: int = 1) -> Parts:
    model, data = task.make(given.device, microbatches)
    apply, params, buffers = ps.make_functional(model)
    if given.dtype != "float32":
        apply = ps.with_policy(
            apply, f"params=float32,compute=autocast({given.dtype}),output=float32"
        )
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=LR), ps.DynamicScale(init_scale=SCALE)

    def loss_fn(
        params: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Tensor, Tensor]
    ) -> Any:
        x, y = batch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    return Parts(data, params, buffers, loss_fn, optimizer, rule)


def pure_step(
    task: Task,
    given: argparse.Namespace,
    microbatches: int = 1,
    wrap: Callable[[Any], Any] = lambda step: step,
    wrap_loss: Callable[[Any], Any] = lambda loss_fn: loss_fn,
    static: bool = False,
    **settings: Any,
) -> tuple[Callable[[Window], None], Window]:
    """A step by `train_step`, and microbatches for it. `static`: the donated tensors stay where
    they are, as CUDA graphs that write into them must know.
    """
    parts = made(task, given, microbatches)
    step = wrap(
        functools.partial(
            ps.train_step,
            loss_fn=wrap_loss(parts.loss_fn),
            optimizer=parts.optimizer,
            rule=parts.rule,
            **settings,
        )
    )
    state = ps.init_train_state(parts.params, parts.buffers, parts.optimizer, parts.rule)
    if static:
        torch.utils._pytree.tree_map_only(Tensor, torch._dynamo.mark_static_address, state)

    def once(window: Window) -> None:
        nonlocal state
        state, _ = step(state, window)

    return once, parts.data


def purescale(task: Task, given: argparse.Namespace, *args: Any, **settings: Any) -> Job:
    """`train_step`."""
    return Call(functools.partial(*pure_step(task, given, *args, **settings)))


def by_hand(task: Task, given: argparse.Namespace, max_norm: float, donate: bool = False) -> Job:
    """The loop of `value_and_grad` and `unscale_and_step`."""
    [batch], params, buffers, loss_fn, optimizer, rule = made(task, given)
    gradients = ps.value_and_grad(loss_fn)
    opt_state, scaler = optimizer.init(params), rule.init(given.device)

    def step() -> None:
        nonlocal params, buffers, opt_state, scaler
        (_, new_buffers), grads = gradients(params, buffers, batch, scaler=scaler)
        out = ps.unscale_and_step(
            optimizer, scaler, params, grads, opt_state, max_norm, donate=donate
        )
        params, opt_state = out.params, out.opt_state
        buffers = ps.select(out.found_inf, buffers, new_buffers)
        scaler = rule.update(scaler, out.found_inf)

    return Call(step)


def by_parts(task: Task, given: argparse.Namespace, max_norm: float, donate: bool = False) -> Job:
    """The loop of the README, one part after the other."""
    [batch], params, buffers, loss_fn, optimizer, rule = made(task, given)
    gradients = ps.value_and_grad(loss_fn)
    opt_state, scaler = optimizer.init(params), rule.init(given.device)

    def step() -> None:
        nonlocal params, buffers, opt_state, scaler
        (_, new_buffers), grads = gradients(params, buffers, batch, scaler=scaler)
        grads, bad = ps.unscale_and_check(scaler, grads, donate=donate)
        grads, _ = ps.clip_by_global_norm(grads, max_norm)
        params, opt_state = ps.maybe_step(optimizer, params, grads, opt_state, bad, donate=donate)
        buffers = ps.select(bad, buffers, new_buffers)
        scaler = rule.update(scaler, bad)

    return Call(step)


def window_by_hand(task: Task, given: argparse.Namespace, microbatches: int) -> Job:
    """The loop of `accumulate_grads` over a window, donated."""
    data, params, buffers, loss_fn, optimizer, rule = made(task, given, microbatches)
    gradients = ps.value_and_grad(loss_fn)
    opt_state, scaler = optimizer.init(params), rule.init(given.device)

    def step() -> None:
        nonlocal params, buffers, opt_state, scaler
        accum, new_buffers = ps.init_accum(params), buffers
        for batch in data:
            (_, new_buffers), grads = gradients(params, new_buffers, batch, scaler=scaler)
            grads, bad = ps.unscale_and_check(scaler, grads, donate=True)
            accum = ps.accumulate_grads(accum, grads, found_inf=bad, donate=True)
        grads, bad = ps.accumulated_grads(accum, donate=True)
        params, opt_state = ps.maybe_step(optimizer, params, grads, opt_state, bad, donate=True)
        buffers = ps.select(bad, buffers, new_buffers)
        scaler = rule.update(scaler, accum.found_inf)

    return Call(step)


# ---- the tables ----------------------------------------------------------------------------------


def eager(task: Task, given: argparse.Namespace) -> Rows:
    unscaled = "" if given.dtype == "float16" else ", which does not scale here"
    names = PRECISION[given.dtype]
    return {
        "GradScaler + fused AdamW": lambda: grad_scaler(task, given, fused=True),
        "GradScaler + foreach AdamW": lambda: grad_scaler(task, given, foreach=True),
        "GradScaler + for-loop AdamW": lambda: grad_scaler(task, given, foreach=False),
        f"Fabric {names[0]} + fused AdamW{unscaled}": lambda: fabric(task, given),
        f"accelerate {names[1]} + fused AdamW{unscaled}": lambda: accelerate(task, given),
        "purescale, donate=True": lambda: purescale(task, given, donate=True),
        "purescale": lambda: purescale(task, given),
    }


def with_settings(task: Task, given: argparse.Namespace, **settings: Any) -> Rows:
    return {
        "GradScaler + fused AdamW": lambda: grad_scaler(task, given, fused=True, **settings),
        "purescale, donate=True": lambda: purescale(task, given, donate=True, **settings),
        "purescale": lambda: purescale(task, given, **settings),
    }


def loops_by_hand(task: Task, given: argparse.Namespace, **settings: Any) -> Rows:
    """Without and with donation, beside the composed step."""
    return {
        **with_settings(task, given, **settings),
        "by hand, donate=True": lambda: by_hand(task, given, donate=True, **settings),
        "by hand": lambda: by_hand(task, given, **settings),
        "by parts, donate=True": lambda: by_parts(task, given, donate=True, **settings),
        "by parts": lambda: by_parts(task, given, **settings),
    }


def compile_seconds(job: Job, device: str) -> float:
    """Until steps are as fast as they get: the second may be compiled anew. Nothing comes from a
    cache on disk.
    """
    with fresh_cache():
        return seconds(lambda: [job.run() for _ in range(3)], device)


def compiled(task: Task, given: argparse.Namespace) -> Rows:
    whole = functools.partial(torch.compile, fullgraph=True)
    jit = functools.partial(ps.jit, donate=0)
    rows: Rows = {
        "GradScaler + fused AdamW, torch.compile(model)": lambda: grad_scaler(
            task, given, wrap=torch.compile, fused=True
        ),
        "purescale, donate=True, compiled": lambda: purescale(task, given, wrap=whole, donate=True),
        "purescale, compiled": lambda: purescale(task, given, wrap=whole),
        "purescale, donate=True, loss_fn compiled": lambda: purescale(
            task, given, wrap_loss=whole, donate=True
        ),
        "purescale, jit, donate=0": lambda: purescale(task, given, wrap=jit),
    }
    if given.device == "cuda":
        mode = {"mode": "reduce-overhead"}
        model, step = functools.partial(torch.compile, **mode), functools.partial(whole, **mode)
        rows["GradScaler + fused AdamW, reduce-overhead"] = lambda: grad_scaler(
            task, given, wrap=model, fused=True
        )
        rows["purescale, donate=True, reduce-overhead"] = lambda: purescale(
            task, given, wrap=step, static=True, donate=True
        )
        rows["purescale, jit, donate=0, reduce-overhead"] = lambda: purescale(
            task, given, wrap=functools.partial(jit, **mode)
        )

    def timed(name: str, make: Callable[[], Job]) -> Job:
        job = make()
        print(f"{compile_seconds(job, given.device):.1f} s to compile: {name}\n")
        return job

    return {name: functools.partial(timed, name, make) for name, make in rows.items()}


def eager_tables(given: argparse.Namespace) -> None:
    for task in TASKS:
        title = f"{task.title}, {models.describe(task.model())}, {given.dtype}"
        compare(title, eager(task, given), given, task=task.title)
        compare(
            f"{title}, max_norm",
            with_settings(task, given, max_norm=1.0),
            given,
            task=task.title,
            max_norm=1.0,
        )
        compare(
            f"{title}, 4 microbatches",
            {
                **with_settings(task, given, microbatches=4),
                "by hand, donate=True": functools.partial(window_by_hand, task, given, 4),
            },
            given,
            task=task.title,
            microbatches=4,
        )


def tables_by_hand(given: argparse.Namespace) -> None:
    for task in BY_HAND:
        title = f"{task.title}, {models.describe(task.model())}, {given.dtype}, by hand, max_norm"
        rows = loops_by_hand(task, given, max_norm=1.0)
        compare(title, rows, given, task=task.title, by_hand=True)


def compiled_tables(given: argparse.Namespace) -> None:
    # What the first compilation of a process pays once, finding out about the compiler, is
    # nobody's.
    compile_seconds(
        Call(functools.partial(torch.compile(torch.sin), torch.ones(8, device=given.device))),
        given.device,
    )
    for task in [*COMPILED, *TASKS[2:]] if given.slow else COMPILED:
        torch.compiler.reset()
        title = f"{task.title}, {models.describe(task.model())}, {given.dtype}, torch.compile"
        compare(title, compiled(task, given), given, task=task.title, compiled=True)


TABLES = {"eager": eager_tables, "by-hand": tables_by_hand, "compiled": compiled_tables}


def main() -> None:
    given = options(__doc__, only={"choices": TABLES, "help": "these tables alone"})
    for name, table in TABLES.items():
        if given.only in (None, name):
            table(given)


if __name__ == "__main__":
    main()
