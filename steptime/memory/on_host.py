"""States in host memory: bytes that it holds and moves for each parameter that it updates."""

from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.software.state_bytes import FP32


class OnHost(NamedTuple):
    """Bytes per parameter that the host updates."""

    stored: Num
    """In host memory."""
    touched: float
    """Read and written in host memory by the update."""
    down: float = 0.0
    """Copied from the device after backward."""
    up: float = 0.0
    """Copied to the device after the update."""
    cast: float = 0.0
    """Read and written in device memory to cast incoming parameters to their dtype."""
    read_on_device: float = 0.0
    """Read in the device's memory for each parameter that stays there, beyond what its own optimizer reads and writes."""
    gathered: float = 0.0
    """Copied to the device before each all-gather."""
    reduced: float = 0.0
    """Copied from the device after each reduce-scatter."""
    added: float = 0.0
    """Read and written in host memory to add the gradients of a further micro-batch."""
    readied: float = 0.0
    """Read and written in device memory for the gradients that go down."""
    summed: float = 0.0
    """Of a sum of micro-batches' gradients that goes down after each, and comes up before it is added to."""


def on_host(job: Job) -> OnHost:
    """What a job's framework holds and moves."""
    family = job.software.family
    return hybrid(job) if family == "megatron-core" else zero_offload(job) if family == "deepspeed" else sharded(job)


def hybrid(job: Job) -> OnHost:
    """Megatron-Core's HybridDeviceOptimizer (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).

    The host has an fp32 copy of the parameter, an fp32 gradient and two moments, 16 bytes. The gradient goes down and the copy
    comes up in fp32, as asynchronous copies are cast on the device (ATen/native/cuda/Copy.cu). torch's fused AdamW reads four and
    writes three of fp32: 28 bytes. On the device the fp32 copies of parameters are read once more to round them
    (fp32_param_copy_back_gpu_hook); with separate masters on the device (`keep_masters`) the usual update has done so.
    """
    size = job.software.bytes_of(job.software.states.param_dtype)
    moments = job.software.state_bytes.moments
    read_on_device = 0.0 if job.performance.cpu_offload.keep_masters else FP32
    return OnHost(2.0 * FP32 + moments, 3.0 * FP32 + 2.0 * moments, FP32, FP32, FP32 + size, read_on_device)


def sharded(job: Job) -> OnHost:
    """FSDP's CPU offload: parameters, gradients and moments of a shard, in the dtypes that they have on a device.

    A shard goes up, and is cast there, before each all-gather; its gradient comes down after each reduce-scatter (torch 2.13
    _fully_shard/_fsdp_param.py, all_gather_inputs; _fsdp_collectives.py, foreach_reduce; _flat_param.py and _runtime_utils.py for
    FSDP 1). Gradients of further micro-batches are added by the host: two read, one written. torch's fused AdamW on a CPU reads
    parameter, gradient and moments, and writes all but the gradient. The other one runs op by op on a CPU, foreach or not: its 20
    accesses are those of `timing.optimizer.foreach_bytes_per_param`. Clipping reads the gradients, reads and writes them.
    """
    software, states = job.software, job.software.states
    param, gradient = software.bytes_of(states.param_dtype), software.bytes_of(states.main_grad_dtype)
    moments = job.software.state_bytes.moments
    update = 2.0 * param + gradient + 2.0 * moments
    if states.optimizer_impl != "fused":
        update = 4.0 * param + 14.0 * moments / 2.0 + 2.0 * gradient
    clip = 3.0 * gradient if states.clip_grad else 0.0
    return OnHost(param + gradient + moments, update + clip, gathered=param, reduced=gradient, added=3.0 * gradient)


