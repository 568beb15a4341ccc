"""The plan whose layout is searched: of a file, or of a model, a machine and a number of devices."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import Config, ConfigError, build
from steptime.base.document import read_source
from steptime.commands import plan_defaults
from steptime.commands.console import load
from steptime.job.device_count import AUTO, stated_devices
from steptime.job.edit import anchor, apply_settings, plan_mapping
from steptime.job.job import Job
from steptime.job.limits import MOST_MICROBATCHES
from steptime.job.mesh import Parallelism
from steptime.job.sections import Data
from steptime.search.space import AXES, divisors

OF_LAYOUT = ("layers_per_stage", "microbatch_group_sz", "pipeline_passes")
"""Keys of `parallelism` that the stages must suit."""


class SearchPlan(NamedTuple):
    """A plan whose layout is searched."""

    job: Job
    said: bool
    """Whether it has its own layout; otherwise `job` is on one device."""
    devices: int | None
    """The plan's number of devices; None where --devices must give it."""
    fixed: dict[str, tuple[Any, ...]]
    """Axes given by a plan without a complete layout."""
    kept: dict[str, Any]
    """Settings that such a plan gives, by dotted key, but that only some layouts can have: `job` is without them."""
    command: str = "3dtrn PLAN"
    """The command line that estimates it, to which a layout's changes are appended."""


def unplanned(model: str, machine: str | None, devices: int | None, sets: list[str]) -> SearchPlan:
    """The plan of a model, a machine and a number of devices; everything else takes the defaults of a report."""
    given = plan_defaults.plan(model, machine, devices, sets)
    plan = plan_from(json.dumps(given), "-", "", sets)
    return plan._replace(devices=plan.devices or given["devices"])


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
    plan_defaults.check(options.model, next(iter(options.machine), None), options.sets)
    machine = next(iter(options.machine), plan_defaults.MACHINE)
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
    problems = apply_settings(data, sets)
    said, batch = (_section(data, key) for key in ("parallelism", "data"))
    try:
        key, devices = stated_devices(data)
    except ConfigError as error:
        raise _of(name, ConfigError([*problems, *error.details])) from None
    if {"tp", "pp"} <= said.keys() and ("dp" in said or key) and "microbatch_sz" in batch:
        return _whole(source, text, name, sets)
    try:
        fixed, kept = _one_device(data, said, batch)
        kept |= _layers_of_stages(data)
        if devices is not None:
            _drop_devices(data)
        if Path(name).suffix:
            anchor(data, Path(name).parent)
        job = _on_fewest(data)
    except ConfigError as error:
        raise _of(name, ConfigError([*problems, *error.details])) from None
    if problems:
        raise _of(name, ConfigError(problems))
    return SearchPlan(job, said=False, devices=devices, fixed=fixed, kept=kept)


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A section of a plan, or of a section; empty where it has none, or an invalid one."""
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _drop_devices(data: dict[str, Any]) -> None:
    """Leave the number of devices, which is known, to the search."""
    data.pop("devices", None)
    if isinstance(hardware := data.get("hardware"), dict):
        data["hardware"] = {key: value for key, value in hardware.items() if key != "nodes"}


def _one_device(
    data: dict[str, Any], said: dict[str, Any], batch: dict[str, Any]
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Give a plan the least layout, and return the axes that it fixes, and the settings that need another layout.

    Sections that are invalid stay so, and are reported when the plan is read.
    """
    said = {key: value for key, value in said.items() if key != "dp" or value not in (None, AUTO)}
    least: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1}
    sections: list[tuple[str, type[Config], dict[str, Any]]] = [
        ("parallelism", Parallelism, least | said),
        ("data", Data, {"microbatch_sz": 1} | batch),
    ]
    fixed: dict[str, tuple[Any, ...]] = {}
    kept: dict[str, Any] = {}
    if data.get("parallelism") is None:
        data["parallelism"] = {}
    for name, kind, section in sections:
        if not isinstance(data.get(name), dict):
            continue
        data[name] = section
        try:
            read = build(kind, section)
        except ConfigError:
            continue
        mine = {key: value for key in {**said, **batch} if key in section and (value := getattr(read, key)) is not None}
        fixed |= {key: (value,) for key, value in mine.items() if key in AXES}
        kept |= {f"{name}.{key}": value for key, value in mine.items() if key in OF_LAYOUT and value != AUTO}
        rest = {key: value for key, value in section.items() if key not in AXES and f"{name}.{key}" not in kept}
        data[name] = rest | (least if name == "parallelism" else {"microbatch_sz": 1})
    _raise_dp(data)
    return fixed, kept


