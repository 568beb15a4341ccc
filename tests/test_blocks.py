"""What torch's caching allocator counts for states beyond their bytes, block by block, worked out by hand."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.memory.allocator_blocks import LargeBlocks, further_ends, registered, shards
from steptime.memory.buckets import Pieces
from steptime.memory.states import stage_states

MIB = 2.0**20
GPT = {
    "n_layers": 12, "hidden_sz": 512, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 50257, "norm": "layernorm", "bias": True,
    "learned_positions": True, "rotary_embeds": False, "glu": False, "tie_embeddings": True, "dropout": 0.1,
}  # fmt: skip
"""A GPT of Megatron-LM's own tests."""


def plan(hardware, **performance):
    """It on Megatron's own layers, without TransformerEngine, two stages and four replicas."""
    said = {
        "cublas_workspace": ":4096:8", "grad_accumulation_fusion": False, "attention_impl": "unfused",
        "scores_in_buffer": True, "te_workspaces": 0, "dummy_wgrads": "none",
    } | performance  # fmt: skip
    return job(
        GPT, gbs=32, seqlen=1024, microbatch_sz=4, hardware=hardware, performance=said, tp=1, pp=2, dp=4, zero_level=0
    )


def test_blocks_that_small_tensors_share():
    """13 tensors of 1.5 MiB take 19.5 of 20 MiB and the last one its end, 0.5; a tensor of 3 MiB takes a free block of 4 whole.

    From 10 MiB on memory is a multiple of 2 MiB: 10.5 takes 12, of which 1.5 are cut off, and serve the next tensor of 1.5.
    """
    blocks = LargeBlocks()
    small = [blocks.allocate(1.5 * MIB) for _ in range(13)]
    assert blocks.rest == 0.5 * MIB
    first = blocks.allocate(10.5 * MIB)
    second = blocks.allocate(1.5 * MIB)
    assert (blocks.rest, second.address) == (0.5 * MIB, first.address + 10.5 * MIB)
    blocks.release(small[12])  # 2 MiB with its end
    assert blocks.rest == 0.0
    for address in small[:12]:
        blocks.release(address)
    fourth = [blocks.allocate(4.0 * MIB) for _ in range(5)]
    assert blocks.rest == 0.0
    blocks.release(fourth[2])
    blocks.allocate(3.0 * MIB)
    assert blocks.rest == 1.0 * MIB
    assert blocks.allocate(MIB) is None


def test_a_block_that_joined_its_neighbor_has_one_length():
    """4 and 16 MiB fill 20; freed in the order 16, 4 they are one block of 20, whose first 16 the next tensor of 16 takes.

    The 4 left are the next tensor's; nothing is asked of the driver again.
    """
    blocks = LargeBlocks()
    small, large = blocks.allocate(4.0 * MIB), blocks.allocate(16.0 * MIB)
    assert (small.address, large.address) == (0.0, 4.0 * MIB)
    blocks.release(large)
    blocks.release(small)
    assert (blocks.allocate(16.0 * MIB).address, blocks.allocate(4.0 * MIB).address) == (0.0, 16.0 * MIB)
    assert blocks.rest == 0.0


def test_ends_between_steps_as_a_gpu_counted_them():
    """Tensor parallel 1, pp 2, nothing sharded: the last stage holds six layers and the head. By hand, in MiB:

    Parameters of a layer are 1.5, 2 and 2, main weights and each moment 3, 4 and 4; smaller ones have a pool of their own. Six
    layers' parameters leave 7 of 40 free, gradients 1.59 of 172. Main weights: 3 of the 7, then 4s of a new 20; the second
    layer's 3 takes what is left of the 7, a block of 4, whole: 1 too many. All others are cut off; 2s, 12 and the 50 of the
    head's copy stay free. Moments use these and three new 20s up to the sixth layer, whose first 3 takes a block of 4 and whose
    last 4 one of 5: 3 too many in all, beside the 0.875 of the head's parameter (49.125 of 50).

    Megatron-LM's gpt3_mcore_tp1_pp2 has 906.706 on GB200, 2 less on A100 and 2 more on H100: blocks that activations leave.
    """
    found = plan("gb200-nvl72")
    states = stage_states(Assembly(found))[1]
    assert further_ends(Assembly(found), 1, states).bytes == 3.0 * MIB
    row = estimate(found).memory.stages[1]
    assert row.persisting_bytes / MIB == pytest.approx(906.706, abs=0.004)
    other = plan("dgx-a100-80", expandable_segments=True)
    assert further_ends(Assembly(other), 1, states).bytes == 0.0


def test_the_last_rank_updates_the_end_of_every_bucket():
    """Tensors start at multiples of 64. Buckets of 1,152 and 512: of 2 ranks the last has 576 to 1,151 and 256 to 511 of each.

    100 lies at 0; 1,000 from 128 to 1,127: 552 of it; 70 in the second bucket at 0: none; 300 from 128 to 427: 172.
    """
    pieces = [Pieces(100, 1), Pieces(1000, 1), Pieces(70, 1), Pieces(300, 1)]
    assert shards(pieces, [1152.0, 512.0], 2.0) == [552.0, 172.0]
    assert registered(pieces) == [300.0, 70.0, 1000.0, 100.0]
