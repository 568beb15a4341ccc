"""A resolved plan as Megatron-LM's arguments and the fields of its config objects: the inverse of `megatron.translation`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from steptime.job.job import Job
from steptime.job.mesh import Fsdp
from steptime.launch.keys import KeyTable
from steptime.launch.megatron.performance_section import MODULES
from steptime.launch.write.megatron_kinds import kinds
from steptime.launch.write.plain_keys import plain_keys, word_for
from steptime.software.frameworks import framework_of
from steptime.software.precision import RECIPES

Keys = dict[str, Any]
_OTHERWISE = {
    "deepspeed", "use_rotary_position_embeddings", "add_position_embedding", "recompute_modules", "recompute_method",
    "recompute_num_layers", "moe_z_loss_coeff", "moe_layer_recompute", "multi_latent_attention", "window_size",
}  # fmt: skip
"""Written with other keys, in other words, or for another framework."""
_NO_FLAGS = {"deallocate_pipeline_outputs"}
"""Fields of config objects only."""
NO_LIMIT = 10**6
"""Deferred weight gradients of the head without a limit."""


def arguments(job: Job, table: KeyTable, *, objects: bool) -> Keys:
    """Argument -> value, defaults included. `objects`: the names of config objects, where they differ from the parser's."""
    config = job.to_config()
    skipped = _OTHERWISE if objects else {*_OTHERWISE, *_NO_FLAGS}
    found = {key: value for key, value in plain_keys(config, table).items() if key not in skipped}
    if found.get("moe_router_dtype") == "compute":
        del found["moe_router_dtype"]
    found |= _model(job, config["model"], table, objects=objects)
    found |= _layout(job, config["parallelism"], table)
    found |= _performance(config, table, objects=objects)
    if _by_torch(job):
        found |= {"overlap_grad_reduce": False, "overlap_param_gather": False, "grad_reduce_in_bf16": None}
    if not objects:  # whose parser names Adam so, and requires the latter (training/arguments.py)
        found |= {"optimizer": "adam"} if found.get("optimizer") == "adamw" else {}
        found.setdefault("max_position_embeddings", job.data.seqlen)
    return found


def _model(job: Job, model: Mapping[str, Any], table: KeyTable, *, objects: bool) -> Keys:
    heads, groups, glu, activation = (model.get(k) for k in ("n_q_heads", "n_kv_heads", "glu", "activation"))
    found: Keys = {
        "normalization": word_for(table, "normalization", model["norm"]),
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "position_embedding_type": _positions(model),
        "hidden_dropout": model["dropout"],
        "attention_dropout": model["attention_dropout"],
        "activation_func_clamp_value": model.get("swiglu_limit"),
    }
    if objects:
        found |= {"gated_linear_unit": glu, "activation_func": word_for(table, "activation_func", activation)}
        found |= {"share_embeddings_and_output_weights": model["tie_embeddings"], "vocab_size": model["vocab_sz"]}
        found.pop("group_query_attention")
    else:
        found |= {"swiglu": bool(glu and activation == "silu"), "quick_geglu": bool(glu and activation == "gelu")}
        found |= {"squared_relu": bool(not glu and activation == "relu2")}
        found |= {"untie_embeddings_and_output_weights": not model["tie_embeddings"]}
        # the tokenizer counts one more, for the end of a document
        found |= {"tokenizer_type": "NullTokenizer", "vocab_size": model["vocab_sz"] - 1}
    return found | kinds(job, model, table)


def _positions(model: Mapping[str, Any]) -> str:
    return "rope" if model["rotary_embeds"] else "learned_absolute" if model["learned_positions"] else "none"


