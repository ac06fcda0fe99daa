"""What `make_functional` makes of each architecture is the module: gradients, a training, autocast,
its own checkpointing and the way back, bit for bit. `docs/modules.md` has a table of what was run,
which PURESCALE_WRITE_TABLE=1 writes.
"""

import math
import os
from pathlib import Path

import helpers
import pytest
import torch
from helpers import Untouched, assert_close, same_bits, shares_memory, started, tensors
from torch.utils.checkpoint import checkpoint

import purescale as ps

transformers = pytest.importorskip("transformers")
pytest.importorskip("x_transformers")
pytest.importorskip("timm")

from architectures import ARCHITECTURES, REFUSED, enable_checkpointing, loss_of  # noqa: E402

# x-transformers calls torch.jit.script when it is imported; no concern of this package. Of the two
# names, transformers 5.0 has only the older one.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning",
    "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning",
    # RecurrentGemma keeps the states of its recurrence, and reads them in a generation only.
    "ignore:the forward of the model left another value in its plain attributes .*recurrent_states",
    # LeViT keeps biases that it looks up in its weights, and looks them up again in each copy.
    "ignore:the forward of the model left another value in its plain attributes .*attention_bias_c",
)

# What fails under torch.autocast(bfloat16) as a module too: the error, and why.
NO_AUTOCAST = {
    "DebertaForMaskedLM": (
        "value cannot be converted to type c10::BFloat16 without overflow",
        "refused, as the module is: it fills bfloat16 scores with the least float32",
    )
}
PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda a: a.name)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def functional(architecture):
    """apply, params, buffers: pure, so that all tests of an architecture can share them."""
    return ps.make_functional(architecture.make())


@pytest.fixture(scope="module")
def trained(architecture, functional):
    """The state after three steps."""
    apply, params, buffers = functional
    parts = ps.from_torch(torch.optim.AdamW, lr=1e-2), ps.NoScale()
    run = started(params, None, *parts, loss_fn=loss_fn_of(apply), buffers=buffers)
    return helpers.trained(*run, [[architecture.inputs()]] * 3)[0]


def called(function, *args, **kwargs):
    transformers.set_seed(3)  # the same dropout on both sides
    return function(*args, **kwargs)


def loss_fn_of(apply):
    def loss_fn(params, buffers, inputs):
        out, buffers = called(apply, params, buffers, **inputs)
        return loss_of(out), buffers

    return loss_fn


def gradients(functional, architecture):
    """(loss, buffers), grads: by the pure function."""
    apply, params, buffers = functional
    return ps.value_and_grad(loss_fn_of(apply))(params, buffers, architecture.inputs())


