"""One pipeline of a search, its stages that differ, and the cost of every layout on it: chunks by row of the parts.

Stages that hold the same chunks do the same work, and the first of them has the most micro-batches in flight. So each kind of
stage is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from steptime.base.num import Num, is_column
from steptime.job.assembly import Assembly, Chunk, chunks_of, stages_of
from steptime.job.candidates import SectionColumns
from steptime.job.facts import Facts
from steptime.job.job import Job
from steptime.job.layer_counts import layers_per_chunk
from steptime.memory.kept_buffers import ByExperts, joined
from steptime.memory.ledger import PartMemory
from steptime.memory.op_walk import chunk_peaks
from steptime.schedule import placement
from steptime.schedule.orders import described
from steptime.search.part_columns import JoinedMemories, PartColumns
from steptime.search.part_figures import NO_MODULES
from steptime.search.recompute import RecomputeChoice
from steptime.software.performance import EAGER_TORCH
from steptime.timing.part_times import ChunkTime, PartTimes, plain_time, replay_s


class Stages(NamedTuple):
    """The stages of a pipeline that differ."""

    schedule: str
    pp: int
    vpp: int
    chunks: tuple[tuple[Chunk, ...], ...]
    """The chunks of every kind of stage."""
    of: tuple[tuple[int, ...], ...]
    """The stages of each kind."""
    layers: int
    """Most layers of a chunk."""
    said: str | None = None
    """The schedule in the plan's words."""

    @property
    def split(self) -> bool:
        """Whether some backwards run in two halves."""
        return described(self.schedule).split

    @property
    def first(self) -> tuple[int, ...]:
        """The first stage of each kind."""
        return tuple(mine[0] for mine in self.of)

    @property
    def times(self) -> tuple[int, ...]:
        """How many stages are of each kind."""
        return tuple(map(len, self.of))


def contents(chunk: Chunk) -> tuple[object, ...]:
    """What chunks that do the same work have in common."""
    return chunk.runs, chunk.embedding, chunk.head


def stages(assembly: Assembly, found: Facts, schedule: str) -> Stages:
    """Distribute the layers of an assembly to a pipeline's chunks; `found`: its facts, with plain pp, vpp and schedule."""
    pp, vpp = int(found.pp), int(found.vpp)
    counts = layers_per_chunk(found)
    chunks = chunks_of(tuple(assembly.runs), counts, placement(schedule, pp, vpp))
    kinds: dict[tuple[object, ...], list[int]] = {}
    by_stage = stages_of(chunks, pp)
    for stage, mine in enumerate(by_stage):
        kinds.setdefault(tuple((*contents(c), c.depth == 0) for c in mine), []).append(stage)
    of = tuple(map(tuple, kinds.values()))
    return Stages(
        schedule,
        pp,
        vpp,
        tuple(tuple(by_stage[mine[0]]) for mine in of),
        of,
        max(counts),
        found.schedule_said,
    )


class ChunkFigures(NamedTuple):
    """One chunk, in rows of the parts: [recomputation, row]."""

    forward_s: Num
    backward_s: Num
    saved: Num
    """Bytes that it saves for the backward of one micro-batch."""
    forward_extra: Num
    """Most bytes of a forward in addition to what is saved when it ends."""
    backward_extra: Num
    """The same for a backward, in addition to what is saved when it starts."""
    weight_s: Num = None
    """Of a split backward what makes the gradients of weights."""
    kept: Num = None
    """Bytes that its first half leaves."""
    input_extra: Num = None
    """As in `schedule.SplitBytes`, of the first half."""
    weight_extra: Num = None
    """The same of the second."""

    def rows(self, which: Any) -> ChunkFigures:
        """A selection of rows."""
        return ChunkFigures(*(None if column is None else column[:, which] for column in self))


MOST = 2**20
"""Recomputations of chunks times rows that are kept: some 40 MB."""


def rows_of_all(chunk_figures: Sequence[ChunkFigures], which: Any) -> list[ChunkFigures]:
    """Some rows of the chunks of a stage, each chunk once."""
    known = {id(figures): figures for figures in chunk_figures}
    found = {name: figures.rows(which) for name, figures in known.items()}
    return [found[id(figures)] for figures in chunk_figures]


def counts_of(microbatches: Any) -> list[int]:
    """The different numbers of micro-batches of some rows, ascending (`np.unique` without indices imports `numpy.ma`)."""
    return sorted(map(int, {*microbatches.tolist()}))


