"""Every moment of FSDP2's walk, to the byte: layers and groups of made-up sizes between a real embedding and head.

A layer saves 1,000 B and has 1,700 B at most in forward, 1,900 B in backward. Its group: gathered 10,000, unsharded 30,000,
gradients 3,000, the reduction's input 6,000, its output 400, what takes the gradients' place 700, cut copies 50.
A second group, of experts: 20,000, 40,000, 5,000, 8,000, 500, 900, 60.
The root: gathered 100,000, unsharded 300,000, gradients 50,000, input 60,000, output 4,000, reduced 7,000, cut copies 0.
Two tokens of 128: the embedding keeps ids, 2 * 8 = 16 B, and makes x, 2 * 128 * 2 = 512 B.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.ends import GatheredEnds
from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped, backward, forward
from steptime.fsdp.pipeline_chunks import Gradients, Passing, ShardedChunk, chunk_bytes
from steptime.fsdp.pipeline_memory import Outstanding, ShardedStage, Situation
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=0.0, sums=0.0)
EXPERTS = Buffers(0.0, 20_000.0, 40_000.0, 5_000.0, 8_000.0, 500.0, 900.0, 60.0, last=0.0, sums=0.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=0.0, sums=0.0)


def walked(*each: Buffers, n_layers: int = 3, ep: int = 1, dp: int = 2, **fsdp: object) -> tuple[Every, Every]:
    """Forward and backward of layers whose groups are `each`; each leaves 400 B until backward ends."""
    moe = {"moe": {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}} if ep > 1 else {}
    layout = {"dp": dp, "ep": ep, "fsdp": {"reduce_dtype": "fp32"} | fsdp}
    assembly = Assembly(job("fsdp2", model=moe, seqlen=2, microbatches=2, **layout))
    memories = PartMemories(assembly, weight_grads_stay=True)
    layers = [Wrapped(LAYER, [*each], [0.0 for _ in each], 400.0, 0.0)] * n_layers
    there, back = Every(), Every()
    forward(assembly, memories, there, ROOT, layers)
    backward(assembly, memories, back, ROOT, layers)
    return there, back


def test_forward_frees_the_layer_before():
    """The root's 300,000 stay. Embedding: the root's flat buffer and its own 16 + 512. First gather: root's flat buffer, its own
    10,000, its parameters 30,000, cut copies 50, the input 512; a later one has the 10,000 of the layer before in the root's
    place. In a layer: 30,000, its flat buffer, 1,700 - 1,000.
    """
    there, _ = walked(BLOCK)
    assert there.of("forward of embedding") == [(0.0, 300_000 + 100_000 + 16 + 512)]
    first, later = 300_000 + 100_000 + 10_000 + 30_000 + 50 + 512, 300_000 + 2 * 10_000 + 30_000 + 50 + 512
    assert there.of("forward of an all-gather") == [(16.0, first), (1_016.0, later), (2_016.0, later)]
    held = 300_000 + 30_000 + 10_000 + 700
    assert there.of("forward of mlp") == [(1_016.0, held), (2_016.0, held), (3_016.0, held)]


def test_forward_sends_the_embeddings_shard(monkeypatch):
    """Learned positions make the embedding's group, here a shard of 500 B, larger than a layer's, or the head's of 7."""
    first, last = (ROOT._replace(sent=sent) for sent in (500.0, 7.0))
    ends = GatheredEnds(first, last, 0.0, separate=True)
    monkeypatch.setattr("steptime.fsdp.memory_walk.ends_of", lambda *_: ends)
    there, _ = walked(BLOCK)
    assert there.sent == 500.0


def test_forward_keeps_layers_that_are_not_resharded():
    """As before, and 30,000 more for each layer done."""
    there, _ = walked(BLOCK, reshard_after_forward=False)
    later, held = 300_000 + 2 * 10_000 + 30_000 + 50 + 512, 300_000 + 30_000 + 10_000 + 700
    assert there.of("forward of an all-gather")[1:] == [(1_016.0, later + 30_000), (2_016.0, later + 60_000)]
    assert [moment for _, moment in there.of("forward of mlp")] == [held, held + 30_000, held + 60_000]


