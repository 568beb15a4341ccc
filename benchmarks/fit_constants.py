"""Fit the constants of steptime/data/efficiency.yaml on the measured rows marked `fit`, and on nothing else.

python benchmarks/fit_constants.py --date 2026-11-21 [--check]

What is fitted: for each accelerator and GEMM dtype the share of the rate measured alone that a training step reaches, and for
each software profile and release one factor on the seconds of its kernels. NVIDIA's own frameworks come first; other trainers
then get their factor beside the shares found. Each constant has a prior (a normal on its logarithm), so a
constant that few runs speak for stays near it. The loss is soft-L1 of log(predicted / measured), one vote per cell. The same
rows give the same file; --check says whether the file is what the rows give.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from steptime.answer.result import estimate
from steptime.cost.rates import peak_dtype
from steptime.job.job import Job
from steptime.software.efficiency import EFFICIENCY_FILE, NOTHING_FITTED, Efficiency, efficiency, share_family, using
from steptime.software.profiles import extended, profile_names
from steptime.validation.judgement import judge
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import headline, with_experts

MEASURED_SIGMA, ASSUMED_SIGMA = 0.03, 0.10
"""Prior of a sustained share around 1: the machine file's rate was measured, or is a guess from another figure."""
GAP_SIGMA = 0.5
"""Prior of the launch gaps of a low-precision recipe over those of bf16."""
PROFILE_SIGMA = 0.10
"""Prior of a framework's factor around 1."""
RELEASE_SIGMA = 0.04
"""Prior of a release's factor around its framework's: the same cell in another release differs by 2.7 % in the median."""
REFERENCE = {"megatron-core", "megatron-2021"}
"""Profiles whose factor is 1: the model is theirs, op by op; a factor says how another framework differs from it."""
ROBUST = 0.05
"""Errors beyond this count in proportion, not squared."""
ERROR_SIGMA = 0.05
"""Spread of errors that priors are weighed against."""
STEP = 0.01
"""Of the finite differences, in the logarithm."""
FEWEST = 5
"""An accelerator has a share of its own, and a base profile a factor, from so many runs on."""
ROUNDS = 12
CLOSE = 5e-4
FOLDS = 12

Floats = np.ndarray[Any, np.dtype[np.float64]]

Name = tuple[str, ...]


@dataclass
class Run:
    """One measured run and the constants that speak in it."""

    id: str
    job: Job
    measured_s: float
    weight: float
    names: tuple[Name, ...]
    guessed: bool
    """Whether the machine file's GEMM rate is a guess."""
    model: str
    release: str
    nvidia: bool
    """A run of NVIDIA's own frameworks, or of Megatron-LM on 8 x B200: these set the shares of the accelerators."""
    source: str = ""
    native: bool = False
    """A run of the PyTorch-native stack."""

    def error(self, constants: Efficiency) -> float:
        """log(predicted / measured)."""
        with using(constants):
            return log(estimate(self.job).step_s / self.measured_s)


def runs() -> list[Run]:
    """The headline rows marked `fit`, one vote per cell; without mixtures of experts, which have no constant of their own."""
    judged = [
        j
        for j in headline(judge(row) for row in shipped() if row.text("split") == "fit")
        if j.step_error is not None and not with_experts(j)
    ]
    votes = Counter(j.cell for j in judged)
    found = []
    for j in judged:
        job = to_job(to_config(j.row))
        profile, _, release = job.software.name.partition("@")
        device = job.machine.accelerator
        names: list[Name] = [("share", device.same_chip_as or device.name, share_family(job.software.precision))]
        if profile not in REFERENCE:
            names.append(("factor", profile))
        if release:
            names.append(("factor", job.software.name))
        if job.software.recipe:
            names.append(("gap",))
        own = job.software.family.startswith("megatron") and j.row.file == "nvidia"
        nvidia = own or j.row.group == "simumax"
        assert j.measured_step_s is not None
        found.append(
            Run(
                j.row.id,
                job,
                j.measured_step_s,
                1.0 / votes[j.cell],
                tuple(names),
                is_guess(job),
                j.row.text("model_name"),
                job.software.name,
                nvidia,
                j.row.group,
                j.row.file == "native",
            )
        )
    return without_few(found)


def without_few(rows: list[Run]) -> list[Run]:
    """The runs without constants that few of them speak for.

    Few runs of an accelerator say more of their trainer; few of a base profile, which any trainer without a profile of its own
    has, say more of one trainer than of all.
    """
    speak = Counter(name for run in rows for name in run.names)
    general = {("factor", profile) for profile in base_profiles()}
    few = {name for name, count in speak.items() if (name[0] == "share" or name in general) and count < FEWEST}
    return [replace(run, names=tuple(name for name in run.names if name not in few)) for run in rows]


def base_profiles() -> set[str]:
    """Profiles that others extend, but for those whose factor is 1."""
    return {extended(profile) for profile in profile_names()} - {""} - REFERENCE


