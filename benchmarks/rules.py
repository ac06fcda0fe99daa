"""Every rule of the loss scale, ours and every peer's, over the largest gradients of real float16
trainings. Run `python benchmarks/rules.py`; writes rules.md and rules.png.

What is replayed was recorded with `--record`: nets on scikit-learn's digits in float16, the largest
unscaled gradient of each step, under a rule that skipped none. A step counts as skipped where that
times the scale is beyond 65504, so what a skipped step does to the next ones is left out, and so
are activations whose gradients are larger than those of all parameters (at most one bit, measured).
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purescale as ps
from purescale import interop, simulate

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings" / "digits.csv"
STEPS, BATCH, SEEDS = 250, 32, (1, 2, 3)
BAND = 12  # bits that may be unused: with more, small gradients begin to round to 0

# ---- recording -----------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def _conv(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        *_conv(1, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *_conv(8, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    ),
    "residual": lambda: nn.Sequential(
        *_conv(1, 8),
        nn.MaxPool2d(2),
        nn.ReLU(),
        *(Residual(nn.Sequential(*_conv(8, 8), nn.ReLU(), *_conv(8, 8))) for _ in range(2)),
        nn.Flatten(),
        nn.Linear(128, 10),
    ),
    "8 layers, no norms": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        *(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())),
        nn.Linear(128, 10),
    ),
}


def record() -> None:
    """The largest gradient of each step of each net, as powers of two."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)  # nets this small: two get in each other's way
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    columns: dict[str, list[str]] = {}
    optimizer = ps.from_torch(torch.optim.AdamW, lr=2e-3)
    rule = ps.HeadroomScale(init_scale=1.0)
    for name, make in NETS.items():
        for seed in SEEDS:
            torch.manual_seed(seed)
            apply, params, buffers = ps.make_functional(make())
            half = ps.with_policy(apply, "params=float32,compute=float16,output=float32")

            def loss_fn(params: Any, buffers: Any, rows: Tensor, half: Any = half) -> Any:
                logits, buffers = half(params, buffers, x[rows])
                return F.cross_entropy(logits, y[rows]), buffers

            state = ps.init_train_state(params, buffers, optimizer, rule)
            infos = []
            for _ in range(STEPS):
                rows = torch.randint(len(x), (BATCH,))
                state, info = ps.train_step(
                    state, [rows], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=True
                )
                infos.append(info)
            run = ps.stack_infos(infos)
            assert not run.found_inf.any()
            columns[f"{name}, seed {seed}"] = [f"{bits:.2f}" for bits in run.grad_amax.log2()]
            print(f"{name}, seed {seed}: loss {run.loss[-20:].mean():.4f}", flush=True)
    RECORDINGS.parent.mkdir(exist_ok=True)
    with RECORDINGS.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])


def recordings() -> tuple[list[str], Tensor]:
    """The names, and the largest gradients [runs, steps]."""
    with RECORDINGS.open(newline="") as file:
        names, *rows = csv.reader(file)
    bits = torch.tensor([[float(value) for value in row] for row in rows])
    return names, torch.exp2(bits).T.contiguous()


# ---- what happens to the gradients ---------------------------------------------------------------


