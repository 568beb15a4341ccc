"""Errors of peak memory by mechanism: which parts of the memory model are covered by measured runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from steptime.job.edit import value_at
from steptime.validation.judgement import Judgement
from steptime.validation.slices import memory_errors, model_kind
from steptime.validation.stats import plain, stats

Shows = Callable[[Judgement], bool]
"""Whether a run has a mechanism."""


def said(j: Judgement, path: str) -> Any:
    """The value at a dotted path of a row's config; None where it has none."""
    return value_at(j.config, path)


def _is(path: str, *values: object) -> Shows:
    return lambda j: said(j, path) in values


def _has(path: str) -> Shows:
    return lambda j: bool(said(j, path))


def _above_one(path: str) -> Shows:
    return lambda j: int(said(j, path) or 1) > 1


def _not_interleaved(j: Judgement) -> bool:
    return _above_one("parallelism.pp")(j) and not _above_one("parallelism.vpp")(j)


def _zero(level: int) -> Shows:
    return lambda j: _above_one("parallelism.dp")(j) and said(j, "parallelism.zero_level") == level


def _recomputes(kind: str) -> Shows:
    """none, selective (also among other words) or full."""

    def shows(j: Judgement) -> bool:
        word = said(j, "performance.recompute.granularity") or said(j, "performance.activation_checkpointing_type")
        return kind in (word or "none")

    return shows


def is_fsdp(j: Judgement) -> bool:
    """Megatron-FSDP, whose levels are those of ZeRO."""
    return int(said(j, "parallelism.zero_level") or 0) >= 2


def _flash(j: Judgement, backend: str) -> bool:
    if said(j, "performance.attention_impl") != "flash":
        return False
    backend_said = said(j, "performance.attention_backend")
    older = j.accelerator.startswith("a100")
    blackwell = j.accelerator.startswith(("gb", "b")) and bool(said(j, "performance.deterministic"))
    batch_first = backend_said == "flash" or (backend_said == "auto" and (older or blackwell))
    return batch_first == (backend == "flash")


MECHANISMS: dict[str, Shows] = {
    "one device": lambda j: j.row.text("n_gpus") == "1",
    "tensor parallel": _above_one("parallelism.tp"),
    "pipeline, not interleaved": _not_interleaved,
    "pipeline, interleaved": lambda j: _above_one("parallelism.pp")(j) and _above_one("parallelism.vpp")(j),
    "recompute none": _recomputes("none"),
    "recompute selective": _recomputes("selective"),
    "recompute full": _recomputes("full"),
    "ZeRO 0": _zero(0),
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
    "FSDP": lambda j: "fsdp" in (said(j, "parallelism") or {}),
    "fp8": lambda j: j.precision in {"fp8", "mxfp8", "nvfp4"},
    "context parallel": _above_one("parallelism.cp"),
    "mixture of experts": lambda j: model_kind(j).startswith("moe") or bool(said(j, "model.moe")),
}
"""Mechanisms of a run; it can show several. Levels of ZeRO as stated by the source."""

