"""The loss in chunks of torchtitan under FSDP2: bytes at the peak of a first step. Zero tolerance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from live_bytes import LiveBytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch_blocks import DTYPES, Kernels, Transformer
from torch_fsdp import world
from torch_jobs import covering

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.memory.stages import peak_moments
from steptime.model.model import Model

DP, SEQLEN, CHUNKS = 4, 256, 8
WIDE = Model(n_layers=3, hidden_sz=64, inter_sz=160, n_q_heads=4, n_kv_heads=2, head_dim=16, vocab_sz=2048)
MODELS = {
    "loss": WIDE,
    "layers": WIDE.model_copy(update={"vocab_sz": 512}),
    "gradients of the head": WIDE.model_copy(update={"hidden_sz": 96, "n_q_heads": 6}),
}
"""Models by what is largest."""


class Body(Transformer):
    """The model without its head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.kernels.recompute == "full":
                x = checkpoint(block, x, self.cos, self.sin, self.mask, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin, self.mask)
        return self.norm(x)


class Whole(Body):
    """The model with its head and one loss of all tokens."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(super().forward(tokens)), labels)


class Handed(torch.autograd.Function):
    """Hands the collected gradient on to the hidden states."""

    @staticmethod
    def forward(ctx, hidden, grad, loss):
        ctx.save_for_backward(grad)
        return loss.detach()

    @staticmethod
    def backward(ctx, _):
        (grad,) = ctx.saved_tensors
        return grad, None, None


def cut(whole: Tensor) -> list[Tensor]:
    """Chunks of the sequence, each contiguous."""
    return [part.contiguous() for part in torch.split(whole, whole.shape[1] // CHUNKS, dim=1)]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1), reduction="sum")


def chunked_loss(hidden: Tensor, labels: Tensor, head: nn.Linear, *, by_token: bool = False) -> Tensor:
    """pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper.__call__; `by_token`: @b5bcd76c."""
    if by_token:  # all tokens are one sequence
        hidden, labels = hidden.flatten(0, 1)[None], labels.flatten(0, 1)[None]
    parts = [part.detach().requires_grad_() for part in cut(hidden)]
    targets = cut(labels)
    collected = torch.zeros_like(hidden, dtype=torch.float32)
    total = hidden.new_zeros((), dtype=torch.float32)
    sharded = isinstance(head, FSDPModule)
    if sharded:
        stay(head, keep=True)
    if sharded and by_token:
        head.unshard()
    ends = [0, *(part.shape[1] * (i + 1) for i, part in enumerate(parts))]
    for (start, end), part, target in zip(pairwise(ends), parts, targets, strict=True):
        if sharded and end == hidden.shape[1]:
            head.set_requires_gradient_sync(True, recurse=False)
        logits = head(part)  # the last chunk's logits are referenced until now
        loss = cross_entropy(logits, target)
        total = total + loss.detach()
        loss.backward()
        collected[:, start:end] = part.grad.to(torch.float32)
        part.grad = None
    if sharded:
        stay(head, keep=False)
        head.reshard()
    return Handed.apply(hidden, collected.to(hidden.dtype), total)


def stay(head: nn.Linear, *, keep: bool) -> None:
    """Keep the head's parameters gathered and its gradients unreduced, or not."""
    head.set_reshard_after_forward(not keep)
    head.set_reshard_after_backward(not keep)
    head.set_requires_gradient_sync(not keep, recurse=False)


def step(body: Body, batch: int, *, by_token: bool = False) -> None:
    """Forward and backward of one micro-batch."""
    tokens, labels = torch.zeros(batch, SEQLEN, dtype=torch.long), torch.zeros(batch, SEQLEN, dtype=torch.long)
    if isinstance(body, Whole):
        loss = body(tokens, labels)
    else:
        hidden = body(tokens)
        loss = chunked_loss(hidden, labels, body.head, by_token=by_token)
        del hidden
    del tokens, labels
    loss.backward()