def test_forward_gathers_the_next_layer_where_experts_are_spread():
    """Both groups of a layer, 30,000 flat, arrive while the one before runs. The first copies out beside both flat buffers; when
    the second does, the first one's flat buffer is the one before, parameters of both are there, 70,000, cut copies 60.
    """
    there, _ = walked(BLOCK, EXPERTS, n_layers=2, ep=2)
    assert there.of("forward of embedding") == [(0.0, 300_000 + 100_000 + 30_000 + 16 + 512)]
    second = 300_000 + 10_000 + 20_000 + 70_000 + 60 + 512
    assert there.of("forward of an all-gather") == [
        (16.0, 300_000 + 100_000 + 30_000 + 30_000 + 50 + 512),
        (16.0, second),
        (1_016.0, 300_000 + 20_000 + 30_000 + 30_000 + 50 + 512),
        (1_016.0, second),
    ]
    held = 300_000 + 70_000 + 20_000 + 700
    assert there.of("forward of mlp") == [(1_016.0, held + 30_000), (2_016.0, held)]


BASE = 300_000 + 2 * 131_200
"""Beside every layer's backward: the root's parameters, and the gradients of head and norm in bf16."""


def test_backward_of_one_group_a_layer():
    """Gather: parameters 30,000, flat buffer and cut copies 10,050, the gradient that came in, 512. In a layer: 30,000, the next
    one's flat buffer 10,000 (not in the first), 1,900 - 1,000. Reduction: that flat buffer, gradients 3,000, input 6,000, 512.
    The input outlives one layer; each layer done leaves 400.
    """
    _, back = walked(BLOCK)
    gather, run, reduce = BASE + 30_000 + 10_050 + 512, BASE + 30_000 + 900, BASE + 3_000 + 6_000 + 512
    assert back.of("backward of an all-gather") == [
        (3_016.0, gather),
        (2_016.0, gather + 6_000 + 400),
        (1_016.0, gather + 6_000 + 800),
    ]
    assert back.of("backward of mlp") == [
        (3_016.0, run + 10_000),
        (2_016.0, run + 10_000 + 6_000 + 400),
        (1_016.0, run + 6_000 + 800),
    ]
    assert back.of("backward of a reduce-scatter") == [
        (2_016.0, reduce + 10_000),
        (1_016.0, reduce + 10_000 + 400),
        (16.0, reduce + 800),
    ]


def test_backward_of_two_groups_a_layer():
    """Groups copy out one after the other: the larger, 20,060, counts. Experts are reduced first, input 8,000, with their
    gradients 5,000, the other group's 3,000 and its parameters 30,000; then that one, input 6,000 more, gradients 3,000. Both
    inputs, 14,000, outlive one layer.
    """
    _, back = walked(BLOCK, EXPERTS, n_layers=2, ep=2)
    gather, run = BASE + 70_000 + 20_060 + 512, BASE + 70_000 + 900
    assert back.of("backward of an all-gather") == [(2_016.0, gather), (1_016.0, gather + 14_000 + 400)]
    assert back.of("backward of mlp") == [(2_016.0, run + 30_000), (1_016.0, run + 14_000 + 400)]
    experts, other = BASE + 8_000 + 5_000 + 3_000 + 30_000 + 512, BASE + 14_000 + 3_000 + 512
    assert back.of("backward of a reduce-scatter") == [
        (1_016.0, experts + 30_000),
        (1_016.0, other + 30_000),
        (16.0, experts + 400),
        (16.0, other + 400),
    ]


def test_backward_without_resharding_frees_layer_by_layer():
    """Nothing arrives: 30,000 for each layer not done yet stay, and while a layer is reduced those of the layers before it."""
    _, back = walked(BLOCK, reshard_after_forward=False)
    run = BASE + 900
    assert [moment for _, moment in back.of("backward of mlp")] == [
        run + 90_000,
        run + 60_000 + 6_000 + 400,
        run + 30_000 + 6_000 + 800,
    ]
    assert [moment for _, moment in back.of("backward of a reduce-scatter")] == [
        BASE + 60_000 + 3_000 + 6_000 + 512,
        BASE + 30_000 + 3_000 + 6_000 + 512 + 400,
        BASE + 3_000 + 6_000 + 512 + 800,
    ]


