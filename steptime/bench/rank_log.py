"""Output of a run: the root's on standard error and in a log file; from other ranks only failures, in both."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import count
from pathlib import Path
from textwrap import indent
from time import perf_counter
from typing import TextIO

from steptime.base.config import ConfigError
from steptime.base.streams import abandon_unless_writable

LOG = logging.getLogger("steptime.bench")
"""info: on standard error and in the log file; debug: in the log file only."""
LOG.propagate = False
OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class RankFormatter(logging.Formatter):
    """Messages unchanged; on ranks other than 0 every line begins with "[rank 1] "."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.prefix = f"[rank {rank}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of one message, including its traceback."""
        return indent(super().format(record), self.prefix, lambda _: True)


def guarded(run: Callable[[], int | None], rank: int = 0, path: Path | None = None) -> int:
    """Run the work of one rank and return the exit code of its process.

    That is what `run` returned; 2 after one line per problem for bad input; 1 after a traceback for any other failure; 130 if
    interrupted. Ranks other than 0 print nothing. `path` is the log, one for all ranks, appended to; a rank that a signal ends
    (SIGTERM from its launcher, a crash in C) leaves its stack there.
    """
    with ExitStack() as stack:
        stack.callback(abandon_unless_writable, sys.stderr)
        stack.enter_context(_handler(sys.stderr, rank, logging.INFO))
        try:
            if path is not None:
                file = stack.enter_context(_open(path))
                stack.enter_context(_handler(file, rank, logging.DEBUG))
                stack.enter_context(_last_words(file))
            if rank > 0:
                stack.enter_context(redirect_stdout(None))
            return run() or OK
        except ConfigError as error:
            LOG.error("\n".join(error.problems))  # noqa: TRY400  bad input, no failure of ours
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            LOG.exception("the benchmark failed")
            return FAILED


@contextmanager
def _handler(stream: TextIO, rank: int, level: int) -> Iterator[None]:
    """Send this package's messages from a level on, and warnings, to a stream too; on ranks other than 0 only errors."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RankFormatter(rank))
    handler.setLevel(logging.ERROR if rank else level)
    loggers = LOG, logging.getLogger("py.warnings")
    for logger in loggers:
        logger.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    logging.captureWarnings(capture=True)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        for logger in loggers:
            logger.removeHandler(handler)


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", errors="replace", buffering=1)
    except OSError as error:
        raise ConfigError(f"{path}: the log cannot be written ({error.strerror}); use another folder") from None


@contextmanager
def same_problems(rank: int) -> Iterator[None]:
    """Work in which bad input is bad on every rank (reading the config): only the root reports it; all exit with 2."""
    try:
        yield
    except ConfigError:
        if rank > 0:
            raise SystemExit(BAD_INPUT) from None
        raise


@contextmanager
def _last_words(log: TextIO) -> Iterator[None]:
    """The stack of a process that a signal ends, in the log: written in C, so also while it waits in a collective."""
    with ExitStack() as stack:
        if not faulthandler.is_enabled():
            faulthandler.enable(log)
            stack.callback(faulthandler.disable)
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGTERM, log, all_threads=False, chain=True)
            stack.callback(faulthandler.unregister, signal.SIGTERM)
        yield


def progress(total: int, label: str) -> Callable[[], None]:
    """A function to call after each of `total` pieces of work: it reports how many are done, and the time so far."""
    start, done = perf_counter(), count(1)
    return lambda: LOG.info("%s %d/%d, %.0f s", label, next(done), total, perf_counter() - start)
