"""`3dtrn --from KIND FILE`: the job of a launch script, a framework's config or a log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.job.edit import read_setting
from steptime.launch.plan_yaml import plan_yaml
from steptime.launch.read import read
from steptime.launch.reading import LEAVE_OUT, to_job

if TYPE_CHECKING:
    from argparse import Namespace

    from steptime.job.job import Job
    from steptime.launch.reading import Reading


def launched(options: Namespace) -> tuple[Job, Reading]:
    """The job of a launch file with the command's settings over it, saved where that is asked for.

    Raises:
        ConfigError: the file cannot be read, is another framework's, leaves something open, or cannot be saved.
    """
    sets = dict(map(read_setting, options.sets))
    try:
        reading = read(options.kind, options.config, sets, options.added)
    except ConfigError as error:
        lines = [line for line in error.problems if not (options.allow_unmodelled and line.endswith(LEAVE_OUT))]
        raise ConfigError(lines) from None
    job = to_job(reading, sets, allow_unmodelled=options.allow_unmodelled)
    if options.save is not None:
        save(options.save, job)
    return job, reading


def save(path: str, job: Job) -> None:
    """Write a plan as YAML.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(plan_yaml(job))
    except FileExistsError:
        raise ConfigError(f"--save {path}: file exists; remove it or use another name") from None
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written ({error.strerror})") from None
