import pytest
import sim

from purescale._torch_optim import kernels

WHY_NOT = sim.why_not()
if WHY_NOT is None:
    sim.load()
    kernels.DEVICES_THAT_SKIP.add("sim")  # whose fused kernels are the CPU's, which are masked


def pytest_collection_modifyitems(items):
    for item in items:
        if WHY_NOT is not None and "second_device" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
