"""torch's ring attention under a fake process group: what it exchanges, and how much lives for the moment.

torch dispatches it for CUDA kernels alone (_context_parallel/_attention.py), so its two loops are called with the CPU's flash
attention in their place. Rank is the last one, which merges most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jobs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from steptime.answer.result import estimate
from steptime.bench.runs.probes import Collectives, IssuedCollective, LiveBytes
from steptime.model.ops import Attention

BATCH, SEQLEN, HEADS, HEAD = 2, 512, 4, 64
METHODS = {"all_gather": cp_attention._RotateMethod.ALL_GATHER, "p2p": cp_attention._RotateMethod.ALL_TO_ALL}


class Kernels:
    """The CPU's flash attention as the ring calls it, counted."""

    def __init__(self) -> None:
        self.flops: list[int] = []

    def forward(self, q, k, v, *, is_causal):
        self.flops.append(4 * q.numel() * k.shape[2] // (2 if is_causal else 1))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    def backward(self, grad_out, *, query, key, value, out, logsumexp, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        )


class Seen(NamedTuple):
    """One layer's attention, forward and backward."""

    forward: Counter[IssuedCollective]
    backward: Counter[IssuedCollective]
    flops: list[int]
    peaks: tuple[int, int]


@contextmanager
def last_of(cp: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=cp - 1, world_size=cp, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def run(cp: int, how: str) -> Seen:
    kernels = Kernels()
    shape = (BATCH, SEQLEN // cp, HEADS, HEAD)  # heads come after positions out of a projection
    q, k, v, grad = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    before = cp_attention._cp_options.rotate_method
    cp_attention._cp_options.rotate_method = METHODS[how]
    try:
        with last_of(cp) as ranks:
            with Collectives() as forward, LiveBytes([q, k, v]) as ahead:
                out, lse, *_ = cp_attention._templated_ring_attention(
                    ranks, 2, kernels.forward, q, k, v, is_causal=True
                )
            with Collectives() as backward, LiveBytes([q, k, v, out, lse, grad]) as back:
                cp_attention._templated_ring_attention_backward(
                    ranks, 2, kernels.backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
                )
    finally:
        cp_attention._cp_options.rotate_method = before
    return Seen(forward.calls, backward.calls, kernels.flops, (ahead.peak.total, back.peak.total))


def job(cp: int, how: str):
    wide = HEADS * HEAD
    model = {"n_layers": 1, "hidden_sz": wide, "inter_sz": wide, "n_q_heads": HEADS, "vocab_sz": 128}
    return jobs.job(model, gbs=BATCH, seqlen=SEQLEN, microbatch_sz=BATCH, software="fsdp2", cp=cp, cp_comm_type=how)


cases = pytest.mark.parametrize(("cp", "how"), [(cp, how) for cp in (2, 4, 8) for how in METHODS])


@cases
def test_collectives(cp, how):
    """What torch issues is what the table says: a ring is an all-to-all that sends to the next rank alone."""
    seen, stated = run(cp, how), Counter()
    for row in estimate(job(cp, how)).collectives:
        if row.axis == "cp":
            kind = "all_to_all" if row.kind == "send_recv" else row.kind
            stated[kind, row.bytes] += row.count_per_step
    assert Counter({(c.kind, c.bytes): n for c, n in (seen.forward + seen.backward).items()}) == +stated


@cases
def test_flops(cp, how):
    """A call per block, the causal one first, all of the same work."""
    seen, answer = run(cp, how), estimate(job(cp, how))
    op = next(op for op in answer.assembly.kinds[0].ops if isinstance(op, Attention))
    assert len(seen.flops) == op.calls == cp
    assert sum(seen.flops) == op.full_flops * op.causal_share


@cases
def test_what_lives_for_the_moment(cp, how):
    """Peaks of forward and backward: q, k, v (and the outputs), what the kernel is said to make and to hold besides."""
    op = next(op for op in estimate(job(cp, how)).assembly.kinds[0].ops if isinstance(op, Attention))
    one = BATCH * HEADS * SEQLEN // cp * HEAD * 2  # bytes of q, k, v or out
    lse = BATCH * HEADS * SEQLEN // cp * 4
    forward, backward = run(cp, how).peaks
    assert forward == 3 * one + (one + lse) + op.forward_temp_bytes
    early = one if (cp, how) == (2, "all_gather") else 0  # with two ranks the second step is the last, and lighter
    assert backward == 3 * one + (one + lse) + one + 3 * one + op.backward_temp_bytes - early
