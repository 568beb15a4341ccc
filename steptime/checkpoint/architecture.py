"""The architecture of a transformer from the names and shapes of its tensors; every value has its source.

What shapes do not determine (the number of heads when their width is not recorded, top-k of a router) comes from a config next to
the weights (Hugging Face config.json, Megatron args, GGUF key-values) or stays unset. Field names are those of the `model:` part
of a job file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from math import gcd
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint import experts, layer_gaps, mixers, stacks
from steptime.checkpoint import weight_names as names
from steptime.checkpoint.confignames import CHECKED, from_config, norm_of, said
from steptime.checkpoint.stacks import MAX_LAYERS, STACKED, FoundArchitecture
from steptime.checkpoint.stored_records import Problem, Shape

CANDIDATES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
SHARED = "albert_layer_groups."
CACHE_ITEMSIZE = 2  # bytes of an element of a key-value cache: fp16 or bf16
_NO_DECODER = re.compile(r"(?:^|\.)encoder\.|bert|^transformer\.layer\.|vision|visual")
PADDING = 1024  # rows by which an embedding may exceed the vocabulary that a config states


def infer(
    shapes: Mapping[str, Shape], facts: list[dict[str, Any]], tied: AbstractSet[str] = frozenset()
) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """({field: {value, from}}, MISSING_TENSOR and CONFIG_MISMATCH problems) of tensors by name, some of them `tied` to others.

    Empty when nothing looks like a transformer.
    """
    shared = any(SHARED in name for name in shapes)
    parts = stacks.split(_unstacked(_plainly_named(shapes), facts))
    if parts is None:
        return {}, []
    gaps = layer_gaps.missing(parts.main, facts)
    found = FoundArchitecture(parts, tied)
    for number, tails in parts.main.layers.items():
        for tail, shape in tails.items():
            if tail not in found.tails:
                found.tails[tail] = (f"{parts.main.prefix}{number}.{tail}", shape)
    configs = [known for fact in facts for known in from_config(fact)]
    _stated(found, [known for fact in facts if fact.get("slices") for known in from_config(fact)])
    _embedding(found, {config["hidden_sz"] for _, config in configs if "hidden_sz" in config})
    if found.get("hidden_sz") is None:
        return {}, gaps
    count = len(parts.main.layers)
    if shared:  # the same layers run again and again
        _stated(found, [(source, {"n_layers": c["n_layers"]}) for source, c in configs if "n_layers" in c])
    found.set("n_layers", None if shared else count, f"{counted(count, 'layer')} {parts.main.prefix}*")
    _mlp(found)
    regular = experts.infer(found)
    mixers.kinds(found)
    _norms(found, facts)
    _biases(found)
    _attention(found)
    for part, about in parts.others.items():
        found.set(part, about, "tensors by name")
    problems = _mismatches(found, configs, said(facts)) if "vocab_sz" in found.fields else []
    _stated(found, configs)
    _heads(found)
    mixers.sections(found, [known for _, known in configs])
    runs = experts.runs(parts.main.layers, found.get("hidden_sz"), found.get("head_dim"))
    if runs and not found.get("layer_kinds") and not regular:
        found.set("layers", runs, "layers whose shapes differ")
    families = [str(fact["config"].get("model_type", "")) for fact in facts if isinstance(fact.get("config"), dict)]
    families += ["modernbert"] if found.last("mlp.Wi") else []
    _kv_cache(found, families)
    return found.fields, [*gaps, *problems]


def _plainly_named(shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Without torch.compile's prefix; XLM's lists of each part of its layers and ALBERT's groups as layers with their parts."""
    if not any("_orig_mod." in name or SHARED in name or ".attentions.0." in name for name in shapes):
        return shapes

    def plain(name: str) -> str:
        name = re.sub(
            r"albert_layer_groups\.(\d+)\.albert_layers\.\d+\.", r"layers.\1.", name.replace("_orig_mod.", "")
        )
        return re.sub(r"(?<![^.])(attentions|ffns|layer_norm[12])\.(\d+)\.", r"layers.\2.\1.", name)

    return {plain(name): shape for name, shape in shapes.items()}


