import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two workers on two cores: one thread each.
torch.set_num_threads(1)

settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _same_random_numbers_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()
