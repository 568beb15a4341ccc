"""One formula for a number and for a numpy column.

Cost formulas are written with plain operators and the functions here. An operand is a Python number or a float64 numpy array;
numpy itself is imported only when an array turns up, so a single run never loads it.

Which ops a model has is no formula but a choice: with one tensor-parallel rank there is no collective. `same` makes the choice
for all rows of a column at once and refuses where they differ; `alike` takes such a column apart first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil as _ceil
from math import sqrt as _sqrt
from typing import Any, TypeAlias, TypeVar

Num: TypeAlias = Any
"""A Python int or float, or a float64 numpy array: one value, or one per candidate layout."""


T = TypeVar("T")

PLAIN = (float, int, bool)
"""Exact types of plain numbers, tried first: a single run asks a few thousand times."""


def is_column(x: Num) -> bool:
    """Whether `x` is a numpy array (tested without importing numpy)."""
    return type(x) not in PLAIN and hasattr(x, "__array_ufunc__")


def maximum(a: Num, b: Num) -> Num:
    """The larger of the two, element by element for columns.

    >>> maximum(2.0, 3.0)
    3.0
    """
    if is_column(a) or is_column(b):
        import numpy as np

        return np.maximum(a, b)
    return max(a, b)


def minimum(a: Num, b: Num) -> Num:
    """The smaller of the two, element by element for columns.

    >>> minimum(2.0, 3.0)
    2.0
    """
    if is_column(a) or is_column(b):
        import numpy as np

        return np.minimum(a, b)
    return min(a, b)


def where(condition: Num, a: Num, b: Num) -> Num:
    """`a` where the condition holds, else `b`; both are evaluated.

    >>> where(1 > 0, "yes", "no")
    'yes'
    """
    if is_column(condition):
        import numpy as np

        return np.where(condition, a, b)
    return a if condition else b


def ceil(x: Num) -> Num:
    """The smallest whole number not below `x`.

    >>> ceil(2.1)
    3
    """
    if is_column(x):
        import numpy as np

        return np.ceil(x)
    return _ceil(x)


def sqrt(x: Num) -> Num:
    """The square root: correctly rounded by IEEE 754 in both Python and numpy, so a column equals its rows.

    >>> sqrt(9.0)
    3.0
    """
    if is_column(x):
        import numpy as np

        return np.sqrt(x)
    return _sqrt(x)


class RowsDifferError(ValueError):
    """A choice that rows of a column make differently; `meets` says which meet its condition."""

    def __init__(self, meets: Num) -> None:
        """Keep the condition."""
        super().__init__("rows of a column want different ops: `alike` takes them apart")
        self.meets = meets


def same(condition: Num) -> bool:
    """Whether a condition holds, for all rows of a column alike.

    >>> same(3 > 2)
    True

    Raises:
        RowsDifferError: it holds for some rows only.
    """
    if not is_column(condition):
        return bool(condition)
    if condition.all() == condition.any():
        return bool(condition.all())
    raise RowsDifferError(condition)


def alike(formula: Callable[..., T], *columns: Num) -> list[tuple[Num, T]]:
    """`formula` of columns, once for all rows that make the same choices: (numbers of the rows, what it gives for them).

    >>> import numpy as np
    >>> [(rows.tolist(), tp.tolist()) for rows, tp in alike(lambda tp: tp if same(tp > 1) else -tp, np.array([1, 2, 4]))]
    [([1, 2], [2, 4]), ([0], [-1])]
    """
    import numpy as np

    def parted(rows: Num) -> list[tuple[Num, T]]:
        try:
            return [(rows, formula(*(column[rows] for column in columns)))]
        except RowsDifferError as differ:
            return [*parted(rows[differ.meets]), *parted(rows[~differ.meets])]

    return parted(np.arange(len(columns[0])))
