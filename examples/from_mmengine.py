"""Training code of MMEngine and mmpose beside the same in purescale, and the numbers of both.

Run `make conformance` once, which installs mmengine, then
`.venv/bin/python examples/from_mmengine.py`. mmpose's hook is written out with its own steps, since
mmpose needs an older torch; apex needs a compiler, and is one line: see `ApexOptimWrapper` below.
"""

import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import purescale as ps

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmengine.optim import AmpOptimWrapper, OptimWrapper

torch.manual_seed(0)
MICROBATCHES = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(10)]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def loss_fn_of(apply):
    def loss_fn(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(logits, batch[1]), buffers

    return loss_fn


def windows(every: int):
    """The microbatches in windows; the last one may be shorter, and is still a whole step."""
    return [MICROBATCHES[start : start + every] for start in range(0, len(MICROBATCHES), every)]


# ---- OptimWrapper: accumulation and clipping


def old_optim_wrapper():
    model = make_model()
    wrapper = OptimWrapper(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        accumulative_counts=3,
        clip_grad={"max_norm": 0.5},
    )
    wrapper.initialize_count_status(model, 0, len(MICROBATCHES))
    for x, y in MICROBATCHES:
        with wrapper.optim_context(model):
            loss = F.cross_entropy(model(x), y)
        wrapper.update_params(loss)
    return dict(model.named_parameters())


def new_optim_wrapper():
    apply, params, buffers = ps.make_functional(make_model())
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=0.01), ps.NoScale()
    state = ps.init_train_state(params, buffers, optimizer, rule)
    for window in windows(every=3):
        state, _ = ps.train_step(
            state, window, loss_fn=loss_fn_of(apply), optimizer=optimizer, rule=rule, max_norm=0.5
        )
    return state.params


# ---- AmpOptimWrapper: float16 autocast and a dynamic loss scale


def old_amp_optim_wrapper():
    model = make_model()
    # It wants a GPU; the scaler of the CPU has the same rule.
    with (
        mock.patch(
            "mmengine.optim.optimizer.amp_optimizer_wrapper.is_cuda_available", return_value=True
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        wrapper = AmpOptimWrapper(
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2
        )
    wrapper.loss_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    wrapper.initialize_count_status(model, 0, len(MICROBATCHES))
    for x, y in MICROBATCHES:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        wrapper.update_params(loss)
    return {
        **dict(model.named_parameters()),
        "the scale": torch.tensor(wrapper.loss_scaler.get_scale()),
    }


def new_amp_optim_wrapper():
    apply, params, buffers = ps.make_functional(make_model())
    apply = ps.with_policy(apply, "params=float32,compute=autocast(float16),output=float32")
    optimizer, rule = (
        ps.from_torch(torch.optim.SGD, lr=0.1),
        ps.DynamicScale(init_scale=2.0**24, growth_interval=3),
    )
    state = ps.init_train_state(params, buffers, optimizer, rule)
    for window in windows(every=2):
        state, _ = ps.train_step(
            state, window, loss_fn=loss_fn_of(apply), optimizer=optimizer, rule=rule
        )
    return {**state.params, "the scale": state.scaler.scale}


# ---- ApexOptimWrapper(opt_level="O2") is the policy and the rule of that level in the step above:
# policy "params=float32,compute=float16,output=float32" (masters, norms in float32) and
# DynamicScale(init_scale=2.0**16)


# ---- Fp16OptimizerHook of mmpose: a half model, float32 masters, a static scale


def old_fp16_optimizer_hook(loss_scale: float = 512.0):
    model = make_model().half()
    masters = [p.detach().float().requires_grad_() for p in make_model().parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for x, y in MICROBATCHES:
        model.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        (loss * loss_scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float() / loss_scale
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return dict(zip(dict(model.named_parameters()), masters, strict=True))


def new_fp16_optimizer_hook():
    apply, params, buffers = ps.make_functional(make_model())
    apply = ps.with_policy(apply, "params=float32,compute=float16,output=float32")
    optimizer, rule = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9), ps.StaticScale(512.0)
    state = ps.init_train_state(params, buffers, optimizer, rule)
    for batch in MICROBATCHES:
        state, _ = ps.train_step(
            state, [batch], loss_fn=loss_fn_of(apply), optimizer=optimizer, rule=rule, max_norm=0.5
        )
    return state.params


def main() -> dict[str, float]:
    pairs = {
        "OptimWrapper": (old_optim_wrapper, new_optim_wrapper),
        "AmpOptimWrapper": (old_amp_optim_wrapper, new_amp_optim_wrapper),
        "Fp16OptimizerHook": (old_fp16_optimizer_hook, new_fp16_optimizer_hook),
    }
    apart = {}
    for name, (old, new) in pairs.items():
        before, after = old(), new()
        assert list(before) == list(after)
        apart[name] = max((before[key] - after[key]).abs().max().item() for key in before)
        print(f"{name:20} largest difference of a parameter after training: {apart[name]:.1e}")
    return apart


if __name__ == "__main__":
    main()