JOB_MECHANISMS: dict[str, Shows] = {
    "no model parallelism": lambda j: not any(_above_one(f"parallelism.{axis}")(j) for axis in ("tp", "pp", "cp")),
    "tensor parallel": _above_one("parallelism.tp"),
    "sequence parallel": _has("parallelism.sp"),
    "pipeline, not interleaved": _not_interleaved,
    "pipeline, interleaved": _above_one("parallelism.vpp"),
    "context parallel": _above_one("parallelism.cp"),
    "distributed optimizer": _is("parallelism.zero_level", 1),
    "replicated states": _is("parallelism.zero_level", 0),
    "replicated shards": _above_one("parallelism.replicas"),
    "Megatron-FSDP, as ZeRO": is_fsdp,
    "bf16": _is("performance.precision", "bf16"),
    "fp16, fp32 gradient copies": _is("performance.precision", "fp16"),
    "fp8": lambda j: "fp8" in str(said(j, "performance.precision")),
    "precision-aware optimizer": _is("performance.master_dtype", "remainder"),
    "attention by cuDNN": lambda j: _flash(j, "cudnn"),
    "attention, batch first": lambda j: _flash(j, "flash"),
    "unfused attention scores, TE": lambda j: (
        _is("performance.attention_impl", "unfused")(j) and not _is("performance.scores_in_buffer", True)(j)
    ),
    "unfused attention scores, Megatron buffer": _is("performance.scores_in_buffer", True),
    "no attention mask": _is("performance.attention_mask", False),
    "dropout": _has("model.dropout"),
    "cross entropy, native": _is("performance.loss_impl", "native"),
    "cross entropy, TE": _is("performance.loss_impl", "fused"),
    "deferred weight gradients of the head": _has("performance.deferred_head_wgrads"),
    "cuBLAS workspace as set": lambda j: not _is("performance.cublas_workspace", "default")(j),
    "cuBLAS workspace, default": _is("performance.cublas_workspace", "default"),
    "userbuffers": _above_one("performance.te_workspaces"),
    "expandable segments": _is("performance.expandable_segments", True),
    "recompute selective": _is("performance.recompute.granularity", "selective"),
    "recompute full": _is("performance.recompute.granularity", "full"),
}
"""Mechanisms of a job of Megatron-LM's tests."""

EXPERT_MECHANISMS: dict[str, Shows] = {
    "expert parallel": _above_one("parallelism.ep"),
    "expert tensor parallel": _above_one("parallelism.etp"),
    "context parallel": _above_one("parallelism.cp"),
    "pipeline": _above_one("parallelism.pp"),
    "distributed optimizer": _is("parallelism.zero_level", 1),
    "replicated shards": _above_one("parallelism.replicas"),
    "dispatcher alltoall": _is("performance.moe.dispatcher", "alltoall"),
    "dispatcher allgather": _is("performance.moe.dispatcher", "allgather"),
    "dispatcher flex": _is("performance.moe.dispatcher", "flex"),
    "fused permutation": _is("performance.moe.permute_fusion", True),
    "deterministic reductions of rows": _is("performance.moe.deterministic", True),
    "grouped GEMM": _is("performance.moe.grouped_gemm", True),
    "one GEMM per expert": _is("performance.moe.grouped_gemm", False),
    "fp32 router": _is("performance.moe.router_dtype", "fp32"),
    "load-balancing loss": _is("model.moe.load_balancing", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "sinkhorn": _is("model.moe.load_balancing", "sinkhorn"),
    "sigmoid scores": _is("model.moe.score_function", "sigmoid"),
    "shared experts": _has("model.moe.shared_expert_inter_sz"),
    "shared experts, overlapped": _is("performance.moe.shared_expert_overlap", True),
    "capacity": _has("model.moe.capacity_factor"),
    "latent attention": _is("model.attention.kind", "mla"),
    "multi-token prediction": _has("model.mtp"),
    "activation offloading": _has("performance.offload_modules"),
    "all-to-all overlapped with another micro-batch": _has("performance.overlap.ep"),
    "recompute selective": _is("performance.recompute.granularity", "selective"),
    "recompute full": _is("performance.recompute.granularity", "full"),
}
"""Mechanisms of its mixtures of experts."""


def memory_by_mechanism(judged: Sequence[Judgement]) -> dict[str, Any]:
    """Stats of the memory error by mechanism, and by how a peak was read (`how_read`)."""
    known = [j for j in judged if j.memory_error is not None]
    return {
        name: {how: _figures(j for j in known if shows(j) and how_read(j) == how) for how in READINGS}
        for name, shows in MECHANISMS.items()
    }


READINGS = ("allocated", "ci", "otherwise")


def how_read(j: Judgement) -> str:
    """One of `READINGS`: torch's peak allocation of a run, of a small test job, or any other reading."""
    if j.metric != "allocated":
        return "otherwise"
    return "ci" if j.allocator is not None else "allocated"


def _figures(rows: Iterable[Judgement]) -> dict[str, Any]:
    return plain(stats(memory_errors(rows)))
