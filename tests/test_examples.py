"""What a newcomer runs: the demo, the loop by hand, the contents page."""

import importlib.util
import os
import pydoc
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import output_of_torchrun

import purescale as ps

ROOT = Path(__file__).parent.parent
EXAMPLES = str(ROOT / "examples"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])
if importlib.util.find_spec("sklearn") is None:  # which takes a second to import
    pytest.skip("needs scikit-learn", allow_module_level=True)

# matplotlib's and scikit-learn's own
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"
)


@pytest.mark.slow
def test_the_demo_trains_three_times_and_draws_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import digits

    runs = digits.main(["--epochs", "1", "--picture", str(tmp_path / "digits.png")])
    assert [run.title for run in runs] == ["float32", "float16, purescale", "float16, GradScaler"]
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert runs[1].skipped.sum() == runs[2].skipped.sum() == 7, "as README says"
    assert all(torch.isfinite(run.losses).all() for run in runs)
    # same seeds, data and arithmetic: the first clean steps agree to float16's rounding
    ours, theirs = runs[1], runs[2]
    assert torch.equal(ours.scales[:12], theirs.scales[:12])
    torch.testing.assert_close(ours.losses[:12], theirs.losses[:12], rtol=2e-2, atol=2e-2)
    out, log = capsys.readouterr()
    assert not log, "no bar where there is no terminal"
    assert "test accuracy" in out
    assert digits.SECONDS in out
    running, precise = (
        float(re.search(rf"^{kind} +([\d.]+)$", out, re.M)[1])
        for kind in ("running averages", "precise_bn")
    )
    assert precise > running


def test_the_loop_by_hand_runs_and_is_short(capsys):
    path = ROOT / "examples" / "by_hand.py"
    runpy.run_path(str(path))
    (loss, steps), (later_loss, later_steps) = re.findall(
        r"loss ([\d.]+), .*?(\d+) steps applied", capsys.readouterr().out
    )
    assert float(loss) < 1.0
    assert float(later_loss) < 1.0
    assert int(steps) >= 10
    # 113 microbatches in windows of four: the last one holds one and is a whole step
    assert int(later_steps) == int(steps) + 29
    for name, most in (("", 25), (", accumulating", 14)):
        loop = path.read_text().split(f"# -- the loop{name}\n")[1].split("# -- the end of the")[0]
        assert len([line for line in loop.splitlines() if line.strip()]) <= most
        assert "train_step" not in loop


@pytest.mark.slow
def test_the_attribution_predicts_trainings_without_some_digits(capsys):
    runpy.run_path(str(ROOT / "examples" / "attribution.py"))
    assert float(capsys.readouterr().out.split(": ")[-1]) > 0.95


@pytest.mark.slow
def test_the_ensemble_trains_each_rate_as_torch_would(capsys):
    runpy.run_path(str(ROOT / "examples" / "ensemble.py"))
    out = capsys.readouterr().out
    rows = [
        tuple(map(float, row))
        for row in re.findall(r"^([\d.]+) {3}([\d.]+) {3}([\d.]+)$", out, re.M)
    ]
    assert len({rate for rate, *_ in rows}) == len({loss for _, loss, _ in rows}) == 8
    assert max(accuracy for *_, accuracy in rows) > 0.8
    alone, together = map(
        float, re.search(r"loss ([\d.]+), in the ensemble ([\d.]+)", out).groups()
    )
    assert together == pytest.approx(alone, rel=2e-2)


