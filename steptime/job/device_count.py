"""The number of devices of a plan that states it: data parallelism is the quotient by the other degrees."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from steptime.base.config import Config, ConfigError, ConfigProblem
from steptime.base.words import counted
from steptime.hardware.machine import Machine

DEGREES = ("tp", "cp", "pp")
AUTO = "auto"
MOST_DP = 1_000_000
"""Largest data-parallel degree of a plan."""


def spread(plan: Any) -> Any:
    """A plan with `parallelism.dp` = devices / (tp cp pp) filled in, where `devices` or `hardware.nodes` is given.

    Under FSDP tp and pp are 1 where they are not given.

    Raises:
        ConfigError: dp is auto and there is no number of devices, they cannot be shared, or dp is given and contradicts them.
    """
    if not isinstance(plan, Mapping):
        return plan
    layout = plan.get("parallelism")
    given = layout.model_dump(exclude_unset=True) if isinstance(layout, Config) else layout
    if not isinstance(given, Mapping):
        return plan
    if isinstance(given.get("fsdp"), Mapping):  # sharding alone is a layout
        given = {"tp": 1, "pp": 1, **given}
        plan = {**plan, "parallelism": given}
    key, devices = stated_devices(plan)
    open_dp = given.get("dp", AUTO) in (AUTO, None)
    if not key:
        if given.get("dp") == AUTO:
            line = "parallelism.dp: auto needs a number of devices; set devices, or hardware.nodes"
            raise ConfigError(ConfigProblem(line, "parallelism.dp"))
        return plan
    degrees = [_count(given.get(axis, 1)) for axis in DEGREES]
    if devices is None or None in degrees:  # reported by the check of the section
        return {**plan, "parallelism": {**given, "dp": 1}} if open_dp else plan
    inner = prod(degree for degree in degrees if degree)
    if open_dp:
        if devices % inner:
            raise ConfigError(ConfigProblem(_uneven(key, devices, inner), key))
        if devices // inner > MOST_DP:
            line = f"{key}: {devices:,} devices are too many; with tp*cp*pp = {inner:,} at most {MOST_DP * inner:,}"
            raise ConfigError(ConfigProblem(line, key))
        return {**plan, "parallelism": {**given, "dp": devices // inner}}
    dp = _count(given["dp"])
    if dp is not None and dp * inner != devices:
        line = f"{key}: {counted(devices, 'device')}, but tp*cp*pp*dp = {dp * inner:,}; remove one, or set parallelism.dp to auto"
        raise ConfigError(ConfigProblem(line, key))
    return plan


def stated_devices(plan: Mapping[str, Any]) -> tuple[str, int | None]:
    """The key that states the number of devices ("" if none does), and the number; None if it is invalid.

    Raises:
        ConfigError: devices and hardware.nodes contradict each other.
    """
    key, on_nodes = _of_nodes(plan.get("hardware"))
    if plan.get("devices") is None:
        return key, on_nodes and prod(on_nodes)
    devices = _count(plan["devices"])
    if devices is not None and on_nodes is not None and not 0 <= prod(on_nodes) - devices < on_nodes[1]:
        nodes, each = on_nodes
        line = f"devices: {devices:,}, but hardware.nodes: {counted(nodes, 'node')} of {each:,} = {prod(on_nodes):,}; remove one"
        raise ConfigError(ConfigProblem(line, "devices"))
    return "devices", devices


def _of_nodes(hardware: Any) -> tuple[str, tuple[int, int] | None]:
    """hardware.nodes, if a machine section states it, and its value with the devices of a node; None if either is invalid."""
    if isinstance(hardware, Config):
        hardware = hardware.model_dump(exclude_unset=True) | {"node_type": getattr(hardware, "node_type", None)}
    if not isinstance(hardware, Mapping) or hardware.get("nodes") is None:
        return "", None
    nodes, machine = _count(hardware["nodes"]), hardware.get("node_type")
    try:
        found = machine if isinstance(machine, Machine) else Machine.load(str(machine), hardware.get("overrides"))
    except ConfigError:  # reported by the check of the section
        return "hardware.nodes", None
    return "hardware.nodes", (nodes, found.devices_per_node) if nodes else None


def _count(value: Any) -> int | None:
    """A whole number of 1 or more in any spelling; None otherwise."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    whole = 1.0 <= number < 1e15 and number == int(number) and not isinstance(value, bool)
    return int(number) if whole else None


def _uneven(key: str, devices: int, inner: int) -> str:
    below, above = devices // inner * inner, (devices // inner + 1) * inner
    near = f"{below:,} or {above:,}" if below else f"{above:,}"
    return f"{key}: {devices:,} devices are not a multiple of tp*cp*pp = {inner:,}; nearest: {near}"
