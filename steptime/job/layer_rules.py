"""Facts and rules about the kinds of a model's layers: hybrid patterns, linear attention, multi-token prediction, adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule
from steptime.model.blocks import HYBRID

if TYPE_CHECKING:
    from steptime.model.model import Model


SWITCHES = ("glu", "pre_norms", "post_norms", "parallel_residual", "shared_norm", "whole_qk_norm")
"""Switches of a model's layers."""


def layer_facts(model: Model) -> dict[str, Any]:
    """The facts about a model's kinds of layer."""
    pattern, mamba = model.hybrid_pattern, model.mamba
    listed = model.layers
    kinds = {run.kind for run in listed} if listed is not None else {HYBRID[letter] for letter in pattern or ""}
    layers = None if listed is None else sum(run.repeat for run in listed)
    return {
        "kinds": frozenset(kinds),
        "layers_listed": len(pattern) if layers is None and pattern is not None else layers,
        "listed_by": "model.layers" if layers is not None else "model.hybrid_pattern",
        "patterned": pattern is not None,
        "switches": frozenset(name for name in SWITCHES if getattr(model, name)),
        "linear": model.linear_attention,
        "mtp": model.mtp,
        "lora": model.lora,
        "last_kind": last_kind(model),
        "window": model.attention.window,
        "window_pattern": model.attention.window_pattern,
        "whole_heads": model.attention.whole_heads,
        "mamba_heads": mamba.heads(model.hidden_sz) if mamba else 0,
        "mamba_groups": mamba.n_groups if mamba else 0,
    }


def default_profile(model: Model, *, fsdp: bool) -> str:
    """The software profile where a plan names none: FSDP2's for FSDP, and for layers that Megatron-Core has not."""
    return "megatron-core" if model.pre_norms and not (fsdp or model.parallel_residual) else "fsdp2"


def last_kind(model: Model) -> str:
    """The kind of a model's last layer; with attention where it has only experts, as multi-token prediction repeats it."""
    found = model.layers[-1].kind if model.layers else HYBRID[model.hybrid_pattern[-1]] if model.hybrid_pattern else ""
    if found:
        return "moe" if found == "experts" else found
    return "moe" if model.moe is not None and model.moe.at(model.n_layers - 1) else "dense"


