"""FSDP's chunks of a pipeline, in columns: what they hold in each situation, and what FSDP adds to their actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeVar

from steptime import fsdp
from steptime.base.num import Num
from steptime.cost.overlap import contention, hidden_s
from steptime.cost.work import Work
from steptime.fsdp.collective_ranks import shard_group
from steptime.fsdp.loss_in_pipeline import by_micro_batch
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.pipeline_chunks import ABSENT, ShardedChunk, in_buffer
from steptime.fsdp.pipeline_memory import ShardedStage, Situation, fetches_ahead, situations
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds, chunk_seconds
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.memory.ledger import PartMemory
from steptime.memory.part_memories import input_kept
from steptime.memory.stages import PeakMoment
from steptime.schedule import Action, order
from steptime.schedule.orders import first_backward
from steptime.schedule.sharded import sharded_steps
from steptime.search.fsdp_groups import ChunkGroups, Ends
from steptime.search.part_columns import JoinedMemories
from steptime.search.pipeline import Stages, contents, memory_rows, some
from steptime.search.pipeline_layouts import Pipelines
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice
from steptime.search.stage_peaks import alike, largest
from steptime.timing.step_time import layer_replays_s

Made = TypeVar("Made")


@dataclass
class FsdpChunks:
    """The chunks of a pipeline by [recomputation, row]."""

    pipes: Pipelines
    stages: Stages
    choices: tuple[RecomputeChoice, ...]
    rows: LayoutRows
    ends: Ends
    """By row."""
    view: Job
    """The job with the rows as columns."""

    @cached_property
    def assembly(self) -> Assembly:
        """The parts of every search in this job."""
        found = self.pipes.chunks.parts.assembly.remade(self.view, {})
        found.hold(self.stages.chunks)
        return found

    @cached_property
    def memories(self) -> list[tuple[JoinedMemories, JoinedMemories]]:
        """By recomputation, parts whose gradients stay until their backward ends, and others."""
        chunks = self.pipes.chunks
        return [(chunks.stay(choice), chunks.under(choice)[1]) for choice in self.choices]

    def of(self, chunk: Chunk, found: ChunkGroups) -> ShardedChunk:
        """One chunk, as from `fsdp.pipeline_chunks.chunk_bytes`."""
        job, whole, part = self.view, self.pipes.chunks.parts.whole, self.rows.part
        itemsize, x = job.software.itemsize, whole.boundary_bytes[part]
        stay, plain = ([self._layers(chunk, both[i]) for both in self.memories] for i in range(2))
        units = [unit for unit, (_, count) in zip(found.layers, chunk.runs, strict=True) for _ in range(count)]
        layers = [
            Wrapped(memory, [unit.sizes], [], 0.0, unit.last * itemsize)
            for memory, unit in zip(self._stacked(stay), units, strict=True)
        ]
        ones = [memories for memories, _ in self.memories]
        return ShardedChunk(
            self.assembly, chunk, job.schedule == "1f1b" and self.stages.vpp == 1, found.root.sizes,
            found.root.last * itemsize, layers, self._stacked(plain),
            self._stacked([[m.embedding] for m in ones])[0] if chunk.embedding else ABSENT,
            self._stacked([[m.head] for m in ones])[0] if chunk.head else ABSENT,
            found.head_elements * itemsize, whole.logits_bytes[part] if chunk.head else x, (0.0, 0.0), [0.0] * len(layers), x,
            by_micro_batch(self.assembly, chunk),
        )  # fmt: skip

    def _layers(self, chunk: Chunk, memories: JoinedMemories) -> list[PartMemory]:
        """The layers of a chunk one by one; only those that are checkpointed one by one."""
        every = [memory for times, _, memory in memories.layers(chunk) for _ in range(times)]
        if every and not chunk.embedding:  # its input lies in the pipeline's own buffer
            x = self.pipes.chunks.parts.whole.boundary_bytes
            full = memories.recompute.granularity == "full"
            every[0] = in_buffer(every[0], x, x if input_kept(chunk.runs[0][0]) or full else 0.0)
        return every

    def _stacked(self, every: Sequence[Sequence[PartMemory]]) -> list[PartMemory]:
        """Memories of each recomputation as columns [recomputation, row]."""
        import numpy as np

        known: dict[tuple[int, ...], PartMemory] = {}

        def stack(values: Sequence[Num]) -> Num:
            return np.stack([np.broadcast_to(value, self.rows.at.shape) for value in values])

        for same in zip(*every, strict=True):
            if (key := tuple(map(id, same))) not in known:
                mine = [memory_rows(one, self.rows.part) for one in same]
                ends = [
                    one._replace(bytes=stack([getattr(m, way).bytes for m in mine]))
                    for way, one in (("forward", mine[0].forward), ("backward", mine[0].backward))
                ]
                known[key] = PartMemory(stack([m.saved for m in mine]), *ends)
        return [known[tuple(map(id, same))] for same in zip(*every, strict=True)]

    @cached_property
    def stage_walks(self) -> list[ShardedStage]:
        """What each kind of stage holds."""
        gradients = self.view.software.state_bytes.gradients
        to_come = [[gradients * mine.sharded for mine in of.chunks] for of in self.ends.stages]
        microbatches = self.pipes.grid.gbs // (self.rows.dp * self.rows.microbatch_sz)
        return [
            ShardedStage(chunks, mine, microbatches) for chunks, mine in zip(self._each(self.of), to_come, strict=True)
        ]

    def _each(self, make: Callable[[Chunk, ChunkGroups], Made]) -> list[list[Made]]:
        """What is made of every chunk, [kind of stage][virtual chunk]; once for chunks that hold the same."""
        known: dict[tuple[object, ...], Made] = {}
        for chunks, of in zip(self.stages.chunks, self.ends.stages, strict=True):
            for chunk, mine in zip(chunks, of.chunks, strict=True):
                if contents(chunk) not in known:
                    known[contents(chunk)] = make(chunk, mine)
        return [[known[contents(chunk)] for chunk in chunks] for chunks in self.stages.chunks]

    def moment(self, kind: int, step: tuple[int, int | None]) -> PeakMoment:
        """The worst moment of a kind of stage, of all rows as if they had the micro-batches and the group of this step."""
        s = self.stages
        shape = s.schedule, s.pp, s.vpp
        reshard = fsdp.options(self.assembly).reshard_after_forward
        ahead = fetches_ahead(self.view)
        moments = [
            self.stage_walks[kind].moment(one)
            for one in worst_situations(shape, step, s.of[kind], alike(s, kind), ahead=ahead, reshard=reshard)
        ]
        return reduce(PeakMoment.worse, moments)

    def seconds(self, tiers: Any, rates: Any) -> list[list[ChunkSeconds]]:
        """FSDP's seconds of every chunk, [kind of stage][virtual chunk], [recomputation, row]."""
        return self._each(lambda chunk, found: self._seconds(chunk, found, tiers, rates))

    def _seconds(self, chunk: Chunk, found: ChunkGroups, tiers: Any, rates: Any) -> ChunkSeconds:
        import numpy as np

        units = [unit for unit, (_, count) in zip(found.layers, chunk.runs, strict=True) for _ in range(count)]
        root = [] if by_micro_batch(self.assembly, chunk) else [found.root]
        elements = sum([unit.elements for unit in (*root, *units)])
        every = [unit.seconds for unit in (found.root, *units)]
        each = []
        for choice in self.choices:
            times = self.pipes.chunks.under(choice)[0]
            parts = {
                part: of._replace(
                    forward=Work(memory_s=some(of.forward.seconds, self.rows.part)),
                    backward=Work(memory_s=some(of.backward.seconds, self.rows.part)),
                )
                for part, of in times.of.items()
            }
            replays = {part: some(s, self.rows.part) for part, s in layer_replays_s(times, chunk).items()}
            each.append(chunk_seconds(self.assembly, tiers, rates, chunk, every, elements, parts, replays))
        shape = self.rows.at.shape
        return ChunkSeconds(
            *(np.stack([np.broadcast_to(value, shape) for value in same]) for same in zip(*each, strict=True))
        )


