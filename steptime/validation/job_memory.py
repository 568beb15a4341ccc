"""Memory of real GPU jobs compared with the estimate: persisting bytes and peaks, by mechanism, machine and split.

The rows are those of Megatron-LM's own tests, in which torch's allocator was read to the byte (`ci_jobs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from steptime.base.grouping import grouped
from steptime.validation.ci_jobs import AllocatorMemory, is_ci
from steptime.validation.judgement import Judgement
from steptime.validation.mechanisms import EXPERT_MECHANISMS, JOB_MECHANISMS, is_fsdp, said

LARGE = 10e9
"""Peak above which a job counts as large [B]."""
SPLITS = ("test", "fit")
EXPERTS = "mixture of experts"


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
    readings = [j.allocator for j in rows if j.allocator is not None]
    return {
        "persisting": figures([_error(found) for item in readings if (found := item.persisting)]),
        "peak": figures([error for j in rows if (error := j.memory_error) is not None]),
        "first_peak": figures([_error(found) for item in readings if (found := item.first_peak)]),
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

    `headline` is of dense models; it leaves out rows that are judged separately (`AllocatorMemory.excluded`) and those of
    Megatron-FSDP, which is judged as ZeRO.
    """
    judged = list(judged)
    known = [j for j in judged if j.skipped is None and j.allocator is not None]
    plain = [j for j in known if not _allocator_memory(j).excluded]
    leading = [j for j in plain if kind_of(j) == "dense"]
    routed = [j for j in plain if kind_of(j) == EXPERTS]
    told = [j for j in plain if kind_of(j) in {"dense", "Megatron-FSDP"}]
    return {
        "rows": len(known),
        "headline": by_split(leading),
        "large": by_split([j for j in leading if (j.measured_bytes or 0.0) > LARGE]),
        "mechanisms": {name: by_split([j for j in told if shows(j)]) for name, shows in JOB_MECHANISMS.items()},
        "kinds": groups(plain, kind_of),
        "experts": {name: by_split([j for j in routed if shows(j)]) for name, shows in EXPERT_MECHANISMS.items()},
        "machines": groups(leading, lambda j: f"{j.row.text('gpu')}, {j.row.text('container')}"),
        "apart": groups([j for j in known if _allocator_memory(j).excluded], lambda j: _allocator_memory(j).excluded),
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
    if is_fsdp(j):
        return "Megatron-FSDP"
    if said(j, "model.moe"):
        return EXPERTS
    if said(j, "model.layers") or said(j, "model.mamba"):
        return "hybrid"
    return "latent attention" if said(j, "model.attention.kind") == "mla" else "dense"


def _allocator_memory(j: Judgement) -> AllocatorMemory:
    assert j.allocator is not None
    return j.allocator
