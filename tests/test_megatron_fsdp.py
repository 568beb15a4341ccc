"""Megatron-FSDP by hand: its four sharding strategies, and parameters that it stores in fp8."""

import pytest

from steptime import Job, estimate, fsdp
from steptime.fsdp.groups import groups

LAYER, QUANTIZED, ALL = 218_112_000, 218_103_808, 8_030_261_248
"""Parameters of a layer of Llama-3 8B, those of its projections, and those of the model."""


def plan(level, machine="dgx-h100", **performance):
    return Job(
        model="llama3-8b",
        parallelism={"tp": 1, "pp": 1, "dp": 8, "zero_level": level},
        data={"gbs": 16, "seqlen": 4096, "microbatch_sz": 1},
        performance={"software": "megatron-core", **performance},
        hardware=machine,
    )


@pytest.mark.parametrize(
    ("level", "params", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)],
    ids=["no_shard", "optim", "optim_grads", "optim_grads_params"],
)
def test_states_of_the_four_strategies(level, params, gradients, optimizer):
    """Ranks that share weights (2 bytes), gradients (4), and masters and moments (12), padding aside.

    megatron-core 0.16.1 on a CPU, dp 4, 45,760 dense parameters: optim has 45,824 weights, 11,456 masters and 45,824 gradients on
    a rank; optim_grads 11,456 gradients; optim_grads_params a quarter of each, by unit; no_shard all whole.
    """
    stage = estimate(plan(level)).memory.stages[0]
    assert stage.params_bytes == pytest.approx(2 * ALL / params, rel=1e-4)
    assert stage.gradients_bytes == pytest.approx(4 * ALL / gradients, rel=1e-4)
    assert stage.optimizer_bytes == pytest.approx(12 * ALL / optimizer, rel=1e-4)


def calls(level):
    """Of two micro-batches, by kind: how often a parameter takes part in a collective."""
    found = {}
    for row in estimate(plan(level)).collectives:
        each = 4 if "gradients" in row.name else 2
        found[row.kind] = found.get(row.kind, 0.0) + row.bytes * row.count_per_step / each
    return {kind: elements / ALL for kind, elements in found.items()}


def test_collectives_of_the_four_strategies():
    """megatron-core 0.16.1 on a CPU: no_shard and optim reduce at the last micro-batch, optim_grads in each; both of the latter
    gather once a step. optim_grads_params gathers units twice in each, the rest once a step, and reduces all in each.
    """
    assert calls(0) == pytest.approx({"all_reduce": 1}, rel=1e-3)
    assert calls(1) == pytest.approx({"reduce_scatter": 1, "all_gather": 1}, rel=1e-3)
    assert calls(2) == pytest.approx({"reduce_scatter": 2, "all_gather": 1}, rel=1e-3)
    units = 32 * LAYER / ALL
    assert calls(3) == pytest.approx({"reduce_scatter": 2, "all_gather": 4 * units + (1 - units)}, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "machine", "stored", "turned"),
    [("fp8_current", "dgx-h100", 1, 1), ("fp8_current", "dgx-b200", 1, 0), ("mxfp8", "dgx-b200", 2, 0)],
)
def test_parameters_stored_in_fp8(precision, machine, stored, turned):
    """Weights of projections are a byte each over 8 ranks (MXFP8: two buffers), and a byte each in every gather.

    Embedding, head and norms stay in bf16. A gathered layer on Hopper takes a second byte for its transposes.
    """
    found = estimate(plan(3, machine, precision=precision, fp8_params=True))
    stage = found.memory.stages[0]
    assert stage.params_bytes == (2 * (ALL - 32 * QUANTIZED) + stored * 32 * QUANTIZED) / 8
    assert stage.gradients_bytes == 4 * ALL / 8
    [sent] = [row.bytes for row in found.collectives if row.name == "block parameters"]
    assert sent == QUANTIZED + 2 * (LAYER - QUANTIZED)
    sizes = fsdp.buffers(found.assembly, groups(found.assembly, found.assembly.chunks[0]).layers[0])
    assert sizes.unsharded == (1 + turned) * QUANTIZED + 2 * (LAYER - QUANTIZED)
