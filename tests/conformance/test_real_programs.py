"""Trainings that use much at once, beside torch's own loop: a Llama of transformers and a vision
transformer of timm, with their own checkpointing, Muon and AdamW, a warm-up from a rate of 0, a
guard and windows of two microbatches; saved and resumed in the middle, then given back to torch.
"""

import pytest
import torch
from helpers import started, trained

import purescale as ps

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("x_transformers")

from architectures import (
    LLAMA,
    SIDE,
    TIMM_VIT,
    VOCABULARY,
    enable_checkpointing,
    from_config,
    from_timm,
    loss_of,
)

# Its older name, which transformers 5.0 has alone.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"
)

STEPS, WARM_UP, RATES, MAX_NORM = 6, 8, {"matrices": 0.02, "others": 3e-3}, 1.0


def llama():
    torch.manual_seed(0)
    model = from_config("Llama", "ForCausalLM", LLAMA | {"use_cache": False}).train()
    assert enable_checkpointing(model)
    return model


def vit():
    torch.manual_seed(0)
    model = from_timm("vit_tiny_patch16_224", TIMM_VIT).train()
    assert enable_checkpointing(model)
    return model


def text(generator):
    """Each token is the next after the one before it."""
    tokens = torch.randint(VOCABULARY - 12, (4, 1), generator=generator) + torch.arange(12)
    return {"input_ids": tokens, "labels": tokens}


def images(generator):
    """The class of an image is the brightest of its three channels."""
    noise = torch.randn(4, 3, SIDE, SIDE, generator=generator)
    return {"x": noise + torch.eye(3)[torch.arange(4) % 3][:, :, None, None]}


def windows(inputs, count):
    generator = torch.Generator().manual_seed(1)
    return [[inputs(generator), inputs(generator)] for _ in range(count)]


def label(name, param):
    outside = ("embed_tokens", "lm_head", "pos_embed", "head")
    inner = param.ndim == 2 and not any(part in name for part in outside)
    return "matrices" if inner else "others"


def warm_up(step):
    return min(step / WARM_UP, 1.0)


def rate(peak):
    return lambda step: peak * torch.clamp(step / WARM_UP, max=1.0)


def ours(matrices):
    optimizers = {
        "matrices": ps.from_torch(matrices, lr=rate(RATES["matrices"])),
        "others": ps.from_torch(torch.optim.AdamW, lr=rate(RATES["others"])),
    }
    return ps.partition(optimizers, label)


def torch_optimizers(model, matrices):
    groups = {key: [] for key in RATES}
    for name, parameter in model.named_parameters():
        groups[label(name, parameter)].append(parameter)
    return {
        "matrices": matrices(groups["matrices"], lr=RATES["matrices"]),
        "others": torch.optim.AdamW(groups["others"], lr=RATES["others"]),
    }


def torch_loop(model, optimizers, data, done=0, factor=1.0):
    """Train the module as torch's own loop does, from step `done` of the schedule on. The loss is
    multiplied by `factor` and the gradients are divided by it.
    """
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up, last_epoch=done - 1 if done else -1)
        for optimizer in optimizers.values()
    ]
    for window in data:
        for microbatch in window:
            (loss_of(model(**microbatch)) * (factor / len(window))).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer, scheduler in zip(optimizers.values(), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def training(model, optimizer):
    """(state, step)"""
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params, buffers, microbatch):
        out, buffers = apply(params, buffers, **microbatch)
        return loss_of(out), buffers

    settings = {"buffers": buffers, "guard": ps.SpikeGuard(), "max_norm": MAX_NORM, "donate": True}
    return started(params, None, optimizer, ps.DynamicScale(2.0**10), loss_fn=loss_fn, **settings)


def largest_difference(model, other):
    """The largest change of a parameter, relative to its norm."""
    with torch.no_grad():
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def saved_resumed_and_given_back(make, matrices, data, path):
    """A third of the training, a save, a third, and the last third in torch."""
    third = len(data) // 3
    state, before = trained(*training(make(), ours(matrices)), data[:third])
    ps.save(path, state)
    like, step = training(make(), ours(matrices))
    state, after = trained(ps.load(path, like=like), step, data[third : 2 * third])
    assert not any(info.found_inf for info in before + after)

    model = make()
    ps.load_into(model, state.params, state.buffers)
    optimizers, parts = torch_optimizers(model, matrices), ours(matrices).optimizers
    for key, optimizer in optimizers.items():
        optimizer.load_state_dict(parts[key].to_state_dict(state.opt_state[key], RATES[key]))
    torch_loop(model, optimizers, data[2 * third :], done=2 * third)
    return model


@pytest.mark.parametrize(("make", "inputs"), [(llama, text), (vit, images)], ids=["llama", "vit"])
@pytest.mark.parametrize("matrices", [torch.optim.SGD, torch.optim.Muon])
def test_saved_resumed_and_given_back_it_is_the_loop_of_torch(make, inputs, matrices, tmp_path):
    data = windows(inputs, 3 * STEPS)
    model = saved_resumed_and_given_back(make, matrices, data, tmp_path / "run.pt")
    expected, rounded = make(), make()
    torch_loop(expected, torch_optimizers(expected, matrices), data)
    # Muon gives every direction of a gradient one length, those of rounding errors too: the same
    # loop with a loss three times as large shows how far rounding alone leads.
    torch_loop(rounded, torch_optimizers(rounded, matrices), data, factor=3.0)
    rounding = largest_difference(rounded, expected)
    assert largest_difference(model, expected) < 3 * rounding
