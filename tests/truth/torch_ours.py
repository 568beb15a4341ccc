"""The same model as `torch_blocks` builds, stated by steptime's op lists."""

from __future__ import annotations

from collections import Counter

import torch
from torch_blocks import Kernels, Transformer

from steptime.bench.runs.probes import Saved
from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.model import Model
from steptime.model.ops import Op, Tensor, tensor_bytes
from steptime.model.segments import find_segments, kept_names
from steptime.model.shard import Shard
from steptime.software.performance import load_software

MODULES = {"none": frozenset[str](), "selective": frozenset({"core_attn"})}


def shard_of(model: Model, kernels: Kernels, batch: int, seqlen: int, *, tp: int = 1, sp: bool = False) -> Shard:
    """One device's share under the profile `torch`, with the kernels named."""
    software = load_software("torch").replace(
        precision=kernels.precision,
        attention_impl=kernels.attention,
        norm_impl=kernels.norm,
        activation_impl=kernels.activation,
        loss_impl="composite" if kernels.loss == "fp32" else "fused",
    )
    return Shard(float(batch), float(seqlen), float(seqlen), float(tp), sp, float(model.vocab_sz), software)


def block_input(model: Model, shard: Shard) -> Tensor:
    return Tensor("x", shard.sequence_tokens * model.hidden_sz, shard.itemsize)


def kept(ops: list[Op], x: Tensor, modules: frozenset[str] = frozenset()) -> Counter[int]:
    """Sizes of the storages that a part keeps for backward, each with its count."""
    sizes = tensor_bytes(ops, x)
    names = kept_names(ops, find_segments(ops, modules))
    return Counter(whole(sizes[name]) for name in names)


def kept_by_model(model: Model, kernels: Kernels, shard: Shard) -> Counter[int]:
    """What a whole model keeps: embedding, blocks, final norm, head and loss."""
    x = block_input(model, shard)
    block = kept(block_ops(model, shard), x, MODULES.get(kernels.recompute, frozenset()))
    if kernels.recompute == "full":
        block = Counter([whole(x.bytes)])
    total = kept(embedding_ops(model, shard), x) + kept(head_ops(model, shard), x)
    for _ in range(model.n_layers):
        total += block
    return total


def replayed(ops: list[Op], recompute: str) -> list[Op]:
    """The ops of a block that torch's checkpoint runs again.

    It stops when the last kept tensor is back. An op that keeps only its inputs has packed them before its kernel starts, so
    the last such op does not run; one that keeps something it makes (flash's output, a dropout mask) does.
    """
    if recompute == "none":
        return []
    if recompute == "selective":
        ops = [op for op in ops if op.name.startswith("attn.core")]
    last = max(i for i, op in enumerate(ops) if op.saves)
    made = {t.name for t in ops[last].allocates}
    return ops[: last + 1 if made & set(ops[last].saves) else last]


def whole(bytes_: float) -> int:
    assert bytes_ == int(bytes_), "a storage holds whole bytes"
    return int(bytes_)


def built(model: Model, kernels: Kernels, seqlen: int) -> Transformer:
    """The torch module with parameters in the compute dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(kernels.dtype)
    try:
        return Transformer(model, kernels, seqlen)
    finally:
        torch.set_default_dtype(before)


def kept_by_torch(saved: Saved) -> Counter[int]:
    """Sizes of the storages that torch keeps; 0-dimensional ones (the loss's total weight) are left out."""
    return Counter(t.bytes for t in saved.tensors if t.shape)
