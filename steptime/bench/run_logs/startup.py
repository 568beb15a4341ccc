"""From job start to the first training step, read from existing logs: `3dtrn bench startup LOG...`.

Start-up is the time from "Job started at: ..." (the job script's first line) to the stamp of rank 0's first `step=0` line,
which trainers print when that step is done. Logs of this package's own benchmark also have `phase NAME SECONDS s` lines.

What `step=0` is: the word `step` by itself, `=`, and zero by itself (`step=0,`, `train/step=0`, `step = 0/100`). `step=01`,
`step=0.5`, `warmup_step=0`, `--step=0` are not; nor is `global_step=0`, which trainers print when they load a checkpoint or
echo their settings, before any step is done. Lines that name another rank than 0 do not count.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.base.grouping import grouped
from steptime.bench.run_logs.stamps import Stamp, dated, elapsed, in_name, of_line, read_lines

PHASES = ("launcher", "imports", "init", "build", "first_step")
"""The parts of a start-up in order; `steady`, the time of a later step, is listed as well."""

STEP = re.compile(r"(?<![\w.-])step\s*=\s*(\d+)(?!\w|[.-]\w)")
_JOB_START = re.compile(r"job started(?: at)?\s*:", re.IGNORECASE)
_RANK = re.compile(r"(?:\b|global_|local_|world_)rank[\s=:#]*(\d+)", re.IGNORECASE)
_PREFIX = re.compile(r"(?:\[default|\s*)(\d+)\]?: ")
_LAST_RANK = re.compile(r"\brank\s*:\s*\d+\s*/\s*(\d+)", re.IGNORECASE)
_WORLD = re.compile(r"(?<![A-Za-z_])world[_ ]size[\"']?\s*[=:]\s*(\d+)", re.IGNORECASE)
_WORLD_IN_NAME = re.compile(r"ngpus?[-_=]?(\d+)", re.IGNORECASE)
_MODEL = re.compile(r"\bmodel(?:_name|_size_key|_size|_key)?[\"']?\s*[=:]\s*[\"']?([A-Za-z]\w[\w./+-]*)", re.IGNORECASE)
_PHASE = re.compile(r"\bphase\s+(\w+)\s+(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*s\b")


class Startup(NamedTuple):
    """A job that reached its first step."""

    log: str
    seconds_s: float
    """From job start to the end of the first step."""
    world_size: int | None
    model: str | None
    start: datetime | None
    stop: datetime | None
    phases_s: dict[str, float]
    """Seconds by phase, as the log states them; empty for logs of other programs."""
    notes: tuple[str, ...] = ()

    @property
    def other_s(self) -> float | None:
        """Time that no phase covers: the job script before the launcher, and rounding of time stamps."""
        return self.seconds_s - sum(self.phases_s.get(name, 0.0) for name in PHASES) if self.phases_s else None


class NeverStarted(NamedTuple):
    """A log without step 0."""

    log: str
    lines: int
    """Number of lines with text."""
    start: datetime | None
    last: Stamp | None
    """The last time stamp."""
    world_size: int | None


class Unclear(NamedTuple):
    """A job that reached step 0 after an unknown time."""

    log: str
    why: str
    lines: int


class Quantiles(NamedTuple):
    """Seconds of `n` start-ups; p10 and p90 are the nearest ranks."""

    min_s: float
    p10_s: float
    median_s: float
    p90_s: float
    max_s: float
    n: int


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Quantiles of one or more start-ups.

    >>> quantiles([60.0, 90.0, 300.0])
    Quantiles(min_s=60.0, p10_s=60.0, median_s=90.0, p90_s=300.0, max_s=300.0, n=3)

    Raises:
        ValueError: no start-ups.
    """
    if not seconds:
        raise ValueError("no start-ups to summarize")
    ordered, n = sorted(seconds), len(seconds)
    p10, p90 = (ordered[-(-tenths * n // 10) - 1] for tenths in (1, 9))
    return Quantiles(ordered[0], p10, median(ordered), p90, ordered[-1], n)


def by_world_size(rows: Iterable[Startup]) -> dict[int | None, Quantiles]:
    """Quantiles of each world size, smallest first; None collects the logs that do not state theirs."""
    groups = grouped(rows, lambda row: row.world_size)
    sizes = sorted(groups, key=lambda size: size or 1 << 62)
    return {size: quantiles([row.seconds_s for row in groups[size]]) for size in sizes}


@dataclass
class _Log:
    """State of the lines read so far."""

    lines: int = 0
    starts: int = 0
    start: Stamp | None = None
    last: Stamp | None = None
    """The last stamp between the job start and step 0."""
    reached: bool = False
    step: Stamp | None = None
    world_size: int | None = None
    model: str | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """Read one more line."""
        self.lines += 1
        if not self.reached:
            self._before_step(line)
        if "phase" in line and (found := _PHASE.search(line)):
            self.phases.setdefault(found[1], float(found[2]))

    def _before_step(self, line: str) -> None:
        lower = line.lower()
        if self.world_size is None and "size" in lower and (found := _WORLD.search(line)):
            self.world_size = int(found[1])
        if self.world_size is None and "rank" in lower and (found := _LAST_RANK.search(line)):
            self.world_size = int(found[1]) + 1
        if self.model is None and "model" in lower and (found := _MODEL.search(line)):
            self.model = found[1]
        if "started" in lower and (found := _JOB_START.search(line)):
            text = line[found.end() :]
            self.start, self.last = dated(text) or of_line(text), None
            self.starts += 1
            self.phases.clear()  # of another attempt
            return
        step = first_step(line)
        stamp = of_line(line, step.start() if step else None)
        if step:
            self.reached, self.step = True, stamp
        self.last = stamp or self.last


def first_step(line: str) -> re.Match[str] | None:
    """Where a line of rank 0 says step=0."""
    found = step_of(line)
    return found if found and found[1] == "0" else None


def step_of(line: str) -> re.Match[str] | None:
    """Where a line of rank 0 says step=N; group 1 is N."""
    found = STEP.search(line) if "step" in line else None
    return found if found and not _of_another_rank(line) else None


def _of_another_rank(line: str) -> bool:
    """Whether a line names a rank other than 0: rank=3, local_rank: 3, [rank3], [default3]: (torchrun), 3: (srun -l)."""
    ranks = [found[1]] if (found := _PREFIX.match(line)) else []
    if "rank" in line.lower():
        ranks += _RANK.findall(line)
    return any(int(rank) for rank in ranks)


def read_log(path: str) -> Startup | NeverStarted | Unclear:
    """One log, line by line in bounded memory, whatever bytes it holds.

    A file name like `...-ngpu8-2023-10-05-191101.log` gives the world size and the job start where the text does not. Of
    several attempts in one log the one that reached step 0 first counts, from its own job start.

    Raises:
        ConfigError: the file cannot be read.
    """
    log = _Log()
    for line in read_lines(path):
        log.take(line)
    name = Path(path).name
    if log.world_size is None and (found := _WORLD_IN_NAME.search(name)):
        log.world_size = int(found[1])
    notes = [f"{log.starts} job starts; the last before step 0 is used"] if log.starts > 1 else []
    if log.start is None and (start := in_name(name)):
        log.start = start
        notes.append("job start from the file's name")
    if log.reached and log.step is None and log.last is not None:
        log.step = log.last
        notes.append("step 0 has no time stamp; the last one before it is used")
    return _judge(name, log, notes)


def _judge(name: str, log: _Log, notes: list[str]) -> Startup | NeverStarted | Unclear:
    """The result for the whole log."""
    start = log.start if isinstance(log.start, datetime) else None
    if log.start is not None and log.step is not None:
        seconds = elapsed(log.start, log.step)
        if seconds < 0:
            why = f"step 0 is stamped {-seconds:g} s before the job start: the clocks or time zones differ"
            return Unclear(name, why, log.lines)
        stop = start + timedelta(seconds=seconds) if start else None
        return Startup(name, seconds, log.world_size, log.model, start, stop, log.phases, tuple(notes))
    if "first_step" in log.phases:
        seconds = sum(log.phases.get(phase, 0.0) for phase in PHASES)
        notes = ["no time stamp of job start or step 0: the sum of the phases is used"]
        return Startup(name, seconds, log.world_size, log.model, start, None, log.phases, tuple(notes))
    if not log.reached:
        return NeverStarted(name, log.lines, start, log.last, log.world_size)
    missing = "a job start" if log.start is None else "a time stamp at step=0"
    return Unclear(name, f"no line states {missing}", log.lines)


def read_stamps(path: str) -> list[Startup]:
    """A CSV of start-ups: columns log (a name) and stop (a stamp); start, world_size and model, else from the name.

    Raises:
        ConfigError: the file cannot be read or has other columns; one line per row that is wrong.
    """
    rows: list[Startup] = []
    problems: list[str] = []
    try:
        table = list(csv.DictReader(read_lines(path)))
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV ({error})") from None
    if not table or not {"log", "stop"} <= table[0].keys():
        raise ConfigError(f"{path}: expected columns log,start,stop and a row for each job")
    for i, cells in enumerate(table, 1):
        try:
            rows.append(_listed({key: cells.get(key) or "" for key in ("log", "start", "stop", "world_size", "model")}))
        except ValueError as error:
            problems.append(f"{path}, row {i}: {error}")
    if problems:
        raise ConfigError(problems)
    return rows


def _listed(cells: dict[str, str]) -> Startup:
    """One row of a list.

    Raises:
        ValueError: it is no start-up; the text says what to write.
    """
    name, size = cells["log"], cells["world_size"]
    start, stop = dated(cells["start"]) if cells["start"] else in_name(name), dated(cells["stop"])
    if start is None or stop is None:
        key = "start" if start is None else "stop"
        raise ValueError(f"{key}: expected a stamp like 2023-10-05-191101 (got {cells[key]!r})")
    seconds = elapsed(start, stop)
    if seconds < 0:
        raise ValueError(f"stop: {-seconds:g} s before start (got {cells['stop']!r}, {cells['start']!r})")
    if not size and (found := _WORLD_IN_NAME.search(name)):
        size = found[1]
    if size and not size.isdecimal():
        raise ValueError(f"world_size: expected a whole number (got {size!r})")
    return Startup(name, seconds, int(size) if size else None, cells["model"] or None, start, stop, {})
