"""Every moment of the head's backward under FSDP2, to the byte: whole, or loss by loss in chunks.

Eight tokens of 128 values, a vocabulary of 1,024, two ranks, gradients reduced in fp32. The head saves 5,000 B and has 9,000 at
most in backward; 10 B are saved below it. Its group as gathered 20,000, in use 30,000, its shard 7; gradients 6,000 of which the
reduction makes 8,000, input 400, stored 90. Other parameters are there with 100,000, the last layer's arrive with 10,000.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.ends import GatheredEnds
from steptime.fsdp.groups import Buffers
from steptime.fsdp.loss_chunks import chunks_backward, rooted_chunks
from steptime.fsdp.memory_walk import Wrapped, head_backward
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories

ENDS = GatheredEnds(
    Buffers(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, last=0.0, sums=0.0),
    Buffers(7.0, 20_000.0, 30_000.0, 6_000.0, 400.0, 50.0, 8_000.0, 0.0, last=0.0, sums=0.0, stored=90.0),
    between=60.0,
    separate=True,
)
BLOCK = Buffers(0.0, 10_000.0, 40_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=0.0, sums=0.0)
HEAD = PartMemory(5_000.0, Peak(7_000.0, "loss"), Peak(9_000.0, "loss"))
VOCABULARY, NORM = 1024 * 128, 128
HIDDEN = 8 * 128 * 2
LOGITS, LOG_PROBS = 2 * 1024 * 2, 2 * 1024 * 4
"""Of a quarter of the tokens, in bf16 and in fp32."""


def an_assembly(chunks: int = 4, software: str = "fsdp2") -> Assembly:
    performance = {"loss_chunks": chunks, "loss_impl": "composite"}
    return Assembly(job(software, seqlen=8, performance=performance, dp=2, fsdp={"reduce_dtype": "fp32"}))


def test_a_head_of_its_own_is_reduced_after_its_backward():
    """In its backward: 30,000 in use, 60 of the embedding, 10,000 arriving, 9,000 - 5,000. Then what replaces the gradients,
    8,000, the input, 400, and the gradient of the hidden states. The head's 90 are stored; the input outlives the head.
    """
    of, moments = an_assembly(1), Every(1_000.0)
    memories = PartMemories(of, weight_grads_stay=True)
    memories.head = HEAD
    layers = [Wrapped(LAYER, [BLOCK], [0.0], 400.0, 0.0)]
    assert head_backward(of, memories, moments, ENDS, layers, 10.0, 100_000.0) == (0.0, 400.0)
    assert [moment[:3] for moment in moments.all] == [
        (5_010.0, 100_060 + 30_000 + 10_000 + 4_000, "backward of loss"),
        (10.0, 100_060 + 10_000 + 8_000 + 400 + HIDDEN, "backward of a reduce-scatter"),
    ]
    assert moments.to_come == 1_000 - 90


def test_gradients_of_a_head_in_the_root_stay():
    """2 B of each number of head and norm until the root reduces them."""
    of, moments = an_assembly(1), Every()
    memories = PartMemories(of, weight_grads_stay=True)
    memories.head = HEAD
    left = head_backward(of, memories, moments, ENDS._replace(separate=False), [], 10.0, 100_000.0)
    assert left == (2 * (VOCABULARY + NORM), 0.0)
    assert [moment[:3] for moment in moments.all] == [(5_010.0, 100_000 + 30_000 + 4_000, "backward of loss")]


@pytest.mark.parametrize(("software", "standing"), [("torchtitan@2026-08", 20_000), ("torchtitan", 0)])
def test_a_head_that_runs_chunk_by_chunk(software, standing):
    """pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper; foreach_reduce of torch's FSDP2.

    While chunks run, the sums of the head's gradients in fp32. In the last chunk's: the collected gradient in fp32, the logits,
    and the gradient of a quarter of the hidden states, beside the reduction's input, fp32 again; log probabilities are freed.
    The reduction's output, half of it, and the last sum, which stays, replace the sums: half of it more. A loss by token has
    freed what was gathered before (@b5bcd76c). The hidden states are handed on; the norm is gathered with the head again, 20,000,
    then both their gradients are there.
    """
    sums = 4 * VOCABULARY
    of, moments = an_assembly(software=software), Every(1e6)
    after = chunks_backward(of, moments, ENDS, HEAD, below=10.0, kept=100_000.0, arriving=10_000.0)
    held = 100_000 + 30_000 + sums
    summed = held + 2 * HIDDEN + LOGITS + HIDDEN / 4 + sums
    norm = 100_000 + 30_000 + sums
    assert [moment[:3] for moment in moments.all] == [
        (5_010.0, held + 4_000, "backward of loss"),
        (5_010.0 - LOG_PROBS, summed, "backward of a sum of gradients"),
        (5_010.0 - LOG_PROBS, summed + sums / 2, "backward of a reduce-scatter"),
        (5_010.0 - LOG_PROBS - HIDDEN, norm + HIDDEN + 20_000, "backward of an all-gather"),
        (5_010.0 - LOG_PROBS - HIDDEN, norm + 2 * HIDDEN + 10_000, "backward of head.norm"),
    ]
    assert (moments.standing, moments.sent, moments.gathered) == (standing, 7.0, 20_000.0 + standing)
    assert moments.to_come == 1e6 - (VOCABULARY + NORM) / 2 * 4
    assert after == 4 * NORM


def test_a_head_in_the_root_runs_chunk_by_chunk():
    """Its gradients add up in bf16 as they are made; after the chunks the log probabilities and hidden states are gone."""
    of, moments = an_assembly(), Every()
    rooted_chunks(of, moments, ENDS, HEAD, 10.0, 100_000.0, 10_000.0)
    held = 100_000 + 30_000 + 2 * VOCABULARY
    assert [moment[:3] for moment in moments.all] == [
        (5_010.0, held + 4_000, "backward of loss"),
        (5_010.0 - LOG_PROBS - HIDDEN, held + 2 * HIDDEN + 10_000, "backward of head.norm"),
    ]
