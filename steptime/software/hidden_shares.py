"""How much of each kind of communication is hidden under compute."""

from __future__ import annotations

from typing import TypeAlias, cast

from steptime.base.config import Config

Share: TypeAlias = bool | float
"""Fraction of a communication that is hidden under compute: a bool, or a number from 0 to 1."""


class Overlap(Config):
    """Fraction of communication hidden under compute; axes not set follow the profile."""

    tp: Share | None = None
    dp: Share | None = None
    pp: Share | None = None
    ep: Share | None = None
    cp: Share | None = None
    offload: Share | None = None
    """Copies of activations to and from host memory; default true."""

    def __eq__(self, other: object) -> bool:
        """Equal in type too: with true the model decides how much is hidden, with 1.0 all of it is."""
        same = super().__eq__(other)
        return same is True and [type(share) for _, share in self] == [
            type(share) for _, share in cast("Overlap", other)
        ]

    def __hash__(self) -> int:
        """Of its shares."""
        return hash(tuple(self))
