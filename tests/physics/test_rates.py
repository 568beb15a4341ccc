"""What a device sustains: the rates behind a step's products, where its file says more or less."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.cost.compute import gemm_traffic
from steptime.cost.rates import head_64, peak_dtype, rates
from steptime.hardware.machine import Machine
from steptime.model.ops import Gemm, Param
from steptime.software.efficiency import Efficiency, using
from steptime.software.performance import load_software


def part(name: str, software="torch", performance=None, model=None, **figures) -> float:
    on = machine(**({"flops": 1.0} | figures))
    return estimate(job(software, on=on, performance=performance, model=model)).time.parts_s[name]


def by_hand(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY)


PRODUCTS = 16 * (2 * 163_840 + 131_072) * (2 + 1 / 0.95)
"""FLOPs of 8 tokens through two layers and the head, as seconds at 1 FLOP/s: forward and dgrad, and wgrad at 95 % of the rate."""
ATTENTION = 2 * 16_384
"""Two layers' causal half of 2 * 8 * 8 * (128 + 128)."""


def test_products_and_attention():
    """Attention's backward has five products to forward's two."""
    assert part("gemm") == by_hand(PRODUCTS)
    assert part("attention") == by_hand(ATTENTION * 3.5)


def test_a_step_takes_what_its_parts_take():
    """Where memory, links and the host are free: products and attention."""
    found = estimate(job("torch", on=machine(flops=1.0)))
    assert found.time.step_s == found.step_s == by_hand(PRODUCTS + ATTENTION * 3.5)


@pytest.mark.parametrize(
    ("figures", "rate"),
    [
        ({"sustained_flops": {"bf16": 0.5}}, 0.5),
        ({"sustained_flops": {"fp16": 0.5}}, 0.5),  # the other 16-bit dtype stands in
        ({"sustained_flops": {}, "best_flops": {"bf16": 0.5}}, 0.4),  # 0.8 of what the best shape reaches for a moment
        ({"sustained_flops": {}, "best_flops": {"fp16": 0.5}}, 0.4),
        ({"sustained_flops": {}}, 0.75),  # of the peak
    ],
)
def test_what_a_machine_file_leaves_unsaid(figures, rate):
    assert part("gemm", **figures) == by_hand(PRODUCTS / rate)


def test_torch_reaches_its_share_of_a_tuned_rate():
    """Half of it: products take twice as long under torch, and no longer under Megatron-Core."""
    assert part("gemm", torch_gemm_share=0.5) == by_hand(2 * PRODUCTS)
    assert part("gemm", "megatron-core", torch_gemm_share=0.5) == part("gemm", "megatron-core")


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [
        ("best", 0.8, 0.5),
        ("fa2", 0.4, 0.25),
        ("fa1", 0.4 / 2.35, 0.25 / 2.35),  # Dao 2023: FlashAttention-2 is 1.7 to 3.0 times as fast as the first
        ("triton", 0.4 / 1.7, 0.25 / 1.7),  # and 1.3 to 2.5 times as fast as the Triton version
        ("flex", 0.4 * 0.9, 0.25 * 0.9),  # FlexAttention reaches 0.85 to 0.9 of it
        ("efficient", 0.4 * 0.2, 0.25 * 0.2),  # 44.4 ms a layer of DeepSeek-V3 16B, where it would take 9.1
    ],
)
def test_attention_kernels(kernel, forward, backward):
    """Shares of the dense peak; the best kernel of a device may be faster than FlashAttention-2."""
    figures = {
        "attention_forward_efficiency": 0.8,
        "attention_backward_efficiency": 0.5,
        "fa2_forward_efficiency": 0.4,
        "fa2_backward_efficiency": 0.25,
    }
    found = part("attention", performance={"attention_kernel": kernel}, **figures)
    assert found == by_hand(ATTENTION * (1 / forward + 2.5 / backward))


