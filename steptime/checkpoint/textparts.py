"""Blocks of the text report: each returns its lines, [] when there is nothing to say."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped

if TYPE_CHECKING:
    from steptime.checkpoint.inventory import Inventory
    from steptime.checkpoint.size_units import Units
    from steptime.checkpoint.tree import Node

MAX_ROWS = 32
NAME = 30
MAX_RANKS = 16


def wrapped(lead: str, text: str, width: int) -> list[str]:
    """`text` behind `lead`, wrapped at `width` columns with a hanging indent."""
    lines = textwrap.wrap(lead + text, max(width, 24), subsequent_indent="  ", break_on_hyphens=False)
    return lines or [lead]


def tree(summary: Inventory, depth: int, units: Units, width: int) -> list[str]:
    """Modules with parameters, share and size; identical layers once, with the number of each in the last column."""
    total = summary.params or 1
    unit = units.fitting(summary.tree.nbytes)
    rows: list[tuple[int, str, Node]] = []
    for name, child in _opened(summary.tree):
        _rows(rows, name, child, 0, depth)
    if not rows:
        return []
    lines = ["", f"{'':{NAME}}{'params':>16}{'share':>7}{unit:>8}"]
    for level, name, node in rows[:MAX_ROWS]:
        label = escaped("  " * level + name.removesuffix(".weight") + (f" x{node.repeat}" if node.repeat > 1 else ""))
        label = label if len(label) < NAME else f"{label[: NAME - 4]}..."
        share = f"{node.params / total:.1%}" if level == 0 else ""
        line = f"{label:{NAME}}{node.params:16,}{share:>7}{units.column(node.nbytes, unit):>8}  "
        lines.append((line + _detail(node, width - len(line))).rstrip())
    if len(rows) > MAX_ROWS:
        lines.append(f"... {len(rows) - MAX_ROWS} more rows (--depth, --tensors or --json show them)")
    return lines


def _opened(root: Node) -> list[tuple[str, Node]]:
    """The top rows: a module that is most of the whole is replaced by what is in it, unless that is one kind of layer."""
    rows = [(child.name, child) for child in root.children.values()]
    while True:
        most = next((row for row in rows if row[1].children and 2 * row[1].params > root.params), None)
        if most is None or most[1].repeat > 1 or any(name[0] in "*[" or name.isdecimal() for name in most[1].children):
            return rows
        at = rows.index(most)
        rows[at : at + 1] = [(f"{most[0]}.{child.name}", child) for child in most[1].children.values()]


def _rows(rows: list[tuple[int, str, Node]], name: str, node: Node, level: int, depth: int) -> None:
    """A row per module down to `depth`; below a folded group the counts are of one member."""
    if len(node.children) == 1:
        (only,) = node.children.values()
        if only.repeat > 1:
            name, node = f"{name}.{only.name}", only
    rows.append((level, name, node))
    if level < depth and len(rows) <= 4 * MAX_ROWS:
        for child in node.children.values():
            if level + 1 < depth or len(node.children) > 1 or child.repeat > 1:
                _rows(rows, child.name, child, level + 1, depth + (child.repeat > 1))


def _detail(node: Node, room: int) -> str:
    """The shape, the number of each, or as many shapes of what is inside as fit in `room` columns."""
    if node.shape is not None:
        text = escaped(f"{_shape(node)}{' = ' + node.alias_of if node.alias_of else ''}")
        return text if len(text) <= room else f"{text[: max(room - 3, 0)]}..."
    if node.repeat > 1:
        return f"{node.params // node.repeat:,} each"
    text = ""
    for name, child in list(node.children.items())[:8]:
        only = next(iter(child.children.values())) if len(child.children) == 1 else child
        part = escaped(f"{name.removesuffix('.weight')} {_shape(only)}") if only.shape is not None else ""
        text = f"{text} {part}".strip() if len(text) + len(part) < room else text
    inside = len(node.children)
    return text or f"{inside} part{'s' * (inside != 1)}"


def _shape(node: Node) -> str:
    return f"[{','.join(map(str, node.shape or ()))}]"


def roles(summary: Inventory, units: Units) -> list[str]:
    """Bytes by role, when there is more than weights."""
    by = summary.by_role
    rows = [("weights", by["model"]["bytes"], "")]
    if by["master"]:
        rows.append(("master copy", by["master"]["bytes"], ""))
    if by["optimizer"]["bytes"]:
        states = ", ".join(by["optimizer"]["states"][:4])
        rows.append(("optimizer", by["optimizer"]["bytes"], escaped(states, 30)))
    if by["other"]["bytes"]:
        rows.append(("other", by["other"]["bytes"], ""))
    if len(rows) == 1:
        return []
    total = sum(row[1] for row in rows)
    per = f"{total / summary.params:.2f} B per parameter" if summary.params else ""
    rows.append(("total", total, per))
    return [
        "",
        "by role",
        *(f"  {name:12}{size:20,} B{units.size(size):>12}  {note}".rstrip() for name, size, note in rows),
    ]


def rank_table(summary: Inventory, units: Units) -> list[str]:
    """One row per kind of rank."""
    main = summary.counted[0]
    lines: list[str] = []
    if main.parallelism:
        known = [
            f"{k.upper()} {v}" for k, v in main.parallelism.items() if isinstance(v, int) and not isinstance(v, bool)
        ]
        source = main.parallelism.get("source")
        lines += ["", f"parallelism {' x '.join(known) or 'not recorded'}" + (f" (from {source})" if source else "")]
    if not main.ranks:
        return lines
    lines += [] if lines else [""]
    lines.append(f"{'rank':24}{'tensors':>9}{'params':>17}{'weights':>11}{'optimizer':>12}")
    rows = _alike(main.ranks)
    for row in rows[:MAX_RANKS]:
        label = escaped(str(row["name"]), 60)[:23]
        weights, other = units.size(row["model_bytes"]), units.size(row["optimizer_bytes"])
        params = "" if row["params"] is None else f"{row['params']:,}"
        lines.append(f"{label:24}{row['tensors']:9,}{params:>17}{weights:>11}{other:>12}")
    if len(rows) > MAX_RANKS:
        lines.append(f"... {len(rows) - MAX_RANKS} more (--json lists all)")
    return lines


def _alike(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours with equal figures as one row, "rank 0 .. rank 63"."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        same = rows and all(rows[-1][key] == value for key, value in rank.items() if key != "name")
        if same:
            rows[-1]["name"] = f"{rows[-1]['name'].partition(' .. ')[0]} .. {rank['name']}"
        else:
            rows.append(dict(rank))
    return rows


def sections(summary: Inventory, units: Units, width: int) -> list[str]:
    """The sets of files, when there are several; other saves in one line."""
    lines: list[str] = []
    if len(summary.sections) > 1:
        lines += ["", f"{len(summary.sections)} sets of files"]
        for section in summary.sections[:12]:
            same = f"  also present as {section.same_as}" if section.same_as else ""
            text = f"{section.path or '.'}: {section.format}, {len(section.files)} file(s), {units.size(section.nbytes)}{same}"
            lines += [f"  {line}" for line in wrapped("", escaped(text, 300), width - 2)]
        if len(summary.sections) > 12:
            lines.append(f"  and {len(summary.sections) - 12} more (--json lists all)")
    notes = [note for section in summary.sections for note in section.notes]
    for note in notes[:6]:
        lines += wrapped("note: ", escaped(note, 300), width)
    if summary.others:
        lines += wrapped("other saves here (--all reads them): ", escaped(", ".join(summary.others), 400), width)
    return lines


def architecture(summary: Inventory, width: int) -> list[str]:
    """What was inferred, and from where in a word."""
    found = summary.architecture
    if not found:
        return []
    lines = ["", "architecture (from names and shapes unless noted)"]
    plain: list[str] = []
    for key, entry in found.items():
        if entry["value"] is None or key in ("q_rows", "kv_rows", "max_positions"):
            continue
        source = entry["from"] if entry["from"] in ("config.json", "args", "GGUF key-values") else ""
        plain.append(f"{key} {_value(entry['value'])}" + (f" ({source})" if source else ""))
    lines += [f"  {line}" for line in wrapped("", "  ".join(plain), width - 2)]
    head = found.get("head_dim")
    if head is not None and head["value"] is None:
        fits = ", ".join(map(str, head["candidates"])) or "none of the usual widths"
        lines += [f"  {line}" for line in wrapped("head_dim: ", f"{head['from']}; possible: {fits}", width - 2)]
    return lines


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {v}" for k, v in value.items()) + "}"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def tensor_line(name: str, shape: str, dtype: str, note: str) -> str:
    """One line of --tensors."""
    return f"{escaped(name)}  {short(dtype)} {shape}{'  ' + escaped(note) if note else ''}"
