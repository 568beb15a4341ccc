"""The report a person reads: answer first, then the tree, totals, architecture, problems. Plain text of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.checkpoint import textparts
from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.jsonable import pickles
from steptime.checkpoint.size_units import Units

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.checkpoint.inventory import Inventory
    from steptime.checkpoint.records import Section

MAX_PROBLEMS = 12
MAX_GLOBALS = 8
MAX_KIND = 45


def report(summary: Inventory, depth: int, units: Units, width: int, paint: Callable[[str, str], str]) -> str:
    """The whole report; `paint(text, colour)` colours for terminals or does nothing."""
    if not summary.sections:
        return ""
    blocks = [
        _headline(summary, units, width, paint),
        textparts.tree(summary, depth, units, width),
        textparts.rank_table(summary, units),
        textparts.roles(summary, units),
        textparts.sections(summary, units, width),
        textparts.architecture(summary, width),
        _pickle(summary, width - 2),
        problems(summary, width, paint),
    ]
    return "\n".join(line for block in blocks for line in block)


def _headline(summary: Inventory, units: Units, width: int, paint: Callable[[str, str], str]) -> list[str]:
    main, totals = summary.counted[0], summary.totals
    state = "complete" if summary.complete else paint("INCOMPLETE", "red")
    count = len(summary.all_problems)
    state += paint(f", {_counted(count, 'problem')} (below)", "red") if count else ""
    step = f", step {summary.step}" if summary.step is not None else ""
    io, size = summary.io, totals["logical_bytes"]
    files = sum(len(section.files) for section in summary.sections)
    read = f"read {units.size(io.bytes_read)} in {io.seconds * 1e3:.0f} ms"
    lines = [
        paint(escaped(summary.path), "bold"),
        *_kind(main, step, state),
        f"{_counted(totals['tensors'], 'tensor')} in {_counted(files, 'file')}; {read}, no tensor data, no code run",
        f"parameters {summary.params:,} ({_short_count(summary.params)})   bytes {size:,} ({units.size(size)})",
    ]
    if totals["logical_params"] != totals["params"] or totals["stored_params"] != totals["params"]:
        logical, stored = totals["logical_params"], totals["stored_params"]
        lines.append(f"  unique {totals['params']:,}   in whole tensors {logical:,}   stored {stored:,}")
    if totals["stored_bytes"] != totals["logical_bytes"]:
        lines.append(f"  storages hold {totals['stored_bytes']:,} bytes, tensors name {totals['logical_bytes']:,}")
    every = sum(row["bytes"] for row in summary.by_dtype) or 1
    parts = [f"{short(row['dtype'])} {row['bytes'] / every:.1%}" for row in summary.by_dtype[:6]]
    more = f" and {len(summary.by_dtype) - 6} more" if len(summary.by_dtype) > 6 else ""
    return [*lines, *textparts.wrapped("dtypes by bytes: ", escaped(", ".join(parts)) + more, width)]


def _kind(main: Section, step: str, state: str) -> list[str]:
    """Format, container and state, on two lines where one is too short for them."""
    container = "" if main.container == "single file" else f", {main.container}"
    kind = f"{main.format}{container}{step}"
    return [f"{kind}, {state}"] if len(kind) < MAX_KIND else [kind, f"  {state}"]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _short_count(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _pickle(summary: Inventory, width: int) -> list[str]:
    facts = pickles(summary)
    if not facts["globals"]:
        return []
    lines = []
    needs = [escaped(name, 80) for name in facts["needs"]]
    if needs:
        more = f" and {len(needs) - MAX_GLOBALS} more" if len(needs) > MAX_GLOBALS else ""
        lines += textparts.wrapped("needs these classes: ", ", ".join(needs[:MAX_GLOBALS]) + more, width)
    if facts["weights_only_loadable"]:
        lines.append("torch.load(weights_only=True) would accept it")
    elif facts["weights_only_loadable"] is False:
        reasons = [escaped(reason, 80) for reason in facts["refused_because"]]
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        text = ", ".join(reasons[:3]) + more
        lines += textparts.wrapped("torch.load(weights_only=True) would refuse: ", text, width)
    return ["", "pickle: no code from this checkpoint was executed", *(f"  {line}" for line in lines)]


def problems(summary: Inventory, width: int, paint: Callable[[str, str], str]) -> list[str]:
    """Every problem on its own line (the first dozen), or that there is none."""
    found = summary.all_problems
    if not found:
        return ["", "no problems found"]
    lines = ["", _counted(len(found), "problem")]
    for item in found[:MAX_PROBLEMS]:
        word = paint("error", "red") if item.severity == "error" else paint("warning", "yellow")
        where = f"{escaped(item.file, 120)}: " if item.file else ""
        first = f"{where}{escaped(item.message, 600)} [{item.code}]"
        body = textparts.wrapped("", first, width - 11)
        lines += [f"  {word}: {body[0]}", *(f"    {line}" for line in body[1:])]
    if len(found) > MAX_PROBLEMS:
        lines.append(f"  and {len(found) - MAX_PROBLEMS} more (--json lists all)")
    return lines
