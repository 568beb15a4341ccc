"""How communication hides under compute: one mechanism for every axis.

Compute is one stream, the collectives of each axis (tp, cp, ep, dp, pp, the link to the host) are another. Work on one stream
runs in order, work on two runs at once; how much does so is found where the order is known. Of that the plan's `overlap` hides
all, nothing or a share, and hidden communication slows the compute that hides it (`hidden_s`).
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime.base.num import Num, minimum, where
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain
from steptime.software.hidden_shares import Share

CONTENTION = 0.15
"""Share of hidden communication that comes back as slower compute: NVLink collectives take 15 % of the processor
(calculon-ai/calculon@caa4b11 systems/a100_80g.json, processor_usage)."""

NIC_CONTENTION = 0.02
"""Share of hidden InfiniBand communication that comes back as slower compute, 2 % (calculon-ai/calculon@caa4b11
systems/a100_80g.json); of groups with one rank in a node: a ring through a node's NVLink is slowed by CONTENTION."""


def hidden_s(comm_s: Num, at_once_s: Num, share: Share | None, slowed: Num = CONTENTION) -> Num:
    """Seconds of communication that compute hides.

    True hides the part that overlaps compute, `at_once_s`, less the fraction `slowed` of it by which it slows that compute. A
    number hides that fraction of `comm_s`; false or None hides nothing.

    >>> hidden_s(8.0, 4.0, True), hidden_s(8.0, 4.0, 0.25), hidden_s(8.0, 4.0, False)
    (3.4, 2.0, 0.0)
    """
    if share is True:
        return at_once_s * (1.0 - slowed)
    return comm_s * float(share or 0.0)


def in_pieces_s(comm_s: Num, compute_s: Num, pieces: Num) -> Num:
    """Seconds of a collective that overlap a kernel, both split into `pieces`, one per rank of the ring.

    The first piece of the collective overlaps nothing; each other one overlaps a piece of the kernel
    (TransformerEngine's userbuffers, transformer_engine/common/comm_gemm_overlap).

    >>> in_pieces_s(8.0, 100.0, 8), in_pieces_s(8.0, 4.0, 8)
    (7.0, 3.5)
    """
    return minimum(comm_s, compute_s) * (pieces - 1.0) / pieces


def contention(group: Group, tiers: Sequence[Tier]) -> Num:
    """Share of a hidden collective that comes back as slower compute: a NIC's where a node holds one rank of the group.

    A group with several ranks in a node that also spans nodes (dp 32 with tp 4 on nodes of 8) is slowed like NVLink: its ring has
    hops inside of each node, whose copies run on the same processors as compute for as long as the collective lasts.
    """
    return where(members_per_domain(group, tiers[0].size) > 1, CONTENTION, NIC_CONTENTION)
