"""What each piece of the physics is worth: the headline rows estimated again with one piece off, nothing fitted anew.

A refit would hide a missing piece inside other constants; so each switch is also told on the rows alone that it moves.
`Ablated` is where a piece is taken out: a step timed as ever, in which some kind of work costs nothing or nothing is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from steptime import fsdp
from steptime.cost import compute
from steptime.cost.parts import CommCall, PartTime, Work
from steptime.job.assembly import Assembly, Chunk, Part
from steptime.job.job import Job
from steptime.model.ops import Gemm, Move, Op
from steptime.report.error_cells import percent
from steptime.report.table import Table
from steptime.timing.data_parallel import DataParallel, worst_stage
from steptime.timing.step_time import StepTime
from steptime.validation.judgement import Judgement
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import headline, leads
from steptime.validation.stats import Errors, plain, stats

MOVED = 0.03
"""Share of the step time from which a switch is said to move a row."""


class Switch(NamedTuple):
    """One piece of physics: the name by which `Ablated` knows it, and what is taken out."""

    name: str
    says: str


SWITCHES = (
    Switch("head", "LM head, final norm and loss cost no time"),
    Switch("attention", "attention costs no time"),
    Switch("tp_comm", "tensor-parallel communication costs no time"),
    Switch("tp_overlap", "tensor-parallel communication hides under nothing"),
    Switch("cp_comm", "context-parallel communication costs no time"),
    Switch("cp_overlap", "context-parallel communication hides under nothing"),
    Switch("dp_comm", "gradient reduction and parameter gathers cost no time"),
    Switch("dp_overlap", "gradient reduction and parameter gathers hide under nothing"),
    Switch("pp_comm", "sends between pipeline stages cost no time"),
    Switch("bubble", "the pipeline idles nowhere: its busiest stage's work alone"),
    Switch("launch", "no launch gaps"),
    Switch("kernels", "no fixed time per kernel"),
    Switch("recompute", "recomputation costs no time"),
    Switch("elementwise", "memory-bound work (norms, activations, casts, loss) costs no time"),
    Switch("casts", "casts of low-precision recipes by kernels of their own cost no time"),
    Switch("gemm_shape", "matrix multiplies of every shape run at the asymptotic rate"),
    Switch("stragglers", "replicas do not wait for the slowest"),
    Switch("optimizer", "the optimizer costs no time"),
)

WORK: dict[str, Callable[[Work], Work]] = {
    "attention": lambda work: replace(work, attention_s=0.0),
    "tp_comm": lambda work: replace(work, calls=_silent(work.calls, "tp")),
    "tp_overlap": lambda work: replace(work, calls=_exposed(work.calls, "tp")),
    "cp_comm": lambda work: replace(work, calls=_silent(work.calls, "cp")),
    "cp_overlap": lambda work: replace(work, calls=_exposed(work.calls, "cp")),
    "launch": lambda work: replace(work, launch_s=0.0),
    "elementwise": lambda work: replace(work, memory_s=0.0),
}
"""What a switch makes of the work of one part in one direction."""


def _silent(calls: list[CommCall], axis: str) -> list[CommCall]:
    return [call for call in calls if call.axis != axis]


def _exposed(calls: list[CommCall], axis: str) -> list[CommCall]:
    return [call._replace(hidden_s=0.0) if call.axis == axis else call for call in calls]


def without_casts(assembly: Assembly) -> Assembly:
    """An assembly whose block casts nothing by kernels of their own; tensors, bytes and rates of products stay."""

    def bare(op: Op) -> Op:
        if isinstance(op, Move) and op.name.endswith(".cast"):
            return replace(op, forward_bytes=0.0, kernels=0.0)
        return replace(op, cast_bytes=0.0, cast_kernels=0.0) if isinstance(op, Gemm) else op

    made = copy(assembly)
    made.block = replace(assembly.block, ops=[bare(op) for op in assembly.block.ops])
    return made


class Ablated(StepTime):
    """The timing of a job with one piece of physics off; `ablated_s` is the step."""

    def __init__(self, assembly: Assembly, off: str) -> None:
        """Time the step without `off`, the name of a switch."""
        self.off = off
        super().__init__(without_casts(assembly) if off == "casts" else assembly)

    @property
    def ablated_s(self) -> float:
        """Seconds of the step without the piece. The bubble leaves at the end, with the stragglers that wait through it."""
        if self.off != "bubble" or self.job.parallelism.pp == 1:
            return self.step_s
        waiting = self.straggler_s / (self.walk.makespan_s + self.fsdp_exposed_s)
        return self.step_s - self.pipeline.bubble_s * (1.0 + waiting)

    def timed(self, part: Part, modules: frozenset[str] = frozenset(), gap_s: float = 0.0) -> PartTime:
        """A part as ever, then without the piece."""
        if self.off == "kernels":
            self.rates = replace(self.rates, gemm_kernel_s=0.0, move_kernel_s=0.0)
            self.context = replace(self.context, rates=self.rates)
        if self.off == "head" and part is self.assembly.head:
            return PartTime(Work(), Work(), Work())
        return PartTime(*(self.without(work) for work in super().timed(part, modules, gap_s)))

    def without(self, work: Work) -> Work:
        """The work of one part in one direction, the piece taken out."""
        return WORK[self.off](work) if self.off in WORK else work

    @cached_property
    def whole_replay(self) -> Work:
        """A block's forward run again, without the piece."""
        return self.without(super().whole_replay)

    def replays(self, chunk: Chunk) -> list[tuple[float, Work]]:
        """What recomputation repeats: nothing where that is the piece."""
        return [] if self.off == "recompute" else super().replays(chunk)

    @cached_property
    def sends(self) -> list[float]:
        """Seconds of a send over each boundary."""
        return [0.0 for _ in super().sends] if self.off == "pp_comm" else super().sends

    @cached_property
    def dp(self) -> DataParallel | None:
        """Data-parallel collectives: all in sight, or none."""
        found = super().dp
        if found is None or self.off not in {"dp_comm", "dp_overlap"}:
            return found
        shown = 1.0 if self.off == "dp_overlap" else 0.0
        reduce_s, gather_s = worst_stage(found.reductions) * shown, worst_stage(found.gathers) * shown
        return found._replace(reduce_exposed_s=reduce_s, gather_exposed_s=gather_s)

    def fsdp_exposed(self) -> float:
        """Seconds of FSDP's communication in sight: its copies stay where the network is free."""
        if self.off not in {"dp_comm", "dp_overlap"} or not fsdp.applies(self.job):
            return super().fsdp_exposed()
        groups = [g for direction in self.fsdp_times for g in direction]
        network = sum(g.gather_s + g.reduce_s for g in groups) if self.off == "dp_overlap" else 0.0
        return self.job.microbatches * (sum(g.copy_s for g in groups) + network)

    @property
    def norm_reduce_s(self) -> float:
        """All-reduces of the gradients that sequence parallelism leaves partial."""
        return 0.0 if self.off == "tp_comm" else super().norm_reduce_s

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer."""
        return 0.0 if self.off == "optimizer" else super().optimizer_s

    @cached_property
    def straggler_s(self) -> float:
        """Seconds that replicas wait for the slowest."""
        return 0.0 if self.off == "stragglers" else super().straggler_s


@contextmanager
def constants(**values: float) -> Iterator[None]:
    """Constants of `steptime.cost.compute` with other values for a while."""
    kept = {name: getattr(compute, name) for name in values}
    try:
        for name, value in values.items():
            setattr(compute, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(compute, name, value)


def step_without(assembly: Assembly, off: str) -> float:
    """Seconds of a job's step with one piece of physics off.

    Raises:
        ValueError: there is no such switch.
    """
    if off not in {switch.name for switch in SWITCHES}:
        raise ValueError(f"no switch {off!r}")
    if off == "gemm_shape":
        with constants(K_OVERHEAD=0.0, WAVE_LOSS=0.0):
            return StepTime(assembly).step_s
    return Ablated(assembly, off).ablated_s


def ablation(judged: Iterable[Judgement]) -> dict[str, Any]:
    """By switch: stats of the headline rows without the piece, and on the rows it moves with and without it.

    The key "nothing" has the figures with everything on. Every config is estimated again once per switch.
    """
    rows = [j for j in headline(judged) if leads(j) and j.step_error is not None]
    assemblies = {json.dumps(j.config, sort_keys=True): j for j in rows}
    built = {text: Assembly(job_of(j)) for text, j in assemblies.items()}
    found: dict[str, Any] = {"nothing": {"all": plain(stats((j.cell, j.step_error or 0.0) for j in rows))}}
    for switch in SWITCHES:
        step_s = {text: step_without(assembly, switch.name) for text, assembly in built.items()}
        found[switch.name] = compared([(j, step_s[json.dumps(j.config, sort_keys=True)]) for j in rows])
    return found


def job_of(j: Judgement) -> Job:
    """The job that a row was judged by."""
    return to_job(to_config(j.row)._replace(config=j.config or {}))


def compared(rows: Sequence[tuple[Judgement, float]]) -> dict[str, Any]:
    """Stats of all rows with the other step time; of those it moves by more than `MOVED`, with the estimate's and the other."""

    def errors(some: Iterable[tuple[Judgement, float]]) -> Errors:
        return [(j.cell, step_s / (j.measured_step_s or 1.0) - 1.0) for j, step_s in some]

    moved = [(j, step_s) for j, step_s in rows if abs(step_s / (j.predicted_step_s or 1.0) - 1.0) > MOVED]
    return {
        "all": plain(stats(errors(rows))),
        "moved_with": plain(stats(errors((j, j.predicted_step_s or 0.0) for j, _ in moved))),
        "moved_without": plain(stats(errors(moved))),
    }


def table(found: Mapping[str, Any]) -> Table:
    """What each piece of physics is worth on the headline rows, from `ablation`."""
    says = {switch.name: switch.says for switch in SWITCHES}
    rows = []
    for name, figures in found.items():
        every = [percent(figures["all"][key]) for key in ("mean", "p90")]
        moved = ["", "", "", "", ""]
        if name in says:
            before, after = figures["moved_with"], figures["moved_without"]
            moved = [f"{before['rows']:,}", *(percent(f[key]) for key in ("mean", "p90") for f in (before, after))]
        rows.append([says.get(name, "everything on"), *every, *moved])
    header = ["", "mean", "p90", "rows moved", "mean with", "without", "p90 with", "without"]
    notes = (
        "one piece off at a time, nothing fitted anew; one vote per cell, rows of both splits",
        "rows moved: those whose step time it changes by more than 3 %, with their error with and without the piece",
    )
    return Table("ablation", header, rows, notes)
