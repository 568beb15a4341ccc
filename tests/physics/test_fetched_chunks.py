"""Chunks that a schedule fetches ahead: three of four at a time, and what it takes to copy them out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers, ParamGroup, groups
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.pipeline_chunks import Gradients, Passing, ShardedChunk, chunk_bytes, in_buffer
from steptime.fsdp.pipeline_memory import (
    Outstanding,
    Situation,
    fetches_ahead,
    gathered_bytes,
    situations,
    stage_chunks,
    stage_steps,
)
from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak
from steptime.memory.part_memories import PartMemories
from steptime.schedule import order
from steptime.schedule.actions import Action
from steptime.schedule.sharded import sharded_steps

ACTIONS = (*(Action("F", 0, chunk) for chunk in range(4)), *(Action("B", 0, chunk) for chunk in (3, 2, 1, 0)))
FETCHED = [(0, 1, 2), (3,), (), (), (), (0,), (), ()]
HELD = [{0, 1, 2}, *[{1, 2, 3}] * 4, {0, 1, 2}, {0, 1}, {0}]


def test_the_next_three_chunks_are_there():
    """F0 F1 F2 F3 B3 B2 B1 B0: F1 drops chunk 0 and fetches 3; the next three of F2, F3 and B3 are 1, 2 and 3 in some order; B2
    drops 3 and fetches 0; then they go one by one (torch 2.13 distributed/pipelining/schedules.py, _add_unshard_reshard).
    """
    steps = sharded_steps(ACTIONS, ahead=True, reshard=False)
    assert [step.fetched for step in steps] == FETCHED
    assert [step.gathered_layers for step in steps] == [step.gathered_roots for step in steps] == HELD
    assert not any(step.gathers or step.roots for step in steps)
    assert [step.reduces for step in steps] == [False] * 4 + [True] * 4


def test_a_chunk_fetched_for_its_own_action():
    """The first action's; the others were requested before theirs."""
    found = [one.passing for one in situations(sharded_steps(ACTIONS, ahead=True, reshard=False), 4)]
    assert [one.fetched for one in found] == [True] + [False] * 7
    assert all(one.gathered and not one.roots for one in found)


def test_the_first_stage_makes_no_gradient_of_its_input():
    """Its backward runs whole in place of the gradients of weights (stage.py, backward_one_chunk); other stages split theirs."""
    said = {"reshard_after_forward": False}
    assembly = Assembly(job("fsdp2", dp=2, pp=2, schedule="zero_bubble", microbatches=2, fsdp=said))
    orders = order("zero_bubble", 2, 1, 2)
    kinds = [[step.action.kind for step in stage_steps(assembly, stage, orders[stage])] for stage in (0, 1)]
    assert kinds == [["F", "F", "B", "B"], ["F", "I", "F", "I", "W", "W"]]
    assert [step.gathers for step in stage_steps(assembly, 0, orders[0])] == [False] * 4  # fetched ahead


def test_what_hooks_gather_stays_till_it_is_freed():
    """Without fetches each chunk's first action gathers both. Layers freed after a forward are gathered again, roots are not."""
    steps = sharded_steps(ACTIONS, ahead=False, reshard=True)
    assert [step.fetched for step in steps] == [()] * 8
    assert [step.gathers for step in steps] == [True] * 8
    assert [step.roots for step in steps] == [True] * 4 + [False] * 4
    assert [step.gathered_layers for step in steps] == [set()] * 5 + [{3}, {3, 2}, {3, 2, 1}]
    assert not any(one.passing.gathered for one in situations(steps, 4))  # backwards too, whose roots are there


def a_chunk(flat: float = 5_000.0) -> ShardedChunk:
    """Two layers between a chunk's ends; the root's flat buffer has `flat` bytes."""
    block = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=0.0, sums=0.0)
    root = Buffers(0.0, flat, 3e6, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=0.0, sums=0.0)
    assembly = Assembly(job("fsdp2", dp=2, pp=2, fsdp={"reduce_dtype": "bf16"}))
    memories = PartMemories(assembly, weight_grads_stay=True)
    return replace(
        chunk_bytes(assembly, assembly.stages[0][0], memories, memories, split=False),
        root=root,
        last_of_root=200.0,
        layers=[Wrapped(LAYER, [block], [0.0], 0.0, 70.0)] * 2,
        added=[LAYER._replace(forward=NO_BYTES, backward=NO_BYTES)] * 2,
        embedding=PartMemory(16.0, NO_BYTES, NO_BYTES),
        head=PartMemory(0.0, NO_BYTES, NO_BYTES),
        output=5_000.0,
        x=512.0,
    )