LAYER_RULES = [
    Rule(
        "layers without norms",
        "model.pre_norms",
        "layers with norms neither before nor after attention and MLP are not modeled; set post_norms, or use true",
        lambda f: bool({"pre_norms", "post_norms"} & f.switches),
    ),
    # megatron/core/models/gpt/gpt_layer_specs.py: input_layernorm and pre_mlp_layernorm, or TELayerNormColumnParallelLinear
    Rule(
        "layers that begin without a norm",
        "model.pre_norms",
        "Megatron-Core's layers begin with a norm; use true, or torchtitan, fsdp2, torch or deepspeed",
        lambda f: "pre_norms" in f.switches or f.family != "megatron-core",
    ),
    Rule(
        "norm of all heads with tp",
        "model.qk_norm_type",
        "per_layer is not modeled with tp > 1, which splits the heads (got {f.tp}); use per_head, which costs nearly the same",
        lambda f: ("whole_qk_norm" not in f.switches) | (f.tp == 1),
    ),
    Rule(
        "one norm for both halves",
        "model.shared_norm",
        "needs model.parallel_residual and pre_norms; set them, or use false",
        lambda f: "shared_norm" not in f.switches or ({"parallel_residual", "pre_norms"} <= f.switches),
    ),
    Rule(
        "parallel MLP in Megatron-Core",
        "model.parallel_residual",
        "Megatron-Core runs attention and MLP one after the other; use false, or torchtitan, fsdp2, torch or deepspeed",
        lambda f: "parallel_residual" not in f.switches or f.family != "megatron-core",
    ),
    Rule(
        "kinds of layer with a parallel MLP",
        "model.parallel_residual",
        "is modeled for dense layers only, not with experts or single-sublayer layers (hybrid_pattern); use false",
        lambda f: "parallel_residual" not in f.switches or not (f.moe or f.kinds - {"dense"}),
    ),
    # one all-reduce of the sum is what GPT-NeoX runs (megatron/model/transformer.py, ParallelTransformerLayer)
    Rule(
        "parallel MLP with tp",
        "model.parallel_residual",
        "is not modeled with tp > 1 (got {f.tp}); use tp 1, or false",
        lambda f: ("parallel_residual" not in f.switches) | (f.tp == 1),
    ),
    Rule(
        "pattern or layers",
        "model.hybrid_pattern",
        "has no meaning together with model.layers; remove one",
        lambda f: not (f.patterned and f.listed_by == "model.layers"),
    ),
    Rule(
        "listed experts need moe",
        "model.moe",
        "missing: {f.listed_by} lists layers with experts; give n_experts, expert_inter_sz and experts_per_token",
        lambda f: f.moe | (not f.kinds & {"moe", "experts"}),
    ),
    Rule(
        "mamba layers need mamba",
        "model.mamba",
        "missing: {f.listed_by} lists Mamba layers; set it, {{}} for the defaults",
        lambda f: (f.mamba_heads > 0) | ("mamba" not in f.kinds),
    ),
    # megatron/core/ssm/mamba_mixer.py and mamba_context_parallel.py: each device has whole heads, and whole groups over tp
    Rule(
        "tp and cp divide mamba heads",
        "parallelism.tp",
        "tp*cp must divide the {f.mamba_heads} Mamba heads (got {f.tp} * {f.cp}); lower tp or cp",
        lambda f: f.mamba_heads % (f.tp * f.cp) == 0,
    ),
    Rule(
        "tp divides mamba groups",
        "parallelism.tp",
        "must divide model.mamba.n_groups {f.mamba_groups} (got {f.tp}); lower tp",
        lambda f: f.mamba_groups % f.tp == 0,
    ),
    Rule(
        "mamba framework",
        "performance.software",
        "Mamba layers are modeled for Megatron-Core only (got {f.software}); use megatron-core or a profile of its family",
        lambda f: (f.mamba_heads == 0) | (f.family == "megatron-core"),
    ),
    Rule(
        "mamba with ZeRO",
        "parallelism.zero_level",
        "Mamba layers are not modeled with FSDP or zero_level 2 or 3 (got {f.zero_level}); use 0 or 1",
        lambda f: (f.mamba_heads == 0) | (f.zero_level < 2),
    ),
    # megatron/core/transformer/transformer_config.py:1528-1554, __post_init__; torchtitan's converters leave modules out by name
    # (pytorch/torchtitan@b5bcd76c torchtitan/components/quantization/nvfp4.py, nvfp4_bf16_tail_fqns)
    Rule(
        "bf16 layers of a recipe",
        "performance.bf16_layers_at_start",
        "layers in bf16 need megatron-core or fsdp2 and a recipe other than fp8_delayed (got {f.software}, {f.precision}); "
        "remove them",
        lambda f: (
            (max(f.bf16_layers) == 0)
            | (f.recipe & (f.precision != "fp8_delayed") & ((f.family == "megatron-core") | (f.family == "fsdp2")))
        ),
    ),
    Rule(
        "bf16 layers of a stage",
        "performance.bf16_layers_at_start",
        "must be at most the layers of the first or last pipeline stage (got {f.bf16_layers[0]} and {f.bf16_layers[1]} of "
        "{f.n_layers}); lower it, or pp {f.pp}",
        lambda f: (max(f.bf16_layers) == 0) | (max(f.bf16_layers) <= f.n_layers // f.pp),
    ),
    # linear attention
    Rule(
        "linear layers listed",
        "model.linear_attention.freq",
        "lists {f.linear.listed} layers, model.n_layers is {f.n_layers}; list each layer once",
        lambda f: f.linear is None or f.linear.listed in {0, f.n_layers},
    ),
    Rule(
        "linear attention with a pattern",
        "model.linear_attention",
        "has no meaning together with model.hybrid_pattern; remove one",
        lambda f: (f.linear is None) | (not f.patterned),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: experimental_attention_variant
    Rule(
        "key heads divide value heads",
        "model.linear_attention.n_key_heads",
        "must divide n_value_heads {f.linear.n_value_heads} (got {f.linear.n_key_heads}); change one of them",
        lambda f: f.linear is None or f.linear.n_value_heads % f.linear.n_key_heads == 0,
    ),
    Rule(
        "as many keys as values",
        "model.linear_attention.n_key_heads",
        "must equal n_value_heads {f.linear.n_value_heads} with kind {f.linear.kind} (got {f.linear.n_key_heads}); use it",
        lambda f: (
            f.linear is None or f.linear.kind == "gated_delta_net" or f.linear.n_key_heads == f.linear.n_value_heads
        ),
    ),
    Rule(
        "tp divides linear key heads",
        "parallelism.tp",
        "must divide model.linear_attention.n_key_heads {f.linear.n_key_heads} (got {f.tp}); lower tp",
        lambda f: True if f.linear is None else f.linear.n_key_heads % f.tp == 0,
    ),
    # multi-token prediction as in Megatron-Core
    Rule(
        "mtp after a transformer layer",
        "model.mtp",
        "repeats the last layer, which must have attention and an MLP or experts (it is {f.last_kind}); use 0",
        lambda f: (f.mtp == 0) | (f.last_kind in {"dense", "moe"}),
    ),
    # megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward
    Rule(
        "mtp with recomputation by groups",
        "performance.recompute.n_layers",
        "must be 1 with model.mtp (got {f.recompute_words}), whose layers Megatron-Core recomputes one by one; use 1",
        lambda f: (
            (f.mtp == 0)
            | (f.granularity != "full")
            | (f.recompute_method == "block")
            | (set(f.recompute_counts) <= {1})
        ),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: overlap_moe_expert_parallel_comm
    Rule(
        "mtp with expert overlap",
        "performance.overlap.ep",
        "with model.mtp, Megatron-Core overlaps the all-to-all of experts only for mtp 1 and an interleaved pipeline, pp > 1 "
        "and vpp > 1 (got mtp {f.mtp}, pp {f.pp}); use these, or remove the overlap",
        lambda f: (f.mtp == 0) | (dict(f.overlap).get("ep", 0.0) == 0.0) | ((f.mtp == 1) & (f.pp > 1)),
    ),
    # low-rank adapters
    Rule(
        "adapters of dense layers",
        "model.lora",
        "adapters are modeled only on dense layers with gqa (not with experts, mla, linear attention, mamba or mtp); remove it",
        lambda f: (
            f.lora is None
            or not (f.moe or f.patterned or f.linear or f.mtp or f.attention != "gqa" or f.kinds - {"dense"})
        ),
    ),
    Rule(
        "adapters with tp of Megatron",
        "model.lora",
        "adapters are modeled with tp > 1 only as Megatron splits them (got tp {f.tp} with {f.software}); use tp 1, or remove it",
        lambda f: (f.lora is None) | (f.tp == 1) | (f.family == "megatron-core"),
    ),
    Rule(
        "rank of split adapters",
        "model.lora.rank",
        "must be a multiple of tp {f.tp} where both matrices are split (got {f.lora.rank}); use another rank, or lora.split one",
        lambda f: f.lora is None or f.lora.split == "one" or f.lora.rank % f.tp == 0,
    ),
    Rule(
        "adapters in one precision",
        "model.lora",
        "adapters are not modeled with {f.precision}; use bf16, fp16 or fp32",
        lambda f: (f.lora is None) | (not f.recipe),
    ),
    Rule(
        "adapters with a split backward",
        "model.lora",
        "frozen weights are not modeled with schedules that split backward ({f.schedule_said}); use 1f1b",
        lambda f: (f.lora is None) | (not f.split_backward),
    ),
    Rule(
        "adapters with FSDP in a pipeline",
        "model.lora",
        "adapters are not modeled with FSDP or zero_level 3 in a pipeline (got pp {f.pp}); use pp 1",
        lambda f: (f.lora is None) | (f.pp == 1) | ((f.zero_level < 3) & (f.fsdp is None)),
    ),
    Rule(
        "adapters with FSDP 1",
        "model.lora",
        "adapters are not modeled with fsdp.version 1; use 2",
        lambda f: (f.lora is None) | (f.fsdp is None) | (f.fsdp_version == 2),
    ),
    Rule(
        "adapters of existing projections",
        "model.lora.targets",
        "the model has no gate_proj (glu is false), so nothing would be trained; add other projections",
        lambda f: f.lora is None or "glu" in f.switches or set(f.lora.targets) != {"gate_proj"},
    ),
    # bitsandbytes keeps packed weights; their shards need a storage dtype of another size
    Rule(
        "sharded nf4",
        "model.lora.base_dtype",
        "nf4 is not modeled with FSDP or zero_level 3; use bf16, or zero_level 2",
        lambda f: (f.lora is None) or (f.lora.base_dtype != "nf4") or ((f.zero_level < 3) & (f.fsdp is None)),
    ),
]
