"""Which stages of a pipeline hold which of the buffers beside states and activations; what the host keeps, in which dtype.

8 tokens of 128 values: a boundary tensor has 2,048 B in bf16, the logits of a vocabulary of 1,024 are 16,384 B.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from physics_jobs import job, machine

from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.buffers import (
    batches,
    deferred_wgrad_bytes,
    earlier_logits_bytes,
    gradient_copies,
    of_pipeline,
)
from steptime.memory.on_host import on_host
from steptime.memory.optimizer_moments import looped_temporaries

LAYERS = {"n_layers": 12}


def staged(software: str = "megatron-core", **said: Any) -> Assembly:
    layout: dict[str, Any] = {"microbatches": 6} | said
    return Assembly(job(software, model=LAYERS, **layout))


def by_stage(of: Any, assembly: Assembly) -> list[float]:
    return [of(assembly, chunks) for chunks in assembly.stages]


@pytest.mark.parametrize(
    ("layout", "waiting"),
    [({}, [0]), ({"pp": 3}, [0, 0, 2]), ({"pp": 3, "vpp": 2}, [0, 0, 2]), ({"pp": 2, "microbatches": 2}, [0, 1])],
)
def test_stages_whose_heads_gradients_wait(layout, waiting):
    """Two of five earlier ones: logits' gradient and three boundary tensors each; of one that is all there was, one less."""
    assembly = staged(performance={"deferred_head_wgrads": 2}, **layout)
    assert by_stage(deferred_wgrad_bytes, assembly) == [
        n * (16_384 + 3 * 2_048) - (2_048 if n == 1 else 0) for n in waiting
    ]


@pytest.mark.parametrize(
    ("software", "layout", "held"),
    [
        ("aleph-alpha", {}, [1]),
        ("aleph-alpha", {"pp": 3}, [0, 0, 1]),
        ("aleph-alpha", {"microbatches": 1}, [0]),
        ("megatron-core", {"pp": 3}, [0, 0, 0]),
    ],
)
def test_stages_that_keep_the_logits_before(software, layout, held):
    assert by_stage(earlier_logits_bytes, staged(software, **layout)) == [16_384 * n for n in held]


@pytest.mark.parametrize(("stay", "ends"), [(True, 6 * (8 * 28 + 64)), (False, 64)])
def test_batches_are_on_the_first_and_the_last_stage(stay, ends):
    """28 B a token: index, label and position of 8 B each, and a weight in fp32; a mask of 8 x 8. All six, or one mask."""
    assembly = staged(pp=3, performance={"batches_stay": stay})
    found = [sum(one.bytes for one in batches(assembly, chunks)) for chunks in assembly.stages]
    assert found == [ends, 0, ends]


@pytest.mark.parametrize(
    ("software", "layout", "held"),
    [
        # inputs and their gradients of every chunk but the first, 2 of each; what is under way: 2, or 3 with virtual stages
        ("megatron-core", {"pp": 3}, [0, 2 + 2, 2 + 2]),
        ("megatron-core", {"pp": 3, "vpp": 2}, [2 + 3, 4 + 3, 4 + 3]),
        ("megatron-core", {}, [0]),
        # torch: a buffer for each of 6 micro-batches that comes, from either side
        ("torch", {"pp": 3}, [6, 12, 6]),
        ("torch", {}, [0]),
    ],
)
def test_boundary_tensors(software, layout, held):
    assembly = staged(software, **layout)
    found = [sum(one.bytes for one in of_pipeline(assembly, chunks)) for chunks in assembly.stages]
    assert found == [2_048 * n for n in held]


@pytest.mark.parametrize(
    ("software", "performance", "names"),
    [
        ("megatron-core", {"main_grad_dtype": "bf16"}, [40.0]),
        ("megatron-core", {"main_grad_dtype": "fp32"}, []),
        ("megatron-core", {"main_grad_dtype": "bf16", "master_dtype": "remainder"}, []),
    ],
)
def test_copies_of_half_precision_gradients(software, performance, names):
    """4 B of each of 10 parameters, for a main weight in fp32."""
    states: Any = SimpleNamespace(owned=10.0, gradients_bytes=20.0)
    assert [one.bytes for one in gradient_copies(job(software, performance=performance), states)] == names


def test_a_shard_on_the_host_has_the_dtypes_of_the_device():
    """Parameters in bf16, gradients in fp32, moments of 4 + 4 B. Fused, the update reads and writes 2 * 2 B, reads 4, reads and
    writes 2 * 8; op by op 4 * 2 + 14 * 4 + 2 * 4. Clipping: 3 * 4.
    """
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1e12, "core_bytes_per_s": 1e12}
    on = Machine(**machine(host_bytes_per_s=1e12).model_dump(exclude={"host"}), host=host)
    touched = {}
    for how in ("fused", "foreach"):
        performance = {
            "cpu_offload": {"optimizer": 1.0, "params": True}, "param_dtype": "bf16", "main_grad_dtype": "fp32",
            "moment_dtype": "fp32", "optimizer_impl": how, "clip_grad": False,
        }  # fmt: skip
        plan = job("fsdp2", on=on, dp=2, performance=performance, fsdp={})
        found = on_host(plan)
        assert (found.gathered, found.reduced, found.added) == (2.0, 4.0, 12.0)
        assert found[0] == 2 + 4 + 8
        touched[how] = found[1]
        clipped = on_host(plan.replace(**{"performance.clip_grad": True}))
        assert clipped[1] - found[1] == 12.0
    assert touched == {"fused": 2 * 2 + 4 + 2 * 8, "foreach": 4 * 2 + 14 * 4 + 2 * 4}


@pytest.mark.parametrize(("reshard", "zero"), [(True, 3), (False, 2)])
def test_temporaries_of_an_update_in_a_loop_are_those_of_a_shard(reshard, zero):
    """Two copies in fp32 of half of the embedding, 131,072 elements."""
    performance = {"optimizer_impl": "for_loop", "moment_dtype": "fp32"}
    plan = job("fsdp2", dp=2, performance=performance, fsdp={"reshard_after_forward": reshard})
    assembly = Assembly(plan)
    held = assembly.chunk_params(assembly.chunks[0])
    assert plan.zero_level == zero
    assert looped_temporaries(plan, held, {"dense": 2, "expert": 2}) == 2 * 4 * 131_072 / 2
