"""What a benchmark comes to: the machine file, its estimates beside what was measured, results and rows for validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.bench import beside
from steptime.bench.beside import Beside, of
from steptime.bench.device import Device
from steptime.bench.figures import figures, tiers
from steptime.bench.machine_file import Figure, Provenance, machine_document
from steptime.bench.rows import SCHEMA, to_dict
from steptime.bench.runnable import alone
from steptime.machine import Machine
from steptime.mesh import group
from steptime.step import Estimate, estimate

if TYPE_CHECKING:
    from steptime.bench.block import BlockRow
    from steptime.bench.run import Options, Raw, Step
    from steptime.bench.world import World
    from steptime.job import Job


class Conclusion(NamedTuple):
    """What one benchmark found."""

    machine: dict[str, Any] | None
    """The machine file; None where nothing was calibrated."""
    figures: dict[str, Figure]
    beside: list[Beside]
    estimates: list[Estimate]
    """Of the steps, in their order."""


def described(
    job: Job, raw: Raw, world: World, device: Device, options: Options, torch_version: str
) -> tuple[dict[str, Any], dict[str, Figure]]:
    """The machine file of what was calibrated, and the accelerator's figures in it."""
    joined = raw.before.joined(raw.after)
    provenance = Provenance(options.command, options.date, device.name, torch_version)
    found = figures(joined, device, job.software.compute_dtype, provenance)
    per_node = world.world_size // world.nodes
    crossing = frozenset(axis for axis in {row.axis for row in joined.collectives} if _crosses(job, axis, per_node))
    network = tiers(joined.collectives, crossing, per_node, provenance)
    return machine_document(device, found, network, per_node, provenance), found


def _crosses(job: Job, axis: str, per_node: int) -> bool:
    """Whether a group of this axis has ranks on more than one node: ranks lie in the order pp, dp, tp, tp innermost."""
    own = group(job.parallelism, axis)  # type: ignore[arg-type]
    return float(own.ranks * own.stride) > per_node


def conclude(
    job: Job, raw: Raw, machine: Machine, built: dict[str, Any] | None, found: dict[str, Figure]
) -> Conclusion:
    """Estimate all that was measured, on `machine`."""
    here = job.replace(hardware=machine)
    dtype = job.software.compute_dtype
    own = estimate(here)
    joined = raw.before.joined(raw.after)
    estimates = [estimate(step.job.replace(hardware=machine)) for step in raw.steps]
    rows: list[Beside] = []
    for step, predicted in zip(raw.steps, estimates, strict=True):
        rows += of_step(step, predicted)
    for block in raw.blocks:
        rows += of_block(here, block)
    for step, predicted in zip(raw.steps, estimates, strict=True):
        rows += of_memory(step, predicted)
    rows += [Beside("exact", t.name, t.unit, t.predicted, t.observed) for t in raw.truths]
    rows += beside.gemms(own, joined.gemms, dtype)
    rows += beside.attention(own, joined.attention, dtype)
    rows += beside.moves(own, joined.moves, dtype)
    groups = {row.axis: group(here.parallelism, row.axis) for row in joined.collectives}  # type: ignore[arg-type]
    rows += beside.collectives(machine, joined.collectives, groups)
    return Conclusion(built, found, rows, estimates)


def of_step(step: Step, predicted: Estimate) -> list[Beside]:
    """The step's seconds."""
    ranks = f" on {step.row.ranks}" if step.row.ranks > 1 else ""
    return [of("step", f"{step.row.layout}{ranks}", predicted.step_s, step.row.timing)]


def of_block(job: Job, block: BlockRow) -> list[Beside]:
    """One block by itself, recomputation in backward included."""
    timing = estimate(alone(job, block.recompute)).timing
    replay = timing.whole_replay if block.recompute == "full" else timing.block.replay
    again = float(replay.seconds) if block.recompute != "none" else 0.0
    label = "" if block.recompute == "none" else f", recompute {block.recompute}"
    return [
        of("block", f"forward{label}", float(timing.block.forward.seconds), block.forward),
        of("block", f"backward{label}", float(timing.block.backward.seconds) + again, block.backward),
    ]


def of_memory(step: Step, predicted: Estimate) -> list[Beside]:
    """Peaks of every rank that differs from the ones before it."""
    per_stage = step.row.ranks // step.job.parallelism.pp
    rows: list[Beside] = []
    for rank in range(0, step.row.ranks, per_stage):
        stage = predicted.memory.stages[rank // per_stage]
        where = f", stage {stage.stage}" if step.job.parallelism.pp > 1 else ""
        mine = slice(rank, rank + per_stage)
        for kind, expected, held in (
            ("allocated", stage.allocated_bytes, step.row.allocated_peak_bytes[mine]),
            ("reserved", stage.reserved_bytes, step.row.reserved_peak_bytes[mine]),
        ):
            known = [float(value) for value in held if value is not None]
            if known:
                rows.append(Beside("memory", f"{kind}, {step.row.layout}{where}", "bytes", expected, max(known)))
    return rows


def document(raw: Raw, found: Conclusion) -> dict[str, Any]:
    """results.json, without its header."""
    joined = raw.before.joined(raw.after)
    return {
        "schema": SCHEMA,
        "steps": [
            step.row._asdict()
            | step.row.timing._asdict()
            | {
                "timing": None,
                "config": step.job.to_config(),
                "predicted_step_s": predicted.step_s,
                "predicted_allocated_bytes": [s.allocated_bytes for s in predicted.memory.stages],
                "predicted_reserved_bytes": [s.reserved_bytes for s in predicted.memory.stages],
            }
            for step, predicted in zip(raw.steps, found.estimates, strict=True)
        ],
        "blocks": [
            block._asdict() | {"forward": block.forward._asdict(), "backward": block.backward._asdict()}
            for block in raw.blocks
        ],
        "beside": [row._asdict() | {"error": row.error} for row in found.beside],
        "gemms": [to_dict(row) for row in joined.gemms],
        "attention": [to_dict(row) for row in joined.attention],
        "moves": [to_dict(row) for row in joined.moves],
        "launches": [to_dict(row) for row in joined.launches],
        "collectives": [to_dict(row) for row in joined.collectives],
        "drift": raw.drift,
        "machine": found.machine,
        "notes": raw.notes,
    }
