"""A pipeline's walk for many layouts at once: one order of actions, the seconds of their chunks in columns.

The closed form of a pipeline supposes that chunks are alike, but for those at its ends. Where they are not, stages wait for each
other in every slot of the schedule, and only the walk tells how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.schedule import default_group
from steptime.schedule.graph import Graph, graph
from steptime.schedule.orders import described, first_backward, shortened
from steptime.schedule.walk import REPEATS
from steptime.search.pipeline import Flavor, Stages, counts_of

WIDTH = 1024
"""Layouts that are walked together."""
MOST_REPEATS = 512
"""Repeats of the middle of a step that are walked where fewer do not settle; the last one then stands for the others."""


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
    flavors: Sequence[Sequence[Flavor]],
    microbatches: Any,
    boundaries: Sequence[Num],
    *,
    blocking: bool,
    least: Num = 0.0,
    wanted: Any = True,
) -> Num:
    """Seconds of every layout's pipeline, [recomputation, row].

    Args:
        stages: the pipeline.
        flavors: its chunks, [kind of stage][virtual chunk].
        microbatches: of every row.
        boundaries: exposed seconds of one send from each stage to the next, the last to the first, by row.
        blocking: a send also holds its sender.
        least: seconds that it takes at least.
        wanted: [recomputation, row], which are walked; others keep `least`.
    """
    import numpy as np

    shape = flavors[0][0].forward_s.shape
    kind_of = {stage: kind for kind, mine in enumerate(stages.of) for stage in mine}
    each = [flavor for stage in range(stages.pp) for flavor in flavors[kind_of[stage]]]
    costs = [*(flavor.forward_s for flavor in each), *(flavor.backward_s for flavor in each)]
    if stages.split:
        costs += [flavor.backward_s - flavor.weight_s for flavor in each] + [flavor.weight_s for flavor in each]
    sends = [np.broadcast_to(seconds, shape) for seconds in (0.0, *boundaries, *boundaries)]
    result = np.array(np.broadcast_to(least, shape), dtype=float)
    for m in counts_of(microbatches):
        left = np.broadcast_to(wanted & (microbatches == m), shape)
        for repeats in (REPEATS, 4 * REPEATS, min(m, MOST_REPEATS)):
            run = _run(stages.schedule, stages.pp, stages.vpp, m, repeats)
            which = np.nonzero(left)
            left = np.zeros(shape, dtype=bool)
            for first in range(0, which[0].size, WIDTH):
                some = tuple(places[first : first + WIDTH] for places in which)
                result[some], left[some] = run([c[some] for c in costs], [s[some] for s in sends], blocking=blocking)
            if not left.any():
                break
    return result


class WalkRun(NamedTuple):
    """A step of a pipeline, or a shorter one that stands for it."""

    graph: Graph
    repeats: int
    """Whole repeats of its steady state."""
    length: int
    """Actions of a stage in one of them."""
    fewer: int
    """Repeats that it is shorter by."""

    def __call__(self, costs: list[Any], sends: list[Any], *, blocking: bool) -> tuple[Any, Any]:
        """Makespans of some layouts, as `schedule.walk.Step.run` has them, and which of them had not settled."""
        import numpy as np

        held, waited = costs, [None] * len(sends)
        if blocking:
            held = [cost + sends[send] for cost, send in zip(costs, self.graph.outgoing, strict=True)]
        else:
            waited = [None, *sends[1:]]
        free = np.zeros((len(self.graph.rows), len(costs[0])))
        for number, (previous, source, cost, send) in enumerate(islice(self.graph.rows, 1, None), 1):
            now, later = free[number], waited[send]
            np.maximum(free[previous], free[source] if later is None else free[source] + later, out=now)
            now += held[cost]
        end = free[[numbers[-1] for numbers in self.graph.stages]].max(axis=0)
        if not self.fewer:
            return end, False
        lasts, before = self._repeats(free)
        longest = lasts.max(axis=0)
        settled = np.ptp(np.concatenate([lasts, before]), axis=0) <= 1e-9 * longest
        return end + self.fewer * longest, ~settled

    def _repeats(self, free: Any) -> tuple[Any, Any]:
        """Seconds of the last repeat and of the one before it, [stage, layout]."""
        import numpy as np

        found = []
        for actions, numbers in zip(self.graph.orders, self.graph.stages, strict=True):
            last = first_backward(actions) - 2 + self.repeats * self.length
            ends = [free[numbers[last - back * self.length]] for back in range(3)]
            found.append((ends[0] - ends[1], ends[1] - ends[2]))
        lasts, before = zip(*found, strict=True)
        return np.stack(lasts), np.stack(before)


@lru_cache(maxsize=64)
def _run(name: str, pp: int, vpp: int, microbatches: int, repeats: int) -> WalkRun:
    """A step, shortened to so many repeats where that is less."""
    group = default_group(pp, microbatches)
    short, period, fewer = shortened(name, pp, vpp, microbatches, group, repeats)
    if period is None or 3 * short > 2 * microbatches:
        return WalkRun(graph(name, pp, vpp, microbatches, group), 0, 0, 0)
    return WalkRun(graph(name, pp, vpp, short, period), repeats, described(name).passes * vpp * period, fewer)
