"""Seconds of every layout on one pipeline: the closed form of its walk, and the work before and after it.

Chunks, collectives and the optimizer take the same time as in an estimate. Only the walk of the schedule is replaced: by the
busiest stage's work, one micro-batch through one chunk of every other stage and the sends of that micro-batch, and by times at
which the first forward and the last backward of a chunk run in an even pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from steptime.base.num import Num, maximum, where
from steptime.cost.comm import collective
from steptime.job.job import Job
from steptime.job.mesh import Group, group, members_per_domain
from steptime.schedule import default_group
from steptime.schedule.stage_exchange import Exchange, exchange_of
from steptime.search.pipeline import ChunkFigures, Stages, counts_of, sums
from steptime.search.pipeline_states import PipelineStates, SentColumns
from steptime.search.walk_columns import makespans, unlike
from steptime.software.hidden_shares import Share
from steptime.timing.data_parallel import exposed
from steptime.timing.gradients_down import sums_s
from steptime.timing.part_times import Pricing


class Pipe(NamedTuple):
    """The pipeline of every layout: [recomputation, row]."""

    makespan_s: Num
    busiest: Num
    """The kind of stage with the most work."""
    forward_s: list[Num]
    """Of each kind of stage, one micro-batch through all its chunks."""
    backward_s: list[Num]
    group: Num
    """Micro-batches that run through one chunk before the next."""
    send_s: Num


class Sends(NamedTuple):
    """Seconds of the sends of one micro-batch between stages, by row."""

    each: list[Num]
    """From every stage to the next."""
    once: Num
    """All boundaries one after the other."""
    longest: Num
    wrap: Num
    """From the last stage to the first."""
    stage_s: list[Num]
    """Of each kind of stage, what its own sends of one micro-batch take at most, forward and backward."""


NO_SENDS = Sends([], 0.0, 0.0, 0.0, [0.0])


def sends(stages: Stages, whole: Job, priced: Pricing, sent: Any, tp: Any, sp: Any) -> Sends:
    """The sends between stages. `whole`: a job whose stages have as many devices; `sent`: bytes of a stage's output, by row."""
    p, n_dcs = whole.parallelism, priced.n_dcs
    known: dict[tuple[float, ...], Num] = {}
    each: list[Num] = []
    for stage in range(stages.pp - 1):
        pair = group(p, "pp", stage=stage, n_dcs=n_dcs)
        key = tuple(float(members_per_domain(pair, tier.size)) for tier in priced.context.tiers)
        if key not in known:
            known[key] = send_s(whole, priced, pair, sent, tp, sp)
        each.append(known[key])
    total: Num = 0.0
    longest: Num = 0.0
    for seconds in each:
        total = total + seconds
    for seconds in known.values():
        longest = maximum(longest, seconds)
    wrap = send_s(whole, priced, group(p, "embedding", n_dcs=n_dcs), sent, tp, sp)
    around = [(stages.vpp - 1.0) * wrap, *(stages.vpp * seconds for seconds in each), (stages.vpp - 1.0) * wrap]
    stage_s = []
    for mine in stages.of:
        most: Num = 0.0
        for pair_s in {(id(around[s]), id(around[s + 1])): (around[s], around[s + 1]) for s in mine}.values():
            most = maximum(most, pair_s[0] + pair_s[1])
        stage_s.append(most)
    return Sends(each, total, longest, wrap, stage_s)


def send_s(job: Job, priced: Pricing, pair: Group, sent: Any, tp: Any, sp: Any) -> Num:
    """Seconds of one send, as in `timing.step_time.send`."""
    alone = collective("send_recv", sent, pair, priced.context.tiers).time_s
    if not job.software.comm.scatter_gather_sends:
        return alone
    gathered = collective("all_gather", sent, priced.context.groups["tp"], priced.context.tiers).time_s
    return where(sp, alone, collective("send_recv", sent / tp, pair, priced.context.tiers).time_s + gathered)


