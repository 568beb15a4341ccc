"""Output of `3dtrn validate --log` and `3dtrn diff` of logs: measured vs. predicted, answer first."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import yaml

from steptime.answer.result import config, finite
from steptime.base.words import counted
from steptime.launch.logs.steady import RULE, Steady
from steptime.report.estimate_text import assumptions
from steptime.report.format import COUNT, GIB, number, percent, quantity, seconds
from steptime.report.headline import headline
from steptime.report.table import PLAIN, Fact, FactList, ReportSection, Style, Table, layout, unstyled
from steptime.validation.logged import Compared

FEW = 5
"""Least number of lines for which a spread is shown."""
RANKS = 16
"""Most ranks that are shown one by one; of more, the highest peak of each stage."""


def report(compared: Compared, style: Style = PLAIN) -> str:
    """The whole comparison as text: the job, the answer, measurement, memory, the plan, what the estimate assumes."""
    lines = [style.paint(line, "head" if i == 0 else "plain") for i, line in enumerate(headline(compared.estimate))]
    out = ["\n".join(style.fold(line) for line in lines)]
    out += ["\n".join(layout(section, style)) for section in sections(compared)]
    plan = yaml.safe_dump(compared.run.config, sort_keys=False, allow_unicode=True, width=76)
    out.append(style.paint("the plan", "head") + "\n" + style.fold(unstyled(indent(plan, "  "))).rstrip("\n"))
    out.append("\n".join(assumptions(compared.estimate.assumptions, style)))
    return "\n\n".join(block for block in out if block) + "\n"


def sections(compared: Compared) -> list[ReportSection]:
    """The whole comparison: the answer, measurement, memory, conventions, and assumptions."""
    found: list[ReportSection | None] = [
        answer(compared),
        measured(compared),
        memory(compared),
        parameters(compared),
        notes(compared),
    ]
    return [section for section in found if section is not None]


def answer(compared: Compared) -> Table:
    """Step, rates and peaks: measured, predicted, error."""
    run, ours = compared.run, compared.estimate
    step, tokens = run.steady.step_s, compared.tokens_per_step
    low, high = ours.time.step_s_p10, ours.time.step_s_p90
    rows = [_row("step", step, ours.step_s, seconds)]
    of_log = _span(run.steady.step_s_p10, run.steady.step_s_p90) if run.steady.used >= FEW else "-"
    rows.append(["  80 % interval", of_log, _span(low, high), ""])
    rows.append(_row("tokens/s", tokens / step, tokens / ours.step_s, lambda x: quantity(x, COUNT, digits=4)))
    rows.append(_rate_row("tokens/s/device", tokens, compared))
    rows.append(_rate_row("TFLOP/s/device", compared.flops_per_step / 1e12, compared))
    rows += _peak_rows(compared)
    where = "inside" if low <= step <= high else "outside"
    told = ["error = predicted / measured - 1", f"the measured step is {where} the predicted 80 % interval"]
    told = [*other_devices(compared), *other_batch(compared), *told, *convention(compared)]
    return Table("measured and predicted", ["", "measured", "predicted", "error"], rows, told)


def _devices_of_log(compared: Compared) -> int:
    """The devices that the log's job ran on; the plan's where the log does not say."""
    return compared.run.log.job_devices or compared.estimate.devices


def other_devices(compared: Compared) -> list[str]:
    """That the plan is for another number of devices than the log says the job ran on."""
    said, ours = _devices_of_log(compared), compared.estimate.devices
    if said == ours:
        return []
    return [
        (
            f"the plan has {ours:,} devices, the log's job ran on {said:,}: these are two jobs, and the errors say nothing of "
            f"either; give the log's with --set devices={said}, and its batch with --set data.gbs=N"
        )
    ]


def other_batch(compared: Compared) -> list[str]:
    """That the Trainer's samples over its steps are not the plan's batch; a tenth is left for a short last batch."""
    log, ours = compared.run.log, compared.run.job.data.gbs
    if log.whole_batch is None or log.steps is not log.whole:
        return []
    low, high = log.whole_batch
    if 0.9 * low <= ours <= 1.1 * high:
        return []
    return [
        (
            f"the plan has {ours:,} sequences a step, the log {(low + high) / 2.0:,.4g} samples a step; if a sample is a "
            "sequence, give the log's batch with --set data.gbs=N; if the trainer packs samples into sequences, both may be right"
        )
    ]


def _row(name: str, of_log: float, of_plan: float, show: Any) -> list[str]:
    return [name, show(of_log), show(of_plan), percent(of_plan / of_log - 1.0, signed=True)]


def _rate_row(name: str, work: float, compared: Compared) -> list[str]:
    """A rate per device: work of a step of the job over step time and devices, those of each side."""
    of_log = work / compared.run.steady.step_s / _devices_of_log(compared)
    return _row(name, of_log, work / compared.estimate.step_s / compared.estimate.devices, lambda x: number(x, 4))


def _span(low: float, high: float) -> str:
    return f"{seconds(low)} to {seconds(high)}"


def _peak_rows(compared: Compared) -> list[list[str]]:
    """The highest peak of any rank that reports one, and the estimate of that rank's stage."""
    rows = []
    for what in ("allocated", "reserved"):
        said = [row for row in compared.memory if getattr(row, f"{what}_bytes")]
        if said:
            top = max(said, key=lambda row: float(getattr(row, f"{what}_bytes")))
            name = f"memory, {what}" + ("" if top.rank < 0 else f" (rank {top.rank})")
            rows.append(
                _row(
                    name,
                    getattr(top, f"{what}_bytes"),
                    getattr(top, f"predicted_{what}_bytes"),
                    lambda value: f"{value / GIB:,.2f} GiB",
                )
            )
    return rows


