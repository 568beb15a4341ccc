"""Accuracy of the verdict near the capacity limit: runs that ended out of memory and runs of the same sources that did not.

The ratio is the predicted peak (what the allocator reserves, context and communicators) over the usable memory of the device. Up
to 1 the estimate says that the job fits. Most runs are far from the limit, where any model is right; only the bands from 0.85 to
1.15 distinguish models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from steptime.validation.judgement import Judgement

EDGES = (0.0, 0.85, 0.95, 1.05, 1.15, inf)
CLOSE = (0.85, 1.15)
LARGEST_SOURCE = "hagemann"
"""The source with nearly all runs out of memory, reported separately."""


class Band(NamedTuple):
    """Runs whose ratio lies in [low, high), and how many of each kind are judged correctly."""

    low: float
    high: float | None
    """None: no upper edge."""
    ran: int
    ran_right: int
    """Ran, and predicted to fit."""
    ran_out: int
    ran_out_right: int
    """Ran out of memory, and not predicted to fit."""
    balanced_accuracy: float | None
    """Mean of the two shares judged correctly; None where one kind is missing, or the band is on one side of 1."""


def band(runs: Iterable[Judgement], low: float, high: float) -> Band:
    """The runs between two ratios."""
    inside = [j for j in runs if j.occupancy is not None and low <= j.occupancy < high]
    out = [j for j in inside if j.ran_out]
    ran = [j for j in inside if not j.ran_out]
    out_right = sum((j.occupancy or 0.0) > 1.0 for j in out)
    ran_right = sum((j.occupancy or 0.0) <= 1.0 for j in ran)
    told = ran and out and low < 1.0 < high
    balanced = (ran_right / len(ran) + out_right / len(out)) / 2.0 if told else None
    return Band(low, None if high == inf else high, len(ran), ran_right, len(out), out_right, balanced)


def figures(runs: Sequence[Judgement]) -> dict[str, Any]:
    """Each band, the bands close to the edge together, all together, and the runs out of memory that were predicted to fit."""
    everything = band(runs, 0.0, inf)
    false_fits = everything.ran_out - everything.ran_out_right
    called_fits = false_fits + everything.ran_right
    return {
        "bands": [band(runs, low, high)._asdict() for low, high in pairwise(EDGES)],
        "close": band(runs, *CLOSE)._asdict(),
        "all": everything._asdict(),
        "false_fits": {
            "rows": false_fits,
            "of_all": false_fits / len(runs) if runs else None,
            "of_ran_out": false_fits / everything.ran_out if everything.ran_out else None,
            "of_called_fits": false_fits / called_fits if called_fits else None,
            "by_verdict": sum(j.ran_out and j.verdict == "fits" for j in runs),
        },
    }


def verdicts_of_runs(judged: Iterable[Judgement]) -> dict[str, dict[str, int]]:
    """Verdicts of all runs with a measured step: by source with any predicted not to fit, most of them first, and in total."""
    counts: dict[str, dict[str, int]] = {}
    for j in judged:
        if j.measured_step_s and not j.ran_out:
            for name in (j.row.group, "all"):
                counts.setdefault(name, {"fits": 0, "tight": 0, "does_not_fit": 0})[j.verdict] += 1
    ordered = sorted(counts.items(), key=lambda item: (item[0] == "all", -item[1]["does_not_fit"], item[0]))
    return {name: found for name, found in ordered if found["does_not_fit"] or name == "all"}


def fits_by_band(judged: Sequence[Judgement]) -> dict[str, Any]:
    """The figures of all sources that report runs out of memory, of the largest of them, and of the others."""
    known = [j for j in judged if j.skipped is None and j.occupancy is not None]
    sources = {j.row.group for j in known if j.ran_out}
    runs = [j for j in known if j.row.group in sources]
    return {
        "all": figures(runs),
        LARGEST_SOURCE: figures([j for j in runs if j.row.group == LARGEST_SOURCE]),
        "others": figures([j for j in runs if j.row.group != LARGEST_SOURCE]),
    }
