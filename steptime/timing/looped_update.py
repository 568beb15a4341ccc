"""Seconds in which the host launches an update that runs op by op over each tensor.

torch/optim/adam.py (2.13), _single_tensor_adam: weight decay, the first moment's lerp, the second's mul and addcmul, the root,
its division, the sum with eps and the last addcdiv are kernels of their own for each tensor; torch's experts are stacked into
one. FSDP2 calls them on DTensors. The host runs ahead of the device, which waits only where kernels are shorter than launches.
"""

from __future__ import annotations

from steptime.base.num import Num, where
from steptime.cost.host import DTENSOR_HOST
from steptime.job.job import Job
from steptime.job.local_params import CountedParams

KERNELS = 8.0
"""Kernels of the update of one tensor."""


def launches_s(job: Job, held: CountedParams) -> Num:
    """Seconds of the host to update the parameters of a stage; 0 where one kernel, or a few, update all."""
    states = job.software.states
    if states.optimizer != "adamw" or states.optimizer_impl != "for_loop" or job.performance.cpu_offload.share:
        return 0.0
    tensors = sum([count * float(len(params.params)) for params, count in held])
    on_dtensors = job.zero_level >= 2
    slower = DTENSOR_HOST if on_dtensors else where(job.parallelism.tp > 1, DTENSOR_HOST, 1.0)
    return KERNELS * tensors * job.software.timing.host_kernel_s * slower
