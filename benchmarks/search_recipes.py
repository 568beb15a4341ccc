"""Where published layouts rank in the space of all layouts that fit, by the search.

    python benchmarks/search_recipes.py [--most 12]

Of NVIDIA's published pre-training runs (`3dtrn validate`) the largest of each model, accelerator and precision. A layout that its
authors tuned should be among the fastest of the space; whatever the search calls faster they may not have been able to run.
"""

from __future__ import annotations

import argparse
from typing import Any

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.search import walked
from steptime.search.run import run
from steptime.search.search import Asked
from steptime.validation.parallel import judge_rows
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
        if not walked.covered(job):
            continue
        key = tuple(j.row.text(column) for column in ("model_name", "gpu", "precision"))
        size = job.parallelism.devices
        if key not in found or size > found[key][0]:
            found[key] = size, j.row.id, job
    ordered = sorted(found.values(), key=lambda entry: (-entry[0], entry[1]))
    return [(name, job) for _, name, job in ordered[:most]]


def rank(job: Job) -> tuple[float, float, int, Any]:
    """Share of the layouts that fit which are faster, the step over the best one's, how many fit, and the best."""
    found = run(job, Asked((job.parallelism.devices,), (job.data.gbs,)))
    own = estimate(job).step_s
    steps = found.columns["step_s"]
    return float((steps < own).mean()), own / found.best.step_s if found.best else float("nan"), steps.size, found.best


def main() -> None:
    """Print a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=12)
    options = parser.parse_args()
    print("| run | devices | layouts that fit | faster | step over the best |")
    print("|---|---:|---:|---:|---:|")
    for name, job in recipes(options.most):
        share, over, size, _ = rank(job)
        print(f"| {name} | {job.parallelism.devices:,} | {size:,} | {100.0 * share:.2f} % | {over:.2f} |", flush=True)


if __name__ == "__main__":
    main()
