"""Settings of a plan that have no effect on its job, and why; listed where the plan differs from its profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import le
from typing import Any

from steptime.base.config import Config
from steptime.base.words import flow
from steptime.fsdp.of_job import ends_alike
from steptime.job.job import Job
from steptime.job.offload_rules import OF_NO_PROFILE
from steptime.model.blocks import layers
from steptime.model.model import Moe
from steptime.software.performance import OPTIONS, load_software
from steptime.software.settings import MoeSettings


def usual_settings(job: Job) -> dict[str, Any]:
    """The settings of the job's profile on its machine, without those of the plan."""
    return load_software(job.software.name).on(job.machine).settings()


def _alike(key: str) -> Callable[[Job], bool]:
    """Whether attention reads its tensors as without the setting."""

    def holds(job: Job) -> bool:
        other = job.software.replace(**{key: usual_settings(job)[key]}).batch_first_attention
        unfused = job.software.kernels.attention_impl != "flash"
        return unfused or job.data.microbatch_sz == 1 or other == job.software.batch_first_attention

    return holds


def _no_drops(job: Job) -> bool:
    """Whether the capacity of an expert holds all rows."""
    moe = job.model.moe
    if moe is None or moe.capacity_factor is None or moe.pad_to_capacity:
        return False
    return moe.capacity_factor >= (moe.imbalance_factor if job.parallelism.ep > 1 else 1.0)


def _without(module: str) -> Callable[[Job], bool]:
    """Whether the model lacks a module."""

    def holds(job: Job) -> bool:
        kinds, moe = {layer.kind for layer, _ in layers(job.model)}, job.model.moe
        return not {"mlp": kinds & DENSE, "shared_experts": moe and moe.shared_expert_inter_sz}[module]

    return holds


def _keys_as_they_are(job: Job) -> bool:
    """Whether keys and values are read without a copy for each query, or copied whatever the setting."""
    model, kernels = job.model, job.software.kernels
    flash = kernels.attention_impl == "flash" or job.parallelism.cp > 1
    same_heads = model.attention.kind == "mla" or model.n_q_heads == model.n_kv_heads
    return not flash or same_heads or kernels.fused_projections == "qkv"


def _heads_stay(job: Job) -> bool:
    """Whether no heads can be gathered after norms of q and k."""
    flash = job.software.kernels.attention_impl == "flash"
    return not job.model.qk_norm or not flash or job.parallelism.tp == 1 or job.model.attention.kind == "mla"


DENSE = {"dense", "mlp"}
"""Kinds of layer with a dense MLP."""
NO_PIPELINE = ("there is no pipeline (pp 1)", lambda job: job.parallelism.pp == 1)
IDLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "performance.softmax_impl": (
        "flash attention has no separate softmax kernel",
        lambda job: job.software.kernels.attention_impl == "flash",
    ),
    "performance.attention_kernel": (
        "attention is unfused",
        lambda job: job.software.kernels.attention_impl != "flash",
    ),
    "performance.loss_impl": (
        "traced and pieces differ from composite only in torch's own loss, traced only over a split vocabulary (tp > 1)",
        lambda job: (
            job.software.kernels.loss_impl in {"traced", "pieces"}
            and (
                job.software.kernels.vocab_parallel
                or (job.parallelism.tp == 1 and job.software.kernels.loss_impl == "traced")
            )
        ),
    ),
    "performance.attention_backend": ("the layout of attention's tensors is the same", _alike("attention_backend")),
    "performance.deterministic": ("the modeled kernels are the same", _alike("deterministic")),
    "performance.gathered_logits": (
        "there is no tensor parallelism (tp 1)",
        lambda job: job.parallelism.tp == 1,
    ),
    "performance.optimizer_impl": (
        "applies only to optimizer adamw",
        lambda job: job.software.states.optimizer != "adamw",
    ),
    "performance.muon_tp_mode": (
        "applies only to Muon with tp > 1",
        lambda job: "muon" not in job.software.states.optimizer or job.parallelism.tp == 1,
    ),
    "performance.repeat_kv": (
        "has an effect only with flash attention of fewer key-value heads than query heads, without attention kind mla",
        _keys_as_they_are,
    ),
    "performance.qk_norm_gathered": (
        "has an effect only with model.qk_norm, flash attention and tp > 1, without attention kind mla",
        _heads_stay,
    ),
    "performance.sp_regather": ("sp is off", lambda job: not job.sp),
    "performance.recompute_stops_early": (
        "nothing is recomputed beyond what backward reads",
        lambda job: job.recompute.granularity == "none" or job.recompute.modules == {"core_attn"},
    ),
    "performance.dummy_wgrads": (
        "grad_accumulation_fusion is off",
        lambda job: not job.software.states.grad_accumulation_fusion,
    ),
    "performance.grouped_workspaces": (
        "there are no grouped GEMMs",
        lambda job: job.model.moe is None or not job.software.moe.grouped_gemm,
    ),
    "performance.deferred_head_wgrads": NO_PIPELINE,
    "performance.deallocate_pipeline_outputs": (
        "applies only to pipelines of Megatron-Core",
        lambda job: job.parallelism.pp == 1 or job.software.family == "fsdp2",
    ),
    "parallelism.fsdp.no_sync": (
        "one micro-batch per step, or a pipeline, which reduces once per step",
        lambda job: job.single_microbatch or job.parallelism.pp > 1,
    ),
    "parallelism.fsdp.ends": (
        "applies only to version 2 with wrap block, without a pipeline, no_sync and tied embeddings",
        ends_alike,
    ),
    "performance.overlap.pp": NO_PIPELINE,
    "performance.overlap.tp": ("there is no tensor parallelism (tp 1)", lambda job: job.parallelism.tp == 1),
    "performance.overlap.cp": ("there is no context parallelism (cp 1)", lambda job: job.parallelism.cp == 1),
    "performance.overlap.ep": ("there is no all-to-all of experts (ep 1)", lambda job: job.parallelism.ep == 1),
    "performance.moe.router_dtype": (
        "the flex dispatcher always uses fp32",
        lambda job: job.software.moe.dispatcher == "flex" and job.software.family == "megatron-core",
    ),
    "performance.quantized_head": (
        "only TransformerEngine's mxfp8 has a quantized head",
        lambda job: job.software.precision != "mxfp8",
    ),
    "performance.moe.flex_backend": (
        "the dispatcher is not flex",
        lambda job: job.software.moe.dispatcher != "flex",
    ),
    "performance.moe.shared_expert_overlap": (
        "there is no all-to-all of experts (ep 1)",
        lambda job: job.parallelism.ep == 1 and not job.sp,
    ),
    "model.moe.score_function": (
        "in torch, sigmoid and softmax move and save the same bytes",
        lambda job: job.software.family == "fsdp2" and not job.model.moe.pre_softmax,
    ),
    "model.moe.node_limit": (
        "this dispatcher sends one row per expert to any node, and the time to select groups is not modeled",
        lambda job: job.software.family == "megatron-core" and job.software.moe.dispatcher != "flex",
    ),
    "model.moe.pre_softmax": (
        "applies only to Megatron-Core with score_function softmax",
        lambda job: job.software.family != "megatron-core" or job.model.moe.score_function != "softmax",
    ),
    "model.moe.capacity_factor": ("no tokens are dropped at this load", _no_drops),
    "model.moe.imbalance_factor": ("all experts are on one device (ep 1)", lambda job: job.parallelism.ep == 1),
}
"""Dotted key -> why it changes nothing, and of which jobs that is true."""
MODULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mlp": ("no layer has a dense MLP", _without("mlp")),
    "shared_experts": ("the model has no shared experts", _without("shared_experts")),
    "moe_act": ("already recomputed by moe", lambda job: "moe" in job.recompute.modules),
    "act": (
        "all activations are already recomputed",
        lambda job: _without("mlp")(job) and bool({"moe", "moe_act"} & job.recompute.modules),
    ),
}
"""Recomputed module -> the same."""


