"""What torch.compile recomputes of a block under a memory budget, on a block of seven ops, by hand.

torch/_functorch/partitioners.py, choose_saved_values_set: a block keeps less than the budget's share of what it keeps otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steptime.model.ops import Attention, Gemm, Move, Op, Param, Tensor
from steptime.model.segments import listed_bytes, rotations, within_budget
from steptime.software.precision import RECIPES

if TYPE_CHECKING:
    from steptime.software.precision import Recipe


def block(recipe: Recipe | None = None) -> list[Op]:
    """A norm, its products, a norm of the query, which is turned; attention, which keeps what has turned and the products (its
    values), a projection, an activation and its product. Elements in bf16, sums of rows in fp32.
    """
    t = {name: Tensor(name, 100.0, 2.0) for name in ("n", "qn", "turned", "o", "p", "a", "y")}
    sums = {name: Tensor(name, 10.0, 4.0) for name in ("n.sum", "q.sum", "lse")}
    weight = (Param("w", (10, 10)),)
    products = Tensor("qkv", 150.0, 2.0)
    return [
        Move("norm", ("x",), (t["n"],), ("x", "n.sum"), (sums["n.sum"],)),
        Gemm("qkv", ("n",), (products,), ("n",), (), weight, recipe=recipe),
        Move("q_norm", ("qkv",), (t["qn"],), ("qkv", "q.sum"), (sums["q.sum"],)),
        Move("rope", ("qn",), (t["turned"],)),
        Attention("core", ("turned", "qkv"), (t["o"],), ("turned", "qkv", "o", "lse"), (sums["lse"],)),
        Gemm("proj", ("o",), (t["p"],), ("o",), (), weight, recipe=recipe),
        Move("act", ("p",), (t["a"],), ("p",)),
        Gemm("down", ("a",), (t["y"],), ("a",), (), weight, recipe=recipe),
    ]


ALL = 40 + 200 + 300 + 40 + 200 + 200 + 40 + 200 + 200 + 200
"""Sum of the norm, its output; products, sum of the query's norm, what has turned; output and sums of attention; projection,
activation; and the output once more, as the projection's view of it. The input is apart."""


def test_what_a_block_keeps():
    """With all bans 1,620 B: of 40 B for each sum of ten rows, 200 B for 100 elements, 300 B for the products."""
    assert listed_bytes(block(), []) == ALL == 1_620


@pytest.mark.parametrize(
    ("budget", "again", "kept"),
    [
        (1.0, [], ALL),
        (0.999, [0, 6], 1_220),  # norm and activation, from what is kept anyway
        (0.754, [0, 6], 1_220),  # 1,221 B
        (0.753, [0, 2, 6], 1_020),  # 1,219.9 B: what has turned, through the query's norm, too
        (0.1, [0, 2, 6], 1_020),  # no products
    ],
)
def test_what_a_budget_makes_again(budget, again, kept):
    """Making the turned query alone again would keep its norm's output instead, as many bytes; so would the query's norm."""
    found = within_budget(block(), budget)
    assert [segment.first for segment in found] == again
    assert listed_bytes(block(), found) == kept


def test_sums_of_a_norm_are_kept():
    """Of the norm its output is dropped and its sums stay. Of the turned query: from its norm on, until attention reads it."""
    norm, turned, act = within_budget(block(), 0.1)
    assert (norm.drops, norm.keeps, norm.reads, norm.last) == ({"n"}, ("n.sum",), ("x",), 0)
    assert (turned.drops, turned.keeps, turned.reads) == ({"qn", "turned"}, ("q.sum",), ("qkv",))
    assert (turned.first, turned.last, turned.trigger) == (2, 3, 4)
    assert (act.drops, act.keeps, act.reads, act.trigger) == ({"a"}, (), ("p",), 7)


def test_float8_by_rows_makes_again_what_only_its_products_keep_whatever_the_budget():
    """Norm and activation, whose outputs nothing else keeps: the budget is a share of 1,220 B. The turned query is next."""
    ops = block(RECIPES["fp8_rowwise"])
    assert [segment.first for segment in within_budget(ops, 1.0)] == []
    assert [segment.first for segment in within_budget(ops, 0.999)] == [0, 2, 6]


def test_attention_whose_operands_are_products_has_nothing_to_turn():
    """What attention reads here is made by a product, which does not run again."""
    ops = [op for op in block() if op.name not in {"q_norm", "rope"}]
    assert rotations(ops) == []
    assert [(segment.first, segment.last) for segment in rotations(block())] == [(2, 3)]
