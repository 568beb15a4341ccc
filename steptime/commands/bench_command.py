"""`3dtrn bench`: measures what the model assumes and what it predicts; writes launch scripts; reads logs."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from datetime import UTC, datetime
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.commands.console import Printer, load

if TYPE_CHECKING:
    from steptime.bench.conclude import BenchResults
    from steptime.bench.environment import Launch
    from steptime.bench.phases import Phases
    from steptime.bench.rank_run import Raw
    from steptime.bench.world import World
    from steptime.job.job import Job

LOGS = ("startup", "memory", "scaling")
"""First words that read logs instead of running a benchmark."""
FOLDER = "steptime-bench"
GIB = 2.0**30
SAMPLE_S = 2.0
"""Seconds between samples of the host's memory: each looks through all processes."""


def bench(options: Namespace, out: Printer) -> int:
    """Run one benchmark, print a launch script, or read logs."""
    word, *rest = options.words
    if word in LOGS:
        return _logs(word, rest, options, out)
    if rest:
        raise ConfigError(
            f"bench: expected one PLAN, or {', '.join(LOGS)} before files (got {' '.join(options.words)})"
        )
    if options.emit is not None:
        from steptime.bench.launch_script import emit

        arguments = _arguments(options)
        out.text(emit(options.emit, load(word, options.sets), word, arguments=arguments, gpus=options.device != "cpu"))
        return 0
    _check(options)
    if missing := [name for name in ("torch", "psutil") if find_spec(name) is None]:
        raise ConfigError(f"bench: needs {' and '.join(missing)}; pip install 'steptime[bench]'")
    return _measured(options, out)


def _check(options: Namespace) -> None:
    """Raise for option values with which no benchmark can run."""
    from steptime.bench.spread import LAYOUTS

    problems = []
    if not 0.0 <= options.seconds < inf:
        problems.append(f"--seconds: must be finite and at least 0 (got {options.seconds:g})")
    if unknown := [name for name in options.layouts if name not in LAYOUTS]:
        problems.append(f"--layouts: unknown layout {unknown[0]!r}; use {', '.join(LAYOUTS)}")
    if options.steps < 1:
        problems.append(f"--steps: at least 1 (got {options.steps}); --only sweeps,block,exact runs none")
    if problems:
        raise ConfigError(problems)


def _arguments(options: Namespace) -> list[str]:
    """The arguments of this command that its ranks need too."""
    words = [word for setting in options.sets for word in ("--set", setting)]
    for name in ("out", "device", "seconds", "steps", "seed"):
        value = getattr(options, name)
        if value is not None and value != options.usual[name]:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    if options.only != options.usual["only"]:
        words += ["--only", ",".join(sorted(options.only))]
    if options.layouts:
        words += ["--layouts", ",".join(options.layouts)]
    return [*words, *["--trace"] * options.trace]


def _logs(word: str, paths: list[str], options: Namespace, out: Printer) -> int:
    from steptime.report import bench_logs

    if not paths:
        raise ConfigError(f"bench {word}: at least one file is required")
    if word == "memory":
        document, sections = bench_logs.memory_command(paths, log=options.log, start=options.start, stop=options.stop)
    elif word == "scaling":
        document, sections = bench_logs.scaling_command(paths, baseline=options.baseline)
    else:
        document, sections = bench_logs.startup_command(paths)
    out.answer(lambda: document, lambda: sections)
    return 0


def _measured(options: Namespace, out: Printer) -> int:
    """One benchmark on this rank, its output and failures in a log."""
    from steptime.bench.phases import Phases
    from steptime.bench.rank_log import guarded, same_problems
    from steptime.bench.world import find

    # waiting threads should not occupy the cores of working ones
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    phases, launch = Phases(), find()
    with same_problems(launch.rank):
        job, folder = load(options.words[0], options.sets), _folder(options.out)
    return guarded(lambda: _run(job, folder, launch, phases, options, out), launch.rank, folder / "bench.log")


