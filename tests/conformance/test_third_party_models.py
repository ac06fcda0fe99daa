"""Models that nobody here wrote, as they come: random weights from a configuration, dropout on,
nothing downloaded.
"""

import math

import pytest
import torch
from helpers import Untouched, assert_close, same_bits, shares_memory, started

import purescale as ps

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("x_transformers")

from architectures import BERT, GPT, T5, VOCABULARY, from_config, x_transformer

# x-transformers calls torch.jit.script when it is imported; no concern of this package.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

PLAIN = "params=float32,compute=float16,output=float32"
AUTOCAST = "params=float32,compute=autocast(float16),output=float32"

both_policies = pytest.mark.parametrize("policy", [PLAIN, AUTOCAST], ids=["cast", "autocast"])


def gpt2():
    return from_config("GPT2", "LMHeadModel", GPT | {"n_embd": 32})


def bert():
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    return from_config("Bert", "ForMaskedLM", BERT | sizes)


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64}
    return from_config("T5", "ForConditionalGeneration", T5 | sizes)


def call(function, tokens):
    """The loss and all else that `function`, a module or an apply with its params and buffers,
    returns for keyword arguments.
    """
    out = function(input_ids=tokens, labels=tokens)
    return out.loss, out


def call_x_transformer(function, tokens):
    loss, rest = function(x=tokens, return_outputs=True)
    return loss, rest


MODELS = {
    "gpt2": (gpt2, call),
    "bert": (bert, call),
    "t5": (t5, call),
    "x_transformer": (x_transformer, call_x_transformer),
}


@pytest.fixture(params=MODELS)
def made(request):
    """A model in train mode, and how to call it."""
    make, how = MODELS[request.param]
    return make().train(), how


@pytest.fixture
def tokens():
    return torch.randint(1, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def job(model, how, policy, init_scale=2.0**16, **settings):
    """(state, step): AdamW under a dynamic scale, dropout drawn from the state;
    `step(state, microbatches)`.
    """
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, policy)

    def loss_fn(params, buffers, tokens):
        seen = []

        def forward(**kwargs):
            out, new_buffers = apply(params, buffers, **kwargs)
            seen.append(new_buffers)
            return out

        loss, _ = how(forward, tokens)
        return loss, seen[0]

    parts = ps.from_torch(torch.optim.AdamW, lr=3e-3), ps.DynamicScale(init_scale=init_scale)
    settings |= {"buffers": buffers, "rng": torch.Generator().manual_seed(0).get_state()}
    return started(params, None, *parts, loss_fn=loss_fn, **settings)


def test_a_structured_output_keeps_its_class_and_comes_out_in_float32(tokens):
    model = gpt2()
    apply, params, buffers = ps.make_functional(model)
    raw, _ = ps.with_policy(apply, "params=float32,compute=float16")(
        params, buffers, input_ids=tokens, labels=tokens
    )
    out, _ = ps.with_policy(apply, PLAIN)(params, buffers, input_ids=tokens, labels=tokens)
    assert type(out) is type(model(input_ids=tokens, labels=tokens))
    assert (raw.logits.dtype, out.logits.dtype) == (torch.float16, torch.float32)


# ---- steps in float16


@both_policies
def test_ten_steps_replay_lower_the_loss_and_leave_the_module_as_it_was(made, tokens, policy):
    model, how = made
    attributes = {name: vars(module).keys() for name, module in model.named_modules()}
    with Untouched(tensors_of(model)):
        first, step = job(model, how, policy)
        state, losses = first, []
        for _ in range(10):
            with Untouched(state):
                new, info = step(state, [tokens])
            losses.append(info.loss.item())
            assert math.frexp(info.scale.item())[0] == 0.5
            if len(losses) == 2:
                again, other = step(state, [tokens])
                assert same_bits((again, other.loss), (new, info.loss))
            state = new
    assert losses[-1] < losses[0] - 0.5
    assert all(p.dtype is torch.float32 for p in state.params.values())
    assert not shares_memory(
        (first.params, first.buffers, state.params, state.buffers), tensors_of(model)
    )
    assert {name: vars(m).keys() for name, m in model.named_modules()} == attributes
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@both_policies
def test_loss_and_gradient_norm_of_a_half_step_are_those_of_the_float32_module(
    made, tokens, policy
):
    model, how = made
    # which only measures
    state, step = job(model, how, policy, init_scale=2.0**10, max_norm=math.inf)
    _, info = step(state, [tokens])
    torch.set_rng_state(state.rng.clone())
    loss, _ = how(model, tokens)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert not info.found_inf
    assert_close((info.loss, info.grad_norm), (loss.detach(), norm), rtol=5e-3, atol=0.0)