def pipe(
    stages: Stages,
    chunk_figures: Sequence[Sequence[ChunkFigures]],
    microbatches: Any,
    found: Sends,
    share: Share | None,
    wanted: Any,
    limit_s: Num = inf,
    *,
    said: Exchange = "free",
) -> Pipe:
    """In closed form, or walked where `wanted`, in up to `limit_s`; `share`: how much of sends is hidden; `said`: as profiles."""
    import numpy as np

    exchange = exchange_of(said, stages.schedule, stages.vpp)
    forward = [sums(chunks, "forward_s") for chunks in chunk_figures]
    backward = [sums(chunks, "backward_s") for chunks in chunk_figures]
    left, blocking = send_share(share), share is not True  # a send holds its sender
    busiest: Num = 0
    most: Num = 0.0
    worst: Num = 0.0
    total: Num = 0.0
    for kind, times in enumerate(stages.times):
        seconds = forward[kind] + backward[kind]
        busiest, most = where(seconds > most, kind, busiest), maximum(most, seconds)
        worst = maximum(worst, seconds + left * found.stage_s[kind]) if blocking else maximum(worst, seconds)
        total = total + times * seconds
    around = 2.0 * left * (stages.vpp * found.once + (stages.vpp - 1.0) * found.wrap)
    if blocking:
        makespan = microbatches * worst + maximum(0.0, total + around - worst)
    else:  # one micro-batch through every chunk and back waits for every send
        makespan = microbatches * worst + (total - worst) / stages.vpp + around
    walked: Any = unlike(stages) or stages.split or exchange != "free"
    walked = walked or (stages.vpp > 1 and (blocking or stages.schedule != "interleaved"))
    if stages.vpp > 1 and not walked:
        walked = microbatches % stages.pp != 0  # groups of more than pp hide some of the sends
    if np.any(walked):
        boundaries = [left * seconds for seconds in (*found.each, found.wrap)]
        least = microbatches * most
        chosen = wanted & walked & (least <= limit_s)
        walk = partial(makespans, blocking=blocking, exchange=exchange)
        exact = walk(stages, chunk_figures, microbatches, boundaries, least=least, wanted=chosen)
        makespan = where(walked, exact, makespan)
    return Pipe(makespan, busiest, forward, backward, group_sizes(stages, microbatches), left * found.longest)


def send_share(share: Share | None) -> float:
    """The share of a send that its stages wait for; `share`: how much of the sends is hidden."""
    return 1.0 - (float(share or 0.0) if share is not True else 0.0)


def group_sizes(stages: Stages, microbatches: Any) -> Any:
    """Micro-batches that run through one chunk before the next."""
    import numpy as np

    if stages.vpp == 1:
        return microbatches
    groups = {m: float(default_group(stages.pp, m)) for m in counts_of(microbatches)}
    return np.array([groups[m] for m in microbatches.tolist()])


def reduce_s(
    stages: Stages,
    chunk_figures: Sequence[Sequence[ChunkFigures]],
    found: Pipe,
    calls: list[SentColumns],
    at: Any,
    times: Num,
    share: Share | None,
    slowed: Num,
) -> Num:
    """Seconds that gradient reductions add to the step; `at`: the row of the calls of each layout, `times` they run in a step.

    As `timing.data_parallel.exposed_reduction`, with the last backwards of a stage's chunks one after the other, of as many
    micro-batches each as a group has, and those of the stages before it after them. Stages of a split backward end together, each
    with gradients of weights.
    """
    worst = _worst(calls, at) * times
    if share is not True:
        return exposed(worst, 0.0, share, slowed)
    late: Num = 0.0
    before: Num = 0.0
    last = "weight_s" if stages.split else "backward_s"
    for kind, of in enumerate(calls):
        chunks, after = chunk_figures[kind], before
        sent: Num = 0.0
        for virtual, figures in enumerate(chunks):
            seconds = of.chunks[virtual][at]
            if virtual == 0 and stages.chunks[kind][0].depth == 0:
                for share_after, rest in of.marks:
                    late = maximum(late, rest[at] - after - getattr(figures, last) * share_after[at])
            sent = sent + seconds
            if virtual or stages.chunks[kind][0].depth:
                late = maximum(late, sent - after)
            after = after + getattr(figures, last) * (found.group if stages.vpp > 1 and not stages.split else 1.0)
        before = before + (0.0 if stages.split else stages.times[kind] * (chunks[0].backward_s + found.send_s))
    return exposed(worst, late + repeated_s(stages, found, calls, at, times), share, slowed)


