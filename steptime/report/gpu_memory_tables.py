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


def tables(summary: Figures) -> list[Table]:
    """Headline, mechanisms, kinds, machines, rows left out, the worst rows, refused rows; nothing without such rows."""
    if not summary["rows"]:
        return []
    first = {split: figures["first_peak"] for split, figures in summary["headline"].items()}
    notes = [
        "errors in % of torch's own figures, last rank; states: median, mean and worst of what persists between steps",
        *(
            f"peak of the first step, {split}: median {fine(found['median'])}, mean {fine(found['mean'])}, n {found['rows']}"
            for split, found in first.items()
            if found["rows"]
        ),
    ]
    head = [*lines("dense models", summary["headline"]), *lines("above 10 GB", summary["large"])]
    found = [Table("memory of real GPU jobs (Megatron-LM's own tests)", HEADER, head, tuple(notes), left=2)]
    rows = [line for name, figures in summary["mechanisms"].items() for line in lines(name, figures)]
    told = (f"a job shows several mechanisms; {UNPROVED}: no measured job shows it",)
    found.append(Table("memory of real GPU jobs, by mechanism", HEADER, rows, told, left=2))
    rows = [line for name, figures in summary["kinds"].items() for line in lines(name, figures)]
    found.append(Table("memory of real GPU jobs, by kind of model", HEADER, rows, left=2))
    rows = [line for name, figures in summary["experts"].items() for line in lines(name, figures)]
    found.append(Table("memory of real GPU jobs, mixtures of experts by mechanism", HEADER, rows, told, left=2))
    rows = [line for name, figures in summary["machines"].items() for line in lines(name, figures)]
    found.append(Table("memory of real GPU jobs, by GPU and container", HEADER, rows, left=2))
    if summary["apart"]:
        rows = [line for i, figures in enumerate(summary["apart"].values()) for line in lines(f"({i + 1})", figures)]
        why = tuple(f"({i + 1}) {name}" for i, name in enumerate(summary["apart"]))
        found.append(Table("memory of real GPU jobs, judged separately", HEADER, rows, why, left=2))
    for words, key in (("worst rows, dense", "worst"), ("worst rows, experts, hybrid, latent", "worst_others")):
        worst = [[row["id"], row["split"], f"{100.0 * row['memory_error']:+.2f}"] for row in summary[key]]
        found.append(Table(f"memory of real GPU jobs, {words}", ["", "split", "peak, %"], worst, left=2))
    if summary["refused"]:
        rows = [[reason, *(f"{n:,}" for n in counts.values())] for reason, counts in summary["refused"].items()]
        found.append(
            Table("GPU jobs that are not judged", ["", *next(iter(summary["refused"].values()))], rows, left=1)
        )
    return found
