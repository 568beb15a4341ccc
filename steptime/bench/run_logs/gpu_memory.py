"""Logs of GPU memory written by nvidia-smi, summarized by GPU; optionally only between a run's first and last step.

The input is the output of `nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total --format=csv[,noheader][,nounits]
-l 5`, columns in any order. nvidia-smi counts all that the device holds: contexts, communicators and what the allocator
has reserved, of all processes. Tensors are less (torch.cuda.max_memory_allocated), and a peak between two samples is missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import chain, pairwise
from os import SEEK_END
from pathlib import Path
from typing import NamedTuple, NoReturn

from steptime.base.config import ConfigError
from steptime.bench.run_logs.samples import MIB, MemoryUse, Tally
from steptime.bench.run_logs.stamps import dated, following, nearest, of_line, read_lines
from steptime.bench.run_logs.startup import step_of

QUERY = ("timestamp", "index", "name", "memory.used", "memory.total")
"""Columns of a log without a header."""
_DEVICE = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
"""Columns that identify a GPU, best first."""
_UNITS = {"b": 1.0, "kib": 2.0**10, "mib": MIB, "gib": 2.0**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B)?", re.IGNORECASE)
_HEADER = re.compile(r"([\w.]+)\s*(?:\[(\w+)\])?")


class GpuMemoryLog(NamedTuple):
    """The summary of one log."""

    log: str
    gpus: list[MemoryUse]
    unread: int
    """Truncated lines, or lines without a memory value ([N/A])."""
    start: datetime | None
    """The window in time."""
    stop: datetime | None


class _Sample(NamedTuple):
    device: str
    model: str
    used_bytes: float
    total_bytes: float | None
    when: datetime | None


def summarize(path: str, start: datetime | None = None, stop: datetime | None = None) -> GpuMemoryLog:
    """Peak, average and mode of each GPU of one log; of samples from `start` to `stop`, both included, where given.

    Raises:
        ConfigError: the file cannot be read, is not a log of GPU memory, or has no sample in the window.
    """
    tallies: dict[str, Tally] = {}
    unread = 0
    for sample in _samples(path):
        if sample is None:
            unread += 1
            continue
        tally = tallies.setdefault(sample.device, Tally(sample.device, sample.model))
        tally.total_bytes = sample.total_bytes or tally.total_bytes
        if start or stop:
            when = sample.when or _no_time(path)
            if (start and when < start) or (stop and when > stop):
                tally.outside += 1
                continue
        tally.add(sample.used_bytes, sample.when)
    gpus = [tally.row() for _, tally in sorted(tallies.items(), key=_by_index) if tally.samples]
    if not gpus and tallies:
        bounds = f"{start or 'the beginning'} to {stop or 'the end'}"
        raise ConfigError(f"{path}: no sample in the window {bounds}; first sample: {first_sample(path)}")
    if not gpus:
        raise ConfigError(f"{path}: no samples of memory.used; expected columns {','.join(QUERY)}")
    return GpuMemoryLog(path, gpus, unread, start, stop)


def first_sample(path: str) -> datetime:
    """Time of a log's first sample.

    Raises:
        ConfigError: the file cannot be read, or no sample has a time stamp.
    """
    return next((sample.when for sample in _samples(path) if sample and sample.when), None) or _no_time(path)


def step_window(path: str, near: datetime) -> tuple[datetime, datetime]:
    """From the first to the last step of a training log: stamps of rank 0's lines with `step=N`.

    A step's line is printed when the step is done. Where lines have only the time of day, the first is the one nearest to
    `near` (the first sample, say), and each later one nearest to the one before it.

    Raises:
        ConfigError: the log cannot be read, or fewer than two of its steps have a stamp.
    """
    stamps = 0
    first = last = near
    for line in read_lines(path):
        step = step_of(line)
        stamp = of_line(line, step.start()) if step else None
        if stamp is not None:
            last = nearest(stamp, last)
            first = first if stamps else last
            stamps += 1
    if stamps < 2:
        raise ConfigError(f"{path}: fewer than two lines with step=N and a time stamp; give the window's times instead")
    return first, last


def given_window(start: str | None, stop: str | None, near: datetime) -> tuple[datetime | None, datetime | None]:
    """A window from text: 2023-10-05 19:12:15, or 19:12:15: the nearest to `near` for the start, the next one for the stop.

    Raises:
        ConfigError: one line per text that is no time.
    """
    stamps = {
        flag: (text, dated(text) or of_line(text))
        for flag, text in (("--from", start), ("--to", stop))
        if text is not None
    }
    problems = [
        f"{flag}: expected a time like 2023-10-05 19:12:15 or 19:12:15 (got {text!r})"
        for flag, (text, stamp) in stamps.items()
        if stamp is None
    ]
    if problems:
        raise ConfigError(problems)
    opening, closing = (stamps.get(flag, ("", None))[1] for flag in ("--from", "--to"))
    begin = None if opening is None else nearest(opening, near)
    if closing is None:
        return begin, None
    end = following(closing, begin or near)
    if begin and end <= begin:
        raise ConfigError(f"--to {stop}: not after --from {start}")
    return begin, end


def _no_time(path: str) -> NoReturn:
    raise ConfigError(f"{path}: a window needs time stamps; add timestamp to the query")


def _by_index(item: tuple[str, Tally]) -> tuple[bool, int, str]:
    """Sort key: indices as numbers, identifiers after them."""
    name = item[0]
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)


def _samples(path: str) -> Iterator[_Sample | None]:
    """Each sample; None for a line that states no memory.

    Raises:
        ConfigError: no column identifies the GPU of a sample.
    """
    columns = {name: i for i, name in enumerate(QUERY)}
    unit = "mib"
    for line, after in pairwise(chain(read_lines(path), [None])):
        cells = [cell.strip() for cell in str(line).split(",")]
        names = [found for cell in cells if (found := _HEADER.fullmatch(cell))]
        if any(found[1] == "memory.used" for found in names):  # repeated headers occur where logs were joined
            columns = {found[1]: i for i, found in enumerate(names)}
            unit = next((found[2] or "mib").lower() for found in names if found[1] == "memory.used")
            if not columns.keys() & set(_DEVICE):
                raise ConfigError(f"{path}: no column identifies the GPU; add index to the query")
            continue
        if after is None and not cells[-1].endswith("B") and not _complete(path):
            cells[-1] = ""  # 26532 may have been cut off to 265
        yield _sample(cells, columns, unit)


def _sample(cells: list[str], columns: dict[str, int], unit: str) -> _Sample | None:
    """One line's cells; None where the line is truncated, or a needed cell is [N/A]."""
    if len(cells) != len(columns):
        return None
    named = {name: cells[i] for name, i in columns.items()}
    device = next(named[name] for name in _DEVICE if name in named)
    used = _bytes(named["memory.used"], unit)
    if used is None or not device:
        return None
    when = dated(named.get("timestamp", ""))
    return _Sample(device, named.get("name", ""), used, _bytes(named.get("memory.total", ""), unit), when)


def _bytes(cell: str, unit: str) -> float | None:
    """An amount in its own unit, else in that of the column."""
    found = _AMOUNT.fullmatch(cell)
    size = _UNITS.get((found[2] or unit).lower()) if found else None
    return float(found[1]) * size if found and size else None


def _complete(path: str) -> bool:
    """Whether the last line of a file is complete."""
    if not Path(path).is_file():  # a pipe
        return True
    with open(path, "rb") as file:  # noqa: PTH123
        file.seek(-1, SEEK_END)
        return file.read(1) in b"\r\n"
