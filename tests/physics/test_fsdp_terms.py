"""Single terms of FSDP's memory and seconds, of made-up groups: what adds up, what is still to come, what is cut or doubled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from physics_jobs import job, machine
from walked_moments import LAYER, Every

from steptime.answer.result import estimate
from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.flat_walk import flat_forward
from steptime.fsdp.groups import Buffers, groups
from steptime.fsdp.loss_in_pipeline import by_micro_batch
from steptime.fsdp.memory_walk import Wrapped, backward, copied_parameters
from steptime.fsdp.moments import Moments
from steptime.fsdp.no_sync_walk import Phase, Sums, reductions, root_sums
from steptime.fsdp.of_job import ends_alike, unsynced
from steptime.fsdp.passes import pass_moments
from steptime.fsdp.pipeline_memory import stage_actions, stage_chunks
from steptime.fsdp.plus_plus import reduction
from steptime.fsdp.seconds import CommSeconds, backward_gather, group_seconds, price
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.memory.optimizer_moments import matrix, unevenness
from steptime.memory.part_memories import PartMemories
from steptime.memory.states import stage_states
from steptime.model.ops import Param
from steptime.schedule import order

BLOCK = Buffers(500.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
EXPERTS = Buffers(0.0, 20_000.0, 40_000.0, 5_000.0, 8_000.0, 500.0, 900.0, 60.0, last=80.0, sums=9_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)


def sharded(microbatches: int = 3, **fsdp: Any) -> Assembly:
    return Assembly(job("fsdp2", dp=2, microbatches=microbatches, fsdp={"reduce_dtype": "fp32"} | fsdp))


def test_sums_that_are_reduced():
    """fp32 sums are twice their gradients: what is cut along another dimension, 90, is copied in fp32; what takes the sums' place
    has its last gradient, or that, once more.
    """
    sums = Sums(sharded(), ROOT, [Wrapped(LAYER, [BLOCK], [0.0], 0.0, 0.0)] * 3)
    assert (sums.whole, sums.grown, sums.copied) == (100_000 + 3 * 6_000, 2.0, True)
    cut = BLOCK._replace(chunked=90.0)
    assert (sums.reducing(BLOCK), sums.reducing(cut)) == (6_000, 6_000 + 2 * 90)
    assert (sums.reduced(BLOCK), sums.reduced(cut)) == (700 + 70, 700 + 90)


def test_reductions_of_a_layer_with_experts():
    """Experts first, beside the dense group's sums and parameters: 9,000 + 6,000 + 30,000 and the input 8,000; then 6,000 beside
    both inputs, 14,000.
    """
    both = Wrapped(LAYER, [BLOCK, EXPERTS], [0.0, 0.0], 0.0, 0.0)
    assert both.buffers.sums == 15_000
    found = list(reductions(both, Sums(sharded(), ROOT, [])))
    assert found == [(9_000 + 6_000 + 30_000 + 8_000, 8_000), (6_000 + 14_000, 14_000)]


@pytest.mark.parametrize(("reduce", "made"), [("fp32", [(0.0, 9.0 + 100_000 + 200)]), ("bf16", [])])
def test_sums_of_the_root(reduce, made):
    """The first micro-batch copies them, beside its last gradient, where they are of another dtype."""
    found = Every()
    sums = Sums(sharded(reduce_dtype=reduce), ROOT, [])
    root_sums(found, ROOT, sums, Phase(summed=False, last=False), 9.0)
    assert found.of("backward of a sum of gradients") == made
    root_sums(found, ROOT, sums, Phase(summed=True, last=False), 9.0)
    assert len(found.all) == len(made)


@pytest.mark.parametrize(
    ("said", "alike"),
    [({}, False), ({"pp": 2}, True), ({"fsdp": {"version": 1}}, True), ({"fsdp": {"wrap": "model"}}, True)],
)
def test_ends_that_are_one_group(said, alike):
    assert ends_alike(job("fsdp2", dp=2, microbatches=2, **({"fsdp": {}} | said))) is alike


@pytest.mark.parametrize(("pp", "microbatches", "sums"), [(1, 2, True), (2, 2, False), (1, 1, False)])
def test_a_pipeline_adds_gradients_up_by_itself(pp, microbatches, sums):
    said = {"reduce_dtype": "fp32", "no_sync": True, "reshard_after_forward": False}
    assert unsynced(job("fsdp2", dp=2, pp=pp, microbatches=microbatches, fsdp=said)) is sums


@pytest.mark.parametrize(
    ("microbatches", "no_sync", "to_come"),
    [(1, False, True), (3, True, True), (3, False, False)],
)
def test_gradients_that_are_still_to_come(microbatches, no_sync, to_come):
    """4 B of each of 590,464 parameters over 2 ranks: of a single micro-batch, or where the last one reduces for all."""
    forward, _ = pass_moments(sharded(microbatches, no_sync=no_sync))
    assert forward[3] == (590_464 / 2 * 4 if to_come else 0)


def test_gradients_of_a_stage_come_with_its_last_backward():
    """F B F B of the last of two stages: one layer, head and norm, 164,096 + 131,200 parameters, in fp32 over 2 ranks."""
    assembly = Assembly(
        job("fsdp2", dp=2, pp=2, schedule="1f1b", microbatches=2, fsdp={"reshard_after_forward": False})
    )
    actions = order("1f1b", 2, 1, 2)[1]
    found = list(stage_actions(assembly, 1, stage_chunks(assembly)[1], actions))
    left = 4 * (164_096 + 131_200) / 2
    assert [one.to_come for one in found] == [left, left, left, 0.0]
    assert [one.moment[3] for one in found] == [left] * 4
    saved = [one.kept for one in found]
    assert saved[0] == saved[2] > saved[1] == saved[3] == 0.0


def test_seconds_of_sums_on_a_device_of_4_bytes_a_second():
    """164,096 gradients in bf16, reduced in fp32. `price` copies 2 + 4 B of each. The first micro-batch casts them, no more;
    others read and add, 2 + 4 + 4; the last also copies the sums, 4 + 4, not the gradients.
    """
    on = machine(memory=4.0, node=2)
    plan = job("fsdp2", on=on, dp=2, microbatches=3, fsdp={"reduce_dtype": "fp32", "no_sync": True})
    assembly = Assembly(plan)
    layer = groups(assembly, assembly.chunks[0]).layers[0]
    found = price(assembly, tuple(on.tiers), layer, rates(on.accelerator, plan.software))
    assert found.compute_s == 164_096 * 6 / 4
    assert (found.first_s, found.later_s, found.last_s) == (0.0, 164_096 * (10 - 6) / 4, 164_096 * (10 + 8 - 6) / 4)
    assert (found.copy_s, found.near_s) == (164_096 * 2 * 2 / 4, 0.0)


def test_gathers_among_the_neighbors_of_a_second_partition():
    """ZeRO++: backward gathers in 7 s what forward has in 100 s, and copies it in 3 s."""
    on = machine(node=2)
    plan = job("deepspeed", on=on, dp=4, zero_level=3, zero_plus_plus={"hpz_partition_size": 2})
    assembly = Assembly(plan)
    layer = groups(assembly, assembly.chunks[0]).layers[0]
    of = CommSeconds(100.0, 1.0, 1.0, copy_s=3.0, near_s=7.0)
    priced = rates(on.accelerator, plan.software)
    assert backward_gather(assembly, tuple(on.tiers), priced, layer, of) == (7.0, 3.0, 0.0)


def test_parts_in_forward_and_backward_order():
    """Embedding 1 and 2 s, two layers 3 and 4 s with 0.5 s run again, the head 5 and 6 s."""
    on = machine(node=2)
    plan = job("fsdp2", on=on, dp=2, fsdp={})
    assembly = Assembly(plan)
    seconds = {assembly.embedding: (1.0, 2.0), assembly.kinds[0]: (3.0, 4.0), assembly.head: (5.0, 6.0)}
    parts = {part: PartTime(Work(gemm_s=one), Work(gemm_s=two), Work()) for part, (one, two) in seconds.items()}
    again = {assembly.kinds[0]: 0.5}
    forward, back = group_seconds(assembly, tuple(on.tiers), parts, again, rates(on.accelerator, plan.software))
    assert [of.compute_s for of in forward] == [1.0, 3.0, 3.0, 5.0]
    assert [of.compute_s for of in back] == [6.0, 4.5, 4.5, 2.0]


@pytest.mark.parametrize(("matrices", "kinds"), [(0, ["reduce_scatter"]), (3, ["reduce_scatter", *["all_to_all"] * 4])])
def test_vectors_alone_are_reduced_as_they_are(matrices, kinds):
    """qgZ exchanges matrices in int4: each call within nodes and between them, with its scales."""
    quantized = {"quantized_gradients": True}
    plan = job("deepspeed", on=machine(node=2), dp=4, zero_level=3, zero_plus_plus=quantized)
    found = reduction(plan, 100.0, 200.0, matrices, Group("dp", 4.0, 1.0))
    assert [one.kind for one in found] == kinds
    assert found[0].bytes == 200.0


def test_what_a_layers_gather_sends_and_copies_out():
    """The shard's copy of 500 B; parameters and those cut along another dimension, where they were freed."""
    resharded, kept = sharded(), sharded(reshard_after_forward=False)
    assert copied_parameters(resharded, BLOCK) == 30_000 + 50
    assert copied_parameters(kept, BLOCK) == 0.0
    found = Every()
    layers = [Wrapped(LAYER, [BLOCK], [0.0], 0.0, 0.0)] * 2
    backward(resharded, PartMemories(resharded, weight_grads_stay=True), found, ROOT, layers)
    assert found.sent == 500.0


