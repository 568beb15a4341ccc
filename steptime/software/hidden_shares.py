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


def waits_at_once(cp_impl: str, compiled: str) -> dict[str, Share | None]:
    """The default that torch's ring of context parallelism has in a compiled graph: none of its exchanges is hidden.

    A functional collective that is traced is waited for where it is issued (torch/distributed/_functional_collectives.py,
    _maybe_wrap_tensor), so in the graph the wait precedes the block that an eager ring computes meanwhile. In training
    inductor moves neither by default (torch/_inductor/config.py, reorder_for_compute_comm_overlap, enable_overlap_scheduling).
    """
    return {"cp": False} if cp_impl == "torch" and compiled != "none" else {}
