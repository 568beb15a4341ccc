"""Calibrates a job with a team's own measured steps: `3dtrn PLAN --calibrate measured.yaml`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from steptime.answer.evidence import unjudged
from steptime.answer.result import estimate
from steptime.base.config import Config, ConfigError, build, show
from steptime.base.core_schemas import Field
from steptime.base.document import parse, read_each, read_source
from steptime.base.units import Seconds
from steptime.job.edit import anchor
from steptime.job.job import Job
from steptime.software.calibration import Calibration


class MeasuredEntry(Config, allow_inf_nan=False):
    """One entry of the file: a config, by path or inline, and its measured step time."""

    config: str | dict[str, Any]
    step_s: Seconds | None = Field(None, gt=0)
    tokens_per_s_per_device: float | None = Field(None, gt=0)


class MeasuredRun(NamedTuple):
    """One run: the accelerator and precision it counts for, its measured over its estimated step, and what it covers."""

    accelerator: str
    precision: str
    ratio: float
    covers: frozenset[str]
    """Keys of what no judged run had (`unjudged`)."""


def calibrated(job: Job, path: str) -> Job:
    """The job with the calibration from the runs on its accelerator in its precision.

    Raises:
        ConfigError: a bad file, one line per problem; no run on this accelerator in this precision; or the job has a calibration
        already.
    """
    if job.performance.calibration is not None:
        raise ConfigError("--calibrate: the plan already has performance.calibration; use only one of them")
    place = (job.machine.accelerator.name, job.software.precision)
    found = runs(path)
    own = [run for run in found if (run.accelerator, run.precision) == place]
    if not own:
        counts = Counter(f"{run.accelerator} {run.precision}" for run in found)
        there = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        raise ConfigError(f"{path}: no run on {' in '.join(place)}, which this job needs; runs in the file: {there}")
    covers = frozenset[str]().union(*(run.covers for run in own))
    return job.replace(**{"performance.calibration": Calibration.of([run.ratio for run in own], path, covers)})


def runs(path: str) -> list[MeasuredRun]:
    """The measured runs of a file: a list of {config, step_s} or {config, tokens_per_s_per_device}.

    Paths inside are relative to the file.

    Raises:
        ConfigError: one line per problem of the file or of a config in it.
    """
    if path == "-":
        raise ConfigError("--calibrate -: not supported, standard input is the plan; use a file")
    entries = parse(read_source(Path(path))[0], path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of {{config, step_s}} (got {show(entries)})")
    numbered = [(f"{path}: [{i}]", entry) for i, entry in enumerate(entries)]
    return read_each(numbered, lambda one: _run(build(MeasuredEntry, one[1], one[0]), Path(path).parent, one[0]))


def _run(entry: MeasuredEntry, base: Path, at: str) -> MeasuredRun:
    """The estimate of one entry, at the location `at` in the file, compared with its measurement.

    Raises:
        ConfigError: problems under the keys of the entry.
    """
    step_s, rate = entry.step_s, entry.tokens_per_s_per_device
    if (step_s is None) == (rate is None):
        raise ConfigError(f"{at}.step_s: set either step_s or tokens_per_s_per_device")
    job = _job(entry.config, base, at)
    if job.performance.calibration is not None:
        raise ConfigError(
            f"{at}.config: performance.calibration: remove it; a run is compared with the uncalibrated estimate"
        )
    if rate is not None:
        step_s = job.data.gbs * job.data.seqlen / (rate * job.parallelism.devices)
    assert step_s is not None
    predicted = estimate(job).step_s
    place = (job.machine.accelerator.name, job.software.precision)
    return MeasuredRun(*place, step_s / predicted, frozenset(unjudged(job)))


def _job(config: str | dict[str, Any], base: Path, at: str) -> Job:
    """The job of a path or of an inline mapping."""
    try:
        if isinstance(config, str):
            return Job.load(base / config)
        data = dict(config)
        anchor(data, base)
        return build(Job, data)
    except ConfigError as error:
        raise ConfigError(f"{at}.config: {problem}" for problem in error.problems) from None
