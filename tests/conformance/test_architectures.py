"""What `make_functional` makes of each architecture is the module: gradients, a training, autocast,
its own checkpointing and the way back, bit for bit.
"""

import inspect

import pytest
import torch
from helpers import same_bits, tensors

import purescale as ps

transformers = pytest.importorskip("transformers")
pytest.importorskip("x_transformers")

from architectures import ARCHITECTURES  # noqa: E402

# x-transformers calls torch.jit.script when it is imported; no concern of this package.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)


def loss_of(out):
    """The loss that a model returns, or one of all that it returns."""
    if isinstance(out, torch.Tensor):
        return out
    if getattr(out, "loss", None) is not None:
        return out.loss
    return sum(t.sin().mean() for t in tensors(tuple(out)) if t.requires_grad)


def loss_fn_of(apply):
    def loss_fn(params, buffers, inputs):
        transformers.set_seed(3)  # the same dropout on both sides
        out, buffers = apply(params, buffers, **inputs)
        return loss_of(out), buffers

    return loss_fn


def backward(model, inputs):
    transformers.set_seed(3)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach()


def state_of(model, names):
    registered = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: registered[name].detach() for name in names}


def gradients(model, inputs):
    apply, params, buffers = ps.make_functional(model)
    (loss, buffers), grads = ps.value_and_grad(loss_fn_of(apply))(params, buffers, inputs)
    return loss, buffers, grads


def compare_gradients(architecture):
    model, inputs = architecture.make(), architecture.inputs()
    loss, buffers, grads = gradients(model, inputs)
    assert same_bits(loss, backward(model, inputs).float())
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert list(grads) == list(expected)
    assert any(grad.any() for grad in grads.values())
    wrong = [name for name in grads if not same_bits(grads[name], expected[name])]
    assert not wrong
    assert same_bits(buffers, state_of(model, buffers))


def trained(architecture):
    apply, params, buffers = ps.make_functional(architecture.make())
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=1e-2), ps.NoScale()
    state = ps.init_train_state(params, buffers, optimizer, rule)
    for _ in range(3):
        state, _ = ps.train_step(
            state,
            [architecture.inputs()],
            loss_fn=loss_fn_of(apply),
            optimizer=optimizer,
            rule=rule,
        )
    return apply, state


def compare_training(architecture):
    _, state = trained(architecture)
    model = architecture.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, architecture.inputs())
        optimizer.step()
    used = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    before = ps.make_functional(architecture.make())[1]
    assert not all(same_bits(state.params[name], before[name]) for name in used)
    expected = state_of(model, used)
    wrong = [name for name in used if not same_bits(state.params[name], expected[name])]
    assert not wrong
    assert same_bits(state.buffers, state_of(model, state.buffers))


def compare_autocast(architecture):
    model, inputs = architecture.make(), architecture.inputs()
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, "params=float32,compute=autocast(bfloat16)")
    transformers.set_seed(3)
    ours, _ = apply(params, buffers, **inputs)
    transformers.set_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(**inputs)
    assert same_bits(tensors(ours), tensors(theirs))


def compare_checkpointing(architecture, monkeypatch):
    plain = gradients(architecture.make(), architecture.inputs())
    model, calls = architecture.make(), []

    def counted(*args, **kwargs):
        calls.append(1)
        return torch.utils.checkpoint.checkpoint(*args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, architecture.inputs())
    assert calls
    wrong = [n for n in plain[2] if not same_bits(plain[2][n], again[2][n])]
    assert not wrong
    assert same_bits(plain, again)


def compare_load_into(architecture):
    apply, state = trained(architecture)
    model, inputs = architecture.make(), architecture.inputs()
    ps.load_into(model, state.params, state.buffers)
    transformers.set_seed(3)
    ours, _ = apply(state.params, state.buffers, train=False, **inputs)
    transformers.set_seed(3)
    theirs = model.eval()(**inputs)
    assert same_bits(tensors(ours), [t.detach() for t in tensors(theirs)])


def compare_hidden_states(architecture):
    model, inputs = architecture.make(), architecture.inputs() | {"output_hidden_states": True}
    apply, params, buffers = ps.make_functional(model)
    outs = []
    for _ in range(3):
        transformers.set_seed(3)
        outs.append(tensors(apply(params, buffers, train=False, **inputs)[0]))
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])
    transformers.set_seed(3)
    assert same_bits(outs[0], [t.detach() for t in tensors(model.eval()(**inputs))])
    assert len(outs[0]) > len(tensors(model(**architecture.inputs())))