def convention(compared: Compared) -> list[str]:
    """The FLOP convention of the log, or that no known one matches its figure."""
    found = compared.counted
    if found is None:
        return ["TFLOP/s: not in the log; causal attention halved, vocabulary unpadded"]
    logged = found.logged_flops_per_step
    if found.matches:
        near = found.matches[0]
        return [f"the log's TFLOP/s: {near.name} ({percent(near.flops_per_step / logged - 1.0, signed=True)})"]
    scale = 1e12 * _devices_of_log(compared)
    halved, full = found.known[0].flops_per_step / scale, found.known[2].flops_per_step / scale
    ours = f"ours {halved:,.4g} (causal attention halved) or {full:,.4g} (in full); the rows above count ours"
    return [f"the log's TFLOP/s match no known convention: {logged / scale:,.4g} TFLOP per device and step, {ours}"]


def measured(compared: Compared) -> FactList:
    """The lines behind the measured step."""
    run, steady = compared.run, compared.run.steady
    whose = run.reading.framework
    whose = f"with {whose}, {run.reading.source}" if whose == "a plan" else whose
    facts = [
        Fact("log", [", ".join(run.log.files) + f" ({whose})"]),
        Fact("used", [_used(steady), *_left_out(steady)]),
        Fact("median", [_median(steady)]),
    ]
    if steady.restarts:
        shown = ", ".join(f"{number:,}" for number in steady.restarts[:8]) + " ..." * (len(steady.restarts) > 8)
        facts.append(Fact("restarts", [f"first iteration logged after each: {shown}"]))
    flags = {status: len(run.reading.of(status)) for status in ("used", "default", "irrelevant", "unmodeled")}
    words = ("used", "framework defaults", "no cost", "not modeled")
    if any(flags.values()):  # none of a plan, which is not read by flags
        facts.append(
            Fact("settings", [", ".join(f"{n:,} {word}" for n, word in zip(flags.values(), words, strict=True))])
        )
    return FactList("measurement", facts)


def _used(steady: Steady) -> str:
    every = "" if steady.interval == 1 else f", each of {steady.interval} iterations"
    batch = f", global batch {steady.batch:,}" if steady.batch else ""
    which = (
        f"iterations {steady.first:,} to {steady.last:,}"
        if steady.last > steady.first
        else f"iteration {steady.last:,}"
    )
    return f"{steady.used:,} of {counted(steady.logged, 'line')}{every} ({which}{batch})"


def _left_out(steady: Steady) -> list[str]:
    said = ", ".join(f"{count:,} {why}" for why, count in steady.left_out.items())
    return [RULE] + ([f"left out: {said}"] if said else [])


def _median(steady: Steady) -> str:
    if steady.median_low_s is None or steady.median_high_s is None:
        return "fewer than 6 lines: no confidence interval of the median"
    return f"95 % interval {_span(steady.median_low_s, steady.median_high_s)} (order statistics)"


