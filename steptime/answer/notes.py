"""Notes on a job: settings that are valid but unusual, and what was taken where a plan can mean several things."""

from __future__ import annotations

from steptime.base.words import counted
from steptime.job.job import Job
from steptime.schedule.stage_exchange import exchange_of

FLASH_CAPABILITY = 8.0
"""GPU architecture that FlashAttention-2 requires (Dao-AILab/flash-attention README: Ampere or newer)."""

LOADED_MASK_BYTES = 1e9
"""Attention mask of a micro-batch from which on a note tells of it: to collate 2.1 GB into shared memory took a worker of torch's
data loader 4.8 s on one core of a Xeon (torch 2.13), where reading the tokens takes no time to speak of."""


def notes(job: Job) -> list[str]:
    """Settings that are valid but unusual."""
    devices, node = job.parallelism.devices, job.machine.devices_per_node
    lines = []
    if devices < node:
        verb = "is" if devices == 1 else "are"
        lines.append(
            f"note: {devices} of the {node} devices of a {job.machine.name.removesuffix('-node')} node {verb} used"
        )
    elif devices % node:
        lines.append(f"note: {counted(devices, 'device')} on nodes of {node}: the last node is partly used")
    inner = job.machine.tiers[0]
    domain = f"{inner.name} ({counted(inner.size, 'device')})"
    if job.parallelism.tp > inner.size:
        lines.append(
            f"note: tp {job.parallelism.tp} is wider than {domain}, so its collectives use the next network tier"
        )
    elif job.parallelism.cp > 1 and job.parallelism.tp * job.parallelism.cp > inner.size:
        lines.append(
            f"note: tp*cp {job.parallelism.tp * job.parallelism.cp} is wider than {domain}, "
            "so context-parallel communication uses the next network tier"
        )
    meant = other_meaning(job)
    lines += meant
    if not meant and job.recompute.modules == {"core_attn"} and job.software.kernels.attention_impl == "flash":
        lines.append(
            "note: selective recomputation of flash attention frees only its log-sum-exp; super-selective or full frees more"
        )
    return [*lines, *_attention(job), *_masks(job), *_autocast(job), *_auto_tp(job), *_one_stream(job)]


def other_meaning(job: Job) -> list[str]:
    """A word of the plan that the framework itself uses for something else.

    pytorch/torchtitan@b5bcd76c torchtitan/distributed/activation_checkpoint.py, SelectiveAC: "Per-op selective activation
    checkpointing", the mode selective of its configs.
    """
    said = job.performance.activation_checkpointing_type
    if said != "selective" or not job.software.name.startswith("torchtitan"):
        return []
    core = "Megatron's selective recomputation (core attention only)"
    write = "write per-op: --set performance.activation_checkpointing_type=per-op"
    return [
        f"note: performance.activation_checkpointing_type selective is {core}; for torchtitan's mode selective {write}"
    ]


def _attention(job: Job) -> list[str]:
    """Where a device has no kernel for flash attention, or the kernel follows from what its file leaves out."""
    device, kernels = job.machine.accelerator, job.software.kernels
    if kernels.attention_impl != "flash":
        return []
    capability = device.compute_capability
    if capability is not None and capability < FLASH_CAPABILITY:
        missing = f"no kernel for {device.name} (compute capability {capability:g}, it needs {FLASH_CAPABILITY:g})"
        return [f"note: FlashAttention has {missing}; set performance.attention_impl to unfused"]
    if capability is None and kernels.attention_kernel.startswith("sdpa"):
        why = f"because {job.machine.name} states no accelerator.compute_capability, as NVIDIA devices do for cuDNN's kernel"
        return [f"note: attention_kernel {kernels.attention_kernel} is FlashAttention-2 here, {why}"]
    return []


def _masks(job: Job) -> list[str]:
    """Where Megatron's data loader makes attention masks of a size that takes it long: each sequence's positions squared.

    A byte a pair, over all positions on every rank that shares a sequence (core datasets/gpt_dataset.py,
    create_attention_mask; Megatron-LM training/utils.py, get_batch_on_this_tp_rank).
    """
    mask_bytes = 1.0 * job.data.microbatch_sz * job.data.seqlen**2
    buffers, flash = job.software.buffers, job.software.kernels.attention_impl == "flash"
    if (
        job.software.family != "megatron-core"
        or not (buffers.attention_mask and flash)
        or mask_bytes < LOADED_MASK_BYTES
    ):
        return []
    made = f"the data loader makes an attention mask of {mask_bytes / 1e9:.1f} GB for each micro-batch, in time not counted here"
    return [
        f"note: {made}; a flash kernel needs none: --no-create-attention-mask-in-dataloader (performance.attention_mask)"
    ]


def _autocast(job: Job) -> list[str]:
    """fp32 weights under torch.autocast, which casts them for each matrix product (`model.sublayers.cast_weight`)."""
    software = job.software
    half = software.compute_dtype
    if software.family != "torch" or software.states.param_dtype != "fp32" or half == "fp32":
        return []
    copies = f"the {half} copies of weights that backward reads are in memory, the time to make them is not counted"
    return [f"note: weights are fp32 under torch.autocast: matrix products run in {half}; {copies}"]


def _auto_tp(job: Job) -> list[str]:
    """DeepSpeed's own tensor parallelism of Hugging Face models.

    deepspeedai/DeepSpeed deepspeed/runtime/engine.py: tensor_parallel.autotp_size since v0.16.4, where "the compatibility between
    'autotp' and 'zero_stage = 3' has not been validated" is an error to v0.19.3.
    """
    if job.software.family != "deepspeed" or job.parallelism.tp == 1:
        return []
    since = "0.19.4" if job.zero_level == 3 else "0.16.4"
    with_zero = " with ZeRO stage 3" if job.zero_level == 3 else ""
    return [
        f"note: tp {job.parallelism.tp} is AutoTP (tensor_parallel.autotp_size){with_zero}, in DeepSpeed since {since}"
    ]


def _one_stream(job: Job) -> list[str]:
    """Where stages of a pipeline wait for each other's exchanges (`schedule.one_stream`)."""
    if exchange_of(job.software.layout.stage_exchange, job.schedule, job.parallelism.vpp) != "one_stream":
        return []
    why = "the torch 2.10 and 2.11 of this release send and receive on one stream per stage, so that stages wait for each other"
    return [f"note: {why}; torch 2.13 has a stream for each pair of stages (software torchtitan)"]
