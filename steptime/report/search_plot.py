"""A plot of a search: memory against the objective, every layout that may fit, the front and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.report.format import GIB
from steptime.report.plot_style import picture

if TYPE_CHECKING:
    from steptime.search.search import Search

MOST = 20_000
"""Number of layouts that are drawn, best first."""


def draw(found: Search, path: str) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    import numpy as np

    columns = found.columns
    order = np.argsort(columns["step_s"])[:MOST]
    with picture(path, 7.0, 4.6) as figure:
        axes = figure.subplots()
        axes.scatter(
            columns["step_s"][order], columns["held_bytes"][order] / GIB, s=3, color="#8C8C8C", label="layouts that fit"
        )
        front = found.pareto()
        axes.plot(
            [layout.step_s for layout in front], [layout.held_bytes / GIB for layout in front], "o-", ms=4, color="#0072B2",
            label="Pareto front",
        )  # fmt: skip
        if found.given is not None:
            axes.plot(
                [found.given.step_s], [found.given.memory.most_bytes / GIB], "D", color="#D55E00", label="the plan"
            )
        axes.set_xscale("log")
        axes.set_xlabel("seconds a step")
        axes.set_ylabel("GiB that a device needs at most")
        axes.legend()
