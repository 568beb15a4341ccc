"""Layers of other kinds in a Hugging Face config.json: hybrids of Mamba-2, attention, MLP and experts, and linear attention.

Source of the hybrids: transformers, src/transformers/models/nemotron_h/configuration_nemotron_h.py.
"""

from __future__ import annotations

Json = dict[str, object]

HYBRIDS = ("nemotron_h",)
"""Families whose layers are each one thing."""
LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Words of `layers_block_type`, of files on the Hub and of transformers 5, in the letters of `hybrid_override_pattern`."""
SIZES = {
    "n_heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "state_dim": ("ssm_state_size", 128),
    "n_groups": ("n_groups", 8),
    "conv_width": ("conv_kernel", 4),
    "chunk_sz": ("chunk_size", 128),
}
"""Fields of `model.mamba`: their keys and class defaults."""
AHEAD = "*E"
"""What one depth of multi-token prediction is: attention, then experts."""


def letters(values: Json, kinds: str, pattern: str) -> object:
    """The pattern in letters, from a list of words or from the older key; None where neither is given."""
    words = values.get(kinds)
    if isinstance(words, list):
        return "".join(LETTERS.get(str(word), "?") for word in words)
    return values.get(pattern)


def layers_of(values: Json) -> object:
    """The layers in letters."""
    return letters(values, "layers_block_type", "hybrid_override_pattern")


def counted(values: Json) -> Json:
    """The number of layers where a file leaves it to the list of their kinds, as transformers 5 does."""
    layers = layers_of(values)
    return (
        {"num_hidden_layers": len(layers)}
        if values.get("num_hidden_layers") is None and isinstance(layers, str)
        else {}
    )


def hybrid_section(values: Json) -> tuple[Json, list[str]]:
    """Fields of `Model` for the layers of a hybrid, and what is wrong with them."""
    layers = layers_of(values)
    if not isinstance(layers, str) or not layers or set(layers) - set(LETTERS.values()):
        return {}, ["hybrid_override_pattern: expected the layers in order, of the letters M, *, - and E"]
    found: Json = {"hybrid_pattern": layers}
    if "M" in layers:
        found["mamba"] = {ours: values.get(key, default) for ours, (key, default) in SIZES.items()}
    ahead = letters(values, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or AHEAD
    if values.get("num_nextn_predict_layers") and ahead != AHEAD:
        return found, [f"mtp_hybrid_override_pattern: {ahead!r} is not modeled, only {AHEAD!r}"]
    return found, []


# --- linear attention ---

DELTA_SIZES = {
    "n_key_heads": "linear_num_key_heads",
    "n_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Gated DeltaNet's sizes, by Qwen3-Next's keys."""
LINEAR = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "gated_delta_net"),
    "kimi_linear": "kda",
    "minimax": "lightning",
    "minimax_text_01": "lightning",
}
"""The linear attention of each family."""


def linear_section(model_type: str, values: Json) -> tuple[Json, list[str]]:
    """The `linear_attention` section of a family that has it, and what is wrong with it; empty for any other."""
    kind = LINEAR.get(model_type)
    if kind is None:
        return {}, []
    section: Json = {"kind": kind}
    if kind == "kda":
        said = values.get("linear_attn_config")
        said = said if isinstance(said, dict) else {}
        width, heads = said.get("head_dim", 128), said.get("num_heads", 32)
        section |= {"n_value_heads": heads, "key_head_dim": width, "value_head_dim": width}
        section["conv_width"] = said.get("short_conv_kernel_size", 4)
        if not isinstance(layers := said.get("kda_layers"), list):
            return {}, ["linear_attn_config.kda_layers: missing"]
        count = values.get("num_hidden_layers")
        section["freq"] = [int(layer in layers) for layer in range(1, (count if isinstance(count, int) else 0) + 1)]
        return section, []
    if kind == "lightning":
        heads, width = values.get("num_attention_heads"), values.get("head_dim")
        section |= {"n_value_heads": heads, "key_head_dim": width, "value_head_dim": width}
    else:
        section |= {ours: values[theirs] for ours, theirs in DELTA_SIZES.items()}
    if isinstance(types := values.get("layer_types"), list):
        section["freq"] = [int(of == "linear_attention") for of in types]
    elif isinstance(types := values.get("attn_type_list"), list):
        section["freq"] = [int(of == 0) for of in types]
    elif kind == "gated_delta_net":
        section["freq"] = values.get("full_attention_interval", 4)
    else:  # the first of every two has full attention (configuration_minimax.py)
        count = values.get("num_hidden_layers")
        section["freq"] = [layer % 2 for layer in range(count if isinstance(count, int) else 0)]
    return {**section, "freq": interval(section["freq"])}, []


def interval(freq: object) -> object:
    """The n where the last of every n layers has full attention, if a list has that pattern.

    >>> interval([1, 1, 0, 1, 1, 0]), interval([1, 0, 0])
    (3, [1, 0, 0])
    """
    if not isinstance(freq, list) or 0 not in freq:
        return freq
    n = freq.index(0) + 1
    return n if n > 1 and freq == [int((layer + 1) % n != 0) for layer in range(len(freq))] else freq
