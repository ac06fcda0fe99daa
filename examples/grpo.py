"""Reinforcement learning in half precision: a small transformer writes letters, and is rewarded
where enough of them follow the one before in the alphabet, which at first hardly ever happens.

Sampler and trainer compute the same policy by different kernels: the one letter by letter from
cached keys and values, the other all letters at once. Where they disagree the gradient is of
another policy than the one that acted, and bfloat16 disagrees eight times as much as float16
(arXiv 2510.26788). float16 needs a loss scale, and a skipped step throws a batch of rollouts away.

Run `python examples/grpo.py --picture grpo.png` (with `[notebooks]` installed): about a minute.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purescale as ps
from purescale import interop

LETTERS, TOKENS, ENOUGH = 8, 32, 10  # a policy that guesses gets there in 1 answer of 200
PROMPTS, GROUP = 4, 8  # rollouts of a step: four first letters, eight answers to each


class Way(NamedTuple):
    dtype: str
    rule: Any
    max_retries: int = 0


WAYS = {
    "float32": Way("float32", ps.NoScale()),
    "bfloat16": Way("bfloat16", ps.NoScale()),
    # as verl has it
    "float16, from 2**16": Way("float16", ps.DynamicScale(2.0**16, growth_interval=400)),
    "float16, Megatron's": Way("float16", interop.megatron.rule(initial_scale=2.0**32)),
    # from the same start, which is as wrong for it
    "float16, headroom": Way("float16", ps.HeadroomScale(2.0**32, max_scale=2.0**32), 8),
}


class Transformer(nn.Module):
    """Logits of the next letter, and the keys and values to go on from."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(TOKENS + 1, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor, past: Any = None) -> tuple[Tensor, list[Any]]:
        start = past[0][0].shape[-2] if past else 0
        x = self.letters(letters) + self.places[start : start + letters.shape[1]]
        kept = []
        for index, block in enumerate(self.blocks):
            x, keys_and_values = block(x, past[index] if past else None)
            kept.append(keys_and_values)
        return self.head(self.norm(x)), kept


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], -2), torch.cat([past[1], value], -2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.mix(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (key, value)


class Rollouts(NamedTuple):
    letters: Tensor  # int64 [rollouts, 1 + TOKENS]: the one given, those written
    logp: Tensor  # float32 [rollouts, TOKENS]: how likely the sampler found them
    reward: Tensor  # float32 [rollouts]: 0 or 1
    advantage: Tensor  # float32 [rollouts]: 0 where all answers to a prompt got the same


@torch.no_grad()
def sample(sampler: nn.Module) -> Rollouts:
    letter = torch.randint(LETTERS, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    written, logps, past = [letter], [], None
    for _ in range(TOKENS):
        logits, past = sampler(letter, past)
        logp = logits[:, -1].float().log_softmax(-1)
        letter = logp.exp().multinomial(1)
        written.append(letter)
        logps.append(logp.gather(-1, letter))
    letters = torch.cat(written, -1)
    reward = ((letters.diff() % LETTERS == 1).sum(-1) >= ENOUGH).float()
    groups = reward.view(PROMPTS, GROUP)
    advantage = (groups - groups.mean(-1, True)) / (groups.std(-1, keepdim=True) + 1e-6)
    return Rollouts(letters, torch.cat(logps, -1), reward, advantage.flatten())


def grpo_loss(apply: Any, params: Any, buffers: Any, batch: Rollouts) -> tuple[Tensor, Any, Any]:
    (logits, _), _ = apply(params, buffers, batch.letters[:, :-1])
    logp = logits.log_softmax(-1).gather(-1, batch.letters[:, 1:, None]).squeeze(-1)
    log_ratio = logp - batch.logp  # 0, were the sampler the trainer
    ratio, advantage = log_ratio.exp(), batch.advantage[:, None]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    off = log_ratio.detach().double()
    told = {
        "reward": batch.reward.mean(),
        "informative": (batch.advantage != 0).any(),
        "kl": (off.expm1() - off).mean(),  # of the trainer from the sampler, a letter
        "log_ratio": off.sum(-1).abs().mean(),  # of a whole answer
    }
    return loss, buffers, told


def train(way: Way, seed: int, steps: int) -> ps.StepInfo:
    """What the steps of a run tell, stacked; in `aux` the reward and the mismatch."""
    torch.manual_seed(seed)
    model = Transformer()
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, f"params=float32,compute={way.dtype},output=float32")
    sampler = model.to(getattr(torch, way.dtype))
    optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    state = ps.init_train_state(params, buffers, optimizer, way.rule)
    infos = []
    for _ in range(steps):
        ps.load_into(sampler, state.params, state.buffers)
        state, info = ps.train_step(
            state,
            [sample(sampler)],
            loss_fn=functools.partial(grpo_loss, apply),
            optimizer=optimizer,
            rule=way.rule,
            max_norm=1.0,
            max_retries=way.max_retries,  # the same rollouts again, at a lower scale
            donate=True,
        )
        infos.append(info)
    return ps.stack_infos(infos)


def told(runs: list[ps.StepInfo], name: str) -> Tensor:
    return torch.stack([run.aux[0][name] for run in runs]).float()  # [seeds, steps]


def table(runs: dict[str, list[ps.StepInfo]]) -> str:
    lines = [f"{'':20} reward at last (least, most)  lost  retries  KL a letter  |log ratio|"]
    for name, seeds in runs.items():
        rewards = told(seeds, "reward")
        last = rewards[:, rewards.shape[1] * 3 // 4 :].mean(-1)
        lost = sum(int(run.found_inf.sum()) for run in seeds)
        retries = sum(int(run.retries.sum()) for run in seeds)
        kl, log_ratio = (told(seeds, field).mean() for field in ("kl", "log_ratio"))
        lines.append(
            f"{name:20} {last.mean():14.2f} ({last.min():.2f}, {last.max():.2f}) {lost:6} "
            f"{retries:8} {kl:12.1e} {log_ratio:12.6f}"
        )
    return "\n".join(lines)


COLOURS = dict(zip(WAYS, ("black", "#E69F00", "#0072B2", "#D55E00", "#009E73"), strict=True))
STYLES = dict(zip(WAYS, (":", "-", "-", "--", "-."), strict=True))


def draw(runs: dict[str, list[ps.StepInfo]]) -> Any:
    import matplotlib.pyplot as plt

    figure, (rewards, scales, ratios) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name, seeds in runs.items():
        line = {"color": COLOURS[name], "linestyle": STYLES[name]}
        rewards.plot(told(seeds, "reward").mT, alpha=0.4, linewidth=0.8, **line)
        rewards.plot(told(seeds, "reward").mean(0), label=name, **line)
        ratios.semilogy(told(seeds, "log_ratio").mean(0), **line)
        for run in seeds if name.startswith("float16") else ():
            scales.semilogy(run.scale, base=2, drawstyle="steps-post", **line)
            lost = torch.where(run.found_inf)[0]
            scales.plot(lost, run.scale[lost], "x", color=COLOURS[name])
    rewards.set(xlabel="step", ylabel="reward", title="seeds (thin) and their mean")
    scales.set(xlabel="step", ylabel="scale", title="each seed; x: a batch of rollouts lost")
    ratios.set(xlabel="step", ylabel=f"|log ratio| over {TOKENS} letters", title="mismatch")
    figure.legend(loc="outside lower center", ncols=len(runs))
    return figure


def main(arguments: list[str] | None = None) -> dict[str, list[ps.StepInfo]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    runs = {
        name: [train(way, seed, given.steps) for seed in range(given.seeds)]
        for name, way in WAYS.items()
    }
    print(table(runs))
    if given.picture:
        draw(runs).savefig(given.picture, dpi=150)
    return runs


if __name__ == "__main__":
    torch.set_num_threads(1)  # nets this small: two get in each other's way
    main()