@pytest.mark.parametrize(
    ("figures", "forward", "backward"),
    [({"cudnn_forward_efficiency": 0.9, "cudnn_backward_efficiency": 0.6}, 0.9, 0.6), ({}, 0.8, 0.5)],
)
def test_cudnn_of_2026(figures, forward, backward):
    """Its own shares of the peak where a device has them, those of the best kernel before it elsewhere."""
    before = {"attention_forward_efficiency": 0.8, "attention_backward_efficiency": 0.5, "fa2_forward_efficiency": 0.4}
    before |= {"compute_capability": 10.0}
    found = part("attention", performance={"attention_kernel": "cudnn-9.19"}, **before, **figures)
    assert found == by_hand(ATTENTION * (1 / forward + 2.5 / backward))


@pytest.mark.parametrize(
    ("kernel", "capability", "forward", "backward"),
    [
        ("sdpa", 9.0, 0.8, 0.5),
        ("sdpa-9.19", 9.0, 0.9, 0.6),
        ("sdpa", None, 0.4, 0.25),
        ("sdpa-9.19", None, 0.4, 0.25),
    ],
)
def test_torch_takes_cudnns_kernel_where_there_is_cudnn(kernel, capability, forward, backward):
    """Its scaled_dot_product_attention, asked for cuDNN's first: on NVIDIA's devices that, on others FlashAttention-2's."""
    figures = {
        "attention_forward_efficiency": 0.8,
        "attention_backward_efficiency": 0.5,
        "cudnn_forward_efficiency": 0.9,
        "cudnn_backward_efficiency": 0.6,
        "fa2_forward_efficiency": 0.4,
        "fa2_backward_efficiency": 0.25,
        "compute_capability": capability,
    }
    found = part("attention", performance={"attention_kernel": kernel}, **figures)
    assert found == by_hand(ATTENTION * (1 / forward + 2.5 / backward))


@pytest.mark.parametrize(("kernel", "rate"), [("flex", 1.5), ("fa2", 1.0), ("triton", 1 / 1.7)])
def test_attention_kernels_of_blackwell(kernel, rate):
    """FlexAttention has instructions of Blackwell that FlashAttention-2 leaves unused: 1.5 of its rate; others as anywhere."""
    figures = {"fa2_forward_efficiency": 0.4, "fa2_backward_efficiency": 0.25, "microscaling": True}
    found = part("attention", performance={"attention_kernel": kernel}, **figures)
    assert found == by_hand(ATTENTION * (1 / 0.4 + 2.5 / 0.25) / rate)


def test_flex_attention_that_nothing_compiles():
    """All 64 scores of a sequence, not the causal half, at bf16's rate and in fp32 without tensor cores, here half of it.

    Forward: one product of two in fp32, (1 + 2) / 2 of the time; backward two of five, (3 + 2 * 2) / 5.
    """
    found = part(
        "attention", performance={"attention_kernel": "flex_eager"}, sustained_flops={"bf16": 1.0, "fp32": 0.5}
    )
    assert found == by_hand(2 * ATTENTION * (1.5 + 2.5 * 1.4))


@pytest.mark.parametrize("name", ["mi300x-node", "mi355x-node"])
def test_small_heads_on_amd_do_not_take_nvidias_shares(name):
    """No rate of AMD's kernels at head size 64 was found: FlashAttention-2's share, as before they had rates of their own."""
    profile = load_software("megatron-core").replace(attention_kernel="best")
    assert head_64(Machine.load(name).accelerator, profile) == (0.87, 0.87)


@pytest.mark.parametrize("changes", [{"attention_ramp_tokens": 24}, {"model": {"n_q_heads": 2}}])
def test_matrix_products_of_all_scores_have_no_ramp_and_no_share_of_small_heads(changes):
    """Both are of flash kernels: blocks that the mask crosses, and their work for each score."""
    found = part("attention", performance={"attention_kernel": "flex_eager"}, **changes)
    assert found == by_hand(2 * ATTENTION * 3.5)


def test_a_device_without_figures_of_its_own_runs_flash_attention_2_at_its_best():
    assert part("attention", performance={"attention_kernel": "fa2"}) == by_hand(ATTENTION * 3.5)


