"""CONTRIBUTING: its worked changes are applied to a copy of the project, where the tests that they
name pass; its rooms are in the order of the imports, and the files that it names are there.
"""

import importlib
import math
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from test_house import FLOORS

import purescale as ps
from purescale._torch.dtypes import widest_float

ROOT = Path(__file__).parents[1]
TOPS = ROOT, ROOT / "purescale"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    section.splitlines()[0]: section for section in PAGE.split("\n## ") if "```diff" in section
}
FIX = "change CONTRIBUTING.md, or what it shows, so that both agree again"


def hunks(section):
    """(path, old text, new text) of each hunk of a section; old is empty for a new file."""
    path = None
    for diff in re.findall(r"```diff\n(.*?)```", section, re.S):
        for part in re.split(r"^(?=---|\+\+\+|@@)", diff, flags=re.M):
            head, _, body = part.partition("\n")
            if head.startswith(("---", "+++")):
                path = head[4:]
            lines = body.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            if new:
                yield path, old, new


def apply(root, section, *, reverse=False):
    for path, old, new in hunks(section):
        file = root / path
        if not old:
            assert file.exists() == reverse, f"a worked change makes {path}, which is there: {FIX}"
            if reverse:
                file.unlink()
            else:
                file.write_text(new)
            continue
        before, after = (new, old) if reverse else (old, new)
        text = file.read_text()
        assert text.count(before) == 1, f"{path} has not once:\n{before}\n{FIX}"
        file.write_text(text.replace(before, after))


def is_applied(root, section):
    files = [(root / path, new) for path, _, new in hunks(section)]
    return all(file.exists() and new in file.read_text() for file, new in files)


