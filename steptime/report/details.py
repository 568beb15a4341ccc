"""The tables under the breakdown: every projection, every collective, the pipeline, scaling, the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from steptime.answer.result import Estimate
from steptime.answer.tables import sends_most, stages_alike
from steptime.base.grouping import grouped
from steptime.base.rows import CollectiveRow, GemmRow, WeakScaling
from steptime.base.words import counted
from steptime.cost.part_seconds import call_names
from steptime.job.device_count import AUTO
from steptime.model.ops import Comm
from steptime.report.breakdown import stage_range
from steptime.report.format import (
    BINARY,
    COUNT,
    SI,
    TIME,
    Unit,
    column,
    number,
    percent,
    quantity,
    seconds,
    unit_for,
    whole,
)
from steptime.report.table import Fact, FactList, Table


def _fine_unit(largest: float) -> Unit:
    """A unit of time for one call and its parts: the largest part has at most four digits, or it is in seconds."""
    return TIME[1] if largest < 0.01 else TIME[2] if largest < 10.0 else TIME[3]


def gemms(estimate: Estimate) -> Table:
    """Each projection's m, n, k on one device, its FLOPs, bytes and seconds, by pass; per call."""
    alike = stages_alike(estimate.assembly)
    rows: list[list[str]] = []
    for name, all_rows in grouped(estimate.gemms, lambda row: row.name).items():
        unit = _fine_unit(max(row.time_s for row in all_rows))
        rows.append([f"{name} ({unit.name}): {_calls(all_rows, alike)}"])
        shapes = {(row.pass_, *row[4:]): row for row in all_rows}
        rows += [_gemm_cells(row, unit.size) for row in shapes.values()]
    header = ["", "m", "n", "k", "GFLOP", "in", "weight", "out", "math", "memory", "time"]
    title = "matrix multiplies, one call on one device (MiB)"
    notes = ["in, weight, out: bytes read and written by the pass; time = max(math, memory) + launch"]
    return Table(title, header, rows, notes)


def _gemm_cells(row: GemmRow, size: float) -> list[str]:
    """One pass of a projection."""
    shape = [whole(row.m), whole(row.n), whole(row.k)]
    moved = [number(x / 2.0**20) for x in (row.input_bytes, row.weight_bytes, row.output_bytes)]
    took = [number(x / size) for x in (row.compute_s, row.bandwidth_s, row.time_s)]
    return [" " + row.pass_, *shape, number(row.flops / 1e9), *moved, *took]


def _calls(rows: Sequence[GemmRow], alike: Mapping[int, Sequence[int]]) -> str:
    """How often a device runs a projection, and on which stages if not on all; `alike`: stages equal to a row's."""
    counts: dict[str, list[float]] = {}
    for row in rows:
        counts.setdefault(row.pass_, []).append(row.count_per_step)
    forward = _span(counts.pop("forward", []))
    backward = _span([count for each in counts.values() for count in each])
    at = {stage for row in rows for stage in alike[row.stage]}
    where = "" if len(at) == sum(map(len, alike.values())) else f", on stage {stage_range(sorted(at))} only"
    noun = "call" if (backward or forward) == "1" else "calls"
    replays = "" if forward == backward or not backward else f" (forward {forward}: recomputed)"
    return f"{backward or forward} {noun} a step{replays}{where}"


def _span(counts: Sequence[float]) -> str:
    """Smallest and largest of some counts."""
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    return whole(low) if low == high else f"{whole(low)} to {whole(high)}"


def collectives(estimate: Estimate) -> Table:
    """Each collective by group: size and time of one call, exposed seconds of the step."""
    rows: list[list[str]] = []
    groups = grouped(estimate.collectives, lambda row: (row.axis, row.ranks, row.tier))
    for (axis, ranks, tier), members in groups.items():
        unit = _fine_unit(max(row.time_s for row in members))
        rows.append([f"{axis} ({unit.name}): {counted(ranks, 'rank')} over {tier}"])
        rows += [_collective_cells(row, unit.size) for row in joined_boundaries(members)]
    header = ["", "", "MiB", "calls", "latency", "wire", "call", "exposed"]
    notes = ["MiB: full tensor of one call; call = latency + wire + ramp (transition between small and large messages)"]
    if estimate.pipeline.stages > 1:
        notes += _shown_stages(estimate)
    return Table("collectives, one call (exposed: ms of the step)", header, rows, notes, left=2)


def _shown_stages(estimate: Estimate) -> list[str]:
    """Which stage the calls of every axis are of, in one line: those of layers of the busiest, of buckets of what sends most."""
    timing = estimate.timing
    axes = dict.fromkeys(row.axis for row in estimate.collectives if row.axis not in {"pp", "embedding"})
    buckets = [axis for axis in axes if axis in {"dp", "edp"} and timing.dp]
    layers = [axis for axis in axes if axis not in buckets]
    most = sends_most(timing.dp.reductions) if timing.dp and buckets else timing.busiest
    if most == timing.busiest:
        layers, buckets = [*layers, *buckets], []
    shown = [f"{', '.join(layers)}: calls of stage {timing.busiest}, the busiest"] if layers else []
    shown += [f"{', '.join(buckets)}: of stage {most}, which sends most"] if buckets else []
    ops = (op for part in (estimate.assembly.embedding, estimate.assembly.head) for op in part.ops)
    at_ends = {name for op in ops if isinstance(op, Comm) for name in call_names(op.name)}
    ends = any(row.name in at_ends for row in estimate.collectives)
    shown += ["embedding and head: of their own stages"] if ends and shown else []
    return ["; ".join(shown)] if shown else []


