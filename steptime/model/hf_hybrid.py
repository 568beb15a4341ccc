"""A hybrid of Mamba-2, attention, MLP and experts in a Hugging Face config.json: the order of its layers, and Mamba-2's sizes.

Source: transformers, src/transformers/models/nemotron_h/configuration_nemotron_h.py.
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
