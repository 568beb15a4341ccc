"""Settings besides the layout that shorten a step: what each saves, and whether its estimate is verified."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from steptime.answer.result import Estimate
from steptime.answer.switches import LEAST
from steptime.base.rows import Saving
from steptime.report.headline import fix_cost, typed
from steptime.report.table import WIDTH, Table

TITLE = f"settings that shorten the step by {100.0 * LEAST:.0f} % or more, each by itself"


def of_report(estimate: Estimate) -> Table | None:
    """The settings of a job that fits, which keep its arithmetic as precise; None where it has none, or does not fit."""
    return table(estimate.savings)


def table(found: Sequence[Saving], title: str = TITLE, notes: Sequence[str] = ()) -> Table | None:
    """Each setting as typed, its cost and its name below; None without any."""
    rows: list[list[str]] = []
    for saving in found:
        rows += [[line] for line in typed(saving.set)]
        rows += [[f"    {line}"] for line in wrap(described(saving), WIDTH - 6)]
    return Table(title, [], rows, notes) if rows else None


def described(saving: Saving) -> str:
    """Its name, its cost, and what is to be known of it."""
    return "; ".join(filter(None, (f"{saving.name}: {fix_cost(saving)}", saving.note)))
