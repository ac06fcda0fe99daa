"""The page on reinforcement learning in float16 over FSDP2: its program on two ranks, the same run
as with torch's scalers, and what the page says of flags, repeats, critics and samplers.
"""

import math
import re

import pytest
import torch
import torch.distributed as dist
from helpers import assert_close, clone, in_processes, on_all_ranks, same_bits
from test_docs import PAGES, blocks, output_of_script
from test_dtensor import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import purescale as ps

PAGE = "docs/float16_reinforcement_learning.md"
RULE = ps.DynamicScale(init_scale=2.0**24, growth_interval=2)
SCALING = {"init_scale": 2.0**24, "growth_interval": 2}
TOLERANCE = 1e-6  # `unscale_and_step` unscales and clips by one division


def definitions(rule=RULE):
    """Return what the blocks of the page for many ranks define."""
    names = {"__name__": "page"}
    program, *others = blocks(PAGES[PAGE])[:3]
    for block in (program.split("dist.init_process_group")[0], *others):
        exec(compile(block, PAGE, "exec"), names)
    names["rule"] = rule
    return names


class Run:
    """A policy over the ranks, and the state of its training. After a backward rank `bad_shard`
    has an inf in its shard of one gradient, as where a row of an embedding overflows.
    """

    def __init__(self, page):
        torch.manual_seed(0)
        self.page = page
        self.policy = page["sharded"](page["Policy"](), init_device_mesh("cpu", (ranks(),)))
        self.params = dict(self.policy.named_parameters())
        self.opt_state, self.scaler = page["optimizer"].init(self.params), page["rule"].init()
        self.bad_shard = None
        self.params["letters.weight"].register_post_accumulate_grad_hook(self.spoil)

    def spoil(self, param):
        if self.bad_shard == dist.get_rank():
            param.grad.to_local()[0, 0] = math.inf

    def sampled(self):
        sampler = self.page["Policy"]().half().requires_grad_(False)
        return self.page["roll_out"](sampler, self.policy)

    def train(self, rollouts, by="train_on"):
        """Train by a function of the page, and return its flag and loss."""
        stepped = self.page[by](rollouts, self.policy, self.params, self.opt_state, self.scaler)
        self.opt_state, self.scaler, found_inf, loss = stepped
        return bool(found_inf), loss


def begun(rank, rule=RULE, careful=False):
    """A run with random numbers of each rank's own."""
    page = definitions(rule)
    page["rule"] = page["careful"] if careful else rule
    run = Run(page)
    torch.manual_seed(1 + rank)
    return run


def ranks():
    return dist.get_world_size()


# ---- beside torch's scalers ----------------------------------------------------------------------

BOTH, DATA, SHARD, FINE = "all ranks", "the rollouts of rank 1", "the shard of rank 1", "nothing"
# From 2**24 the first steps overflow on all ranks.
STEPS = [BOTH] * 5 + [FINE] * 2 + [SHARD, FINE, DATA, FINE, FINE, FINE]


def spoiled(rollouts, cause):
    """The rollouts, with an advantage on rank 1 that no scale of the run allows."""
    letters, logps, advantage, reward = rollouts
    if cause == DATA and dist.get_rank() == 1:
        advantage = advantage * 1e6
    return letters, logps, advantage, reward


def by_torch(run, batches, scaler):
    optimizer = torch.optim.AdamW(run.policy.parameters(), lr=3e-3, weight_decay=0.0)
    loss_of, losses, scales = definitions()["loss_of"], [], []
    for rollouts, cause in zip(batches, STEPS, strict=True):
        run.bad_shard = 1 if cause == SHARD else None
        loss = loss_of(run.policy, rollouts)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.policy.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
    return losses, scales