def wrapped(body: Body, mesh: DeviceMesh, reduce: str, ends: str) -> Body:
    """Each block is a group; so are embedding, and norm with head, where they are apart.

    torchtitan/distributed/fsdp.py, apply_fsdp_to_decoder; without, torchtitan/models/qwen3/parallelize.py@fc6629b.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, DTYPES[reduce], cast_forward_inputs=False)
    said = {"mesh": mesh["dp"], "mp_policy": policy}
    if ends == "apart":
        fully_shard(body.tokens, **said, reshard_after_forward=True)
        fully_shard([body.norm, body.head], **said, reshard_after_forward=False)
    for block in body.blocks:
        fully_shard(block, **said, reshard_after_forward=True)
    return fully_shard(body, **said)


def held(
    model: Model, recompute: str, batch: int, reduce: str, ends: str, *, by_token: bool = False, of: type[Body] = Body
) -> int:
    """The most that torch holds, without buffers."""
    with world(DP) as mesh:
        body = wrapped(of(model, Kernels(recompute=recompute), SEQLEN), mesh, reduce, ends)
        step(body, batch, by_token=by_token)
        for param in body.parameters():
            param.grad = None
        with LiveBytes([*body.parameters(), *body.buffers()]) as live:
            step(body, batch, by_token=by_token)
    return live.peak.total - sum(t.untyped_storage().nbytes() for t in body.buffers())


def alone(model: Model, recompute: str, batch: int) -> int:
    """The same on one device, in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        body = Body(model, Kernels(recompute=recompute), SEQLEN)
    finally:
        torch.set_default_dtype(torch.float32)
    with LiveBytes([*body.parameters(), *body.buffers()]) as live:
        step(body, batch)
    return live.peak.total - sum(t.untyped_storage().nbytes() for t in body.buffers())


def stated(
    model: Model,
    recompute: str,
    batch: int,
    reduce: str = "",
    ends: str = "",
    software: str = "fsdp2",
    chunks: int = CHUNKS,
) -> float:
    """The estimate's peak of a first step's forward and backward, which has no moments yet."""
    performance = {"software": software if reduce else "torch", "loss_chunks": chunks, "loss_impl": "composite"}
    performance |= {"norm_impl": "fused", "activation_impl": "composite", "recompute_stops_early": True}
    performance |= {"activation_checkpointing_type": recompute}
    parallelism: dict[str, Any] = {"tp": 1, "pp": 1, "dp": DP if reduce else 1}
    if reduce:
        performance |= {"param_dtype": "fp32", "main_grad_dtype": "fp32", "moment_dtype": "fp32"}
        parallelism["fsdp"] = {"ends": ends, "reduce_dtype": reduce}
    job = Job(
        model=model,
        parallelism=parallelism,
        performance=performance,
        data={"gbs": parallelism["dp"] * batch, "seqlen": SEQLEN, "microbatch_sz": batch},
        hardware="mi300x-node",
    )
    found = estimate(job)
    stage = found.memory.stages[0]
    if reduce:
        return stage.first_peak_bytes - stage.buffers_bytes
    return 2.0 * stage.params_bytes + peak_moments(found.assembly)[0].added_bytes  # as many bytes of gradients


RECOMPUTE, BATCHES, REDUCED = ("none", "full"), (1, 2), ("fp32", "bf16")
ENDS = {"apart": ("apart", False), "root": ("root", False), "root, tied": ("root", True)}


@pytest.mark.parametrize(
    ("model", "recompute", "batch", "reduce", "ends"), covering(MODELS, RECOMPUTE, BATCHES, REDUCED, ENDS, meet=3)
)
def test_peak(model, recompute, batch, reduce, ends):
    """Tied, the head's gradients add up in the embedding's, which the root reduces after the embedding's backward."""
    where, tied = ENDS[ends]
    model = MODELS[model].model_copy(update={"tie_embeddings": tied})
    assert stated(model, recompute, batch, reduce, where) == held(model, recompute, batch, reduce, where)


@pytest.mark.parametrize(("tied", "recompute", "reduce"), covering((False, True), RECOMPUTE, REDUCED, meet=3))
def test_peak_of_one_loss_of_all_tokens(tied, recompute, reduce):
    """Layers are largest. The gradient of a tied weight waits in autograd for the embedding's, which is added to it."""
    model = WIDE.model_copy(update={"hidden_sz": 384, "n_q_heads": 24, "vocab_sz": 768, "tie_embeddings": tied})
    assert stated(model, recompute, 1, reduce, "root", chunks=1) == held(model, recompute, 1, reduce, "root", of=Whole)


@pytest.mark.parametrize(("model", "recompute", "batch", "reduce"), covering(MODELS, RECOMPUTE, BATCHES, REDUCED))
def test_peak_of_a_loss_by_token(model, recompute, batch, reduce):
    found = stated(MODELS[model], recompute, batch, reduce, "apart", "torchtitan")
    assert found == held(MODELS[model], recompute, batch, reduce, "apart", by_token=True)


@pytest.mark.parametrize(
    ("model", "tied", "recompute", "batch"), covering(MODELS, (False, True), RECOMPUTE, BATCHES, meet=3)
)
def test_peak_on_one_device(model, tied, recompute, batch):
    model = MODELS[model].model_copy(update={"tie_embeddings": tied})
    assert stated(model, recompute, batch) == alone(model, recompute, batch)