class ColumnSeconds(PipelineSeconds):
    """What FSDP adds to the actions of some layouts."""

    def __init__(self, of: FsdpChunks, found: list[list[ChunkSeconds]], tiers: Any, some_of: Any) -> None:
        """`found`: of all layouts, by kind of stage; `some_of`: places of theirs, [recomputation], [row]."""
        stages = of.stages
        kind_of = {stage: kind for kind, mine in enumerate(stages.of) for stage in mine}
        self.assembly = of.assembly
        share = of.view.software.overlap.dp
        slowed = contention(shard_group(of.view), tiers)
        slowed = some(slowed, some_of[1])
        kinds = [[ChunkSeconds(*(column[some_of] for column in one)) for one in chunks] for chunks in found]
        shown = [[one.gather_s - hidden_s(one.gather_s, one.gather_s, share, slowed) for one in mine] for mine in kinds]
        self.chunks = [kinds[kind_of[stage]] for stage in range(stages.pp)]
        heads = [{c for c, one in enumerate(mine) if by_micro_batch(of.assembly, one)} for mine in stages.chunks]
        self.losses = [heads[kind_of[stage]] for stage in range(stages.pp)]
        self.shown = [shown[kind_of[stage]] for stage in range(stages.pp)]
        self.waits = share is True


