"""FSDP in a pipeline, in columns: what its chunks hold, and its schedule walked with what FSDP adds to the actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import inf
from operator import ge
from typing import Any

from steptime import fsdp
from steptime.answer.verdict import update_temporaries
from steptime.base.num import Num, maximum, where
from steptime.cost.comm import collective
from steptime.cost.overlap import contention, hidden_s
from steptime.cost.parts import Work
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.pipeline_chunks import ABSENT, ShardedChunk, in_buffer
from steptime.fsdp.pipeline_memory import REPEATS, Situation, StageHeld, fetches_ahead, situations
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds, chunk_seconds
from steptime.fsdp.seconds import shard_group
from steptime.job.assembly import Assembly, Chunk
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.mesh import Group
from steptime.memory.buffers import at_peak, gradient_copies, step_change
from steptime.memory.ledger import PartMemory
from steptime.memory.overhead import overhead, reserved_bytes
from steptime.memory.part_memories import input_kept
from steptime.memory.stages import PeakMoment
from steptime.memory.states import States, state_bytes
from steptime.schedule import Action, order
from steptime.schedule.orders import described, first_backward, shortened
from steptime.schedule.sharded import sharded_steps
from steptime.search.held import alike
from steptime.search.layouts import Block, Pipelines
from steptime.search.parts import JoinedMemories
from steptime.search.pipeline import Stages, counts_of, memory_rows, some
from steptime.search.recompute import RecomputeChoice
from steptime.search.rows import LayoutRows, legal_rows, spreads_of
from steptime.search.sharded_groups import ChunkGroups, Ends, ends, picked
from steptime.search.space import SPLIT_SETTINGS, Shape
from steptime.search.walk_columns import makespans
from steptime.software.settings import Share
from steptime.timing.step_time import layer_replays_s, straggler_s


def covers_shape(shape: Shape) -> bool:
    """Whether it is such a pipeline: of one whose backwards are split, each layout is estimated."""
    return shape.pp > 1 and not (shape.schedule and described(shape.schedule).split)


@dataclass
class ShardedChunks:
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
        vars(found)["stages"] = [list(chunks) for chunks in self.stages.chunks]
        return found

    @cached_property
    def memories(self) -> list[tuple[JoinedMemories, JoinedMemories]]:
        """By recomputation, parts whose gradients stay until their backward ends, and others."""
        chunks = self.pipes.chunks
        return [(chunks.stay(choice), chunks.under(choice)[1]) for choice in self.choices]

    def of(self, chunk: Chunk, found: ChunkGroups) -> ShardedChunk:
        """One chunk, as `fsdp.pipeline_chunks.chunk_bytes` has it."""
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
        )  # fmt: skip

    def _layers(self, chunk: Chunk, memories: JoinedMemories) -> list[PartMemory]:
        """The layers of a chunk one by one; those that are checkpointed one by one alone."""
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
    def held(self) -> list[StageHeld]:
        """What each kind of stage holds."""
        known: dict[tuple[object, ...], ShardedChunk] = {}
        found = []
        for chunks, of in zip(self.stages.chunks, self.ends.stages, strict=True):
            keys = [(chunk.runs, chunk.embedding, chunk.head) for chunk in chunks]
            for key, chunk, mine in zip(keys, chunks, of.chunks, strict=True):
                known[key] = known.get(key) or self.of(chunk, mine)
            to_come = [state_bytes(self.view).gradients * mine.sharded for mine in of.chunks]
            found.append(StageHeld([known[key] for key in keys], to_come))
        return found

    def moment(self, kind: int, step: tuple[int, int | None]) -> PeakMoment:
        """The worst moment of a kind of stage, of all rows as if they had the micro-batches and the group of this step."""
        s = self.stages
        shape = s.schedule, s.pp, s.vpp
        reshard = fsdp.options(self.assembly).reshard_after_forward
        ahead = fetches_ahead(self.view)
        moments = [
            self.held[kind].moment(one)
            for one in worst_situations(shape, step, s.of[kind], alike(s, kind), ahead=ahead, reshard=reshard)
        ]
        return reduce(PeakMoment.worse, moments)

    def seconds(self, tiers: Any, rates: Any) -> list[list[ChunkSeconds]]:
        """FSDP's seconds of every chunk, [kind of stage][virtual chunk], [recomputation, row]."""
        known: dict[tuple[object, ...], ChunkSeconds] = {}
        found = []
        for chunks, of in zip(self.stages.chunks, self.ends.stages, strict=True):
            keys = [(chunk.runs, chunk.embedding, chunk.head) for chunk in chunks]
            for key, chunk, mine in zip(keys, chunks, of.chunks, strict=True):
                known[key] = known.get(key) or self._seconds(chunk, mine, tiers, rates)
            found.append([known[key] for key in keys])
        return found

    def _seconds(self, chunk: Chunk, found: ChunkGroups, tiers: Any, rates: Any) -> ChunkSeconds:
        import numpy as np

        units = [unit for unit, (_, count) in zip(found.layers, chunk.runs, strict=True) for _ in range(count)]
        elements = sum([unit.elements for unit in (found.root, *units)])
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

    def __init__(self, of: ShardedChunks, found: list[list[ChunkSeconds]], tiers: Any, some_of: Any) -> None:
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
            held = [0] * len(like)
            for chunk, count in zip(like, one.beside.whole, strict=True):
                held[chunk] += count
            most.setdefault(_sort(one, like), {}).setdefault(tuple(held), one)
    found = []
    for sort in most.values():
        kept: list[tuple[int, ...]] = []
        for held_of in sorted(sort, reverse=True):
            if not any(all(map(ge, other, held_of)) for other in kept):
                kept.append(held_of)
        found += [sort[held_of] for held_of in kept]
    return found


