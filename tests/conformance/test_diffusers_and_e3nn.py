"""Libraries whose models hold containers of their own classes: diffusers' frozen dicts, e3nn's
tuples that have no length.
"""

import pytest
import torch
from helpers import same_bits

import purescale as ps

diffusers = pytest.importorskip("diffusers")
e3nn = pytest.importorskip("e3nn")
o3, e3nn_nn = pytest.importorskip("e3nn.o3"), pytest.importorskip("e3nn.nn")

# The libraries script functions with torch.jit when they are imported.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)

BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def conditional_unet():
    types = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    types |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    model = diffusers.UNet2DConditionModel(
        8, 3, 3, cross_attention_dim=8, attention_head_dim=2, **types, **BLOCKS
    )
    return model, (torch.randn(2, 3, 8, 8), torch.tensor([1, 7]), torch.randn(2, 5, 8))


def autoencoder():
    types = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    types |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(**types, **BLOCKS), (torch.randn(2, 3, 8, 8),)


def equivariant():
    e3nn.set_optimization_defaults(jit_script_fx=False)
    first, hidden, last = "4x0e + 2x1o", "8x0e + 4x1o", "2x0e"

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = o3.FullyConnectedTensorProduct(first, first, hidden)
            self.linear = o3.Linear(hidden, hidden)
            self.norm = e3nn_nn.BatchNorm(hidden)
            self.last = o3.FullyConnectedTensorProduct(hidden, hidden, last)

        def forward(self, x):
            x = self.norm(self.linear(self.first(x, x)))
            return (self.last(x, x),)

    return Net(), (torch.randn(6, o3.Irreps(first).dim),)


MODELS = [conditional_unet, autoencoder, equivariant]


def loss_of(out):
    return out[0].square().mean() if isinstance(out, tuple) else out.sample.square().mean()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_and_buffers_have_the_bits_of_the_module(make, checkpoints):
    torch.manual_seed(0)
    model, inputs = make()
    if checkpoints and not hasattr(model, "enable_gradient_checkpointing"):
        pytest.skip("it has no checkpointing of its own")
    if checkpoints:
        model.train().enable_gradient_checkpointing()
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params, buffers, inputs):
        torch.manual_seed(1)
        out, buffers = apply(params, buffers, *inputs)
        return loss_of(out), buffers

    (loss, new_buffers), grads = ps.value_and_grad(loss_fn)(params, buffers, inputs)
    torch.manual_seed(1)
    expected = loss_of(model.train()(*inputs))
    expected.backward()
    assert same_bits(loss, expected.detach())
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    zero = {name: torch.zeros_like(p) for name, p in own.items()}
    assert same_bits(grads, {n: zero[n] if p.grad is None else p.grad for n, p in own.items()})
    assert sum(bool(grad.any()) for grad in grads.values()) > len(grads) / 2
    registered = dict(model.named_parameters()) | dict(model.named_buffers())
    assert same_bits(new_buffers, {name: registered[name].detach() for name in new_buffers})
