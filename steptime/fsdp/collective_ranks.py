"""The ranks of FSDP's collectives."""

from __future__ import annotations

from steptime.job.job import Job
from steptime.job.mesh import Group, GroupAxis, fewer_shards, group


def shard_group(job: Job, kind: str = "dense") -> Group:
    """The ranks that share one copy of the model, or of its experts."""
    axis: GroupAxis = "expert_shards" if kind == "expert" else "shards"
    return group(job.parallelism, axis, n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)


def copy_group(job: Job) -> Group:
    """The ranks that hold the same shard (HSDP)."""
    return group(job.parallelism, "replicas", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)


def backward_group(job: Job) -> Group:
    """The ranks among which backward gathers a layer."""
    return fewer_shards(job.parallelism, job.cross_dc.n_dcs if job.cross_dc else 1)
