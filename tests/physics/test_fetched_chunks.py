"""Chunks that a schedule fetches ahead: three of four at a time, and what it takes to copy them out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job
from walked_moments import LAYER

from steptime.fsdp.groups import Buffers, ParamGroup, groups
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.pipeline_chunks import Gradients, Passing, chunk_bytes
from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES, PartMemory
from steptime.memory.part_memories import PartMemories
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
    assert [step.layers_held for step in steps] == [step.roots_held for step in steps] == HELD
    assert not any(step.gathers or step.roots for step in steps)
    assert [step.reduces for step in steps] == [False] * 4 + [True] * 4


def test_what_hooks_gather_stays_till_it_is_freed():
    """Without fetches each chunk's first action gathers both. Layers freed after a forward are gathered again, roots are not."""
    steps = sharded_steps(ACTIONS, ahead=False, reshard=True)
    assert [step.fetched for step in steps] == [()] * 8
    assert [step.gathers for step in steps] == [True] * 8
    assert [step.roots for step in steps] == [True] * 4 + [False] * 4
    assert [step.layers_held for step in steps] == [set()] * 5 + [{3}, {3, 2}, {3, 2, 1}]


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
    block = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0)
    root = Buffers(0.0, 5_000.0, 3e6, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0)
    layers = [Wrapped(LAYER, [block], [0.0], 0.0, 70.0)] * 2
    assembly = Assembly(job("fsdp2", dp=2, pp=2, fsdp={"reduce_dtype": "bf16"}))
    memories = PartMemories(assembly, weight_grads_stay=True)
    chunk = replace(
        chunk_bytes(assembly, assembly.stages[0][0], memories, memories, split=False),
        root=root if largest < 1e5 else root._replace(gathered=largest),
        layers=layers,
        added=[LAYER._replace(forward=NO_BYTES, backward=NO_BYTES)] * 2,
        embedding=PartMemory(16.0, NO_BYTES, NO_BYTES),
        head=PartMemory(0.0, NO_BYTES, NO_BYTES),
        output=5_000.0,
    )
    passing = Passing(kind, fetched=True, held=True, roots=False, gradients=Gradients(summed=summed))
    worst = chunk.worst(passing)
    sums = 56_000 if summed else 0
    assert worst == (saved, 3e6 + 60_000 + sums + largest, "copies of gathered parameters", 0.0)


def test_layers_of_one_group_have_none_of_their_own():
    """Wrapped whole, the stage's parameters are the root's: 2 layers of 164,096 and the embedding's 131,072."""
    assembly = Assembly(job("fsdp2", model={"n_layers": 4}, dp=2, pp=2, fsdp={"wrap": "model"}))
    found = groups(assembly, assembly.stages[0][0])
    assert found.layers == [ParamGroup(0, 0, 2, 0)] * 2
    assert found.root.elements == 2 * 164_096 + 131_072
