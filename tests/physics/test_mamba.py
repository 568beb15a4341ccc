"""A Mamba-2 layer by hand: parameters, FLOPs and bytes of its scan, its temporaries."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.cost.compute import backward, forward
from steptime.cost.rates import rates
from steptime.job.assembly import Assembly
from steptime.model.scans import Scan

SMALL = {
    "n_layers": 2,
    "hidden_sz": 128,
    "inter_sz": 256,
    "n_q_heads": 4,
    "vocab_sz": 1024,
    "glu": False,
    "hybrid_pattern": "M-",
    "mamba": {"n_heads": 8, "head_dim": 32, "state_dim": 16, "n_groups": 2, "chunk_sz": 64},
}


def layer(**layout):
    """The Mamba layer of a small hybrid model, 64 tokens."""
    return Assembly(job(SMALL, seqlen=64, dp=1, tp=1, gbs=4, **layout)).kinds[0]


def scan(**layout):
    return next(op for op in layer(**layout).ops if isinstance(op, Scan))


def test_parameters_of_a_layer():
    """d = 8 * 32 = 256, G N = 32. in_proj 128 (2 * 256 + 2 * 32 + 8) = 74,752; convolution (256 + 64)(4 + 1) = 1,600; A_log, D
    and dt_bias 3 * 8; gated norm 256; out_proj 256 * 128 = 32,768; norm 128 (megatron/core/ssm/mamba_mixer.py)."""
    assert layer().n_params == 74_752 + 1_600 + 24 + 256 + 32_768 + 128


def test_flops_and_bytes_of_a_scan():
    """64 tokens, chunks of 64. Per token: C B^T within the chunk, causal, 2 groups * 64 * 16 = 2,048; with x 8 heads * 64 * 32
    = 16,384; states in and out 8 * 4 * 16 * 32 = 16,384: 34,816 FLOPs.

    Bytes per token: convolution 2 * 2 (256 + 64) = 1,280; states (4 + 2) * 256 * 16 / 64 = 384; dt (2 + 8) * 8 = 80.
    """
    op = scan()
    assert op.flops == 64 * 34_816
    assert op.forward_bytes == 64 * (1_280 + 384 + 80)
    assert op.conv_bytes == 64 * 1_280


def test_time_of_a_scan():
    """64 * 34,816 FLOPs at 1 TFLOP/s 2.228 us; 81,920 bytes of the convolution at 1 GB/s 81.920 us, 29,696 of states and dt at
    2 GB/s 14.848 us; backward 2.8 times as long."""
    slow = job(SMALL, seqlen=64, dp=1, tp=1, gbs=4)
    of = rates(slow.machine.accelerator, slow.software)
    r = of._replace(scan_flops=1e12, conv_bytes_per_s=1e9, bytes_per_s=2e9, move_rate=1.0, move_kernel_s=0.0)
    found = forward(scan(), r, {})
    assert (found.compute_s, found.bandwidth_s) == (pytest.approx(2.228224e-6), pytest.approx(96.768e-6))
    assert found.time_s == pytest.approx(98.996224e-6)
    assert backward(scan(), r, {})[0].time_s == pytest.approx(2.8 * 98.996224e-6)


def test_temporaries_of_a_scan():
    """64 tokens, one chunk: convolved channels 2 * 320 * 64 = 40,960; dt and its sums 8 * 8 * 64 = 4,096; states 4,096 elements;
    C B^T 4 * 64 * 64 * 2 = 32,768.

    Forward: passing states before there is output, 40,960 + 4,096 + 6 * 4,096 - 2 * 2 * 256 * 64 = 4,096, is less than at the
    end, 40,960 + 4,096 + 2 * 4,096 + 32,768 = 86,016. Backward: 2 * 40,960 + 4,096 + dt again 2 * 8 * 64 + 32,768 + the gradient
    before the gate 2 * 256 * 64, and states and their gradients twice 2 * 6 * 4,096 = 49,152.
    """
    op = scan()
    assert op.forward_temp_bytes == 86_016
    assert op.backward_temp_bytes == 81_920 + 4_096 + 1_024 + 32_768 + 32_768 + 49_152


def test_sequences_are_put_first_only_where_there_are_several():
    names = [op.name for op in layer().ops]
    assert "mamba.batch_first" not in names
    assert {"mamba.batch_first", "mamba.sequence_first"} <= {op.name for op in layer(microbatch_sz=2).ops}


def test_context_parallel_ranks_exchange_tokens_for_heads():
    """cp 2: z, x, B, C and dt by five all-to-alls of 32 tokens * 584 outputs * 2 bytes in all, y by one of 32 * 256 * 2."""
    found = {op.name: op for op in layer(cp=2).ops}
    assert found["mamba.to_heads"].bytes * found["mamba.to_heads"].count == 32 * 584 * 2
    assert found["mamba.to_tokens"].bytes == 32 * 256 * 2


def test_model_flops_of_a_step():
    """Megatron's convention: 7 d N per token and scan, 2 per weight of a projection and of the logits, attention nowhere; three
    times for forward and backward, 4 sequences of 64 tokens. Nothing is recomputed or padded, so the hardware's are the same."""
    weights = 74_752 + 32_768 + 2 * 128 * 256 + 1024 * 128
    per_token = 2 * weights + 7 * 256 * 16
    found = estimate(job(SMALL, seqlen=64, dp=1, tp=1, gbs=4)).flops
    assert found.model_per_step == found.model_per_step_full_attention == pytest.approx(3 * 256 * per_token)
    assert found.hardware_per_step == pytest.approx(3 * 256 * per_token)


