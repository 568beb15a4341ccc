"""Memory that this process and its children hold on the host (RSS), sampled while something runs."""

from __future__ import annotations

import sys
from datetime import datetime
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, NamedTuple, Self

import psutil

from steptime.bench.samples import Memory, Tally

if TYPE_CHECKING:
    from types import TracebackType


class MaxRss(NamedTuple):
    """What the kernel kept: not sampled, so no peak is missed; its counters lag by some pages a thread."""

    own_bytes: int
    """The most that this process has ever held."""
    largest_child_bytes: int
    """The most that one of its ended and waited-for children, or of theirs, has held; 0 before the first has ended."""


def max_rss() -> MaxRss:
    """High-water marks of resident memory since the process began (getrusage: KiB on Linux, bytes on macOS); 0 on Windows."""
    try:
        import resource
    except ImportError:
        return MaxRss(0, 0)

    unit = 1 if sys.platform == "darwin" else 1024
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return MaxRss(own * unit, children * unit)


def rss_bytes() -> int:
    """Resident memory of this process and all its descendants, now. Pages that several of them share count in each."""
    process = psutil.Process()
    total = int(process.memory_info().rss)
    for child in process.children(recursive=True):
        try:
            total += int(child.memory_info().rss)
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return total


class Sampler:
    """Samples `rss_bytes` every `interval_s` in a thread, at entry and at exit; a peak between two samples is missed.

    >>> with Sampler(interval_s=0.5) as sampler:
    ...     work = bytearray(1000)
    >>> sampler.row().samples >= 2
    True
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        """`interval_s`: seconds between samples. Each looks at all processes of the host for children: 0.1 ms per process."""
        self.interval_s = interval_s
        self._tally = Tally("host")
        self._lock = Lock()
        self._stop = Event()
        self._thread = Thread(target=self._run, name="host-memory", daemon=True)

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def sample(self) -> int:
        """Take one more sample, now; its bytes."""
        used = rss_bytes()
        with self._lock:
            self._tally.add(used, datetime.now().astimezone().replace(tzinfo=None))
        return used

    def row(self) -> Memory:
        """Peak, average and mode so far; `total_bytes` is what the host has.

        Raises:
            ValueError: no sample was taken.
        """
        with self._lock:
            self._tally.total_bytes = float(psutil.virtual_memory().total)
            return self._tally.row()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.sample()
