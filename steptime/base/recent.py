"""The last results of a computation, so that what several plans share is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The last `size` results of a computation, each with the arguments that gave it, which need an equality but no hash.

    >>> lengths = Recent(2)
    >>> [lengths.of(word, lambda word=word: len(word)) for word in ("tp", "pp", "tp")]
    [2, 2, 2]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Forget all results."""
        self._known: tuple[tuple[object, T], ...] = ()

    def of(self, arguments: object, compute: Callable[[], T]) -> T:
        """The result for these arguments, computed unless it is among the last ones."""
        for known, result in self._known:
            if known == arguments:
                return result
        result = compute()
        self._known = ((arguments, result), *self._known)[: self.size]
        return result
