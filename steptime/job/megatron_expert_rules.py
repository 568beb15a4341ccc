"""What Megatron-Core refuses of a mixture of experts, or runs as if it were not said.

Source: megatron/core/transformer/transformer_config.py (core_v0.16.1), __post_init__, where no other is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule

if TYPE_CHECKING:
    from steptime.job.facts import Facts


def woven(f: Facts) -> bool:
    """Whether the exchange of experts runs beside another micro-batch's compute."""
    return bool(dict(f.overlap).get("ep", 0.0)) and f.moe and f.family == "megatron-core"


def _woven_rule(name: str, text: str, holds: Any) -> Rule:
    """A condition of overlap_moe_expert_parallel_comm."""
    why = f"Megatron-Core overlaps the exchange of experts only {text}; or use false"
    return Rule(name, "performance.overlap.ep", why, lambda f: (not woven(f)) | holds(f))


MEGATRON_EXPERT_RULES = [
    _woven_rule("woven ep", "with ep over 1 (got {f.ep}); raise it", lambda f: f.ep > 1),
    _woven_rule(
        "woven dispatcher",
        "with dispatcher alltoall or flex (got {f.experts_run.dispatcher}); change it",
        lambda f: f.experts_run.dispatcher != "allgather",
    ),
    _woven_rule(
        "woven recomputation",
        "without full recomputation; recompute modules",
        lambda f: "full" not in {f.checkpoint_word, f.granularity},
    ),
    _woven_rule("woven precision", "in bf16 or fp16 (got fp32); change it", lambda f: f.precision != "fp32"),
    _woven_rule(
        "woven shared experts",
        "without performance.moe.shared_expert_overlap; remove that",
        lambda f: not f.experts_run.shared_expert_overlap,
    ),
    Rule(
        "delayed weight gradients",
        "performance.moe.delay_wgrad_compute",
        "needs performance.overlap.ep, whose schedule it belongs to; add overlap: {{ep: true}}, or remove it",
        lambda f: (not f.experts_run.delay_wgrad_compute) | (dict(f.overlap).get("ep", 0.0) == 1.0),
    ),
    # TransformerEngine pytorch/ops/fused/grouped_mlp.py; megatron/core/transformer/moe/experts.py, _is_fused_impl_supported
    Rule(
        "experts in epilogues",
        "performance.moe.fused_mlp",
        "TransformerEngine runs experts in the products' epilogues with precision mxfp8 or nvfp4, grouped_gemm and etp 1 (got "
        "{f.precision}, etp {f.etp}); use false",
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
        "pieces of overlapped layers",
        "performance.moe.overlap_keeps_pieces",
        "needs performance.overlap.ep, whose schedule it belongs to; add overlap: {{ep: true}}, or remove it",
        lambda f: (not f.experts_run.overlap_keeps_pieces) | (dict(f.overlap).get("ep", 0.0) > 0.0),
    ),
    Rule(
        "shared experts to overlap",
        "performance.moe.shared_expert_overlap",
        "the model has no shared experts (model.moe.n_shared_experts); use false",
        lambda f: (not f.experts_run.shared_expert_overlap) | (f.shared_inter_sz > 0),
    ),
    Rule(
        "shared experts beside the dispatcher",
        "performance.moe.shared_expert_overlap",
        "Megatron-Core overlaps shared experts with dispatcher alltoall or flex (got {f.experts_run.dispatcher}); use one, or "
        "false",
        lambda f: (not f.experts_run.shared_expert_overlap) | (f.experts_run.dispatcher != "allgather"),
    ),
    # megatron/core/transformer/moe/moe_layer.py, MoELayer.router_and_preprocess
    Rule(
        "latent with shared experts overlapped",
        "performance.moe.shared_expert_overlap",
        "Megatron-Core does not overlap shared experts where routed ones read a latent (model.moe.latent_sz); use false",
        lambda f: (f.experts.latent_sz is None) | (not f.experts_run.shared_expert_overlap),
    ),
    Rule(
        "overlapped shared experts run again",
        "performance.recompute.modules",
        "Megatron-Core does not recompute shared_experts with performance.moe.shared_expert_overlap; remove one",
        lambda f: "shared_experts" not in f.modules or not f.experts_run.shared_expert_overlap,
    ),
    Rule(
        "single experts run again",
        "performance.recompute.modules",
        "Megatron-Core recomputes moe_act only with grouped products; remove it, or performance.moe.grouped_gemm false",
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
        "Megatron-Core has it for score_function sigmoid only (got {f.experts.score_function}); use sigmoid, or false",
        lambda f: (not f.experts.expert_bias) | (f.experts.score_function == "sigmoid") | (f.family == "fsdp2"),
    ),
    Rule(
        "capacity under sinkhorn",
        "model.moe.capacity_factor",
        "Megatron-Core drops no rows under load_balancing sinkhorn; use aux_loss or none, or remove it",
        lambda f: (f.experts.capacity_factor is None) | (f.experts.load_balancing != "sinkhorn"),
    ),
]
