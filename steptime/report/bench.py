"""What the microbenchmark says: predicted beside measured, and the rates of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.report.figures import percent
from steptime.report.format import BINARY, COUNT, SI, Unit, number, quantity, seconds
from steptime.report.table import Fact, Facts, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steptime.bench.beside import Beside, Summary
    from steptime.bench.machine_file import Figure
    from steptime.bench.write import Run
    from steptime.report.table import Section

TITLES = {
    "step": "whole steps",
    "block": "one block",
    "memory": "memory",
    "exact": "counts",
    "gemm": "matrix multiplies",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "collective": "collectives",
}
_UNITS: dict[str, tuple[Unit, ...]] = {"bytes": BINARY, "count": COUNT, "FLOP": SI}
_EACH = ("step", "block", "memory", "exact", "attention")
"""Kinds of figures of which every one is shown; of the others the errors, and the widest."""


def sections(run: Run) -> list[Section]:
    """The answer first: the step and its memory, then what they are made of, then the machine's rates."""
    from steptime.bench.beside import summarise

    found = run.found
    return [
        head(run),
        each([row for row in found.beside if row.what in _EACH]),
        errors(summarise(row for row in found.beside if row.what not in _EACH)),
        *([rates(found.figures)] if found.figures else []),
        *([Facts("notes", [Fact("-", [note]) for note in run.raw.notes])] if run.raw.notes else []),
        Facts("", [Fact("wrote", run.files)]),
    ]


def head(run: Run) -> Facts:
    """What was measured where, and whether the machine kept its pace."""
    device, drift = run.device, run.raw.drift
    kind = "threads" if device.kind == "cpu" else "processors"
    facts = [
        Fact("process", [run.world_line]),
        Fact("device", [f"{device.name}, {device.processors} {kind}, {quantity(device.memory_bytes, BINARY)}"]),
    ]
    if drift is not None:
        facts.append(
            Fact("drift", [f"after the steps the same products took {drift:.2f} times as long as before them"])
        )
    return Facts("measured on", facts)


def each(found: Sequence[Beside]) -> Table:
    """Every figure, with the signed error of the prediction."""
    rows: list[list[str]] = []
    kind = ""
    for row in found:
        if row.what != kind:
            kind = row.what
            rows.append([TITLES[kind]])
        spread = "" if row.spread is None else percent(row.spread)
        rows.append([f"  {row.name}", _shown(row, row.predicted), _shown(row, row.measured), _error(row), spread])
    return Table("", ["predicted beside measured", "predicted", "measured", "difference", "spread"], rows)


def _error(row: Beside) -> str:
    if row.what == "exact":
        return "none" if row.predicted == row.measured else number(row.predicted - row.measured)
    return percent(row.error, signed=True)


def _shown(row: Beside, value: float) -> str:
    if row.unit == "s":
        return seconds(value)
    if row.what == "exact":
        return f"{value:,.0f}"
    return quantity(value, _UNITS[row.unit], digits=4)


def errors(found: Sequence[Summary]) -> Table:
    """Errors of many alike figures."""
    rows = [
        [TITLES[s.what], str(s.n), *(percent(x) for x in (s.median, s.mean, s.worst)), percent(s.bias, signed=True)]
        for s in found
    ]
    notes = [f"worst of {TITLES[s.what]}: {s.worst_name}" for s in found]
    return Table("", ["errors without sign", "n", "median", "mean", "worst", "bias"], rows, notes)


def rates(figures: Mapping[str, Figure]) -> Facts:
    """The figures of the machine file, and what each rests on; who measured when is the same for all, and in the file."""
    return Facts(
        "the machine file",
        [
            Fact(path.rpartition("kernels.")[2], [f"{_rate(path, one.value)}   {one.source.partition(';')[0]}"])
            for path, one in figures.items()
        ],
    )


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
