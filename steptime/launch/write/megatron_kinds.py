"""Experts, latent attention, windows and hybrid layers of a plan as Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from steptime.job.job import Job
from steptime.launch.keys import KeyTable
from steptime.launch.megatron.layer_kinds import LINEAR
from steptime.launch.write.plain_keys import word_for
from steptime.model.blocks import layers
from steptime.model.hf_hybrid import AHEAD

COEFFICIENT = 0.01
"""Coefficient of a loss that the plan has: any number is read as one."""


def kinds(job: Job, model: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """Argument -> value of all kinds of layer and attention that a resolved model section has."""
    attention = _attention(model.get("attention") or {}, table)
    return _hybrid(model) | _experts(job, model, table) | attention | _linear(model)


def _hybrid(model: Mapping[str, Any]) -> dict[str, Any]:
    if not model.get("hybrid_pattern"):
        return {}
    name = "hybrid_layer_pattern" if model.get("mtp") else "hybrid_override_pattern"  # the older one has no depths
    pattern = model["hybrid_pattern"] + f"/{AHEAD}" * (model.get("mtp") or 0)
    return {name: pattern, "is_hybrid_model": True}


def _experts(job: Job, model: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    moe = model.get("moe")
    if not moe:
        return {}
    on = [int(layer.kind == "moe") for layer, count in layers(job.model) for _ in range(count)]
    balancing = word_for(table, "moe_router_load_balancing_type", moe.get("load_balancing"))
    found: dict[str, Any] = {
        "num_experts": moe["n_experts"],
        "moe_layer_freq": None if model.get("hybrid_pattern") else layer_freq(on),
        "moe_router_load_balancing_type": balancing,
        "moe_aux_loss_coeff": COEFFICIENT if str(balancing).endswith("aux_loss") else None,
        "moe_z_loss_coeff": COEFFICIENT / 10.0 if moe.get("z_loss") else None,
    }
    if not moe.get("shared_expert_inter_sz"):
        found |= {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": None}
    if moe.get("node_limit"):
        found |= {"moe_router_num_groups": moe["n_groups"], "moe_router_group_topk": moe["node_limit"]}
    return found


def layer_freq(on: Sequence[int]) -> str | None:
    """Which layers have experts, as a list in Python's words; None where all do.

    >>> layer_freq([0, 0, 1, 1, 1])
    '([0]*2+[1]*3)'
    """
    return None if all(on) else f"({'+'.join(f'[{kind}]*{len([*run])}' for kind, run in groupby(on))})"


def _linear(model: Mapping[str, Any]) -> dict[str, Any]:
    said = model.get("linear_attention")
    if not said:
        return {}
    if said["kind"] != "gated_delta_net":
        return dict.fromkeys(("linear_attention_freq", *LINEAR))
    freq = said["freq"]
    words = {"linear_attention_freq": freq if isinstance(freq, int) else layer_freq(freq)}
    return {"experimental_attention_variant": said["kind"]} | words


def _attention(attention: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    found: dict[str, Any] = {"attention_output_gate": bool(attention.get("gated"))}
    if attention.get("kind") == "mla":
        found |= {"multi_latent_attention": True, "qk_layernorm": True}  # norms of the latents
    if (window := attention.get("window")) is not None:
        found |= {"window_size": f"({window - 1}, 0)", "window_attn_skip_freq": attention.get("window_pattern")}
    if attention.get("sinks"):
        found["softmax_type"] = word_for(table, "softmax_type", True)
    return found
