"""Sharded gradients are allocated layer by layer, each with its reduction; a micro-batch that reduces none allocates none.

Three layers whose shards have 100 B, or 60 B and experts' 40 B, of 1,000 B in all: at the reductions 1,000, 900 and 800 B are to
come, at the root's 700. (`test_fsdp_moments` has the groups of made-up sizes.)
"""

from __future__ import annotations

import pytest
from physics_jobs import job, machine
from walked_moments import LAYER, Every

from steptime.fsdp import flat_walk, memory_walk, no_sync_walk
from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped, wrapped
from steptime.fsdp.no_sync_walk import Phase, WalkedChunk
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)
LAST, MIDDLE = Phase(summed=True, last=True), Phase(summed=True, last=False)


def walked(to_come: float, shards: list[float], version: int, phase: Phase | None) -> Every:
    """A backward; with a `phase` one of several micro-batches of which the last alone reduces."""
    said = {"version": version, "reduce_dtype": "fp32", "no_sync": phase is not None}
    assembly = Assembly(job("fsdp2", seqlen=2, microbatches=3, dp=2, fsdp=said))
    memories, found = PartMemories(assembly, weight_grads_stay=True), Every(to_come)
    layers = [Wrapped(LAYER, [BLOCK] * len(shards), shards, 0.0, 70.0)] * 3
    if phase is None:
        plain = flat_walk.flat_backward if version == 1 else memory_walk.backward
        plain(assembly, memories, found, ROOT, layers)
    elif version == 1:
        no_sync_walk.flat_backward(assembly, memories, found, ROOT, layers, phase)
    else:
        no_sync_walk.backward(WalkedChunk(assembly, memories, ROOT, layers, layers), found, phase)
    return found


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("phase", [None, LAST])
def test_each_reduction_allocates_a_layers_shard(version, phase):
    found = walked(1_000.0, [100.0], version, phase)
    assert found.left["backward of mlp"] == [1_000.0, 900.0, 800.0]
    assert found.left["backward of a reduce-scatter"] == [1_000.0, 900.0, 800.0]
    assert found.left["backward of embedding"] == found.left["backward of the root's reduce-scatter"] == [700.0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("phase", [None, LAST])
def test_no_more_than_all_are_allocated(version, phase):
    """Of 250 B, as where the first layers' are frozen."""
    found = walked(250.0, [100.0], version, phase)
    assert found.left["backward of mlp"] == [250.0, 150.0, 50.0]
    assert found.left["backward of embedding"] == [0.0]


def test_experts_are_reduced_first():
    """The second group's 40 B, then the first one's 60 B (torch's post-backward hooks run from the last group on)."""
    found = walked(1_000.0, [60.0, 40.0], 2, None)
    assert found.left["backward of a reduce-scatter"] == [1_000.0, 960.0, 900.0, 860.0, 800.0, 760.0]
    assert walked(1_000.0, [60.0, 40.0], 2, LAST).left["backward of mlp"] == [1_000.0, 900.0, 800.0]


@pytest.mark.parametrize("version", [1, 2])
def test_without_reductions_all_are_to_come(version):
    found = walked(1_000.0, [100.0], version, MIDDLE)
    assert {left for every in found.left.values() for left in every} == {1_000.0}


def test_a_forward_whose_parameters_are_gathered():
    """It holds the root's 300,000 B and three layers' 30,000; embedding and head save 16 and 200 B, have 528 and 900 at most."""
    assembly = Assembly(job("fsdp2", seqlen=2, microbatches=3, dp=2, fsdp={"no_sync": True}))
    memories, found = PartMemories(assembly, weight_grads_stay=True), Every()
    memories.embedding = PartMemory(16.0, Peak(528.0, "embedding"), Peak(0.0, ""))
    memories.head = PartMemory(200.0, Peak(900.0, "loss"), Peak(0.0, ""))
    no_sync_walk.gathered_forward(memories, found, ROOT, [Wrapped(LAYER, [BLOCK], [0.0], 0.0, 0.0)] * 3)
    held = 300_000.0 + 90_000
    assert found.of("forward of embedding") == [(16.0, held + 512)]
    assert found.of("forward of mlp") == [(1_016.0 + 1_000 * i, held + 700) for i in range(3)]
    assert found.of("forward of loss") == [(3_216.0, held + 700)]


@pytest.mark.parametrize(("offload", "bytes_"), [({}, 4 * 164_096 / 2), ({"params": True}, 0.0)])
def test_sharded_gradients_of_a_layer(offload, bytes_):
    """fp32 of half of its 164,096 parameters; none on the device where the host updates them. The last one to be trained is
    the down projection, 32,768 elements in bf16.
    """
    link = machine(host_bytes_per_s=1.0)
    on = Machine(**link.model_dump(exclude={"host"}), host={"memory_bytes": 1e15, "memory_bytes_per_s": 1.0})
    assembly = Assembly(job("fsdp2", on=on, dp=2, performance={"cpu_offload": offload}, fsdp={"reduce_dtype": "fp32"}))
    layers = wrapped(assembly, PartMemories(assembly, weight_grads_stay=True), assembly.chunks[0])
    assert [layer.gradients for layer in layers] == [[bytes_]] * 2
    assert [layer.last for layer in layers] == [2 * 32_768] * 2


def test_each_layer_has_the_group_of_its_width():
    """Wide layers have 164,096 + 3 * 128 * 256 = 262,400 parameters, gathered in bf16; narrow ones 164,096."""
    kinds = [{"repeat": 1, "inter_sz": 512}, {"repeat": 2}, {"repeat": 1, "inter_sz": 512}]
    assembly = Assembly(job("fsdp2", model={"n_layers": 4, "layers": kinds}, dp=2, fsdp={"reduce_dtype": "fp32"}))
    layers = wrapped(assembly, PartMemories(assembly, weight_grads_stay=True), assembly.chunks[0])
    assert [layer.buffers.gathered for layer in layers] == [2 * n for n in (262_400, 164_096, 164_096, 262_400)]


@pytest.mark.parametrize(
    ("microbatches", "expected"),
    [(2, [(False, False), (True, True)]), (3, [(False, False), (True, False), (True, True)])],
)
def test_micro_batches_that_differ(microbatches, expected):
    """The first finds no sums; the last reduces them; those between, all alike, do neither."""
    assembly = Assembly(job("fsdp2", dp=2, microbatches=microbatches, fsdp={"no_sync": True}))
    assert [*no_sync_walk.phases(assembly)] == expected


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_whole_gradients_of_earlier_micro_batches(dtype, itemsize):
    """All 590,464 parameters' (`physics_jobs`), in the dtype of the reduction."""
    assembly = Assembly(job("fsdp2", dp=2, microbatches=2, fsdp={"no_sync": True, "reduce_dtype": dtype}))
    assert no_sync_walk.summed_bytes(assembly) == itemsize * 590_464
