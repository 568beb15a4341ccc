"""Which passes a step without synchronization walks, and what lies beside each: the sums of earlier micro-batches.

Three layers and a root of made-up sizes as in `test_no_sync_moments`: sums of 100,000 + 3 * 6,000 B.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.no_sync_walk import walk
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)
SUMS = 100_000 + 3 * 6_000


def walked(microbatches: int, **fsdp: object) -> tuple[Every, Every]:
    """Embedding and head save 16 and 200 B and have 528 and 900 B at most in forward, 1,028 and 1,400 B in backward."""
    layout = {"dp": 2, "fsdp": {"reduce_dtype": "fp32", "no_sync": True} | fsdp}
    assembly = Assembly(job("fsdp2", model={"n_layers": 3}, seqlen=2, microbatches=microbatches, **layout))
    memories = PartMemories(assembly, weight_grads_stay=True)
    memories.embedding = PartMemory(16.0, Peak(528.0, "embedding"), Peak(1_028.0, "embedding"))
    memories.head = PartMemory(200.0, Peak(900.0, "loss"), Peak(1_400.0, "loss"))
    there, back = Every(), Every()
    walk(assembly, memories, there, back, ROOT, [Wrapped(LAYER, [BLOCK], [0.0], 0.0, 70.0)] * 3)
    return there, back


@pytest.mark.parametrize(("microbatches", "differ"), [(2, 2), (3, 3), (8, 3)])
@pytest.mark.parametrize(
    ("version", "start", "flat"),
    [
        (1, 100_000 + 528, 3),  # the flat parameter itself is read
        (2, 300_000 + 100_000 + 528, 0),
    ],
)
def test_the_first_those_in_the_middle_and_the_last(microbatches, differ, version, start, flat):
    """Two micro-batches have none in the middle, of more all are alike."""
    there, back = walked(microbatches, version=version)
    assert there.of("forward of embedding") == [(0.0, start)] * differ
    assert len(back.of("backward of loss")) == differ
    assert len(back.of("backward of a flat gradient")) == flat * differ


def test_sums_lie_beside_every_forward_but_the_first():
    """The worst is the first layer's gather: the root's parameters and flat buffer, 400,000, its own 10,000, 30,000 and 50, the
    input 512, beside sums.
    """
    there, _ = walked(3)
    assert (there.worst.activations_bytes, there.worst.transient_bytes) == (16.0, 440_562 + SUMS)


def test_parameters_that_stay_are_gathered_by_the_first():
    """Later forwards hold all parameters, 390,000, and a part's own bytes beside sums; the gathers were made without any."""
    there, _ = walked(3, reshard_after_forward=False, reshard_after_backward=False)
    assert len(there.of("forward of an all-gather")) == 3
    assert there.of("forward of loss")[1:] == [(3_216.0, 390_000.0 + 700)] * 2
    assert (there.worst.activations_bytes, there.worst.transient_bytes) == (3_216.0, 390_700 + SUMS)