def stages_that_differ(orders: Sequence[Sequence[Action]], mine: Sequence[int]) -> Iterator[Sequence[Action]]:
    """Of the stages of a kind the orders of those that may hold the most.

    The first one has the most micro-batches in flight; but one that runs all forwards before its first backward holds no
    gradients beside them: so the first one, too, that does not.
    """
    yield orders[mine[0]]
    turns = (
        orders[stage] for stage in mine if any(a.kind == "F" for a in orders[stage][first_backward(orders[stage]) :])
    )
    first = next(turns, None)
    if first is not None and first is not orders[mine[0]]:
        yield first


@lru_cache(maxsize=1024)
def worst_situations(
    shape: tuple[str, int, int],
    step: tuple[int, int | None],
    mine: tuple[int, ...],
    like: tuple[int, ...],
    *,
    ahead: bool,
    reshard: bool,
) -> list[Situation]:
    """The situations of a kind of stage that no other one outweighs, whatever its chunks weigh.

    `shape`: schedule, stages and chunks per stage; `step`: micro-batches and their group; `like`: of each chunk the first
    one that is equal.
    """
    most: dict[Any, dict[tuple[int, ...], Situation]] = {}
    for actions in stages_that_differ(order(*shape, *step), mine):
        steps = sharded_steps(tuple(actions), ahead=ahead, reshard=reshard)
        for one in situations(steps, shape[2]):
            in_flight = [0] * len(like)
            for chunk, count in zip(like, one.during.whole, strict=True):
                in_flight[chunk] += count
            most.setdefault(_sort(one, like), {}).setdefault(tuple(in_flight), one)
    return [sort[counts] for sort in most.values() for counts in largest(sorted(sort, reverse=True))]


def _sort(one: Situation, like: tuple[int, ...]) -> tuple[object, ...]:
    """All but the micro-batches of a situation, the same for equal chunks."""
    states = zip(like, one.gradients, one.during.unreduced, strict=True)
    each = [(*state, at in one.gathered_layers, at in one.gathered_roots) for at, state in enumerate(states)]
    own = each.pop(one.chunk)
    return own, one.passing, one.reduces, tuple(sorted(each))
