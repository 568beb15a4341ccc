"""Which of five layers run again, by method, and how often in one backward; and a node whose ranks share one link."""

from __future__ import annotations

from math import inf

import pytest
from physics_jobs import job, machine
from plain_backward import AUTOGRAD

from steptime.answer.result import estimate
from steptime.cost.network import network, one_link
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.job.sections import CrossDc
from steptime.memory.kept_buffers import stage_experts
from steptime.memory.kept_ops import kept_of_chunk
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.op_walk import walk_part
from steptime.memory.part_memories import PartMemories, groups_of
from steptime.model.ops import Move, Tensor
from steptime.software.performance import load_software


def plan(method: str, software: str = "megatron-core"):
    performance = {"recompute": {"granularity": "full", "method": method, "n_layers": 2}}
    return job(software, model={"n_layers": 5}, performance=performance)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("every", [(1, 1, False), (1, 1, True), (1, 1, False), (1, 1, True), (1, 1, False)]),  # the second of each two
        ("block", [(2, 1, True), (3, 1, False)]),  # the first two
        ("uniform", [(2, 2, True), (1, 1, True)]),  # groups of two, and one that is left
    ],
)
def test_groups_of_layers(method, expected):
    """How often a group occurs, its layers, and whether only its input is kept: 8 tokens of 128 in bf16."""
    assembly = Assembly(plan(method))
    (part,) = assembly.kinds
    memories = PartMemories(assembly)
    found = memories.layers(assembly.chunks[0])
    assert [(times, group) for times, group, _ in found] == [(times, ((part, size),)) for times, size, _ in expected]
    kept = memories.plain[part].saved
    assert [memory.saved for *_, memory in found] == [2_048 if again else kept for *_, again in expected]


@pytest.mark.parametrize(
    ("software", "method", "whole", "inner"),
    [
        ("megatron-core", "every", 2, 0),
        ("megatron-core", "block", 2, 0),
        ("megatron-core", "uniform", 5, 0),
        ("fsdp2", "every", 2, 0),
        ("fsdp2", "block", 2, 0),
        ("fsdp2", "uniform", 3, 2),  # replays stop early in the last layer of each group alone
    ],
)
def test_replays_of_a_backward(software, method, whole, inner):
    timing = estimate(plan(method, software)).timing
    (part,) = timing.assembly.kinds
    found = timing.parts.layer_replays(timing.assembly.chunks[0])
    expected = [(float(whole), part, timing.parts.whole_replays[part])]
    assert found == expected + ([(float(inner), part, timing.parts.of[part].forward)] if inner else [])


@pytest.mark.parametrize(("ranks", "stride", "share"), [(8, 1, 4), (8, 2, 2), (4, 4, 1)])
def test_ranks_of_a_node_share_one_link_outside(ranks, stride, share):
    """Nodes of four: 1/4, 1/2 or all of the rate between them, as so many of the group's ranks are inside one."""
    node = Tier(name="node", size=4, bytes_per_s=100.0, latency_s=1.0, efficiency=1.0)
    fabric = Tier(name="fabric", size=inf, bytes_per_s=40.0, latency_s=2.0, efficiency=1.0)
    found = one_link(Group("dp", ranks, stride), (node, fabric))
    assert [(tier.name, tier.bytes_per_s) for tier in found] == [("node", 100.0), ("fabric", 40.0 / share)]


def test_the_devices_of_a_center_share_its_link():
    """8 Gbit/s, 1e9 B/s, between two centers of two devices: half each. The nodes end with their center."""
    inside_of = machine()
    link = CrossDc(n_dcs=2, interconnect_bandwidth_gbps=8.0, interconnect_latency_s=0.5)
    inside, between = network(inside_of, link, 4)
    assert (inside.size, between.bytes_per_s, between.latency_s) == (2, 1e9 / 2, 0.5)
    with pytest.raises(ValueError, match="number of devices"):
        network(inside_of, link)
    ends = inside_of.model_copy(update={"tiers": [Tier(name="rack", size=2, bytes_per_s=1.0, latency_s=0.0)]})
    assert [tier.name for tier in network(ends, link, 8)] == [
        "rack",
        "cross-dc",
    ]  # a machine whose last tier holds two devices


