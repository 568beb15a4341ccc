"""Rates that a device sustains under a software profile; the cost of every op uses them."""

from math import inf
from typing import NamedTuple

from steptime.base.recent import Recent
from steptime.cost.expert_rates import experts_flops
from steptime.hardware.machine import Accelerator
from steptime.software.efficiency import compute_factor, efficiency, sustained_share
from steptime.software.performance import EAGER_TORCH, Software
from steptime.software.precision import RECIPES, rate_of

FALLBACK_SUSTAINED = 0.75
"""Share of the dense peak assumed where a machine states no sustained rate (assumed; A100 0.73-0.82, H100 about 0.7)."""
BEST_SUSTAINED = 0.8
"""Share of the best shape's rate that is sustained, where a machine states only the best (assumed: long GEMMs sustain about 0.85
of it on Ampere and Hopper, 0.6 to 0.8 on Blackwell)."""
OLDER_KERNELS = {"fa1": 1.0 / 2.35, "triton": 1.0 / 1.7, "flex": 0.9, "efficient": 0.2}
"""Rates over FlashAttention-2's: it is 1.7 to 3.0 times as fast as FlashAttention-1 and 1.3 to 2.5 times as fast as the Triton
version (Dao 2023, arXiv 2307.08691 section 4). Within these, chosen on rows marked fit of llm-foundry and Aleph Alpha.
FlexAttention reaches 0.85 to 0.9 of it on A100 (pytorch.org/blog/flexattention).

The memory-efficient kernel at keys of 192 and values of 128: with it a step of DeepSeek-V3 16B (27 layers, 16 heads, 8 sequences
of 4,096 on each of 8 H100) takes 1.09 s more than with FlexAttention, 40.4 ms a layer (pytorch/torchtitan commit f738a03b, pull
request 1610), whose kernels, with a document mask, take 92 / 54 + 173 / 27 ms for 16 sequences (commit 6b9602339,
dsv3_scaling_experiment_results.md). So 44.4 ms forward and backward, where FlashAttention-2 would take 9.1. Its 128 blocks, one a
head and sequence, hardly fill an H100 (aten/src/ATen/native/transformers/cuda/attention_backward.cu, num_splits_key). Where a
mask is a tensor, it computes the scores above the diagonal too; the same rate of the causal half is assumed there."""
FLEX_ON_BLACKWELL = 1.5
"""Rate of FlexAttention divided by FlashAttention-2's, where the latter leaves Blackwell's own instructions unused: 14B steps at
512 and at 2,048 tokens on 8 x B200 differ by what 437 TFLOP/s take, forward and backward (torchtitan-ar, rows marked fit)."""

HEAD_64 = 0.87
"""Rate of FlashAttention-2 at head size 64 divided by that at 128: 156/173 on A100, 257/294 on H100 (causal, 4k;
Dao-AILab/flash-attention README)."""
HOPPER_HEAD_64 = (0.725, 0.836)
"""The same of FlashAttention-3, forward and backward: 420/579 causal, 453/542 not causal, 4k on H100 (arXiv 2407.08608 figures 5
and 6). The exponentials of a score cost the same at half the products."""
BLACKWELL_HEAD_64 = (0.667, 0.836)
"""The same of FlashAttention-4: 708/1062 causal, 4k on B200 (Dao-AILab/flash-attention pull request 2605); backward assumed as on
Hopper."""

GROUPED_ON_BLACKWELL = 0.36
"""Share of the dense bf16 peak that torch._grouped_mm reaches on Blackwell, forward and backward: 863 and 753 TFLOP/s of 2,250 on
B200 for 1 and 8 groups of 128,000 rows, n 2048, k 7168; 747 and 854 for n 8192, k 5120 (pytorch/ao@0b1bb11
torchao/prototype/moe_training/README.md). On Hopper it keeps up with a dense product (597 to 624 on H200; tile-ai/TileOPs pull
request 1567)."""

