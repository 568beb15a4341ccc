"""The scaling table: throughput, speed-up and efficiency by ranks, the model's beside the measured; JSON and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.bench import scaling
from steptime.bench.rows import SCHEMA
from steptime.report.bench_logs import Answer, read_all
from steptime.report.format import GIB, TIME, column, number, percent, unit_for
from steptime.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steptime.bench.scaling import Point, Series


def scaling_command(paths: Sequence[str], *, baseline: int | None = None) -> Answer:
    """The scaling table of several results.json, one per number of processes.

    Args:
        paths: results of `3dtrn bench`.
        baseline: the number of ranks that every series must begin with; None takes its smallest.

    Raises:
        ConfigError: one line per file or key that is wrong, or per series that cannot be compared.
    """
    runs = [run for each in read_all(paths, scaling.read_runs) for run in each]
    found = scaling.series(runs, baseline)
    document = {
        "schema": SCHEMA,
        "scaling": [
            {"layout": each.layout, "kind": each.kind, "rows": [_point_dict(point) for point in each.points]}
            for each in found
        ],
    }
    return document, [_scaling_table(each) for each in found]


def _point_dict(point: Point) -> dict[str, Any]:
    fields = point.run._asdict() | {"tokens_per_s": point.run.tokens_per_s} | point._asdict()
    return {key: value for key, value in fields.items() if key not in {"run", "config"}}


def _scaling_table(found: Series) -> Table:
    """Throughput first; the step's times under one unit, the model's beside the measured."""
    base = found.points[0].run
    unit = unit_for(max(point.run.median_s for point in found.points), TIME)
    rows = []
    for point in found.points:
        run = point.run
        predicted = "-" if run.predicted_step_s is None else column([run.predicted_step_s], unit.size)[0]
        share = "-" if point.predicted_efficiency is None else percent(point.predicted_efficiency)
        memory = "-" if run.allocated_bytes is None else number(run.allocated_bytes / GIB)
        times = column([run.min_s, run.median_s, run.p90_s], unit.size)
        shares = [f"{point.speed_up:.2f}x", percent(point.efficiency), share]
        rows.append([str(run.ranks), number(run.tokens_per_s), *shares, *times, predicted, memory])
    header = ["ranks", "tokens/s", "speed-up", "efficiency", "model", "min", "median", "p90", "model", "GiB"]
    notes = [
        f"against {base.ranks} rank{'s' * (base.ranks > 1)} ({base.layout}); efficiency is speed-up over ranks"
        + (f" / {base.ranks}" if base.ranks > 1 else ""),
        "model: what the estimate says of the efficiency, and of the step; GiB: allocated peak of the rank that holds most",
    ]
    title = f"{found.kind} scaling, {found.layout}: step in {unit.name}"
    return Table(title, header, rows, notes)
