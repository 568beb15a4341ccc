"""Two gloo ranks: what the collectives compute, and which rows a sweep makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.launch import fork_ranks

from steptime.bench.runs import collectives

SCRIPT = Path(__file__).with_name("gloo_collectives.py")


@pytest.fixture(scope="module")
def said():
    """What rank 0 printed."""
    done = fork_ranks(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    return json.loads(done.stdout)


def test_collectives_collect(said):
    """Full tensors of 8 numbers over 2 ranks; rank 0 hands in 1, 2, 3 ..., rank 1 10, 20, 30 ..."""
    zero, one = said["results"]
    summed = [11.0 * i for i in range(1, 9)]
    assert zero["all_reduce"] == one["all_reduce"] == summed
    assert zero["all_gather"] == one["all_gather"] == [1, 2, 3, 4, 10, 20, 30, 40]
    assert (zero["reduce_scatter"], one["reduce_scatter"]) == (summed[:4], summed[4:])
    assert zero["all_to_all"] == [1, 2, 3, 4, 10, 20, 30, 40]
    assert one["all_to_all"] == [5, 6, 7, 8, 50, 60, 70, 80]
    assert zero["broadcast"] == one["broadcast"] == list(range(1, 9))
    assert zero["send_recv"] == one["send_recv"] == list(range(1, 9))  # there and back


def test_every_kind_has_rows_of_exact_bytes(said):
    """Two fp32 numbers are 8 bytes; each size is four times the one before, to 32 KiB; a mesh axis of one rank has none."""
    assert {row["kind"] for row in said["rows"]} == set(collectives.KINDS)
    for kind in collectives.KINDS:
        mine = [row for row in said["rows"] if row["kind"] == kind]
        assert [row["bytes"] for row in mine] == [8 * 4**i for i in range(7)]
        for row in mine:
            assert (row["axis"], row["ranks"]) == ("dp", 2)
            assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
            assert row["reps"] >= collectives.LEAST


def test_the_slowest_rank_counts(said):
    """1 and 5 s on rank 0, 2 and 4 s on rank 1."""
    assert said["slowest"] == [2.0, 5.0]


def test_what_a_back_end_refuses_is_noted(said):
    assert "broadcast over dp, 8 B: not measured; no broadcast here" in said["refused"]


def test_sizes_stop_where_memory_does(monkeypatch):
    """A tenth of 10 KB: 8, 32, 128, 512."""
    monkeypatch.setattr(collectives.operands, "free_bytes", lambda _: 10_000.0)
    assert collectives.sizes(torch.device("cpu")) == [8, 32, 128, 512]
