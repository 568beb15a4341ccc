"""The measured runs nearest to a job, how they differ from it, and how near they are in one word."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any, Literal, NamedTuple

from steptime.answer.features import FEATURES, of_run
from steptime.answer.measured import AXES, NEAR, FitRun, Measured, RunPlace
from steptime.job.job import Job

NEAREST = 3
_NAMES = {"hidden": "hidden size", "n_layers": "layers", "microbatch": "micro-batch"}


class Evidence(NamedTuple):
    """The measurements behind an interval."""

    word: Literal["measured nearby", "interpolated", "extrapolated"]
    n: int
    """Number of measured cells within `NEAR`."""
    nearest: list[dict[str, Any]]
    """The nearest cells, one run of each: id, what ran, how it differs, distance, measured over predicted."""
    beyond: list[str]


def evidence(place: RunPlace, found: Measured, away: Sequence[float], beyond: list[str]) -> Evidence:
    """Nearest runs and the word; `away` is the distance of every run, `beyond` what was not measured."""
    near = {run.cell for run, d in zip(found.runs, away, strict=True) if d <= NEAR}
    word: Literal["measured nearby", "interpolated", "extrapolated"] = "extrapolated"
    if not beyond:
        word = "measured nearby" if near else "interpolated"
    return Evidence(word, len(near), nearest(place, found, away), beyond)


def unjudged(job: Job) -> dict[str, str]:
    """What a job has and no judged run had, by its key in a plan, each with a line of the report."""
    found: dict[str, str] = {}
    if job.performance.cpu_offload.share:
        found["performance.cpu_offload"] = (
            "cpu_offload: only three validated runs, DeepSpeed ZeRO-2 on two A100, have optimizer updates on the host"
        )
    if job.model.linear_attention:
        found["model.linear_attention"] = (
            "model: no validated run has linear attention; one compared by hand took 52 % longer than estimated"
        )
    return found


def nearest(place: RunPlace, found: Measured, away: Sequence[float]) -> list[dict[str, Any]]:
    """The nearest cells, one run of each."""
    seen: set[int] = set()
    out: list[dict[str, Any]] = []
    for d, i in sorted((d, i) for i, d in enumerate(away)):
        run = found.runs[i]
        if run.cell not in seen:
            seen.add(run.cell)
            ratio = round(exp(run.log_ratio), 4)
            differs = differences(place, run)
            out.append({"id": run.id, "distance": round(d, 3), "measured_over_predicted": ratio, "differs": differs})
        if len(out) == NEAREST:
            break
    return out


def differences(place: RunPlace, run: FitRun) -> list[str]:
    """How a run differs from the job: "software nemo@24.09", "experts 128", "devices 64"."""
    fields = ("accelerator", "precision", "software", "recompute", "layers")
    out = [
        f"{name} {getattr(run.place.kind, name)}"
        for name in fields
        if getattr(run.place.kind, name) != getattr(place.kind, name)
    ]
    known = zip(FEATURES, of_run(run.id), place.features, strict=False)  # a job's place and a run may have none
    out += [f"{name} {theirs}" for name, theirs, ours in known if theirs != ours and None not in (theirs, ours)]
    pairs = zip(AXES, run.place.at, place.at, strict=True)
    return out + [f"{_NAMES.get(axis, axis)} {theirs:,.0f}" for axis, theirs, ours in pairs if theirs != ours]


def projected(place: RunPlace, found: Measured, away: Sequence[float]) -> RunPlace:
    """The place with the nearest run's accelerator, precision, software or kind of layers where its own was not measured."""
    near = found.runs[away.index(min(away))].place.kind
    kind, kinds = place.kind, found.votes.keys()
    if kind in found.votes:
        return place
    if not any(other.accelerator == kind.accelerator for other in kinds):
        kind = kind._replace(accelerator=near.accelerator)
    if not any(other.profile == kind.profile for other in kinds):
        kind = kind._replace(software=near.software, family=near.family)
    if not any(other.accelerator == kind.accelerator and other.width == kind.width for other in kinds):
        kind = kind._replace(precision=near.precision)
    if not any(other.layers == kind.layers for other in kinds):
        kind = kind._replace(layers=near.layers)
    return place._replace(kind=kind)
