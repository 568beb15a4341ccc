"""What a job's settings say about FSDP: asked of every job, so it imports nothing that only FSDP needs."""

from __future__ import annotations

from steptime.job.fsdp_rules import reduce_dtype
from steptime.job.job import Job
from steptime.job.mesh import ReduceDtype
from steptime.software.frameworks import framework_of


def applies(job: Job) -> bool:
    """Whether parameters are sharded and gathered group by group."""
    return job.zero_level == 3 or job.parallelism.fsdp is not None


def by_torch(job: Job) -> bool:
    """Whether groups are those of torch's FSDP, where the job shards parameters: not Megatron-FSDP's, nor DeepSpeed's."""
    return framework_of(job.software.name, job.software.family).fully_shards


def reduced_in(job: Job) -> ReduceDtype:
    """Dtype in which gradients are reduced."""
    return reduce_dtype(job.parallelism.fsdp, job.software)


def unsynced(job: Job) -> bool:
    """Whether several micro-batches of a step add up whole gradients, which the last one reduces (no_sync).

    Under a pipeline the schedule does so.
    """
    if job.parallelism.pp > 1 or job.single_microbatch or not applies(job):
        return False
    if job.parallelism.fsdp and job.parallelism.fsdp.wrap == "parameter":
        return False  # the graph of a micro-batch reduces them
    return syncs_last(job)


def syncs_last(job: Job) -> bool:
    """Whether gradients are reduced once a step; of a pipeline with several passes, after the last of them.

    torch reduces them after each pass. NeMo AutoModel's experts keep whole gradients and parameters until the optimizer's step
    (NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/fsdp_mixin.py, get_is_optim_step).
    """
    said = job.parallelism.fsdp.no_sync if job.parallelism.fsdp else None
    return job.software.layout.no_sync if said is None else said


def ends_alike(job: Job) -> bool:
    """Whether embedding and head are in one group, or each parameter in its own, whatever `Fsdp.ends` says."""
    fsdp = job.parallelism.fsdp
    other = fsdp is not None and (fsdp.version == 1 or fsdp.wrap != "block")
    return other or job.parallelism.pp > 1 or unsynced(job) or job.model.tie_embeddings


def pooled(job: Job) -> bool:
    """Whether torch's FSDP gathers and reduces group by group on streams of its own; jobs of it are sharded."""
    fsdp = job.parallelism.fsdp
    by_group = fsdp is None or fsdp.wrap not in {"model", "parameter"}
    return by_torch(job) and job.software.name != "xla" and by_group
