"""The `performance` section of a Megatron job: precision, recomputation, kernels, states and overlap."""

from __future__ import annotations

from typing import Any

from steptime.launch.settings import Settings

_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}
"""fp8_recipe -> precision (core fp8_utils.py, get_fp8_recipe)."""
_OF_RECIPES = ("fp8_recipe", "fp8_param_gather", "fp4_recipe", "fp4_param", "first_last_layers_bf16")
_MODULES = frozenset({"core_attn", "layernorm", "mlp"})
_OF_EXPERTS = frozenset({"moe_act", "moe", "shared_experts", "mla_up_proj"})
"""Modules of layers that the model does not have."""
_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_UNFUSED = {"flash": False, "fused": False, "auto": False, "unfused": True, "local": True}
"""AttnBackend -> whether scores are in memory (core enums.py)."""


def performance_section(s: Settings, layout: dict[str, Any], software: str) -> dict[str, Any]:
    """Everything that the settings decide; kernels that they do not name are the profile's."""
    section: dict[str, Any] = {"software": software}
    if multiple := s.whole("make_vocab_size_divisible_by"):
        section["vocab_multiple"] = multiple
    section |= _precision(s) | _recompute(s) | _states(s)
    fused = s.on("gradient_accumulation_fusion")
    if software == "megatron-2021":
        for argument, key in (("masked_softmax_fusion", "softmax_impl"), ("bias_gelu_fusion", "activation_impl")):
            section[key] = "fused" if s.on(argument) else "composite"
        # it adds into fp32 alone (NVIDIA/Megatron-LM@00129014 megatron/arguments.py)
        return section | {"grad_accumulation_fusion": fused and section["main_grad_dtype"] == "fp32"}
    section |= {"grad_accumulation_fusion": fused} | _kernels(s)
    return section | {"overlap": _overlap(s, layout, section)}


def plain_dtype(s: Settings) -> str:
    """The dtype of parameters and activations that no recipe quantises."""
    return "bf16" if s.on("bf16") else "fp16" if s.on("fp16") else "fp32"


def main_grad_dtype(s: Settings) -> str:
    """What gradients are added up and reduced in."""
    if s.on("use_precision_aware_optimizer") and s.word("main_grads_dtype", _DTYPES) == "bf16":
        return "bf16"
    return "fp32" if s.on("accumulate_allreduce_grads_in_fp32") else plain_dtype(s)


def _precision(s: Settings) -> dict[str, Any]:
    """bf16, fp16, fp32, or a low-precision recipe with its stored parameters."""
    if s.on("bf16") and s.on("fp16"):
        s.problems.append(f"{s.source}: {s.name('bf16')} and {s.name('fp16')} are both given; keep one")
    fp8 = s.get("fp8") or s.on("fp8_hybrid") or s.on("fp8_e4m3")
    if not fp8 and not s.get("fp4"):
        for key in _OF_RECIPES:
            s.without_effect(key, "only with fp8 or fp4")
        return {"precision": plain_dtype(s)}
    if s.get("fp4"):
        if s.get("fp4_recipe") != "nvfp4":
            s.leave_out("fp4_recipe", "a recipe of the user's own: NVFP4 is counted")
        return {"precision": "nvfp4", "fp8_params": s.on("fp4_param")}
    recipe = str(s.get("fp8_recipe") or "delayed").lower()
    if recipe not in _RECIPES:
        s.leave_out("fp8_recipe", "delayed scaling is counted")
    return {"precision": _RECIPES.get(recipe, "fp8_delayed"), "fp8_params": s.on("fp8_param_gather")}


def _recompute(s: Settings) -> dict[str, Any]:
    granularity, method = s.get("recompute_granularity"), s.get("recompute_method")
    if granularity is None and s.on("recompute_activations"):
        granularity = "selective"
    if granularity is None and (s.on("checkpoint_activations") or method):  # of releases before granularity was said
        granularity = "full"
    if granularity is None:
        for key in ("recompute_num_layers", "recompute_modules"):
            s.without_effect(key, "only with recompute_granularity")
        return {"activation_checkpointing_type": "none"}
    if granularity == "full":
        s.without_effect("recompute_modules", "only with recompute_granularity selective")
        layers = s.count("recompute_num_layers", 1, least=0)
        return {"recompute": {"granularity": "full", "method": method or "uniform", "n_layers": layers}}
    if granularity != "selective":
        s.fail("recompute_granularity", f"expected full or selective (got {granularity!r})")
        return {}
    modules = s.words("recompute_modules") or ["core_attn"]
    if strange := [name for name in modules if name not in _MODULES | _OF_EXPERTS]:
        s.fail("recompute_modules", f"unknown module (got {strange[0]!r})")
    kept = [name for name in modules if name in _MODULES]
    if not kept:
        return {"activation_checkpointing_type": "none"}
    return {"recompute": {"granularity": "selective", "modules": kept}}