def run_is_that_of_torchs_scaler(peer, rank):
    """Scales and skips are the same, losses and weights to 1e-6."""
    ours = begun(rank)
    batches, skips, losses, scales = [], [], [], []
    for cause in STEPS:
        batches.append(spoiled(ours.sampled(), cause))
        ours.bad_shard = 1 if cause == SHARD else None
        found_inf, loss = ours.train(batches[-1])
        skips.append(found_inf)
        losses.append(loss)
        scales.append(ours.scaler.scale.item())
    assert skips == [cause != FINE for cause in STEPS]

    theirs = Run(ours.page)
    their_losses, their_scales = by_torch(theirs, batches, peer("cpu", **SCALING))
    assert scales == their_scales
    assert_close(losses, their_losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert_close(whole(ours.params), whole(theirs.params), rtol=TOLERANCE, atol=TOLERANCE)
    assert not same_bits(whole(ours.params), whole(Run(ours.page).params))
    assert all(same_bits(told, whole(ours.params)) for told in on_all_ranks(whole(ours.params)))


# ---- one flag ------------------------------------------------------------------------------------


def a_step_over_local_shards_has_a_flag_for_each_rank(rank):
    """What the page warns of, and why the check above can fail."""
    run = begun(rank, ps.DynamicScale(init_scale=2.0**10))
    loss, run.bad_shard = run.page["loss_of"](run.policy, run.sampled()), 1
    ps.scale_loss(run.scaler, loss).backward()
    params = {name: p.detach().to_local() for name, p in run.params.items()}
    grads = {name: p.grad.to_local() for name, p in run.params.items()}
    optimizer = run.page["optimizer"]
    out = ps.unscale_and_step(optimizer, run.scaler, params, grads, optimizer.init(params))
    assert on_all_ranks(bool(out.found_inf)) == [False, True]


def a_rule_that_reads_the_loss_of_each_rank_needs_its_flag_reduced(rank):
    """Else scales differ, where the loss of one rank is NaN."""
    run = begun(rank)
    rule = run.page["careful"]
    letters, logps, advantage, _ = run.sampled()
    rollouts = letters, logps, advantage * (math.nan if rank else 1), 0
    loss = run.page["loss_of"](run.policy, rollouts)
    ps.scale_loss(rule.init(), loss).backward()
    grads, found_inf = ps.unscale_and_check(
        rule.init(), {name: p.grad for name, p in run.params.items()}
    )
    amax, finite = ps.grad_amax(grads), torch.isfinite(loss.detach())
    own = rule.update(rule.init(), found_inf & finite, amax)
    assert on_all_ranks(own.scale.item()) == [2.0**25, 2.0**32]
    finite = ~ps.all_reduce_found_inf(~finite)
    joint = rule.update(rule.init(), found_inf & finite, amax)
    assert on_all_ranks(joint.scale.item()) == [2.0**32, 2.0**32]


# ---- the other blocks ----------------------------------------------------------------------------


def all_ranks_repeat_rollouts_equally_often(rank):
    """Twice from a scale that is far too high, not at all then, and to the limit in vain."""
    run = begun(rank, careful=True)
    calls, loss_of = [], run.page["loss_of"]
    run.page["loss_of"] = lambda *arguments: calls.append(0) or loss_of(*arguments)
    for bad_shard in (None, None, 1):  # the last one in each of its attempts
        attempts, run.bad_shard = len(calls), bad_shard
        found_inf, _ = run.train(run.sampled(), by="train_until_applied")
        assert found_inf == (bad_shard is not None)
        assert on_all_ranks(len(calls) - attempts) == [{0: 3, 3: 1, 4: 8}[attempts]] * 2
        assert len(set(on_all_ranks(run.scaler.scale.item()))) == 1
    assert run.opt_state.applied == 2


def an_overflow_of_the_critic_on_one_rank_skips_the_policy_on_all(rank):
    page = definitions(ps.DynamicScale(init_scale=2.0**10))
    policy, critic = Run(page), Run(page)
    models = {"policy": policy.policy, "critic": critic.policy}
    params = {"policy": policy.params, "critic": critic.params}
    opt_state, scaler = page["optimizer"].init(params), page["rule"].init()
    torch.manual_seed(1 + rank)
    rollouts = policy.sampled()
    for bad_shard in (1, None):
        before, critic.bad_shard = clone(whole(policy.params)), bad_shard
        values = critic.policy(rollouts[0][:, :-1]).mean(-1)
        loss = page["loss_of"](policy.policy, rollouts) + (values - rollouts[2]).square().mean()
        opt_state, scaler, found_inf = page["train_together"](loss, models, opt_state, scaler)
        assert on_all_ranks(bool(found_inf)) == [bad_shard is not None] * 2
        assert same_bits(whole(policy.params), before) == (bad_shard is not None)
    assert scaler.scale == 2.0**9
    assert opt_state.applied == 1


def the_sampler_has_the_bits_that_the_trainer_computes_with(rank):
    """After skipped steps and after applied ones."""
    run = begun(rank)
    sampler = run.page["Policy"]().half().requires_grad_(False)
    for _ in range(8):
        rollouts = run.page["roll_out"](sampler, run.policy)
        assert same_bits(run.policy(rollouts[0]).detach(), sampler(rollouts[0]))
        run.train(rollouts)
    assert 0 < run.opt_state.applied < 8


def _all(rank):
    run_is_that_of_torchs_scaler(torch.amp.GradScaler, rank)
    run_is_that_of_torchs_scaler(ShardedGradScaler, rank)
    a_step_over_local_shards_has_a_flag_for_each_rank(rank)
    a_rule_that_reads_the_loss_of_each_rank_needs_its_flag_reduced(rank)
    all_ranks_repeat_rollouts_equally_often(rank)
    an_overflow_of_the_critic_on_one_rank_skips_the_policy_on_all(rank)
    the_sampler_has_the_bits_that_the_trainer_computes_with(rank)


def test_what_the_page_says_holds_over_two_ranks():
    """In one start of two processes, which takes longer than they do."""
    in_processes(_all)


@pytest.mark.slow
def test_the_script_of_the_page_trains_over_two_ranks(tmp_path):
    page = PAGES[PAGE].read_text()
    pattern = r"reward (\S+), at last (\S+)\n(\d+) of 80 steps skipped, scale \d+\n"
    first, last, skips = re.fullmatch(pattern, output_of_script(PAGES[PAGE], tmp_path)).groups()
    assert float(first) < 0.3
    assert float(last) > 0.9
    assert f"Each of the first {skips} steps overflows" in page.replace("\n", " ")