class Chunks:
    """Every chunk of a search over all rows of the parts, worked out once."""

    def __init__(self, job: Job, parts: PartColumns) -> None:
        """`job`: values that no chunk changes."""
        self.job = job
        self.parts = parts
        self._under: dict[RecomputeChoice, tuple[PartTimes, JoinedMemories]] = {}
        self._known: dict[tuple[object, ...], tuple[Num, ...]] = {}
        self._plain: dict[tuple[object, ...], ChunkTime] = {}
        self.plain_times = parts.times(NO_MODULES, NO_MODULES)
        self.copies = any(of.copied_s for of in parts.of.values())
        """Whether what recomputation leaves to send changes the seconds of a layer."""
        self._first: dict[RecomputeChoice, JoinedMemories] = {}

    def of(self, chunk: Chunk, choices: tuple[RecomputeChoice, ...], rows: Any, *, split: bool) -> ChunkFigures:
        """A chunk under each of some recomputations, for some rows of the parts. `split`: its backward runs in two halves."""
        import numpy as np

        if len(self._known) * len(self.parts.keys) > MOST:
            self._known.clear()
        each = [self._one(chunk, choice, split=split) for choice in choices]
        found = []
        for same in zip(*each, strict=True):
            column = np.empty((len(choices), rows.size))
            for row, values in zip(column, same, strict=True):
                row[:] = some(values, rows)
            found.append(column)
        return ChunkFigures(*found)

    def kept_by_experts(self, chunks: Sequence[Chunk], rows: Any) -> ByExperts:
        """What the modules with experts of a stage refer to, for some rows of the parts."""
        every = [[*chunk.runs, *([(self.parts.assembly.head, 1)] if chunk.head else [])] for chunk in chunks]
        of = {part: self.parts.of[part].kept for part in {part for runs in every for part, _ in runs}}
        selected = {part: ByExperts(*(some(column, rows) for column in kept)) for part, kept in of.items()}
        return joined([(selected[part], count) for part, count in runs] for runs in every)

    def _one(self, chunk: Chunk, choice: RecomputeChoice, *, split: bool) -> tuple[Num, ...]:
        key = (*contents(chunk), choice, split)
        if key not in self._known:
            times, memories = self.under(choice)
            under = key[: 4 if self.copies else 3]
            if under not in self._plain:
                self._plain[under] = plain_time(times if self.copies else self.plain_times, chunk)
            seconds, memory = self._plain[under], chunk_peaks(memories.parts(chunk))
            extra = memory.forward.bytes - memory.saved, memory.backward.bytes - memory.saved
            saved = memory.saved + self.output(chunk)
            halves: tuple[Num, ...] = ()
            if split:
                half = memories.split(chunk)
                halves = seconds.weight_s, half.kept, half.inputs.bytes - memory.saved, half.weights
            backward_s = seconds.backward_s + replay_s(times, chunk)
            self._known[key] = (seconds.forward_s, backward_s, saved, *extra, *halves)
        return self._known[key]

    def output(self, chunk: Chunk) -> Num:
        """Bytes of its output held for backward: in torch the logits of a pipeline's last chunk (`memory.stages`)."""
        if chunk.head:
            kept = not chunk.embedding and self.job.software.family in EAGER_TORCH
            return self.parts.whole.logits_bytes if kept else 0.0
        return 0.0 if self.job.software.activations.deallocate_pipeline_outputs else self.parts.whole.boundary_bytes

    def first(self, chunk: Chunk, choice: RecomputeChoice, rows: Any) -> list[tuple[int, PartMemory]]:
        """The parts of a chunk where gradients come into being, some rows of the parts."""
        return [(count, memory_rows(of, rows)) for count, of in self.stay(choice).parts(chunk)]

    def stay(self, choice: RecomputeChoice) -> JoinedMemories:
        """Memory of the parts where gradients of their parameters are held until their backward ends."""
        if choice not in self._first:
            modules = choice.form(self.job.model.n_layers + 2).modules
            self._first[choice] = JoinedMemories(self.parts, self.under(choice)[0].assembly, modules, first=True)
        return self._first[choice]

    def under(self, choice: RecomputeChoice) -> tuple[PartTimes, JoinedMemories]:
        """Seconds and memory of the parts under one recomputation."""
        if choice not in self._under:
            form = choice.form(self.job.model.n_layers + 2)
            view: Any = SectionColumns(self.parts.assembly.job, {"recompute": form})
            assembly = self.parts.assembly.remade(view, {})
            whole = form.granularity == "full"
            times = self.parts.times(form.modules, assembly.head_modules, whole=whole)
            self._under[choice] = (
                PartTimes(assembly, times.of, times.whole_replays),
                JoinedMemories(self.parts, assembly, form.modules),
            )
        return self._under[choice]


def memory_rows(of: PartMemory, rows: Any) -> PartMemory:
    """A part in some rows of columns."""
    forward, backward = (peak._replace(bytes=some(peak.bytes, rows)) for peak in (of.forward, of.backward))
    return of._replace(saved=some(of.saved, rows), forward=forward, backward=backward, n_params=some(of.n_params, rows))


def some(column: Num, rows: Any) -> Num:
    """A selection of rows of a column, or the one number of all."""
    return column[rows] if is_column(column) else column


def sums(chunk_figures: Sequence[ChunkFigures], field: str) -> Num:
    """A figure of all chunks of a stage."""
    total: Num = 0.0
    for figures in chunk_figures:
        total = total + getattr(figures, field)
    return total
