"""The quick tests that depend on the torch, at both ends of the range that pyproject.toml declares:
`make matrix`. Properties draw a fifth of their examples.

A session whose Python is not on the machine is skipped, and nox says so.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nox

TORCH_OF = {"3.12": "2.11.0", "3.13": "2.15.0"}  # the oldest torch; the newest of both
# Of files and pages, and of rules beside their own oracles, in the arithmetic of 0-d tensors.
WITHOUT_TORCH = (
    *("house", "contributing", "types", "gpu_page"),
    *("headroom", "rule_battery", "guard_battery", "simulate", "strategies"),
)

if shutil.which("pyenv"):  # whose python3.12 answers only if that version is named
    versions = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
    os.environ["PYENV_VERSION"] = ":".join(versions.stdout.split())

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


@nox.session(python=list(TORCH_OF))
def quick(session: nox.Session) -> None:
    """Run the quick tests with the torch of this Python."""
    torch = f"torch=={TORCH_OF[str(session.python)]}"
    pins = re.sub("^torch==.*$", torch, Path("constraints.txt").read_text(), flags=re.MULTILINE)
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
