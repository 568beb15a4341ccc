"""Results of reading logs of finished runs, as JSON and as tables: start-up, memory, scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import read_each
from steptime.base.words import counted
from steptime.bench.run_logs import gpu_memory, scaling_runs, startup
from steptime.bench.run_logs.gpu_memory import GpuMemoryLog
from steptime.bench.run_logs.samples import MIB, MemoryUse
from steptime.bench.run_logs.scaling_runs import Point, ScalingSeries
from steptime.bench.run_logs.startup import PHASES, NeverStarted, Startup, Unclear, by_world_size, quantiles
from steptime.bench.timings import SCHEMA
from steptime.report.format import GIB, TIME, column, number, percent, seconds, unit_for, whole
from steptime.report.table import Fact, FactList, ReportSection, Table

LogReport = tuple[dict[str, Any], list[ReportSection]]

_SMI = (
    "nvidia-smi counts all device memory (contexts, communicators, reserved memory), not tensors: compare it with"
    " reserved memory plus overhead, not with allocated memory"
)
_NO_LAW = (
    "no scaling law is fitted: of 119 published start-ups (Perlmutter, 2023) world size explains 2 % of the variance"
)


# --- start-up ---


def startup_command(paths: Sequence[str]) -> LogReport:
    """`3dtrn bench startup LOG...`: job start to first step. A .csv is a list of start and stop stamps.

    Raises:
        ConfigError: one line per file that cannot be read.
    """

    def read(path: str) -> Sequence[Startup | NeverStarted | Unclear]:
        return startup.read_stamps(path) if path.endswith(".csv") else [startup.read_log(path)]

    rows = [row for each in read_each(paths, read) for row in each]
    if len(paths) == len(rows) > len({row.log for row in rows}):  # equal names in several folders
        rows = [row._replace(log=path) for row, path in zip(rows, paths, strict=True)]
    started = [row for row in rows if isinstance(row, startup.Startup)]
    never = [row for row in rows if isinstance(row, startup.NeverStarted)]
    unclear = [row for row in rows if isinstance(row, startup.Unclear)]
    overall = startup.quantiles([row.seconds_s for row in started]) if started else None
    sizes = startup.by_world_size(started)
    document = {
        "schema": SCHEMA,
        "startup": {
            "started": [_plain(row) | {"other_s": row.other_s} for row in started],
            "never_started": [_plain(row) for row in never],
            "unclear": [_plain(row) for row in unclear],
            "quantiles": overall and overall._asdict(),
            "by_world_size": [{"world_size": size, **found._asdict()} for size, found in sizes.items()],
        },
    }
    return document, _startup_sections(started, never, unclear)


def _plain(row: Any) -> dict[str, Any]:
    """A row as JSON: its fields, times as text."""
    return {key: value.isoformat() if hasattr(value, "isoformat") else value for key, value in row._asdict().items()}


def _startup_sections(started: list[Startup], never: list[NeverStarted], unclear: list[Unclear]) -> list[ReportSection]:
    """The answer, then the tables that have rows."""
    told: list[ReportSection] = [_answer(started, never, unclear)]
    if started:
        told += [_sizes(started), _rows(started)]
    if any(row.phases_s for row in started):
        told.append(_phases(started))
    if never:
        told.append(_never(never))
    if unclear:
        told.append(FactList("start-up unknown", [Fact(row.log, [row.why], "warn") for row in unclear]))
    return told


def _answer(started: list[Startup], never: list[NeverStarted], unclear: list[Unclear]) -> FactList:
    facts = []
    if started:
        least, p10, middle, p90, most = _stamped(quantiles([row.seconds_s for row in started])[:5])
        tenths = f"; {p10} to {p90} s (10th to 90th percentile)" if len(started) >= 10 else ""
        spread = f"median {middle} s{tenths}; {least} to {most} s in all" if len(started) > 1 else f"{middle} s"
        facts.append(Fact("job start to first step", [spread], "head"))
    facts.append(Fact("started", [f"{len(started)} of {len(started) + len(never) + len(unclear)} logs"]))
    if never:
        facts.append(Fact("did not start", [f"{len(never)} without step=0"], "bad"))
    if unclear:
        facts.append(Fact("unknown", [f"{len(unclear)} reached step 0, with unknown start-up time"], "warn"))
    return FactList("start-up", facts)


def _stamped(values: Sequence[float]) -> list[str]:
    """Seconds between stamps: whole ones as such, else in tenths."""
    decimals = 0 if all(value == int(value) for value in values) else 1
    return [f"{value:,.{decimals}f}" for value in values]


def _sizes(started: list[Startup]) -> Table:
    groups = [("unknown" if size is None else str(size), found) for size, found in by_world_size(started).items()]
    groups.append(("all", quantiles([row.seconds_s for row in started])))
    shown = [_stamped([found[i] for _, found in groups]) for i in range(5)]
    rows = [[label, str(found.n), *cells] for (label, found), *cells in zip(groups, *shown, strict=True)]
    rows.insert(-1, [])
    return Table("start-up by world size (s)", ["ranks", "n", "min", "p10", "median", "p90", "max"], rows, [_NO_LAW])


def _rows(started: list[Startup]) -> Table:
    rows: list[list[str]] = []
    noted: dict[str, list[str]] = {}
    for row, took in zip(started, _stamped([row.seconds_s for row in started]), strict=True):
        mark = ""
        if row.notes:
            mark = " *"
            noted.setdefault("; ".join(row.notes), []).append(row.log)
        size = "-" if row.world_size is None else str(row.world_size)
        when = "-" if row.start is None else row.start.strftime("%Y-%m-%d %H:%M:%S")
        rows.append([row.log, took + mark, size, when])
    notes = [f"* {', '.join(logs)}: {note}" if len(noted) > 1 else f"* {note}" for note, logs in noted.items()]
    return Table("start-up by log", ["", "s", "ranks", "job start"], rows, notes)


def _phases(started: list[Startup]) -> Table:
    """The parts that our own logs state, in their order."""
    rows = [row for row in started if row.phases_s]
    named = [name for name in (*PHASES, "steady") if any(name in row.phases_s for row in rows)]
    named += sorted({name for row in rows for name in row.phases_s} - set(named))
    cells = [
        [
            row.log,
            *(f"{row.phases_s[name]:,.2f}" if name in row.phases_s else "-" for name in named),
            f"{row.other_s:,.2f}",
        ]
        for row in rows
    ]
    notes = [
        "other: job script before the launcher, and time stamp rounding",
        "steady: a later step, for comparison with the first; not part of the start-up",
    ]
    return Table(
        "parts of the start-up (s)", ["", *(name.replace("_", " ") for name in named), "other"], cells,
        notes if "steady" in named else notes[:1],
    )  # fmt: skip


def _never(rows: list[NeverStarted]) -> Table:
    cells = [[row.log, whole(row.lines), str(row.start or "none stated"), str(row.last or "none")] for row in rows]
    return Table("did not start: rank 0 did not log step=0", ["", "lines", "job start", "last stamp"], cells)


# --- memory ---


def memory_command(
    paths: Sequence[str], *, log: str | None = None, start: str | None = None, stop: str | None = None
) -> LogReport:
    """GPU-memory logs of nvidia-smi (CSV) summarized by GPU.

    Samples count between the first and the last step of `log`, a training log, or from `start` to `stop`: 2023-10-05 19:12:15, or
    19:12:15.

    Raises:
        ConfigError: one line per file that cannot be read or has no sample in the window.
    """
    if log is not None and (start is not None or stop is not None):
        raise ConfigError("a training log and --from or --to are both set; use one")

    def read(path: str) -> GpuMemoryLog:
        if log is None and start is None and stop is None:
            return gpu_memory.summarize(path)
        near = gpu_memory.first_sample(path)
        window = gpu_memory.step_window(log, near) if log else gpu_memory.given_window(start, stop, near)
        return gpu_memory.summarize(path, *window)

    found = read_each(paths, read)
    document = {
        "schema": SCHEMA,
        "gpu_memory": [
            _plain(each) | {"gpus": [_plain(gpu) | {"line": log_line(gpu)} for gpu in each.gpus]} for each in found
        ],
    }
    return document, [_memory_table(each) for each in found]


def log_line(gpu: MemoryUse) -> str:
    """The line about a training log's window."""
    peak, average, mode = (value / MIB for value in (gpu.peak_bytes, gpu.average_bytes, gpu.mode_bytes))
    return f"[gpu_memory_log - GPU {gpu.name}] Peak = {peak:.0f} MiB, Avg = {average:.2f} MiB, Mode = {mode:.0f} MiB"


