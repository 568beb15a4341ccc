"""Errors on the shipped measured runs: the second table of the README, and all of it in benchmarks/accuracy.md.

python benchmarks/accuracy.py        prints the table and writes the page anew
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ablation

from steptime.answer.result import step_seconds
from steptime.base.config import build
from steptime.base.document import parse_mapping, read_source
from steptime.cost.rates import peak_dtype
from steptime.job.job import Job
from steptime.report import analyses
from steptime.report.analyses import HEADER, cells
from steptime.report.format import percent
from steptime.report.table import Table
from steptime.report.validation_tables import step_time, table, worst
from steptime.software.efficiency import EFFICIENCY_FILE, NOTHING_FITTED, efficiency, using
from steptime.validation.error_summary import fitting, summarize
from steptime.validation.gpu_memory import EXPERTS, kind_of
from steptime.validation.judgement import Judgement, judge_all, judge_shipped
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import (
    SLICES,
    headline,
    leads,
    memory_errors,
    native,
    others,
    sliced,
    step_errors,
    with_experts,
)
from steptime.validation.stats import Errors, Stats, stats

PAGE = Path(__file__).parent / "accuracy.md"
WORST = 12
SPLITS = ("fit", "test", "all")
TOLD = {"PyTorch-native stack": native, "other trainers": others}
INTRODUCTION = """# How accurate, and what that figure is worth

Made by `python benchmarks/accuracy.py` from the shipped measured runs; a test keeps it true. Every error is
predicted / measured - 1; rows marked `test` were in no fit. [docs/validation.md](../docs/validation.md) says how rows become
plans, what is left out and why, and where the model is weak.

The headline is NVIDIA's frameworks: the rows of `nvidia.csv` and the dense Megatron-LM runs on 8 x B200 of SimuMax. The
PyTorch-native stack (`native.csv`) and other trainers are told by source, because one source can have hundreds of rows.
"""


def line(name: str, errors: Errors) -> str:
    """One row of the table."""
    found = stats(errors)
    return f"| {name} | {' | '.join(cells(found._asdict()))} |\n" if found else ""


def main() -> None:
    """Print the table: step times of test rows, then peak memory."""
    test = [j for j in headline(judge_shipped()) if j.row.text("split") == "test"]

    def step(name: str, wanted: Callable[[Judgement], bool]) -> str:
        return line(f"step time, {name}", step_errors(j for j in test if wanted(j)))

    print("| what | rows | cells | median | mean | p90 | bias |\n|---|---:|---:|---:|---:|---:|---:|")
    print(step("NVIDIA's frameworks", leads), end="")
    print(step("the same in bf16 or fp16", lambda j: leads(j) and j.precision in {"bf16", "fp16"}), end="")
    print(step("the same in fp8, MXFP8 or NVFP4", lambda j: leads(j) and j.precision not in {"bf16", "fp16"}), end="")
    print(step("NeMo on H100", lambda j: j.framework == "NeMo" and "h100" in j.accelerator), end="")
    print(step("mixtures of experts, NVIDIA's frameworks", experts_of_nvidia), end="")
    print(step("mixtures of experts, other trainers", experts_of_others), end="")
    print(step("PyTorch-native stack", native), end="")
    print(step("other trainers", others), end="")
    name = "step time, NVIDIA's frameworks"
    print(line(f"{name}, their release unknown", step_errors(of_unknown_release("test"))), end="")
    print(line(f"{name}, without the fitted efficiency.yaml", step_errors(of_nothing_fitted())), end="")
    simumax = [j for j in judge_shipped() if j.row.group == "simumax"]
    dense, experts = ([j for j in simumax if with_experts(j) == wanted] for wanted in (False, True))
    print(line("peak allocated memory, Megatron-LM on 8 x B200 (fit and test)", memory_errors(dense)), end="")
    print(line("the same, DeepSeek-V2 and V3", memory_errors(experts)), end="")
    for kind in ("dense", EXPERTS, "hybrid", "latent attention"):
        print(
            line(f"peak allocated memory, Megatron-LM's own tests, {kind}", memory_errors(own_tests("test", kind))),
            end="",
        )


def experts_of_nvidia(j: Judgement) -> bool:
    """Whether a row is of a mixture of experts in the collections of the headline."""
    return with_experts(j) and (j.row.file == "nvidia" or j.row.group == "simumax")


def experts_of_others(j: Judgement) -> bool:
    """Whether a row is of a mixture of experts in other collections."""
    return with_experts(j) and not experts_of_nvidia(j)


def own_tests(split: str, kind: str = "dense") -> list[Judgement]:
    """Jobs of Megatron-LM's own tests that count, of one kind of model."""
    held = [j for j in judge_shipped() if j.skipped is None and j.held is not None and not j.held.apart]
    return [j for j in held if kind_of(j) == kind and j.row.text("split") == split]


