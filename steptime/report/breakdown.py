"""Where every second and byte goes: the sections under the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.report.format import BINARY, GIB, TIME, Unit, column, number, percent, quantity, seconds, unit_for, whole
from steptime.report.table import Fact, Facts, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from steptime.estimate import CollectiveRow, GemmRow, StageMemory, WeakScaling
    from steptime.step import Estimate

_BAR = 16
_MEMORY_ROWS = (
    ("parameters", "params_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer states", "optimizer_bytes"),
    ("activations", "activations_bytes"),
    ("transient at the peak", "transient_bytes"),
    ("allocated", "allocated_bytes"),
    ("reserved", "reserved_bytes"),
)
_SHOWN_STAGES = 5


def step_parts(estimate: Estimate) -> Table:
    """Seconds by part, widest first, with what ran hidden beside them; the parts sum to the step."""
    step, parts, hidden = estimate.time.step_s, estimate.time.parts_s, estimate.time.hidden_s
    names = sorted(parts | hidden, key=lambda name: (-parts.get(name, 0.0), -hidden.get(name, 0.0)))
    names = [name for name in names if parts.get(name) or hidden.get(name)]
    unit = unit_for(step, TIME)
    total, widest = sum(parts.values()), max(parts.values())
    own = [parts.get(name, 0.0) for name in names]
    beside = [hidden.get(name, 0.0) for name in names]
    shown = column([*own, total, *beside], unit.size, 4)
    rows = []
    for i, name in enumerate(names):
        under = shown[len(names) + 1 + i] if beside[i] else ""
        rows.append([name.replace("_", " "), shown[i], percent(own[i] / step), under, bar(own[i] / widest)])
    rows += [[], ["sum", shown[len(names)], percent(total / step), "", ""]]
    header = ["", unit.name, "share", "hidden", " " * _BAR]
    if not any(hidden.values()):
        rows, header = [row[:3] + row[4:] for row in rows], header[:3] + header[4:]
    return Table("where the step goes", header, rows)


def bar(share: float) -> str:
    """A bar as long as a share of one."""
    halves = round(2 * _BAR * min(max(share, 0.0), 1.0))
    return ("█" * (halves // 2) + "▌" * (halves % 2)).ljust(_BAR)


def memory(estimate: Estimate) -> Table:
    """GiB of one device by stage; stages whose figures read the same share a column."""
    held = estimate.memory
    groups = _alike(held.stages)
    shown = _choose(groups, held.worst_stage)
    heads = [_range([row.stage for row in group]) for group in shown]
    stages = [group[0] for group in shown]
    rows = [[label, *_gib_column(getattr(row, key) for row in stages)] for label, key in _MEMORY_ROWS]
    context, links = held.overhead_bytes
    need = [row.reserved_bytes + context + links for row in stages]
    rows.append(["CUDA context, communicators", *_gib_column([context + links] * len(stages))])
    rows.append(
        [
            "left of " + number(held.capacity_bytes / GIB) + " usable",
            *_gib_column(held.capacity_bytes - x for x in need),
        ]
    )
    title = "memory per device (GiB)"
    if len(held.stages) == 1:
        heads = ["device"]
    else:
        heads[0] = "stage " + heads[0]
    return Table(title, ["", *heads], rows, _memory_notes(estimate, shown))


def _gib_column(values: Iterable[float]) -> list[str]:
    """GiB with two decimals: head-room is a difference of these."""
    return [f"{value / GIB:,.2f}" for value in values]


def _memory_notes(estimate: Estimate, shown: Sequence[list[StageMemory]]) -> list[str]:
    """Which stage is the worst, the op at its peak, and how many stages the table leaves out."""
    held = estimate.memory
    worst, last = held.stages[held.worst_stage], held.stages[-1]
    if len(held.stages) == 1:
        return [f"peak at {worst.peak_op}"]
    notes = [f"stage {worst.stage} is the worst: peak at {worst.peak_op}"]
    if last is not worst and last.peak_op != worst.peak_op:
        notes.append(f"stage {last.stage}, the last: peak at {last.peak_op}")
    missing = len(held.stages) - sum(len(group) for group in shown)
    if missing:
        notes.append(f"{missing} more of {len(held.stages)} stages lie between those shown; --json lists all")
    return notes


def _alike(stages: Sequence[StageMemory]) -> list[list[StageMemory]]:
    """Runs of neighbouring stages whose printed figures are equal."""
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


def _range(numbers: Sequence[int]) -> str:
    """Whole numbers in short: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _fine_unit(largest: float) -> Unit:
    """A unit of time for a column whose small values matter too: the one that gives the largest at most six digits."""
    return TIME[1] if largest < 0.2 else TIME[2] if largest < 200.0 else TIME[3]


