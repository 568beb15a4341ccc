"""The architecture of a transformer from the names and shapes of its tensors; every value says where it is from.

What shapes cannot tell (the number of heads when their width is not recorded, top-k of a router) comes from a config
beside the weights (Hugging Face config.json, Megatron args, GGUF key-values) or stays unset. Field names are those of
the `model:` part of a job file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.confignames import CHECKED, from_config
from steptime.checkpoint.records import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.records import Shape, StoredTensor

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blk|blocks?)\.(\d{1,6})\.")
EMBED = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|token_embd|embed_in)\.weight$")
POSITIONS = re.compile(r"(?:^|\.)(?:wpe|position_embeddings|embed_positions|position_embd)\.weight$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out|output)\.weight$")
EXPERT = re.compile(r"experts\.(?:local_experts\.)?(\d{1,6})\.")
NORM = re.compile(r"(?:norm\w*|ln_\w+|layernorm\w*)\.(weight|bias)$|layer_norm_(weight|bias)$")
LINEAR_BIAS = re.compile(
    r"(?:[qkvo]_proj|w[qkvo]|c_attn|c_proj|c_fc|query_key_value|dense\w*|linear_\w+|qkv|fc\d|attn_[qkv]|attn_output|"
    r"ffn_\w+|gate_proj|up_proj|down_proj)\.bias$"
)
QKV_BIAS = re.compile(r"(?:[qkv]_proj|w[qkv]|linear_qkv|qkv|attn_[qkv])\.bias$")
CANDIDATES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)


@dataclass(slots=True)
class _Shapes:
    """Whole shapes by name, and what was found so far."""

    by_name: dict[str, Shape]
    tied: set[str]
    layers: dict[int, list[str]] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def last(self, *names: str) -> tuple[str, Shape] | None:
        """The first tensor whose name ends in one of `names` (module name, without ".weight")."""
        ends = tuple(f"{name}.weight" for name in names)
        for name, shape in self.by_name.items():
            if name.endswith(ends) and len(shape) == 2 and "experts" not in name and "shared" not in name:
                return name, shape
        return None

    def set(self, key: str, value: Any, source: str, **more: Any) -> None:
        """Record a value unless one is known."""
        self.found.setdefault(key, {"value": value, "from": source, **more})

    def get(self, key: str) -> Any:
        """The value found for `key`, or None."""
        return self.found.get(key, {}).get("value")


def infer(
    tensors: Iterable[StoredTensor], facts: list[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """({field: {value, from}}, CONFIG_MISMATCH problems). Empty when nothing looks like a transformer."""
    tensors = list(tensors)
    shapes = _Shapes(
        {t.name.replace("_orig_mod.", ""): t.whole for t in tensors}, {t.name for t in tensors if t.alias_of}
    )
    for name in shapes.by_name:
        match = LAYER.search(name)
        if match:
            shapes.layers.setdefault(int(match[1]), []).append(name)
    configs = [known for fact in facts for known in from_config(fact)]
    whole = [known for fact in facts if fact.get("slices") for known in from_config(fact)]
    if not shapes.layers:
        return {}, []
    _stated(shapes, whole)
    _embedding(shapes)
    if shapes.get("hidden_sz") is None:
        return {}, []
    shapes.set("n_layers", max(shapes.layers) + 1, f"highest layer number, {max(shapes.layers)}")
    _mlp(shapes)
    _moe(shapes)
    _norms(shapes)
    _attention(shapes)
    problems = _mismatches(shapes, configs)
    _stated(shapes, configs)
    _heads(shapes)
    return shapes.found, problems


def _stated(s: _Shapes, configs: list[tuple[str, dict[str, Any]]]) -> None:
    """What configs say, where nothing is known yet."""
    for source, config in configs:
        for key, value in config.items():
            if key == "moe_from_config":
                (s.get("moe") or {}).update(value)
            else:
                s.set(key, value, source)


def _embedding(s: _Shapes) -> None:
    name = next((n for n, shape in s.by_name.items() if EMBED.search(n) and len(shape) == 2), None)
    if name is None:
        return
    vocab, hidden = s.by_name[name]
    s.set("vocab_sz", vocab, name)
    s.set("hidden_sz", hidden, name)
    table = next((n for n in s.by_name if POSITIONS.search(n)), None)
    s.set("learned_positions", table is not None, table or "no position embedding")
    if table is not None:
        s.set("max_positions", s.by_name[table][0], table)
    head = next((n for n in s.by_name if HEAD.search(n) and "layers" not in n), None)
    tied = head is None or head in s.tied or name in s.tied
    s.set("tie_embeddings", tied, f"{head} is tied" if head and tied else head or "no output layer")


def _mlp(s: _Shapes) -> None:
    hidden = s.get("hidden_sz")
    down = s.last("down_proj", "w2", "linear_fc2", "dense_4h_to_h", "mlp.c_proj", "ffn_down", "fc2", "fc_out")
    up = s.last("up_proj", "w3", "ffn_up", "w1", "linear_fc1", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc1", "fc_in")
    if down is None or up is None:
        return
    inter = next((n for n in down[1] if n != hidden), hidden)  # GPT-2 stores [in, out], others [out, in]
    rows = next((n for n in up[1] if n != hidden), hidden)
    s.set("inter_sz", inter, down[0])
    gated = rows == 2 * inter or s.last("gate_proj", "w3", "ffn_gate") is not None
    s.set("glu", gated, up[0] if rows == 2 * inter else "gate projection by name")


def _moe(s: _Shapes) -> None:
    numbers = [int(m[1]) for m in map(EXPERT.search, s.by_name) if m]
    packed = next(((n, v) for n, v in s.by_name.items() if (len(v) == 3 and "exps" in n) or "experts.w" in n), None)
    if not numbers and packed is None:
        return
    count = max(numbers) + 1 if numbers else packed[1][0] if packed else 0
    moe: dict[str, Any] = {"n_experts": count}
    ends = ("down_proj.weight", "w2.weight", "linear_fc2.weight")
    down = next((n for n in s.by_name if EXPERT.search(n) and n.endswith(ends) and len(s.by_name[n]) == 2), None)
    if down:
        moe["expert_inter_sz"] = s.by_name[down][1]
    if any("shared_expert" in n for n in s.by_name):
        shared = next((v for n, v in s.by_name.items() if "shared_expert" in n and n.endswith(ends)), None)
        moe["shared_expert_inter_sz"] = shared[1] if shared else None
        moe["n_shared_experts"] = 1
    sparse = sorted(i for i, names in s.layers.items() if any("expert" in n or "exps" in n for n in names))
    first, second = (*sparse, *sparse, 0)[0], (*sparse, 0, 0)[1]
    if first > 0:
        moe["n_dense_layers"] = first
    if second - first > 1:
        moe["moe_frequency"] = second - first
    s.set("moe", {k: v for k, v in moe.items() if v is not None}, "expert tensors; top-k is not in shapes")
    if down:
        s.set("inter_sz", s.by_name[down][1], down)
        s.set("glu", any("gate_proj" in n or n.endswith("w3.weight") for n in s.by_name), "expert projections by name")


def _norms(s: _Shapes) -> None:
    inside = [n for n in s.by_name if LAYER.search(n)]
    kinds = {m[1] or m[2] for m in map(NORM.search, inside) if m}
    if kinds:
        s.set(
            "norm", "layernorm" if "bias" in kinds else "rmsnorm", "norm biases" if "bias" in kinds else "no norm bias"
        )
        s.set("norm_bias", "bias" in kinds, "norm tensors by name")
    biases = [n for n in inside if LINEAR_BIAS.search(n)]
    others = [n for n in biases if not QKV_BIAS.search(n)]
    s.set("bias", bool(others), "linear biases by name")
    if biases and not others:
        s.set("qkv_bias", value=True, source=biases[0])
    qk = next((n for n in inside if re.search(r"(?:q_norm|q_layernorm|attn_q_norm)\.weight$", n)), None)
    s.set("qk_norm", qk is not None, qk or "no q_norm")
    width = s.by_name[qk][0] if qk and len(s.by_name[qk]) == 1 else None
    if width and width != s.get("hidden_sz") and width <= max(CANDIDATES):
        s.set("head_dim", width, qk or "")


def _attention(s: _Shapes) -> None:
    hidden = s.get("hidden_sz")
    latent = s.last("kv_a_proj_with_mqa", "wkv_a", "linear_kv_down_proj", "attn_kv_a_mqa")
    if latent is not None:
        s.set("attention", {"kind": "mla"}, latent[0])
        return
    q, k = s.last("q_proj", "wq", "attn_q", "linear_q"), s.last("k_proj", "wk", "attn_k")
    fused = s.last("linear_qkv", "query_key_value", "c_attn", "qkv_proj", "attn_qkv", "Wqkv", "qkv")
    out = s.last("o_proj", "wo", "linear_proj", "attn.c_proj", "attn_output", "out_proj", "attention.dense")
    if q is not None and k is not None:
        s.set("q_rows", q[1][0], q[0])
        s.set("kv_rows", k[1][0], k[0])
    elif fused is not None:
        rows = next((n for n in fused[1] if n != hidden), hidden)
        q_rows = next((n for n in out[1] if n != hidden), hidden) if out else hidden
        if rows > q_rows and (rows - q_rows) % 2 == 0:
            s.set("q_rows", q_rows, out[0] if out else fused[0])
            s.set("kv_rows", (rows - q_rows) // 2, f"{fused[0]} = q + 2 kv rows")
    inverse = next((n for n in s.by_name if n.endswith("rotary_emb.inv_freq")), None)
    if inverse and len(s.by_name[inverse]) == 1:
        s.set("head_dim", 2 * s.by_name[inverse][0], inverse)


def _heads(s: _Shapes) -> None:
    """Heads from rows and head width; without a width only the candidates are listed."""
    q, kv, width, heads = s.get("q_rows"), s.get("kv_rows"), s.get("head_dim"), s.get("n_q_heads")
    if q is None or kv is None or not kv:
        return
    if width is None and heads and q % heads == 0:
        s.set("head_dim", q // heads, f"{q} query rows / {heads} heads ({s.found['n_q_heads']['from']})")
        width = q // heads
    if width and q % width == 0 and kv % width == 0:
        source = f"rows / head_dim {width}"
        s.set("n_q_heads", q // width, source)
        s.set("n_kv_heads", kv // width, source)
        return
    fits = [n for n in CANDIDATES if gcd(q, kv) % n == 0]
    ratio = f"n_q_heads : n_kv_heads = {q // gcd(q, kv)} : {kv // gcd(q, kv)}"
    s.found["head_dim"] = {"value": None, "from": f"not in the shapes; {ratio}", "candidates": fits}


def _mismatches(s: _Shapes, configs: list[tuple[str, dict[str, Any]]]) -> list[Problem]:
    problems = []
    for source, config in configs:
        for key in CHECKED:
            stated, seen = config.get(key), s.get(key)
            if key == "inter_sz" and s.get("moe"):
                continue  # configs of sparse models name the dense width, shapes the experts'
            if stated is not None and seen is not None and stated != seen:
                message = f"{key}: {source} says {stated}, {s.found[key]['from']} says {seen}"
                problems.append(Problem("CONFIG_MISMATCH", message, source))
    return problems
