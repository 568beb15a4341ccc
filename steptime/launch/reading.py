"""Result of the readers of launch scripts, framework configs and logs: a config, and the use of every flag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple, TypeAlias

from steptime.base.config import ConfigError, ConfigProblem, build
from steptime.base.words import counted
from steptime.hardware.machine import machine_names
from steptime.job.edit import put
from steptime.job.job import Job
from steptime.model.blocks import n_params
from steptime.software.state_bytes import state_bytes

Env: TypeAlias = "Mapping[str, str] | None"
"""Variables of the environment, and the words and counts that the user gives, by name."""
Sets: TypeAlias = "Mapping[str, Any] | None"
"""The user's settings by dotted key: {"data.seqlen": 4096}."""
Status = Literal["used", "irrelevant", "default", "approximated", "unmodeled"]
NOT_MODELED = "not modeled"
"""End of the line about a refused flag that hides what else the file lacks."""
LEAVE_OUT = f"{NOT_MODELED}; --allow-unmodeled ignores it"
"""End of the line about any other refused flag."""
MACHINE_UNKNOWN = "machine unknown; add --set hardware.node_type=NAME (3dtrn machines)"
"""End of the line about a file whose machine nothing names."""
OTHER_NODES = "; for other nodes add --devices N"
"""End of the line about devices that do not fit, where a script's nodes gave them."""
OTHER_MODEL = "another kind of model"
"""Marks the note of a flag that names an unsupported model: then nothing else of its file is reported."""
NO_OPTION = "not an option of"
"""First words of the note for a key that the framework does not have, a reason specific to each."""
_ALONE = (OTHER_MODEL, "mixture of experts", "reinforcement learning")


class LaunchFlag(NamedTuple):
    """One flag or key of the framework, and its use."""

    name: str
    """In the framework's spelling: --tensor-model-parallel-size, parallelism.tensor_parallel_degree."""
    value: str
    status: Status
    """used: it is in the config. irrelevant: it changes no cost. default: not given, and filled from the framework's own default.
    approximated: it changes cost a little, and the note says what is counted in its place; listed among the assumptions.
    unmodeled: it changes cost, and no config expresses it."""
    note: str = ""
    """The config key that it became, why it is irrelevant, or the release whose default it is."""


class Reading(NamedTuple):
    """A launch file as a config."""

    source: str
    """The file's path, as given."""
    framework: str
    """Framework and the release whose defaults fill in: "Megatron-LM (megatron-core 0.16.1)"."""
    config: dict[str, Any]
    """Plain data, as in a YAML plan: complete and runnable, including `hardware`."""
    flags: list[LaunchFlag]
    left_open: Mapping[str, str] | None = None
    """Config keys that the file does not set, and why, worded as in an error."""
    devices_per_node: int | None = None
    """Processes that the file starts on each node, one per device."""

    def of(self, status: Status) -> list[LaunchFlag]:
        """The flags with one status."""
        return [flag for flag in self.flags if flag.status == status]


def refusals(source: str, flags: list[LaunchFlag], end: str = LEAVE_OUT) -> list[str]:
    """A line with this end for each flag that is not modeled; if one names an unsupported kind of model, only that line."""
    refused = [flag for flag in flags if flag.status == "unmodeled"]
    alone = [flag for flag in refused if is_other_model(flag)][:1]
    # for one reason the first key
    once = {flag.name if flag.note.startswith(NO_OPTION) else flag.note: flag for flag in reversed(refused)}
    listed = alone or [flag for flag in refused if flag in once.values()]
    return [f"{source}: {told(flag)}; {end}" for flag in listed]


def is_other_model(flag: LaunchFlag) -> bool:
    """Whether a flag is refused for the kind of model that it names, whatever the other flags."""
    return flag.status == "unmodeled" and any(words in flag.note for words in _ALONE)


def left_out_differences(readings: Sequence[Reading | None], labels: Sequence[str]) -> list[str]:
    """A line for each flag in which jobs differ and that is in no plan: its cost is in no figure; None: a plan's job."""
    said = [
        {f.name: f.value for f in reading.flags if f.status in {"unmodeled", "approximated"}} if reading else {}
        for reading in readings
    ]
    known = [n for n, reading in enumerate(readings) if reading is not None]
    lines = []
    for name in dict.fromkeys(name for flags in said for name in flags):
        values = {labels[n]: said[n].get(name, "unset") for n in known}
        different = len({*values.values()}) > 1
        if different or len(known) < len(readings):
            told = ", ".join(f"{label} {value}" for label, value in values.items())
            lines.append(f"in no plan{', but different' if different else ''}: {name} ({told})")
    return lines


def cut(error: ConfigError) -> ConfigError:
    """The same problems, with overlong words cut: names, values and paths in files can have any length.

    >>> len(cut(ConfigError("f: --n" + "1" * 5000 + " is not a flag")).problems[0])
    77
    """
    most = r"[^\s/]{81,}|\S{301,}"
    return ConfigError(re.sub(most, lambda word: word[0][:57] + "...", line) for line in error.problems)


def told(flag: LaunchFlag) -> str:
    """A flag, its value and its note in one text."""
    return f"{flag.name} {flag.value}: {flag.note}".replace(" :", ":")


def still_open(reading: Reading, config: Mapping[str, Any]) -> list[str]:
    """A line for each required key that is not given: those that the file does not set, and the machine."""
    missing = [why for path, why in (reading.left_open or {}).items() if not _said(config, path)]
    if "hardware" not in config:
        missing.append(MACHINE_UNKNOWN)
    return [f"{reading.source}: {why}" for why in missing]


