"""A preset with the fields that a recipe sets over it."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError, build, show
from steptime.job.edit import read_model
from steptime.launch.config_values import Computed
from steptime.launch.devices import told
from steptime.launch.reading import Sets
from steptime.model.model import Model

_FIELDS = {
    "num_layers": "n_layers", "hidden_size": "hidden_sz", "ffn_hidden_size": "inter_sz", "num_attention_heads": "n_q_heads",
    "num_query_groups": "n_kv_heads", "kv_channels": "head_dim", "vocab_size": "vocab_sz",
    "share_embeddings_and_output_weights": "tie_embeddings", "qk_layernorm": "qk_norm", "add_qkv_bias": "qkv_bias",
    "mtp_num_layers": "mtp", "num_moe_experts": "moe.n_experts", "moe_ffn_hidden_size": "moe.expert_inter_sz",
    "moe_router_topk": "moe.experts_per_token",
}  # fmt: skip
"""Fields of a GPT's config (megatron/core/transformer/transformer_config.py, models/gpt_provider.py) -> of a model."""
_KINDS = {
    "normalization": "norm", "gated_linear_unit": "glu", "add_bias_linear": "bias", "window_size": "attention.window",
    "multi_latent_attention": "attention.kind", "num_moe_experts": "moe", "moe_layer_freq": "moe",
}  # fmt: skip
"""Fields that make a model of another kind, where they are not as the preset has them -> of a model."""


def changed(path: str, preset: str, said: dict[str, Any], section: str, sets: Sets) -> Any:
    """A preset with what the recipe sets over it, in its section of the config.

    Raises:
        ConfigError: a size is known only at run time, or the recipe makes a model of another kind, and the user sets none.
    """
    changes: dict[str, Any] = {}
    listed = build(Model, read_model(preset))
    if (file := told(sets, "model.hf")) is not None:
        return {"hf": file}
    if told(sets, "model") is not None:
        return preset
    _same_kind(path, preset, listed, {key: said.get(f"{section}.{key}") for key in _KINDS}, section)
    for name, field in _FIELDS.items():
        key = f"{section}.{name}"
        if isinstance(value := said.get(key), Computed) and told(sets, f"model.{field}") is None:
            raise ConfigError(f"{path}: {key} is computed ({value.code}); add --set model.{field}=N")
        if value is None or isinstance(value, Computed):
            continue
        part, _, last = field.rpartition(".")
        if part:
            changes[part] = changes.get(part, getattr(listed, part).model_dump(exclude_unset=True)) | {last: value}
        else:
            changes[field] = value
    return {"preset": preset} | changes if changes else preset


def _same_kind(path: str, preset: str, listed: Model, said: dict[str, Any], section: str) -> None:
    """Refuse fields that say more than other sizes of a preset's kind of model."""
    for name, value in said.items():
        if value is None or isinstance(value, Computed) or _as_listed(name, value, listed):
            continue
        what = f"{section}.{name}: another kind of model than {preset} (got {show(value)})"
        raise ConfigError(f"{path}: {what}; add --set model=NAME, or --set model.hf=CONFIG.json")


def _as_listed(name: str, value: Any, listed: Model) -> bool:
    """Whether a field is as the preset has it."""
    if name == "moe_layer_freq":  # a list has 0 for a dense layer (megatron/core/models/gpt/gpt_layer_specs.py)
        dense = value.count(0) if isinstance(value, list) else 0 if value == 1 else None
        return bool(dense == (listed.moe.n_dense_layers if listed.moe else 0))
    own: Any = listed
    for part in _KINDS[name].split("."):
        own = getattr(own, part, None)
    if name == "multi_latent_attention":
        return bool(value) == bool(own == "mla")
    return bool(str(value).lower() == str(own).lower() if isinstance(own, str | bool) else bool(value) == bool(own))
