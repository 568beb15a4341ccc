"""Grouping by a key, in the order in which the keys appear."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Lists of the items with an equal key; unlike `itertools.groupby`, equal ones need not be neighbours.

    >>> grouped(["tp", "pp", "dense"], len)
    {2: ['tp', 'pp'], 5: ['dense']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
