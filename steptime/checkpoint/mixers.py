"""Model keys of layers other than plain attention, from names and shapes: latents, gates, linear attention, Mamba-2.

Shapes: DeepSeek-V2 (`modeling_deepseek_v2.py`, arXiv 2405.04434), Qwen3-Next (`modeling_qwen3_next.py`), Mamba-2
(`modeling_mamba2.py`, Megatron-Core `ssm/mamba_mixer.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from steptime.checkpoint import weight_names as names
from steptime.checkpoint.stacks import FoundArchitecture
from steptime.checkpoint.stored_records import Shape

KINDS = (  # of layers that are no attention, by what only they have
    ("linear_attention", re.compile(r"linear_attn\.|^attn\.A_log$|delta_net|^self_attn\.(?:A_log$|output_gate\.)")),
    ("mamba", re.compile(r"A_log$|ssm_a$")),
    ("rwkv", re.compile(r"time_(?:decay|maa|mix)|attention\.time_")),
)
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "experts": "E"}
CROSS, OWN = "cross_attn.q_proj.weight", "self_attn.q_proj.weight"
"""Whether a layer is a cross-attention layer of Mllama."""
_MAMBA = "mixer|mamba|ssm"
WIDEST_HEAD = 512
"""A norm of q that is wider is one over all heads (known heads have up to 256)."""


def kinds(f: FoundArchitecture) -> None:
    """Record what kind each layer is, where not all are attention: `layer_kinds`, and the hybrid's pattern."""
    marks = [(kind, {tail for tail in f.tails if mark.search(tail)}) for kind, mark in KINDS]
    attention = {tail for tail in f.tails if names.is_attention(tail)}
    sparse = {tail for tail in f.tails if names.SPARSE.search(tail)}
    mlp = {tail for tail in f.tails if any(names.ends(tail, name) for name in names.DOWN)}
    found: list[str] = []
    single = True  # whether each layer is one thing, with a norm of its own
    for _, tails in sorted(f.parts.main.layers.items()):
        about = [kind for kind, own in marks if not own.isdisjoint(tails)]
        about += ["attention"] if not about and not attention.isdisjoint(tails) else []
        rest = ["experts"] if not sparse.isdisjoint(tails) else ["mlp"] if not mlp.isdisjoint(tails) else []
        single = single and len(about) + len(rest) == 1
        kind = (about or rest or ["attention"])[0] if attention or any(own for _, own in marks) else "attention"
        found.append("cross_attention" if CROSS in tails and OWN not in tails else kind)
    if set(found) - {"attention"}:
        f.set("layer_kinds", dict(Counter(found)), "layers by their own modules")
    if single and "mamba" in found and set(found) <= LETTERS.keys() and _matrix(f, "in_proj") and not _mamba_1(f):
        f.set("hybrid_pattern", "".join(LETTERS[kind] for kind in found), "layers by their own modules")
    if "linear_attention" in found and set(found) <= {"linear_attention", "attention"}:
        freq = [int(kind == "linear_attention") for kind in found]
        f.set("linear_attention", {"freq": freq}, "layers by their own modules")
    if not {"attention", "cross_attention"} & set(found):
        f.attends = False


def sections(f: FoundArchitecture, configs: list[dict[str, Any]]) -> None:
    """Record `attention`, `mamba`, `linear_attention` and where the norms are; the rest comes from `configs`."""
    if f.last(*names.LATENT) is not None:
        _latent(f)
    if sinks := next((name for tail, (name, _) in f.tails.items() if tail.endswith("sinks")), None):
        f.set("attention", {"sinks": True}, sinks)
    _places_of_norms(f)
    if f.get("hybrid_pattern"):
        _mamba(f, configs)
    if f.get("linear_attention"):
        _linear(f)