SCAN_FLOPS_PER_SM = 0.68e12
"""Rate of the five Triton kernels of Mamba-2's scan on one SM, forward, without the time of `Scan.forward_bytes`: 12.6 M
tokens/s on H100 at 8,192 tokens, 128 heads of 64, 128 states, 1 group, chunks of 256 (12.1 to 12.9 at 4,096 and 16,384; 10.7 to
11.8 beyond; vllm-project/vllm pull request 27299, "Original": its copy of them). The last and largest alone runs at .99 (H800;
tile-ai/tilelang@be9c08f benchmark/mamba2/README.md). Not a share of the peak: the similar kernels of linear attention, below, are
as fast on one SM of GB200 as on one of H100, which is assumed for these too [FLOP/s]."""
SCAN_SHARE = 0.091
"""The same as a share of the dense peak, where a machine states no number of SMs (H100: 90 of 989)."""
CONV_BYTES_PER_SM = 21e9
"""What the causal convolution of width 4 reads and writes on one SM: 18.5 and 19.6 GB/s on H100, 20.3 and 22.0 on H200, 20.4 and
22.3 on B200, 20.0 and 22.1 on GB200, 21.0 and 23.3 on GB300, 21.5 and 23.4 on B300 for the channels of Nemotron 3 Nano and Super,
8,192 tokens in bf16 (ai-dynamo/aiconfigurator@095f58a aic-core/src/aiconfigurator_core/systems/data/*/linear_attention/trtllm/
1.3.0rc20/mamba2_perf.parquet, causal_conv1d_fn) [B/s]."""

ELEMENTS_PER_SM = 2.6e9
"""What eager torch's element-wise kernels without vector loads process on one SM. bf16 cast to fp32: 1,073,741,824 elements in
2.774 ms on a device that casts back at 7.0 TB/s with vector loads, so a Blackwell of some 148 SMs (PaddlePaddle/Paddle pull
request 76988, column torch); 1.7e9 on A100 at three quarters of the clock, 67,108,864 in 0.362 ms (pytorch/pytorch pull request
195542, control). PReLU with a broadcast weight on H200: 2.2e9, 1,024 x 10,240 fp16 (tile-ai/TileOPs pull request 500) [1/s]."""

DRAWN_PER_SM = 1.6e10
"""Scores for which a flash kernel draws dropout on one SM: the random numbers (Philox) compete with the softmax for issue
slots, and little of their time is hidden (arXiv 2410.07531). 67.1e6 causal scores, forward and backward (4,096 tokens in 4
sequences, 16 heads of 128; that they are causal is assumed), take 24 us more on B300 and 33 us on GB200 with FlashAttention-2, 45
us on B300 and 20 us on H200 with cuDNN's kernel (NVIDIA/TransformerEngine issue 3312, pull request 3313): 1.9, 1.4, 1.0 and
2.5e10, of which this is the geometric mean [1/s]."""

CHUNK_FLOPS_PER_SM = 0.65e12
"""What the Triton kernels of linear attention compute on one SM, forward: Gated DeltaNet .73, .60 and .79 on GB200, .57 and .60
on H20, a fixed decay .64, .43 and .68 on GB200, heads of 128 (benchmarks of fla-org/flash-linear-attention; MoonshotAI/FlashKDA
README). Copies of Gated DeltaNet's for inference, medians: .69 on H100, .80 on B200, .77 on GB200, .82 on GB300 in TensorRT-LLM
1.3.0rc20, .49, .69, .60 and .63 in SGLang 0.5.14 (ai-dynamo/aiconfigurator@095f58a, linear_attention/*/gdn_perf.parquet, 16,384
tokens and more) [FLOP/s]."""
CHUNK_SHARE = 0.06
"""The same as a share of the dense peak, where a machine states no number of SMs (assumed: .05 on GB200, .08 on H100 by its
SMs)."""


class Rates(NamedTuple):
    """Rates that a device sustains for one job's precision: `_flops` [FLOP/s], `bytes_per_s` [B/s], `_s` of a kernel [s]."""

    gemm_flops: float
    """Asymptote of a GEMM in the compute dtype."""
    attention_forward_flops: float
    attention_backward_flops: float
    bytes_per_s: float
    """Rate of a long copy in device memory."""
    gemm_kernel_s: float
    move_kernel_s: float
    sm_count: float | None
    """Processors among which a GEMM's output tiles are divided, in waves; None where the device has none, or the number is
    unknown."""
    grad_itemsize: float
    """Bytes per element of the gradient that wgrad writes."""
    fused_accumulation: bool
    """wgrad reads and writes the main gradient (gradient-accumulation fusion)."""
    slowness: float
    """Factor on the seconds of kernels and launches; already applied to the rates above."""
    accumulate_bytes: float
    """Bytes per weight that a separate kernel moves to add wgrad's result to the main gradient."""
    move_rate: float
    """Rate of memory-bound kernels divided by `bytes_per_s`."""
    plain_share: float
    """GEMM rate without tensor cores divided by `gemm_flops`."""
    grouped_share: float
    """Rate of grouped products divided by `gemm_flops`, before the loss from few rows per expert."""
    recipe_flops: float
    """Asymptote of a GEMM of quantized operands."""
    experts_flops: float
    """The same of torchao's grouped products of experts."""
    scan_flops: float
    """Rate of the matrix products inside a state-space scan."""
    conv_bytes_per_s: float
    """Rate of a causal convolution."""
    elements_per_s: float
    """Elements of element-wise kernels without vector loads [1/s]."""
    drawn_per_s: float
    """Scores for which attention draws a dropout mask [1/s]."""
    chunk_flops: float
    """Rate of linear attention in chunks."""
    attention_ramp_tokens: float
    attention_head_64: tuple[float, float]
    """Rates of attention at head size 64 divided by those at 128, forward and backward."""
    gemm_overhead_k: float | None