def _layout(job: Job, layout: Mapping[str, Any], table: KeyTable) -> Keys:
    """Degrees other than the plain ones, the distribution of layers and of states."""
    p, level = job.parallelism, job.zero_level
    ends = p.embedding_and_loss_count_as_layers
    found: Keys = {
        "context_parallel_size": p.cp,
        "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 else None,
        "account_for_embedding_in_pipeline_split": ends,
        "account_for_loss_in_pipeline_split": ends,
        "use_distributed_optimizer": level >= 1,
        "cp_comm_type": word_for(table, "cp_comm_type", layout["cp_comm_type"]) if p.cp > 1 else None,
        "hierarchical_context_parallel_sizes": f"{p.cp_a2a} {p.cp // p.cp_a2a}" if p.cp_a2a > 1 else None,
    }
    if p.layers_per_stage is not None and p.pp > 1:
        found["pipeline_model_parallel_layout"] = layout_text(job.layers_per_chunk, job.model.mtp)
    if _by_torch(job):
        options = p.fsdp or Fsdp.model_construct()
        resharded = options.reshard_after_forward is not False
        found |= {"use_distributed_optimizer": False, "use_torch_fsdp2": True}
        found["torch_fsdp2_reshard_after_forward"] = resharded
    elif level >= 2:
        strategy = word_for(table, "data_parallel_sharding_strategy", level)
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    if p.bucket_size_mb is not None:
        elements = p.bucket_size_mb * 1e6 / (4 if job.software.states.main_grad_dtype == "fp32" else 2)
        found["ddp_bucket_size"] = int(elements) if elements.is_integer() else None
    return found


def _by_torch(job: Job) -> bool:
    """Whether torch's fully_shard takes the place of Megatron's own data parallelism, which overlaps nothing then."""
    software = job.software
    return software.family == "megatron-core" and framework_of(software.name, software.family).fully_shards


def layout_text(counts: list[int], depths: int = 0) -> str:
    """Layers of each chunk, and multi-token prediction's depths in the last, as Megatron's pipeline layout.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, validate_layer_layout: as many m as --mtp-num-layers.

    >>> layout_text([3, 4, 4, 3])
    'Et*3|(t*4|)*2t*3L'
    >>> layout_text([3, 4, 4, 3], 1)
    'Et*3|(t*4|)*2t*3mL'
    """
    first, *middle = [f"t*{count}" if count else "" for count in counts[:-1]]
    parts = [f"E{first}|"]
    for word, same in groupby(middle):
        times = len(list(same))
        parts.append(f"({word}|)*{times}" if times > 1 else f"{word}|")
    return "".join(parts) + (f"t*{counts[-1]}" if counts[-1] else "") + "m" * depths + "L"


def _performance(config: Mapping[str, Any], table: KeyTable, *, objects: bool) -> Keys:
    performance = config["performance"]
    found = _precision(performance, table) | _states(performance, table) | _recompute(performance)
    found |= _attention(performance) | _kernels(config, objects=objects)
    share = performance["overlap"].get("dp")
    sharded = config["parallelism"]["zero_level"] >= 1
    reduce, gather = share is True, share is True and sharded
    if sharded and isinstance(share, float):  # one of the two hides its share of their bytes
        gradient = 4.0 if performance["main_grad_dtype"] == "fp32" else 2.0
        reduce = share == round(gradient / (gradient + (4.0 if performance["precision"] == "fp32" else 2.0)), 3)
        gather = not reduce
    return found | {"overlap_grad_reduce": reduce, "overlap_param_gather": gather}


