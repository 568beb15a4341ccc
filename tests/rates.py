"""A made-up device with round figures, for sums done by hand."""

from math import inf

from steptime.cost.rates import HEAD_64, Rates

RATES = Rates(
    gemm_flops=200e12,
    attention_forward_flops=150e12,
    attention_backward_flops=120e12,
    bytes_per_s=1e12,
    gemm_kernel_s=4e-6,
    move_kernel_s=3e-6,
    sm_count=100.0,
    grad_itemsize=4.0,
    fused_accumulation=True,
    slowness=1.0,
    accumulate_bytes=0.0,
    move_rate=1.0,
    plain_share=1.0,
    grouped_share=1.0,
    recipe_flops=400e12,
    experts_flops=400e12,
    scan_flops=50e12,
    conv_bytes_per_s=1e12,
    elements_per_s=inf,
    drawn_per_s=inf,
    chunk_flops=40e12,
    attention_ramp_tokens=450.0,
    attention_head_64=(HEAD_64, HEAD_64),
    gemm_overhead_k=None,
)
