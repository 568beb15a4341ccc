"""What a run prints: on the root only, copied into a log file, with every failure in it; progress; nothing that needs torch."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol, TextIO

from steptime.base.config import ConfigError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Ranked(Protocol):
    """A `World`, or the `Launch` that is one before it is started."""

    @property
    def rank(self) -> int:
        """Among all processes."""
        ...

    @property
    def world_size(self) -> int:
        """All processes."""
        ...


# --- streams -------------------------------------------------------------------------------------------------------------


class _Tee(io.TextIOBase):
    """A stream that also writes to a log, and that goes on when its reader has left."""

    def __init__(self, stream: TextIO | None, log: TextIO | None) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if self._stream is not None:
            put(self._stream, text)
        if self._log is not None and ("\r" not in text or text.endswith("\n")):  # of a bar, only how it ended
            self._log.write(text.rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            put(self._stream, "")
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Neither is ours to close."""

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"


def put(stream: TextIO, text: str) -> None:
    """Write and flush; once the reader has left, say no more to it and do not mind."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # what is buffered would fail again when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", errors="replace", buffering=1)
    except OSError as error:
        raise ConfigError(f"{path}: the log cannot be written ({error.strerror}); name another folder") from None


@contextmanager
def tee(path: Path | None) -> Iterator[None]:
    """Append a copy of what goes to standard output and error to a log file; the streams are put back whatever happens.

    Args:
        path: the file, made with its folders; None: no copy, only the patience with readers that have left.

    Raises:
        ConfigError: it cannot be written.
    """
    with ExitStack() as stack:
        stack.enter_context(_copied(stack.enter_context(_open(path)) if path is not None else None))
        yield


@contextmanager
def _copied(log: TextIO | None) -> Iterator[None]:
    saved = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(saved[0], log), _Tee(saved[1], log)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = saved


@contextmanager
def _mute() -> Iterator[None]:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


# --- failures ------------------------------------------------------------------------------------------------------------


def guarded(run: Callable[[], int | None], world: Ranked | None, path: Path | None = None) -> int:
    """Run the work of one rank and return the exit code of its process.

    The root's output is copied to the log; of other ranks only failures are heard: their lines start with "[rank 1]", on
    standard error and in the log. A rank that a signal ends (SIGTERM from its launcher, a crash in C) leaves its stack there.

    Args:
        run: the work; returns an exit code or None.
        world: who this is; None: the only process.
        path: the log, one for all ranks; None: no log.

    Returns:
        What `run` returned; 2 after one line per problem for bad input; 1 after a traceback for any other failure; 130 if
        interrupted.
    """
    rank = world.rank if world is not None else 0
    with ExitStack() as stack:
        log = None
        try:
            log = stack.enter_context(_open(path)) if path is not None else None
            stack.enter_context(_last_words(log))
            stack.enter_context(_copied(log) if rank == 0 else _mute())
            return run() or OK
        except ConfigError as error:
            _complain("".join(f"{problem}\n" for problem in error.problems), rank, log)
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:  # noqa: BLE001  whatever it was, it is told and the exit code is not 0
            _complain(traceback.format_exc(), rank, log)
            return FAILED


@contextmanager
def alike(world: Ranked | None) -> Iterator[None]:
    """Work in which bad input is bad on every rank (reading the config): only the root tells; the others leave with 2.

    >>> with alike(launch):
    ...     job = Job.load(path)
    """
    try:
        yield
    except ConfigError:
        if world is not None and world.rank > 0:
            raise SystemExit(BAD_INPUT) from None
        raise


def _complain(text: str, rank: int, log: TextIO | None) -> None:
    """To standard error, which the root copies to the log; other ranks say who they are, and write to the log themselves."""
    if rank > 0:
        text = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
        if log is not None:
            log.write(text)
    if sys.stderr is not None:
        put(sys.stderr, text)


@contextmanager
def _last_words(log: TextIO | None) -> Iterator[None]:
    """The stack of a process that a signal ends, in the log: written in C, so also while it waits in a collective."""
    with ExitStack() as stack:
        if log is not None and not faulthandler.is_enabled():
            faulthandler.enable(log)
            stack.callback(faulthandler.disable)
        if log is not None and hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGTERM, log, all_threads=False, chain=True)
            stack.callback(faulthandler.unregister, signal.SIGTERM)
        yield


# --- progress ------------------------------------------------------------------------------------------------------------

_CELLS = 24


@contextmanager
def progress(
    total: int, label: str, *, stream: TextIO | None = None, shown: bool = True
) -> Iterator[Callable[[], None]]:
    """Count steps: a bar on a terminal, a plain line every tenth of the way elsewhere; never a colour or an escape code.

    The time left is that of the steps to come at the median of those done, the first left out: it warms up.

    >>> with progress(40, "gemm") as step:
    ...     for shape in shapes:
    ...         measure(shape)
    ...         step()

    Args:
        total: steps to come.
        label: what they do.
        stream: standard error by default.
        shown: false on ranks that stay quiet.
    """
    total = max(total, 1)
    out = stream if stream is not None else sys.stderr
    bar = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"
    stamps = [perf_counter()]
    drawn = ""

    def step() -> None:
        nonlocal drawn
        stamps.append(perf_counter())
        done = len(stamps) - 1
        if not shown or out is None:
            return
        line = _line(done, total, label, stamps, bar=bar)
        if bar:
            put(out, "\r" + line.ljust(len(drawn)))
            drawn = line
        elif done == total or 10 * done // total != 10 * (done - 1) // total:
            put(out, line + "\n")

    try:
        yield step
    finally:
        if drawn and out is not None:
            put(out, f"\r{drawn}\n")  # whole again, for a log


def _line(done: int, total: int, label: str, stamps: list[float], *, bar: bool) -> str:
    steady = [after - before for before, after in pairwise(stamps[1:])]
    filled = min(_CELLS, _CELLS * done // total)
    cells = f" [{'#' * filled}{'.' * (_CELLS - filled)}]" if bar else ""
    if done >= total:
        time = f", {_duration(stamps[-1] - stamps[0])} in all"
    else:
        time = f", {_duration(median(steady) * (total - done))} left" if steady else ""
    return f"{label}{cells} {done}/{total}{time}"


def _duration(seconds: float) -> str:
    """As a person says it: "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
