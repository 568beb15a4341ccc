"""FLOPs of a step under the three conventions in use."""

from __future__ import annotations

from steptime.base.num import Num
from steptime.base.rows import Flops
from steptime.job.assembly import Assembly
from steptime.job.parts import Part
from steptime.model.ops import Gemm
from steptime.model.scans import Chunked, Scan

FORWARD_AND_BACKWARD = 3.0
"""Backward computes two products for each of forward's."""


def linear_flops_per_token(assembly: Assembly, *, frozen: bool = False) -> float:
    """Forward FLOPs per token of every projection and the logits: 2 per weight that a token uses, vocabulary unpadded.

    Rows that experts drop at even load, below a capacity factor of 1, are not counted. `frozen`: of the frozen weights only.
    """
    model = assembly.job.model
    kept = min((model.moe and model.moe.capacity_factor) or 1.0, 1.0)
    weights: float = sum(
        count * (model.vocab_sz * model.hidden_sz if p.vocab else p.active * (kept if p.n_experts else 1.0))
        for part, count in every_part(assembly)
        for op in part.ops
        if isinstance(op, Gemm)
        for p in op.params
        if p.multiplies and not (frozen and p.trained)
    )
    return 2.0 * weights


def every_part(assembly: Assembly) -> list[tuple[Part, int]]:
    """The layers in depth order, and the head, in which multi-token prediction has its own layers."""
    return [*assembly.runs, (assembly.head, 1)]


def attention_flops_per_token(assembly: Assembly) -> float:
    """Forward FLOPs per token of attention over the whole score matrix: 2 n_q (d_qk + d_v) s per attention layer.

    Of a layer with a window so much of it that half is what the causal mask and the window leave.
    """
    model, seqlen, total = assembly.job.model, assembly.job.data.seqlen, 0.0
    for part, layers in every_part(assembly):
        if any(op.role == "core_attn" for op in part.ops):
            count = model.mtp if part is assembly.head else layers
            share, _ = part.model.attention.shares(float(seqlen))
            total += 2.0 * count * part.model.n_q_heads * sum(part.model.head_widths) * seqlen * (2.0 * share)
    return total


def scan_flops_per_token(assembly: Assembly) -> float:
    """Forward FLOPs per token of state-space layers and linear attention: `Scan.counted`, `Chunked.counted`."""
    total: Num = 0.0
    for part, layers in every_part(assembly):
        for op in part.ops:
            if isinstance(op, Scan | Chunked):
                total = total + layers * part.tp * op.counted
    return float(total)


def step_flops(assembly: Assembly, hardware_per_step: float) -> Flops:
    """One step of the whole job.

    Model FLOPs: forward once and backward twice that, once for a frozen weight, without recomputation; attention halved for the
    causal mask as Megatron counts it (megatron/training/training.py, num_floating_point_operations), or in full (PaLM, Chowdhery
    et al. 2022, appendix B; torchtitan/models/utils.py).
    """
    job = assembly.job
    tokens = float(job.data.gbs) * job.data.seqlen
    linear = linear_flops_per_token(assembly) + scan_flops_per_token(assembly)
    attention = attention_flops_per_token(assembly)
    untrained = tokens * linear_flops_per_token(assembly, frozen=True)
    half = FORWARD_AND_BACKWARD * tokens * (linear + attention / 2.0) - untrained
    full = FORWARD_AND_BACKWARD * tokens * (linear + attention) - untrained
    return Flops(half, full, hardware_per_step)
