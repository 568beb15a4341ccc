"""Verdicts of the estimate on published runs that ran and on those that ran out of memory.

    python benchmarks/verdicts.py

Prints the table of docs/validation.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from steptime.validation.ci_jobs import is_ci
from steptime.validation.judgement import Judgement, judge_shipped
from steptime.validation.slices import headline

VERDICTS = ("fits", "tight", "does_not_fit")


def line(name: str, runs: Sequence[Judgement]) -> str:
    """One row of the table: the share of each verdict, and how many runs."""
    counts = Counter(j.verdict for j in runs)
    cells = [f"{100.0 * counts[verdict] / len(runs):.0f} % ({counts[verdict]:,})" for verdict in VERDICTS]
    over = sum((j.occupancy or 0.0) > 1.0 for j in runs)
    return f"| {' | '.join([name, f'{len(runs):,}', *cells, f'{over:,}'])} |"


def main() -> None:
    """Print the table."""
    known = [j for j in judge_shipped() if j.skipped is None and j.verdict]
    counted = {id(j) for j in headline(known)}
    print(
        "| runs | n | FITS | TIGHT | DOES NOT FIT | reserved memory above the usable |\n|---|---:|---:|---:|---:|---:|"
    )
    print(line("ran, and count in the errors of step time", [j for j in known if id(j) in counted and not j.ran_out]))
    print(line("all that ran but Megatron-LM's own tests", [j for j in known if not (j.ran_out or is_ci(j.row))]))
    print(line("Megatron-LM's own tests", [j for j in known if is_ci(j.row)]))
    print(line("ran out of memory", [j for j in known if j.ran_out]))


if __name__ == "__main__":
    main()
