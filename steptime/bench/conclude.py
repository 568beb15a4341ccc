"""Conclusions of a benchmark: the machine file, its estimates compared with the measurements, and the files that tell both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from steptime.answer.result import Estimate, estimate
from steptime.bench import comparison
from steptime.bench.comparison import PredictionRow, timing_row
from steptime.bench.device import BenchDevice
from steptime.bench.links import alpha_beta
from steptime.bench.machine_figures import figures, tiers
from steptime.bench.machine_file import Figure, Provenance, machine_document, machine_yaml
from steptime.bench.runnable import alone, peak_differences
from steptime.bench.timings import SCHEMA, to_dict
from steptime.bench.world import World
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.job.mesh import group

if TYPE_CHECKING:
    from steptime.bench.rank_run import LayoutSteps, Raw
    from steptime.bench.runs.block import BlockRow

UNITS: dict[str, Literal["bytes", "count", "FLOP"]] = {
    "parameters": "count",
    "calls": "count",
    "B": "bytes",
    "FLOP": "FLOP",
}


HOST_KEYS = ("peak_bytes", "average_bytes", "mode_bytes", "total_bytes", "samples", "interval_s")


class Conclusion(NamedTuple):
    """The results of one benchmark."""

    figures: dict[str, Figure]
    """Figures of the calibrated accelerator; empty where none was calibrated."""
    machine: dict[str, Any] | None
    """The machine file's mapping; None where nothing was calibrated."""
    predictor: str
    """The machine that the estimates use: the measured one, else the config's."""
    comparisons: list[PredictionRow]
    estimates: list[Estimate]
    """Comparisons of the steps, in their order."""
    notes: list[str]
    """Reasons why measured peaks may differ from the estimates."""


def conclude(job: Job, raw: Raw, world: World, device: BenchDevice, provenance: Provenance, path: Path) -> Conclusion:
    """Write the machine file to `path`, and estimate everything that was measured on that machine.

    Where no sweeps ran, nothing is written, and the estimates use the config's own machine.
    """
    joined = raw.before.joined(raw.after)
    found: dict[str, Figure] = {}
    document = None
    machine = job.machine
    if joined.gemms:
        per_node = world.world_size // world.nodes
        found = figures(joined, device, job.software.compute_dtype, provenance)
        crossing = frozenset(axis for axis in {row.axis for row in joined.collectives} if crosses(job, axis, per_node))
        network = tiers(joined.collectives, crossing, per_node, provenance)
        document = machine_document(device, found, network, per_node, provenance)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(machine_yaml(document), encoding="utf-8")
        machine = Machine.load(str(path))
    steps = [(step, estimate(step.job.replace(hardware=machine))) for step in raw.steps]
    rows = comparisons(job.replace(hardware=machine), raw, steps, device)
    why = [note for step, predicted in steps for note in reasons(step, predicted, device)]
    return Conclusion(found, document, machine.name, rows, [predicted for _, predicted in steps], why)


def crosses(job: Job, axis: str, per_node: int) -> bool:
    """Whether groups of an axis have ranks on several nodes: ranks are ordered pp, dp, tp, with tp innermost."""
    p = job.parallelism
    stride = {"tp": 1, "dp": p.tp, "pp": p.tp * p.dp}.get(axis, 1)
    ranks = {"tp": p.tp, "dp": p.dp, "pp": p.pp}.get(axis, p.devices)
    return ranks * stride > per_node


def comparisons(
    job: Job, raw: Raw, steps: list[tuple[LayoutSteps, Estimate]], device: BenchDevice
) -> list[PredictionRow]:
    """Every figure that was both measured and predicted; the job is on the machine that the estimates use."""
    dtype, own, statistic = job.software.compute_dtype, estimate(job), device.statistic
    joined = raw.before.joined(raw.after)
    rows = [
        timing_row("step", name_of(step), predicted.step_s, step.row.timing, statistic) for step, predicted in steps
    ]
    rows += [row for block in raw.blocks for row in of_block(job, block, device)]
    rows += [row for step, predicted in steps for row in of_memory(step, predicted)]
    rows += [PredictionRow("exact", t.name, UNITS[t.unit], t.predicted, t.observed) for t in raw.truths]
    rows += comparison.gemms(own, joined.gemms, dtype, statistic)
    rows += comparison.attention(own, joined.attention, dtype, statistic)
    rows += comparison.moves(own, joined.moves, dtype, statistic)
    groups = {axis: group(job.parallelism, axis) for axis in ("tp", "dp", "pp")}
    return rows + comparison.collectives(job.machine, joined.collectives, groups)


