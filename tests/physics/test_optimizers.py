"""Optimizers other than Adam: bytes of moments, bytes that an update moves, Muon's iterations, by hand."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.rates import Rates, rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.optimizer_moments import matrix, orthogonalized
from steptime.model.ops import Param
from steptime.timing.optimizer import quantize_bytes_per_weight, update_bytes_per_param
from steptime.timing.orthogonalize import matrix_s, newton_schulz_s, orthogonalize_s
from steptime.timing.part_times import pricing

LAYERS = 2 * 163_840
"""Elements of the matrices of the two layers; embedding and head have 262,144, five norms of 128 have 640 elements."""


def rates_of(found: Job) -> Rates:
    return rates(found.machine.accelerator, found.software)


def optimizer_bytes(name: str, software: str = "megatron-core", **said) -> float:
    found = job(software, zero_level=0, **said).replace(**{"performance.optimizer": name})
    return estimate(found).memory.stages[0].optimizer_bytes


def test_moments_of_megatron():
    """Master 4; two fp32 moments of Adam, one of SGD and Lion; Muon one of matrices, two of embedding, head and norms."""
    total, ends = 590_464, 262_144 + 640
    assert optimizer_bytes("adamw") == 12 * total
    assert optimizer_bytes("sgd") == optimizer_bytes("lion") == 8 * total
    assert optimizer_bytes("muon") == 8 * LAYERS + 12 * ends


def test_eight_bits_of_a_moment():
    """Two codes of a byte, a scale of 4 bytes for each block of 256 and moment: 2 + 8/256; norms of 128 keep two fp32 moments.

    torchao/optim/subclass_8bit.py: codes and scale; adam.py, _new_buffer: tensors below 4,096 elements stay whole.
    """
    assert optimizer_bytes("adamw_8bit", "torch") == (LAYERS + 262_144) * (2 + 8 / 256) + 640 * 8


def test_whole_matrices_dealt_out():
    """Eight ranks share 327,680 elements of matrices evenly: 40,960; but up and gate, one matrix, are 65,536. So each rank's part
    of the buffer is that long, and the fullest updates them beside an eighth of the rest, 32,848 padded to buckets of 1,024.
    """
    found = job(dp=8, microbatches=8).replace(**{"performance.optimizer": "dist_muon", "parallelism.zero_level": 1})
    stage, usual = (
        estimate(one).memory.stages[0] for one in (found, found.replace(**{"performance.optimizer": "adamw"}))
    )
    assert stage.params_bytes - usual.params_bytes == 2 * 8 * (65_536 - 40_960)
    assert stage.gradients_bytes - usual.gradients_bytes == 4 * 8 * (65_536 - 40_960)


def test_bytes_that_an_update_moves():
    """Gradient 4, master 4 read and written, parameter 2 written: 14, beside twice the moments. Muon: 52 more.

    Adafactor, all in fp32: 5 accesses of the parameter, 3 of the gradient, 11 of the estimate, 4 bytes each.
    """
    plain = job()
    assert update_bytes_per_param(plain.replace(**{"performance.optimizer": "lion"}), 4.0) == 14 + 8
    muon = plain.replace(**{"performance.optimizer": "muon", "parallelism.zero_level": 0})
    assert update_bytes_per_param(muon, 4.0) == 14 + 8 + 52
    states = {"performance.precision": "fp32", "performance.optimizer": "adafactor"}
    assert update_bytes_per_param(job("torch", zero_level=0).replace(**states), 0.0) == 19 * 4


def device_s(performance=None, **said) -> float:
    """Seconds of the optimizer step on a device of 1 B/s that can run fp8."""
    on = machine(memory=1.0, peak_flops={"bf16": 1e30, "fp32": 1e30, "fp8": 1e30})
    return estimate(job(on=on, performance=performance, **said)).timing.optimizer.device_s


@pytest.mark.parametrize(("layers", "elements"), [([1, 3], 3 * 164_096 + 131_200), ([3, 1], 3 * 164_096 + 131_072)])
def test_the_stage_with_the_most_parameters_updates_last(layers, elements):
    """46 bytes a parameter: gradient 4, master and two moments read and written 24, parameter written 2; norm and clipping read
    the gradient twice and write it, 12; zeroing 4. Head and final norm have 131,200 parameters, the embedding 131,072.
    """
    found = device_s(pp=2, layers_per_stage=layers, microbatches=2, model={"n_layers": 4})
    assert found == pytest.approx(46 * elements)


def test_updated_weights_are_quantized():
    """Delayed scaling reads bf16 and writes two copies, 2 + 2 * 1 bytes for each of the layers' weights; current scaling reads
    twice (TransformerEngine pytorch/module/base.py, get_weight_workspace). The head stays in bf16.
    """
    plain = device_s()
    assert device_s({"precision": "fp8_delayed"}) - plain == pytest.approx(LAYERS * (2 + 2))
    assert device_s({"precision": "fp8_current"}) - plain == pytest.approx(LAYERS * (2 * 2 + 2))


def test_newton_schulz():
    """m = 256 by n = 1024: five iterations of 4 m^2 n + 2 m^3 FLOPs, 5 x (268,435,456 + 33,554,432) = 1,509,949,440.

    In whole waves of tiles on one SM that is 1.50995 ms at 1e12 FLOP/s. Where memory is slow, 1e9 B/s: five times the bytes of
    three products in bf16, the added matrix read once more, 2 x (262,144 + 262,144 + 131,072), 2 x (65,536 x 2 + 131,072) and
    2 x (65,536 + 262,144 + 524,288).
    """
    fast = rates_of(job("torch", on=machine(flops=1e12)))
    assert newton_schulz_s(256, 1024, fast) == pytest.approx(1.509949440e-3, rel=1e-3)
    slow = rates_of(job("torch", on=machine(memory=1e9)))
    assert newton_schulz_s(256, 1024, slow) == pytest.approx(5 * (1_310_720 + 524_288 + 1_703_936) / 1e9, rel=1e-3)


def test_what_a_device_orthogonalizes():
    """tp 2 leaves half the rows of q, k and v, 192 of 384, and half the columns of the output projection, 64 of 128."""
    split = Assembly(
        job(tp=2, model={"n_q_heads": 2}).replace(**{"performance.optimizer": "muon", "parallelism.zero_level": 0})
    )
    found = {
        p.param.name: matrix(p.param, p.each)
        for params, _ in split.counted_params(split.stages[0])
        for p in params
        if orthogonalized(p.param)
    }
    assert found["attn.qkv.weight"] == (192, 128)
    assert found["attn.proj.weight"] == (128, 64)
    assert not any("embedding" in name or "head" in name or "norm" in name for name in found)


def test_experts_are_tensors_of_their_own():
    """Of 8 experts a device of ep 2 has 4: gate and up, 2 * 64 * 128 = 16,384 elements each, are four tensors, not one.

    Muon's iterations run on each: 2 * 64 rows of 128 columns, and down's 128 rows of 64.
    """
    moe = {"n_experts": 8, "experts_per_token": 2, "expert_inter_sz": 64}
    split = Assembly(job(dp=2, ep=2, microbatches=2, model={"moe": moe}).replace(**{"parallelism.zero_level": 0}))
    found = {
        p.param.name: (p.tensors, p.each, matrix(p.param, p.each))
        for params, _ in split.counted_params(split.stages[0])
        for p in params
        if p.param.n_experts
    }
    assert found == {
        "mlp.experts.up.weight": (4, 16_384, (128, 128)),
        "mlp.experts.down.weight": (4, 8_192, (128, 64)),
    }


@pytest.mark.parametrize(
    ("mode", "split", "flops", "bytes_"),
    [
        ("blockwise", 0, 4 * 8 * 8 * 32 + 2 * 8**3, 0),  # the device's own 8 rows
        ("duplicated", 0, 4 * 16 * 16 * 32 + 2 * 16**3, 1_024),  # the whole, gathered once
        ("distributed", 0, 4 * 32 * 32 * 8 + 2 * 32**3, 5 * 2 * 32 * 32),  # Gram matrices of 32 columns, five times
        ("distributed", 1, 4 * 16 * 16 * 16 + 2 * 16**3, 5 * 2 * 16 * 16),  # of 16 rows
        ("distributed", None, 4 * 16 * 16 * 32 + 2 * 16**3, 0),  # nothing is split
    ],
)
def test_newton_schulz_of_a_matrix_that_tensor_parallelism_splits(mode, split, flops, bytes_):
    """16 rows of 32 columns over tp 2: five iterations of 4 m^2 n + 2 m^3 FLOPs. A gather sends half of 512 fp32 values, an
    all-reduce of bf16 sends half of them twice (Emerging-Optimizers muon_utils.py, newton_schulz_tp).
    """
    matrix_ = Param("w", (16, 32), split)
    elements = 512 if split is None else 256
    for on, expected in ((machine(flops=1.0), 5 * flops), (machine(link=1.0), bytes_)):
        performance = {"optimizer": "muon", "muon_tp_mode": mode}
        plan = job(on=on, tp=2, model={"n_q_heads": 2}, performance=performance, zero_level=0)
        found = matrix_s(plan, matrix_, elements, pricing(plan).context)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("mode", "name", "bytes_", "each"), [
    ("duplicated", "Muon momenta", 4 * 384 * 128, 1),
    ("distributed", "Muon products", 2 * 128 * 128, 5),
])  # fmt: skip
def test_collectives_of_muon_are_listed(mode, name, bytes_, each):
    """tp 2 splits the rows of q, k and v, 384 of 128 columns in fp32: one gather, or five sums of 128 x 128 in bf16 for each
    layer. Their seconds are exposed, in the optimizer's part.
    """
    performance = {"optimizer": "muon", "muon_tp_mode": mode}
    plan = job(tp=2, model={"n_q_heads": 2}, performance=performance, zero_level=0)
    found = estimate(plan)
    rows = [row for row in found.collectives if row.name.startswith("Muon")]
    layers = plan.model.n_layers
    row = next(row for row in rows if (row.name, row.bytes) == (name, bytes_))
    assert row.count_per_step >= each * layers
    assert row.count_per_step % (each * layers) == 0
    assert (row.axis, row.ranks) == ("tp", 2)
    assert row.exposed_s == pytest.approx(row.count_per_step * row.time_s)
    blockwise = estimate(plan.replace(**{"performance.muon_tp_mode": "blockwise"}))
    assert not [row for row in blockwise.collectives if row.name.startswith("Muon")]


@pytest.mark.parametrize(
    ("optimizer", "dp", "flops"),
    [
        ("muon", 2, 2 * 5 * 100_663_296),
        ("dist_muon", 2, 5 * 100_663_296),  # an even share of two
        ("dist_muon", 16, 5 * 37_748_736),  # no less than the longest
        ("adamw", 2, 0),
    ],
)
def test_whole_matrices_take_an_even_share_or_the_longest(optimizer, dp, flops):
    """4 m^2 n + 2 m^3 of a layer: q, k, v 384 x 128 29,360,128; projection 12,582,912; gate and up 512 x 128 37,748,736; down
    128 x 256 20,971,520; together 100,663,296, in two layers.
    """
    performance = {"optimizer": optimizer}
    plan = job(on=machine(flops=1.0), dp=dp, performance=performance, zero_level=1 * (optimizer == "dist_muon"))
    held = Assembly(plan)
    found = orthogonalize_s(plan, held.counted_params(held.stages[0]), pricing(plan).context)
    assert found == pytest.approx(flops, rel=1e-3)


def test_weights_stored_in_blocks_are_transposed():
    """Gathered in a byte each, they arrive by rows; the copy by columns is read and written, with an fp32 scale for each block of
    128 x 128: 2 (1 + 4 / 16,384).
    """
    plan = job(on=Machine.load("dgx-h100"), dp=2, performance={"precision": "fp8_blockwise", "fp8_params": True})
    assert quantize_bytes_per_weight(plan) == 2 * (1 + 4 / 16_384)
