"""From a measured row to its estimate: as published, assumptions, its config, the errors, and their basis."""

from __future__ import annotations

from typing import Any

from steptime.answer.result import Estimate
from steptime.report import breakdown, constants, details, explain, kernel_table
from steptime.report.format import GIB, number, percent, seconds
from steptime.report.table import Fact, FactList, ReportSection, Table
from steptime.validation.judgement import Judgement
from steptime.validation.measurements import MeasuredRow
from steptime.validation.row_plan import to_config

WIDEST = 2
"""Number of projections, and of collectives, that are written out."""

_GROUPS = {
    "source": ("source",),
    "note": ("note",),
    "quality": ("quality", "split", "task", "row_type", "complete_inputs"),
    "measured": (
        "step_time_s", "tokens_per_s_per_gpu", "step_time_kind", "peak_memory_gb", "mem_metric", "tflops_per_gpu_reported",
        "mfu_reported", "flops_formula_note", "derived_fields",
    ),
    "software": ("framework", "precision", "overlap_notes", "zero_or_fsdp", "recompute"),
    "hardware": ("gpu", "n_gpus", "machine"),
    "layout": ("tp", "pp", "dp", "vpp", "cp", "ep", "etp", "sp"),
    "batch": ("global_batch_size", "seq_len", "micro_batch_size"),
}  # fmt: skip
"""Columns in reading order; the model's, and any others, follow."""


def published(judged: Judgement) -> list[ReportSection]:
    """Every cell of the row, and the assumptions made for it or why it is skipped."""
    row = judged.row
    known = {"id", *(column for group in _GROUPS.values() for column in group)}
    groups = {**_GROUPS, "model": tuple(column for column in row.cells if column not in known)}
    facts = []
    for label, columns in groups.items():
        cells = [(column, row.text(column)) for column in columns if row.text(column)]
        if len(columns) == 1 and cells:
            facts.append(Fact(label, [cells[0][1]]))
        elif cells:
            facts.append(Fact(label, ["; ".join(f"{column} {text}" for column, text in cells)]))
    name = f"{row.file}.csv, included with steptime" if row.published else "your file"
    title = f"{row.id} as {'published' if row.published else 'measured'} (line {row.line} of {name})"
    return [FactList(title, facts), *_standing(judged)]


def _standing(judged: Judgement) -> list[ReportSection]:
    """Skipped, or left out of the headline, and why; assumptions."""
    if judged.skipped:
        return [Table("skipped", [], [[judged.skipped]])]
    found: list[ReportSection] = []
    if judged.excluded:
        found.append(Table("judged, but not in the headline figures", [], [[judged.excluded]]))
    if judged.assumed:
        found.append(Table("assumed (not stated in the row)", [], [[text] for text in judged.assumed]))
    return found


def config_yaml(row: MeasuredRow) -> str:
    """The config of a row as YAML that `3dtrn -` takes.

    Raises:
        SkipRowError: the row has none.
    """
    import yaml

    return str(yaml.safe_dump(to_config(row).config, sort_keys=False, allow_unicode=True, width=78))


def predicted(judged: Judgement, estimate: Estimate) -> list[ReportSection]:
    """The errors, step time breakdown, and every formula and constant behind it."""
    found: list[ReportSection | None] = [
        _errors(judged, estimate),
        Table("assumed by the estimate", [], [[text] for text in estimate.assumptions]),
        breakdown.step_parts(estimate),
        breakdown.memory(estimate),
        kernel_table.table(estimate),
        details.gemms(estimate),
        details.collectives(estimate) if estimate.collectives else None,
        details.pipeline(estimate),
        *written_out(estimate),
        kernel_table.formulas(estimate),
        constants.shared(),
        constants.fitted(estimate.job),
        constants.machine(estimate.job),
        constants.software(estimate.job),
    ]
    return [section for section in found if section is not None]


def _errors(judged: Judgement, estimate: Estimate) -> Table:
    """Prediction next to measurement; errors are signed, positive is too slow or too large."""
    rows: list[list[str]] = []
    data, measured_s = estimate.job.data, judged.measured_step_s
    rate = None if measured_s is None else data.gbs * data.seqlen / measured_s / estimate.devices
    ours = estimate.throughput.tokens_per_s_per_device
    rows.append(_row("step", (estimate.step_s, measured_s), judged.step_error, seconds))
    rows.append(
        _row("tokens/s/device", (ours, rate), None if rate is None else ours / rate - 1.0, lambda x: number(x, 4))
    )
    if judged.measured_bytes is not None:
        pair = (judged.predicted_bytes, judged.measured_bytes)
        rows.append(_row(f"memory, {judged.metric}", pair, judged.memory_error, lambda x: f"{x / GIB:,.2f} GiB"))
    if judged.allocator is not None:
        pairs = (("between steps", judged.allocator.persisting), ("peak, first step", judged.allocator.first_peak))
        for name, found in pairs:
            if found is not None:
                measured_bytes, ours_bytes = found
                error = ours_bytes / measured_bytes - 1.0
                rows.append(_row(name, (ours_bytes, measured_bytes), error, lambda x: f"{x / GIB:,.3f} GiB"))
    notes = [f"verdict: {judged.verdict}" + ("; the run ended out of memory" if judged.ran_out else "")]
    notes.append("error = predicted / measured - 1; 3dtrn validate counts the step's and the memory's")
    return Table("predicted vs. measured", ["", "predicted", "measured", "error"], rows, notes)


def _row(name: str, pair: tuple[float | None, float | None], error: float | None, show: Any) -> list[str]:
    return [name, *("-" if value is None else show(value) for value in pair), percent(error, signed=True)]


def written_out(estimate: Estimate) -> list[ReportSection]:
    """The longest projections and the most exposed collectives, each as formula and numbers."""
    spent: dict[str, float] = {}
    for gemm in estimate.gemms:
        spent[gemm.name] = spent.get(gemm.name, 0.0) + gemm.count_per_step * gemm.time_s
    shown: dict[str, float] = {}
    for link in estimate.collectives:
        shown[link.name] = shown.get(link.name, 0.0) + link.exposed_s
    names = [
        name for seconds_of in (spent, shown) for name in sorted(seconds_of, key=lambda n: -seconds_of[n])[:WIDEST]
    ]
    return [section for name in names for section in explain.explain(estimate, name)]