def _memory_table(found: GpuMemoryLog) -> Table:
    rows = []
    for gpu in found.gpus:
        share = percent(gpu.peak_bytes / gpu.total_bytes) if gpu.total_bytes else "-"
        peak, average, mode = (value / MIB for value in (gpu.peak_bytes, gpu.average_bytes, gpu.mode_bytes))
        used = f"{gpu.samples:,} of {gpu.samples + gpu.outside:,}"
        label = f"GPU {gpu.name}" if gpu.name.isdecimal() else gpu.name
        rows.append([label, gpu.model, f"{peak:,.0f}", share, f"{average:,.2f}", f"{mode:,.0f}", used])
    spacing = max((gpu.interval_s for gpu in found.gpus if gpu.interval_s), default=None)
    every = f"sampled every {seconds(spacing)}" if spacing else "samples have no time stamps"
    notes = [f"{every}: peaks between samples are missed; torch.cuda.max_memory_allocated records them", _SMI]
    if found.start or found.stop:
        notes.insert(0, f"only samples from {found.start or 'the beginning'} to {found.stop or 'the end'}")
    else:
        notes.insert(0, "no window given: the average includes start-up and idle time")
    if found.unread:
        notes.append(f"{counted(found.unread, 'line')} without memory skipped (truncated, or [N/A])")
    return Table(
        f"GPU memory, {found.log} (MiB)",
        ["", "", "peak", "of total", "average", "mode", "samples"],
        rows,
        notes,
        left=2,
    )