def idle(job: Job) -> list[str]:
    """One line for each setting of the plan that changes nothing, other than its profile's."""
    found = [f"no effect: {path} {flow(value)} ({why})" for path, value in said(job) if (why := _why(path, job))]
    recompute = job.performance.recompute
    modules = [name for name in (recompute.modules or () if recompute else ()) if name in MODULES]
    found += [
        f"no effect: performance.recompute.modules {name} ({MODULES[name][0]})"
        for name in modules
        if MODULES[name][1](job)
    ]
    return found + _beyond_the_layers(job)


def _why(path: str, job: Job) -> str:
    """Why a key changes nothing in the job; empty where it does, or may."""
    if job.model.moe is None and path.startswith("performance.moe."):
        return "the model has no experts"
    return IDLE[path][0] if path in IDLE and IDLE[path][1](job) else ""


def _beyond_the_layers(job: Job) -> list[str]:
    """Where method every counts more layers than a chunk has, whose layers are then all kept."""
    counts, chunks = job.recompute.n_layers, job.layers_per_chunk
    if job.recompute.method != "every" or all(map(le, counts, chunks)):
        return []
    every, most = flow(counts[0] if len(set(counts)) == 1 else list(counts)), max(chunks)
    why = f"no chunk has more than {most} layers" if len(chunks) > 1 else f"the model has {most} layers"
    setting = f"performance.recompute.n_layers {every} with method every"
    if any(map(le, counts, chunks)):
        return [f"note: {setting} recomputes nothing in model chunks of fewer layers"]
    return [f"no effect: {setting} ({why}, so none is recomputed)"]


def said(job: Job) -> Iterator[tuple[str, Any]]:
    """Settings that the plan changes, by dotted key."""
    usual, own = usual_settings(job), job.performance
    for key in OPTIONS:
        value = getattr(own, key)
        if value is not None and value != usual[key]:
            yield f"performance.{key}", value
    for key in OF_NO_PROFILE:
        if value := getattr(own, key):
            yield f"performance.{key}", value
    for axis, share in own.overlap or ():
        if share is not None and share != usual["overlap"][axis]:
            yield f"performance.overlap.{axis}", share
    if (fsdp := job.parallelism.fsdp) is not None:
        if fsdp.no_sync is not None:
            yield "parallelism.fsdp.no_sync", fsdp.no_sync
        if fsdp.ends not in {None, "root", usual["fsdp_ends"]}:
            yield "parallelism.fsdp.ends", fsdp.ends
    yield from _changed("performance.moe", own.moe, MoeSettings)
    if job.model.moe is not None:
        yield from _changed("model.moe", job.model.moe, Moe)


def _changed(path: str, section: Config, kind: type[Config]) -> Iterator[tuple[str, Any]]:
    for key, field in kind.model_fields.items():  # in their order: that of a set varies from process to process
        if key in section.model_fields_set and (value := getattr(section, key)) != field.default:
            yield f"{path}.{key}", value
