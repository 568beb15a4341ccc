"""Device memory outside the allocator, and what the allocator reserves beyond what is allocated."""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num, maximum
from steptime.base.rows import Overhead
from steptime.job.job import Job
from steptime.memory.receive_buffers import receive_buffer_bytes

GIB = 2.0**30
"""Bytes of a GiB."""
CONTEXT_BYTES = 0.5 * GIB
"""CUDA context and loaded kernels with lazy loading: 0.47 GiB on A100 (stas00/ml-engineering@744d01e,
training/performance/README.md)."""
COMMUNICATOR_BYTES = 0.25 * GIB
"""Channel buffers of one NCCL communicator. 544 to 688 MB for a group of GPUs of one node is reported in NVIDIA/nccl#964 with
every protocol buffered eagerly; newer releases allocate lazily. A quarter GiB per group in use is assumed."""
FRAGMENTATION = 0.2
"""Reserved beyond allocated, as a fraction of activations and transients: states are large and contiguous.
Ten dense runs on 8 x B200 that report both (MooreThreads/SimuMax@4dcaae5) are between 0.14 and 0.6, the long ones lowest; their
reserved over allocated memory is 1.03 to 1.09."""
EXPANDABLE_FRAGMENTATION = 0.024
"""The same with expandable segments, in which only gaps that no tensor fits into are lost: the share with which the estimate is
what was reserved. The median of 16 cells of torchtitan's dense rows marked fit (pytorch/torchtitan@31a17bfd, its pull requests
and branches; FSDP2 without a traced graph; rows that count, the mean of a cell's rows being its one vote); 13 of 16 are between
0.012 and 0.037. The allocator's rules, run over the allocations of two steps of Llama-3 8B, and of Qwen3 14B and 32B with 12
layers, lose 0.5 to 2.8 GiB, 0.04 to 0.24 of their activations and transients."""


class StreamPools(NamedTuple):
    """What FSDP's streams hold [B]. A cached block serves only the stream that allocated it (`fsdp.moments`)."""

    gradients_to_come: Num
    """Sharded gradients that are not allocated at the peak: reductions return them, so they have memory of their own."""
    most_bytes: Num
    """Most activations and transients of any moment in the memory of the stream that computes."""
    gathers_bytes: Num
    """Most bytes of what all-gathers send and return."""


def overhead(job: Job) -> Overhead:
    """The context, one communicator per process group, and the buffers that exchanges of experts' rows have besides."""
    own = job.machine.accelerator.context_bytes
    context = CONTEXT_BYTES if own is None else own
    return Overhead(context, communicating_groups(job) * COMMUNICATOR_BYTES, receive_buffer_bytes(job))


def communicating_groups(job: Job) -> Num:
    """Process groups that communicate; a2a+p2p has two for a sequence."""
    p = job.parallelism
    of_sequence = 2 if job.cp_comm_type == "a2a+p2p" else 1
    groups = sum([1 * (p.tp > 1), 1 * (p.pp > 1), 1 * (p.dp * p.cp > 1), of_sequence * (p.cp > 1), 1 * (p.ep > 1)])
    return groups + 1 * (job.model.tie_embeddings and p.pp > 1)


def reserved_bytes(
    states_bytes: Num, moving_bytes: Num, pools: StreamPools | None = None, *, expandable: bool = False
) -> Num:
    """Memory that the caching allocator holds at the peak.

    `states_bytes` and `moving_bytes`: what is allocated then. `pools`: of torch's FSDP, whose streams each have memory of their
    own; None where one stream allocates everything. `expandable`: segments are expandable. It is never less than what is
    allocated: what a reduction returns beside gradients of earlier micro-batches is in none of `pools`.
    """
    pieces = 1.0 + (EXPANDABLE_FRAGMENTATION if expandable else FRAGMENTATION)
    if pools is None:
        return states_bytes + moving_bytes * pieces
    by_pool = states_bytes + pools.gradients_to_come + pools.most_bytes * pieces + pools.gathers_bytes
    return maximum(states_bytes + moving_bytes, by_pool)
