"""A picture of a search: memory against the objective, every layout that may fit, the front and the plan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.report.format import GIB

if TYPE_CHECKING:
    from steptime.search.search import Search

MOST = 20_000
"""Layouts that are drawn: the best ones."""


def draw(found: Search, path: str) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    columns = found.columns
    order = np.argsort(columns["step_s"])[:MOST]
    figure, axes = plt.subplots(figsize=(7.0, 4.6), layout="constrained")
    axes.scatter(
        columns["step_s"][order], columns["held_bytes"][order] / GIB, s=3, color="#8C8C8C", label="layouts that fit"
    )
    front = found.pareto()
    axes.plot(
        [layout.step_s for layout in front], [layout.held_bytes / GIB for layout in front], "o-", ms=4, color="#0072B2",
        label="least memory for the time",
    )  # fmt: skip
    if found.given is not None:
        memory = found.given.memory
        held = memory.peak_reserved_bytes + sum(memory.overhead_bytes)
        axes.plot([found.given.step_s], [held / GIB], "D", color="#D55E00", label="the plan")
    axes.set_xscale("log")
    axes.set_xlabel("seconds a step")
    axes.set_ylabel("GiB of a device, reserved and outside the allocator")
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({os.strerror(error.errno or 0)})") from None
    plt.close(figure)
