"""Marks of time in a job's log, and how long each phase of its start took.

All of it is wall clock, which is the only one that processes and hosts share; no figure here is a difference to another clock.
Stamps are in UTC: the job script and a container inside it may live in different zones.
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
"""The variable in which a job script leaves when it began: seconds since 1970, or YYYY-MM-DD-HHMMSS in UTC."""
PROC_STAT = Path("/proc/self/stat")
_STAMP = "%Y-%m-%d-%H%M%S"


def job_started(at_s: float | None = None, host: str | None = None) -> str:
    """The line that a job script begins with.

    >>> job_started(0, "node1")
    'Job started at: 1970-01-01-000000 on node1'

    Args:
        at_s: seconds since 1970; now by default.
        host: this one by default.
    """
    return f"Job started at: {_at(at_s):{_STAMP}} on {host or socket.gethostname()}"


def step_line(step: int, figures: Mapping[str, float | str], at_s: float | None = None) -> str:
    """The line of one training step, stamped when it was done; numbers have six significant digits.

    >>> step_line(0, {"loss": 2.5, "step_s": 0.25}, 0)
    '1970-01-01 00:00:00 step=0, loss=2.5, step_s=0.25'

    Args:
        step: from 0.
        figures: by name.
        at_s: seconds since 1970; now by default.
    """
    told = [f"{name}={value if isinstance(value, str) else f'{value:.6g}'}" for name, value in figures.items()]
    return f"{_at(at_s):%Y-%m-%d %H:%M:%S} " + ", ".join([f"step={step}", *told])


def _at(at_s: float | None) -> datetime:
    return datetime.fromtimestamp(time.time() if at_s is None else at_s, UTC)


class Phases:
    """A stopwatch of phases that follow one another: launcher, imports, init, build, first_step, steady.

    The launcher's phase is from the job's start to this process's; it is None where the job script left no stamp. The next
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

    def end(self, name: str, count: int = 1) -> float:
        """The phase ends now, and the next begins.

        Args:
            name: of the phase that ends.
            count: how many repetitions it was (steady steps).

        Returns:
            Seconds of one repetition.
        """
        now = self._now()
        took = (now - self._last) / count
        self.seconds[name] = took
        self._last = now
        return took

    def skip(self) -> None:
        """What went on since the last phase belongs to none."""
        self._last = self._now()

    @property
    def lines(self) -> list[str]:
        """As a log shows them, and as `3dtrn bench startup` reads them: "phase imports 0.812 s"."""
        return [f"phase {name} {took:.6g} s" for name, took in self.seconds.items() if took is not None]

    def until(self, name: str) -> float:
        """Seconds from the job's start (the process's, if that is unknown) to the end of a phase.

        Raises:
            KeyError: it has not ended.
        """
        names = list(self.seconds)
        if name not in names:
            raise KeyError(name)
        return sum(self.seconds[each] or 0.0 for each in names[: names.index(name) + 1])


def job_start_s(env: Mapping[str, str] = os.environ) -> float | None:
    """When the job script says it began [s since 1970]; None if it does not.

    Raises:
        ConfigError: it cannot be read.
    """
    text = env.get(JOB_STARTED, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.strptime(text, _STAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(f"{JOB_STARTED}: expected seconds or YYYY-MM-DD-HHMMSS (got {text[:40]!r})") from None


def process_start_s() -> float:
    """When this process began [s since 1970].

    Source: proc(5), /proc/PID/stat field 22, clock ticks since boot; psutil where there is no /proc.
    """
    try:
        fields = PROC_STAT.read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        import psutil

        return float(psutil.Process().create_time())
    return time.time() - age
