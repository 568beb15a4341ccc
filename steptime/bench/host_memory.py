"""Memory that this process and its children hold on the host (RSS), sampled while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from threading import Event, Thread

import psutil

from steptime.bench.run_logs.samples import Tally


def max_rss_bytes() -> int:
    """The largest memory that this process has ever held; not sampled, so no peak is missed. 0 on Windows.

    Source: getrusage(2), ru_maxrss: KiB on Linux, bytes on macOS.
    """
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def rss_bytes() -> int:
    """Resident memory of this process and all its descendants, now. Shared pages count in each process."""
    process = psutil.Process()
    total = int(process.memory_info().rss)
    for child in process.children(recursive=True):
        try:
            total += int(child.memory_info().rss)
        except psutil.Error:  # it has just ended, or belongs to another user
            continue
    return total


@contextmanager
def sampled(interval_s: float = 1.0) -> Iterator[Tally]:
    """Samples of `rss_bytes` every `interval_s` in a thread, at entry and at exit; a peak between two samples is missed.

    Each looks at all processes of the host for children: 0.1 ms per process. The tally is complete once the block has ended.

    >>> with sampled() as tally:
    ...     work = bytearray(1000)
    >>> tally.row().samples
    2
    """
    tally, ended = Tally("host"), Event()
    tally.total_bytes = float(psutil.virtual_memory().total)

    def sample() -> None:
        tally.add(rss_bytes(), datetime.now().astimezone().replace(tzinfo=None))

    def run() -> None:
        while not ended.wait(interval_s):
            sample()

    thread = Thread(target=run, name="host-memory", daemon=True)
    sample()
    thread.start()
    try:
        yield tally
    finally:
        ended.set()
        thread.join()
        sample()
