"""Errors summarized: the headline, the other trainers, the highest errors by slice, and what the analyses of them say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from steptime.validation.bands import fits_by_band, verdicts_of_runs
from steptime.validation.interval_coverage import near_80, summary_of
from steptime.validation.job_memory import gpu_memory
from steptime.validation.judgement import Judgement
from steptime.validation.mechanisms import memory_by_mechanism
from steptime.validation.ratios import ratios
from steptime.validation.regret import regret
from steptime.validation.slices import (
    SLICES,
    headline,
    leads,
    memory_errors,
    native,
    others,
    sliced,
    split_of,
    step_errors,
    told_by_source,
    with_experts,
)
from steptime.validation.stats import interval, plain, stats
from steptime.validation.yardsticks import baselines_of_groups, noise


def skip_kind(reason: str) -> str:
    """A reason without the row's own numbers, so that equal reasons can be counted."""
    first = re.sub(r" \(got .*?\)(?=;|$| with)", "", reason).partition("; ")[0]
    return re.sub(r"(?<=[ =])\d[\d,]*\b", "N", first).strip()


def fitting(judged: Sequence[Judgement]) -> dict[str, dict[str, int]]:
    """Runs that ended out of memory and runs that did not, and how many of each the estimate calls so.

    A run that fitted counts as right when its verdict is fits or tight; one that did not when it is tight or does_not_fit.
    """
    out = [j for j in judged if j.skipped is None and j.ran_out]
    sources = {j.row.group for j in out}
    ran = [j for j in judged if j.skipped is None and not j.ran_out and j.row.group in sources]
    return {
        "ran_out": {"rows": len(out), "right": sum(j.verdict != "fits" for j in out)},
        "ran": {"rows": len(ran), "right": sum(j.verdict != "does_not_fit" for j in ran)},
    }


def summarize(judged: Sequence[Judgement], worst: int) -> dict[str, Any]:
    """The `summary` of `3dtrn validate --json`; figures of step time unless they say memory.

    `step_time`, `by` and `split_interval_5_95` are of all rows that count; `headline`, `native`, `experts`, `other`: the groups.
    """
    counted = headline(judged)
    excluded = [j for j in judged if j.skipped is None and j.excluded is not None]
    skipped = Counter(skip_kind(j.skipped) for j in judged if j.skipped is not None)
    everything = group(counted, worst)
    by = everything["by"]
    medians = [figures["median"] for figures in by["source"].values()]
    leading = [j for j in counted if leads(j)]
    natives, rest = [j for j in counted if native(j)], [j for j in counted if others(j)]
    experts = [j for j in counted if with_experts(j)]
    return {
        "rows": len(judged),
        "judged": len(judged) - sum(skipped.values()),
        "skipped": sum(skipped.values()),
        "step_time": everything["step_time"],
        "headline": {"name": name_of(leading)} | group(leading, worst),
        "native": group(natives, worst) | told_by_source(natives),
        "experts": group(experts, worst) | told_by_source(experts),
        "other": group(rest, worst) | told_by_source(rest),
        "median_over_sources": median(medians) if medians else None,
        "by": by,
        "split_interval_5_95": everything["split_interval_5_95"],
        "apart": {key: plain(figures) for key, figures in sliced(excluded, lambda j: j.excluded or "").items()},
        "baselines": baselines_of_groups(counted),
        "noise": noise(judged),
        "ratios": ratios(judged),
        "regret": regret(judged),
        "memory": {
            key: plain(figures)
            for key, figures in sliced(judged, lambda j: f"{j.metric}, {j.row.group}", memory_errors).items()
        },
        "memory_by_mechanism": memory_by_mechanism(judged),
        "gpu_memory": gpu_memory(judged, worst),
        "intervals": (covered := summary_of(counted)),
        "intervals_near_80": {of: near_80(found)._asdict() for of, found in covered.items()},
        "fits": fitting(judged),
        "fits_by_band": fits_by_band(judged),
        "verdicts_of_runs": verdicts_of_runs(counted),
        "worst": everything["worst"],
        "skipped_by_reason": dict(skipped.most_common()),
    }


def name_of(leading: Sequence[Judgement]) -> str:
    """What the headline group consists of: a user's own rows, or those of NVIDIA's frameworks."""
    return "NVIDIA's frameworks" if any(j.row.published for j in leading) else "own runs"


def group(counted: Sequence[Judgement], worst: int) -> dict[str, Any]:
    """Figures of some of the counted rows: all, every split, every slice, intervals, and the worst by name."""
    by = {name: sliced(counted, key) for name, key in SLICES.items()}
    return {
        "step_time": plain(stats(step_errors(counted))) | {"interval_5_95": interval(step_errors(counted))},
        "by": {name: {key: plain(figures) for key, figures in found.items()} for name, found in by.items()},
        "split_interval_5_95": {
            name: interval(step_errors(j for j in counted if split_of(j) == name)) for name in by["split"]
        },
        "worst": [_row(j) for j in worst_rows(counted, worst)],
    }


def worst_rows(counted: Iterable[Judgement], n: int) -> list[Judgement]:
    """The n rows with the largest errors of step time."""
    judged = [(abs(error), j) for j in counted if (error := j.step_error) is not None]
    return [j for _, j in sorted(judged, key=lambda pair: (-pair[0], pair[1].row.id))[:n]]


def _row(j: Judgement) -> dict[str, Any]:
    return {
        "id": j.row.id,
        "split": j.row.text("split"),
        "step_time_error": j.step_error,
        "measured_tokens_per_s_per_gpu": j.measured_tokens_per_s,
        "predicted_tokens_per_s_per_gpu": j.predicted_tokens_per_s,
    }