def test_layers_resharded_to_two_ranks_keep_a_half():
    """A layer done with its forward keeps half of its parameters, 15,000, until backward has copied out what it gathered again.

    Forward: 15,000 for each layer before. Backward: the gather beside its own 15,000 and those of the layers below; then theirs.
    """
    there, back = walked(BLOCK, dp=4, reshard_after_forward=2)
    held = 300_000 + 30_000 + 10_000 + 700
    assert [moment for _, moment in there.of("forward of mlp")] == [held, held + 15_000, held + 30_000]
    gather, run, reduce = BASE + 30_000 + 10_050 + 512, BASE + 30_000 + 900, BASE + 3_000 + 6_000 + 512
    assert [moment for _, moment in back.of("backward of an all-gather")] == [
        gather + 45_000,
        gather + 30_000 + 6_000 + 400,
        gather + 15_000 + 6_000 + 800,
    ]
    assert [moment for _, moment in back.of("backward of mlp")] == [
        run + 10_000 + 30_000,
        run + 10_000 + 15_000 + 6_000 + 400,
        run + 6_000 + 800,
    ]
    assert [moment for _, moment in back.of("backward of a reduce-scatter")] == [
        reduce + 10_000 + 30_000,
        reduce + 10_000 + 15_000 + 400,
        reduce + 800,
    ]


def test_the_ends_of_backward():
    """Embedding: its gradient 2 * 131,072 and the one that came in, 512, beside the last reduction's input and three times 400.
    Then the root: gradients 50,000, which are more than 7,000, and the input 60,000.
    """
    _, back = walked(BLOCK)
    assert back.of("backward of embedding") == [(16.0, BASE + 6_000 + 2 * 131_072 + 512 + 1_200)]
    assert back.of("backward of the root's reduce-scatter") == [(0.0, 50_000 + 60_000 + 1_200)]


def test_the_heads_backward_stands_beside_what_is_gathered():
    """The last layer's flat buffer, 10,000, has arrived; without resharding all three layers' 90,000 are there instead. What is
    saved is the same: three layers' 3,000, the ids' 16 and the head's own.
    """
    head = [
        next(moment for moment in walked(BLOCK, **said)[1].all if moment.op != "backward of an all-gather")
        for said in ({}, {"reshard_after_forward": False})
    ]
    assert head[1].transient - head[0].transient == 90_000 - 10_000
    assert head[0].transient > 310_000
    assert head[0].saved == head[1].saved > 3_016


def first_chunk() -> ShardedChunk:
    """The first stage's chunk of two layers; its output 5,000 B, gradients of the head's parameters 1,300.

    The last gradient of each layer has 70 B, of the root 200. The embedding keeps 16, has 900 in backward; the end 40 and 140.
    """
    assembly = Assembly(job("fsdp2", seqlen=2, microbatches=2, dp=2, pp=2, fsdp={"reduce_dtype": "fp32"}))
    return ShardedChunk(
        assembly=assembly,
        chunk=assembly.stages[0][0],
        keeps_sent=False,
        root=ROOT,
        last_of_root=200.0,
        layers=[Wrapped(LAYER, [BLOCK], [0.0], 0.0, 70.0)] * 2,
        added=[LAYER] * 2,
        embedding=PartMemory(16.0, Peak(528.0, "embedding"), Peak(900.0, "embedding")),
        head=PartMemory(40.0, Peak(140.0, "end"), Peak(140.0, "end")),
        head_grad=1_300.0,
        output=5_000.0,
        half=(0.0, 0.0),
        waits=[0.0] * 2,
        x=512.0,
    )


def chunk_backward(gradients: Gradients, *, held: bool = False) -> Every:
    """All moments of its backward."""
    found = Every()
    first_chunk().backward(Passing("B", fetched=False, gathered=held, roots=False, gradients=gradients), found)
    return found


def test_what_a_chunk_saves():
    """Ids 16, two layers of 1,000, the end's 40, and the output 5,000."""
    assert first_chunk().saved == 16 + 2 * 1_000 + 40 + 5_000


def test_the_worst_of_a_chunks_first_backward():
    """The sum of the root's gradients at its end: 305,000, parameters 60,000, sums 12,000 and 100,000, its last gradient 200."""
    worst = first_chunk().worst(Passing("B", fetched=False, gathered=False, roots=False, gradients=Gradients()))
    assert (worst.activations_bytes, worst.transient_bytes) == (0.0, 305_000 + 60_000 + 112_000 + 200)


