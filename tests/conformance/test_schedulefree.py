"""`with_schedule_free` beside the reference of its authors, a whole training each."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import cross_entropy_of, started, trained
from torch import nn

import purescale as ps

schedulefree = pytest.importorskip("schedulefree")


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_a_training_is_that_of_the_reference_wrapper(beta):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3))
    other = copy.deepcopy(model)
    batches = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(100)]

    theirs = schedulefree.ScheduleFreeWrapperReference(
        torch.optim.SGD(other.parameters(), lr=0.1, weight_decay=1e-3), momentum=beta
    )
    theirs.train()
    for x, y in batches:
        F.cross_entropy(other(x), y).backward()
        theirs.step()
        theirs.zero_grad()
    expected = {name: p.detach().clone() for name, p in other.named_parameters()}
    theirs.eval()

    apply, params, buffers = ps.make_functional(model)
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1, weight_decay=1e-3)
    settings = {"loss_fn": cross_entropy_of(apply), "buffers": buffers}
    run = started(params, None, ps.with_schedule_free(sgd, beta), ps.DynamicScale(), **settings)
    state, _ = trained(*run, [[batch] for batch in batches])
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(state.params, expected)
    averages = {name: p.detach() for name, p in other.named_parameters()}
    close(ps.averaged(state.params, state.opt_state), averages)
