"""When gradients are reduced and parameters gathered, on links of 1 B/s: seconds are bytes that a rank sends.

Two ranks of a ring pass half of a tensor on. Of the model (one layer, a vocabulary of 8192) buckets close from 125,000 elements
on, in backward order: the head, 1,048,576 elements; norm, down, gate and up, norm, qkv, 147,712; projection, norm and embedding,
1,065,088. All end at a multiple of 128. Two ranks in a node slow the compute that they hide under by 15 % of what hides.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.cost.comm import CommCost
from steptime.cost.overlap import contention
from steptime.hardware.machine import Machine
from steptime.job.mesh import Group, Parallelism, group
from steptime.schedule import walk
from steptime.timing.data_parallel import Reduction, exposed_reduction, gather_ends, networks
from steptime.timing.part_times import ChunkTime

MODEL = {"n_layers": 1, "vocab_sz": 8192}
HEAD, MIDDLE, EMBEDDING = 1_048_576, 147_712, 1_065_088
FORWARD_FLOPS = 19_415_040
"""16 * (163,840 + 1,048,576) in projections of 8 tokens, and 2 * 8 * 8 * 256 / 2 = 16,384 in causal attention."""
BACKWARD_FLOPS = 19_398_656 * (1 + 1 / 0.95) + 2.5 * 16_384
"""As seconds at the rate of forward: dgrad, wgrad at 95 % of its rate, flash attention's five products to two."""


def exposed(name: str, flops: float, *, node: int = 8, **said) -> float:
    """Exposed seconds of a step's reductions ("gradients") or gathers ("parameters")."""
    layout = {"dp": 2, "bucket_size_mb": 0.5, "model": MODEL} | said
    answer = estimate(job(on=machine(flops=flops, link=1.0, node=node), **layout))
    return sum(row.exposed_s for row in answer.collectives if row.name == name)


def by_hand(shown: float, everything: float, slows: float = 0.15):
    return pytest.approx(shown + slows * (everything - shown), rel=SLIGHTLY)


def rows(name: str, **said) -> dict[float, float]:
    """Bytes to seconds of a bucket's calls."""
    answer = estimate(job(on=machine(link=1.0), dp=2, bucket_size_mb=0.5, model=MODEL, **said))
    return {row.bytes: row.time_s for row in answer.collectives if row.name == name}


def test_buckets_and_their_seconds():
    """fp32 gradients are reduce-scattered, bf16 parameters gathered: half of 4 and of 2 bytes an element."""
    reduced, gathered = rows("gradients"), rows("parameters")
    for elements in (HEAD, MIDDLE, EMBEDDING):
        assert reduced[4 * elements] == pytest.approx(2 * elements, rel=SLIGHTLY)
        assert gathered[2 * elements] == pytest.approx(elements, rel=SLIGHTLY)


# --- parameters before the first forward ---

EVERY_GATHER = HEAD + MIDDLE + EMBEDDING


@pytest.mark.parametrize(
    ("bucket_s", "shown"),
    [
        # a forward so long that only the first bucket shows: the embedding's, the last in backward order
        (2_000_000, EMBEDDING),
        # forward reaches the head's bucket 2 * 500,000 s after the embedding has come; its gather left 500,000 s after
        (500_000, EMBEDDING + HEAD - 500_000),
        # each gather outlasts the forward beside it
        (100_000, EMBEDDING + (MIDDLE - 100_000) + (HEAD - 100_000)),
    ],
)
def test_gathers_run_last_bucket_first_each_beside_the_forward_of_the_one_before(bucket_s, shown):
    """megatron/core/distributed/distributed_data_parallel.py:237 chains the buckets from last to first; a bucket's pre-forward
    hook waits for its own gather, then sends the next one off (param_and_grad_buffer.py, finish_param_sync). Three buckets share
    the forward evenly.
    """
    assert exposed("parameters", FORWARD_FLOPS / (3 * bucket_s)) == by_hand(shown, EVERY_GATHER)


def test_between_nodes_hidden_gathers_slow_compute_by_two_percent():
    """One rank a node sends over its NIC, which takes no processors: 2 % of what hides comes back."""
    found = exposed("parameters", FORWARD_FLOPS / 6_000_000, node=1)
    assert found == by_hand(EMBEDDING, EVERY_GATHER, slows=0.02)


def test_without_overlap_all_gathers_show():
    found = exposed("parameters", FORWARD_FLOPS / 6_000_000, performance={"overlap": {"dp": False}})
    assert found == pytest.approx(EVERY_GATHER, rel=SLIGHTLY)


# --- gradients beside the last backward ---

EVERY_REDUCTION = 2 * EVERY_GATHER