def test_gradients_of_the_heads_parameters():
    """Head and final norm, 131,200 elements in bf16, of the last stage alone."""
    assembly = Assembly(job("fsdp2", dp=2, pp=2, fsdp={"reduce_dtype": "fp32"}))
    memories = PartMemories(assembly, weight_grads_stay=True)
    found = [chunk_bytes(assembly, chunk, memories, memories, split=False).head_grad for (chunk,) in assembly.stages]
    assert found == [0.0, 2 * 131_200]


def test_a_chunks_first_backward():
    """Beside all: output 5,000, the root 300,000. bf16 gradients are copied to fp32 sums, 6,000 a layer, 100,000 for the root,
    while the last gradient is still there. Parameters of 30,000 stay once gathered; the gradient received lies in the pipeline's
    buffer, so the last layer runs with 512 less.
    """
    beside, found = 305_000, chunk_backward(Gradients())
    assert found.of("backward of end") == [(2_056.0, beside + 100)]
    assert found.of("backward of an all-gather") == [
        (2_016.0, beside + 30_000 + 10_000 + 1_300),
        (1_016.0, beside + 60_000 + 10_000 + 1_300 + 6_000 + 512),
    ]
    assert found.of("backward of mlp") == [
        (2_016.0, beside + 30_000 + 10_000 + 1_300 + 900 - 512),
        (1_016.0, beside + 60_000 + 1_300 + 6_000 + 900),
    ]
    assert found.of("backward of embedding") == [(16.0, beside + 60_000 + 1_300 + 12_000 + 884)]
    assert found.of("backward of a sum of gradients") == [
        (1_016.0, beside + 30_000 + 10_000 + 1_300 + 6_000 + 70 + 512),
        (16.0, beside + 60_000 + 1_300 + 12_000 + 70 + 512),
        (0.0, beside + 60_000 + 12_000 + 100_000 + 200),
    ]


def test_a_chunks_later_backward():
    """The sums, 100,000 + 2 * 6,000, and both layers' parameters are there from the start: nothing is gathered or made anew."""
    beside, found = 305_000 + 112_000 + 60_000, chunk_backward(Gradients(summed=True), held=True)
    assert found.of("backward of mlp") == [
        (2_016.0, beside + 1_300 + 900 - 512),
        (1_016.0, beside + 1_300 + 900),
    ]
    assert not found.of("backward of a sum of gradients")
    assert not found.of("backward of an all-gather")


def test_a_chunks_backward_before_gradients_are_added_up():
    """Gradients of a half that ran before, 50,000 + 2 * 3,000 in bf16, wait; the root's are not copied to sums of their own."""
    found = chunk_backward(Gradients(fresh=True))
    assert found.of("backward of a sum of gradients") == [
        (1_016.0, 305_000 + 56_000 + 30_000 + 10_000 + 1_300 + 6_000 + 70 + 512),
        (16.0, 305_000 + 56_000 + 60_000 + 1_300 + 12_000 + 70 + 512),
    ]


@pytest.mark.parametrize(("summed", "sums"), [(False, 0), (True, 100_000 + 2 * 6_000)])
def test_the_two_halves_of_a_split_backward(summed, sums):
    """For inputs: the output 5,000, the root 300,000 and both layers 60,000, gathered or not, beside the sums, and 7,000 of its
    own; 3,000 stay. For weights: the root, and layers that are gathered; the last layer's gradients, 3,000, join those of the
    head, 1,300, then the first one's, once the last one's 2,000 are gone. Sums are not added to before the next backward.
    """
    chunk = replace(first_chunk(), half=(3_000.0, 7_000.0), waits=[1_000.0, 2_000.0])
    of_inputs, of_weights, alone = Every(), Every(), Every()
    before = Gradients(summed=summed)
    for kind, held, found in (("I", False, of_inputs), ("W", True, of_weights), ("W", False, alone)):
        chunk.one_half(Passing(kind, fetched=False, gathered=held, roots=False, gradients=before), found)
    run = 5_000 + 360_000 + sums
    assert of_inputs.of("gradients of the inputs") == [(0.0, run + 7_000), (3_000.0, run)]
    added = [(3_000.0, sums + 1_300 + 3_000), (1_000.0, sums + 1_300 + 6_000)]
    for found, parameters in ((of_weights, 360_000), (alone, 300_000)):
        assert found.of("gradients of the weights") == [(kept, parameters + bytes_) for kept, bytes_ in added]


