"""The house: imports point downward, files stay small, private names of torch stand in one file."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

import purescale
from purescale._torch.private import NAMES

ROOT = Path(purescale.__file__).parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
LIMIT = 540


@functools.cache
def parsed(name):
    return ast.parse(FILES[name].read_text())


def imported(name):
    """The files of the package that one of them imports, wherever in it."""
    here = FILES[name].parent
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [here, here.parent][node.level - 1].joinpath(*(node.module or "").split("."))
            # `from .._tree import pytree` names a file, `from .._tree.pytree import Tree` what is
            # in one.
            names = [base / alias.name for alias in node.names]
            for path in [base] if base.with_suffix(".py").exists() else names:
                path = path / "__init__" if path.is_dir() else path
                if path.with_suffix(".py").exists():
                    yield str(path.with_suffix(".py").relative_to(ROOT))


def room_of(name):
    """The folder of a file, or the file itself where it is beside the folders."""
    return name.split("/")[0]


def packages(name):
    """The packages of others that a file imports."""
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def circle(graph):
    """Some files each of which imports the next, the last of them the first; None if there are
    none.
    """
    below = set()

    def search(name, above):
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in below:
            for other in graph[name]:
                if path := search(other, [*above, name]):
                    return path
            below.add(name)
        return None

    return next((path for name in graph if (path := search(name, []))), None)


def private(name):
    """The private names of torch that a file spells out, each with its line."""
    known = {
        part for entry in NAMES.values() for part in entry.path.split(".") if part.startswith("_")
    }
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            owner = ast.unparse(node.value)
            if node.attr in known or owner.split(".")[0] in ("torch", "nn", "F", "Tensor"):
                yield f"{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if "._" in node.module or any(alias.name.startswith("_") for alias in node.names):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (
                f"{node.lineno}: {n}" for n in names if n.startswith("torch.") and "._" in n
            )


# From the ground up; rooms of one floor do not import each other.
FLOORS = [
    {"_torch"},
    {"_tree"},
    {"_distributed", "_jit", "_module", "_optim", "_checkpoint.py"},
    {"_grads", "_batch_norm", "_torch_optim"},
    {"_wrappers"},
    {"_loss_scale"},
    {"_step", "simulate.py"},
    {"_runs"},
    {"_reports", "interop", "testing"},
    {"types.py"},
    {"__init__.py"},
]


def test_imports_point_downward_from_room_to_room():
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {room_of(name) for name in FILES}
    assert set(floor) == rooms, "give each room, and each file beside them, its floor in FLOORS"
    upward = {
        (name, other)
        for name in FILES
        for other in imported(name)
        if room_of(name) != room_of(other) and floor[room_of(name)] <= floor[room_of(other)]
    }
    assert upward == set(), (
        "each of these imports from its own floor or a higher one: move what both need down, or "
        "take it as an argument"
    )


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: set(imported(name)) for name in FILES}
    assert {"_step/train_step.py", "_tree/stacking.py"} <= graph["__init__.py"]
    assert (path := circle(graph)) is None, (
        f"{' -> '.join(path)}: move what two of them need into a file below both"
    )


def test_no_two_files_have_one_name():
    names = [Path(name).name for name in FILES if "interop/" not in name]
    names = [name for name in names if name != "__init__.py"]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert twice == [], "rename one of each: pages name a file without its folder"


ROOMS = sorted({room_of(name) for name in FILES if name.startswith("_") and "/" in name})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for_and_re_exports_nothing(room):
    body = parsed(f"{room}/__init__.py").body
    assert ast.get_docstring(parsed(f"{room}/__init__.py")), "say what the room is for"
    assert len(body) == 1, "leave the docstring alone there, and import from the file itself"


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_says_that_it_may_import_is_below_it_and_holds_what_it_imports(room):
    text = ast.get_docstring(parsed(f"{room}/__init__.py"))
    names = re.search(r"May import: (.*?)\.(\s|$)", text, re.S)
    assert names, f"end the docstring of {room}/__init__.py with a line `May import: ...`"
    said = set(re.findall(r"`(_[\w.]+)`", names.group(1)))
    floor = next(index for index, rooms in enumerate(FLOORS) if room in rooms)
    files = [name for name in FILES if room_of(name) == room]
    used = {room_of(other) for name in files for other in imported(name)} - {room}
    assert used <= said, f"name these after `May import:` in {room}/__init__.py: {used - said}"
    above = said - set().union(*FLOORS[:floor])
    assert not above, f"{room}/__init__.py names rooms that are not below it: {above}; delete them"


def test_a_circle_of_imports_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]


def test_one_file_knows_optree_and_one_what_takes_its_place():
    users = [name for name in FILES if "optree" in packages(name)]
    assert users == ["_torch/private.py", "_tree/pytree.py"], "call optree through _tree/pytree.py"


def test_nothing_is_needed_but_torch_and_optree():
    foreign = {package for name in FILES for package in packages(name)}
    # the bar of `precise_bn`, the picture of a probe and the checks for users' tests, where they
    # are asked for
    asked_for = {"tqdm", "matplotlib", "hypothesis"}
    asked_for |= {"typing_extensions"}  # by type checkers, which bring it
    assert foreign - set(sys.stdlib_module_names) == {"torch", "optree"} | asked_for, (
        "users install torch and optree alone: do without the package, or import it where it is "
        "asked for and name it in `asked_for` and in an extra of pyproject.toml"
    )


def test_extras_are_installed_from_a_copy_of_the_repository_in_the_same_words():
    """purescale is on no index."""
    project = ROOT.parent
    pages = [project / "README.md", *project.glob("docs/*.md"), *ROOT.rglob("*.py")]
    for page in pages:
        words = " ".join(page.read_text(encoding="utf-8").replace('"', " ").split())
        assert not re.search(r"pip install [^`]{0,20}purescale", words), (
            f"{page}: write `pip install '.[extra]'` in a copy of the repository"
        )
        for what in re.findall(r"`pip install '\.\[\w+\]'`(.{40})", words):
            assert what.startswith((" in a copy of the repository", " adds ")), (  # README: there
                f"{page}: write `in a copy of the repository` after the command"
            )


def test_what_tests_need_is_imported_by_testing_alone():
    rooms = {room_of(name) for name in FILES if "hypothesis" in packages(name)}
    assert rooms == {"testing"}, "users have no hypothesis: move what needs it into testing/"
    users = {room_of(name) for name in FILES if "testing" in map(room_of, imported(name))}
    assert users == {"testing"}, "testing/ imports hypothesis: move what others need out of it"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_enough_to_be_read_at_once(name):
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= LIMIT, f"{name} has {lines} lines: cut it in two, one idea a file"


def test_private_names_of_torch_stand_in_one_place():
    elsewhere = {name: list(private(name)) for name in FILES if name != "_torch/private.py"}
    assert {name: names for name, names in elsewhere.items() if names} == {}, (
        "add each to NAMES in _torch/private.py, and call it through that file"
    )
