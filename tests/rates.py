"""A made-up device with round figures, for sums done by hand."""

from steptime.cost.rates import Rates

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
)