def peak_dtype(accelerator: Accelerator, precision: str) -> str:
    """The tensor-core mode that a precision runs in: fp32 GEMMs use tf32 only where asked, so fp32 stays fp32."""
    if precision in RECIPES:
        precision = rate_of(precision, accelerator.peak_flops) or precision
    if precision in accelerator.peak_flops:
        return precision
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(precision, "fp32")
    return twin if twin in accelerator.peak_flops else next(iter(accelerator.peak_flops))


RATES: Recent[Rates] = Recent(4)
"""`added_rates` of the last devices and profiles."""


def rates(accelerator: Accelerator, software: Software, microbatches: int = 1) -> Rates:
    """Sustained rates of a device under a software profile.

    Without fusion the gradient of a weight is added to the main one by a separate kernel, except where the first micro-batch's
    becomes the gradient (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    found = RATES.of((accelerator, software, efficiency()), lambda: added_rates(accelerator, software))
    if software.states.gradients_persist:
        return found
    # the first micro-batch's gradient becomes the gradient where none persists
    return found._replace(accumulate_bytes=(microbatches - 1.0) / microbatches * found.accumulate_bytes)


def added_rates(accelerator: Accelerator, software: Software) -> Rates:
    """The same where every micro-batch's gradient is added."""
    dtype = peak_dtype(accelerator, software.compute_dtype)
    chip = accelerator.same_chip_as or accelerator.name
    projections = peak_dtype(accelerator, software.precision)
    factor, share = (_one, _one) if software.timing.measured else (compute_factor, sustained_share)
    slow = software.timing.compute_factor * factor(software.name)
    peak = accelerator.peak_flops[dtype] / slow
    main = software.bytes_of(software.states.main_grad_dtype)
    attention = attention_efficiency(accelerator, software)
    copy_rate = accelerator.memory_bytes_per_s * accelerator.memory_efficiency / slow
    sms = accelerator.sm_count or inf
    slow_gemm = slow / (accelerator.torch_gemm_share if software.family in EAGER_TORCH else 1.0)
    return Rates(
        gemm_flops=sustained_flops(accelerator, dtype) * share(chip, software.compute_dtype) / slow_gemm,
        attention_forward_flops=peak * attention[0],
        attention_backward_flops=peak * attention[1],
        bytes_per_s=copy_rate,
        gemm_kernel_s=software.timing.gemm_kernel_s * slow,
        move_kernel_s=software.timing.move_kernel_s * slow,
        sm_count=accelerator.sm_count,
        grad_itemsize=main if software.states.grad_accumulation_fusion else software.itemsize,
        fused_accumulation=software.states.grad_accumulation_fusion,
        slowness=slow,
        accumulate_bytes=0.0 if software.states.grad_accumulation_fusion else software.itemsize + 2.0 * main,
        move_rate=software.timing.move_rate,
        plain_share=plain_share(accelerator, dtype),
        grouped_share=grouped_share(accelerator, software, dtype),
        recipe_flops=sustained_flops(accelerator, projections) * share(chip, software.precision) / slow_gemm,
        experts_flops=experts_flops(accelerator, software, sustained_flops) / slow_gemm,
        scan_flops=accelerator.sm_count * SCAN_FLOPS_PER_SM / slow if accelerator.sm_count else peak * SCAN_SHARE,
        conv_bytes_per_s=min(copy_rate * software.timing.move_rate, sms * CONV_BYTES_PER_SM / slow),
        elements_per_s=sms * ELEMENTS_PER_SM / slow,
        drawn_per_s=sms * DRAWN_PER_SM / slow,
        chunk_flops=accelerator.sm_count * CHUNK_FLOPS_PER_SM / slow if accelerator.sm_count else peak * CHUNK_SHARE,
        attention_ramp_tokens=0.0 if scores_in_memory(software) else accelerator.attention_ramp_tokens,
        attention_head_64=head_64(accelerator, software),
        gemm_overhead_k=accelerator.gemm_overhead_k,
    )


