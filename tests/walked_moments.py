"""All moments of a memory walk, for tests that work each out by hand."""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num
from steptime.fsdp.moments import Moments
from steptime.memory.ledger import PartMemory, Peak

LAYER = PartMemory(1_000.0, Peak(1_700.0, "mlp"), Peak(1_900.0, "mlp"))
"""Saves 1,000 B and has 1,700 B at most in forward, 1,900 B in backward."""


class Moment(NamedTuple):
    """What one call of `mark` notes."""

    saved: Num
    transient: Num
    op: str
    gathered: Num = 0.0
    """Of `transient` what all-gathers have returned."""


class Every(Moments):
    """Keeps all moments, not the worst one alone."""

    def __init__(self, to_come: Num = 0.0) -> None:
        super().__init__(to_come)
        self.all: list[Moment] = []
        self.left: dict[str, list[Num]] = {}
        """Of every moment of a name: bytes of sharded gradients that are still to be allocated."""

    def mark(self, saved: Num, transient: Num, op: str, gathered: Num = 0.0, **apart: Num) -> None:
        self.all.append(Moment(saved, transient, op, gathered))
        self.left.setdefault(op, []).append(self.to_come)
        super().mark(saved, transient, op, gathered, **apart)

    def of(self, op: str) -> list[tuple[Num, Num]]:
        """(saved, transient) of the moments of one name."""
        return [(moment.saved, moment.transient) for moment in self.all if moment.op == op]

    def gathered_in(self, op: str) -> list[Num]:
        """What all-gathers have returned in the moments of one name."""
        return [moment.gathered for moment in self.all if moment.op == op]
