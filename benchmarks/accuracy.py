"""Errors on the shipped measured runs: the second table of the README, and all of it in benchmarks/accuracy.md.

python benchmarks/accuracy.py        prints the table and writes the page anew
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from steptime.report import analyses
from steptime.report.figures import cells
from steptime.report.markdown import markdown
from steptime.report.table import Table
from steptime.report.validation import BY, step_time, table, worst
from steptime.validation.ablation import SWITCHES, ablation
from steptime.validation.compare import Judgement, judge_all
from steptime.validation.groups import headline, leads, memory_errors, step_errors
from steptime.validation.measurements import shipped
from steptime.validation.stats import Errors, stats
from steptime.validation.summary import summarise

NVIDIA = ("NeMo", "Megatron-LM", "NeMo Megatron")
PAGE = Path(__file__).parent / "accuracy.md"
WORST = 12
SPLITS = ("fit", "test", "all")
INTRODUCTION = """# How accurate, and what that figure is worth

Made by `python benchmarks/accuracy.py` from the shipped measured runs; a test keeps it true. Every error is
predicted / measured - 1; rows marked `test` were in no fit. [docs/validation.md](../docs/validation.md) says how rows become
plans, what is left out and why, and where the model is weak.

The headline is NVIDIA's frameworks: the rows of `nvidia.csv` and the dense Megatron-LM runs on 8 x B200 of SimuMax. Other
trainers are told by source, because one source can have hundreds of rows.
"""


@cache
def judged() -> list[Judgement]:
    """All shipped rows, judged once."""
    return judge_all(shipped())


def line(name: str, errors: Errors) -> str:
    """One row of the table."""
    found = stats(errors)
    return f"| {name} | {' | '.join(cells(found._asdict()))} |\n" if found else ""


def main() -> None:
    """Print the table: step times of test rows, then peak memory."""
    test = [j for j in headline(judged()) if j.row.text("split") == "test"]

    def step(name: str, wanted: Callable[[Judgement], bool]) -> str:
        return line(f"step time, {name}", step_errors(j for j in test if wanted(j)))

    print("| what | rows | cells | median | mean | p90 | bias |\n|---|---:|---:|---:|---:|---:|---:|")
    print(step("all dense bf16 and fp16 runs", lambda _: True), end="")
    print(
        step("NeMo on H100", lambda j: j.row.text("framework").startswith("NeMo") and "h100" in j.accelerator), end=""
    )
    print(step("Megatron-LM and NeMo", lambda j: j.row.text("framework").startswith(NVIDIA)), end="")
    print(step("other trainers", lambda j: not j.row.text("framework").startswith(NVIDIA)), end="")
    simumax = [j for j in judged() if j.row.group == "simumax"]
    print(line("peak allocated memory, Megatron-LM on 8 x B200 (fit and test)", memory_errors(simumax)), end="")


def page() -> str:
    """The text of benchmarks/accuracy.md."""
    summary = summarise(judged(), WORST)
    leading = summary["headline"]
    test = {
        name: stats(step_errors(j for j in headline(judged()) if j.row.text("split") == "test" and leads_in(j, name)))
        for name in leading["by"]["accelerator"]
    }
    tables: list[Table] = [
        *step_time(summary),
        unknown_release(),
        table("test rows of the headline, by accelerator", {name: f._asdict() for name, f in test.items() if f}),
        *(table(f"headline, {title}", leading["by"][name]) for name, title in BY.items()),
        *worst("worst rows of the headline", leading["worst"]),
        *worst("worst rows of other trainers", summary["other"]["worst"]),
        *analyses.all_tables(summary),
        table("peak memory, by what was read and source", summary["memory"]),
        analyses.ablation(ablation(judged()), {switch.name: switch.says for switch in SWITCHES}),
    ]
    return "\n".join([INTRODUCTION, *(markdown(made, 2) for made in tables)])


def unknown_release() -> Table:
    """The headline's errors where every row takes its framework's profile, not its release's."""
    rows = [j.row for j in headline(judged()) if leads(j)]
    again = headline(judge_all(rows, known_release=False))
    found = {split: stats(step_errors(j for j in again if split in {"all", j.row.text("split")})) for split in SPLITS}
    return table("step time of the headline, release unknown", {name: f._asdict() for name, f in found.items() if f})


def leads_in(j: Judgement, accelerator: str) -> bool:
    """Whether a row is of the headline group, on one accelerator."""
    return leads(j) and j.accelerator == accelerator


if __name__ == "__main__":
    main()
    PAGE.write_text(page(), encoding="utf-8")
