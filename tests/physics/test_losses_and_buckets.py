"""The copies of logits that losses hold, buckets as rows and as columns, and parameters of parts that repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.job.local_params import Pieces
from steptime.memory.allocator_blocks import LargeBlocks
from steptime.memory.buckets import run_buckets
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.op_walk import chunk_peaks
from steptime.model.embedding_and_head import torch_loss
from steptime.model.ops import Move, Op, Tensor

LOGITS = Tensor("logits", 8 * 1_024.0, 2.0)
"""8 tokens of 1,024 logits in bf16: 16,384 B, in fp32 32,768 B."""


def loss(impl: str, *, tp: int = 1, chunks: int = 1, kept: bool = False) -> dict[str, Move]:
    """The kernels of torch's loss of `LOGITS`, or of a rank's half of twice as many."""
    software = job("fsdp2").software.replace(loss_impl=impl, loss_chunks=chunks)
    shard = Assembly(job("fsdp2", model={"n_q_heads": 4}, tp=tp)).shard
    ops: list[Op] = torch_loss(replace(shard, software=software), LOGITS, logits_kept=kept)
    return {op.name: op for op in ops if isinstance(op, Move)}


CAST = (49_152, 49_152, 0, 0)
"""Read in bf16 and written in fp32, and back."""
SMALL = 32_768


@pytest.mark.parametrize(
    ("impl", "tp", "kept", "cast", "softmax"),
    [
        # two kernels' reads and writes of fp32 forward, three backward; a training loop holds the logits in bf16
        ("composite", 1, False, CAST, (2 * SMALL, 3 * SMALL, 1, 16_384, 0)),
        ("traced", 1, False, CAST, (2 * SMALL, 3 * SMALL, 1, 0, 0)),
        # over a split vocabulary a kernel for each operation, and a copy more: the exponentials
        ("composite", 2, False, CAST, (8 * SMALL, 7 * SMALL, 6, 16_384 + SMALL, SMALL)),
        ("traced", 2, False, CAST, (8 * SMALL, 7 * SMALL, 6, 0, 0)),
        # logits that the trainer keeps are added to in backward
        ("composite", 2, True, (49_152, 49_152 + 16_384, 0, 0), (2 * SMALL, 3 * SMALL, 1, 16_384, 0)),
    ],
)
def test_copies_of_logits(impl, tp, kept, cast, softmax):
    """A rank's 8,192 logits, kernel by kernel (`torch_loss`). Of 8 targets an int64 and a number in fp32 are read, 96 B; backward
    writes zeros of fp32.
    """
    found = loss(impl, tp=tp, kept=kept)
    one, two, three = found["loss.cast"], found["loss.log_softmax"], found["loss.nll"]
    assert (one.forward_bytes, one.backward_bytes, one.forward_temp_bytes, one.backward_temp_bytes) == cast
    assert (two.forward_bytes, two.backward_bytes, two.kernels) == softmax[:3]
    assert (two.forward_temp_bytes, two.backward_temp_bytes) == softmax[3:]
    assert (three.forward_bytes, three.backward_bytes) == (96, SMALL)


def test_logits_in_fp32_are_not_copied():
    """Nothing is cast, and the loss reads them as they are: 2 * 32,768 B forward, 3 * 32,768 backward, and no copy beside."""
    shard = Assembly(job("fsdp2")).shard
    software = shard.software.replace(loss_impl="composite")
    wide = LOGITS._replace(itemsize=4.0)
    ops = [op for op in torch_loss(replace(shard, software=software), wide, logits_kept=False) if isinstance(op, Move)]
    assert [op.name for op in ops] == ["loss.log_softmax", "loss.nll"]
    assert (ops[0].forward_bytes, ops[0].backward_bytes) == (2 * SMALL, 3 * SMALL)
    assert (ops[0].forward_temp_bytes, ops[0].backward_temp_bytes) == (0, 0)


def test_copies_of_logits_of_a_loss_in_place():
    """Shifted by a position: read and written; backward zeros, a read and a write. The kernel reads, and its gradient takes the
    place of what it read.
    """
    found = loss("in_place")
    cast, shift, last = found["loss.cast"], found["loss.shift"], found["loss"]
    assert (cast.forward_bytes, cast.backward_bytes) == (49_152, 49_152)
    assert (shift.forward_bytes, shift.backward_bytes) == (2 * SMALL, 3 * SMALL)
    assert (last.forward_bytes, last.backward_bytes, last.backward_temp_bytes) == (SMALL, 2 * SMALL, -SMALL)


@pytest.mark.parametrize("impl", ["composite", "in_place", "compiled"])
def test_a_loss_in_four_chunks_runs_four_times(impl):
    """Every kernel four times over tensors of the same size."""
    whole, parts = loss(impl), loss(impl, chunks=4)
    for name, op in whole.items():
        assert parts[name].kernels == 4 * op.kernels
        if op.forward_bytes is not None and name != "loss.nll":
            assert parts[name].forward_bytes == 4 * op.forward_bytes
        assert parts[name].backward_bytes == 4 * (op.backward_bytes or 0)


PIECES = [Pieces(100, 1), Pieces(300, 1)]


@pytest.mark.parametrize("size", [1_000, None])
def test_buckets_in_columns(size):
    """Eight layers of 100 and 300 elements on 2 ranks: each starts at a multiple of 64, so a layer takes 128 + 320 = 448. After
    1,000 elements, in the third layer's first tensor's end at 996 not yet, in its second at 1,324, a bucket ends at 1,408.
    """
    one = run_buckets([(PIECES, 8)], 2, size)
    for changed in (run_buckets([(PIECES, 8)], np.array([2.0]), size), run_buckets([(PIECES * 8, 1)], 2, size)):
        assert [float(np.sum(each)) for each in changed if np.sum(each)] == one
    assert one == ([1_408, 1_408, 896] if size else [3_584])


@pytest.mark.parametrize(
    ("count", "size", "before", "expected"),
    [
        # each from a multiple of 64: after 0, 128, 256 and 384 the fourth ends at 484; of eight in all two such buckets of 512
        (8, 400, 0, [512, 512]),
        (9, 400, 0, [512, 512, 128]),
        # behind 70 elements they start at 128: the third ends at 484; then buckets of four, and two are left, of 228
        (9, 400, 70, [512, 512, 256]),
        (3, 100, 0, [128, 128, 128]),  # each closes its own
        (4, None, 0, [512]),
    ],
)
def test_buckets_of_equal_tensors(count, size, before, expected):
    """Of 100 elements on 2 ranks, told at once or one by one: a bucket closes once it holds `size`, and is filled up to 128s."""
    first = [Pieces(before, 1)] if before else []
    assert run_buckets([([*first, Pieces(100, count)], 1)], 2, size) == expected
    assert run_buckets([([*first, *[Pieces(100, 1)] * count], 1)], 2, size) == expected
    columns = run_buckets([([*first, Pieces(100, count)], 1)], np.array([2.0]), size)
    assert [float(np.sum(each)) for each in columns if np.sum(each)] == expected


def test_one_bucket_of_whole_and_broken_numbers():
    """It is one number, not a column."""
    assert run_buckets([([Pieces(100.0, 1), Pieces(300, 1)], 1)], 2, None) == [512]


def test_parts_that_repeat():
    """Three parts that keep 10 B with peaks of 14 and 17 above what the ones before keep, then two that keep 3: 20 + 17, and 30
    + 3 + 6 B. Of 5 and 7 parameters: 3 * 5 + 2 * 7.
    """
    first = PartMemory(10, Peak(14, "a"), Peak(17, "b"), 5)
    second = PartMemory(3, Peak(4, "c"), Peak(6, "d"), 7)
    assert chunk_peaks([(3, first), (0, first), (2, second)]) == PartMemory(36, Peak(37, "c"), Peak(39, "d"), 29)


def test_free_blocks_join():
    """Three tensors of 4 MiB lie one after another in 20 MiB. Once all are free, the first in the middle last, a tensor of 20 MiB
    has the same address: nothing is taken from the driver.
    """
    mib = 1024.0 * 1024.0
    blocks = LargeBlocks()
    held = [blocks.allocate(4 * mib) for _ in range(3)]
    for at in (0, 2, 1):
        block = held[at]
        assert block is not None
        assert (block.address, block.length) == (at * 4 * mib, 4 * mib)
        blocks.release(block)
    assert blocks.allocate(20 * mib) == (0, 20 * mib, 20 * mib)
    assert blocks.rest == 0