def memory(compared: Compared) -> Table | None:
    """Peaks by rank and stage; for many ranks the highest of each stage."""
    rows = compared.memory
    if not rows:
        return None
    shown, told = rows, []
    if len(rows) > RANKS:
        peaks = sorted(rows, key=lambda row: (row.allocated_bytes or 0.0, row.reserved_bytes or 0.0), reverse=True)
        highest = {row.stage: row for row in reversed(peaks)}
        shown = sorted(highest.values(), key=lambda row: -1 if row.stage is None else row.stage)
        told.append(f"{counted(len(rows), 'rank')} reported; the highest of each stage is shown (all: --json)")
    if any(row.stage is None for row in rows):
        told.append("stage unknown: compared with the largest of all stages")
    kinds = [what for what in ("allocated", "reserved") if any(getattr(row, f"{what}_bytes") for row in rows)]
    lines = []
    for row in shown:
        pairs = [_pair(getattr(row, f"{what}_bytes"), getattr(row, f"predicted_{what}_bytes")) for what in kinds]
        where = ["?" if row.rank < 0 else str(row.rank), "?" if row.stage is None else str(row.stage)]
        lines.append([*where, *(cell for pair in pairs for cell in pair)])
    header = ["rank", "stage", *(name for what in kinds for name in (what, "predicted", "error"))]
    return Table("peak memory by rank (GiB)", header, lines, told)


def _pair(of_log: float | None, of_plan: float) -> list[str]:
    if not of_log:
        return ["-", f"{of_plan / GIB:,.2f}", ""]
    return [f"{of_log / GIB:,.2f}", f"{of_plan / GIB:,.2f}", percent(of_plan / of_log - 1.0, signed=True)]


def parameters(compared: Compared) -> Table | None:
    """Parameters by model-parallel rank where the log and the plan differ, or that they agree."""
    rows = compared.parameters
    if not rows:
        return None
    off = [row for row in rows if row.logged != row.predicted]
    if not off:
        return Table("parameters", [], [[f"plan and log agree for all {len(rows)} model-parallel ranks in the log"]])
    lines = [
        [f"({row.tp_rank}, {row.stage})", f"{row.logged:,}", f"{row.predicted:,}", f"{row.predicted - row.logged:+,}"]
        for row in off[:RANKS]
    ]
    told = [f"{len(rows) - len(off)} of {counted(len(rows), 'rank')} agree"]
    return Table("parameters by (tensor, pipeline) rank", ["", "log", "plan", "difference"], lines, told)


def notes(compared: Compared) -> Table | None:
    """Values taken from the log, and assumptions."""
    said = compared.run.notes
    return Table("notes", [], [[text] for text in said]) if said else None


def to_dict(compared: Compared) -> dict[str, Any]:
    """A compared log as plain data: the plan, measured, predicted, errors (predicted / measured - 1), memory by rank."""
    run, ours = compared.run, compared.estimate
    step_s, tokens = run.steady.step_s, compared.tokens_per_step
    return {
        "files": list(run.log.files),
        "framework": run.reading.framework,
        "config": config(ours),
        "assumptions": list(ours.assumptions),
        "flags": [flag._asdict() for flag in run.reading.flags],
        "notes": [*other_devices(compared), *other_batch(compared), *run.notes],
        "measured": {**run.steady._asdict(), **_rates(compared, step_s, tokens, _devices_of_log(compared))},
        "predicted": {
            "step_s": ours.step_s,
            "step_s_p10": ours.time.step_s_p10,
            "step_s_p90": ours.time.step_s_p90,
            **_rates(compared, ours.step_s, tokens, ours.devices),
            "verdict": ours.memory.verdict,
            "stages": [row._asdict() for row in ours.memory.stages],
        },
        "step_time_error": ours.step_s / step_s - 1.0,
        "flops_convention": _convention(compared),
        "memory": [
            {
                **row._asdict(),
                "allocated_error": _error(row.predicted_allocated_bytes, row.allocated_bytes),
                "reserved_error": _error(row.predicted_reserved_bytes, row.reserved_bytes),
            }
            for row in compared.memory
        ],
        "parameters": [row._asdict() for row in compared.parameters],
    }


def _rates(compared: Compared, step_s: float, tokens: float, devices: int) -> dict[str, float]:
    return {
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_per_device": tokens / step_s / devices,
        "tflops_per_device": compared.flops_per_step / step_s / devices / 1e12,
    }


def _convention(compared: Compared) -> dict[str, Any] | None:
    """The log's own FLOPs per step, the convention that reproduces them (null: none within 1 %), and what each would give."""
    found = compared.counted
    if found is None:
        return None
    return {
        "logged_flops_per_step": found.logged_flops_per_step,
        "matches": [c.name for c in found.matches],
        "known": {c.name: finite(c.flops_per_step) for c in found.known},
    }


def _error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1.0 if measured else None
