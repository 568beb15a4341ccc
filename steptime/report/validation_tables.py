"""Output of `3dtrn validate`: the headline, other trainers, slices, analyses, memory of real GPU jobs, and skipped rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steptime.base.words import counted
from steptime.report import analyses
from steptime.report.analyses import HEADER, UNPROVED, rows_of
from steptime.report.format import number, percent
from steptime.report.table import Table

Summary = Mapping[str, Any]

FEW = 5
"""Least number of cells for which a spread is shown."""
BY = {
    "accelerator": "by accelerator",
    "source": "by source",
    "precision": "by precision",
    "framework": "by framework",
    "model_kind": "by model kind",
}


def table(title: str, groups: Mapping[str, Mapping[str, Any]], notes: tuple[str, ...] = ()) -> Table:
    """One row per slice."""
    return Table(title, ["", *HEADER], rows_of(groups), notes)


def tables(summary: Summary) -> list[Table]:
    """The whole report, summary first; slices without rows are left out."""
    found = step_time(summary)
    leading, others, native = summary["headline"], summary["other"], summary["native"]
    experts = summary["experts"]
    mine = next((group for group in (leading, native, others, experts) if group["step_time"]["rows"]), leading)
    found += [table(title, mine["by"][name]) for name, title in BY.items() if mine["by"][name]]
    found += worst("worst rows", mine["worst"])
    found += worst("worst rows, PyTorch-native", native["worst"] if mine is not native else [])
    found += worst("worst rows, mixtures of experts", experts["worst"] if mine is not experts else [])
    found += worst("worst rows, other trainers", others["worst"] if mine is not others else [])
    if summary["apart"]:
        found.append(table("judged, but not in the figures above", summary["apart"]))
    found += analyses.all_tables(summary)
    if summary["memory"]:
        note = "metric, source; unstated: compared with reserved"
        found.append(table("peak memory", summary["memory"], (note,)))
    found += _gpu_tables(summary["gpu_memory"])
    found += analyses.intervals(summary)
    if summary["skipped_by_reason"]:
        rows = [[reason, f"{count:,}"] for reason, count in summary["skipped_by_reason"].items()]
        found.append(Table("skipped, by reason", ["", "rows"], rows))
    return found


def each(rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Every row of a user's own CSV, with the fields of `--json`: measured vs. predicted."""
    lines = []
    for row in rows:
        if row["skipped"]:
            continue
        step = [_figure(row[f"{who}_step_s"], 3) for who in ("measured", "predicted")]
        memory = [_figure(row[f"{who}_memory_gib"], 1) for who in ("measured", "predicted")]
        errors = [
            "" if row[key] is None else percent(row[key], signed=True) for key in ("step_time_error", "memory_error")
        ]
        lines.append([row["id"], *step, errors[0], *memory, errors[1]])
    header = ["", "step s", "predicted", "error", "GiB", "predicted", "error"]
    return [Table("row by row", header, lines, ("assumptions for each row: --json",))] if lines else []


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def step_time(summary: Summary) -> list[Table]:
    """The errors of step time: the headline by split, then the other groups by split and by source."""
    leading = summary["headline"]
    told = {
        "PyTorch-native stack": summary["native"],
        "mixtures of experts": summary["experts"],
        "other trainers": summary["other"],
    }
    notes: tuple[str, ...] = (
        f"{counted(summary['rows'], 'measured row')}: {summary['judged']:,} judged, {summary['skipped']:,} skipped",
        "error = predicted / measured - 1; median, mean and p90 of its size",
        "one vote per cell (model, accelerator, layout, batch, precision)",
    )
    named = "step time" if leading["name"] == "own runs" else f"step time: {leading['name']}"
    found = []
    if leading["step_time"]["rows"] or not any(group["step_time"]["rows"] for group in told.values()):
        found.append(table(named, by_split(leading), (*notes, *intervals(leading))))
        notes = ()
    for name, group in told.items():
        if group["step_time"]["rows"]:
            said = (*notes, *intervals(group), *_over_sources(group))
            rows = [*rows_of(by_split(group)), ["by source"], *rows_of(group["sources"])]
            found.append(Table(f"step time: {name}", ["", *HEADER], rows, said))
            notes = ()
    return found


def by_split(group: Summary) -> dict[str, Mapping[str, Any]]:
    """Figures of every split and of all; only of all where no row has a split."""
    splits = group["by"]["split"]
    return {**(splits if set(splits) != {"none"} else {}), "all": group["step_time"]}


