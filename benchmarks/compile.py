"""Seconds to compile, graphs and step time: `loss_fn` compiled and the step eager, the whole step
compiled, and nothing compiled, beside a GradScaler loop over `torch.compile(model)`. AdamW. Run
`make bench`.

Each figure of seconds is of a process of its own with an empty cache: the first two passes over all
windows of the loop, less two warm ones. Step times are of rounds in turn with the GradScaler loop,
in one process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import torch
import torch.nn.functional as F
from harness import DTYPES, options, record, seconds
from torch import Tensor, nn
from torch._dynamo.utils import counters

import purescale as ps

LR, SCALE = 1e-3, 2.0**10  # low enough that no step overflows under float16
VOCABULARY, LENGTH = 65, 64
Microbatch = tuple[Tensor, Tensor]
Step = Callable[[list[Microbatch]], object]


class Case(NamedTuple):
    """A net and the windows that its loop goes through."""

    title: str
    model: Callable[[], nn.Module]
    microbatch: Callable[[int], Microbatch]  # of the step with this index
    steps: int
    microbatches: int = 1

    def windows(self, device: str) -> list[list[Microbatch]]:
        torch.manual_seed(1)
        return [
            [
                (x.to(device), y.to(device))
                for x, y in (self.microbatch(index) for _ in range(self.microbatches))
            ]
            for index in range(self.steps)
        ]


def text(batch: int, length: int) -> Microbatch:
    """Random characters; the last of each row are not asked for."""
    x, y = torch.randint(VOCABULARY, (2, batch, length))
    y[:, -3:] = -100
    return x, y


def cases(quick: bool) -> dict[str, Case]:
    gpt = functools.partial(
        models.GPT, VOCABULARY, LENGTH, dim=64, depth=1 if quick else 2, heads=4
    )
    steps, hundred, many = (12, 10, 20) if quick else (50, 50, 100)
    window = 3 if quick else 8
    shuffled = torch.randperm(LENGTH - 12, generator=torch.Generator().manual_seed(0))
    lengths = (12 + shuffled).tolist()

    def vectors(width: int, _: int) -> Microbatch:
        return models.batch(32, width, device="cpu")

    def images(_: int) -> Microbatch:
        return models.batch(8, 3, 16, 16, device="cpu")

    def resnet() -> nn.Module:
        return models.resnet(3, 8, stages=2, blocks=1 if quick else 2)

    return {
        "lengths": Case(f"GPT, {steps} lengths", gpt, lambda index: text(8, lengths[index]), steps),
        "sizes": Case(
            f"GPT, {steps} lengths and batch sizes",
            gpt,
            lambda index: text(2 + (5 * index) % 9, lengths[index]),
            steps,
        ),
        "one": Case("GPT, one microbatch", gpt, lambda _: text(8, 48), 5),
        "window": Case(
            f"GPT, {window} microbatches", gpt, lambda _: text(8, 48), 5, microbatches=window
        ),
        "conv": Case("Conv net, one microbatch", models.conv_net, images, 5),
        "conv_window": Case(
            f"Conv net, {window} microbatches", models.conv_net, images, 5, microbatches=window
        ),
        "resnet": Case("ResNet, one microbatch", resnet, images, 5),
        "resnet_window": Case(
            f"ResNet, {window} microbatches", resnet, images, 5, microbatches=window
        ),
        "hundred": Case(
            f"MLP, {2 * hundred} tensors",
            functools.partial(models.mlp, 64, hundred),
            functools.partial(vectors, 64),
            5,
        ),
        "many": Case(
            f"MLP, {2 * many} small tensors",
            functools.partial(models.mlp, 16, many),
            functools.partial(vectors, 16),
            5,
        ),
    }


# ---- the ways ------------------------------------------------------------------------------------

BASELINE = "GradScaler, torch.compile(model)"


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def grad_scaler(case: Case, given: argparse.Namespace) -> Step:
    """The loop of torch's documentation."""
    torch.manual_seed(0)
    model = case.model().to(given.device)
    forward = torch.compile(model, backend=given.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(given.device, init_scale=SCALE)

    def step(window: list[Microbatch]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for x, y in window:
            with torch.autocast(
                given.device, DTYPES[given.dtype], enabled=given.dtype != "float32"
            ):
                loss = loss_of(forward(x), y) / len(window)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def purescale(
    case: Case,
    given: argparse.Namespace,
    *,
    loss: bool = False,
    whole: bool = False,
) -> Step:
    torch.manual_seed(0)
    apply, params, buffers = ps.make_functional(case.model().to(given.device))
    if given.dtype != "float32":
        apply = ps.with_policy(apply, f"compute=autocast({given.dtype}),output=float32")
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=LR), ps.DynamicScale(init_scale=SCALE)
    compiled = functools.partial(torch.compile, fullgraph=True, backend=given.backend)

    def loss_fn(params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Microbatch) -> Any:
        logits, buffers = apply(params, buffers, batch[0])
        return loss_of(logits, batch[1]), buffers

    step = functools.partial(
        ps.train_step,
        loss_fn=compiled(loss_fn) if loss else loss_fn,
        optimizer=optimizer,
        rule=rule,
        donate=True,
    )
    step = compiled(step) if whole else step
    state = ps.init_train_state(params, buffers, optimizer, rule)

    def once(window: list[Microbatch]) -> None:
        nonlocal state
        state, _ = step(state, window)

    return once


WAYS: dict[str, Callable[[Case, argparse.Namespace], Step]] = {
    BASELINE: grad_scaler,
    "loss_fn compiled": functools.partial(purescale, loss=True),
    "whole step compiled": functools.partial(purescale, whole=True),
}


# ---- one case, in a process of its own -----------------------------------------------------------


def measure(case: Case, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds, graphs and step times; why and where, if it does not compile. The process of the
    GradScaler loop also times the eager step.
    """
    # What the first compilation of a process pays once, finding out about the compiler, is
    # nobody's.
    torch.compile(torch.sin, backend=given.backend)(torch.ones(8, device=given.device))
    torch.compiler.reset()
    counters.clear()
    step, windows = WAYS[way](case, given), case.windows(given.device)
    done = 0

    def all_windows(step: Step) -> None:
        nonlocal done
        for window in windows:
            step(window)
            done += 1

    def timed(step: Step) -> float:
        return seconds(lambda: all_windows(step), given.device)

    try:
        cold = sum(timed(step) for _ in range(2))
    except Exception as error:  # of any kind that a compiler raises
        return {"failed": f"{type(error).__name__} at step {done + 1}"}
    graphs = counters["stats"]["unique_graphs"]
    warm = statistics.median(timed(step) for _ in range(3))
    found = {"seconds": cold - 2 * warm, "graphs": graphs}
    if given.once:
        return found
    peer, ours = (
        (step, purescale(case, given)) if way == BASELINE else (grad_scaler(case, given), step)
    )
    for _ in range(3):
        all_windows(peer)
        all_windows(ours)
    rounds = [(timed(peer), timed(ours)) for _ in range(given.rounds)]
    low, ratio, high = statistics.quantiles([a / b for b, a in rounds], n=4)
    peer_ms, ms = (
        1e3 * statistics.median(times) / len(windows) for times in zip(*rounds, strict=True)
    )
    return {**found, "peer_ms": peer_ms, "ms": ms, "ratio": ratio, "low": low, "high": high}


def in_a_process(name: str, way: str, given: argparse.Namespace, *, once: bool) -> dict[str, Any]:
    """`measure`, with nothing warm."""
    command = [sys.executable, __file__, "--case", name, "--way", way]
    for option in ("rounds", "device", "dtype", "backend"):
        command += [f"--{option}", str(getattr(given, option))]
    command += ["--quick"] * given.quick + ["--once"] * once
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the tables ----------------------------------------------------------------------------------


def table(name: str, case: Case, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A row a way; seconds are the median of the repeats."""
    columns = (
        *("way", "s to compile", f"against {BASELINE}", "graphs", "ms a step", "against it"),
        "quartiles",
    )
    model = models.describe(case.model())
    print(f"### {case.title}, {model}, {given.dtype}, {given.backend}\n")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for way in list(WAYS)[: None if case.microbatches > 1 else -1]:
        rows[way] = found = in_a_process(name, way, given, once=False)
        if "failed" in found:
            continue
        again = [in_a_process(name, way, given, once=True) for _ in range(given.repeats - 1)]
        found["seconds"] = statistics.median(one["seconds"] for one in (found, *again))
    peer = rows[BASELINE]
    rows["eager"] = {**peer, "seconds": 0.0, "graphs": 0}
    rows[BASELINE] = {**peer, "ms": peer["peer_ms"], "ratio": 1.0, "low": 1.0, "high": 1.0}
    for way, found in rows.items():
        cells = shown(found, peer) if "ms" in found else f"{found['failed']} | | | | |"
        print(f"| {way} | {cells} |")
        record(given, title=case.title, row=way, baseline=BASELINE, **found)
    print(flush=True)
    return rows


def shown(found: dict[str, Any], peer: dict[str, Any]) -> str:
    spread = f"{found['low']:.2f} to {found['high']:.2f}"
    return (
        f"{found['seconds']:.1f} | {ratio(found, peer)} | {found['graphs']} | {found['ms']:.2f} | "
        f"{found['ratio']:.2f} | {spread}"
    )


def ratio(found: dict[str, Any], peer: dict[str, Any]) -> str:
    if "failed" in found or "failed" in peer:
        return "-"
    return f"{found['seconds'] / peer['seconds']:.2f}"


def budgets(rows: dict[str, dict[str, dict[str, Any]]], titles: dict[str, str]) -> None:
    """The figures that have a budget."""
    loss, whole = "loss_fn compiled", "whole step compiled"
    hundred = rows["hundred"]
    figures = [
        (
            f"{titles['hundred']}: {whole} / {BASELINE}",
            ratio(hundred[whole], hundred[BASELINE]),
            2.5,
        ),
        (f"{titles['hundred']}: {loss} / {BASELINE}", ratio(hundred[loss], hundred[BASELINE]), 1.1),
    ]
    for one, window in (("one", "window"), ("conv", "conv_window"), ("resnet", "resnet_window")):
        for way in WAYS:
            what = f"{titles[window]} / {titles[one]}: {way}"
            single = rows[one].get(way, rows[one][whole])
            figures.append((what, ratio(rows[window][way], single), 1.3))
    for name in ("lengths", "sizes"):
        for way in (loss, BASELINE):
            graphs = rows[name][way].get("graphs", rows[name][way].get("failed"))
            figures.append((f"{titles[name]}: graphs, {way}", str(graphs), 2))
    print("### Budgets\n\n| figure | budget | measured |\n|---|---|---|")
    for what, measured, budget in figures:
        print(f"| {what} | {budget} | {measured} |")
    print()


def main() -> None:
    flag = {"action": "store_true"}
    given = options(
        __doc__,
        rounds=9,
        backend={"default": "inductor", "help": "of torch.compile; default: inductor"},
        quick={**flag, "help": "small nets, few steps, each compiled once"},
        repeats={"type": int, "default": 3, "help": "of the seconds to compile; default: 3"},
        case={"choices": cases(quick=True), "help": "this one alone"},
        way={"choices": WAYS, "help": "with --case: measure it here and now, once"},
        once={**flag, "help": "with --way: no step times"},
    )
    every = cases(given.quick)
    if given.way:
        print(json.dumps(measure(every[given.case], given.way, given)))
        return
    if given.quick:
        given.rounds, given.repeats = 3, 1
    if given.case:
        table(given.case, every[given.case], given)
        return
    rows = {name: table(name, case, given) for name, case in every.items()}
    budgets(rows, {name: case.title for name, case in every.items()})


if __name__ == "__main__":
    main()
