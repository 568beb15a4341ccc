"""FSDP2 under a pipeline, on links of 1 B/s in a node: how often parameters are gathered, gradients reduced, and what shows.

A layer has 164,096 elements, the embedding 131,072, head and final norm 131,200 (`physics_jobs`); two stages of two layers on two
shards each. A gather of bf16 to two ranks takes 1 s an element, a reduce-scatter of fp32 2 s.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.memory_over_time import stage_holds
from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError
from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.pipeline_chunks import Gradients, chunk_bytes
from steptime.fsdp.pipeline_memory import situations
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.schedule.actions import Action
from steptime.schedule.graph import graph
from steptime.schedule.sharded import Around, sharded_run, sharded_steps
from steptime.timing.timeline import Timeline

LAYER, EMBEDDING, HEAD = 164_096, 131_072, 131_200
STAGE_0, STAGE_1 = 2 * LAYER + EMBEDDING, 2 * LAYER + HEAD


def answer(
    *, overlap: bool = False, microbatches: int = 4, layers: int = 4, schedule: str = "1f1b", vpp: int = 1, **fsdp
) -> Estimate:
    layout = {"dp": 2, "pp": 2, "vpp": vpp, "schedule": schedule}
    layout["fsdp"] = {"reduce_dtype": "fp32", "reshard_after_forward": False} | fsdp
    performance = {"overlap": {"dp": overlap}}
    on = machine(link=1.0, outside=1e30, node=2)
    made = job("fsdp2", on=on, microbatches=microbatches, model={"n_layers": layers}, performance=performance, **layout)
    return estimate(made)


def seconds(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY)


@pytest.mark.parametrize("microbatches", [1, 4, 64])
def test_a_step_gathers_and_reduces_once(microbatches):
    """Compute is free. Stage 1 gathers once stage 0's first output has come; both reduce when all is done, stage 1, which has 128
    elements more, the longer. The number of micro-batches is of no matter.
    """
    shown = answer(microbatches=microbatches).time.parts_s["dp_comm"]
    assert shown == seconds(STAGE_0 + STAGE_1 + 2 * STAGE_1)


def test_what_shows_is_what_the_pipeline_takes_longer():
    """One micro-batch whose compute takes long: stage 0 gathers, stage 1 gathers once it has the output; stage 1 reduces beside
    stage 0's backward, so of the reductions stage 0's shows.
    """
    slow = machine(link=1.0, outside=1e30, node=2, flops=1e3)
    layout = {"dp": 2, "pp": 2, "fsdp": {"reduce_dtype": "fp32", "reshard_after_forward": False}}
    made = job("fsdp2", on=slow, model={"n_layers": 4}, performance={"overlap": {"dp": False}}, **layout)
    shown = estimate(made).time.parts_s["dp_comm"]
    assert shown == seconds(STAGE_0 + STAGE_1 + 2 * STAGE_0)


def test_forwards_free_layers_and_backwards_keep_them():
    """Two micro-batches. Stage 0 runs F0 F1 B0 B1: both forwards gather, and B0, which leaves the layers for B1. Stage 1 runs
    F0 B0 F1 B1: F0 gathers, B0 gathers what F0 freed and leaves it for F1, and B1 gathers what F1 freed. Two layers, three times.
    """
    rows = {row.name: row for row in answer(microbatches=2, reshard_after_forward=True).collectives}
    assert rows["block parameters"].count_per_step == 2 * 3
    assert rows["block gradients"].count_per_step == 2
    assert rows["root parameters"].count_per_step == 1


def test_gathers_of_several_chunks_come_ahead():
    """Two chunks of a layer on each stage, all gathered from the step's start, the first one first. Stage 1's second chunk, with
    the head, waits for its own 2 L + head. Reductions: each stage's second chunk at once after its last backward, then stage 0's
    first chunk and stage 1's, the last in the order of backwards being stage 0's: it follows what both second chunks' took.
    """
    found = answer(schedule="interleaved", vpp=2, overlap=True)
    rows = {row.name: row.count_per_step for row in found.collectives if row.axis == "dp"}
    assert rows["block parameters"] == rows["block gradients"] == 2
    shown, least = found.time.parts_s["dp_comm"], 2 * LAYER + HEAD + 2 * (LAYER + HEAD)
    assert least * (1 - SLIGHTLY) <= shown <= (least + 2 * LAYER + 2 * (LAYER + EMBEDDING)) * (1 + SLIGHTLY)
    one_by_one = answer(schedule="interleaved", vpp=2, overlap=False).time.parts_s["dp_comm"]
    assert one_by_one >= shown * (1 - SLIGHTLY)


def test_another_chunks_parameters_and_gradients_wait_too():
    """Two chunks of a layer on each stage: beside one chunk's backward lie 2 + 4 bytes an element of both."""
    for stage, elements in zip(
        answer(schedule="interleaved", vpp=2, microbatches=64).memory.stages, (STAGE_0, STAGE_1), strict=True
    ):
        small = 64 * 8 * 128 * 2 * 4
        assert 6 * elements <= stage.transient_bytes <= 6 * elements + 2 * 2 * LAYER + small


