"""`3dtrn scale`: step time over data-parallel degrees, and with `--best` the best layout of each number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptime.answer.result import Estimate
from steptime.base.words import counted
from steptime.job.job import Job
from steptime.report.details import scaling
from steptime.report.format import GIB, percent, seconds
from steptime.report.layout_rows import recomputed
from steptime.report.search_tables import row
from steptime.report.table import Table
from steptime.search.search import Search

_HEAD = ["devices", "step", "efficiency", "MFU", "GiB", "tp", "cp", "pp", "vpp", "dp", "mbs", "zero", "recompute"]


def tables(estimate: Estimate) -> list[Table]:
    """Fixed work per device, where the batch grows with dp; and a fixed batch, where the work per device shrinks."""
    dp = estimate.job.parallelism.dp
    title = f"strong scaling (the same batch of {counted(estimate.job.data.gbs, 'sequence')})"
    return [scaling(estimate.weak_scaling, dp), scaling(estimate.strong_scaling, dp, title)]


def best_of_each(job: Job, found: Sequence[tuple[int, Search | str]]) -> Table:
    """A row for each size; for those that cannot hold the job, what the nearest layout lacks."""
    base = _base(found)
    lines: list[list[str]] = []
    for size, one in found:
        best = one.best if isinstance(one, Search) else None
        if best is None:
            lines.append([f"{size:,}: {one if isinstance(one, str) else lacks(one)}"])
            continue
        p, e = best.job.parallelism, best.estimate
        share = percent(e.throughput.tokens_per_s_per_device / base)
        axes = [p.tp, p.cp, p.pp, p.vpp, p.dp, best.job.data.microbatch_sz, best.job.zero_level]
        memory = f"{best.held_bytes / GIB:.1f}"
        mfu = percent(e.throughput.mfu).removesuffix(" %")
        lines.append([f"{size:,}", seconds(e.step_s), share, mfu, memory, *map(str, axes), recomputed(best)])
    title = f"best layout of each size, gbs {job.data.gbs:,} x {job.data.seqlen:,}"
    return Table(title, _HEAD, lines, ["efficiency: tokens/s/device relative to the smallest size that fits"])


def _base(found: Sequence[tuple[int, Search | str]]) -> float:
    """Tokens per second and device of the smallest size that fits."""
    first = next((one.best for _, one in found if isinstance(one, Search) and one.best), None)
    return first.estimate.throughput.tokens_per_s_per_device if first else 1.0


def lacks(one: Search) -> str:
    """The memory that the smallest layout lacks."""
    nearest = one.layout(one.nearest[2], fitting=False) if one.nearest is not None else None
    if nearest is None:
        return "does not fit"
    short = nearest.held_bytes - nearest.estimate.memory.capacity_bytes
    return f"does not fit; the nearest layout needs {short / GIB:.1f} GiB more"


def best_rows(found: Sequence[tuple[int, Search | str]]) -> list[dict[str, Any]]:
    """The same as data."""
    base = _base(found)
    rows: list[dict[str, Any]] = []
    for size, one in found:
        best = one.best if isinstance(one, Search) else None
        if best is not None:
            share = best.estimate.throughput.tokens_per_s_per_device / base
            rows.append({"devices": size, "fits": True, "efficiency": share} | row(best))
        else:
            why = one if isinstance(one, str) else lacks(one)
            rows.append({"devices": size, "fits": False, "efficiency": None, "why": why})
    return rows