def zero_offload(job: Job) -> OnHost:
    """DeepSpeed's ZeRO-Offload (deepspeedai/DeepSpeed@edaa7221 deepspeed/runtime/zero/stage3.py).

    The host has an fp32 parameter, an fp32 gradient, two moments, and the partition of gradients in the dtype in which they
    accumulate; with offload_param the parameter of the compute dtype too. In each micro-batch that partition goes down, and comes
    up to be worked on or added to; after the last one its fp32 copy goes down (partition_grads,
    _offload_grad_partition_at_boundary). On the host gradients are scaled in place, 8 bytes, Adam moves 28, and parameters are
    cast, 6, as copies that block are cast where they come from (_reassign_or_swap_out_partitioned_parameters); then they go up,
    or before each gather (partition_parameters.py).
    """
    software, away = job.software, job.performance.cpu_offload.params
    size, sums = software.bytes_of(software.states.param_dtype), software.bytes_of(software.states.main_grad_dtype)
    moments = job.software.state_bytes.moments
    stored = 2.0 * FP32 + moments + sums + (size if away else 0.0)
    touched = 2.0 * FP32 + 3.0 * FP32 + 2.0 * moments + FP32 + size
    if job.zero_level < 3:
        return whole_offload(job, touched)
    reduced = 2.0 * sums + FP32 / job.microbatches
    return OnHost(stored, touched, up=0.0 if away else size, gathered=size if away else 0.0, reduced=reduced)


FP64, FLAG = 8.0, 1.0
"""Bytes of a number in double precision, and of a truth value."""


def whole_offload(job: Job, touched: float) -> OnHost:
    """ZeRO-Offload at stages 1 and 2 (deepspeedai/DeepSpeed@edaa7221 deepspeed/runtime/zero/stage_1_and_2.py).

    The host has an fp32 parameter, an fp32 gradient, two moments, and a buffer of rounded parameters (__init__); its update moves
    `touched` bytes (unscale_and_clip_grads, step), and the rounded parameters go up. After the last micro-batch the gradient goes
    down in fp32 (async_inplace_copy_grad_to_fp32_buffer_from_gpu). Before that the device takes its norm in double precision
    (set_norm_for_param_grad_in_gpu: cast, read), looks for inf and nan (_has_inf_or_nan: float, isnan, abs, == inf, or, float,
    max) and casts it. At stage 2 every one of several micro-batches is added to a sum of the parameters' dtype on the host: it
    goes down, and but for the first comes up before (async_accumulate_grad_in_cpu_via_gpu). At stage 1 the device adds them up,
    and the step's one reduction finds `micro_step_id` 0 (setup_buckets, copy_grads_in_partition).
    """
    software = job.software
    size = software.bytes_of(software.states.param_dtype)
    stored = 2.0 * FP32 + job.software.state_bytes.moments + size
    norm = (size + FP64) + FP64
    finite = (size + FP32) + (FP32 + FLAG) + 2.0 * FP32 + (FP32 + FLAG) + 3.0 * FLAG + (FLAG + FP32) + FP32
    readied = norm + finite + (size + FP32)
    summed = size if job.zero_level == 2 else 0.0
    return OnHost(stored + summed * (job.microbatches > 1), touched, FP32, size, readied=readied, summed=summed)


def offload_buffers(job: Job, counted: CountedParams, bucket: Num) -> Num:
    """Bytes of the device's buffers of ZeRO-Offload at stages 1 and 2: buckets of gradients, and the largest parameter's sum.

    Same file: setup_buckets makes one buffer of reduce_bucket_size elements, `bucket`, and with overlap_comm a second;
    temp_grad_buffer_for_gpu_offload stays.
    """
    if not follows_buckets(job):
        return 0.0
    most: Num = 0.0
    for params, _ in counted:
        for p in params:
            most = maximum(most, p.each)
    return job.software.itemsize * (bucket * (1.0 if job.software.overlap.dp is False else 2.0) + most)


def follows_buckets(job: Job) -> bool:
    """Whether a job is one of ZeRO-Offload at stage 1 or 2, whose copies to the host follow the buckets of the reduction."""
    return job.software.family == "deepspeed" and job.performance.cpu_offload.share > 0.0 and job.zero_level in {1, 2}


def staging_bytes(job: Job, counted: CountedParams, owned: Num) -> Num:
    """Bytes of the fp32 copy on the device, of one tensor at a time, from which an updated parameter is rounded."""
    said = job.performance.cpu_offload
    if said.share == 0.0 or said.keep_masters or on_host(job).cast == 0.0:
        return 0.0
    most: Num = 0.0
    for params, _ in counted:
        for p in params:
            most = maximum(most, p.each)
    return FP32 * minimum(most, owned)
