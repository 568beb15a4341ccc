"""One benchmark on every rank: calibrate, train, calibrate again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.bench import timings
from steptime.bench.machine_figures import Sweeps
from steptime.bench.phases import Phases, first_step_done
from steptime.bench.rank_log import LOG
from steptime.bench.run_logs.samples import MemoryUse
from steptime.bench.runnable import as_run, layout_name, unsupported
from steptime.bench.runs import adamw, bandwidth, collectives, gemm, operands, sdpa
from steptime.bench.runs.block import BlockRow, run_block
from steptime.bench.runs.engines import lay_out, make_mesh
from steptime.bench.runs.step import StepRow, run_steps
from steptime.bench.runs.training import Trainer
from steptime.bench.runs.truths import TorchCount, layout_truths, truths
from steptime.bench.spread import named
from steptime.bench.world import World
from steptime.job.job import Job

PARTS = ("sweeps", "block", "step", "exact")
"""The parts of a benchmark; --only chooses among them."""
SHARES = {"gemm": 0.4, "attention": 0.2, "moves": 0.15, "optimizer": 0.1, "launches": 0.05, "collectives": 0.1}
"""Shares of the seconds of a calibration."""
SHARE_OF_A_BLOCK = 1.0 / 60.0
"""Share of the seconds for timing each direction of a block."""
SHARE_AFTER = 0.3
"""Share of the seconds for the calibration after the steps, of what the config itself runs."""
GIB = 2.0**30


class BenchOptions(NamedTuple):
    """Options of one benchmark."""

    out: Path
    seconds: float = 30.0
    """Seconds for the sweeps of both calibrations."""
    steps: int = 10
    """Timed steps of each layout."""
    seed: int = 0
    parts: frozenset[str] = frozenset(PARTS)
    layouts: tuple[str, ...] = ()
    """Names of `spread.LAYOUTS`; empty for the config's own layout."""
    trace: bool = False


class LayoutSteps(NamedTuple):
    """The measured steps of a layout, and their job."""

    job: Job
    row: StepRow


class Raw(NamedTuple):
    """All measurements of one benchmark."""

    before: Sweeps
    after: Sweeps
    """The config's own work measured again after the steps: shows whether the machine's speed was constant."""
    blocks: list[BlockRow]
    steps: list[LayoutSteps]
    truths: list[TorchCount]
    notes: list[str]
    host: MemoryUse | None = None
    """Resident memory of the root's process and its children, sampled."""

    @property
    def drift(self) -> float | None:
        """Median ratio of the second calibration's seconds to the first's, over equal products."""
        first = {row._replace(timing=None): row.timing.median_s for row in self.before.gemms}  # type: ignore[arg-type]
        ratios = [
            row.timing.median_s / first[key]
            for row in self.after.gemms
            if (key := row._replace(timing=None)) in first  # type: ignore[arg-type]
        ]
        return median(ratios) if ratios else None


NOTHING = Sweeps([], [], [], [], [], [])


def stages(options: BenchOptions, world: World) -> int:
    """Number of times that `measure_all` calls its `done`."""
    sweeps = 4 + (world.world_size > 1) if "sweeps" in options.parts else 0
    steps = max(len(options.layouts), 1) if "step" in options.parts else 0
    return sweeps + bool(sweeps) + steps + len(options.parts & {"block", "exact"})


def measure_all(job: Job, world: World, options: BenchOptions, phases: Phases, done: Callable[[], None]) -> Raw:
    """Measure a job over as many devices as there are ranks, which all call this; `done` is called after each piece of work.

    Raises:
        ConfigError: plain torch cannot run one of the layouts; nothing has run then.
    """
    jobs = [named(job, name, world.world_size) for name in options.layouts] or [job]
    if options.parts - {"sweeps"}:
        refuse(jobs, world.device.type)
    if "step" in options.parts:
        refuse_large(jobs, world)
    before = after = NOTHING
    blocks: list[BlockRow] = []
    steps: list[LayoutSteps] = []
    if "sweeps" in options.parts:
        before = calibrate(job, world, (1.0 - SHARE_AFTER) * options.seconds, done)
    if "block" in options.parts:
        blocks = run_block(job, world.device, seconds=SHARE_OF_A_BLOCK * options.seconds)
        done()
    if "step" in options.parts:
        phases.skip()  # time before this is not part of a training job's start
        for each in jobs:
            steps.append(train(each, world, options, phases))
            done()
    if "sweeps" in options.parts:
        after = recalibrate(job, world, SHARE_AFTER * options.seconds)
        done()
    found: list[TorchCount] = []
    if "exact" in options.parts:
        found = counts(job, jobs, world, options.seed)
        done()
    notes = [*before.notes, *after.notes, *(note for step in steps for note in step.row.notes)]
    return Raw(before, after, blocks, steps, found, list(dict.fromkeys(notes)))


