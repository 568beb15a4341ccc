"""Numbers as people read them: three or four digits, a scaled unit, thousands separated.

Everything below takes SI floats (bytes, seconds, FLOP/s) and gives text. GB is 1e9 and GiB 2**30, never mixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GIB = 2.0**30


class Unit(NamedTuple):
    """A unit for printing: `value / size` is followed by `name`."""

    name: str
    size: float


TIME = (Unit("ns", 1e-9), Unit("us", 1e-6), Unit("ms", 1e-3), Unit("s", 1.0))
BINARY = (Unit("B", 1.0), Unit("KiB", 2.0**10), Unit("MiB", 2.0**20), Unit("GiB", GIB), Unit("TiB", 2.0**40))
DECIMAL = (Unit("B", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
SI = tuple(Unit(prefix, 1e3**power) for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E", "Z", "Y")))
COUNT = (Unit("", 1.0), Unit("k", 1e3), Unit("M", 1e6), Unit("B", 1e9), Unit("T", 1e12))
LONG_TIME = (*TIME, Unit("min", 60.0), Unit("h", 3600.0), Unit("days", 86400.0))


def unit_for(value: float, units: tuple[Unit, ...]) -> Unit:
    """The largest unit that `value` reaches, else the smallest one.

    >>> unit_for(0.0042, TIME).name
    'ms'
    """
    # 0.9995 would be printed as 1.00 (or 1,000) of the next unit, so it already takes that one.
    return next((unit for unit in reversed(units) if abs(value) >= 0.9995 * unit.size), units[0])


def digits_after_point(value: float, digits: int = 3) -> int:
    """Decimals that show `value` with that many significant digits (none from 10**(digits-1) on).

    >>> [digits_after_point(x) for x in (0.5, 5.0, 50.0, 500.0)]
    [2, 2, 1, 0]
    """
    decimals = digits - 1
    limit = 10.0
    while decimals > 0 and abs(value) >= limit - 0.5 * 10.0**-decimals:
        decimals -= 1
        limit *= 10.0
    return decimals


def number(value: float, digits: int = 3) -> str:
    """A number; zero is "0", almost zero "<0.01", ten million and more have an exponent.

    >>> number(1234.5), number(12.345), number(0.0), number(0.001), number(3.4e8)
    ('1,234', '12.3', '0', '<0.01', '3.40e8')
    """
    if value == 0:
        return "0"
    if abs(value) >= 1e7:
        return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")
    floor = 10.0 ** (1 - digits)
    return f"{value:,.{digits_after_point(value, digits)}f}" if abs(value) >= floor / 2 else f"<{floor:g}"


def quantity(value: float, units: tuple[Unit, ...], suffix: str = "", digits: int = 3) -> str:
    """A number in a suitable unit.

    >>> quantity(989e12, SI, "FLOP/s"), quantity(70.55e9, COUNT, digits=3), quantity(2.63e-4, TIME)
    ('989 TFLOP/s', '70.5 B', '263 us')
    """
    unit = unit_for(value, units)
    return f"{number(value / unit.size, digits)} {unit.name}{suffix}".rstrip()


def seconds(value: float) -> str:
    """Seconds up to a thousand, then minutes, hours, days.

    >>> seconds(17.42), seconds(0.00123), seconds(7200.0)
    ('17.42 s', '1.230 ms', '2.000 h')
    """
    if value == 0:
        return "0 s"
    return quantity(value, TIME if value < 1000.0 else LONG_TIME, digits=4)


def gib(value: float) -> str:
    """Bytes in GiB.

    >>> gib(80 * 2.0**30)
    '80.0'
    """
    return number(value / GIB)


def in_gib(value: float, *, signed: bool = False) -> str:
    """Bytes in GiB with three decimals, with six or nine where these would all be zero; less than half a byte is 0.

    >>> [in_gib(x * 2.0**30) for x in (41.6, 0.0005, 0.000031, 0.0)], in_gib(-2.0**20, signed=True)
    (['41.600', '0.001', '0.000031', '0'], '-0.001')
    """
    digits = next((n for n in (3, 6) if abs(value) / GIB >= 0.5 * 10.0**-n), 9)
    return f"{value / GIB:{'+' if signed else ''}.{digits}f}" if abs(value) >= 0.5 else "0"


def bytes_in(nbytes: float, unit: Unit) -> str:
    """Bytes in a unit with two decimals, whole numbers without.

    >>> bytes_in(1536, BINARY[1]), bytes_in(1536, BINARY[0])
    ('1.50', '1,536')
    """
    return f"{nbytes:,.0f}" if unit.size == 1.0 else f"{nbytes / unit.size:,.2f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share of one, in percent.

    >>> percent(0.4187), percent(0.4187, signed=True), percent(None)
    ('41.9 %', '+41.9 %', '-')
    """
    return "-" if share is None else f"{100.0 * share:{'+' if signed else ''},.1f} %"


def whole(value: float) -> str:
    """A count, with its fraction only where it has one.

    >>> whole(2048.0), whole(2.5)
    ('2,048', '2.5')
    """
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}".rstrip("0").rstrip(".")


def column(values: Iterable[float], size: float = 1.0, digits: int = 3) -> list[str]:
    """Values of one column in one unit and with equal decimals, so that their decimal points align.

    >>> column([10.31, 0.98, 0.0])
    ['10.3', '1.0', '0']
    """
    scaled = [value / size for value in values]
    decimals = digits_after_point(max((abs(value) for value in scaled), default=0.0), digits)
    return [f"{value:,.{decimals}f}" if value else "0" for value in scaled]