def test_short_sequences_and_small_heads():
    """8 of 8 + 24 tokens of a ramp, rated at 4,096 of 4,096 + 24; heads of 64 at 0.87 of the rate of heads of 128."""
    ramp = 8 / (8 + 24) * (4096 + 24) / 4096
    assert part("attention", attention_ramp_tokens=24) == by_hand(ATTENTION * 3.5 / ramp)
    assert part("attention", model={"n_q_heads": 2}) == by_hand(ATTENTION * 3.5 / 0.87)


@pytest.mark.parametrize(
    ("kernel", "microscaling", "forward", "backward"),
    [
        ("best", False, 420 / 579, 453 / 542),  # FlashAttention-3 on H100, arXiv 2407.08608 figures 5 and 6, 4k
        (
            "best",
            True,
            708 / 1062,
            453 / 542,
        ),  # FlashAttention-4 on B200, Dao-AILab/flash-attention pull request 2605, 4k
        ("cudnn-9.19", True, 708 / 1062, 453 / 542),
        ("fa2", False, 0.87, 0.87),
        ("fa2", True, 0.87, 0.87),
    ],
)
def test_small_heads_by_kernel(kernel, microscaling, forward, backward):
    """TFLOP/s at head size 64 over those at 128; all other rates are 1 FLOP/s."""
    figures = {"fa2_forward_efficiency": 1.0, "fa2_backward_efficiency": 1.0, "microscaling": microscaling}
    figures |= {"compute_capability": 10.0 if microscaling else 9.0}
    found = part("attention", performance={"attention_kernel": kernel}, model={"n_q_heads": 2}, **figures)
    assert found == pytest.approx(ATTENTION * (1 / forward + 2.5 / backward), rel=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "fp32", "slower"),
    [
        (16, 0.25, 2),  # rows of 32 bytes start where tensor cores can read them: their 0.5
        (12, 0.25, 4),  # rows of 24 bytes do not: the rate of fp32
        (12, 4.0, 2),  # no faster than with tensor cores
    ],
)
def test_heads_that_tensor_cores_cannot_read(head_dim, fp32, slower):
    """Unfused attention: two products of 2 * 8 * 8 * head_dim forward, four backward, in two layers."""
    performance = {"attention_impl": "unfused"}
    figures = {"peak_flops": {"bf16": 1.0, "fp32": fp32}, "sustained_flops": {"bf16": 0.5}}
    found = part("attention", performance=performance, model={"head_dim": head_dim}, **figures)
    assert found == by_hand(2 * 6 * 128 * head_dim * slower)


