"""Breakdown of step time and memory: the sections below the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steptime.answer.result import Estimate
from steptime.base.rows import Overhead, StageMemory
from steptime.report.format import GIB, TIME, column, number, percent, seconds, unit_for
from steptime.report.palette import time_color
from steptime.report.table import Table
from steptime.schedule import placement

_BAR = 16
MEMORY_ROWS = (
    ("parameters", "params_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer states", "optimizer_bytes"),
    ("activations", "activations_bytes"),
    ("workspaces, buffers", "buffers_bytes"),
    ("transient at the peak", "passing_bytes"),
    ("allocated", "allocated_bytes"),
    ("reserved", "reserved_bytes"),
)
RECEIVE_BUFFERS = "buffers for rows of experts"
_SHOWN_STAGES = 5


def step_parts(estimate: Estimate) -> Table:
    """Seconds by part, largest first, with hidden work next to them; the parts sum to the step."""
    step, parts, hidden = estimate.time.step_s, estimate.time.parts_s, estimate.time.hidden_s
    names = shown_parts(estimate)
    unit = unit_for(step, TIME)
    total, widest = sum(parts.values()), max(parts.values())
    own = [parts.get(name, 0.0) for name in names]
    overlapped = [hidden.get(name, 0.0) for name in names]
    shown = column([*own, total, *overlapped], unit.size, 4)
    rows = []
    for i, name in enumerate(names):
        under = shown[len(names) + 1 + i] if overlapped[i] else ""
        rows.append([part_name(name), shown[i], percent(own[i] / step), under, bar(own[i] / widest)])
    rows += [[], ["sum", shown[len(names)], percent(total / step), "", ""]]
    header = ["", unit.name, "share", "hidden", " " * _BAR]
    if not any(hidden.values()):
        rows, header = [row[:3] + row[4:] for row in rows], header[:3] + header[4:]
    return Table("step time breakdown", header, rows, bar_colors=[time_color(name) for name in names])


def shown_parts(estimate: Estimate, least: float = 1e-12) -> list[str]:
    """Parts of the step and hidden work, largest first; a difference of two equal sums may leave a rounding error."""
    time = estimate.time
    sizes = {n: (time.parts_s.get(n, 0.0), time.hidden_s.get(n, 0.0)) for n in time.parts_s | time.hidden_s}
    names = sorted(sizes, key=lambda name: tuple(-s for s in sizes[name]))
    return [name for name in names if max(sizes[name]) > least * time.step_s]


PARTS = {
    "gemm": "matrix multiplies",
    "memory_bound": "memory-bound kernels",
    "launch": "launch gaps",
    "recompute": "recomputation",
    "tp_comm": "tensor-parallel communication",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert dispatch and combine",
    "pp_comm": "pipeline sends",
    "dp_comm": "data-parallel communication",
    "embedding_comm": "tied embedding's all-reduce",
    "host_comm": "copies to and from the host",
    "host_optimizer": "optimizer on the host",
    "bubble": "pipeline bubble",
}


def part_name(key: str) -> str:
    """A part of the step in words."""
    return PARTS.get(key, key.replace("_", " "))


def part_title(estimate: Estimate, key: str) -> str:
    """A part of the step with its seconds and share."""
    total = estimate.time.parts_s.get(key, 0.0)
    return f"{part_name(key)}: {seconds(total)}, {percent(total / estimate.step_s)} of the step"


def bar(share: float) -> str:
    """A bar whose length is a share of one."""
    halves = round(2 * _BAR * min(max(share, 0.0), 1.0))
    return ("█" * (halves // 2) + "▌" * (halves % 2)).ljust(_BAR)


def outside(over: Overhead) -> list[tuple[str, float]]:
    """Rows of memory that torch's allocator does not count; buffers for rows of experts where there are any."""
    rows = [("context, communicators", over.context + over.communicators)]
    return [*rows, (RECEIVE_BUFFERS, over.receive_buffers)] if over.receive_buffers else rows


