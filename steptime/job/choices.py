"""Degrees that divide the sizes of a model, as the fix of a message lists them."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 1024
"""Greatest degree listed."""


def divisors(number: float) -> str:
    """The degrees that divide a number.

    >>> divisors(32)
    '1, 2, 4, 8, 16, 32'
    """
    n = int(number)
    return ", ".join(str(d) for d in range(1, min(n, MOST) + 1) if n % d == 0)


def tp_degrees(sizes: Iterable[float], n_kv_heads: float, *, replicated: bool) -> str:
    """The powers of two that divide all of `sizes` and the key-value heads, or are a multiple of these where they are replicated.

    >>> tp_degrees([32, 14336], 8, replicated=True), tp_degrees([12], 12, replicated=False)
    ('1, 2, 4, 8, 16, 32', '1, 2, 4')
    """
    whole, kv = [int(size) for size in sizes], int(n_kv_heads)
    powers = [2**i for i in range(8) if all(size % 2**i == 0 for size in whole)]
    return ", ".join(str(tp) for tp in powers if kv % tp == 0 or (replicated and tp % kv == 0))
