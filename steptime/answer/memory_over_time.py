"""Bytes on a stage's device from action to action; the largest is the peak of the memory table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from steptime import fsdp
from steptime.answer.verdict import in_step
from steptime.job.assembly import Assembly
from steptime.memory.buffers import at_peak, stage_buffers
from steptime.memory.stages import PeakMoment, chunk_bytes, first_backward_moments, one_backward
from steptime.memory.states import States
from steptime.schedule import Action, in_flight
from steptime.schedule.actions import ActionKind
from steptime.schedule.orders import described


class ActionBytes(NamedTuple):
    """Bytes of one device at the worst moment of an action, and between that action and the next."""

    activations_bytes: float
    """Saved for backward, of all micro-batches in flight."""
    transient_bytes: float
    """In addition to them at the worst moment of the action."""
    gradients_bytes: float
    """Gradients allocated by then."""
    kept_bytes: float
    """Saved for backward after the action."""
    gradients_kept_bytes: float
    """Gradients allocated after it."""


class StageHolds(NamedTuple):
    """Bytes that one stage holds in each action."""

    stage: int
    weights: list[float]
    """By virtual chunk: kept by each micro-batch in flight."""
    forward: list[float]
    """By virtual chunk: the peak of a forward beyond that."""
    later: dict[ActionKind, list[float]]
    """The same for every kind of backward action."""
    frees: dict[ActionKind, list[float]]
    """By virtual chunk: freed by each of these; negative where an I adds."""
    permanent: float
    """Workspaces and buffers, held in every action."""
    gradients: float
    """Gradients of the whole stage."""
    first_gradients: float
    """Gradients allocated before the first backward."""
    first_backward: PeakMoment | None
    """The worst moment of the first backward, where it allocates gradients."""
    optimizer_step: PeakMoment
    one_by_one: Callable[[Sequence[Action]], Iterator[ActionBytes]] | None = None
    """Where every action is walked separately (FSDP under a pipeline): all actions."""

    def actions(self, order: Sequence[Action]) -> Iterator[ActionBytes]:
        """Bytes that the stage holds in each of its actions, in order."""
        if self.one_by_one is not None:
            yield from self.one_by_one(order)
            return
        kept, gradients, first = 0.0, self.first_gradients, self.first_backward
        for kind, _, chunk in order:
            if kind == "F":
                kept += self.weights[chunk]
                yield ActionBytes(kept, self.forward[chunk] + self.permanent, gradients, kept, gradients)
                continue
            resident, extra = kept, self.later[kind][chunk] + self.permanent
            kept -= self.frees[kind][chunk]
            kept = max(kept, 0.0)  # a rounding error may remain of what was freed
            if first is not None:
                gradients = self.gradients - float(first.grads_not_yet_allocated_bytes)
                extra = float(first.transient_bytes) + self.permanent
                yield ActionBytes(float(first.activations_bytes), extra, gradients, kept, self.gradients)
                first = None
            else:
                yield ActionBytes(resident, extra, self.gradients, kept, self.gradients)
            gradients = self.gradients


def stage_holds(assembly: Assembly, states: list[States]) -> list[StageHolds]:
    """Bytes that every stage holds in each action, as counted by `answer.verdict.stage_rows`."""
    job = assembly.job
    buffers = [stage_buffers(assembly, stage, state) for stage, state in enumerate(states)]
    permanent = [float(at_peak(one)) for one in buffers]
    steps = [in_step(job, state, of_stage) for state, of_stage in zip(states, buffers, strict=True)]
    steps = [m._replace(transient_bytes=m.transient_bytes + own) for m, own in zip(steps, permanent, strict=True)]
    if fsdp.applies(job):
        if job.parallelism.pp > 1:
            return _sharded_stages(assembly, states, steps, permanent)
        return [_sharded(assembly, states[0], steps[0])._replace(permanent=permanent[0])]
    of, alone = chunk_bytes(assembly), one_backward(job)
    found = []
    for stage, (state, step) in enumerate(zip(states, steps, strict=True)):
        weights, forward, backward = ([float(x) for x in rows[stage]] for rows in (of.weights, of.forward, of.backward))
        later: dict[ActionKind, list[float]] = {"B": backward}
        frees: dict[ActionKind, list[float]] = {"B": weights}
        if of.halves is not None:
            kept = [float(x) for x in of.halves.kept[stage]]
            later["I"], later["W"] = ([float(x) for x in rows[stage]] for rows in of.halves[1:])
            frees["I"], frees["W"] = [w - k for w, k in zip(weights, kept, strict=True)], kept
        gradients = float(state.gradients_bytes)
        holds = StageHolds(stage, weights, forward, later, frees, permanent[stage], gradients, gradients, None, step)
        if alone or _all_forward_first(assembly, stage):
            holds = _gradients_come(assembly, holds, whole=not alone)
        found.append(holds)
    return found


def _all_forward_first(assembly: Assembly, stage: int) -> bool:
    """Whether a stage allocates its gradients in its first backward, which follows all of its forwards."""
    job = assembly.job
    p = job.parallelism
    if p.pp == 1 or len(assembly.stages[stage]) > 1 or job.software.states.gradients_persist:
        return False
    if described(job.schedule).split:
        return False
    counts = in_flight(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz)
    return counts[stage] >= job.schedule_microbatches


def _gradients_come(assembly: Assembly, holds: StageHolds, *, whole: bool) -> StageHolds:
    """A stage without gradients before its first backward. `whole`: the pipeline holds `weights`, not only what parts save."""
    others = (assembly.job.schedule_microbatches - 1) * holds.weights[0] if whole else 0.0
    own = holds.weights[0] if whole else None
    moments = first_backward_moments(assembly, assembly.stages[holds.stage][0], others, own)
    in_forward = next(moments)
    worst = next(moments)
    for moment in moments:
        worst = worst.worse(moment)
    weight = float(in_forward.activations_bytes) - others
    forward, absent = float(in_forward.transient_bytes), float(in_forward.grads_not_yet_allocated_bytes)
    return holds._replace(
        weights=[weight], forward=[forward], frees={"B": [weight]},
        first_gradients=holds.gradients - absent, first_backward=worst,
    )  # fmt: skip


def _sharded(assembly: Assembly, state: States, step: PeakMoment) -> StageHolds:
    """FSDP's one stage: the worst of each pass, its buffers among the transients."""
    in_forward, in_backward = fsdp.pass_moments(assembly)
    gradients = float(state.gradients_bytes)
    absent = float(in_forward.grads_not_yet_allocated_bytes)
    weight = float(chunk_bytes(assembly).walked[0][0].saved)
    return StageHolds(
        0, [weight], [float(in_forward.added_bytes) - weight + absent],
        {"B": [float(in_backward.added_bytes) - weight]}, {"B": [weight]}, 0.0,
        gradients, gradients - absent, in_backward if absent else None, step,
    )  # fmt: skip


