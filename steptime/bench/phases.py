"""Time stamps in a job's log, and the duration of each phase of its start.

All of it is wall clock, the only clock that processes and hosts share.
Stamps are in UTC: the job script and a container inside it may have different time zones.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from steptime.base.config import ConfigError

JOB_STARTED = "STEPTIME_JOB_STARTED"
"""The variable in which a job script leaves its start time: seconds since 1970, or YYYY-MM-DD-HHMMSS in UTC."""
PROC_STAT = Path("/proc/self/stat")
_STAMP = "%Y-%m-%d-%H%M%S"


def job_started(at_s: float) -> str:
    """The first line of a job's log, from the seconds since 1970: "Job started at: 2023-10-05-191101 on node1"."""
    return f"Job started at: {datetime.fromtimestamp(at_s, UTC):{_STAMP}} on {socket.gethostname()}"


def first_step_done(at_s: float, layout: str) -> str:
    """The line of the first training step, from when it ended: "2023-10-05 19:11:15 step=0, layout=ddp"."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} step=0, layout={layout}"


class Phases:
    """A stopwatch of phases that follow one another: launcher, imports, init, build, first_step.

    The launcher's phase is from the job's start to this process's; it is None where the job script set no start time. The next
    begins with the process.

    >>> phases = Phases()
    >>> phases.end("imports")
    """

    def __init__(self, env: Mapping[str, str] = os.environ, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._last = process_start_s()
        began = job_start_s(env)
        self.seconds: dict[str, float | None] = {"launcher": None if began is None else self._last - began}
        """By phase, in order."""

    def end(self, name: str) -> None:
        """End the phase; the next one begins."""
        now = self._now()
        self.seconds[name], self._last = now - self._last, now

    def skip(self) -> None:
        """Skip the time since the last phase."""
        self._last = self._now()

    @property
    def lines(self) -> list[str]:
        """As logged, and as read by `3dtrn bench startup`: "phase imports 0.812 s"."""
        return [f"phase {name} {took:.6g} s" for name, took in self.seconds.items() if took is not None]


def job_start_s(env: Mapping[str, str] = os.environ) -> float | None:
    """When the job script began [s since 1970]; None where it is not set.

    Raises:
        ConfigError: it cannot be read.
    """
    text = env.get(JOB_STARTED, "").strip()
    if not text:
        return None
    try:
        return float(text) if "-" not in text else datetime.strptime(text, _STAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(f"{JOB_STARTED}: expected seconds or YYYY-MM-DD-HHMMSS (got {text[:40]!r})") from None


def process_start_s() -> float:
    """When this process began [s since 1970].

    Source: proc(5), /proc/PID/stat field 22, clock ticks since boot, which psutil rounds to whole seconds; psutil where there is
    no /proc.
    """
    try:
        fields = PROC_STAT.read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        import psutil

        return float(psutil.Process().create_time())
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
