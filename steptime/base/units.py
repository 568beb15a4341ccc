"""Quantities with units on input: "450 GB/s", "400 Gbit/s", "80 GiB", "3 us", "989 TFLOP/s" become SI floats.

A bare number is already SI. GB is 1e9 bytes and GiB is 2**30, never mixed; bits need the word bit, so that Gb is never ambiguous.
Inside steptime every quantity is a float in bytes, seconds, bytes/s or FLOP/s.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from steptime.base.core_schemas import BeforeValidator, Field

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 2.0 ** (10 * power) for power, prefix in enumerate("KMGTPE", start=1)}

BYTE_UNITS = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()} | {"byte": 1.0, "bytes": 1.0}
BIT_UNITS = {f"{prefix}{word}": scale / 8 for prefix, scale in (_DECIMAL | _BINARY).items() for word in ("bit", "bits")}
SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
RATE_UNITS = {f"{unit}/s": scale for unit, scale in (BYTE_UNITS | BIT_UNITS).items()}
FLOP_UNITS = {f"{prefix}{word}": scale for prefix, scale in _DECIMAL.items() for word in ("FLOP/s", "FLOPS")}

_QUANTITY = re.compile(r"\s*([-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*")
_SUFFIXED = r"([0-9][0-9,]*\.?[0-9]*)\s*([kmbgtKMBGT]?)i?"
_AMBIGUOUS = r"[kKMGTPE]i?b(?:ps|/s)?|[kKMGTPE]?i?bps"


def read_quantity(value: Any, units: dict[str, float], example: str) -> Any:
    """A number, or text of a number and one of `units`, as an SI float.

    Anything that is not text is returned unchanged for pydantic to check; a bool is not a number.

    Raises:
        ValueError: if the text is not a number with one of these units.

    >>> read_quantity("450 GB/s", RATE_UNITS, "450 GB/s")
    450000000000.0
    >>> read_quantity("400 Gbit/s", RATE_UNITS, "450 GB/s")
    50000000000.0
    """
    if isinstance(value, bool):
        raise ValueError(f"expected a number or a quantity like {example!r}")  # noqa: TRY004  pydantic reports ValueErrors
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"expected a number or a quantity like {example!r}")
    number, unit = match.groups()
    if unit and unit not in units:
        if re.fullmatch(_AMBIGUOUS, unit):
            raise ValueError(f"ambiguous unit {unit!r} (bits or bytes?): use for example Gbit/s or GB/s")
        raise ValueError(f"unknown unit {unit[:60]!r}: expected a quantity like {example!r}")
    return float(number) * units.get(unit, 1.0)


def spelled_out(value: Any, expected: list[str]) -> str:
    """The end of an error line: the number that 8k or 15T abbreviates; k is 1024 where a whole number is expected, else 1000.

    >>> spelled_out("8k", ["a whole number"]), spelled_out("15T", ["a number"]), spelled_out("8 GB", ["a number"])
    ('; write 8192', '; write 1.5e+13', '')
    """
    match = re.fullmatch(_SUFFIXED, value) if type(value) is str else None
    whole = "a whole number" in expected
    if match is None or not (whole or "a number" in expected):
        return ""
    digits, suffix = match.groups()
    number = float(digits.replace(",", "")) * (1024 if whole else 1000) ** " kmbt".index(
        suffix.lower().replace("g", "b") or " "
    )
    return "" if whole and number != int(number) else f"; write {number:.0f}" if whole else f"; write {number:g}"


def _reader(units: dict[str, float], example: str) -> BeforeValidator:
    return BeforeValidator(lambda value: read_quantity(value, units, example))


Bytes = Annotated[float, _reader(BYTE_UNITS | BIT_UNITS, "80 GiB"), Field(ge=0, allow_inf_nan=False)]
"""A size [B]."""
Seconds = Annotated[float, _reader(SECOND_UNITS, "3 us"), Field(ge=0, allow_inf_nan=False)]
"""A time [s]."""
BytesPerS = Annotated[float, _reader(RATE_UNITS, "450 GB/s"), Field(ge=0, allow_inf_nan=False)]
"""A bandwidth [B/s]."""
FlopPerS = Annotated[float, _reader(FLOP_UNITS, "989 TFLOP/s"), Field(ge=0, allow_inf_nan=False)]
"""A rate of arithmetic [FLOP/s]."""
