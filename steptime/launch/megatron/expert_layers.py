"""Mixtures of experts in a Megatron job: which layers have them, the router, the dispatcher.

Source: megatron-core 0.16.1 transformer/transformer_config.py, models/gpt/gpt_layer_specs.py and transformer/moe.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.layer_kinds import hybrid_pattern, listed

_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Kinds of balancing that are losses; a coefficient of 0 turns them off."""


def has_experts(keys: JobKeys) -> bool:
    """Whether the job has experts; a single one is a dense MLP."""
    said = keys.words("num_experts")
    if len(said) > 1:  # Megatron-DeepSpeed: the experts of each layer that has some
        return True
    count = keys.whole("num_experts", least=0) or 0
    if count == 1:
        keys.without_effect("num_experts", "one expert is counted as a dense MLP")
    return count > 1


def expert_section(keys: JobKeys, ffn: int) -> dict[str, Any]:
    """What experts add to the `model` section; empty without. `ffn`: width of the dense MLP."""
    if not has_experts(keys):
        return {}
    layers = _layers(keys)
    width = keys.whole("moe_ffn_hidden_size") or ffn
    moe: dict[str, Any] = {
        "n_experts": keys.count("num_experts"),
        "expert_inter_sz": width,
        "latent_sz": keys.whole("moe_latent_size"),
        "experts_per_token": keys.count("moe_router_topk"),
        "n_dense_layers": layers.pop("n_dense_layers", None),
        "score_function": keys.word("moe_router_score_function"),
        "pre_softmax": keys.on("moe_router_pre_softmax")
        or keys.get("moe_router_load_balancing_type") == "softmax_topk",
        "expert_bias": keys.on("moe_router_enable_expert_bias"),
        **trained_with(keys),
    }
    if str(keys.get("moe_router_score_function")) == "sqrtsoftplus":
        keys.approximate("moe_router_score_function", "counted as a sigmoid")
    moe |= _shared(keys, width) | _groups(keys)
    return layers | {"moe": {key: value for key, value in moe.items() if value is not None}}


def trained_with(keys: JobKeys) -> dict[str, Any]:
    """How experts are trained, whatever sizes they have: losses of the router, and a capacity."""
    return {"load_balancing": _balancing(keys), "z_loss": bool(keys.number("moe_z_loss_coeff"))} | capacity(keys)


def capacity(keys: JobKeys) -> dict[str, Any]:
    """The tokens that an expert takes at most; empty where it takes all."""
    if (factor := keys.number("moe_expert_capacity_factor")) <= 0:
        return {}
    return {"capacity_factor": factor, "pad_to_capacity": keys.on("moe_pad_expert_input_to_capacity")}


def expert_degrees(keys: JobKeys, tp: int) -> dict[str, int]:
    """Expert parallelism; by default experts are also split over tp (core model_parallel_config.py)."""
    if not has_experts(keys):
        keys.without_effect("expert_model_parallel_size", "only with experts")
        return {}
    return {"ep": keys.count("expert_model_parallel_size"), "etp": keys.whole("expert_tensor_parallel_size") or tp}


def expert_performance(keys: JobKeys, precision: str) -> dict[str, Any]:
    """Router and dispatcher: the `moe` part of the `performance` section; empty without experts.

    TransformerEngine's fuser has kernels with epilogues for grouped products in mxfp8 and nvfp4 alone (ops/fused/grouped_mlp.py).
    """
    fuser = keys.on("use_transformer_engine_op_fuser")
    fused = fuser and has_experts(keys) and keys.on("moe_grouped_gemm") and precision in {"mxfp8", "nvfp4"}
    if fuser and not fused:
        keys.approximate("use_transformer_engine_op_fuser", "TransformerEngine's modules are counted")
    paged = fused and keys.on("moe_paged_stash") and keys.word("moe_token_dispatcher_type") == "flex"
    if keys.on("moe_paged_stash") and not paged:
        keys.approximate("moe_paged_stash", "activations of experts stay where they are")
    if not has_experts(keys):
        return {}
    dtype = str(keys.get("moe_router_dtype"))
    if dtype == "fp64":
        keys.approximate("moe_router_dtype", "the router is counted as fp32")
    dispatcher = keys.word("moe_token_dispatcher_type")
    hybrid = dispatcher == "flex" and keys.word("moe_flex_dispatcher_backend") == "hybridep"
    if dispatcher != "flex":
        keys.without_effect("moe_flex_dispatcher_backend", "only with the flex dispatcher")
    elif keys.get("moe_flex_dispatcher_backend") == "ncclep":
        keys.approximate("moe_flex_dispatcher_backend", "NCCL's library is counted as DeepEP")
    shared = keys.on("moe_shared_expert_overlap") and keys.whole("moe_shared_expert_intermediate_size") is not None
    moe: dict[str, Any] = {
        "dispatcher": dispatcher,
        "permute_fusion": keys.on("moe_permute_fusion"),
        "router_dtype": "fp32" if dtype in {"fp32", "fp64"} else "compute",
        "grouped_gemm": keys.on("moe_grouped_gemm"),
        "shared_expert_overlap": shared,
        "deterministic": keys.on("deterministic_mode"),
        "delay_wgrad_compute": keys.on("delay_wgrad_compute"),
    }
    moe |= {name: True for name, on in (("fused_mlp", fused), ("paged_stash", paged)) if on}
    moe |= {"flex_backend": "hybridep"} if hybrid else {}
    return {"moe": moe | _multiprocessors(keys, deepep=dispatcher == "flex" and not hybrid)}


