"""The inferred architecture as the `model:` part of a config; what is unknown, or has no plan key, is a one-line comment.

Names and shapes come first; what they do not determine (windows, top-k, activations) comes from a config.json next to the
weights, as read by `model.hf`.
"""

from __future__ import annotations

from typing import Any

from steptime.base.words import counted, flow
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.inventory import Inventory
from steptime.checkpoint.weight_names import BUFFERS

REQUIRED = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz")
OPTIONAL = (
    "n_kv_heads", "head_dim", "glu", "activation", "norm", "bias", "qkv_bias", "norm_bias", "tie_embeddings",
    "learned_positions", "max_positions", "qk_norm", "qk_norm_type", "pre_norms", "post_norms",
    "parallel_residual", "shared_norm", "dropout", "attention_dropout", "layers", "moe", "attention", "linear_attention",
    "hybrid_pattern", "mamba", "mtp",
)  # fmt: skip
SECTIONS = {  # what no section can do without, or no default stands for
    "moe": ("n_experts", "expert_inter_sz", "experts_per_token"), "mamba": ("n_groups", "state_dim"),
    "linear_attention": ("kind", "n_key_heads", "key_head_dim"),
}  # fmt: skip
EQUAL_HEADS = ("kda", "lightning")
"""Kinds of linear attention with as many heads of keys as of values."""
NO_PLAN = ("vision", "audio", "projector", "encoder")
"""Parts of a checkpoint without keys in a plan."""
ONE_PLACE = {"hybrid_pattern": ("layers",), "attention": ("n_kv_heads", "head_dim")}
"""Fields that another field already determines: latent attention has no key heads."""


def model_yaml(summary: Inventory) -> str:
    """A YAML document with one key, `model`; every line has the source of its value."""
    found = summary.architecture
    fields, notes = _fields(summary)
    lines = [f"# inferred from {escaped(summary.path)}; parameters {summary.restored.params:,}", "model:"]
    for key in (*REQUIRED, *OPTIONAL):
        if key in fields:
            value, source = fields[key]
            lines.append(f"  {key}: {flow(value)}  # {escaped(source, 90)}")
        elif key in REQUIRED or (key in found and found[key]["value"] is None and key != "head_dim"):
            lines.append(f"  # {key}: {_unknown(found, key)}")
    for key, needed in SECTIONS.items():
        section = fields[key][0] if key in fields else None
        if section is None or section.get("kind") in EQUAL_HEADS:
            continue
        unknown = "not known from names and shapes; needs a config next to the weights"
        lines += [f"  # {key}.{name}: {unknown}" for name in needed if section.get(name) is None]
    lines += [f"  # {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _fields(summary: Inventory) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Fields of the model with their sources, and those without a plan key."""
    found = summary.architecture
    known = {key: (entry["value"], entry["from"]) for key, entry in found.items() if entry["value"] is not None}
    if "mtp" in known:
        known["mtp"] = known["mtp"][0]["n_layers"], known["mtp"][1]
    notes = [
        f"{key}: {escaped(flow(found[key]['value']), 160)} in the checkpoint; no plan key for it"
        for key in NO_PLAN
        if key in found
    ]
    stated, problems = _stated(summary)
    notes += [escaped(f"config.json: {problem.partition(' (read:')[0]}", 160) for problem in problems]
    for key, value in stated.items():
        own = known.get(key)
        if isinstance(value, dict) and own and isinstance(own[0], dict):
            known[key] = value | own[0], own[1]
        elif own is None and key != "mtp":  # what was not saved is not there
            known[key] = value, "config.json"
    kinds = known.get("layer_kinds", ({}, ""))[0]
    odd = set(kinds) - {"attention"} - ({"linear_attention"} if "linear_attention" in known else set())
    if odd and "hybrid_pattern" not in known:
        notes.append(f"layer_kinds: {flow(kinds)} in the checkpoint; no plan key for such layers")
    for key, others in ONE_PLACE.items():
        if key in known and (key != "attention" or known[key][0].get("kind") == "mla"):
            known = {name: value for name, value in known.items() if name not in others}
    fields = {key: known[key] for key in (*REQUIRED, *OPTIONAL) if key in known}
    return fields, notes + _difference(summary, fields)


def _stated(summary: Inventory) -> tuple[dict[str, Any], list[str]]:
    """Fields that a config.json next to the weights states, and why it is not read."""
    from steptime.model.hf import fields_of

    config = summary.counted[0].facts.get("config")
    if not isinstance(config, dict) or "model_type" not in config:
        return {}, []
    text = config.get("text_config")
    fields, problems = fields_of(text if isinstance(text, dict) and "model_type" in text else config)
    return ({}, problems) if problems else (fields, [])


def _difference(summary: Inventory, fields: dict[str, tuple[Any, str]]) -> list[str]:
    """How many parameters the plan has more or less than the checkpoint, where it is whole and they differ."""
    from steptime.model.blocks import n_params
    from steptime.model.model import Model

    try:
        planned = n_params(Model.model_validate({key: value for key, (value, _) in fields.items()}))
    except ValueError:  # pydantic's too: something required is not known
        return []
    more = planned - sum(t.unique for t in summary.restored.tensors if not BUFFERS.search(t.name))
    if not more:
        return []
    side = "more" if more > 0 else "fewer"
    return [f"this model has {counted(planned, 'parameter')}, {abs(more):,} {side} than the checkpoint"]


def _unknown(found: dict[str, dict[str, Any]], key: str) -> str:
    width = found.get("head_dim", {})
    if key == "n_q_heads" and width.get("value") is None and width:
        return escaped(f"not known: {width['from']}", 200)
    return "not known from names and shapes"
