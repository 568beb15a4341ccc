"""Known defects of llm-analysis and Calculon, each with the right number here.

llm-analysis is cli99/llm-analysis@d841e40 (llm_analysis/analysis.py), Calculon is calculon-ai/calculon@caa4b11
(calculon/llm/llm.py).
"""

from __future__ import annotations

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.hardware.machine import Machine

T = 8192


job = jobs.usually("llama3-70b", gbs=256, seqlen=T, tp=8, pp=4, dp=4)


def rows(answer, axis):
    return [row for row in answer.collectives if row.axis == axis]


# --- llm-analysis ---


def test_llm_analysis_1_only_zero_3_gathers_for_forward():
    """analysis.py:1330 charges the gather at every level; 1240-1262 do not divide it by tp."""
    for level in (0, 1):
        answer = estimate(job("llama3-8b", tp=2, pp=1, zero_level=level, gbs=64))
        per_step = sum(row.count_per_step * row.bytes for row in rows(answer, "dp") if row.kind == "all_gather")
        local = answer.assembly.local_params(answer.assembly.chunks[0])
        assert per_step == pytest.approx(2 * local * level, rel=1e-3)  # once a step, not once a micro-batch


def test_llm_analysis_2_a_layer_is_recomputed_once():
    """analysis.py:2297 multiplies by the layers twice."""
    answer = estimate(job("llama3-8b", tp=1, pp=1, performance={"activation_checkpointing_type": "selective"}))
    replay = answer.timing.parts.layer.replay
    assert answer.time.parts_s["recompute"] == pytest.approx(32 * 64 * replay.seconds)
    core = answer.timing.parts.layer.forward.attention_s
    assert replay.seconds == pytest.approx(core + replay.launch_s)


def test_llm_analysis_3_recomputation_and_flash_are_two_things():
    """analysis.py:1077 passes one for the other: here each takes its own from what attention saves."""
    saved = {
        (impl, word): estimate(
            job("llama3-8b", tp=1, pp=1, performance={"attention_impl": impl, "activation_checkpointing_type": word})
        )
        .memory.stages[0]
        .activations_bytes
        for impl in ("flash", "unfused")
        for word in ("none", "selective")
    }
    assert saved["unfused", "none"] > 3 * saved["flash", "none"]
    assert saved["flash", "none"] > saved["flash", "selective"]
    assert saved["unfused", "selective"] == pytest.approx(saved["flash", "selective"], rel=0.1)


def test_llm_analysis_4_tokens_count_every_micro_batch():
    """analysis.py:2480 divides one micro-batch by the whole step."""
    answer = estimate(job("llama3-8b", pp=1))
    assert answer.job.microbatches == 64
    assert answer.throughput.tokens_per_s == pytest.approx(256 * T / answer.step_s)
    assert answer.throughput.tokens_per_s_per_device == pytest.approx(256 * T / answer.step_s / 32)


def test_llm_analysis_5_a_nic_of_200_gbit_is_25_gbytes_per_second():
    """Its gpu_configs give 200 GB/s to each GPU: that is a node of eight NICs."""
    tier = Machine.load("selene").tiers[1]
    assert (tier.bytes_per_s, tier.nics_per_node) == (25e9, 8)


def test_llm_analysis_6_gradients_count_and_too_large_is_an_answer():
    """analysis.py:2081 leaves gradients out; 1934 ends in StopIteration."""
    stage = estimate(job("megatron-530b", tp=1, pp=1, dp=1, gbs=1, seqlen=2048)).memory.stages[0]
    assert stage.gradients_bytes == 2 * stage.params_bytes
    assert stage.allocated_bytes > 18 * 529e9


def test_llm_analysis_7_the_batch_is_sequences():
    """Its LLaMA script passes 4,000,000 tokens as sequences."""
    answer = estimate(job("llama3-8b", pp=1, gbs=256, seqlen=4096))
    assert answer.throughput.tokens_per_s * answer.step_s == pytest.approx(256 * 4096)


# --- Calculon ---


def test_calculon_a_full_recomputation_is_one_more_forward():
    """llm.py:1220-1223 adds up cumulative counters: 7.57 forwards of FLOPs in place of one."""
    none, full = (
        estimate(job(performance={"activation_checkpointing_type": word})).flops.hardware_per_step
        for word in ("none", "full")
    )
    forward = 80 * estimate(job()).timing.parts.layer.forward.flops * 8 * 256  # all layers, tp ranks and micro-batches
    assert full - none == pytest.approx(forward)


def test_calculon_embedding_head_and_loss_take_time_and_memory():
    """llm.py has neither: on Llama-3-8B's single stage they are a visible share."""
    answer = estimate(job("llama3-8b", tp=1, pp=1, dp=8))
    ends = answer.timing.parts.head.forward.seconds + answer.timing.parts.embedding.forward.seconds
    assert ends > 0.05 * 32 * answer.timing.parts.layer.forward.seconds
