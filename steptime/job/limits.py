"""The limits of steptime: numbers in a plausible range, and features that are modeled."""

from collections.abc import Callable
from typing import Any, NamedTuple

from steptime.job.device_count import MOST_DP
from steptime.job.facts import Facts
from steptime.software.performance import EAGER_TORCH
from steptime.software.precision import RECIPES


class Rule(NamedTuple):
    """`holds` is true for a valid job."""

    name: str
    path: str
    """The wrong key, or its section where several keys are."""
    text: str
    """The problem and the fix, with facts as {f.tp}."""
    holds: Callable[[Facts], Any]


MOST_MICROBATCHES = 100_000
MOST_ACTIONS = 10_000_000
"""Micro-batches of a step, and these times the chunks of the pipeline."""

BOUNDS: dict[str, tuple[str, float]] = {
    "n_layers": ("model.n_layers", 10_000),
    "hidden_sz": ("model.hidden_sz", 1_000_000),
    "inter_sz": ("model.inter_sz", 10_000_000),
    "n_q_heads": ("model.n_q_heads", 100_000),
    "n_kv_heads": ("model.n_kv_heads", 100_000),
    "head_dim": ("model.head_dim", 100_000),
    "vocab_sz": ("model.vocab_sz", 100_000_000),
    "tp": ("parallelism.tp", 10_000),
    "pp": ("parallelism.pp", 10_000),
    "dp": ("parallelism.dp", MOST_DP),
    "vpp": ("parallelism.vpp", 1_000),
    "cp": ("parallelism.cp", 10_000),
    "ep": ("parallelism.ep", 100_000),
    "n_experts": ("model.moe.n_experts", 100_000),
    "experts_per_token": ("model.moe.experts_per_token", 10_000),
    "expert_inter_sz": ("model.moe.expert_inter_sz", 10_000_000),
    "shared_inter_sz": ("model.moe.shared_expert_inter_sz", 10_000_000),
    "mtp": ("model.mtp", 100),
    "gbs": ("data.gbs", 100_000_000),
    "seqlen": ("data.seqlen", 100_000_000),
    "microbatch_sz": ("data.microbatch_sz", 1_000_000),
}
"""Largest accepted numbers: about ten times what anybody has trained with."""


def _at_most(name: str, limit: float) -> Callable[[Facts], Any]:
    return lambda f: getattr(f, name) <= limit


SANE = [
    *(
        Rule(
            f"{name} is out of range",
            path,
            f"must be at most {limit:,} (got {{f.{name}}}); lower it",
            _at_most(name, limit),
        )
        for name, (path, limit) in BOUNDS.items()
    ),
    Rule(
        "too many devices",
        "parallelism",
        "tp*cp*pp*dp must be at most 10,000,000 devices (got {f.devices}); lower dp",
        lambda f: (f.devices <= 1e7) | (f.tp > 1e4) | (f.pp > 1e4) | (f.dp > 1e6) | (f.cp > 1e4),
    ),
    Rule(
        "too many micro-batches",
        "data.gbs",
        "more than 100,000 micro-batches per step (got {f.microbatches}); raise microbatch_sz or dp",
        lambda f: (f.microbatches <= MOST_MICROBATCHES) | (f.gbs > BOUNDS["gbs"][1]),
    ),
    Rule(
        "schedule too long",
        "parallelism",
        "pp*vpp*micro-batches must be at most 10,000,000 (got {f.chunks} chunks, {f.microbatches} micro-batches); raise dp",
        lambda f: (f.chunks * f.microbatches <= MOST_ACTIONS) | (f.chunks > 1e5) | (f.microbatches > MOST_MICROBATCHES),
    ),
]

