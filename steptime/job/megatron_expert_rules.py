"""What Megatron-Core rejects for a mixture of experts, or ignores.

Source: megatron/core/transformer/transformer_config.py (core_v0.16.1), __post_init__, where no other is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule

if TYPE_CHECKING:
    from steptime.job.facts import Facts


BEFORE_0_18 = ("nemo", *(f"megatron-bridge@{release}" for release in ("25.09", "25.11", "26.02", "26.04")))
"""Profiles whose Megatron-Core is 0.17 or earlier (NVIDIA-NeMo/Megatron-Bridge docs/releases/software-versions.md: 0.17.0 in
26.04, 0.18.0 in 26.06)."""


def woven(f: Facts) -> bool:
    """Whether the all-to-all of experts overlaps the compute of another micro-batch."""
    return bool(dict(f.overlap).get("ep", 0.0)) and f.moe and f.family == "megatron-core"


def woven_in_one_stage(f: Facts) -> bool:
    """Whether it overlaps in a pipeline without virtual stages, which Megatron-Core refuses."""
    return woven(f) and f.pp > 1 and f.vpp == 1


def _woven_rule(name: str, text: str, holds: Any) -> Rule:
    """A condition of overlap_moe_expert_parallel_comm."""
    why = f"Megatron-Core overlaps the all-to-all of experts only {text}; or use false"
    return Rule(name, "performance.overlap.ep", why, lambda f: (not woven(f)) | holds(f))


MEGATRON_EXPERT_RULES = [
    _woven_rule("expert overlap needs ep", "with ep over 1 (got {f.ep}); raise it", lambda f: f.ep > 1),
    _woven_rule(
        "expert overlap dispatcher",
        "with dispatcher alltoall or flex (got {f.experts_run.dispatcher}); change it",
        lambda f: f.experts_run.dispatcher != "allgather",
    ),
    _woven_rule(
        "expert overlap recomputation",
        "without full recomputation; recompute modules",
        lambda f: "full" not in {f.checkpoint_word, f.granularity},
    ),
    # megatron/core/models/gpt/gpt_model.py alone has build_schedule_plan
    _woven_rule("expert overlap models", "in models without Mamba layers", lambda f: "mamba" not in f.kinds),
    # other profiles may stand for another program, such as DeepSeek's with DualPipe: the report and --export say so
    _woven_rule(
        "expert overlap in a pipeline",
        "with parallelism.vpp over 1 where pp is (got vpp {f.vpp} with pp {f.pp}); raise vpp, use pp 1",
        lambda f: (not f.software.startswith(("nemo", "megatron-bridge"))) | (f.pp == 1) | (f.vpp > 1),
    ),
    _woven_rule("expert overlap precision", "in bf16 or fp16 (got fp32); change it", lambda f: f.precision != "fp32"),
    _woven_rule(
        "expert overlap shared experts",
        "without performance.moe.shared_expert_overlap; remove that",
        lambda f: not f.experts_run.shared_expert_overlap,
    ),
    Rule(
        "delayed weight gradients",
        "performance.moe.delay_wgrad_compute",
        "has an effect only with performance.overlap.ep; set overlap: {{ep: true}}, or remove it",
        lambda f: (not f.experts_run.delay_wgrad_compute) | (dict(f.overlap).get("ep", 0.0) == 1.0),
    ),
    # TransformerEngine pytorch/ops/fused/grouped_mlp.py; megatron/core/transformer/moe/experts.py, _is_fused_impl_supported
    Rule(
        "experts in epilogues",
        "performance.moe.fused_mlp",
        "only with precision mxfp8 or nvfp4, grouped_gemm true, etp 1 and software megatron-core "
        "(TransformerEngine's fused grouped MLP; got {f.precision}, {f.experts_run.grouped_gemm}, {f.etp}, {f.software}); "
        "use false",
        lambda f: (
            (not f.experts_run.fused_mlp)
            | (
                (f.precision in {"mxfp8", "nvfp4"})
                & f.experts_run.grouped_gemm
                & (f.etp == 1)
                & (f.family == "megatron-core")
            )
        ),
    ),
    Rule(
        "activation in epilogues",
        "performance.moe.fused_mlp",
        "only with SwiGLU, quick GEGLU or fused weighted squared ReLU (model.glu with activation silu or gelu, or relu2 with "
        "activation_impl fused); use false",
        lambda f: (not f.experts_run.fused_mlp) | f.fused_activation,
    ),
    Rule(
        "offload of fused experts",
        "performance.offload_modules",
        "Megatron-Core offloads expert_fc1 and moe_act only without performance.moe.fused_mlp; remove them, or use false there",
        lambda f: (not f.experts_run.fused_mlp) | (not f.offload & {"expert_fc1", "moe_act"}),
    ),
    # docs/user-guide/features/paged_stash.md; transformer_config.py, moe_expert_rank_capacity_factor
    Rule(
        "pages of experts",
        "performance.moe.paged_stash",
        "only with performance.moe.fused_mlp and dispatcher flex (got {f.experts_run.fused_mlp}, {f.experts_run.dispatcher}); "
        "use false",
        lambda f: (not f.experts_run.paged_stash) | (f.experts_run.fused_mlp & (f.experts_run.dispatcher == "flex")),
    ),
    Rule(
        "pieces of overlapped layers",
        "performance.moe.overlap_keeps_pieces",
        "has an effect only with performance.overlap.ep; set overlap: {{ep: true}}, or remove it",
        lambda f: (not f.experts_run.overlap_keeps_pieces) | (dict(f.overlap).get("ep", 0.0) > 0.0),
    ),
    Rule(
        "shared experts to overlap",
        "performance.moe.shared_expert_overlap",
        "the model has no shared experts (model.moe.n_shared_experts); use false",
        lambda f: (not f.experts_run.shared_expert_overlap) | (f.shared_inter_sz > 0),
    ),
    Rule(
        "dispatcher of shared expert overlap",
        "performance.moe.shared_expert_overlap",
        "Megatron-Core overlaps shared experts only with dispatcher alltoall or flex (got {f.experts_run.dispatcher}); use one "
        "of them, or false",
        lambda f: (not f.experts_run.shared_expert_overlap) | (f.experts_run.dispatcher != "allgather"),
    ),
    # "moe_shared_expert_overlap only works with alltoall token dispatcher" to core_v0.17.1, "alltoall or flex" from core_v0.18.0
    Rule(
        "flex with shared experts overlapped",
        "performance.moe.shared_expert_overlap",
        "with dispatcher flex needs Megatron-Core 0.18, and {f.software} has an earlier one; use dispatcher alltoall, or false",
        lambda f: (
            (not f.experts_run.shared_expert_overlap)
            | (f.experts_run.dispatcher != "flex")
            | (not f.software.startswith(BEFORE_0_18))
        ),
    ),
    # megatron/core/transformer/moe/moe_layer.py, MoELayer.router_and_preprocess
    Rule(
        "latent with shared experts overlapped",
        "performance.moe.shared_expert_overlap",
        "Megatron-Core does not overlap shared experts with model.moe.latent_sz; use false",
        lambda f: (f.experts.latent_sz is None) | (not f.experts_run.shared_expert_overlap),
    ),
    Rule(
        "recomputation of overlapped shared experts",
        "performance.recompute.modules",
        "Megatron-Core does not recompute shared_experts with performance.moe.shared_expert_overlap; remove one",
        lambda f: "shared_experts" not in f.modules or not f.experts_run.shared_expert_overlap,
    ),
    Rule(
        "recomputation of ungrouped experts",
        "performance.recompute.modules",
        "Megatron-Core recomputes moe_act only with grouped GEMMs; remove it, or performance.moe.grouped_gemm false",
        lambda f: "moe_act" not in f.modules or f.experts_run.grouped_gemm or f.family != "megatron-core",
    ),
    Rule(
        "gate of shared experts",
        "model.moe.shared_expert_gate",
        "the model has no shared experts (model.moe.n_shared_experts); use false",
        lambda f: (not f.experts.shared_expert_gate) | (f.shared_inter_sz > 0),
    ),
    Rule(
        "balancing bias",
        "model.moe.expert_bias",
        "Megatron-Core supports it for score_function sigmoid only (got {f.experts.score_function}); use sigmoid, or false",
        lambda f: (not f.experts.expert_bias) | (f.experts.score_function == "sigmoid") | (f.family == "fsdp2"),
    ),
    Rule(
        "capacity under sinkhorn",
        "model.moe.capacity_factor",
        "Megatron-Core drops no tokens with load_balancing sinkhorn; use aux_loss or none, or remove it",
        lambda f: (f.experts.capacity_factor is None) | (f.experts.load_balancing != "sinkhorn"),
    ),
]
