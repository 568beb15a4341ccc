"""How much a function does, counted instead of timed: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Made = TypeVar("Made")


def python_calls(function: Callable[[], Made]) -> tuple[Made, int]:
    """What the function returns, and how many calls of Python functions that takes.

    Seconds are measured by `benchmarks/estimate.py`.
    """
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        made = function()
    finally:
        sys.setprofile(None)
    return made, counted
