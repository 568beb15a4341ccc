"""Ranks that the experts of a token lie on, where it takes those of its best groups: formula against drawn scores."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from steptime.model.router_choice import Routing


def chosen(experts, k, groups, limit, tokens=20_000):
    """Experts of each token, k of them: scores are drawn, the groups with the largest sums of their k // limit best scores are
    chosen, then the k best experts of these (megatron/core/transformer/moe/moe_utils.py, group_limited_topk)."""
    scores = np.random.default_rng(0).standard_normal((tokens, groups, experts // groups))
    best = np.sort(scores, axis=2)[:, :, -(k // limit) :].sum(axis=2)
    left_out = np.argsort(best, axis=1)[:, : groups - limit]
    np.put_along_axis(scores, left_out[:, :, None], -np.inf, axis=1)
    return np.argpartition(-scores.reshape(tokens, experts), k, axis=1)[:, :k]


def mean_parts(found, experts, parts):
    """Mean number of distinct parts among the experts of a token."""
    hit = np.zeros((len(found), parts))
    np.put_along_axis(hit, found // (experts // parts), 1.0, axis=1)
    return hit.sum(axis=1).mean()


@pytest.mark.parametrize(
    ("experts", "k", "groups", "limit"), [(256, 8, 8, 4), (160, 6, 8, 3), (64, 6, 8, 4), (256, 8, 4, 2), (256, 8, 1, 1)]
)
def test_the_formula_is_the_mean_of_drawn_tokens(experts, k, groups, limit):
    """DeepSeek-V3, V2 and others. Where parts are groups: up to 4 % off, since a chosen group may have none of the k best; within
    2 % elsewhere. Without groups the formula is exact."""
    found = chosen(experts, k, groups, limit)
    for parts in (2, 4, 8, 16, 32, 64):
        if experts % parts == 0:
            ours = Routing(experts, k, groups, limit).distinct(float(parts))
            assert ours == pytest.approx(mean_parts(found, experts, parts), rel=0.04 if parts == groups else 0.02), (
                parts
            )


def test_deepseek_v3_by_hand():
    """4 of 8 groups are chosen, 128 experts, 4 on each of 32 ranks. One expert of each group: a given rank of its 8 is missed
    with 7/8. Four more of the other 124: missed with (120 x 119 x 118 x 117) / (124 x 123 x 122 x 121). 20,000 drawn tokens
    have 7.48."""
    missed = 7 / 8 * comb(120, 4) / comb(124, 4)
    ours = Routing(256, 8, 8, 4).distinct(64.0)
    assert ours == pytest.approx(32 * (1 - missed))
    assert mean_parts(chosen(256, 8, 8, 4), 256, 64) == pytest.approx(ours, rel=0.002)


def test_the_limit_in_a_column():
    """Parts of several groups, of one and of a part of one, side by side."""
    routing, parts = Routing(256, 8, 8, 4), np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0])
    assert routing.distinct(parts).tolist() == [routing.distinct(n) for n in parts.tolist()]
    assert routing.distinct(1.0) == 1.0
    assert routing.distinct(256.0) == pytest.approx(8.0)
