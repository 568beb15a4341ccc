"""Pipeline schedules against the frameworks: Megatron-Core's own functions at work, torch's tables and torch's own replay."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path

import mcore_ask as ask
import pytest

from steptime.schedule import Action, default_group, in_flight, order, placement, walk

MEGATRON = Path(__file__).with_name("mcore_schedule.py")

# pp, vpp, microbatches, group
RUNS = [
    *[(pp, 1, m, None) for pp in (1, 2, 4, 8) for m in (1, 2, 3, 8, 13)],
    *[(pp, vpp, m * pp, None) for pp in (2, 3, 4, 8) for vpp in (2, 3, 5) for m in (1, 2, 5)],
    *[
        (pp, vpp, m, group)
        for pp, m, group in [(2, 5, 3), (4, 10, 5), (4, 10, 6), (4, 13, 7), (4, 13, 9), (3, 17, 7)]
        for vpp in (2, 4)
    ],
]
# pp, vpp, microbatches that pp does not divide: default_group, the smallest group that Megatron accepts
UNEVEN = [
    (pp, vpp, m) for pp, m in [(2, 3), (2, 31), (3, 4), (4, 5), (4, 13), (4, 15), (6, 64), (5, 9)] for vpp in (2, 3)
]
RUNS += [(pp, vpp, m, default_group(pp, m)) for pp, vpp, m in UNEVEN]
SMALLER = [(pp, vpp, m, group) for pp, vpp, m in UNEVEN for group in range(pp, default_group(pp, m))]
REFUSED = [*SMALLER, (4, 2, 10, 4), (4, 2, 3, 4), (4, 2, 8, 3)]


@pytest.fixture(scope="module")
def megatron():
    """What Megatron-Core does in each cell, from one process that imports it."""
    cells = [*RUNS, *REFUSED]
    return dict(zip(cells, json.loads(ask.megatron(MEGATRON, json.dumps(cells))), strict=True))


def name(vpp):
    return "1f1b" if vpp == 1 else "interleaved"


@pytest.mark.parametrize("cell", RUNS, ids=str)
def test_megatron_runs_this_order_on_every_rank(megatron, cell):
    pp, vpp, microbatches, group = cell
    theirs = [[Action(*action) for action in rank] for rank in megatron[cell]["orders"]]
    assert theirs == [list(actions) for actions in order(name(vpp), pp, vpp, microbatches, group)]


@pytest.mark.parametrize("cell", UNEVEN, ids=str)
def test_a_plan_without_a_group_runs_megatrons_order(megatron, cell):
    """As Megatron with the smallest group that it accepts; every smaller one is among REFUSED."""
    theirs = megatron[(*cell, default_group(cell[0], cell[2]))]["orders"]
    assert [[Action(*action) for action in rank] for rank in theirs] == list(map(list, order("interleaved", *cell)))


@pytest.mark.parametrize("cell", [*RUNS, *REFUSED], ids=str)
def test_megatron_counts_and_table(megatron, cell):
    pp, vpp, microbatches, group = cell
    for (total, warmup, rest), actions in zip(
        megatron[cell]["counts"], order(name(vpp), pp, vpp, microbatches, group), strict=True
    ):
        kinds = [action.kind for action in actions]
        assert len(kinds) == 2 * total
        # the warm-up is what runs before the first pair of a forward and a backward
        assert kinds == ["F"] * warmup + ["F", "B"] * rest + ["B"] * warmup
        forwards = [[a.microbatch, a.chunk] for a in actions if a.kind == "F"]
        assert forwards == megatron[cell]["table"]


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_what_megatron_refuses(megatron, cell):
    """docs/schedules.md says so: the order can be made, but Megatron raises."""
    assert "should" in megatron[cell]["refused"]
    assert "orders" not in megatron[cell]


def torch_table(schedule, pp, vpp, microbatches):
    """torch's own order of every rank, with only forwards and backwards kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    table = [
        [action for action in rank if action is not None and action.computation_type.value in "FB"]
        for rank in get_schedule_ops(schedule, pp, microbatches, None if vpp == 1 else vpp)
    ]
    if schedule == "1F1B":
        # torch 2.13 numbers the forwards of the last rank from 1, and would never start: count them from 0
        last = [a for a in table[-1] if a.computation_type.value == "F"]
        assert [a.microbatch_index for a in last] == list(range(1, microbatches + 1))
        table[-1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a.computation_type.value == "F" else a
            for a in table[-1]
        ]
    return table


