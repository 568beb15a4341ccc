"""The issuer of a collective that the host ran: gloo's threads do not record the group, their callers do.

DTensor calls functional collectives (torch/distributed/_functional_collectives.py), DDP's reducer and FSDP call c10d itself
(torch/csrc/distributed/c10d/reducer.cpp, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.bench.trace.events import TraceGroup

if TYPE_CHECKING:
    from steptime.bench.trace.events import Activity, Trace

FUNCTIONAL, DIRECT = "DTensor's functional collectives", "direct collectives (DDP, FSDP)"
_FAMILIES = ("reduce", "gather", "broadcast", "alltoall", "barrier", "scatter", "send", "recv")
"""gloo runs a reduce-scatter as an all-reduce."""


def with_issuers(trace: Trace) -> list[Activity]:
    """The host's collectives, those without a group with one that is named after their issuer.

    A collective is matched with the first call of its family that began before it and has none yet: gloo's queues keep order.
    """
    calls = _calls(trace)
    named = []
    for work in sorted(trace.transfers):
        queue = calls.get(_family(work.kind), [])
        if not work.group.name and queue and queue[0][0] <= work.start:
            named.append(work._replace(group=TraceGroup(queue.pop(0)[1], work.group.ranks)))
        else:
            named.append(work)
    return named


def _calls(trace: Trace) -> dict[str, list[tuple[int, str]]]:
    """By family: time and issuer of each c10d call, in order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for ops in trace.threads.values():
        inside = 0
        for op in sorted(ops, key=lambda op: (op.start, -op.end)):
            if op.name.startswith("_c10d_functional"):
                inside = max(inside, op.end)
            elif op.name.startswith("c10d::"):
                found.setdefault(_family(op.name), []).append((op.start, FUNCTIONAL if op.end <= inside else DIRECT))
    return {family: sorted(queue) for family, queue in found.items()}


def _family(name: str) -> str:
    """The common name of both ends: c10d::_allgather_base_ and gloo:all_gather are a gather."""
    plain = name.replace("_", "").lower()
    return next((family for family in _FAMILIES if family in plain), plain)
