"""Memory of torch's allocator besides states and activations: workspaces, grow-only buffers, masks, stage inputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from steptime.base.num import PLAIN, Num, minimum, where
from steptime.base.rows import StageBuffer
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.memory.block_rests import BLOCKS, KIB, block_rest_bytes
from steptime.memory.kept_buffers import comm_buffer_bytes, dummy_wgrad_bytes, stage_experts
from steptime.memory.states import States
from steptime.software.performance import EAGER_TORCH, Software

FP32 = 4.0
"""Bytes of one fp32 number."""
TORCH_DEFAULT = ":4096:2:16:8"
"""Size in KiB and count of each part of torch's default workspace, in the form of CUBLAS_WORKSPACE_CONFIG."""
TORCH_HOPPER = ":4096:8"
TORCH = "torch v2.11.0 aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize"
TE = "TransformerEngine v2.9 transformer_engine/pytorch/module/base.py:77, get_cublas_workspace_size_bytes"
STREAMS = "TransformerEngine v2.9 transformer_engine/pytorch/module/base.py:95, get_multi_stream_cublas_workspace"
TOKEN = 3.0 * 8.0 + FP32
"""Bytes of a token of a batch: its index, label and position as 64-bit integers, its weight in the loss in fp32."""
BATCHES = "NVIDIA/Megatron-LM@5e4fc931 pretrain_gpt.py, get_batch: batch[key].cuda(); megatron/core/rerun_state_machine.py:1155"
MASK = "megatron-core 0.16.1 datasets/gpt_dataset.py:706, _get_ltor_masks_and_position_ids"
INPUTS = "megatron-core 0.16.1 transformer/transformer_block.py:570, set_input_tensor"
RECEIVED = "torch 2.13 distributed/pipelining/stage.py, _setup_forward_recv_info, _setup_backward_recv_info"
SENDS = "megatron-core 0.16.1 pipeline_parallel/schedules.py:494, the last input_tensor_grad; p2p_communication.py"
POOL = "megatron-core 0.16.1 utils.py:609, GlobalMemoryBuffer"
DUMMIES = (
    "megatron-core 0.16.1 tensor_parallel/layers.py:584; TransformerEngine v2.9 module/base.py:106, get_dummy_wgrad"
)
DEFERRED = "megatron-core 0.16.1 tensor_parallel/layers.py:509, grad_output_buffer and embedding_activation_buffer"
OUTPUT_BUFFERS = (
    "Aleph-Alpha/scaling@737f855 src/scaling/core/nn/pipeline_schedule/train.py, required_buffer_count: two or more; "
    "nn/parallel_module/parallel_module.py, _execute_loss_fn gets the last stage's outputs, and nothing removes them"
)
MAPS = "megatron-core 0.16.1 transformer/moe/token_dispatcher.py:610-611: the dispatcher refers to them until its next forward"
GRAPHS = (
    "megatron-core 0.16.1 transformer/moe/token_dispatcher.py:610, self.probs; pipeline_parallel/utils.py, ScheduleNode"
)
PIECES = "megatron-core 0.15.0 models/gpt/fine_grained_callables.py:291, TransformerLayerNode._release_state"
COPIES = "megatron-core 0.16.1 optimizer/optimizer.py:759, model_param.main_grad.float(); distrib_optimizer.py:2419"
COPIES_KEPT = (
    "NVIDIA/Megatron-LM@b4bc51b1 megatron/optimizer/optimizer.py: zero_grad leaves those of fp32_from_float16_groups"
)
OLD_GRADIENTS = (
    "NVIDIA/Megatron-LM@b4bc51b1 megatron/model/distributed.py, allreduce_gradients: param.main_grad = param.grad"
)


class OfAnyBatch(NamedTuple):
    """Buffers of a stage that do not grow with the number of micro-batches."""

    first: list[StageBuffer]
    """Of libraries and modules."""
    rests: tuple[StageBuffer, ...]
    """Of allocator blocks."""
    copies: list[StageBuffer]
    """Of gradients."""


def of_any_batch(assembly: Assembly, stage: int, states: States) -> OfAnyBatch:
    """Those of one stage with these states."""
    rests = block_rest_bytes(assembly, assembly.stages[stage], states.buckets)
    return OfAnyBatch(
        [*common_buffers(assembly), *grow_only(assembly, stage)],
        one_buffer("unsplit remainders of blocks", rests, BLOCKS, stays=True),
        gradient_copies(assembly.job, states),
    )


def all_of_any_batch(assembly: Assembly, states: list[States]) -> list[OfAnyBatch]:
    """Those of every stage; equal stages share theirs."""
    return assembly.by_stage(lambda stage, _: of_any_batch(assembly, stage, states[stage]))


def common_buffers(assembly: Assembly) -> list[StageBuffer]:
    """The buffers that every stage has alike, the first of each."""
    return [
        *workspaces(assembly.job),
        *one_buffer("Megatron's grow-only buffer", comm_buffer_bytes(assembly), POOL, stays=True),
    ]


