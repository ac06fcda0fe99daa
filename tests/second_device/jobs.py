"""Kinds of training, each as a job that runs on any device: what the tests run and docs/gpu.md
lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import CLASSES, cross_entropy_of, small_net, started
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import purescale as ps

INF = float("inf")
RULE = ps.DynamicScale(2.0**10, growth_interval=2)
ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
SGD = ps.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9)


class Job(NamedTuple):
    """A state, a step over a list of microbatches, and lists of these, on one device. Something in
    the second list overflows.
    """

    state: Any
    step: Callable[..., Any]
    windows: list[list[Any]]


def to(device: Any, tree: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, tree
    )


# ---- models and data -----------------------------------------------------------------------------


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9, bias=bias), nn.Tanh(), nn.Linear(9, 3, bias=bias))


class Block(nn.Module):
    """Attention by hand, whose operators are those of the CPU, over tied embeddings."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def layer(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        weights = (q @ k.mT).masked_fill(later, -1e4).softmax(-1)
        return h + self.mlp(h + weights @ v)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = checkpoint(self.layer, h, use_reentrant=False) if self.checkpoints else self.layer(h)
        return self.head(h).transpose(1, 2)


class Recurrent(nn.Module):
    """An RNN, LSTM or GRU of two layers in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = kind(8, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0]).transpose(1, 2)


def sparse_rows() -> nn.Module:
    """A table whose gradient is sparse."""
    return nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11), Transposed())


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class InHalf(nn.Module):
    """A model that casts its input, as one with half parameters does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[0].weight.dtype)).float()


def vectors(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def images(index: int) -> tuple[Tensor, Tensor]:
    _, y = vectors(index)
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(index)), y


def sentences(index: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1], tokens[:, 1:]


def windows_of(data: Callable[[int], Any], microbatches: int) -> list[list[Any]]:
    found = [[data(10 * w + i) for i in range(microbatches)] for w in range(4)]
    x, *rest = found[1][-1]
    if x.is_floating_point():
        found[1][-1] = (x * INF, *rest)
    return found


# ---- a job from its parts ------------------------------------------------------------------------


def job(
    device: Any,
    optimizer: Any = ADAMW,
    *,
    rule: Any = RULE,
    net: Callable[[], nn.Module] = mlp,
    data: Callable[[int], Any] = vectors,
    policy: str = "",
    dtype: torch.dtype = torch.float32,
    microbatches: int = 1,
    seeded: bool = False,
    loss_of: Callable[[Any], Any] = cross_entropy_of,
    **settings: Any,
) -> Job:
    torch.manual_seed(0)
    # moved as trees: torch unties the parameters of a module that moves to a device like this one
    apply, params, buffers = to(device, ps.make_functional(net()))
    params = {name: leaf.to(dtype) for name, leaf in params.items()}
    rng = torch.Generator(device).manual_seed(3).get_state() if seeded else None
    loss_fn = loss_of(ps.with_policy(apply, policy) if policy else apply)
    settings |= {"loss_fn": loss_fn, "buffers": buffers, "rng": rng}
    state, step = started(params, None, optimizer, rule, **settings)
    return Job(state, step, to(device, windows_of(data, microbatches)))


def with_aux(apply: Any) -> Any:
    def loss_fn(params: Any, buffers: Any, microbatch: Any) -> Any:
        x, y = microbatch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers, {"right": (logits.argmax(1) == y).sum()}

    return loss_fn


def from_torchs_scheduler(device: Any) -> Any:
    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    with torch.device(device):
        return ps.from_torch(torch.optim.AdamW, lr=ps.schedule_from_torch(make, 1e-2, 10))


def momentum() -> Any:
    """SGD with momentum as an (init, update) pair."""

    def init(params: Any) -> Any:
        return {name: torch.zeros_like(leaf) for name, leaf in params.items()}

    def update(grads: Any, state: Any, params: Any) -> Any:
        state = {name: 0.9 * kept + grads[name] for name, kept in state.items()}
        return {name: -0.05 * kept for name, kept in state.items()}, state

    return ps.from_transformation((init, update))


