"""How many micro-batches each stage holds, and their bytes at the worst moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import ge, itemgetter, mul, sub
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, is_column, where
from steptime.schedule.actions import Action, ActionKind
from steptime.schedule.orders import described, first_backward, order, shortened

BytesPerChunk: TypeAlias = Sequence[Sequence[Num]]
"""Bytes of each chunk, [pp][vpp]: numbers or columns."""


class State(NamedTuple):
    """The micro-batches that a stage holds when a forward ends or a backward starts; that micro-batch is included."""

    in_flight: tuple[int, ...]
    """[vpp] micro-batches of which a chunk holds saved tensors, until the last backward action of each."""
    whole: tuple[int, ...]
    """[vpp] those of them whose B or I has not run, which are held in full; equal to `in_flight` where backward is not split."""
    action: Action

    def later(self, microbatches: int) -> State:
        """The same state so many micro-batches later."""
        return self._replace(action=self.action._replace(microbatch=self.action.microbatch + microbatches))

    def below(self, other: State) -> bool:
        """Whether this one holds no more of any chunk than another state: micro-batches in full, and halves of them."""
        more = map(ge, other.whole, self.whole)
        halves = map(ge, map(sub, other.in_flight, other.whole), map(sub, self.in_flight, self.whole))
        return other is not self and all(more) and all(halves)


class SplitBytes(NamedTuple):
    """Bytes that a schedule with split backwards holds, by chunk."""

    kept: BytesPerChunk
    """Bytes held for the weights' gradients: saved tensors that the input gradients do not free, and what they add."""
    input_extra: BytesPerChunk
    """Peak of the gradients of the inputs besides all that is saved when they start (their own too)."""
    weight_extra: BytesPerChunk
    """The same for the gradients of the weights."""


class StagePeak(NamedTuple):
    """The worst moment of a stage."""

    bytes: Num
    saved_bytes: Num
    """The part that is saved for backward; the rest belongs to the running action."""
    action: Action