def counts(job: Job, jobs: list[Job], world: World, seed: int) -> list[TorchCount]:
    """What torch counts for the whole model, and on several ranks for each layout: parameters and collectives of a rank."""
    found = truths(job) if world.is_root else []
    if world.world_size == 1:
        return found
    for each in jobs:
        name = layout_name(each)
        trainer = Trainer(lay_out(as_run(each, world.device.type)[0], world.device, seed), seed)
        for _ in range(2):  # DDP settles its buckets after the first step
            trainer.step()
        found += [truth._replace(name=f"{name}: {truth.name}") for truth in layout_truths(trainer)]
    return found


def refuse(jobs: list[Job], device_type: str) -> None:
    """Raise for jobs that plain torch cannot run.

    Raises:
        ConfigError: one line per problem.
    """
    problems = [problem for job in jobs for problem in unsupported(as_run(job, device_type)[0], device_type)]
    if problems:
        raise ConfigError(f"{problem} (or --only sweeps)" for problem in dict.fromkeys(problems))


def refuse_large(jobs: list[Job], world: World) -> None:
    """Raise for steps that exceed the host's memory: unlike CUDA's allocator, the host would stop other programs.

    Raises:
        ConfigError: one line per layout.
    """
    if world.device.type == "cuda":
        return
    ranks, free = -(-world.world_size // world.nodes), operands.free_bytes(world.device)
    problems = []
    for job in jobs:
        needed = ranks * estimate(as_run(job, world.device.type)[0]).memory.peak_allocated_bytes
        if needed > free:
            sizes = f"{layout_name(job)} needs {needed / GIB:.1f} GiB, but only {free / GIB:.1f} GiB are free"
            problems.append(f"memory: {sizes}; --set a smaller data.microbatch_sz or model.n_layers (or --only sweeps)")
    if problems:
        raise ConfigError(problems)


def calibrate(job: Job, world: World, seconds: float, done: Callable[[], None]) -> Sweeps:
    """Every sweep, all ranks at once, as in a step."""
    device, dtype = world.device, job.software.compute_dtype
    share = {name: part * seconds for name, part in SHARES.items()}
    dtypes = [dtype] if device.type == "cpu" else list(dict.fromkeys((dtype, "bf16")))
    gemms, notes = gemm.sweep(job, device, share["gemm"])
    done()
    attended, said = sdpa.sweep(job, device, dtypes, share["attention"])
    notes += said
    done()
    moves, said = bandwidth.sweep(job, device, dtypes, share["moves"])
    notes += said
    done()
    updates, said = adamw.steps(job, device, dtypes, share["optimizer"])
    launches, more = adamw.launches(device, share["launches"])
    notes += said + more
    done()
    sent: list[timings.CollectiveTiming] = []
    if (mesh := make_mesh(job, device.type)) is not None:
        sent, said = collectives.sweep(mesh, device, share["collectives"])
        notes += said
        done()
    return Sweeps(gemms, attended, moves + updates, launches, sent, notes)


def recalibrate(job: Job, world: World, seconds: float) -> Sweeps:
    """The config's own products and memory-bound work in its own dtype."""
    device, dtype = world.device, job.software.compute_dtype
    gemms, notes = gemm.time_shapes(gemm.projections(job), dtype, device, 0.6 * seconds, patience=3.0)
    moves, said = bandwidth.sweep(job, device, [dtype], 0.4 * seconds)
    return NOTHING._replace(gemms=gemms, moves=moves, notes=notes + said)


def train(job: Job, world: World, options: BenchOptions, phases: Phases) -> LayoutSteps:
    """The steps of one layout; the first layout's start-up is the job's, and its first step is stamped."""
    trace = options.out / "trace" / layout_name(job) if options.trace else None
    first = "build" not in phases.seconds

    def mark(name: str) -> None:
        phases.end(name)
        if name == "first_step" and not options.parts & {"sweeps", "block"}:
            LOG.info(first_step_done(time.time(), layout_name(job)))

    row = run_steps(job, world.device, steps=options.steps, seed=options.seed, trace=trace, mark=mark if first else str)
    if first:
        phases.seconds["steady"] = row.timing.median_s
    return LayoutSteps(as_run(job, world.device.type)[0], row)