def _one(*_of: str) -> float:
    """The slowdown of a device: 1 where all of its constants were measured on it (`machine.Kernels`)."""
    return 1.0


def flash_kernel(accelerator: Accelerator, software: Software) -> str:
    """The attention kernel that the profile runs on a device.

    torch's scaled_dot_product_attention that asks for cuDNN's kernel first takes FlashAttention-2's where there is none (AMD).
    """
    kernel = software.kernels.attention_kernel
    if not kernel.startswith("sdpa"):
        return kernel
    if accelerator.compute_capability is None:
        return "fa2"
    return "best" if kernel == "sdpa" else "cudnn-9.19"


def attention_efficiency(accelerator: Accelerator, software: Software) -> tuple[float, float]:
    """Shares of the dense peak in forward and backward of the attention kernel that the profile runs."""
    forward, backward = accelerator.attention_forward_efficiency, accelerator.attention_backward_efficiency
    kernel = flash_kernel(accelerator, software)
    if kernel == "cudnn-9.19":
        return accelerator.cudnn_forward_efficiency or forward, accelerator.cudnn_backward_efficiency or backward
    if kernel == "best":
        return forward, backward
    if scores_in_memory(software):
        return eager_flex_efficiency(accelerator, peak_dtype(accelerator, software.compute_dtype))
    older = OLDER_KERNELS.get(kernel, 1.0)
    if kernel == "flex" and accelerator.microscaling:
        older = FLEX_ON_BLACKWELL
    return (accelerator.fa2_forward_efficiency or forward) * older, (
        accelerator.fa2_backward_efficiency or backward
    ) * older


def eager_flex_efficiency(accelerator: Accelerator, dtype: str) -> tuple[float, float]:
    """The same of the products of FlexAttention that is not compiled (`model.eager_flex`), for keys as wide as values.

    Forward one product of two is in fp32, without tensor cores; backward two of five (scores again, gradient of the softmax).
    """
    fast, peak = sustained_flops(accelerator, dtype), accelerator.peak_flops[dtype]
    slow = sustained_flops(accelerator, "fp32") if "fp32" in accelerator.peak_flops else fast
    return 2.0 / (1.0 / slow + 1.0 / fast) / peak, 5.0 / (2.0 / slow + 3.0 / fast) / peak


def scores_in_memory(software: Software) -> bool:
    """Whether attention runs as matrix products and kernels on all scores: no blocks that the mask crosses, no flash kernel."""
    return software.kernels.attention_kernel == "flex_eager"


def head_64(accelerator: Accelerator, software: Software) -> tuple[float, float]:
    """Rates of the profile's attention kernel at head size 64 divided by those at 128, forward and backward.

    Where an NVIDIA device's own kernel is another than FlashAttention-2, those of that; of AMD's kernels none was found.
    """
    if scores_in_memory(software):
        return 1.0, 1.0
    own = flash_kernel(accelerator, software) in {"best", "cudnn-9.19"}
    if not own or accelerator.fa2_forward_efficiency is None or accelerator.compute_capability is None:
        return HEAD_64, HEAD_64
    return BLACKWELL_HEAD_64 if accelerator.microscaling else HOPPER_HEAD_64


def plain_share(accelerator: Accelerator, dtype: str) -> float:
    """Rate of a GEMM that tensor cores cannot run (it runs as fp32) divided by that of one that they can."""
    return min(1.0, accelerator.peak_flops.get("fp32", inf) / sustained_flops(accelerator, dtype))


def grouped_share(accelerator: Accelerator, software: Software, dtype: str) -> float:
    """Rate of the profile's grouped products divided by that of a long GEMM.

    Products that have streams of their own are cuBLAS' for each expert, by TransformerEngine or by grouped_gemm.
    """
    own_streams = software.buffers.grouped_workspaces > 0
    if software.family not in EAGER_TORCH or own_streams or not accelerator.microscaling:
        return 1.0
    return min(1.0, GROUPED_ON_BLACKWELL * accelerator.peak_flops[dtype] / sustained_flops(accelerator, dtype))


def sustained_flops(accelerator: Accelerator, dtype: str) -> float:
    """Sustained rate of a long GEMM in isolation [FLOP/s]; bf16 and fp16 are used for each other if one is missing."""
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
    known = accelerator.sustained_flops
    best = accelerator.best_flops.get(dtype) or accelerator.best_flops.get(twin)
    guess = best * BEST_SUSTAINED if best else accelerator.peak_flops[dtype] * FALLBACK_SUSTAINED
    return known.get(dtype) or known.get(twin) or guess