def test_depth_and_waves_of_a_product():
    """A device of two SMs and an overhead of 128: of depth 128 a product reaches 1/2, of 256 2/3, of 384 3/4, of 512 4/5, of 1024
    8/9; with 8 rows to every tile of 128 x 256, tiles are columns / 256: an odd number of them leaves half of a wave empty, of
    which a quarter is lost.

    By rows x columns x depth: forward 8 x n x k, dgrad 8 x k x n, wgrad k x n x 8 (depth 8: 8 / 136). Tiles of wgrad: k / 128
    rows, n / 256 columns.
    """

    def share(tiles: int, depth: int) -> float:
        waves = tiles / 2
        full = waves / -(-tiles // 2)
        return (0.75 + 0.25 * full) * depth / (depth + 128)

    # eager: q, k, v and projection 128 x 128, gate and up 256 x 128, down 128 x 256, the head 1024 x 128
    expected = 0.0
    for n, k, count in ((128, 128, 8), (256, 128, 4), (128, 256, 2), (1024, 128, 1)):
        flops = 2 * 8 * n * k
        forward = flops / share(-(-n // 256), k)
        dgrad = flops / share(-(-k // 256), n)
        wgrad = flops / share(-(-k // 128) * -(-n // 256), 8) / 0.95
        expected += count * (forward + dgrad + wgrad)
    assert part("gemm", sm_count=2, gemm_overhead_k=128) == by_hand(expected)


@pytest.mark.parametrize(("sm_count", "expected"), [(132, 89.76e12), (None, 91e12)])
def test_a_scan_runs_on_every_processor(sm_count, expected):
    """Mamba-2's kernels compute .68 TFLOP/s on an SM: of 132 SMs 89.76; where their number is not stated .091 of the peak."""
    on = machine(flops=1e15, sm_count=sm_count)
    assert rates(on.accelerator, job(on=on).software).scan_flops == pytest.approx(expected)


@pytest.mark.parametrize(("sm_count", "expected"), [(148, 384.8e9), (None, float("inf"))])
def test_elements_without_vector_loads_go_through_every_processor(sm_count, expected):
    """2.6e9 a second on an SM: of 148 SMs 384.8e9; no limit where their number is not stated."""
    on = machine(flops=1e15, sm_count=sm_count)
    assert rates(on.accelerator, job(on=on).software).elements_per_s == pytest.approx(expected)


@pytest.mark.parametrize(("sm_count", "expected"), [(2, 42e9), (100, 0.5 * 800e9), (None, 0.5 * 800e9)])
def test_a_convolution_is_as_fast_as_its_processors_and_as_memory(sm_count, expected):
    """21 GB/s on each of two SMs; 100 could do 2,100, but memory of 800 GB/s gives such kernels half of its rate."""
    on = machine(memory=800e9, sm_count=sm_count)
    assert rates(on.accelerator, job(on=on).software.replace(move_rate=0.5)).conv_bytes_per_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stated", "asked", "found"),
    [
        (["bf16", "fp16", "fp32"], "fp16", "fp16"),
        (["fp16", "fp32"], "bf16", "fp16"),  # the other 16 bits, on V100
        (["bf16", "fp32"], "fp16", "bf16"),
        (["tf32", "fp32"], "bf16", "tf32"),  # neither of them: whatever is stated first
        (["bf16", "fp32"], "tf32", "fp32"),
        (["bf16"], "fp32", "bf16"),
    ],
)
def test_a_precision_that_a_device_does_not_state(stated, asked, found):
    """The tensor-core mode that stands in for it: of 16 bits the other format, of others fp32, else the first that is stated."""
    peaks = dict.fromkeys(stated, 1.0)
    on = machine(peak_flops=peaks, sustained_flops={})
    assert peak_dtype(on.accelerator, asked) == found


@pytest.mark.parametrize(("software", "share", "slower"), [("torch", 1.0, 1.0), ("megatron-core", 0.5, 3.0)])
def test_what_was_fitted_on_runs_is_not_of_a_device_whose_kernels_were_measured(software, share, slower):
    """A device of 8 TFLOP/s on which steps reach half of a product's rate, with profiles whose kernels take three times as long:
    figures of eager torch were measured on it, kernels' fixed times among them, those of Megatron were not.
    """
    on = machine(flops=8e12, memory=1e12)
    with using(Efficiency({"toy": {"bf16": 0.5}}, 1.0, 1.0, {"torch": 3.0, "megatron-core": 3.0})):
        plan = job(software, on=on)
        found = rates(on.accelerator, plan.software)
    assert found.gemm_flops == pytest.approx(8e12 * share / slower)
    assert found.recipe_flops == pytest.approx(8e12 * share / slower)
    assert found.attention_forward_flops == pytest.approx(8e12 / slower)
    assert found.bytes_per_s == pytest.approx(1e12 / slower)
    assert found.slowness == slower


@pytest.mark.parametrize(("fused", "bytes_"), [(True, 4 + 4), (False, 2)])
def test_bytes_of_a_weights_gradient(fused, bytes_):
    """Megatron's GEMM adds to the main gradient, which is read and written in fp32, or writes one in bf16: 6 x 4 weights."""
    plan = job("megatron-core", performance={"grad_accumulation_fusion": fused})
    product = Gemm("p", ("x",), (), ("x",), (), (Param("w", (6, 4)),), m=8, n=6, k=4, itemsize=2.0)
    wgrad = gemm_traffic(product, rates(plan.machine.accelerator, plan.software))[2]
    assert wgrad == (8 * 4 * 2, 8 * 6 * 2, 6 * 4 * bytes_)
