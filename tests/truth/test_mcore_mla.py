"""What Megatron-Core's latent attention keeps for backward, sends, and counts as parameters, on a CPU, against our op lists.

Proved, to the byte, for tp 1, 2, 4 with and without sequence parallelism, with and without a rank of the query, rope and yarn,
and recomputed modules. Attention is unfused, norms are torch's. Not proved: what flash attention and TransformerEngine's norms
keep.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import pytest
from mcore_ask import ask, checked, model, shard

from steptime.model.blocks import block_ops, embedding_ops, head_ops, params
from steptime.model.ops import Comm, Tensor, tensor_bytes
from steptime.model.segments import find_segments, kept_names

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
}
SMALL = {"layers": 1, "h": 64, "nq": 4, "nkv": 4, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 256, "qk_norm": True}
VARIANTS = {
    "V3": {},
    "V2-Lite": {"q_lora_rank": None},
    "yarn": {"rope_type": "yarn"},
    "narrow values": {"v_head_dim": 8},
    **{f"recompute {'+'.join(m)}": {"recompute": m} for m in (("mla_up_proj",), ("core_attn",), ("layernorm",))},
    "recompute mla_up_proj+core_attn": {"recompute": ("mla_up_proj", "core_attn")},
    "V2-Lite, recompute mla_up_proj": {"q_lora_rank": None, "recompute": ("mla_up_proj",)},
}
LAYOUTS = {"tp1": (1, False), "tp2": (2, False), "tp2 sp": (2, True), "tp4 sp": (4, True)}
CASES = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS]


def config(layout, variant):
    said = dict(VARIANTS[variant])
    c = SMALL | {"sp": LAYOUTS[layout][1]}
    if modules := said.pop("recompute", ()):
        c["recompute"] = {"granularity": "selective", "modules": list(modules)}
    return c | {"mla": LATENT | said}


@cache
def answers(layout):
    return dict(zip(VARIANTS, ask([config(layout, v) for v in VARIANTS], tp=LAYOUTS[layout][0], dp=2), strict=True))


def theirs_saved(c, answer):
    """Bytes that Megatron's attention keeps, without masks, mask types, and the angles that a recomputed rotation keeps."""
    angles = [c["s"], 1, 1, c["mla"]["qk_pos_emb_head_dim"]]
    left_out = ([1], [1, 1, c["s"], c["s"]])
    total = 0
    for module, shape, dtype, size, _ in answer["saved"]:
        no_activation = shape in left_out or (dtype == "float32" and shape == angles)
        if "self_attention" in module and not no_activation:
            on_cuda = 2 * size if "norm" in module and shape[-1] == 1 and dtype == "bfloat16" else size
            total += on_cuda
    return total


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_saved_bytes_collectives_and_parameters(layout, variant):
    tp, c, answer = LAYOUTS[layout][0], config(layout, variant), checked(answers(layout)[variant])
    ours, seen = model(c).model_copy(update={"qk_norm": False}), shard(c, tp)
    modules = frozenset(c.get("recompute", {}).get("modules", ()))
    ops = block_ops(ours, seen)
    attention = ops[: next(i for i, op in enumerate(ops) if op.name == "attn.residual")]
    sizes = tensor_bytes(ops, Tensor("x", seen.sequence_tokens * ours.hidden_sz, seen.itemsize))
    kept = kept_names(ops, find_segments(ops, modules))
    norm = {t.name for op in attention if op.name == "attn.norm" for t in op.stats}
    mine = {t.name for op in attention for t in op.allocates} - norm
    assert sum(sizes[name] for name in kept if name in mine) == theirs_saved(c, answer)
    ahead, back = Counter(), Counter()
    for part in (embedding_ops(ours, seen), ops, head_ops(ours, seen)):
        again = {i for s in find_segments(part, modules) for i in range(s.first, s.last + 1)}
        for i, op in enumerate(part):
            if isinstance(op, Comm) and op.kind:
                ahead[op.kind, tp, op.bytes] += 1
                back[op.kind, tp, op.bytes] += (i in again) + op.regather
            if isinstance(op, Comm) and op.backward:
                back[op.backward, tp, op.bytes] += 1
    found = [
        Counter((kind, n, float(size)) for kind, n, size, _ in answer[way] if n > 1) for way in ("forward", "backward")
    ]
    assert [+ahead, +back] == found
    assert sum(p.local(tp) for p in params(ours, seen)) == sum(prod(shape) for _, shape in answer["params"])