def intervals(group: Summary) -> list[str]:
    """A line for every split with enough cells."""
    known = {**group["split_interval_5_95"], "all": group["step_time"]["interval_5_95"]}
    lines = []
    for name, figures in by_split(group).items():
        if (found := known.get(name)) and figures["cells"] >= FEW:
            spans = ", ".join(f"{key} {100 * low:.1f} to {100 * high:.1f}" for key, (low, high) in found.items())
            lines.append(f"5-95 % interval, {name}: {spans} %")
    return lines


def _over_sources(others: Summary) -> list[str]:
    """The median over sources, and the sources with large errors."""
    every, test = percent(others["median_over_sources"]), percent(others["test_median_over_sources"])
    lines = [f"median over sources of each source's median: {every}, of test rows {test}"]
    if others["worse_than_15_percent"]:
        lines.append(f"worse than 15 % with ten rows or more: {', '.join(others['worse_than_15_percent'])}")
    return lines


def worst(title: str, rows: list[dict[str, Any]]) -> list[Table]:
    """The rows with the largest errors, with measured and predicted figures."""
    if not rows:
        return []
    lines = [
        [
            row["id"],
            row["split"],
            percent(row["step_time_error"], signed=True),
            *(number(row[f"{kind}_tokens_per_s_per_gpu"] or 0.0) for kind in ("measured", "predicted")),
        ]
        for row in rows
    ]
    return [Table(title, ["", "split", "error", "measured", "predicted"], lines, ("tokens/s per device",), left=2)]


_GPU_HEADER = ["", "", "n", "states", "mean", "worst", "peak", "mean", "p90", "worst"]


def _fine(share: float | None) -> str:
    """A share in percent with two decimals: memory is known to the byte."""
    return "-" if share is None else f"{100.0 * share:.2f}"


def _split_lines(name: str, found: Summary) -> list[list[str]]:
    """A row for each split that has rows."""
    rows = []
    for split, figures in found.items():
        states, peak = figures["persisting"], figures["peak"]
        if peak["rows"]:
            shown = [_fine(states[key]) for key in ("median", "mean", "worst")]
            shown += [_fine(peak[key]) for key in ("median", "mean", "p90", "worst")]
            rows.append([name, split, f"{peak['rows']:,}", *shown])
            name = ""
    return rows or [[name, "", "0", UNPROVED, *[""] * (len(_GPU_HEADER) - 4)]]


def _gpu_table(what: str, groups: Summary, notes: tuple[str, ...] = ()) -> Table:
    """The rows of each group, its name first."""
    rows = [line for name, figures in groups.items() for line in _split_lines(name, figures)]
    return Table(f"memory of real GPU jobs{what}", _GPU_HEADER, rows, notes, left=2)


def _gpu_tables(summary: Summary) -> list[Table]:
    """Headline, mechanisms, kinds, machines, rows left out, the worst rows, refused rows; nothing without such rows."""
    if not summary["rows"]:
        return []
    head = {"dense models": summary["headline"], "above 10 GB": summary["large"]}
    notes = [
        "errors in % of torch's own figures, last rank; states: median, mean and worst of what persists between steps"
    ]
    for split, figures in summary["headline"].items():
        if (first := figures["first_peak"])["rows"]:
            errors = f"median {_fine(first['median'])}, mean {_fine(first['mean'])}"
            notes.append(f"peak of the first step, {split}: {errors}, n {first['rows']}")
    told = (f"a job shows several mechanisms; {UNPROVED}: no measured job shows it",)
    found = [
        _gpu_table(" (Megatron-LM's own tests)", head, tuple(notes)),
        _gpu_table(", by mechanism", summary["mechanisms"], told),
        _gpu_table(", by kind of model", summary["kinds"]),
        _gpu_table(", mixtures of experts by mechanism", summary["experts"], told),
        _gpu_table(", by GPU and container", summary["machines"]),
    ]
    if separate := summary["apart"]:
        numbered = {f"({i})": figures for i, figures in enumerate(separate.values(), 1)}
        found.append(
            _gpu_table(", judged separately", numbered, tuple(f"({i}) {name}" for i, name in enumerate(separate, 1)))
        )
    for words, key in (("worst rows, dense", "worst"), ("worst rows, experts, hybrid, latent", "worst_others")):
        worst = [[row["id"], row["split"], f"{100.0 * row['memory_error']:+.2f}"] for row in summary[key]]
        found.append(Table(f"memory of real GPU jobs, {words}", ["", "split", "peak, %"], worst, left=2))
    if refused := summary["refused"]:
        rows = [[reason, *(f"{n:,}" for n in counts.values())] for reason, counts in refused.items()]
        found.append(Table("GPU jobs that are not judged", ["", *next(iter(refused.values()))], rows))
    return found
