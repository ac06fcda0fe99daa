"""docs/a_loop_that_never_waits.md on the second device: its loop reads nothing between two logs,
and what stands at the left of its table waits, and not what stands at the right.
"""

import functools
import re

import pytest
import sim
import torch
from helpers import assert_close
from jobs import ADAMW, RULE, job, mlp, to
from test_loop_that_never_waits import PAGE, page
from torch import nn

import purescale as ps

SIM = "sim:0"

# ---- the loop ------------------------------------------------------------------------------------

LOG = ("check_scaler", "check_guard", "save")  # of the package, beside `read` of the page


@pytest.fixture(name="run")
def _run(tmp_path, monkeypatch):
    """A function that trains as the page does, where `advance` and the log may be wrapped."""
    monkeypatch.chdir(tmp_path)

    def run(device, of_log=lambda function: function, of_advance=lambda function: function):
        names, training = page(device)
        names |= {"read": of_log(names["read"]), "advance": of_advance(names["advance"])}
        with monkeypatch.context() as patch, sim.waiting(refused=device != "cpu"):
            for name in LOG:
                patch.setattr(ps, name, of_log(getattr(ps, name)))
            exec(training, names)
        return names

    return run


def may_wait(function, counted=None):
    """The function, which may wait where nothing else may; what it waits for is counted."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with sim.waiting(refused=False), sim.counted() as counts:
            result = function(*args, **kwargs)
        if counted is not None:
            counted.append((function.__name__, counts.reads + counts.to_host))
        return result

    return call


def numbers(names):
    return torch.tensor([list(row.values()) for row in names["rows"]])


def test_the_loop_waits_where_it_logs_and_nowhere_else(run):
    counted = []
    names = run(SIM, lambda function: may_wait(function, counted))
    assert [waits for name, waits in counted if name == "read"] == [1] * 4
    assert {name for name, _ in counted} == {"read", *LOG}
    assert {tensor.device for tensor in names["best"].values()} == {torch.device(SIM)}


def test_the_loop_has_the_numbers_of_the_cpu(run):
    on_device, expected = run(SIM, may_wait), run("cpu")
    assert_close(numbers(on_device), numbers(expected), rtol=2e-3, atol=2e-3, equal_nan=True)
    assert_close(to("cpu", on_device["best"]), expected["best"], rtol=5e-3, atol=5e-3)


def test_a_read_between_two_logs_is_an_error(run):
    def reading(advance):
        def advance_and_read(state, batches):
            state, infos = advance(state, batches)
            float(infos[-1].loss)
            return state, infos

        return advance_and_read

    with pytest.raises(RuntimeError, match="the host waits"):
        run(SIM, may_wait, reading)


# ---- the table -----------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def rate(count):
    return 0.1 / (count + 1)


class Things:
    """The objects that the rows of the table name, on the device."""

    def __init__(self):
        self.job = job(SIM)
        self.window = self.job.windows[0]
        _, self.info = self.job.step(self.job.state, self.window)
        self.net, (x, y) = mlp().to(SIM), self.window[0]
        self.losses = nn.functional.cross_entropy(self.net(x), y, reduction="none").detach()
        self.mask, self.host = y > 0, x.cpu()

    def scaled(self, **settings):
        """A GradScaler and an optimizer whose gradients are unscaled."""
        x, y = self.window[0]
        optimizer = torch.optim.AdamW(self.net.parameters(), **settings)
        scaler = torch.amp.GradScaler("sim", init_scale=8.0)
        scaler.scale(nn.functional.cross_entropy(self.net(x), y)).backward()
        scaler.unscale_(optimizer)
        return scaler, optimizer

    def step(self, optimizer=ADAMW, **settings):
        """A call of a step with these settings, which has run before."""
        state = ps.init_train_state(self.job.state.params, {}, optimizer, RULE)
        call = functools.partial(self.job.step, state, self.window, optimizer=optimizer, **settings)
        call()
        return call


def reads(things):
    loss = things.info.loss
    return [lambda: float(loss), loss.item, loss.tolist, loss.cpu, lambda: loss.cpu().numpy()]


def branches(things):
    def asserted():
        assert not things.info.found_inf

    return [lambda: 1 if things.info.found_inf else 0, asserted]


def chosen(things):
    flag, loss = things.info.found_inf, things.info.loss
    return [lambda: ps.select(flag, loss, 2 * loss), lambda: torch.where(flag, loss, 2 * loss)]


def masked(things):
    losses, mask = things.losses, things.mask
    return [lambda: losses[mask].mean(), mask.nonzero, mask.unique]


def weighted(things):
    return [lambda: torch.where(things.mask, things.losses, 0).sum() / things.mask.sum()]


def summed(things):
    rows = torch.zeros(1, 8, dtype=torch.int64, device=SIM)
    return torch.sparse_coo_tensor(rows, things.losses, (3,), check_invariants=False)


def steps(things):
    params, scaler = things.job.state.params, RULE.init(SIM)
    given = params, params, ADAMW.init(params)
    return [
        things.step(),
        lambda: ps.unscale_and_step(ADAMW, scaler, *given),
        lambda: ps.maybe_step(ADAMW, *given, things.info.found_inf),
    ]


def clipped(things):
    things.scaled()
    clip = functools.partial(nn.utils.clip_grad_norm_, error_if_nonfinite=True)
    return [lambda: clip(list(things.net.parameters()), 1.0)]


def classes(things):
    own = ps.from_torch(torch.optim.SGD, lr=rate), ps.to_transformation(ADAMW)
    return [things.step(own[0]), things.step(ps.from_transformation(own[1]))]


def checks(things):
    guard = ps.SpikeGuard().init(SIM)
    return [
        lambda: ps.check_scaler(things.job.state.scaler, RULE),
        lambda: ps.check_guard(guard, max_rejections=3),
        lambda: str(ps.grad_report(things.job.state.params)),
    ]


def stepped(things):
    scaler, optimizer = things.scaled(foreach=True)
    return [lambda: scaler.step(optimizer)]


# By the first code of a row: calls each of which waits, and calls none of which does.
ROWS = {
    "float(info.loss)": (reads, lambda on: [lambda: ps.stack_infos([on.info] * 2)]),
    "print(info.loss)": (
        lambda on: [lambda: str(on.info.loss), lambda: f"{on.info.loss:.3f}"],
        lambda on: [],
    ),
    "if info.found_inf:": (branches, chosen),
    "loss[mask].mean()": (masked, weighted),
    "sparse.coalesce()": (lambda on: [summed(on).coalesce], lambda on: [summed(on).to_dense]),
    "GradScaler.step(optimizer)": (stepped, steps),
    "GradScaler.get_scale()": (
        lambda on: [on.scaled()[0].get_scale],
        lambda on: [lambda: on.info.scale],
    ),
    "clip_grad_norm_(..., error_if_nonfinite=True)": (clipped, lambda on: [on.step(max_norm=1.0)]),
    "max_retries=1": (lambda on: [on.step(max_retries=1)], lambda on: [on.step()]),
    "from_torch(Own, lr=rate)": (lambda on: [on.step(ps.from_torch(Own, lr=rate))], classes),
    "batch.to(device)": (
        lambda on: [lambda: on.host.to(SIM)],
        lambda on: [lambda: on.host.to(SIM, non_blocking=True)],
    ),
    "torch.tensor(0.1, device=device)": (
        lambda on: [lambda: torch.tensor(0.1, device=SIM)],
        lambda on: [lambda: torch.full((), 0.1, device=SIM)],
    ),
    "check_scaler": (checks, lambda on: []),
}


def test_the_rows_are_those_of_the_page():
    section = PAGE.read_text().split("\n## What waits")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)`", section, re.M) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_waits_at_the_left_and_not_at_the_right(row):
    left, right = ROWS[row]
    for call in left(Things()):
        with sim.waiting(refused=True), pytest.raises(RuntimeError, match="waits"):
            call()
    for call in right(Things()):
        with sim.waiting(refused=True):
            call()