def _sort(one: Situation, like: tuple[int, ...]) -> tuple[object, ...]:
    """All but the micro-batches of a situation, the same for equal chunks."""
    states = zip(like, one.gradients, one.beside.unreduced, strict=True)
    each = [(*state, at in one.layers_held, at in one.roots_held) for at, state in enumerate(states)]
    own = each.pop(one.chunk)
    return own, one.passing, one.reduces, tuple(sorted(each))


class ShardedPipelines(Pipelines):
    """FSDP's layouts of one job on one number of devices."""

    def blocks(
        self,
        stages: Stages,
        shape: Shape,
        choices: tuple[RecomputeChoice, ...],
        share: Share | None,
        limit_s: float = inf,  # noqa: ARG002
    ) -> Iterator[Block]:
        """One block; as `Pipelines.blocks`."""
        import numpy as np

        rows = self.rows(shape)
        ((zero, job),) = self.zeros.items()
        legal = legal_rows(self.grid, zero, shape.schedule, rows)
        rows, legal = rows.some(legal), legal[legal]
        if not rows.at.size:
            return
        said = self.said(stages, shape)
        spreads, at = spreads_of(rows.tp, rows.ep, rows.etp)
        found = picked(ends(said, stages, spreads, self.grid.devices), at)
        degrees = {name: getattr(rows, name) for name in ("tp", "cp", "ep", "etp", "dp", "microbatch_sz")}
        view = Candidates(said, **degrees, gbs=1.0 * self.grid.gbs)
        vars(view.parallelism)["whole"] = self.grid.devices
        chunks = ShardedChunks(self, stages, choices, rows, found, view.as_job)
        outside = sum(overhead(view.as_job)) + 0.0 * rows.tp
        allocated, reserved = self.held(chunks)
        capacity = job.machine.accelerator.usable_memory_bytes
        block = Block(
            self.job, self.grid.devices, self.grid.gbs, stages, shape.split, zero, choices, rows, legal,
            np.full_like(reserved, np.inf), allocated + outside, reserved + outside, capacity, self.most(choices), outside,
        )  # fmt: skip
        self.walk(block, chunks, share)
        yield block

    def said(self, stages: Stages, shape: Shape) -> Job:
        """The job in this pipeline, on as few devices as it takes."""
        settings = {"parallelism.pp": stages.pp, "parallelism.vpp": stages.vpp, "parallelism.schedule": stages.said}
        batch = self.job.data.gbs * stages.pp
        return self.job.replace(**settings, **SPLIT_SETTINGS[shape.split], **{"data.gbs": batch})

    def held(self, chunks: ShardedChunks) -> tuple[Num, Num]:
        """Allocated and reserved bytes of the stage with the most."""
        import numpy as np

        rows, stages, job = chunks.rows, chunks.stages, chunks.view
        microbatches = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        shape = len(chunks.choices), rows.at.size
        allocated, reserved = np.zeros(shape), np.zeros(shape)
        steps: dict[tuple[int, int | None], list[int]] = {}
        for m in counts_of(microbatches):
            short, period, _ = shortened(stages.schedule, stages.pp, stages.vpp, m, None, REPEATS)
            steps.setdefault((short, period), []).append(m)
        pooled = _pools(self.job)
        for kind, of in enumerate(chunks.ends.stages):
            buffers = self.buffers(stages, kind, rows, 0.0)
            states = States(of.params, of.gradients, of.optimizer, [], owned=of.owned)
            copies = gradient_copies(job, states)
            updating = update_temporaries(job, states) + (buffers.between - buffers.moving + step_change(copies))
            for step, counts in steps.items():
                mine = np.isin(microbatches, counts)
                moment = chunks.moment(kind, step)
                more = updating > moment.added_bytes
                moving = where(more, updating, moment.activations_bytes + moment.transient_bytes)
                gradients = of.gradients - where(more, 0.0, moment.grads_not_yet_allocated_bytes)
                fixed = of.params + gradients + of.optimizer + (buffers.staying + buffers.moving + at_peak(copies))
                held = reserved_bytes(fixed, moving)
                held = where(rows.tp == 1, reserved_bytes(fixed, moving, of.group), held) if pooled else held
                allocated[:, mine] = maximum(allocated, fixed + moving)[:, mine]
                reserved[:, mine] = maximum(reserved, held)[:, mine]
        return allocated, reserved

    def walk(self, block: Block, chunks: ShardedChunks, share: Share | None) -> None:
        """Fill in the seconds of the layouts that may fit."""
        import numpy as np

        stages, rows, job = chunks.stages, chunks.rows, chunks.view
        wanted = block.fits
        if not wanted.any():
            return
        flavors = self.flavors(stages, chunks.choices, rows.part)
        tiers, microbatches = self.priced.dp_tiers, self.grid.gbs // (rows.dp * rows.microbatch_sz)
        found = chunks.seconds(tiers, self.priced.context.rates)
        sent = self.sends(stages, rows)
        left = 1.0 - (float(share or 0.0) if share is not True else 0.0)
        makespan = makespans(
            stages,
            flavors,
            microbatches,
            [left * seconds for seconds in (*sent.each, sent.wrap)],
            blocking=share is not True,
            least=np.inf,
            wanted=wanted,
            around=lambda some_of: ColumnSeconds(chunks, found, tiers, some_of),
        )
        work = [sum(f.forward_s + f.backward_s for f in mine) for mine in flavors]
        busiest: Num = 0
        most: Num = 0.0
        for kind, seconds in enumerate(work):
            busiest, most = where(seconds > most, kind, busiest), maximum(most, seconds)
        partial: Num = 0.0
        for kind, of in enumerate(chunks.ends.stages):
            cost = collective("all_reduce", of.partial_bytes, Group("tp", rows.tp, 1), self.priced.context.tiers).time_s
            partial = where(busiest == kind, of.tensors * microbatches * cost, partial)
        after = chunks.ends.embedding_s + rows.sp * partial + chunks.ends.optimizer_s
        step = makespan + after + straggler_s(job, makespan)
        block.step_s[:] = np.where(wanted, step, np.inf)


def _pools(job: Job) -> bool:
    """Whether torch's allocator keeps gathered groups beside, without tensor parallelism."""
    return fsdp.pooled(job.replace(**{"parallelism.tp": 1}))
