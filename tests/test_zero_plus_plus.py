"""ZeRO++ of DeepSpeed by hand (Wang et al. 2023, arXiv 2306.10209): bytes of its collectives, and of the second partition."""

import pytest

from steptime import Job, estimate, search
from steptime.base.config import ConfigError
from steptime.fsdp import plus_plus
from steptime.job.mesh import group
from steptime.search.space import Axes

LAYER, ALL = 218_112_000, 8_030_261_248
"""Parameters of a layer of Llama-3 8B, 7 matrices and 2 vectors, and of the model; 64 ranks divide every dimension 0."""


def plan(plus=None, microbatches=1, dp=64, **performance):
    return Job(
        model="llama3-8b",
        parallelism={"tp": 1, "pp": 1, "dp": dp, "zero_level": 3, "zero_plus_plus": plus},
        data={"gbs": dp * microbatches, "seqlen": 4096, "microbatch_sz": 1},
        performance={"software": "deepspeed", **performance},
        hardware="dgx-h100",
    )


def rows(plus, microbatches=1, dp=64):
    found = estimate(plan(plus, microbatches, dp)).collectives
    return {row.name: (row.kind, row.ranks, row.bytes, row.count_per_step) for row in found}


def test_all_gathers_but_the_first_run_within_nodes():
    """hpZ, two micro-batches: of the four gathers of each of 32 layers three, and of the root's two one, are among 8 ranks."""
    found = rows({"hpz_partition_size": 8}, microbatches=2)
    assert found["block parameters"] == ("all_gather", 64, 2 * LAYER, 32)
    assert found["block parameters, second partition"] == ("all_gather", 8, 2 * LAYER, 3 * 32)
    assert found["root parameters"][3] == found["root parameters, second partition"][3] == 1
    assert found["block gradients"] == ("reduce_scatter", 64, 2 * LAYER, 2 * 32)


def test_a_second_partition_of_fewer_devices_is_all_of_them():
    """DeepSpeed takes the smaller (utils/groups.py): on one node of 8, 2 bytes / 8 ranks again, and gathers among the same 8."""
    found = rows({"hpz_partition_size": 16}, dp=8)
    assert found["block parameters, second partition"] == ("all_gather", 8, 2 * LAYER, 32)
    plain, second = (estimate(plan(said, dp=8)) for said in (None, {"hpz_partition_size": 16}))
    assert second.memory.stages[0].params_bytes == 2 * plain.memory.stages[0].params_bytes == 2 * 2 * ALL / 8
    assert second.step_s == pytest.approx(plain.step_s, rel=1e-9)


def test_a_second_partition_may_be_larger_than_a_node():
    """16 ranks on nodes of 8, which its name does not deny."""
    found = rows({"hpz_partition_size": 16})
    assert found["block parameters, second partition"] == ("all_gather", 16, 2 * LAYER, 32)
    assert not [name for name in found if "within nodes" in name]


def test_the_second_partition_is_held():
    """2 bytes for each parameter / 8 ranks, beside 2 / 64 of the first."""
    plain, second = (estimate(plan(said)).memory.stages[0] for said in (None, {"hpz_partition_size": 8}))
    assert plain.params_bytes == 2 * ALL / 64
    assert second.params_bytes - plain.params_bytes == 2 * ALL / 8
    assert second.allocated_bytes - plain.allocated_bytes == 2 * ALL / 8


def test_quantized_weights():
    """qwZ: a byte for each weight, and 4 for the scale of 4,096 of them; gathered int8 and what it becomes, fp16, are both held.

    In bf16 the dequantized tensor is cast: beside reading and writing 2 + 2 bytes, 1 + 2 and 2 + 2 more move.
    """
    found = rows({"quantized_weights": True})
    assert found["block parameters"] == ("all_gather", 64, LAYER * (1 + 4 / 4096), 64)
    plain, low = (
        estimate(plan(said, activation_checkpointing_type="full")).memory.stages[0]
        for said in (None, {"quantized_weights": True})
    )
    assert low.allocated_bytes > plain.allocated_bytes
    seconds = [
        estimate(plan({"quantized_weights": True}, precision=precision)).time.parts_s["memory_bound"]
        - estimate(plan(precision=precision)).time.parts_s["memory_bound"]
        for precision in ("bf16", "fp16")
    ]
    assert seconds[0] / seconds[1] == pytest.approx((7 + 4 / 4096) / (3 + 4 / 4096), rel=0.02)


ALL_OF_IT = {"hpz_partition_size": 8, "quantized_weights": True, "quantized_gradients": True}


@pytest.mark.parametrize(
    ("plus", "second", "sent", "flat", "moved", "reduced"),
    [(None, 0, 7_000, 2 * 4_096, 0, 4 * 4_096), (ALL_OF_IT, 2 * 4_096 / 8, 4_100, 12_292, 28_676, 4_104)],
)
def test_bytes_of_4096_elements(plus, second, sent, flat, moved, reduced):
    """One scale of 4 bytes. Second partition: 2 bytes over 8 ranks. Sent in int8: 4,096 + 4, for a buffer of 7,000. Held until
    parameters are copied out: that and 2 * 4,096 in fp16. Moved for it: int8 read, fp16 written, fp16 read and bf16 written,
    1 + 2 + 2 + 2 bytes and the scale. A reduction in fp32 reads 4; in int4 what is sent and received, twice 2,048 + 4.
    """
    job = plan(plus)
    assert plus_plus.secondary_bytes(job, 4_096) == second
    assert plus_plus.sent_bytes(job, 4_096, 7_000) == sent
    assert plus_plus.flat_bytes(job, 4_096) == flat
    assert plus_plus.dequantized_bytes(job, 4_096) == moved
    assert plus_plus.reduction_bytes(job, 4_096, 4.0) == reduced


