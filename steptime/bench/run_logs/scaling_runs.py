"""Scaling over 1, 2, 4 ... processes from the results of several benchmark runs: throughput, speed-up, efficiency, memory.

Runs of one layout (ddp, tp, fsdp2+tp) are one series; its baseline is the run on one rank ("single"), else its smallest.
Weak scaling: tokens per step grow with the ranks; strong: they stay the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from steptime.base.config import Config, ConfigError, build, show
from steptime.base.core_schemas import Field
from steptime.base.document import read_each, unreadable
from steptime.base.grouping import grouped
from steptime.bench.timings import SCHEMA

ScalingKind = Literal["weak", "strong"]

_SAME = (
    "model", "data.seqlen", "performance.precision", "performance.activation_checkpointing_type", "performance.recompute",
)  # fmt: skip
"""Settings that all runs of a series must share, so that only the number of ranks differs."""
SINGLE = "single"
"""The layout of a run on one rank: the baseline of all others."""


class ScalingRun(NamedTuple):
    """One measured step of one results.json."""

    file: str
    layout: str
    ranks: int
    tokens_per_step: float
    """Tokens per step of the whole job."""
    config: dict[str, Any]
    min_s: float
    median_s: float
    p90_s: float
    reps: int
    allocated_peak_bytes: float | None
    """Peak of the rank with the largest."""
    reserved_peak_bytes: float | None
    predicted_step_s: float | None
    predictor: str = ""
    """The machine that the estimate is for; "" where the results do not say."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job, from the median."""
        return self.tokens_per_step / self.median_s


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Peaks = list[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None] | None


class _Step(Config, extra_fields_behavior="ignore"):
    """What is read of a step in results.json, whose rows are `bench.runs.step.StepRow` with its timing in place."""

    layout: str
    ranks: int = Field(gt=0)
    tokens_per_step: float = Field(gt=0, allow_inf_nan=False)
    config: dict[str, Any]
    min_s: _Seconds
    median_s: _Seconds
    p90_s: _Seconds
    reps: int = Field(gt=0)
    allocated_peak_bytes: _Peaks = None
    """By rank."""
    reserved_peak_bytes: _Peaks = None
    predicted_step_s: _Seconds | None = None


class Point(NamedTuple):
    """One run compared with its baseline."""

    run: ScalingRun
    speed_up: float
    """Tokens per second divided by the baseline's."""
    efficiency: float
    """speed_up / (ranks / baseline's ranks)."""
    predicted_efficiency: float | None
    """The same from the predicted step times; None where one is missing."""
    memory_ratio: float | None
    """Allocated peak divided by the baseline's."""


class ScalingSeries(NamedTuple):
    """Runs of one layout, fewest ranks first; the first is the baseline."""

    layout: str
    kind: ScalingKind
    points: list[Point]


def read_runs(path: str) -> list[ScalingRun]:
    """The measured steps of a results.json (schema "3dtrn-bench/1").

    Raises:
        ConfigError: the file cannot be read or is none; one line per missing or wrong key.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({str(error)[:80]})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ConfigError(f"{path}: schema: expected {SCHEMA!r} (got {found!r}); give results.json of `3dtrn bench`")
    steps = document.get("steps")
    if not isinstance(steps, list) or not steps:
        raise ConfigError(
            f"{path}: steps: expected measured steps (got {'none' if not steps else type(steps).__name__})"
        )
    return read_each(
        enumerate(steps), lambda step: _run(path, build(_Step, step[1], f"{path}: steps[{step[0]}]"), document)
    )


def _run(path: str, step: _Step, document: dict[str, Any]) -> ScalingRun:
    """A step's row; its predictor is the machine that the results measured, else the one of the config."""
    named = _at(document, "machine.name") or _at(step.config, "hardware.node_type")
    allocated, reserved = (
        max((peak for peak in peaks or [] if peak is not None), default=None)
        for peaks in (step.allocated_peak_bytes, step.reserved_peak_bytes)
    )
    return ScalingRun(
        path, step.layout, step.ranks, step.tokens_per_step, step.config, step.min_s, step.median_s, step.p90_s, step.reps,
        allocated, reserved, step.predicted_step_s, named if isinstance(named, str) else "",
    )  # fmt: skip


