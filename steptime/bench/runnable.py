"""Which settings plain torch can run: those that are refused, and those that the device overrides.

A refusal is one line: path, problem, and the fix as a `--set`. Changes required by the device (its norm kernel) are made, and
reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from steptime.bench.built import Limit, model_limits, performance_limits
from steptime.job.fsdp_rules import reduce_dtype
from steptime.job.job import Job
from steptime.job.mesh import Parallelism
from steptime.job.sections import Data
from steptime.software.performance import ITEMSIZE, Performance

RecomputeChoice: TypeAlias = Literal["none", "selective", "full"]
RECOMPUTES: tuple[RecomputeChoice, ...] = ("none", "selective", "full")
FAMILIES = ("torch", "fsdp2")
NO_WORKSPACE = ":0:0"
"""CUBLAS_WORKSPACE_CONFIG for no workspace."""


def unsupported(job: Job, device_type: str) -> list[str]:
    """Parts of a job that plain torch cannot run on a device, one line each, with the fix; empty where it can run."""
    limits = list(model_limits(job))
    if job.software.family in FAMILIES:
        limits += [*performance_limits(job), *_kernels(job), *_states(job), *_layout(job), *_device(job, device_type)]
    else:  # its switches are another profile's
        fix = _set("software=torch", *(["precision=bf16"] if job.software.recipe else []))
        limits.append((True, f"performance.software: {job.software.name} is not plain torch", fix))
    return [f"{text}; {fix}" for broken, text, fix in limits if broken]


def _kernels(job: Job) -> Iterator[Limit]:
    """Options of the layers."""
    s, plan = job.software, job.recompute
    settings = s.settings()
    text = "performance.activation_impl: torch has no fused gated activation"
    yield s.kernels.activation_impl == "fused" and job.model.glu, text, _set("activation_impl=composite")
    text = f"performance.rope_impl: torch applies rotary embeddings in separate kernels (got {s.kernels.rope_impl})"
    yield s.kernels.rope_impl != "composite" and job.model.rotary_embeds, text, _set("rope_impl=composite")
    text = "performance.softmax_impl: the benchmark's unfused attention runs one softmax kernel"
    yield s.kernels.softmax_impl != "fused" and s.kernels.attention_impl == "unfused", text, _set("softmax_impl=fused")
    for key in ("sp_regather", "grad_accumulation_fusion", "deallocate_pipeline_outputs", "cuda_graphs"):
        yield bool(settings[key]), f"performance.{key}: not available in plain torch", _set(f"{key}=false")
    text = f"performance.recompute.modules: only core_attn (got {', '.join(sorted(map(str, plan.modules)))})"
    yield bool(plan.modules - {"core_attn"}), text, _set("recompute=null", "activation_checkpointing_type=selective")


def _states(job: Job) -> Iterator[Limit]:
    """Dtypes of parameters, gradients and optimizer states."""
    s, size = job.software, job.software.state_bytes
    one = size.params == size.gradients == size.moments / 2.0 and size.master == 0.0
    yield s.states.optimizer != "adamw", "performance.optimizer: the benchmark runs AdamW only", _set("optimizer=adamw")
    text = "performance: plain AdamW keeps gradients and moments in the parameters' dtype, without master weights"
    dtype = s.states.param_dtype
    fix = _set(f"main_grad_dtype={dtype}", f"moment_dtype={dtype}", "master_dtype=none")
    yield not one, text, fix
    sharded = s.family == "fsdp2" and job.parallelism.dp > 1
    text = (
        f"performance.param_dtype: {dtype} parameters in {s.compute_dtype} compute need FSDP2 over more than one rank"
    )
    same = dtype in {"compute", s.compute_dtype}
    yield one and not same and not sharded, text, _set(*(f"{key}={s.compute_dtype}" for key in _DTYPES))


_DTYPES = ("param_dtype", "main_grad_dtype", "moment_dtype")


def _layout(job: Job) -> Iterator[Limit]:
    """How the job is distributed."""
    p, family = job.parallelism, job.software.family
    alone = "--set parallelism."
    yield p.cp > 1, f"parallelism.cp: the benchmark does not run context parallelism (got {p.cp})", f"{alone}cp=1"
    yield job.cross_dc is not None, "cross_dc: the benchmark runs in one data center only", "--set cross_dc=null"
    yield (
        family == "torch" and job.zero_level > 0,
        "parallelism.zero_level: DDP does not shard states",
        f"{alone}zero_level=0",
    )
    text = "parallelism.dp: DDP cannot be combined with tensor parallelism"
    yield family == "torch" and p.dp > 1 and p.tp > 1, text, "--set performance.software=fsdp2"
    text = (
        f"parallelism.schedule: torch's 1F1B needs as many micro-batches as stages (got {job.microbatches} for {p.pp})"
    )
    named = f"parallelism.schedule: the benchmark runs torch's GPipe, 1F1B and interleaved 1F1B (got {job.schedule})"
    yield job.schedule not in {"gpipe", "1f1b", "interleaved"} and p.pp > 1, named, f"{alone}schedule=null"
    yield job.schedule == "1f1b" and p.pp > 1 and job.microbatches < p.pp, text, f"{alone}schedule=gpipe"
    text = "model.tie_embeddings: torch's pipelining does not synchronize the copies"
    yield job.model.tie_embeddings and p.pp > 1, text, "--set model.tie_embeddings=false"
    text = "model.learned_positions: not supported with tensor parallelism in the benchmark"
    yield job.model.learned_positions and p.tp > 1, text, f"{alone}tp=1"
    text = "model.dropout: tensor-parallel ranks would draw different masks"
    drops = [f"--set model.{key}=0" for key in ("dropout", "attention_dropout") if getattr(job.model, key)]
    yield bool(drops) and p.tp > 1, text, " ".join(drops)
    text = "parallelism.fsdp.version: the benchmark runs FSDP2, not FullyShardedDataParallel"
    yield p.fsdp is not None and p.fsdp.version != 2, text, f"{alone}fsdp.version=2"
    text = "parallelism.fsdp.prefetch: fully_shard prefetches one group"
    yield p.fsdp is not None and p.fsdp.prefetch != 1, text, f"{alone}fsdp.prefetch=1"


def _device(job: Job, device_type: str) -> Iterator[Limit]:
    """Features for which the device has no kernel."""
    s = job.software
    wide = device_type == "cuda" and s.compute_dtype == "fp32" and s.kernels.attention_impl == "flash"
    text = "performance.precision: flash attention on CUDA needs bf16 or fp16"
    yield wide, text, _set("precision=bf16")


def _set(*changes: str) -> str:
    """The arguments that change keys of `performance`."""
    return " ".join(f"--set performance.{change}" for change in changes)


def as_run(job: Job, device_type: str) -> tuple[Job, list[str]]:
    """The job as the device runs it, and what that changed, one line each.

    F.rms_norm is one kernel on a GPU and several on a CPU; a CPU's flash attention has no dropout, its products no workspace.
    """
    changes: dict[str, Any] = {}
    notes: list[str] = []
    impl = "composite" if device_type == "cpu" else "fused"
    if job.software.kernels.norm_impl != impl and job.model.norm == "rmsnorm":
        changes["performance.norm_impl"] = impl
        notes.append(f"performance.norm_impl: {impl}, since F.rms_norm runs so on {device_type}")
    if device_type == "cpu" and (job.model.dropout or job.model.attention_dropout):
        changes |= {"model.dropout": 0.0, "model.attention_dropout": 0.0}
        notes.append("model.dropout: 0, since flash attention on a CPU has no dropout")
    workspaces = job.software.compute_capability and job.software.buffers.cublas_workspace != NO_WORKSPACE
    if device_type == "cpu" and workspaces:
        changes["performance.cublas_workspace"] = NO_WORKSPACE
        notes.append("performance.cublas_workspace: none, since a CPU has no cuBLAS")
    if job.software.states.clip_grad:
        changes["performance.clip_grad"] = False
        notes.append("performance.clip_grad: false, since the benchmark does not clip gradients")
    return (job.replace(**changes) if changes else job), notes


def peak_differences(job: Job, device_type: str) -> list[str]:
    """Known reasons why the measured peak of a step may differ from the estimate; empty where it is equal to the byte."""
    p, s = job.parallelism, job.software
    cpu, reduce = device_type == "cpu", ITEMSIZE[reduce_dtype(p.fsdp, s)]
    sharded = s.family == "fsdp2" and p.dp > 1
    reasons = {
        "tensor parallelism: DTensor keeps additional copies": p.tp > 1,
        "pipelining: the schedule keeps receive buffers and outputs": p.pp > 1,
        "FSDP2: target ids are kept through forward, 8 bytes per token": sharded,
        "FSDP2: with few shards a reduced gradient is as large as its source": sharded
        and reduce * p.replicas / p.dp >= s.itemsize,
        "full recomputation: a bias gradient is summed after its input is freed": job.model.bias
        and job.recompute.granularity == "full",
        "CPU: LayerNorm keeps statistics in the compute dtype": cpu
        and job.model.norm == "layernorm"
        and s.itemsize < ITEMSIZE["fp32"],
        "CPU: temporaries of RMSNorm's backward are not modeled": cpu and job.model.norm == "rmsnorm",
        "allocator: blocks are rounded up, and cuBLAS keeps a workspace": device_type == "cuda",
    }
    return [reason for reason, holds in reasons.items() if holds]


def layout_name(job: Job) -> str:
    """The name of the layout: single, ddp, fsdp2, hsdp, tp, pp, or several joined: fsdp2+tp."""
    p = job.parallelism
    sharded = "hsdp" if p.replicas > 1 else "fsdp2"
    parts = {(sharded if job.software.family == "fsdp2" else "ddp"): p.dp, "tp": p.tp, "pp": p.pp}
    return "+".join(name for name, ranks in parts.items() if ranks > 1) or "single"


def alone(job: Job, recompute: RecomputeChoice = "none", device_type: str = "cpu") -> Job:
    """The job's model and micro-batch on one device, one micro-batch a step, under the profile torch with the job's kernels.

    Parameters are in the compute dtype, which is what FSDP2 gathers them in.
    """
    s, data = job.software, job.data
    kept = ("attention_impl", "norm_impl", "activation_impl", "loss_impl")
    performance = {key: getattr(s.kernels, key) for key in kept} | {
        "software": "torch",
        "precision": s.compute_dtype,
        "activation_checkpointing_type": recompute,
    }
    one = Job(
        model=job.model,
        parallelism=Parallelism.model_validate({"tp": 1, "pp": 1, "dp": 1}),
        performance=Performance.model_validate(performance),
        data=Data(gbs=data.microbatch_sz, seqlen=data.seqlen, microbatch_sz=data.microbatch_sz),
        hardware=job.hardware,
    )
    return as_run(one, device_type)[0]