def joined_boundaries(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """Rows, with pipeline boundaries of equal figures joined: the name gives their number."""
    alike = grouped(rows, lambda row: row[1:] if row.axis == "pp" else id(row))
    return [
        same[0] if len(same) == 1 else same[0]._replace(name=f"each of {len(same)} boundaries")
        for same in alike.values()
    ]


def _collective_cells(row: CollectiveRow, size: float) -> list[str]:
    """One kind of collective, or several equal boundaries of the pipeline."""
    took = [number(x / size) for x in (row.latency_s, row.bandwidth_s, row.time_s)]
    sizes = [number(row.bytes / 2.0**20), whole(row.count_per_step)]
    return [f" {row.name}", row.kind.replace("_", "-"), *sizes, *took, number(1e3 * row.exposed_s)]


def pipeline(estimate: Estimate) -> FactList | None:
    """The schedule, its bubble and what is in flight; None without a pipeline."""
    line = estimate.pipeline
    if line.stages == 1:
        return None
    vpp = estimate.job.parallelism.vpp
    chunks = f" of {vpp} chunks" if vpp > 1 else ""
    idle, at = percent(line.bubble_fraction), f"stage {estimate.timing.busiest}, the busiest"
    counts = [whole(round(x, 2)) for x in line.in_flight]
    shown = _ends(counts)
    schedule = f"{line.schedule}, {line.stages} stages{chunks}, {counted(line.microbatches, 'micro-batch')}"
    passes = estimate.timing.passes
    schedule += f" in {passes} passes (parallelism.pipeline_passes), each of which drains" if passes > 1 else ""
    facts = [
        Fact("schedule", [schedule]),
        Fact("bubble", [f"{seconds(line.bubble_s)} on {at}; stages are idle {idle} of the makespan on average"]),
        Fact("in flight", [" ".join(shown) + " micro-batches, first stage to last"]),
    ]
    layers = [sum(n for chunk in chunks for _, n in chunk.runs) for chunks in estimate.assembly.stages]
    if len(set(layers)) > 1 or estimate.job.parallelism.layers_per_stage == AUTO:
        facts.append(Fact("layers", [" ".join(_ends([whole(n) for n in layers])) + ", first stage to last"]))
    return FactList("pipeline", facts)


def _ends(counts: list[str]) -> list[str]:
    """The figures of every stage, of a long pipeline those of its ends."""
    return counts if len(counts) <= 16 else [*counts[:6], "…", *counts[-6:]]


def scaling(
    rows: Sequence[WeakScaling], here: int = 0, title: str = "weak scaling (the same work per device)"
) -> Table:
    """Step and efficiency by data-parallel degree; the degree `here` is marked as the job's own."""
    unit = unit_for(max((row.step_s for row in rows), default=1.0), TIME)
    steps = column([row.step_s for row in rows], unit.size, 4)
    cells = []
    for row, step in zip(rows, steps, strict=True):
        mark = "this job" * (row.dp == here)
        if row.verdict != "fits":
            mark = ", ".join(filter(None, (mark, row.verdict.replace("_", " "))))
        share = "-" if row.verdict == "does_not_fit" else percent(row.efficiency)
        cells.append([f"dp {row.dp:,}", whole(row.devices), whole(row.gbs), step, share, mark])
    more = any(row.efficiency > 1.0005 for row in rows if row.verdict != "does_not_fit")
    notes = ["above 100 %: the optimizer step and other fixed costs are shared by more devices"] if more else []
    return Table(title, ["", "devices", "gbs", unit.name, "efficiency", ""], cells, notes)


RUN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("tokens", lambda x: quantity(x, COUNT)),
    "steps": ("steps", whole),
    "days": ("training only", lambda x: f"{number(x)} days"),
    "wall_days": ("wall time", lambda x: f"{number(x)} days"),
    "counted": ("  counted", lambda x: "training, " + ", ".join(x) if x else "training only"),
    "not_counted": ("  not counted", "; ".join),
    "goodput": ("goodput", lambda x: f"{100.0 * x:.4g} % of the wall time is training"),
    "device_hours": ("device-hours", lambda x: f"{x:,.0f}"),
    "cost": ("cost", lambda x: quantity(x, COUNT)),
    "price_per_device_hour": ("  price", lambda x: f"{x:g} per device-hour"),
    "price_source": ("  from", str),
    "energy_kwh": ("energy", lambda x: quantity(1e3 * x, SI, "Wh") + " of the devices at their rated power"),
    "checkpoint_bytes": ("one checkpoint", lambda x: quantity(x, BINARY)),
    "checkpoint_write_s": ("time to write", seconds),
    "best_checkpoint_interval_s": ("best interval", lambda x: seconds(x) + " between checkpoints (Young, Daly)"),
    "mtbf_s": ("failures", lambda x: f"one in {seconds(x)}"),
    "step_s": ("", seconds),
}
"""Keys of `run` in the order they are read: label and unit; an empty label is shown elsewhere."""


def run(estimate: Estimate) -> FactList | None:
    """Figures of the whole training run; units follow from the names. None where the config has no `run`."""
    if not estimate.run:
        return None
    found = dict(estimate.run)
    if "wall_days" not in found:
        found = {key: value for key, value in found.items() if key not in {"counted", "not_counted"}}
    facts = []
    for name in sorted(found, key=lambda name: list(RUN).index(name) if name in RUN else len(RUN)):
        label, show = RUN.get(name, (name.replace("_", " "), str))
        if label and (found[name] not in (None, []) or name == "counted"):
            facts.append(Fact(label, [show(found[name])]))
    return FactList("the whole run", facts)
