"""Sizes of one chunk of a pipeline under FSDP2: its ends, its output, its first layer, and its gradients from action to action.

8 tokens of 128 values: what goes from stage to stage has 2,048 B in bf16.
"""

from __future__ import annotations

from typing import Any

import pytest
from physics_jobs import job, machine

from steptime.fsdp.pipeline_chunks import ABSENT, Gradients, ShardedChunk, chunk_bytes
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES
from steptime.memory.part_memories import PartMemories

X = 2_048


def chunks(**said: Any) -> tuple[PartMemories, list[ShardedChunk]]:
    """Two stages of two layers each."""
    assembly = Assembly(job("fsdp2", dp=2, pp=2, model={"n_layers": 4}, fsdp={"reduce_dtype": "bf16"}, **said))
    memories = PartMemories(assembly)
    return memories, [chunk_bytes(assembly, one, memories, memories, split=False) for (one,) in assembly.stages]


def test_the_ends_of_two_stages():
    """The first has the embedding and sends 2,048 B on; the last has the head and keeps 8 * 1,024 logits in bf16."""
    memories, (first, last) = chunks()
    assert (first.embedding, first.head, last.embedding, last.head) == (
        memories.embedding,
        ABSENT,
        ABSENT,
        memories.head,
    )
    assert (ABSENT.saved, ABSENT.forward, ABSENT.backward) == (0.0, NO_BYTES, NO_BYTES)
    assert memories.embedding.saved != memories.head.saved
    assert (first.output, last.output) == (X, 8 * 1_024 * 2)
    assert (first.x, first.head_grad) == (X, 0.0)
    assert last.head_grad == 2 * (131_072 + 128)


@pytest.mark.parametrize(
    ("recompute", "norm", "counted"),
    [("none", "fused", X), ("full", "fused", X), ("none", "composite", 0), ("full", "composite", X)],
)
def test_the_first_layers_input(recompute, norm, counted):
    """A layer that keeps its input, as it is or to run again, has counted it; the pipeline's buffer has it instead. A norm in
    several kernels keeps a copy in fp32, which stays.
    """
    how = {"activation_checkpointing_type": recompute, "norm_impl": norm, "compile": "none"}
    _, (first, last) = chunks(performance=how)
    assert first.layers[0].memory == first.layers[1].memory
    for found in (last.layers[0].memory, last.added[0]):
        other = last.layers[1].memory if found is last.layers[0].memory else last.added[1]
        assert (other.saved - found.saved, other.forward.bytes - found.forward.bytes) == (counted, X)
        assert other.backward.bytes - found.backward.bytes == counted


def test_a_quarter_of_what_layers_keep_is_in_host_memory():
    """Three quarters of the first layer's input were counted, which the pipeline's buffer has."""
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1.0, "core_bytes_per_s": 1.0}
    on = Machine(**machine(host_bytes_per_s=1.0).model_dump(exclude={"host"}), host=host)
    _, (_, last) = chunks(on=on, performance={"activation_offload": 0.25})
    first, second = (of.memory for of in last.layers)
    assert second.saved - first.saved == 0.75 * X
    assert second.backward.bytes - first.backward.bytes == 0.75 * X
    assert second.forward.bytes - first.forward.bytes == X


def test_gradients_from_action_to_action():
    """Forwards change nothing. A backward leaves sums, and so does a first half after a second one, which leaves its own."""
    none, summed, fresh = Gradients(), Gradients(summed=True), Gradients(fresh=True)
    assert [of.after("F") for of in (none, summed, fresh)] == [none, summed, fresh]
    assert [of.after("B") for of in (none, summed, fresh)] == [summed] * 3
    assert [of.after("I") for of in (none, summed, fresh)] == [none, summed, summed]
    assert [of.after("W") for of in (none, summed, fresh)] == [fresh, Gradients(summed=True, fresh=True), fresh]
