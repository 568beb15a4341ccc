"""A pipeline's walk for many layouts at once: one order of actions, the seconds of their chunks in columns.

The closed form of a pipeline supposes that chunks are alike, but for those at its ends. Where they are not, stages wait for each
other in every slot of the schedule, and only the walk gives the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.schedule import default_group
from steptime.schedule.graph import Graph, graph
from steptime.schedule.orders import described, first_backward, shortened
from steptime.schedule.sharded import AroundActions, additions, sharded_run
from steptime.schedule.stage_exchange import Exchange, exchanged_run
from steptime.schedule.walk import REPEATS
from steptime.search.pipeline import ChunkFigures, Stages, counts_of
from steptime.search.walk_levels import Levels, levels, walked

WIDTH = 1024
"""Layouts that are walked together."""
MOST_MICROBATCHES = 512
"""Micro-batches in the middle of a step that are walked where fewer do not settle; the last repeat then represents the others."""


def unlike(stages: Stages) -> bool:
    """Whether chunks differ in more than the ends of the pipeline."""
    inner = {
        chunk.runs
        for kind, chunks in zip(stages.of, stages.chunks, strict=True)
        for chunk in chunks
        if not (0 in kind and chunk is chunks[0]) and not (stages.pp - 1 in kind and chunk is chunks[-1])
    }
    return len(inner) > 1


def makespans(
    stages: Stages,
    chunk_figures: Sequence[Sequence[ChunkFigures]],
    microbatches: Any,
    boundaries: Sequence[Num],
    *,
    blocking: bool,
    least: Num = 0.0,
    wanted: Any = True,
    around: Callable[[Any], AroundActions] | None = None,
    exchange: Exchange = "free",
) -> Num:
    """Seconds of every layout's pipeline, [recomputation, row]: at least `least`, which those keep that are not `wanted`.

    `chunk_figures`: its chunks, [kind of stage][virtual chunk]. `boundaries`: exposed seconds of one send from each stage to the
    next, the last to the first, by row. `blocking`: a send also holds its sender. `around`: what FSDP adds to the actions of some
    layouts, given by their places. `exchange`: as `schedule.walk.walk`.
    """
    import numpy as np

    shape = chunk_figures[0][0].forward_s.shape
    kind_of = {stage: kind for kind, mine in enumerate(stages.of) for stage in mine}
    each = [figures for stage in range(stages.pp) for figures in chunk_figures[kind_of[stage]]]
    costs = [*(figures.forward_s for figures in each), *(figures.backward_s for figures in each)]
    if stages.split:
        costs += [figures.backward_s - figures.weight_s for figures in each] + [figures.weight_s for figures in each]
    sends = [np.broadcast_to(seconds, shape) for seconds in (0.0, *boundaries, *boundaries)]
    result = np.array(np.broadcast_to(least, shape), dtype=float)
    left = np.broadcast_to(wanted, shape)
    most = max(5 * REPEATS, MOST_MICROBATCHES // (stages.pp if stages.vpp > 1 else 1))
    # one stream may fall behind for longer than a few repeats
    for repeats in (most,) if exchange == "one_stream" else (REPEATS, 4 * REPEATS, most):
        later = np.zeros(shape, dtype=bool)
        for run, fewer in _runs(stages, microbatches, left, repeats):
            which = np.nonzero(left & (fewer >= 0))
            for first in range(0, which[0].size, WIDTH):
                some = tuple(places[first : first + WIDTH] for places in which)
                seconds = [c[some] for c in costs], [s[some] for s in sends], fewer[some[1]]
                added = around(some) if around else None
                result[some], later[some] = run(*seconds, blocking=blocking, around=added, exchange=exchange)
        if not (left := later).any():
            break
    return result


def _runs(stages: Stages, microbatches: Any, left: Any, repeats: int) -> Iterator[tuple[WalkRun, Any]]:
    """Steps that represent the layouts `left`, each with the repeats that it is shorter by, by row; -1 for rows of others."""
    import numpy as np

    runs: dict[tuple[int, int, int], tuple[WalkRun, Any]] = {}
    for m in counts_of(microbatches[left.any(axis=0)]):
        run = _run(stages.schedule, stages.pp, stages.vpp, m, repeats)
        _, fewer = runs.setdefault((run.microbatches, run.group, run.repeats), (run, np.full(len(microbatches), -1.0)))
        fewer[microbatches == m] = run.fewer
    yield from runs.values()


class WalkRun(NamedTuple):
    """A step of a pipeline, or a shorter one that represents it."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    group: int
    repeats: int = 0
    """Whole repeats of its steady state, where it is shorter than the step."""
    length: int = 0
    """Actions of a stage in one of them."""
    fewer: int = 0
    """Repeats that it is shorter by: steps of other numbers of micro-batches may be the same but for these."""

    def __call__(
        self,
        costs: list[Any],
        sends: list[Any],
        fewer: Any,
        *,
        blocking: bool,
        around: AroundActions | None = None,
        exchange: Exchange = "free",
    ) -> tuple[Any, Any]:
        """Makespans of some layouts, as from `schedule.walk.Step.run`, and which of them had not settled.

        `fewer`: of each of them.
        """
        import numpy as np

        what, busy_s = (self.schedule, self.pp, self.vpp, self.microbatches, self.group), costs
        found: Levels | Graph = graph(*what) if exchange != "free" or around else levels(*what)
        if blocking:
            busy_s = [cost + sends[send] for cost, send in zip(costs, found.outgoing, strict=True)]
        marks = [[numbers[-1] for numbers in found.stages], *self._repeats(found)]
        every = np.array(marks).reshape(-1)
        if isinstance(found, Levels):
            ended = walked(found, busy_s, None if blocking else sends, every.tolist())
        else:
            if exchange != "free":
                ends = exchanged_run(exchange, found, what[1:], costs, sends, additions(found, around, 0.0))[1]
            else:
                assert around is not None
                ends = sharded_run(found, busy_s, [0.0] * len(sends) if blocking else sends, around, 0.0)
            ended = np.stack([ends[number] for number in every])
        end, *repeats = ended.reshape(len(marks), self.pp, -1)
        if not repeats:
            return end.max(axis=0), False
        lasts, before = repeats[0] - repeats[1], repeats[1] - repeats[2]
        longest = lasts.max(axis=0)
        settled = np.ptp(np.concatenate([lasts, before]), axis=0) <= 1e-9 * longest
        return end.max(axis=0) + fewer * longest, ~settled

    def _repeats(self, found: Levels | Graph) -> list[list[int]]:
        """The last action of the last repeat, of the one before and of the one before that, by stage."""
        if not self.fewer:
            return []
        firsts = found.first_backward if isinstance(found, Levels) else [*map(first_backward, found.orders)]
        places = [[first - 2 + (self.repeats - back) * self.length for first in firsts] for back in range(3)]
        return [[numbers[at] for at, numbers in zip(mine, found.stages, strict=True)] for mine in places]


@lru_cache(maxsize=64)
def _run(name: str, pp: int, vpp: int, microbatches: int, repeats: int) -> WalkRun:
    """A step, shortened to so many repeats where that is less."""
    group = default_group(pp, microbatches)
    short, period, fewer = shortened(name, pp, vpp, microbatches, group, repeats)
    if period is None or 3 * short > 2 * microbatches:
        return WalkRun(name, pp, vpp, microbatches, group)
    length = described(name).passes * vpp * period
    return WalkRun(name, pp, vpp, short, period, repeats, length, fewer)
