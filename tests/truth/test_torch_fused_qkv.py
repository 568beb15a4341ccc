"""What torch keeps for backward of torchtitan's fused projection of q, k and v, byte for byte, against the op lists.

pytorch/torchtitan@bcc09297 torchtitan/models/common/attention.py, FusedQKVLinear.forward: one product, split by groups of heads,
each part copied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_torch_compile import (
    CPU_FLASH,
    SIZES,
    B,
    Block,
    S,
    contexts,
    flat,
    inputs,
    model_of,
    ours_within,
    saved_by_compile,
    saved_within,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_blocks import Attention, Kernels, Rotate, flash, tables
from torch_blocks import Block as EagerBlock
from torch_ours import block_input, kept, kept_by_torch, whole
from torch_ours import shard_of as eager_shard

from steptime.bench.runs.probes import Saved
from steptime.model.blocks import block_ops
from steptime.model.model import Model
from steptime.model.ops import Move, tensor_bytes
from steptime.model.segments import find_segments, kept_names
from steptime.model.shard import Shard
from steptime.software.performance import Performance, resolve
from steptime.software.settings import Compile

MODELS = {
    "llama": model_of("llama"),
    "qwen3": model_of("qwen3"),
    "one head each": Model(n_layers=1, vocab_sz=128, **SIZES["llama"] | {"n_kv_heads": 4}),
    "one key-value head": Model(n_layers=1, vocab_sz=128, **SIZES["llama"] | {"n_kv_heads": 1}),
}


def split(qkv: Tensor, model: Model) -> list[Tensor]:
    """FusedQKVLinear.forward after its product."""
    b, s, _ = qkv.shape
    each, d = model.n_q_heads // model.n_kv_heads, model.head_dim
    parts = torch.split(qkv.view(b, s, -1, each + 2, d), [each, 1, 1], dim=-2)
    return [part.reshape(b, s, -1, d).contiguous() for part in parts]


def rows(model: Model) -> int:
    return (model.n_q_heads + 2 * model.n_kv_heads) * model.head_dim


class TitanBlock(Block):
    """The block of `test_torch_compile` with that projection."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.qkv = nn.Linear(model.hidden_sz, rows(model), bias=False).bfloat16()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = split(self.qkv(self.norm(x, 0)), self.model)
        if self.model.qk_norm:
            q, k = self.norm(q, 2), self.norm(k, 3)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.linear["o"](o.transpose(1, 2).contiguous().view(b, s, -1))
        normed = self.norm(x, 1)
        return x + self.linear["down"](self.act(self.linear["gate"](normed)) * self.linear["up"](normed))


class TitanAttention(Attention):
    """The eager attention of `torch_blocks` with that projection."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__(model, kernels)
        self.model = model
        self.qkv = nn.Linear(model.hidden_sz, rows(model), bias=False)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = split(self.qkv(x), self.model)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (Rotate.apply(t, cos, sin) for t in (q, k))
        o = flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.p)
        return self.o(o.transpose(1, 2).contiguous().view(b, s, -1))


def titan(model: Model, compiled: Compile, software: str = "torchtitan") -> Shard:
    resolved = resolve(Performance(software=software, compile=compiled))
    return Shard(float(B), float(S), float(S), 1.0, False, float(model.vocab_sz), resolved)


def per_op(model: Model, shard: Shard) -> Counter[int]:
    ops = block_ops(model, shard)
    segments = find_segments(ops, frozenset({"per_op"}), compiled=shard.software.kernels.compile != "none")
    sizes = tensor_bytes(ops, block_input(model, shard))
    return Counter(whole(sizes[name]) for name in kept_names(ops, segments))


@pytest.mark.parametrize("kind", MODELS)
def test_compiled_block(kind):
    """Backward reads q, k and v themselves, so that the product is not kept.

    Within a memory budget: where query and key run again, in Qwen3 at 0.7, they start from the product, of which the value is a
    view too.
    """
    model = MODELS[kind]
    shard = titan(model, "blocks")
    ops, x = block_ops(model, shard), block_input(model, shard)
    budgets = (0.95, 0.7) if kind in SIZES else ()
    found = saved_within({1.0: ()} | dict.fromkeys(budgets, (CPU_FLASH,)), TitanBlock(model), *inputs(model))
    assert found.pop(1.0) == kept(ops, x)
    for budget, saved in found.items():
        assert saved == ours_within(budget, ops, x), budget


@pytest.mark.parametrize("kind", ["qwen3", "one key-value head"])
def test_per_op_compiled(kind):
    """The policy keeps the first product, which is q, k and v together, and the third, the MLP's gate."""
    model, block = MODELS[kind], TitanBlock(MODELS[kind])

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=contexts)

    assert saved_by_compile(run, *inputs(model)) == per_op(model, titan(model, "blocks"))


