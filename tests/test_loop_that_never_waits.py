"""The loop of docs/a_loop_that_never_waits.md: it skips, scales and learns as a loop of GradScaler
that reads flag and loss in each step. tests/second_device/test_what_waits.py counts its reads.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from test_docs import PAGES, blocks
from torch import nn

import purescale as ps

PAGE = PAGES["docs/a_loop_that_never_waits.md"]
CHOSEN = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
TRAINING = "batches, rows = iter(loader), []"


def page(device="cpu"):
    """Return what the first block of the page defines on a device, before the training, and the
    training as code.
    """
    text = blocks(PAGE)[0]
    assert text.count(CHOSEN) == text.count(TRAINING) == 1
    setup, _, training = text.replace(CHOSEN, f"device = {device!r}").partition(TRAINING)
    names = {"__name__": "page"}
    exec(compile(setup, PAGE.name, "exec"), names)
    return names, compile(TRAINING + training.partition("\nassert")[0], PAGE.name, "exec")


@pytest.fixture(name="trained")
def _trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, training = page()
    exec(training, names)
    return names


def by_grad_scaler(names):
    """Model, scale and rows of the loop of torch, which reads flag and loss in each step."""
    model = copy.deepcopy(nn.Sequential(*names["layers"]))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=30)
    guard, rows, count = names["guard"].init(), [], 0
    for x, y in names["loader"]:
        buffers = [buffer.clone() for buffer in model.buffers()]
        for group in optimizer.param_groups:
            group["lr"] = float(names["rate"](torch.tensor(count)))
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        overflow, rejected = not bool(norm.isfinite()), False
        if not overflow:
            guard, bad = names["guard"].update(guard, loss.detach(), norm)
            rejected = bool(bad)
        if not rejected:
            scaler.step(optimizer)
        scaler.update()
        if overflow or rejected:
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        else:
            count += 1
        row = loss.item(), scale, overflow or rejected, rejected
        rows.append(dict(zip(names["rows"][0], row, strict=True)))
    return model, scaler.get_scale(), rows


def test_it_skips_scales_and_learns_as_a_loop_of_grad_scaler_that_reads_each_step(trained):
    model, scale, rows = by_grad_scaler(trained)
    state = trained["state"]
    for name in ("scale", "skipped", "rejected"):
        assert [row[name] for row in trained["rows"]] == [row[name] for row in rows]
    assert sum(row["skipped"] for row in rows) == 2
    assert state.scaler.scale == scale
    losses = [torch.tensor([row["loss"] for row in some]) for some in (trained["rows"], rows)]
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-3, equal_nan=True)
    for name, tensor in model.state_dict().items():
        actual = (state.params | state.buffers)[name]
        torch.testing.assert_close(actual, tensor, rtol=5e-3, atol=5e-3)


def test_the_weights_that_it_keeps_are_those_of_the_lowest_loss(trained):
    names, _ = page()
    batches, losses, states = iter(names["loader"]), [], []
    state = names["state"]
    for _ in range(4):
        state, _ = names["advance"](state, itertools.islice(batches, 20))
        logits, _ = names["apply"](state.params, state.buffers, names["held_out"][0], train=False)
        losses.append(F.cross_entropy(logits, names["held_out"][1]))
        states.append(ps.clone(state.params))
    index = int(torch.stack(losses).argmin())
    assert same_bits(trained["best"], states[index])
    assert same_bits(trained["lowest"], losses[index])


def test_the_file_that_it_saves_is_the_last_state(trained):
    like = trained["state"]
    assert same_bits(ps.load("state.pt", like=like), like)
