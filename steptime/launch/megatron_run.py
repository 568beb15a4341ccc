"""The `performance` section of a Megatron-LM job: precision, recomputation, kernels, states and overlap."""

from __future__ import annotations

from typing import Any

from steptime.launch.megatron_flags import Arguments

_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}
_OF_EXPERTS = frozenset({"moe_act", "moe", "shared_experts"})
_LEGACY = ("DDP_impl", "activations_checkpoint_method", "data_impl")
"""Arguments of 2021 and 2022 alone."""


def is_legacy(arguments: Arguments) -> bool:
    """Whether the arguments are of Megatron-LM before Megatron-Core and TransformerEngine: those of 2021 and 2022."""
    if "transformer_impl" in arguments.said or "recompute_granularity" in arguments.said:
        return False
    return arguments.on("checkpoint_activations") or any(name in arguments.said for name in _LEGACY)


def performance_section(arguments: Arguments, layout: dict[str, Any], *, glu: bool) -> dict[str, Any]:
    """Everything that Megatron-LM's arguments decide; kernels that they do not name are the profile's."""
    a = arguments
    section: dict[str, Any] = {"software": "megatron-2021" if a.old else "megatron-core"}
    if multiple := a.at_least_one("make_vocab_size_divisible_by"):
        section["vocab_multiple"] = multiple
    section |= _precision(a) | _recompute(a) | _states(a, section_precision(a))
    if a.old:
        for argument, key in (("masked_softmax_fusion", "softmax_impl"), ("bias_gelu_fusion", "activation_impl")):
            section[key] = "fused" if a.on(argument) else "composite"
        # it adds into fp32 alone (NVIDIA/Megatron-LM@00129014 megatron/arguments.py)
        fused = a.on("gradient_accumulation_fusion") and section["main_grad_dtype"] == "fp32"
        return section | {"grad_accumulation_fusion": fused}
    section |= {"grad_accumulation_fusion": a.on("gradient_accumulation_fusion")} | _kernels(a, glu=glu)
    section["overlap"] = _overlap(a, layout, section)
    return section


def section_precision(a: Arguments) -> str:
    """The dtype of parameters and activations (Megatron-LM, arguments.py, validate_args)."""
    if a.on("bf16") and a.on("fp16"):
        a.problems.append(f"{a.name('bf16')} and {a.name('fp16')} are both given; keep one")
    return "bf16" if a.on("bf16") else "fp16" if a.on("fp16") else "fp32"


def _precision(a: Arguments) -> dict[str, Any]:
    fp8 = a.text("fp8") or ("hybrid" if a.on("fp8_hybrid") or a.on("fp8_e4m3") else None)
    if a.text("fp4") is not None:
        if a.text("fp4_recipe") != "nvfp4":
            a.leave_out("fp4_recipe", "a recipe of the user's own: NVFP4 is counted")
        return {"precision": "nvfp4", "fp8_params": a.on("fp4_param")}
    if fp8 is None or fp8 == "False":
        return {"precision": section_precision(a)}
    recipe = a.text("fp8_recipe") or "delayed"
    if recipe not in _RECIPES:
        a.leave_out("fp8_recipe", "delayed scaling is counted")
    stored = a.on("fp8_param_gather") or a.on("fp8_param")
    return {"precision": _RECIPES.get(recipe, "fp8_delayed"), "fp8_params": stored}


def _recompute(a: Arguments) -> dict[str, Any]:
    granularity = a.text("recompute_granularity") or a.text("activations_checkpoint_granularity")
    method = a.text("recompute_method") or a.text("activations_checkpoint_method")
    if granularity is None and a.on("recompute_activations"):
        granularity = "selective"
    if granularity is None and (a.on("checkpoint_activations") or method):
        granularity = "full"
    if granularity is None:
        return {"activation_checkpointing_type": "none"}
    if granularity == "selective":
        modules = [word for word in a.words("recompute_modules") if word not in _OF_EXPERTS] or ["core_attn"]
        return {"recompute": {"granularity": "selective", "modules": modules}}
    if granularity != "full":
        a.problems.append(f"{a.name('recompute_granularity')}: expected full or selective (got {granularity!r})")
        return {}
    names = ("recompute_num_layers", "activations_checkpoint_num_layers", "checkpoint_num_layers")
    layers = next((number for name in names if (number := a.whole(name)) is not None), 1)
    return {"recompute": {"granularity": "full", "method": method or "uniform", "n_layers": layers}}


