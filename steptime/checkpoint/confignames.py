"""Names other projects give to the fields of a model, in the order they are looked up.

Sources: Hugging Face `configuration_*.py` attribute maps, Megatron-LM `megatron/training/arguments.py`,
GGUF specification (ggml `docs/gguf.md`, architecture-prefixed keys).
"""

from __future__ import annotations

from typing import Any

FIELDS: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "block_count", "n_layers"),
    "hidden_sz": ("hidden_size", "n_embd", "d_model", "embedding_length", "dim"),
    "inter_sz": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "feed_forward_length"),
    "n_q_heads": ("num_attention_heads", "n_head", "num_heads", "attention.head_count", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "attention.head_count_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels", "attention.key_length"),
    "vocab_sz": ("padded_vocab_size", "vocab_size"),
    "tie_embeddings": ("tie_word_embeddings",),
}
MOE_FIELDS: dict[str, tuple[str, ...]] = {
    "n_experts": ("num_experts", "num_local_experts", "n_routed_experts", "expert_count"),
    "experts_per_token": ("num_experts_per_tok", "moe_router_topk", "expert_used_count"),
}
CHECKED = ("n_layers", "hidden_sz", "inter_sz", "vocab_sz", "head_dim")


def from_config(facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(source, fields) of each config a section's facts hold: config.json, pickled args, GGUF key-values."""
    found = []
    for key, source in (
        ("config", "config.json"),
        ("params", "params.json"),
        ("args", "args"),
        ("gguf", "GGUF key-values"),
    ):
        values = facts.get(key)
        if not isinstance(values, dict):
            continue
        if isinstance(values.get("text_config"), dict):  # multimodal models nest the language model's
            values = values | values["text_config"]
        known = _fields(_unprefixed(values) if key == "gguf" else values)
        if known:
            found.append((source, known))
    return found


def _unprefixed(values: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{values.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[n] for n in names if type(values.get(n)) in (int, bool)), None)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    found = {field: value for field, names in FIELDS.items() if (value := _first(values, names)) is not None}
    groups = values.get("num_query_groups")
    if values.get("group_query_attention") and type(groups) is int:  # Megatron: 1 unless grouped
        found["n_kv_heads"] = groups
    untied = values.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        found["tie_embeddings"] = not untied
    moe = {field: value for field, names in MOE_FIELDS.items() if (value := _first(values, names)) is not None}
    if moe.get("n_experts"):
        found["moe_from_config"] = moe
    return found
