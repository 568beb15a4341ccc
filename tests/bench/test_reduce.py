"""Figures over ranks: known values on two real ranks, and the arithmetic on one."""

from __future__ import annotations

import json
import statistics
from math import isnan, nan

import pytest
from bench.launch import fork_ranks
from hypothesis import given
from hypothesis import strategies as st

from steptime.bench import reduce
from steptime.bench.reduce import RankSpread, over_ranks, slowest

SCRIPT = """
import json, sys
from pathlib import Path
from steptime.bench.reduce import over_ranks, slowest
from steptime.bench.world import find, finish, start

world = start(find(), "cpu")
rank = world.rank

def error(values, call=over_ranks):
    try:
        call(values)
    except ValueError as problem:
        return str(problem)

steps = [[1.0, 4.0, 2.0], [2.0, 3.0, 2.5]][rank]
found = {
    "plain": over_ranks({"loss": [2.0, 4.0][rank]}),
    "slowest": slowest(steps),
    "untracked": error([{"loss": 1.0, "time": 1.0}, {"time": None}][rank]),
    "lengths": error([[1.0], [1.0, 2.0]][rank], call=slowest),
    "after": over_ranks({"rank": float(rank)}),
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
finish(world)
"""


def test_two_ranks(tmp_path):
    """Both get the same, errors included, and go on together afterwards."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    done = fork_ranks(script, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == {
        "plain": {"loss": [2.0, 3.0, 4.0, 1.0]},
        "slowest": [2.0, 4.0, 2.5],
        "untracked": "loss: not tracked on rank 1 of 2; time: not tracked on rank 1 of 2",
        "lengths": "the ranks have different numbers of samples: 1, 2, by rank",
        "after": {"rank": [0.0, 0.5, 1.0, 0.5]},
    }


def test_one_process_needs_no_group():
    assert over_ranks({"loss": 2, "none_yet": 0.0}) == {
        "loss": RankSpread(2.0, 2.0, 2.0, 0.0),
        "none_yet": RankSpread(0.0, 0.0, 0.0, 0.0),
    }
    assert slowest([1.0, 2.0]) == [1.0, 2.0]
    assert over_ranks({}) == {}
    assert slowest([]) == []


@pytest.fixture
def ranks(monkeypatch):
    """Stand in for a process group: what each rank would bring."""

    def bring(*rows):
        monkeypatch.setattr(reduce, "gathered", lambda mine: list(rows))

    return bring


def test_ranks_that_did_not_track_are_named(ranks):
    ranks({"loss": 1.0}, {}, {"loss": None})
    with pytest.raises(ValueError, match=r"^loss: not tracked on ranks 1, 2 of 3$"):
        over_ranks({"loss": 1.0})


def test_what_is_no_number_stays_none(ranks):
    ranks({"loss": 1.0}, {"loss": nan})
    assert all(map(isnan, over_ranks({"loss": 1.0})["loss"]))


def test_a_step_is_as_long_as_that_of_its_slowest_rank(ranks):
    ranks([1.0, 1.0, 9.0], [2.0, 2.0, 1.0])
    assert slowest([1.0]) == [2.0, 2.0, 9.0]


figure = st.floats(-1e6, 1e6)


@given(st.lists(figure, min_size=1, max_size=6))
def test_figures_over_ranks_are_those_of_statistics(column):
    found = reduce._spread(column)
    expected = RankSpread(min(column), statistics.fmean(column), max(column), statistics.pstdev(column))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)
