"""The plan whose layout is searched: of a file, or of a model, a machine and a number of devices."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import read_source
from steptime.commands import defaults
from steptime.commands.console import load
from steptime.job.device_count import stated_devices
from steptime.job.edit import anchor, apply_setting
from steptime.job.job import Job
from steptime.job.mistaken import plan_mapping

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable

AXES = {
    **{
        name: f"parallelism.{name}"
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "sp", "zero_level", "schedule")
    },
    "microbatch_sz": "data.microbatch_sz",
}
"""Axes by the names of their keys."""


class SearchPlan(NamedTuple):
    """A plan whose layout is searched."""

    job: Job
    said: bool
    """Whether it has its own layout; otherwise `job` is on one device."""
    devices: int | None
    """The plan's number of devices; None where --devices must give it."""
    fixed: dict[str, tuple[Any, ...]]
    """Axes given by a plan without a complete layout."""
    command: str = "3dtrn PLAN"
    """The command line that estimates it, to which a layout's changes are appended."""


def unplanned(model: str, machine: str | None, devices: int | None, sets: list[str]) -> SearchPlan:
    """The plan of a model, a machine and a number of devices; everything else takes the defaults of a report."""
    made = defaults.plan(model, machine, devices, sets)
    plan = plan_from(json.dumps(made), "-", "", sets)
    return plan._replace(devices=plan.devices or made["devices"])


def unplanned_search(options: Namespace) -> SearchPlan:
    """The plan of --model, --machine (the first of them) and --devices (the most of them)."""
    if options.model is None:
        raise ConfigError(
            "3dtrn search needs a PLAN file, or --model NAME --devices N (3dtrn models lists the presets)"
        )
    problems: list[str] = []
    counts = numbers("--devices", options.devices, problems)
    if not counts and not problems:
        problems.append("--devices: required without a PLAN file")
    if problems:
        raise ConfigError(problems)
    machine = next(iter(options.machine), defaults.MACHINE)
    plan = unplanned(options.model, machine, max(counts), options.sets)
    size = str(counts[0]) if len(counts) == 1 else "N"
    command = ["3dtrn", "--model", options.model, "--machine", machine, "--devices", size]
    batch = [f"data.gbs={plan.job.data.gbs}"] if len(counts) > 1 else []
    return plan._replace(command=_shell(command, [*batch, *options.sets]))


LONGEST_PATH = 40
"""Of a plan in the command that the report shows; a longer one would not fit a line."""


def _shell(command: Iterable[str], sets: Iterable[str]) -> str:
    """A command line with its settings, to type in a shell."""
    return shlex.join([*command, *(word for setting in sets for word in ("--set", setting))])


def plan_of(source: str, sets: list[str]) -> SearchPlan:
    """The plan of a file; it may omit `parallelism` or parts of it, and the micro-batch.

    Raises:
        ConfigError: one line per problem, the file's name first.
    """
    text, name = read_source(source)
    shown = source if source != "-" and len(source) <= LONGEST_PATH else "PLAN"
    return plan_from(text, source, name, sets)._replace(command=_shell(["3dtrn", shown], sets))


def plan_from(text: str, source: str, name: str, sets: list[str]) -> SearchPlan:
    """The plan of a text that came from `source`, "-" where that is no file."""
    data = plan_mapping(text, name)
    for setting in sets:
        apply_setting(data, setting)
    said, batch = data.get("parallelism"), data.get("data")
    if (said is not None and not isinstance(said, dict)) or not isinstance(batch, dict):
        return _whole(source, text, name, sets)
    said = said or {}
    try:
        key, devices = stated_devices(data)
    except ConfigError as error:
        raise _of(name, error) from None
    counted = "dp" in said or key
    if {"tp", "pp"} <= said.keys() and counted and "microbatch_sz" in batch:
        return _whole(source, text, name, sets)
    fixed = {key: (value,) for key, value in {**said, **batch}.items() if key in AXES and value is not None}
    if key and devices is None:
        return _whole(source, text, name, sets)  # whose check reports what is wrong with the number
    data.pop("devices", None)
    if isinstance(data.get("hardware"), dict):
        data["hardware"].pop("nodes", None)
    cross = data.get("cross_dc")
    copies = cross.get("n_dcs", 1) if isinstance(cross, dict) else 1
    kept = {key: value for key, value in said.items() if key not in AXES}
    data["parallelism"] = {**kept, "tp": 1, "pp": 1, "dp": copies}
    data["data"] = {**batch, "microbatch_sz": 1}
    if Path(name).suffix:
        anchor(data, Path(name).parent)
    try:
        return SearchPlan(Job.load(json.dumps(data)), said=False, devices=devices, fixed=fixed)
    except ConfigError as error:
        raise _of(name, error) from None


def _whole(source: str, text: str, name: str, sets: list[str]) -> SearchPlan:
    """A plan with its own layout."""
    if source == "-":
        try:
            job = Job.load(text if "\n" in text else text + "\n", sets)
        except ConfigError as error:
            raise _of(name, error) from None
    else:
        job = load(source, sets)
    return SearchPlan(job, said=True, devices=job.parallelism.devices, fixed={})


def _of(name: str, error: ConfigError) -> ConfigError:
    """The problems of a plan after the name of its file, which a plan without a file has not."""
    return ConfigError(f"{name}: {problem}" for problem in error.problems) if name else error


def numbers(option: str, text: str | None, problems: list[str]) -> list[int]:
    """The counts in `512`, `512,1024` or `512:4096`: a range doubles from first to last."""
    if text is None:
        return []
    if not re.fullmatch(r"\d+(,\d+)*|\d+:\d+", text):
        problems.append(f"{option} {text}: expected a whole number, a comma-separated list, or LOW:HIGH")
        return []
    if ":" not in text:
        found = list(dict.fromkeys(map(int, text.split(","))))
    else:
        low, high = map(int, text.split(":"))
        found = [low * 2**i for i in range(40) if 0 < low * 2**i <= high] if low <= high else []
        if found and found[-1] != high:
            found.append(high)
    if not found or min(found) < 1:
        problems.append(f"{option} {text}: expected at least 1, and LOW at most HIGH")
        return []
    return found