MUON_AND_ADAMW = ps.partition(
    {"muon": ps.from_torch(torch.optim.Muon, lr=0.02), "adamw": ADAMW},
    lambda name, leaf: "muon" if leaf.ndim == 2 else "adamw",
)
TWO = ps.partition(
    {"sgd": SGD, "adamw": ADAMW}, lambda name, leaf: "sgd" if leaf.ndim == 2 else "adamw"
)
# Gradients that are rounding alone make no steps.
DAMPED = ps.from_torch(torch.optim.AdamW, lr=1e-2, eps=1e-4)
IN_STATE = ps.from_torch(
    torch.optim.AdamW, lr=1e-2, in_state=("lr", "weight_decay", "betas", "eps")
)
SCHEDULED_AND_IN_STATE = ps.partition(
    {"sgd": ps.from_torch(torch.optim.SGD, lr=lambda step: 0.05 * 0.9**step), "adamw": IN_STATE},
    lambda name, leaf: "sgd" if leaf.ndim == 2 else "adamw",
)
GROUPS = ps.from_torch(
    torch.optim.AdamW, lr=1e-2, overrides={"*bias": {"lr": 1e-3, "weight_decay": 0.0}}
)


# ---- loops that are no `train_step` --------------------------------------------------------------


def stepping_by_hand(step: Callable[..., Any], microbatches: int = 1) -> Callable[[Any], Job]:
    """A job whose step is `step(gradients, state, window)`, of new parts of the state and what it
    tells.
    """

    def make(device: Any) -> Job:
        gradients = ps.value_and_grad(cross_entropy_of(ps.make_functional(mlp())[0]))

        def by_hand(state: Any, window: Any, **settings: Any) -> Any:
            def gradients_of(batch: Any) -> Any:
                (loss, _), grads = gradients(state.params, {}, batch, scaler=state.scaler)
                return loss, grads

            params, opt_state, found_inf, told = step(gradients_of, state, window, **settings)
            scaler = RULE.update(state.scaler, found_inf)
            return state._replace(params=params, opt_state=opt_state, scaler=scaler), told

        return job(device, microbatches=microbatches)._replace(step=by_hand)

    return make


def by_hand(gradients_of: Any, state: Any, window: Any) -> Any:
    loss, grads = gradients_of(window[0])
    grads, found_inf = ps.unscale_and_check(state.scaler, grads)
    grads, norm = ps.clip_by_global_norm(grads, 1.0)
    grads = ps.clip_by_value(grads, 0.5)
    params, opt_state = ps.maybe_step(ADAMW, state.params, grads, state.opt_state, found_inf)
    return ps.ema(state.params, params, 0.5), opt_state, found_inf, (loss, norm)


def accumulated(gradients_of: Any, state: Any, window: Any) -> Any:
    accum = ps.init_accum(state.params)
    for microbatch in window:
        loss, grads = gradients_of(microbatch)
        grads, found_inf = ps.unscale_and_check(state.scaler, grads)
        accum = ps.accumulate_grads(accum, grads, found_inf)
    grads, found_inf = ps.accumulated_grads(accum)
    params, opt_state = ps.maybe_step(ADAMW, state.params, grads, state.opt_state, found_inf)
    return params, opt_state, found_inf, loss


def unscaled_and_stepped(gradients_of: Any, state: Any, window: Any, donate: bool = False) -> Any:
    loss, grads = gradients_of(window[0])
    given = state.params, grads, state.opt_state
    out = ps.unscale_and_step(ADAMW, state.scaler, *given, 1.0, 0.5, donate=donate)
    return out.params, out.opt_state, out.found_inf, (loss, out.grad_norm)


def ensemble(device: Any) -> Job:
    made = job(device, IN_STATE)
    states = [made.state, ps.replace_settings(made.state, lr=2e-2)]
    step = torch.vmap(lambda state, window: made.step(state, window), in_dims=(0, None))
    return made._replace(state=ps.stack_states(states), step=step)


# ---- all of them ---------------------------------------------------------------------------------


def of_class(name: str) -> Any:
    optimizer = ps.from_torch(getattr(torch.optim, name), lr=1e-2, **CLASSES[name])
    net = functools.partial(mlp, bias=name != "Muon")  # which takes matrices
    return functools.partial(job, optimizer=optimizer, net=net, max_norm=1.0)


def small(**settings: Any) -> Any:
    return functools.partial(job, net=small_net, data=images, **settings)


