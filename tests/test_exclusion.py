"""Which judged rows of the shipped collection stand apart, by what their source says."""

import pytest
from own_rows import BASE, SHIPPED

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.validation.exclusion import exclusion, leak, refuse_not_judged
from steptime.validation.judgement import judge
from steptime.validation.measured_figures import ALLOCATOR, LEAK
from steptime.validation.measurements import MeasuredRow, SkipRowError


@pytest.mark.parametrize(
    ("notes", "stands_apart"),
    [
        ("packed documents", True),
        ("SFT on Packed documents; compile=off", True),
        ("packed doc mask", False),
        ("", False),
    ],
)
def test_packed_documents_stand_apart(notes, stands_apart):
    """A published row alone: a user's own counts."""
    cells = BASE | {"overlap_notes": notes, "recompute": "none", "vocab": "32000", "quality": "A"}
    reason = exclusion(MeasuredRow(cells, "native", 2), [])
    assert (reason is not None and reason.startswith("packed documents")) == stands_apart
    assert exclusion(MeasuredRow(cells, "", 2), []) is None


def test_other_vendors_kernels_stand_apart():
    """By what the source says, whatever its time was; a user's own row counts."""
    cells = BASE | {
        "recompute": "none",
        "vocab": "32000",
        "quality": "A",
        "gpu": "ascend-910b",
        "framework": "MindSpeed-LLM 1.0.RC3",
    }
    assert (exclusion(MeasuredRow(cells, "native", 2), []) or "").startswith("MindSpeed on Ascend")
    assert exclusion(MeasuredRow(cells, "", 2), []) is None


def test_packed_documents_of_the_shipped_rows():
    """The nine runs of ms-swift whose source says so, and no others."""
    packed = [row for row in SHIPPED.values() if (exclusion(row, []) or "").startswith("packed documents")]
    assert {row.group for row in packed} == {"ms-swift"}
    assert len(packed) == 9


@pytest.mark.parametrize(
    ("cells", "cause"),
    [
        (
            {"recompute": "mixed ilp: keep 13.8 recompute 72.3 offload 13.9 %"},
            "not stated: which tensors its solver keeps",
        ),
        ({"recompute": "selective (graph remat; op list not stated)"}, "not stated: which operations"),
        ({"zero_or_fsdp": "zero3 + Adam states offloaded during step"}, "not modeled yet: optimizer states"),
        ({"note": "so how fp32 was run is not visible"}, "not stated: how fp32 was run"),
    ],
)
def test_a_row_that_is_not_judged_says_why(cells, cause):
    """A published row alone: a user's own gets the message about its key."""
    with pytest.raises(SkipRowError, match=f"^{cause}"):
        refuse_not_judged(MeasuredRow(BASE | cells, "native", 2))
    refuse_not_judged(MeasuredRow(BASE | cells, "", 2))


LEAKY = [f"nous-torchtitan-n00{i}" for i in range(1, 7)]


@pytest.mark.parametrize("name", LEAKY)
def test_a_leak_explains_the_memory_of_its_runs(name):
    """Estimate and leak are within 2 % of what was reserved, on 8 to 128 devices and with 8 and 10 sequences.

    Qwen3 30B A3B: 48 layers of hidden size 2,048, 32 heads and 4 key heads of 128, top 8 of 128; bf16, full recomputation.
    Each layer's dispatcher keeps the router's probabilities, which refer to the recomputed graph up to them. Its saved tensors,
    in bytes per token: the outputs of both norms and the residual between them, 3 x 4,096; q and k before their norms, 8,192 and
    1,024; q, and k and v repeated for all heads, 3 x 8,192; attention's output 8,192 and log-sum-exp 128; the statistics of four
    norms, (1 + 32 + 4 + 1) x 4; the router's softmax 512, scores 32 and indices 64: 55,160. They are activations, beside
    which expandable segments lose 2.4 % to gaps.
    """
    kept = 3 * 4096 + 8192 + 1024 + 3 * 8192 + 8192 + 128 + 38 * 4 + 512 + 32 + 64
    assert kept == 55_160
    judged = judge(SHIPPED[name])
    assert judged.measured_bytes is not None
    assert judged.predicted_bytes is not None
    tokens = judged.row.needed("micro_batch_size") * 4096
    assert judged.predicted_bytes + 1.024 * 48 * tokens * kept == pytest.approx(judged.measured_bytes, rel=0.02)


WAITING = {"torchtitan-pr-n110": 0.5012, "torchtitan-pr-n111": 0.7649}
"""Rows, and the share of 95.0396 GiB that their source prints as peak active memory."""


@pytest.mark.parametrize("name", WAITING)
def test_what_collectives_held_until_the_device_had_run_them(name):
    """Active memory counts freed blocks that wait for another stream. Tensor parallelism frees in each of 32 layers two gathered
    inputs and two partial outputs of 32,768 tokens x 4,096 in bf16, 256 MiB each: 1 GiB. With full recomputation, which leaves
    most of the device free, 25 GiB of them wait, and 11 GiB where nine tenths are reserved: a host some layers ahead.
    """
    row, gib = SHIPPED[name], 2.0**30
    assert 4 * row.needed("micro_batch_size") * row.needed("seq_len") * row.needed("hidden") * 2 == gib
    found = estimate(Job(**judge(row).config)).memory.stages[0]
    waits = WAITING[name] * 95.0396 - found.allocated_bytes / gib
    assert waits == pytest.approx(25.2 if name.endswith("110") else 11.5, abs=0.1)


ABSOLUTE = ["torchtitan-pr-n078", "torchtitan-pr-n081"]


def test_absolute_values_that_checkpointing_kept():
    """Llama-3 8B with a sequence of 8,192 tokens; estimate and kept values are within 1 % of what was reserved.

    Eager, each of a layer's seven linears keeps those of its input, 6 x 4,096 + 14,336 a token, and of its weight, two of 4,096 x
    4,096, two of 1,024 x 4,096 and three of 14,336 x 4,096: in bf16 and 32 layers exactly 32 GiB. Compiled with a scale for each
    row, those of the feed-forward's three weights: 10.5 GiB.
    """
    weights = 3 * 14_336 * 4_096
    every = 8_192 * (6 * 4_096 + 14_336) + 2 * 4_096 * (4_096 + 1_024) + weights
    kept = {"torchtitan-pr-n078": 32 * 2 * weights, "torchtitan-pr-n081": 32 * 2 * every}
    assert kept["torchtitan-pr-n081"] == 2**35
    for name in ABSOLUTE:
        judged = judge(SHIPPED[name])
        assert judged.predicted_bytes + kept[name] == pytest.approx(judged.measured_bytes, rel=0.01)


def test_a_leak_is_no_evidence_for_other_programs():
    """Its reading is none of the allocator's counters, which the memory interval rests on; the step time counts as before."""
    assert {row.id for row in SHIPPED.values() if leak(row)} == {*LEAKY, *WAITING, *ABSOLUTE}
    assert {judge(SHIPPED[name]).metric for name in [*LEAKY, *WAITING, *ABSOLUTE]} == {LEAK}
    assert LEAK not in ALLOCATOR
    assert exclusion(SHIPPED[LEAKY[0]], []) is None
    assert leak(MeasuredRow(BASE | {"id": LEAKY[0]}, "", 2)) is None
