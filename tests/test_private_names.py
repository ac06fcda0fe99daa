"""What is imported when, and a torch that lacks a private name."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import purescale as ps
from purescale._torch import private
from purescale._torch.private import NAMES, list_operator, look_up

# ---- imports -------------------------------------------------------------------------------------

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")


def modules_after_each(stages):
    """The modules of a new process after each of these stages of its code."""
    show = "\nimport sys\nprint('modules', *sys.modules)\n"
    code = "".join(textwrap.dedent(stage) + show for stage in stages)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("modules ")]
    return [set(line.split()[1:]) for line in lines]


LOOP = """
    import torch
    import purescale as ps

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, ps.policy("params=float32,compute=float16,output=float32"))

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch[0])
        return (out - batch[1]).square().mean(), buffers

    optimizer = ps.from_torch(OPTIMIZER)
    rule = ps.DynamicScale()
    state = ps.init_train_state(params, buffers, optimizer, rule)
    for _ in range(2):
        window = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]
        settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
        state, info = ps.train_step(state, window, **settings, max_norm=1.0, donate=True)
"""


def test_import_and_eager_steps_add_purescale_optree_and_the_standard_library_and_no_compiler():
    optimizers = [
        "torch.optim.AdamW, lr=1e-3",
        "torch.optim.RMSprop",
        "torch.optim.AdamW, lr=lambda applied: 1e-3 * 0.9**applied",
    ]
    loops = "".join(LOOP.replace("OPTIMIZER", optimizer) for optimizer in optimizers)
    stages = "import torch", "import purescale", "import purescale.testing", loops
    of_torch, ours, *_, after = modules_after_each(stages)
    assert {"purescale.simulate", "purescale.interop.apex"} <= ours
    roots = {module.split(".")[0] for module in ours - of_torch}
    assert roots - set(sys.stdlib_module_names) <= {"purescale", "optree"}
    assert not any(module.startswith(HEAVY) for module in after - of_torch)


# ---- a torch that has changed --------------------------------------------------------------------


def trained():
    torch.manual_seed(0)
    values = {"torch": torch, "ps": ps}
    exec(textwrap.dedent(LOOP.replace("OPTIMIZER", "torch.optim.AdamW")), values)
    return values["state"].params


@pytest.fixture
def without(monkeypatch):
    """Takes a private name away, as in a torch that lacks it."""

    def take(name):
        monkeypatch.setitem(NAMES, name, NAMES[name]._replace(path=f"{NAMES[name].path}_gone"))
        monkeypatch.delitem(vars(private), name, raising=False)

    yield take
    monkeypatch.undo()
    for name in NAMES:
        vars(private).pop(name, None)


def test_the_table_has_no_name_that_this_torch_lacks():
    assert {name for name in NAMES if not exists(name)} == set()


def exists(name):
    try:
        look_up(NAMES[name]._replace(otherwise=None))
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def expected():
    return trained()


@pytest.mark.parametrize("name", NAMES)
def test_a_training_loop_runs_without_a_private_name(name, without, expected):
    without(name)
    torch.testing.assert_close(trained(), expected, rtol=1e-5, atol=1e-6)


def refused(what):
    version = re.escape(torch.__version__)
    words = rf"needs {what}, which torch {version} does not have; the rest .*Fix: "
    return pytest.raises(ImportError, match=words)


REFUSED = [name for name in NAMES if NAMES[name].otherwise is None]


@pytest.mark.parametrize("name", REFUSED)
def test_a_feature_without_its_private_name_is_refused_by_that_name(name, without):
    without(name)
    with refused(f"{re.escape(NAMES[name].path)}"):
        getattr(private, name)


def test_a_missing_list_operator_is_refused_when_it_is_called(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_sqrt")
    operator = list_operator("sqrt")
    with refused(r"torch\._foreach_sqrt"):
        operator([torch.ones(1)])


def test_each_name_that_a_file_uses_is_there():
    files = Path(ps.__file__).parent.rglob("*.py")
    used = {name for file in files for name in re.findall(r"\bprivate\.(\w+)", file.read_text())}
    assert used - {"py"} - vars(private).keys() <= NAMES.keys()


def test_a_name_that_is_not_in_the_table_is_no_attribute():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = private.no_such_name


# ---- the slower public ways give the same --------------------------------------------------------


def test_without_its_name_a_backward_gives_the_same():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for run in (look_up(NAMES["run_backward"]), NAMES["run_backward"].otherwise):
        loss = (used**3).sum()
        gradients = run(
            (loss,), (torch.ones(()),), False, False, (used, unused), True, accumulate_grad=False
        )
        torch.testing.assert_close(gradients[0], torch.full((2,), 3.0))
        assert gradients[1] is None
