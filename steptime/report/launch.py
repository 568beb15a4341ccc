"""What became of the flags of a launch script: used, irrelevant to cost, filled in, not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report.table import Fact, Facts, Table

if TYPE_CHECKING:
    from steptime.launch.reading import Flag, Reading
    from steptime.report.table import Section


def sections(reading: Reading) -> list[Section]:
    """Every flag, the ones that made the plan first."""
    return [found for found in (_used(reading), _others(reading)) if found is not None]


def document(reading: Reading) -> dict[str, Any]:
    """The same as JSON."""
    flags = [flag._asdict() for flag in reading.flags]
    return {"source": reading.source, "framework": reading.framework, "flags": flags}


def _used(reading: Reading) -> Table | None:
    rows = [[flag.name, flag.value, flag.note] for flag in reading.of("used")]
    header = [f"read from {reading.source}", "value", "became"]
    return Table("", header, rows, [f"as {reading.framework} takes them"], left=3) if rows else None


def _others(reading: Reading) -> Facts | None:
    kinds = (
        ("left out, not modelled", [_with_note(flag) for flag in reading.of("unmodelled")]),
        ("filled in from its defaults", [_with_value(flag) for flag in reading.of("default")]),
        ("irrelevant to cost", [flag.name for flag in reading.of("irrelevant")]),
    )
    facts = [Fact(f"{label}, {len(words)}", [", ".join(words)]) for label, words in kinds if words]
    return Facts("other flags", facts) if facts else None


def _with_value(flag: Flag) -> str:
    return f"{flag.name} {flag.value}".strip()


def _with_note(flag: Flag) -> str:
    return f"{_with_value(flag)} ({flag.note})" if flag.note else _with_value(flag)
