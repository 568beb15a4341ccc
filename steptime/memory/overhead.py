"""Device memory outside the allocator, and what the allocator reserves beyond what is allocated."""

from __future__ import annotations

from steptime.base.num import Num, maximum, where
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
CACHED_GROUPS = 2.55
"""Memory reserved beyond allocated under FSDP without tensor parallelism, in units of the largest parameter group, gathered; on
top of the sharded gradients that are not allocated at the peak. A cached block serves only the stream that allocated it
(c10/cuda/CUDACachingAllocator.cpp, get_free_block). Reduce-scatters allocate their outputs, which become the gradients, on a
stream of their own (torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce; of the first FSDP
_runtime_utils.py, _post_backward_hook), where the memory stays when gradients are freed; all-gathers too have one, which holds
the largest group. The rest, 1.55 groups, is fitted: the median of torchtitan's dense rows marked fit
(pytorch/torchtitan@31a17bfd and its pull requests), all of FSDP2, that ran compiled, with expandable segments and without a
traced graph; most ask for 2.4 to 2.7, with 30 and with 109 GiB of activations. With one vote per cell it is 2.44, of eager runs
1.85. Without expandable segments a fifth of activations and transients comes on top; with tensor parallelism that fifth alone is
nearer."""


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
    states_bytes: Num,
    moving_bytes: Num,
    group_bytes: Num | None = None,
    gradients_to_come: Num = 0.0,
    *,
    expandable: bool = False,
    most_bytes: Num = 0.0,
) -> Num:
    """Memory that the caching allocator holds at the peak.

    `group_bytes`: the largest group of FSDP, gathered; 0 where a traced graph gathers, whose memory is all in the pool of the
    stream that computes. `gradients_to_come`: sharded gradients that are not allocated then. `expandable`: segments are
    expandable, so that memory not held by FSDP's streams is reused for any size. `most_bytes`: most activations and transients of
    any moment; those of an earlier one, with fewer gradients, are reserved too, since gradients have memory of their own.
    """
    if group_bytes is None:
        return states_bytes + moving_bytes * (1.0 + FRAGMENTATION)
    pieces = 1.0 if expandable else 1.0 + FRAGMENTATION
    of_streams = gradients_to_come + CACHED_GROUPS * group_bytes
    apart = maximum(moving_bytes, most_bytes) * pieces + of_streams
    return states_bytes + where(group_bytes == 0.0, moving_bytes * pieces, apart)
