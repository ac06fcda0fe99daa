"""CONTRIBUTING: its walk-throughs are applied to a copy of the project, where the tests that they
name pass; its map has the floors of the imports.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_house import FLOORS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    section.splitlines()[0]: section for section in PAGE.split("\n## ") if "```diff" in section
}
# What torch brought is in place already: its patch is taken out and put in again.
DONE = "How to add a fused kernel"


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
            assert file.exists() == reverse
            if reverse:
                file.unlink()
            else:
                file.write_text(new)
            continue
        before, after = (new, old) if reverse else (old, new)
        text = file.read_text()
        assert text.count(before) == 1, f"{path} has not once:\n{before}"
        file.write_text(text.replace(before, after))


@pytest.fixture
def project(tmp_path):
    """A copy of the project, without the walk-throughs that somebody follows here."""
    for folder in ("purescale", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, section in SECTIONS.items():
        files = [path for path, old, _ in hunks(section) if not old]
        if name != DONE and all((ROOT / path).exists() for path in files):
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
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def passes(project, section):
    """The command that a section names passes in the project."""
    run(project, *shlex.split(re.search(r"`pytest ([^`]+)`", section).group(1)))


def test_there_are_four_walk_throughs():
    assert len(SECTIONS) == 4
    assert DONE in SECTIONS


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != DONE])
def test_a_walk_through_applies(name, project):
    apply(project, SECTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SECTIONS if name != DONE])
def test_the_tests_that_a_walk_through_names_pass_and_those_of_the_house(name, project):
    apply(project, SECTIONS[name])
    passes(project, SECTIONS[name])
    run(project, "tests/test_house.py", "tests/test_contributing.py", "-m", "not slow")


@pytest.mark.slow
def test_the_walk_through_of_what_is_there_is_what_is_there(project):
    before = {path: (project / path).read_text() for path, _, _ in hunks(SECTIONS[DONE])}
    apply(project, SECTIONS[DONE], reverse=True)
    assert all((project / path).read_text() != text for path, text in before.items())
    apply(project, SECTIONS[DONE])
    assert {path: (project / path).read_text() for path in before} == before
    passes(project, SECTIONS[DONE])


def test_the_map_has_the_floors_of_the_imports_from_the_top():
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    layout = re.search(r"```\n(purescale/ .*?)```", PAGE, re.S).group(1)
    rooms = re.findall(r"^(_\w+)/", layout, re.M)
    assert set(rooms) == {r for r in floor if r.startswith("_") and not r.endswith(".py")}
    assert [floor[room] for room in rooms] == sorted((floor[room] for room in rooms), reverse=True)


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
    assert drawn(CI="1") == check
    # which local modules a test before has imported
    assert drawn("-p", "constants") == check
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
            assert not re.search(r"^@settings\(", path.read_text(), re.M), path.name
