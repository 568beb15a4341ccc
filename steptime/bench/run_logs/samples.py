"""Peak, average and mode of samples of used memory, without storing the samples."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import NamedTuple

MIB = 2.0**20


class MemoryUse(NamedTuple):
    """Summary of the samples of one device, or of one process and its children."""

    name: str
    """The device's index (or identifier), "host" for processes."""
    model: str
    """The accelerator's name; "" where unknown."""
    peak_bytes: float
    """The largest sample; the true peak may be between two samples."""
    average_bytes: float
    mode_bytes: float
    """The most frequent value in whole MiB; the largest of several."""
    total_bytes: float | None
    """Total memory of the device."""
    samples: int
    """Number of samples behind these figures (in the window, where there is one)."""
    outside: int
    """Samples outside of the window."""
    interval_s: float | None
    """Mean interval between the samples."""
    first: datetime | None
    last: datetime | None


class Tally:
    """Running peak, mean and mode of samples that arrive one by one."""

    def __init__(self, name: str, model: str = "") -> None:
        self.name, self.model = name, model
        self.total_bytes: float | None = None
        self.outside = 0
        self.samples = 0
        self._peak = self._sum = 0.0
        self._counts: Counter[int] = Counter()
        self._first: datetime | None = None
        self._last: datetime | None = None

    def add(self, used_bytes: float, when: datetime | None = None) -> None:
        """Add one sample."""
        self.samples += 1
        self._peak = max(self._peak, used_bytes)
        self._sum += used_bytes
        self._counts[round(used_bytes / MIB)] += 1
        if when is not None:
            self._first = self._first or when
            self._last = when

    def row(self) -> MemoryUse:
        """The summary.

        Raises:
            ValueError: there was no sample.
        """
        if not self.samples:
            raise ValueError(f"{self.name}: no samples")
        mode = max(self._counts, key=lambda mib: (self._counts[mib], mib)) * MIB
        first, last, gaps = self._first, self._last, self.samples - 1
        interval_s = (last - first).total_seconds() / gaps if first and last and gaps else None
        return MemoryUse(
            self.name, self.model, self._peak, self._sum / self.samples, mode, self.total_bytes, self.samples,
            self.outside, interval_s, first, last,
        )  # fmt: skip
