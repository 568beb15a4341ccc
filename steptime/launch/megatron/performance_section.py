"""The `performance` section of a Megatron job: precision, recomputation, kernels, states and overlap."""

from __future__ import annotations

from typing import Any, get_args

from steptime.base.config import show
from steptime.launch.devices import machine_told
from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.expert_layers import expert_performance, has_experts
from steptime.launch.megatron.layer_kinds import latent
from steptime.launch.megatron.own_layers import have_one_attention
from steptime.software.settings import OffloadModule
from steptime.software.timing_settings import GraphModule

_MODULES = frozenset({"core_attn", "layernorm", "mlp"})
_OF_EXPERTS = frozenset({"moe_act", "moe", "shared_experts"})
_OF_LATENTS = frozenset({"mla_up_proj"})
_FUSED_CAPABILITY = 8.0
_OF_CORE = {"use_mcore_models", "deprecated_use_mcore_models", "bias_swiglu_fusion"}
OLDER = ("megatron-2021", "megatron-deepspeed")
"""Software whose kernels and experts are not Megatron-Core's."""
MODULES = _MODULES | _OF_EXPERTS | _OF_LATENTS
"""All modules that Megatron can recompute."""


def performance_section(keys: JobKeys, layout: dict[str, Any], software: str) -> dict[str, Any]:
    """Everything that the settings decide; other kernels are the profile's."""
    section: dict[str, Any] = {"software": software}
    if multiple := keys.whole("make_vocab_size_divisible_by"):
        section["vocab_multiple"] = multiple
    section |= _precision(keys) | _recompute(keys) | _offload(keys) | _states(keys) | _cpu_offload(keys)
    fused = keys.on("gradient_accumulation_fusion")
    if software.partition("@")[0] in OLDER:
        # it accumulates in fp32 only (NVIDIA/Megatron-LM@00129014 megatron/arguments.py), in Megatron-DeepSpeed not at all
        # (deepspeedai/Megatron-DeepSpeed megatron/core/tensor_parallel/layers.py: "temporary commented")
        fused = fused and section["main_grad_dtype"] == "fp32" and not keys.on("deepspeed")
        return section | _older_kernels(keys) | {"grad_accumulation_fusion": fused}
    section |= {"grad_accumulation_fusion": fused} | _kernels(keys) | expert_performance(keys, section["precision"])
    return section | {"overlap": _overlap(keys, layout, section)}


def plain_dtype(keys: JobKeys) -> str:
    """The dtype of parameters and activations that no recipe quantizes."""
    return "bf16" if keys.on("bf16") else "fp16" if keys.on("fp16") else "fp32"


def main_grad_dtype(keys: JobKeys) -> str:
    """The dtype in which gradients accumulate and are reduced."""
    if keys.on("use_torch_fsdp2"):
        return plain_dtype(keys)
    said = keys.get("megatron_fsdp_main_grads_dtype")
    if keys.on("use_megatron_fsdp") and said in ("fp32", "bf16", "fp16"):
        return str(said)
    if keys.on("use_precision_aware_optimizer") and keys.word("main_grads_dtype") == "bf16":
        return "bf16"
    return "fp32" if keys.on("accumulate_allreduce_grads_in_fp32") else plain_dtype(keys)


def optimizer_of(keys: JobKeys) -> str | None:
    """The optimizer, where it is modeled and not Adam; Muon with the distributed optimizer assigns whole matrices.

    Source: NVIDIA/Megatron-LM@d98e8a64 megatron/training/arguments.py, where dist_muon is the old name of that.
    """
    said = str(keys.get("optimizer"))
    if said == "muon" and keys.on("use_distributed_optimizer"):
        return "dist_muon"
    return said if said in {"lion", "sgd", "muon", "dist_muon"} else None


