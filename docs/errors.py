"""The tables of docs/validation.md: errors of the shipped measured runs, as `3dtrn validate` computes them.

python docs/errors.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

from steptime.report import coverage
from steptime.report.validation import cells, percent
from steptime.step import estimate
from steptime.validation.compare import Judgement, judge
from steptime.validation.measurements import shipped
from steptime.validation.rows import to_config, to_job
from steptime.validation.summary import SLICES, headline, memory_errors, sliced, stats, step_errors, summarise

WORST = 12
FIGURES = "rows | cells | median | mean | p90 | bias"


def table(header: str, rows: list[list[str]]) -> str:
    """A table of Markdown: the first column to the left, figures to the right."""
    columns = [column.strip() for column in header.split("|")]
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def by(judged: list[Judgement], name: str) -> str:
    """Errors of step time by one slice, for test rows and for fit rows."""
    rows = []
    for key in sliced(judged, SLICES[name]):
        for split in ("test", "fit"):
            group = [j for j in judged if SLICES[name](j) == key and j.row.text("split") == split]
            if found := stats(step_errors(group)):
                rows.append([key, split, *cells(found._asdict())])
    return table(f"{name} | split | {FIGURES}", rows)


def totals(judged: list[Judgement], summary: dict) -> str:
    """Errors of step time by split, with the bootstrap interval of the median and the mean."""
    intervals = {**summary["split_interval_5_95"], "all": summary["step_time"]["interval_5_95"]}
    rows = []
    for split in ("test", "fit", "all"):
        found = stats(step_errors(j for j in judged if split in {"all", j.row.text("split")}))
        spans = [" to ".join(percent(end) for end in intervals[split][name]) for name in ("median", "mean")]
        rows.append([split, *cells(found._asdict()), *spans])
    return table(f"split | {FIGURES} | median, 5-95 % | mean, 5-95 %", rows)


def scaled(judged: list[Judgement], guess: Callable[[Judgement], float]) -> list[str]:
    """Errors on test rows of a guess times one factor per accelerator and precision: the median measured / guess of fit rows."""
    timed = [(j, guess(j)) for j in judged if j.measured_step_s]
    factors: dict[tuple[str, str], list[float]] = {}
    for j, step_s in timed:
        if j.row.text("split") == "fit":
            factors.setdefault((j.accelerator, j.precision), []).append(j.measured_step_s / step_s)
    everything = median(factor for group in factors.values() for factor in group)
    errors = [
        (j.cell, step_s * median(factors.get((j.accelerator, j.precision), [everything])) / j.measured_step_s - 1.0)
        for j, step_s in timed
        if j.row.text("split") == "test"
    ]
    return cells(stats(errors)._asdict())


def model_flops(j: Judgement) -> float:
    """FLOPs of a step per device: what a flat MFU takes the step for."""
    found = estimate(to_job(to_config(j.row)))
    return found.flops.model_per_step / found.devices


def baselines(judged: list[Judgement]) -> str:
    """The estimate on test rows beside two that know the fit rows."""
    test = [j for j in judged if j.row.text("split") == "test"]
    rows = [
        ["the estimate, as it is", *cells(stats(step_errors(test))._asdict())],
        [
            "the estimate, one factor per accelerator and precision",
            *scaled(judged, lambda j: j.predicted_step_s or 0.0),
        ],
        ["a flat MFU per accelerator and precision, no physics", *scaled(judged, model_flops)],
    ]
    return table(f"test rows | {FIGURES}", rows)


def main() -> None:
    """Print all tables."""
    judged = [judge(row) for row in shipped()]
    counted, summary = headline(judged), summarise(judged, WORST)
    print(f"{summary['rows']:,} rows: {summary['judged']:,} judged, {summary['skipped']:,} skipped.\n")
    print("### Step time\n\n" + totals(counted, summary))
    print(f"The median over sources of each source's median is {percent(summary['median_over_sources'])}.\n")
    print("### Beside simpler guesses\n\n" + baselines(counted))
    for name in ("accelerator", "source", "framework", "precision"):
        print(f"### Step time by {name}\n\n{by(counted, name)}")
    print(f"### The {WORST} worst rows\n")
    worst = [[row["id"], row["split"], percent(row["step_time_error"], signed=True)] for row in summary["worst"]]
    print(table("row | split | error", worst))
    print("### Judged, but beside the figures above\n")
    print(table(f"why | {FIGURES}", [[key, *cells(found)] for key, found in summary["apart"].items()]))
    print("### Peak memory\n")
    memory = sliced(judged, lambda j: f"{j.metric}, {j.row.group}", memory_errors)
    print(table(f"what was read, source | {FIGURES}", [[key, *cells(f._asdict())] for key, f in memory.items()]))
    for made in coverage.tables(summary["intervals"]):
        print(f"### {made.title}\n")
        print(table(" | ".join(["rows of", *made.header[1:]]), made.rows))
    fits = summary["fits"]
    print("### Fits or not\n")
    words = {
        "ran_out": "ran out of memory: called tight or does not fit",
        "ran": "ran, same sources: called fits or tight",
    }
    rows = [
        [text, f"{fits[key]['rows']:,}", percent(fits[key]["right"] / fits[key]["rows"])] for key, text in words.items()
    ]
    print(table("runs | rows | right", rows))
    print("### Skipped, and why\n")
    reasons = Counter(summary["skipped_by_reason"])
    print(table("reason | rows", [[reason, f"{count:,}"] for reason, count in reasons.most_common()]), end="")


if __name__ == "__main__":
    main()
