"""Batch-norm statistics: how exact they are, what a pass costs, and what they are worth. Run
`make bench`.

The peers are fvcore's update_bn_stats, torch's update_bn and the formula of mmpretrain's
PreciseBNHook.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from harness import Call, Job, compare, options
from models import resnet
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import purescale as ps

try:
    from fvcore.nn.precise_bn import update_bn_stats
except ImportError:
    update_bn_stats = None

Buffers = dict[str, Tensor]
Apply = Callable[..., tuple[Tensor, Buffers]]
Way = Callable[[nn.Module, list[Tensor]], None]  # writes into the model


# ---- the ways to compute them --------------------------------------------------------------------


def purescale_pass(
    apply: Apply, params: Buffers, buffers: Buffers, batches: list[Tensor]
) -> Buffers:
    stats = ps.init_bn_stats(buffers)
    for batch in batches:
        stats = ps.accumulate_bn_stats(stats, apply, params, buffers, batch)
    return ps.bn_buffers(stats, buffers)


@torch.no_grad()
def plain_pass(apply: Apply, params: Buffers, buffers: Buffers, batches: list[Tensor]) -> None:
    for batch in batches:
        apply(params, buffers, batch)


@torch.no_grad()
def mmpretrain_pass(model: nn.Module, batches: list[Tensor]) -> None:
    """Its formula: the plain mean over the batches of their means and unbiased variances."""
    norms = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    momenta = [norm.momentum for norm in norms]
    means = [torch.zeros_like(norm.running_mean) for norm in norms]
    variances = [torch.zeros_like(norm.running_var) for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # so that the buffers are those of the last batch
    for batch in batches:
        model(batch)
        for norm, mean, var in zip(norms, means, variances, strict=True):
            mean += norm.running_mean / len(batches)
            var += norm.running_var / len(batches)
    for norm, mean, var, momentum in zip(norms, means, variances, momenta, strict=True):
        norm.running_mean, norm.running_var, norm.momentum = mean, var, momentum


def peers() -> dict[str, Way]:
    ways: dict[str, Way] = {
        "update_bn": lambda model, batches: update_bn(batches, model),
        "mmpretrain formula": mmpretrain_pass,
    }
    if update_bn_stats is not None:
        ways = {
            "fvcore": lambda model, batches: update_bn_stats(model, batches, len(batches)),
            **ways,
        }
    return ways


# ---- accuracy ------------------------------------------------------------------------------------

CHANNELS = 64


class Case(NamedTuple):
    """The data of one layer. `half_model`: its buffers are float16; `reread`: purescale's
    statistics are read as float32 all the same.
    """

    title: str
    make: Callable[[], list[Tensor]]
    half_model: bool = False
    reread: bool = False


def normal(
    *shape: int, mean: float = 0.0, sigma: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    return (mean + sigma * torch.randn(shape)).to(dtype)


def equal(
    count: int = 16, mean: float = 0.0, sigma: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [normal(32, CHANNELS, 8, 8, mean=mean, sigma=sigma, dtype=dtype) for _ in range(count)]


def shifted() -> list[Tensor]:
    return [batch + torch.randn(1, CHANNELS, 1, 1) for batch in equal()]


def vectors(rows: int, last: int) -> list[Tensor]:
    return [*(normal(rows, CHANNELS) for _ in range(15)), normal(last, CHANNELS, mean=2.0)]


CASES = [
    Case("(i) equal", equal),
    Case("(i-b) equal, means shift by N(0, 1)", shifted),
    Case("(i-c) 256 of 2, (N, C)", lambda: [normal(2, CHANNELS) for _ in range(256)]),
    Case("(ii) last of 1, (N, C, H, W)", lambda: [*equal(15), normal(1, CHANNELS, 8, 8)]),
    Case(
        "(ii-b) the same, last shifted by 2",
        lambda: [*equal(15), normal(1, CHANNELS, 8, 8, mean=2.0)],
    ),
    Case("(ii-c) last of 2, (N, C), shifted by 2", lambda: vectors(8, 2)),
    Case("(ii-d) last of 1, (N, C), shifted by 2", lambda: vectors(8, 1)),
    Case(
        "(ii-e) (N, C, L), L = 100 and 10",
        lambda: [
            normal(32, CHANNELS, 10, mean=1.0, sigma=3.0)
            if index % 2
            else normal(32, CHANNELS, 100)
            for index in range(16)
        ],
    ),
    Case("(iii) mean 100, sigma 0.1", lambda: equal(mean=100.0, sigma=0.1)),
    Case("(iii) mean 1000, sigma 0.1", lambda: equal(mean=1000.0, sigma=0.1)),
    Case("(iii) mean 1e4, sigma 1", lambda: equal(mean=1e4)),
    Case("(iii) mean 1e4, sigma 0.1", lambda: equal(mean=1e4, sigma=0.1)),
    Case("(iv) float16 inputs", lambda: equal(dtype=torch.float16)),
    Case(
        "(iv-b) float16 inputs, mean 100, sigma 1", lambda: equal(mean=100.0, dtype=torch.float16)
    ),
    Case("(iv-c) model.half()", lambda: equal(dtype=torch.float16), half_model=True),
    Case(
        "(iv-c) the same stats as float32 buffers",
        lambda: equal(dtype=torch.float16),
        half_model=True,
        reread=True,
    ),
    Case("(v) 5000 of 4x64x2x2", lambda: [normal(4, CHANNELS, 2, 2) for _ in range(5000)]),
]


def layer(case: Case, batches: list[Tensor]) -> nn.Module:
    norm: nn.Module = nn.BatchNorm2d(CHANNELS) if batches[0].ndim == 4 else nn.BatchNorm1d(CHANNELS)
    return (norm.half() if case.half_model else norm).to(batches[0].device)


def ours(case: Case, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    apply, params, buffers = ps.make_functional(layer(case, batches))
    stats = ps.init_bn_stats(buffers)
    for batch in batches:
        stats = ps.accumulate_bn_stats(stats, apply, params, buffers, batch)
    if case.reread:
        buffers = {name: buffer.float() for name, buffer in buffers.items()}
    new = ps.bn_buffers(stats, buffers)
    return new["running_mean"], new["running_var"]


def theirs(case: Case, batches: list[Tensor], way: Way) -> tuple[Tensor, Tensor]:
    norm = layer(case, batches)
    way(norm, batches)
    return norm.running_mean, norm.running_var


def cell(
    true_mean: Tensor, true_var: Tensor, run: Callable[..., tuple[Tensor, Tensor]], *args: object
) -> str:
    """The largest errors over the channels: of the mean in units of sigma, of the variance as a
    fraction of it.
    """
    try:
        mean, var = run(*args)
    except ValueError:
        return "ValueError"
    off = ((mean - true_mean).abs() / true_var.sqrt()).max().item()
    ratio = (var / true_var - 1).abs().max().item()
    negative = int((var < 0).sum())
    return f"{off:.0e} / {ratio:.1e}" + (f", {negative} negative" if negative else "")


def accuracy(device: str) -> None:
    ways = peers()
    print(
        "### Errors against the float64 truth: mean in units of sigma / variance relative, the "
        f"largest of {CHANNELS} channels\n"
    )
    print("| batches | purescale | " + " | ".join(ways) + " |\n" + "|---" * (2 + len(ways)) + "|")
    for case in CASES:
        torch.manual_seed(0)
        batches = [batch.to(device) for batch in case.make()]
        pooled = torch.cat([batch.double().transpose(0, 1).flatten(1) for batch in batches], dim=1)
        mean, unbiased, biased = pooled.mean(1), pooled.var(1), pooled.var(1, correction=0)
        cells = [cell(mean, unbiased, ours, case, batches)]
        for name, way in ways.items():
            # fvcore writes the biased variance, and is held to that.
            target = biased if name == "fvcore" else unbiased
            cells.append("" if case.reread else cell(mean, target, theirs, case, batches, way))
        print(f"| {case.title} | " + " | ".join(cells) + " |")
    print()


# ---- cost ----------------------------------------------------------------------------------------


def cost(given: argparse.Namespace, width: int, variants: bool) -> None:
    torch.manual_seed(0)

    def make() -> nn.Module:
        return resnet(3, width=width, stages=4, blocks=2).to(given.device)

    batches = [torch.randn(32, 3, 32, 32, device=given.device) for _ in range(4)]
    apply, params, buffers = ps.make_functional(make())

    def pair(apply: Apply) -> dict[str, Callable[[], Job]]:
        return {
            "plain train-mode forward": lambda: Call(
                lambda: plain_pass(apply, params, buffers, batches)
            ),
            "purescale": lambda: Call(lambda: purescale_pass(apply, params, buffers, batches)),
        }

    def peer(way: Way) -> Callable[[], Job]:
        def job() -> Job:
            model = make()
            return Call(lambda: way(model, batches))

        return job

    norms = sum(isinstance(module, nn.BatchNorm2d) for module in make().modules())
    title = f"One pass over 4 batches of 32x3x32x32, ResNet-18-like, width {width}, {norms} layers"
    compare(title, {**pair(apply), **{name: peer(way) for name, way in peers().items()}}, given)
    if not variants:
        return
    compare(
        f"{title}, autocast(bfloat16)",
        pair(ps.with_policy(apply, "params=float32,compute=autocast(bfloat16)")),
        given,
    )

    compiled = torch.compile(apply)
    start = time.perf_counter()
    try:
        plain_pass(compiled, params, buffers, batches[:1])
        purescale_pass(compiled, params, buffers, batches[:1])
    except RuntimeError as error:
        print(
            f"torch.compile is left out, it raised {type(error).__name__}: "
            f"{str(error).splitlines()[0]}\n"
        )
        return
    print(f"Both compiled in {time.perf_counter() - start:.0f} s.\n")
    compare(f"{title}, torch.compile", pair(compiled), given)


# ---- a real case ---------------------------------------------------------------------------------

SEEDS = 5
STEPS = (20, 50, 200)
# one that moves the weights fast, as it takes for a running average to lag behind, and one that
# does not
OPTIMIZERS = {
    "SGD, lr 0.05, momentum 0.9": ps.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW, lr 0.002": ps.from_torch(torch.optim.AdamW, lr=2e-3),
}


class Digits(NamedTuple):
    train_x: Tensor
    test_x: Tensor
    train_y: Tensor
    test_y: Tensor


def load(device: str) -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    split = train_test_split(*load_digits(return_X_y=True), test_size=0.25, random_state=0)
    images = [
        torch.tensor(x, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
        for x in split[:2]
    ]
    return Digits(*images, *(torch.tensor(y, device=device) for y in split[2:]))


def test_losses(seed: int, optimizer: ps.Optimizer, data: Digits) -> list[list[float]]:
    """After each of STEPS: with running averages, and with precise statistics in both regimes."""
    torch.manual_seed(seed)
    apply, params, buffers = ps.make_functional(
        resnet(1, width=16, stages=3, blocks=1).to(data.train_x.device)
    )
    rule = ps.NoScale()

    def loss_fn(params: Buffers, buffers: Buffers, batch: Tensor) -> tuple[Tensor, Buffers]:
        logits, buffers = apply(params, buffers, data.train_x[batch])
        return F.cross_entropy(logits, data.train_y[batch]), buffers

    state = ps.init_train_state(params, buffers, optimizer, rule)
    order = torch.randperm(len(data.train_x)).to(data.train_x.device).split(4)
    losses = []
    for step, batch in enumerate(order[: max(STEPS)], start=1):
        state, _ = ps.train_step(
            state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=True
        )
        if step in STEPS:
            # Large batches, as the batch regime wants them.
            loader = data.train_x.split(256)
            precise = (
                ps.precise_bn(apply, state.params, state.buffers, loader, normalize=regime)
                for regime in ("batch", "sequential")
            )
            with torch.no_grad():
                outs = [
                    apply(state.params, buffers, data.test_x, train=False)[0]
                    for buffers in (state.buffers, *precise)
                ]
            losses.append([F.cross_entropy(out, data.test_y).item() for out in outs])
    return losses


def digits(device: str) -> None:
    try:
        data = load(device)
    except ImportError:
        print("The digits are left out: scikit-learn is not installed.")
        return
    torch.set_num_threads(1)  # the net is small: a second thread only waits
    start = time.perf_counter()
    print(
        f"### Test loss on digits, batch size 4: medians of {SEEDS} seeds, then running average / "
        "batch / sequential for each seed\n"
    )
    print(
        "| after | running average | batch | sequential | batch is better in "
        f"|{''.join(f' seed {seed} |' for seed in range(SEEDS))}"
    )
    print("|---" * (5 + SEEDS) + "|")
    for name, optimizer in OPTIMIZERS.items():
        by_steps = zip(*(test_losses(seed, optimizer, data) for seed in range(SEEDS)), strict=True)
        for steps, runs in zip(STEPS, by_steps, strict=True):
            medians = [statistics.median(column) for column in zip(*runs, strict=True)]
            better = sum(batch < running for running, batch, _ in runs)
            cells = [
                *(f"{loss:.3f}" for loss in medians),
                f"{better} of {SEEDS}",
                *(" / ".join(f"{x:.3f}" for x in run) for run in runs),
            ]
            print(f"| {steps} steps of {name} | {' | '.join(cells)} |")
    print(f"\n{time.perf_counter() - start:.0f} s.")


def main() -> None:
    given = options(__doc__)
    if update_bn_stats is None:
        print("fvcore is left out: it is not installed.\n")
    accuracy(given.device)
    cost(given, width=64, variants=False)  # that of ResNet-18
    cost(given, width=16, variants=True)  # so small that what is paid per layer shows
    digits(given.device)


if __name__ == "__main__":
    main()