def plain(*args: Any, **settings: Any) -> Any:
    return lambda device: job(device, *args, **settings)


def half(optimizer: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda device: job(device, optimizer, net=InHalf, dtype=dtype)


JOBS: dict[str, Callable[[Any], Job]] = {
    **{f"{name}, `max_norm`": of_class(name) for name in CLASSES},
    "float16, batch norm": small(policy="params=float32,compute=float16,output=float32"),
    "bfloat16, batch norm": small(policy="params=float32,compute=bfloat16,output=float32"),
    "autocast(float16), batch norm": small(policy="compute=autocast(float16),output=float32"),
    "transformer block, tied": plain(DAMPED, net=Block, data=sentences),
    "transformer block, checkpointed": plain(DAMPED, net=lambda: Block(True), data=sentences),
    **{
        kind.__name__: plain(DAMPED, net=functools.partial(Recurrent, kind), data=sentences)
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    },
    "sparse gradients, SGD": plain(SGD, net=sparse_rows, data=sentences, microbatches=2),
    "sparse gradients, AdamW, `max_norm`": plain(net=sparse_rows, data=sentences, max_norm=1.0),
    "3 microbatches": small(microbatches=3),
    '3 microbatches, `bn_update="window"`': small(microbatches=3, bn_update="window"),
    '3 microbatches, `on_nonfinite="drop_microbatch"`': plain(
        microbatches=3, on_nonfinite="drop_microbatch"
    ),
    "3 microbatches, `weight_fn`": plain(microbatches=3, weight_fn=lambda batch: len(batch[0])),
    "`clip_value`": plain(clip_value=0.01),
    "`max_norm`, `norm_type=inf`": plain(max_norm=0.1, norm_type=INF),
    "aux": plain(loss_of=with_aux),
    "`NoScale`": plain(rule=ps.NoScale()),
    "`StaticScale`": plain(rule=ps.StaticScale(64.0)),
    "`HeadroomScale`": plain(rule=ps.HeadroomScale(window=4)),
    "`SpikeGuard`": plain(guard=ps.SpikeGuard(warmup=2)),
    "masters of bfloat16": half(ps.with_master_weights(ADAMW)),
    "masters of float16": half(ps.with_master_weights(ADAMW), torch.float16),
    "stochastic rounding": half(ps.with_stochastic_rounding(ADAMW)),
    "moments in bfloat16": plain(ps.with_state_dtype(ADAMW, {"exp_avg": torch.bfloat16})),
    "SGD and AdamW, a partition": plain(TWO),
    "Muon and AdamW, a partition": plain(MUON_AND_ADAMW),
    "masters of a partition": half(ps.with_master_weights(TWO)),
    "masters of a partition, every setting": lambda device: job(
        device,
        ps.with_master_weights(SCHEDULED_AND_IN_STATE),
        **{"rule": ps.HeadroomScale(window=4), "net": InHalf, "dtype": torch.bfloat16},
        **{"microbatches": 3, "on_nonfinite": "drop_microbatch", "weight_fn": lambda b: len(b[0])},
        **{"max_norm": 1.0, "clip_value": 0.1, "guard": ps.SpikeGuard(warmup=2)},
    ),
    "overrides": plain(GROUPS),
    "a schedule": plain(ps.from_torch(torch.optim.AdamW, lr=lambda step: 1e-2 * 0.9**step)),
    "`schedule_from_torch`": lambda device: job(device, from_torchs_scheduler(device)),
    "settings in the state": plain(IN_STATE),
    "`from_transformation`": plain(momentum()),
    "`rng` in the state": plain(seeded=True),
    "`unscale_and_step`": stepping_by_hand(unscaled_and_stepped),
    "a loop by hand": stepping_by_hand(by_hand),
    "`accumulate_grads`": stepping_by_hand(accumulated, microbatches=3),
    "an ensemble, by vmap": ensemble,
    "`max_retries=2`": plain(max_retries=2),
}
# What stands for a kind: other classes by a formula, and layers, have no graph of another form.
ALIKE = {f"{name}, `max_norm`" for name in CLASSES.keys() - {"AdamW", "RMSprop", "Muon"}}
ALIKE |= {"LSTM", "GRU", "bfloat16, batch norm", "masters of float16", "SGD and AdamW, a partition"}
