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
from live_bytes import LiveBytes
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_attention
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from steptime.answer.result import estimate
from steptime.bench.runs.probes import Collectives, IssuedCollective
from steptime.model.ops import Attention

BATCH, SEQLEN, HEADS, HEAD = 2, 512, 4, 64
MLA = {"kind": "mla", "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
WIDTHS = {"gqa": (HEAD, HEAD), "mla": (96, 64)}
"""Widths of a head of queries and keys, and of values."""
METHODS = {"all_gather": cp_attention._RotateMethod.ALL_GATHER, "p2p": cp_attention._RotateMethod.ALL_TO_ALL}


class Kernels:
    """A flash kernel as the ring calls it, counted: it makes what one makes, and computes nothing.

    The CPU's own takes no values narrower than keys.
    """

    def __init__(self) -> None:
        self.flops: list[int] = []

    def forward(self, q, k, v, *, is_causal):
        full = 2 * q.numel() * k.shape[2] + 2 * q.numel() // q.shape[3] * v.shape[3] * k.shape[2]
        self.flops.append(full // (2 if is_causal else 1))
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        return out, q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, grad_out, *, query, key, value, out, logsumexp, is_causal):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


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


def run(cp: int, how: str, kind: str) -> Seen:
    kernels, (wide, narrow) = Kernels(), WIDTHS[kind]
    shape = (BATCH, SEQLEN // cp, HEADS)  # heads come after positions out of a projection
    q, k, v, grad = (torch.zeros(*shape, d, dtype=torch.bfloat16).transpose(1, 2) for d in (wide, wide, narrow, narrow))
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


def ring_job(cp: int, how: str, kind: str):
    wide = HEADS * HEAD
    model = {"n_layers": 1, "hidden_sz": wide, "inter_sz": wide, "n_q_heads": HEADS, "vocab_sz": 128}
    model |= {"attention": MLA} if kind == "mla" else {}
    return jobs.job(model, gbs=BATCH, seqlen=SEQLEN, microbatch_sz=BATCH, software="fsdp2", cp=cp, cp_comm_type=how)


cases = pytest.mark.parametrize(
    ("cp", "how", "kind"), [(cp, how, kind) for cp in (2, 4, 8) for how in METHODS for kind in WIDTHS]
)


@cases
def test_collectives(cp, how, kind):
    """What torch issues is what the table says: a ring is an all-to-all that sends to the next rank alone."""
    seen, stated = run(cp, how, kind), Counter()
    for row in estimate(ring_job(cp, how, kind)).collectives:
        if row.axis == "cp":
            kind = "all_to_all" if row.kind == "send_recv" else row.kind
            stated[kind, row.bytes] += row.count_per_step
    assert Counter({(c.kind, c.bytes): n for c, n in (seen.forward + seen.backward).items()}) == +stated


@cases
def test_flops(cp, how, kind):
    """A call per block, the causal one first, all of the same work."""
    seen, answer = run(cp, how, kind), estimate(ring_job(cp, how, kind))
    op = next(op for op in answer.assembly.kinds[0].ops if isinstance(op, Attention))
    assert len(seen.flops) == op.calls == cp
    assert sum(seen.flops) == op.full_flops * op.causal_share


@cases
def test_what_lives_for_the_moment(cp, how, kind):
    """Peaks of forward and backward: q, k, v (and the outputs), what the kernel is said to make and to hold besides."""
    op = next(op for op in estimate(ring_job(cp, how, kind)).assembly.kinds[0].ops if isinstance(op, Attention))
    at = BATCH * HEADS * SEQLEN // cp
    wide, narrow = (2 * at * width for width in WIDTHS[kind])  # bytes of q or k, and of v or out
    inputs, outputs = 2 * wide + narrow, narrow + 4 * at
    forward, backward = run(cp, how, kind).peaks
    assert forward == inputs + outputs + op.forward_temp_bytes
    early = wide / 2 + narrow / 2 if (cp, how) == (2, "all_gather") else 0  # with two ranks the second step is the last
    assert backward == inputs + outputs + narrow + inputs + op.backward_temp_bytes - early


@pytest.mark.parametrize("how", METHODS)
def test_a_traced_ring_waits_before_its_block(how, monkeypatch):
    """In the graph that torch.compile gets, each wait directly follows its collective; the first block comes after both."""
    monkeypatch.setattr(cp_attention._cp_options, "rotate_method", METHODS[how])
    q = torch.zeros(BATCH, HEADS, SEQLEN // 4, HEAD, dtype=torch.bfloat16)

    def block(q, k, v, *, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    with last_of(4) as ranks:
        graph = make_fx(lambda q: cp_attention._templated_ring_attention(ranks, 2, block, q, q, q, is_causal=True)[0])(
            q
        )
    names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes]
    sent = [at for at, name in enumerate(names) if name.startswith(("all_gather", "all_to_all"))]
    blocks = [at for at, name in enumerate(names) if name.startswith("_scaled_dot_product")]
    assert (len(sent), len(blocks)) == ({"all_gather": 1, "p2p": 3}[how], 4)
    assert all(names[at + 1].startswith("wait_tensor") for at in sent)
    assert all(at + 1 < block for at, block in zip(sent, blocks, strict=False))
