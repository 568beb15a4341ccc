"""Seconds and bytes of every part of a job, one row per (sp, tp, cp, micro-batch): the components of all layouts.

Rows whose parts are made of the same ops are priced and walked together by the functions of a single estimate, then laid side by
side. Layers of a kind, the embedding and the head become parts whose figures are columns over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from steptime.base.num import Num, where
from steptime.cost.part_seconds import PartTime
from steptime.cost.work import Work
from steptime.job.assembly import Assembly
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.parts import Part
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories
from steptime.memory.split_backward import SplitMemory
from steptime.model.ops import Tensor
from steptime.search.part_figures import NO_MODULES, Fragment, Modules, PartFigures, Whole, alike_copies, part_figures
from steptime.timing.part_times import PartTimes


class PartKey(NamedTuple):
    """The values that the ops of a part depend on."""

    sp: bool
    tp: int
    cp: int
    ep: int
    etp: int
    microbatch_sz: int
    microbatches: int
    """Per step, as far as parts depend on it (`distinct_microbatches`)."""


def distinct_microbatches(job: Job, microbatches: Num) -> Num:
    """Micro-batches per step as far as parts depend on them.

    Their number matters where the first one's gradients become the gradient; whether there are several where all-to-alls of
    experts overlap another one's compute.
    """
    if not job.software.states.gradients_persist:
        return microbatches
    return where(microbatches > 1, 2.0, 1.0 if job.software.overlap.ep else 2.0)


def joined(fragments: Sequence[Any], places: Sequence[Any], size: int) -> Any:
    """Fragments of one shape, nested tuples of columns, as one with `size` rows: row i of a fragment goes to `places[i]`."""
    import numpy as np

    first = fragments[0]
    if isinstance(first, tuple):
        fields = [joined(same, places, size) for same in zip(*fragments, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    column = np.zeros(size)
    for values, place in zip(fragments, places, strict=True):
        column[place] = values
    return column


@dataclass(frozen=True, eq=False)
class KeyRows:
    """One row for each of `keys`."""

    keys: list[PartKey]

    def find(self, *columns: Any) -> Any:
        """The row of every key, given in columns in the order of `PartKey`."""
        import numpy as np

        codes, order, sizes = self._codes
        return order[np.searchsorted(codes, code(*columns, sizes=sizes))]

    @cached_property
    def _codes(self) -> tuple[Any, Any, list[int]]:
        import numpy as np

        columns = [np.array(column, dtype=float) for column in zip(*self.keys, strict=True)]
        codes = code(*columns)
        order = np.argsort(codes)
        return codes[order], order, extents(columns)


@dataclass(frozen=True, eq=False)
class PartColumns(KeyRows):
    """The parts of a job over all rows of `keys`."""

    module_sets: tuple[Modules, ...]
    assembly: Assembly
    """The parts whose figures are columns over all rows; the ops are those of some rows only."""
    of: Mapping[Part, PartFigures]
    whole: Whole

    def times(self, modules: Modules, in_head: Modules, *, whole: bool = False) -> PartTimes:
        """Seconds of every part as an estimate has them, with a set of modules recomputed in layers, and one in the head.

        `whole`: layers are run again from their inputs.
        """

        def time(part: Part, of: PartFigures) -> PartTime:
            replays = modules if part in self.assembly.kinds else in_head if part is self.assembly.head else NO_MODULES
            at = 1 + self.module_sets.index(replays) if replays else 0
            replay = of.replay_s[at - 1] if replays else 0.0
            sent = -1 if whole and part in self.assembly.kinds else at
            forward_s, backward_s = of.copied_s[sent] if of.copied_s else (of.forward_s, of.backward_s)
            backward = Work(memory_s=backward_s, weight_s=of.weight_s)
            return PartTime(Work(memory_s=forward_s), backward, Work(memory_s=replay))

        replays = {part: Work(memory_s=self.of[part].whole_replay_s) for part in self.assembly.kinds}
        return PartTimes(self.assembly, {part: time(part, of) for part, of in self.of.items()}, replays)


def extents(columns: Sequence[Any]) -> list[int]:
    """One plus the largest value of each column."""
    return [int(column.max(initial=0)) + 1 for column in columns]


def code(*columns: Any, sizes: Sequence[int] = ()) -> Any:
    """One whole number for a row of columns of whole numbers. `sizes`: what they are less than; by default their own extents."""
    import numpy as np

    result = np.zeros(1, dtype=np.int64)
    for column, size in zip(columns, sizes or extents(columns), strict=True):
        result = result * size + np.asarray(column, dtype=np.int64)
    return result


class JoinedMemories(PartMemories):
    """Memory of the parts over all rows under one recomputation."""

    def __init__(self, parts: PartColumns, assembly: Assembly, modules: Modules, *, first: bool = False) -> None:
        """`assembly`: that of `parts` with the recomputation as its job's; `first`: where gradients come into being."""
        self.assembly = assembly
        self.recompute = assembly.job.recompute
        self.parts_of = parts
        self.first = first
        self.embedding = self._memory(assembly.embedding)
        self.head = self._memory(assembly.head, assembly.head_modules)
        self.plain = {part: self._memory(part) for part in assembly.kinds}
        self.selective = {part: self._memory(part, modules) for part in assembly.kinds}
        self._start()

    def _memory(self, part: Part, modules: Modules = NO_MODULES) -> PartMemory:
        of, at = self.parts_of.of[part], 1 + self.parts_of.module_sets.index(modules) if modules else 0
        saved, forward, backward, ahead = (of.first if self.first else of.memory)[at]
        return PartMemory(saved, Peak(forward, ""), Peak(backward, ""), of.n_params, ahead)

    def reentrant(self, part: Part) -> Peak:
        """The peak of the backward of a layer in a reentrant checkpoint."""
        return Peak(self.parts_of.of[part].reentrant[1 if self.first else 0], "")

    def passing(self, part: Part) -> Peak:
        """The most that a forward holds of which nothing but the input stays."""
        return Peak(self.parts_of.of[part].passing, "")

    def split_part(self, part: Part) -> SplitMemory:
        """One part of one micro-batch whose backward is split."""
        kept, inputs, weights = self.parts_of.of[part].halves
        return SplitMemory(kept, Peak(inputs, ""), weights)

    @property
    def waiting_gradient(self) -> Num:
        """Bytes of the embedding's gradient before it is accumulated."""
        return self.parts_of.whole.waiting_gradient