@pytest.mark.parametrize(
    ("kind", "saved", "summed", "largest"),
    [
        ("F", 0.0, False, 10_000.0),
        ("B", 7_016.0, True, 10_000.0),  # ids, two layers of 1,000 and the output 5,000
        ("F", 0.0, False, 100_000.0),
    ],
)
def test_copying_out_what_was_fetched(kind, saved, summed, largest):
    """Beside the root's parameters, 3,000,000, those of both layers, 60,000, and sums of gradients, 50,000 and 2 * 3,000, the
    largest flat buffer, a layer's or the root's, is there till its copies are made.
    """
    passing = Passing(kind, fetched=True, gathered=True, roots=False, gradients=Gradients(summed=summed))
    worst = a_chunk(5_000.0 if largest < 1e5 else largest).worst(passing)
    sums = 56_000 if summed else 0
    assert worst[:4] == (saved, 3e6 + 60_000 + sums + largest, "copies of gathered parameters", 0.0)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_that_gathers_its_layers(reshard):
    """Both keep 10,000 of the flat buffer before them, the first the root's 5,000; each has its own, its parameters of 30,000 and
    the input 512. Layers that are not freed, 30,000, lie beside the second, and at the end beside the output.
    """
    chunk, found = a_chunk(), Every()
    options = chunk.assembly.job.replace(**{"parallelism.fsdp.reshard_after_forward": reshard})
    chunk = replace(chunk, assembly=Assembly(options))
    passing = Passing("F", fetched=False, gathered=False, roots=True, gradients=Gradients(summed=True))
    chunk.forward(passing, found)
    beside, kept = 3e6 + 56_000, 0 if reshard else 30_000
    assert found.of("forward of an all-gather") == [
        (16.0, beside + 5_000 + 10_000 + 30_000 + 512),
        (1_016.0, beside + 10_000 + 10_000 + 30_000 + kept + 512),
    ]
    held = beside + 30_000 + 10_000 + 700
    assert found.of("forward of mlp") == [(1_016.0, held), (2_016.0, held + kept)]
    assert found.of("forward of the output") == [(2_016.0, beside + 10_000 + 2 * kept + 5_000)]
    assert chunk.worst(passing) == found.worst


@pytest.mark.parametrize(("roots", "flat"), [(True, 5_000), (False, 0)])
def test_a_root_that_stays_has_no_flat_buffer(roots, flat):
    """The first micro-batch gathers it; its buffer is there until the first layer's has been copied out."""
    chunk, found = a_chunk(), Every()
    chunk.forward(Passing("F", fetched=False, gathered=False, roots=roots, gradients=Gradients()), found)
    assert found.of("forward of the input") == [(0.0, 3e6 + flat)]
    assert found.of("forward of an all-gather")[0] == (16.0, 3e6 + flat + 10_000 + 30_000 + 512)


def test_groups_are_reduced_root_first(monkeypatch):
    """Gradients 50,000 and 2 * 3,000. The root's input of 60,000 beside all of them and the layers' parameters; then its shard,
    4,000, takes its gradients' place, whose last one is still there, 200. A layer's parameters go before its input of 6,000 is
    made; its shard has 400.
    """
    found = Every()
    monkeypatch.setattr("steptime.fsdp.pipeline_chunks.Moments", lambda _: found)
    a_chunk().reduction(Gradients(summed=True))
    assert found.of("reduction of gradients") == [
        (0.0, 60_000 + 56_000 + 60_000),
        (0.0, 60_000 + 6_000 + 4_000 + 60_000 + 200),
        (0.0, 30_000 + 6_000 + 4_000 + 6_000),
        (0.0, 30_000 + 3_000 + 4_400 + 6_000 + 70),
        (0.0, 3_000 + 4_400 + 6_000),
        (0.0, 4_800 + 6_000 + 70),
    ]