@pytest.mark.parametrize(
    ("backward_s", "shown"),
    [
        # 1 s an element: the head is ready after 1,048,576 s of 2,261,376, and from then on the link never rests
        (EVERY_GATHER, HEAD + EVERY_REDUCTION - EVERY_GATHER),
        # 2 s an element: the head's ends at 4 * 1,048,576 = 4,194,304; the middle's, ready at 2,392,576, at 4,489,728; the
        # embedding's is ready when backward ends, at 4,522,752
        (2 * EVERY_GATHER, 2 * EMBEDDING),
    ],
)
def test_a_bucket_is_ready_when_backward_has_passed_its_share_of_the_elements(backward_s, shown):
    """Of four micro-batches the last one's backward; the head's bucket first."""
    found = exposed("gradients", BACKWARD_FLOPS / backward_s, microbatches=4)
    assert found == by_hand(shown, EVERY_REDUCTION)


@pytest.mark.parametrize(("backward_s", "shown"), [(1_000_000, 2_425_344), (100_000, 3_081_984 - 2_048 - 100_000)])
def test_a_later_stage_reduces_in_the_cool_down(backward_s, shown):
    """Two stages, one bucket each: the last one's gradients are whole a send and a backward of stage 0 before the pipeline ends.

    Stage 0 has a layer and the embedding: 2 * (164,096 + 1,048,576) = 2,425,344 s. Stage 1 has three layers, norm and head:
    2 * (3 * 164,096 + 128 + 1,048,576) = 3,081,984 s. The send is of 2,048 bytes. A layer's backward on stage 0 has
    2,621,440 * (1 + 1 / 0.95) + 40,960 FLOPs (see BACKWARD_FLOPS). The longer of both shows.
    """
    layout = {
        "model": MODEL | {"n_layers": 4},
        "pp": 2,
        "layers_per_stage": [1, 3],
        "n_param_buckets": 1,
        "bucket_size_mb": None,
    }
    found = exposed("gradients", (2_621_440 * (1 + 1 / 0.95) + 40_960) / backward_s, **layout)
    assert found == by_hand(shown, 3_081_984)


# --- ZeRO-2 ---


@pytest.mark.parametrize(
    ("backward_s", "late"),
    [(1_000_000, 4_522_752 - 1_000_000), (5_000_000, 0)],
)
def test_zero_2_reduces_every_micro_batch(backward_s, late):
    """Only a shard of the gradients stays, so each of four micro-batches is reduced: 4,522,752 s in one bucket.

    The last one's has nothing beside it; each of the three before it shows what it outlasts the next backward by.
    """
    layout = {"zero_level": 2, "n_param_buckets": 1, "bucket_size_mb": None, "microbatches": 4}
    found = exposed("gradients", BACKWARD_FLOPS / backward_s, **layout)
    assert found == by_hand(4_522_752 + 3 * late, 4 * 4_522_752)


# --- copies of the shards, and one link of a node ---


def test_copies_add_a_reduction_between_them_and_no_gather():
    """Two copies of two shards: half of each fp32 bucket is all-reduced between them, 2 * 1/2 of it sent by each rank: 2 + 2 s an
    element. Either collective costs 8.4 us before its first hop, and hops are free.
    """
    layout = {"dp": 4, "replicas": 2, "n_param_buckets": 1, "bucket_size_mb": None, "model": MODEL}
    rows = {row.name: row for row in estimate(job(on=machine(link=1.0), **layout)).collectives}
    assert rows["gradients"].time_s == pytest.approx(4 * EVERY_GATHER, rel=SLIGHTLY)
    assert rows["gradients"].bandwidth_s == pytest.approx(4 * EVERY_GATHER)
    assert rows["gradients"].latency_s == pytest.approx(16.8e-6)
    assert rows["gradients"].tier == "inside"
    assert rows["parameters"].time_s == pytest.approx(EVERY_GATHER, rel=SLIGHTLY)
    assert rows["parameters"].latency_s == pytest.approx(8.4e-6)


@pytest.mark.parametrize(("replicas", "dense", "experts"), [(1, (8, 2), (4, 4)), (2, (4, 2), (2, 4))])
def test_who_reduces_the_gradients_of_experts(replicas, dense, experts):
    """tp 2, dp 8, ep 4: of 16 devices 4 hold the same experts, 4 apart, and 8 the same other parameters, 2 apart. Two copies
    halve both; the devices that hold the same shard are 8 apart.
    """
    moe = {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}
    plan = job(model={"moe": moe, "n_q_heads": 2}, tp=2, dp=8, ep=4, zero_level=1, replicas=replicas)
    found = networks(plan, tuple(plan.machine.tiers))
    assert [found[of].shards[1:3] for of in ("dense", "expert")] == [dense, experts]
    assert [found[of].replicas[1:3] for of in ("dense", "expert")] == [(replicas, 16 / replicas)] * 2


@pytest.mark.parametrize(("software", "links"), [("megatron-core", 4), ("deepspeed", 1)])
def test_a_ring_over_nodes_has_every_link_of_a_node_or_one(software, links):
    """Eight ranks in two nodes of four: 7/8 of a tensor leaves by four NICs of 1 B/s, or by one (node_links of the profile)."""
    on = machine(link=1e3, outside=1.0, node=4)
    layout = {"dp": 8, "n_param_buckets": 1, "model": MODEL, "zero_level": 1}
    (row,) = [r for r in estimate(job(software, on=on, **layout)).collectives if r.name == "parameters"]
    assert row.bandwidth_s == pytest.approx(7 / 8 * row.bytes / links)


