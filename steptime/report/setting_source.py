"""The origin of a setting of the software profile: the plan, or the profile with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steptime.job.job import Job

OWN = "this config"


def setting_source(job: Job, path: str) -> str:
    """The source of one setting, by its dotted path."""
    axis = path.removeprefix("overlap.")
    section = job.performance.overlap if axis != path else job.performance
    if section is not None and getattr(section, axis, None) is not None:
        return OWN
    return job.software.sources.get(path, "not in its file: the default")
