"""A plot of `3dtrn validate`: predicted against measured step time, and the distribution of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.report.plot_style import picture, plain_numbers
from steptime.validation.judgement import Judgement
from steptime.validation.slices import headline

BAND = 0.10
"""Half the width of the band around the diagonal."""
REACH = 0.5
"""Errors beyond this share are drawn at the edge."""
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B4513", "#4B0082")
"""Distinguishable by color-blind readers (Okabe and Ito 2008), and two more dark ones."""
_SHAPES = "osD^vP*X"
"""The marker of each color, which a grayscale print needs."""
_OTHERS = ("#8C8C8C", "h")
_SPLITS: dict[str, dict[str, Any]] = {
    "fit": {"facecolors": "none", "linewidths": 0.9, "s": 26},
    "test": {"linewidths": 0.4, "edgecolors": "white", "s": 30},
    "none": {"linewidths": 0.4, "edgecolors": "white", "s": 30},
}
_STEPS = {"fit": ("--", "#7A7A7A"), "test": ("-", "#000000"), "none": ("-", "#000000")}
_NAMES = {"fit": "fit: constants may be fitted on these", "test": "test: never used to fit", "none": "measured runs"}


def draw(judged: Sequence[Judgement], path: str) -> None:
    """Write the picture of all rows of the headline that have a step time.

    Raises:
        ConfigError: there are none, or the file cannot be written.
    """
    rows = [j for j in headline(judged) if j.step_error is not None]
    if not rows:
        raise ConfigError("--plot: no judged row has a step time; nothing to draw")
    with picture(path, 11.5, 6.0) as figure:
        left, right = figure.subplots(1, 2)
        _scatter(left, rows)
        running = _errors(right, rows)
        marks, bars, lines = (axes.get_legend_handles_labels() for axes in (left, right, running))
        legend: dict[str, Any] = {"handletextpad": 0.4}
        figure.legend(*marks, loc="outside lower left", ncols=3, **legend)
        figure.legend(bars[0] + lines[0], bars[1] + lines[1], loc="outside lower right", **legend)


def _split(j: Judgement) -> str:
    said = j.row.text("split")
    return said if said in _SPLITS else "none"


def _looks(rows: Sequence[Judgement]) -> dict[str, tuple[str, str]]:
    """A color and a marker for each accelerator, most rows first; those beyond the palette share one pair."""
    order = [name for name, _ in Counter(j.accelerator for j in rows).most_common()]
    pairs = list(zip(_COLORS, _SHAPES, strict=True))
    return {name: pairs[i] if i < len(pairs) else _OTHERS for i, name in enumerate(order)}


def _scatter(axes: Any, rows: Sequence[Judgement]) -> None:
    """Predicted over measured, both logarithmic, with the diagonal and its band."""
    every = [value for j in rows for value in (j.measured_step_s, j.predicted_step_s) if value]
    low, high = 0.7 * min(every), 1.4 * max(every)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    ends = [low, high]
    under, over = ([share * end for end in ends] for share in (1.0 - BAND, 1.0 + BAND))
    axes.fill_between(ends, under, over, color="#DDDDDD", linewidth=0, label=f"within {100 * BAND:.0f} %")
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    looks = _looks(rows)
    for split in [name for name in _SPLITS if any(_split(j) == name for j in rows)]:
        chosen = [j for j in rows if _split(j) == split]
        paint = "edgecolors" if split == "fit" else "color"
        for color, marker in dict.fromkeys(looks.values()):
            own = [j for j in chosen if looks[j.accelerator] == (color, marker)]
            points = ([j.measured_step_s for j in own], [j.predicted_step_s for j in own])
            axes.scatter(*points, alpha=0.75, zorder=3, marker=marker, **_SPLITS[split] | {paint: color})
        axes.scatter(
            [], [], marker="o", label=f"{_NAMES[split]} ({len(chosen):,})", **_SPLITS[split] | {paint: "black"}
        )
    counts = Counter(j.accelerator for j in rows)
    for name, (color, marker) in looks.items():
        if (color, marker) != _OTHERS:
            axes.scatter([], [], marker=marker, s=30, color=color, label=f"{name} ({counts[name]:,})")
    if rest := [name for name, look in looks.items() if look == _OTHERS]:
        said = f"{len(rest)} more ({sum(counts[n] for n in rest):,})"
        axes.scatter([], [], marker=_OTHERS[1], s=30, color=_OTHERS[0], label=said)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        if high < 30.0 * low:  # less than two powers of ten: numbers between them too
            plain_numbers(axis)
    axes.set_xlabel("measured step time [s]")
    axes.set_ylabel("predicted step time [s]")
    axes.set_title(counted(len(rows), "measured step"))


def _errors(axes: Any, rows: Sequence[Judgement]) -> Any:
    """A histogram of all signed errors; returns the axes of their cumulative shares by split."""
    errors = [_clipped(j.step_error or 0.0) for j in rows]
    edges = [-100 * REACH + 2.5 * i for i in range(round(200 * REACH / 2.5) + 1)]
    axes.axvspan(-100 * BAND, 100 * BAND, color="#DDDDDD", linewidth=0, zorder=0)
    axes.hist(
        errors, bins=edges, weights=[100.0 / len(errors)] * len(errors), color="#9DB8CE", label="all, in bins of 2.5 %"
    )
    axes.axvline(0.0, color="#999999", linewidth=0.8)
    axes.set(xlim=(-100 * REACH, 100 * REACH), xlabel="error of the step time, predicted / measured - 1 [%]")
    axes.set_ylabel("share of the rows in a bin [%]")
    running = axes.twinx()
    for split in [name for name in _SPLITS if any(_split(j) == name for j in rows)]:
        own = sorted(_clipped(j.step_error or 0.0) for j in rows if _split(j) == split)
        middle = median(abs(j.step_error or 0.0) for j in rows if _split(j) == split)
        line, color = _STEPS[split]
        shares = [100.0 * (i + 1) / len(own) for i in range(len(own))]
        name = "cumulative" if split == "none" else f"{split}, cumulative"
        label = f"{name}; median size {100 * middle:.1f} % by row"
        running.step(
            [own[0], *own], [0.0, *shares], where="post", linestyle=line, color=color, linewidth=1.4, label=label
        )
    running.set(ylim=(0.0, 100.0), ylabel="share of the rows with a lower error [%]")
    running.spines["right"].set_visible(True)
    beyond = sum(abs(j.step_error or 0.0) > REACH for j in rows)
    if beyond:
        axes.text(
            0.01,
            0.99,
            f"{beyond:,} beyond ±{100 * REACH:.0f} %,\ndrawn at the edge",
            transform=axes.transAxes,
            va="top",
        )
    axes.set_title("distribution of errors")
    return running


def _clipped(error: float) -> float:
    """A signed error in per cent, at the edge where it is beyond."""
    return 100.0 * min(max(error, -REACH), REACH)