@cache
def summary() -> dict[str, Any]:
    """The summary of `3dtrn validate --worst 12`."""
    return summarize(judge_shipped(), WORST)


def page() -> str:
    """The text of benchmarks/accuracy.md."""
    found = summary()
    tables: list[Table] = [
        *step_time(found),
        unknown_release(),
        less_fitted(),
        cross_validation(),
        best_shape_alone(),
        *(by(name, "NVIDIA's frameworks", leads) for name in SLICES if name != "split"),
        *(by(name, who, wanted) for who, wanted in TOLD.items() for name in ("accelerator", "source", "framework")),
        *worst("worst rows of NVIDIA's frameworks", found["headline"]["worst"]),
        *worst("worst rows of the PyTorch-native stack", found["native"]["worst"]),
        *worst("worst rows of mixtures of experts", found["experts"]["worst"]),
        *worst("worst rows of other trainers", found["other"]["worst"]),
        table("judged, but not counted above", found["apart"]),
        *analyses.all_tables(found),
        table("peak memory, by what was read and source", found["memory"]),
        eight_b200(),
        *analyses.intervals(found),
        fits(),
        ablation.table(ablation.ablation(judge_shipped())),
        skipped(found["skipped_by_reason"]),
    ]
    return "\n".join([INTRODUCTION, *map(markdown, tables)])


def by(name: str, who: str, wanted: Callable[[Judgement], bool]) -> Table:
    """Errors of step time by one slice, for test rows and for fit rows."""
    rows, group = [], [j for j in headline(judge_shipped()) if wanted(j)]
    for key in sliced(group, SLICES[name]):
        for split in ("test", "fit"):
            chosen = [j for j in group if SLICES[name](j) == key and j.row.text("split") == split]
            if found := stats(step_errors(chosen)):
                rows.append([key, split, *cells(found._asdict())])
    word = name.replace("_", " ")
    return Table(f"step time by {word}, {who}", [word, "split", *HEADER], rows, left=2)


def fits() -> Table:
    """Verdicts of runs that ended out of memory and of runs of the same sources that did not; tight is right for both."""
    texts = {
        "ran_out": "ran out of memory: called tight or does not fit",
        "ran": "ran, same sources: called fits or tight",
    }
    found = fitting(judge_shipped())
    rows = [
        [text, f"{found[key]['rows']:,}", percent(found[key]["right"] / found[key]["rows"])]
        for key, text in texts.items()
    ]
    return Table("fits or not", ["runs", "rows", "right"], rows)


def skipped(reasons: dict[str, int]) -> Table:
    """How many rows were not judged, by reason."""
    return Table(
        "skipped, by reason", ["reason", "rows"], [[reason, f"{count:,}"] for reason, count in reasons.items()]
    )


def unknown_release() -> Table:
    """The headline's errors where every row takes its framework's profile, not its release's."""
    found = {split: stats(step_errors(of_unknown_release(split))) for split in SPLITS}
    return table("step time of the headline, release unknown", {name: f._asdict() for name, f in found.items() if f})


def less_fitted() -> Table:
    """Test rows of the headline without the fitted file: the machine files' own rates, as they ship."""
    rows = [("fitted, as it ships", leading("test")), ("without steptime/data/efficiency.yaml", of_nothing_fitted())]
    found = {name: stats(step_errors(judgements)) for name, judgements in rows}
    return table("test rows of the headline, and what the fitted constants are worth", plain(found))


@cache
def of_nothing_fitted() -> list[Judgement]:
    """Test rows of the headline, judged without the fitted file."""
    rows = [j.row for j in leading("test")]  # chosen by the shipped constants
    with using(NOTHING_FITTED):
        return headline(judge_all(rows))