def _unstacked(shapes: Mapping[str, Shape], facts: list[dict[str, Any]]) -> Mapping[str, Shape]:
    """Megatron's distributed checkpoints keep equal layers as one tensor with the layers as its first dimension."""
    stated = {fact["args"].get("num_layers") for fact in facts if isinstance(fact.get("args"), dict)}
    counts = Counter(shape[0] for name, shape in shapes.items() if shape and STACKED.search(name)) if stated else {}
    layers = next((count for count in counts if count in stated), None)
    if layers is None or layers > MAX_LAYERS:
        return shapes
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        match = STACKED.search(name)
        if match is None or not shape or shape[0] != layers:
            found[name] = shape
            continue
        for number in range(layers):
            found[f"{name[: match.end()]}{number}.{name[match.end() :]}"] = shape[1:]
    return found


def _stated(f: FoundArchitecture, configs: list[tuple[str, dict[str, Any]]]) -> None:
    """Take over from configs each field that is still unknown."""
    for source, config in configs:
        for key, value in config.items():
            if key.endswith("_from_config"):
                (f.get(key.removesuffix("_from_config")) or {}).update(value)
            else:
                f.set(key, value, source)


def _embedding(f: FoundArchitecture, stated: AbstractSet[int]) -> None:
    """Vocabulary and width. If tables, norms and stages have several widths, the one `stated` by a config is used."""
    outer, prefix = f.parts.outer, f.parts.main.prefix
    tables = [(n, shape) for n, shape in outer.items() if names.EMBED.search(n) and len(shape) == 2]
    positions = next((n for n, s in outer.items() if names.POSITIONS.search(n) and len(s) > 1), None)
    widths = f.parts.main.widths()
    of_table = ""
    if tables:
        of_table, (vocab, hidden) = max(tables, key=lambda item: (_common(item[0], prefix), item[1][0]))
        f.set("vocab_sz", vocab, of_table)
        factored = not any(hidden in shape for _, shape in f.tails.values())  # or it is another part's table
        widths = widths if factored and widths else {hidden: 1, **widths}
    if tables or f.last(*names.Q, *names.QKV) is not None:  # vision and audio encoders have no vocabulary
        width = next((width for width in widths if width in stated), next(iter(widths), None))
        f.set("hidden_sz", width, of_table if of_table and width == outer[of_table][1] else f"norms of {prefix}*")
    if tables:
        head = next((n for n, s in outer.items() if names.HEAD.search(n) and len(s) == 2), None)
        tied = head is None or head in f.tied or of_table in f.tied
        f.set("tie_embeddings", tied, f"{head} is tied" if head and tied else head or "no output layer")
    f.set("learned_positions", positions is not None, positions or "no position embedding")
    if positions is not None:
        f.set("max_positions", outer[positions][-2], positions)


def _common(name: str, prefix: str) -> int:
    """Number of leading dotted parts that a name shares with the layers' prefix."""
    pairs = zip(name.split("."), prefix.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)


def _mlp(f: FoundArchitecture) -> None:
    hidden = f.get("hidden_sz")
    down, up = f.last(*names.DOWN), f.last(*names.UP)
    if down is None or up is None:
        return
    inter = next((n for n in down[1] if n != hidden), hidden)  # GPT-2 stores [in, out], others [out, in]
    rows = next((n for n in up[1] if n != hidden), hidden)
    f.set("inter_sz", inter, down[0])
    gated = rows == 2 * inter or f.last(*names.GATE) is not None
    f.set("glu", gated, up[0] if rows == 2 * inter else "gate projection by name")


