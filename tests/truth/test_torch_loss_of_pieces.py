"""Cross entropy of the logits' pieces in turn, as torchtitan of March 2025 had it: bytes of both passes. Zero tolerance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from live_bytes import LiveBytes

from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.op_walk import walk_part
from steptime.memory.part_memories import PartMemories

TOKENS, HIDDEN, VOCABULARY = 256, 64, 4096


def theirs(pieces):
    """Most bytes of each pass beside hidden states, weight and labels; the loop drops the logits before backward."""
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(VOCABULARY, (1, TOKENS))
    live = LiveBytes([x, weight, labels], log=True)
    known = x.nbytes + weight.nbytes + labels.nbytes
    with live:
        logits = F.linear(x, weight)
        total = torch.zeros(())
        for some, of in zip(logits.chunk(pieces, 1), labels.chunk(pieces, 1), strict=True):
            total = total + F.cross_entropy(some.flatten(0, 1).float(), of.flatten(0, 1))
        some = of = logits = None
        turn = len(live.moments)
        total.div(pieces).backward()
    within = [m for m in live.moments[turn:] if m.op != "aten.mm"]
    return [max(moment.total for moment in half) - known for half in (live.moments[:turn], within)]


def ours(pieces):
    """The same of the loss alone, without the labels that it keeps."""
    job = Job(
        model={"n_layers": 1, "hidden_sz": HIDDEN, "inter_sz": 64, "n_q_heads": 1, "vocab_sz": VOCABULARY},
        parallelism={"tp": 1, "pp": 1, "dp": 1},
        performance={"software": "torch", "loss_impl": "pieces", "loss_chunks": pieces},
        data={"gbs": 1, "seqlen": TOKENS, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    assembly = Assembly(job)
    (logits,) = next(op.outputs for op in assembly.head.ops if op.name == "head.proj")
    loss = assembly.head.ops[-1]
    found = walk_part([loss], logits, "", frozenset(), PartMemories(assembly).autograd)
    return [peak.bytes - 8 * TOKENS for peak in (found.forward, found.backward)]


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_bytes_of_both_passes(pieces):
    """Logits, log probabilities and a piece's upcast; then log probabilities and two gradients of a piece."""
    assert theirs(pieces) == ours(pieces)
