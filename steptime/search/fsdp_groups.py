"""FSDP's groups in a pipeline by sharding of the weights: what they hold, send and take.

They depend on tp, ep, etp and the pipeline alone, since dp * cp is what these leave of the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from steptime import fsdp
from steptime.base.num import Num, maximum
from steptime.fsdp.groups import ParamGroup, buffers, groups
from steptime.fsdp.pipeline_seconds import group_price
from steptime.fsdp.seconds import CommSeconds
from steptime.job.assembly import Assembly, Chunk
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.memory.states import partial_gradients
from steptime.search.part_columns import joined
from steptime.search.pipeline import Stages, contents, some
from steptime.search.sharded_weights import WeightSharding, columns
from steptime.timing.optimizer import optimizer_step
from steptime.timing.part_times import Pricing, pricing
from steptime.timing.step_time import embedding_reduce


class GatheredUnit(NamedTuple):
    """What is gathered at once: the root's group, or a layer's groups."""

    sizes: fsdp.Buffers
    last: Num
    """Elements of the last parameter."""
    elements: Num
    seconds: CommSeconds


class ChunkGroups(NamedTuple):
    """The groups of a chunk, columns by sharding."""

    root: GatheredUnit
    layers: tuple[GatheredUnit, ...]
    """Of a layer of each run of equal ones."""
    head_elements: Num
    sharded: Num
    """Elements of trained parameters on one rank."""


class StageGroups(NamedTuple):
    """A kind of stage, columns by sharding."""

    params: Num
    gradients: Num
    optimizer: Num
    owned: Num
    update: Num
    """Temporaries of an update, of the tensor it works on."""
    chunks: tuple[ChunkGroups, ...]
    tensors: Num
    """Gradients that sequence parallelism leaves partial: their number, and bytes of one."""
    partial_bytes: Num


class Ends(NamedTuple):
    """All of one pipeline, columns by sharding."""

    stages: tuple[StageGroups, ...]
    """Of each kind."""
    optimizer_s: Num
    embedding_s: Num


Columns = TypeVar("Columns")


def picked(of: Columns, at: Any) -> Columns:
    """The same in other rows."""
    found: Any = of
    if isinstance(found, tuple):
        fields = [picked(field, at) for field in found]
        return type(found)(*fields) if hasattr(found, "_fields") else type(found)(fields)  # type: ignore[return-value]
    return some(found, at)  # type: ignore[no-any-return]


def chunk_groups(assembly: Assembly, chunk: Chunk, priced: Pricing) -> ChunkGroups:
    """The groups of one chunk of an assembly."""
    found, around = groups(assembly, chunk), (assembly, priced.dp_tiers, priced.context.rates)

    def unit(of: ParamGroup) -> GatheredUnit:
        sizes = [buffers(assembly, one) for one in of.all]
        whole = fsdp.Buffers(*[sum(same) for same in zip(*sizes, strict=True)])
        last = reduce(maximum, [one.last for one in of.all])
        return GatheredUnit(whole, last, 1.0 * sum([one.elements for one in of.all]), group_price(*around, of))

    places = [sum(count for _, count in chunk.runs[:i]) for i in range(len(chunk.runs))]
    head = assembly.local_head_params.total if chunk.head else 0.0
    layers = tuple(unit(found.layers[at]) for at in places)
    return ChunkGroups(unit(found.root), layers, head, fsdp.sharded_elements(assembly, [chunk]))


def ends(job: Job, stages: Stages, shardings: Sequence[WeightSharding], devices: int) -> Ends:
    """The groups of a pipeline on so many devices. `job`: with its degrees and its schedule."""
    said = columns(shardings)
    dp = devices / (stages.pp * said["tp"])
    view = Candidates(job, **said, dp=dp, gbs=job.microbatches * dp)
    fragments, places = [], []
    for which, group in view.alike_parts():
        group.all_on(devices)
        assembly = Assembly(group.as_job)
        assembly.hold([assembly.stages[stage] for stage in stages.first])
        fragments.append(_ends(assembly))
        places.append(which)
    found: Ends = joined(fragments, places, len(shardings))
    return found


def _ends(assembly: Assembly) -> Ends:
    priced, stages = pricing(assembly.job), []
    known: dict[tuple[object, ...], ChunkGroups] = {}
    for kind, (chunks, state) in enumerate(zip(assembly.stages, fsdp.states(assembly), strict=True)):
        keys = list(map(contents, chunks))
        for key, chunk in zip(keys, chunks, strict=True):
            known[key] = known.get(key) or chunk_groups(assembly, chunk, priced)
        bytes_ = state.params_bytes, state.gradients_bytes, state.optimizer_bytes, state.owned, state.update_bytes
        partial = partial_gradients(assembly, kind, one_by_one=True)
        tensors = partial.calls / assembly.job.microbatches
        stages.append(StageGroups(*bytes_, tuple(known[key] for key in keys), tensors, partial.bytes))
    return Ends(
        tuple(stages), optimizer_step(assembly, priced.context).time_s, embedding_reduce(assembly, priced).time_s
    )
