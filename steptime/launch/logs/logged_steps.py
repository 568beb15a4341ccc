"""Logged iterations in bounded memory, each one stored once."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from steptime.launch.logs.entries import Iteration

LIMIT = 200_000
"""Most lines stored: beyond that only every second iteration is kept, then every fourth, and so on."""


class LoggedSteps:
    """Iterations by number, in arrays: a log of millions of lines stays small, and their order is irrelevant."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.stride = 1
        """Only iterations divisible by it are stored."""
        self._interval = 0
        """Iterations per line before any was dropped; 0 while none was."""
        self._number = array("q")
        self._columns = tuple(array(code) for code in "dddqd")

    def __len__(self) -> int:
        return len(self._number)

    def add(self, line: Iteration, number: int) -> None:
        """Record a line under a number."""
        if number % self.stride:
            return
        self._number.append(number)
        values = (line.step_s, line.tokens_per_s, line.tflops, line.batch, line.samples_per_s)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)  # type: ignore[arg-type]
        if len(self._number) >= self.limit:
            self._thin()

    def _thin(self) -> None:
        """Keep each iteration once; if more than half of the space is still used, only every second one."""
        kept = self._once()
        if len(kept) > self.limit // 2:
            self._interval = self._interval or _usual_gap([self._number[i] for i in kept])
            self.stride *= 2
            kept = [i for i in kept if self._number[i] % self.stride == 0]
        self._number = array("q", (self._number[i] for i in kept))
        self._columns = tuple(array(column.typecode, (column[i] for i in kept)) for column in self._columns)

    def _once(self) -> list[int]:
        """Positions in the arrays by iteration; of several lines for one iteration the fastest (a restart warms up)."""
        number, (step_s, rate, tflops, batch, samples) = self._number, self._columns

        def fastest(i: int) -> tuple[float, ...]:
            return number[i], step_s[i], -rate[i], -tflops[i], -batch[i], -samples[i]

        order = sorted(range(len(number)), key=fastest)
        return [i for n, i in enumerate(order) if n == 0 or number[order[n - 1]] != number[i]]

    @property
    def interval(self) -> int:
        """Iterations that a line covers: the most common difference between lines."""
        return self._interval or _usual_gap([self._number[i] for i in self._once()])

    def lines(self) -> list[Iteration]:
        """Every iteration once, by number; where several lines log it, with the shortest time."""
        return [self._line(i) for i in self._once()]

    def _line(self, i: int) -> Iteration:
        step_s, rate, tflops, batch, samples = (column[i] for column in self._columns)
        return Iteration("", self._number[i], step_s, rate, tflops, batch, samples_per_s=samples)


def _usual_gap(numbers: Sequence[int]) -> int:
    gaps = Counter(b - a for a, b in pairwise(numbers))
    return max(gaps, key=lambda gap: (gaps[gap], -gap)) if gaps else 1