def update_s(job: Job, priced: Pricing, found: Pipe, states: PipelineStates, at: Any, microbatches: Num) -> Num:
    """Seconds of the update, and of sums of micro-batches that go to the host before it."""
    rate = priced.context.rates.bytes_per_s
    to_host = sums_s(job, states.in_turn[at], microbatches, found.backward_s[0], rate)
    return states.optimizer_s[at] + to_host.exposed_s


def repeated_s(stages: Stages, found: Pipe, calls: list[SentColumns], at: Any, times: Num) -> Num:
    """Seconds by which the reductions of every micro-batch but the last outlast the backward that they overlap."""
    late: Num = 0.0
    if type(times) is float:
        return late
    for kind in range(len(stages.chunks)):
        late = maximum(late, calls[kind].total_s[at] - found.backward_s[kind])
    return late * (times - 1.0)


def gather_s(
    stages: Stages,
    chunk_figures: Sequence[Sequence[ChunkFigures]],
    found: Pipe,
    calls: list[SentColumns],
    at: Any,
    share: Share | None,
    slowed: Num,
    *,
    broadcast: bool,
) -> Num:
    """Seconds that parameter gathers add: as `timing.data_parallel.exposed_gather`, chunks of a stage a group apart."""
    worst = _worst(calls, at)
    if broadcast:
        return worst
    if share is not True:
        return exposed(worst, 0.0, share, slowed)
    late: Num = 0.0
    before: Num = 0.0
    for kind, of in enumerate(calls):
        chunks, needed = chunk_figures[kind], before
        free: Num = 0.0
        for virtual, figures in enumerate(chunks):
            free = free + of.chunks[virtual][at]
            if virtual == 0 and stages.chunks[kind][0].depth == 0:
                n = of.buckets[at]
                mean = (free - of.first_s[at]) / maximum(n - 1.0, 1.0)
                spread = figures.forward_s / n
                waits = of.first_s[at] + (n - 1.0) * maximum(0.0, mean - spread)
                free, late = maximum(free, waits + (n - 1.0) * spread), maximum(late, waits)
            else:
                late = maximum(late, free - needed)
            needed = needed + figures.forward_s * (found.group if stages.vpp > 1 else 1.0)
        before = before + stages.times[kind] * (chunks[0].forward_s + found.send_s)
    return exposed(worst, late, share, slowed)


def _worst(calls: list[SentColumns], at: Any) -> Num:
    worst: Num = 0.0
    for of in calls:
        worst = maximum(worst, of.total_s)
    return worst[at]


def partial_s(found: Pipe, bytes_: list[Num], at: Any, priced: Pricing, tp: Any) -> Num:
    """Seconds of the all-reduce over tp of gradients that sequence parallelism leaves partial, of the busiest stage.

    `bytes_`, `tp`: by sharding; `at`: the sharding of each layout.
    """
    over = Group("tp", tp, 1)
    sent = [collective("all_reduce", of, over, priced.context.tiers).time_s for of in bytes_]
    each = [where(of > 0.0, time_s, 0.0)[at] for of, time_s in zip(bytes_, sent, strict=True)]
    result: Num = each[0]
    for kind in range(1, len(each)):
        result = where(found.busiest == kind, each[kind], result)
    return result
