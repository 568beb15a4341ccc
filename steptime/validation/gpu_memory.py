"""Memory of real GPU jobs compared with the estimate: persisting bytes and peaks, by mechanism, machine and split.

The rows are those of Megatron-LM's own tests, in which torch's allocator was read to the byte (`ci_jobs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from steptime.base.grouping import grouped
from steptime.validation.ci_jobs import HeldMemory, is_ci
from steptime.validation.judgement import Judgement

LARGE = 10e9
"""Peak above which a job counts as large [B]."""
SPLITS = ("test", "fit")
EXPERTS = "mixture of experts"


def _said(j: Judgement, section: str, key: str) -> Any:
    return (j.config or {}).get(section, {}).get(key)


def _above_one(axis: str) -> Callable[[Judgement], bool]:
    return lambda j: int(_said(j, "parallelism", axis) or 1) > 1


def _is(key: str, *values: object) -> Callable[[Judgement], bool]:
    return lambda j: _said(j, "performance", key) in values


def _recomputes(j: Judgement, kind: str) -> bool:
    said = _said(j, "performance", "recompute")
    return bool(said) and said.get("granularity") == kind


def _fsdp(j: Judgement) -> bool:
    return int(_said(j, "parallelism", "zero_level") or 0) >= 2


def _flash(j: Judgement, backend: str) -> bool:
    if _said(j, "performance", "attention_impl") != "flash":
        return False
    said = _said(j, "performance", "attention_backend")
    older = j.accelerator.startswith("a100")
    blackwell = j.accelerator.startswith(("gb", "b")) and bool(_said(j, "performance", "deterministic"))
    batch_first = said == "flash" or (said == "auto" and (older or blackwell))
    return batch_first == (backend == "flash")


MECHANISMS: dict[str, Callable[[Judgement], bool]] = {
    "no model parallelism": lambda j: not any(_above_one(axis)(j) for axis in ("tp", "pp", "cp")),
    "tensor parallel": _above_one("tp"),
    "sequence parallel": lambda j: bool(_said(j, "parallelism", "sp")),
    "pipeline, not interleaved": lambda j: _above_one("pp")(j) and not _above_one("vpp")(j),
    "pipeline, interleaved": _above_one("vpp"),
    "context parallel": _above_one("cp"),
    "distributed optimizer": lambda j: _said(j, "parallelism", "zero_level") == 1,
    "replicated states": lambda j: _said(j, "parallelism", "zero_level") == 0,
    "replicated shards": _above_one("replicas"),
    "Megatron-FSDP, as ZeRO": _fsdp,
    "bf16": _is("precision", "bf16"),
    "fp16, fp32 gradient copies": _is("precision", "fp16"),
    "fp8": lambda j: "fp8" in str(_said(j, "performance", "precision")),
    "precision-aware optimizer": _is("master_dtype", "remainder"),
    "attention by cuDNN": lambda j: _flash(j, "cudnn"),
    "attention, batch first": lambda j: _flash(j, "flash"),
    "unfused attention scores, TE": lambda j: (
        _is("attention_impl", "unfused")(j) and not _is("scores_in_buffer", True)(j)
    ),
    "unfused attention scores, Megatron buffer": _is("scores_in_buffer", True),
    "no attention mask": _is("attention_mask", False),
    "dropout": lambda j: bool(_said(j, "model", "dropout")),
    "cross entropy, native": _is("loss_impl", "native"),
    "cross entropy, TE": _is("loss_impl", "fused"),
    "deferred weight gradients of the head": lambda j: bool(_said(j, "performance", "deferred_head_wgrads")),
    "cuBLAS workspace as set": lambda j: not _is("cublas_workspace", "default")(j),
    "cuBLAS workspace, default": _is("cublas_workspace", "default"),
    "userbuffers": lambda j: int(_said(j, "performance", "te_workspaces") or 0) > 1,
    "expandable segments": _is("expandable_segments", True),
    "recompute selective": lambda j: _recomputes(j, "selective"),
    "recompute full": lambda j: _recomputes(j, "full"),
}
"""Mechanisms of a job; it can show several."""


def _routed(key: str, *values: object) -> Callable[[Judgement], bool]:
    return lambda j: (_said(j, "model", "moe") or {}).get(key) in values


def _run(key: str, *values: object) -> Callable[[Judgement], bool]:
    return lambda j: (_said(j, "performance", "moe") or {}).get(key) in values


EXPERT_MECHANISMS: dict[str, Callable[[Judgement], bool]] = {
    "expert parallel": _above_one("ep"),
    "expert tensor parallel": _above_one("etp"),
    "context parallel": _above_one("cp"),
    "pipeline": _above_one("pp"),
    "distributed optimizer": lambda j: _said(j, "parallelism", "zero_level") == 1,
    "replicated shards": _above_one("replicas"),
    "dispatcher alltoall": _run("dispatcher", "alltoall"),
    "dispatcher allgather": _run("dispatcher", "allgather"),
    "dispatcher flex": _run("dispatcher", "flex"),
    "fused permutation": _run("permute_fusion", True),
    "deterministic reductions of rows": _run("deterministic", True),
    "grouped GEMM": _run("grouped_gemm", True),
    "one GEMM per expert": _run("grouped_gemm", False),
    "fp32 router": _run("router_dtype", "fp32"),
    "load-balancing loss": _routed("load_balancing", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "sinkhorn": _routed("load_balancing", "sinkhorn"),
    "sigmoid scores": _routed("score_function", "sigmoid"),
    "shared experts": lambda j: bool((_said(j, "model", "moe") or {}).get("shared_expert_inter_sz")),
    "shared experts, overlapped": _run("shared_expert_overlap", True),
    "capacity": lambda j: bool((_said(j, "model", "moe") or {}).get("capacity_factor")),
    "latent attention": lambda j: (_said(j, "model", "attention") or {}).get("kind") == "mla",
    "multi-token prediction": lambda j: bool(_said(j, "model", "mtp")),
    "activation offloading": lambda j: bool(_said(j, "performance", "offload_modules")),
    "all-to-all overlapped with another micro-batch": lambda j: bool(
        (_said(j, "performance", "overlap") or {}).get("ep")
    ),
    "recompute selective": lambda j: _recomputes(j, "selective"),
    "recompute full": lambda j: _recomputes(j, "full"),
}
"""Mechanisms of mixtures of experts."""


def figures(errors: Sequence[float]) -> dict[str, Any]:
    """Number, and median, mean, p90 and worst absolute error; every row has one vote, since no two have the same layout."""
    if not errors:
        return {"rows": 0, "median": None, "mean": None, "p90": None, "worst": None}
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(sizes),
        "median": median(sizes),
        "mean": fmean(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "worst": sizes[-1],
    }


def of_rows(rows: Sequence[Judgement]) -> dict[str, Any]:
    """Errors of the persisting bytes, of the peak and of the first step's peak."""
    held = [j.held for j in rows if j.held is not None]
    return {
        "persisting": figures([_error(found) for item in held if (found := item.persisting)]),
        "peak": figures([error for j in rows if (error := j.memory_error) is not None]),
        "first_peak": figures([_error(found) for item in held if (found := item.first_peak)]),
    }


