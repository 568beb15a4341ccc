"""The tables of docs/validation.md: errors of the shipped measured runs, as `3dtrn validate` computes them.

python docs/errors.py
"""

from __future__ import annotations

from steptime.report import analyses, coverage
from steptime.report.figures import HEADER, cells
from steptime.report.markdown import markdown
from steptime.report.table import Table
from steptime.report.validation import step_time, table, worst
from steptime.validation.compare import Judgement, judge_all
from steptime.validation.groups import SLICES, headline, leads, sliced, step_errors
from steptime.validation.measurements import shipped
from steptime.validation.stats import stats
from steptime.validation.summary import fitting, summarise

WORST = 12


def by(judged: list[Judgement], name: str, who: str) -> Table:
    """Errors of step time by one slice, for test rows and for fit rows."""
    rows = []
    for key in sliced(judged, SLICES[name]):
        for split in ("test", "fit"):
            group = [j for j in judged if SLICES[name](j) == key and j.row.text("split") == split]
            if found := stats(step_errors(group)):
                rows.append([key, split, *cells(found._asdict())])
    return Table(
        f"step time by {name.replace('_', ' ')}, {who}", [name.replace("_", " "), "split", *HEADER], rows, left=2
    )


def fits(judged: list[Judgement]) -> Table:
    """Verdicts of runs that ended out of memory and of runs of the same sources that did not; tight is right for both."""
    words = {
        "ran_out": "ran out of memory: called tight or does not fit",
        "ran": "ran, same sources: called fits or tight",
    }
    found = fitting(judged)
    rows = [
        [text, f"{found[key]['rows']:,}", analyses.percent(found[key]["right"] / found[key]["rows"])]
        for key, text in words.items()
    ]
    return Table("fits or not", ["runs", "rows", "right"], rows)


def main() -> None:
    """Print all tables."""
    judged = judge_all(shipped())
    counted, summary = headline(judged), summarise(judged, WORST)
    leading, others = [j for j in counted if leads(j)], [j for j in counted if not leads(j)]
    tables = [
        *step_time(summary),
        *analyses.baselines(summary),
        *(by(leading, name, "NVIDIA's frameworks") for name in SLICES if name != "split"),
        *(by(others, name, "other trainers") for name in ("accelerator", "source", "framework")),
        *worst(f"the {WORST} worst rows of NVIDIA's frameworks", summary["headline"]["worst"]),
        *worst(f"the {WORST} worst rows of other trainers", summary["other"]["worst"]),
        table("judged, but beside the figures above", summary["apart"]),
        *analyses.noise(summary),
        *analyses.ratios(summary),
        *analyses.regret(summary),
        table("peak memory, by what was read and source", summary["memory"]),
        *analyses.mechanisms(summary),
        *coverage.tables(summary["intervals"]),
        fits(judged),
        *analyses.bands(summary),
    ]
    reasons = [[reason, f"{count:,}"] for reason, count in summary["skipped_by_reason"].items()]
    tables.append(Table("skipped, and why", ["reason", "rows"], reasons))
    print("\n".join(markdown(made) for made in tables), end="")


if __name__ == "__main__":
    main()