def torch_starts(table):
    """When each action starts in torch's own replay, a forward taking 1 and a backward 2; and the end."""
    from torch.distributed.pipelining._schedule_visualizer import add_schedule_op_spacing

    with contextlib.redirect_stdout(io.StringIO()):
        spaced = add_schedule_op_spacing(table)
    ranks, end = [], 0
    for rank in spaced:
        now, starts = 0, []
        for action in rank:
            width = 2 if action is not None and action.computation_type.value == "B" else 1
            if action is not None:
                starts.append(now)
                end = max(end, now + width)
            now += width
        ranks.append(starts)
    return ranks, end


TABLES = [
    *[("GPipe", "gpipe", pp, 1, m) for pp in (2, 4, 8) for m in (1, 3, 8)],
    *[("1F1B", "1f1b", pp, 1, m) for pp in (2, 4, 8) for m in (8, 9, 16)],
    *[("Interleaved1F1B", "interleaved", pp, v, m) for pp in (2, 4) for v in (2, 3) for m in (2, 3, 4, 8, 12)],
    ("Interleaved1F1B", "interleaved", 4, 2, 10),
    ("Interleaved1F1B", "interleaved", 4, 4, 6),
    ("Interleaved1F1B", "interleaved", 8, 2, 32),
    *[("LoopedBFS", "gpipe", pp, v, m) for pp in (2, 4) for v in (2, 3) for m in (2, 3, 8)],
]
TABLES = [
    (theirs, ours, pp, v, m) for theirs, ours, pp, v, m in TABLES if ours != "interleaved" or m % max(1, m // pp) == 0
]


@pytest.mark.parametrize(("theirs", "ours", "pp", "vpp", "microbatches"), TABLES)
def test_torch_tables_order_times_and_in_flight(theirs, ours, pp, vpp, microbatches):
    table = torch_table(theirs, pp, vpp, microbatches)
    orders = order(ours, pp, vpp, microbatches)
    as_actions = [
        tuple(Action(a.computation_type.value, a.microbatch_index, a.stage_index // pp) for a in rank) for rank in table
    ]
    assert tuple(as_actions) == orders
    starts, end = torch_starts(table)
    ours_walk = walk(ours, pp, vpp, microbatches, [[1.0] * vpp] * pp, [[2.0] * vpp] * pp, [0.0] * pp)
    assert [[span.start_s for span in times.spans] for times in ours_walk.times()] == starts
    assert ours_walk.makespan_s == end
    assert in_flight(ours, pp, vpp, microbatches) == [live_peak(rank) / vpp for rank in table]


def live_peak(rank):
    live = peak = 0
    for action in rank:
        live += 1 if action.computation_type.value == "F" else -1
        peak = max(peak, live)
    return peak


def in_turn(action):
    """A torch action as ours: overlapped pairs one after the other."""
    if not action.sub_actions:
        yield action.computation_type.value, action.microbatch_index, action.stage_index
    for inner in action.sub_actions or ():
        yield from in_turn(inner)


SPLIT_TABLES = [
    *[("InterleavedZeroBubble", "zero_bubble", pp, v, m) for pp in (2, 4, 8) for v in (2, 3) for m in (1, 3, 4, 8, 16)],
    *[("ZBVZeroBubble", "zbv", pp, 2, m) for pp in (2, 3, 4, 8) for m in (1, 4, 7, 15, 24)],
    *[("DualPipeV", "dualpipev", pp, 2, m) for pp in (2, 3, 4, 8) for m in (2 * pp, 2 * pp + 1, 24)],
]
SPLIT_TABLES = [cell for cell in SPLIT_TABLES if cell[1] != "zero_bubble" or cell[4] % max(1, cell[4] // cell[2]) == 0]


@pytest.mark.parametrize(("theirs", "ours", "pp", "vpp", "microbatches"), SPLIT_TABLES)
def test_torchs_zero_bubble_tables(theirs, ours, pp, vpp, microbatches):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    places = dict(enumerate(placement(ours, pp, vpp)))
    table = [
        [found for action in row if action is not None for found in in_turn(action)]
        for row in get_schedule_ops(theirs, pp, microbatches, vpp)
    ]
    for rank, row in enumerate(table):
        assert all(places[stage].stage == rank for _, _, stage in row)
    as_actions = [tuple(Action(kind, m, places[stage].chunk) for kind, m, stage in row) for row in table]
    assert tuple(as_actions) == order(ours, pp, vpp, microbatches)
