"""A machine's file as plain data: figures without their sources, changed by dotted key, and those that lack a unit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError, ConfigProblem
from steptime.base.document import shipped_names

if TYPE_CHECKING:
    from collections.abc import Iterable


def plain_tree(node: Any, path: str, provenance: dict[str, str]) -> Any:
    """`node` without its sources, which are moved to `provenance` under their dotted path.

    A shipped figure may also name the kind of its source in one word, `basis` (docs/machines.md); only tests read it.
    """
    if isinstance(node, list):
        return [plain_tree(item, f"{path}.{i}", provenance) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if node.keys() - {"basis"} == {"value", "source"}:
        provenance[path] = str(node["source"])
        return node["value"]
    plain = {}
    for key, value in node.items():
        if key in {"source", "provenance"} and isinstance(value, str):
            provenance[path] = value
        elif key == "provenance" and isinstance(value, dict):
            provenance.update((str(at), str(source)) for at, source in value.items())
        else:
            plain[key] = plain_tree(value, f"{path}.{key}" if path else str(key), provenance)
    return plain


def put_figure(plain: dict[str, Any], key: str, value: object) -> None:
    """Set `value` at a dotted key; the later validation reports unknown keys."""
    node: Any = plain
    parts, at = key.split("."), f"hardware.overrides.{key}"
    for depth, part in enumerate(parts):
        if isinstance(node, list) and not (part.isdecimal() and int(part) < len(node)):
            valid = ", ".join(map(str, range(len(node))))
            raise ConfigError(ConfigProblem(f"{at}: {part!r} is not a valid index; valid: {valid}", at))
        if not isinstance(node, dict | list):
            line = f"{at}: {'.'.join(parts[:depth])} is a single value and has no keys"
            raise ConfigError(ConfigProblem(line, at))
        step: Any = int(part) if isinstance(node, list) else part
        if depth == len(parts) - 1:
            node[step] = value
        else:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]


FAR = 1000.0
"""Factor below the least or above the largest shipped figure at which a figure is refused."""

SHIPPED: dict[str, tuple[float, float, str]] = {
    "tier.bytes_per_s": (3e8, 2e12, "GB/s"),
    "tier.latency_s": (5e-7, 2e-4, "us"),
    "memory_bytes": (1.7e10, 4e11, "GiB"),
    "usable_memory_bytes": (1.6e10, 4e11, "GiB"),
    "memory_bytes_per_s": (4e10, 1e13, "GB/s"),
    "peak_flops": (1e11, 2e16, "TFLOP/s"),
    "sustained_flops": (1e11, 2e16, "TFLOP/s"),
}
"""Least and largest figure of the shipped machines, rounded outward, in SI, and the unit to write; checked by a test."""

_SI = {"GB/s": "B/s", "us": "s", "GiB": "B", "TFLOP/s": "FLOP/s"}


def implausible(figures: Iterable[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """Path and message of every implausible figure; `figures` are a key of `SHIPPED`, a dotted path and a value."""
    found = []
    for key, path, value in figures:
        low, high, unit = SHIPPED[key]
        if value and not low / FAR <= value <= high * FAR:
            line = f"{path}: {value:g} {_SI[unit]} is not plausible; write the unit, for example '{value:g} {unit}'"
            found.append((path, line))
    return found


ACCELERATORS = Path(__file__).parents[1] / "data" / "accelerators"


def accelerator_names() -> list[str]:
    """The names of the shipped accelerators, sorted."""
    return shipped_names(ACCELERATORS)


def accelerator_yaml(name: str) -> str:
    """The file of a shipped accelerator: YAML, each figure with its source."""
    return (ACCELERATORS / f"{name}.yaml").read_text(encoding="utf-8")
