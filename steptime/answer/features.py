"""What a job or a measured run has that counts for no distance, but is named where the two differ.

`data/run_features.json` holds the features of the measured runs in `data/intervals.json`; `python benchmarks/fit_intervals.py`
writes both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from steptime.job.job import Job

FEATURES_FILE = Path(__file__).parents[1] / "data" / "run_features.json"

Feature: TypeAlias = str | int | None

FEATURES: dict[str, Callable[[Job], Feature]] = {
    "attention": lambda job: {"gqa": "grouped heads", "mla": "latent"}[job.model.attention.kind],
    "experts": lambda job: job.model.moe.n_experts if job.model.moe else None,
    "shared experts": lambda job: job.model.moe.n_shared_experts if job.model.moe else None,
    "vpp": lambda job: job.parallelism.vpp,
}
"""Name to what a job has; None where it does not apply."""


def features_of(job: Job) -> tuple[Feature, ...]:
    """The features of a job, in the order of `FEATURES`."""
    return tuple([feature(job) for feature in FEATURES.values()])


def of_run(run_id: str) -> tuple[Feature, ...]:
    """The features of a measured run; empty where the file does not have it."""
    return tuple(_document()["runs"].get(run_id, ()))


@cache
def _document() -> Any:
    return json.loads(FEATURES_FILE.read_bytes())