def test_gradients_wait_unsharded():
    """64 micro-batches: beside the second backward lie all gathered parameters of the stage in bf16, 2 bytes an element, and all
    gradients in fp32, 4 bytes; sharded gradients come with the reduction.
    """
    found = answer(microbatches=64)
    for stage, elements in zip(found.memory.stages, (STAGE_0, STAGE_1), strict=True):
        assert stage.gradients_bytes == 0
        small = 64 * 8 * 128 * 2 * 4  # what is received, at most twice
        assert 6 * elements <= stage.transient_bytes <= 6 * elements + 2 * 2 * LAYER + small
    bf16 = answer(microbatches=64, reduce_dtype="bf16").memory.stages[0].transient_bytes
    assert 2 * STAGE_0 <= found.memory.stages[0].transient_bytes - bf16 <= 2 * STAGE_0 + 2 * LAYER


def test_a_reduced_chunk_holds_no_unsharded_gradients():
    """F0 F0 F1 F1 B1 B1 B0 B0: each chunk's second backward finds the first one's gradients, and reduces; then chunk 1 has none.

    Micro-batches that wait for backward in each action, its own aside: of chunk 0 0, 1, 2, 2, 2, 2, 1, 0.
    """
    actions = tuple(Action(kind, m, chunk) for kind, chunk in (("F", 0), ("F", 1), ("B", 1), ("B", 0)) for m in (0, 1))
    found = list(situations(sharded_steps(actions, ahead=True, reshard=False), 2))
    none, summed = Gradients(), Gradients(summed=True)
    nothing, of_1, of_0 = (none, none), (none, summed), (summed, none)
    assert [one.gradients for one in found] == [*[nothing] * 5, of_1, nothing, of_0]
    assert [one.reduces for one in found] == [False] * 5 + [True, False, True]
    assert [one.during.whole for one in found] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 1), (2, 0), (1, 0), (0, 0)]
    assert [one.after.unreduced for one in found] == [(True, True)] * 5 + [(True, False)] * 2 + [(False, False)]


def test_memory_over_time_reaches_the_peak_and_ends_with_the_gradients():
    """Action by action, the largest is the table's; at the end the sharded gradients of fp32 are there, half of 4 bytes each."""
    for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
        found = answer(schedule=schedule, vpp=vpp)
        actions = Timeline(found.timing).actions
        for holds, row, spans in zip(
            stage_holds(found.assembly, found.timing.states), found.memory.stages, actions, strict=True
        ):
            held = list(holds.actions([span.action for span in spans]))
            worst = max(of.activations_bytes + of.transient_bytes + of.gradients_bytes for of in held)
            assert len(held) == len(spans)
            stated = row.activations_bytes + row.transient_bytes + row.gradients_bytes
            assert worst <= stated * (1 + 1e-9)
            assert held[-1].kept_bytes == pytest.approx(0.0, abs=1.0)
            assert held[-1].gradients_kept_bytes == 4 * (STAGE_0 if holds.stage == 0 else STAGE_1) / 2 or vpp == 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"schedule": "zbv", "vpp": 2, "reshard_after_forward": True}, "not modeled yet with schedule zbv; use false"),
    ],
)
def test_what_is_left_out(said, message):
    with pytest.raises(ConfigError, match=message):
        answer(**said)


NO_TIME = PartTime(Work(), Work(), Work())