def _precision(keys: JobKeys) -> dict[str, Any]:
    """bf16, fp16, fp32, or a low-precision recipe with its stored parameters, and the layers that it leaves in bf16."""
    if keys.on("bf16") and keys.on("fp16"):
        keys.problem(f"{keys.name('bf16')} and {keys.name('fp16')} are both set; use one")
    found: dict[str, Any] = {"precision": plain_dtype(keys)}
    fp8 = keys.get("fp8") or keys.on("fp8_hybrid") or keys.on("fp8_e4m3")
    if keys.get("fp4"):
        if keys.get("fp4_recipe") != "nvfp4":
            keys.leave_out("fp4_recipe", "a custom recipe: counted as NVFP4")
        found = {"precision": "nvfp4", "fp8_params": keys.on("fp4_param")}
    elif fp8:
        recipe = keys.meaning("fp8_recipe")
        if recipe is None and keys.get("fp8_recipe") is not None:
            keys.leave_out("fp8_recipe", "counted as delayed scaling")
        found = {"precision": recipe or "fp8_delayed", "fp8_params": keys.on("fp8_param_gather")}
    else:
        keys.without_effect("first_last_layers_bf16", "only with fp8 or fp4")
    if len(found) > 1 and keys.on("first_last_layers_bf16"):  # one at either end by default
        ends = ("start", "end")
        found |= {f"bf16_layers_at_{end}": keys.count(f"num_layers_at_{end}_in_bf16", 1, least=0) for end in ends}
    if found["precision"] != "mxfp8":
        keys.without_effect("fp8_output_proj", "only with fp8_recipe mxfp8")
    elif keys.on("fp8_output_proj"):
        found["quantized_head"] = True
    return found


def _recompute(keys: JobKeys) -> dict[str, Any]:
    granularity, method = keys.get("recompute_granularity"), keys.get("recompute_method")
    if keys.on("recompute_activations"):  # which wins over a granularity (arguments.py, validate_args)
        if granularity not in (None, "selective"):
            keys.without_effect("recompute_granularity", "--recompute-activations sets it to selective")
        granularity = "selective"
    older = "checkpoint" in keys.name("recompute_method") and "recompute_granularity" not in keys.values
    if granularity is None and (keys.on("checkpoint_activations") or (method and older)):
        granularity = "full"  # of releases before granularity existed, with --activations-checkpoint-method
    if granularity is None and keys.on("moe_layer_recompute") and has_experts(keys):
        granularity = "selective"  # transformer_config.py, __post_init__: core_attn and moe
    if granularity in (None, "none"):  # ms-swift's word for none
        for key in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            keys.without_effect(key, "only with recompute_granularity")
        return {"activation_checkpointing_type": "none"}
    if granularity == "full":
        keys.without_effect("recompute_modules", "only with recompute_granularity selective")
        layers = keys.count("recompute_num_layers", 1, least=0)
        return {"recompute": {"granularity": "full", "method": method or "uniform", "n_layers": layers}}
    if granularity != "selective":
        keys.fail("recompute_granularity", f"expected full or selective (got {show(granularity)})")
        return {}
    modules = keys.words("recompute_modules") or ["core_attn"]
    if strange := [name for name in modules if name not in MODULES]:
        keys.fail("recompute_modules", f"unknown module (got {show(strange[0])})")
    there = _MODULES | (_OF_EXPERTS if has_experts(keys) else set()) | (_OF_LATENTS if latent(keys) else set())
    modules += ["moe"] if keys.on("moe_layer_recompute") else []
    kept = list(dict.fromkeys(name for name in modules if name in there))
    if not kept:
        return {"activation_checkpointing_type": "none"}
    return {"recompute": {"granularity": "selective", "modules": kept}}


def _offload(keys: JobKeys) -> dict[str, Any]:
    """Modules whose inputs are offloaded to host memory."""
    if not keys.on("fine_grained_activation_offloading"):
        return {}
    said, known = keys.words("offload_modules"), get_args(OffloadModule)
    if strange := [name for name in said if name not in known]:
        keys.leave_out("offload_modules", f"{strange[0]} is not modeled yet")
    return {"offload_modules": [name for name in said if name in known]}


