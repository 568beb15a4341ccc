"""Analyses of the errors, as tables: baselines, noise floor, ratios, regret, runs close to the memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steptime.report.format import percent
from steptime.report.table import Table

Summary = Mapping[str, Any]

HEADER = ["rows", "cells", "median", "mean", "p90", "bias"]
UNPROVED = "not verified"
"""Shown in place of figures for a mechanism that no measured run covers."""

GUESSES = {
    "estimate": "the estimate, unscaled",
    "scaled_estimate": "scaled by one factor per accelerator and precision",
    "flat_mfu": "one MFU per accelerator and precision",
}
FLOORS = {
    "same_release": "measured twice in one release",
    "other_release": "measured in another release or source",
    "other_trainers": "other trainers, measured twice in one source",
    "moe_other_release": "mixtures of experts, in another release",
    "lookup": "row predicted by the median of other releases",
    "lookup_on_test": "the same, test rows only",
    "estimate_on_test": "the estimate on the same rows",
}
RATIOS = {"weak_scaling": "weak scaling", "strong_scaling": "strong scaling", "layout": "layout"}
SWEEPS = {
    "headline": "the headline group",
    "other": "other trainers",
    "test": "test rows only",
    "apart": "judged separately",
}


INTERVALS = {"step": "80 % intervals of step time", "memory": "80 % intervals of peak memory"}


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Rows, cells, median, mean, p90 and bias of one slice as text."""
    errors = [percent(figures[name]) for name in ("median", "mean", "p90")]
    return [f"{figures['rows']:,}", f"{figures['cells']:,}", *errors, percent(figures["bias"], signed=True)]


