"""Rules over flags and over gradients without a training, and what many steps tell as one value."""

import dataclasses
import inspect
import math
import re
import textwrap

import hypothesis.strategies as st
import pytest
import torch
from helpers import any32, batch, job, legal_rules, same_bits, stack, started, trained
from hypothesis import example, given
from test_interop import RULES as PEERS
from torch._dynamo.testing import CompileCounterWithBackend

import purescale as ps
from purescale.simulate import replay, simulate
from purescale.testing import assert_pure, assert_sync_free, assert_vmap_equals_loop

SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
RULES = PEERS | {
    "DynamicScale": ps.DynamicScale(init_scale=2.0**20, growth_interval=2),
    "StaticScale": ps.StaticScale(8.0),
    "NoScale": ps.NoScale(),
    "HeadroomScale": ps.HeadroomScale(init_scale=2.0**20, window=3),
}
each_rule = pytest.mark.parametrize("name", RULES)
flags = st.lists(st.booleans(), max_size=20)
amaxes = st.lists(any32.map(abs), max_size=20)


def given_to(rule, state, bad, amax):
    return rule.update(state, bad, *([amax] if takes_amax(rule) else []))


def takes_amax(rule):
    return getattr(rule, "takes_amax", False)


@given(st.sampled_from(sorted(RULES)), flags)
def test_simulate_equals_a_loop(name, pattern):
    rule = RULES[name]
    states = [rule.init()]
    for bad in pattern:
        states.append(given_to(rule, states[-1], torch.tensor(bad), torch.tensor(-1.0)))
    assert same_bits(simulate(rule, pattern), stack(states))
    assert same_bits(simulate(rule, torch.tensor(pattern, dtype=torch.bool)), stack(states))


@given(st.sampled_from(sorted(RULES)), amaxes, st.sampled_from([65504.0, 3.4e38, 448]))
@example("StaticScale", [8188.0], 65504.0)  # which just fits
def test_replay_equals_a_loop_in_which_a_step_overflows_by_its_scale(name, series, largest):
    rule = RULES[name]
    states, bads = [rule.init()], []
    for amax in series:
        bads.append(not amax * states[-1].scale.item() <= largest)
        told = bads[-1] and (math.isfinite(amax) or not takes_amax(rule))
        states.append(given_to(rule, states[-1], torch.tensor(told), torch.tensor(amax).float()))
    got, found_infs = replay(rule, series, largest)
    assert same_bits(got, stack(states))
    assert found_infs.dtype is torch.bool
    assert found_infs.tolist() == bads


def test_replay_of_steps_that_no_scale_could_have_cured_leaves_a_rule_that_takes_amax_alone():
    rule = ps.HeadroomScale(init_scale=1.0)
    states, bads = replay(rule, [1.0, math.nan, math.inf, 1.0])
    assert bads.tolist() == [False, True, True, False]
    assert states.scale.tolist() == [1.0] + [512.0] * 4
    assert simulate(rule, [False] * 5).scale.tolist() == [1.0] * 6  # it knows of no gradients


@given(legal_rules, flags)
def test_simulate_is_pure(rule, pattern):
    assert_pure(simulate, rule, torch.tensor(pattern, dtype=torch.bool))


@each_rule
def test_many_runs_at_once_equal_runs_in_turn(name):
    rule = RULES[name]
    assert_vmap_equals_loop(lambda pattern: simulate(rule, pattern), torch.rand(5, 12) < 0.3)
    tops = torch.exp2(torch.randint(-20, 20, (5, 12)).float())
    tops[0, 3], tops[1, 4] = math.nan, math.inf
    assert_vmap_equals_loop(lambda series: replay(rule, series), tops)


@pytest.mark.slow
def test_compiled_it_is_one_graph():
    rule, counter = RULES["HeadroomScale"], CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda t: replay(rule, t), fullgraph=True, backend=counter)
    for _ in range(2):
        tops = torch.exp2(torch.randint(-20, 20, (6,)).float())
        assert same_bits(compiled(tops), replay(rule, tops))
    assert counter.frame_count == 1


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A rule of one's own whose setting is a tensor."""

    factor: torch.Tensor

    def init(self, device=None):
        return ps.StaticScale(1024.0).init(device)

    def update(self, scaler, found_inf):
        scale = torch.where(found_inf, scaler.scale * self.factor, scaler.scale)
        return scaler._replace(scale=scale)


def test_many_settings_at_once_of_a_rule_that_holds_them_as_tensors():
    factors = torch.tensor([0.5, 0.25])
    states = torch.vmap(lambda factor: simulate(Tunable(factor), [True, True]))(factors)
    assert states.scale.tolist() == [[1024, 512, 256], [1024, 256, 64]]


def test_replay_of_what_a_run_told_gives_the_scales_of_that_run():
    """Where no step was skipped, for then the gradients are known whatever the scale."""
    rule = ps.HeadroomScale(init_scale=1.0, window=3)
    state, step = job(SGD, rule)
    state, infos = trained(state, step, [[batch(index)] for index in range(8)])
    run = ps.stack_infos(infos)
    states, found_infs = replay(rule, run.grad_amax)
    assert same_bits((states.scale[:-1], found_infs), (run.scale, run.found_inf))
    assert same_bits(states.amax_history[-1], state.scaler.amax_history)


