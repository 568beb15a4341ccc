"""One device's share of a job."""

from __future__ import annotations

from dataclasses import replace

from steptime.job.job import Job
from steptime.model.shard import Shard, padded_vocab


def shard_of(job: Job) -> Shard:
    """One device's share of one micro-batch of the job."""
    p, data = job.parallelism, job.data
    return Shard(
        batch=1.0 * data.microbatch_sz,
        seq=data.seqlen / p.cp,
        kv_seq=float(data.seqlen),
        tp=p.tp,
        sp=job.sp,
        vocab=padded_vocab(job.model.vocab_sz, p.tp, job.software.layout.vocab_multiple),
        software=job.software,
        cp=p.cp,
        cp_comm_type=job.cp_comm_type,
        cp_a2a=p.cp_a2a,
        ep=p.ep,
        etp=p.etp,
    )


def in_bf16_of(shard: Shard) -> Shard:
    """The share of a layer that a recipe leaves in bf16."""
    return replace(shard, software=shard.software.model_copy(update={"precision": "bf16"}))
