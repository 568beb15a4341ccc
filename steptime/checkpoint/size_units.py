"""Sizes for reading: GiB = 2**30 bytes, or GB = 10**9 with si; exact counts stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

_IEC = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SI = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class Units:
    """How sizes are written: `iec` (KiB, MiB, GiB) or `si` (kB, MB, GB)."""

    name: str = "iec"

    @property
    def _units(self) -> dict[str, int]:
        return _IEC if self.name == "iec" else _SI

    def fitting(self, nbytes: int) -> str:
        """The largest unit of which `nbytes` is at least one."""
        return next((unit for unit, size in reversed(self._units.items()) if nbytes >= size), "B")

    def size(self, nbytes: int) -> str:
        """`nbytes` with the unit that fits."""
        unit = self.fitting(nbytes)
        return f"{nbytes} B" if unit == "B" else f"{nbytes / self._units[unit]:.2f} {unit}"

    def column(self, nbytes: int, unit: str) -> str:
        """`nbytes` in `unit`, for a table."""
        return str(nbytes) if unit == "B" else f"{nbytes / self._units[unit]:.2f}"