def _precision(performance: Mapping[str, Any], table: KeyTable) -> Keys:
    precision = performance["precision"]
    recipe = precision in RECIPES
    found: Keys = {"bf16": precision == "bf16" or recipe, "fp16": precision == "fp16"}
    if precision == "nvfp4":
        found |= {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": performance["fp8_params"]}
        return found | _bf16_layers(performance)
    if recipe and (word := word_for(table, "fp8_recipe", precision)):
        found |= {"fp8": "e4m3" if word in {"mxfp8", "blockwise"} else "hybrid", "fp8_recipe": word}
        found["fp8_param_gather"] = performance["fp8_params"]
        found |= {"fp8_output_proj": True} if performance.get("quantized_head") and precision == "mxfp8" else {}
    return found | _bf16_layers(performance)


def _bf16_layers(performance: Mapping[str, Any]) -> Keys:
    """The first and the last layers in bf16."""
    counts = {end: performance.get(f"bf16_layers_at_{end}", 0) for end in ("start", "end")}
    if not any(counts.values()):
        return {}
    return {"first_last_layers_bf16": True} | {f"num_layers_at_{end}_in_bf16": n for end, n in counts.items()}


def _states(performance: Mapping[str, Any], table: KeyTable) -> Keys:
    """Dtypes of main gradients, master weights and moments."""
    gradients, moments, half = performance["main_grad_dtype"], performance["moment_dtype"], performance["precision"]
    found: Keys = {"accumulate_allreduce_grads_in_fp32": gradients == "fp32" and half != "fp32"}
    if gradients == "bf16":
        found["grad_reduce_in_bf16"] = True
    if away := performance.get("cpu_offload"):
        found |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": away["optimizer"],
            "overlap_cpu_optimizer_d2h_h2d": away["overlap"],
            "use_precision_aware_optimizer": not away["keep_masters"],
        }
    if performance["master_dtype"] == "remainder" or moments != "fp32":
        found["use_precision_aware_optimizer"] = True
        if performance["master_dtype"] == "fp32":
            found["store_param_remainders"] = False
        word = word_for(table, "exp_avg_dtype", moments)
        found |= {"exp_avg_dtype": word, "exp_avg_sq_dtype": word}
    return found


def _recompute(performance: Mapping[str, Any]) -> Keys:
    """Recomputation, and activations that wait in the host's memory."""
    away = performance.get("offload_modules")
    found: Keys = {"fine_grained_activation_offloading": True, "offload_modules": " ".join(away)} if away else {}
    return found | _recomputation(performance)


def _recomputation(performance: Mapping[str, Any]) -> Keys:
    said = performance.get("recompute") or {}
    if said.get("granularity") == "selective" and MODULES.issuperset(said.get("modules", [""])):
        return {"recompute_granularity": "selective", "recompute_modules": " ".join(said["modules"])}
    if said.get("granularity") == "full" and isinstance(said["n_layers"], int) and said["method"] != "every":
        layers = {"recompute_method": said["method"], "recompute_num_layers": said["n_layers"]}
        return {"recompute_granularity": "full", **layers}
    return {}


def _attention(performance: Mapping[str, Any]) -> Keys:
    backend, flash = performance["attention_backend"], performance["attention_impl"] == "flash"
    if backend == "direct" and performance["scores_in_buffer"] and not performance["te_workspaces"]:
        return {"transformer_impl": "local", "use_flash_attn": flash}
    word = {"flash": "flash", "cudnn": "fused"}.get(backend, "auto")
    return {"attention_backend": word if flash else "unfused"}


def _graphs(said: Any) -> Keys:
    if isinstance(said, bool):
        return {"cuda_graph_impl": "local" if said else "none"}
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": list(said)}


def _kernels(config: Mapping[str, Any], *, objects: bool) -> Keys:
    performance, model = config["performance"], config["model"]
    fused = performance["activation_impl"] == "fused"
    loss, waiting = performance["loss_impl"], performance["deferred_head_wgrads"]
    found: Keys = {
        "masked_softmax_fusion": performance["softmax_impl"] == "fused",
        "apply_rope_fusion": performance["rope_impl"] == "fused",
        "cross_entropy_loss_fusion": loss in {"native", "fused"},
        "cross_entropy_fusion_impl": "te" if loss == "fused" else "native",
        **_graphs(performance["cuda_graphs"]),
        "defer_embedding_wgrad_compute": waiting > 0,
        "wgrad_deferral_limit": waiting % NO_LIMIT,
    }
    if objects:
        return found | {"bias_activation_fusion": fused}
    return found | {
        "bias_swiglu_fusion" if model["glu"] and model["activation"] == "silu" else "bias_gelu_fusion": fused
    }
