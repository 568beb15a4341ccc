"""A plan as the YAML that `Job.load` reads back to the same Job."""

from __future__ import annotations

from typing import Any

import yaml

from steptime.job import Job
from steptime.launch.reading import Reading, to_job


def plan_yaml(plan: Reading | Job) -> str:
    """The plan as YAML: what a reading says, or all that a job resolves to.

    Raises:
        ConfigError: a reading that is no job (see `to_job`).
    """
    raise AssertionError(f"{plan}{Any}{yaml}{to_job}")
