"""What logs of finished runs say, as JSON and as tables: start-up and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.bench import gpu_memory, startup
from steptime.bench.rows import SCHEMA
from steptime.bench.samples import MIB
from steptime.config import ConfigError
from steptime.report.format import BINARY, percent, quantity, seconds, whole
from steptime.report.table import Fact, Facts, Section, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from steptime.bench.gpu_memory import Summary
    from steptime.bench.host_memory import MaxRss
    from steptime.bench.samples import Memory
    from steptime.bench.startup import NeverStarted, Quantiles, Startup, Unclear

    Found = TypeVar("Found")

Answer = tuple[dict[str, Any], list[Section]]

_NO_LAW = (
    "no scaling law is fitted: of 119 published start-ups (Perlmutter, 2023) world size explains 2 % of the variance"
)
_SMI = (
    "nvidia-smi counts all that the device holds (contexts, communicators, what the allocator reserves), not tensors:"
    " compare it with reserved memory and overhead, not with allocated"
)


def read_all(paths: Sequence[str], read: Callable[[str], Found]) -> list[Found]:
    """Every file read, or the problems of all that cannot be."""
    found: list[Found] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(read(path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


# --- start-up ---


def startup_command(paths: Sequence[str]) -> Answer:
    """`3dtrn bench startup LOG...`: job start to first step. A .csv is a list of start and stop stamps.

    Raises:
        ConfigError: one line per file that cannot be read.
    """

    def read(path: str) -> Sequence[Startup | NeverStarted | Unclear]:
        return startup.read_stamps(path) if path.endswith(".csv") else [startup.read_log(path)]

    rows = [row for each in read_all(paths, read) for row in each]
    started = [row for row in rows if isinstance(row, startup.Startup)]
    never = [row for row in rows if isinstance(row, startup.NeverStarted)]
    unclear = [row for row in rows if isinstance(row, startup.Unclear)]
    overall = startup.quantiles([row.seconds_s for row in started]) if started else None
    sizes = startup.by_world_size(started)
    document = {
        "schema": SCHEMA,
        "startup": {
            "started": [_plain(row) for row in started],
            "never_started": [_plain(row) for row in never],
            "unclear": [_plain(row) for row in unclear],
            "quantiles": overall and overall._asdict(),
            "by_world_size": [{"world_size": size, **found._asdict()} for size, found in sizes.items()],
        },
    }
    sections: list[Section] = [_startup_answer(started, never, unclear, overall)]
    if overall:
        sections += [_startup_sizes(sizes, overall), _startup_rows(started)]
    if any(row.phases_s for row in started):
        sections.append(_startup_phases(started))
    if never:
        sections.append(_never(never))
    if unclear:
        sections.append(Facts("start-up unknown", [Fact(row.log, [row.why], "warn") for row in unclear]))
    return document, sections


def _plain(row: Any) -> dict[str, Any]:
    """A row as JSON: its fields, times as text."""
    fields = {key: value.isoformat() if hasattr(value, "isoformat") else value for key, value in row._asdict().items()}
    if isinstance(row, startup.Startup):
        fields |= {"other_s": row.other_s, "notes": list(row.notes)}
    return fields


def _startup_answer(
    started: list[Startup], never: list[NeverStarted], unclear: list[Unclear], overall: Quantiles | None
) -> Facts:
    facts = []
    if overall:
        least, p10, middle, p90, most = _stamped(overall[:5])
        spread = (
            f"median {middle} s; {p10} to {p90} s without the fastest and slowest tenth; {least} to {most} s in all"
        )
        facts.append(Fact("job start to first step", [spread], "head"))
    facts.append(Fact("started", [f"{len(started)} of {len(started) + len(never) + len(unclear)} logs"]))
    if never:
        facts.append(Fact("did not start", [f"{len(never)} without step=0"], "bad"))
    if unclear:
        facts.append(Fact("unknown", [f"{len(unclear)} reached step 0, after how long cannot be told"], "warn"))
    return Facts("start-up", facts)


def _stamped(values: Sequence[float]) -> list[str]:
    """Seconds between stamps: whole ones as such, else in tenths."""
    decimals = 0 if all(value == int(value) for value in values) else 1
    return [f"{value:,.{decimals}f}" for value in values]


def _startup_sizes(sizes: dict[int | None, Quantiles], overall: Quantiles) -> Table:
    groups = [("unknown" if size is None else str(size), found) for size, found in sizes.items()] + [("all", overall)]
    rows = [
        [label, str(found.n), *(f"{value:,.1f}".removesuffix(".0") for value in found[:5])] for label, found in groups
    ]
    rows.insert(-1, [])
    return Table("start-up by world size (s)", ["ranks", "n", "min", "p10", "median", "p90", "max"], rows, [_NO_LAW])


def _startup_rows(started: list[Startup]) -> Table:
    rows, notes = [], []
    for row, took in zip(started, _stamped([row.seconds_s for row in started]), strict=True):
        mark = ""
        if row.notes:
            mark = " *"
            notes.append(f"* {row.log}: {'; '.join(row.notes)}")
        size = "-" if row.world_size is None else str(row.world_size)
        when = "-" if row.start is None else row.start.strftime("%Y-%m-%d %H:%M:%S")
        rows.append([row.log, took + mark, size, when])
    return Table("start-up by log", ["", "s", "ranks", "job start"], rows, notes)


def _startup_phases(started: list[Startup]) -> Table:
    """The parts that our own logs state, in their order."""
    rows = [row for row in started if row.phases_s]
    named = [name for name in (*startup.PHASES, "steady") if any(name in row.phases_s for row in rows)]
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
        "other: the job script ahead of the launcher, and the rounding of the stamps",
        "steady: a later step, for comparison with the first; no part of the start-up",
    ]
    return Table(
        "parts of the start-up (s)", ["", *(name.replace("_", " ") for name in named), "other"], cells,
        notes if "steady" in named else notes[:1],
    )  # fmt: skip


def _never(rows: list[NeverStarted]) -> Table:
    cells = [[row.log, whole(row.lines), str(row.start or "none stated"), str(row.last or "none")] for row in rows]
    return Table("did not start: no line of rank 0 says step=0", ["", "lines", "job start", "last stamp"], cells)


# --- memory ---


def memory_command(
    paths: Sequence[str], *, log: str | None = None, start: str | None = None, stop: str | None = None
) -> Answer:
    """GPU-memory logs of nvidia-smi summarised by GPU.

    Args:
        paths: CSV files.
        log: a training log; only samples between its first and its last step count.
        start: only samples from this time on count: 2023-10-05 19:12:15, or 19:12:15.
        stop: only samples up to this time count.

    Raises:
        ConfigError: one line per file that cannot be read or has no sample in the window.
    """
    if log is not None and (start is not None or stop is not None):
        raise ConfigError("a training log and --from or --to are both given; keep one")

    def read(path: str) -> Summary:
        if log is None and start is None and stop is None:
            return gpu_memory.summarise(path)
        near = gpu_memory.first_sample(path)
        window = gpu_memory.step_window(log, near) if log else gpu_memory.given_window(start, stop, near)
        return gpu_memory.summarise(path, *window)

    found = read_all(paths, read)
    document = {
        "schema": SCHEMA,
        "gpu_memory": [
            _plain(each) | {"gpus": [_plain(gpu) | {"line": log_line(gpu)} for gpu in each.gpus]} for each in found
        ],
    }
    return document, [_memory_table(each) for each in found]


def log_line(gpu: Memory) -> str:
    """The line that training logs keep of it."""
    peak, average, mode = (value / MIB for value in (gpu.peak_bytes, gpu.average_bytes, gpu.mode_bytes))
    return f"[gpu_memory_log - GPU {gpu.name}] Peak = {peak:.0f} MiB, Avg = {average:.2f} MiB, Mode = {mode:.0f} MiB"


def _memory_table(found: Summary) -> Table:
    rows = []
    for gpu in found.gpus:
        share = percent(gpu.peak_bytes / gpu.total_bytes) if gpu.total_bytes else "-"
        peak, average, mode = (value / MIB for value in (gpu.peak_bytes, gpu.average_bytes, gpu.mode_bytes))
        held = f"{gpu.samples:,} of {gpu.samples + gpu.outside:,}"
        rows.append([f"GPU {gpu.name}", gpu.model, f"{peak:,.0f}", share, f"{average:,.2f}", f"{mode:,.0f}", held])
    spacing = max((gpu.interval_s for gpu in found.gpus if gpu.interval_s), default=None)
    every = f"sampled every {seconds(spacing)}" if spacing else "samples without times"
    notes = [f"{every}: a peak between two samples is missed; torch.cuda.max_memory_allocated misses none", _SMI]
    if found.start or found.stop:
        notes.insert(0, f"only samples from {found.start or 'the beginning'} to {found.stop or 'the end'}")
    else:
        notes.insert(0, "no window given: the average includes start-up and idle time")
    if found.unread:
        notes.append(f"{found.unread:,} lines without memory left out (cut short, or [N/A])")
    return Table(
        f"GPU memory, {found.log} (MiB)",
        ["", "", "peak", "of total", "average", "mode", "samples"],
        rows,
        notes,
        left=2,
    )


def host_memory(row: Memory, most: MaxRss) -> tuple[dict[str, Any], Facts]:
    """What this process and its children held on the host: samples, and what the kernel kept."""
    peak, average, mode = (quantity(value, BINARY) for value in (row.peak_bytes, row.average_bytes, row.mode_bytes))
    every = f", every {seconds(row.interval_s)}" if row.interval_s else ""
    facts = [
        Fact(
            "with children", [f"peak {peak}, average {average}, mode {mode} ({row.samples:,} samples{every})"], "head"
        ),
        Fact("this process", [f"at most {quantity(most.own_bytes, BINARY)}, by the kernel's count"]),
    ]
    if most.largest_child_bytes:
        facts.append(
            Fact("largest child", [f"at most {quantity(most.largest_child_bytes, BINARY)}, of those that have ended"])
        )
    return _plain(row) | most._asdict(), Facts("host memory (RSS; shared pages count in each process)", facts)
