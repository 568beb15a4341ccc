"""Every moment of an FSDP2 backward whose last micro-batch alone reduces gradients, to the byte.

The others add theirs up whole, in the dtype of the reduction: here fp32, twice the bf16 gradients, so that a layer's are copied
(torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward; _fsdp_param.py, to_accumulated_grad_if_needed).
Three layers of 1,000 B saved and 1,900 B at most in backward. A group: gathered 10,000, unsharded 30,000, gradients 3,000, their
sums 6,000, the reduction's input 6,000, what takes the sums' place 700, its last gradient 70; the root's: 100,000, 300,000,
50,000, 100,000, 60,000, 7,000 and 200. Two tokens of 128: the embedding keeps 16 B of ids, x has 512 B.
"""

from __future__ import annotations

from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.no_sync_walk import Phase, WalkedChunk, backward
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)
BASE = 300_000 + 2 * 131_200
"""Beside every layer's backward: the root's parameters, and the gradients of head and norm in bf16."""
SUMS = 100_000 + 3 * 6_000
EMBEDDING = 2 * 131_072 + 512
"""Its gradient in bf16, and the gradient that came in."""


def walked(phase: Phase, block: Buffers = BLOCK) -> Every:
    """The backward of a micro-batch; each layer's reduction leaves 400 B until it ends."""
    assembly = Assembly(job("fsdp2", seqlen=2, microbatches=3, dp=2, fsdp={"reduce_dtype": "fp32", "no_sync": True}))
    layers, found = [Wrapped(LAYER, [block], [0.0], 400.0, 70.0)] * 3, Every()
    memories = PartMemories(assembly, weight_grads_stay=True)
    backward(WalkedChunk(assembly, memories, ROOT, layers, layers), found, phase)
    return found


def test_the_first_micro_batch_makes_the_sums():
    """Each layer done leaves 6,000. While they are made its last gradient 70 is there, the next layer's flat buffer 10,000, the
    gradient that came in 512. At the end the root's: 100,000 and its last gradient 200 beside all layers' sums.
    """
    found = walked(Phase(summed=False, last=False))
    gather, run, add = BASE + 30_000 + 10_050 + 512, BASE + 30_000 + 900, BASE + 512 + 70
    assert found.of("backward of an all-gather") == [(3_016.0 - 1_000 * i, gather + 6_000 * i) for i in range(3)]
    assert found.of("backward of mlp") == [
        (3_016.0, run + 10_000),
        (2_016.0, run + 10_000 + 6_000),
        (1_016.0, run + 12_000),
    ]
    assert found.of("backward of a sum of gradients") == [
        (2_016.0, add + 10_000 + 6_000),
        (1_016.0, add + 10_000 + 12_000),
        (16.0, add + 18_000),
        (0.0, 18_000 + 100_000 + 200),
    ]
    assert found.of("backward of embedding") == [(16.0, BASE + 18_000 + EMBEDDING)]


def test_one_in_the_middle_adds_to_them():
    """All sums are there from the start, and nothing is made anew."""
    found = walked(Phase(summed=True, last=False))
    run = SUMS + BASE + 30_000 + 900
    assert found.of("backward of mlp") == [(3_016.0, run + 10_000), (2_016.0, run + 10_000), (1_016.0, run)]
    assert found.of("backward of embedding") == [(16.0, SUMS + BASE + EMBEDDING)]
    assert not found.of("backward of a sum of gradients")
    assert not found.of("backward of a reduce-scatter")


def test_the_last_one_reduces_them():
    """A layer's sums go into the input of its reduction, 6,000 each, which outlives one layer; 400 wait for the end. The sums are
    6,000 and what takes their place, 700 and its last gradient, 70 more as it is fp32, less. The root's 100,000 likewise.
    """
    found = walked(Phase(summed=True, last=True))
    run, reduce = BASE + 30_000 + 900, BASE + 512 + 6_000 + 6_000
    assert found.of("backward of mlp") == [
        (3_016.0, SUMS + run + 10_000),
        (2_016.0, SUMS - 6_000 + run + 10_000 + 6_000 + 400),
        (1_016.0, SUMS - 12_000 + run + 6_000 + 800),
    ]
    assert found.of("backward of a reduce-scatter") == [
        (2_016.0, SUMS - 6_000 + reduce + 10_000),
        (1_016.0, SUMS - 12_000 + reduce + 10_000 + 400),
        (16.0, SUMS - 18_000 + reduce + 800),
    ]
    assert found.of("backward of embedding") == [(16.0, 100_000 + BASE + 6_000 + 1_200 + EMBEDDING)]
    assert found.of("backward of the root's reduce-scatter") == [(0.0, 100_000 + 60_000 + 1_200)]


def test_what_takes_the_place_of_sums_may_be_larger():
    """With few ranks: 7,000 in place of sums of 6,000; the last gradient counts 70 there, in bf16, and is an fp32 sum of 140."""
    found = walked(Phase(summed=True, last=True), BLOCK._replace(reduced=7_000.0))
    first = found.of("backward of a reduce-scatter")[0]
    assert first == (2_016.0, SUMS - 6_000 + BASE + 512 + 10_000 + 7_070 + 6_000)
