"""Seconds of one op on one device: a roofline with sustained rates, a shape term for GEMMs, a fixed time per kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from steptime.machine import Accelerator
from steptime.num import Num, ceil, maximum, where
from steptime.ops import Attention, Gemm, Move, Op
from steptime.performance import ITEMSIZE, Software

TILE_M, TILE_N = 128.0, 256.0
"""Output tile of the large cuBLAS/CUTLASS tensor-core kernels (reference for wave quantisation: NVIDIA, Matrix
Multiplication Background User's Guide, section "Wave quantization")."""
K_OVERHEAD = 200.0
"""A tile's prologue and epilogue, in units of k: a GEMM of depth k runs at k / (k + 200) of its asymptote. With WAVE_LOSS and
a fixed time of 4 us it meets 74 published cuBLAS efficiencies of Llama layers on A100 and H100, m 256 to 4096, to 6 % (mean
absolute log error; microsoft/vidur@7d47513 data/profiling). Isolated GEMMs alone would have 50 to 100; small layers in training
runs want more (rows marked fit)."""
WAVE_LOSS = 0.25
"""The part of a half-empty last wave that is lost; kernels with smaller tiles or split-k win back the rest (same fit)."""
WGRAD_RATE = 0.95
"""wgrad's rate over forward's: medians .681 (NT, fp32 accumulation) and .718 (TN) over 183 A100 shapes
(MooreThreads/SimuMax@4dcaae5 configs/system/a100_pcie.json)."""
FALLBACK_SUSTAINED = 0.75
"""Share of the dense peak assumed where a machine states no sustained rate (assumed; A100 0.73-0.82, H100 about 0.7)."""
CAUSAL_RAMP = 450.0
"""Flash attention at s tokens runs at s / (s + 450) of its asymptote: blocks on the diagonal are computed whole. Fits the causal
figures of FlashAttention-2 on A100 (512 to 16k tokens, head size 128, s0 = 320 to 465) and FlashAttention-3 on H100 (360 to 590)
(Dao-AILab/flash-attention README; arXiv 2407.08608 figure 5)."""
RATED_LENGTH = 4096.0
"""Tokens at which a machine file states its attention rates: the figures of arXiv 2407.08608 and its like are read there."""
HEAD_64 = 0.87
"""Rate at head size 64 over that at 128: 156/173 on A100, 257/294 on H100 (FlashAttention-2, causal, 4k; same README)."""
OLDER_KERNELS = {"fa1": 1.0 / 2.35, "triton": 1.0 / 1.7}
"""Rates over FlashAttention-2's: it is 1.7 to 3.0 times as fast as FlashAttention-1 and 1.3 to 2.5 times as fast as the Triton
version (Dao 2023, arXiv 2307.08691 section 4.1). Within these, chosen on rows marked fit of llm-foundry and Aleph Alpha."""
ROW_BYTES = 16.0
"""Rows of a matrix that a tensor core reads start at multiples of this (NVIDIA, Matrix Multiplication Background User's Guide,
section "Tensor Core Requirements": 8 elements of 16 bits)."""
FLASH_BACKWARD_MATMULS, FLASH_FORWARD_MATMULS = 5.0, 2.0
"""Dao 2023, section 3.1: backward recomputes the scores, so five matrix products against two."""


class Pass(NamedTuple):
    """One kernel call: work, bytes and time of one pass of one op."""

    flops: Num
    bytes: Num
    compute_s: Num
    bandwidth_s: Num
    time_s: Num
    kernels: float = 1.0


NOTHING = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device sustains, for one job's precision."""

    gemm_flops: float
    plain_flops: float
    """Without tensor cores."""
    attention_forward_flops: float
    attention_backward_flops: float
    bytes_per_s: float
    move_bytes_per_s: float
    """Of memory-bound kernels."""
    gemm_kernel_s: float
    move_kernel_s: float
    sm_count: float
    grad_itemsize: float
    """Bytes per element of the gradient that wgrad writes."""
    fused_accumulation: bool
    """wgrad reads and writes the main gradient (gradient-accumulation fusion)."""
    accumulate_bytes: float = 0.0
    """Bytes per weight that a kernel of its own moves to add wgrad's result to the main gradient."""


def peak_dtype(accelerator: Accelerator, precision: str) -> str:
    """The tensor-core mode that a precision runs in: fp32 GEMMs use tf32 only where asked, so fp32 stays fp32."""
    if precision in accelerator.peak_flops:
        return precision
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(precision, "fp32")
    return twin if twin in accelerator.peak_flops else next(iter(accelerator.peak_flops))


def rates(accelerator: Accelerator, software: Software, microbatches: int = 1) -> Rates:
    """Sustained rates of a device under a software profile.

    Without fusion the gradient of a weight is added to the main one by a kernel of its own, except where the first micro-batch's
    becomes the gradient (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    dtype = peak_dtype(accelerator, software.precision)
    slow = software.compute_factor
    memory = accelerator.memory_bytes_per_s * accelerator.memory_efficiency / slow
    peak = accelerator.peak_flops[dtype] / slow
    main = software.bytes_of(software.main_grad_dtype)
    attention = attention_efficiency(accelerator, software)
    # the first micro-batch's gradient becomes the gradient where none persists
    times = (microbatches - 1.0) / microbatches if not software.gradients_persist else 1.0
    return Rates(
        gemm_flops=sustained_flops(accelerator, dtype) / slow,
        plain_flops=accelerator.peak_flops.get("fp32", peak) / slow,
        attention_forward_flops=peak * attention[0],
        attention_backward_flops=peak * attention[1],
        bytes_per_s=memory,
        move_bytes_per_s=memory * software.move_rate,
        gemm_kernel_s=software.gemm_kernel_s * slow,
        move_kernel_s=software.move_kernel_s * slow,
        sm_count=float(accelerator.sm_count or 1),
        grad_itemsize=main if software.grad_accumulation_fusion else software.itemsize,
        fused_accumulation=software.grad_accumulation_fusion,
        accumulate_bytes=0.0 if software.grad_accumulation_fusion else times * (software.itemsize + 2.0 * main),
    )


def attention_efficiency(accelerator: Accelerator, software: Software) -> tuple[float, float]:
    """Shares of the dense peak in forward and backward, of the kernel that the profile runs."""
    forward, backward = accelerator.attention_forward_efficiency, accelerator.attention_backward_efficiency
    if software.attention_kernel == "best":
        return forward, backward
    older = OLDER_KERNELS.get(software.attention_kernel, 1.0)
    return (accelerator.fa2_forward_efficiency or forward) * older, (
        accelerator.fa2_backward_efficiency or backward
    ) * older


def sustained_flops(accelerator: Accelerator, dtype: str) -> float:
    """What a long GEMM reaches [FLOP/s]; bf16 and fp16 stand in for each other."""
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
    known = accelerator.sustained_flops
    return known.get(dtype) or known.get(twin) or accelerator.peak_flops[dtype] * FALLBACK_SUSTAINED


def shape_efficiency(m: Num, n: Num, k: Num, count: Num, sm_count: float) -> Num:
    """Share of the asymptotic rate: depth, and waves of output tiles.

    A GEMM of ceil(m/128) ceil(n/256) tiles runs in ceil(tiles/SMs) waves, the last one as long as a full one.
    """
    waves = ceil(m / TILE_M) * ceil(n / TILE_N) * count / sm_count
    full = waves / ceil(waves)
    return (1.0 - WAVE_LOSS + WAVE_LOSS * full) * (k / (k + K_OVERHEAD))


def gemm_pass(op: Gemm, r: Rates, m: Num, n: Num, k: Num, bytes_: Num, rate: float = 1.0) -> Pass:
    """One matrix product m x k by k x n, `count` times: the slower of arithmetic and memory, plus a kernel's fixed time."""
    peak = where(aligned(op), r.gemm_flops, r.plain_flops)
    compute = op.flops / (peak * rate * shape_efficiency(m, n, k, op.count, r.sm_count))
    bandwidth = bytes_ / r.bytes_per_s
    return Pass(op.flops, bytes_, compute, bandwidth, maximum(compute, bandwidth) + r.gemm_kernel_s)


def aligned(op: Gemm) -> Num:
    """Whether a batched product's rows start where tensor cores can read them; weights are taken to be.

    The heads of unfused attention are slices of one tensor, head_dim elements apart. Of BigScience's runs that differ in heads
    alone (rows marked fit), those of head size 108 and 150 spend 31 to 37 s of a step more on 370 to 390 TFLOP per device: 11
    TFLOP/s, which is fp32's peak without tensor cores (19.5) times `shape_efficiency`; 104, 144, 208, 216 and 224 spend none.
    """
    if op.params or op.itemsize >= 4.0:
        return True
    return ((op.k * op.itemsize) % ROW_BYTES == 0) & ((op.n * op.itemsize) % ROW_BYTES == 0)


def gemm_bytes(op: Gemm) -> tuple[Num, Num, Num]:
    """Bytes of the left operand (input), right operand (weight) and result (output) of the forward product."""
    size = op.itemsize * op.count
    return op.m * op.k * size, op.k * op.n * size, op.m * op.n * size


def forward(op: Op, r: Rates, sizes: dict[str, Num]) -> Pass:
    """The forward pass of an op; `sizes` holds the bytes of every tensor of the part it stands in."""
    if isinstance(op, Gemm):
        left, right, out = gemm_bytes(op)
        return gemm_pass(op, r, op.m, op.n, op.k, left + right + out)
    if isinstance(op, Attention):
        flops = op.full_flops * op.causal_share
        return attention_pass(op, r, flops, r.attention_forward_flops, 1.0)
    if isinstance(op, Move):
        moved = op.forward_bytes
        if moved is None:
            read = total(sizes[name] for name in op.inputs) + param_bytes(op)
            moved = read + total(t.bytes for t in op.outputs) + total(t.bytes for t in op.stats)
        return move_pass(moved / op.efficiency, op.kernels, r)._replace(bytes=moved)
    return NOTHING


def backward(op: Op, r: Rates, sizes: dict[str, Num]) -> tuple[Pass, Pass]:
    """The backward pass of an op: (gradient of the input, gradient of the weight)."""
    if isinstance(op, Gemm):
        return gemm_backward(op, r)
    if isinstance(op, Attention):
        flops = op.full_flops * op.causal_share * FLASH_BACKWARD_MATMULS / FLASH_FORWARD_MATMULS
        return attention_pass(op, r, flops, r.attention_backward_flops, 2.0), NOTHING
    if isinstance(op, Move) and not op.same_grad:
        moved = op.backward_bytes
        if moved is None:
            read = total(t.bytes for t in op.outputs) + total(sizes[name] for name in op.saves)
            moved = read + total(sizes[name] for name in op.inputs) + param_bytes(op)
        return move_pass(moved / op.efficiency, op.kernels, r)._replace(bytes=moved), NOTHING
    return NOTHING, NOTHING


def gemm_backward(op: Gemm, r: Rates) -> tuple[Pass, Pass]:
    """dgrad: m x n by n x k. wgrad: k x m by m x n, into the gradient's own dtype, read first when it accumulates."""
    left, right, out = gemm_bytes(op)
    dgrad = gemm_pass(op, r, op.m, op.k, op.n, out + right + left)
    if not op.params:
        return dgrad, gemm_pass(op, r, op.k, op.n, op.m, left + right + out)
    grad = op.k * op.n * op.count * r.grad_itemsize * (2.0 if r.fused_accumulation else 1.0)
    return dgrad, gemm_pass(op, r, op.k, op.n, op.m, left + out + grad, WGRAD_RATE)


def parameter_gradients(op: Op, r: Rates) -> Num:
    """Seconds of the kernels that finish a projection's gradients.

    A bias: the output's gradient summed over tokens, one read of it. A weight: its gradient added to the main one, where wgrad
    does not do so itself.
    """
    if not isinstance(op, Gemm) or not op.params:
        return 0.0
    seconds: Num = 0.0
    if any(len(p.shape) == 1 for p in op.params):
        seconds = seconds + move_pass(gemm_bytes(op)[2], 1.0, r).time_s
    if r.accumulate_bytes:
        seconds = seconds + move_pass(op.k * op.n * op.count * r.accumulate_bytes, 1.0, r).time_s
    return seconds


def attention_pass(op: Attention, r: Rates, flops: Num, rate: float, passes: float) -> Pass:
    """A flash kernel: arithmetic against q, k, v and output read and written `passes` times."""
    per_token = op.n_q_heads * (op.d_qk + op.d_v) + op.n_kv_heads * (op.d_qk + op.d_v)
    bytes_ = op.batch * op.q_len * per_token * op.itemsize * passes
    ramp = op.kv_len / (op.kv_len + CAUSAL_RAMP) * ((RATED_LENGTH + CAUSAL_RAMP) / RATED_LENGTH)
    reached = rate * ramp * where(op.d_qk <= 64, HEAD_64, 1.0)
    compute, bandwidth = flops / reached, bytes_ / r.bytes_per_s
    return Pass(flops, bytes_, compute, bandwidth, maximum(compute, bandwidth) + r.gemm_kernel_s)


def move_pass(bytes_: Num, kernels: float, r: Rates) -> Pass:
    """A memory-bound kernel."""
    bandwidth = bytes_ / r.move_bytes_per_s
    return Pass(0.0, bytes_, 0.0, bandwidth, bandwidth + kernels * r.move_kernel_s, kernels)


def param_bytes(op: Op) -> float:
    """Bytes of the parameters that a memory-bound op reads (norm weights: small, unsharded)."""
    return float(sum(p.elements for p in op.params) * ITEMSIZE["bf16"])


def total(values: object) -> Num:
    """Sum left to right, from 0.0, so that a column equals its rows."""
    result: Num = 0.0
    for value in values:  # type: ignore[attr-defined]
        result = result + value
    return result
