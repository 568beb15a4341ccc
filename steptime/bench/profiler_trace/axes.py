"""The parallelism of a collective in a trace: from its group's name, else from its caller and the degrees of the config.

gloo's threads do not record the group of what they run, but its callers are there: DTensor calls functional collectives
(torch/distributed/_functional_collectives.py), DDP's reducer and FSDP call c10d itself (torch/csrc/distributed/c10d/reducer.cpp,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from steptime.bench.profiler_trace.events import Activity, Trace, TraceGroup
from steptime.bench.profiler_trace.kernel_names import group_part
from steptime.job.job import Job

FUNCTIONAL, DIRECT = "DTensor's functional collectives", "direct collectives (DDP, FSDP)"
_FAMILIES = ("reduce", "gather", "broadcast", "alltoall", "barrier", "scatter", "send", "recv")
"""gloo runs a reduce-scatter as an all-reduce."""
_SENDS = {"send", "recv", "sendrecv", "send_recv", "batch_isend_irecv", "coalesced"}
_WORDS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}


class TracedAxes:
    """The axes of one job; `notes` collects assumptions about groups without a known name."""

    def __init__(self, job: Job) -> None:
        layout = job.parallelism
        degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
        self.degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
        self.sizes = [*self.degrees.items(), ("dp", layout.dp * layout.cp)]
        self.notes: list[str] = []

    def part(self, work: Activity, trace: Trace) -> str:
        """The part that a collective belongs to: `tp_comm`, `dp_comm` ..., `other_comm` where it is unknown.

        A named group decides. Else sends are the pipeline's, the config's only axis has them all, DTensor issues tensor-parallel
        and DDP and FSDP data-parallel ones, or the axis of as many ranks has them; groups of dp x cp ranks reduce gradients
        (megatron/core/parallel_state.py, DATA_PARALLEL_GROUP_WITH_CP).
        """
        name, ranks = work.group
        if name in {"", FUNCTIONAL, DIRECT} and len({group.name for group in trace.groups}) == 1:
            name, ranks = trace.groups[0]
        named = group_part(name)
        if named:
            return named
        if work.kind in _SENDS and "pp" in self.degrees:
            return self._assume(name, ranks, "pp", "sends and receives", work.kind)
        if len(self.degrees) == 1:
            return self._assume(name, ranks, next(iter(self.degrees)), "the plan's only axis", "")
        issuer = {FUNCTIONAL: "tp", DIRECT: "dp"}.get(name)
        if issuer in self.degrees and "cp" not in self.degrees:
            return self._assume(name, ranks, issuer, "no group is recorded; classified by caller", "")
        fits = {axis for axis, degree in self.sizes if degree == ranks}
        if len(fits) == 1:
            return self._assume(name, ranks, fits.pop(), "no other axis has groups of that size", "")
        self._note(f"collectives of {_group(name, ranks)} could not be assigned to an axis")
        return "other_comm"

    def _assume(self, name: str, ranks: int, axis: str, why: str, kind: str) -> str:
        what = f"{kind} of " if kind else "collectives of "
        what = "" if name in {FUNCTIONAL, DIRECT} else what
        self._note(f"{what}{_group(name, ranks)} count as {_WORDS[axis]}-parallel: {why}")
        return f"{axis}_comm"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _group(name: str, ranks: int) -> str:
    """Description of a group."""
    size = f" ({ranks} ranks)" if ranks else ""
    return f"{name or 'an unnamed group'}{size}"


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
