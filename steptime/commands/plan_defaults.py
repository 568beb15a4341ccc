"""What a plan without a file takes for what it does not state: the machine, the number of devices, and the batch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError, ConfigProblem
from steptime.base.words import counted
from steptime.job.edit import read_settings

if TYPE_CHECKING:
    from steptime.hardware.machine import Machine
    from steptime.job.job import Job
    from steptime.model.model import Model

MODEL = "llama3-8b"
MACHINE = "dgx-h100"
SEQLEN = 8192
MAX_DEVICES = 1_000_000
STEP_TOKENS = 4 * 2**20
"""Default tokens per step: the initial batch of Llama 3 405B (arXiv 2407.21783, section 3.4.1: 4M)."""
DEVICE_TOKENS = 2**10
"""Default tokens per step and device on more than 4,096 devices: Llama 3 405B had 16M on 16,384 (the same, table 4)."""


def sets(model: str | None, machine: str | None, devices: int | None) -> list[str]:
    """The options as settings for a plan, whose other keys of `hardware` they keep."""
    named = {"model": model, "hardware.node_type": machine, "devices": devices}
    return [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


_STATED_BY = {"--model": ("model", "model.preset"), "--machine": ("hardware", "hardware.node_type")}
"""Options -> the keys that state the same."""


def check(model: str | None, machine: str | None, changes: Iterable[str]) -> None:
    """Check that no setting states another model or machine than the options.

    Raises:
        ConfigError: one line for each that does.
    """
    stated, given = flat(changes), {"--model": model, "--machine": machine}
    problems = [
        ConfigProblem(
            f"{option} {value}: --set {key}={stated[key]} states another; give one of them",
            keys_only=f"{option.lstrip('-')} {value}: {key}={stated[key]} states another; give one of them",
        )
        for option, value in given.items()
        for key in _STATED_BY[option]
        if value is not None and isinstance(stated.get(key), str) and _other(option, stated[key], value)
    ]
    if problems:
        raise ConfigError(problems)
    known(model, machine)


def known(model: str | None, machine: str | None) -> None:
    """Check the names that the options give.

    Raises:
        ConfigError: one is unknown.
    """
    if machine is not None:
        _machine(machine)
    if model is not None:
        _model(model)


def _machine(name: str) -> Machine:
    from steptime.hardware.machine import Machine

    with _option("--machine"):
        return Machine.load(name)


def _model(name: str) -> Model:
    from steptime.model.presets import load_model

    with _option("--model"):
        return load_model(name)


def _other(option: str, stated: str, value: str) -> bool:
    """Whether two names are not one; a machine may have aliases."""
    from steptime.hardware.machine import shipped_name

    with suppress(ConfigError):  # an unknown name is reported when the plan is read
        return stated != value and (option != "--machine" or shipped_name(stated) != shipped_name(value))
    return True


def kept_overrides(machine: str | None, overrides: Mapping[str, Any], changes: Iterable[str]) -> list[str]:
    """A line where --machine takes figures over that the plan states of its own machine."""
    keys = sorted(overrides.keys() - {key.removeprefix("hardware.overrides.") for key in flat(changes)})
    if machine is None or not keys:
        return []
    return [f"--machine {machine}: hardware.overrides of the plan ({', '.join(keys)}) apply to it, too"]


def check_devices(counts: int | Collection[int] | None, devices: int | None, changes: Iterable[str]) -> None:
    """Check that settings, which make `devices`, do not contradict --devices, one number or several.

    Raises:
        ConfigError: they do.
    """
    stated = flat(changes)
    key = next((key for key in ("devices", "hardware.nodes", "parallelism.dp") if stated.get(key) is not None), "")
    given = [counts] if isinstance(counts, int) else [*(counts or ())]
    if given and key and devices is not None and devices not in given:
        numbers, product = ", ".join(f"{n:,}" for n in given), counted(devices, "device")
        said = f"{key}={stated[key]} makes {product}; remove one"
        plain = f"devices: {numbers}, but {said}"
        raise ConfigError(ConfigProblem(f"--devices: {numbers}, but --set {said}", keys_only=plain))


def check_counts(job: Job, changes: Iterable[str]) -> None:
    """Check that settings of devices, nodes and data-parallel ranks do not contradict each other: the last one is the job's.

    Raises:
        ConfigError: they do.
    """
    stated, devices, size = flat(changes), job.parallelism.devices, job.machine.devices_per_node
    made = {"devices": devices, "hardware.nodes": -(-devices // size), "parallelism.dp": job.parallelism.dp}
    given = {key: stated[key] for key in made if type(stated.get(key)) is int}
    wrong = next((key for key in given if given[key] != made[key]), None)
    if wrong is not None and (kept := next((key for key in given if given[key] == made[key]), None)):
        said = f"{wrong}={given[wrong]}, but {{}}{kept}={given[kept]} makes {counted(devices, 'device')}; remove one"
        raise ConfigError(ConfigProblem(f"--set {said.format('--set ')}", keys_only=said.format("")))


def plan(model: str, machine: str | None, devices: int | None, changes: Iterable[str]) -> dict[str, Any]:
    """A plan without a layout, of which `changes` are settings still to be made: model, devices, batch and machine.

    Raises:
        ConfigError: a name is unknown, or there are no devices.
    """
    from steptime.hardware.machine import Machine

    stated = flat(changes)
    if machine is not None:
        node = _machine(machine)
    else:
        with _option("hardware.node_type"):
            node = Machine.load(_named(stated) or MACHINE)
    shape = _model(model)
    longest = shape.max_positions if shape.learned_positions and shape.max_positions else SEQLEN
    seqlen = _count(stated, "data.seqlen") or min(longest, SEQLEN) // 64 * 64 or longest  # OPT has 2,050 positions
    count = devices if devices is not None else _devices(stated, node.devices_per_node)
    micro_batch = _count(stated, "data.microbatch_sz") or 1
    if count < 1:
        raise ConfigError(_of_option("--devices", f"must be at least 1 (got {count})"))
    if count > MAX_DEVICES:
        raise ConfigError(_of_option("--devices", f"must be at most {MAX_DEVICES:,} (got {count})"))
    tokens = max(STEP_TOKENS, DEVICE_TOKENS * count)
    return {
        "model": model,
        "devices": count,
        "data": {"gbs": sequences(tokens, seqlen, count * micro_batch), "seqlen": seqlen},
        "hardware": machine or MACHINE,
    }


@contextmanager
def _option(name: str) -> Iterator[None]:
    """Problems of an option's value, each after its name.

    Raises:
        ConfigError: the value has any.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_of_option(name, line) for line in error.problems) from None


