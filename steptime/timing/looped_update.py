"""Seconds in which the host launches an update that runs op by op over each tensor.

torch/optim/adam.py (2.13), _single_tensor_adam: weight decay, the first moment's lerp, the second's mul and addcmul, the root,
its division, the sum with eps and the last addcdiv are kernels of their own for each tensor; torch's experts are stacked into
one. FSDP2 calls them on DTensors, FSDP1 on pieces of flat parameters, ZeroRedundancyOptimizer on the tensors that a rank owns.
The host runs ahead of the device, which waits only where kernels are shorter than launches.
"""

from __future__ import annotations

from steptime.base.num import Num, where
from steptime.cost.host import DTENSOR_HOST
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.memory.states import shard_ranks

KERNELS = 8.0
"""Kernels of the update of one tensor."""


def launches_s(job: Job, counted: CountedParams) -> Num:
    """Seconds of the host to update the parameters of a stage; 0 where one kernel, or a few, update all."""
    states = job.software.states
    if states.optimizer != "adamw" or states.optimizer_impl != "for_loop" or job.performance.cpu_offload.share:
        return 0.0
    tensors = sum([count * _tensors(job, float(len(params.params))) for params, count in counted if params.params])
    fsdp = job.parallelism.fsdp
    fsdp2 = job.zero_level >= 2 and (fsdp is None or fsdp.version == 2)
    slower = DTENSOR_HOST if fsdp2 else where(job.parallelism.tp > 1, DTENSOR_HOST, 1.0)
    return KERNELS * tensors * job.software.timing.host_kernel_s * slower


def _tensors(job: Job, whole: float) -> Num:
    """Tensors of a part that one device updates: all, on average those that it owns, or what its shard holds of flat ones."""
    fsdp = job.parallelism.fsdp
    if fsdp is not None and fsdp.version == 1:
        return 1.0 + (whole - 1.0) / shard_ranks(job) if fsdp.original_params else 1.0
    return whole / shard_ranks(job) if job.zero_level == 1 else whole
