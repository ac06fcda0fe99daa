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
            assert not file.exists()
            file.write_text(new)
            continue
        before, after = (new, old) if reverse else (old, new)
        text = file.read_text()
        assert text.count(before) == 1, f"{path} has not once:\n{before}"
        file.write_text(text.replace(before, after))


@pytest.fixture
def project(tmp_path):
    for folder in ("purescale", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def passes(project, section):
    """The command that a section names, run in the project."""
    command = shlex.split(re.search(r"`pytest ([^`]+)`", section).group(1))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command],
        cwd=project,
        env={"PYTHONPATH": str(project), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]


def test_there_are_four_walk_throughs():
    assert len(SECTIONS) == 4
    assert DONE in SECTIONS


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != DONE])
def test_a_walk_through_applies(name, project):
    apply(project, SECTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SECTIONS if name != DONE])
def test_the_tests_that_a_walk_through_names_pass(name, project):
    apply(project, SECTIONS[name])
    passes(project, SECTIONS[name])


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
