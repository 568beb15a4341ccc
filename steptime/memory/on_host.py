"""States in the host's memory: bytes that it holds and moves for each parameter that it updates."""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.job.assembly import CountedParams
from steptime.job.job import Job
from steptime.memory.moments import FP32, least_moments, local_tensors


class OnHost(NamedTuple):
    """Bytes per parameter that the host updates."""

    held: float
    """In the host's memory."""
    down: float
    """Copied from the device after backward."""
    up: float
    """Copied to the device after the update."""
    touched: float
    """Read and written in the host's memory by the update."""
    cast: float = 0.0
    """Read and written in the device's memory to bring what comes up to the parameters' dtype."""
    beside: float = 0.0
    """Read in the device's memory for each parameter that stays there, beyond what its own optimizer reads and writes."""


def on_host(job: Job) -> OnHost:
    """What a job's framework holds and moves.

    Megatron-Core's HybridDeviceOptimizer (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py): an fp32 copy of the
    parameter, an fp32 gradient and two moments, 16 bytes. The gradient goes down and the copy comes up in fp32, as asynchronous
    copies are cast on the device (ATen/native/cuda/Copy.cu). torch's fused AdamW reads four and writes three of fp32: 28 bytes.
    On the device the fp32 copies of parameters are read once more to round them (fp32_param_copy_back_gpu_hook); with masters of
    their own on the device (`keep_masters`) the usual update has done so.
    """
    size = job.software.bytes_of(job.software.states.param_dtype)
    moments = least_moments(job)
    beside = 0.0 if job.performance.cpu_offload.keep_masters else FP32
    return OnHost(2.0 * FP32 + moments, FP32, FP32, 3.0 * FP32 + 2.0 * moments, FP32 + size, beside)


def staging_bytes(job: Job, held: CountedParams, owned: Num) -> Num:
    """Bytes of the fp32 copy on the device, of one tensor at a time, from which an updated parameter is rounded."""
    said = job.performance.cpu_offload
    if said.share == 0.0 or said.keep_masters:
        return 0.0
    most: Num = 0.0
    for params, _ in held:
        for p in params:
            most = maximum(most, local_tensors(job, p)[1])
    return FP32 * minimum(most, owned)
