"""Bytes that memory-bound kernels move: on a device of 1 B/s whose products are free, seconds are bytes.

Of 8 tokens of 128 values in bf16 an activation has A = 8 * 128 * 2 = 2,048 bytes.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine
from rates import RATES

from steptime.answer.result import estimate
from steptime.cost.compute import parameter_gradients
from steptime.model.ops import Gemm, Param


def moved(software: str = "megatron-core", **said) -> float:
    """Seconds of memory-bound kernels in a step; GEMMs, attention and the optimizer are counted elsewhere."""
    return estimate(job(software, on=machine(memory=1.0), **said)).time.parts_s["memory_bound"]


def by_hand(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY)


def test_a_megatron_step_of_one_layer():
    """Fused kernels: norm, rope, SwiGLU, residual; the table's look-up and its dense gradient; the loss in fp32.

    norm forward: x, 128 weights, out, 8 fp32 rstd: 2048 + 256 + 2048 + 32 = 4,384
         backward: dout, x and rstd, dx, weights: 2048 + 2080 + 2048 + 256 = 6,432
    rope, either way: q and k read and written: 2 * 2 * 2048 = 8,192
    SwiGLU forward: gate and up (2 * 256 wide: 8,192), out 4,096 = 12,288; backward: dout, gate and up, their gradient = 20,480
    residual forward: two read, one written = 6,144; backward nothing
    layer: 2 * (4384 + 6432) + 2 * 8192 + 12288 + 20480 + 2 * 6144 = 83,072
    embedding forward: rows read and written 4,096; backward the same and the dense gradient of 131,072 elements: zeroed and
        scattered into (2 bytes), read (2), the fp32 main gradient read and written (4 + 4): 12 each = 1,572,864
    head: a norm 10,816; logits L = 8 * 1024 * 2 = 16,384, in fp32 32,768. Loss forward: logits read, upcast written, softmax read
        and written: 16384 + 3 * 32768 = 114,688; backward: softmax read, fp32 gradient written, read, downcast written: the same
    """
    layer, embedding, head = 83_072, 2 * 4_096 + 1_572_864, 10_816 + 2 * 114_688
    assert layer + embedding + head == 1_904_320
    assert moved(model={"n_layers": 1}) == by_hand(1_904_320)
    assert moved(model={"n_layers": 3}, microbatches=2) == by_hand(2 * (1_904_320 + 2 * 83_072))


def test_an_eager_torch_step_of_one_layer():
    """Separate kernels; every gradient of a first micro-batch is the gradient itself, so nothing is added to one.

    norm: as Megatron's, 10,816 both ways
    rope forward: halves rotated (3 passes), two products (2 each), their sum (3): 10 * 2 * 2048 = 40,960; backward: two products
        (4), gradients of two halves (4), one negated (1), two sums (6): 15 * 2 * 2048 = 61,440
    SiLU forward: gate read, out written 8,192; backward: gate and dout read, dgate written 12,288
    product forward: 3 * 4096 = 12,288; backward: dout, both factors, both gradients 20,480
    residual 6,144, forward only
    layer: 2 * 10816 + 40960 + 61440 + 8192 + 12288 + 12288 + 20480 + 2 * 6144 = 189,568
    embedding: 2 * 4,096, and 131,072 * (2 + 2 + 2 + 2) bytes, its gradient in bf16 = 1,048,576
    head: norm 10,816; cast: logits 16,384 to fp32 32,768 and back: 2 * 49,152; log_softmax forward 65,536, backward dout, its own
        output, dx: 98,304; nll forward: a target of 8 and a value of 4 bytes per token: 96, backward the gradient written 32,768
    """
    layer = 189_568
    embedding = 2 * 4_096 + 1_048_576
    head = 10_816 + 2 * 49_152 + 65_536 + 98_304 + 96 + 32_768
    assert layer + embedding + head == 1_552_160
    assert moved("torch", model={"n_layers": 1}) == by_hand(1_552_160)


@pytest.mark.parametrize(("tp", "dense"), [(1, 1_572_864), (2, 786_432)])
def test_the_embeddings_gradient_is_dense(tp, dense):
    """12 bytes for each of a device's 131,072 / tp elements (a micro-batch's own rows aside), 8 with a bf16 main gradient."""
    layout = {"model": {"n_q_heads": 2, "n_layers": 1}, "tp": tp, "microbatches": 3}
    wide, narrow = (moved(performance={"main_grad_dtype": dtype}, **layout) for dtype in ("fp32", "bf16"))
    assert wide - narrow == by_hand(3 * dense / 12 * 4)


def test_eager_rope_passes_25_times_where_a_fused_kernel_passes_four_times():
    """q and k are 4,096 bytes together; 8 passes more in forward and 13 in backward, in 2 layers of 3 micro-batches: 516,096."""
    eager, fused = (moved(performance={"rope_impl": how}, microbatches=3) for how in ("composite", "fused"))
    assert eager - fused == by_hand(21 * 4_096 * 2 * 3)
    without = moved(model={"rotary_embeds": False}, microbatches=3)
    assert fused - without == by_hand(2 * 4_096 * 2 * 2 * 3)


def test_megatrons_eager_rope_passes_twelve_times_forward_and_fourteen_backward():
    """q and k are 4,096 bytes together; 10 and 12 passes more than a fused kernel's two, in 2 layers: 180,224. Tables are kept.

    Forward: half negated 1, joined 2, two products 4, sum 3, joined with the empty part 2; backward, without that last join: 10,
    zeros for the empty part 1, their sum 3 (_apply_rotary_pos_emb_bshd, megatron/core/models/common/embeddings/rope_utils.py).
    """
    fused, own = (moved(performance={"rope_impl": how}) for how in ("fused", "own_tables"))
    assert own - fused == by_hand((10 + 12) * 4_096 * 2)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_unfused_gradients_are_added_in_a_kernel_of_their_own(microbatches):
    """Megatron's main gradient persists, so every micro-batch adds: bf16 read, fp32 read and written, 10 bytes a weight.

    Projections of two layers and the head: 2 * 163,840 + 131,072 = 458,752 weights.
    """
    fused, apart = (
        moved(performance={"grad_accumulation_fusion": how}, microbatches=microbatches) for how in (True, False)
    )
    assert apart - fused == by_hand(microbatches * 458_752 * 10)


@pytest.mark.parametrize(("microbatches", "adds"), [(1, 0), (2, 1), (5, 4)])
def test_torchs_first_micro_batch_adds_to_nothing(microbatches, adds):
    """torch frees gradients after the step, so the first is taken as it is; each later one reads two bf16 and writes one."""
    fused, apart = (
        moved("torch", performance={"grad_accumulation_fusion": how}, microbatches=microbatches)
        for how in (True, False)
    )
    assert apart - fused == by_hand(adds * 458_752 * 6)


def test_a_gradient_is_added_in_one_kernel():
    """Two grouped weights of 128 x 256 at 10 bytes each: 655,360 bytes at 1e12 B/s are .65536 us, beside 3 us for one kernel."""
    adds = RATES._replace(fused_accumulation=False, accumulate_bytes=10.0)
    op = Gemm("g", m=8.0, n=256.0, k=128.0, count=2.0, params=(Param("w", (256, 128)),), grouped=True)
    assert parameter_gradients(op, adds) == pytest.approx(3.65536e-6)
    assert parameter_gradients(op, RATES) == 0.0


def test_a_bias_gradient_sums_the_outputs_gradient():
    """One read of each projection's dout: qkv 384 wide, gate and up 512; proj and down 128 each. 8 * 1152 * 2 = 18,432 bytes.

    The norms' biases are read beside their weights, 256 bytes forward and back, where norm_bias says so; here not.
    """
    plain, biased = (
        moved(model={"n_layers": 1, "bias": bias, "norm_bias": False, "norm": "layernorm"}) for bias in (False, True)
    )
    assert biased - plain == by_hand(18_432)