def pipeline_seconds(*, memory: float = 1e30, overlap: bool = False, reduced: str = "fp32") -> PipelineSeconds:
    """Of two stages without any compute, for one micro-batch a step."""
    on = machine(memory=memory, link=1.0, node=2)
    layout = {"dp": 2, "pp": 2, "fsdp": {"reduce_dtype": reduced, "reshard_after_forward": False}}
    made = job("fsdp2", on=on, model={"n_layers": 4}, performance={"overlap": {"dp": overlap}}, **layout)
    assembly = Assembly(made)
    tiers = tuple(on.tiers)
    parts = dict.fromkeys((assembly.embedding, *assembly.kinds, assembly.head), NO_TIME)
    priced = rates(on.accelerator, made.software)
    return PipelineSeconds(assembly, tiers, parts, [{}, {}], priced)


def chunk_seconds(*, memory: float = 1e30, overlap: bool) -> list[ChunkSeconds]:
    """Of both stages."""
    return [chunks[0] for chunks in pipeline_seconds(memory=memory, overlap=overlap).chunks]


def test_forwards_gather_and_backwards_reduce():
    """The forward gathers root and two layers, 1 s an element; the backward, reduces in fp32, 2 s each."""
    forward, backward = pipeline_seconds().passes(0)
    assert (forward.calls, forward.network_s) == (3.0, seconds(STAGE_0))
    assert (backward.calls, backward.network_s) == (3.0, seconds(2 * STAGE_0))


def test_a_forward_gathers_the_root_and_copies_it_out():
    """A gather takes 1 s an element; its copy out of the flat buffer, which reads and writes 2 bytes, 4 s: with the root all of
    the stage's elements, where the root is there those of its two layers. Where copies take no time nothing hides a gather.
    """
    for of, elements in zip(chunk_seconds(memory=1.0, overlap=False), (STAGE_0, STAGE_1), strict=True):
        assert of.gather_s == seconds(elements)
        assert of.copies_s == pytest.approx(4 * elements)
        assert of.forward_s == pytest.approx(of.gather_s + 4 * elements, abs=0.01)
        assert of.forward_layers_s == seconds(5 * 2 * LAYER)
    for of in chunk_seconds(overlap=True):
        assert of.forward_s == pytest.approx(of.gather_s, abs=0.01)
        assert of.forward_layers_s == seconds(2 * LAYER)


@pytest.mark.parametrize("replayed_s", [0.0, 20_000.0])
def test_a_backward_hides_the_gather_of_the_layer_before(replayed_s):
    """Of two layers, gathered in 164,096 s each, the last one's gather shows; the first one's runs beside the last layer's
    backward of 100,000 s and what it recomputes. A node has one rank: 2 % of what hides comes back as slower compute.
    """
    on = machine(link=1e30, outside=1.0, node=1)
    layout = {"dp": 2, "pp": 2, "fsdp": {"reduce_dtype": "fp32"}}
    made = job("fsdp2", on=on, model={"n_layers": 4}, performance={"overlap": {"dp": True}}, **layout)
    assembly = Assembly(made)
    [layer] = assembly.kinds
    parts = dict.fromkeys((assembly.embedding, layer, assembly.head), NO_TIME)
    parts[layer] = PartTime(Work(), Work(gemm_s=100_000.0), Work())
    priced, replays = rates(on.accelerator, made.software), [{layer: replayed_s}] * 2
    found = PipelineSeconds(assembly, tuple(on.tiers), parts, replays, priced)
    hidden = 100_000 + replayed_s
    for [of] in found.chunks:
        assert of.backward_s == seconds(2 * LAYER - 0.98 * hidden)


def test_a_middle_stage_has_no_root():
    """Of three stages the second has neither embedding nor head: its forward gathers two layers, 1 s an element, no more."""
    layout = {"dp": 2, "pp": 3, "fsdp": {"reduce_dtype": "fp32", "reshard_after_forward": False}}
    assembly = Assembly(job("fsdp2", on=machine(link=1.0, node=2), model={"n_layers": 6}, **layout))
    parts = dict.fromkeys((assembly.embedding, *assembly.kinds, assembly.head), NO_TIME)
    on = assembly.job.machine
    found = PipelineSeconds(assembly, tuple(on.tiers), parts, [{}] * 3, rates(on.accelerator, assembly.job.software))
    assert found.chunks[1][0].gather_s == seconds(2 * LAYER)
    assert found.prices[1][0].every[0].gather_s == 0.0


def test_gradients_added_up_in_fp32():
    """At 1 B/s: the first micro-batch reads 2 B of bf16 and writes 4 B an element; a later one reads 4 B more, the sum so far."""
    seconds_of = pipeline_seconds(memory=1.0)
    of = seconds_of.chunks[0][0]
    assert (of.first_sum_s, of.sum_s) == (pytest.approx(6 * STAGE_0), pytest.approx(10 * STAGE_0))


