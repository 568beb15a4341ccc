"""Files written by ranks: the missing ranks of the grid, and one table row per rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice, product
from math import prod
from typing import Any

from steptime.checkpoint.stored_records import Section, StoredTensor

MAX_LINES = 10
MAX_GRID = 1 << 20  # ranks; more is a number somebody wrote into a name or an argument, not a job


def check(
    section: Section, sizes: dict[str, int], present: Collection[tuple[int, ...]], name: Callable[..., str]
) -> None:
    """MISSING_RANK for each place of the grid `sizes` {axis: degree} without a file; `name(*place)` is what it would be.

    Only the first few are named: a number in a file name may be anything.
    """
    total = prod(sizes.values())
    gone = total - len(present)
    degrees = " x ".join(f"{axis.upper()} {size}" for axis, size in sizes.items())
    if total > MAX_GRID:
        section.problem("MISSING_RANK", f"{len(present)} of {total:,} ranks present ({degrees})", section.path)
        return
    places = (place for place in product(*map(range, sizes.values())) if place not in present)
    for place in islice(places, MAX_LINES):
        section.problem("MISSING_RANK", f"missing: {len(present)} of {total} ranks present ({degrees})", name(*place))
    if gone > MAX_LINES:
        section.problem("MISSING_RANK", f"{gone - MAX_LINES} more ranks are missing")


def rows(tensors: Iterable[StoredTensor], label: Callable[[StoredTensor], str | None]) -> list[dict[str, Any]]:
    """The table of ranks: per `label` of a tensor its pieces, elements and bytes by role; None is left out."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        name = label(tensor)
        if name is None:
            continue
        if name not in found:
            found[name] = row(name)
        add(found[name], tensor.role, 1, tensor.numel, tensor.nbytes)
    return list(found.values())


def row(name: str) -> dict[str, Any]:
    """A row of the table of ranks with nothing in it yet."""
    return {"name": name, "tensors": 0, "params": 0, "model_bytes": 0, "optimizer_bytes": 0}


def add(found: dict[str, Any], role: str, pieces: int, elements: int, nbytes: int) -> None:
    """Add pieces of one role to a row."""
    found["tensors"] += pieces
    if role in ("model", ""):
        found["params"] += elements
        found["model_bytes"] += nbytes
    elif role in ("optimizer", "master"):
        found["optimizer_bytes"] += nbytes
