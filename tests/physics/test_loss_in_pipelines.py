"""The last stage of a pipeline whose loss runs in chunks: what it holds in its actions, of made-up sizes.

torchtitan reduces the head's gradient with each micro-batch's loss (pytorch/torchtitan@b5bcd76c torchtitan/components/loss.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers
from steptime.fsdp.loss_in_pipeline import Turn, by_micro_batch, reduction_left_s, turns
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.pipeline_chunks import Gradients, Passing, ShardedChunk, chunk_bytes
from steptime.fsdp.seconds import CommSeconds
from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak
from steptime.memory.part_memories import PartMemories
from steptime.schedule import order
from steptime.schedule.actions import Action
from steptime.schedule.sharded import sharded_steps


def assembled(software: str = "torchtitan", schedule: str = "1f1b", **said: Any) -> Assembly:
    """Two stages of two layers."""
    layout = {"dp": 2, "pp": 2, "schedule": schedule, "microbatches": 2} | said
    if "loss_chunks" in layout:
        layout["performance"] = {"loss_chunks": layout.pop("loss_chunks")}
    fsdp = {"reduce_dtype": "fp32", "reshard_after_forward": False} | layout.pop("fsdp", {})
    return Assembly(job(software, model={"n_layers": 4}, fsdp=fsdp, **layout))


def last_chunk(schedule: str = "1f1b", *, by_loss: bool = True) -> ShardedChunk:
    """Two layers with 30,000 B of parameters and 3,000 of gradients, a root of 3,000,000 and 50,000; sums are twice as large.

    The root's reduction has an input of 60,000 and a shard of 40 in the stored dtype; the head keeps 40 B, needs 75 in forward
    and 90 in backward.
    """
    assembly = assembled(schedule=schedule)
    memories, [chunk] = PartMemories(assembly, weight_grads_stay=True), assembly.stages[1]
    found = chunk_bytes(assembly, chunk, memories, memories, split=False)
    assert found.by_loss
    block = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, 0.0, 0.0)
    root = Buffers(0.0, 5_000.0, 3e6, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, 0.0, 0.0, stored=40.0)
    return replace(
        found,
        by_loss=by_loss,
        root=root,
        last_of_root=200.0,
        layers=[Wrapped(LAYER, [block], [0.0], 0.0, 70.0)] * 2,
        added=[LAYER] * 2,
        embedding=PartMemory(16.0, NO_BYTES, NO_BYTES),
        head=PartMemory(40.0, Peak(75.0, "h"), Peak(90.0, "h")),
        head_grad=900.0,
        output=5_000.0,
        x=512.0,
    )


def passing(kind: str, *, summed: bool) -> Passing:
    """An action that finds layers and root gathered."""
    return Passing(kind, fetched=False, gathered=True, roots=False, gradients=Gradients(summed=summed))


@pytest.mark.parametrize(("schedule", "pending"), [("1f1b", 60_000 + 2 * 40), ("gpipe", 60_000 + 40)])
@pytest.mark.parametrize(("summed", "layers"), [(False, 0), (True, 2 * 6_000)])
def test_what_the_heads_last_reduction_leaves(schedule, pending, summed, layers):
    """Its input, and one shard of the head's gradient in the stored dtype, or two; sums of the layers' gradients alone beside.

    Reduced once a step, the head's sums of 100,000 are there and nothing of a reduction.
    """
    chunk, once = (last_chunk(schedule, by_loss=by_loss) for by_loss in (True, False))
    assert chunk.gradient_bytes(Gradients(summed=summed)) == pending + layers
    assert once.gradient_bytes(Gradients(summed=summed)) == (100_000 + layers if summed else 0)
    assert chunk.gradient_bytes(Gradients(fresh=True)) == pending + 2 * 3_000
    assert once.gradient_bytes(Gradients(fresh=True)) == 50_000 + 2 * 3_000


@pytest.mark.parametrize(("schedule", "sent"), [("1f1b", 512), ("gpipe", 0)])
def test_a_forward_ends_with_the_losss_backward(schedule, sent):
    """Root and layers, 3,060,000; what the last reduction left; the sums of the layers, 12,000. The loss adds the head's sums,
    100,000, and what its backward needs beyond what is kept, 90 - 40, beside the gradient that 1F1B has sent and holds.
    """
    chunk, found = last_chunk(schedule), Every()
    chunk.forward(passing("F", summed=True), found)
    beside = 3_060_000 + 60_000 + (2 * 40 if sent else 40) + 12_000
    assert [(of.saved, of.transient) for of in found.all if of.op == "backward of h"] == [
        (16 + 2_000 + 40, beside + 100_000 + 50 + sent)
    ]
    assert found.of("forward of h") == []


@pytest.mark.parametrize("summed", [False, True])
def test_a_backward_starts_with_the_norm(summed):
    """Output 5,000, root and layers 3,060,000, the last reduction's 60,080, from the second on sums of 12,000 and 512 sent
    before. The gradient that the loss has left goes through the norm, 512; no gradient of the head is made, and no sum of it.
    """
    chunk, found = last_chunk(), Every()
    chunk.backward(passing("B", summed=summed), found)
    held = 5_000 + 3_060_000 + 60_080 + (12_000 + 512 if summed else 0)
    assert found.of("backward of head.norm") == [(16 + 2_000 + 40, held + 512)]
    first = 0 if summed else 6_000
    assert found.of("backward of mlp") == [(2_016.0, held + 900), (1_016.0, held + first + 900)]
    made = [] if summed else [(1_016.0, held + 6_000 + 70 + 512), (16.0, held + 12_000 + 70 + 512)]
    assert found.of("backward of a sum of gradients") == made


def test_the_reduction_after_the_step_is_the_layers(monkeypatch):
    """Parameters of one layer, 30,000, are left when the first one's input of 6,000 is made beside 60,080 and sums of 12,000."""
    found = Every()
    monkeypatch.setattr("steptime.fsdp.pipeline_chunks.Moments", lambda _: found)
    last_chunk().reduction(Gradients(summed=True))
    assert found.of("reduction of gradients") == [
        (0.0, 30_000 + 60_080 + 12_000 + 6_000),
        (0.0, 30_000 + 60_080 + 6_000 + 400 + 6_000 + 70),
        (0.0, 60_080 + 6_000 + 400 + 6_000),
        (0.0, 60_080 + 800 + 6_000 + 70),
    ]