def test_a_state_starts_where_the_flags_are():
    assert simulate(ps.DynamicScale(), torch.ones(2, dtype=torch.bool, device="meta")).scale.is_meta


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: simulate(ps.DynamicScale, [True]), TypeError, "rule is the class DynamicScale"),
        (lambda: simulate(ps.NoScale(), torch.ones(3)), ValueError, r"expected bool \[T\]"),
        (lambda: simulate(ps.NoScale(), torch.ones(2, 3) > 0), ValueError, r"\(2, 3\).*torch.vmap"),
        (lambda: replay(ps.NoScale(), torch.tensor(1.0)), ValueError, r"floating \[T\]"),
        (lambda: replay(ps.NoScale(), [1, 2]), ValueError, r"amaxes is torch.int64 \(2,\)"),
        (lambda: replay(ps.NoScale(), [1.0], largest=0), ValueError, "largest must be positive"),
        (lambda: simulate(ps.NoScale(), True), ValueError, "found_infs is True; expected bool"),
        (lambda: replay(ps.NoScale(), [1.0, "2"]), TypeError, "str"),
    ],
)
def test_what_is_no_run_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_list_of_what_steps_told_is_not_read():
    told = [torch.tensor(value) for value in (1.0, math.inf, 3.0)]
    states, flags = assert_sync_free(replay, ps.HeadroomScale(), told)
    assert_sync_free(simulate, ps.DynamicScale(), list(flags.unbind()))
    assert same_bits((states, flags), replay(ps.HeadroomScale(), [1.0, math.inf, 3.0]))


# ---- infos over time


def infos_of(steps, aux=(), **settings):
    state, step = started(
        {"w": torch.ones(3)}, lambda p, x: (p["w"] * x).square().sum(), SGD,
        ps.DynamicScale(init_scale=2.0**24, growth_interval=1), **settings,
    )  # fmt: skip
    _, infos = trained(state, step, [[torch.tensor(1.0 + index)] for index in range(steps)])
    return [info._replace(aux=aux) for info in infos]


def test_the_log_line_and_the_picture_of_the_docstring_are_made(tmp_path, monkeypatch, capsys, plt):
    """As they stand there, in a run that overflows at first, with a step whose gradient is 0."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"(?:^ {4}.+\n)+", inspect.getdoc(ps.stack_infos).split("Args:")[0], re.M)
    log, picture = map(textwrap.dedent, blocks)
    assert len(picture.splitlines()) == 5, "as it says"
    rule = ps.HeadroomScale(init_scale=2.0**24, window=3)
    state, step = job(SGD, rule, max_norm=1.0)
    given = {"stack_infos": ps.stack_infos, "torch": torch, "plt": plt, "infos": []}
    for index in range(5):
        state, info = step(state, [batch(index)])
        if index == 3:
            info = info._replace(grad_amax=torch.zeros(()))
        exec(log, given | {"step": 100 * index, "info": info})
    assert given["infos"][0].found_inf, "else no line would be drawn for it"
    exec(picture, given)
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert re.search(
        r"^400: loss [\d.]+, scale \d+, 1 skipped, norm [\d.]+$", capsys.readouterr().out, re.M
    )


def test_a_run_is_its_infos_stacked():
    infos = infos_of(3, max_norm=1.0)
    run = ps.stack_infos(infos)
    for name in ("loss", "found_inf", "scale", "grad_norm", "retries"):
        assert same_bits(getattr(run, name), torch.stack([getattr(i, name) for i in infos]))
    assert run.grad_amax == () and run.aux == ()  # noqa: PT018
    assert isinstance(run, ps.StepInfo)


def test_what_is_absent_stays_absent_and_aux_is_stacked_leaf_by_leaf():
    aux = ({"hits": torch.ones(2), "none": None}, [torch.tensor(3)])
    run = ps.stack_infos(infos_of(2, aux))
    assert run.grad_norm == ()
    assert same_bits(run.aux, ({"hits": torch.ones(2, 2), "none": None}, [torch.tensor([3, 3])]))


def test_stacked_infos_of_an_ensemble_and_a_compiled_function():
    infos = infos_of(2)
    members = [stack([info, info]) for info in infos]
    assert ps.stack_infos(members).loss.shape == (2, 2)
    compiled = torch.compile(ps.stack_infos, fullgraph=True, backend="eager")
    assert same_bits(compiled(infos), ps.stack_infos(infos))


def test_stacking_reads_and_changes_nothing():
    assert_pure(ps.stack_infos, infos_of(2))
    assert_sync_free(ps.stack_infos, infos_of(2))


def with_aux(info, *values):
    return [info._replace(aux=(value,)) for value in values]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a: [], ValueError, "got no infos"),
        (lambda a: None, TypeError, "takes a list, got None. Fix"),
        (lambda a: a, TypeError, "takes a list, got one StepInfo. Fix"),
        (lambda a: [a, *a], TypeError, r"infos\[1\] is tensor.*infos \+= \[info\]"),
        (lambda a: [a, a._replace(grad_norm=a.loss)], ValueError, r"infos\[1\] does not match"),
        (lambda a: with_aux(a, torch.ones(2), torch.ones(3)), ValueError, r"\(3,\), .*\(2,\) in"),
        (lambda a: with_aux(a, "late", "early"), ValueError, "'early', but 'late' in infos"),
        (lambda a: with_aux(a, None, torch.ones(2)), ValueError, r"32 \(2,\), but None in infos"),
    ],
)
def test_what_cannot_be_stacked_is_refused(change, error, words):
    [info] = infos_of(1)
    with pytest.raises(error, match=words):
        ps.stack_infos(change(info))
