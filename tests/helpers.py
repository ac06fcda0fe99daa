"""What the tests look at: bits, versions and memory of whole trees."""

from __future__ import annotations

import contextlib
import datetime
import functools
import multiprocessing
import os
import socket
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import purescale as ps
from purescale._torch import tracing
from purescale._tree.cache import MetadataCache
from purescale.testing import Untouched as Untouched
from purescale.testing import overflow_runs, scale_rules
from purescale.testing import same_bits as same_bits
from purescale.testing import shares_memory as shares_memory

# The classes of torch.optim with a capturable implementation and without a fused kernel.
CAPTURABLE = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")

# Each class of torch.optim that has a formula, with the settings that give it the most slots.
CLASSES: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {"foreach": False},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def slots_of(state: Any, name: str, like: Any = ()) -> dict[str, Tensor]:
    """The slots of one parameter by name, with the count of its steps if `like` has that."""
    slots = {key: column[name] for key, column in state.slots.items()}
    slots = {key: slot for key, slot in slots.items() if isinstance(slot, Tensor)}
    if "step" in like:
        count = state.applied.float() if state.counts == () else state.counts[name]
        slots = {"step": count, **slots}
    return slots


EXAMPLES = 50  # of a property, in the quick tests


def examples(count: int) -> settings:
    """Another number of examples for one property, which `make fuzz` multiplies too."""
    return settings(max_examples=max(1, count * settings().max_examples // EXAMPLES))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def clone(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def stack(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def with_its_double(tree: Any) -> Any:
    """Two members: the tree, and the tree with all that is floating times 2."""
    return pytree.tree_map(lambda t: torch.stack([t, 2 * t if t.is_floating_point() else t]), tree)


def unstack(tree: Any, index: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[index], tree)


def assert_close(a: Any, b: Any, **tolerance: float) -> None:
    torch.testing.assert_close(tensors(a), tensors(b), **tolerance)


class Dispatched(TorchDispatchMode):
    """Counts the operators that run inside; `reads` are those that bring a tensor's value to the
    host, `reductions` those that add up over ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return sum(func is torch.ops.aten._local_scalar_dense.default for func in self.ops)

    @property
    def reductions(self) -> int:
        return sum("all_reduce" in str(op) or "allreduce" in str(op) for op in self.ops)


class AsOnAnAccelerator(Dispatched):
    """`Dispatched` on a CPU that goes the way of an accelerator, where nothing may be read."""

    def __enter__(self) -> Any:
        self.forced = tracing.as_on_an_accelerator()
        self.forced.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.forced.__exit__(*raised)


def on_an_accelerator(forced: bool) -> Any:
    """A context in which a CPU goes the way of an accelerator, if that is forced."""
    return tracing.as_on_an_accelerator() if forced else contextlib.nullcontext()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Within, torch has this default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- several processes ---------------------------------------------------------------------------


def in_processes(body: Any, count: int = 2, patience: float = 120) -> None:
    """`body(rank)`, or each function of a tuple in turn, in `count` processes of one gloo group. A
    rank that waits for another longer than `patience`, in seconds, raises.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # from a process that has imported what takes long and nothing else
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "purescale.testing", "pytest", "hypothesis"]
    )
    mp.start_processes(
        _rank, args=(port, body, count, patience), nprocs=count, start_method="forkserver"
    )


def _rank(rank: int, port: int, body: Any, count: int, patience: float) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count)
    )
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timeout)
    for part in body if isinstance(body, tuple) else (body,):
        part(rank)
    dist.barrier()
    # gloo's threads now and then abort a process that ends in the ordinary way.
    os._exit(0)


def output_of_torchrun(*arguments: str, paths: list[str], **settings: Any) -> str:
    """The output of programs on several ranks, with these folders on their path."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    for _ in range(2):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, **settings
        )
        # A thread of gloo may end a process that is about to end (pytorch#190489).
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


def spread(tree: Any, mesh: Any, placements: dict[str, Any]) -> Any:
    """A dict as DTensors, in memory of its own, without any communication; what has no placements
    stays a plain tensor.
    """
    return {
        name: distribute_tensor(leaf.clone(), mesh, placements[name], src_data_rank=None)
        if name in placements
        else leaf.clone()
        for name, leaf in tree.items()
    }


def whole(tree: Any) -> Any:
    """A tree with the whole tensor of each DTensor."""
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def on_all_ranks(value: Any) -> list[Any]:
    """The value of each rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


# ---- a small training job ------------------------------------------------------------------------


class OldDouble(torch.autograd.Function):
    """A function of the older form, without setup_context. torch.func does not take it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class OwnBackward(torch.autograd.Function):
    """`x * w`, whose backward runs a graph of its own over `w`, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach(), w)
        return x * w

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            (x * w).backward(seed)
        return seed * w, None


def function_of(forward: Any, backward: Any) -> Any:
    """`apply` of an autograd.Function of these two."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), parts).apply


class Keeps(torch.autograd.Function):
    """The sum of `w`, whose gradient is a tensor that somebody keeps, or a view of it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, kept: Tensor, view: bool = False) -> Tensor:
        ctx.kept, ctx.view = kept, view
        return w.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (ctx.kept.view(ctx.kept.shape) if ctx.view else ctx.kept), None, None


class Checkpointed(nn.Module):
    """Three parts with dropout, each in a checkpoint of its own if `checkpoints`."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.3)) for _ in range(3)
        )
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpoints else part(x)
        return x


def module_of(forward: Any, **parts: Any) -> nn.Module:
    """A module with this forward, which is given the module too. A plain tensor is a buffer."""

    class Made(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

    made = Made()
    for name, part in parts.items():
        is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
        made.register_buffer(name, part) if is_buffer else setattr(made, name, part)
    return made


def called(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The output of `apply` of the module on its own tensors, and the new buffers."""
    apply, params, buffers = ps.make_functional(module)
    return apply(params, buffers, *args, **options)