MODELED = [
    Rule(
        "moe framework",
        "performance.software",
        "mixtures of experts are modeled for Megatron-Core and FSDP2 only (got {f.software}); use megatron-core, torchtitan "
        "or a profile derived from them",
        lambda f: (not f.moe) | f.framework.experts,
    ),
    # torchtitan/models/common/moe_sharding.py (pull request 3386), sp_layout: without sp every tp rank holds all tokens
    Rule(
        "FSDP2's experts without sp",
        "parallelism.sp",
        "experts with tp > 1 are modeled with sequence parallelism only (got {f.software}, tp {f.tp}); set sp, or use tp 1",
        lambda f: (not f.moe) | (f.family != "fsdp2") | (not f.framework.experts_tp) | f.sp | (f.tp == 1),
    ),
    # NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/parallelizer.py, parallelize_model, _resolve_moe_tp_plan: tp
    # ranks repeat attention, router and experts, without sp and from pretrained weights; no tp before 8a83fdce (2026-07)
    Rule(
        "AutoModel's experts with tp",
        "parallelism.tp",
        "tp > 1 with experts is not modeled yet for NeMo AutoModel, where each tp rank routes all tokens (got {f.tp}); use 1",
        lambda f: (not f.moe) | f.framework.experts_tp | (f.tp == 1),
    ),
    Rule(
        "experts of Megatron",
        "model.moe",
        "capacity factors, balancing losses, gated or overlapped shared experts, latent_sz, post_norms, all-gather dispatch, "
        "deterministic kernels, fused permutation and delayed weight gradients are not modeled yet with FSDP2 "
        "(got {f.megatron_only}); remove it, or use megatron-core",
        lambda f: (f.family != "fsdp2") | (not f.megatron_only),
    ),
    Rule(
        "flex with capacity",
        "performance.moe.dispatcher",
        "flex with a capacity factor is not modeled yet; use alltoall, or remove model.moe.capacity_factor",
        lambda f: (not f.moe) | (f.experts_run.dispatcher != "flex") | (f.experts.capacity_factor is None),
    ),
    Rule(
        "mla framework",
        "model.attention.kind",
        "mla is modeled for Megatron-Core and FSDP2 only (got software {f.software}); use megatron-core, torchtitan or "
        "a profile derived from them",
        lambda f: (f.attention == "gqa") | f.framework.experts,
    ),
    Rule(
        "window with cp",
        "parallelism.cp_comm_type",
        "with cp, windowed attention needs a2a, or TransformerEngine's all_gather (got {f.cp_comm_type}); "
        "use a2a, or cp 1",
        lambda f: (
            (f.cp == 1)
            | (f.window is None)
            | (f.cp_comm_type == "a2a")
            | ((f.cp_comm_type == "all_gather") & (f.family not in EAGER_TORCH))
        ),
    ),
    Rule(
        "sinks with cp",
        "parallelism.cp_comm_type",
        "with cp, attention with sinks or chunks needs a2a (got {f.cp_comm_type}); use a2a, or cp 1",
        lambda f: (f.cp == 1) | (not f.whole_heads) | (f.cp_comm_type == "a2a"),
    ),
    Rule(
        "linear attention framework",
        "performance.software",
        "linear attention is modeled for Megatron-Core only (got {f.software}); use megatron-core or a profile of its family",
        lambda f: (f.linear is None) | (f.family == "megatron-core"),
    ),
    Rule(
        "linear attention with ZeRO",
        "parallelism.zero_level",
        "linear attention is not modeled with FSDP or zero_level 2 or 3 (got {f.zero_level}); use 0 or 1",
        lambda f: (f.linear is None) | (f.zero_level < 2),
    ),
    Rule(
        "linear attention with cp",
        "parallelism.cp",
        "not modeled yet together with model.linear_attention (got {f.cp}); use 1",
        lambda f: (f.linear is None) | (f.cp == 1),
    ),
    Rule(
        "linear attention with a window",
        "model.attention.window",
        "not modeled yet together with model.linear_attention (got {f.window}); remove it",
        lambda f: (f.linear is None) | (f.window is None),
    ),
    Rule(
        "linear attention with tp",
        "parallelism.tp",
        "with linear attention, tp > 1 is modeled only for kind gated_delta_net (got {f.tp} with {f.linear.kind}); use 1",
        lambda f: (f.tp == 1) | (f.linear is None or f.linear.kind == "gated_delta_net"),
    ),
    Rule(
        "mtp framework",
        "performance.software",
        "multi-token prediction is modeled for Megatron-Core only (got {f.software}); "
        "use megatron-core or a profile of its family",
        lambda f: (f.mtp == 0) | (f.family == "megatron-core"),
    ),
    Rule(
        "mtp with ZeRO",
        "parallelism.zero_level",
        "multi-token prediction is not modeled with FSDP or zero_level 2 or 3 (got {f.zero_level}); use 0 or 1",
        lambda f: (f.mtp == 0) | (f.zero_level < 2),
    ),
    Rule(
        "mtp with window_pattern",
        "model.mtp",
        "not modeled yet together with model.attention.window_pattern (got {f.mtp}); use 0",
        lambda f: (f.mtp == 0) | (f.window_pattern is None),
    ),
    Rule(
        "recipe with ZeRO",
        "performance.precision",
        "with zero_level 3, TransformerEngine's recipes are modeled only for dense models with fp8_params and not for nvfp4 "
        "(got {f.precision}); set performance.fp8_params, or use zero_level 1 or 2",
        lambda f: (
            (not f.recipe or f.precision not in f.framework.recipes)
            | (f.zero_level < 3)
            | (f.family == "fsdp2")
            | (f.states.fp8_params and not f.moe and f.precision != "nvfp4")
        ),
    ),
    Rule(
        "recomputation with split backward",
        "performance.recompute",
        "not modeled yet with zero_bubble, zbv and dualpipev (got {f.granularity}); use "
        "performance.activation_checkpointing_type none instead, or another schedule",
        lambda f: (not f.split_backward) | (f.granularity in {"", "none"}),
    ),
    Rule(
        "recomputation preset with split backward",
        "performance.activation_checkpointing_type",
        "not modeled yet with zero_bubble, zbv and dualpipev (got {f.checkpoint_word!r}); use none, or another schedule",
        lambda f: (not f.split_backward) | (f.checkpoint_word in {None, "none"}),
    ),
    Rule(
        "tied embeddings with a V schedule",
        "model.tie_embeddings",
        "not modeled yet with zbv and dualpipev, whose first stage holds embedding and head; use false",
        lambda f: (f.chunks_needed is None) | (not f.tie_embeddings),
    ),
    Rule(
        "resharding with split backward",
        "parallelism.fsdp.reshard_after_forward",
        "not modeled yet with schedule {f.schedule_said}; use false, torchtitan's default with pp > 1",
        lambda f: (f.family != "fsdp2") | (f.zero_level != 3) | (not f.split_backward),
    ),
    Rule(
        "resharding to fewer ranks with pp or cpu_offload",
        "parallelism.fsdp.reshard_after_forward",
        "a number of ranks is not modeled yet with pp > 1 or cpu_offload (got {f.fsdp_ranks}); use true or false",
        lambda f: (f.fsdp_ranks == 0) | ((f.pp == 1) & (f.cpu_offload.share == 0.0)),
    ),
    Rule(
        "pp and ep with FSDP 1",
        "parallelism.fsdp.version",
        "1 is not modeled yet with pp > 1 or ep > 1 (got pp {f.pp}, ep {f.ep}); use 2",
        lambda f: (f.fsdp_version == 2) | ((f.pp == 1) & (f.ep == 1)),
    ),
    Rule(
        "tied embeddings of FSDP stages",
        "model.tie_embeddings",
        "torch's pipeline stages cannot share weights with FSDP and pp > 1 (got pp {f.pp}); use false",
        lambda f: (f.family != "fsdp2") | (f.pp == 1) | (not f.tie_embeddings),
    ),
]
"""Keys that are read but not modeled yet."""