def _folder(asked: str | None) -> Path:
    """Where results go: a folder that holds none yet.

    Raises:
        ConfigError: the one asked for holds results.
    """
    if asked is not None:
        if (Path(asked) / "results.json").exists():
            raise ConfigError(f"--out {asked}: already contains results.json; use another folder")
        return Path(asked)
    names = (FOLDER if i == 1 else f"{FOLDER}-{i}" for i in range(1, 10_000))
    return next(path for name in names if not ((path := Path(name)) / "results.json").exists())


def _run(job: Job, folder: Path, launch: Launch, phases: Phases, options: Namespace, out: Printer) -> int:
    """Start, measure, and on the root conclude, write and print."""
    from steptime.bench.host_memory import sampled
    from steptime.bench.phases import job_start_s, job_started
    from steptime.bench.rank_log import LOG, progress
    from steptime.bench.rank_run import BenchOptions, measure_all, stages
    from steptime.bench.spread import spread
    from steptime.bench.world import finish, start
    from steptime.report import bench_tables as view
    from steptime.report.table import to_text

    phases.end("imports")
    if (began := job_start_s()) is not None:
        LOG.info(job_started(began))
    world = start(launch, options.device)
    phases.end("init")
    LOG.info("world_size=%d", world.world_size)
    job, notes = spread(job, world.world_size)
    chosen = BenchOptions(
        folder, options.seconds, options.steps, options.seed, options.only, tuple(options.layouts), options.trace
    )
    with sampled(SAMPLE_S) as host:
        raw = measure_all(job, world, chosen, phases, progress(stages(chosen, world), "benchmark"))
    if world.is_root:
        LOG.info("\n".join(phases.lines))
        raw = raw._replace(notes=[*notes, *raw.notes], host=host.row())
        found = _concluded(job, raw, world, folder, options)
        sections = view.sections(found)
        LOG.debug(to_text(sections))
        out.answer(lambda: found.document, lambda: sections)
    finish(world)
    return 0


def _concluded(job: Job, raw: Raw, world: World, folder: Path, options: Namespace) -> BenchResults:
    """The machine file, the estimates, and all files of the results."""
    from steptime.bench.conclude import BenchResults, conclude, results, write
    from steptime.bench.device import describe
    from steptime.bench.diagnostics import diagnostics, text
    from steptime.bench.machine_file import Provenance
    from steptime.bench.rank_log import LOG

    device = describe(world.device)
    command = shlex.join(["3dtrn", "bench", *options.words, *_arguments(options)])
    header = diagnostics(world, job.to_config(), options.seed)
    provenance = Provenance(command, f"{datetime.now(UTC):%Y-%m-%d}", device.name, header["torch"]["version"])
    found = conclude(job, raw, world, device, provenance, folder / "machine.yaml")
    LOG.debug(text(header))  # the terminal is for the answer
    run = write(
        folder, BenchResults(world.line, device, raw, found, {**results(raw, found), "diagnostics": header}, [])
    )
    return _with_rows(run, folder)


def _with_rows(run: BenchResults, folder: Path) -> BenchResults:
    """The measured steps as rows that `3dtrn validate --measurements` reads, each with its prediction."""
    from steptime.validation.measurement_csv import append, job_cells

    if not run.raw.steps:
        return run
    path = folder / "predicted_vs_measured.csv"
    path.unlink(missing_ok=True)
    for step, predicted in zip(run.raw.steps, run.found.estimates, strict=True):
        row, peaks = step.row, [peak for peak in step.row.allocated_peak_bytes if peak is not None]
        seconds = getattr(row.timing, run.device.statistic)
        cells = job_cells(predicted.job, seconds) | {
            "id": f"{row.layout}-{row.ranks}",
            "step_time_kind": f"{run.device.statistic.removesuffix('_s')} of {row.timing.reps} steps",
            "peak_memory_gb": repr(max(peaks) / GIB) if peaks else "",
            "mem_metric": "allocated, GiB" if peaks else "",
            "note": run.world_line,
            "predicted_step_s": repr(predicted.step_s),
            "predicted_memory_gib": repr(predicted.memory.peak_allocated_bytes / GIB),
        }
        append(cells, str(path))
    return run._replace(files=[*run.files, str(path)])
