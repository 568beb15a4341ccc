"""Tables of names included with steptime, each with its source: data/checkpoint/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(name: str) -> dict[str, Any]:
    """The tables of one file by subject."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parents[1] / "data" / "checkpoint" / f"{name}.json").read_bytes()
    )
    return found


def words(names: str | list[str]) -> tuple[str, ...]:
    """The words of a line, or of several lines."""
    return tuple(" ".join([names] if isinstance(names, str) else names).split())
