"""The inferred architecture as the `model:` part of a config; what is not known, or no plan can say, is a comment of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.checkpoint.escape import escaped

if TYPE_CHECKING:
    from steptime.checkpoint.inventory import Inventory

REQUIRED = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz")
OPTIONAL = (
    "n_kv_heads", "head_dim", "glu", "norm", "bias", "qkv_bias", "norm_bias", "tie_embeddings", "learned_positions",
    "max_positions", "qk_norm", "layers", "moe", "attention",
)  # fmt: skip
MOE_REQUIRED = ("n_experts", "expert_inter_sz", "experts_per_token")
NO_PLAN = ("vision", "audio", "projector", "encoder", "mtp", "layer_kinds")
"""Parts of a checkpoint that a plan of a decoder does not have."""


def model_yaml(summary: Inventory) -> str:
    """A YAML document with one key, `model`; every line says where its value is from."""
    found = summary.architecture
    lines = [f"# inferred from {escaped(summary.path)}; parameters {summary.restored.params:,}", "model:"]
    for key in (*REQUIRED, *OPTIONAL):
        entry = found.get(key)
        if entry is not None and entry["value"] is not None:
            lines.append(f"  {key}: {_value(entry['value'])}  # {escaped(entry['from'], 90)}")
        elif key in REQUIRED or entry is not None:
            lines.append(f"  # {key}: {_unknown(found, key)}")
    moe = (found.get("moe") or {}).get("value")
    missing = [key for key in MOE_REQUIRED if isinstance(moe, dict) and not moe.get(key)]
    lines += [f"  # moe.{key}: not known from names and shapes; a config beside the weights says it" for key in missing]
    parts = [(key, found[key]["value"]) for key in NO_PLAN if key in found]
    lines += [
        f"  # {key}: {escaped(_value(value), 160)} in the checkpoint; a plan has no such part" for key, value in parts
    ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)


def _unknown(found: dict[str, dict[str, Any]], key: str) -> str:
    width = found.get("head_dim", {})
    if key in ("n_q_heads", "head_dim") and width.get("value") is None and width:
        candidates = ", ".join(map(str, width.get("candidates", [])))
        return escaped(f"{width['from']}; head_dim is one of {candidates or 'none of the usual widths'}", 160)
    return "not known from names and shapes"
