"""Facts and rules about a mixture of experts and how it is distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.num import maximum
from steptime.job.grouped_rules import grouped_refusal
from steptime.job.limits import Rule
from steptime.job.megatron_expert_rules import MEGATRON_EXPERT_RULES
from steptime.model.model import Moe

if TYPE_CHECKING:
    from steptime.job.facts import Facts
    from steptime.model.model import Model
    from steptime.software.performance import Software

_NONE = Moe.model_construct(n_experts=1, expert_inter_sz=1, experts_per_token=1)


def expert_facts(model: Model, software: Software) -> dict[str, Any]:
    """The facts about a model's experts and how they run."""
    moe = model.moe or _NONE
    return {
        "moe": model.moe is not None,
        "n_experts": moe.n_experts,
        "experts_per_token": moe.experts_per_token,
        "expert_groups": moe.n_groups or 1,
        "node_limit": moe.node_limit or 0,
        "expert_inter_sz": moe.expert_inter_sz,
        "shared_inter_sz": moe.shared_expert_inter_sz,
        "dense_layers": moe.n_dense_layers,
        "expert_tp_degree": moe.expert_tp_degree or 0,
        "experts": moe,
        "experts_run": software.moe,
        "fused_activation": fused_activation(model, software),
        "grouped_refusal": grouped_refusal(model, software),
        "megatron_only": next((key for key, said in megatron_only(moe, model, software).items() if said), ""),
    }


def fused_activation(model: Model, software: Software) -> bool:
    """Whether TransformerEngine's fused grouped MLP has the activation: SwiGLU, quick GEGLU, weighted squared ReLU.

    megatron/core/transformer/moe/experts.py@d98e8a64, _is_fused_impl_supported. A plan's gelu of a gated MLP stands for the quick
    one too; squared ReLU is weighted where its kernel is fused.
    """
    if model.glu:
        return model.activation in {"silu", "gelu"}
    return model.activation == "relu2" and software.kernels.activation_impl == "fused"


def megatron_only(moe: Moe, model: Model, software: Software) -> dict[str, bool]:
    """Features that torchtitan's layers with experts lack, and whether a job uses them."""
    return {
        "capacity_factor": moe.capacity_factor is not None,
        "load_balancing": moe.load_balancing != "none",
        "z_loss": moe.z_loss,
        "shared_expert_gate": moe.shared_expert_gate,
        "latent_sz": moe.latent_sz is not None,
        "post_norms": model.post_norms and model.moe is not None,
        "allgather": software.moe.dispatcher == "allgather",
        "shared_expert_overlap": software.moe.shared_expert_overlap,
        "deterministic": model.moe is not None and software.moe.deterministic,
        "delay_wgrad_compute": software.moe.delay_wgrad_compute,
        "permute_fusion": model.moe is not None and software.moe.permute_fusion,
    }


