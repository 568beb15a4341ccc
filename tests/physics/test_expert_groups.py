"""Parameter groups of experts and split tables by hand: the dimension that is cut, and the rows that fill up its last piece."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.fsdp.groups import ParamGroup, group_of, groups
from steptime.job.assembly import Assembly
from steptime.model.ops import Param


def sizes(group: ParamGroup) -> tuple[float, float, float]:
    """Elements, with the rows that fill up, and of parameters cut along dimension 1."""
    return group.elements, group.padded, group.turned


def test_few_ranks_cut_whole_experts():
    """6 experts over ep 2 are 3 a device, 3 * 50 * 10 = 1,500 elements; two ranks of shards, 4 in all, have 2 each: 4 * 500."""
    experts = [Param("w", (6, 50, 10), group="expert", n_experts=6)]
    assert sizes(group_of(experts, 1, 2, (2, 1))) == (1_500, 2_000, 0)


def test_one_expert_a_rank_is_not_cut():
    """4 experts over ep 2, two ranks each: one a rank. With three each, 6 in all, the 50 rows of an expert are cut in 17s."""
    experts = [Param("w", (4, 50, 10), group="expert", n_experts=4)]
    assert sizes(group_of(experts, 1, 2, (2, 1))) == (1_000, 1_000, 0)
    assert sizes(group_of(experts, 1, 3, (2, 1))) == (1_000, 51 * 20, 1_000)


def test_experts_with_tensors_of_their_own_are_cut_anywhere():
    """Megatron-FSDP: 2 experts of 50 rows of 10 lie in one buffer of 100 rows; 3 ranks have 34 each, and nothing is turned."""
    experts = [Param("w", (4, 50, 10), group="expert", n_experts=4)]
    assert sizes(group_of(experts, 1, 3, (2, 1), stacked=False)) == (1_000, 1_020, 0)


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
    experts = [Param("w", (4, 100, 10), split_dim, group="expert", n_experts=4)]
    assert sizes(group_of(experts, 1, 24, (2, 2))) == (1_000, padded, 1_000)


def test_tensor_parallel_tables_are_cut_by_rows():
    """tp 2 leaves 512 of 1,024 rows of embedding and head; five ranks have 103 each, 515. The final norm's 128 are 26 each."""
    assembly = Assembly(job("fsdp2", model={"n_q_heads": 2}, tp=2, dp=5, fsdp={}))
    assert groups(assembly, assembly.chunks[0]).root.padded == 2 * 515 * 128 + 5 * 26


def test_experts_that_nothing_cuts_but_the_shards():
    """4 experts of 8 x 16 on one rank of ep and etp: 512 elements, two whole experts for each of two shards."""
    assert sizes(group_of([Param("w", (4, 8, 16), group="expert", n_experts=4, split_dim=1)], 1, 2)) == (512, 512, 0)