def stage_buffers(assembly: Assembly, stage: int, states: States, known: OfAnyBatch | None = None) -> list[StageBuffer]:
    """Every buffer of one stage with these states; empty ones are left out. `known`: those `of_any_batch`, where found."""
    chunks = assembly.stages[stage]
    first, rests, copies = known or of_any_batch(assembly, stage, states)
    deferred, before = deferred_wgrad_bytes(assembly, chunks), earlier_logits_bytes(assembly, chunks)
    return [
        *first,
        *of_pipeline(assembly, chunks),
        *one_buffer("operands of the head's deferred gradients", deferred, DEFERRED),
        *one_buffer("logits of the previous micro-batch", before, OUTPUT_BUFFERS),
        *rests,
        *batches(assembly, chunks),
        *copies,
    ]


def one_buffer(
    name: str, bytes_: Num, source: str, *, stays: bool = False, at_peak: bool = True, carried: bool = False
) -> tuple[StageBuffer, ...]:
    """A buffer; none where it is empty."""
    if type(bytes_) in PLAIN and bytes_ == 0.0:
        return ()
    return (StageBuffer(name, bytes_, stays, at_peak, source, carried),)


def at_peak(buffers: list[StageBuffer]) -> Num:
    """Bytes that are allocated at the peak of a micro-batch."""
    return 1.0 * sum([one.bytes for one in buffers if one.at_peak])


def step_change(buffers: list[StageBuffer]) -> Num:
    """Bytes that the optimizer step adds to the peak of a micro-batch; negative where it holds less."""
    own = sum([one.bytes for one in buffers if not one.at_peak])  # all of which stay
    return own - sum([one.bytes for one in buffers if not one.stays])


def workspaces(job: Job) -> list[StageBuffer]:
    """Workspaces of the libraries that multiply matrices, by architecture; none on a device that is not NVIDIA's."""
    said, chip = job.software.buffers, job.software.compute_capability
    if chip == 0.0:
        return []
    streams = said.grouped_workspaces if job.model.moe is not None and job.software.moe.grouped_gemm else 0
    ours, one = cublas_workspace_bytes(said.cublas_workspace, chip), te_workspace_bytes(chip)
    return [
        *one_buffer(
            f"cuBLAS workspaces of torch, {said.cublas_handles}", said.cublas_handles * ours, TORCH, stays=True
        ),
        *one_buffer("TransformerEngine's cuBLAS workspace", said.te_workspaces * one, TE, stays=True),
        *one_buffer("workspaces of grouped GEMMs", streams * one, STREAMS, stays=True),
    ]


@cache
def cublas_workspace_bytes(said: str, compute_capability: float) -> float:
    """Bytes of the workspace that torch allocates per cuBLAS handle and stream: pairs of KiB and count, as in the variable.

    By default, 32 MiB from Hopper on (Blackwell since NVIDIA's container of April 2026) and 8.125 MiB before.

    >>> cublas_workspace_bytes(":4096:8", 8.0) / 2**20, cublas_workspace_bytes("default", 8.0) / 2**20
    (32.0, 8.125)
    """
    if said == "default":
        said = TORCH_HOPPER if compute_capability >= 9.0 else TORCH_DEFAULT
    return sum(KIB * int(size) * int(count) for size, count in re.findall(r":(\d+):(\d+)", said))


def te_workspace_bytes(compute_capability: float) -> float:
    """Bytes of cuBLASLt's workspace: 32 MiB from Hopper on, else 4 MiB."""
    return (32.0 if compute_capability >= 9.0 else 4.0) * KIB * KIB


def has_batch(chunks: Sequence[Chunk]) -> bool:
    """Whether a stage takes batches from the data loader: the first and the last (Megatron-LM pretrain_gpt.py, get_batch)."""
    return any(chunk.embedding or chunk.head for chunk in chunks)


def masks(software: Software, chunks: Sequence[Chunk]) -> bool:
    """Whether a stage holds the causal mask: every one until October 2023 (Megatron-LM a0e190ca), then those with batches."""
    return software.buffers.attention_mask and (has_batch(chunks) or software.family == "megatron-2021")


def mask_bytes(assembly: Assembly, chunks: list[Chunk]) -> Num:
    """The causal mask of a micro-batch, made by the data loader: one byte per pair of positions on this rank."""
    shard = assembly.shard
    return shard.batch * shard.seq * shard.kv_seq if masks(assembly.job.software, chunks) else 0.0


def batches(assembly: Assembly, chunks: list[Chunk]) -> list[StageBuffer]:
    """The mask of the current micro-batch, or all micro-batches of the step with their masks where the ends keep them."""
    job, shard, mask = assembly.job, assembly.shard, mask_bytes(assembly, chunks)
    if not job.software.buffers.batches_stay or not has_batch(chunks):
        return [*one_buffer("attention mask", mask, MASK)]
    all_of = job.microbatches * (mask + TOKEN * shard.batch * shard.seq)
    return [*one_buffer("micro-batches of the step", all_of, BATCHES, stays=True)]