def test_hardware_flops_of_a_hybrid_are_more_by_what_attention_recomputes():
    """One attention layer over 64 tokens, causal, 4 heads of 32: a product is 2 * 4 * 32 * 64 / 2 = 8,192 FLOPs a token. Backward
    runs 5 of them and 4 are counted, so the hardware does one more; states of 256 do not bring it below the model's.
    """
    deep = SMALL | {"hybrid_pattern": "M*", "mamba": SMALL["mamba"] | {"state_dim": 256}}
    found = estimate(job(deep, seqlen=64, dp=1, tp=1, gbs=4)).flops
    assert found.hardware_per_step - found.model_per_step == pytest.approx(256 * 8_192)


def test_sizes_that_a_model_does_not_say():
    """Megatron-Core's: 128 states, heads of 64, 8 groups (transformer_config.py, mamba_state_dim to mamba_num_groups), chunks of
    128 and a convolution of 4 (ssm/mamba_mixer.py). Of width 512 there are 2 * 512 / 64 = 16 heads, d = 1,024, G N = 1,024.

    in_proj 512 (2 * 1,024 + 2 * 1,024 + 16) = 2,105,344; convolution (1,024 + 2,048) 5 = 15,360; 3 * 16; norms 1,024 and 512;
    out_proj 524,288. FLOPs a token: C B^T 8 * 128 * 128, with x 16 * 128 * 64, states in and out 16 * 4 * 128 * 64: 786,432.
    """
    plain = SMALL | {"hidden_sz": 512, "mamba": {}}
    part = Assembly(job(plain, seqlen=128, dp=1, tp=1, gbs=4)).kinds[0]
    [op] = [op for op in part.ops if isinstance(op, Scan)]
    assert part.n_params == 2_105_344 + 15_360 + 48 + 1_024 + 512 + 524_288
    assert op.flops == 128 * 786_432


def test_a_single_state():
    """As `test_parameters_of_a_layer` with one state of one group: G N = 1, in_proj 128 (512 + 2 + 8) = 66,816, convolution
    (256 + 2) 5.
    """
    one = SMALL | {"mamba": SMALL["mamba"] | {"state_dim": 1, "n_groups": 1}}
    part = Assembly(job(one, seqlen=64, dp=1, tp=1, gbs=4)).kinds[0]
    assert part.n_params == 66_816 + 1_290 + 24 + 256 + 32_768 + 128
