"""A guard: which steps it rejects, and that a rejected step is as if it had not been."""

import dataclasses
import functools
import math
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from helpers import (
    HALF,
    AsOnAnAccelerator,
    Dispatched,
    batch,
    clone,
    cross_entropy_of,
    in_processes,
    on_all_ranks,
    small_net,
    stack,
    started,
    trained,
    unstack,
)
from hypothesis import example, given
from torch import Tensor

import purescale as ps
from purescale.testing import assert_pure, assert_single_graph, assert_vmap_equals_loop, same_bits

nan, inf = math.nan, math.inf
GUARD = ps.SpikeGuard(sigma=6.0, decay=0.9, warmup=3)
PATIENT = ps.SpikeGuard(warmup=3, patience=3)


# ---- the rule ------------------------------------------------------------------------------------


class Oracle:
    """The rule in Python floats, a list of what was learnt in place of running numbers."""

    def __init__(self, guard):
        self.guard, self.seen, self.row = guard, ([], []), 0

    def weights(self, count):
        """Of what was learnt, the newest last."""
        weights = []
        for index in range(count):
            rate = max(1 / (index + 1), 1 - self.guard.decay)
            weights = [w * (1 - rate) for w in weights] + [rate]
        return weights

    def limit(self, values):
        weights = self.weights(len(values))
        mean = math.fsum(w * v for w, v in zip(weights, values, strict=True))
        variance = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
        return mean + self.guard.sigma * max(math.sqrt(variance), abs(mean) * 2.0**-20)

    def update(self, *values):
        known = [(seen, v) for seen, v in zip(self.seen, values, strict=False) if v is not None]
        bad = any(len(s) >= self.guard.warmup and v > self.limit(s) for s, v in known)
        gives_in = bad and self.row == self.guard.patience
        if gives_in:
            bad, self.row = False, 0
            self.seen[0].clear(), self.seen[1].clear()
        self.row += bad
        if not bad and all(math.isfinite(v) for _, v in known):
            for seen, value in known:
                seen.extend([value] if value else [])
            self.row = 0 if known[-1][1] else self.row
        return bad


steady = st.floats(1.5, 2.5, width=32)
losses = steady | st.sampled_from([0.0, 2.0, 30.0, 1e30, nan, inf, -inf, -5.0])
guards = st.builds(
    ps.SpikeGuard,
    sigma=st.sampled_from([1.0, 3.0, 6.0]),
    decay=st.sampled_from([0.5, 0.9, 0.99]),
    warmup=st.integers(2, 6),
    patience=st.integers(1, 4),
)


@given(guards, st.lists(st.tuples(losses, losses | st.none()), max_size=40))
@example(GUARD, [(2.0, None)] * 10 + [(2.0000002, None), (2.1, None)])  # rounding is not a spike
@example(PATIENT, [*[(2.0, None)] * 6, *[(9.0, None), (0.0, None), (nan, None)] * 4, (9.0, None)])
@example(PATIENT, [*[(2.0, None)] * 6, *[(inf, None)] * 5, (2.0, None), (inf, None)])
def test_it_rejects_what_is_sigma_deviations_above_what_was_learnt(guard, run):
    oracle, state = Oracle(guard), guard.init()
    for loss, norm in run:
        near = [abs(v - oracle.limit(s)) < 1e-6 * abs(v) if s and v and math.isfinite(v) else False
                for s, v in zip(oracle.seen, (loss, norm), strict=True)]  # fmt: skip
        if any(near):
            return  # rounding decides
        wide = functools.partial(torch.tensor, dtype=torch.float64)
        values = wide(loss), () if norm is None else wide(norm)
        state, bad = guard.update(state, *values)
        assert bad.item() is oracle.update(loss, norm)
        assert (state.loss.num_steps, state.grad_norm.num_steps) == tuple(map(len, oracle.seen))
        assert state.consecutive_rejections == oracle.row
    for stats, seen in zip(state[:2], oracle.seen, strict=True):
        if seen:
            weights = oracle.weights(len(seen))
            mean = math.fsum(w * v for w, v in zip(weights, seen, strict=True))
            assert stats.mean.item() == pytest.approx(mean, rel=1e-9, abs=1e-9)
        assert stats.variance >= 0


def counting(state, rejections):
    """The state of a guard, or of a step with one, after so many rejections in a row."""
    if isinstance(state, ps.TrainState):
        return state._replace(guard=counting(state.guard, rejections))
    return state._replace(consecutive_rejections=torch.tensor(rejections, dtype=torch.int32))