def is_guess(job: Job) -> bool:
    """Whether the GEMM rate of a job's precision was not measured on the machine but guessed from another figure.

    Block-scaled recipes run at a rate that was measured without block scales.
    """
    dtype = peak_dtype(job.machine.accelerator, job.software.precision)
    if job.software.recipe and job.software.recipe.microscaling:
        return True
    source = job.machine.provenance.get(f"accelerator.sustained_flops.{dtype}", "assumed")
    return source.startswith("assumed")


def sigma(name: Name, measured: Collection[Name]) -> float:
    """The prior's spread."""
    if name[0] == "share":
        return MEASURED_SIGMA if name in measured else ASSUMED_SIGMA
    if name[0] == "gap":
        return GAP_SIGMA
    return RELEASE_SIGMA if "@" in name[1] else PROFILE_SIGMA


def constants(x: dict[Name, float]) -> Efficiency:
    """The constants whose logarithms are `x`; a release's factor stands on its profile's.

    A base profile without one has the geometric mean of the trainers that extend it, one vote each: what to expect of another.
    """
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    factors: dict[str, float] = {}
    for name, value in x.items():
        if name[0] == "share":
            shares[name[1]][name[2]] = exp(value)
        elif name[0] == "factor":
            profile = name[1].partition("@")[0]
            beneath = x.get(("factor", profile), 0.0) if profile != name[1] else 0.0
            factors[name[1]] = exp(value + beneath)
    fitted = [(name, log(value)) for name, value in factors.items() if "@" not in name]
    for base in base_profiles() - factors.keys():
        if trainers := [value for name, value in fitted if extended(name) == base]:
            factors[base] = exp(sum(trainers) / len(trainers))
    every = sorted(value for name, value in x.items() if name[0] == "share")
    middle = exp(every[len(every) // 2]) if every else 1.0
    return Efficiency(dict(shares), middle, exp(x.get(("gap",), 0.0)), factors)


def fit(
    rows: Sequence[Run], known: dict[Name, float], start: Mapping[Name, float] = {}, rounds: int = ROUNDS
) -> dict[Name, float]:
    """Logarithms of the constants that `known` lacks, and those: Gauss-Newton with soft-L1 weights and priors."""
    names = sorted({name for run in rows for name in run.names} - known.keys())
    index = {name: i for i, name in enumerate(names)}
    x = np.array([start.get(name, 0.0) for name in names])
    votes = np.array([run.weight for run in rows])
    measured = {name for run in rows if not run.guessed for name in run.names}
    prior = np.diag([(ERROR_SIGMA / sigma(name, measured)) ** 2 for name in names])
    for _ in range(rounds):
        now = dict(zip(names, map(float, x), strict=True)) | known
        errors = np.array([run.error(constants(now)) for run in rows])
        slopes = slopes_of(rows, now, errors, index)
        weights = votes / np.sqrt(1.0 + (errors / ROBUST) ** 2)
        left = slopes.T @ (weights[:, None] * slopes) + prior
        change = np.linalg.solve(left, -slopes.T @ (weights * errors) - prior @ x)
        x = x + change
        print(
            f"largest change {np.abs(change).max():.4f}, mean |error| {np.average(np.abs(errors), weights=votes):.4f}",
            file=sys.stderr,
        )
        if np.abs(change).max() < CLOSE:
            break
    return dict(zip(names, map(float, x), strict=True)) | known


def slopes_of(rows: Sequence[Run], now: dict[Name, float], errors: Floats, index: dict[Name, int]) -> Floats:
    """Derivative of every error by the logarithm of every constant that is sought: one more estimate for each.

    A row has one share, and its profile's and its release's factor move it alike.
    """
    slopes = np.zeros((len(rows), len(index)))
    for kind in ("share", "factor", "gap"):
        mine = [name for name in now if name[0] == kind and "@" not in name[-1]]
        moved = constants(now | {name: now[name] + STEP for name in mine})
        for r, run in enumerate(rows):
            sought = [index[name] for name in run.names if name[0] == kind and name in index]
            if sought:
                slopes[r, sought] = (run.error(moved) - errors[r]) / STEP
    return slopes


def cross_validate(rows: Sequence[Run], start: Mapping[Name, float], fold_of: Callable[[Run], str]) -> dict[str, float]:
    """Errors of runs that the constants were not fitted on, fold by fold, with the release unknown; from `start`, two rounds."""
    rows = [replace(run, names=tuple(name for name in run.names if "@" not in name[-1])) for run in rows]
    folds = sorted({fold_of(run) for run in rows})
    found: list[tuple[float, float]] = []
    for i in range(min(FOLDS, len(folds))):
        held = set(folds[i::FOLDS])
        now = constants(fit([run for run in rows if fold_of(run) not in held], {}, start, 2))
        found += [(exp(run.error(now)) - 1.0, run.weight) for run in rows if fold_of(run) in held]
    return weighted(found)


def unseen_source(rows: Sequence[Run], mine: Sequence[Run], x: Mapping[Name, float]) -> dict[str, float]:
    """Errors of each source of `mine` under factors of trainers that are fitted on all other runs; two rounds from `x`."""
    found: list[tuple[float, float]] = []
    for source in sorted({run.source for run in mine}):
        held = [run for run in mine if run.source == source]
        sought = {name for run in held for name in run.names if name[0] == "factor"}
        known = {name: value for name, value in x.items() if name not in sought}
        rest = [run for run in rows if run not in held and sought & {*run.names}]
        now = constants(fit(rest, known, x, 2) if rest else known)
        found += [(exp(run.error(now)) - 1.0, run.weight) for run in held]
    return weighted(found)


def errors_unseen(rows: Sequence[Run], fold_of: Mapping[str, object]) -> dict[str, float]:
    """log(predicted / measured) by id, with constants that one round from the shipped ones fits without the run's fold."""
    start = logarithms(efficiency())
    folds = sorted({str(fold_of[run.id]) for run in rows})
    found: dict[str, float] = {}
    for i in range(min(FOLDS, len(folds))):
        held = set(folds[i::FOLDS])
        known = [run for run in rows if str(fold_of[run.id]) not in held]
        shares = fit([run for run in known if run.nvidia], {}, start, 1)
        now = constants(fit([run for run in known if not run.nvidia], shares, start, 1))
        found |= {run.id: run.error(now) for run in rows if str(fold_of[run.id]) in held}
    return found


def logarithms(now: Efficiency) -> dict[Name, float]:
    """The inverse of `constants`."""
    x: dict[Name, float] = {("gap",): log(now.recipe_gap)}
    x |= {("share", a, d): log(value) for a, by in now.sustained_share.items() for d, value in by.items()}
    for name, value in now.compute_factor.items():
        x["factor", name] = log(value / now.compute_factor.get(name.partition("@")[0], 1.0) if "@" in name else value)
    return x


def figures(rows: Sequence[Run], now: Efficiency) -> dict[str, float]:
    """Weighted median, mean, p90 and bias of the errors, in per cent."""
    return weighted((exp(run.error(now)) - 1.0, run.weight) for run in rows)


def weighted(found: Iterable[tuple[float, float]]) -> dict[str, float]:
    """The same of (error, weight) pairs."""
    errors = sorted(found, key=lambda pair: abs(pair[0]))
    total = sum(weight for _, weight in errors)

    def quantile(share: float) -> float:
        seen = 0.0
        for error, weight in errors:
            seen += weight
            if seen >= share * total:
                return abs(error)
        return abs(errors[-1][0])

    mean = sum(abs(error) * weight for error, weight in errors) / total
    bias = sum(error * weight for error, weight in errors) / total
    return {
        k: round(100.0 * v, 1)
        for k, v in {"median": quantile(0.5), "mean": mean, "p90": quantile(0.9), "bias": bias}.items()
    }


def document(rows: Sequence[Run], x: dict[Name, float], date: str) -> str:
    """The text of data/efficiency.yaml."""
    now = rounded(constants(x))
    leading = [run for run in rows if run.nvidia]
    speak = Counter(name for run in rows for name in run.names)
    body = {
        "written_by": f"python benchmarks/fit_constants.py --date {date}",
        "source": "fitted on the measured rows marked fit, with priors (benchmarks/fit_constants.py)",
        "rows": len(rows),
        "cells": round(sum(run.weight for run in rows)),
        "errors_percent": {"without this file": figures(rows, NOTHING_FITTED), "with it": figures(rows, now)},
        "cross_validation_percent": {
            "rows": len(leading),
            "unseen model x accelerator": cross_validate(
                leading, x, lambda run: f"{run.model} {run.job.machine.accelerator.name}"
            ),
            "unseen release": cross_validate(leading, x, lambda run: run.release),
        },
        "cross_validation_native_percent": {
            "rows": len(native := [run for run in rows if run.native]),
            "unseen source": unseen_source(rows, native, x),
        },
        "rows_that_speak": {" ".join(name[1:]) or "recipe gap": count for name, count in sorted(speak.items())},
        **now._asdict(),
    }
    return yaml.safe_dump(body, sort_keys=False, width=118)


def rounded(now: Efficiency) -> Efficiency:
    """Three decimals: no run speaks for more."""
    shares = {a: {d: round(v, 3) for d, v in sorted(by.items())} for a, by in sorted(now.sustained_share.items())}
    factors = {name: round(value, 3) for name, value in sorted(now.compute_factor.items())}
    return Efficiency(shares, round(now.default_share, 3), round(now.recipe_gap, 3), factors)


def main() -> int:
    """Fit, and write the file or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="the date to write into the file")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file differs")
    asked = parser.parse_args()
    rows = runs()
    shares = fit([run for run in rows if run.nvidia], {})
    text = document(rows, fit([run for run in rows if not run.nvidia], shares), asked.date)
    if asked.check:
        return int(Path(EFFICIENCY_FILE).read_text(encoding="utf-8") != text)
    Path(EFFICIENCY_FILE).write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
