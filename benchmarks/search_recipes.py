"""Where published layouts rank in the space of all layouts that fit, by the search.

    python benchmarks/search_recipes.py [--most 12]

Of NVIDIA's published pre-training runs (`3dtrn validate`) the largest of each model, accelerator and precision. A layout that its
authors tuned should be among the fastest of the space; whatever the search calls faster they may not have been able to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.search import estimated
from steptime.search.changes import words
from steptime.search.recompute import MAPPING, WORD
from steptime.search.run import run
from steptime.search.search import Asked, Layout
from steptime.search.space import Axes
from steptime.validation.judgement import judge_rows
from steptime.validation.select import select
from steptime.validation.slices import leads


def recipes(most: int) -> list[tuple[str, Job]]:
    """One run of each model, accelerator and precision: that on the most devices."""
    found: dict[tuple[str, ...], tuple[int, str, Job]] = {}
    for j in judge_rows(select(None, None, None, "all")):
        if j.skipped or j.excluded or not leads(j) or j.config is None or not j.measured_step_s:
            continue
        try:
            job = Job.model_validate(j.config)
        except (ConfigError, ValueError):
            continue
        if not estimated.covered(job):
            continue
        key = tuple(j.row.text(column) for column in ("model_name", "gpu", "precision"))
        size = job.parallelism.devices
        if key not in found or size > found[key][0]:
            found[key] = size, j.row.id, job
    ordered = sorted(found.values(), key=lambda entry: (-entry[0], entry[1]))
    return [(name, job) for _, name, job in ordered[:most]]


BEST = 0.05
"""A layout ranks where at most this share of those that fit is faster."""


class Rank(NamedTuple):
    """Where a layout stands among all that fit."""

    faster: float
    """Share of them."""
    over: float
    """Its step over that of the best."""
    fitting: int
    best: Layout | None


def rank(job: Job, axes: Axes | None = None) -> Rank:
    """Rank a job on its own devices and batch."""
    found = run(job, Asked((job.parallelism.devices,), (job.data.gbs,), axes or Axes()))
    own = estimate(job).step_s
    steps = found.columns["step_s"]
    over = own / found.best.step_s if found.best else float("nan")
    faster = steps < own * (1.0 - 1e-9)  # its own column differs by the order of a sum
    return Rank(float(faster.mean()), over, steps.size, found.best)


LATER = ("recompute", "zero_level", "sp", "cp", "vpp")
"""Axes on which a run of 2020 to 2022 had one value, and software has more since."""


def settled(job: Job, names: Sequence[str]) -> Axes:
    """Some axes as the job has them."""
    said, p = job.performance, job.parallelism
    key, value = WORD, said.activation_checkpointing_type or "none"
    if said.recompute is not None:
        key, value = MAPPING, said.recompute.model_dump(exclude_unset=True)
    own = {"zero_level": job.zero_level, "sp": job.sp, "cp": p.cp, "vpp": p.vpp, "recompute": value}
    return Axes({key if name == "recompute" else name: (own[name],) for name in names})


def reason(job: Job) -> str:
    """The share of layouts that is faster where one of the axes is the job's own, or all of them."""
    shares = [(" ".join(names), rank(job, settled(job, names))) for names in [*((name,) for name in LATER), LATER]]
    return ", ".join(f"{names} {100.0 * of.faster:.1f} % of {of.fitting:,}" for names, of in shares)


def main() -> None:
    """Print a row for each recipe, and what keeps those from the best that are not among them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=12)
    options = parser.parse_args()
    print("| run | devices | layouts that fit | faster | step over the best |")
    print("|---|---:|---:|---:|---:|")
    why: list[str] = []
    for name, job in recipes(options.most):
        of = rank(job)
        devices = f"{job.parallelism.devices:,}"
        print(f"| {name} | {devices} | {of.fitting:,} | {100.0 * of.faster:.2f} % | {of.over:.2f} |", flush=True)
        if of.faster > BEST:
            best = words(of.best.changes) if of.best else "none"
            why.append(f"{name}: faster, with its own {reason(job)}; the best: {best}")
    print(*why, sep="\n")


if __name__ == "__main__":
    main()
