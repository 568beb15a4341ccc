"""Backwards of a step without synchronization between made-up ends: parameters that stay, one group, flat sums.

Layers and root are those of `test_no_sync_passes`: 30,000 B of parameters, sums of 6,000 a layer and of 100,000. Embedding and
head save 16 and 200 B and have 1,028 and 1,400 B at most; the gradient that comes in has 512 B. Gradients of the head's 131,200
parameters are bf16.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.no_sync_walk import Phase, WalkedChunk, backward, flat_backward
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)
FIRST, MIDDLE, LAST = Phase(False, False), Phase(summed=True, last=False), Phase(summed=True, last=True)
SUMS, HEAD, TABLE = 100_000 + 3 * 6_000, 2 * 131_200, 2 * 131_072
ADDED = LAYER._replace(backward=Peak(1_500.0, "mlp"))
"""A layer whose gradients of weights are added to existing ones at once."""


def walked(phase: Phase, *, tied: bool = False, **fsdp: object) -> Every:
    said, model = {"reduce_dtype": "fp32", "no_sync": True} | fsdp, {"n_layers": 3, "tie_embeddings": tied}
    assembly = Assembly(job("fsdp2", model=model, seqlen=2, microbatches=3, dp=2, fsdp=said))
    memories, found = PartMemories(assembly, weight_grads_stay=True), Every()
    memories.embedding = PartMemory(16.0, Peak(528.0, "embedding"), Peak(1_028.0, "embedding"))
    memories.head = PartMemory(200.0, Peak(900.0, "loss"), Peak(1_400.0, "loss"))
    layers, added = ([Wrapped(memory, [BLOCK], [0.0], 400.0, 70.0)] * 3 for memory in (LAYER, ADDED))
    if said.get("version") == 1:
        flat_backward(assembly, memories, found, ROOT, layers, phase)
    else:
        backward(WalkedChunk(assembly, memories, ROOT, layers, added), found, phase)
    return found


STAYS = {"reshard_after_forward": False, "reshard_after_backward": False}


def test_parameters_stay_after_the_first_backward():
    """The root's 300,000 and the layers' 90,000 lie beside all; each layer adds its sums of 6,000. At the end the root's are made
    beside them.
    """
    found, held = walked(FIRST, **STAYS), 390_000 + HEAD
    assert found.of("backward of loss") == [(3_216.0, 390_000 + 1_200)]
    assert found.of("backward of mlp") == [(3_016.0 - 1_000 * i, held + 6_000 * i + 900) for i in range(3)]
    assert found.of("backward of an all-gather") == [(3_016.0 - 1_000 * i, held + 6_000 * i + 512) for i in range(3)]
    assert found.of("backward of embedding") == [(16.0, held + 18_000 + 1_012)]
    layers = [(2_016.0 - 1_000 * i, held + 6_000 * (i + 1) + 512 + 70) for i in range(3)]
    assert found.of("backward of a sum of gradients") == [*layers, (0.0, 390_000 + 18_000 + 100_000 + 200)]


def test_parameters_stay_after_a_later_backward():
    """All sums are there; none is made."""
    found, held = walked(MIDDLE, **STAYS), SUMS + 390_000
    assert found.of("backward of loss") == [(3_216.0, held + 1_200)]
    assert [bytes_ for _, bytes_ in found.of("backward of mlp")] == [held + HEAD + 900] * 3
    assert found.of("backward of embedding") == [(16.0, held + HEAD + 1_012)]
    assert not found.of("backward of a sum of gradients")


def test_the_last_backward_frees_them():
    """Each layer's 30,000 go before it is reduced: its sums of 6,000 and the input of 6,000, which outlives it. What a layer
    leaves, 400, waits for the end.
    """
    found = walked(LAST, **STAYS)
    assert found.of("backward of loss") == [(3_216.0, SUMS + 390_000 + 1_200)]
    left = 300_000 + HEAD
    assert found.of("backward of mlp") == [
        (3_016.0, SUMS + left + 90_000 + 900),
        (2_016.0, SUMS - 6_000 + left + 60_000 + 6_000 + 400 + 900),
        (1_016.0, SUMS - 12_000 + left + 30_000 + 6_000 + 800 + 900),
    ]
    assert found.of("backward of a reduce-scatter") == [
        (2_016.0 - 1_000 * i, SUMS - 6_000 * (i + 1) + left + 512 + 60_000 - 30_000 * i + 12_000 + 400 * i)
        for i in range(3)
    ]
    assert found.of("backward of embedding") == [(16.0, 100_000 + left + 6_000 + 1_200 + 1_012)]


@pytest.mark.parametrize(
    ("phase", "fsdp", "left"),
    [
        (FIRST, {}, 0),  # replicas reduce with the last alone
        (LAST, {}, 400),
        (FIRST, {"wrap": "model"}, 400),  # gradients of a group of all layers wait for its end
        (MIDDLE, {"wrap": "model"}, 400),
        (MIDDLE, {"wrap": "model", "reduce_dtype": "bf16"}, 0),  # they are added to the sums at once
        (LAST, {"wrap": "model", "reduce_dtype": "bf16"}, 0),
    ],
)
def test_what_a_layer_leaves(phase, fsdp, left):
    """400 B of each of three layers that lie beside the embedding's backward."""
    found = walked(phase, **STAYS, **fsdp)
    at_once = phase.summed and "reduce_dtype" in fsdp
    sums = {FIRST: 18_000, MIDDLE: SUMS, LAST: 100_000 + 6_000}[phase] + (0 if phase.last else 90_000)
    beside = 300_000 + (0 if at_once else HEAD) + sums + 1_012
    assert found.of("backward of embedding") == [(16.0, beside + 3 * left)]