@pytest.mark.parametrize("kind", MODELS)
def test_per_op(kind):
    """Eager: those two, and the fifth, of the MLP's output, which nobody reads."""
    model, modes = MODELS[kind], []
    x, cos, sin = inputs(model)
    out = checkpoint(TitanBlock(model), x, cos, sin, use_reentrant=False, context_fn=lambda: contexts(modes))
    cached = [value.val for values in modes[0].storage.values() for value in flat(values)]
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.itemsize for t in [x, *cached]}
    assert Counter(storages.values()) == per_op(model, titan(model, "none"))
    out.sum().backward()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("kernels", [Kernels(), Kernels(norm="composite"), Kernels(precision="fp32")])
def test_eager_block(kind, kernels):
    """Autograd keeps the copies, and no view of the product."""
    model, before = MODELS[kind], torch.get_default_dtype()
    torch.set_default_dtype(kernels.dtype)
    try:
        block = EagerBlock(model, kernels)
        block.attn = TitanAttention(model, kernels)
    finally:
        torch.set_default_dtype(before)
    buffers = [t if t is None else t.to(kernels.dtype) for t in tables(model, S)]
    x = torch.randn(B, S, model.hidden_sz, dtype=kernels.dtype, requires_grad=True)
    with Saved([*block.parameters(), *(t for t in buffers if t is not None)]) as saved:
        block(x, *buffers)
    shard = eager_shard(model, kernels, B, S)
    shard = replace(shard, software=shard.software.replace(fused_projections="qkv_copied"))
    assert kept(block_ops(model, shard), block_input(model, shard)) == kept_by_torch(saved)


@pytest.mark.parametrize(("software", "each"), [("torchtitan", 57_472), ("torchtitan@2026-06", 55_424)])
def test_llama3_8b_per_token_and_layer(software, each):
    """Bytes that the policy keeps, compiled: the layer's input 2 x 4,096, attention's output 2 x 4,096 and log-sum-exp 4 x 32,
    the gate 2 x 14,336 = 45,184; with them q, k and v, 2 x (4,096 + 1,024 + 1,024) = 12,288, and of three products every second
    one: q and v, 2 x (4,096 + 1,024) = 10,240.
    """
    model = Model(n_layers=1, hidden_sz=4096, inter_sz=14336, n_q_heads=32, n_kv_heads=8, vocab_sz=128256)
    saved = per_op(model, titan(model, "blocks", software))
    assert sum(size * count for size, count in saved.items()) == B * S * each


@pytest.mark.parametrize(("compiled", "moved"), [("none", 24_576), ("blocks", 4_096)])
def test_bytes_of_the_copies_of_llama3_8b(compiled, moved):
    """Of each token all 6,144 elements are read and written, 2 x 2 x 6,144; compiled, the 1,024 of the value alone."""
    model = Model(n_layers=1, hidden_sz=4096, inter_sz=14336, n_q_heads=32, n_kv_heads=8, vocab_sz=128256)
    ops = block_ops(model, titan(model, compiled))
    [copies] = [op for op in ops if isinstance(op, Move) and op.name == "attn.qkv.split"]
    assert copies.forward_bytes == copies.backward_bytes == B * S * moved
