"""The jobs that `3dtrn diff` compares: plans, and launch files, which are read as with --from."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import unreadable
from steptime.commands import plan_defaults
from steptime.commands.console import load

if TYPE_CHECKING:
    from steptime.answer.result import Estimate
    from steptime.job.job import Job
    from steptime.launch.reading import Reading


class ComparedJob(NamedTuple):
    """The job of one file."""

    job: Job
    reading: Reading | None
    """Of a launch file; None for a plan."""
    notes: list[str]


def read_jobs(paths: Sequence[str], options: Namespace) -> list[ComparedJob]:
    """Plans and launch files with the command's settings over each; a launch file without a machine has the first plan's.

    Raises:
        ConfigError: the problems of all files, one line each.
    """
    found: dict[int, ComparedJob] = {}
    problems: list[str] = []
    launched: list[int] = []
    for n, path in enumerate(paths):
        try:
            found[n] = ComparedJob(load(path, options.sets), None, [])
        except ConfigError as error:
            if _is_launch_file(path, options.kind):
                launched.append(n)
            elif Path(path).is_dir():
                problems += unreadable(path, IsADirectoryError(), "a plan, a launch file or a training log").problems
            else:
                problems += error.problems
    from steptime.launch.reading import MACHINE_UNKNOWN  # a file that cannot be read yet may name it

    other = next((each.job for each in found.values()), None)
    asked_of: dict[str, list[str]] = {}
    for n in launched:
        try:
            found[n] = _launched(paths[n], options, other)
        except ConfigError as error:
            lines = [line for line in error.problems if not (problems and line.endswith(MACHINE_UNKNOWN))]
            asked_of[paths[n]] = lines
    asked = [line for lines in asked_of.values() for line in lines]
    if asked and not problems:
        from steptime.commands.launch_command import for_one, retyped

        asked += retyped(options.typed, asked_of) + for_one(options.typed, options.kind or "auto", paths, asked_of)
    if problems or asked:
        raise ConfigError(dict.fromkeys([*problems, *asked]))
    for each in found.values():
        plan_defaults.check_devices(options.devices, each.job.parallelism.devices, options.stated)
        plan_defaults.check_counts(each.job, options.stated)
    return [found[n] for n in range(len(paths))]


def notes_of(jobs: Sequence[ComparedJob], labels: Sequence[str], estimates: Sequence[Estimate] = ()) -> list[str]:
    """What no table shows: where a machine is from, what the reports of launch files say first, flags that no plan has."""
    from steptime.launch.reading import left_out_differences
    from steptime.report.estimate_text import above

    notes = [f"{label}: {note}" for label, job in zip(labels, jobs, strict=True) for note in job.notes]
    for label, job, found in zip(labels, jobs, estimates, strict=False):
        notes += [f"{label}: {note}" for note in above(found)] if job.reading else []
    return [*notes, *left_out_differences([job.reading for job in jobs], labels)]


def _is_launch_file(path: str, kind: str | None) -> bool:
    """Whether a file that is no plan that can run is for --from: of the given kind, or of one that its text shows."""
    from steptime.launch.kinds import is_plan, kind_of
    from steptime.launch.nearby_files import NearbyFiles
    from steptime.launch.python.config_values import split_path
    from steptime.launch.read import named, read_text

    file = split_path(named(path)[0])[0]
    if path == "-" or not Path(file).is_file():
        return False
    text = read_text(file)
    if is_plan(text) or not text.strip():
        return False
    try:
        return bool(kind or kind_of(file, text, NearbyFiles(Path(file).parent)))
    except ConfigError:
        return False


def _launched(path: str, options: Namespace, other: Job | None) -> ComparedJob:
    """The job of a launch file, on the machine of the `other` job where neither the file nor the command names one."""
    from steptime.commands.launch_command import read_job

    kind, stated = options.kind or "auto", plan_defaults.flat(options.sets)
    if other is not None and not {"hardware", "hardware.node_type"} & stated.keys():
        machine = f"hardware={json.dumps(other.hardware.to_config())}"
        job, reading = read_job(options, kind, path, [machine, *options.sets])
        if "hardware" not in reading.config:
            note = f"hardware: {other.machine.name}, taken from the plan: {path} does not name its machine"
            return ComparedJob(job, reading, [note])
    return ComparedJob(*read_job(options, kind, path, options.sets), [])
