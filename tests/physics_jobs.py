"""Jobs whose seconds and bytes can be worked out on paper: a made-up machine of round rates, a small model, one layout."""

from __future__ import annotations

from typing import Any

from steptime.hardware.machine import Machine
from steptime.job.job import Job

FREE = 1e30
"""A rate at which what is moved or computed takes no time that a test could see."""
SLIGHTLY = 1e-4
"""Relative: kernels' and collectives' own microseconds beside the seconds of slow devices and links."""


def machine(
    *,
    flops: float = FREE,
    memory: float = FREE,
    link: float = FREE,
    node: int = 8,
    outside: float | None = None,
    kernels: dict[str, float] | None = None,
    **figures: Any,
) -> Machine:
    """Nodes of `node` devices with one SM each, on which GEMMs and attention reach `flops` at every shape.

    `memory`, `link` (inside a node) and `outside` (between nodes, as `link` unless said) are rates [B/s]; hops are free.
    `kernels`: fixed times, which profiles of eager torch take from the device. `figures`: other keys of an accelerator.
    """
    device: dict[str, Any] = {
        "name": "toy",
        "peak_flops": {"bf16": flops, "fp32": flops},
        "sustained_flops": {"bf16": flops, "fp32": flops},
        "memory_bytes": 1e15,
        "usable_memory_bytes": 1e15,
        "memory_bytes_per_s": memory,
        "memory_efficiency": 1.0,
        "attention_forward_efficiency": 1.0,
        "attention_backward_efficiency": 1.0,
        "attention_ramp_tokens": 0.0,
        "gemm_overhead_k": 0.0,
        "sm_count": 1,
        "kernels": {"gemm_kernel_s": 0.0, "move_kernel_s": 0.0} | (kernels or {}),
    } | figures
    inside = {"name": "inside", "size": node, "bytes_per_s": link, "latency_s": 0.0, "efficiency": 1.0}
    between = {"name": "outside", "bytes_per_s": outside or link, "latency_s": 0.0, "efficiency": 1.0}
    return Machine(name="toy", accelerator=device, devices_per_node=node, tiers=[inside, between])


MODEL = {"n_layers": 2, "hidden_sz": 128, "inter_sz": 256, "n_q_heads": 1, "vocab_sz": 1024}
"""Elements of a layer: q, k and v 3 * 128 * 128 = 49,152, the output projection 16,384, gate and up 65,536, down 32,768: 163,840
in projections; two norms of 128. Embedding and head have 1024 * 128 = 131,072 each, the final norm 128. In all 590,464."""


def job(
    software: str = "megatron-core",
    *,
    on: Machine | None = None,
    model: dict[str, Any] | None = None,
    performance: dict[str, Any] | None = None,
    microbatches: int = 1,
    seqlen: int = 8,
    batch: int = 1,
    **parallelism: Any,
) -> Job:
    """A job of `microbatches` micro-batches of `batch` sequences; `model` and `performance` go over the defaults."""
    layout = {"tp": 1, "pp": 1, "dp": 1} | parallelism
    return Job(
        model=MODEL | (model or {}),
        parallelism=layout,
        performance={"software": software} | (performance or {}),
        data={"gbs": layout["dp"] * batch * microbatches, "seqlen": seqlen, "microbatch_sz": batch},
        hardware={"node_type": on or machine()},
    )
