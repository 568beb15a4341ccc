"""The combine of torchtitan v0.2.1 and v0.2.2: rows in the order of their tokens, cast to fp32, times scores by torch.bmm."""

from __future__ import annotations

import pytest
from own_rows import own
from physics_jobs import job

from steptime import Job
from steptime.cost.compute import backward, forward
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Move
from steptime.software.performance import load_software
from steptime.validation.row_torchtitan import torchtitan_release

NEW = "torchtitan@0.2.1"


def ops(of: Job) -> dict[str, Move]:
    return {op.name: op for op in Assembly(of).kinds[0].ops if isinstance(op, Move)}


@pytest.mark.parametrize(("shared", "added"), [({}, 0), ({"n_shared_experts": 1}, 3 * 2048)])
def test_bytes_of_8_tokens(shared, added):
    """8 tokens of 128 values to 2 of 8 experts: 16 rows, 2,048 elements, 4,096 B in bf16; the sums have 1,024.

    Zeros and an indexed copy: 3 * 4,096; taken back by index 2 * 4,096. Casts between bf16 and fp32, 6 B of 2,048 + 1,024
    elements; a product reads or writes both in fp32, 4 B of each: one forward, two backward. Kept: the rows in fp32, 8,192 B,
    and 16 scores. Shared experts' output is added: two reads and a write of 2,048 B.
    """
    moe = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2} | shared
    found = ops(job(NEW, model={"moe": moe, "n_q_heads": 2}))
    put, weigh = found["moe.unsort"], found["moe.weigh"]
    assert (put.forward_bytes, put.backward_bytes, put.saves) == (3 * 4096, 2 * 4096, ("moe.order",))
    casts, product = 6 * 3072, 4 * 3072
    assert (weigh.forward_bytes, weigh.backward_bytes) == (casts + product + added, casts + 2 * product)
    assert weigh.forward_by_element == (2.6 * 2048, product)
    assert weigh.backward_by_element == (2 * 2.6 * 2048, 2 * product)
    assert [(t.name, t.bytes) for t in weigh.stats] == [("moe.wide", 8192)]
    assert weigh.saves == ("moe.wide", "moe.ranked")
    assert "moe.scatter" not in found


def test_seconds_of_gpt_oss_20b_on_8_h100():
    """4 sequences of 8,192 tokens, recomputed in full: 22.07 % MFU, and 24.19 with one kernel instead (pull request 2717).

    torchtitan's FLOPs of a token: 6 * 3.61e9 active parameters + 6 * 24 layers * 64 heads * 128 * 8,192 = 31.3e9; of 32,768
    tokens at 989 TFLOP/s 4.70 and 4.29 s, so 17.2 ms of each of 24 layers less. That kernel reads 131,072 rows of 2,880 in bf16,
    755 MB, and writes 189 MB of sums, twice; backward reads 755 + 189 MB and writes 755: 3.6 GB at 2.8 TB/s, 1.3 ms. So 18.5.
    """
    layout = {"tp": 1, "pp": 1, "dp": 8, "fsdp": {}}
    data = {"gbs": 32, "seqlen": 8192, "microbatch_sz": 4}
    found = ops(
        Job(
            model="gpt-oss-20b",
            parallelism=layout,
            data=data,
            performance={"software": NEW},
            hardware="grand-teton-h100",
        )
    )
    rate = rates(Machine.load("grand-teton-h100").accelerator, load_software(NEW))
    two = [found["moe.unsort"], found["moe.weigh"]]
    seconds = sum(2.0 * forward(op, rate, {}).time_s + backward(op, rate, {})[0].time_s for op in two)
    assert seconds == pytest.approx(18.5e-3, rel=0.05)


@pytest.mark.parametrize(
    ("source", "experts", "release"),
    [
        ("pytorch/torchtitan PR #1973", "64", "0.2"),
        ("pytorch/torchtitan PR #2107", "64", "0.2.1"),
        ("pytorch/torchtitan PR #2107", "", "0.2"),
        ("pytorch/torchtitan@1 (branch, 2026-03-26)", "64", "0.2.1"),
        ("pytorch/torchtitan PR #2775", "64", "0.2"),
        ("pytorch/torchtitan PR #2937", "64", "2026-05"),
    ],
)
def test_rows_of_pull_requests_1974_to_2775(source, experts, release):
    """Without experts both releases are the same."""
    assert torchtitan_release(own(framework="torchtitan", source=source, n_experts=experts)) == release