def mean_square_of(apply: Any) -> Any:
    """The loss_fn that is the mean of the squares of what `apply` returns."""

    def loss_fn(params: Any, buffers: Any, *args: Any) -> Any:
        out, buffers = apply(params, buffers, *args)
        return out.float().square().mean(), buffers

    return loss_fn


def in_one_graph(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def generator_of(seed: int) -> torch.Generator:
    """A generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def batch(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = generator_of(seed)
    return torch.randn(size, 1, 6, 6, generator=generator), torch.randint(
        0, 3, (size,), generator=generator
    )


def cross_entropy_of(apply: Any) -> Any:
    """The loss_fn of a classifier, for microbatches (x, y)."""

    def loss_fn(params: Any, buffers: Any, microbatch: Any) -> Any:
        x, y = microbatch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    return loss_fn


def in_float32(params: Any, buffers: Any, x: Tensor) -> Any:
    """A loss that leaves autocast, whose backward multiplies matrices all the same."""
    with torch.autocast("cpu", enabled=False):
        return (x @ params["w"]).square().mean(), buffers


HALF = "params=float32,compute=float16,output=float32"


def job(optimizer: Any, rule: Any, policy: str = HALF, **settings: Any) -> tuple[Any, Any]:
    """(state, step): a net with BatchNorm on random images, `step(state, microbatches)`."""
    apply, params, buffers = ps.make_functional(small_net())
    loss_fn = cross_entropy_of(ps.with_policy(apply, policy))
    step = functools.partial(
        ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, **settings
    )
    return ps.init_train_state(params, buffers, optimizer, rule), step


def started(
    params: Any,
    loss: Any = None,
    optimizer: Any = None,
    rule: Any = None,
    *,
    buffers: Any = None,
    rng: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """(state, step) of a loss of one line, `loss(params, microbatch)`, or of a whole `loss_fn=`; by
    default SGD at a rate of 1 under a scale of 2**10, so a step subtracts the gradient.
    """
    optimizer = ps.from_torch(torch.optim.SGD, lr=1.0) if optimizer is None else optimizer
    rule = ps.DynamicScale(init_scale=2.0**10, growth_interval=3) if rule is None else rule
    settings.setdefault("loss_fn", lambda p, b, x: (loss(p, x), b))
    step = functools.partial(ps.train_step, optimizer=optimizer, rule=rule, **settings)
    guard = {"guard": settings["guard"]} if "guard" in settings else {}
    state = ps.init_train_state(params, buffers or {}, optimizer, rule, rng=rng, **guard)
    return state, step


def assert_donation_keeps_bits(call: Any) -> None:
    """`call(donate=...)`, which makes anew what it is given, gives the same bits either way."""
    kept = clone(call(donate=False))
    assert same_bits(call(donate=True), kept)


def trained(state: Any, step: Any, windows: Any) -> tuple[Any, list[Any]]:
    """The state after `step(state, window)` for each window, and what the steps told."""
    infos = []
    for window in windows:
        state, info = step(state, window)
        infos.append(info)
    return state, infos


def by_parts(
    optimizer: Any,
    scaler: Any,
    params: Any,
    grads: Any,
    state: Any,
    max_norm: Any = None,
    clip_value: Any = None,
) -> tuple[Any, ...]:
    """What `unscale_and_step` is equal to."""
    grads, found_inf = ps.unscale_and_check(scaler, grads)
    norm: Any = ()
    if max_norm is not None:
        grads, norm = ps.clip_by_global_norm(grads, max_norm)
    if clip_value is not None:
        grads = ps.clip_by_value(grads, clip_value)
    return (*ps.maybe_step(optimizer, params, grads, state, found_inf), found_inf, norm)


def at(scale: float, **counters: int) -> ps.ScalerState:
    """A scaler state with this scale and these counters."""
    changed = {name: torch.tensor(value, dtype=torch.int32) for name, value in counters.items()}
    return (
        ps.DynamicScale().init()._replace(scale=torch.tensor(scale, dtype=torch.float32), **changed)
    )


def scaled_by(state: Any, scale: float) -> Any:
    return state._replace(scaler=state.scaler._replace(scale=torch.tensor(scale)))


# ---- Hypothesis ----------------------------------------------------------------------------------

powers_of_two = st.integers(-24, 24).map(lambda exponent: 2.0**exponent)
finite32 = st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-60)
any32 = st.floats(width=32)


def vectors(
    elements: st.SearchStrategy[float], dtype: torch.dtype = torch.float32
) -> st.SearchStrategy[Tensor]:
    return st.lists(elements, min_size=1, max_size=6).map(
        lambda values: torch.tensor(values, dtype=torch.float64).to(dtype)
    )


def trees(elements: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    leaf = vectors(elements)
    return st.fixed_dictionaries(
        {"b": leaf, "a": st.tuples(leaf, st.none() | leaf), "n": st.lists(leaf, max_size=2)}
    )


legal_rules = scale_rules(ps.DynamicScale)
overflow_patterns = overflow_runs(320)


def steered(bad: bool, scale: float) -> bool:
    """`bad`, unless the scale is about to leave the range of float32, where jax rounds to 0 and
    Python floats go on.
    """
    if not 2.0**-100 < scale < 2.0**100:
        return scale > 1
    return bad


def find_no_plans(monkeypatch):
    """Make each call plan anew, as the first one does. What is kept meanwhile is found later."""
    none = property(lambda plans: (), lambda plans, entries: vars(plans).update(entries=entries))
    monkeypatch.setattr(MetadataCache, "entries", none, raising=False)