def _sharded_stages(
    assembly: Assembly, states: list[States], steps: list[PeakMoment], permanent: list[float]
) -> list[StageHolds]:
    """FSDP's stages of a pipeline, action by action."""

    def action_bytes(stage: int, chunks: list[fsdp.ShardedChunk], orders: Sequence[Action]) -> Iterator[ActionBytes]:
        every, kept, gradients = float(states[stage].gradients_bytes), 0.0, 0.0
        walked = fsdp.stage_actions(assembly, stage, chunks, orders)
        following = next(walked)
        for action in orders:
            if action.kind == "I" and following.action != action:  # the first chunk's inputs need no gradients
                yield ActionBytes(kept, permanent[stage], gradients, kept, gradients)
                continue
            of, kept = following.moment, float(following.kept)
            before = every - float(of.grads_not_yet_allocated_bytes)
            gradients = every - float(following.to_come)
            yield ActionBytes(
                float(of.activations_bytes), float(of.transient_bytes) + permanent[stage], before, kept, gradients
            )
            following = next(walked, following)

    return [
        StageHolds(
            stage,
            [],
            [],
            {},
            {},
            permanent[stage],
            float(state.gradients_bytes),
            0.0,
            None,
            step,
            partial(action_bytes, stage, chunks),
        )
        for stage, (state, step, chunks) in enumerate(zip(states, steps, fsdp.stage_chunks(assembly), strict=True))
    ]
