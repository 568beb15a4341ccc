"""The modules of a checkpoint as a table: parameters, share and size of each, identical layers once."""

from __future__ import annotations

from steptime.base.words import counted
from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.inventory import Inventory
from steptime.checkpoint.tree import Node
from steptime.report.format import Unit, bytes_in, unit_for
from steptime.report.table import Table

MAX_ROWS = 32
ROOM = 24
"""Width in characters for the shapes inside a module."""


def modules(summary: Inventory, depth: int, units: tuple[Unit, ...], most: int = MAX_ROWS) -> Table | None:
    """Modules down to `depth`, at most `most` of them, with the shape, the number of each, or their contents."""
    total = summary.restored.params or 1
    unit = unit_for(summary.tree.nbytes, units)
    found: list[tuple[int, str, Node]] = []
    in_pipeline = any("pipeline" in section.facts for section in summary.counted)
    for name, child in (
        [(child.name, child) for child in summary.tree.children.values()] if in_pipeline else _opened(summary.tree)
    ):
        _collect(found, name, child, 0, depth, 4 * most)
    if not found:
        return None
    rows = [
        [
            escaped("  " * level + name.removesuffix(".weight") + (f" x{node.repeat}" if node.repeat > 1 else "")),
            _detail(node),
            short(node.dtype),
            f"{node.params:,}",
            f"{node.params / total:.1%}" if level == 0 else "",
            bytes_in(node.nbytes, unit),
        ]
        for level, name, node in found[:most]
    ]
    more = [f"{len(found) - most} more rows: --depth, --tensors or --json show them"] if len(found) > most else []
    return Table("modules", ["", "", "dtype", "params", "share", unit.name], rows, more, left=3, tails=True)


def _opened(root: Node) -> list[tuple[str, Node]]:
    """The top rows: a module with most of the parameters is replaced by its contents, unless that is one kind of layer."""
    rows = [(child.name, child) for child in root.children.values()]
    while True:
        most = next((row for row in rows if row[1].children and 2 * row[1].params > root.params), None)
        if most is None or most[1].repeat > 1 or any(name[0] in "*[" or name.isdecimal() for name in most[1].children):
            return rows
        at = rows.index(most)
        rows[at : at + 1] = [(f"{most[0]}.{child.name}", child) for child in most[1].children.values()]


def _collect(rows: list[tuple[int, str, Node]], name: str, node: Node, level: int, depth: int, most: int) -> None:
    """A row per module down to `depth`; below a folded group the counts are of one member."""
    if len(node.children) == 1:
        (only,) = node.children.values()
        if only.repeat > 1:
            name, node = f"{name}.{only.name}", only
    rows.append((level, name, node))
    if level < depth and len(rows) <= most:
        for child in node.children.values():
            if level + 1 < depth or len(node.children) > 1 or child.repeat > 1:
                _collect(rows, child.name, child, level + 1, depth + (child.repeat > 1), most)


def _detail(node: Node) -> str:
    """The shape, the number of each, or as many shapes of what is inside as fit in `ROOM`."""
    if node.shape is not None:
        return escaped(f"{_shape(node)}{' = ' + node.alias_of if node.alias_of else ''}")
    if node.repeat > 1:
        return f"{node.params // node.repeat:,} each"
    text, left = "", len(node.children)
    for name, child in list(node.children.items())[:8]:
        only = next(iter(child.children.values())) if len(child.children) == 1 else child
        part = escaped(f"{name.removesuffix('.weight')} {_shape(only)}") if only.shape is not None else ""
        if part and len(text) + len(part) < ROOM:
            text, left = f"{text} {part}".strip(), left - 1
    inside = len(node.children)
    return (f"{text} +{left}" if left else text) if text else counted(inside, "part")


def _shape(node: Node) -> str:
    return f"[{','.join(map(str, node.shape or ()))}]"