def rows_cut_evenly(f: Facts) -> Any:
    """Whether the ranks that share each expert's weights can split them where they do so by rows."""
    shards = maximum(f.stage_ranks // (f.expert_ranks * f.replicas), 1)
    whole = (f.expert_inter_sz % (shards * f.etp) == 0) & (f.hidden_sz % shards == 0)
    return (shards * f.ep <= f.n_experts) | whole


EXPERT_RULES = [
    *MEGATRON_EXPERT_RULES,
    Rule(
        "ep needs moe",
        "parallelism.ep",
        "must be 1 without model.moe (got {f.ep}); use 1",
        lambda f: (f.ep == 1) | f.moe,
    ),
    # megatron/core/transformer/moe/moe_layer.py, MoELayer.forward
    Rule(
        "moe without sp",
        "parallelism.sp",
        "Megatron-Core requires sequence parallelism for experts with tp > 1 (got tp {f.tp}); set sp, or use tp 1",
        lambda f: (not f.moe) | (f.family != "megatron-core") | f.sp | (f.tp == 1),
    ),
    # megatron/core/parallel_state.py, initialize_model_parallel: world_size % (etp * ep * pp) == 0
    Rule(
        "experts over ranks",
        "parallelism.ep",
        "dp*cp*tp = ep*etp*edp: the {f.stage_ranks} devices of a stage (dp {f.dp} * cp {f.cp} * tp {f.tp}) "
        "are not a multiple of ep {f.ep} * etp {f.etp} = {f.expert_ranks}; lower ep, or raise dp",
        lambda f: (not f.moe) | (f.stage_ranks % f.expert_ranks == 0),
    ),
    Rule(
        "experts over centers",
        "cross_dc.n_dcs",
        "must divide edp = dp*cp*tp / (ep*etp) so that the experts of a layer stay in one data center (got {f.n_dcs}); lower ep",
        lambda f: (not f.moe) | (f.n_dcs == 1) | (f.stage_ranks % (f.expert_ranks * f.n_dcs) == 0),
    ),
    # megatron/core/parallel_state.py: "Expert data parallel size should be divisible by partial DistOpt shard factor"
    Rule(
        "replicas of experts",
        "parallelism.replicas",
        "must divide edp = dp*cp*tp / (ep*etp) (got {f.replicas}); lower it, or ep {f.ep}",
        lambda f: (not f.moe) | (f.replicas == 1) | (f.stage_ranks % (f.expert_ranks * f.replicas) == 0),
    ),
    Rule(
        "ep divides experts",
        "parallelism.ep",
        "must divide n_experts {f.n_experts} (got {f.ep}); valid: {f.ep_choices}",
        lambda f: (not f.moe) | (f.n_experts % f.ep == 0),
    ),
    Rule(
        "etp divides expert_inter_sz",
        "parallelism.etp",
        "must divide expert_inter_sz {f.expert_inter_sz} (got {f.etp}); lower etp, or use 1",
        lambda f: (not f.moe) | (f.expert_inter_sz % f.etp == 0),
    ),
    # transformer_engine.py, TEGroupedLinear: without ep > 1 experts' gradients go with the dense ones, over dp*cp
    Rule(
        "etp with ep 1",
        "parallelism.etp",
        "must be tp {f.tp} if ep is 1 (got {f.etp}): Megatron-Core reduces the gradients of such experts over dp only; remove "
        "it, or raise ep",
        lambda f: (not f.moe) | (f.ep > 1) | (f.etp == f.tp),
    ),
    # torchtitan/distributed/parallel_dims.py: ep takes the ranks of tp, and experts are not split further
    Rule(
        "etp with FSDP2",
        "parallelism.etp",
        "FSDP2 splits experts over ep or over tp, not both (got etp {f.etp} with ep {f.ep}); remove it",
        lambda f: (not f.moe) | (f.family != "fsdp2") | (f.ep == 1) | (f.etp == 1),
    ),
    # torch/distributed/fsdp/_fully_shard/_fsdp_param.py: "FSDP does not support uneven sharding on dim 1"
    Rule(
        "experts sharded by FSDP2",
        "parallelism.ep",
        "with more ranks in a stage ({f.stage_ranks}) than experts ({f.n_experts}), FSDP2 shards expert weights by rows, and the "
        "ranks per expert must divide expert_inter_sz {f.expert_inter_sz} and hidden_sz {f.hidden_sz}; change ep or dp",
        lambda f: (not f.moe) | (f.family != "fsdp2") | rows_cut_evenly(f),
    ),
    # torchtitan/models/common/token_dispatcher.py@6b960233, MinimalAsyncEPTokenDispatcher: TP, CP, PP "are out of scope"
    Rule(
        "MinimalAsyncEP",
        "performance.moe.flex_backend",
        "minimal_async_ep is torchtitan's, for tp, cp and pp of 1 (got software {f.software}, tp {f.tp}, cp {f.cp}, "
        "pp {f.pp}); use deepep",
        lambda f: (
            (not f.moe)
            | (f.experts_run.flex_backend != "minimal_async_ep")
            | ((f.family == "fsdp2") & (f.tp == 1) & (f.cp == 1) & (f.pp == 1))
        ),
    ),
    Rule(
        "capacity without waiting",
        "performance.moe.non_blocking_capacity_factor",
        "only dispatcher flex with HybridEP under FSDP2 has a capacity instead of waiting for counts (got dispatcher "
        "{f.experts_run.dispatcher}, flex_backend {f.experts_run.flex_backend}, software {f.software}); remove it",
        lambda f: (
            (not f.moe)
            | (f.experts_run.non_blocking_capacity_factor is None)
            | (
                (f.family == "fsdp2")
                & (f.experts_run.dispatcher == "flex")
                & (f.experts_run.flex_backend == "hybridep")
            )
        ),
    ),
    Rule(
        "experts in low precision",
        "performance.moe.grouped_precision",
        "{f.experts_run.grouped_precision} {f.grouped_refusal}; use none",
        lambda f: not f.grouped_refusal,
    ),
    Rule(
        "a rate of experts in low precision",
        "performance.moe.grouped_precision",
        "{f.machine} states no rate of products in fp8 (peak_flops.fp8); add it, or use none",
        lambda f: (
            f.experts_run.grouped_precision == "none"
            or bool(f.grouped_refusal)
            or "fp8" in f.machine_dtypes
            or (f.experts_run.grouped_precision != "fp8_rowwise" and "mxfp8" in f.machine_dtypes)
        ),
    ),
    # token_dispatcher.py, MoEFlexTokenDispatcher: "Flex token dispatcher requires TPxEP > 1"
    Rule(
        "flex with one rank",
        "performance.moe.dispatcher",
        "flex requires ep*etp > 1; raise ep, or use alltoall",
        lambda f: (not f.moe) | (f.experts_run.dispatcher != "flex") | (f.expert_ranks > 1),
    ),
    Rule(
        "expert_tp_degree",
        "model.moe.expert_tp_degree",
        "must equal parallelism.etp {f.etp} (got {f.expert_tp_degree}); set one of them",
        lambda f: (f.expert_tp_degree == 0) | (f.expert_tp_degree == f.etp),
    ),
    Rule(
        "tp divides shared experts",
        "parallelism.tp",
        "must divide shared_expert_inter_sz {f.shared_inter_sz} (got {f.tp}); valid: {f.tp_choices}",
        lambda f: f.shared_inter_sz % f.tp == 0,
    ),
    Rule(
        "top k",
        "model.moe.experts_per_token",
        "must be at most n_experts {f.n_experts} (got {f.experts_per_token}); lower it, or raise n_experts",
        lambda f: f.experts_per_token <= f.n_experts,
    ),
    # megatron/core/transformer/moe/moe_utils.py, group_limited_topk: groups of one size, the best by the sum of their topk //
    # group_topk best experts
    Rule(
        "groups of experts",
        "model.moe.n_groups",
        "must divide n_experts {f.n_experts} (got {f.expert_groups}); use one of {f.ep_choices}",
        lambda f: f.n_experts % f.expert_groups == 0,
    ),
    Rule(
        "groups need a limit",
        "model.moe.n_groups",
        "needs model.moe.node_limit, the number of groups per token; set it, or remove n_groups",
        lambda f: (f.expert_groups == 1) | (f.node_limit > 0),
    ),
    Rule(
        "node limit",
        "model.moe.node_limit",
        "must be at most n_groups {f.expert_groups} and experts_per_token {f.experts_per_token} (got {f.node_limit}); lower it",
        lambda f: (f.node_limit <= f.experts_per_token) & (f.node_limit <= f.expert_groups),
    ),
    Rule(
        "top k of the groups",
        "model.moe.node_limit",
        "{f.node_limit} of {f.expert_groups} groups have fewer than experts_per_token {f.experts_per_token} experts; raise it",
        lambda f: (f.node_limit == 0) | (f.n_experts * f.node_limit >= f.experts_per_token * f.expert_groups),
    ),
    Rule(
        "dense layers",
        "model.moe.n_dense_layers",
        "must be at most n_layers {f.n_layers} (got {f.dense_layers}); lower it",
        lambda f: f.dense_layers <= f.n_layers,
    ),
    Rule(
        "padding needs capacity",
        "model.moe.pad_to_capacity",
        "needs model.moe.capacity_factor; set it, or remove pad_to_capacity",
        lambda f: f.experts.capacity_factor is not None or not f.experts.pad_to_capacity,
    ),
]
