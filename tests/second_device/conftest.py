import pytest
import sim

WHY_NOT = sim.why_not()
if WHY_NOT is None:
    sim.load()


def pytest_collection_modifyitems(items):
    for item in items:
        if WHY_NOT is not None and "second_device" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
