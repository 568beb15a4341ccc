"""One transformer block of a config: seconds forward and backward, and bytes saved, under each recomputation."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from steptime.base.config import ConfigError
from steptime.bench.runnable import RECOMPUTES, RecomputeChoice, alone, unsupported
from steptime.bench.runs.chunks import plan_of
from steptime.bench.runs.clock import Timing, measure
from steptime.bench.runs.modules import TorchBlock, building, tables
from steptime.bench.runs.probes import Saved
from steptime.job.job import Job


class BlockRow(NamedTuple):
    """One block, unsharded, on one micro-batch."""

    recompute: RecomputeChoice
    dtype: str
    batch: int
    seqlen: int
    forward: Timing
    backward: Timing
    """Includes recomputation."""
    saved_bytes: int
    """Bytes that forward keeps for backward, each storage once, without parameters and tables."""


class OneBlock:
    """A block under one recomputation, with its input (b, s, h) and the gradient of its output."""

    def __init__(self, job: Job, device: torch.device) -> None:
        """Build it with random weights, on the device."""
        plan = plan_of(job)
        self.recomputes = plan.recompute.granularity == "full"
        with building(plan.dtype, device):
            self.block, self.tables = TorchBlock(plan), tables(plan)
        shape = (job.data.microbatch_sz, job.data.seqlen, job.model.hidden_sz)
        self.x = torch.randn(shape, dtype=plan.dtype, device=device, requires_grad=True)
        self.grad = torch.randn(shape, dtype=plan.dtype, device=device)

    def forward(self) -> Tensor:
        """One forward; its graph lives as long as the returned tensor."""
        run = partial(checkpoint, self.block, use_reentrant=False) if self.recomputes else self.block
        out: Tensor = run(self.x, *self.tables)
        return out

    def saved(self) -> Saved:
        """Bytes that one forward keeps."""
        with Saved([*self.block.parameters(), *(t for t in self.tables if t is not None)]) as saved:
            self.forward()
        return saved

    def timings(self, seconds: float) -> tuple[Timing, Timing]:
        """Forward and backward, `seconds` each."""
        outs: list[Tensor] = []

        def prepare() -> None:
            self.block.zero_grad(set_to_none=True)
            self.x.grad = None
            outs[:] = [self.forward()]

        forward = measure(self.forward, self.x.device, seconds=seconds)
        return forward, measure(lambda: outs.pop().backward(self.grad), self.x.device, seconds=seconds, before=prepare)


def run_block(job: Job, device: torch.device, *, seconds: float = 0.5) -> list[BlockRow]:
    """Time one block, whole whatever the job's layout, under no, selective and full recomputation; `seconds` each direction.

    Raises:
        ConfigError: plain torch has no such kernels.
    """
    rows = []
    for recompute in RECOMPUTES:
        one = alone(job, recompute, device.type)
        if problems := unsupported(one, device.type):
            raise ConfigError(problems)
        block = OneBlock(one, device)
        dtype, data = one.software.compute_dtype, one.data
        saved = block.saved().bytes
        rows.append(BlockRow(recompute, dtype, data.microbatch_sz, data.seqlen, *block.timings(seconds), saved))
    return rows