def eight_b200() -> Table:
    """The dense runs on 8 x B200 one by one: what torch allocated at most, and the step."""
    rows = []
    for j in judge_shipped():
        if j.row.group == "simumax" and j.skipped is None and j.step_error is not None:
            layout = " ".join(f"{key}{j.row.text(key)}" for key in ("tp", "pp", "cp"))
            batch = f"{j.row.text('seq_len')} x {j.row.text('global_batch_size')}"
            memory = "" if j.memory_error is None else f"{100.0 * j.memory_error:+.2f} %"
            peak = "" if j.measured_bytes is None else f"{j.measured_bytes / 2**30:.2f}"
            name = j.row.text("model_name")
            rows.append(
                [j.row.id, j.row.text("split"), name, layout, batch, f"{100.0 * j.step_error:+.1f} %", peak, memory]
            )
    header = ["row", "split", "model", "layout", "tokens x batch", "step time", "GiB allocated", "memory"]
    return Table("Megatron-LM on 8 x B200, run by run (measured peak, errors)", header, rows, left=5)


def cross_validation() -> Table:
    """Rows marked fit, each judged with constants that were fitted without its kind; in the headline with the release unknown."""
    document = parse_mapping(*read_source(EFFICIENCY_FILE))
    rows = []
    for key, whose in (("cross_validation_percent", ""), ("cross_validation_native_percent", ", PyTorch-native stack")):
        folds = document.get(key, {})
        for name, found in ((name, found) for name, found in folds.items() if name != "rows"):
            sizes = [f"{found[size]:.1f} %" for size in ("median", "mean", "p90")]
            rows.append([f"{name}{whose}", str(folds["rows"]), *sizes, f"{found['bias']:+.1f} %"])
    title = "cross-validation on rows marked fit; NVIDIA's without their release (python benchmarks/fit_constants.py)"
    return Table(title, ["left out", "rows", "median", "mean", "p90", "bias"], rows)


def best_shape_alone() -> Table:
    """An accelerator described by its peaks, its bandwidth and the best GEMM shape alone, with nothing fitted on it."""
    found = {}
    for name in sorted({j.accelerator for j in leading("all")}):
        jobs = [(j, bare(j)) for j in leading("all") if j.accelerator == name]
        shares = {key: share for key, share in efficiency().sustained_share.items() if key != name}
        with using(efficiency()._replace(sustained_share=shares)):
            errors = [(j.cell, step_seconds(job) / (j.measured_step_s or 1.0) - 1.0) for j, job in jobs if job]
        found[name] = stats(errors)
    title = "a device described by its best GEMM shape alone (its rates and its share left out), fit and test rows"
    return table(title, plain(found))


def bare(j: Judgement) -> Job | None:
    """A row's job on its machine without the sustained rates that the best shape can stand in for; None where it cannot."""
    mapped = to_config(j.row)
    job = to_job(mapped)
    device = job.machine.accelerator
    if not {peak_dtype(device, job.software.precision), "bf16"} & device.best_flops.keys():
        return None
    known = {key: rate for key, rate in device.sustained_flops.items() if key not in {*device.best_flops, "fp16"}}
    machine = job.machine.model_copy(update={"accelerator": device.model_copy(update={"sustained_flops": known})})
    return build(Job, mapped.config | {"hardware": {"node_type": machine}})


def leading(split: str) -> list[Judgement]:
    """The headline rows of a split that have a step time."""
    rows = [j for j in headline(judge_shipped()) if leads(j) and j.step_error is not None]
    return [j for j in rows if split in {"all", j.row.text("split")}]


def plain(found: dict[str, Stats | None]) -> dict[str, dict[str, float]]:
    """Figures as mappings, without those of no rows."""
    return {name: figures._asdict() for name, figures in found.items() if figures}


@cache
def all_of_unknown_release() -> list[Judgement]:
    """Headline rows, judged by their framework's profile."""
    return headline(judge_all((j.row for j in leading("all")), known_release=False))


def of_unknown_release(split: str) -> list[Judgement]:
    """The same of one split."""
    return [j for j in all_of_unknown_release() if split in {"all", j.row.text("split")}]


def markdown(section: Table) -> str:
    """A heading, the table, its notes as a list; a row of one cell becomes a row in bold, an empty row is left out."""
    columns = len(section.header)
    rule = ["---" if i < section.left else "---:" for i in range(columns)]
    rows = [[f"**{row[0]}**", *[""] * (columns - 1)] if len(row) == 1 else row for row in section.rows if row]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (section.header, *rows)]
    lines.insert(1, f"|{'|'.join(rule)}|")
    notes = ["", *(f"- {note}" for note in section.notes)] if section.notes else []
    title = section.title[:1].upper() + section.title[1:]
    return "\n".join([f"## {title}", "", *lines, *notes]) + "\n"


if __name__ == "__main__":
    main()
    PAGE.write_text(page(), encoding="utf-8")
