"""Pipeline schedules: what each stage runs, in which order.

A schedule is one row of `SCHEDULES`: a generator of every stage's actions, where each model chunk is held, whether backward is
split, and how it repeats. Everything else (`walk`, `peaks`, `in_flight`, a job's own chunks) reads only these.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from steptime.base.num import Num
from steptime.schedule.actions import Action, ActionKind, Orders, Place, in_groups, looped, v_shaped


class Repeat(NamedTuple):
    """With more than `fill` micro-batches the same order repeats every `period`; a stage's repeats count from its first backward.

    The input of an action is at most one repeat earlier on the stage that makes it.
    """

    fill: int
    period: int


class Schedule(NamedTuple):
    """A pipeline schedule."""

    generate: Callable[[int, int, int, int], Orders]
    """(pp, vpp, microbatches, group) to the order of every stage."""
    place: Callable[[int, int], tuple[Place, ...]]
    """(pp, vpp) to the place of every model chunk, in depth order."""
    split: bool = False
    """Whether backwards, or some of them, run as I and W (zero-bubble schedules)."""
    repeat: Callable[[int, int, int], Repeat | None] = lambda pp, vpp, group: None  # noqa: ARG005
    """(pp, vpp, group) to the repetition in the middle of a long step, if there is one."""
    pairs: bool = False
    """Whether a forward directly before a B runs as one action with it: its output is sent after both have run."""
    vpp: int | None = None
    """The model chunks per stage that the schedule requires; None for any number."""

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of action that it may run."""
        return ("F", "B", "I", "W") if self.split else ("F", "B")

    @property
    def passes(self) -> int:
        """Actions of one micro-batch and chunk, where the middle of a step repeats."""
        return 3 if self.split else 2


def _one_forward_one_backward(pp: int, vpp: int, microbatches: int, group: int) -> Orders:
    """1F1B with one chunk per stage, interleaved 1F1B with several.

    megatron/core/pipeline_parallel/schedules.py (0.16.1): backwards run the table of the forwards with the chunks reversed
    (get_model_chunk_id, :1044); get_pp_rank_microbatches, :738, counts the warm-up.
    """
    table = in_groups(vpp, microbatches, group)
    forward = [Action("F", microbatch, chunk) for microbatch, chunk in table]
    backward = [Action("B", microbatch, vpp - 1 - chunk) for microbatch, chunk in table]
    orders = []
    for stage in range(pp):
        behind = pp - 1 - stage
        warmup = min(behind if vpp == 1 else 2 * behind + (vpp - 1) * group, len(table))
        steady = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
        orders.append((*forward[:warmup], *steady, *backward[len(table) - warmup :]))
    return tuple(orders)