DUALPIPE = (
    "not modeled yet; use dualpipev with half the pp and twice the dp (torch and FSDP2), or 1f1b or interleaved with "
    "performance.overlap.ep (Megatron-Core)"
)
"""DualPipe runs two pipelines in opposite directions over the same devices, each a copy of the model; cut in half, one of them is
DualPipeV on half the devices (deepseek-ai/DualPipe, README, "DualPipeV")."""
NOT_MODELED = {
    **{
        f"performance.precision={word}": f"not modeled yet; use one of bf16, fp16, fp32, {', '.join(RECIPES)}"
        for word in ("fp8_e4m3", "fp4", "tf32", "int8")
    },
    **{
        f"parallelism.schedule={word}": f"use {ours}"
        for word, ours in {
            "zero-bubble": "zero_bubble",
            "zb-h1": "zero_bubble with vpp 1",
            "interleaved-zero-bubble": "zero_bubble with vpp of 2 or more",
            "zb-v": "zbv",
            "looped-bfs": "gpipe with vpp of 2 or more",
        }.items()
    },
    **{
        f"parallelism.schedule={word}": "not modeled yet; use 1f1b, interleaved, zero_bubble, zbv or dualpipev"
        for word in ("zb-h2", "v-half", "v-min")
    },
    **dict.fromkeys((f"parallelism.schedule={word}" for word in ("dualpipe", "DualPipe")), DUALPIPE),
    **{
        f"performance.moe.dispatcher={word}": "use flex, which is DeepEP and HybridEP"
        for word in ("deepep", "hybridep")
    },
    **{f"model.attention.kind={word}": "set model.hybrid_pattern" for word in ("mamba", "hybrid")},
    "model.attention.kind=linear": "set model.linear_attention",
    "model.attention.kind=dsa": "not modeled yet; use gqa",
    "performance.optimizer_offload": "not a key; use performance.cpu_offload",
    "performance.offload": "not a key; use performance.offload_modules",
    "performance.fp8": "not a key; set performance.precision to fp8_current, mxfp8 or another recipe",
    **{f"parallelism.{key}": "not modeled yet; remove it" for key in ("hybrid_cp",)},
    "parallelism.expert_tp": "not a key; use parallelism.etp",
    "parallelism.ulysses": "not a key; use cp with cp_comm_type a2a",
    "parallelism.hierarchical_cp": "not a key; use cp with cp_comm_type a2a+p2p and cp_a2a",
}
"""Keys ("path") and words ("path=word") of other tools, and what to write instead."""