def _jump(amaxes: Tensor) -> Tensor:
    return amaxes * torch.where(torch.arange(STEPS) < STEPS // 2, 1.0, 2.0**10)


def _drift(amaxes: Tensor) -> Tensor:
    return amaxes * torch.exp2(torch.linspace(0, 12, STEPS))


def _spikes(amaxes: Tensor) -> Tensor:
    return amaxes * torch.where(torch.arange(STEPS) % 50 == 49, 2.0**10, 1.0)


def settled(amaxes: Tensor) -> float:
    """The largest power of two at which none of these steps overflows: where a rule that grows is
    after a long while.
    """
    return 2.0 ** math.floor(math.log2(65504 / amaxes.max().item()))


AS_IS: Callable[[Tensor], Tensor] = lambda amaxes: amaxes  # noqa: E731
SCENARIOS: dict[str, tuple[float | None, Callable[[Tensor], Tensor]]] = {
    # None: from where the recording as it is just fits
    "start at 2**24": (2.0**24, AS_IS),
    "start at 2**32": (2.0**32, AS_IS),
    "start at 2**0": (1.0, AS_IS),
    "jump of 2**10": (None, _jump),
    "drift of 12 bits": (None, _drift),
    "spike of 2**10 every 50 steps": (None, _spikes),
}

# Each from a start; all other settings are those that the library has when nothing is said.
RULES: dict[str, Callable[[float], Any]] = {
    "HeadroomScale()": lambda s: ps.HeadroomScale(s, max_scale=max(s, 2.0**24)),
    "HeadroomScale(window=16)": lambda s: ps.HeadroomScale(s, window=16, max_scale=max(s, 2.0**24)),
    "HeadroomScale(margin=2)": lambda s: ps.HeadroomScale(s, margin=2, max_scale=max(s, 2.0**24)),
    "DynamicScale()": lambda s: ps.DynamicScale(s, max_scale=max(s, 2.0**24)),
    "DynamicScale(growth_interval=50)": lambda s: ps.DynamicScale(
        s, growth_interval=50, max_scale=max(s, 2.0**24)
    ),
    "torch.amp, MMEngine": lambda s: interop.torch_amp.rule(init_scale=s),
    "apex": lambda s: interop.apex.rule(init_scale=s, max_loss_scale=max(s, 2.0**24)),
    "DeepSpeed": lambda s: interop.deepspeed.rule(init_scale=s),
    "Megatron-LM": lambda s: interop.megatron.rule(initial_scale=s),
    "fairseq": lambda s: interop.fairseq.rule(init_scale=s),
    "flax": lambda s: interop.flax.rule(scale=s),
    "jmp": lambda s: interop.jmp.rule(loss_scale=s),
    "Keras": lambda s: interop.keras.rule(initial_scale=s),
    "nnabla": lambda s: interop.nnabla.rule(scale=s),
}


def replayed(
    make: Callable[[float], Any], start: float | None, amaxes: Tensor, given: Tensor
) -> Any:
    """Scales and flags [runs, steps]; the runs of one start at once."""
    if start is not None:
        states, bad = torch.vmap(lambda series: simulate.replay(make(start), series))(given)
        return states.scale[:, :-1], bad
    each = [
        simulate.replay(make(settled(was)), series)
        for was, series in zip(amaxes, given, strict=True)
    ]
    return torch.stack([s.scale[:-1] for s, _ in each]), torch.stack([bad for _, bad in each])


# ---- table and picture ---------------------------------------------------------------------------


def _span(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


MORE = ("from 2**0: first step in the band", "bits unused")


def table(amaxes: Tensor) -> str:
    lines = [
        "| " + " | ".join(["rule", *SCENARIOS, *MORE]) + " |",
        "|---|" + "---|" * (len(SCENARIOS) + len(MORE)),
    ]
    for name, make in RULES.items():
        cells = []
        for title, (start, change) in SCENARIOS.items():
            given = change(amaxes)
            scales, bad = replayed(make, start, amaxes, given)
            cells.append(_span(bad.sum(1).tolist()))
            if title == "start at 2**0":
                unused = (65504 / (given * scales)).log2()
                inside = (unused >= 0) & (unused <= BAND)
                first = [row.nonzero()[0].item() + 1 if row.any() else None for row in inside]
                reached = [step for step in first if step is not None]
                never = len(first) - len(reached)
                words = [_span(reached)] if reached else []
                words += [f"never in {never}"] if never else []
                band = ", ".join(words)
                rest = _span([round(v) for v in unused[:, -50:].median(1).values.tolist()])
        lines.append(f"| {name} | " + " | ".join([*cells, band, rest]) + " |")
    return "\n".join(lines)


HEAD = """# Rules of the loss scale over real gradients

Steps skipped of {steps}, the least and the most of {runs} recordings: {nets}, each with
{seeds} seeds, AdamW, batches of {batch} of scikit-learn's digits in float16.
`python benchmarks/rules.py` replays them (`purescale.simulate.replay`), `--record` trains again.
Settings are each library's own but for the start. Jump, drift and spikes are laid over a recording,
and each rule starts from the largest scale at which the recording without them just fits: where a
rule that grows stands after a long while. The band: a scale that overflows nothing and leaves at
most {band} bits unused; "bits unused": the median of the last 50 steps, from 2**0.

"""
TAIL = """

What is not in it: a skipped step changes the gradients of the next ones, and gradients of
activations can be up to a bit larger than those of all parameters. A better scale is not a better
model: where nothing overflows and few bits are unused, a wrong scale costs nothing, and what is won
are the steps that were not thrown away.

![Scales of four rules over one recording](rules.png)
"""

# Okabe and Ito: told apart by most who see colours otherwise, and by the kind of line.
STYLES = {
    "HeadroomScale()": ("#D55E00", "-"),
    "DynamicScale()": ("#0072B2", "--"),
    "Megatron-LM": ("#009E73", "-."),
    "DynamicScale(growth_interval=50)": ("#CC79A7", ":"),
}


def picture(names: list[str], amaxes: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = ["start at 2**32", "start at 2**0", "jump of 2**10", "spike of 2**10 every 50 steps"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.6), sharex=True, layout="constrained")
    index = next(i for i, name in enumerate(names) if name.startswith("residual"))
    for ax, title in zip(axes.flat, shown, strict=True):
        start, change = SCENARIOS[title]
        one = amaxes[index : index + 1]
        given = change(one)
        limit = (65504 / given[0]).log2()
        top = max(limit.max().item(), 10 if start is None else math.log2(start)) + 2
        ax.fill_between(range(STEPS), limit, top, color="0.9", step="post", label="overflows")
        low = 0.0
        for name, (colour, line) in STYLES.items():
            scales, bad = replayed(RULES[name], start, one, given)
            bits, skipped = scales[0].log2(), bad[0].nonzero().flatten()
            ax.plot(bits, line, color=colour, drawstyle="steps-post", linewidth=1.8, label=name)
            ax.plot(skipped, bits[skipped], "x", color=colour, markersize=6)
            low = min(low, bits.min().item())
        ax.set(title=title, ylim=(low - 1, top), xlim=(-2, STEPS))
    for ax in axes[:, 0]:
        ax.set_ylabel("log2 of the loss scale")
    for ax in axes[1]:
        ax.set_xlabel("step (a cross: it was skipped)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="train again, which takes a minute")
    given = parser.parse_args()
    if given.record:
        record()
    names, amaxes = recordings()
    rows = table(amaxes)
    print(rows)
    nets = ", ".join(NETS)
    facts = {"steps": STEPS, "runs": len(names), "nets": nets, "seeds": len(SEEDS)}
    text = HEAD.format(**facts, batch=BATCH, band=BAND) + rows + TAIL
    (HERE / "rules.md").write_text(text)
    picture(names, amaxes, HERE / "rules.png")


if __name__ == "__main__":
    main()