def _places_of_norms(f: FoundArchitecture) -> None:
    """Record which norms a layer has: at the beginning or end of its halves, one for both, over one head or all of them.

    transformers modeling_gemma2.py, modeling_olmo2.py, modeling_falcon.py (ln_attn and ln_mlp), modeling_cohere.py.
    """
    named = {tail.rpartition(".")[0].rpartition(".")[2]: name for tail, (name, _) in f.tails.items()}
    post = named.get("post_feedforward_layernorm")
    if post or "pre_feedforward_layernorm" in named:
        f.set("post_norms", value=True, source=post or named["pre_feedforward_layernorm"])
    if post and not {"input_layernorm", "pre_feedforward_layernorm"} & named.keys():
        f.set("pre_norms", value=False, source=f"{post}, and no input_layernorm")
    own = [tail for tail in f.tails if names.NORM.search(tail) and not names.Q_NORM.search(tail) and "k_" not in tail]
    modules = {tail.rpartition(".")[0] for tail in own}
    if {"ln_attn", "ln_mlp"} <= named.keys():
        f.set("parallel_residual", value=True, source=named["ln_mlp"])
    elif len(modules) == 1 and f.attends and f.get("inter_sz") and not f.get("layer_kinds"):
        f.set("parallel_residual", value=True, source=f"one norm for attention and MLP: {f.tails[own[0]][0]}")
        f.set("shared_norm", value=True, source=f.tails[own[0]][0])
    head = f.get("head_dim") or WIDEST_HEAD
    for tail, (name, shape) in f.tails.items():
        if names.Q_NORM.search(tail) and shape == (f.get("q_rows"),) and shape[0] > head:
            f.set("qk_norm_type", "per_layer", name)


def _latent(f: FoundArchitecture) -> None:
    """Rows: keys and values down r + rope, up heads x (nope + v), queries heads x (nope + rope), output heads x v.

    So heads x rope is what queries and outputs have together over the up projection.
    """
    down, up = f.last(*names.LATENT), f.last("kv_b_proj", "wkv_b", "linear_kv_up_proj", "attn_kv_b")
    query = f.last(*names.LATENT_Q, *names.Q)
    out = f.last(*names.OUT)
    if down is None or up is None or query is None or out is None:
        return
    section: dict[str, Any] = {"kind": "mla", "kv_lora_rank": up[1][1]}
    if query[1][1] != f.get("hidden_sz"):
        section["q_lora_rank"] = query[1][1]
    rope, values = min(down[1]) - up[1][1], out[1][1]
    heads = (query[1][0] + values - up[1][0]) // rope if rope > 0 else 0
    if heads > 0 and not values % heads and not up[1][0] % heads and query[1][0] == up[1][0] - values + heads * rope:
        section |= {"qk_rope_head_dim": rope, "v_head_dim": values // heads}
        section["qk_nope_head_dim"] = up[1][0] // heads - values // heads
        f.set("n_q_heads", heads, f"{query[0]}, {up[0]} and {out[0]}")
    f.fields["attention"] = {"value": section, "from": down[0]}


def _tail(f: FoundArchitecture, name: str) -> Shape | None:
    """Shape of the last part `name` of a Mamba or linear attention layer."""
    return next((shape for tail, (_, shape) in f.tails.items() if tail.endswith(name)), None)


def _matrix(f: FoundArchitecture, name: str) -> Shape | None:
    own = re.compile(rf"(?:{_MAMBA})\.{name}\.weight$")
    return next((shape for tail, (_, shape) in f.tails.items() if own.search(tail)), None)


def _mamba_1(f: FoundArchitecture) -> bool:
    """Mamba's first version has a decay per channel and state."""
    return len(_tail(f, "A_log") or ()) == 2


def _mamba(f: FoundArchitecture, configs: list[dict[str, Any]]) -> None:
    """Heads, their width and the convolution are in the shapes; of groups and states only the product is in the shapes."""
    decay, out, conv = _tail(f, "A_log"), _matrix(f, "out_proj"), _tail(f, "conv1d.weight")
    if decay is None or out is None or conv is None or not decay[0]:
        return
    inner = out[1]
    both = (conv[0] - inner) // 2
    section: dict[str, Any] = {"n_heads": decay[0], "head_dim": inner // decay[0], "conv_width": conv[-1]}
    said = {key: value for config in configs for key, value in config.get("mamba_from_config", {}).items()}
    section |= said
    groups, states = said.get("n_groups"), said.get("state_dim")
    if groups and not both % groups:
        section["state_dim"] = both // groups
    elif states and not both % states:
        section["n_groups"] = both // states
    f.set("mamba", section, f"Mamba-2 layers; n_groups x state_dim = {both}")


def _linear(f: FoundArchitecture) -> None:
    """Gated DeltaNet: a decay for each head of values; queries and keys have what the convolution has besides."""
    decay, norm, conv = (_tail(f, f"linear_attn.{name}") for name in ("A_log", "norm.weight", "conv1d.weight"))
    if decay and norm and conv:
        section = {
            "kind": "gated_delta_net",
            "n_value_heads": decay[0],
            "value_head_dim": norm[0],
            "conv_width": conv[-1],
        }
        keys = (conv[0] - decay[0] * norm[0]) // 2
        source = f"linear_attn.*; n_key_heads x key_head_dim = {keys}"
        f.fields["linear_attention"] = {"value": section | f.get("linear_attention"), "from": source}
