"""Collectives over the ranks of a mesh axis, from a few bytes to as much as fits; every rank calls these functions.

Each repetition starts after a barrier and is timed on every rank; the slowest rank's seconds count. All ranks decide by these
common figures when to stop, so that none waits for a call that another skips.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from steptime.bench import timings
from steptime.bench.runs import operands
from steptime.bench.runs.clock import Timing, summary, synchronize
from steptime.model.ops import Kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SMALLEST, GROWTH = 8, 4
"""The first size [B], and the ratio of one to the next."""
LARGEST = {"cpu": 2**28, "cuda": 2**33}
"""Largest full tensor [B]."""
SHARE = 0.1
"""Share of the free memory for the full tensor; its parts, and copies inside the back end, need more."""
ALWAYS = 2**20
"""Sizes up to this are always measured: smaller ones show no bandwidth [B]."""
LEAST, MOST = 5, 50
"""Repetitions of one size."""
QUICK_S, BATCH = 1e-3, 20
"""On a GPU calls shorter than this are timed in batches, so that launching and waiting cost the batch (as nccl-tests)."""


class CollectiveCall(NamedTuple):
    """One collective ready to run."""

    run: Callable[[], object]
    given: torch.Tensor
    """This rank's input."""
    result: torch.Tensor
    """This rank's output."""
    bytes: int
    """The full tensor."""
    ranks: int
    """The memory between which bytes move."""
    trips: int = 1
    """How many times the bytes pass from one rank to another in one run."""