def _states(s: Settings) -> dict[str, Any]:
    """Dtypes of main gradients, master weights and moments."""
    section: dict[str, Any] = {"main_grad_dtype": main_grad_dtype(s)}
    if s.get("optimizer") not in {"adam", "adamw"}:
        s.leave_out("optimizer", "another optimizer than Adam: its two moments are counted")
    if not s.on("use_precision_aware_optimizer"):
        return section
    remainders = s.on("store_param_remainders", default=True) and s.on("bf16")
    if s.word("main_params_dtype", _DTYPES) != "fp32":
        s.leave_out("main_params_dtype", "master weights in fp32 are counted")
    elif remainders and (s.get("fp8_recipe") or "delayed") == "delayed":
        # core optimizer/optimizer_config.py, store_param_remainders and use_precision_aware_optimizer_no_fp8_or_ds_fp8
        section["master_dtype"] = "remainder"
    moments = {str(s.get(key)).rpartition(".")[2] for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    one = _DTYPES.get(next(iter(moments)))
    if len(moments) == 1 and one is not None:
        section["moment_dtype"] = one
    else:
        s.leave_out("exp_avg_dtype", "both moments in one of fp32, bf16 and fp16: fp32 is counted")
    return section


def _kernels(s: Settings) -> dict[str, Any]:
    local = s.get("transformer_impl") == "local" and not s.on("use_flash_attn")
    if s.get("transformer_impl") != "transformer_engine":
        s.leave_out("transformer_impl", "TransformerEngine's kernels are counted, attention apart")
    unfused = s.word("attention_backend", _UNFUSED) or (local and s.get("attention_backend") == "auto")
    section: dict[str, Any] = {"attention_impl": "unfused" if unfused else "flash"}
    if unfused:
        section["softmax_impl"] = "fused" if s.on("masked_softmax_fusion") else "composite"
    else:
        s.without_effect("masked_softmax_fusion", "only where attention is not fused")
    positions = s.get("position_embedding_type")
    if positions in {"rope", "mrope", "yarn"}:
        # YaRN's factor on the tables is beyond the fused kernel (core models/common/embeddings/rope_utils.py)
        fused = s.on("apply_rope_fusion") and positions != "yarn"
        section["rope_impl"] = "fused" if fused else "own_tables"
    section["activation_impl"] = "fused" if _activation_is_fused(s) else "composite"
    # the native fusion keeps as much as no fusion does (data/software/megatron-core.yaml, loss_impl)
    fused = s.on("cross_entropy_loss_fusion") and s.get("cross_entropy_fusion_impl") == "te"
    section["loss_impl"] = "fused" if fused else "composite"
    graphs = (
        str(s.get("cuda_graph_impl") or "none") != "none" or s.on("enable_cuda_graph") or s.on("external_cuda_graph")
    )
    if s.get("deallocate_pipeline_outputs") is not None:
        section["deallocate_pipeline_outputs"] = s.on("deallocate_pipeline_outputs")
    return section | {"cuda_graphs": graphs}


def _activation_is_fused(s: Settings) -> bool:
    """Whether bias and activation are one kernel (arguments.py, core_transformer_config_from_args; core transformer/mlp.py).

    The squared ReLU is compiled whatever is said of the others (core activations.py, squared_relu).
    """
    named = str(s.get("activation_func")).endswith("squared_relu") and not s.on("gated_linear_unit")
    if named or s.on("squared_relu"):
        return True
    if s.get("bias_activation_fusion") is not None:
        return s.on("bias_activation_fusion")
    if s.on("swiglu"):
        return s.on("bias_swiglu_fusion")
    return s.on("bias_gelu_fusion") and s.on("add_bias_linear")


def _overlap(s: Settings, layout: dict[str, Any], section: dict[str, Any]) -> dict[str, bool | float]:
    """What hides under compute. With one of the two data-parallel overlaps, its share of their bytes does.

    Sends are hidden with virtual stages alone (core pipeline_parallel/schedules.py).
    """
    reduce, gather = s.on("overlap_grad_reduce"), s.on("overlap_param_gather")
    dp: bool | float = reduce
    if layout["zero_level"] and reduce != gather:
        gradient = 4.0 if section["main_grad_dtype"] == "fp32" else 2.0
        share = gradient / (gradient + (4.0 if section["precision"] == "fp32" else 2.0))
        dp = round(share if reduce else 1.0 - share, 3)
    return {
        "tp": s.on("tp_comm_overlap") and layout["tp"] > 1,
        "dp": dp,
        "pp": s.on("overlap_p2p_comm") and layout.get("vpp", 1) > 1,
    }