def _states(a: Arguments, precision: str) -> dict[str, Any]:
    """Dtypes of main gradients, master weights and moments."""
    fp32_sums = a.on("accumulate_allreduce_grads_in_fp32") or a.on("grad_reduce_in_fp32")
    gradients = precision
    if precision == "bf16":
        gradients = "bf16" if a.on("grad_reduce_in_bf16") else "fp32"
    elif precision == "fp16" and fp32_sums:
        gradients = "fp32"
    section: dict[str, Any] = {}
    if a.on("use_precision_aware_optimizer"):
        if a.text("main_grads_dtype") == "bf16":
            gradients = "bf16"
        if a.text("main_params_dtype") != "fp32":
            a.leave_out("main_params_dtype", "master weights in fp32 are counted")
        elif precision == "bf16" and (a.text("fp8_recipe") or "delayed") == "delayed":
            # core optimizer/optimizer_config.py, store_param_remainders and use_precision_aware_optimizer_no_fp8_or_ds_fp8
            section["master_dtype"] = "remainder"
        moments = {a.text("exp_avg_dtype"), a.text("exp_avg_sq_dtype")}
        one = next(iter(moments))
        if len(moments) == 1 and one in {"fp32", "bf16", "fp16"}:
            section["moment_dtype"] = one
        else:
            a.leave_out("exp_avg_dtype", "both moments in one of fp32, bf16 and fp16: fp32 is counted")
    return {"main_grad_dtype": gradients} | section


def _kernels(a: Arguments, *, glu: bool) -> dict[str, Any]:
    backend = a.text("attention_backend") or "auto"
    local = a.text("transformer_impl") == "local" and not a.on("use_flash_attn")
    if a.text("transformer_impl") != "transformer_engine":
        a.leave_out("transformer_impl", "TransformerEngine's kernels are counted, attention apart")
    unfused = backend in {"unfused", "local"} or (local and backend == "auto")
    section: dict[str, Any] = {"attention_impl": "unfused" if unfused else "flash"}
    if unfused:
        section["softmax_impl"] = "fused" if a.on("masked_softmax_fusion") else "composite"
    if (a.text("position_embedding_type") or "") in {"rope", "mrope"} or a.on("use_rotary_position_embeddings"):
        section["rope_impl"] = "fused" if a.on("apply_rope_fusion") else "own_tables"
    fused = a.on("bias_swiglu_fusion") if glu else a.on("bias_gelu_fusion") and a.on("add_bias_linear")
    if "bias_activation_fusion" in a.said:
        fused = a.on("bias_activation_fusion")
    # megatron/core/activations.py, squared_relu: compiled, whatever is said of the others
    section["activation_impl"] = "fused" if fused or a.on("squared_relu") else "composite"
    # the native fusion keeps as much as no fusion does (data/software/megatron-core.yaml, loss_impl)
    fused_loss = a.on("cross_entropy_loss_fusion") and a.text("cross_entropy_fusion_impl") == "te"
    section["loss_impl"] = "fused" if fused_loss else "composite"
    graphs = (a.text("cuda_graph_impl") or "none") != "none" or a.on("enable_cuda_graph") or a.on("external_cuda_graph")
    return section | {"cuda_graphs": graphs}


def _overlap(a: Arguments, layout: dict[str, Any], section: dict[str, Any]) -> dict[str, bool | float]:
    """What hides under compute. With one of the two data-parallel overlaps, its share of their bytes does."""
    reduce, gather = a.on("overlap_grad_reduce"), a.on("overlap_param_gather")
    dp: bool | float = reduce
    if layout["zero_level"] and reduce != gather:
        gradient = 4.0 if section["main_grad_dtype"] == "fp32" else 2.0
        share = gradient / (gradient + (4.0 if section["precision"] == "fp32" else 2.0))
        dp = round(share if reduce else 1.0 - share, 3)
    return {
        "tp": a.on("tp_comm_overlap") and layout["tp"] > 1,
        "dp": dp,
        "pp": a.on("overlap_p2p_comm") and layout.get("vpp", 1) > 1,
    }