def name_of(step: LayoutSteps) -> str:
    """A layout and its ranks."""
    return f"{step.row.layout} on {step.row.ranks}" if step.row.ranks > 1 else step.row.layout


def of_block(job: Job, block: BlockRow, device: BenchDevice) -> list[PredictionRow]:
    """One block by itself, with the kernels that the device runs; backward includes recomputation."""
    parts = estimate(alone(job, block.recompute, device.kind)).timing.parts
    layer = parts.assembly.kinds[0]
    timed = parts.of[layer]
    replay = parts.whole_replays[layer] if block.recompute == "full" else timed.replay
    replay_s = float(replay.seconds) if block.recompute != "none" else 0.0
    label = "" if block.recompute == "none" else f", recompute {block.recompute}"
    return [
        timing_row("block", f"forward{label}", float(timed.forward.seconds), block.forward, device.statistic),
        timing_row(
            "block", f"backward{label}", float(timed.backward.seconds) + replay_s, block.backward, device.statistic
        ),
    ]


def of_memory(step: LayoutSteps, predicted: Estimate) -> list[PredictionRow]:
    """Peaks by pipeline stage, of the rank with the largest."""
    row, stages = step.row, predicted.memory.stages
    per_stage = row.ranks // len(stages)
    rows: list[PredictionRow] = []
    for stage in stages:
        mine = slice(stage.stage * per_stage, (stage.stage + 1) * per_stage)
        where = f", stage {stage.stage}" if len(stages) > 1 else ""
        for kind, expected, peaks in (
            ("allocated", stage.allocated_bytes, row.allocated_peak_bytes[mine]),
            ("reserved", stage.reserved_bytes, row.reserved_peak_bytes[mine]),
        ):
            known = [float(value) for value in peaks if value is not None]
            if known:
                rows.append(PredictionRow("memory", f"{kind}, {name_of(step)}{where}", "bytes", expected, max(known)))
    return rows


def reasons(step: LayoutSteps, predicted: Estimate, device: BenchDevice) -> list[str]:
    """Known reasons why a layout's allocated peak differs from the estimate; none where both are equal."""
    if all(row.predicted == row.measured for row in of_memory(step, predicted) if row.name.startswith("allocated")):
        return []
    known = peak_differences(step.job, device.kind) or ["no known cause: the estimate is wrong"]
    return [f"allocated, {name_of(step)}: {reason}" for reason in known]


def results(raw: Raw, found: Conclusion) -> dict[str, Any]:
    """results.json without its header: everything measured and predicted, in SI units."""
    joined = raw.before.joined(raw.after)
    kinds = ("gemms", "attention", "moves", "launches", "collectives")
    return {
        "schema": SCHEMA,
        "steps": [step_dict(step, p) for step, p in zip(raw.steps, found.estimates, strict=True)],
        "blocks": [
            row._asdict() | {"forward": row.forward._asdict(), "backward": row.backward._asdict()} for row in raw.blocks
        ],
        "beside": [row._asdict() | {"error": row.error} for row in found.comparisons],
        **{kind: [to_dict(row) for row in getattr(joined, kind)] for kind in kinds},
        "links": [line._asdict() for line in alpha_beta(joined.collectives)],
        "drift": raw.drift,
        "host_memory": raw.host and {key: raw.host._asdict()[key] for key in HOST_KEYS},
        "machine": found.machine,
        "predicted_on": found.predictor,
        "notes": [*raw.notes, *found.notes],
    }


def step_dict(step: LayoutSteps, predicted: Estimate) -> dict[str, Any]:
    """A measured layout with its config and its estimate."""
    stages = predicted.memory.stages
    return to_dict(step.row) | {
        "config": step.job.to_config(),
        "predicted_step_s": predicted.step_s,
        "predicted_allocated_bytes": [stage.allocated_bytes for stage in stages],
        "predicted_reserved_bytes": [stage.reserved_bytes for stage in stages],
    }


class BenchResults(NamedTuple):
    """One benchmark on the root: measurements, conclusions, and file locations."""

    world_line: str
    device: BenchDevice
    raw: Raw
    found: Conclusion
    document: dict[str, Any]
    """results.json."""
    files: list[str]


def write(folder: Path, run: BenchResults) -> BenchResults:
    """Write results.json; returns the run with the names of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(run.document, indent=1) + "\n", encoding="utf-8")
    files = ["machine.yaml"] if run.found.machine else []
    return run._replace(files=[str(folder / name) for name in [*files, "results.json"]])
