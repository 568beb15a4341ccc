"""What the host needs to launch a kernel: eager Python, compiled code, DTensors, CUDA graphs."""

from __future__ import annotations

from steptime.base.num import Num, where
from steptime.software.performance import EAGER_TORCH, Software

COMPILED_HOST = 0.47
"""Host time of a launch from compiled code over that of eager torch: 18.9 against 40.3 ms for the forward of a Llama 8B at 128
tokens (huggingface/accelerate@16cb6eb8 benchmarks/torch.compile)."""
DTENSOR_HOST = 2.5
"""The same of an eager launch on DTensors (assumed): the smallest operation takes 24 to 133 us by release against 4.8 us
(pytorch/pytorch pull requests 160580, 166371). 5 would make steps of Llama-3 8B under TP2 host-bound that were not (torchtitan,
rows marked fit)."""


def launch_host_s(software: Software, tp: Num) -> Num:
    """Seconds that the host needs for one launch: none from CUDA graphs, less compiled, more on DTensors."""
    each = software.timing.host_kernel_s
    if software.timing.cuda_graphs:
        return 0.0
    if software.kernels.compile != "none":
        return each * COMPILED_HOST
    return each * where(tp > 1, DTENSOR_HOST, 1.0) if software.family in EAGER_TORCH else each