@pytest.mark.parametrize(
    ("performance", "share"),
    [
        ({}, 1.0),
        ({"activation_checkpointing_type": "selective"}, 1.0),
        ({"recompute": {"granularity": "full", "method": "block", "n_layers": 2}}, 1.0),
        ({"activation_offload": 0.25}, 0.75),
    ],
)
def test_every_tensor_that_a_chunk_keeps_is_listed(performance, share):
    """Two of five layers, or none, keep their input alone, 2,048 B; else all that their ops save, of which the host has a share;
    embedding and head keep theirs.
    """
    on = machine(host_bytes_per_s=1.0)
    assembly = Assembly(job("fsdp2", on=on, model={"n_layers": 5}, performance=performance))
    memories, (part,) = PartMemories(assembly), assembly.kinds
    each = (memories.selective if "activation_checkpointing_type" in performance else memories.plain)[part]
    names = [name for op in part.ops for name in op.saves]
    layers = 2 * 2_048 + 3 * each.saved if "recompute" in performance else 5 * share * each.saved
    found = list(kept_of_chunk(memories, assembly.chunks[0]))
    assert sum(tensor.bytes for tensor in found) == layers + memories.embedding.saved + memories.head.saved
    mine = [tensor for tensor in found if tensor.op in part.ops]
    assert {tensor.name for tensor in mine} <= {*names}
    assert len(mine) > 5
    inputs = [tensor.bytes for tensor in found if tensor.op is None]
    assert inputs == ([2 * 2_048.0] if "recompute" in performance else [])


def test_maps_of_a_heads_layer_count_once():
    """Of multi-token prediction the head has one layer with experts beside the two of the model: three times a layer's maps."""
    moe = {"n_experts": 4, "experts_per_token": 2, "expert_inter_sz": 256}
    kept = [
        stage_experts(Assembly(job(model={"moe": moe, "mtp": mtp}, dp=2, ep=2, microbatches=2)), 0).maps
        for mtp in (0, 1)
    ]
    assert kept[0] > 0
    assert kept[1] == kept[0] * 3 / 2


@pytest.mark.parametrize(
    ("software", "early", "reentrant"),
    [("accelerate", False, True), ("accelerate", True, False), ("megatron-2021", False, False)],
)
def test_checkpoints_that_are_one_function(software, early, reentrant):
    """accelerate's default, as torch.utils.checkpoint has it with use_reentrant=True. One that stops early is not reentrant."""
    assert load_software(software).replace(recompute_stops_early=early).activations.reentrant == reentrant


def test_layers_checkpointed_together_run_again_one_by_one():
    """A layer saves 10 B and has 20 B at most in forward: the second of two runs beside what the first saves, and the group's
    input, 2,048 B, is there throughout. Backward of a layer has 1 B at most, or 5,000 B.
    """
    for most in (1.0, 5_000.0):
        memories = PartMemories(Assembly(plan("block")))
        (kind,) = memories.assembly.kinds
        memories.plain = {kind: PartMemory(10.0, Peak(20.0, "run"), Peak(most, "back"))}
        found = memories.checkpointed(((kind, 2),))
        assert found.saved == 2_048.0
        assert found.backward == (Peak(10.0 + 20.0 + 2_048.0, "run") if most == 1.0 else Peak(10.0 + most, "back"))


def test_an_input_of_a_replay_that_an_earlier_op_needs_last():
    """x of 100 B is read by op 2, which runs again, and kept for op 1. In op 1's backward there are x, the gradients of op 1's
    output, 10 B, and of x from both, 200 B, and 1,000 B of its own.
    """
    ops = [
        Move("1", ("x",), (Tensor("a", 10.0, 1.0),), ("x",), backward_temp_bytes=1000.0),
        Move("2", ("x", "a"), (Tensor("b", 20.0, 1.0),), ("b",), role="core_attn"),
        Move("3", ("b",), (Tensor("c", 1.0, 1.0),)),
    ]
    found = walk_part(ops, Tensor("x", 100.0, 1.0), "c", frozenset({"core_attn"}), AUTOGRAD)
    assert found.backward == Peak(100 + 10 + 200 + 1000, "1")


def test_equal_groups_of_layers_of_two_kinds():
    """Layers a b a b a a a by twos: (a, b) twice, (a, a) once, and the last a."""
    a, b = Assembly(job(model={"layers": [{"repeat": 1, "inter_sz": 512}, {"repeat": 1}]})).kinds
    runs = ((a, 1), (b, 1), (a, 1), (b, 1), (a, 3))
    assert groups_of(runs, 2) == [(2, ((a, 1), (b, 1))), (1, ((a, 2),)), (1, ((a, 1),))]


def test_three_kinds_of_layers_run_again_one_after_another():
    """Each saves 10 B and has 14 at most in forward, 17 in backward: with the first two run again, 20 + 17, and for the last
    replay 20 + 14 and its input, which the group keeps.
    """
    memories = PartMemories(Assembly(job(performance={"recompute": {"granularity": "full", "method": "uniform"}})))
    [kind] = memories.assembly.kinds
    x = kind.x.bytes
    for backward in (17.0, 17.0 + 2 * x):
        memories.plain[kind] = PartMemory(10.0, Peak(14.0, "f"), Peak(backward, "b"))
        memories._groups.clear()
        found = memories.checkpointed(((kind, 1), (kind, 1), (kind, 1)))
        assert found.backward.bytes == 20 + max(14 + x, backward)
        assert (found.saved, found.n_params) == (x, 3 * kind.n_params)
