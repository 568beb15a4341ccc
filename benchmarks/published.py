"""Predicted against measured step times: every plan under configs/published/ that holds its measured value.

    python benchmarks/published.py

Prints the table of docs/validation.md. Nothing is fitted to these rows: GEMM rates, attention and network efficiencies of the
A100 come from published kernel timings, each named in the machine and software files; four constants that docs/validation.md
lists lean on other runs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from steptime import Job, estimate

PLANS = Path(__file__).parents[1] / "configs" / "published"
MEASURED = re.compile(r"^# measured: step_time_s: ([0-9.]+)$", re.MULTILINE)


class Row(NamedTuple):
    """One published run."""

    model: str
    recompute: str
    gpus: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Signed: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


def rows() -> list[Row]:
    """A row per plan, in the order of the files."""
    found = []
    for path in sorted(PLANS.glob("*.yaml")):
        measured = MEASURED.search(path.read_text(encoding="utf-8"))
        if measured:
            job = Job.load(path)
            kind = str(job.performance.activation_checkpointing_type) + (", sp" if job.sp else "")
            found.append(Row(job.model.name, kind, job.parallelism.devices, float(measured[1]), estimate(job).step_s))
    return found


def mean_absolute_error(found: list[Row]) -> float:
    """Mean of the errors' sizes."""
    return sum(abs(row.error) for row in found) / len(found)


def table(found: list[Row]) -> str:
    """Rows as Markdown, then their mean and largest error."""
    lines = ["| model | recomputation | GPUs | measured s | predicted s | error |", "|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {row.model} | {row.recompute} | {row.gpus} | {row.measured_s:.2f} | {row.predicted_s:.2f} | {row.error:+.1%} |"
        for row in found
    ]
    worst = max(abs(row.error) for row in found)
    return "\n".join([*lines, "", f"Mean absolute error {mean_absolute_error(found):.1%}, largest {worst:.1%}."])


def main() -> None:
    """Print the table."""
    sys.stdout.write(table(rows()) + "\n")


if __name__ == "__main__":
    main()
