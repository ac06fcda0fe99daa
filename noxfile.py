"""The quick tests that depend on the torch, with the newest torch and Python: `make matrix`. The
oldest torch is that of constraints.txt, with which all tests run. Properties draw a fifth of their
examples.

Where the Python is not on the machine the session is skipped, and nox says so.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nox

PYTHON, TORCH = "3.13", "2.15.0"
# Of files and pages, and of rules beside their own oracles, in the arithmetic of 0-d tensors.
WITHOUT_TORCH = (
    *("house", "contributing", "types", "gpu_page"),
    *("headroom", "rule_battery", "simulate", "strategies"),
)

if shutil.which("pyenv"):  # whose python3.13 answers only if that version is named
    versions = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
    os.environ["PYENV_VERSION"] = ":".join(versions.stdout.split())

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHON)
def quick(session: nox.Session) -> None:
    """Run the quick tests with the newest torch."""
    pins = Path("constraints.txt").read_text()
    pins = re.sub("^torch==.*$", f"torch=={TORCH}", pins, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(pins)
        constraints.flush()
        # By the environment, which takes the place of constraints in a machine's pip configuration.
        session.install("--editable", ".[dev]", env={"PIP_CONSTRAINT": constraints.name})
    ignored = [f"--ignore=tests/test_{name}.py" for name in WITHOUT_TORCH]
    for tests in (["tests", "--ignore=tests/conformance", *ignored], ["tests/second_device"]):
        session.run(
            *("python", "-m", "pytest", "-n", "2", "-m", "not slow", *tests, *session.posargs),
            env={"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "matrix"},
        )