@pytest.mark.parametrize(
    ("layers", "roots", "bytes_"), [({1}, {1}, 3_060_000), ({1}, {0}, 60_000), ({0}, {1}, 3e6), (set(), set(), 0)]
)
def test_parameters_of_a_chunk_beside_another(layers, roots, bytes_):
    """Layers' and the root's, each where they are gathered."""
    nothing = Outstanding((0, 0), (0, 0), (True, True))
    passing = Passing("F", fetched=False, gathered=True, roots=False, gradients=Gradients())
    one = Situation(0, passing, (Gradients(),) * 2, frozenset(layers), frozenset(roots), False, nothing, nothing)
    assert gathered_bytes(a_chunk(), one, 1) == bytes_


@pytest.mark.parametrize(
    ("schedule", "vpp", "ahead"),
    [("1f1b", 1, False), ("gpipe", 1, False), ("gpipe", 2, True), ("interleaved", 2, True), ("zero_bubble", 1, True)],
)
def test_schedules_that_fetch_ahead(schedule, vpp, ahead):
    """Those of one chunk a stage but the zero-bubble ones leave it to FSDP's hooks (torch 2.13, schedules.py)."""
    plan = job(
        "fsdp2",
        dp=2,
        pp=2,
        vpp=vpp,
        schedule=schedule,
        microbatches=4,
        model={"n_layers": 4},
        fsdp={"reshard_after_forward": False},
    )
    assert fetches_ahead(plan) is ahead


def test_layers_of_one_group_have_none_of_their_own():
    """Wrapped whole, the stage's parameters are the root's: 2 layers of 164,096 and the embedding's 131,072."""
    assembly = Assembly(job("fsdp2", model={"n_layers": 4}, dp=2, pp=2, fsdp={"wrap": "model"}))
    found = groups(assembly, assembly.stages[0][0])
    assert found.layers == [ParamGroup(0, 0, 2, 0)] * 2
    assert found.root.elements == 2 * 164_096 + 131_072


def test_a_layer_whose_input_lies_in_the_pipelines_buffer():
    """Its 4 B are no part of forward; backward and what is saved had counted 3 of them."""
    found = in_buffer(PartMemory(10.0, Peak(20.0, "a"), Peak(30.0, "b")), 4.0, 3.0)
    assert found == PartMemory(7.0, Peak(16.0, "a"), Peak(27.0, "b"))


@pytest.mark.parametrize(
    ("schedule", "vpp", "keeps"), [("1f1b", 1, True), ("gpipe", 1, False), ("interleaved", 2, False)]
)
def test_one_f_one_b_keeps_the_gradient_that_it_sent(schedule, vpp, keeps):
    """Schedule1F1B._step_microbatches holds the operations of a send until the next one (torch 2.13, schedules.py). Where
    gradients of weights are added to existing ones, a backward does not hold them to its end.
    """
    layout = {"model": {"n_layers": 4}, "dp": 2, "pp": 2, "vpp": vpp, "schedule": schedule, "microbatches": 4}
    assembly = Assembly(job("fsdp2", fsdp={}, **layout))
    first = stage_chunks(assembly)[0][0]
    [kind] = assembly.kinds
    stay, added = (PartMemories(assembly, weight_grads_stay=said).plain[kind] for said in (True, False))
    assert first.keeps_sent is keeps
    assert (first.layers[0].memory, first.added[0]) == (stay, added)
    assert stay.backward.bytes > added.backward.bytes


@pytest.mark.parametrize(("summed", "kept"), [(False, 0.0), (True, 512.0)])
def test_a_later_backward_runs_beside_the_gradient_sent_before(summed, kept):
    """The last stage's chunk sends its input's gradient, 512 B, up: from the second micro-batch on one is there throughout."""
    chunk = a_chunk()
    last = replace(chunk, chunk=chunk.assembly.stages[1][0])
    passing = Passing("B", fetched=False, gathered=True, roots=False, gradients=Gradients(summed=summed))
    found = []
    for keeps in (False, True):
        moments = Every()
        replace(last, keeps_sent=keeps).backward(passing, moments)
        found.append(moments.of("backward of " if summed else "backward of mlp"))
        assert replace(last, keeps_sent=keeps).sent_before(passing) == (kept if keeps else 0.0)
    assert found[0]
    assert found[1] == [(saved, transient + kept) for saved, transient in found[0]]