def prepare(kind: str, bytes_: int, group: ProcessGroup, device: torch.device, dtype: torch.dtype) -> CollectiveCall:
    """A collective whose full tensor has `bytes_`, rounded down to split evenly over the ranks, at least one element each.

    All-reduce and broadcast write into what they are given. send_recv goes from the group's first rank to its last and back,
    the two that are furthest apart.
    """
    ranks = dist.get_world_size(group)
    itemsize = torch.empty((), dtype=dtype).element_size()
    part = max(bytes_ // (itemsize * ranks), 1)
    full, shard = (torch.randn(size, device=device, dtype=dtype) for size in (part * ranks, part))
    size = part * ranks * itemsize
    if kind == "all_reduce":
        return CollectiveCall(lambda: dist.all_reduce(full, group=group), full, full, size, ranks)
    if kind == "all_gather":
        return CollectiveCall(lambda: _tensors("all_gather")(full, shard, group=group), shard, full, size, ranks)
    if kind == "reduce_scatter":
        return CollectiveCall(lambda: _tensors("reduce_scatter")(shard, full, group=group), full, shard, size, ranks)
    if kind == "all_to_all":
        there = torch.empty_like(full)
        return CollectiveCall(lambda: dist.all_to_all_single(there, full, group=group), full, there, size, ranks)
    if kind == "broadcast":
        return CollectiveCall(lambda: dist.broadcast(full, group=group, group_src=0), full, full, size, ranks)
    return _there_and_back(full, size, group, ranks)


def _tensors(kind: str) -> Callable[..., object]:
    """The call over one tensor, which torch 2.13 renames."""
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[kind]
    found: Callable[..., object] = getattr(dist, f"{kind}_single", None) or getattr(dist, older)
    return found


def _there_and_back(full: torch.Tensor, size: int, group: ProcessGroup, ranks: int) -> CollectiveCall:
    rank, last = dist.get_rank(group), ranks - 1
    back = torch.empty_like(full)

    def run() -> None:
        if rank == 0:
            dist.send(full, group=group, group_dst=last)
            dist.recv(back, group=group, group_src=last)
        elif rank == last:
            dist.recv(back, group=group, group_src=0)
            dist.send(back, group=group, group_dst=0)

    return CollectiveCall(run, full, back, size, 2, trips=2)


def slowest(samples: list[float], group: ProcessGroup, device: torch.device) -> list[float]:
    """For each repetition the largest of all ranks' seconds; the same list on every rank."""
    kept = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(kept, op=dist.ReduceOp.MAX, group=group)
    return [float(x) for x in kept.tolist()]


def time_call(call: CollectiveCall, group: ProcessGroup, device: torch.device, seconds: float) -> Timing:
    """Repetitions, each after a barrier; their number follows from two trial runs and `seconds`."""
    trials = slowest([_once(call, group, device, 1) for _ in range(2)], group, device)
    quick = device.type == "cuda" and min(trials) < QUICK_S
    calls = BATCH if quick else 1
    reps = int(min(max(seconds / (calls * min(trials)), LEAST), MOST))
    return summary(slowest([_once(call, group, device, calls) for _ in range(reps)], group, device))


def _once(call: CollectiveCall, group: ProcessGroup, device: torch.device, calls: int) -> float:
    """Seconds of one trip on this rank."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    synchronize(device)
    start = perf_counter()
    for _ in range(calls):
        call.run()
    synchronize(device)
    return (perf_counter() - start) / (calls * call.trips)


def sizes(device: torch.device) -> list[int]:
    """Sizes that this rank's memory allows."""
    most = min(float(LARGEST.get(device.type, 2**26)), SHARE * operands.free_bytes(device))
    found = [SMALLEST]
    while found[-1] * GROWTH <= most:
        found.append(found[-1] * GROWTH)
    return found


def measure_axis(
    group: ProcessGroup, axis: str, device: torch.device, seconds: float
) -> tuple[list[timings.CollectiveTiming], list[str]]:
    """Every kind over the two ranks or more of `group`, in rows of this axis; its share of the `seconds` limits its sizes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counted = -slowest([-float(len(sizes(device)))], group, device)[0]  # the least of all ranks
    found: list[timings.CollectiveTiming] = []
    notes: list[str] = []
    for kind in KINDS:
        of_bytes = sizes(device)[: int(counted)]
        timed, note = _measure_kind(kind, axis, of_bytes, group, device, dtype, seconds / len(KINDS))
        found += timed
        notes += [note] if note else []
    operands.release(device)
    return found, notes


def _measure_kind(
    kind: Kind,
    axis: str,
    of_bytes: list[int],
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
) -> tuple[list[timings.CollectiveTiming], str]:
    """One kind over all sizes, smallest first."""
    found: list[timings.CollectiveTiming] = []
    spent = 0.0
    for bytes_ in of_bytes:
        if found and bytes_ > ALWAYS and spent + GROWTH * found[-1].timing.min_s * (LEAST + 2) > seconds:
            return found, f"{kind} over {axis}: up to {found[-1].bytes:,} B; the next size exceeds the time budget"
        try:
            call = prepare(kind, bytes_, group, device, dtype)
            timing = time_call(call, group, device, seconds / len(of_bytes))
        except RuntimeError as error:  # torch's message, equal on every rank
            return found, f"{kind} over {axis}, {bytes_} B: not measured; {operands.first_line(error)}"
        spent += timing.median_s * call.trips * (timing.reps + 2)
        if not found or found[-1].bytes != call.bytes:
            found.append(timings.CollectiveTiming(kind, axis, call.ranks, call.bytes, timing))
    return found, ""


def sweep(mesh: DeviceMesh, device: torch.device, seconds: float) -> tuple[list[timings.CollectiveTiming], list[str]]:
    """Every kind over every axis of a mesh that has more than one rank, for about `seconds` altogether.

    The rows are those of this rank's groups: groups side by side run at the same time, as in training. Call it on every rank.
    """
    names = mesh.mesh_dim_names or ()
    axes = [(name, mesh.get_group(i)) for i, name in enumerate(names) if mesh.size(i) > 1]
    found: list[timings.CollectiveTiming] = []
    notes: list[str] = []
    for name, group in axes:
        timed, said = measure_axis(group, name, device, seconds / len(axes))
        found, notes = found + timed, notes + said
    return found, notes
