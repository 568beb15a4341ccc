"""FSDP by hand where every module is wrapped alone, where several groups are gathered ahead, and how experts' weights are cut."""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers, layer_group
from steptime.fsdp.memory_walk import (
    Moments,
    Wrapped,
    copied_out,
    forward,
    gathered_backward_ahead,
    gathered_forward_ahead,
    largest_module,
    wrapped,
)
from steptime.fsdp.memory_walk import by_module as walked_by_module
from steptime.fsdp.passes import pass_moments
from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES, PartMemory
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment
from steptime.model.ops import Param

# --- every module by itself ---


def by_module() -> Assembly:
    """Two tokens, two ranks: parameters are gathered in bf16, their shards are fp32, gradients are reduced in fp32."""
    layout = {"dp": 2, "fsdp": {"version": 1, "wrap": "module", "reduce_dtype": "fp32"}}
    return Assembly(job("fsdp2", seqlen=2, microbatches=2, **layout))


def test_the_largest_module_of_some():
    """Of 30, 42 and 40 elements that of 42: 84 B gathered, half of them sent by each rank, 168 B of fp32 to reduce."""
    found = largest_module(by_module(), [Param("a", (10, 3)), Param("b", (7, 6)), Param("c", (5, 8))])
    assert (found.sent, found.gathered, found.reduce_input) == (42.0, 84.0, 168.0)


def test_a_layer_holds_its_largest_module_and_the_gradients_of_all():
    """Gate, up and down have 256 * 128 = 32,768 elements: 2 B gathered, 4 B to reduce. Each rank keeps half of the gradients of
    all 164,096 elements in fp32.
    """
    assembly = by_module()
    layers = wrapped(assembly, PartMemories(assembly, weight_grads_stay=True), assembly.chunks[0])
    assert len(layers) == 2
    for layer in layers:
        [one] = layer.each
        assert (one.sent, one.gathered, one.reduce_input) == (32_768.0, 65_536.0, 131_072.0)
        assert layer.gradients == [82_048 * 4.0]


def test_the_ends_of_a_step_by_modules():
    """Embedding and head have 131,072 elements. Forward is worst where the embedding's come, 2 B each, from a bf16 copy of half
    of them; backward at its reduction: its gradient 2 B an element, an fp32 copy 4 B, and half of that as the result.
    """
    there, back = pass_moments(by_module())
    assert (there.added_bytes, there.op) == (131_072 * (2 + 1), "forward of an all-gather")
    assert (back.added_bytes, back.op) == (131_072 * (2 + 4 + 2), "backward of the root's reduce-scatter")


# --- groups gathered ahead ---


def layers_of(*gathered: float) -> list[Wrapped]:
    """Layers that take so many bytes gathered, and a tenth more once copied out."""
    sizes = [Buffers(0.0, size, 1.1 * size, 0.0, 0.0, 0.0, 0.0, 0.0, last=0.0, sums=0.0) for size in gathered]
    return [Wrapped(PartMemory(0.0, NO_BYTES, NO_BYTES), [size], [0.0], 0.0, 0.0) for size in sizes]


@pytest.mark.parametrize(
    ("prefetch", "ep", "expected"),
    [
        (2, 1, [30.0, 50.0, 30.0, 0.0]),  # its own and the next one
        (3, 1, [60.0, 50.0, 30.0, 0.0]),
        (1, 1, [0.0, 0.0, 0.0, 0.0]),  # a gather starts with its own layer
        (1, 2, [10.0, 20.0, 30.0, 0.0]),  # torchtitan/distributed/fsdp.py: one ahead where experts are sharded
    ],
)
def test_what_forward_has_gathered_ahead(prefetch, ep, expected):
    """Layers of 10, 20 and 30 B (set_modules_to_forward_prefetch)."""
    moe = {"moe": {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 64}} if ep > 1 else {}
    assembly = Assembly(job("fsdp2", dp=2, ep=ep, model=moe, fsdp={"prefetch": prefetch}))
    assert gathered_forward_ahead(assembly, layers_of(10.0, 20.0, 30.0)) == expected


