"""What each flag of a launch script was used for: read, irrelevant to cost, filled in, not modeled."""

from __future__ import annotations

from typing import Any

from steptime.launch.reading import LaunchFlag, Reading
from steptime.report.table import Fact, FactList, ReportSection

_VALUE = 8
"""Longest value that widens its column."""
_LONGEST = 40
"""Longest value that is shown in full."""


def sections(reading: Reading) -> list[ReportSection]:
    """Every flag; those that made the plan come first."""
    return [found for found in (_used(reading), _others(reading)) if found is not None]


def document(reading: Reading) -> dict[str, Any]:
    """The same as JSON."""
    flags = [flag._asdict() for flag in reading.flags]
    return {"source": reading.source, "framework": reading.framework, "flags": flags}


def _used(reading: Reading) -> FactList | None:
    """Flags, their values, and the config key they became; facts, since a table would cut long names."""
    used = reading.of("used")
    width = min(max((len(flag.value) for flag in used), default=0), _VALUE)
    facts = [Fact(flag.name, [f"{_cut(flag.value):<{width}}  {flag.note}"]) for flag in used]
    return FactList(f"read from {reading.source}, interpreted as {reading.framework}", facts) if used else None


def _others(reading: Reading) -> FactList | None:
    kinds = (
        ("left out", [_with_note(flag) for flag in reading.of("unmodeled")]),
        ("approximated", [_with_note(flag) for flag in reading.of("approximated")]),
        ("defaults", [_with_value(flag) for flag in reading.of("default")]),
        ("no cost", [flag.name for flag in reading.of("irrelevant")]),
    )
    facts = [Fact(f"{label}, {len(words)}", [", ".join(words)]) for label, words in kinds if words]
    return FactList("other flags: left out (not modeled), framework defaults, no cost", facts) if facts else None


def _cut(value: str) -> str:
    """A value, cut if it is too long for a line."""
    return value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"


def _with_value(flag: LaunchFlag) -> str:
    return f"{flag.name} {flag.value}".strip()


def _with_note(flag: LaunchFlag) -> str:
    return f"{_with_value(flag)} ({flag.note})" if flag.note else _with_value(flag)
