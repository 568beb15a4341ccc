"""`--watch`: the report again whenever the plan's file changes."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from steptime.base.config import ConfigError
from steptime.commands.console import Printer, tell

PAUSE_S = 0.2
"""Interval between checks of the file [s]."""
CLEAR = "\x1b[2J\x1b[H"


def watch(options: Namespace, out: Printer, report: Callable[[Namespace, Printer], int]) -> int:
    """Report, and again at every change, until interrupted; problems of the plan are shown, and the next change awaited.

    Raises:
        ConfigError: the plan is in no file.
    """
    if options.config in {None, "-"}:
        raise ConfigError("--watch: needs the file of a plan; standard input and options do not change")
    seen: tuple[int, int] | None = (-1, -1)
    code = 0
    try:
        while True:
            now = _stamp(options.config)
            if now != seen:
                seen = now
                code = _once(options, out, report)
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        return code


def _once(options: Namespace, out: Printer, report: Callable[[Namespace, Printer], int]) -> int:
    """One report, on a cleared screen where the output is a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(CLEAR)
    try:
        return report(options, out)
    except ConfigError as error:
        tell(error.problems)
        return 2


def _stamp(path: str) -> tuple[int, int] | None:
    """A value that changes with the file; None where it does not exist."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size