def test_sums_in_the_dtype_of_compute_are_added_to_at_once():
    """No gradient of the head, nor of a layer, of which 500 B lie beside what it saves."""
    found = walked(MIDDLE, reduce_dtype="bf16", **STAYS)
    assert found.of("backward of mlp") == [(3_016.0 - 1_000 * i, SUMS + 390_000 + 500) for i in range(3)]


@pytest.mark.parametrize(
    ("fsdp", "waits"),
    [
        ({"reduce_dtype": "fp32"}, HEAD),
        ({"reduce_dtype": "bf16"}, TABLE),
        ({"version": 1, "reshard_after_backward": True}, HEAD),
    ],
)
def test_a_tied_heads_gradient_waits_for_the_embeddings(fsdp, waits):
    """1,024 * 128 in bf16 wait in autograd until the embedding's come (torch/csrc/autograd/engine.cpp), even where sums are
    added to at once, as the norm's 128 are then. Then the embedding's and the sum lie beside it (input_buffer.cpp, accumulate).
    """
    found = walked(MIDDLE, tied=True, **(STAYS | fsdp))
    there = SUMS + (100_000 + 30_000 if "version" in fsdp else 390_000) + waits
    layer = 500 if fsdp.get("reduce_dtype") == "bf16" else 900
    assert [bytes_ for _, bytes_ in found.of("backward of mlp")] == [there + layer] * 3
    assert found.of("backward of embedding") == [(16.0, there + 1_012), (0.0, there + 2 * TABLE)]


@pytest.mark.parametrize(
    ("phase", "reshard", "sums", "there"),
    [
        (FIRST, False, 0, (30_000, 30_000, 30_000)),
        (MIDDLE, False, SUMS, (30_000, 30_000, 30_000)),
        (LAST, False, SUMS, (30_000, 20_000, 10_000)),
        (MIDDLE, True, SUMS, (20_000, 20_000, 10_000)),  # its own, and the next one's ahead
    ],
)
def test_flat_parameters_of_a_backward(phase, reshard, sums, there):
    """Beside the flat root, 100,000, and the head's gradients. The loss runs once the last layer's 10,000, or all, are there. The
    first micro-batch's gradients stay, 6,000 a layer; the last one's are reduced with the sums.
    """
    found = walked(phase, version=1, reshard_after_forward=reshard)
    at_loss = 10_000 if reshard else 30_000
    assert found.of("backward of loss") == [(3_216.0, sums + 100_000 + at_loss + 1_200)]
    assert found.of("backward of an all-gather")[0] == (3_216.0, sums + 100_000 + at_loss)
    more = {FIRST: 6_000, MIDDLE: 0, LAST: -6_000}[phase]
    assert found.of("backward of mlp") == [
        (3_016.0 - 1_000 * i, sums + more * i + 100_000 + HEAD + there[i] + 900) for i in range(3)
    ]
