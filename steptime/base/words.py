"""Counts with their nouns and values as a plan writes them, for messages and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFUSED = "refused by "
"""Start of a line on a setting that a plan's own framework stops at; each answer has it at its top."""


def counted(count: float, noun: str) -> str:
    """A count and its noun, in the plural unless it is one.

    >>> counted(1, "device"), counted(1024, "device"), counted(0, "micro-batch"), counted(2, "process")
    ('1 device', '1,024 devices', '0 micro-batches', '2 processes')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,.0f} {noun}{ending}"


def flow(value: Any) -> str:
    """A value in YAML's flow style; words need no quotes there.

    >>> flow({"granularity": "full", "n_layers": (1, 2)}), flow(True), flow(None)
    ('{granularity: full, n_layers: [1, 2]}', 'true', 'null')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def argument(value: Any) -> str:
    """A value as `--set` reads it, quoted for a shell.

    >>> argument({"granularity": "full", "n_layers": 2}), argument(True)
    ("'{granularity: full, n_layers: 2}'", 'true')
    """
    text = flow(value)
    return f"'{text}'" if text[:1] in {"{", "["} else text
