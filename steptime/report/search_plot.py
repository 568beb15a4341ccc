"""A plot of a search: memory against step time, every layout that may fit, the front and the plan."""

from __future__ import annotations

from steptime.report.format import GIB
from steptime.report.palette import OTHER, TIME
from steptime.report.plot_style import picture, plain_numbers
from steptime.report.search_answer import title
from steptime.search.front import REACH
from steptime.search.search import Search

MOST = 20_000
"""Number of layouts that are drawn, best first."""


def draw(found: Search, path: str) -> None:
    """Write the picture; layouts slower than `REACH` times the slowest that matters, front or plan, are left out.

    Raises:
        ConfigError: the file cannot be written.
    """
    import numpy as np

    front, given = found.pareto(), found.given
    ends = [*(layout.step_s for layout in front), *([] if given is None else [given.step_s])]
    columns = found.columns
    order = np.argsort(columns["step_s"])
    if ends:
        order = order[columns["step_s"][order] <= max(REACH * min(ends), *ends)]
    with picture(path, 7.0, 4.6) as figure:
        axes = figure.subplots()
        spots = columns["step_s"][order[:MOST]], columns["held_bytes"][order[:MOST]] / GIB
        axes.scatter(*spots, s=4, color=OTHER, alpha=0.6, linewidths=0, label="layouts that fit")
        line = [layout.step_s for layout in front], [layout.held_bytes / GIB for layout in front]
        axes.plot(*line, "o-", ms=4, color=TIME["gemm"], label=f"Pareto front, up to {REACH:g} x the best")
        if given is not None:
            mark = {"color": TIME["tp_comm"], "markeredgecolor": "black", "label": "the plan"}
            axes.plot([given.step_s], [given.memory.most_bytes / GIB], "D", **mark)
            capacity = given.memory.capacity_bytes / GIB
            axes.axhline(capacity, color="black", linewidth=1.5, label=f"{capacity:.1f} GiB usable")
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.set(xlabel="seconds a step", ylabel="GiB that a device needs at most", ylim=(0.0, None))
        axes.set_title(title(found), fontsize=9)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=8)