def _multiprocessors(keys: JobKeys, *, deepep: bool) -> dict[str, int]:
    """Those of DeepEP's kernels, where they are said: an even number (deepseek-ai/DeepEP, deep_ep/buffer.py, set_num_sms)."""
    name = "moe_deepep_num_sms"
    if not deepep:
        keys.without_effect(name, "only DeepEP is limited by them")
        return {}
    count = keys.whole(name, least=2)
    if count is not None and count % 2:
        keys.fail(name, f"expected an even number (got {count}); use {count + 1}")
    return {} if count is None else {"deepep_sms": count}


def _layers(keys: JobKeys) -> dict[str, Any]:
    """Which layers have experts: `n_dense_layers` where all do after some, else the runs of `model.layers`.

    A number N is a layer with experts and N - 1 without, a list one entry for each layer (gpt_layer_specs.py); MindSpeed-LLM has
    a number of dense layers before them, and -1 for 1.
    """
    count, said = keys.whole("num_layers") or 0, keys.get("moe_layer_freq")
    if hybrid_pattern(keys) or not count:
        keys.without_effect("moe_layer_freq", "the hybrid pattern sets which layers have experts")
        return {}
    number = re.fullmatch(r"-?[1-9]\d{0,5}", str(said))
    kinds = [int(layer % int(said) == 0) for layer in range(count)] if number else listed(str(said))
    if len(kinds) != count or not set(kinds) <= {0, 1}:
        keys.fail("moe_layer_freq", f"expected a number or {count} layers of 0 and 1 (got {said})")
        return {}
    first = min(max(0, keys.whole("first_k_dense_replace", least=-1) or 0), count)
    kinds = [0] * first + kinds[first:]
    dense = kinds.index(1) if 1 in kinds else count
    if all(kinds[dense:]):
        return {"n_dense_layers": dense} if dense else {}
    return {"layers": [{"kind": "moe" if on else "dense", "repeat": len([*run])} for on, run in groupby(kinds)]}


def _balancing(keys: JobKeys) -> str:
    """The balancing whose tensors are kept; the first of several."""
    name = "moe_router_load_balancing_type"
    kinds = re.findall(r"\w+", str(keys.get(name)))
    rates = [float(rate) for rate in re.findall(r"[\d.]+(?:e-?\d+)?", str(keys.get("moe_aux_loss_coeff")))] or [0.0]
    if len(kinds) > 1:
        keys.approximate(name, f"several kinds of load balancing: counted as {kinds[0]}")
        keys.put(name, kinds[0])
    if str(keys.get(name)) == "quantile_balancing":
        keys.approximate(name, "load balancing by quantiles: counted as none")
        return "none"
    kind = str(keys.word(name))
    return "none" if kind in _BALANCED and not rates[0] else kind


def _shared(keys: JobKeys, width: int) -> dict[str, Any]:
    """Shared experts: their total width, and their number if each has a routed one's width."""
    total = keys.whole("moe_shared_expert_intermediate_size") or width * (keys.whole("n_shared_experts", least=0) or 0)
    if not total:
        return {}
    found = {"n_shared_experts": max(1, total // width), "shared_expert_inter_sz": total}
    return found | ({"shared_expert_gate": True} if keys.on("moe_shared_expert_gate") else {})


def _groups(keys: JobKeys) -> dict[str, Any]:
    """Groups of experts to which a token is limited."""
    groups, chosen = keys.whole("moe_router_num_groups"), keys.whole("moe_router_group_topk")
    if not groups or not chosen or chosen >= groups:
        keys.without_effect("moe_router_num_groups", "counted without group limits")
        keys.without_effect("moe_router_group_topk", "counted without group limits")
        return {}
    return {"node_limit": chosen, "n_groups": groups}
