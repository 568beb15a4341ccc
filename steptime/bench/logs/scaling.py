"""Scaling over 1, 2, 4 ... processes from the results of several benchmark runs: throughput, speed-up, efficiency, memory.

Runs of one layout (ddp, tp, fsdp2+tp) are one series; its baseline is the run on one rank ("single"), else its smallest.
Weak scaling: tokens per step grow with the ranks; strong: they stay the same.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from steptime.base.config import ConfigError
from steptime.bench.timings import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
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
    problems: list[str] = []
    runs = [_read(path, i, step, problems) for i, step in enumerate(steps)]
    if problems:
        raise ConfigError(problems)
    return [run._replace(predictor=_predictor(document, run)) for run in runs]


def _predictor(document: dict[str, Any], run: ScalingRun) -> str:
    """The machine that the results measured, else the one of the config."""
    named = _at(document, "machine.name") or _at(run.config, "hardware.node_type")
    return named if isinstance(named, str) else ""


def _read(path: str, i: int, step: Any, problems: list[str]) -> ScalingRun:
    """One step's row; problems are added to `problems`, and the row is then unusable."""
    fields = step if isinstance(step, dict) else {}

    def wrong(key: str, expected: str) -> None:
        problems.append(f"{path}: steps[{i}].{key}: expected {expected} (got {_short(fields.get(key))})")

    def positive(key: str) -> float:
        value: Any = fields.get(key)
        if not _positive(value):
            wrong(key, "a positive number")
            return math.nan
        return float(value)

    def count(key: str) -> int:
        value: Any = fields.get(key)
        if not _positive(value) or value != int(value):
            wrong(key, "a positive whole number")
            return 0
        return int(value)

    def largest(key: str) -> float | None:
        values = fields.get(key)
        known = [value for value in values if value is not None] if isinstance(values, list) else []
        if not isinstance(values, list | None) or not all(map(_positive_or_zero, known)):
            wrong(key, "a list of bytes, one per rank")
            return None
        return float(max(known)) if known else None

    for key, kind, name in (("layout", str, "a name"), ("config", dict, "the resolved config")):
        if not isinstance(fields.get(key), kind):
            wrong(key, name)
    predicted = None if fields.get("predicted_step_s") is None else positive("predicted_step_s")
    return ScalingRun(
        path, str(fields.get("layout")), count("ranks"), positive("tokens_per_step"), fields.get("config", {}),
        positive("min_s"), positive("median_s"), positive("p90_s"), count("reps"),
        largest("allocated_peak_bytes"), largest("reserved_peak_bytes"), predicted,
    )  # fmt: skip


def _positive(value: Any) -> bool:
    return _positive_or_zero(value) and value > 0


def _positive_or_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _short(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:40]


def series(runs: list[ScalingRun], baseline: int | None = None) -> list[ScalingSeries]:
    """The runs as series, each against its baseline.

    Args:
        runs: of all files.
        baseline: the number of ranks that every series must begin with; None takes its smallest.

    Raises:
        ConfigError: a series has no baseline, one number of ranks twice, other models or batches; one line each.
    """
    groups: dict[str, list[ScalingRun]] = {}
    for run in runs:
        groups.setdefault(run.layout, []).append(run)
    single = groups.get(SINGLE, [])
    found: list[ScalingSeries] = []
    problems: list[str] = []
    for layout, group in groups.items():
        if group is single and len(groups) > 1:
            continue  # the baseline of all other runs
        members = group if any(run.ranks == 1 for run in group) or group is single else single + group
        try:
            found.append(_series(layout, sorted(members, key=lambda run: run.ranks), baseline))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


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
            f"{layout}: no baseline; the only run has {base.ranks} ranks ({base.file}); give a smaller one too"
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
                both = f"{_short(ours.get(key))} in {base.file}, {_short(theirs.get(key))} in {run.file}"
                lines.append(f"{key} differs: {both}; scale one plan over the ranks alone")
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