@pytest.mark.parametrize(
    ("said", "by"),
    [
        ({}, [False, True]),
        ({"fsdp": {"ends": "apart"}}, [False, True]),
        ({"fsdp": {"ends": "root"}}, [False, False]),  # the head is in the root's group, which the pipeline reduces
        ({"fsdp": {"wrap": "model"}}, [False, False]),
        ({"software": "fsdp2"}, [False, False]),
        ({"software": "torchtitan", "loss_chunks": 1}, [False, False]),
        ({"pp": 1}, [False]),  # a chunk with both ends is no pipeline's
    ],
)
def test_where_the_head_is_reduced_by_micro_batch(said, by):
    """Where the last chunk's head is in a group of its own and a training loop runs the loss in chunks, as torchtitan does."""
    assembly = assembled(**said)
    assert [by_micro_batch(assembly, chunk) for (chunk,) in assembly.stages] == by


def test_a_backward_in_halves_gathers_with_its_first():
    """F0 I0 F1 I1 W0 W1 of the last stage: a loss gathers and reduces, I gathers for the norm, W needs no head."""
    orders = order("zero_bubble", 2, 1, 2)[1]
    assert [one.kind for one in orders] == ["F", "I", "F", "I", "W", "W"]
    steps = sharded_steps(tuple(orders), ahead=True, reshard=False)
    assert turns(steps, {0}) == [Turn(1, 1), Turn(1), Turn(1, 1), Turn(1), Turn(), Turn()]


def test_gradients_of_weights_between_a_loss_and_its_backward():
    """F0 I0 F1 W0 I1 W1: W0 runs while the second loss has freed the head, which I1 gathers."""
    actions = (
        Action("F", 0, 0), Action("I", 0, 0), Action("F", 1, 0), Action("W", 0, 0), Action("I", 1, 0), Action("W", 1, 0),
    )  # fmt: skip
    steps = sharded_steps(actions, ahead=True, reshard=False)
    assert turns(steps, {0}) == [Turn(1, 1), Turn(1), Turn(1, 1), Turn(), Turn(1), Turn()]


def test_a_head_that_is_reduced_once_a_step():
    """Its forward ends with the output, its backward begins with the loss, each under the name of its own worst op."""
    chunk = replace(last_chunk(by_loss=False), head=PartMemory(40.0, Peak(75.0, "logits"), Peak(90.0, "loss")))
    there, back = Every(), Every()
    chunk.forward(passing("F", summed=False), there)
    assert there.of("forward of logits") == [(2_056.0, 3_060_000 + 75 - 40 + 5_000)]
    chunk.backward(passing("B", summed=False), back)
    assert back.of("backward of loss") == [(2_056.0, 5_000 + 3_060_000 + 90 - 40)]


def test_no_less_than_nothing_is_left_of_a_reduction():
    """A reduction of 0.5 s beside 2 s of compute is hidden whole."""
    assert reduction_left_s(CommSeconds(0.0, 0.0, 0.5), [CommSeconds(0.0, 2.0)], True, 0.0) == 0.0