def test_what_hides_is_the_rest():
    """Of 2,261,376 s of gathers and twice that of reductions what does not show; the slowed compute counts as shown."""
    layout = {"dp": 2, "bucket_size_mb": 0.5, "model": MODEL}
    time = estimate(job(on=machine(flops=FORWARD_FLOPS / 6_000_000, link=1.0), **layout)).time
    assert time.parts_s["dp_comm"] + time.hidden_s["dp_comm"] == pytest.approx(3 * EVERY_GATHER, rel=SLIGHTLY)
    assert time.hidden_s["dp_comm"] > EVERY_GATHER


def test_what_hides_of_every_micro_batchs_reductions():
    """ZeRO-2 reduces 4,522,752 s in each of four micro-batches, and gathers half of that once."""
    layout = {"dp": 2, "zero_level": 2, "n_param_buckets": 1, "microbatches": 4, "model": MODEL}
    time = estimate(job(on=machine(flops=BACKWARD_FLOPS / 5_000_000, link=1.0), **layout)).time
    everything = 4 * 4_522_752 + 4_522_752 / 2
    assert time.parts_s["dp_comm"] + time.hidden_s["dp_comm"] == pytest.approx(everything, rel=SLIGHTLY)
    assert time.hidden_s["dp_comm"] > 2 * 4_522_752


def test_how_late_gathers_make_a_forward():
    """Three buckets of 3 s under a forward of 6 s, which needs one every 2 s: they end after 3, 6 and 9 s, so that forward is 3,
    4 and 5 s late. The second is sent once the first has come, the third when forward, then 4 s late, reaches the second.
    """
    bucket = Reduction("parameters", "all_gather", 1.0, CommCost(0.0, 3.0, "node", 3.0, "ring"), 1, Group("dp", 2, 1))
    walked = walk("1f1b", 1, 1, 1, [[6.0]], [[12.0]], [0.0])
    found = gather_ends([[bucket] * 3], 0, walked, [[ChunkTime(6.0, 12.0, 0.0)]])
    assert [(end_s, late_s) for end_s, late_s, _ in found] == [(3.0, 3.0), (6.0, 4.0), (9.0, 5.0)]


def test_gathers_of_a_stage_that_waits_for_its_first_input():
    """The second stage's forward begins after 6 s and needs its second bucket 3 s later. The first is there after 3 s; the second
    is sent when forward reaches the first, so that it comes after 9 s, in time.
    """
    bucket = Reduction("parameters", "all_gather", 1.0, CommCost(0.0, 3.0, "node", 3.0, "ring"), 1, Group("dp", 2, 1))
    walked = walk("1f1b", 2, 1, 1, [[6.0], [6.0]], [[12.0], [12.0]], [0.0, 0.0])
    found = gather_ends([[bucket] * 2], 0, walked, [[ChunkTime(6.0, 12.0, 0.0)]])
    assert [late_s for _, late_s, _ in found] == [3.0, 3.0]
    found = gather_ends([[bucket] * 2], 1, walked, [[ChunkTime(6.0, 12.0, 0.0)]] * 2)
    assert [(end_s, late_s) for end_s, late_s, _ in found] == [(3.0, 0.0), (9.0, 0.0)]


def test_a_reduction_among_shards_and_then_among_replicas():
    """8 B at 1 B/s: two shards reduce-scatter half, 4 s, and two replicas all-reduce the 4 B left, 2 * 4/2 = 4 s, hops apart."""
    plan = job(on=machine(link=1.0), dp=4, zero_level=1, replicas=2, model=MODEL)
    cost = networks(plan, tuple(plan.machine.tiers))["dense"].costs("reduce_scatter")(8.0)
    assert cost.bandwidth_s == 8.0
    assert cost.time_s > 8.0


def test_a_stage_without_buckets_adds_nothing():
    """A pipeline of 0.25 + 0.25 s ends long after the reductions that it does not have."""
    assert exposed_reduction([[[]]], walk("1f1b", 1, 1, 1, [[0.25]], [[0.25]], [0.0])) == 0.0


@pytest.mark.parametrize(("tp", "slowed"), [(1, 0.15), (2, 0.15), (4, 0.15), (8, 0.02)])
def test_a_group_with_several_ranks_in_a_node_slows_compute_like_nvlink(tp, slowed):
    """64 devices in nodes of 8: with tp 8 each node has one rank of a data-parallel group, whose ring then has no NVLink hop."""
    over = group(Parallelism(tp=tp, pp=1, dp=64 // tp), "dp")
    assert float(contention(over, Machine.load("dgx-h100").tiers)) == slowed