def _norms(f: FoundArchitecture, facts: list[dict[str, Any]]) -> None:
    """Kind of norm. Without a bias, a gated MLP means RMSNorm, except for Cohere, DBRX and ModernBERT."""
    norms = [(tail, m[1] or m[2]) for tail in f.tails if (m := names.NORM.search(tail)) and "indexer." not in tail]
    kinds = {kind for _, kind in norms}  # DeepSeek-V3.2's indexer has a LayerNorm beside the layer's RMSNorm
    per_layer = sum(not names.Q_NORM.search(tail) and "k_" not in tail for tail, _ in norms)
    stated = next((known for fact in facts if (known := norm_of(fact))), None)
    gated = f.get("glu") and (per_layer > 1 or f.last("linear_fc1")) and not any(map(names.LAYERNORM.search, f.tails))
    of_family = next((tail for tail in f.tails if names.RMSNORM.search(tail)), None)
    if "bias" in kinds:
        f.set("norm", "layernorm", "norm biases")
    elif stated is not None:
        f.set("norm", *stated)
    elif kinds and of_family:
        f.set("norm", "rmsnorm", f"no norm bias, and {of_family}")
    elif kinds and gated:
        f.set("norm", "rmsnorm", "no norm bias, gated MLP")  # with one norm a layer it may be Cohere's LayerNorm
    elif kinds:
        f.set("norm", None, "no norm bias: shapes do not distinguish rmsnorm from layernorm")
    if kinds:
        f.set("norm_bias", "bias" in kinds, "norm tensors by name")
    latent = f.last(*names.LATENT_Q)  # a norm of the latent has no head's width
    normed = (
        entry for tail, entry in f.tails.items() if names.Q_NORM.search(tail) and not (latent or tail[:5] == "cross")
    )
    qk, shape = next(normed, (None, ()))
    f.set("qk_norm", qk is not None, qk or "no q_norm")
    if qk and len(shape) == 1 and shape[0] != f.get("hidden_sz") and shape[0] <= max(CANDIDATES):
        f.set("head_dim", shape[0], qk)


def _biases(f: FoundArchitecture) -> None:
    """Biases of linear layers: those with a two-dimensional weight. Norms have one-dimensional weights."""
    modules = [tail.removesuffix(".bias") for tail in f.tails if tail.endswith(".bias")]
    linear = [m for m in modules if f"{m}.weight" in f.tails and len(f.tails[f"{m}.weight"][1]) == 2]
    linear = [m for m in linear if not m.endswith("dt_proj")]  # a part of Mamba's scan
    linear += [tail for tail in f.tails if tail.endswith("_proj_bias")]
    others = [m for m in linear if not names.QKV_MODULE.search(m)]
    f.set("bias", bool(others), "linear biases by name")
    if linear and not others:
        f.set("qkv_bias", value=True, source=f"{linear[0]}.bias")


