"""The table's rows of FSDP's collectives, and which jobs the rules of FSDP are about, by hand."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.fsdp.of_job import applies, pooled, unsynced
from steptime.job.job import Job
from steptime.job.mesh import Fsdp

LAYER, ROOT = 164_096, 262_272
"""Elements of a layer, and of embedding, head and final norm."""


def test_each_row_has_its_own_seconds():
    """Two ranks, links of 1 B/s, free compute: half of each tensor is sent, 1 s an element of bf16 and 2 of an fp32 gradient.

    Two layers are gathered in both passes, embedding and head once; gradients are reduced once each.
    """
    said = {"dp": 2, "fsdp": {"reduce_dtype": "fp32"}, "performance": {"overlap": {"dp": False}}}
    found = estimate(job("fsdp2", on=machine(link=1.0), **said)).collectives
    rows = {row.name: (row.kind, row.ranks, row.bytes, row.count_per_step, row.exposed_s) for row in found}
    near = lambda seconds: pytest.approx(seconds, rel=SLIGHTLY)  # noqa: E731
    assert rows == {
        "root parameters": ("all_gather", 2, 2 * ROOT, 1, near(ROOT)),
        "block parameters": ("all_gather", 2, 2 * LAYER, 4, near(4 * LAYER)),
        "root gradients": ("reduce_scatter", 2, 4 * ROOT, 1, near(2 * ROOT)),
        "block gradients": ("reduce_scatter", 2, 4 * LAYER, 2, near(4 * LAYER)),
    }


@pytest.mark.parametrize(
    ("software", "said", "dtype", "size"),
    [
        ("fsdp2", {}, "fp32", 4),
        ("torchtitan", {}, "fp32", 4),
        ("megatron-core-fsdp2", {}, "bf16", 2),
        ("megatron-core-fsdp2", {"precision": "fp32"}, "fp32", 4),
        ("accelerate", {}, "bf16", 2),
        ("megatron-core-fsdp2", {"reduce_dtype": "fp32"}, "fp32", 4),
        ("fsdp2", {"reduce_dtype": "bf16"}, "bf16", 2),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_plan_or_of_the_profile(software, said, dtype, size):
    """A layer's 164,096 elements at 2 or 4 B. torchtitan's policy reduces in fp32 (torchtitan/config/configs.py,
    mixed_precision_reduce); Megatron-Core gives none (torch_fully_sharded_data_parallel.py), so gradients keep the parameters'
    dtype; accelerate's is the compute dtype (utils/dataclasses.py, set_mixed_precision). The plan echoes it.
    """
    fsdp = {key: said[key] for key in said.keys() & {"reduce_dtype"}}
    how = {key: said[key] for key in said.keys() & {"precision"}}
    plan = job(software, dp=2, fsdp=fsdp, performance=how)
    rows = {row.name: row.bytes for row in estimate(plan).collectives}
    assert rows["block gradients"] == size * LAYER
    echoed = plan.to_config()["parallelism"]["fsdp"]
    assert (echoed["reduce_dtype"], list(echoed)) == (
        dtype,
        list(Fsdp(reduce_dtype="fp32").model_dump(exclude_none=True)),
    )
    assert Job(**plan.to_config()) == plan


@pytest.mark.parametrize(
    ("software", "layout", "expected"),
    [
        ("torch", {}, (False, False, False)),
        ("fsdp2", {"fsdp": {}}, (True, False, True)),
        ("fsdp2", {"zero_level": 3}, (True, False, True)),
        ("fsdp2", {"fsdp": {}, "tp": 2}, (True, False, True)),
        ("fsdp2", {"fsdp": {"no_sync": True}}, (True, True, True)),
        ("fsdp2", {"fsdp": {"no_sync": True}, "microbatches": 1}, (True, False, True)),
        ("fsdp2", {"fsdp": {"wrap": "model"}}, (True, False, False)),
        ("fsdp2", {"fsdp": {"wrap": "parameter"}}, (True, False, False)),
        ("megatron-core", {"zero_level": 3}, (True, False, False)),
        ("deepspeed", {"zero_level": 3}, (True, False, False)),
        ("deepspeed", {"zero_level": 2}, (False, False, False)),
    ],
)
def test_jobs_whose_parameters_are_gathered(software, layout, expected):
    """Whether FSDP runs, whether whole gradients add up over micro-batches, whether gathers have a pool of their own."""
    plan = job(software, **({"dp": 2, "microbatches": 2, "model": {"n_q_heads": 2}} | layout))
    assert (applies(plan), unsynced(plan), pooled(plan)) == expected
