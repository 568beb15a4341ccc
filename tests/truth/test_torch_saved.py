"""Storages that autograd keeps for backward, one by one, against what the op lists say they keep. Zero tolerance."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch_blocks import Block, Kernels, tables
from torch_ours import MODULES, block_input, built, kept, kept_by_model, kept_by_torch, shard_of

from steptime.bench.runs.probes import Saved
from steptime.model.blocks import block_ops
from steptime.model.model import Model

SIZES = (
    # hidden, inter, query heads, key-value heads, head_dim, sequence, batch
    (48, 80, 4, 2, 8, 16, 3),
    (64, 176, 8, 8, 8, 32, 1),
    (40, 112, 6, 1, 16, 24, 2),
)


def model_of(size: tuple[int, ...], **fields: object) -> Model:
    hidden, inter, n_q, n_kv, d, _, _ = size
    fixed = {"hidden_sz": hidden, "inter_sz": inter, "n_q_heads": n_q, "n_kv_heads": n_kv, "head_dim": d}
    return Model(n_layers=2, vocab_sz=101, **fixed, **fields)


KINDS = {
    "llama": {},
    "llama geglu": {"activation": "gelu"},
    "llama reglu": {"activation": "relu"},
    "qwen3": {"qk_norm": True},
    "gpt": {"glu": False, "norm": "layernorm", "bias": True, "learned_positions": True},
    "gpt dropout": {"glu": False, "norm": "layernorm", "bias": True, "learned_positions": True, "dropout": 0.1},
    "relu mlp": {"glu": False, "activation": "relu", "dropout": 0.2},
    "squared relu mlp": {"glu": False, "activation": "relu2", "norm": "layernorm"},
    "squared relu glu": {"activation": "relu2"},
    "gemma": {"post_norms": True, "activation": "gelu", "qk_norm": True},
    "olmo2": {"post_norms": True, "pre_norms": False, "qk_norm": True, "qk_norm_type": "per_layer"},
    "gpt neox": {"glu": False, "norm": "layernorm", "bias": True, "parallel_residual": True, "dropout": 0.1},
    "falcon": {"glu": False, "norm": "layernorm", "norm_bias": True, "parallel_residual": True, "shared_norm": True},
    "qwen3 no rope": {"qk_norm": True, "rotary_embeds": False, "glu": False, "activation": "silu"},
}
KERNELS = [
    Kernels(),
    Kernels(attention="unfused"),
    Kernels(norm="composite", loss="native"),
    Kernels(activation="fused", precision="fp32"),
    Kernels(precision="fp32", norm="composite", attention="unfused"),
    Kernels(precision="fp16", recompute="selective"),
    Kernels(recompute="selective", attention="unfused", activation="fused"),
    Kernels(recompute="full", loss="native"),
]


def describe(kernels: Kernels) -> str:
    return " ".join(str(v) for v in vars(kernels).values())


def saved_by_block(model: Model, kernels: Kernels, batch: int, seqlen: int) -> Saved:
    """Run one torch block forward."""
    torch.set_default_dtype(kernels.dtype)
    try:
        block = Block(model, kernels)
    finally:
        torch.set_default_dtype(torch.float32)
    buffers = [t if t is None else t.to(kernels.dtype) for t in tables(model, seqlen)]
    x = torch.randn(batch, seqlen, model.hidden_sz, dtype=kernels.dtype, requires_grad=True)
    with Saved([*block.parameters(), *(t for t in buffers if t is not None)]) as saved:
        block(x, *buffers)
    return saved


CASES = [
    (SIZES[(i + j) % len(SIZES)], kind, kernels)
    for (i, kind), (j, kernels) in product(enumerate(KINDS), enumerate(KERNELS))
    if kernels.recompute != "full"
]
"""Every kind with all kernels, sizes in turn."""


@pytest.mark.parametrize(("size", "kind", "kernels"), CASES, ids=[f"{n} h{s[0]} {describe(k)}" for s, n, k in CASES])
def test_block(size, kind, kernels):
    model = model_of(size, **KINDS[kind])
    seqlen, batch = size[5:]
    ours = kept(
        block_ops(model, shard_of(model, kernels, batch, seqlen)),
        block_input(model, shard_of(model, kernels, batch, seqlen)),
        MODULES[kernels.recompute],
    )
    assert ours == kept_by_torch(saved_by_block(model, kernels, batch, seqlen))


WHOLE = [(kind, kernels, (i + j) % 2 == 0) for (i, kind), (j, kernels) in product(enumerate(KINDS), enumerate(KERNELS))]


@pytest.mark.parametrize(
    ("kind", "kernels", "tied"), WHOLE, ids=[f"{n} {describe(k)}{' tied' * tied}" for n, k, tied in WHOLE]
)
def test_whole_model(kind, kernels, tied):
    """Embedding, two blocks, final norm, head and loss."""
    size = SIZES[0]
    model = model_of(size, tie_embeddings=tied, **KINDS[kind])
    seqlen, batch = size[5:]
    torch_model = built(model, kernels, seqlen)
    tokens = torch.randint(model.vocab_sz, (batch, seqlen))
    with Saved([*torch_model.parameters(), *torch_model.buffers()]) as saved:
        loss = torch_model(tokens, tokens.clone())
    loss.backward()
    assert kept_by_model(model, kernels, shard_of(model, kernels, batch, seqlen)) == kept_by_torch(saved)


@pytest.mark.parametrize(
    ("model", "gib_per_layer"),
    [
        (Model(n_layers=1, hidden_sz=4096, inter_sz=14336, n_q_heads=32, n_kv_heads=8, vocab_sz=128256), 1376845824),
        (Model(n_layers=1, hidden_sz=8192, inter_sz=28672, n_q_heads=64, n_kv_heads=8, vocab_sz=128256), 2720071680),
    ],
    ids=["8b", "70b"],
)
def test_llama3_layer(model, gib_per_layer):
    """One layer at 8192 tokens, measured once with fake tensors: T (2 (4h + 2 nq d + 2 nkv d + 4i) + 4 nq + 8) bytes."""
    shard = shard_of(model, Kernels(), 1, 8192)
    assert (
        sum(size * n for size, n in kept(block_ops(model, shard), block_input(model, shard)).items()) == gib_per_layer
    )