def gemms(estimate: Estimate) -> Table:
    """Each projection's m, n, k on one device, its work and bytes and what they take, by pass; per call."""
    by_name: dict[str, list[GemmRow]] = {}
    for row in estimate.gemms:
        by_name.setdefault(row.name, []).append(row)
    size = _fine_unit(max((row.time_s for row in estimate.gemms), default=0.0))
    rows: list[list[str]] = []
    for name, all_rows in by_name.items():
        rows.append([f"{name}: {_calls(all_rows, estimate.pipeline.stages)}"])
        shapes = {(row.pass_, *row[4:]): row for row in all_rows}
        rows += [_gemm_cells(row, size.size) for row in shapes.values()]
    header = ["", "m", "n", "k", "GFLOP", "in", "weight", "out", "math", "memory", "time"]
    title = f"matrix multiplies, per call on one device (MiB; {size.name})"
    notes = [
        "in, weight, out are the bytes that pass reads and writes; time is the larger of math and memory, and launch"
    ]
    return Table(title, header, rows, notes)


def _gemm_cells(row: GemmRow, size: float) -> list[str]:
    """One pass of a projection."""
    shape = [whole(row.m), whole(row.n), whole(row.k)]
    moved = [number(x / 2.0**20) for x in (row.input_bytes, row.weight_bytes, row.output_bytes)]
    took = [number(x / size) for x in (row.compute_s, row.bandwidth_s, row.time_s)]
    return ["  " + row.pass_, *shape, number(row.flops / 1e9), *moved, *took]


def _calls(rows: Sequence[GemmRow], stages: int) -> str:
    """How often a projection's first pass runs in a step, and on which stages."""
    one_pass = [row.count_per_step for row in rows if row.pass_ == rows[0].pass_]
    low, high = min(one_pass), max(one_pass)
    text = f"{whole(low)} calls" if low == high else f"{whole(low)} to {whole(high)} calls"
    at = sorted({row.stage for row in rows})
    return text + " a step" + ("" if len(at) == stages else f", stage {_range(at)} only")


def collectives(estimate: Estimate) -> Table:
    """Each collective by group: size and time of one call, exposed seconds of the step."""
    groups: dict[tuple[str, int, str], list[CollectiveRow]] = {}
    for row in estimate.collectives:
        groups.setdefault((row.axis, row.ranks, row.tier), []).append(row)
    size = _fine_unit(max((row.time_s for row in estimate.collectives), default=0.0))
    per_step = unit_for(estimate.time.step_s, TIME[:3])
    rows: list[list[str]] = []
    for (axis, ranks, tier), members in groups.items():
        rows.append([f"{axis}: {ranks:,} ranks over {tier}"])
        rows += [_collective_cells(row, size.size, per_step.size) for row in members]
    header = ["", "", "MiB", "calls", "latency", "wire", "call", "exposed"]
    title = f"collectives (one call: {size.name}; exposed per step: {per_step.name})"
    return Table(title, header, rows, ["MiB: the whole tensor of one call"], left=2)


def _collective_cells(row: CollectiveRow, size: float, per_step: float) -> list[str]:
    """One kind of collective."""
    took = [number(x / size) for x in (row.latency_s, row.bandwidth_s, row.time_s)]
    sizes = [number(row.bytes / 2.0**20), whole(row.count_per_step)]
    return ["  " + row.name, row.kind.replace("_", "-"), *sizes, *took, number(row.exposed_s / per_step)]


def pipeline(estimate: Estimate) -> Facts | None:
    """The schedule, its bubble and what is in flight; None without a pipeline."""
    line = estimate.pipeline
    if line.stages == 1:
        return None
    held = [whole(round(x, 2)) for x in line.in_flight]
    shown = held if len(held) <= 16 else [*held[:6], "…", *held[-6:]]
    facts = [
        Fact("schedule", [f"{line.schedule}, {line.stages} stages, {line.microbatches:,} micro-batches"]),
        Fact(
            "bubble",
            [f"{seconds(line.bubble_s)}, {percent(line.bubble_fraction)} of the makespan idle (mean of stages)"],
        ),
        Fact("in flight", [" ".join(shown) + " micro-batches, first stage to last"]),
    ]
    return Facts("pipeline", facts)


def weak_scaling(
    rows: Sequence[WeakScaling], here: int = 0, title: str = "weak scaling (the same work per device)"
) -> Table:
    """Step and efficiency by data-parallel degree; the degree `here` is marked as the job's own."""
    unit = unit_for(max((row.step_s for row in rows), default=1.0), TIME)
    steps = column([row.step_s for row in rows], unit.size, 4)
    cells = []
    for row, step in zip(rows, steps, strict=True):
        mark = "this job" if row.dp == here else ""
        cells.append([f"dp {row.dp:,}", whole(row.devices), whole(row.gbs), step, percent(row.efficiency), mark])
    return Table(title, ["", "devices", "gbs", unit.name, "efficiency", ""], cells)


def run(estimate: Estimate) -> Facts | None:
    """What the whole training run takes; units are read off the names. None where the config has no `run`."""
    if not estimate.run:
        return None
    facts = [Fact(*_run_fact(name, value)) for name, value in estimate.run.items() if value is not None]
    return Facts("the whole run", facts)


def _run_fact(name: str, value: object) -> tuple[str, list[str]]:
    """A label and a value in people's units, from a name that ends in its unit."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return words, [str(value)]
    if name.endswith("_bytes"):
        return words.removesuffix(" bytes"), [quantity(value, BINARY)]
    if name.endswith("_s"):
        return words.removesuffix(" s"), [seconds(value)]
    if name in ("goodput", "efficiency") or name.endswith(("_share", "_fraction")):
        return words, [percent(value)]
    return words, [number(value, 4)]