def _attention(f: FoundArchitecture) -> None:
    hidden = f.get("hidden_sz")
    latent = f.last(*names.LATENT)
    if latent is not None:
        f.set("attention", {"kind": "mla"}, latent[0])
        return
    q, k, fused, out = f.last(*names.Q), f.last(*names.K), f.last(*names.QKV), f.last(*names.OUT)
    if q is not None and k is not None:
        gated = out is not None and q[1][0] == 2 * out[1][1]  # a gate as wide as the query (Qwen3-Next)
        if gated:
            f.set("attention", {"gated": True}, q[0])
        f.set("q_rows", q[1][0] // 2 if gated else q[1][0], q[0])
        f.set("kv_rows", k[1][0], k[0])
    elif fused is not None:
        rows = next((n for n in fused[1] if n != hidden), hidden)
        q_rows = next((n for n in out[1] if n != hidden), hidden) if out else hidden
        if rows > q_rows and (rows - q_rows) % 2 == 0:
            f.set("q_rows", q_rows, out[0] if out else fused[0])
            f.set("kv_rows", (rows - q_rows) // 2, f"{fused[0]} = q + 2 kv rows")
    inverse = next((n for n in (*f.parts.outer, *f.tails) if n.endswith("rotary_emb.inv_freq")), None)
    shape = f.parts.outer.get(inverse or "") or f.tails.get(inverse or "", ("", ()))[1]
    if inverse and len(shape) == 1:
        f.set("head_dim", 2 * shape[0], inverse)


def _heads(f: FoundArchitecture) -> None:
    """Numbers of heads from rows and head width. Without a head width, list the candidates."""
    for key in () if f.attends else ("n_q_heads", "n_kv_heads", "head_dim"):  # a config's, of Mamba's heads
        f.fields.pop(key, None)
    q, kv, width, heads = f.get("q_rows"), f.get("kv_rows"), f.get("head_dim"), f.get("n_q_heads")
    if q is None or kv is None or not kv:
        return
    if width is None and heads and q % heads == 0:
        f.set("head_dim", q // heads, f"{q} query rows / {heads} heads ({f.fields['n_q_heads']['from']})")
        width = q // heads
    if width and q % width == 0 and kv % width == 0:
        source = f"rows / head_dim {width}"
        f.set("n_q_heads", q // width, source)
        if f.get("n_kv_heads") != kv // width:  # a config may say what its family has no use for
            f.fields["n_kv_heads"] = {"value": kv // width, "from": source}
        return
    fits = [n for n in CANDIDATES if gcd(q, kv) % n == 0]
    widths = f"may be {' or '.join(map(str, fits))}" if fits else f"divides {gcd(q, kv)}"
    ratio = f"n_q_heads : n_kv_heads = {q // gcd(q, kv)} : {kv // gcd(q, kv)}"
    source = (
        f"{q} query and {kv} key rows, {ratio}, head_dim {widths}; a config.json next to the weights would determine it"
    )
    f.fields["head_dim"] = {"value": None, "from": source, "candidates": fits}


def _kv_cache(f: FoundArchitecture, families: list[str]) -> None:
    """Set `kv_cache_bytes_per_token` [bytes], over all layers, where they are a decoder's and their key rows are known.

    2 x key rows a layer (keys and values) for attention with heads; for multi-head latent attention the compressed vector and the
    rotary key, the rows of the down projection (DeepSeek-V2, arXiv 2405.04434, section 2.1.4).
    """
    encodes = _NO_DECODER.search(f.parts.main.prefix) or f.last("q_lin") or any("bert" in name for name in families)
    if f.get("vocab_sz") is None or encodes:
        return
    kinds, latent = f.get("layer_kinds"), f.last(*names.LATENT)
    layers = kinds.get("attention", 0) if kinds else f.get("n_layers")
    heads, width = f.get("n_kv_heads"), f.get("head_dim")
    if latent is not None:
        rows, source, each = min(latent[1]), f"rows of {latent[0]} x 2 bytes", 1
    else:
        rows, source, each = f.get("kv_rows") or (heads and width and heads * width), "rows x 2 bytes", 2
    if layers and rows:
        text = f"{layers} layers x {rows} {source}"
        f.set("kv_cache_bytes_per_token", each * layers * rows * CACHE_ITEMSIZE, text if latent else f"2 x {text}")


def _mismatches(
    f: FoundArchitecture, configs: list[tuple[str, dict[str, Any]]], elsewhere: dict[str, set[int]]
) -> list[Problem]:
    """Fields of a language model that differ from its config, and that no other part of the config states."""
    problems = []
    for source, config in configs:
        for key in CHECKED:
            stated, seen = config.get(key), f.get(key)
            if key == "inter_sz" and (f.get("moe") or f.get("layer_kinds")):
                continue  # configs of sparse and hybrid models name the dense width, shapes the experts' or none
            if key == "inter_sz" and stated is not None and seen is not None and stated == 2 * seen:
                continue  # some name the width of both halves of a gated MLP
            if key == "vocab_sz" and stated and seen and (stated < seen < stated + PADDING or elsewhere["codebooks"]):
                continue  # codebooks of sounds share a table with the words
            if stated is not None and seen is not None and stated != seen and seen not in elsewhere[key]:
                message = f"{key}: {source} says {stated}, {f.fields[key]['from']} says {seen}"
                problems.append(Problem("CONFIG_MISMATCH", message, source))
    return problems
