"""What each piece of the physics is worth: the headline rows estimated again with one piece off, nothing fitted anew.

A refit would hide a missing piece inside other constants; so each switch is also told on the rows alone that it moves.
`ablated` is where a piece is taken out: a step timed as ever, in which some kind of work costs nothing or nothing is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from steptime.cost import compute
from steptime.cost.part_seconds import PartTime
from steptime.cost.work import CommCall, Work
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.parts import Part
from steptime.model.ops import Gemm, Move, Op
from steptime.report.format import percent
from steptime.report.table import Table
from steptime.timing.data_parallel import worst_stage
from steptime.timing.host_update import HostUpdate
from steptime.timing.part_times import PartTimes, Pricing, part_times, pricing
from steptime.timing.step_parts import pipeline
from steptime.timing.step_time import StepTime, straggler_s, time_parts
from steptime.validation.judgement import Judgement
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import headline, leads
from steptime.validation.stats import Errors, plain, stats

MOVED = 0.03
"""Share of the step time from which a switch is said to move a row."""


class Switch(NamedTuple):
    """One piece of physics: the name by which `ablated` knows it, and what is taken out."""

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
    """An assembly whose layers cast nothing by kernels of their own; tensors, bytes and rates of products stay."""

    def bare(op: Op) -> Op:
        if isinstance(op, Move) and op.name.endswith(".cast"):
            return replace(op, forward_bytes=0.0, kernels=0.0)
        return replace(op, cast_bytes=0.0, cast_kernels=0.0) if isinstance(op, Gemm) else op

    parts = {part: replace(part, ops=list(map(bare, part.ops))) for part in assembly.kinds}
    return assembly.remade(assembly.job, parts)


@dataclass(frozen=True)
class AsEver:
    """A step timed as ever: what a switch changes is all that is computed for it."""

    assembly: Assembly
    priced: Pricing

    @classmethod
    def of(cls, assembly: Assembly) -> AsEver:
        """The step of an assembly."""
        return cls(assembly, pricing(assembly.job))

    @cached_property
    def parts(self) -> PartTimes:
        """Seconds of its parts."""
        return part_times(self.assembly, self.priced)

    @cached_property
    def timing(self) -> StepTime:
        """Its timing."""
        return time_parts(self.assembly, self.priced, self.parts)


def ablated(step: AsEver, off: str) -> float:
    """Seconds of a step timed as ever but for one piece: some kind of work costs nothing, or nothing is hidden."""
    if off == "casts":
        step = AsEver.of(without_casts(step.assembly))
    if off == "kernels":
        rates = step.priced.context.rates._replace(gemm_kernel_s=0.0, move_kernel_s=0.0)
        step = replace(step, priced=step.priced._replace(context=replace(step.priced.context, rates=rates)))
    timing = step.timing
    if off == "pp_comm":
        timing = time_parts(step.assembly, step.priced, step.parts, free_sends=True)
    elif off in {*WORK, "head", "recompute"}:
        timing = time_parts(step.assembly, step.priced, without(step.parts, off))
    elif (
        off == "bubble" and timing.job.parallelism.pp > 1
    ):  # it leaves at the end, with the stragglers that wait through it
        waiting = timing.straggler_s / (timing.walk.makespan_s + timing.fsdp_exposed_s)
        return timing.step_s - pipeline(timing).bubble_s * (1.0 + waiting)
    return changed(timing, off).step_s


def without(parts: PartTimes, off: str) -> PartTimes:
    """The seconds of the parts, the piece taken out."""
    change = WORK.get(off, lambda work: work)
    of = {part: PartTime(*map(change, times)) for part, times in parts.of.items()}
    replays = {part: change(work) for part, work in parts.whole_replays.items()}
    if off == "head":
        of[parts.assembly.head] = PartTime(Work(), Work(), Work())
    if off == "recompute":
        of = {part: times._replace(replay=Work()) for part, times in of.items()}
        replays = {part: Work() for part in replays}
        return Unreplayed(parts.assembly, of, replays)
    return PartTimes(parts.assembly, of, replays)


class Unreplayed(PartTimes):
    """Parts of which recomputation repeats nothing."""

    def replays(self, chunk: Chunk) -> list[tuple[float, Part, Work]]:
        """Nothing."""
        del chunk
        return []


def changed(timing: StepTime, off: str) -> StepTime:
    """What stands around the pipeline, the piece taken out."""
    if off in {"dp_comm", "dp_overlap"}:
        shown = 1.0 if off == "dp_overlap" else 0.0
        if timing.dp:
            reduce_s, gather_s = worst_stage(timing.dp.reductions) * shown, worst_stage(timing.dp.gathers) * shown
            timing = replace(timing, dp=timing.dp._replace(reduce_exposed_s=reduce_s, gather_exposed_s=gather_s))
        if timing.fsdp:  # its copies stay where the network is free
            exposed_s = timing.job.microbatches * (timing.fsdp.copies_s + shown * timing.fsdp.network_s)
            timing = replace(timing, fsdp=timing.fsdp._replace(exposed_s=exposed_s))
            timing = replace(timing, straggler_s=straggler_s(timing.job, timing.walk.makespan_s + exposed_s))
    if off == "tp_comm":
        timing = replace(timing, norm_reduce=timing.norm_reduce._replace(calls=0.0))
    if off == "launch":
        timing = replace(timing, optimizer=timing.optimizer._replace(around_s=0.0))
    if off == "optimizer":
        timing = replace(timing, optimizer=timing.optimizer._replace(device_s=0.0, host=HostUpdate()))
    return replace(timing, straggler_s=0.0) if off == "stragglers" else timing


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


def step_without(step: AsEver, off: str) -> float:
    """Seconds of a job's step with one piece of physics off.

    Raises:
        ValueError: there is no such switch.
    """
    if off not in {switch.name for switch in SWITCHES}:
        raise ValueError(f"no switch {off!r}")
    if off == "gemm_shape":
        with constants(K_OVERHEAD=0.0, WAVE_LOSS=0.0):
            return ablated(AsEver.of(step.assembly), off)
    return ablated(step, off)


def ablation(judged: Iterable[Judgement]) -> dict[str, Any]:
    """By switch: stats of the headline rows without the piece, and on the rows it moves with and without it.

    The key "nothing" has the figures with everything on. Every config is estimated again once per switch.
    """
    rows = [j for j in headline(judged) if leads(j) and j.step_error is not None]
    configs = {json.dumps(j.config, sort_keys=True): j for j in rows}
    step_s = {text: steps_without(job_of(j)) for text, j in configs.items()}
    found: dict[str, Any] = {"nothing": {"all": plain(stats((j.cell, j.step_error or 0.0) for j in rows))}}
    for switch in SWITCHES:
        found[switch.name] = compared([(j, step_s[json.dumps(j.config, sort_keys=True)][switch.name]) for j in rows])
    return found


def steps_without(job: Job) -> dict[str, float]:
    """Seconds of a job's step by the piece of physics that is off."""
    step = AsEver.of(Assembly(job))
    return {switch.name: step_without(step, switch.name) for switch in SWITCHES}


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
