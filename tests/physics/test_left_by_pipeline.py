"""What torch's pipelining of 2024 leaves in memory, by hand.

Source: torch 2.6 torch/distributed/pipelining/stage.py. Run on a CPU with stand-in collectives, four layers under FSDP2 held the
last layer's fp32 gradient, and nothing else, from one step's reduction to the next one's.

One sequence of 128 tokens; 2 stages of 2 layers; 4 micro-batches. A layer has 4 x 64 x 64 parameters of attention,
3 x 64 x 128 of its MLP and 2 x 64 of norms: 41,088, which are reduced in fp32: 164,352 B. A boundary is 128 x 64 x 2 B =
16,384 B; logits are 128 x 512 x 2 B = 131,072 B.
"""

from __future__ import annotations

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.fsdp.pipeline_memory import Outstanding, ShardedStage, shards, stage_chunks
from steptime.job.assembly import Assembly
from steptime.job.job import Job

REDUCED, BOUNDARY, LOGITS = 164_352.0, 16_384.0, 131_072.0


def sharded_job(software: str = "torchtitan@0.1") -> Job:
    """The job of the docstring."""
    sizes = {
        "n_layers": 4,
        "hidden_sz": 64,
        "inter_sz": 128,
        "n_q_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 16,
        "vocab_sz": 512,
    }
    sharded = {"reshard_after_forward": False, "reduce_dtype": "fp32"}
    bf16, where = {"software": software, "precision": "bf16"}, "h100-sxm"
    return jobs.job(sizes, seqlen=128, hardware=where, performance=bf16, pp=2, dp=2, fsdp=sharded)


def stage(at: int, software: str = "torchtitan@0.1") -> ShardedStage:
    """One of the two stages."""
    assembly = Assembly(sharded_job(software))
    return ShardedStage(stage_chunks(assembly)[at], shards(assembly, at))


def waiting(whole: int) -> Outstanding:
    """A stage of one chunk with micro-batches that wait for their backward."""
    return Outstanding((whole,), (0,), (True,))


@pytest.mark.parametrize(
    ("at", "whole", "own", "left"),
    [
        (0, 1, 1, REDUCED + 2 * BOUNDARY),  # two of four outputs wait with what they keep
        (0, 3, 1, REDUCED),  # all do
        (1, 0, 1, REDUCED + 3 * LOGITS),  # the last stage holds one micro-batch
        (0, 0, 0, 4 * BOUNDARY),  # its own reduction frees the input of the one before
    ],
)
def test_outputs_and_the_last_reduction_stay(at, whole, own, left):
    """Outputs whose backward has begun, of all four; and the last layer's gradient, except in the chunk's own reduction."""
    assert stage(at).left(waiting(whole), 0, own) == left


def test_two_chunks_keep_a_reduction_each():
    """Each chunk is a module of its own with its own streams' context: beside one's reduction the other's input stays."""
    one = stage(0).chunks[0]
    both = ShardedStage([one, one], [0.0, 0.0])
    of = Outstanding((1, 2), (0, 0), (True, True))
    assert both.left(of, 0, 1) == 2 * REDUCED + (4 - 2) * BOUNDARY + (4 - 2) * BOUNDARY
    assert both.left(of, 1, 0) == REDUCED + (4 - 1) * BOUNDARY + (4 - 2) * BOUNDARY


def test_later_torch_keeps_neither():
    """torch 2.13 clears the input in the callback that ends the backward, and stages do not keep outputs."""
    assert stage(1, "torchtitan").left(waiting(0), 0, 1) == 0.0


def test_the_estimate_counts_them():
    """The last stage's peak is a backward, beside which three of four logits and the reduction's input stay."""
    keeping = estimate(sharded_job())
    held = ShardedStage.left
    try:
        ShardedStage.left = lambda *_: 0.0  # type: ignore[method-assign]
        freeing = estimate(sharded_job())
    finally:
        ShardedStage.left = held  # type: ignore[method-assign]
    more = [
        a.allocated_bytes - b.allocated_bytes for a, b in zip(keeping.memory.stages, freeing.memory.stages, strict=True)
    ]
    assert more == [REDUCED + 2 * BOUNDARY, REDUCED + 3 * LOGITS]