def open_with(reading: Reading, sets: Sets) -> list[str]:
    """The same with the user's settings; nothing until they are known."""
    config = deepcopy(reading.config)
    for path, value in (sets or {}).items():
        put(config, path, value)
    return still_open(reading, config) if sets is not None else []


def to_job(reading: Reading, sets: Sets = None, *, allow_unmodeled: bool = False) -> Job:
    """The job of a launch file; `sets` are dotted keys and values that override its config.

    Raises:
        ConfigError: the layout cannot run, a required setting is missing, or a flag changes cost and is not modeled, one line
        each;
            with `allow_unmodeled` such a flag becomes one of the job's notes.
    """
    try:
        return _job(reading, sets, allow_unmodeled=allow_unmodeled)
    except ConfigError as error:
        raise cut(error) from None


def _job(reading: Reading, sets: Sets, *, allow_unmodeled: bool) -> Job:
    config = deepcopy(reading.config)
    notes = [f"approximated: {told(flag)}" for flag in reading.of("approximated")]
    notes += [f"ignored (not modeled): {told(flag)}" for flag in reading.of("unmodeled")]
    if notes:
        config["notes"] = [*config.get("notes", []), *notes]
    model = config.get("model")
    adapters = model.get("lora") if isinstance(model, dict) else None
    for path, value in (sets or {}).items():
        if path == "model" and isinstance(model, dict) and model.get("preset") == value:
            continue  # with what the file says of its training
        put(config, path, value)
        if path == "model" and adapters is not None:  # another model, trained alike
            config["model"] = {"lora": adapters} | ({"preset": value} if isinstance(value, str) else value)
    refused = [] if allow_unmodeled else refusals(reading.source, reading.flags)
    if refused and any(map(is_other_model, reading.flags)):
        raise ConfigError(refused)
    if problems := [*refused, *still_open(reading, config)]:
        raise ConfigError(dict.fromkeys(problems))
    try:
        job = build(Job, config)
        fits_machine(reading, job)
        _holds_states(reading, job)
    except ConfigError as error:
        raise ConfigError(f"{reading.source}: {problem}" for problem in _of_devices(reading, error.details)) from None
    return job


def _of_devices(reading: Reading, problems: Sequence[ConfigProblem]) -> list[str]:
    """The problems of a layout, as a question where only a launcher's default or one script's nodes gave the devices."""
    taken = _taken(reading)
    others = [one.line for one in problems if not one.path.startswith(("data.", "parallelism."))]
    if taken is not None and all(one.path for one in problems) and problems[0].line not in others:
        broken = f"the launcher's default is {taken.value}: {problems[0].line}"
        return [f"number of devices unknown ({broken}); add --set parallelism.dp=N", *others]
    script = reading.devices_per_node is not None
    return [one.line + (OTHER_NODES if script and one.path == "parallelism.ep" else "") for one in problems]


def _taken(reading: Reading) -> LaunchFlag | None:
    """The devices where only the launcher's default gives them."""
    return next((flag for flag in reading.flags if flag.name == "devices" and flag.status == "default"), None)


def fits_machine(reading: Reading, job: Job) -> None:
    """Raise where the file starts more processes on a node than the machine has devices.

    Raises:
        ConfigError: one line.
    """
    per_node, machine = reading.devices_per_node, job.machine
    if per_node is not None and per_node > machine.devices_per_node:
        had = f"{machine.name} has {counted(machine.devices_per_node, 'device')}"
        dies = f"{machine.name}-gcd"  # a machine whose modules are two devices each to the operating system
        name = f"{dies}, whose devices are the dies (GCDs)" if dies in machine_names() else "NAME"
        raise ConfigError(f"{per_node} processes per node, but {had}; add --set hardware.node_type={name}")


def _holds_states(reading: Reading, job: Job) -> None:
    """Raise where the devices are only those that the launcher takes by default, and their memory is less than the states.

    Weights, gradients, masters and moments in mixed precision are 16 bytes a parameter (Rajbhandari et al. 2020, section 3.1),
    less where all of them are in 16 bits; a frozen one takes at least half a byte.

    Raises:
        ConfigError: one line.
    """
    if (taken := _taken(reading)) is None:
        return
    trained = min(16.0, sum(state_bytes(job.software.states, job.software.bytes_of)))
    states = (trained if job.model.lora is None else 0.5) * n_params(job.model, job.data.seqlen)
    memory = job.machine.accelerator.memory_bytes
    named = any(flag.name == "distributed_type" for flag in reading.flags)
    alone = taken.note.startswith("parallelism.dp: accelerate launch") and not named and not job.zero_level
    if alone and states > memory:
        why = f"no accelerate config is named, and {states / 2**30:,.0f} GiB of states do not fit on one device"
        raise ConfigError(f"sharding unknown ({why}); add --with FILE")
    if states > memory * job.parallelism.devices:
        by = f"{states / 2**30:,.0f} GiB of states do not fit on {taken.value} devices, the launcher's default"
        raise ConfigError(f"number of devices unknown ({by}); add --set parallelism.dp=N")


def _said(config: Mapping[str, Any], path: str) -> bool:
    """Whether a dotted key is set; dp follows devices or nodes; a section that is no mapping has all keys."""
    hardware = config.get("hardware")
    if path == "parallelism.dp" and ("devices" in config or (isinstance(hardware, Mapping) and "nodes" in hardware)):
        return True
    section, _, key = path.partition(".")
    found = config.get(section, {})
    if "." in key and isinstance(found, Mapping):
        return _said(found, key)
    whole = section == "model" and isinstance(found, Mapping) and bool({"preset", "hf"} & found.keys())
    return whole or (key in found if isinstance(found, Mapping) else True)
