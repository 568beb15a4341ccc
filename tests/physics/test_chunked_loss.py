"""What a loss in chunks holds under FSDP2 beside the logits of one chunk (fsdp.chunked_loss; tests/truth has torch's bytes)."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.answer.result import estimate
from steptime.fsdp.passes import peak_moment
from steptime.job.assembly import Assembly
from steptime.memory.chunked_loss import standing_bytes
from steptime.memory.part_memories import PartMemories

VOCABULARY, END, NORM = 8192, 1_048_576, 128
"""Rows of embedding or head, elements of either (more than a layer's 164,096), and of the final norm."""
MODEL = {"vocab_sz": VOCABULARY}
SAID = {"reduce_dtype": "fp32", "ends": "apart"}
HOW = {"activation_checkpointing_type": "full", "expandable_segments": True, "loss_chunks": 4}


@pytest.mark.parametrize(("batch", "copied"), [(1, 0), (2, 256 + 8)])
def test_backward_of_the_loss(batch, copied):
    """4,096 tokens of 128 numbers a sequence, a quarter of them at a time, by pytorch/torchtitan@bcc09297 components/loss.py.

    Of each token: inputs of 2 layers, of the head's norm and of the head, 4 * 256 B, statistics and ids, 4 + 8, its label, 8,
    and its gradient in fp32, 512. Of several sequences a chunk is a copy: 256 + 8 more. Of a quarter: logits in bf16, which are
    still referenced, and three rows of 8,192 in fp32. Head and norm in bf16 twice, as gathered and in use; the head's gradients
    so far in fp32. The next layer is not gathered yet.
    """
    stage = estimate(
        job("fsdp2", model=MODEL, seqlen=4096, batch=batch, performance=HOW, dp=2, fsdp=SAID)
    ).memory.stages[0]
    assert "loss" in stage.peak_op
    tokens = batch * 4096 * (4 * 256 + 12 + 8 + 512 + copied) + batch * 1024 * (2 + 3 * 4) * VOCABULARY
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert moving == tokens + 2 * 2 * (END + NORM) + 4 * END


@pytest.mark.parametrize(("tied", "whole"), [(False, 2 * END + NORM), (True, END + NORM)])
def test_backward_of_the_loss_of_a_head_in_the_roots_group(tied, whole):
    """As `test_backward_of_the_loss`, beside the whole root in bf16: embedding, head and norm, or one weight for both and norm.

    No hook of the head runs: autograd adds up its gradients as they are made, in bf16, and nothing is gathered once more.
    """
    said = SAID | {"ends": "root"}
    model = MODEL | {"tie_embeddings": tied}
    stage = estimate(job("fsdp2", model=model, seqlen=4096, performance=HOW, dp=2, fsdp=said)).memory.stages[0]
    assert "loss" in stage.peak_op
    tokens = 4096 * (4 * 256 + 12 + 8 + 512) + 1024 * (2 + 3 * 4) * VOCABULARY
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert moving == tokens + 2 * whole + 2 * END


def test_what_the_head_gathered_stays_in_backward():
    """Head and norm in bf16, and again for the norm's backward, in the same group; before, an input of half of it (2 ranks)."""
    found = peak_moment(estimate(job("fsdp2", model=MODEL, performance=HOW, dp=2, fsdp=SAID)).assembly)
    assert found.gathers_bytes == 2 * 2 * (END + NORM) + END + NORM


@pytest.mark.parametrize("batch", [1, 2])
def test_a_loss_by_token_copies_nothing_and_frees_what_it_gathered(batch):
    """pytorch/torchtitan@b5bcd76c components/loss.py: the above less the copies, 256 + 8 bytes a token of several sequences, and
    less head and norm as gathered, 2 bytes a number, which unshard() frees when they are copied out. Of gathers the most is then
    that of the forward's norm, in the same group, while the last layer's is there, and its input.
    """
    peaks = []
    for software in ("torchtitan@2026-08", "torchtitan"):
        said = job(software, model=MODEL, seqlen=4096, batch=batch, performance=HOW, dp=2, fsdp=SAID)
        stage = estimate(said).memory.stages[0]
        assert "loss" in stage.peak_op
        peaks.append(stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes)
    assert peaks[0] - peaks[1] == (batch == 2) * 2 * 4096 * (256 + 8) + 2 * (END + NORM)
    found = peak_moment(estimate(job("torchtitan", model=MODEL, performance=HOW, dp=2, fsdp=SAID)).assembly)
    assert found.gathers_bytes == 2 * (END + NORM) + 2 * 164_096 + END + NORM


@pytest.mark.parametrize("how", [{"loss_impl": "traced"}, {"loss_chunks": 1}])
def test_one_loss_of_all_tokens_gathers_once(how):
    """Its one gather and the last layer's, of 164,096 elements, and an input of half of the former."""
    said = job("fsdp2", model=MODEL, performance=HOW | how, dp=2, fsdp=SAID)
    assert peak_moment(estimate(said).assembly).gathers_bytes == 2 * (END + NORM) + 2 * 164_096 + END + NORM


def test_a_loss_of_pieces_of_all_logits():
    """Only the cross entropy is in pieces (pytorch/torchtitan@e23bb707 components/loss.py, chunked_cross_entropy_loss).

    One device. Of each of 4,096 tokens: inputs of 2 layers, of the head's norm and of the head, 4 * 256 B; statistics, ids and
    its label, 4 + 8 + 8; logits in bf16 and log probabilities in fp32, 2 + 4 B of each of 8,192. Of a quarter the logits in fp32.
    """
    how = HOW | {"loss_impl": "pieces"}
    stage = estimate(job("torch", model=MODEL, seqlen=4096, performance=how)).memory.stages[0]
    assert stage.peak_op == "forward of loss"
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert moving == 4096 * (4 * 256 + 20 + 6 * VOCABULARY) + 1024 * 4 * VOCABULARY


def test_seconds_of_a_loss_of_pieces():
    """Bytes of an element of the logits that are moved. Forward: 2 read, 4 written, 4 read, 4 written. Backward: 4 written, 8
    read and 4 written, 4 read and 2 written, and where pieces' gradients are joined 2 read and 2 written.
    """
    one, four = (loss_bytes({"loss_impl": "pieces", "loss_chunks": n}) for n in (1, 4))
    assert (one, four) == (36 * 4096 * VOCABULARY, 40 * 4096 * VOCABULARY)


def loss_bytes(how):
    """Bytes that the loss moves."""
    loss = estimate(job("fsdp2", model=MODEL, seqlen=4096, performance=how)).assembly.head.ops[-1]
    return loss.forward_bytes + loss.backward_bytes


@pytest.mark.parametrize(
    ("stay", "software", "held"),
    [
        (True, "torch", 4 * END),
        (False, "torch", 0),  # gradients exist before the backward
        (True, "fsdp2", 0),  # the whole gradient is counted by fsdp.loss_chunks
    ],
)
def test_the_heads_gradient_stays_from_chunk_to_chunk(stay, software, held):
    """Every chunk's backward adds to it, in fp32 here: 4 B of each of the head's numbers, of the norm's 128 none."""
    how = HOW | {"main_grad_dtype": "fp32"}
    found = Assembly(job(software, model=MODEL, seqlen=4096, performance=how, dp=2))
    memories = PartMemories(found, weight_grads_stay=stay)
    assert memories.chunks_hold(found.head) - standing_bytes(found.head) == held
