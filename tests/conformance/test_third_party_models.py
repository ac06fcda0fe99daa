"""Models that nobody here wrote, as they come: random weights from a configuration, dropout on,
nothing downloaded.
"""

import math

import pytest
import torch
from helpers import Untouched, assert_close, same_bits, shares_memory

import purescale as ps

transformers = pytest.importorskip("transformers")

# x-transformers calls torch.jit.script when it is imported; no concern of this package.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

VOCABULARY, BATCH, LENGTH, WIDTH = 61, 4, 12, 32
PLAIN = "params=float32,compute=float16,output=float32"
AUTOCAST = "params=float32,compute=autocast(float16),output=float32"

both_policies = pytest.mark.parametrize("policy", [PLAIN, AUTOCAST], ids=["cast", "autocast"])


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def x_transformer():
    x = pytest.importorskip("x_transformers")
    layers = x.Decoder(
        dim=WIDTH, depth=2, heads=2, attn_dim_head=16, attn_dropout=0.1, ff_dropout=0.1
    )
    return x.AutoregressiveWrapper(
        x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    )


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
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def job(model, how, policy, init_scale=2.0**16, **settings):
    """(state, step): AdamW under a dynamic scale, dropout drawn from the state;
    `step(state, microbatches)`.
    """
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, policy)
    optimizer, rule = (
        ps.from_torch(torch.optim.AdamW, lr=3e-3),
        ps.DynamicScale(init_scale=init_scale),
    )

    def loss_fn(params, buffers, tokens):
        seen = []

        def forward(**kwargs):
            out, new_buffers = apply(params, buffers, **kwargs)
            seen.append(new_buffers)
            return out

        loss, _ = how(forward, tokens)
        return loss, seen[0]

    def step(state, microbatches):
        return ps.train_step(
            state, microbatches, loss_fn=loss_fn, optimizer=optimizer, rule=rule, **settings
        )

    return ps.init_train_state(
        params, buffers, optimizer, rule, rng=torch.Generator().manual_seed(0).get_state()
    ), step


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


@pytest.mark.parametrize("name", ["bert", "t5", "x_transformer"])
def test_a_real_overflow_changes_nothing_but_scale_and_random_state(name, tokens):
    make, how = MODELS[name]
    state, step = job(make(), how, PLAIN, init_scale=2.0**24)
    after, info = step(state, [tokens])
    assert info.found_inf
    assert torch.isfinite(info.loss)
    assert same_bits(
        (after.params, after.buffers, after.opt_state, after.step),
        (state.params, state.buffers, state.opt_state, state.step),
    )
    assert after.scaler.scale == state.scaler.scale / 2


# ---- tied weights


def test_tied_weights_reach_both_places_and_are_still_tied_after_three_half_steps(tokens):
    model = gpt2()
    state, step = job(model, call, PLAIN)
    for _ in range(3):
        state, _ = step(state, [tokens])
    trained = gpt2()
    missing, unexpected = trained.load_state_dict(state.params, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert trained.lm_head.weight is trained.transformer.wte.weight
    apply, _, _ = ps.make_functional(model)
    ours, _ = apply(state.params, state.buffers, train=False, input_ids=tokens)
    theirs = trained.eval().requires_grad_(False)(input_ids=tokens)
    assert same_bits(ours.logits, theirs.logits)
    assert not torch.equal(ours.logits, model.eval()(input_ids=tokens).logits)


# ---- what the module's frozen parts are


def test_frozen_parameters_of_a_real_model_stay_bit_for_bit(tokens):
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    frozen = {f"bert.embeddings.{name}" for name, _ in model.bert.embeddings.named_parameters()}
    state, step = job(model, call, PLAIN)
    assert frozen <= set(state.buffers)
    assert not frozen & set(state.params)
    after = state
    for _ in range(3):
        after, _ = step(after, [tokens])
    assert same_bits(after.buffers, state.buffers)
    assert not same_bits(after.params, state.params)
