"""Figures of several layouts at once, as numpy columns: each entry worked out by hand."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from steptime.cost.comm import collective
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group
from steptime.memory.buckets import Pieces, run_buckets
from steptime.memory.ledger import Ledger, Peak
from steptime.memory.stages import PeakMoment
from steptime.schedule import peaks


def entries(*of: float) -> np.ndarray:
    return np.array(of, dtype=float)


def test_the_worst_moment_of_each_entry():
    """GPipe of two chunks and two micro-batches on one stage: forwards of chunk 0, 10 B each, then of chunk 1, 1 B each; the
    backwards the other way. Chunk 0's forward takes 100 B beside 20, or its backward 50 beside 20, or all that is kept is the
    most: 22.
    """
    weights = [[entries(10, 10, 10), entries(1, 1, 1)]]
    forward, backward = [[entries(100, 0, 0), 0.0]], [[entries(0, 50, 0), 0.0]]
    [worst] = peaks("gpipe", 1, 2, 2, weights, forward, backward)
    assert worst.bytes.tolist() == [120, 70, 22]
    assert worst.saved_bytes.tolist() == [20, 20, 22]


def test_the_worse_of_two_moments_by_entry():
    """Activations and transients, less the gradients to come: 5 and 3, 5 and 9, 7 and 7, where the first stays."""
    first = PeakMoment(entries(4, 4, 6), entries(3, 3, 2), "f", entries(2, 2, 1))
    second = PeakMoment(entries(1, 8, 8), entries(3, 2, 1), "b", entries(1, 1, 2))
    found = first.worse(second)
    assert found.activations_bytes.tolist() == [4, 8, 6]
    assert found.transient_bytes.tolist() == [3, 2, 2]
    assert found.grads_not_yet_allocated_bytes.tolist() == [2, 1, 1]
    assert found.added_bytes.tolist() == [5, 9, 7]
    assert found.op == ""


def test_a_ledgers_most_by_entry():
    """3 B and 1 B beside, then 2 and 9: of either entry the more; no op is named."""
    ledger = Ledger(entries(3, 3))
    ledger.mark("first", entries(1, 1))
    ledger.bytes = entries(2, 2)
    ledger.mark("second", entries(0, 9))
    assert ledger.peak.bytes.tolist() == [4, 11]
    assert ledger.peak.op == ""
    worse = Peak(entries(1, 5), "a").worse(Peak(entries(4, 2), "b"))
    assert (worse.bytes.tolist(), worse.op) == ([4, 5], "")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # 100 elements; 1,000 from 128 to 1,128, which close a bucket of 1,000 at 1,152; 70 in one of 128. One bucket: 1,222, 58
        (((100, False), (1_000, False), (70, False)), [[0, 1_152, 0, 128], [0, 0, 0, 1_280]]),
        # a copy of a tied table has a bucket of its own: what lies before it ends at 128, itself takes 384
        (((100, False), (300, True), (70, False)), [[0, 128, 384, 0, 128]] * 2),
        # with nothing before it nothing is closed
        (((300, True), (70, False)), [[0, 384, 0, 128]] * 2),
    ],
)
def test_buckets_of_each_entry(pieces, expected):
    """dp 2, buckets of 1,000 elements or one: tensors start at multiples of 64 and buckets end at multiples of 128
    (megatron/core/distributed/param_and_grad_buffer.py:627-742).
    """
    runs = [([Pieces(elements, 1, alone) for elements, alone in pieces], 1)]
    found = run_buckets(runs, 2, entries(1_000, inf))
    assert np.array([np.broadcast_to(size, 2) for size in found]).T.tolist() == expected


def test_an_all_reduce_of_each_entry():
    """One rank sends nothing; 8 in a node take the switch, which adds, at 9/8 of 8 GB by 80 GB/s (a ring: 7/4 by 100); 16 over
    two nodes, whose links have no such switch, a ring of 15/8 of it by eight NICs of 10 GB/s.
    """
    node = Tier(name="node", size=8, bytes_per_s=100e9, latency_s=0.0, efficiency=1.0, in_network_reduction=True)
    node = node.model_copy(update={"in_network_efficiency": 0.8})
    fabric = Tier(name="fabric", size=inf, bytes_per_s=10e9, latency_s=0.0, efficiency=1.0)
    found = collective("all_reduce", 8e9, Group("dp", entries(1, 8, 16), 1), (node, fabric))
    assert found.bandwidth_s == pytest.approx([0.0, 0.1125, 0.1875])
    assert found.latency_s == pytest.approx([0.0, 25e-6, 8.4e-6])
    assert list(found.algorithm) == ["", "in-network", "ring"]
    assert list(found.tier) == ["", "node", "fabric"]


def test_the_worse_of_a_column_and_a_number():
    """Row by row; a column's rows differ in their op, so none is named."""
    rows, one = Peak(np.array([1.0, 5.0]), "a"), Peak(3.0, "b")
    for worse in (rows.worse(one), one.worse(rows)):
        assert (worse.bytes.tolist(), worse.op) == ([3.0, 5.0], "")
    assert one.worse(Peak(4.0, "c")) == Peak(4.0, "c") == Peak(4.0, "c").worse(one)