def test_settings_that_are_none_are_refused_when_made():
    wrong = {"sigma": (0, nan), "decay": (1.0, 0.0), "warmup": (1,), "patience": (0,)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"{name} must be .*Fix: "):
                ps.SpikeGuard(**{name: value})
        for value in ("6", None, torch.tensor(6.0)):
            with pytest.raises(TypeError, match="Fix: "):
                ps.SpikeGuard(**{name: value})


@pytest.mark.parametrize("huge", [1e155, -1e200])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_loss_whose_square_is_out_of_range_is_not_learnt(huge, at):
    guard, losses = ps.SpikeGuard(warmup=3), [2.0, 2.1, 1.9, 2.0, 2.1]
    state = plain = guard.init()
    for index, loss in enumerate([*losses[:at], huge, *losses[at:]]):
        before = plain
        state, bad = guard.update(state, torch.tensor(loss, dtype=torch.float64), ())
        if loss == huge:
            assert bad.item() == (huge > 0 and index >= guard.warmup)
        else:
            plain, _ = guard.update(before, torch.tensor(loss, dtype=torch.float64), ())
        assert same_bits(state.loss, plain.loss)
    assert guard.update(state, torch.tensor(9.0), ())[1]


@pytest.mark.parametrize("huge", [3e18, 1.9e19, 3e38])
def test_in_float32_too_a_guard_lives_through_the_largest_losses(huge):
    """As on mps, where a state is in float32."""
    guard = ps.SpikeGuard(warmup=3, patience=1)
    state = guard.init()
    state = state._replace(loss=state.loss._replace(mean=torch.zeros(()), variance=torch.zeros(())))
    for loss in (2.0, 2.1, 1.9, huge, huge, 2.0, 2.1, 1.9, 2.0):
        state, _ = guard.update(state, torch.tensor(loss), ())
        assert torch.isfinite(torch.stack(state.loss[:2])).all()


# ---- in a step -----------------------------------------------------------------------------------

ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
RMSPROP = ps.from_torch(torch.optim.RMSprop, lr=1e-2, momentum=0.5)
RULE = ps.DynamicScale(init_scale=2.0**4, growth_interval=4)
CALM, SPIKE, OVERFLOW = 1.0, 100.0, 1e30
PLANTED = [*[CALM] * 5, SPIKE, CALM, SPIKE, OVERFLOW, CALM, CALM, SPIKE, CALM]


APPLY, PARAMS, BUFFERS = ps.make_functional(small_net())
CROSS_ENTROPY = cross_entropy_of(ps.with_policy(APPLY, HALF))


def loss_fn(params, buffers, microbatch):
    loss, buffers = CROSS_ENTROPY(params, buffers, microbatch[0])
    return loss * microbatch[1], buffers


def job(optimizer=ADAMW, rule=RULE, guard=GUARD, **settings):
    settings |= {"loss_fn": loss_fn, "buffers": BUFFERS, "guard": guard}
    return started(PARAMS, None, optimizer, rule, **settings)


def windows(factors, count=1):
    """Windows of `count` microbatches; the factor is that of the last."""
    return [
        [(batch(index), torch.tensor(factor if place == count - 1 else CALM))
         for place, index in enumerate(range(3 * i, 3 * i + count))]
        for i, factor in enumerate(factors)
    ]  # fmt: skip


def flags(infos, name):
    return [getattr(info, name).item() for info in infos]


@pytest.mark.parametrize(
    ("optimizer", "settings", "count"),
    [
        (ADAMW, {"donate": True, "max_norm": inf}, 1),
        (ADAMW, {}, 3),
        (RMSPROP, {"max_norm": 0.5}, 1),
    ],
)
def test_exactly_the_planted_spikes_are_rejected_and_are_as_if_they_had_not_been(
    optimizer, settings, count
):
    every = windows(PLANTED, count)
    state, infos = trained(*job(optimizer, **settings), every)
    assert flags(infos, "rejected") == [factor == SPIKE for factor in PLANTED]
    assert flags(infos, "found_inf") == [factor != CALM for factor in PLANTED]
    scales = flags(infos, "scale")
    assert scales[8] / scales[9] == 2, "the overflow backs off"
    assert state.step == PLANTED.count(CALM)
    calm = [window for window, factor in zip(every, PLANTED, strict=True) if factor != SPIKE]
    without, others = trained(*job(optimizer, **settings), calm)
    assert same_bits(state, without), "scale, counters, guard and buffers too"
    kept = [info for info in infos if not info.rejected]
    assert all(same_bits(a, b) for a, b in zip(kept, others, strict=True))
    # and but for the skips it is the run without a guard
    bare, _ = trained(*job(optimizer, guard=None, **settings), calm)
    assert same_bits(state._replace(guard=()), bare)


