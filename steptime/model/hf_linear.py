"""Linear attention of a Hugging Face config.json: its sizes, and the layers that have it."""

from __future__ import annotations

Json = dict[str, object]

SIZES = {
    "n_key_heads": "linear_num_key_heads",
    "n_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Gated DeltaNet's sizes, by Qwen3-Next's keys."""
KINDS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "gated_delta_net"),
    "kimi_linear": "kda",
    "minimax": "lightning",
    "minimax_text_01": "lightning",
}
"""The linear attention of each family."""


def linear_section(model_type: str, values: Json) -> tuple[Json, list[str]]:
    """The `linear_attention` section of a family that has it, and what is wrong with it; empty for any other."""
    kind = KINDS.get(model_type)
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
        section |= {ours: values[theirs] for ours, theirs in SIZES.items()}
    if isinstance(types := values.get("layer_types"), list):
        section["freq"] = [int(of == "linear_attention") for of in types]
    elif isinstance(types := values.get("attn_type_list"), list):
        section["freq"] = [int(of == 0) for of in types]
    else:
        section["freq"] = values.get("full_attention_interval", 4) if kind == "gated_delta_net" else 2
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
