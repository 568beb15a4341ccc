"""The inferred architecture as the `model:` part of a job file; what is not known stays a comment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.checkpoint.escape import escaped

if TYPE_CHECKING:
    from steptime.checkpoint.inventory import Inventory

REQUIRED = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz")
OPTIONAL = (
    "n_kv_heads", "head_dim", "glu", "norm", "bias", "qkv_bias", "norm_bias", "tie_embeddings", "learned_positions",
    "max_positions", "qk_norm", "moe", "attention",
)  # fmt: skip


def model_yaml(summary: Inventory) -> str:
    """A YAML document with one key, `model`; every line says where its value is from."""
    found = summary.architecture
    lines = [f"# inferred from {escaped(summary.path)}; parameters {summary.params:,}", "model:"]
    for key in (*REQUIRED, *OPTIONAL):
        entry = found.get(key)
        if entry is not None and entry["value"] is not None:
            lines.append(f"  {key}: {_value(entry['value'])}  # {escaped(entry['from'], 90)}")
        elif key in REQUIRED or entry is not None:
            lines.append(f"  # {key}: {_unknown(found, key)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def _unknown(found: dict[str, dict[str, Any]], key: str) -> str:
    width = found.get("head_dim", {})
    if key in ("n_q_heads", "head_dim") and width.get("value") is None and width:
        candidates = ", ".join(map(str, width.get("candidates", [])))
        return escaped(f"{width['from']}; head_dim is one of {candidates or 'none of the usual widths'}", 160)
    return "not known from names and shapes"
