"""A preset with the fields that a recipe sets over it."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_values import Computed
from steptime.launch.devices import told
from steptime.launch.reading import Sets

_FIELDS = {
    "num_layers": "n_layers", "hidden_size": "hidden_sz", "ffn_hidden_size": "inter_sz", "num_attention_heads": "n_q_heads",
    "num_query_groups": "n_kv_heads", "kv_channels": "head_dim", "vocab_size": "vocab_sz",
    "share_embeddings_and_output_weights": "tie_embeddings", "qk_layernorm": "qk_norm",
}  # fmt: skip
"""Fields of a GPT's config (megatron/core/transformer/transformer_config.py, models/gpt_provider.py) -> of a model."""


def changed(path: str, preset: str, said: dict[str, Any], section: str, sets: Sets) -> Any:
    """A preset with what the recipe sets over it, in its section of the config.

    Raises:
        ConfigError: a size is known only at run time, and the user sets none.
    """
    changes: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        key = f"{section}.{name}"
        if isinstance(value := said.get(key), Computed) and told(sets, "model") is told(sets, f"model.{field}") is None:
            raise ConfigError(f"{path}: {key} is computed ({value.code}); add --set model.{field}=N")
        if value is not None and not isinstance(value, Computed):
            changes[field] = value
    return {"preset": preset} | changes if changes else preset