def test_the_layer_whose_backward_is_next_is_gathered_ahead():
    """The first layer's flat buffer is 7,000 here: it has arrived beside the last layer's backward; none follows the first's."""
    blocks = [BLOCK._replace(gathered=7_000.0), BLOCK]
    chunk, found = replace(first_chunk(), layers=[Wrapped(LAYER, [of], [0.0], 0.0, 70.0) for of in blocks]), Every()
    chunk.backward(Passing("B", fetched=False, gathered=False, roots=False, gradients=Gradients()), found)
    assert found.of("backward of mlp") == [
        (2_016.0, 305_000 + 30_000 + 7_000 + 1_300 + 900 - 512),
        (1_016.0, 305_000 + 60_000 + 1_300 + 6_000 + 900),
    ]


def test_a_chunks_forward():
    """Each layer adds the 1,000 that it saves to the ids' 16; beside it lie the root 300,000, its own 30,000 and flat 10,000."""
    found = Every()
    first_chunk().forward(Passing("F", fetched=False, gathered=False, roots=True, gradients=Gradients()), found)
    beside = 300_000 + 30_000 + 10_000 + 700
    assert found.of("forward of mlp") == [(1_016.0, beside), (2_016.0, beside)]


def test_a_chunks_forward_starts_beside_all_that_is_there():
    """The embedding's 528 beside the root 300,000 and the flat buffer that it was gathered in, 100,000, which is there where this
    action gathers it; and beside the sums of micro-batches before it, 100,000 of the root and 2 * 6,000 of the layers in fp32.
    """
    for roots, gradients, held in (
        (True, Gradients(), 300_000 + 100_000 + 528),
        (False, Gradients(), 300_000 + 528),
        (False, Gradients(summed=True), 112_000 + 300_000 + 528),
    ):
        found = Every()
        first_chunk().forward(Passing("F", fetched=False, gathered=False, roots=roots, gradients=gradients), found)
        assert found.of("forward of embedding") == [(0.0, held)]


@pytest.mark.parametrize(
    ("keeps_sent", "stage", "summed", "held"),
    [
        (True, 1, True, 512),  # the second stage has sent the gradient of its input for the micro-batch before
        (True, 1, False, 0),  # nothing was sent before the first
        (True, 0, True, 0),  # the first stage sends none back
        (False, 1, True, 0),  # other schedules let it go
    ],
)
def test_a_sent_gradient_waits_for_the_next(keeps_sent, stage, summed, held):
    """Torch 2.13 distributed/pipelining/schedules.py, Schedule1F1B._step_microbatches: a send's work, which references the
    tensor, is bound to a name until the next send.
    """
    first = first_chunk()
    chunk = replace(first, chunk=first.assembly.stages[stage][0], keeps_sent=keeps_sent)
    passing = Passing("B", fetched=False, gathered=True, roots=False, gradients=Gradients(summed=summed))
    assert chunk.sent_before(passing) == held


@pytest.mark.parametrize("reduces", [True, False])
def test_another_chunk_waits_beside_an_action_and_its_reduction(reduces):
    """Two such chunks; the first one's root reduces from 1,000,000 B. In its backward the other one has its root's 500,000, its
    layers' 60,000, sums of 112,000, and a micro-batch that waits, 7,056. Reduction: layers' 60,000, sums 112,000, the input. Else
    the worst is the last layer's backward, with 2,016 B kept: 305,000, sums, layers' 60,000, 1,300 of the head, 900 - 512.
    """
    one = replace(first_chunk(), root=ROOT._replace(reduce_input=1_000_000.0))
    other = replace(first_chunk(), root=ROOT._replace(unsharded=500_000.0))
    held = ShardedStage([one, other], [400.0, 700.0])
    before, after = Outstanding((0, 1), (0, 0), (True, True)), Outstanding((0, 1), (0, 0), (not reduces, True))
    summed, both = Gradients(summed=True), frozenset({0, 1})
    passing = Passing("B", fetched=False, gathered=True, roots=False, gradients=summed)
    found = held.moment(Situation(0, passing, (summed, summed), both, both, reduces, before, after))
    others = 500_000 + 60_000 + 112_000
    if reduces:
        assert found == PeakMoment(7_056.0, others + 60_000 + 112_000 + 1_000_000, "reduction of gradients", 1_100.0)
    else:
        own = 305_000 + 112_000 + 60_000
        assert found.activations_bytes + found.transient_bytes == 7_056 + 2_016 + others + own + 1_300 + 900 - 512
