"""Linear attention: parameters and FLOPs worked out by hand, and the time of its kernels beside published benchmarks."""

import jobs
import pytest

from steptime import estimate
from steptime.cost import compute
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.model.blocks import layers, n_params
from steptime.model.delta_rule import DELTA_BACKWARD, KDA_SLOWNESS
from steptime.model.linear_attention import LIGHTNING_BACKWARD
from steptime.model.model import Model
from steptime.model.presets import load_model
from steptime.model.scans import Chunked
from steptime.software.performance import load_software

SMALL = {"n_layers": 4, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "vocab_sz": 51200}


def linear_job(linear, **parallelism):
    return jobs.job(SMALL | {"linear_attention": linear}, gbs=32, **{"dp": 4} | parallelism)


def accelerator(name):
    return Machine.load("dgx-h100", {"accelerator": name}).accelerator


def test_parameters_of_qwen3_next():
    """h = 2048; of 48 layers experts 513 * 3 h 512, routers 512 h, gates h, two norms; 36 times Gated DeltaNet, 12 attention.

    Gated DeltaNet: q, k 2 * 2048, v and gate 2 * 4096, beta and alpha 2 * 32 outputs; convolution 4 * 8192; 2 * 32; a norm of
    128; 4096 h. Attention: q and its gate 2 * 4096, k and v 2 * 512, 4096 h, two norms of 256.
    """
    h, vocab = 2048, 151936
    every = 513 * 3 * h * 512 + 512 * h + h + 2 * h
    linear = (2 * 2048 + 2 * 4096 + 64) * h + 4 * 8192 + 64 + 128 + 4096 * h
    full = (2 * 4096 + 2 * 512) * h + 4096 * h + 512
    assert n_params(load_model("qwen3-next-80b-a3b")) == 48 * every + 36 * linear + 12 * full + h + 2 * vocab * h


def test_parameters_of_qwen3_5():
    """h = 4096: 32 MLPs of 3 h 12288, two norms; as Qwen3-Next 24 of Gated DeltaNet, and 8 of attention with 4 KV heads."""
    h, vocab = 4096, 248320
    linear = (2 * 2048 + 2 * 4096 + 64) * h + 4 * 8192 + 64 + 128 + 4096 * h
    full = (2 * 4096 + 2 * 1024) * h + 4096 * h + 512
    every = 3 * h * 12288 + 2 * h
    assert n_params(load_model("qwen3.5-9b")) == 32 * every + 24 * linear + 8 * full + h + 2 * vocab * h


def test_parameters_of_kimi_linear():
    """h = 2304, 32 heads of 128: 26 layers of 257 experts 3 h 1024 and a router 256 h, one MLP 3 h 9216, two norms each.

    20 KDA layers: q, k, v and output 4 * 4096 h; convolutions 4 * 3 * 4096; decay and gate each (h + 4096) 128; beta 32 h; 32 +
    4096; a norm of 128. 7 of latent attention: q 32 * 192 h, 576 h, a norm of 512, 512 * 32 * 256, 4096 h.
    """
    h, vocab = 2304, 163840
    experts = 26 * (257 * 3 * h * 1024 + 256 * h) + 3 * h * 9216 + 27 * 2 * h
    kda = 4 * 4096 * h + 12 * 4096 + 2 * (h + 4096) * 128 + 32 * h + 32 + 4096 + 128
    latent = 6144 * h + 576 * h + 512 + 512 * 32 * 256 + 4096 * h
    assert n_params(load_model("kimi-linear-48b-a3b")) == experts + 20 * kda + 7 * latent + h + 2 * vocab * h


def test_parameters_of_minimax():
    """456 B as published: 70 Lightning layers of 5 * 8192 h and a norm of 8192, 10 of attention, 32 experts 3 h 9216 in all."""
    h, vocab = 6144, 200064
    every = 32 * 3 * h * 9216 + 32 * h + 2 * h
    linear, full = 5 * 8192 * h + 8192, 2 * 8192 * h + 2 * 1024 * h
    found = n_params(load_model("minimax-text-01"))
    assert found == 80 * every + 70 * linear + 10 * full + h + 2 * vocab * h
    assert round(found / 1e9) == 456


def test_which_layers_have_it():
    def has(freq):
        model = Model(**SMALL, linear_attention={"freq": freq})
        return [layer.model.linear_attention is not None for layer, count in layers(model) for _ in range(count)]

    assert has(4) == [True, True, True, False]
    assert has(3) == [True, True, False, True]
    assert has([0, 1, 1, 0]) == [False, True, True, False]