def a_whole_chunk(dtype: str) -> ShardedChunk:
    """The same with ends that keep 16 and 40 B, need 25 and 75 in forward, 30 and 90 in backward; gradients of 900."""
    chunk = a_chunk()
    plan = chunk.assembly.job.replace(**{"parallelism.fsdp": {"reduce_dtype": dtype, "reshard_after_forward": False}})
    return replace(
        chunk,
        assembly=Assembly(plan),
        embedding=PartMemory(16.0, Peak(25.0, "e"), Peak(30.0, "e")),
        head=PartMemory(40.0, Peak(75.0, "h"), Peak(90.0, "h")),
        head_grad=900.0,
        added=[PartMemory(1_000.0, Peak(1_700.0, "mlp"), Peak(1_300.0, "mlp"))] * 2,
    )


def test_a_forward_whose_layers_are_there():
    """Beside the root's parameters and both layers', 60,000: nothing is gathered. The output, 5,000, is there with the head."""
    chunk, found = a_whole_chunk("bf16"), Every()
    chunk.forward(Passing("F", fetched=False, gathered=True, roots=False, gradients=Gradients()), found)
    assert [(saved, held - 3e6) for saved, held, *_ in found.all] == [
        (0.0, 25.0),
        (1_016.0, 60_000 + 700),
        (2_016.0, 60_000 + 700),
        (2_056.0, 60_000 + 75 - 40 + 5_000),
    ]


@pytest.mark.parametrize(
    ("dtype", "summed", "before", "layer", "sums"),
    [
        # the first micro-batch's: a sum of 2 * 3,000 B for each layer done, with its last gradient's 70 and the input's 512
        ("fp32", False, 0, 900, 6_000),
        # of later ones, which are added whole: 2 * (50,000 + 2 * 3,000) are there
        ("fp32", True, 112_000, 900, 0),
        # added where they are made: layers need 1,300
        ("bf16", True, 56_000, 300, 0),
        ("bf16", False, 0, 900, 3_000),
    ],
)
def test_a_backward_whose_layers_are_there(dtype, summed, before, layer, sums):
    """Output, root and layers, 5,000 and 3,060,000; the head, 90 - 40; then its gradients, 900, stay. The gradient of the last
    layer's output lies in the pipeline's buffer, 512 B. The embedding last, 30 - 16; in fp32 the root's sums, 2 * 50,000 with the
    last of its gradients, 200.
    """
    chunk, found = a_whole_chunk(dtype), Every()
    chunk.backward(Passing("B", fetched=False, gathered=True, roots=False, gradients=Gradients(summed=summed)), found)
    held = 5_000 + 3_060_000 + before
    assert found.of("backward of h") == [(2_056.0, held + 90 - 40)]
    held += 900
    assert found.of("backward of mlp") == [(2_016.0, held + layer - 512), (1_016.0, held + sums + layer)]
    last = 70 if dtype == "fp32" else 0
    made = [] if summed else [(1_016.0, held + sums + last + 512), (16.0, held + 2 * sums + last + 512)]
    root = [(0.0, held - 900 + 2 * sums + 100_000 + 200)] if dtype == "fp32" and not summed else []
    assert found.of("backward of a sum of gradients") == [*made, *root]
    assert found.of("backward of e") == [(16.0, held + 2 * sums + 30 - 16)]


def prefetching(chunk: ShardedChunk) -> ShardedChunk:
    """The same with the next two groups gathered ahead."""
    said = {"reduce_dtype": "bf16", "reshard_after_forward": True, "prefetch": 2}
    return replace(chunk, assembly=Assembly(chunk.assembly.job.replace(**{"parallelism.fsdp": said})))


def test_a_forward_that_prefetches_two_layers():
    """Flat buffers: the root's 5,000, and both layers' 20,000 from the start. Then a layer's own 10,000 with what is ahead of it:
    10,000 of the second beside the first's kernels, none beside the second's.
    """
    chunk, found = prefetching(a_whole_chunk("bf16")), Every()
    chunk.forward(Passing("F", fetched=False, gathered=False, roots=True, gradients=Gradients()), found)
    assert [(saved, held - 3e6) for saved, held, *_ in found.all] == [
        (0.0, 5_000 + 20_000 + 25),
        (16.0, 5_000 + 20_000 + 30_000 + 512),
        (1_016.0, 30_000 + 700 + 20_000),
        (1_016.0, 10_000 + 10_000 + 30_000 + 512),
        (2_016.0, 30_000 + 700 + 10_000),
        (2_056.0, 10_000 + 75 - 40 + 5_000),
    ]


