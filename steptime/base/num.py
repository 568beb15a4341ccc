"""One formula for numbers and for numpy columns.

Cost formulas are written with plain operators and the functions here. An operand is a Python number or a float64 numpy
array; numpy itself is imported only when an array turns up, so a single run never loads it.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil as _ceil
from math import lcm as _lcm
from math import sqrt as _sqrt
from typing import Any, TypeAlias

Num: TypeAlias = Any
"""A Python int or float, or a float64 numpy array: one value, or one per candidate layout."""


new_row = tuple.__new__
"""`new_row(Row, (a, b))` is the NamedTuple Row(a, b), in less than half of the time of a call: for those made by the hundred."""
PLAIN = (float, int, bool)
"""Exact types of plain numbers, tested first: one run tests a few thousand times."""
HASHED = frozenset({*PLAIN, str, type(None)})
"""Exact types of what can be a key of a cache, as columns cannot."""


def is_column(x: Num) -> bool:
    """Whether `x` is a numpy array (tested without importing numpy)."""
    return type(x) not in PLAIN and hasattr(x, "__array_ufunc__")


def maximum(a: Num, b: Num) -> Num:
    """The larger of the two, element by element for columns.

    >>> maximum(2.0, 3.0)
    3.0
    """
    if type(a) in PLAIN and type(b) in PLAIN:
        return b if b > a else a  # noqa: FURB136  (max() takes twice as long)
    import numpy as np

    return np.maximum(a, b)


def minimum(a: Num, b: Num) -> Num:
    """The smaller of the two, element by element for columns.

    >>> minimum(2.0, 3.0)
    2.0
    """
    if type(a) in PLAIN and type(b) in PLAIN:
        return b if b < a else a  # noqa: FURB136  (min() takes twice as long)
    import numpy as np

    return np.minimum(a, b)


def where(condition: Num, a: Num, b: Num) -> Num:
    """`a` where the condition holds, else `b`; both are evaluated.

    >>> where(1 > 0, "yes", "no")
    'yes'
    """
    if condition is True or condition is False or not is_column(condition):
        return a if condition else b
    import numpy as np

    return np.where(condition, a, b)


def same(condition: Num) -> bool:
    """Whether a condition holds, with one answer for all rows of a column: for conditions that decide which ops exist.

    >>> same(2 > 1)
    True

    Raises:
        ValueError: it holds for some rows only, which need other ops than the rest (`Candidates.alike` separates them).
    """
    if not is_column(condition):
        return bool(condition)
    if condition.any() != condition.all():
        raise ValueError("rows of a column need different ops")
    return bool(condition.all())


def ceil(x: Num) -> Num:
    """The smallest whole number not below `x`.

    >>> ceil(2.1)
    3
    """
    if type(x) in PLAIN:
        return _ceil(x)
    import numpy as np

    return np.ceil(x)


def lcm(a: Num, b: Num) -> Num:
    """The least common multiple of two whole numbers.

    >>> lcm(12, 128)
    384
    """
    if is_column(a) or is_column(b):
        import numpy as np

        return np.lcm(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)).astype(np.float64)
    return _lcm(int(a), int(b))


def sqrt(x: Num) -> Num:
    """The square root: correctly rounded by IEEE 754 in both Python and numpy, so a column equals its rows.

    >>> sqrt(9.0)
    3.0
    """
    if is_column(x):
        import numpy as np

        return np.sqrt(x)
    return _sqrt(x)


_POWERS = tuple(2.0**k for k in range(32))


def tree_depth(leaves: Num) -> Num:
    """Levels of a binary tree over `leaves`: the smallest d with 2^d >= leaves, from a table.

    >>> [tree_depth(n) for n in (1, 2, 3, 64, 65)]
    [0, 1, 2, 6, 7]
    """
    if is_column(leaves):
        import numpy as np

        return np.searchsorted(_POWERS, leaves)
    return bisect_left(_POWERS, leaves)
