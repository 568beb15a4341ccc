"""The summary as a table for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from steptime.checkpoint.escape import escaped
from steptime.checkpoint.size_units import Units

if TYPE_CHECKING:
    from steptime.checkpoint.inventory import Inventory

MAX_ROWS = 40
MAX_PROBLEMS = 12


def table(summary: Inventory) -> str:
    """A heading, the module tree and the problems, every name escaped."""
    from tabulate import tabulate

    units = Units()
    rows = [
        [
            escaped(node.name) + (f" x{node.repeat}" if node.repeat > 1 else ""),
            f"{node.params:,}",
            units.size(node.nbytes),
        ]
        for child in summary.tree.children.values()
        for node in (child, *child.children.values())
    ]
    body = tabulate(rows[:MAX_ROWS], ["module", "parameters", "bytes"], tablefmt="html", disable_numparse=True)
    state = "complete" if summary.complete else "incomplete"
    name = summary.counted[0].format if summary.counted else "nothing could be read"
    head = f"<p><b>{escape(escaped(summary.path))}</b>: {escape(name)}, {summary.params:,} parameters, {state}</p>"
    problems = "".join(f"<li>{escape(escaped(p.message, 300))}</li>" for p in summary.all_problems[:MAX_PROBLEMS])
    return f"{head}{body}<ul>{problems}</ul>" if problems else f"{head}{body}"
