"""A measured step compared with its estimate: tables, and the document of `3dtrn explain PLAN --trace FILE... --json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptime.base.rows import Time
from steptime.base.words import counted
from steptime.bench.profiler_trace.attribution import Attribution, PartRow, RankStep
from steptime.report.breakdown import part_name
from steptime.report.format import TIME, column, percent, seconds, unit_for
from steptime.report.table import Fact, FactList, ReportSection, Table

SCHEMA = "3dtrn-trace/1"
_KERNELS = 5
"""Number of the largest memory-bound kernels that are named."""
_NAME = 44
_WORDS = {
    "idle": "idle: nothing ran",
    "launch": "launching, device idle",
    "optimizer": "optimizer step",
    "pp_comm": "pipeline sends, waits, bubble",
    "other_comm": "other communication",
    "ep_comm": "expert-parallel communication",
}


def sections(found: Attribution, predicted: Time) -> list[ReportSection]:
    """Predicted and measured parts, largest difference first; then communication, ranks, kernels and assumptions."""
    tables: list[ReportSection] = [_parts(found, predicted)]
    if found.busiest.collectives:
        tables.append(_communication(found))
    if len(found.ranks) > 1:
        tables.append(_ranks(found))
    if found.busiest.kernels:
        tables.append(_kernels(found))
    return [*tables, FactList("notes", [Fact("-", [note]) for note in found.notes])]


def _name(part: str) -> str:
    return _WORDS.get(part) or part_name(part)


def _parts(found: Attribution, predicted: Time) -> Table:
    """Exposed seconds of every part; they sum to the step on both sides."""
    rank, step = found.busiest, found.busiest.step_s
    unit = unit_for(max(step, predicted.step_s), TIME)
    rows = [row for row in found.rows if max(row.predicted_s, row.measured_s) > 1e-12 * step]
    total = [predicted.step_s, step, step - predicted.step_s]
    shown = _columns([[row.predicted_s, row.measured_s, row.difference_s] for row in rows] + [total], unit.size)
    cells = [[_name(row.part), *line, _share(row.difference_s, step)] for row, line in zip(rows, shown, strict=False)]
    cells += [[], ["step", *shown[-1], _share(total[2], step)]]
    when = "the whole trace" if rank.step is None else f"step {rank.step}"
    notes = [
        f"rank {rank.rank}: of {counted(len(found.ranks), 'traced rank')} it computes longest, and others wait for it",
        "difference: measured - predicted; of step: its share of the measured step",
    ]
    if rank.step is not None:
        notes.insert(0, f"step {rank.step}: of {counted(rank.steps, 'profiled step')} the one of median length")
    title = f"predicted and measured, {when} of rank {rank.rank} ({unit.name})"
    return Table(title, ["", "predicted", "measured", "difference", "of step"], cells, notes)


def _communication(found: Attribution) -> Table:
    """Time of each collective, and its exposed part."""
    rank = found.busiest
    unit = unit_for(rank.step_s, TIME)
    names, figures = [], []
    for row in found.rows:
        calls = [call for call in rank.collectives if call.part == row.part]
        if calls or row.predicted_hidden_s:
            names.append(_name(row.part))
            total = row.measured_s + row.measured_hidden_s
            figures.append([total, row.measured_hidden_s, row.measured_s, row.predicted_hidden_s])
            names += [f"  {call.calls:,} x {call.kind.replace('_', '-')}" for call in calls]
            figures += [[call.total_s, call.hidden_s, call.exposed_s, 0.0] for call in calls]
    shown = _columns(figures, unit.size)
    rows = [[name, *line[:3], "" if name.startswith(" ") else line[3]] for name, line in zip(names, shown, strict=True)]
    header = ["", "total", "hidden", "exposed", "predicted hidden"]
    notes = ["hidden: overlapped with compute or with other communication; kinds that run at the same time overlap"]
    return Table(f"communication of rank {rank.rank} ({unit.name})", header, rows, notes)


def _ranks(found: Attribution) -> Table:
    """Least and most of each part over the ranks."""
    step = max(rank.step_s for rank in found.ranks)
    unit = unit_for(step, TIME)
    parts = [row.part for row in found.rows if any(rank.parts_s.get(row.part) for rank in found.ranks)]
    rows: list[list[str]] = []
    for part in [*parts, None]:
        each = [(rank.step_s if part is None else rank.parts_s.get(part, 0.0), rank.rank) for rank in found.ranks]
        (least, a), (most, b) = min(each), max(each)
        low, high = column([least, most], unit.size)
        rows += [[]] if part is None else []
        rows.append(["step" if part is None else _name(part), low, str(a), high, str(b)])
    title = f"over {counted(len(found.ranks), 'rank')}, each its own step of median length ({unit.name})"
    return Table(title, ["", "least", "rank", "most", "rank"], rows)


def _kernels(found: Attribution) -> Table:
    """The largest kernels that are in no table of kernel names, a possible cause of unexplained memory-bound time."""
    rank = found.busiest
    widest = rank.kernels[:_KERNELS]
    unit = unit_for(rank.step_s, TIME)
    shown = column([row.seconds for row in widest], unit.size)
    rows = [
        [_short(row.name), f"{row.calls:,}" if row.calls else "", time, percent(row.seconds / rank.step_s)]
        for row, time in zip(widest, shown, strict=True)
    ]
    rest = len(rank.kernels) - len(widest)
    notes = [f"{rest:,} more names take {seconds(sum(row.seconds for row in rank.kernels[_KERNELS:]))}"] if rest else []
    header = ["", "calls", unit.name, "share"]
    if not any(row.calls for row in widest):
        rows, header = [[row[0], *row[2:]] for row in rows], ["", *header[2:]]
    return Table("largest kernels counted as memory-bound", header, rows, notes)


def _short(name: str) -> str:
    """A kernel's name without its common parts: return type, namespaces, and the end."""
    text = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return text if len(text) <= _NAME else text[: _NAME - 3] + "..."


def _columns(rows: Sequence[Sequence[float]], size: float) -> list[list[str]]:
    """All figures with equal decimals, so that differences can be checked easily."""
    flat = column([value for row in rows for value in row], size, 4)
    width = len(rows[0])
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def _share(value: float, step: float) -> str:
    return percent(value / step, signed=True) if step else ""


def to_dict(found: Attribution, predicted: Time) -> dict[str, Any]:
    """The attribution as plain data, seconds and bytes (schema "3dtrn-trace/1")."""
    return {
        "schema": SCHEMA,
        "rank": found.busiest.rank,
        "predicted": _seconds(predicted),
        "measured": _seconds(found.busiest),
        "rows": [_row(row, found.busiest.step_s) for row in found.rows],
        "ranks": [
            {
                "rank": rank.rank,
                "file": rank.path,
                "step": rank.step,
                "profiled_steps": rank.steps,
                **_seconds(rank),
                "collectives": [call._asdict() for call in rank.collectives],
                "memory_bound": [kernel._asdict() for kernel in rank.kernels[:_KERNELS]],
            }
            for rank in found.ranks
        ],
        "assumptions": list(found.notes),
    }


def _seconds(of: Time | RankStep) -> dict[str, Any]:
    """A step and its parts."""
    return {"step_s": of.step_s, "parts_s": dict(of.parts_s), "hidden_s": dict(of.hidden_s)}


def _row(row: PartRow, step: float) -> dict[str, Any]:
    share = row.difference_s / step if step else 0.0
    return row._asdict() | {"difference_s": row.difference_s, "difference_of_step": share}