def test_dequantized_parameters_of_fp16_are_not_cast():
    job = plan({"quantized_weights": True}, precision="fp16")
    assert plus_plus.dequantized_bytes(job, 4_096) == 4_096 + 4 + 2 * 4_096


def test_scales_of_gradients_have_exchanges_of_their_own():
    """Two matrices of 4,096 elements on 8 nodes of 8: 2,048 bytes and a scale of 4 inside a node, an eighth between nodes."""
    job = plan({"quantized_gradients": True})
    found = plus_plus.reduction(job, 8_192, 32_768, 2, group(job.parallelism, "shards"))
    assert {(one.name, one.bytes, one.group.ranks, one.group.stride, one.calls) for one in found} == {
        ("gradients", 32_768, 64, 1, 0),
        ("gradients, within nodes", 2_048, 8, 1, 2),
        ("gradients scales, within nodes", 4, 8, 1, 2),
        ("gradients, between nodes", 256, 8, 8, 2),
        ("gradients scales, between nodes", 0.5, 8, 8, 2),
    }


def test_a_single_node_reduces_as_ever():
    """Eight devices: fp32 is read and scattered once."""
    job = plan({"quantized_gradients": True}, dp=8)
    assert plus_plus.reduction_bytes(job, 4_096, 4.0) == 4 * 4_096
    found = plus_plus.reduction(job, 8_192, 32_768, 2, group(job.parallelism, "shards"))
    assert [(one.bytes, one.group.ranks, one.calls) for one in found if one.calls] == [(32_768, 8, 1)]


def test_quantized_gradients():
    """qgZ: half a byte for each element, by matrix: first among 8 devices, then 1/8 of it among 8 nodes; on one node as ever."""
    found = rows({"quantized_gradients": True})
    assert found["block gradients, within nodes"] == ("all_to_all", 8, LAYER / 2 / 7, 7 * 32)
    assert found["block gradients, between nodes"] == ("all_to_all", 8, LAYER / 2 / 7 / 8, 7 * 32)
    assert "block gradients" not in found
    assert rows({"quantized_gradients": True}, dp=8) == rows(None, dp=8)


def test_the_paper_s_quarter():
    """Bytes that a node of 8 devices takes part in between nodes: 3 M without, M / 2 + M / 4 with all three (paper, table 1).

    M: 2 bytes for each parameter; scales are a thousandth more.
    """
    plain, plus = rows(None), rows({"hpz_partition_size": 8, "quantized_weights": True, "quantized_gradients": True})
    of = [sum(size * count for _, ranks, size, count in rows.values() if ranks == 64) for rows in (plain, plus)]
    nodes = sum(8 * size * count for name, (_, _, size, count) in plus.items() if name.endswith("between nodes"))
    whole = 2.0 * LAYER * 32 + 2.0 * (ALL - 32 * LAYER)
    assert of[0] == pytest.approx(3 * whole, rel=0.07)  # the root is gathered once
    assert of[1] + nodes == pytest.approx(0.75 * whole, rel=0.003)


def test_a_search_agrees():
    plus = {"hpz_partition_size": 8, "quantized_weights": True, "quantized_gradients": True}
    found = search(plan(plus), axes=Axes({"tp": (1,), "pp": (1,), "microbatch_sz": (1, 2)}))
    best = found.best
    assert best.job.parallelism.zero_plus_plus is not None
    assert best.step_s == estimate(best.job).step_s


def test_a_second_partition_with_adapters_is_refused():
    """Frozen parameters keep a second partition from step to step, which trained ones lose at each (stage3.py, fp16_groups)."""
    with pytest.raises(ConfigError, match="second partition does not run with adapters"):
        plan({"hpz_partition_size": 8}).replace(model={"preset": "llama3-8b", "lora": {"rank": 8}})


def test_more_replicas_than_ranks_leave_no_shard_to_divide():
    """An error of the replicas alone: 4 of them on 2 ranks."""
    with pytest.raises(ConfigError, match="replicas") as caught:
        Job(
            model="llama3-8b",
            parallelism={
                "tp": 1,
                "pp": 1,
                "dp": 2,
                "zero_level": 3,
                "replicas": 4,
                "zero_plus_plus": {"hpz_partition_size": 8},
            },
            data={"gbs": 2, "seqlen": 4096, "microbatch_sz": 1},
            performance={"software": "deepspeed"},
            hardware="dgx-h100",
        )
    assert "hpz_partition_size" not in str(caught.value)


def test_adapters():
    """Rank 16 on q and v: 212,992 trained parameters of a layer, in four matrices; int8 gathers send the frozen ones too.

    16 x 4,096 and 4,096 x 16 of q, 16 x 4,096 and 1,024 x 16 of v. 16 ranks divide all rows. Gradients in int4 go matrix by
    matrix, of 106,496 bytes / 4 in the mean, each with its scales.
    """
    trained = 3 * 65_536 + 16_384
    model = {"preset": "llama3-8b", "lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}
    found = {}
    for said in ({"quantized_weights": True}, {"quantized_weights": True, "quantized_gradients": True}):
        job = plan(said, dp=16).replace(model=model)
        found |= {row.name: (row.kind, row.bytes, row.count_per_step) for row in estimate(job).collectives}
    assert found["block parameters"] == ("all_gather", pytest.approx((LAYER + trained) * (1 + 4 / 4096)), 64)
    assert found["block gradients"] == ("reduce_scatter", 2 * trained, 32)
    assert found["block gradients, within nodes"] == ("all_to_all", trained / 2 / 4, 4 * 32)
