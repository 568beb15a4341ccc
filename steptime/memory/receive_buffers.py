"""Buffers of exchanges of experts' rows outside the caching allocator, which other ranks write."""

from __future__ import annotations

from steptime.base.num import Num, minimum
from steptime.job.job import Job

SCORE_BYTES = 4.0
"""Bytes of a score in HybridEP's buffer."""
TURNS = 2.0
"""Buffers of MinimalAsyncEP, which take turns to receive rows (pytorch/torchtitan@6b960233 torchtitan/distributed/
minimal_async_ep.py, _HIDDEN_RECV_BUFFER_COUNT)."""


def receive_buffer_bytes(job: Job) -> Num:
    """Bytes on one device; T tokens of each of R ranks, h hidden.

    MinimalAsyncEP: room for R T min(k, experts of a rank) rows, twice (init_buffer). HybridEP: R T rows, as many as if every
    token came to one rank, and the score of each for every expert of its NVLink domain; dispatch and combine share them
    (deepseek-ai/DeepEP@94a9f8f csrc/hybrid_ep/buffer/intranode.cu, init and allocate_dispatch_buffers; use_shared_buffer).
    DeepEP's own buffers are not counted.
    """
    how, moe, p = job.software.moe, job.model.moe, job.parallelism
    if moe is None or how.dispatcher != "flex" or how.flex_backend == "deepep":
        return 0.0
    split = p.cp * (p.tp if job.sp else 1)
    ranks, local = p.ep * p.etp, moe.n_experts / p.ep
    tokens = 1.0 * job.data.microbatch_sz * job.data.seqlen / split * ranks
    row = job.software.itemsize * (moe.latent_sz or job.model.hidden_sz)
    if how.flex_backend == "minimal_async_ep":
        return TURNS * tokens * minimum(moe.experts_per_token, local) * row
    return tokens * (row + SCORE_BYTES * local * minimum(ranks, job.machine.tiers[0].size))