def test_a_chunk_in_the_middle_has_no_head_to_reduce():
    """Of three stages of torchtitan the last alone."""
    said = {"dp": 2, "pp": 3, "microbatches": 3, "fsdp": {"reshard_after_forward": False}}
    assembly = Assembly(job("torchtitan", model={"n_layers": 6}, **said))
    assert [by_micro_batch(assembly, chunk) for (chunk,) in assembly.stages] == [False, False, True]


def test_matrices_of_an_optimizer():
    """Experts' weights keep their columns however they are split; others lose rows or columns to tensor parallelism."""
    assert matrix(Param("w", (4, 6, 8), n_experts=4, split_dim=2), 24.0) == (3.0, 8)
    assert matrix(Param("w", (6, 8), split_dim=1), 24.0) == (6, 4.0)
    assert matrix(Param("w", (6, 8), split_dim=0), 24.0) == (3.0, 8)
    assert matrix(Param("w", (6, 8)), 48.0) == (6.0, 8)
    plan: Any = SimpleNamespace(software=SimpleNamespace(states=SimpleNamespace(optimizer="adamw")))
    assert unevenness(plan, [], {"dense": 2, "expert": 4}) == {"dense": 0.0, "expert": 0.0}


@pytest.mark.parametrize(("root", "layer", "sent"), [(50.0, 5.0, 50.0), (1.0, 5.0, 5.0)])
def test_shards_that_version_1_sends(root, layer, sent):
    """The largest shard of the root or of a layer, not what they are gathered into."""
    assembly, found = sharded(version=1), Every()
    layers = [Wrapped(LAYER, [BLOCK._replace(sent=layer)], [0.0], 0.0, 0.0)] * 2
    flat_forward(assembly, PartMemories(assembly), found, ROOT._replace(sent=root), layers)
    assert found.sent == sent


@pytest.mark.parametrize(("replicas", "reduced"), [(1, 0), (2, 2)])
def test_reductions_between_replicas(replicas, reduced):
    """A row each for root and layers, where there are several."""
    found = estimate(job("fsdp2", dp=4, replicas=replicas, fsdp={})).collectives
    assert sum("replicas" in row.name for row in found) == reduced


def test_without_a_moment_nothing_is_held():
    found = Moments(0.0).found
    assert (found.added_bytes, found.most_bytes, found.gathers_bytes) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("away", "left"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_states_that_the_device_keeps(away, left):
    """Of 590,464 parameters on two ranks that the optimizer's states are sharded over, less those whose states the host has."""
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1e12, "core_bytes_per_s": 1e12}
    on = Machine(**machine(host_bytes_per_s=1e12).model_dump(exclude={"host"}), host=host)
    performance = {"cpu_offload": {"optimizer": away}} if away else {}
    [states] = stage_states(Assembly(job(on=on, dp=2, zero_level=1, performance=performance)))
    assert states.owned == left * 590_464 / 2