@pytest.mark.slow
def test_the_probe_shows_which_scales_are_safe_and_who_starves(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import probe

    probes = probe.main(["--picture", str(tmp_path / "probe.png")])
    assert (tmp_path / "probe.png").stat().st_size > 10_000
    low, high = probes["char transformer"].window
    assert low <= 2
    assert high >= 14
    low, high = probes["12 layers, ReLU"].window
    assert 4 <= low <= 8  # the first layers starve below it, which the last do not need
    assert probes["12 layers, ReLU"].low["24.weight"] <= -6
    assert high >= 16
    sigmoid = probes["16 layers, sigmoid"]
    assert sigmoid.window is None
    assert len(sigmoid.starved) >= 6
    lost = {int(name.split(".")[0]) for name in sigmoid.starved + sigmoid.silent}
    assert lost == set(range(0, max(lost) + 1, 2)), "the first layers, and all of them"
    assert 8 <= max(lost) < 24
    out = capsys.readouterr().out
    verdict = out.split("No safe scale for ")[1].splitlines()[0]
    assert all(name in verdict for name in sigmoid.starved)


@pytest.mark.slow
def test_float16_agrees_better_and_headroom_loses_no_rollouts(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import grpo

    picture = tmp_path / "grpo.png"
    # the first answers that are rewarded come within these steps
    runs = grpo.main(["--steps", "8", "--seeds", "1", "--picture", str(picture)])
    assert picture.stat().st_size > 10_000
    tell = {name: run[0] for name, run in runs.items()}
    assert list(tell) == list(grpo.WAYS)
    mismatch = {name: run.aux[0]["log_ratio"].mean() for name, run in tell.items()}
    assert 4 < mismatch["bfloat16"] / mismatch["float16, from 2**16"] < 16, "three bits"
    assert mismatch["float32"] < mismatch["float16, headroom"] / 100
    headroom, megatron = tell["float16, headroom"], tell["float16, Megatron's"]
    assert headroom.aux[0]["informative"].any(), "else nothing could have overflowed"
    assert headroom.retries.sum() >= 1, "the start does not fit"
    assert not headroom.found_inf.any(), "and yet no rollouts are lost"
    assert torch.equal(megatron.found_inf, megatron.aux[0]["informative"]), "all that teach are"
    assert "float16, headroom" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_train_as_one_process_does_by_a_group_ddp_and_fsdp2():
    """In one start of two processes, which takes longer than they do."""
    mains = (
        "import data_parallel, ddp, fsdp2\n"
        "with ddp.ranks() as place:\n"
        "    for example in (data_parallel, ddp, fsdp2): example.main(*place)"
    )
    ranks = "--standalone", "--nproc-per-node", "2", "--no-python"
    printed = output_of_torchrun(*ranks, sys.executable, "-c", mains, paths=EXAMPLES)
    # the last twice: from its checkpoint too
    pattern = r"^2 ranks: (\d+) steps applied of 19, .* within (\S+) of one"
    ends = re.findall(pattern, printed, re.M)
    assert len(ends) == 4
    assert {steps for steps, _ in ends} == {"15"}
    assert all(float(apart) <= 1e-5 for _, apart in ends)


def test_every_public_name_has_a_docstring_and_an_example():
    for name in dir(ps):
        thing = getattr(ps, name)
        if name.startswith("_") or not callable(thing):
            continue
        assert thing.__doc__, name
        if not (
            isinstance(thing, type)
            and (issubclass(thing, tuple) or getattr(thing, "_is_protocol", False))
        ):
            assert ">>>" in thing.__doc__, name


def test_all_is_exactly_the_public_names_in_the_order_of_the_index():
    beside = {"testing", "types", *ps.types.__all__}
    public = {name for name in dir(ps) if not name.startswith("_")} - beside
    assert sorted(ps.__all__) == sorted(public)
    index = re.findall(r"^    (\w+) +\S", ps.__doc__, re.M)
    assert index == ps.__all__


def test_help_lists_the_public_names():
    text = pydoc.plain(pydoc.render_doc(ps))
    for name in ps.__all__:
        assert re.search(rf"^ +(class )?{name}\b", text, re.M), name
    assert "class DynamicScale" in text


def test_the_package_is_typed():
    assert (Path(ps.__file__).parent / "py.typed").exists()
