"""The parts of a job that its torch modules need: each stage's model chunk, and the blocks that are checkpointed together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from steptime.bench.runs.operands import torch_dtype
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.model.model import Model
from steptime.software.recomputation import Recomputation


class ModulePlan(NamedTuple):
    """The parts of a job that its modules need."""

    model: Model
    seqlen: int
    dtype: torch.dtype
    """Dtype of compute."""
    flash: bool
    """Attention by scaled_dot_product_attention; else by explicit products and a softmax."""
    wide_loss: bool
    """Cross entropy of an fp32 copy of the logits; else of the logits themselves."""
    recompute: Recomputation


def plan_of(job: Job) -> ModulePlan:
    """The module plan of a job."""
    s = job.software
    flash, wide = s.kernels.attention_impl == "flash", s.kernels.loss_impl == "composite"
    return ModulePlan(job.model, job.data.seqlen, torch_dtype(s.compute_dtype), flash, wide, job.recompute)


class CheckpointSpan(NamedTuple):
    """Consecutive blocks that run as one: checkpointed together, or not checkpointed."""

    blocks: int
    checkpointed: bool


class ModelSlice(NamedTuple):
    """One model chunk: `layers` blocks from number `first` on, possibly with embedding or head."""

    depth: int
    first: int
    spans: list[CheckpointSpan]
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return sum(span.blocks for span in self.spans)


def slices(job: Job) -> list[ModelSlice]:
    """The pp*vpp chunks of a job in depth order."""
    found: list[ModelSlice] = []
    first = 0
    for chunk in Assembly(job).chunks:
        spans = spans_of(job.recompute, chunk.depth, chunk.layers)
        found.append(ModelSlice(chunk.depth, first, spans, chunk.embedding, chunk.head))
        first += chunk.layers
    return found


def spans_of(recompute: Recomputation, depth: int, layers: int) -> list[CheckpointSpan]:
    """Full recomputation, uniform: groups of n_layers, each checkpointed; block: the first n_layers, one by one."""
    if recompute.granularity != "full":
        return [CheckpointSpan(1, checkpointed=False)] * layers
    count = recompute.n_layers[depth]
    if recompute.method == "block":
        return [CheckpointSpan(1, checkpointed=i < count) for i in range(layers)]
    groups, rest = divmod(layers, count)
    return [CheckpointSpan(blocks, checkpointed=True) for blocks in [count] * groups + [rest] * bool(rest)]