def _of_option(name: str, line: str) -> ConfigProblem:
    return ConfigProblem(f"{name}: {line}", keys_only=f"{name.lstrip('-')}: {line}")


def flat(changes: Iterable[str]) -> dict[str, Any]:
    """What settings state, by dotted key: also that of the mappings in their values.

    Those that cannot be read are left out: they are reported when the plan is read.

    >>> flat(["parallelism={tp: 8, fsdp: {version: 1}}"]).keys()
    dict_keys(['parallelism', 'parallelism.tp', 'parallelism.fsdp', 'parallelism.fsdp.version'])
    """
    found: dict[str, Any] = {}
    for key, value in read_settings(changes)[0].items():
        found |= _inside(key, value)
    return found


def _inside(key: str, value: Any) -> dict[str, Any]:
    found = {key: value}
    for name, item in value.items() if isinstance(value, dict) else ():
        found |= _inside(f"{key}.{name}", item)
    return found


def sequences(tokens: int, seqlen: int, devices: int) -> int:
    """Sequences of a step: the multiple of the devices nearest to `tokens`; the devices are halved while they are more.

    So every degree of data parallelism divides it but for the largest. `devices`: times the sequences of a micro-batch.

    >>> [sequences(4 * 2**20, 8192, devices) for devices in (8, 48, 500, 2048, 2304)]
    [512, 528, 500, 512, 576]
    """
    copies = devices
    while copies % 2 == 0 and copies * seqlen > tokens:
        copies //= 2
    return max(1, round(tokens / (seqlen * copies))) * copies


def _named(stated: Mapping[str, Any]) -> str | None:
    """The machine that the settings name."""
    found = stated.get("hardware.node_type", stated.get("hardware"))
    return found if isinstance(found, str) else None


def _devices(stated: Mapping[str, Any], node: int) -> int:
    """Devices of a plan whose number no option gives: as set, by the nodes, by the degrees, or one node."""
    if dp := _count(stated, "parallelism.dp"):
        return prod((dp, *(_count(stated, f"parallelism.{axis}") or 1 for axis in ("tp", "cp", "pp"))))
    return _count(stated, "devices") or node * (_count(stated, "hardware.nodes") or 1)


def _count(stated: Mapping[str, Any], key: str) -> int | None:
    """A whole number of 1 or more that the settings give; other values are left to the checks of the plan."""
    value = stated.get(key)
    return value if type(value) is int and value > 0 else None