def memory(estimate: Estimate) -> Table:
    """GiB of one device by stage; stages with equal printed figures share a column."""
    found = estimate.peaks
    groups = _alike(found.stages)
    shown = _choose(groups, found.worst_stage)
    heads = [stage_range([row.stage for row in group]) for group in shown]
    stages = [group[0] for group in shown]
    rows = [[label, *_gib_column(memory_bytes(row, key) for row in stages)] for label, key in MEMORY_ROWS]
    least = [found.least_of(row.allocated_bytes) for row in stages]
    most = [found.most_of(row.reserved_bytes) for row in stages]
    usable = number(found.capacity_bytes / GIB)
    rows += [
        *([name, *_gib_column([size] * len(stages))] for name, size in outside(found.overhead_bytes)),
        ["needed at least", *_gib_column(least)],
        ["needed at most (p90)", *(["not known"] * len(stages) if found.open_ended else _gib_column(most))],
        [
            f"left of {usable} usable",
            *([""] * len(stages) if found.open_ended else _gib_column(found.capacity_bytes - x for x in most)),
        ],
    ]
    if found.host_bytes:
        rows.append(["states on the host, a node", *_gib_column([found.host_bytes]), *[""] * (len(stages) - 1)])
        if found.host_capacity_bytes is not None:
            rows.append(
                [
                    f"left of {number(found.host_capacity_bytes / GIB)} there",
                    *_gib_column([found.host_capacity_bytes - found.host_bytes]),
                    *[""] * (len(stages) - 1),
                ]
            )
    title = "memory per device (GiB)"
    if len(found.stages) == 1:
        heads = ["device"]
    else:
        heads[0] = "stage " + heads[0]
    return Table(title, ["", *heads], rows, _memory_notes(estimate, shown))


def memory_bytes(row: StageMemory, key: str) -> float:
    """One figure of a stage; `passing_bytes` are the transient bytes without the buffers."""
    return row.transient_bytes - row.buffers_bytes if key == "passing_bytes" else float(getattr(row, key))


def _gib_column(values: Iterable[float]) -> list[str]:
    """GiB with two decimals: headroom is a difference of such figures."""
    return [f"{value / GIB:,.2f}" for value in values]


def _memory_notes(estimate: Estimate, shown: Sequence[list[StageMemory]]) -> list[str]:
    """Which stage is the worst, the op at its peak, and how many stages the table leaves out."""
    found = estimate.peaks
    p = estimate.job.parallelism
    worst = found.stages[found.worst_stage]
    if len(found.stages) == 1:
        return [f"peak at {worst.peak_op}"]
    last = found.stages[placement(estimate.job.schedule, p.pp, p.vpp)[-1].stage]
    notes = [f"stage {worst.stage} needs the most memory: peak at {worst.peak_op}"]
    if last is not worst and last.peak_op != worst.peak_op:
        where = "last" if last is found.stages[-1] else "with the head"
        notes.append(f"stage {last.stage} ({where}): peak at {last.peak_op}")
    missing = len(found.stages) - sum(len(group) for group in shown)
    if missing:
        notes.append(f"{missing} more of {len(found.stages)} stages are not shown; --json lists all")
    return notes + _unreduced(estimate)


def _unreduced(estimate: Estimate) -> list[str]:
    """Where the gradients of FSDP in a pipeline are at the peak: whole, until the last micro-batch reduces them.

    A loss in chunks reduces the head's with each micro-batch (`fsdp.loss_in_pipeline`).
    """
    worst = estimate.peaks.stages[estimate.peaks.worst_stage]
    if worst.gradients_bytes or worst.peak_op.startswith("forward") or not estimate.job.parallelism.fsdp:
        return []
    return ["no layer's gradient is reduced yet at the peak: whole gradients are among the transients"]


def _alike(stages: Sequence[StageMemory]) -> list[list[StageMemory]]:
    """Runs of neighboring stages with equal printed figures."""
    groups: list[list[StageMemory]] = []
    for row in stages:
        if groups and _gib_column(groups[-1][0][1:8]) == _gib_column(row[1:8]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _choose(groups: list[list[StageMemory]], worst: int) -> list[list[StageMemory]]:
    """At most `_SHOWN_STAGES` groups: first, worst, last, and others evenly between."""
    if len(groups) <= _SHOWN_STAGES:
        return groups
    last = len(groups) - 1
    at_worst = next(i for i, group in enumerate(groups) if any(row.stage == worst for row in group))
    keep = {0, at_worst, last}
    for step in range(1, _SHOWN_STAGES):
        if len(keep) < _SHOWN_STAGES:
            keep.add(round(step * last / (_SHOWN_STAGES - 1)))
    return [groups[i] for i in sorted(keep)]


def stage_range(numbers: Sequence[int]) -> str:
    """Whole numbers as ranges: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
