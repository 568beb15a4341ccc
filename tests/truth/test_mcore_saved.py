"""What Megatron-Core keeps for backward, sends, and counts as parameters: its own GPTModel on a CPU against our op lists.

Proved, to the byte, on tensor-parallel ranks of 1 to 4, with and without sequence parallelism: storages saved for backward by
the embedding, each block, and final norm with head and loss; every collective of a forward and a backward; parameters. The
model is Megatron-Core 0.16.1 with its local layer spec: unfused attention, torch's norms, Megatron's fused activations.

Not proved, because it needs a GPU or TransformerEngine: what TransformerEngine's LayerNormLinear and flash attention keep, fp8,
TransformerEngine's cross entropy, rotary fusion, user-buffer overlap; and what torch.compile, Megatron's jit_fuser, makes of
functions that run eagerly here. The fused softmax and gradient-accumulation GEMM are Megatron's autograd functions over a
stand-in for the CUDA kernel, so what is kept is proved, the kernel is not. Dropout masks are those of torch's `native_dropout`
(bool, as on CUDA); LayerNorm's statistics are counted in fp32, which only CUDA keeps.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import pytest
from mcore_ask import ask, cases, checked, model, part, shard

from steptime.model.blocks import block_ops, embedding_ops, head_ops, params
from steptime.model.ops import Comm, Tensor, tensor_bytes
from steptime.model.segments import find_segments, kept_names

SMALL = {"layers": 2, "h": 64, "nq": 4, "nkv": 2, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 256}
"""Two kv heads: grouped-query attention on one rank, one group per rank on two."""
THREE = {"layers": 2, "h": 96, "nq": 12, "nkv": 6, "d": 24, "i": 240, "s": 48, "b": 1, "vocab": 384}
"""Heads wider than hidden/heads, for three ranks with two groups each."""
FOUR = {"layers": 2, "h": 128, "nq": 8, "nkv": 4, "d": 16, "i": 320, "s": 64, "b": 2, "vocab": 512}
GPT = {"glu": False, "bias": True, "norm": "LayerNorm", "learned_positions": True}


def selective(*modules):
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


VARIANTS = {
    "llama": {},
    "multi-head": {"nkv": 0},
    "gpt": {**GPT, "nkv": 0, "dropout": 0.1, "tied": True},
    "gpt fused softmax": {**GPT, "nkv": 0, "dropout": 0.1, "fused_softmax": True},
    "gpt with rope": {**GPT, "learned_positions": False},
    "learned positions": {"learned_positions": True},
    "multi-head learned positions": {"learned_positions": True, "nkv": 0},
    "layernorm": {"norm": "LayerNorm"},
    "bias": {"bias": True},
    "gelu": {"glu": False, "bias": True},
    "gelu unfused": {"glu": False, "fused_activation": False},
    "gelu unfused bias": {"glu": False, "fused_activation": False, "bias": True},
    "geglu": {"activation": "gelu"},
    "swiglu unfused": {"fused_activation": False},
    "relu": {"glu": False, "activation": "relu", "fused_activation": False},
    "squared relu": {"glu": False, "activation": "relu2", "fused_activation": False},
    "squared relu glu": {"activation": "relu2", "fused_activation": False},
    "recompute mlp squared relu": {**selective("mlp"), "glu": False, "activation": "relu2", "fused_activation": False},
    "dropout": {"dropout": 0.1},
    "dropout bias": {"dropout": 0.1, "bias": True},
    "fused softmax": {"fused_softmax": True},
    "fused softmax dropout": {"fused_softmax": True, "dropout": 0.1},
    "fp32": {"dtype": "fp32"},
    "fp32 dropout": {"dtype": "fp32", "dropout": 0.1, "norm": "LayerNorm"},
    "fp16": {"dtype": "fp16"},
    "qk norm": {"qk_norm": True},
    "qk norm multi-head": {"qk_norm": True, "nkv": 0},
    "qk norm layernorm": {"qk_norm": True, "norm": "LayerNorm"},
    "qk norm learned positions": {"qk_norm": True, "learned_positions": True},
    "qk norm layernorm multi-head": {"qk_norm": True, "nkv": 0, "norm": "LayerNorm"},
    "tied": {"tied": True},
    "gradient accumulation fusion": {"grad_accumulation_fusion": True},
    "one sequence": {"b": 1},
    "recompute core_attn": selective("core_attn"),
    "recompute core_attn dropout": {**selective("core_attn"), "dropout": 0.1},
    "recompute core_attn multi-head": {**selective("core_attn"), "nkv": 0},
    "recompute core_attn gpt": {**selective("core_attn"), **GPT, "nkv": 0, "dropout": 0.1},
    "recompute core_attn learned positions": {**selective("core_attn"), "learned_positions": True},
    "recompute layernorm": selective("layernorm"),
    "recompute layernorm gpt": {**selective("layernorm"), **GPT},
    "recompute mlp": {**selective("mlp"), "dropout": 0.1},
    "recompute layernorm mlp": selective("layernorm", "mlp"),
    "recompute core_attn layernorm": selective("core_attn", "layernorm"),
    "recompute core_attn layernorm mlp": {**selective("core_attn", "layernorm", "mlp"), "dropout": 0.1},
}
LAYOUTS = {
    "tp1": (1, {**SMALL}),
    "tp2": (2, {**SMALL}),
    "tp2 sp": (2, {**SMALL, "sp": True}),
    "tp3 sp": (3, {**THREE, "sp": True}),
    "tp4": (4, {**FOUR}),
    "tp4 sp": (4, {**FOUR, "sp": True}),
    "tp4 two groups": (4, {**FOUR, "nkv": 2}),
    "tp4 sp one group": (4, {**FOUR, "nkv": 1, "sp": True}),
}
CASES = cases(LAYOUTS, VARIANTS, whole=("tp3 sp",))


def config(layout, variant):
    """One configuration; `nkv` 0 in a variant means as many as query heads."""
    c = LAYOUTS[layout][1] | VARIANTS[variant]
    return c | {"nkv": c["nkv"] or c["nq"]}


@cache
def answers(layout):
    """One process answers all configurations of a layout."""
    asked = [variant for at, variant in CASES if at == layout]
    return dict(zip(asked, ask([config(layout, v) for v in asked], tp=LAYOUTS[layout][0]), strict=True))


def our_parts(c, ours, seen):
    """Op lists of embedding, block and head, and the modules that a block recomputes."""
    modules = frozenset(c.get("recompute", {}).get("modules", ()))
    blocks = [(n, block_ops(ours, seen), modules) for n in range(c["layers"])]
    return [
        ("embedding", embedding_ops(ours, seen), frozenset()),
        *blocks,
        ("head", head_ops(ours, seen), frozenset()),
    ]


def our_saved(parts, x):
    """Bytes that each part of ours keeps for backward."""
    saved = {}
    for name, ops, modules in parts:
        sizes = tensor_bytes(ops, x)
        saved[name] = sum(sizes[kept] for kept in kept_names(ops, find_segments(ops, modules)))
    return saved


def their_saved(c, answer):
    """Bytes that each part of Megatron keeps, without what is no activation of ours.

    That is: the causal mask (bool, s*s, one for all layers and micro-batches) and one-element tensors (a mask type, a scale).
    """
    saved = Counter()
    for module, shape, dtype, size, _ in answer["saved"]:
        if shape == [1] or (dtype == "bool" and shape == [1, 1, c["s"], c["s"]]):
            continue
        on_cuda = 4 * size // 2 if "norm" in module and shape[-1] == 1 and dtype in ("bfloat16", "float16") else size
        saved[part(module)] += on_cuda
    return dict(saved)


def our_collectives(parts, tp):
    """Collectives of a forward and a backward: (kind, ranks, bytes) with their counts."""
    ahead, back = Counter(), Counter()
    for _, ops, modules in parts:
        replayed = {i for s in find_segments(ops, modules) for i in range(s.first, s.last + 1)}
        for i, op in enumerate(ops):
            if not isinstance(op, Comm):
                continue
            if op.kind:
                ahead[op.kind, tp, op.bytes] += 1
                back[op.kind, tp, op.bytes] += (i in replayed) + op.regather
            if op.backward:
                back[op.backward, tp, op.bytes] += 1
    return +ahead, +back


def their_collectives(calls, tp):
    """The same of Megatron; groups of one rank send nothing."""
    return Counter((kind, ranks, float(size)) for kind, ranks, size, _ in calls if tp > 1)


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_saved_bytes_collectives_and_parameters(layout, variant):
    tp, c, answer = LAYOUTS[layout][0], config(layout, variant), checked(answers(layout)[variant])
    ours, seen = model(c), shard(c, tp)
    parts = our_parts(c, ours, seen)
    x = Tensor("x", seen.sequence_tokens * ours.hidden_sz, seen.itemsize)
    assert our_saved(parts, x) == their_saved(c, answer)
    theirs = their_collectives(answer["forward"], tp), their_collectives(answer["backward"], tp)
    assert our_collectives(parts, tp) == theirs
    assert sum(p.local(tp) for p in params(ours, seen)) == sum(prod(shape) for _, shape in answer["params"])
