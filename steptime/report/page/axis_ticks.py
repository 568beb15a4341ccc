"""Round positions for the labels of an axis: multiples of 1, 2 or 5 times a power of ten."""

from __future__ import annotations

from math import ceil, floor, log10

from steptime.report.format import TIME, unit_for


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers from `low` to `high`, at equal distances.

    >>> round_ticks(0.0, 83.1), round_ticks(0.5, 1.02, 4)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.6, 0.8, 1.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1.0, 2.0, 5.0, 10.0) if size * power >= 0.999 * rough)
    first, last = ceil(low / step - 1e-6), floor(high / step + 1e-6)
    return [float(f"{n * step:.9g}") for n in range(first, last + 1)]


def time_ticks(low_s: float, high_s: float, most: int = 6) -> list[tuple[float, str]]:
    """Round seconds with their labels, all in one unit.

    >>> time_ticks(0.0, 0.0042, 3)
    [(0.0, '0'), (0.002, '2 ms'), (0.004, '4 ms')]
    """
    unit = unit_for(high_s, TIME)
    ticks = round_ticks(low_s / unit.size, high_s / unit.size, most)
    return [(tick * unit.size, f"{tick:g} {unit.name}" if tick else "0") for tick in ticks]
