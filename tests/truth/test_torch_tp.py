"""Tensor parallelism of torch.distributed.tensor, sequence-parallel or not: collectives and saved storages. Zero tolerance."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from mcore_peak import Live
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as OnDim
from torch.distributed.tensor.parallel import loss_parallel
from torch_blocks import Kernels
from torch_fsdp import Fsdp, sharded, world
from torch_ours import kept_by_model, kept_by_torch, replayed, shard_of

from steptime.bench.runs.probes import Collectives, Saved
from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.model import Model
from steptime.model.ops import Comm, Op
from steptime.model.shard import Shard

BATCH, SEQLEN = 3, 32
LLAMA = Model(n_layers=2, hidden_sz=72, inter_sz=160, n_q_heads=8, n_kv_heads=4, head_dim=16, vocab_sz=240)
GPT = Model(
    n_layers=2,
    hidden_sz=56,
    inter_sz=224,
    n_q_heads=8,
    head_dim=8,
    vocab_sz=128,
    glu=False,
    norm="layernorm",
    bias=True,
)
CASES = {
    "llama": (LLAMA, Kernels()),
    "llama fp32": (LLAMA, Kernels(precision="fp32")),
    "llama unfused attention": (LLAMA, Kernels(attention="unfused")),
    "llama core attention recompute": (LLAMA, Kernels(recompute="selective")),
    "llama full recompute": (LLAMA, Kernels(recompute="full")),
    "gpt": (GPT, Kernels()),
    "gpt full recompute": (GPT, Kernels(precision="fp32", recompute="full")),
}


def stated(model: Model, kernels: Kernels, shard: Shard) -> Counter[tuple[str, float]]:
    """Kinds and bytes of the collectives of one step, from the op lists."""
    block = block_ops(model, shard)
    calls: Counter[tuple[str, float]] = Counter()
    for ops in [embedding_ops(model, shard), *[block] * model.n_layers, head_ops(model, shard)]:
        calls += forward(ops) + backward(ops)
    for _ in range(model.n_layers):
        calls += forward(replayed(block, kernels.recompute))
    return calls


def forward(ops: list[Op]) -> Counter[tuple[str, float]]:
    return Counter((op.kind, op.bytes) for op in ops if isinstance(op, Comm) and op.kind)


def backward(ops: list[Op]) -> Counter[tuple[str, float]]:
    comms = [op for op in ops if isinstance(op, Comm) and op.backward]
    return Counter((op.backward, op.bytes) for op in comms) + Counter(
        ("all_gather", op.bytes) for op in comms if op.regather
    )


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("model", "kernels"), CASES.values(), ids=CASES)
def test_collectives_and_saved_storages(model, kernels, tp, sp):
    with world(1, tp) as mesh:
        module = sharded(model, kernels, Fsdp(params=kernels.precision), SEQLEN, mesh, sp=sp)
        tokens = torch.zeros(BATCH, SEQLEN, dtype=torch.long)
        with Collectives() as seen, loss_parallel():
            with Saved([*module.parameters(), *module.buffers()]) as saved:
                loss = module(tokens, tokens.clone())
            loss.backward()
    shard = shard_of(model, kernels, BATCH, SEQLEN, tp=tp, sp=sp)
    assert Counter({(c.kind, c.bytes): n for c, n in seen.calls.items()}) == stated(model, kernels, shard)
    assert {c.ranks for c in seen.calls} == {tp}
    assert kept_by_torch(saved) == kept_by_model(model, kernels, shard)


class Inside(Live):
    """Sees what DTensor's ops run on local tensors; shapes that it propagates without data do not count."""

    def look(self, op):
        self.alive = {key: ref for key, ref in self.alive.items() if (made := ref()) and made.device.type != "meta"}
        super().look(op)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("tp", [2, 4])
def test_fp32_copies_of_the_logits_at_the_peaks_of_the_loss(tp):
    """Forward three: upcast, shifted, exponentials. Backward four: log-probabilities, zeros, exponentials, their sum.

    Besides these, torch holds a few values per token.
    """
    words = 8192
    with world(1, tp) as mesh:
        local = torch.zeros(BATCH * SEQLEN, words // tp, dtype=torch.bfloat16, requires_grad=True)
        logits = DTensor.from_local(local, mesh["tp"], [OnDim(1)], run_check=False)
        targets = torch.zeros(BATCH * SEQLEN, dtype=torch.long)
        with loss_parallel(), Inside([local]) as live:
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            forward_peak, _ = live.restart()
            loss.backward()
    copy = 4 * BATCH * SEQLEN * words // tp
    assert (forward_peak // copy, live.most // copy) == (3, 4)
    model = LLAMA.model_copy(update={"vocab_sz": words})
    ops = {op.name: op for op in head_ops(model, shard_of(model, Kernels(), BATCH, SEQLEN, tp=tp, sp=True))}
    # beside the upcast and the log-probabilities (and the logits that the caller holds), and beside three in backward
    softmax = ops["loss.log_softmax"]
    assert (softmax.forward_temp_bytes - copy / 2, softmax.backward_temp_bytes) == (copy, copy)


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_gathered_before_the_loss(tp):
    """disable_loss_parallel of torchtitan: one all-gather of all logits, none in backward, and a loss over the whole vocabulary.

    Kept for backward are log-probabilities in fp32. At the peak of forward the gathered logits, their upcast and its
    log-probabilities are alive, 2 + 4 + 4 bytes a logit; in backward log-probabilities, their gradient and that of the upcast.
    """
    words = 8192
    with world(1, tp) as mesh:
        local = torch.zeros(BATCH * SEQLEN, words // tp, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(BATCH * SEQLEN, dtype=torch.long)
        with Collectives() as seen, Inside([local]) as live:
            logits = DTensor.from_local(local, mesh["tp"], [OnDim(1)], run_check=False)
            logits = logits.redistribute(placements=[Replicate()]).to_local()
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            forward_peak, _ = live.restart()
            loss.backward()
    one = BATCH * SEQLEN * words
    assert Counter({(c.kind, c.bytes): n for c, n in seen.calls.items()}) == {("all_gather", 2 * one): 1}
    assert (forward_peak // one, live.most // one) == (
        10,
        14,
    )  # the caller still holds the gathered logits in backward: 2 more
    model = LLAMA.model_copy(update={"vocab_sz": words})
    shard = shard_of(model, Kernels(), BATCH, SEQLEN, tp=tp, sp=True)
    shard = dataclasses.replace(shard, software=shard.software.replace(gathered_logits=True))
    ops = {op.name: op for op in head_ops(model, shard)}
    gather = ops["head.concat"]
    assert (gather.kind, gather.bytes, gather.backward) == ("all_gather", 2 * one, None)
    assert not {"loss.max", "loss.target", "loss.sum"} & ops.keys()
    softmax = ops["loss.log_softmax"]
    assert softmax.outputs[0].bytes == 4 * one
    assert (softmax.forward_temp_bytes, softmax.backward_temp_bytes) == (2 * one, 0)  # no exponentials besides