# --- scaling ---


def scaling_command(paths: Sequence[str], *, baseline: int | None = None) -> LogReport:
    """The scaling table of several results.json, one per number of processes; `baseline` as in `scaling_runs.series`.

    Raises:
        ConfigError: one line per file or key that is wrong, or per series that cannot be compared.
    """
    runs = [run for each in read_each(paths, scaling_runs.read_runs) for run in each]
    found = scaling_runs.series(runs, baseline)
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


def _scaling_table(found: ScalingSeries) -> Table:
    """Throughput first; the step's times in one unit, predicted next to measured."""
    base = found.points[0].run
    runs = [point.run for point in found.points]
    unit = unit_for(max(run.median_s for run in runs), TIME)
    predicted = [run.predicted_step_s for run in runs]
    times = [column([getattr(run, name) for run in runs], unit.size) for name in ("min_s", "median_s", "p90_s")]
    times.append(_known(predicted, lambda known: column(known, unit.size)))
    peaks = _known([run.allocated_peak_bytes for run in runs], lambda known: column(known, GIB))
    shares = _known([point.predicted_efficiency for point in found.points], lambda known: [percent(x) for x in known])
    rows = [
        [str(run.ranks), number(run.tokens_per_s), f"{point.speed_up:.2f}x", percent(point.efficiency), share, *cells]
        for run, point, share, *cells in zip(runs, found.points, shares, *times, peaks, strict=True)
    ]
    header = ["ranks", "tokens/s", "speed-up", "efficiency", "model", "min", "median", "p90", "model", "GiB"]
    notes = [
        f"against {counted(base.ranks, 'rank')} ({base.layout}); efficiency is speed-up over ranks"
        + (f" / {base.ranks}" if base.ranks > 1 else ""),
        "model: estimated efficiency and step time; GiB: allocated peak of the rank with the highest",
    ]
    machines = sorted({str(run.predictor) for run in runs if run.predictor})
    if len(machines) > 1:
        notes.append(f"the estimates are for different machines (not comparable): {', '.join(machines)}")
    title = f"{found.kind} scaling, {found.layout}: step in {unit.name}"
    return Table(title, header, rows, notes)


def _known(values: Sequence[float | None], show: Callable[[list[float]], list[str]]) -> list[str]:
    """Cells of a column in which values may be missing: "-"."""
    shown = iter(show([value for value in values if value is not None]))
    return ["-" if value is None else next(shown) for value in values]
