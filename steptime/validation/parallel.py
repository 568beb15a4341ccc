"""Judges many rows on all cores, where a fork is safe: `3dtrn validate` as its own process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from steptime.validation.judgement import Judgement, judge_all
from steptime.validation.measurements import MeasuredRow

FEWEST = 500
"""Number of rows below which processes cost more than they save."""
PIECES = 8
"""Pieces per core: rows differ in cost; neighbors stay together, since they often share a config."""


def judge_rows(rows: Sequence[MeasuredRow], *, known_release: bool = True) -> list[Judgement]:
    """`judge_all`, in several processes where that is safe and faster."""
    cores = len(os.sched_getaffinity(0)) if forks() else 1
    if cores == 1 or len(rows) < FEWEST:
        return judge_all(rows, known_release=known_release)
    size = -(-len(rows) // (PIECES * cores))
    pieces = [rows[at : at + size] for at in range(0, len(rows), size)]
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        return [j for piece in pool.map(partial(judge_all, known_release=known_release), pieces) for j in piece]


def forks() -> bool:
    """Whether a fork of this process is safe: on Linux, with one thread, and no library loaded that starts threads of its own."""
    alone = threading.active_count() == 1 and not {"torch", "numpy"} & sys.modules.keys()
    return sys.platform == "linux" and alone
