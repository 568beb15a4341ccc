"""Which ranks form a group, and how many of them share a node."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.job.mesh import Group, Parallelism, group, members_per_domain

degree = st.sampled_from([1, 2, 3, 4, 6, 8])


def ranks_of(p: Parallelism, axis: str, rank: int = 0) -> list[int]:
    """The ranks of one group, from Megatron's order alone: tp fastest, then cp, dp, pp."""
    grid = [(d + 0, t, c, s) for s, d, c, t in product(range(p.pp), range(p.dp), range(p.cp), range(p.tp))]
    d0, t0, c0, s0 = grid[rank]
    free = {"tp": (1,), "cp": (2,), "dp": (0,), "shards": (0, 2)}[axis]
    fixed = [i for i in range(4) if i not in free]
    mine = (d0, t0, c0, s0)
    return [r for r, at in enumerate(grid) if all(at[i] == mine[i] for i in fixed)]


@settings(deadline=None)
@given(tp=degree, cp=degree, dp=degree, pp=degree, axis=st.sampled_from(["tp", "cp", "dp", "shards"]))
def test_groups_are_those_of_the_rank_grid(tp, cp, dp, pp, axis):
    p = Parallelism(tp=tp, cp=cp, dp=dp, pp=pp)
    found = group(p, axis)
    assert [found.first + i * found.stride for i in range(int(found.ranks))] == ranks_of(p, axis)


@settings(deadline=None)
@given(tp=degree, cp=degree, dp=degree, pp=degree, axis=st.sampled_from(["tp", "cp", "dp", "shards"]))
def test_members_of_the_first_domain_are_counted(tp, cp, dp, pp, axis):
    p = Parallelism(tp=tp, cp=cp, dp=dp, pp=pp)
    found = group(p, axis)
    inside = sum(rank < 8 for rank in ranks_of(p, axis))
    members = members_per_domain(found, 8.0)
    if 8 % found.stride == 0 or found.stride % 8 == 0:
        assert members == inside
    assert 1 <= members <= inside  # a stride that does not divide the node: the group with the fewest


def test_pipeline_boundaries_cross_nodes_one_by_one():
    p = Parallelism(tp=4, pp=4, dp=1)  # stages 0 and 1 share a node of eight, 2 and 3 the next
    inside = [members_per_domain(group(p, "pp", stage=s), 8.0) for s in range(3)]
    assert inside == [2, 1, 2]
    assert [members_per_domain(group(p, "pp", stage=s), inf) for s in range(3)] == [2, 2, 2]


def test_embedding_group_is_first_and_last_stage():
    assert group(Parallelism(tp=8, pp=4, dp=2), "embedding")[1:3] == (2, 48)
    assert group(Parallelism(tp=8, pp=1, dp=2), "embedding").ranks == 1


def test_hybrid_sharding_splits_dp_with_shards_inside():
    p = Parallelism(tp=1, pp=1, dp=32, replicas=4)
    assert group(p, "shards")[1:3] == (8, 1)
    assert group(p, "replicas")[1:3] == (4, 8)


def test_centers_split_dp_and_nothing_else():
    p = Parallelism(tp=8, pp=4, dp=8)  # 256 devices, 128 in each of two centers
    over_dp = group(p, "dp", n_dcs=2)
    assert members_per_domain(over_dp, 128.0) == 4
    assert members_per_domain(over_dp, inf) == 8
    stages = group(p, "pp", n_dcs=2, stage=2)  # a center holds whole pipelines
    assert (stages.first, stages.stride, members_per_domain(stages, 128.0)) == (64, 32, 2)
    assert members_per_domain(group(p, "embedding", n_dcs=2), 128.0) == 2


def test_a_column_equals_its_rows():
    ranks, stride = np.array([2.0, 4, 16, 64, 6]), np.array([1.0, 8, 2, 4, 3])
    column = members_per_domain(Group("dp", ranks, stride), 8.0)
    assert column.tolist() == [members_per_domain(Group("dp", r, s), 8.0) for r, s in zip(ranks, stride, strict=True)]


def test_an_unknown_axis_is_an_error():
    with pytest.raises(ValueError, match="axis 'xp'"):
        group(Parallelism(tp=1, pp=1, dp=1), "xp")