def _error(pair: tuple[float, float]) -> float:
    measured, predicted = pair
    return predicted / measured - 1.0


def by_split(rows: Sequence[Judgement]) -> dict[str, Any]:
    """The same for each split."""
    return {split: of_rows([j for j in rows if j.row.text("split") == split]) for split in SPLITS}


def groups(rows: Sequence[Judgement], key: Callable[[Judgement], str]) -> dict[str, Any]:
    """The same by a key, the key with most rows first."""
    ordered = sorted(grouped(rows, key).items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: by_split(group) for name, group in ordered}


def gpu_memory(judged: Iterable[Judgement], worst: int) -> dict[str, Any]:
    """The `gpu_memory` of the summary of `3dtrn validate --json`.

    `headline` is of dense models; it leaves out rows that are judged separately (`HeldMemory.apart`) and those of Megatron-FSDP,
    which is judged as ZeRO.
    """
    judged = list(judged)
    known = [j for j in judged if j.skipped is None and j.held is not None]
    plain = [j for j in known if not _held(j).apart]
    leading = [j for j in plain if kind_of(j) == "dense"]
    routed = [j for j in plain if kind_of(j) == EXPERTS]
    told = [j for j in plain if kind_of(j) in {"dense", "Megatron-FSDP"}]
    return {
        "rows": len(known),
        "headline": by_split(leading),
        "large": by_split([j for j in leading if (j.measured_bytes or 0.0) > LARGE]),
        "mechanisms": {name: by_split([j for j in told if shows(j)]) for name, shows in MECHANISMS.items()},
        "kinds": groups(plain, kind_of),
        "experts": {name: by_split([j for j in routed if shows(j)]) for name, shows in EXPERT_MECHANISMS.items()},
        "machines": groups(leading, lambda j: f"{j.row.text('gpu')}, {j.row.text('container')}"),
        "apart": groups([j for j in known if _held(j).apart], lambda j: _held(j).apart),
        "worst": worst_rows(leading, worst),
        "worst_others": worst_rows([j for j in plain if kind_of(j) not in {"dense", "Megatron-FSDP"}], worst),
        "refused": refused(judged),
    }


def worst_rows(rows: Iterable[Judgement], count: int) -> list[dict[str, Any]]:
    """The rows with the largest errors of the peak."""
    ordered = sorted(rows, key=lambda j: (-abs(j.memory_error or 0.0), j.row.id))[:count]
    return [{"id": j.row.id, "split": j.row.text("split"), "memory_error": j.memory_error} for j in ordered]


def refused(judged: Iterable[Judgement]) -> dict[str, dict[str, int]]:
    """Number of jobs of each split without an estimate, by reason; most first."""
    found: dict[str, Counter[str]] = {}
    for j in judged:
        if j.skipped is not None and is_ci(j.row):
            found.setdefault(j.skipped, Counter())[j.row.text("split")] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    return {reason: {split: count[split] for split in SPLITS} for reason, count in ordered}


def kind_of(j: Judgement) -> str:
    """dense, Megatron-FSDP, or the kind of layers besides dense ones."""
    model = (j.config or {}).get("model", {})
    if _fsdp(j):
        return "Megatron-FSDP"
    if model.get("moe"):
        return EXPERTS
    if model.get("layers") or model.get("mamba"):
        return "hybrid"
    return "latent attention" if (model.get("attention") or {}).get("kind") == "mla" else "dense"


def _held(j: Judgement) -> HeldMemory:
    assert j.held is not None
    return j.held