def of_pipeline(assembly: Assembly, chunks: list[Chunk]) -> list[StageBuffer]:
    """Boundary tensors that a stage holds besides those of micro-batches in flight.

    Between steps every chunk but the first keeps the last input that it received, and its gradient. At the peak of a micro-batch
    the gradient sent last is still bound, and a receive is in flight; with virtual stages one more. The first stage of a pipeline
    without virtual stages neither receives inputs nor sends gradients. torch's stages make a buffer for every micro-batch that
    they receive, and for its gradient, and keep them.
    """
    job, one = assembly.job, assembly.boundary_bytes
    if job.parallelism.pp == 1:
        return []
    if job.software.family in EAGER_TORCH:
        sides = sum((not chunk.embedding) + (not chunk.head) for chunk in chunks)
        size = job.microbatches * sides * one
        return [*one_buffer("receive buffers of all micro-batches", size, RECEIVED, stays=True)]
    if not job.software.buffers.stage_inputs_stay:
        return []
    inputs = sum(not chunk.embedding for chunk in chunks)
    under_way = 0.0 if inputs == 0 else 3.0 if job.parallelism.vpp > 1 else 2.0
    return [
        *one_buffer("inputs of the stage and their gradients", 2.0 * inputs * one, INPUTS, stays=True, at_peak=False),
        *one_buffer("sends and receives in flight", under_way * one, SENDS),
    ]


def deferred_wgrad_bytes(assembly: Assembly, chunks: list[Chunk]) -> Num:
    """What the head's deferred weight gradients keep in a pipeline: gradients of logits, and inputs, of earlier micro-batches.

    The head's input refers to its graph, at whose root is the input that the stage received, with its gradient. That of the last
    of these micro-batches is counted as the one sent last where all wait (`of_pipeline`).
    """
    job, limit = assembly.job, assembly.job.software.buffers.deferred_head_wgrads
    if job.parallelism.pp == 1 or not any(chunk.head for chunk in chunks):
        return 0.0
    earlier, one = job.microbatches - 1.0, assembly.boundary_bytes
    waiting = minimum(1.0 * limit, earlier)
    sent = where((earlier > 0.0) & (earlier <= limit), one, 0.0)
    return waiting * (assembly.head.sizes["head.logits"] + 3.0 * one) - sent


def earlier_logits_bytes(assembly: Assembly, chunks: list[Chunk]) -> Num:
    """Logits that a trainer with alternating output buffers keeps besides those of the current one, in the compute dtype."""
    job = assembly.job
    if not job.software.buffers.logits_stay or not any(chunk.head for chunk in chunks):
        return 0.0
    ranks = job.parallelism.tp if job.software.comm.gathered_logits else 1.0
    return where(job.microbatches > 1, ranks * assembly.head.sizes["head.logits"], 0.0)


def grow_only(assembly: Assembly, stage: int) -> list[StageBuffer]:
    """Gradients of a stage that are allocated once and kept, and what its modules and pieces of layers refer to."""
    dummies, (maps, graphs, pieces) = dummy_wgrad_bytes(assembly, stage), stage_experts(assembly, stage)
    return [
        *one_buffer("dummy weight gradients", dummies, DUMMIES, stays=True),
        *one_buffer("routing maps of token dispatchers", maps, MAPS, stays=True),
        *one_buffer("graphs referenced by token dispatchers", graphs, GRAPHS, stays=True, at_peak=False),
        *one_buffer("gradients of layers run in pieces", pieces, PIECES),
    ]


def gradient_copies(job: Job, states: States) -> list[StageBuffer]:
    """Fp32 copies of half-precision gradients; where they are kept, also the half-precision gradients.

    Megatron-LM of March to July 2021 held 22 bytes a parameter in backward: weight 2, gradient 2, the last step's gradient 2, its
    fp32 copy 4, master weight 4, moments 8.
    """
    copies, kept = gradient_copy_bytes(job, states), job.software.buffers.gradient_copies == "kept"
    source, old = (COPIES_KEPT, states.gradients_bytes) if kept and copies else (COPIES, 0.0)
    return [
        *one_buffer("fp32 copies of the gradients", copies, source, stays=True, at_peak=kept, carried=kept),
        *one_buffer("gradients of the previous step", old, OLD_GRADIENTS, carried=True),
    ]


def gradient_copy_bytes(job: Job, states: States) -> Num:
    """Fp32 copies of half-precision main gradients, for the parameters whose states a device holds."""
    software = job.software
    if software.buffers.gradient_copies == "none" or software.states.master_dtype != "fp32":
        return 0.0
    if software.bytes_of(software.states.main_grad_dtype) == FP32:
        return 0.0
    return FP32 * states.owned