@pytest.mark.parametrize(
    ("prefetch", "ahead", "copied"),
    [
        # while the last of 10, 20, 30, 40 B computes the one before it arrives; when it was copied out, none had
        (1, 30.0, 44.0 + 40.0),
        (2, 20.0 + 30.0, 44.0 + 40.0 + 30.0),
        (3, 10.0 + 20.0 + 30.0, 44.0 + 40.0 + 20.0 + 30.0),
        (8, 10.0 + 20.0 + 30.0, 44.0 + 40.0 + 10.0 + 20.0 + 30.0),
    ],
)
def test_what_backward_has_gathered_ahead(prefetch, ahead, copied):
    """Copied out its parameters are there twice: 40 B gathered and 44 B (set_modules_to_backward_prefetch)."""
    layers = layers_of(10.0, 20.0, 30.0, 40.0)
    assembly = Assembly(job("fsdp2", dp=2, fsdp={"prefetch": prefetch}))
    assert gathered_backward_ahead(assembly, layers, 3) == ahead
    assert gathered_backward_ahead(assembly, layers, 0) == 0.0
    assert copied_out(assembly, layers, 3) == copied
    stays = Assembly(job("fsdp2", dp=2, fsdp={"prefetch": prefetch, "reshard_after_forward": False}))
    assert gathered_backward_ahead(stays, layers, 3) == copied_out(stays, layers, 3) == 0.0


# --- weights of experts ---


@pytest.mark.parametrize(("software", "said", "turned"), [("fsdp2", {"fsdp": {}}, 49_152), ("megatron-core", {}, 0)])
def test_experts_that_lie_in_one_tensor_are_turned(software, said, turned):
    """4 experts over ep 2 leave 2 a device, of 3 * 64 * 128 elements each, and 8 ranks share them. torchtitan's grouped experts
    lie in one tensor per projection, which is cut along dimension 1; Megatron's each have their own, cut by rows.
    """
    moe = {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 64}
    level = {} if said else {"zero_level": 3}
    assembly = Assembly(job(software, dp=16, ep=2, model={"moe": moe}, **said, **level))
    experts = layer_group(assembly, assembly.kinds[0]).experts
    assert (experts.elements, experts.padded, experts.ranks) == (49_152, 49_152, 8)
    assert experts.turned == turned


def test_a_moment_holds_what_is_marked_and_nothing_else():
    moments = Moments(5.0)
    moments.mark(1.0, 2.0, "x")
    assert moments.worst == PeakMoment(1.0, 2.0, "x", 5.0)


@pytest.mark.parametrize(
    ("wrap", "no_sync", "alone"), [("module", False, True), ("module", True, False), ("block", False, False)]
)
def test_modules_are_walked_alone_where_nothing_adds_up_whole(wrap, no_sync, alone):
    said = {"version": 1, "wrap": wrap, "no_sync": no_sync}
    assert walked_by_module(Assembly(job("fsdp2", dp=2, microbatches=2, fsdp=said))) is alone


@pytest.mark.parametrize("reshard", [True, False])
def test_embedding_and_head_as_groups_of_their_own(reshard):
    """torchtitan's: 262,144 B of the embedding and 262,400 of head and final norm in bf16, each once as gathered and once copied
    out; layers as in `test_fsdp_moments`. The embedding's flat buffer is there till the first layer's has been copied out; the
    head gathers beside the last layer's. Where nothing is freed, the embedding's parameters and 30,000 B a layer stay.
    """
    assembly = Assembly(job("torchtitan", seqlen=2, microbatches=2, dp=2, fsdp={"reshard_after_forward": reshard}))
    memories, there = PartMemories(assembly, weight_grads_stay=True), Every()
    block = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=0.0, sums=0.0)
    root = Buffers(*[0.0] * 8, last=0.0, sums=0.0)
    forward(assembly, memories, there, root, [Wrapped(LAYER, [block], [0.0], 400.0, 0.0)] * 2)
    first, last, stays = 262_144, 262_400, 0 if reshard else 262_144
    layer = 0 if reshard else 30_000
    assert there.of("forward of embedding") == [(0.0, 2 * first + 16 + 512)]
    assert there.of("forward of an all-gather") == [
        (16.0, stays + first + 10_000 + 30_000 + 50 + 512),
        (1_016.0, stays + layer + 2 * 10_000 + 30_000 + 50 + 512),
        (2_016.0, stays + 2 * layer + 10_000 + 2 * last + 512),
    ]
    assert there.gathered_in("forward of an all-gather") == [first + 10_000, 20_000, 10_000 + last]
    held = stays + 30_000 + 10_000 + 700
    assert there.of("forward of mlp") == [(1_016.0, held), (2_016.0, held + layer)]
    head = memories.head
    end = [(2_016.0 + head.saved, stays + 2 * layer + 2 * last + head.forward.bytes - head.saved)]
    assert there.of(f"forward of {head.forward.op}") == end