def series(runs: list[ScalingRun], baseline: int | None = None) -> list[ScalingSeries]:
    """The runs as series, each against its `baseline`, a number of ranks; if not set, its smallest.

    Raises:
        ConfigError: a series has no baseline, one number of ranks twice, other models or batches; one line each.
    """
    groups = grouped(runs, lambda run: run.layout)
    single = groups.get(SINGLE, [])
    if single and len(groups) > 1:
        del groups[SINGLE]  # the baseline of all other runs

    def one(layout: str) -> ScalingSeries:
        group = groups[layout]
        members = group if group is single or any(run.ranks == 1 for run in group) else single + group
        return _series(layout, sorted(members, key=lambda run: run.ranks), baseline)

    return read_each(groups, one)


def _series(layout: str, runs: list[ScalingRun], baseline: int | None) -> ScalingSeries:
    """One layout's runs, fewest ranks first."""
    base = runs[0]
    for one, other in pairwise(runs):
        if one.ranks == other.ranks:
            where = one.file if one.file == other.file else f"{one.file} and {other.file}"
            raise ConfigError(f"{layout}: {one.ranks} ranks appear twice ({where}); give one run per rank count")
    if baseline is not None and base.ranks != baseline:
        raise ConfigError(f"{layout}: no baseline on {baseline} ranks; the smallest run has {base.ranks} ({base.file})")
    if len(runs) == 1:
        raise ConfigError(
            f"{layout}: no baseline; the only run has {base.ranks} ranks ({base.file}); also give a run with fewer ranks"
        )
    problems = [line for run in runs[1:] for line in _differences(base, run)]
    if problems:
        raise ConfigError(f"{layout}: {problem}" for problem in problems)
    return ScalingSeries(layout, _kind(layout, runs), [_point(base, run) for run in runs])


def _differences(base: ScalingRun, run: ScalingRun) -> list[str]:
    """Settings, other than layout and batch, in which two runs differ."""
    lines = []
    for path in _SAME:
        ours, theirs = (dict(_leaves(_at(each.config, path), path)) for each in (base, run))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and key not in {"model.name", "model.source"}:
                both = f"{show(ours.get(key))} in {base.file}, {show(theirs.get(key))} in {run.file}"
                lines.append(f"{key} differs: {both}; only the number of ranks may differ")
    return lines


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{path}.{key}")


def _kind(layout: str, runs: list[ScalingRun]) -> ScalingKind:
    """Weak or strong, by the tokens of a step.

    Raises:
        ConfigError: neither.
    """
    base = runs[0]
    if all(run.tokens_per_step == base.tokens_per_step for run in runs):
        return "strong"
    if all(math.isclose(run.tokens_per_step * base.ranks, base.tokens_per_step * run.ranks) for run in runs):
        return "weak"
    counts = ", ".join(f"{run.tokens_per_step:,g} on {run.ranks} ranks" for run in runs)
    raise ConfigError(
        f"{layout}: tokens per step are neither the same (strong scaling) nor proportional to the ranks (weak): {counts}"
    )


def _point(base: ScalingRun, run: ScalingRun) -> Point:
    speed_up = run.tokens_per_s / base.tokens_per_s
    more = run.ranks / base.ranks
    predicted = None
    if run.predicted_step_s and base.predicted_step_s:
        rates = [each.tokens_per_step / each.predicted_step_s for each in (run, base) if each.predicted_step_s]
        predicted = rates[0] / rates[1] / more
    memory = (
        run.allocated_peak_bytes / base.allocated_peak_bytes
        if run.allocated_peak_bytes and base.allocated_peak_bytes
        else None
    )
    return Point(run, speed_up, speed_up / more, predicted, memory)