def rows_of(groups: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """One row per slice, its name first."""
    return [[name, *cells(figures)] for name, figures in groups.items()]


def baselines(summary: Summary) -> list[Table]:
    """The estimate on test rows, compared with baselines fitted on the fit rows: the headline, then mixtures of experts."""
    note = "factors are medians over fit rows; a flat MFU uses only the FLOP count"
    of_experts = "factors are medians over fit rows of the group; the FLOP count has active parameters only"
    groups = [("", summary["baselines"], note)]
    groups += [(f" of {who}", known, of_experts) for who, known in summary["baselines"]["experts"].items()]
    found = []
    for who, known, told in groups:
        figures = {text: known[key] for key, text in GUESSES.items() if key in known}
        if any(of_guess["rows"] for of_guess in figures.values()):
            title = f"test rows{who}: simpler baselines" if who else "test rows: the estimate and simpler baselines"
            found.append(Table(title, ["", *HEADER], rows_of(figures), (told,)))
    return found


def noise(summary: Summary) -> list[Table]:
    """How much two measurements of one cell differ."""
    rows = [
        [text, f"{f['rows']:,}", f"{f['cells']:,}", *(percent(f[name]) for name in ("median", "mean", "p90", "max"))]
        for key, text in FLOORS.items()
        if (f := summary["noise"][key])["rows"]
    ]
    notes = (
        "pairs: difference of two measurements of a cell divided by their mean, a lower bound for any model's error",
        "rows also measured in another release",
    )
    header = ["", "pairs", "cells", "median", "mean", "p90", "max"]
    return [Table("noise floor: the same cell measured twice", header, rows, notes)] if rows else []


def ratios(summary: Summary) -> list[Table]:
    """Errors of ratios by kind, group and split, with their targets."""
    rows: list[list[str]] = []
    names = {"headline": summary["headline"]["name"], "other": "other trainers"}
    splits = ("all", "test") if "test" in summary["by"]["split"] else ("all",)
    for key, text in RATIOS.items():
        kind = summary["ratios"][key]
        lines = [
            [f"{name}, {split}", *cells(kind[who][split])]
            for who, name in names.items()
            for split in splits
            if kind[who]["all"]["rows"]
        ]
        target = " / ".join(f"{100 * kind['target'][name]:g}" for name in ("median", "mean", "p90"))
        rows += [[f"{text} (target {target} %)"], *lines] if lines else []
    notes = (
        "two runs of one source and release; weak: the number of devices differs, same work per device; strong: same batch",
        "layout: tp, pp, cp, vpp or micro-batch differ, same devices and batch",
        "error of predicted over measured ratio; one vote per series; test: both runs are test rows",
    )
    return [Table("ratios", ["", "pairs", "series", *HEADER[2:]], rows, notes)] if rows else []


def regret(summary: Summary) -> list[Table]:
    """The cost of the estimate's choice of a layout, and the sweeps with the largest cost."""
    rows, worst = [], []
    for key, text in SWEEPS.items():
        found = summary["regret"][key]
        if not found["sweeps"]:
            continue
        taus = [_plain(found[name]) for name in ("tau_median", "tau_lowest")]
        hits = [f"{found[name]}" for name in ("best_picked", "best_in_three", "best_tied", "picks_out_of_memory")]
        costs = [percent(found[name]) for name in ("median", "mean", "worst")]
        rows.append([text, f"{found['sweeps']}", *costs, *hits, *taus])
        worst += _worst_sweeps(found["worst_sweeps"]) if key in {"headline", "other"} else []
    if not rows:
        return []
    header = ["", "sweeps", "median", "mean", "worst", "best", "in 3", "tied", "OOM", "tau", "lowest"]
    notes = (
        "sweep: one job of one source in ten or more layouts, including those that ran out of memory",
        "regret: measured time of the layout predicted fastest of those that fit (else tight), relative to the best measured",
        "target: median 2 %, worst 5 %, picks out of memory 1 %, tau 0.85",
        "best: the best was picked; in 3: it is among the three predicted fastest; tied: with the pick",
        "OOM: the pick ran out of memory; tau: Kendall's tau-b",
    )
    dearest = Table("worst picks", ["", "picked", "layouts", "ran", "regret", "tau"], worst)
    return [Table("regret of choosing a layout", header, rows, notes), *([dearest] if worst else [])]


def _worst_sweeps(sweeps: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for sweep in sweeps:
        cost = "out of memory" if sweep["out_of_memory"] else percent(sweep["regret"])
        rows.append([*(f"{sweep[key]}" for key in ("name", "pick", "layouts", "ran")), cost, _plain(sweep["tau"])])
    return rows


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bands(summary: Summary) -> list[Table]:
    """Runs that ran out of memory and runs that did not, by predicted peak / capacity; one table per group of sources."""
    found = []
    for who, figures in summary["fits_by_band"].items():
        if not figures["all"]["ran_out"]:
            continue
        rows = [_band(_edges(band), band) for band in figures["bands"]]
        rows += [_band("0.85 to 1.15", figures["close"]), _band("all", figures["all"])]
        false = figures["false_fits"]
        note = (
            f"false FITS: {false['rows']} of {figures['all']['ran_out']} that ran out ({percent(false['of_ran_out'])}), "
            f"{percent(false['of_called_fits'])} of all predicted to fit, {percent(false['of_all'])} of all runs"
        )
        said = f"by the verdict, which also uses the p90: {false['by_verdict']} that ran out are predicted to fit"
        target = "target: balanced accuracy 85 % from 0.85 to 1.15, false FITS 2 %"
        header = ["predicted / capacity", "ran", "right", "ran out", "right", "balanced"]
        found.append(Table(f"fits or not, {who}", header, rows, (note, said, target)))
    return found + _ran(summary)


def _ran(summary: Summary) -> list[Table]:
    """Verdicts of successful runs: DOES NOT FIT is an error."""
    rows = [[name, *(f"{n:,}" for n in found.values())] for name, found in summary["verdicts_of_runs"].items()]
    notes = ("runs with a measured step time: sources with a wrong verdict, and all sources",)
    return [Table("successful runs, by verdict", ["", "fits", "tight", "does not fit"], rows, notes)] if rows else []


def _edges(band: Mapping[str, Any]) -> str:
    return f"above {band['low']}" if band["high"] is None else f"{band['low']:g} to {band['high']:g}"


def _band(name: str, band: Mapping[str, Any]) -> list[str]:
    counts = [f"{band[key]:,}" for key in ("ran", "ran_right", "ran_out", "ran_out_right")]
    return [name, *counts, percent(band["balanced_accuracy"])]


def mechanisms(summary: Summary) -> list[Table]:
    """Errors of peak memory by mechanism, for torch's allocations in runs and in test jobs, and for other readings."""
    rows = []
    for name, found in summary["memory_by_mechanism"].items():
        line = [name]
        for how in ("allocated", "ci", "otherwise"):
            line += [f"{found[how]['rows']:,}", percent(found[how]["mean"]) if found[how]["rows"] else UNPROVED]
        rows.append(line)
    known = any(line[i] != "0" for line in rows for i in (1, 3, 5))
    header = ["", "runs", "mean", "CI jobs", "mean", "other", "mean"]
    notes = (
        "runs: torch's peak allocation; CI jobs: the same for tiny test jobs; other: reserved, nvidia-smi or unstated",
        "not verified: no measured run covers it",
    )
    return [Table("peak memory by mechanism", header, rows, notes)] if known else []


def all_tables(summary: Summary) -> list[Table]:
    """Every analysis with results, in reading order."""
    kinds = (baselines, noise, ratios, regret, bands, mechanisms)
    return [table for make in kinds for table in make(summary)]


def intervals(summary: Summary) -> list[Table]:
    """How many measured values lie inside their 80 % intervals: step time, then memory."""
    header = ["", "split", "rows", "cells", "series", "inside", "error", "above", "width", "by rows"]
    notes = (
        "rows of the fit split are judged without their own cell",
        "other sources: each row is judged by runs of other sources only; likewise accelerators and so on",
        "one vote per cell (model, accelerator, layout, batch, precision), as in the fit; by rows: one vote per row",
        "series: rows of one source, accelerator and model; their errors are correlated",
        "error: standard error of inside, one draw per series",
        "above: slower, or more bytes, than the p90; the rest of those outside are below the p10",
        "width: median of (p90 - p10) / estimate",
    )
    shown = []
    for of, found in summary["intervals"].items():
        told = [*notes, *_near_80(summary["intervals_near_80"][of])]
        shown += [Table(INTERVALS[of], header, list(map(_coverage, found)), told, left=2)] if found else []
    return shown


def _near_80(found: Mapping[str, Any]) -> list[str]:
    """The count of slices near 80 %, and the count that chance leaves where every slice is at 80 %."""
    if not found["slices"]:
        return []
    near = f"{found['near']} of {found['slices']} accelerators and frameworks of 2 series or more"
    return [
        f"{near} have 75 to 85 % of test rows inside; if all were at exactly 80 %, {found['expected']:.1f} would by chance"
    ]


def _coverage(figures: Mapping[str, Any]) -> list[str]:
    counts = [f"{figures[name]:,}" for name in ("rows", "cells", "series")]
    shares = [f"{100.0 * figures[name]:.1f} %" for name in ("covered", "error", "above", "width", "of_rows")]
    return [figures["what"], figures["split"] or "none", *counts, *shares]