def test_a_backward_that_prefetches_two_layers():
    """Output and root, 3,005,000, and the head's gradients, 900. The last layer's parameters, 30,000, come out of a flat buffer
    of 10,000, with the other layer's 10,000 beside it; its input's 512 lie in the pipeline's buffer. Parameters stay.
    """
    chunk, found = prefetching(a_whole_chunk("bf16")), Every()
    chunk.backward(Passing("B", fetched=False, gathered=False, roots=False, gradients=Gradients()), found)
    held = 3_005_000 + 900
    assert found.of("backward of an all-gather") == [
        (2_016.0, held + 30_000 + 10_000 + 10_000),
        (1_016.0, held + 60_000 + 10_000 + 512 + 3_000),
    ]
    assert found.of("backward of mlp") == [
        (2_016.0, held + 30_000 + 10_000 + 900 - 512),
        (1_016.0, held + 60_000 + 900 + 3_000),
    ]


@pytest.mark.parametrize(
    ("dtype", "summed", "before", "added"),
    [
        ("bf16", False, 0, (900 + 3_000, 900 + 6_000)),
        ("bf16", True, 56_000, (0, 0)),  # added to the sums where they are made
        ("fp32", True, 112_000, (900 + 3_000, 900 + 6_000)),
    ],
)
def test_gradients_of_weights_come_layer_by_layer(monkeypatch, dtype, summed, before, added):
    """The first half left 7,000 B, of which the last layer's 200 go after it; the head's gradients, 900, are there at once."""
    found = Every()
    monkeypatch.setattr("steptime.fsdp.pipeline_chunks.Moments", lambda _: found)
    chunk = replace(a_whole_chunk(dtype), half=(7_000.0, 9_000.0), waits=[100.0, 200.0])
    chunk.worst(Passing("W", fetched=False, gathered=True, roots=False, gradients=Gradients(summed=summed)))
    held = 3_060_000 + before
    assert found.of("gradients of the weights") == [(7_000.0, held + added[0]), (6_800.0, held + added[1])]


def test_a_first_layer_reads_the_pipelines_buffer():
    """Of two equal layers on the last stage the first keeps 8 * 128 values in bf16 less; a chunk of a head alone has no layer."""
    assembly = Assembly(job("fsdp2", dp=2, pp=2, model={"n_layers": 4}, fsdp={"reduce_dtype": "bf16"}))
    memories, [chunk] = PartMemories(assembly), assembly.stages[1]
    first, second = (of.memory for of in chunk_bytes(assembly, chunk, memories, memories, split=False).layers)
    assert [second.saved - first.saved, second.forward.bytes - first.forward.bytes] == [2_048, 2_048]
    assert second.backward.bytes - first.backward.bytes == 2_048
    bare = chunk._replace(runs=())
    assert chunk_bytes(assembly, bare, memories, memories, split=False).layers == []


def test_halves_of_a_chunk():
    """What the first half of a split backward leaves, and its peak, of the chunk; what it leaves of each of its two layers."""
    assembly = Assembly(job("fsdp2", dp=2, pp=2, model={"n_layers": 4}, fsdp={"reduce_dtype": "bf16"}))
    memories, [chunk] = PartMemories(assembly), assembly.stages[1]
    whole, parts = (chunk_bytes(assembly, chunk, memories, memories, split=split) for split in (False, True))
    halves, [layer] = memories.split(chunk), assembly.kinds
    assert (whole.half, whole.waits) == ((0.0, 0.0), [])
    assert (parts.half, parts.waits) == ((halves.kept, halves.inputs.bytes), [memories.split_part(layer).kept] * 2)
    assert halves.inputs.bytes > halves.kept > 2 * memories.split_part(layer).kept > 0.0


@pytest.mark.parametrize(("stage", "received"), [(0, 512), (1, 0)])
def test_the_gradient_of_the_last_layers_output(stage, received):
    """Received from the next stage it lies in the pipeline's buffer; below a head the layer's backward has it."""
    chunk, found = a_whole_chunk("bf16"), Every()
    chunk = replace(chunk, chunk=chunk.assembly.stages[stage][0])
    chunk.backward(Passing("B", fetched=False, gathered=True, roots=False, gradients=Gradients()), found)
    assert found.of("backward of mlp")[0] == (2_016.0, 5_000 + 3_060_000 + 900 + 900 - received)