@pytest.fixture
def project(tmp_path):
    """A copy of the project, without the worked changes that somebody follows here."""
    for folder in ("purescale", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for section in SECTIONS.values():
        if is_applied(tmp_path, section):
            apply(tmp_path, section, reverse=True)
    return tmp_path


def run(project, *command, **environment):
    """What pytest prints in the project, where all tests pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command],
        cwd=project,
        env={
            "PYTHONPATH": str(project),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-1000:]}\n{FIX}"
    return done.stdout


def test_the_worked_changes_apply(project):
    for section in SECTIONS.values():
        apply(project, section)


@pytest.mark.slow
def test_the_tests_that_the_worked_changes_name_pass_and_those_of_the_house(project):
    for section in SECTIONS.values():
        apply(project, section)
        run(project, *shlex.split(re.search(r"`pytest ([^`]+)`", section).group(1)))
    run(project, "tests/test_house.py", "tests/test_contributing.py", "-m", "not slow")


def test_the_page_is_read_in_one_sitting():
    assert len(SECTIONS) == 2, "only a rule and an optimizer are worked: write a sentence instead"
    assert len(PAGE.splitlines()) <= 200, "cut something that the docstrings say"


def test_the_rooms_are_in_the_order_of_their_floors_from_the_top():
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    layout = re.search(r"```\n(_reports/ .*?)```", PAGE, re.S).group(1)
    rooms = re.findall(r"^(_\w+)/", layout, re.M)
    folders = {room for room in floor if room.startswith("_") and not room.endswith(".py")}
    assert set(rooms) == folders, "give each room one line under `Rooms`"
    floors = [floor[room] for room in rooms]
    assert floors == sorted(floors, reverse=True), (
        "sort the lines under `Rooms` as FLOORS, reversed"
    )


def test_each_file_that_the_page_names_is_there():
    prose = re.sub(r"```diff\n.*?```", "", PAGE, flags=re.S)
    paths = set(re.findall(r"[\w./]+\.py\b", prose))
    absent = {path for path in paths if not any((top / path).exists() for top in TOPS)}
    assert not absent, f"CONTRIBUTING.md names {absent}: change or delete each name"


DRAWS = """
import hypothesis.strategies as st
from helpers import examples
from hypothesis import given

@given(st.floats(), st.integers(), st.text())
def test_a_property(number, count, text):
    print("drawn", number, count, ascii(text))

@examples(10)
@given(st.floats())
def test_a_costly_property(number):
    print("costly", number)
"""


@pytest.mark.slow
def test_checks_draw_the_same_examples_and_make_fuzz_fresh_ones_ten_times_as_many(project):
    (project / "tests/test_drawn.py").write_text(DRAWS)
    (project / "constants.py").write_text(f"NUMBERS = {[n + 0.123 for n in range(1000, 1200)]}")

    def drawn(*arguments, **environment):
        lines = run(project, "-s", "tests/test_drawn.py", *arguments, **environment).splitlines()
        return [line.lstrip(".") for line in lines if "drawn" in line or "costly" in line]

    check = drawn()
    # which local modules a test before has imported
    assert drawn("-p", "constants", CI="1") == check
    fuzz = drawn(HYPOTHESIS_PROFILE="fuzz")
    assert fuzz != drawn(HYPOTHESIS_PROFILE="fuzz")
    for what, most in (("drawn", 50), ("costly", 10)):
        counts = [sum(what in line for line in lines) for lines in (check, fuzz)]
        assert 0.8 * most <= counts[0] <= most
        assert 8 * most <= counts[1] <= 10 * most


def test_make_fuzz_multiplies_the_examples_of_every_property():
    """A count of its own comes from `examples`."""
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name != Path(__file__).name:
            assert not re.search(r"^@settings\(", path.read_text(), re.M), (
                f"{path.name}: write `@examples(count)` of helpers in place of `@settings`"
            )


def test_the_lines_that_clip_each_leaf_clip_each_leaf(monkeypatch):
    [lines] = map(textwrap.dedent, re.findall(r"```python\n(.*?)  ```", PAGE, re.S))
    path, end = ROOT / "purescale/_step/decide.py", "    return Decision("
    source = path.read_text().replace(end, textwrap.indent(lines, "    ") + end)
    names = {"__name__": "purescale._step.decide", "__package__": "purescale._step"}
    names |= {"max_leaf_norm": 0.5, "widest_float": widest_float}
    exec(compile(source, path, "exec"), names)
    for module in ("train_step", "unscale_and_step"):
        module = importlib.import_module(f"purescale._step.{module}")
        monkeypatch.setattr(module, "decide", names["decide"])
    sgd, rule = ps.from_torch(torch.optim.SGD, lr=1.0), ps.DynamicScale(init_scale=4.0)
    params = {"long": torch.zeros(5), "short": torch.zeros(33), "long too": torch.zeros(300)}
    slopes = {"long": 3.0, "short": 0.01, "long too": -0.25}

    def loss_fn(params, buffers, factor):
        loss = sum((params[name] * slopes[name]).sum() for name in params)
        return loss * factor, buffers

    settings = {"loss_fn": loss_fn, "optimizer": sgd, "rule": rule, "max_norm": 2.0}
    state = ps.init_train_state(params, {}, sgd, rule)
    new, info = ps.train_step(state, [1.0], **settings)
    grads = {name: torch.full_like(param, slopes[name]) for name, param in params.items()}
    scaled = {name: grad * 4.0 for name, grad in grads.items()}
    by_hand = ps.unscale_and_step(sgd, state.scaler, params, scaled, state.opt_state, max_norm=2.0)
    norm = torch.cat(list(grads.values())).norm()
    torch.testing.assert_close(info.grad_norm, norm)
    for name, grad in grads.items():
        grad = grad * (2.0 / norm)
        clipped = grad * (0.5 / grad.norm()).clamp(max=1.0)
        torch.testing.assert_close(-new.params[name], clipped)
        torch.testing.assert_close(-by_hand.params[name], clipped)
    skipped, info = ps.train_step(state, [float("inf")], **settings)
    assert info.found_inf
    assert torch.equal(skipped.params["short"], params["short"])

    def of_grads(grads, scale):
        scaler = state.scaler._replace(scale=scale)
        return ps.unscale_and_step(sgd, scaler, grads, grads, state.opt_state).params.sum()

    state = ps.init_train_state(torch.zeros(2), {}, sgd, rule)
    arguments = torch.tensor([math.inf, 1.0]), torch.tensor(4.0)
    by_grads, by_scale = torch.func.grad(of_grads, argnums=(0, 1))(*arguments)
    assert torch.equal(by_grads, torch.ones(2))
    assert by_scale == 0