def _on_fewest(data: dict[str, Any]) -> Job:
    """The job on the first layout of a few devices that its settings allow.

    Raises:
        ConfigError: none of them; the problems of the layout with the fewest.
    """
    problems = []
    for degrees in _least_degrees(data):
        layout = data["parallelism"] | degrees if degrees else data.get("parallelism")
        try:
            return Job.load(json.dumps(data | {"parallelism": layout}))
        except ConfigError as error:
            problems.append(error)
    raise min(problems, key=lambda error: len(error.problems))


def _least_degrees(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Degrees of a few devices: as given, with several ranks of experts, and with two interleaved stages besides.

    Some dispatchers and overlaps of experts' tokens need several ranks; with multi-token prediction overlaps need such stages.
    """
    yield {}
    said, moe = _section(data, "parallelism"), _section(_section(data, "model"), "moe")
    etp = moe.get("expert_tp_degree")
    etp = etp if type(etp) is int and etp > 0 else 1
    ranks: dict[str, Any] = {"ep": 2, "etp": etp, "dp": said["dp"] * 2 * etp} if type(said.get("dp")) is int else {}
    if ranks:
        yield ranks
        yield ranks | {"pp": 2, "vpp": 2, "layers_per_stage": "auto"}


def _layers_of_stages(data: dict[str, Any]) -> dict[str, Any]:
    """The setting of a list of recomputed layers, one number per stage or chunk; on one device as many as the most of them."""
    performance = _section(data, "performance")
    said = _section(performance, "recompute")
    counts = said.get("n_layers")
    if not isinstance(counts, list) or len(counts) < 2 or not all(type(n) is int and n >= 0 for n in counts):
        return {}
    data["performance"] = performance | {"recompute": said | {"n_layers": max(1, *counts)}}
    return {"performance.recompute": said}


def _raise_dp(data: dict[str, Any]) -> None:
    """As many replicas as data centers, hybrid sharding and resharding to fewer ranks need, and as the batch leaves room for.

    With too many sequences for one replica, micro-batches would be more than their limit.
    """
    said, cross = data.get("parallelism"), data.get("cross_dc")
    if not isinstance(said, dict):
        return
    numbers = said.get("replicas"), cross.get("n_dcs") if isinstance(cross, dict) else None
    copies = lcm(*(number for number in numbers if type(number) is int and number > 0))
    ranks = _section(said, "fsdp").get("reshard_after_forward")
    if (
        type(ranks) is int and ranks > 1
    ):  # shards that fewer ranks divide; all devices where none can, which the rule refuses
        devices = data.get("devices")
        copies = devices if type(devices) is int and devices > 0 and devices % ranks else copies * 2 * ranks
    gbs = _section(data, "data").get("gbs")
    most = MOST_MICROBATCHES
    if type(gbs) is int and gbs > most * copies and gbs % copies == 0:
        copies *= next((n for n in divisors(gbs // copies) if gbs <= most * copies * n), 1)
    if said.get("dp") == 1:
        said["dp"] = copies


def _whole(source: str, text: str, name: str, sets: list[str]) -> SearchPlan:
    """A plan with its own layout."""
    if source == "-":
        try:
            job = Job.load(text if "\n" in text else text + "\n", sets)
        except ConfigError as error:
            raise _of(name, error) from None
    else:
        job = load(source, sets)
    return SearchPlan(job, said=True, devices=job.parallelism.devices, fixed={}, kept={})


def _of(name: str, error: ConfigError) -> ConfigError:
    """The problems of a plan after the name of its file, which settings and a plan without a file have not."""
    lines = (line if line.startswith("--set ") else f"{name}: {line}" for line in error.problems)
    return ConfigError(lines) if name else error


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
        order = ", and LOW at most HIGH" if ":" in text else ""
        problems.append(f"{option} {text}: expected at least 1{order}")
        return []
    return found