@lru_cache(maxsize=64)
def states(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> list[list[State]]:
    """For each stage, the states that could hold the most, whatever the bytes of each chunk.

    A step whose middle repeats holds no more than one in which it repeats once.

    Raises:
        ValueError: as `order`.
    """
    short, period, fewer = shortened(schedule, pp, vpp, microbatches, group, 1)
    later = fewer * (period or 0)
    return [
        [state.later(later) if last and later else state for state, last in stage]
        for stage in _states_of(schedule, pp, vpp, short, period)
    ]


@lru_cache(maxsize=64)
def _states_of(schedule: str, pp: int, vpp: int, short: int, period: int | None) -> list[list[tuple[State, bool]]]:
    """The same of a shortened step, and whether each follows the repeat, where the whole step's last micro-batches run.

    One for all numbers of micro-batches that are shortened to it.
    """
    found_schedule = described(schedule)
    found = []
    for row in order(schedule, pp, vpp, short, period):
        last = set(row[first_backward(row) - 1 + found_schedule.passes * vpp * (period or short) :])
        corners = _corners(_distinct(row, vpp, split=found_schedule.split))
        found.append([(state, state.action in last) for state in corners])
    return found


def _distinct(actions: Sequence[Action], vpp: int, *, split: bool) -> list[State]:
    """The distinct states of a stage: the last of a run of forwards of one chunk, the first of a run of backwards.

    A backward for inputs only may leave more bytes than before, so in a split schedule each action counts.
    """
    in_flight, whole = [0] * vpp, [0] * vpp
    first: dict[tuple[ActionKind, int, tuple[int, ...], tuple[int, ...]], Action] = {}
    runs = [list(run) for _, run in groupby(actions, key=itemgetter(0, 2))]
    for same in [[one] for run in runs for one in run] if split else runs:
        kind, _, chunk = same[0]
        if kind == "F":
            in_flight[chunk] += len(same)
            whole[chunk] += len(same)
        first.setdefault((kind, chunk, tuple(in_flight), tuple(whole)), same[-1] if kind == "F" else same[0])
        whole[chunk] -= len(same) * (kind in "BI")
        in_flight[chunk] -= len(same) * (kind in "BW")
    return [State(in_flight, whole, action) for (_, _, in_flight, whole), action in first.items()]


def _corners(found: list[State]) -> list[State]:
    """The ends of every run of states of one kind and chunk whose counts change by the same amount each time.

    What is held is a sum of counts times bytes, so between two ends of a stretch it is at most what it is at one of them; and an
    end that holds no more of anything than another one is left out.
    """
    kept: dict[tuple[ActionKind, int], list[State]] = {}
    steps: dict[tuple[ActionKind, int], list[int]] = {}
    for state in found:
        key = state.action.kind, state.action.chunk
        row = kept.setdefault(key, [])
        step = list(map(sub, state.in_flight + state.whole, row[-1].in_flight + row[-1].whole)) if row else []
        if len(row) > 1 and step == steps[key]:
            row.pop()
        row.append(state)
        steps[key] = step
    corners = {state for row in kept.values() for state in row if not any(state.below(other) for other in row)}
    return [state for state in found if state in corners]


def peaks(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    weights: BytesPerChunk,
    fwd_extra: BytesPerChunk,
    bwd_extra: BytesPerChunk,
    group: int | None = None,
    *,
    halves: SplitBytes | None = None,
) -> list[StagePeak]:
    """The most bytes each stage holds in addition to its states.

    Args:
        schedule: a name in `SCHEDULES`.
        pp: pipeline stages.
        vpp: model chunks per stage.
        microbatches: micro-batches per step.
        weights: [pp][vpp] bytes a chunk saves for the backward of one micro-batch.
        fwd_extra: [pp][vpp] most bytes of a forward in addition to all that is saved when it ends (its own micro-batch too).
        bwd_extra: [pp][vpp] most bytes of a backward in addition to all that is saved when it starts (its own too).
        group: as in `order`.
        halves: of a schedule that splits backwards, as it needs them.

    Returns:
        [pp] the peak, the saved part of it, and an action that reaches it (of columns the stage's first). No byte may be
        negative.

    Raises:
        ValueError: as `order`.
    """
    extras = {"F": fwd_extra, "B": bwd_extra}
    if described(schedule).split:
        if halves is None:
            raise ValueError(f"{schedule} runs the weight gradients separately: their bytes are required")
        extras |= {"I": halves.input_extra, "W": halves.weight_extra}
    worst = []
    for stage, candidates in enumerate(states(schedule, pp, vpp, microbatches, group)):
        late = [0.0] * vpp if halves is None else halves.kept[stage]
        early = [all_of - after for all_of, after in zip(weights[stage], late, strict=True)]
        extra = {kind: bytes_[stage] for kind, bytes_ in extras.items()}
        worst.append(stage_peak(candidates, early, late if halves is not None else None, extra))
    return worst


def stage_peak(
    candidates: Sequence[State], early: Sequence[Num], late: Sequence[Num] | None, extra: Mapping[str, Sequence[Num]]
) -> StagePeak:
    """The worst of a stage's states. `early`, `late`: bytes by chunk that backward, and the weights' gradients, free."""
    most: Num = -1.0
    most_saved: Num = 0.0
    worst = candidates[0].action
    known: dict[tuple[int, ...], Num] = {}
    for in_flight, whole, action in candidates:
        counts = whole if late is None else whole + in_flight
        if counts not in known:  # a third of them is distinct
            known[counts] = sum(map(mul, whole, early)) + (sum(map(mul, in_flight, late)) if late is not None else 0.0)
        saved = known[counts]
        total = saved + extra[action.kind][action.chunk]
        more = total > most
        if more is False:
            continue
        if more is True:
            most, most_saved, worst = total, saved, action
        elif is_column(more):
            most, most_saved = where(more, total, most), where(more, saved, most_saved)
    return StagePeak(most, most_saved, worst)


def in_flight(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> list[float]:
    """Most micro-batches that each stage holds at once, in units of its full set of chunks: [pp].

    1F1B holds min(p - r, m) on stage r; interleaved min(v m, 2 (p - r - 1) + (v - 1) group + 1) / v, one chunk more than its
    warm-up. On stage 0 that is min(m, p + (p - 1) / v) where pp divides m (Korthikanti et al. 2022, arXiv 2205.05198, 4.2).

    >>> in_flight("1f1b", 4, 1, 8), in_flight("interleaved", 4, 2, 8)
    ([4.0, 3.0, 2.0, 1.0], [5.5, 4.5, 3.5, 2.5])
    """
    return [
        max(sum(state.in_flight) for state in found) / vpp for found in states(schedule, pp, vpp, microbatches, group)
    ]
