"""Tables of start-up times: job start to first step, by world size, by log and by phase; logs that never started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.bench.logs.startup import PHASES, by_world_size, quantiles
from steptime.report.format import whole
from steptime.report.table import Fact, FactList, ReportSection, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steptime.bench.logs.startup import NeverStarted, Startup, Unclear

_NO_LAW = (
    "no scaling law is fitted: of 119 published start-ups (Perlmutter, 2023) world size explains 2 % of the variance"
)


def sections(started: list[Startup], never: list[NeverStarted], unclear: list[Unclear]) -> list[ReportSection]:
    """The answer, then the tables that have rows."""
    told: list[ReportSection] = [_answer(started, never, unclear)]
    if started:
        told += [_sizes(started), _rows(started)]
    if any(row.phases_s for row in started):
        told.append(_phases(started))
    if never:
        told.append(_never(never))
    if unclear:
        told.append(FactList("start-up unknown", [Fact(row.log, [row.why], "warn") for row in unclear]))
    return told


def _answer(started: list[Startup], never: list[NeverStarted], unclear: list[Unclear]) -> FactList:
    facts = []
    if started:
        least, p10, middle, p90, most = _stamped(quantiles([row.seconds_s for row in started])[:5])
        tenths = f"; {p10} to {p90} s (10th to 90th percentile)" if len(started) >= 10 else ""
        spread = f"median {middle} s{tenths}; {least} to {most} s in all" if len(started) > 1 else f"{middle} s"
        facts.append(Fact("job start to first step", [spread], "head"))
    facts.append(Fact("started", [f"{len(started)} of {len(started) + len(never) + len(unclear)} logs"]))
    if never:
        facts.append(Fact("did not start", [f"{len(never)} without step=0"], "bad"))
    if unclear:
        facts.append(Fact("unknown", [f"{len(unclear)} reached step 0, with unknown start-up time"], "warn"))
    return FactList("start-up", facts)


def _stamped(values: Sequence[float]) -> list[str]:
    """Seconds between stamps: whole ones as such, else in tenths."""
    decimals = 0 if all(value == int(value) for value in values) else 1
    return [f"{value:,.{decimals}f}" for value in values]


def _sizes(started: list[Startup]) -> Table:
    groups = [("unknown" if size is None else str(size), found) for size, found in by_world_size(started).items()]
    groups.append(("all", quantiles([row.seconds_s for row in started])))
    shown = [_stamped([found[i] for _, found in groups]) for i in range(5)]
    rows = [[label, str(found.n), *cells] for (label, found), *cells in zip(groups, *shown, strict=True)]
    rows.insert(-1, [])
    return Table("start-up by world size (s)", ["ranks", "n", "min", "p10", "median", "p90", "max"], rows, [_NO_LAW])


def _rows(started: list[Startup]) -> Table:
    rows: list[list[str]] = []
    noted: dict[str, list[str]] = {}
    for row, took in zip(started, _stamped([row.seconds_s for row in started]), strict=True):
        mark = ""
        if row.notes:
            mark = " *"
            noted.setdefault("; ".join(row.notes), []).append(row.log)
        size = "-" if row.world_size is None else str(row.world_size)
        when = "-" if row.start is None else row.start.strftime("%Y-%m-%d %H:%M:%S")
        rows.append([row.log, took + mark, size, when])
    notes = [f"* {', '.join(logs)}: {note}" if len(noted) > 1 else f"* {note}" for note, logs in noted.items()]
    return Table("start-up by log", ["", "s", "ranks", "job start"], rows, notes)


def _phases(started: list[Startup]) -> Table:
    """The parts that our own logs state, in their order."""
    rows = [row for row in started if row.phases_s]
    named = [name for name in (*PHASES, "steady") if any(name in row.phases_s for row in rows)]
    named += sorted({name for row in rows for name in row.phases_s} - set(named))
    cells = [
        [
            row.log,
            *(f"{row.phases_s[name]:,.2f}" if name in row.phases_s else "-" for name in named),
            f"{row.other_s:,.2f}",
        ]
        for row in rows
    ]
    notes = [
        "other: job script before the launcher, and time stamp rounding",
        "steady: a later step, for comparison with the first; not part of the start-up",
    ]
    return Table(
        "parts of the start-up (s)", ["", *(name.replace("_", " ") for name in named), "other"], cells,
        notes if "steady" in named else notes[:1],
    )  # fmt: skip


def _never(rows: list[NeverStarted]) -> Table:
    cells = [[row.log, whole(row.lines), str(row.start or "none stated"), str(row.last or "none")] for row in rows]
    return Table("did not start: rank 0 did not log step=0", ["", "lines", "job start", "last stamp"], cells)
