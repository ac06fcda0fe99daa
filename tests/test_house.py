"""The house: imports point downward, files stay small, private names of torch stand in one."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

import purescale
from purescale._torch.private_names import NAMES

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
            # `from .._tree import tree` names a file, `from .._tree.tree import Tree` what is in
            # one.
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
                if found := search(other, [*above, name]):
                    return found
            below.add(name)
        return None

    return next((found for name in graph if (found := search(name, []))), None)


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
    {"_grads", "_batch_norm", "_half"},
    {"_loss_scale"},
    {"_step", "simulate.py"},
    {"_runs"},
    {"_reports", "interop", "testing"},
    {"types.py"},
    {"__init__.py"},
]


def test_imports_point_downward_from_room_to_room():
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    assert set(floor) == {room_of(name) for name in FILES}
    upward = {
        (name, other)
        for name in FILES
        for other in imported(name)
        if room_of(name) != room_of(other) and floor[room_of(name)] <= floor[room_of(other)]
    }
    assert upward == set()


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: set(imported(name)) for name in FILES}
    assert {"_step/train_step.py", "_tree/states.py"} <= graph["__init__.py"]
    assert circle(graph) is None


def test_no_two_files_have_one_name():
    names = [Path(name).name for name in FILES if "interop/" not in name]
    names = [name for name in names if name != "__init__.py"]
    assert len(set(names)) == len(names)


ROOMS = sorted({room_of(name) for name in FILES if name.startswith("_") and "/" in name})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for_and_re_exports_nothing(room):
    body = parsed(f"{room}/__init__.py").body
    assert len(body) == 1
    assert ast.get_docstring(parsed(f"{room}/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_says_that_it_may_import_is_below_it_and_holds_what_it_imports(room):
    text = ast.get_docstring(parsed(f"{room}/__init__.py"))
    names = re.search(r"May import: (.*?)\.(\s|$)", text, re.S).group(1)
    said = set(re.findall(r"`(_[\w.]+)`", names))
    floor = next(index for index, rooms in enumerate(FLOORS) if room in rooms)
    files = [name for name in FILES if room_of(name) == room]
    used = {room_of(other) for name in files for other in imported(name)} - {room}
    assert used <= said <= set().union(*FLOORS[:floor])


# From the stage `start` on a leaf is a dense, real, strided tensor of this rank.
AFTER_FLATTEN = [
    "_grads/grad_stats.py",
    "_grads/measure.py",
    "_optim/fused.py",
    "_step/assemble.py",
    "_step/decide.py",
    "_step/microbatches.py",
    "_step/optimizer_step.py",
    "_step/train_step.py",
    "_step/window_result.py",
]
ASKED = {
    "layout",
    "is_sparse",
    "is_complex",
    "is_nested",
    "is_quantized",
    "placements",
    "is_dtensor",
}


ROOMS_OF_A_STEP = ("_step", "_grads", "_loss_scale", "_batch_norm")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FILES
        if room_of(name) in ROOMS_OF_A_STEP
        and name not in ("_step/optimizer_step.py", "_step/value_and_grad.py")
    ],
)
def test_only_the_update_and_the_gradients_of_a_step_ask_how_it_runs(name):
    nodes = list(ast.walk(parsed(name)))
    asked = {getattr(node, "id", None) for node in nodes}
    asked |= {getattr(node, "attr", None) for node in nodes}
    asked |= {getattr(node, "arg", None) for node in nodes}
    assert not asked & {"traced", "is_compiling", "under_transform"}


@pytest.mark.parametrize("name", AFTER_FLATTEN)
def test_no_stage_after_flatten_asks_for_a_kind_of_leaf(name):
    asked = {node.attr for node in ast.walk(parsed(name)) if isinstance(node, ast.Attribute)}
    asked |= {node.id for node in ast.walk(parsed(name)) if isinstance(node, ast.Name)}
    assert asked & ASKED == set()


def test_a_circle_of_imports_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]


def test_one_file_knows_optree_and_one_what_takes_its_place():
    users = [name for name in FILES if "optree" in packages(name)]
    assert users == ["_torch/private_names.py", "_tree/tree.py"]


def test_nothing_is_needed_but_torch_and_optree():
    foreign = {package for name in FILES for package in packages(name)}
    # the bar of `precise_bn`, the picture of a probe and the checks for users' tests, where they
    # are asked for
    asked_for = {"tqdm", "matplotlib", "hypothesis"}
    asked_for |= {"typing_extensions"}  # by type checkers, which bring it
    assert foreign - set(sys.stdlib_module_names) == {"torch", "optree"} | asked_for


def test_extras_are_installed_from_a_copy_of_the_repository_in_the_same_words():
    """purescale is on no index."""
    project = ROOT.parent
    pages = [project / "README.md", *project.glob("docs/*.md"), *ROOT.rglob("*.py")]
    for page in pages:
        words = " ".join(page.read_text(encoding="utf-8").replace('"', " ").split())
        assert not re.search(r"pip install [^`]{0,20}purescale", words), page
        for what in re.findall(r"`pip install '\.\[\w+\]'`(.{40})", words):
            assert what.startswith((" in a copy of the repository", " adds ")), (
                page
            )  # README: there


def test_what_tests_need_is_imported_by_testing_alone():
    assert {room_of(name) for name in FILES if "hypothesis" in packages(name)} == {"testing"}
    users = {room_of(name) for name in FILES if "testing" in map(room_of, imported(name))}
    assert users == {"testing"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_enough_to_be_read_at_once(name):
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= LIMIT, "one idea a file: cut it in two"


CONTRIBUTING = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text()


def test_the_pages_for_contributors_name_every_file_and_no_other():
    named = {Path(found).name for found in re.findall(r"[\w/]+\.py", CONTRIBUTING)}
    own = {Path(name).name for name in FILES if "interop/" not in name} - {"__init__.py"}
    assert own <= named
    tests = {path.name for path in Path(__file__).parent.rglob("*.py")}
    others = {path.name for path in Path(__file__).parents[1].glob("[bde]*/*.py")}
    peers = {Path(name).name for name in FILES if "interop/" in name}
    made = set(re.findall(r"\+\+\+ [\w/]+/(\w+\.py)", CONTRIBUTING))  # by a worked change
    assert named <= own | tests | others | peers | made | {"__init__.py"}


# A source file has its tests in the test file of its name; these have them in that of a neighbour.
TESTED_WITH = {
    "_batch_norm/bn_inputs.py": "test_bn_stats.py",
    "_distributed/buckets.py": "test_reduce.py",
    "_distributed/process_group.py": "test_reduce.py",
    "_grads/grad_stats.py": "test_clip.py",
    "_grads/measure.py": "test_clip.py",
    "_grads/mesh_stats.py": "test_dtensor.py",
    "_module/norms.py": "test_policy.py",
    "_module/references.py": "test_functional.py",
    "_module/walk.py": "test_recipe.py",
    "_optim/fused.py": "test_laws_of_a_step.py",
    "_optim/step_inputs.py": "test_leaves.py",
    "_optim/formula_step.py": "test_formulas.py",
    "_optim/spec.py": "test_torch_optim.py",
    "_reports/printing.py": "test_grad_report.py",
    "_step/agree.py": "test_reduce.py",
    "_step/assemble.py": "test_train_step.py",
    "_step/decide.py": "test_laws_of_a_step.py",
    "_step/memory.py": "test_donation.py",
    "_step/step_plan.py": "test_decided_once.py",
    "_step/train_state.py": "test_train_step.py",
    "_step/window_result.py": "test_microbatches.py",
    "_torch/cuda_graph.py": "test_capture.py",
    "_torch/operators.py": "test_traffic.py",
    "_torch/private.py": "test_private_names.py",
    "_torch/tracing.py": "test_laws.py",
    "_tree/gradients.py": "test_leaves.py",
    "_tree/tree.py": "test_leaves.py",
    "testing/_battery.py": "test_rule_battery.py",
}
# Laws, counts, pages and options of a public function, over many files.
ACROSS_FILES = {
    "test_addresses.py",
    "test_calls.py",
    "test_captured_laws.py",
    "test_compile.py",
    "test_compiled_loss.py",
    "test_contributing.py",
    "test_cuda.py",
    "test_cuda_capture.py",
    "test_cuda_jobs.py",
    "test_cuda_laws.py",
    "test_default_dtype.py",
    "test_derivatives.py",
    "test_docs.py",
    "test_examples.py",
    "test_fields.py",
    "test_four_ways.py",
    "test_gpu_page.py",
    "test_house.py",
    "test_jax_programs.py",
    "test_loop_that_never_waits.py",
    "test_method.py",
    "test_modes.py",
    "test_peers_mistakes.py",
    "test_recompute.py",
    "test_reinforcement_learning.py",
    "test_sharded_checkpoint.py",
    "test_state_attributes.py",
    "test_sweep.py",
    "test_traffic.py",
    "test_types.py",
    "test_wrapped.py",
}


def test_each_source_file_has_its_test_file():
    tests = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    sources = {name for name in FILES if "interop/" not in name and "__init__" not in name}
    assert set(TESTED_WITH) <= sources
    found = {name: f"test_{Path(name).name.removeprefix('_')}" for name in sources} | TESTED_WITH
    assert {name: test for name, test in found.items() if test not in tests} == {}
    of_interop = {"test_interop.py", "test_torch_amp.py", "test_live_optimizer.py"}
    assert tests == {*found.values(), *of_interop, *ACROSS_FILES}
    own = {name: test for name, test in TESTED_WITH.items() if f"test_{Path(name).name}" in tests}
    assert own == {}, "a file with tests of its own needs no row"


def test_private_names_of_torch_stand_in_one_place():
    theirs = ("_torch/private.py", "_torch/private_names.py")
    found = {name: list(private(name)) for name in FILES if name not in theirs}
    assert {name: names for name, names in found.items() if names} == {}
