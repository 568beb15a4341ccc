"""How much of a collective hides under the compute beside it."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.base.num import Num, minimum, where
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain
from steptime.software.settings import Share

CONTENTION = 0.15
"""Share of hidden communication that comes back as slower compute: NVLink collectives take 15 % of the processor
(calculon-ai/calculon@caa4b11 systems/a100_80g.json, processor_usage)."""

NIC_CONTENTION = 0.02
"""The same of InfiniBand, 2 % (calculon-ai/calculon@caa4b11 systems/a100_80g.json)."""


def hidden_s(comm_s: Num, compute_s: Num, share: Share | None, pieces: Num = 1.0) -> Num:
    """Seconds of a collective that run beside `compute_s` seconds of compute.

    A share hides that part of the collective. True pipelines the two in `pieces` (one per rank of the ring, as
    TransformerEngine's userbuffers do, transformer_engine/common/comm_gemm_overlap): the first piece of the collective has
    nothing to hide under, the others hide under as many pieces of compute. False hides nothing.

    >>> hidden_s(8.0, 100.0, True, 8), hidden_s(8.0, 4.0, True, 8), hidden_s(8.0, 4.0, 0.25), hidden_s(8.0, 4.0, False)
    (5.95, 2.975, 2.0, 0.0)
    """
    if share is None or share is False:
        return 0.0 * comm_s
    if share is True:
        return beside_s(comm_s, compute_s) * (pieces - 1.0) / pieces
    return comm_s * share


def beside_s(comm_s: Num, compute_s: Num) -> Num:
    """Seconds of an asynchronous collective that run beside one kernel, as far as that lasts, less what they slow it down."""
    return minimum(comm_s, compute_s) * (1.0 - CONTENTION)


def exchanges_hidden_s(comm_s: Num, count: Num, beside_s: Num, share: Share | None, slowed: Num) -> Num:
    """Seconds of `count` alike calls of which each runs beside `beside_s` of compute, less what they slow it down.

    A share hides that part of them; True hides each as far as its compute lasts.

    >>> exchanges_hidden_s(2.0, 3, 1.0, True, 0.0), exchanges_hidden_s(2.0, 3, 0.0, 0.5, 0.0)
    (3.0, 3.0)
    """
    if share is True:
        return count * minimum(comm_s, beside_s) * (1.0 - slowed)
    return hidden_s(comm_s * count, beside_s, share)


def contention(group: Group, tiers: Sequence[Tier]) -> Num:
    """Share of a hidden collective that comes back as slower compute: a NIC's where a node holds one rank of the group."""
    return where(members_per_domain(group, tiers[0].size) > 1, CONTENTION, NIC_CONTENTION)


def exposed_after(ready_s: list[float], comm_s: list[float], end_s: float) -> float:
    """Seconds by which collectives on one stream outlast `end_s`, each starting once ready and after the one before.

    >>> exposed_after([1.0, 4.0], [2.0, 3.0], 5.0)
    2.0
    """
    over = 0.0
    for ready, seconds in zip(ready_s, comm_s, strict=True):
        over = max(over, ready) + seconds
    return max(0.0, over - end_s)
