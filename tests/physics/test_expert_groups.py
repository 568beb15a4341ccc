"""Parameter groups of experts by hand: the dimension that is cut, and the rows that fill up its last piece."""

from __future__ import annotations

import pytest

from steptime.fsdp.groups import group_of
from steptime.model.ops import Param


def test_few_ranks_cut_whole_experts():
    """6 experts over ep 2 are 3 a device, 3 * 50 * 10 = 1,500 elements; two ranks of shards, 4 in all, have 2 each: 4 * 500."""
    group = group_of([Param("w", (6, 50, 10), group="expert", n_experts=6)], 1, 2, (2, 1))
    assert (group.elements, group.padded, group.turned) == (1_500, 2_000, 0)


@pytest.mark.parametrize(
    ("split_dim", "padded"),
    [
        # 100 / 2 = 50 rows a device of 20 elements; 24 ranks have 3 each, 72 rows
        (1, 72 * 20),
        # 100 rows of 10 elements; 5 each, 120 rows
        (2, 120 * 10),
    ],
)
def test_more_ranks_than_experts_cut_their_second_dimension(split_dim, padded):
    """4 experts of 100 x 10 over ep 2 and etp 2: 1,000 elements a device, all put together again from pieces of dimension 1."""
    group = group_of([Param("w", (4, 100, 10), split_dim, group="expert", n_experts=4)], 1, 24, (2, 2))
    assert (group.elements, group.padded, group.turned) == (1_000, padded, 1_000)
