"""FSDP's walks at their ends: embedding, head and root of made-up sizes around three layers, every byte by hand.

A layer's group: sent 5,000, gathered 10,000, unsharded 30,000, gradients 3,000, reduction's input 6,000, leaves 400; the root's:
100,000, 300,000, 50,000, 60,000. Embedding and head save 16 and 200 B and have 528 and 900 B at most in forward, 1,028 and
1,400 B in backward; a layer saves 1,000 B. Gradients of the head's 131,200 parameters are bf16.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.ends import GatheredEnds
from steptime.fsdp.flat_walk import flat_backward, flat_forward
from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped, backward, forward
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(5_000.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=0.0, sums=0.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=0.0, sums=0.0)
HEAD = 2 * 131_200
LEFT = 3 * 400
TABLE = 2 * 131_072


def walked(*, chunks: int = 1, tied: bool = False, **fsdp: object) -> tuple[Every, Every]:
    """`chunks`: of the loss."""
    said, model = {"reduce_dtype": "fp32"} | fsdp, {"n_layers": 3, "tie_embeddings": tied}
    how = {"loss_chunks": chunks}
    assembly = Assembly(job("fsdp2", model=model, performance=how, seqlen=2, microbatches=2, dp=2, fsdp=said))
    memories = PartMemories(assembly, weight_grads_stay=True)
    memories.embedding = PartMemory(16.0, Peak(528.0, "embedding"), Peak(1_028.0, "embedding"))
    memories.head = PartMemory(200.0, Peak(900.0, "loss"), Peak(1_400.0, "loss"))
    there, back = Every(), Every()
    passes = (flat_forward, flat_backward) if said.get("version") == 1 else (forward, backward)
    for walk, found in zip(passes, (there, back), strict=True):
        walk(assembly, memories, found, ROOT, [Wrapped(LAYER, [BLOCK], [0.0], 400.0, 0.0)] * 3)
    return there, back


@pytest.mark.parametrize(("reshard", "kept", "ahead"), [(True, 0, 10_000), (False, 90_000, 0)])
def test_head_and_embedding(reshard, kept, ahead):
    """The head finds the last layer's flat buffer in forward, in backward the one gathered for the last layer, or all layers. The
    first layer's reduction still reads its 6,000 beside the embedding's backward.
    """
    there, back = walked(reshard_after_forward=reshard)
    assert there.of("forward of embedding") == [(0.0, 300_000 + 100_000 + 528)]
    assert there.of("forward of loss") == [(3_216.0, 300_000 + 10_000 + kept + 700)]
    assert back.of("backward of loss") == [(3_216.0, 300_000 + ahead + kept + 1_200)]
    assert back.of("backward of embedding") == [(16.0, 300_000 + 6_000 + HEAD + LEFT + 1_012)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_heads_gradients_stay_to_the_embeddings_backward(tied, chunks):
    """Gradients of the head's weight, 1,024 * 128 in bf16, and of the norm, 128, are part of the root's, which is reduced last.

    Where the weight is the embedding's own too: autograd adds the embedding's gradient to it (torch/csrc/autograd/engine.cpp, an
    InputBuffer waits for all of a node's inputs), into a new tensor (input_buffer.cpp, accumulate): 1,024 * 128 in bf16 twice,
    when nothing is left of what the embedding saved. Or chunks of the loss have, and it is added in place.
    """
    _, back = walked(chunks=chunks, tied=tied)
    beside = 300_000 + 6_000 + HEAD + LEFT
    summed = [(0.0, beside + 2 * TABLE)] if tied and chunks == 1 else []
    assert back.of("backward of embedding") == [(16.0, beside + 1_012), *summed]


def test_memory_of_what_the_embeddings_reduction_returns(monkeypatch):
    """The embedding is a group of its own: gradients of 2e9, the reduction's input of 3e9, and shards of 5e9 in place of those.
    These are 3e9 more, from the reducing stream's memory; the computing stream's has 2e9, 3e9 and what layers leave. The head's
    shards are smaller than its gradients.
    """
    first = ROOT._replace(gradients=2e9, reduce_input=3e9, reduced=5e9)
    ends = GatheredEnds(first, ROOT, 0.0, separate=True)
    monkeypatch.setattr("steptime.fsdp.memory_walk.ends_of", lambda *_: ends)
    _, back = walked()
    assert back.of("backward of the root's reduce-scatter") == [(0.0, 5e9 + 3e9 + LEFT)]
    assert back.most == 2e9 + 3e9 + LEFT


@pytest.mark.parametrize(("wrap", "left"), [("block", LEFT), ("model", 0)])
def test_the_roots_reduction(wrap, left):
    """Its gradients of 50,000 and the input of 60,000; what layers leave is part of them where all are one group."""
    _, back = walked(wrap=wrap)
    assert back.of("backward of the root's reduce-scatter") == [(0.0, 50_000 + 60_000 + left)]


def test_a_smaller_group_than_its_reduced_gradients():
    """The reduced shards take the gradients' place: 7,000 where those have 5,000."""
    assembly = Assembly(job("fsdp2", seqlen=2, dp=2, fsdp={"reduce_dtype": "fp32"}))
    found = Every()
    backward(assembly, PartMemories(assembly), found, ROOT._replace(gradients=5_000.0), [])
    assert found.of("backward of the root's reduce-scatter") == [(0.0, 7_000 + 60_000)]


@pytest.mark.parametrize(("reshard", "kept"), [(True, 0), (False, 30_000)])
def test_flat_parameters_ends(reshard, kept):
    """The root's 100,000 are read as they are. Before the loss's backward the last layer's 10,000 come, from a shard of 5,000."""
    there, back = walked(version=1, reshard_after_forward=reshard)
    assert there.of("forward of embedding") == [(0.0, 100_000 + 528)]
    assert there.of("forward of loss") == [(3_216.0, 100_000 + kept + 700)]
    first = (3_216.0, 100_000 + (15_000 if reshard else 30_000))
    assert back.of("backward of an all-gather")[0] == first
    assert back.of("backward of loss") == [(3_216.0, 100_000 + (10_000 if reshard else 30_000) + 1_200)]
    assert back.of("backward of embedding") == [(16.0, 100_000 + HEAD + LEFT + 1_012)]
    assert back.of("backward of the root's flat gradient") == [(0.0, 100_000 + 50_000 + 100_000)]


def test_a_tied_heads_gradient_waits_beside_flat_parameters():
    """As much as an untied one, 2 * (1,024 * 128 + 128) B, beside each layer: its own 10,000, the next one's, and 900. Last the
    embedding's, 2 * 1,024 * 128 B, and a sum of as many lie beside it (torch/csrc/autograd/input_buffer.cpp, accumulate).
    """
    _, back = walked(version=1, tied=True)
    assert [bytes_ - 400 * i for i, (_, bytes_) in enumerate(back.of("backward of mlp"))] == [
        100_000 + HEAD + there + 900 for there in (20_000, 20_000, 10_000)
    ]
    assert back.of("backward of embedding") == [
        (16.0, 100_000 + HEAD + LEFT + 1_012),
        (0.0, 100_000 + HEAD + LEFT + 2 * TABLE),
    ]


def test_nothing_is_gathered_before_the_loss_without_prefetch():
    _, back = walked(version=1, prefetch=0)
    assert back.of("backward of an all-gather")[0] == (3_216.0, 100_000)
    assert back.of("backward of loss") == [(3_216.0, 100_000 + 1_200)]


def test_modules_of_a_block_leave_no_root():
    """Where every module is wrapped neither root nor head's gradients stay, and the loss runs before any is gathered. Beside a
    layer's backward: its own 10,000 and the next one's; the first has none before it.
    """
    there, back = walked(version=1, wrap="module")
    assert there.of("forward of loss") == [(3_216.0, 700)]
    assert back.of("backward of loss") == [(3_216.0, 1_200)]
    assert back.of("backward of an all-gather")[0] == (3_216.0, 15_000)
    assert back.of("backward of mlp") == [
        (3_016.0 - 1_000 * i, there_ + 400 * i + 900) for i, there_ in enumerate((20_000, 20_000, 10_000))
    ]
    assert back.of("backward of embedding") == [(16.0, LEFT + 1_012)]


def test_a_traced_graph_gathers_each_end_for_itself():
    """Embedding, 1,024 x 128, and head with its norm, 131,200, in bf16: each twice, gathered and copied out, while the embedding
    runs; between its forward and the head's nothing of them stays. The head's gradients, 2 * 131,200, and their reduction's
    input, 4 * 131,200, come before the first layer's backward, beside the next layer's 10,000 and the gradient of 2 tokens x 128.
    """
    there, back = walked(wrap="parameter")
    embedding, head, tokens = 2 * 131_072, 2 * 131_200, 2 * 2 * 128
    assert there.of("forward of embedding") == [(0.0, 2 * embedding + 528)]
    assert there.of("forward of loss") == [(3_216.0, head + 10_000 + 700)]
    assert back.of("backward of loss") == [(3_216.0, head + 10_000 + 1_200)]
    shard = (
        4 * 131_200 / 2 + embedding
    )  # of the reduced gradients, and the last parameter's own, which a loop still names
    assert back.of("backward of a reduce-scatter")[0] == (3_016.0, 10_000 + shard + 2 * head + tokens)
    assert back.of("backward of embedding") == [(16.0, 6_000 + LEFT + 1_012)]
    left = 4 * 131_072 / 2 + embedding
    assert back.of("backward of the root's reduce-scatter") == [(0.0, left + 2 * embedding + LEFT)]


def test_layers_that_stay_gathered_in_a_traced_graph():
    """Three of 30,000 beside the head's reduction: its gradients and their shard as above; nothing is gathered ahead."""
    _, back = walked(wrap="parameter", reshard_after_forward=False)
    shard, head, tokens = 4 * 131_200 / 2 + 2 * 131_072, 2 * 131_200, 2 * 2 * 128
    assert back.of("backward of a reduce-scatter")[0] == (3_016.0, 90_000 + shard + 2 * head + tokens)
