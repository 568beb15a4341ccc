"""Jobs for tests: the usual plan, and what a test says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steptime.job.job import Job

DEVICES_PLAN = {
    "model": "llama3-70b",
    "devices": 512,
    "parallelism": {"tp": 8, "pp": 4},
    "data": {"gbs": 1024, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": "h100",
}
"""A plan that says how many devices there are, not dp."""
OF_EVERY_KIND = [
    "deepseek_v2_lite",
    "gpt2_1gpu",
    "gpt_oss_120b",
    "llama3_70b_cross_dc",
    "llama3_70b_run",
    "llama3_8b_fsdp",
    "megatron_1t",
    "nemotron_h_56b",
    "own_model",
    "qwen3_235b_gb200",
]
"""Shipped plans: dense and sparse, latent and windowed attention, Mamba, FSDP, data centers, a run, a pipeline, one device."""


def job(
    model: Any = "llama3-8b",
    *,
    gbs: int = 8,
    seqlen: int = 4096,
    microbatch_sz: int = 1,
    hardware: Any = "dgx-h100",
    software: str | None = None,
    performance: dict[str, Any] | None = None,
    **parallelism: Any,
) -> Job:
    """A job on one device unless `parallelism` (tp, pp, dp ...) says more; `Job.replace` takes dotted changes."""
    return Job(
        model=model,
        parallelism={"tp": 1, "pp": 1, "dp": 1} | parallelism,
        performance=({"software": software} if software else {}) | (performance or {}),
        data={"gbs": gbs, "seqlen": seqlen, "microbatch_sz": microbatch_sz},
        hardware=hardware,
    )


def usually(model: Any = "llama3-8b", performance: dict[str, Any] | None = None, **usual: Any) -> Callable[..., Job]:
    """`job` with other defaults: a model, settings of its performance, and what else it takes."""

    def build(model: Any = model, performance: dict[str, Any] | None = None, **said: Any) -> Job:
        return job(model, performance=settings | (performance or {}), **(usual | said))

    settings = performance or {}
    return build


SEVEN_B = {"n_layers": 32, "hidden_sz": 4096, "inter_sz": 11008, "n_q_heads": 32, "vocab_sz": 32000}
"""The sizes of Llama 7B."""


def node_job(
    performance: dict[str, Any], hardware: Any = "dgx-h100", model: dict[str, Any] | None = None, **parallelism: Any
) -> Job:
    """Llama 7B, with what `model` says of it, on the eight devices of a node."""
    layout: dict[str, Any] = {"dp": 8} | parallelism
    return job(SEVEN_B | (model or {}), gbs=64, seqlen=2048, hardware=hardware, performance=performance, **layout)


EIGHT_HEADS = {"n_layers": 4, "hidden_sz": 1024, "inter_sz": 2816, "n_q_heads": 8, "n_kv_heads": 4, "vocab_sz": 32000}
"""A small model with 8 heads of 128 elements, 4 of keys and values."""


def context_job(
    cp: int = 4,
    how: str = "p2p",
    software: str = "megatron-core",
    *,
    model: dict[str, Any] = EIGHT_HEADS,
    dp: int = 2,
    **more: Any,
) -> Job:
    """That model with its sequences of 4,096 tokens split over `cp` ranks, which exchange as `how` says."""
    return job(model, software=software, dp=dp, cp=cp, cp_comm_type=how, **more)