def _steady_pairs(pp: int, vpp: int, group: int) -> Repeat | None:
    """A pair of a forward and a backward per entry of the table, after the warm-up of the first stage."""
    if vpp == 1:
        return Repeat(pp - 1, 1)
    warmup = 2 * (pp - 1) + (vpp - 1) * group
    return Repeat(-(-warmup // (vpp * group)) * group, group) if group >= pp else None


def _steady_triples(pp: int, vpp: int, group: int) -> Repeat | None:  # noqa: ARG001
    """A forward and both halves of a backward per micro-batch, after the last stage has run its first weights' gradients."""
    return Repeat(2 * pp, 1) if vpp == 1 else None


def _all_forward_all_backward(pp: int, vpp: int, microbatches: int, group: int) -> Orders:  # noqa: ARG001
    """GPipe with one chunk per stage, breadth-first (LoopedBFS) with several; every stage runs the same order.

    torch/distributed/pipelining/schedules.py (2.13): ScheduleGPipe runs the backwards first in, first out;
    ScheduleLoopedBFS last in, first out.
    """
    back = range(microbatches) if vpp == 1 else range(microbatches - 1, -1, -1)
    forward = [Action("F", microbatch, chunk) for chunk in range(vpp) for microbatch in range(microbatches)]
    backward = [Action("B", microbatch, chunk) for chunk in range(vpp - 1, -1, -1) for microbatch in back]
    return ((*forward, *backward),) * pp


def _zero_bubble(name: str) -> Callable[[int, int, int, int], Orders]:
    """A generator of `zero_bubble`, a module that is imported when the first of them runs."""

    def generate(pp: int, vpp: int, microbatches: int, group: int) -> Orders:
        found: Orders = getattr(import_module("steptime.schedule.zero_bubble"), name)(pp, vpp, microbatches, group)
        return found

    return generate


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(_all_forward_all_backward, looped),
    # Megatron-Core takes the interleaved function whenever vpp is set (schedules.py:45): the two names are one family.
    "1f1b": Schedule(_one_forward_one_backward, looped, repeat=_steady_pairs),
    "interleaved": Schedule(_one_forward_one_backward, looped, repeat=_steady_pairs),
    "zero_bubble": Schedule(_zero_bubble("zero_bubble"), looped, split=True, repeat=_steady_triples),
    "zbv": Schedule(_zero_bubble("zb_v"), v_shaped, split=True, vpp=2),
    "dualpipev": Schedule(_zero_bubble("dualpipe_v"), v_shaped, split=True, pairs=True, vpp=2),
}
"""Every schedule, by name."""


@lru_cache(maxsize=64)
def order(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> Orders:
    """The actions of each stage, in the order they run: [pp][2 or more * vpp * microbatches].

    `group` is Megatron's microbatch_group_size_per_vp_stage, `default_group` by default. Only the interleaved schedule has
    groups; with too small a one it deadlocks.

    Raises:
        ValueError: an unknown schedule, a count below one, or one that the schedule does not run.

    >>> [f"{a.kind}{a.microbatch}" for a in order("1f1b", 2, 1, 3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    found = described(schedule)
    if min(pp, vpp, microbatches, 1 if group is None else group) < 1:
        raise ValueError(f"pp={pp}, vpp={vpp}, microbatches={microbatches}, group={group}: each must be at least 1")
    if found.vpp not in {None, vpp}:
        raise ValueError(f"{schedule} needs vpp={found.vpp} (got {vpp})")
    group = default_group(pp, microbatches) if group is None else group
    return found.generate(pp, vpp, microbatches, group)


@lru_cache(maxsize=64)
def placement(schedule: str, pp: int, vpp: int) -> tuple[Place, ...]:
    """Which stage holds each model chunk, as which of its own: [pp * vpp], in depth order.

    Raises:
        ValueError: an unknown schedule.

    >>> [tuple(place) for place in placement("interleaved", 2, 2)]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    """
    return described(schedule).place(pp, vpp)


def described(schedule: str) -> Schedule:
    """A schedule by name.

    Raises:
        ValueError: it is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


def default_group(pp: int, microbatches: int) -> int:
    """Micro-batches that a stage runs through one chunk before the next: the value that both frameworks use where they run.

    The smallest group that Megatron-Core accepts (schedules.py, 0.16.1, :995-1015): from pp to the micro-batches, and the last
    group full or at least pp; a shorter one deadlocks for some sizes. That is its default, pp, where pp divides the
    micro-batches, and torch's n_microbatches // max(1, n_microbatches // pp) (ScheduleInterleaved1F1B.__init__) wherever torch
    accepts the count. Fewer micro-batches than stages, which Megatron refuses, run as one group, as in torch.

    >>> default_group(4, 8), default_group(4, 10), default_group(4, 13), default_group(4, 3)
    (4, 5, 7, 3)
    """
    groups = (group for group in range(pp, microbatches) if not 0 < microbatches % group < pp)
    return next(groups, microbatches)


def shortened(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int | None, repeats: int
) -> tuple[int, int | None, int]:
    """A step of fewer micro-batches whose middle repeats `repeats` times on every stage, and which is otherwise equal.

    Returns:
        Its micro-batches, its group, and by how many repeats it is shorter; the step itself, and 0, where there is none.
    """
    if min(pp, vpp, microbatches, 1 if group is None else group) >= 1:
        said = default_group(pp, microbatches) if group is None else group
        found = described(schedule).repeat(pp, vpp, said)
        if found is not None:
            fewer = (microbatches - microbatches % found.period - found.fill) // found.period - repeats
            if fewer > 0:
                return microbatches - fewer * found.period, found.period, fewer
    return microbatches, group, 0


def first_backward(actions: Sequence[Action]) -> int:
    """Index of the first backward in a stage's order."""
    return next(at for at, action in enumerate(actions) if action.kind in "BI")


def bubble_fraction(pp: Num, vpp: Num, microbatches: Num) -> Num:
    """Idle share of the makespan, (p - 1) / (v m + p - 1): numbers or columns.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, gives the bubble over the ideal time as (p - 1) / (v m); this is the
    same bubble over the whole makespan. Exact for equal chunks and free sends: GPipe and 1F1B at any number of micro-batches,
    several chunks per stage (interleaved in `default_group`) from pp micro-batches on. Otherwise `walk`.

    >>> bubble_fraction(4, 1, 4)
    0.42857142857142855
    """
    return (pp - 1) / (vpp * microbatches + pp - 1)
