"""Predicted against measured step times of runs found after the model was built: every plan under benchmarks/later/.

    python benchmarks/later.py

Prints the tables of docs/validation.md. Each plan was written from its source before its first estimate was made, and holds in
its comments the run's name and group, what was measured, and that first estimate, which later changes of the model leave alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from steptime import Job, estimate

PLANS = Path(__file__).parent / "later"
NOTE = re.compile(r"^# (run|group|measured|first estimate): (.+)$", re.MULTILINE)
GROUPS = ("dense, NVIDIA's frameworks", "dense, PyTorch-native", "mixtures of experts", "other")


class Run(NamedTuple):
    """One run; seconds per step, and GiB that torch's allocator reserved where the source states them (else None)."""

    name: str
    group: str
    measured_s: float
    first_s: float
    predicted_s: float
    inside: bool
    measured_gib: float | None
    predicted_gib: float
    most_gib: float
    """Upper end of the interval of memory."""

    @property
    def first_error(self) -> float:
        """Of the first estimate: predicted / measured - 1."""
        return self.first_s / self.measured_s - 1.0

    @property
    def error(self) -> float:
        """Of the estimate of now."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error(self) -> str:
        """Of reserved memory and of the upper end of its interval, or nothing."""
        if not self.measured_gib:
            return ""
        return (
            f"{self.predicted_gib / self.measured_gib - 1.0:+.0%}, bound {self.most_gib / self.measured_gib - 1.0:+.0%}"
        )


def notes(path: Path) -> dict[str, str]:
    """What a plan's comments say, by name: run, group, measured step_time_s ..."""
    found: dict[str, str] = {}
    for key, value in NOTE.findall(path.read_text(encoding="utf-8")):
        name, _, number = value.rpartition(": ") if key in {"measured", "first estimate"} else ("", "", value)
        found[f"{key} {name}".strip()] = number
    return found


def run(path: Path) -> Run:
    """A plan's comments beside its estimate of now."""
    said, answer = notes(path), estimate(Job.load(path))
    measured = float(said["measured step_time_s"])
    reserved = said.get("measured reserved_gib")
    return Run(
        name=said["run"],
        group=said["group"],
        measured_s=measured,
        first_s=float(said["first estimate step_time_s"]),
        predicted_s=answer.step_s,
        inside=answer.time.step_s_p10 <= measured <= answer.time.step_s_p90,
        measured_gib=float(reserved) if reserved else None,
        predicted_gib=max(stage.reserved_bytes for stage in answer.memory.stages) / 2**30,
        most_gib=answer.memory.peak_reserved_bytes_p90 / 2**30,
    )


def runs() -> list[Run]:
    """All runs, by group, in the order of the files."""
    found = [run(path) for path in sorted(PLANS.glob("*.yaml"))]
    return sorted(found, key=lambda one: GROUPS.index(one.group))


def summary(found: list[Run]) -> list[str]:
    """A line per group: absolute errors and bias, at first and now."""
    lines = [
        "| group | runs | median | mean | bias | median now | inside the interval |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for group in (*(name for name in GROUPS if any(one.group == name for one in found)), "all"):
        some = [one for one in found if group in {one.group, "all"}]
        first, now = [one.first_error for one in some], [one.error for one in some]
        figures = [
            f"{median(map(abs, first)):.1%}",
            f"{mean(map(abs, first)):.1%}",
            f"{mean(first):+.1%}",
            f"{median(map(abs, now)):.1%}",
        ]
        lines.append(
            f"| {group} | {len(some)} | {' | '.join(figures)} | {sum(one.inside for one in some)} of {len(some)} |"
        )
    return lines


def table(found: list[Run]) -> list[str]:
    """A line per run."""
    lines = [
        "| run | measured s | error at first | predicted s | error | inside | reserved memory |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {one.name} | {one.measured_s:.4g} | {one.first_error:+.1%} | {one.predicted_s:.4g} | {one.error:+.1%} "
        f"| {'yes' if one.inside else 'no'} | {one.memory_error} |"
        for one in found
    ]
    return lines


def main() -> None:
    """Print both tables."""
    found = runs()
    sys.stdout.write("\n".join([*summary(found), "", *table(found)]) + "\n")


if __name__ == "__main__":
    main()
