"""Replicas of sharded states over dp*cp: ranks, bytes and collectives, by hand."""

from __future__ import annotations

import math

import pytest
from jobs import context_job

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.cost.comm import collective
from steptime.job.assembly import Assembly
from steptime.job.mesh import group
from steptime.memory.states import shard_ranks
from steptime.timing.step_time import step_time

# h 1024 in 8 heads of 128, 4 key-value heads; 4096 tokens of bf16


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 12), (2, 6), (3, 4), (4, 3)])
def test_states_are_sharded_over_dp_and_cp(replicas, ranks):
    """ZeRO-1 of Megatron: 6 + 12 / ranks bytes per parameter; replicas divide dp*cp = 12, and need not divide dp = 6."""
    of = context_job(2, dp=6, gbs=12, replicas=replicas)
    assert shard_ranks(of) == ranks
    states, params = estimate(of).memory.stages[0], Assembly(of).local_params(Assembly(of).chunks[0])
    held = states.params_bytes + states.gradients_bytes + states.optimizer_bytes
    assert held == pytest.approx(params * (6 + 12 / ranks), rel=1e-3)  # buffers are padded
    buckets = [row.bytes for row in estimate(of).collectives if row.name == "parameters"]
    assert all(bucket % (2 * math.lcm(128, ranks)) == 0 for bucket in buckets)


def test_replicas_of_megatron_reduce_inside_then_between():
    """A reduce-scatter of the fp32 gradients over 4 ranks, and an all-reduce of a quarter of them between 4 copies."""
    of = context_job(2, dp=8, gbs=8, replicas=4, n_param_buckets=1)
    (reduction,) = [row for row in estimate(of).collectives if row.name == "gradients"]
    p, tiers = of.parallelism, step_time(Assembly(of)).context.tiers
    inside = collective("reduce_scatter", reduction.bytes, group(p, "shards"), tiers)
    between = collective("all_reduce", reduction.bytes / 4, group(p, "replicas"), tiers)
    assert (reduction.ranks, reduction.count_per_step) == (4, 1)
    assert reduction.time_s == pytest.approx(inside.time_s + between.time_s)
    # 4 adjacent ranks share a node of 8; each node holds 2 of the 4 copies
    assert (inside.tier, between.tier) == ("nvlink", "infiniband")


def test_fsdp_shards_over_dp_and_cp():
    """torchtitan: parameters live on dp*cp ranks, and replicas stand beside cp."""
    seen = {row.name: row for row in estimate(context_job(2, "all_gather", "fsdp2", dp=4)).collectives}
    assert seen["block parameters"].ranks == 8
    copies = {row.name: row for row in estimate(context_job(2, "all_gather", "fsdp2", dp=4, replicas=2)).collectives}
    assert (copies["block parameters"].ranks, copies["block gradients, replicas"].ranks) == (4, 2)
    with pytest.raises(ConfigError, match="replicas: must divide dp 4"):
        context_job(2, "all_gather", "fsdp2", dp=4, gbs=8, replicas=8)
