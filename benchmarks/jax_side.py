"""The side of JAX in `jax_side_by_side.py`: flax's DynamicScale and optax, under `jax.jit`.

Run by that script: `python benchmarks/jax_side.py CASE`.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases
import optax
from flax.training.dynamic_scale import DynamicScale
from jax_cases import Case, serve, stacked

# A call from the thread of the caller: the fastest way for small programs.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def mlp(params: Any, buffers: Any, x: Any) -> Any:
    depth = len(params) // 2
    for index in range(depth):
        x = x @ params[f"w{index:02}"] + params[f"b{index:02}"]
        x = x if index == depth - 1 else jax.nn.relu(x)
    return x, buffers


def conv(params: Any, buffers: Any, x: Any) -> Any:
    new = {}
    x = x.transpose(0, 2, 3, 1)
    for index, stride in enumerate(jax_cases.STRIDES):
        kernel = params[f"conv{index}"].transpose(2, 3, 1, 0)
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=layout
        )
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // x.shape[-1]
        for name, value in (("mean", mean), ("var", var * count / (count - 1))):
            old = buffers[f"{name}{index}"]
            new[f"{name}{index}"] = old + jax_cases.MOMENTUM * (jax.lax.stop_gradient(value) - old)
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * params[f"scale{index}"]
        x = jax.nn.relu(x + params[f"shift{index}"])
    return x.mean((1, 2)) @ params["head"], new


def norm(params: Any, name: str, x: Any) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * params[f"{name}.scale"] + params[f"{name}.shift"]


def gpt(params: Any, buffers: Any, tokens: Any) -> Any:
    x = params["token"][tokens] + params["position"]
    for index in range(sum(name.startswith("qkv") for name in params)):
        qkv = norm(params, f"attend{index}", x) @ params[f"qkv{index}"]
        q, k, v = (
            part.reshape(*x.shape[:2], jax_cases.HEADS, -1) for part in jnp.split(qkv, 3, -1)
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ params[f"out{index}"]
        up = norm(params, f"think{index}", x) @ params[f"up{index}"]
        x = x + jax.nn.gelu(up, approximate=True) @ params[f"down{index}"]
    return x @ params["token"].T, buffers


MODELS: dict[str, Callable[..., Any]] = {"mlp": mlp, "conv": conv, "gpt": gpt}


def select(flag: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def make(case: Case) -> Callable[[], Any]:
    params, buffers = jax.tree.map(jnp.asarray, (case.params, case.buffers))
    x, y = map(jnp.asarray, case.batch)
    scaler = DynamicScale()

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = MODELS[case.model](params, buffers, batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(out, batch[1]).mean()
        return loss, buffers

    def step(state: Any, batch: Any, tx: Any) -> Any:
        params, buffers, opt_state, scaler, count = state
        grad_fn = scaler.value_and_grad(loss_fn, has_aux=True)
        scaler, finite, (loss, new_buffers), grads = grad_fn(params, buffers, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_buffers, new_opt_state
        new = select(finite, new, (params, buffers, opt_state))
        info = loss, finite, optax.global_norm(grads)
        return (*new, scaler, count + finite), info

    def adamw(lr: Any) -> Any:
        clip = optax.clip_by_global_norm(jax_cases.MAX_NORM)
        return optax.chain(clip, optax.adamw(lr, weight_decay=jax_cases.WEIGHT_DECAY))

    def init(tx: Any) -> Any:
        return params, buffers, tx.init(params), scaler, jnp.array(0)

    if case.program == "maml":

        def after(params: Any, batch: Any) -> Any:
            tx = optax.sgd(jax_cases.INNER_LR)
            state = params, buffers, tx.init(params), scaler, jnp.array(0)
            for _ in range(jax_cases.INNER_STEPS):
                state, _ = step(state, batch, tx)
            return loss_fn(state[0], buffers, batch)[0]

        fn: Any = jax.jit(jax.value_and_grad(after))
        return lambda: jax.block_until_ready(fn(params, (x, y)))[0]

    if case.program == "derivative":

        def after_lr(lr: Any, state: Any, batch: Any) -> Any:
            for _ in range(jax_cases.SCANNED):
                state, info = step(state, batch, optax.sgd(lr))
            return info[0]

        fn = jax.jit(jax.grad(after_lr))
        start = init(optax.sgd(jax_cases.INNER_LR))
        lr = jnp.array(jax_cases.INNER_LR)
        return lambda: jax.block_until_ready(fn(lr, start, (x, y)))

    tx = adamw(jax_cases.LR)
    state = init(tx)
    if case.program == "sweep":
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * case.members), state)
        lrs = jax_cases.LR * (1 + jnp.arange(case.members) / case.members)
        mapped = jax.vmap(lambda s, lr, b: step(s, b, adamw(lr)), in_axes=(0, 0, None))
        fn = jax.jit(lambda state, batch: mapped(state, lrs, batch))
    elif case.program == "scan":
        x, y = (jnp.asarray(stacked(array, jax_cases.SCANNED)) for array in case.batch)
        fn = jax.jit(lambda state, batch: jax.lax.scan(lambda s, b: step(s, b, tx), state, batch))
    else:
        fn = jax.jit(lambda state, batch: step(state, batch, tx))
    states = [state]

    def run() -> Any:
        states[0], info = jax.block_until_ready(fn(states[0], (x, y)))
        return info[0]

    return run


if __name__ == "__main__":
    serve(make)
