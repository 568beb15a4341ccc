"""Where measured runs lie, prepared for distances from many places: what runs share is summed once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import log2
from operator import add, itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

Item = TypeVar("Item")
Pick: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


def pick(places: Sequence[int]) -> Pick:
    """A function from a sequence to its values at some places.

    >>> pick([2, 0])("abc"), pick([1])("abc")
    (('c', 'a'), ('b',))
    """
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[place] for place in places])


def numbered(items: Iterable[Item]) -> tuple[list[int], list[Item]]:
    """The number of each item among the different ones, and these.

    >>> numbered("abcab")
    ([0, 1, 2, 0, 1], ['a', 'b', 'c'])
    """
    every = [*items]
    number = dict(zip(dict.fromkeys(every), count(), strict=False))
    return list(map(number.__getitem__, every)), [*number]


class Branches(NamedTuple):
    """The values on one axis, after those on the axes before it."""

    values: list[float]
    """Each different value, in units of distance."""
    before: Pick
    """Of each branch the sum of the axes before."""
    here: Pick
    """Of each branch the gap on this axis."""


class Sites:
    """The kind and the values of every run."""

    def __init__(
        self,
        kinds: Sequence[int],
        number: Sequence[int],
        places: Sequence[Sequence[float]],
        per_doubling: Sequence[float],
    ) -> None:
        """`kinds`, `number`: of every run the number of its kind and of its place; `places`: their values on every axis."""
        self.kinds = pick(kinds)
        branch = [0] * len(places)
        self.axes: list[Branches] = []
        for per, column in zip(per_doubling, zip(*places, strict=True), strict=True):
            branch, pairs = numbered(zip(branch, column, strict=True))
            here, values = numbered([value for _, value in pairs])
            before = pick([parent for parent, _ in pairs])
            self.axes.append(Branches([per * log2(value) for value in values], before, pick(here)))
        self.branches = pick([branch[place] for place in number])

    def distances(self, steps: Sequence[float], at: Sequence[float]) -> list[float]:
        """Distance of every run from a place: the step of its kind and the gaps on the axes, summed in order.

        `at`: values of the place, in units of distance.

        >>> Sites([0, 1], [0, 1], [(2.0, 8.0), (2.0, 4.0)], (1.0, 0.5)).distances([0.0, 3.0], [0.0, 1.5])
        [1.0, 4.5]
        """
        sums: Sequence[float] = (0.0,)
        for own, axis in zip(at, self.axes, strict=True):
            gaps = [abs(own - value) for value in axis.values]
            sums = tuple(map(add, axis.before(sums), axis.here(gaps)))
        return list(map(add, self.kinds(steps), self.branches(sums)))