def backward(model, architecture, autocast=False):
    """The loss and the gradients of the module; 0 for a parameter that has none."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = called(model, **architecture.inputs())
    loss = loss_of(out).float()
    loss.backward()
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in own.items()
    }


def values(model, names):
    registered = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: registered[name].detach() for name in names}


def evaluated(model, **inputs):
    """What the module returns in eval mode; torch takes other kernels for weights that require a
    gradient, even under no_grad.
    """
    return tensors(called(model.eval().requires_grad_(False), **inputs))


def differing(ours, theirs):
    assert list(ours) == list(theirs)
    return [name for name in ours if not same_bits(ours[name], theirs[name])]


# ---- the pure function is the module


def test_gradients_and_new_buffers_have_the_bits_of_backward(architecture, functional):
    model = architecture.make()
    (loss, buffers), grads = gradients(functional, architecture)
    expected, expected_grads = backward(model, architecture)
    assert same_bits(loss, expected)
    assert differing(grads, expected_grads) == []
    assert differing(buffers, values(model, buffers)) == []
    assert sum(bool(grad.any()) for grad in grads.values()) > len(grads) / 2


def test_three_steps_have_the_bits_of_a_loop_of_torch(architecture, functional, trained):
    model = architecture.make()
    # Its kernel is the one of a step; torch's default on a CPU rounds otherwise.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    # A parameter without a gradient stands still there and decays here, as one with 0 does.
    used = set(functional[1])
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, architecture)
        used &= {name for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    ours = {name: p for name, p in trained.params.items() if name in used}
    assert differing(ours, values(model, ours)) == []
    assert differing(trained.buffers, values(model, trained.buffers)) == []
    assert len(differing(trained.params, functional[1])) > len(used) / 2


def test_load_into_gives_the_module_what_was_trained(architecture, functional, trained):
    inputs = architecture.inputs()
    model = architecture.make()
    ps.load_into(model, trained.params, trained.buffers)
    ours, _ = called(functional[0], trained.params, trained.buffers, train=False, **inputs)
    assert same_bits(tensors(ours), evaluated(model, **inputs))
    assert not same_bits(tensors(ours), evaluated(architecture.make(), **inputs))


# ---- what the module does besides


def test_autocast_has_the_bits_of_torch_autocast(architecture, functional):
    apply, params, buffers = functional
    apply = ps.with_policy(apply, "params=float32,compute=autocast(bfloat16),output=float32")
    model = architecture.make()
    if architecture.name in NO_AUTOCAST:
        error, _ = NO_AUTOCAST[architecture.name]
        with pytest.raises(RuntimeError, match=error):
            gradients((apply, params, buffers), architecture)
        with pytest.raises(RuntimeError, match=error):
            backward(model, architecture, autocast=True)
        return
    (loss, _), grads = gradients((apply, params, buffers), architecture)
    expected, expected_grads = backward(model, architecture, autocast=True)
    assert same_bits(loss, expected)
    assert differing(grads, expected_grads) == []
    assert len(differing(grads, gradients(functional, architecture)[1])) > len(grads) / 2

    ours, _ = called(apply, params, buffers, train=False, **architecture.inputs())
    with torch.autocast("cpu", torch.bfloat16):
        theirs = evaluated(architecture.make(), **architecture.inputs())
    assert same_bits(tensors(ours), [t.float() if t.is_floating_point() else t for t in theirs])


def test_its_own_checkpointing_has_the_bits_of_backward(architecture, functional, monkeypatch):
    """Gradients are compared with those of the module with checkpointing too: without a cache the
    keys have another layout, and some CPUs round their product differently. Buffers are those of
    the model without checkpointing: torch's batch norm counts a batch twice under checkpoints.
    """
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return checkpoint(*args, **kwargs)

    for module in (transformers.modeling_utils, torch.utils.checkpoint):
        monkeypatch.setattr(module, "checkpoint", counted)
    model = architecture.make()
    if not enable_checkpointing(model):
        pytest.skip("it has none")
    (loss, buffers), grads = gradients(ps.make_functional(model), architecture)
    assert calls
    assert not any(calls)
    expected, expected_grads = backward(model, architecture)
    assert same_bits(loss, expected)
    assert differing(grads, expected_grads) == []
    assert differing(buffers, gradients(functional, architecture)[0][1]) == []


def test_what_a_call_leaves_in_a_module_reaches_no_other_call(architecture, functional, trained):
    """Neither the hooks by which transformers collects hidden states nor caches made of weights."""
    apply, params, buffers = functional
    inputs = architecture.inputs()
    if hasattr(architecture.make(), "config"):
        inputs["output_hidden_states"] = True

    def outputs(params, buffers, **inputs):
        return tensors(called(apply, params, buffers, train=False, **inputs)[0])

    before = outputs(trained.params, trained.buffers, **inputs)
    ours = outputs(params, buffers, **inputs)
    assert same_bits(ours, evaluated(architecture.make(), **inputs))
    assert same_bits(before, outputs(trained.params, trained.buffers, **inputs))
    without = outputs(params, buffers, **architecture.inputs())
    assert (len(ours) > len(without)) == ("output_hidden_states" in inputs)


# ---- steps in float16

POLICIES = {
    "cast": "params=float32,compute=float16,output=float32",
    "autocast": "params=float32,compute=autocast(float16),output=float32",
}
FAMILIES = "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "x-transformers"
each_family = pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.name in FAMILIES], ids=lambda a: a.name
)
both_policies = pytest.mark.parametrize("policy", POLICIES)


def half_training(model, policy, init_scale=2.0**16, **settings):
    """(state, step): AdamW under a dynamic scale, dropout drawn from the state."""
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, POLICIES[policy])

    def loss_fn(params, buffers, inputs):
        out, buffers = apply(params, buffers, **inputs)
        return loss_of(out), buffers

    parts = ps.from_torch(torch.optim.AdamW, lr=1e-2), ps.DynamicScale(init_scale=init_scale)
    settings |= {"buffers": buffers, "rng": torch.Generator().manual_seed(0).get_state()}
    return started(params, None, *parts, loss_fn=loss_fn, **settings)


@both_policies
@each_family
def test_ten_steps_replay_lower_the_loss_and_leave_the_module_as_it_was(architecture, policy):
    model = architecture.make()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    attributes = {name: vars(module).keys() for name, module in model.named_modules()}
    with Untouched(own):
        first, step = half_training(model, policy)
        state, losses = first, []
        for _ in range(10):
            with Untouched(state):
                new, info = step(state, [architecture.inputs()])
            losses.append(info.loss.item())
            assert math.frexp(info.scale.item())[0] == 0.5
            if len(losses) == 2:
                again, other = step(state, [architecture.inputs()])
                assert same_bits((again, other.loss), (new, info.loss))
            state = new
    assert losses[-1] < losses[0] - 0.5
    assert all(p.dtype is torch.float32 for p in state.params.values())
    assert not shares_memory((first.params, first.buffers, state.params, state.buffers), own)
    assert {name: vars(m).keys() for name, m in model.named_modules()} == attributes
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@both_policies
@each_family
def test_loss_and_gradient_norm_of_a_half_step_are_those_of_the_float32_module(
    architecture, policy
):
    model = architecture.make()
    # which only measures
    state, step = half_training(model, policy, init_scale=2.0**10, max_norm=math.inf)
    _, info = step(state, [architecture.inputs()])
    torch.set_rng_state(state.rng.clone())
    loss = loss_of(model(**architecture.inputs()))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert not info.found_inf
    assert_close((info.loss, info.grad_norm), (loss.detach(), norm), rtol=5e-3, atol=0.0)


def test_a_structured_output_keeps_its_class_and_comes_out_in_float32():
    gpt2 = ARCHITECTURES[0]
    model, inputs = gpt2.make(), gpt2.inputs()
    apply, params, buffers = ps.make_functional(model)
    raw, _ = ps.with_policy(apply, "params=float32,compute=float16")(params, buffers, **inputs)
    out, _ = ps.with_policy(apply, POLICIES["cast"])(params, buffers, **inputs)
    assert type(out) is type(model(**inputs))
    assert (raw.logits.dtype, out.logits.dtype) == (torch.float16, torch.float32)


# ---- what is refused


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: r.architecture.name)
def test_what_is_refused_runs_as_a_module(refused):
    architecture, train, error, message, _ = refused
    apply, params, buffers = ps.make_functional(architecture.make())

    def loss_fn(params, buffers, inputs):
        out, buffers = called(apply, params, buffers, train=train, **inputs)
        return loss_of(out), buffers

    with pytest.raises(error, match=message):
        ps.value_and_grad(loss_fn)(params, buffers, architecture.inputs())
    model = architecture.make()
    if train:
        backward(model, architecture)
    else:
        evaluated(model, **architecture.inputs())


# ---- the page


def table():
    """What the tests above have run, a line for each architecture."""
    lines = [
        "| model | numbers that train | float32 | autocast(bfloat16) | own checkpointing |\n",
        "|---|---|---|---|---|\n",
    ]
    for architecture in ARCHITECTURES:
        model = architecture.make()
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        _, autocast = NO_AUTOCAST.get(architecture.name, ("", "same bits"))
        checkpointing = "same bits" if enable_checkpointing(model) else "has none"
        lines.append(
            f"| {architecture.name} | {count:,} | same bits | {autocast} | {checkpointing} |\n"
        )
    lines += ["\n| refused | why |\n", "|---|---|\n"]
    lines += [f"| {r.architecture.name} | {r.why} |\n" for r in REFUSED]
    return "".join(lines)


def test_the_page_has_the_table_of_what_was_run():
    before, rest = PAGE.read_text().split(BEGIN)
    shown, after = rest.split(END)
    made = table()
    if os.environ.get("PURESCALE_WRITE_TABLE") == "1":
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
        return
    assert shown.strip() == made.strip(), "run it with PURESCALE_WRITE_TABLE=1"


def test_the_table_has_60_architectures_each_once():
    names = [architecture.name for architecture in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 60
    assert set(NO_AUTOCAST) <= set(names)