def by_sp(job: Job) -> dict[bool, Job]:
    """A job with and without sequence parallelism."""
    return {sp: job.replace(**{"parallelism.sp": sp}) for sp in (False, True)}


def alike_groups(jobs: Mapping[bool, Job], keys: list[PartKey], devices: int) -> Iterator[tuple[Any, Candidates]]:
    """(rows, candidates) of every group of keys whose parts have the same ops; arguments as of `parts_of`."""
    import numpy as np

    for sp, job in jobs.items():
        rows = np.array([i for i, key in enumerate(keys) if key.sp == sp])
        if not rows.size:
            continue
        columns = {name: np.array([float(getattr(keys[i], name)) for i in rows]) for name in PartKey._fields[1:]}
        columns["gbs"] = columns.pop("microbatches") * columns["microbatch_sz"] * job.parallelism.dp
        for which, group in Candidates(job, **columns).alike_parts():
            group.all_on(devices)
            yield rows[which], group


def parts_of(
    jobs: Mapping[bool, Job],
    keys: list[PartKey],
    module_sets: Sequence[Modules],
    devices: int,
    gbs: int,
    *,
    split: bool,
) -> PartColumns:
    """Price and walk the parts of every key.

    `jobs`: the job that says sp or not, on one device; `devices`, `gbs`: of the layouts; `split`: some of their backwards run in
    halves.
    """
    import numpy as np

    fragments, places, first = [], [], None
    for rows, group in alike_groups(jobs, keys, devices):
        for inner, one in alike_copies(group):
            one.all_on(devices)
            assembly, fragment = part_figures(one.as_job, module_sets, gbs, split=split)
            first = first or assembly
            fragments.append(fragment)
            places.append(rows[inner])
    assert first is not None
    whole = joined(fragments, places, len(keys))
    tp = np.array([float(key.tp) for key in keys])
    return _parts(keys, tuple(module_sets), first, whole, tp)


def _parts(
    keys: list[PartKey], module_sets: tuple[Modules, ...], first: Assembly, found: Fragment, tp: Any
) -> PartColumns:
    """Parts at the same places of the runs of an assembly as those of `first`, with the joined figures as their own."""
    old = (first.embedding, first.head, *first.kinds)
    new = {a: _part(a, of, tp) for a, of in zip(old, found.parts, strict=True)}
    assembly = first.remade(first.job, new)
    assembly.boundary_bytes = found.whole.boundary_bytes
    of = {new[a]: figures for a, figures in zip(old, found.parts, strict=True)}
    return PartColumns(keys, module_sets, assembly, of, found.whole)


def _part(part: Part, of: PartFigures, tp: Any) -> Part:
    """A part whose input and parameters have columns over all rows."""
    found = Part(part.kind, part.ops, Tensor(part.x.name, of.x, part.x.itemsize), part.out, tp, part.model)
    vars(found)["n_params"] = of.n_params
    return found