@pytest.mark.parametrize(("optimizer", "donate"), [(ADAMW, True), (RMSPROP, False)])
def test_an_accelerators_way_is_that_of_the_host(optimizer, donate):
    every = windows(PLANTED)
    host, infos = trained(*job(optimizer, max_norm=inf, donate=donate), every)
    state, step = job(optimizer, max_norm=inf, donate=donate)
    with AsOnAnAccelerator() as run:
        forced, forced_infos = trained(state, step, every)
    assert run.reads == 0
    assert flags(forced_infos, "rejected") == flags(infos, "rejected")
    # The norm, of which the guard keeps a mean, is that of another kernel.
    torch.testing.assert_close(tuple(forced), tuple(host), rtol=1e-4, atol=1e-5)
    if optimizer is ADAMW:
        assert same_bits(forced._replace(guard=()), host._replace(guard=()))


def test_a_rejected_step_reports_the_loss_and_the_norm_that_it_was_rejected_for():
    _, infos = trained(*job(max_norm=1.0), windows(PLANTED))
    run = ps.stack_infos(infos)
    assert run.grad_norm.isfinite().tolist() == [factor != OVERFLOW for factor in PLANTED]
    assert run.grad_norm[5] > 10 * run.grad_norm[4]
    assert run.loss[5] > 10 * run.loss[4]
    # Told what the infos tell, the guard decides the same.
    state, verdicts = GUARD.init(), []
    for loss, norm in zip(run.loss, run.grad_norm, strict=True):
        state, bad = GUARD.update(state, loss, norm)
        verdicts.append(bad.item())
    assert [a and not b for a, b in zip(verdicts, run.found_inf & ~run.rejected, strict=True)] == (
        run.rejected.tolist()
    )


@pytest.mark.parametrize("max_norm", [None, inf])
def test_a_spike_of_the_norm_alone_is_seen_where_the_norm_is_measured(max_norm):
    def of_large_slope(params, buffers, microbatch):
        loss, buffers = CROSS_ENTROPY(params, buffers, microbatch[0])
        return loss + (microbatch[1] - 1) * (loss - loss.detach()), buffers

    state, step = job(max_norm=max_norm)
    _, infos = trained(state, functools.partial(step, loss_fn=of_large_slope), windows(PLANTED[:6]))
    assert flags(infos, "rejected") == [False] * 5 + [max_norm is not None]
    assert infos[5].loss < 2


class Counting(NamedTuple):
    seen: Tensor
    in_a_row: Tensor


@dataclasses.dataclass(frozen=True)
class Above:
    """A guard that hands back what it was given, and counts what it rejects."""

    limit: float = 10.0

    def init(self, device=None):
        zero = torch.zeros((), dtype=torch.int32, device=device)
        return Counting(zero, zero.clone())

    def update(self, state, loss, grad_norm):
        bad = loss > self.limit
        return Counting(state.seen, torch.where(bad, state.in_a_row + 1, 0)), bad


@pytest.mark.parametrize("forced", [False, True])
def test_the_state_of_a_guard_of_ones_own_follows_rejections_and_no_other_skip(forced):
    state, step = job(guard=Above())
    every = windows([CALM, SPIKE, SPIKE, OVERFLOW, SPIKE, CALM])
    counts = []
    with AsOnAnAccelerator() if forced else Dispatched():
        for window in every:
            new, _ = assert_pure(step, state, window) if not forced else step(state, window)
            counts.append(new.guard.in_a_row)
            state = new
    assert [count.item() for count in counts] == [0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"weight_fn": lambda m: 0.0}, {"weight_fn": lambda m: torch.tensor(nan)},
     {"max_norm": torch.tensor(nan)}],
)  # fmt: skip
def test_a_step_that_is_skipped_for_another_reason_is_not_the_guards(settings, forced):
    state, step = job()
    state, _ = trained(state, step, windows([CALM] * 4))
    for factor in (CALM, SPIKE):
        with AsOnAnAccelerator() if forced else Dispatched():
            new, info = step(state, windows([factor])[0], **settings)
        assert info.found_inf
        assert not info.rejected
        assert same_bits(new, state)


