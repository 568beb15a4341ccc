"""Tables of `3dtrn validate` on the memory of real GPU jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report.analyses import UNPROVED
from steptime.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    Figures = Mapping[str, Any]

HEADER = ["", "", "n", "states", "mean", "worst", "peak", "mean", "p90", "worst"]


def fine(share: float | None) -> str:
    """A share in percent with two decimals: memory is known to the byte."""
    return "-" if share is None else f"{100.0 * share:.2f}"


def lines(name: str, found: Figures) -> list[list[str]]:
    """A row for each split that has rows."""
    rows = []
    for split, figures in found.items():
        states, peak = figures["persisting"], figures["peak"]
        if peak["rows"]:
            shown = [fine(states[key]) for key in ("median", "mean", "worst")]
            shown += [fine(peak[key]) for key in ("median", "mean", "p90", "worst")]
            rows.append([name, split, f"{peak['rows']:,}", *shown])
            name = ""
    return rows or [[name, "", "0", UNPROVED, *[""] * (len(HEADER) - 4)]]


def table(what: str, groups: Figures, notes: tuple[str, ...] = ()) -> Table:
    """The rows of each group, its name first."""
    rows = [line for name, figures in groups.items() for line in lines(name, figures)]
    return Table(f"memory of real GPU jobs{what}", HEADER, rows, notes, left=2)


def tables(summary: Figures) -> list[Table]:
    """Headline, mechanisms, kinds, machines, rows left out, the worst rows, refused rows; nothing without such rows."""
    if not summary["rows"]:
        return []
    head = {"dense models": summary["headline"], "above 10 GB": summary["large"]}
    notes = [
        "errors in % of torch's own figures, last rank; states: median, mean and worst of what persists between steps"
    ]
    for split, figures in summary["headline"].items():
        if (first := figures["first_peak"])["rows"]:
            errors = f"median {fine(first['median'])}, mean {fine(first['mean'])}"
            notes.append(f"peak of the first step, {split}: {errors}, n {first['rows']}")
    told = (f"a job shows several mechanisms; {UNPROVED}: no measured job shows it",)
    found = [
        table(" (Megatron-LM's own tests)", head, tuple(notes)),
        table(", by mechanism", summary["mechanisms"], told),
        table(", by kind of model", summary["kinds"]),
        table(", mixtures of experts by mechanism", summary["experts"], told),
        table(", by GPU and container", summary["machines"]),
    ]
    if apart := summary["apart"]:
        numbered = {f"({i})": figures for i, figures in enumerate(apart.values(), 1)}
        found.append(table(", judged separately", numbered, tuple(f"({i}) {name}" for i, name in enumerate(apart, 1))))
    for words, key in (("worst rows, dense", "worst"), ("worst rows, experts, hybrid, latent", "worst_others")):
        worst = [[row["id"], row["split"], f"{100.0 * row['memory_error']:+.2f}"] for row in summary[key]]
        found.append(Table(f"memory of real GPU jobs, {words}", ["", "split", "peak, %"], worst, left=2))
    if refused := summary["refused"]:
        rows = [[reason, *(f"{n:,}" for n in counts.values())] for reason, counts in refused.items()]
        found.append(Table("GPU jobs that are not judged", ["", *next(iter(refused.values()))], rows))
    return found