def test_groups_are_reduced_one_after_another():
    """In bf16 at 1 B/s: an element's gradient is read and written into a flat buffer, 2 + 2 s, and half of 2 bytes sent, 1 s. A
    group is copied once the reduction before it is done (_fsdp_param_group.py, post_backward: reduce_scatter_state's event).
    """
    found = pipeline_seconds(memory=1.0, reduced="bf16")
    assert [chunks[0].reduce_s for chunks in found.chunks] == [seconds(5 * STAGE_0), seconds(5 * STAGE_1)]


@pytest.mark.parametrize("together", [1, 2])
def test_layers_checkpointed_together_are_all_gathered_and_summed(together):
    """Two layers a stage are 2 x 164,096 elements: 656,384 bytes in bf16, whether recomputed one at a time or both at once.

    Where gradients add up in fp32 they are twice that, beside the embedding's 524,288.
    """
    recompute = {"granularity": "full", "method": "uniform", "n_layers": together}
    layout = {"dp": 2, "pp": 2, "fsdp": {"reduce_dtype": "fp32", "reshard_after_forward": False}}
    assembly = Assembly(
        job("fsdp2", microbatches=4, model={"n_layers": 4}, performance={"recompute": recompute}, **layout)
    )
    memories = [PartMemories(assembly, weight_grads_stay=True), PartMemories(assembly)]
    found = chunk_bytes(assembly, assembly.stages[0][0], *memories, split=False)
    assert found.parameters == 2 * LAYER * 2
    assert found.gradient_bytes(Gradients(summed=True, fresh=False)) == 4 * (2 * LAYER + EMBEDDING)


def test_what_one_rank_copies_is_no_communication():
    """A shard of one rank sends nothing, but casts its gradients: bytes over memory's rate, under memory-bound kernels."""
    layout = {"dp": 1, "pp": 2, "fsdp": {"reduce_dtype": "fp32", "reshard_after_forward": False}}
    found = estimate(job("fsdp2", on=machine(memory=1e9), model={"n_layers": 4}, **layout))
    assert found.time.parts_s.get("dp_comm", 0.0) == 0.0
    assert not [row for row in found.collectives if row.axis == "dp"]
    assert sum(found.time.parts_s.values()) == pytest.approx(found.step_s)


def test_a_gather_starts_when_its_stage_is_free_and_the_link_too():
    """One stage, one micro-batch; forward 3 s, backward 4 s. Gathered for the forward: 5 s, then 1 s on the same link: chunk 0
    is there at 5 s and the forward ends at 8 s. For the backward: the link is free at 6 s, the stage at 8 s; 2 s later, at 10 s,
    the backward starts and ends at 14 s, then 7 s of reduction.
    """
    found = graph("1f1b", 1, 1, 1)
    around = {
        Action("F", 0, 0): Around(0.0, ((0, 5.0), (1, 1.0)), 0.0),
        Action("B", 0, 0): Around(0.0, ((0, 2.0),), 7.0),
    }
    assert sharded_run(found, [3.0, 4.0], [0.0], lambda *_: around, 0.0) == [0.0, 8.0, 21.0]


def test_a_chunks_input_lies_in_the_pipelines_buffer():
    """8 tokens of 128 values in bf16: the second stage's first layer saves 2,048 bytes less than its next; not the first's."""
    assembly = Assembly(job("fsdp2", microbatches=4, model={"n_layers": 4}, dp=2, pp=2, fsdp={"reduce_dtype": "fp32"}))
    memories = PartMemories(assembly, weight_grads_stay=True)
    found = [chunk_bytes(assembly, chunk, memories, memories, split=False).layers for (chunk,) in assembly.stages]
    assert [last.memory.saved - first.memory.saved for first, last in found] == [0.0, 2_048.0]


def test_free_links_and_memory_add_nothing():
    """But microseconds before each collective's first hop, under a pipeline as without one."""
    for pp in (1, 2):
        layout = {"dp": 2, "pp": pp, "fsdp": {"reduce_dtype": "fp32", "reshard_after_forward": False}}
        timing = estimate(job("fsdp2", on=machine(), microbatches=4, model={"n_layers": 4}, **layout)).timing
        assert 0.0 <= timing.fsdp_exposed_s < 2e-3