def test_a_window_is_judged_as_a_whole_and_a_dropped_microbatch_is_no_part_of_it():
    state, step = job(on_nonfinite="drop_microbatch")
    state, _ = trained(state, step, windows([CALM] * 4, 3))
    new, info = step(state, windows([OVERFLOW], 3)[0])
    assert not info.found_inf
    assert not info.rejected
    assert new.scaler.scale < state.scaler.scale
    new, info = step(state, windows([SPIKE], 3)[0])
    assert info.rejected
    assert same_bits(new, counting(state, 1))
    # of a hundred calm microbatches one that is a little off is no spike
    window = [*windows([1.0] * 30), *windows([1.5])]
    assert not step(state, [each[0] for each in window])[1].rejected


def test_a_spike_is_not_tried_again_and_an_overflow_that_was_cured_is_judged():
    state, step = job(max_retries=30)
    state, infos = trained(state, step, windows([*[CALM] * 4, SPIKE]))
    assert infos[-1].rejected
    assert infos[-1].retries == 0
    high = state._replace(scaler=state.scaler._replace(scale=torch.tensor(2.0**24)))
    new, info = step(high, windows([SPIKE])[0])
    assert info.retries > 0
    assert info.rejected
    assert same_bits(new._replace(scaler=()), counting(state, 2)._replace(scaler=()))
    assert new.scaler.scale < high.scaler.scale, "of which the step knows that it is too high"


def test_a_rule_that_looks_ahead_does_not_learn_from_a_rejected_step():
    rule = ps.HeadroomScale(init_scale=2.0**4, window=4)
    every = windows([*[CALM] * 4, SPIKE])
    state, infos = trained(*job(rule=rule, max_norm=inf), every)
    assert infos[-1].rejected
    assert infos[-1].grad_amax.isfinite()
    before, _ = trained(*job(rule=rule, max_norm=inf), every[:-1])
    assert same_bits(state, counting(before, 1))


def test_a_checkpoint_without_a_guard_still_loads_and_one_that_differs_is_refused(tmp_path):
    state, _ = job()
    old, _ = job(guard=None)
    assert same_bits(ps.TrainState(*old[:6]), old), "six fields, as before there were guards"
    ps.save(tmp_path / "old.pt", old)
    assert "guard" not in ps.to_state_dict(old)["tree"]
    assert same_bits(ps.load(tmp_path / "old.pt", like=old), old)
    words = r"\['guard'\].*of another optimizer, rule or guard"
    with pytest.raises(ValueError, match=f"missing: .*{words}"):
        ps.load(tmp_path / "old.pt", like=state)
    ps.save(tmp_path / "new.pt", state)
    with pytest.raises(ValueError, match=f"not in like: .*{words}"):
        ps.load(tmp_path / "new.pt", like=old)


def test_under_vmap_each_member_is_judged_by_itself():
    members, step = [], None
    for seed in range(3):
        state, step = job()
        params = {name: p * (1 + 0.1 * seed) for name, p in state.params.items()}
        state = state._replace(params=params)
        members.append(trained(state, step, windows([CALM] * 4))[0])
    window = [stack([window[0] for window in windows([CALM, SPIKE, OVERFLOW])])]
    together, info = assert_vmap_equals_loop(step, stack(members), window, rtol=1e-2, atol=1e-3)
    assert info.rejected.tolist() == [False, True, False]
    assert info.found_inf.tolist() == [False, True, True]
    assert same_bits(unstack(together, 1), counting(members[1], 1))


@pytest.mark.slow
def test_a_compiled_step_is_one_graph_and_decides_the_same():
    state, step = job(max_norm=inf)
    states, every = [state], windows(PLANTED)
    for window in every:
        states.append(step(states[-1], window)[0])
    compiled = assert_single_graph(step, *zip(states[:-1], every, strict=True))
    assert flags([info for _, info in compiled], "rejected") == [f == SPIKE for f in PLANTED]
    for (new, _), expected in zip(compiled, states[1:], strict=True):
        torch.testing.assert_close(tuple(new), tuple(expected), rtol=1e-3, atol=1e-4)


# ---- check_guard ---------------------------------------------------------------------------------


def test_check_guard_raises_above_so_many_rejections_in_a_row():
    state = GUARD.init()
    for loss in (2.0, 2.1, 1.9, *[90.0] * 4):
        state, _ = GUARD.update(state, torch.tensor(loss), ())
    ps.check_guard(state, max_rejections=4)
    with pytest.raises(FloatingPointError, match=r"4 steps in a row.*max_rejections=3.*Fix: "):
        ps.check_guard(state, max_rejections=3)
    ps.check_guard(GUARD.update(state, torch.tensor(2.0), ())[0], max_rejections=0)