def test_flops_are_those_that_megatron_counts():
    """Per token and layer of Gated DeltaNet, forward and backward, 3 * 2 times

    h (2 * 2048 + 2 * 4096 + 2 * 32) + 4 (2 * 2048 + 4096) + 32 * 128^2 * 4 + 4096 h
    (NVIDIA/Megatron-LM megatron/training/training.py, num_floating_point_operations); of attention the same without windows.
    """
    h, s, vocab = 1024, 4096, 51200
    linear = h * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 32 * 128**2 * 4 + 4096 * h
    full = 4 * h * h + h * s  # causal: half of 2 h s
    by_hand = 6.0 * (3 * linear + full + 4 * 3 * h * 4096 + vocab * h)
    for tp in (1, 4):
        found = estimate(linear_job({"freq": 4}, tp=tp, dp=8 // tp)).flops
        assert found.model_per_step / (32 * s) == pytest.approx(by_hand, rel=1e-12)
        # the scores once more in backward: the hardware's only other FLOPs
        assert found.hardware_per_step / (32 * s) == pytest.approx(by_hand + h * s, rel=1e-12)


GB200, H20 = "gb200-186", "h20-96"
GDN, KDA, FIXED = (True, 1.0, DELTA_BACKWARD), (True, KDA_SLOWNESS, DELTA_BACKWARD), (False, 1.0, LIGHTNING_BACKWARD)
MEASURED = [  # device, kind, sequences, tokens of each, heads, ms forward, ms forward and backward
    (GB200, GDN, 1, 8192, 96, 1.27, 4.74),
    (GB200, GDN, 2, 16384, 16, 1.03, 3.62),
    (GB200, GDN, 4, 4096, 64, 1.58, 5.96),
    (GB200, FIXED, 1, 8192, 96, 0.79, 2.62),
    (GB200, FIXED, 2, 16384, 16, 0.79, 2.12),
    (GB200, FIXED, 4, 4096, 64, 1.00, 3.46),
    (H20, GDN, 1, 8192, 96, 3.20, None),
    (H20, GDN, 1, 8192, 64, 2.01, None),
    (H20, KDA, 1, 8192, 96, 4.84, None),
    (H20, KDA, 1, 8192, 64, 3.17, None),
    (GB200, KDA, 1, 8192, 96, 2.33, None),
    (GB200, KDA, 1, 8192, 64, 1.58, None),
]
"""Benchmarks of fla-org/flash-linear-attention and MoonshotAI/FlashKDA, heads of 128, bf16; `FIXED` is retention, a fixed
decay."""


@pytest.mark.parametrize(("device", "kind", "b", "t", "heads", "ahead_ms", "both_ms"), MEASURED)
def test_kernel_times_beside_benchmarks(device, kind, b, t, heads, ahead_ms, both_ms):
    """Within 40 %: one rate per SM for all kinds and shapes."""
    delta, slowness, back = kind
    tokens, n = float(b * t), float(heads)
    op = Chunked(
        "",
        tokens=tokens,
        seq=float(t),
        n_heads=n,
        d_k=128,
        d_v=128,
        chunk_sz=64,
        delta=delta,
        slowness=slowness,
        backward_times=back,
    )
    r = rates(accelerator(device), load_software("megatron-core"))
    ahead = compute.forward(op, r, {}).time_s
    assert ahead * 1e3 == pytest.approx(ahead_ms, rel=0.4)
    if both_ms is not None:
        assert (ahead + compute.backward(op, r, {})[0].time_s) * 1e3 == pytest.approx(both_ms, rel=0.4)


def test_few_heads_wait_for_their_chunks():
    """A quarter of the heads on each of four ranks takes longer than a quarter of the time: chunks follow one another."""
    r = rates(accelerator("h100-sxm5-80"), load_software("megatron-core"))
    whole, part = (
        compute.forward(
            Chunked("", tokens=4096.0, seq=4096.0, n_heads=n, d_k=128, d_v=128, chunk_sz=64, delta=True), r, {}
        ).compute_s
        for n in (32.0, 4.0)
    )
    assert part == pytest.approx(160e-6)
    assert whole == pytest.approx(4096 * 32 * 180_224 / (132 * 0.65e12))
