"""Tensors saved in pieces with offsets: put together, checked for gaps and overlaps, replicas counted once."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steptime.checkpoint.records import Section, Shape, StoredTensor

MAX_LINES = 10  # problems of one kind written out


def assemble(section: Section) -> None:
    """Set whole shapes (the reach of the pieces where none is recorded) and `unique` for every tensor of `section`.

    Pieces that repeat each other are replicas; pieces that do not add up to the whole are a problem.
    """
    groups: dict[tuple[str, str], list[StoredTensor]] = {}
    for tensor in section.tensors:
        groups.setdefault((tensor.role, tensor.name), []).append(tensor)
    torn = 0
    for (_, name), group in groups.items():
        placed = [t for t in group if t.offsets is not None]
        if not placed:
            _replicas(group)
            continue
        whole = group[0].global_shape or _reach(placed)
        seen: set[tuple[Shape, Shape]] = set()
        for tensor in placed:
            tensor.global_shape = whole
            key = (tensor.offsets or (), tensor.shape)
            tensor.unique = 0 if key in seen else tensor.numel
            tensor.note = tensor.note or ("replica" if key in seen else "")
            seen.add(key)
        covered = sum(prod(shape) for _, shape in seen)
        if covered != prod(whole):
            torn += 1
            if torn <= MAX_LINES:
                what = "overlap" if covered > prod(whole) else "leave gaps"
                message = f"pieces of {name} {what}: {covered:,} of {prod(whole):,} elements"
                section.problem("INCOMPLETE_COVER", message, tensor=name)
    if torn > MAX_LINES:
        section.problem("INCOMPLETE_COVER", f"{torn - MAX_LINES} more tensors whose pieces do not add up")


def _reach(group: list[StoredTensor]) -> Shape:
    corners = [tuple(o + n for o, n in zip(t.offsets or (), t.shape, strict=True)) for t in group]
    dims = len(corners[0])
    return tuple(max(c[d] for c in corners if len(c) == dims) for d in range(dims))


def _replicas(group: list[StoredTensor]) -> None:
    for number, tensor in enumerate(group):
        tensor.unique = 0 if number else tensor.numel
        if number:
            tensor.note = tensor.note or "replica"
