"""Facts and rules about the kinds of a model's layers: hybrid patterns and Mamba layers."""

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


HYBRID_RULES = [
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
        "missing: {f.listed_by} lists layers with experts",
        lambda f: f.moe | (not f.kinds & {"moe", "experts"}),
    ),
    Rule(
        "mamba layers need mamba",
        "model.mamba",
        "missing: {f.listed_by} lists Mamba layers",
        lambda f: (f.mamba_heads > 0) | ("mamba" not in f.kinds),
    ),
    # megatron/core/ssm/mamba_mixer.py and mamba_context_parallel.py: each device has whole heads, and whole groups over tp
    Rule(
        "tp and cp divide mamba heads",
        "parallelism.tp",
        "tp*cp must divide the {f.mamba_heads} Mamba heads (got {f.tp} * {f.cp})",
        lambda f: f.mamba_heads % (f.tp * f.cp) == 0,
    ),
    Rule(
        "tp divides mamba groups",
        "parallelism.tp",
        "must divide model.mamba.n_groups {f.mamba_groups} (got {f.tp})",
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
        "{f.n_layers})",
        lambda f: (max(f.bf16_layers) == 0) | (max(f.bf16_layers) <= f.n_layers // f.pp),
    ),
]
