"""What DeepEP delivers, put in order by index operations of eager torch: 8 tokens of 128 values on each of ep 2, 2 of 8 experts.

A device's experts get 16 rows of the tokens that arrive at it.
"""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.ops import VECTORIZED, Move
from steptime.model.router_choice import ranks_in_turn

MOE = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}


def ops(software: str, backend: str = "deepep", **performance):
    how = {"moe": {"dispatcher": "flex", "flex_backend": backend}} | performance
    moe = MOE | {"n_groups": 2, "node_limit": 1}
    found = Assembly(job(software, model={"moe": moe, "n_q_heads": 2}, performance=how, dp=2, ep=2))
    return {op.name: op for op in found.kinds[0].ops if isinstance(op, Move)}


@pytest.mark.parametrize(
    ("software", "compiled"), [("fsdp2", "none"), ("torchtitan@0.2", "all"), ("torchtitan@0.1", "all")]
)
def test_rows_taken_and_added_by_index(software, compiled):
    """16 rows of 128 values in bf16, 4,096 bytes, of the 8 tokens that arrive, 2,048 bytes.

    index_select reads and writes rows: 8,192 bytes; its backward, index_add_, writes zeros and adds one element at a time:
    4,096 + 3 * 2,048. scatter_add_ writes zeros, adds rows, and is copied: 4,096 + 3 * 2,048, of them 4,096 + 2 * 2,048 added.
    Each addition reads a value and a sum and writes the sum, three accesses to the two of a copied element: 1.5 * 2,048.
    """
    found = ops(software, compile=compiled)
    permute, scatter = found["moe.local_permute"], found["moe.scatter"]
    assert (permute.forward_bytes, permute.backward_bytes) == (8192, 4096 + 3 * 2048)
    assert permute.forward_by_element == VECTORIZED
    assert permute.backward_by_element == (1.5 * 2048, 4096 + 2 * 2048)
    assert scatter.forward_bytes == 4096 + 3 * 2048
    assert scatter.forward_by_element == (1.5 * 2048, 4096 + 2 * 2048)
    assert scatter.backward_by_element == VECTORIZED


@pytest.mark.parametrize(
    ("software", "backend", "compiled"),
    [("torchtitan", "deepep", "all"), ("automodel", "deepep", "none"), ("torchtitan@0.2", "hybridep", "none")],
)
def test_rows_put_in_order_by_one_kernel(software, backend, compiled):
    """Compiled, by TransformerEngine's permutation, or by HybridEP's own: no addition of single elements."""
    found = ops(software, backend, compile=compiled)
    slow = [op.backward_by_element for op in found.values() if op.name == "moe.local_permute"]
    slow += [op.forward_by_element for op in found.values() if op.name == "moe.scatter"]
    assert slow == [VECTORIZED, VECTORIZED]


@pytest.mark.parametrize(
    ("experts", "per_token", "ep", "ranks"), [(256, 8, 32, 1), (128, 8, 8, 1), (64, 6, 4, 1), (8, 2, 8, 2)]
)
def test_ranks_of_tokens_that_take_experts_in_turn(experts, per_token, ep, ranks):
    """256 experts on 32 ranks: a rank has 8, those of one token.

    64 on 4, six a token: tokens start at 0, 6, 12 ... modulo 64, all even numbers; of a rank's eight starts those at its 12th and
    14th expert reach into the next rank: 1 + 2 / 8 = 1.25. 8 on 8: each expert on a rank of its own.
    """
    assert ranks_in_turn(experts, per_token, ep) == ranks
