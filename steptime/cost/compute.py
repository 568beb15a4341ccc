"""Seconds of one op on one device: a roofline with sustained rates, a shape term for GEMMs, a fixed time per kernel."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, is_column, maximum, new_row, where
from steptime.cost.product_rates import asymptote_of, grouped_rate, wgrad_share
from steptime.cost.rates import Rates
from steptime.model.ops import VECTORIZED, Attention, ByElement, Gemm, Move, Op
from steptime.model.scans import Chunked, Scan
from steptime.software.performance import ITEMSIZE

TILE_M, TILE_N = 128.0, 256.0
"""Output tile of the large cuBLAS/CUTLASS tensor-core kernels (reference for wave quantization: NVIDIA, Matrix
Multiplication Background User's Guide, section "Wave quantization")."""
K_OVERHEAD = 200.0
"""A tile's prologue and epilogue, in units of k: a GEMM of depth k runs at k / (k + 200) of its asymptote. With WAVE_LOSS and
a fixed time of 4 us it meets 74 published cuBLAS efficiencies of Llama layers on A100 and H100, m 256 to 4096, to 6 % (mean
absolute log error; microsoft/vidur@7d47513 data/profiling). Isolated GEMMs alone would have 50 to 100; small layers in training
runs need more (rows marked fit). A tile's fixed time is the same in a faster dtype, which processes more k in that time: see
`depth_overhead`."""
WAVE_LOSS = 0.25
"""Share of a partly filled last wave that is lost; kernels with smaller tiles or split-k recover the rest (same fit)."""
WGRAD_RATE = 0.95
"""wgrad's rate divided by forward's: medians .681 (NT, fp32 accumulation) and .718 (TN) over 183 A100 shapes
(MooreThreads/SimuMax@4dcaae5 configs/system/a100_pcie.json)."""
GROUP_ROWS = 120.0
"""Experts' products of m rows run at m / (m + 120) of a dense one's rate: fp8 on H800, n 4096, k 7168, grouped, has 1346, 1233,
1040 and 932 TFLOP/s at 8192, 1024, 512 and 256 rows (deepseek-ai/DeepGEMM@55ab91f README), of which this gives 1346, 1223, 1107
and 930. Half a tile of 128 rows an expert is padding in the mean, grouped or not."""
RATED_LENGTH = 4096.0
"""Tokens at which a machine file states its attention rates: as do arXiv 2407.08608 and similar papers."""
ROW_BYTES = 16.0
"""Rows of a matrix that a tensor core reads start at multiples of this (NVIDIA, Matrix Multiplication Background User's Guide,
section "Tensor Core Requirements": 8 elements of 16 bits)."""
SCAN_KERNELS = 6.0
"""The convolution and the five kernels of _mamba_chunk_scan_combined_fwd (state-spaces/mamba@e9594ce
mamba_ssm/ops/triton/ssd_combined.py)."""
SCAN_BACKWARD = 2.8
"""Backward time of a scan divided by its forward time (assumed: none is published for Mamba-2; gated delta rule 2.5 to 2.8, gated
linear attention 3.1 to 3.5, retention 1.7 to 2.5 on GB200, fla-org/flash-linear-attention). Backward recomputes convolution,
states and decays."""
CHUNK_S_PER_TOKEN = 40e-6 / 1024.0
"""Least forward time of linear attention per token of a sequence, whose chunks follow one another: Gated DeltaNet with 8 to 16
heads takes .096, .174 and .330 ms for 2,048, 4,096 and 8,192 tokens on B200 (flashinfer-ai/flashinfer#3167); assumed to be the
same on other devices [s]."""


class Pass(NamedTuple):
    """One kernel call: work, bytes and time of one pass of one op."""

    flops: Num
    bytes: Num
    compute_s: Num
    bandwidth_s: Num
    time_s: Num
    kernels: float = 1.0


NOTHING = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def shape_efficiency(m: Num, n: Num, k: Num, count: Num, sm_count: float | None, overhead: float = K_OVERHEAD) -> Num:
    """Share of the asymptotic rate: depth, k / (k + overhead), and waves of output tiles.

    A GEMM of ceil(m/128) ceil(n/256) tiles runs in ceil(tiles/SMs) waves, the last one as long as a full one; without a number of
    SMs no wave is counted. `overhead`: fixed cost of a tile, in units of k (`depth_overhead`).
    """
    deep = k / (k + overhead)
    if sm_count is None:
        return deep
    waves = -(-m // TILE_M) * -(-n // TILE_N) * count / sm_count
    full = waves / -(-waves // 1.0)
    return (1.0 - WAVE_LOSS + WAVE_LOSS * full) * deep


def depth_overhead(op: Gemm, r: Rates) -> float:
    """K_OVERHEAD, or the device's own value, scaled to the dtype of a product.

    In a tile's fixed time quantized operands process more k, by the ratio of the rates. fp8 on H100 then runs squares of 4096 and
    8192 at 1,203 and 1,300 TFLOP/s; measured are 1,217 and 1,290, where 32768 reaches 1,382 (Azure/AI-benchmarking-guide@8fd0c6e
    Azure_Results/ND_H100_v5_results.md).
    """
    return (K_OVERHEAD if r.gemm_overhead_k is None else r.gemm_overhead_k) * (asymptote_of(op, r) / r.gemm_flops)


def gemm_pass(op: Gemm, r: Rates, m: Num, n: Num, k: Num, bytes_: Num, rate: float = 1.0) -> Pass:
    """One matrix product m x k by k x n, `count` times: the slower of arithmetic and memory, plus its kernels' fixed time."""
    fixed, asymptote, kernels = r.gemm_kernel_s, asymptote_of(op, r), op.kernels
    if op.routed:
        rate = rate * grouped_rate(op, r) * op.m / (op.m + GROUP_ROWS)
    if op.recipe:
        fixed = fixed + op.recipe.scale_kernels * r.move_kernel_s
    elif not op.params:
        asymptote = asymptote * where(aligned(op), 1.0, r.plain_share)
    shape = shape_efficiency(m, n, k, op.count / kernels, r.sm_count, depth_overhead(op, r))
    flops = op.flops
    compute, bandwidth = flops / (asymptote * rate * shape), bytes_ / r.bytes_per_s
    seconds = maximum(compute, bandwidth) + fixed * kernels
    return new_row(Pass, (flops / op.load, bytes_, compute, bandwidth, seconds, kernels))


def aligned(op: Gemm) -> Num:
    """Whether the rows of a batched product of activations start where tensor cores can read them; rows of weights always do.

    The heads of unfused attention are slices of one tensor, head_dim elements apart. Of BigScience's runs that differ only in
    heads (rows marked fit), those of head size 108 and 150 spend 31 to 37 s of a step more on 370 to 390 TFLOP per device: 11
    TFLOP/s, which is fp32's peak without tensor cores (19.5) times `shape_efficiency`; 104, 144, 208, 216 and 224 spend none.
    """
    return (op.itemsize >= 4.0) | ((op.k * op.itemsize % ROW_BYTES == 0) & (op.n * op.itemsize % ROW_BYTES == 0))


OperandBytes: TypeAlias = tuple[Num, Num, Num]
"""Bytes that one matrix product reads of either operand and writes."""


def gemm_traffic(op: Gemm, r: Rates) -> tuple[OperandBytes, OperandBytes, OperandBytes]:
    """Bytes of forward (input, weight, output), dgrad (gradient, weight, input's gradient) and wgrad (input, gradient, weight's).

    A recipe's operands are quantized, its results are not.
    """
    activation, weight = (op.recipe.itemsize, op.recipe.weight_itemsize) if op.recipe else (op.itemsize, op.itemsize)
    left, right, out = op.m * op.k * op.count, op.k * op.n * op.count, op.m * op.n * op.count
    grad = r.grad_itemsize * (2.0 if r.fused_accumulation else 1.0) if op.params else op.itemsize
    return (
        (left * activation, right * weight, out * op.itemsize),
        (out * activation, right * weight, left * op.itemsize),
        (left * activation, out * activation, right * grad),
    )


def forward(op: Op, r: Rates, sizes: dict[str, Num]) -> Pass:
    """The forward pass of an op; `sizes` holds the bytes of every tensor of its part."""
    if isinstance(op, Move):
        moved = op.forward_bytes
        if moved is None:
            read = total([sizes[name] for name in op.inputs]) + param_bytes(op)
            moved = read + total([t.bytes for t in op.outputs]) + total([t.bytes for t in op.stats])
        done = move_pass(moved, op.kernels, r, op.forward_by_element)
        return done._replace(kernels=1.0) if op.looped else done
    if isinstance(op, Gemm):
        rate = op.recipe.forward_rate if op.recipe else 1.0
        return gemm_pass(op, r, op.m, op.n, op.k, total(gemm_traffic(op, r)[0]), rate)
    if isinstance(op, Attention):
        flops = op.full_flops * op.causal_share
        rate = r.attention_forward_flops * head_share(op, r.attention_head_64[0])
        return attention_pass(op, r, flops, rate, 1.0, op.merge_forward_bytes)._replace(kernels=op.launches[0])
    if isinstance(op, Scan):
        return scan_pass(op, r, 1.0, 1.0)
    if isinstance(op, Chunked):
        return chunked_pass(op, r, 1.0, 1.0, sizes)
    return NOTHING


def backward(op: Op, r: Rates, sizes: dict[str, Num]) -> tuple[Pass, Pass]:
    """The backward pass of an op: (gradient of the input, gradient of the weight).

    Flash attention recomputes the scores (Dao 2023, section 3.1), so five products against two: three as wide as a key, two as a
    value.
    """
    if isinstance(op, Move):
        if op.same_grad:
            return NOTHING, NOTHING
        moved = op.backward_bytes
        if moved is None:
            read = total([t.grad_bytes for t in op.outputs]) + total([sizes[name] for name in op.saves])
            moved = read + total([sizes[name] for name in op.inputs]) + param_bytes(op)
        return move_pass(moved, op.kernels, r, op.backward_by_element), NOTHING
    if isinstance(op, Gemm):
        return gemm_backward(op, r)
    if isinstance(op, Attention):
        widths = (3.0 * op.d_qk + 2.0 * op.d_v) / (op.d_qk + op.d_v)
        flops = op.full_flops * op.causal_share * widths
        rate = r.attention_backward_flops * head_share(op, r.attention_head_64[1])
        done = attention_pass(op, r, flops, rate, 2.0, op.merge_backward_bytes)
        return done._replace(kernels=op.launches[1]), NOTHING
    if isinstance(op, Scan):
        return scan_pass(op, r, SCAN_BACKWARD, 2.0), NOTHING
    if isinstance(op, Chunked):
        return chunked_pass(op, r, op.backward_times, 2.0, sizes), NOTHING
    return NOTHING, NOTHING


def scan_pass(op: Scan, r: Rates, times: float, passes: float) -> Pass:
    """A state-space scan: its matrix multiplies and the kernels that move memory, `times` those of forward.

    Its FLOPs are those that frameworks count, once forward and twice backward, independent of the algorithm of its kernels.
    """
    flops, bytes_, conv = passes * op.tokens * op.counted, times * op.forward_bytes, times * op.conv_bytes
    compute = times * op.flops / r.scan_flops
    bandwidth = (bytes_ - conv) / (r.bytes_per_s * r.move_rate) + conv / r.conv_bytes_per_s
    kernels = SCAN_KERNELS * times
    return Pass(flops, bytes_, compute, bandwidth, compute + bandwidth + kernels * r.move_kernel_s, kernels)


def chunked_pass(op: Chunked, r: Rates, times: float, passes: float, sizes: dict[str, Num]) -> Pass:
    """Linear attention in chunks: limited by the SMs' arithmetic, or by the chunks' serial order; not by peak or bandwidth.

    FLOPs as of `scan_pass`.
    """
    flops = passes * op.tokens * op.counted
    moved = times * (total(sizes[name] for name in op.inputs) + total(t.bytes for t in op.allocates))
    in_turn_s = op.seq * CHUNK_S_PER_TOKEN * r.slowness
    compute = op.slowness * times * maximum(op.flops / r.chunk_flops, in_turn_s)
    launched = SCAN_KERNELS * times * r.move_kernel_s
    return Pass(flops, moved, compute, moved / r.bytes_per_s, compute + launched, SCAN_KERNELS * times)


def gemm_backward(op: Gemm, r: Rates) -> tuple[Pass, Pass]:
    """dgrad: m x n by n x k. wgrad, unless frozen: k x m by m x n, into the gradient's own dtype, read first to accumulate."""
    _, dgrad, wgrad = gemm_traffic(op, r)
    rate = op.recipe.backward_rate if op.recipe else 1.0
    second = gemm_pass(op, r, op.m, op.k, op.n, total(dgrad), rate)
    if op.params and not op.trained:
        return second, NOTHING
    if op.recipe and op.recipe.casts and op.recipe.casts.plain_wgrad:
        plain = replace(op, recipe=None)
        return second, gemm_pass(plain, r, op.k, op.n, op.m, total(gemm_traffic(plain, r)[2]), WGRAD_RATE)
    return second, gemm_pass(op, r, op.k, op.n, op.m, total(wgrad), rate * wgrad_share(op, WGRAD_RATE))


def operand_casts(op: Op, r: Rates) -> Pass:
    """The kernels that quantize a projection's operands in forward, where they belong to it alone."""
    cast = op.forward_cast if isinstance(op, Gemm) else None
    return move_pass(cast.bytes, cast.kernels, r, cast.slow) if cast and cast.kernels else NOTHING


def parameter_gradients(op: Op, r: Rates) -> Num:
    """Seconds of the kernels that accompany the backward GEMMs of a projection.

    With a low-precision recipe: casts and transposes of their operands. With a bias: the output's gradient summed over tokens,
    one read of it. For a weight: its gradient added to the main gradient, unless wgrad accumulates directly.
    """
    if not isinstance(op, Gemm) or not op.trained:
        return 0.0
    seconds: Num = 0.0
    if any(len(p.shape) == 1 for p in op.params):
        seconds = seconds + move_pass(op.m * op.n * op.count * op.itemsize, op.kernels, r).time_s
    if op.recipe:
        casts = move_pass(op.cast_bytes, op.cast_kernels, r, op.cast_slow)
        seconds = seconds + (casts.time_s + op.in_turn_s * r.slowness)
    if is_column(r.accumulate_bytes) or r.accumulate_bytes:
        added_s = move_pass(op.k * op.n * op.count * r.accumulate_bytes, op.kernels, r).time_s
        seconds = seconds + where(r.accumulate_bytes > 0.0, added_s, 0.0)
    return seconds


def head_share(op: Attention, of_64: float) -> Num:
    """Rate of a flash kernel at its head size divided by that at 128."""
    return where(op.d_qk <= 64, of_64, 1.0)


def attention_pass(op: Attention, r: Rates, flops: Num, rate: float, passes: float, merge_bytes: Num = 0.0) -> Pass:
    """A flash kernel of `rate` at `RATED_LENGTH`: arithmetic against q, k, v and output read and written `passes` times.

    Kernels compute blocks crossed by the mask in full: one edge, of some 225 keys per query, in a causal triangle of s / 2 keys
    per query, two in a window. Both run at n / (n + 450) for n keys seen. Measured on GB200, window 128, head size 64, cuDNN
    9.22: 161 to 167 TFLOP/s forward and 182 to 188 backward at 4,096 to 16,384 tokens (NVIDIA/cudnn-frontend@3929da2
    benchmark/sdpa_benchmark_training/results/gpt_oss), of which this gives 164 and 160; on H200, window 1,024, 336 and 289
    (results/h200_919_only_cudnn), this gives 321 and 287.

    In several calls it runs at the rate of one over the whole length: only blocks on the diagonal are computed in vain, and those
    are the same. Every call has its fixed time; merging moves `merge_bytes`. A dropout mask takes its own time (`drawn_per_s`).
    """
    elements = op.q_len * op.n_q_heads + op.kv_len * op.n_kv_heads
    bytes_ = op.batch * elements * (op.d_qk + op.d_v) * op.itemsize * passes
    seen = where(op.reach > 0.0, op.reach, op.kv_len)
    ramp = seen / (seen + r.attention_ramp_tokens) * ((RATED_LENGTH + r.attention_ramp_tokens) / RATED_LENGTH)
    compute, bandwidth = flops / (rate * ramp), bytes_ / r.bytes_per_s
    around_s = merge_bytes / r.bytes_per_s + op.merge_kernels * r.move_kernel_s + op.calls * r.gemm_kernel_s
    if op.drops:
        around_s = around_s + op.full_flops / (2.0 * (op.d_qk + op.d_v)) * op.causal_share / r.drawn_per_s
    return Pass(flops, bytes_, compute, bandwidth, maximum(compute, bandwidth) + around_s)


def move_pass(bytes_: Num, kernels: float, r: Rates, slow: ByElement = VECTORIZED) -> Pass:
    """A memory-bound kernel: its bytes at the sustained memory rate, plus a fixed time for each of its `kernels`.

    Element-wise kernels without vector loads take at least the time of their elements on the SMs.
    """
    rate = r.bytes_per_s * r.move_rate
    bandwidth = bytes_ / rate
    if slow is not VECTORIZED:
        bandwidth = (bytes_ - slow.bytes) / rate + maximum(slow.bytes / rate, slow.elements / r.elements_per_s)
    return new_row(Pass, (0.0, bytes_, 0.0, bandwidth, bandwidth + kernels * r.move_kernel_s, kernels))


def param_bytes(op: Op) -> float:
    """Bytes of the parameters that a memory-bound op reads (norm weights: small, unsharded)."""
    return float(sum([p.elements for p in op.params]) * ITEMSIZE["bf16"]) if op.params else 0.0


def total(values: Iterable[Num]) -> Num:
    """Sum left to right, from 0.0, so that a column equals its rows."""
    result: Num = 0.0
    for value in values:
        result = result + value
    return result
