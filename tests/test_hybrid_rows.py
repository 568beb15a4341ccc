"""Measured rows of hybrids: the shapes come from the preset of the model that a row names."""

from __future__ import annotations

import pytest

from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.model.blocks import n_params
from steptime.model.presets import load_model
from steptime.software.performance import load_software
from steptime.validation.measurements import SkipRowError, shipped
from steptime.validation.row_plan import to_config, to_job


def row(name):
    return next(r for r in shipped() if r.id == name)


def test_preset_of_a_row():
    """Nemotron 3 Nano on 8 B200 (MBRIDGE-111): 52 layers of the pattern, experts over 8 ranks, HybridEP."""
    mapped = to_config(row("MBRIDGE-111"))
    assert mapped.config["model"] == {"preset": "nemotron-3-nano-30b-a3b"}
    assert "model: preset nemotron-3-nano-30b-a3b" in mapped.assumed
    job = to_job(mapped)
    assert (job.model.n_layers, job.parallelism.ep, job.software.moe.dispatcher) == (52, 8, "flex")


@pytest.mark.parametrize(("name", "sms"), [("dgx-h100", 132), ("gb200-nvl72", 152), ("dgx-b300", 148)])
def test_scans_run_at_the_rate_of_an_sm(name, sms):
    """128 heads of 64, 128 states, 1 group, chunks of 256: 256 * 128 + 128 (256 * 64 + 4 * 128 * 64) = 6,324,224 FLOPs a token.

    H100 takes 1 / 12.62 million tokens/s = 79.2 ns, of which (4 + 2) 8,192 * 128 / 256 + 10 * 128 = 25,856 bytes of states and dt
    at .887 of 3,350 GB/s are 8.7 ns: 6,324,224 / 70.5 ns = 89.7 TFLOP/s, whatever the tensor cores beside its SMs reach.
    """
    accelerator = Machine.load(name).accelerator
    found = rates(accelerator, load_software("megatron-core"))
    assert found.scan_flops * found.slowness == pytest.approx(sms * 89.7e12 / 132, rel=0.003)


@pytest.mark.parametrize(
    ("name", "seconds"), [("dgx-h100", 82.3e-6), ("dgx-b200", 66.6e-6), ("gb200-nvl72", 66.3e-6), ("dgx-b300", 63.3e-6)]
)
def test_convolutions_run_at_the_rate_of_an_sm(name, seconds):
    """Nemotron 3 Nano, 8,192 tokens: 64 * 64 + 2 * 8 * 128 = 6,144 channels, read and written in bf16, 201.3 MB. At 21 GB/s on an
    SM 201.3e6 / (148 * 21e9) = 64.8 us on B200, where 66.6 were measured and its memory alone would take 30."""
    found = rates(Machine.load(name).accelerator, load_software("megatron-core"))
    assert 8192 * 6144 * 4 / (found.conv_bytes_per_s * found.slowness) == pytest.approx(seconds, rel=0.15)


def test_depths_of_the_recipe():
    """Megatron-Bridge trains Super with two depths of multi-token prediction; NeMo's AutoModel row says it has no such layers."""
    assert to_config(row("MBRIDGE-015")).config["model"] == {"preset": "nemotron-3-super-120b-a12b", "mtp": 2}
    assert to_config(row("AUTOMODEL-001")).config["model"] == {"preset": "nemotron-3-super-120b-a12b"}


def test_the_language_model_of_a_multimodal_one():
    assert to_config(row("megatron-sft-recipes-n009")).config["model"] == {"preset": "qwen3.5-9b"}


def test_a_buffer_for_the_worst_case_drops_nothing():
    """HybridEP of torchtitan without waiting, its capacity factor 1.0."""
    config = to_config(row("torchtitan-pr-n030")).config
    assert "capacity_factor" not in config["model"]["moe"]
    assert config["performance"]["moe"]["dispatcher"] == "flex"


def test_no_preset_of_that_name():
    with pytest.raises(SkipRowError, match=r"hybrid layers of Nemotron-3-Ultra-550B-A55B, not a preset"):
        to_config(row("MBRIDGE-018"))


def test_depth_of_a_hybrid_has_attention_and_experts():
    """Nemotron 3 Super's depth ("*E") on h = 4096: two norms and a projection of 2h, attention (32 and 2 heads of 128), experts.

    The projection 2 h^2; enorm, hnorm and the norm after, 3h; attention h (32 + 4) 128 + 32 * 128 h and a norm; experts as a
    layer of theirs (512 of 2,688 on a latent of 1,024, two projections, a shared one of 5,376, a router, a norm). With the
    120.67 B of the decoder that is 123.6 B, as the 124 B that the Hub counts for the weights with their one depth.
    """
    h = 4096
    attention = h * (32 + 2 * 2) * 128 + 32 * 128 * h + h
    experts = 2 * (1024 * 512 * 2688 + h * 1024 + h * 5376) + 512 * h + h
    name = "nemotron-3-super-120b-a12b"
    depth = n_params(load_model(name, mtp=1)) - n_params(load_model(name))
    assert depth == 2 * h * h + 3 * h + attention + experts
    assert round(n_params(load_model(name, mtp=1)) / 1e9) == 124
