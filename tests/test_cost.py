"""Costs of single ops and of one layer, by hand."""

from __future__ import annotations

import pytest
from rates import RATES

from steptime.answer.assumptions import assumptions
from steptime.answer.result import estimate
from steptime.cost import compute
from steptime.cost.compute import gemm_backward, move_pass, shape_efficiency
from steptime.cost.overlap import hidden_s, in_pieces_s
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.model.ops import Attention, ByElement, Gemm, Move, Param, Tensor
from steptime.software.performance import load_software
from steptime.timing.optimizer import clip_bytes_per_param, update_bytes_per_param, update_s

WEIGHT = (Param("w", (2560, 950)),)


def llama3_70b(**changes) -> Job:
    job = Job(
        model="llama3-70b",
        parallelism={"tp": 8, "pp": 4, "dp": 32},
        data={"gbs": 2048, "seqlen": 8192, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    return job.replace(**changes)


# --- one op by hand ---


def test_a_product_bound_by_arithmetic():
    """1280 x 800 by 800 x 2560: 10 x 10 tiles fill 100 SMs once, and a depth of 800 runs at 800/1000."""
    op = Gemm("mlp.up", m=1280.0, n=2560.0, k=800.0, params=WEIGHT)
    assert op.flops == 2 * 1280 * 2560 * 800
    done = compute.forward(op, RATES, {})
    assert done.compute_s == pytest.approx(op.flops / (200e12 * 0.8))
    assert done.bytes == 2 * (1280 * 800 + 800 * 2560 + 1280 * 2560)
    assert done.bandwidth_s == pytest.approx(done.bytes / 1e12)
    assert done.time_s == pytest.approx(max(done.compute_s, done.bandwidth_s) + 4e-6)
    assert done.compute_s > done.bandwidth_s


def test_a_product_bound_by_memory():
    """One row against a large weight: the weight's bytes set the time."""
    op = Gemm("head.proj", m=1.0, n=25600.0, k=8192.0, params=WEIGHT)
    done = compute.forward(op, RATES, {})
    assert done.time_s == pytest.approx(2 * (8192 + 8192 * 25600 + 25600) / 1e12 + 4e-6)


@pytest.mark.parametrize(("rows", "tflops"), [(1024.0, 1233.0), (512.0, 1040.0), (256.0, 932.0)])
def test_products_of_few_rows_an_expert_are_slower(rows, tflops):
    """Grouped fp8 products of n 4096 and k 7168 on H800 run at 1,346 TFLOP/s with 8,192 rows an expert (DeepGEMM's README).

    m / (m + 120) gives 1,223, 1,107 and 930 with fewer.
    """
    rates = RATES._replace(sm_count=None)

    def rate(m: float) -> float:
        op = Gemm("experts.up", m=m, n=4096.0, k=7168.0, params=WEIGHT, grouped=True)
        return op.flops / compute.forward(op, rates, {}).compute_s

    assert 1346.0 * rate(rows) / rate(8192.0) == pytest.approx(tflops, rel=0.065)


def test_waves_of_tiles():
    """101 tiles on 100 SMs take two waves of which a quarter of the emptiness is lost: 3/4 + 1/4 * 101/200."""
    assert shape_efficiency(128.0, 256.0 * 101, 800.0, 1.0, 100.0) == pytest.approx((0.75 + 0.25 * 101 / 200) * 0.8)
    assert shape_efficiency(129.0, 256.0 * 50, 800.0, 1.0, 100.0) == pytest.approx(0.8)  # 2 x 50 tiles
    assert shape_efficiency(128.0, 256.0, 800.0, 100.0, 100.0) == pytest.approx(0.8)  # a hundred products at once


@pytest.mark.parametrize(
    ("accelerator", "sms", "full"), [("gb200-186", 152, 1024 / (7 * 152)), ("mi300x", 304, 1024 / (4 * 304))]
)
def test_waves_on_devices_other_than_hopper(accelerator, sms, full):
    """4096 x 8192 is 32 x 32 = 1,024 tiles: 6.74 waves in 7 on GB200, 0.962 full; 3.37 in 4 on MI300X, 0.842 full."""
    device = Machine.load("dgx-h100", {"accelerator": accelerator}).accelerator
    r = rates(device, load_software("megatron-core"))
    op = Gemm("mlp.up", m=4096.0, n=8192.0, k=800.0, params=WEIGHT)
    assert r.sm_count == sms
    expected = op.flops / (r.gemm_flops * 0.8 * (0.75 + 0.25 * full))
    assert compute.forward(op, r, {}).compute_s == pytest.approx(expected)


def test_without_multiprocessors_there_are_no_waves():
    """A TPU has none: of k / (k + 200) nothing is lost, and the estimate says so."""
    assert shape_efficiency(129.0, 257.0, 800.0, 1.0, None) == pytest.approx(0.8)
    job = llama3_70b(hardware={"node_type": "gcp-tpu-v5p"})
    assert rates(job.machine.accelerator, job.software).sm_count is None
    assert any("no accelerator.sm_count, so no wave quantization" in line for line in assumptions(job))
    assert not any("sm_count" in line for line in assumptions(llama3_70b()))


def test_backward_of_a_projection_is_two_products():
    """dgrad reads the weight, wgrad reads and writes the fp32 main gradient: 8 bytes an element."""
    op = Gemm("mlp.up", m=1280.0, n=2560.0, k=950.0, params=WEIGHT)
    dgrad, wgrad = gemm_backward(op, RATES)
    assert dgrad.flops == wgrad.flops == op.flops
    assert dgrad.bytes == 2 * (1280 * 950 + 950 * 2560 + 1280 * 2560)
    assert wgrad.bytes == 2 * (1280 * 950 + 1280 * 2560) + 8 * 950 * 2560
    _, apart = gemm_backward(op, RATES._replace(fused_accumulation=False, grad_itemsize=2.0))
    assert apart.bytes == 2 * (1280 * 950 + 1280 * 2560) + 2 * 950 * 2560


def test_flash_attention_is_half_and_goes_back_with_five_products():
    op = Attention(
        "attn.core", batch=2.0, q_len=4096.0, kv_len=4096.0, n_q_heads=8.0, n_kv_heads=1.0, d_qk=128.0, d_v=128.0
    )
    whole = 4 * 2 * 8 * 4096 * 4096 * 128
    assert op.full_flops == whole
    done = compute.forward(op, RATES, {})
    assert done.flops == whole / 2
    assert done.bytes == 2 * 4096 * (8 * 256 + 1 * 256) * 2  # q and out, k and v, two bytes each
    assert done.time_s == pytest.approx(whole / 2 / 150e12 + 4e-6)
    back, nothing = compute.backward(op, RATES, {})
    assert back.flops == whole / 2 * 2.5
    assert back.bytes == 2 * done.bytes
    assert back.time_s == pytest.approx(whole / 2 * 2.5 / 120e12 + 4e-6)
    assert nothing.time_s == 0


def test_a_move_reads_and_writes_what_it_names():
    op = Move(
        "mlp.norm",
        ("x",),
        (Tensor("out", 1e6, 2.0),),
        ("x", "rstd"),
        (Tensor("rstd", 1e3, 4.0),),
        (Param("g", (8192,)),),
    )
    sizes = {"x": 2e6, "out": 2e6, "rstd": 4e3}
    done = compute.forward(op, RATES, sizes)
    assert done.bytes == 2e6 + 2 * 8192 + 2e6 + 4e3
    assert done.time_s == pytest.approx(done.bytes / 1e12 + 3e-6)
    back, _ = compute.backward(op, RATES, sizes)
    assert back.bytes == 2e6 + (2e6 + 4e3) + 2e6 + 2 * 8192  # gradient, what was kept, the input's gradient, the weight
    assert move_pass(5e6, 2.0, RATES).time_s == pytest.approx(5e-6 + 6e-6)


def test_kernels_without_vector_loads_take_their_elements_time():
    """Of 3 MB at 1 TB/s 1 MB goes element by element: 500,000 of them at 100e9 take 5 us, not 1; at 1e12 the 1 MB does."""
    slow = ByElement(5e5, 1e6)
    one = RATES._replace(elements_per_s=100e9, move_kernel_s=0.0)
    assert move_pass(3e6, 1.0, one, slow).time_s == pytest.approx(2e-6 + 5e-6)
    assert move_pass(3e6, 1.0, one._replace(elements_per_s=1e12), slow).time_s == pytest.approx(3e-6)
    assert move_pass(3e6, 1.0, one).time_s == pytest.approx(3e-6)
    op = Move(
        "x", forward_bytes=3e6, backward_bytes=2e6, forward_by_element=slow, backward_by_element=ByElement(1e5, 2e6)
    )
    assert compute.forward(op, one, {}).time_s == pytest.approx(7e-6)
    assert compute.backward(op, one, {})[0].time_s == pytest.approx(2e-6)


def test_a_residual_costs_nothing_on_the_way_back():
    op = Move("mlp.residual", ("x", "y"), (Tensor("z", 1e6, 2.0),), same_grad=True)
    assert compute.backward(op, RATES, {"x": 2e6, "y": 2e6, "z": 2e6})[0].time_s == 0


# --- the optimizer ---


@pytest.mark.parametrize(
    ("performance", "bytes_"),
    [
        ({}, 30),  # gradient 4, master 8, moments 16, parameter 2
        ({"main_grad_dtype": "bf16"}, 28),
        ({"software": "fsdp2"}, 28),  # fused: gradient 4, parameter read and written, moments 16
        ({"software": "torch"}, 40),  # foreach, 20 accesses of 2 bytes: parameter 4, moments 3 + 5 + 6, gradient 2
        ({"software": "torch", "precision": "fp32"}, 80),
        (
            {"software": "aleph-alpha"},
            78,
        ),  # foreach: 18 accesses in fp32, 2 of the bf16 gradient, the bf16 copy written
        ({"param_dtype": "fp32"}, 28),  # its own master: gradient 4, parameter read and written, moments 16
        ({"master_dtype": "remainder"}, 28),  # gradient 4, both halves of the master read and written, moments 16
    ],
)
def test_bytes_that_adam_moves(performance, bytes_):
    assert update_bytes_per_param(llama3_70b(**{"parallelism.pp": 1, "performance": performance}), 8.0) == bytes_


def test_clipping_reads_the_gradient_twice_and_writes_it_or_is_left_out():
    job = llama3_70b(**{"parallelism.pp": 1})
    assert clip_bytes_per_param(job) == 12
    assert clip_bytes_per_param(job.replace(**{"performance.clip_grad": False})) == 0


def test_seconds_of_the_optimizer():
    """30 for Adam and 12 for clipping (the norm, then scaling) of the owned, 4 to zero the gradient of the held."""
    job = llama3_70b()
    assert update_s(job, 1e9, 32e9, 8.0, 2e12) == pytest.approx((1e9 * 42 + 32e9 * 4) / 2e12)


# --- overlap ---


def test_what_hides():
    """15 % of what is hidden comes back (calculon, a100_80g.json, processor_usage of NVLink): of 4 s at once, 3.4 are gained."""
    assert hidden_s(8.0, 4.0, share=True) == pytest.approx(3.4)
    assert hidden_s(8.0, 4.0, share=True, slowed=0.02) == pytest.approx(3.92)
    assert hidden_s(8.0, 4.0, share=0.25) == 2.0
    assert hidden_s(8.0, 4.0, share=False) == hidden_s(8.0, 4.0, share=None) == 0.0


def test_a_kernel_in_pieces_leaves_the_first_of_the_collective_alone():
    """Eight pieces: 8 s beside a long kernel run at once but for the first piece, 7 s; beside 4 s of compute 7/8 of that."""
    assert in_pieces_s(8.0, 100.0, 8.0) == 7.0
    assert in_pieces_s(8.0, 4.0, 8.0) == 3.5


# --- one layer, whole ---


def test_shapes_of_a_layer_after_tensor_parallelism():
    """Llama-3-70B, tp 8: 64 + 2 * 8 heads of 128, an MLP of 28,672, the vocabulary padded to 129,024."""
    shapes = {row.name: (row.m, row.n, row.k) for row in estimate(llama3_70b()).gemms if row.pass_ == "forward"}
    assert shapes == {
        "attn.qkv": (8192, 80 * 128 / 8, 8192),
        "attn.proj": (8192, 8192, 64 * 128 / 8),
        "mlp.gate_up": (8192, 2 * 28672 / 8, 8192),
        "mlp.down": (8192, 8192, 28672 / 8),
        "head.proj": (8192, 129024 / 8, 8192),
    }


def test_passes_of_a_projection_in_the_table():
    rows = {row.pass_: row for row in estimate(llama3_70b()).gemms if row.name == "mlp.gate_up" and row.stage == 0}
    m, n, k = 8192, 7168, 8192
    assert {name: (row.m, row.n, row.k) for name, row in rows.items()} == {
        "forward": (m, n, k),
        "dgrad": (m, k, n),
        "wgrad": (k, n, m),
    }
    assert all(row.flops == 2 * m * n * k for row in rows.values())
    assert all(row.count_per_step == 20 * 64 for row in rows.values())  # layers of the stage, micro-batches
    moved = {name: (row.input_bytes, row.weight_bytes, row.output_bytes) for name, row in rows.items()}
    assert moved["forward"] == (2 * m * k, 2 * k * n, 2 * m * n)
    assert moved["dgrad"] == (2 * m * n, 2 * k * n, 2 * m * k)
    assert moved["wgrad"] == (2 * m * k, 2 * m * n, 8 * k * n)
    for row in rows.values():
        total = row.input_bytes + row.weight_bytes + row.output_bytes
        assert row.bandwidth_s == pytest.approx(total / (3350e9 * 0.887))
        assert row.time_s == pytest.approx(max(row.compute_s, row.bandwidth_s) + 4e-6)


A = 8192 * 8192 * 2
"""Bytes of one activation of Llama-3-70B: 8,192 tokens of 8,192 values."""


@pytest.mark.parametrize(
    ("sp", "forward", "backward"),
    [
        (True, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
        (False, {"all_reduce": 2}, {"all_reduce": 2}),
    ],
)
def test_collectives_of_a_layer(sp, forward, backward):
    """megatron-core 0.16.1's own counts, forward and backward; with sp the input is gathered again for wgrad."""
    block = estimate(llama3_70b(**{"parallelism.sp": sp})).timing.parts.layer
    for work, counts in ((block.forward, forward), (block.backward, backward)):
        kinds = [call.kind for call in work.calls]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == counts
        assert all(call.bytes == A for call in work.calls)


def test_a_ring_and_a_send_by_hand():
    """Eight ranks in a node pass 7/8 of the tensor at NVLink's rate; a stage's shard crosses one NIC."""
    answer = estimate(llama3_70b())
    tiers = Machine.load("dgx-h100").tiers
    gather = next(row for row in answer.collectives if row.kind == "all_gather" and row.axis == "tp")
    assert gather.bandwidth_s == pytest.approx(7 / 8 * A / (tiers[0].bytes_per_s * tiers[0].efficiency))
    send = next(row for row in answer.collectives if row.axis == "pp")
    assert send.bytes == A / 8
    assert send.bandwidth_s == pytest.approx(A / 8 / (tiers[1].bytes_per_s * tiers[1].efficiency))
    assert send.latency_s == pytest.approx(4.5e-6 + tiers[1].latency_s)
    assert send.count_per_step == 2 * 64  # every micro-batch, there and back


def test_only_collectives_beside_a_projection_hide_under_it():
    """The loss's three sums wait for the logits and for each other."""
    timing = estimate(llama3_70b(**{"performance.overlap": {"tp": True}})).timing
    hidden = {call.name: call.hidden_s for call in timing.parts.head.forward.calls}
    assert hidden.keys() == {"head.gather", "loss.max", "loss.target", "loss.sum"}
    assert hidden.pop("head.gather") > 0
    assert set(hidden.values()) == {0.0}
