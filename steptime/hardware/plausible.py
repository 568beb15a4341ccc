"""Figures of a machine that are a thousand times off any included machine's: their unit is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