STATES = [job()[0], (), ps.DynamicScale().init(), counting(stack([GUARD.init()] * 2), [1, 2])]


def test_check_guard_refuses_what_counts_no_rejections_and_what_is_no_count():
    for state in STATES:
        with pytest.raises(TypeError, match=r"state of one guard.*Fix: `check_guard\(state\.guard"):
            ps.check_guard(state, max_rejections=3)
    for most in (-1, 2.5, None, True):
        with pytest.raises((TypeError, ValueError), match="max_rejections must be"):
            ps.check_guard(GUARD.init(), most)


# ---- over ranks ----------------------------------------------------------------------------------


def _ranks(rank):
    every = windows(PLANTED)
    calm = windows([CALM] * len(PLANTED))
    mine = every if rank == 1 else calm
    group = dist.group.WORLD
    for settings in ({"max_norm": inf}, {"on_nonfinite": "drop_microbatch"}):
        state, infos = trained(*job(group=group, **settings), mine)
        dropped = "on_nonfinite" in settings
        assert flags(infos, "rejected") == [factor == SPIKE for factor in PLANTED]
        skipped = [factor == SPIKE or (factor == OVERFLOW and not dropped) for factor in PLANTED]
        assert flags(infos, "found_inf") == skipped
        assert same_bits(*on_all_ranks((state, infos)))
    state, step = job(group=group)
    with pytest.raises(ValueError, match="guard"):
        step(state, calm[0], guard=ps.SpikeGuard(warmup=3 + rank))
    off = state.guard._replace(loss=state.guard.loss._replace(mean=state.guard.loss.mean + rank))
    with pytest.raises(ValueError, match=r"guard\.loss\.mean"):
        step(state._replace(guard=off), calm[0])


@pytest.mark.slow
def test_over_a_group_all_ranks_reject_alike():
    in_processes(_ranks)


def answering(name, answer, **own):
    """A guard like `Above` with the answer that is given."""
    update = lambda self, state, loss, grad_norm: answer(state, loss > self.limit)  # noqa: E731
    return type(name, (Above,), {"update": update, **own})()


def test_a_guard_may_remember_nothing():
    empty = lambda self, device=None: ()  # noqa: E731
    guard = answering("WithoutMemory", lambda state, bad: ((), bad), init=empty)
    state, step = job(guard=guard, donate=True)
    state, info = step(state, windows([CALM])[0])
    assert (state.guard, info.rejected.item()) == ((), False)
    before = clone(state)
    state, info = step(state, windows([SPIKE])[0])
    assert info.rejected.item()
    assert same_bits(state.params, before.params)


# ---- what is refused -----------------------------------------------------------------------------


NO_PAIR = answering("NoPair", lambda state, bad: bad)
OTHER = answering("OtherState", lambda state, bad: (state.seen, bad))


@pytest.mark.parametrize(
    ("guard", "error", "words"),
    [
        (ps.SpikeGuard, TypeError, r"guard is the class SpikeGuard.*Fix: SpikeGuard\(\)"),
        ("spikes", TypeError, "guard is str; expected an object with `init"),
        (None, ValueError, r"state\.guard is a Counting.*Fix: .*_replace\(guard=\(\)\)"),
        (GUARD, TypeError, r"state is Counting; expected a SpikeState.*Fix: "),
        (NO_PAIR, TypeError, r"NoPair\.update returned Tensor; expected \(state, bad\)"),
        (OTHER, ValueError, r"state that the guard returned does not match state\.guard"),
    ],
)
def test_what_is_no_guard_is_refused_before_anything_moves(guard, error, words):
    state, step = job(guard=Above(), donate=True)
    before = clone(state)
    with pytest.raises(error, match=words):
        step(state, windows([CALM])[0], guard=guard)
    assert same_bits(state, before)
    if guard is ps.SpikeGuard or guard == "spikes":
        with pytest.raises(error, match=words):
            ps.init_train_state(PARAMS, BUFFERS, ADAMW, RULE, guard=guard)


def test_a_state_without_a_guard_is_refused_by_a_step_with_one():
    state, _ = job(guard=None)
    with pytest.raises(ValueError, match=r"state\.guard is \(\).*Fix: .*guard\.init"):
        job()[1](state, windows([CALM])[0])
    state = state._replace(guard=GUARD.init())
    assert not job()[1](state, windows([CALM])[0])[1].rejected