def _states(keys: JobKeys) -> dict[str, Any]:
    """Dtypes of main gradients, master weights and moments."""
    section: dict[str, Any] = {"main_grad_dtype": main_grad_dtype(keys)}
    if keys.get("megatron_fsdp_grad_comm_dtype") not in (None, "auto", section["main_grad_dtype"]):
        why = "dtypes of Megatron-FSDP: gradients are counted in the dtype of main gradients"
        keys.leave_out("megatron_fsdp_grad_comm_dtype", why)
    if optimizer := optimizer_of(keys):
        section["optimizer"] = optimizer
        if "muon" in optimizer:
            section["muon_tp_mode"] = str(keys.get("muon_tp_mode"))
    elif str(keys.get("optimizer")) not in {"adam", "adamw", "fusedadamw"}:
        keys.leave_out("optimizer", "an optimizer other than Adam: counted with Adam's two moments")
    if not keys.on("use_precision_aware_optimizer") or keys.on("optimizer_cpu_offload"):
        return section | ({"master_dtype": "remainder"} if keys.on("reuse_fp32_param") else {})
    remainders = keys.on("store_param_remainders", default=True) and keys.on("bf16")
    if keys.word("main_params_dtype") != "fp32":
        keys.leave_out("main_params_dtype", "counted with fp32 master weights")
    elif remainders and (keys.get("fp8_recipe") or "delayed") == "delayed":
        # core optimizer/optimizer_config.py, store_param_remainders and use_precision_aware_optimizer_no_fp8_or_ds_fp8
        section["master_dtype"] = "remainder"
    moments = {keys.meaning(key) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if len(moments) == 1 and None not in moments:
        section["moment_dtype"] = moments.pop()
    else:
        keys.leave_out("exp_avg_dtype", "dtypes other than both moments in fp32, bf16 or fp16: counted as fp32")
    return section


def _cpu_offload(keys: JobKeys) -> dict[str, Any]:
    """Optimizer states in host memory, which are fp32 regardless of the dtypes set for TransformerEngine's."""
    if not keys.on("optimizer_cpu_offload"):
        return {}
    if not keys.on("pin_cpu_grads", default=True):
        keys.leave_out("pin_cpu_grads", "copies to unpinned memory: counted at the rate of pinned copies")
    found: dict[str, Any] = {"optimizer": keys.number("optimizer_offload_fraction")}
    if keys.on("overlap_cpu_optimizer_d2h_h2d"):
        found["overlap"] = True
    if not keys.on("use_precision_aware_optimizer"):
        found["keep_masters"] = True
    return {"cpu_offload": found}


def _older_kernels(keys: JobKeys) -> dict[str, Any]:
    """Kernels of the models before Megatron-Core's: SwiGLU is torch's SiLU and product, rotary embedding kernel by kernel.

    Source: deepspeedai/Megatron-DeepSpeed megatron/model/transformer.py, ParallelMLP, rotary_pos_embedding.py.
    """
    found: dict[str, Any] = {"attention_impl": "flash"} if keys.on("use_flash_attn") else {}
    found["softmax_impl"] = "fused" if keys.on("masked_softmax_fusion") else "composite"
    found["activation_impl"] = "fused" if keys.on("bias_gelu_fusion") and not keys.on("swiglu") else "composite"
    if keys.get("position_embedding_type") in ("rope", "rotary"):
        found["rope_impl"] = "own_tables"
    return found


def _kernels(keys: JobKeys) -> dict[str, Any]:
    section = _attention(keys)
    if section["attention_impl"] == "unfused":
        section["softmax_impl"] = "fused" if keys.on("masked_softmax_fusion") else "composite"
    else:
        keys.without_effect("masked_softmax_fusion", "only where attention is not fused")
    positions = str(keys.get("position_embedding_type"))
    if positions in {"rope", "mrope", "yarn"}:
        # YaRN's factor on the tables is beyond the fused kernel (core models/common/embeddings/rope_utils.py)
        fused = keys.on("apply_rope_fusion") and positions != "yarn"
        section["rope_impl"] = "fused" if fused else "own_tables"
    section["activation_impl"] = "fused" if _activation_is_fused(keys) else "composite"
    fused_loss = keys.on("cross_entropy_loss_fusion")
    section["loss_impl"] = keys.word("cross_entropy_fusion_impl") if fused_loss else "composite"
    section["attention_mask"] = keys.on("create_attention_mask_in_dataloader")
    if keys.get("deallocate_pipeline_outputs") is not None:
        section["deallocate_pipeline_outputs"] = keys.on("deallocate_pipeline_outputs")
    if keys.on("defer_embedding_wgrad_compute"):  # a limit of 0 means none
        section["deferred_head_wgrads"] = keys.whole("wgrad_deferral_limit", least=0) or 10**6
    return section | {"cuda_graphs": _graphs(keys)}


def _graphs(keys: JobKeys) -> bool | list[str]:
    """What CUDA graphs launch: whole layers or steps, or the modules that TransformerEngine's graphs capture."""
    impl = str(keys.get("cuda_graph_impl") or "none")
    named = [name for name in keys.words("cuda_graph_scope") if name in get_args(GraphModule)]
    if impl == "transformer_engine" and named:
        return named
    return impl != "none" or keys.on("enable_cuda_graph") or keys.on("external_cuda_graph")


def _attention(keys: JobKeys) -> dict[str, Any]:
    """The attention kernel and its library.

    Megatron's own layers (local) have their scores in the grow-only buffer, and no workspace of TransformerEngine's.
    """
    local = keys.get("transformer_impl") == "local"
    asked = keys.on("use_flash_attn") or keys.get("attention_backend") != "auto"
    own = local and (not asked or have_one_attention(keys))
    # TransformerEngine's fused kernels take 16-bit values only (pytorch/attention/dot_product_attention/utils.py)
    whole = not local and plain_dtype(keys) == "fp32" and keys.get("attention_backend") in (None, "auto")
    unfused = keys.word("attention_backend") or own or whole or (not local and _without_fused_attention(keys))
    section: dict[str, Any] = {"attention_impl": "unfused" if unfused else "flash"}
    if local:  # routers of experts use TransformerEngine's products in any case (core transformer/moe/moe_utils.py)
        experts = has_experts(keys)
        section |= {"te_workspaces": int(experts), "scores_in_buffer": True, "attention_backend": "direct"}
        section |= {"grouped_workspaces": 0} if experts else {}
    elif keys.on("tp_comm_overlap") and keys.count("tensor_model_parallel_size") > 1:
        # its own, and one as large as three for userbuffers' streams (TE cpp_extensions/gemm.py, _NUM_MAX_UB_STREAMS)
        section["te_workspaces"] = 4
    if not (local or unfused) and keys.get("attention_backend") in ("flash", "fused"):
        section["attention_backend"] = "flash" if keys.get("attention_backend") == "flash" else "cudnn"
    return section


def _without_fused_attention(keys: JobKeys) -> bool:
    """Whether the device is older than all fused kernels of TransformerEngine.

    It disables FlashAttention and cuDNN's below compute capability 8.0 (pytorch/attention/dot_product_attention/utils.py,
    get_attention_backend).
    """
    machine = machine_told(keys.sets)
    capability = machine.accelerator.compute_capability if machine else None
    if machine is None or capability is None or capability >= _FUSED_CAPABILITY:
        return False
    device = f"{machine.accelerator.name} has {capability:g}"
    needed = f"TransformerEngine's fused kernels need compute capability {_FUSED_CAPABILITY:g}"
    keys.notes.append(f"attention with all scores: {needed}, {device}")
    return True


def _activation_is_fused(keys: JobKeys) -> bool:
    """Whether bias and activation are one kernel (arguments.py, core_transformer_config_from_args; core transformer/mlp.py).

    The squared ReLU is always compiled (core activations.py, squared_relu).
    """
    named = str(keys.get("activation_func")).endswith("squared_relu") and not keys.on("gated_linear_unit")
    if named or keys.on("squared_relu"):
        return True
    if keys.get("bias_activation_fusion") is not None:
        return keys.on("bias_activation_fusion")
    if keys.on("swiglu"):  # by default not in the older models (legacy/model/transformer.py, ParallelMLP)
        older = keys.on("use_legacy_models") and not _OF_CORE & keys.values.keys()
        return keys.on("bias_swiglu_fusion") and not older
    return keys.on("bias_gelu_fusion") and keys.on("add_bias_linear")


def _overlap(keys: JobKeys, layout: dict[str, Any], section: dict[str, Any]) -> dict[str, bool | float]:
    """What is hidden under compute. With only one of the two data-parallel overlaps, its share of their bytes is.

    Sends are hidden only with virtual stages (core pipeline_parallel/schedules.py).
    """
    reduce, gather = keys.on("overlap_grad_reduce"), keys.on("overlap_param_gather")
    dp: bool | float = reduce or keys.on("use_torch_fsdp2")
    if layout.get("zero_level") and reduce != gather:
        gradient = 4.0 if section["main_grad_dtype"] == "fp32" else 2.0
        share = gradient / (gradient + (4.0 if section["precision"] == "fp32" else 2.0))
        dp = round(share if reduce else 1.0 - share, 3)
    return {
        "tp": keys.on("tp_comm_overlap") and layout["tp"] > 1,
        "dp": dp,
        "pp": keys.on("overlap_p2p_comm") and layout.get("vpp", 1) > 1,
    } | ({"ep": keys.on("overlap_moe_expert_parallel_comm")} if "ep" in layout else {})
