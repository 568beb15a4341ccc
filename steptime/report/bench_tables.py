"""Results of the microbenchmark: predicted vs. measured, and the rates of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptime.base.words import counted
from steptime.bench.comparison import ErrorSummary, PredictionRow
from steptime.bench.conclude import BenchResults
from steptime.bench.machine_file import Figure
from steptime.bench.timings import CollectiveTiming
from steptime.report.format import BINARY, COUNT, SI, Unit, number, percent, quantity, seconds
from steptime.report.table import Fact, FactList, ReportSection, Table

TITLES = {
    "step": "whole steps",
    "block": "one block",
    "memory": "memory",
    "exact": "counts",
    "gemm": "matrix multiplies",
    "attention": "attention (its rate is fitted to these)",
    "memory_bound": "memory-bound kernels",
    "collective": "collectives",
}
_UNITS: dict[str, tuple[Unit, ...]] = {"bytes": BINARY, "count": COUNT, "FLOP": SI}
STEADY = 1.15
"""Change of speed above which the measured steps are not reliable."""
_EACH = ("step", "block", "memory", "attention")
"""Kinds of figures that are listed one by one; of the others, the errors and the largest one."""


def sections(run: BenchResults) -> list[ReportSection]:
    """The answer first: the step and its memory, then their parts, then the machine's rates."""
    from steptime.bench.comparison import summarize

    found = run.found
    notes = [*run.raw.notes, *found.notes]
    blocks: list[ReportSection] = [
        head(run),
        each([row for row in found.comparisons if row.what in _EACH]),
        errors(summarize(row for row in found.comparisons if row.what not in {*_EACH, "exact"})),
        counts([row for row in found.comparisons if row.what == "exact"]),
        *([rates(found.figures)] if found.figures else []),
        links(run.raw.before.collectives),
        *([FactList("notes", [Fact("-", [note]) for note in notes])] if notes else []),
        written(run),
    ]
    return [section for section in blocks if getattr(section, "rows", True)]


def written(run: BenchResults) -> FactList:
    """The files, and how to use the machine's."""
    facts = [Fact("wrote", run.files)]
    if run.found.machine:
        facts.append(Fact("use it", [f"3dtrn PLAN --set hardware.node_type={run.files[0]}"]))
    return FactList("", facts)


def head(run: BenchResults) -> FactList:
    """What was measured where, and whether the machine's speed was constant."""
    device, drift = run.device, run.raw.drift
    processors = counted(device.processors, "thread" if device.kind == "cpu" else "processor")
    facts = [
        Fact("process", [run.world_line]),
        Fact("device", [f"{device.name}, {processors}, {quantity(device.memory_bytes, BINARY)}"]),
    ]
    if drift is not None:
        told = f"the same matrix multiplies took {drift:.2f} times as long after the steps as before"
        if not 1.0 / STEADY < drift < STEADY:
            told += ": measure again when nothing else runs on this machine"
        facts.append(Fact("drift", [told]))
    if run.raw.host is not None:
        peak, average = (quantity(size, BINARY) for size in (run.raw.host.peak_bytes, run.raw.host.average_bytes))
        facts.append(Fact("host memory", [f"peak {peak}, average {average}, this process and its children, sampled"]))
    if not run.found.machine:
        told = f"for {run.found.predictor}, as set in the plan; this machine was not measured"
        facts.append(Fact("predicted", [told]))
    return FactList("measured on", facts)


def each(found: Sequence[PredictionRow]) -> Table:
    """Every figure, with the signed error of the prediction."""
    rows: list[list[str]] = []
    kind = ""
    for row in found:
        if row.what != kind:
            kind = row.what
            rows.append([TITLES[kind]])
        spread = "" if row.spread is None else percent(row.spread)
        both = [_shown(row, value) for value in (row.predicted, row.measured)]
        rows.append([f"  {row.name}", *both, percent(row.error, signed=True), spread])
    return Table("", ["predicted vs. measured", "predicted", "measured", "difference", "spread"], rows)


def _shown(row: PredictionRow, value: float) -> str:
    return seconds(value) if row.unit == "s" else quantity(value, _UNITS[row.unit], digits=4)


def counts(found: Sequence[PredictionRow]) -> Table:
    """Quantities that torch counted, not timed; predicted and counted must be equal."""
    rows = [
        [row.name, f"{row.predicted:,.0f}", f"{row.measured:,.0f}", number(row.error and row.predicted - row.measured)]
        for row in found
    ]
    equal = sum(row.predicted == row.measured for row in found)
    note = f"{equal} of {len(found)} are equal: elements, calls, bytes and FLOPs"
    return Table("", ["counted by torch", "predicted", "counted", "difference"], rows, [note])


def errors(found: Sequence[ErrorSummary]) -> Table:
    """Errors of many similar figures."""
    rows = [
        [TITLES[s.what], str(s.n), *(percent(x) for x in (s.median, s.mean, s.worst)), percent(s.bias, signed=True)]
        for s in found
    ]
    notes = [f"worst of {TITLES[s.what]}: {s.worst_name}" for s in found]
    return Table("", ["absolute errors", "n", "median", "mean", "worst", "bias"], rows, notes)


def links(measured: Sequence[CollectiveTiming]) -> Table:
    """Latency and bus bandwidth of each collective on each axis, by a line fitted to its fastest calls."""
    from steptime.bench.links import BEYOND, alpha_beta, bus_bytes_per_s

    rows = []
    for line in alpha_beta(measured):
        mine = [row for row in measured if (row.axis, row.kind, row.ranks) == line[:3]]
        best, most = max(map(bus_bytes_per_s, mine)), max(row.bytes for row in mine)
        steep = line.bus_bytes_per_s  # sizes dominated by latency show no asymptote
        rate = "-" if steep is None or steep > BEYOND * best else quantity(steep, SI, "B/s")
        cells = [f"{line.kind} over {line.axis}", str(line.ranks), seconds(line.alpha_s), rate]
        rows.append([*cells, quantity(best, SI, "B/s"), quantity(most, BINARY), percent(line.error_median)])
    return Table("", ["bus bandwidth", "ranks", "latency", "asymptote", "best", "up to", "error"], rows)


def rates(figures: Mapping[str, Figure]) -> FactList:
    """The figures of the machine file and their sources; date and host, the same for all, are only in the file."""
    facts = [
        Fact(path.rpartition("kernels.")[2], [f"{_rate(path, one.value)}   {one.source.partition(';')[0]}"])
        for path, one in figures.items()
    ]
    return FactList("the machine file", facts)


def _rate(path: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if path.endswith("efficiency"):
        return percent(value)
    if "flops" in path:
        return quantity(value, SI, "FLOP/s")
    if path.endswith("bytes_per_s"):
        return quantity(value, SI, "B/s")
    return seconds(value) if path.endswith("_s") else number(value)
