"""Two devices that are not CPUs: `sim:0` and `sim:1`. Each operator runs the CPU's kernel, over
memory that the host cannot touch, and what would wait for an accelerator can be made an error.

They are compiled once (in about 20 seconds) and kept in `build/second_device/`. They are for a
process of their own, because torch counts the devices at the first backward, and then takes this
one for the accelerator of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).parents[2] / "build" / "second_device"


def compiler() -> str | None:
    """Return the C++ compiler of this machine, if it has one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)


def library() -> Path:
    """Return where the device for this torch is kept."""
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + SOURCE.read_bytes())
    return CACHE / f"{key.hexdigest()[:16]}.so"


def why_not() -> str | None:
    """Return why this machine can have no second device, None if it can."""
    if os.name != "posix":
        return "the second device maps memory as POSIX does"
    if not library().exists() and compiler() is None:
        return "the second device needs a C++ compiler: c++, g++ or the one that CXX names"
    return None


def build() -> Path:
    """Return the compiled device, compiled if it is not there."""
    if not (path := library()).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        link = [f"-L{path}" for path in cpp_extension.library_paths()]
        link += ["-lc10", "-ltorch_cpu", "-ltorch"]
        if sys.platform == "darwin":
            link += ["-undefined", "dynamic_lookup"]
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w"]
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            command = [compiler(), *flags, *include, SOURCE, "-o", made, *link]
            subprocess.run(command, check=True)
            made.replace(path)  # two processes may compile it: each finds a whole file
    return path


def load() -> None:
    """Register the devices with torch, under the name `sim`."""
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(build())
    torch._register_device_module("sim", module())
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])


def module() -> Any:
    """Return what stands at `torch.sim`, as torch.cuda does for GPUs."""
    made: Any = types.ModuleType("torch.sim")
    ops = torch.ops.sim

    def index(device: Any = "sim") -> int:
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return made.current_device() if found is None else found

    @contextlib.contextmanager
    def device(which: Any) -> Iterator[None]:
        before = ops.exchange_device(index(which))
        try:
            yield
        finally:
            ops.exchange_device(before)

    made._initialized = True  # torch.utils.checkpoint asks, before it keeps a generator's state
    made.is_available = made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.device_count = lambda: 2
    made.current_device = lambda: torch.accelerator.current_device_index()
    made.set_device = lambda which: ops.exchange_device(index(which))
    made.device = device
    made.manual_seed = lambda seed: ops.manual_seed(seed, made.current_device())
    made.manual_seed_all = lambda seed: [ops.manual_seed(seed, each) for each in range(2)]
    made.get_rng_state = lambda which="sim": ops.get_rng_state(index(which))
    made.set_rng_state = lambda state, which="sim": ops.set_rng_state(state, index(which))
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.synchronize = lambda which=None: torch.accelerator.synchronize(index(which or "sim"))
    return made


# ---- what a test asks ----------------------------------------------------------------------------

NAMES = (
    *("launches", "reads", "to_host", "to_device", "between", "waits", "events"),
    "blocks",  # of memory that are in use, of all devices
)


class Counts(types.SimpleNamespace):
    """What has happened on the devices since it was made, or within `counted`."""

    def __init__(self) -> None:
        super().__init__(**dict.fromkeys(NAMES, 0))
        self._before = torch.ops.sim.counts()

    def stop(self) -> None:
        now = torch.ops.sim.counts()
        vars(self).update(zip(NAMES, map(int.__sub__, now, self._before), strict=True))

    @property
    def copies(self) -> int:
        """Between the host and a device, or two devices."""
        return self.to_host + self.to_device + self.between


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    yield counts
    counts.stop()


@contextlib.contextmanager
def _switched(switch: Callable[[bool], bool], value: bool) -> Iterator[None]:
    before = switch(value)
    try:
        yield
    finally:
        switch(before)


def waiting(*, refused: bool) -> Any:
    return _switched(torch.ops.sim.refuse_waiting, refused)


def without_float64() -> Any:
    """Make the devices like MPS, which has none."""
    return _switched(torch.ops.sim.refuse_float64, True)


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """The names of the operators that run inside, complete when it ends."""
    names: list[str] = []
    torch.ops.sim.launched(True)
    try:
        yield names
    finally:
        names += torch.ops.sim.launched(False)
