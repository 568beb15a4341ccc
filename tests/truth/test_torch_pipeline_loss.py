"""torchtitan's loss in chunks in a pipeline's last stage: collectives and peaks of torch's own schedules.

Collectives have zero tolerance.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_torch_chunked_loss import chunked_loss
from test_torch_pipeline import DP, gathered_and_reduced
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch_blocks import DTYPES, Kernels, Transformer
from torch_pipeline import Part, Pipeline, Rank, Step, rank_of, watched

from steptime import fsdp
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.buffers import of_pipeline
from steptime.model.model import Model
from steptime.timing.step_time import pipeline_fsdp, step_time

SEQLEN, BATCH = 64, 2
MODEL = Model(n_layers=8, hidden_sz=64, inter_sz=160, n_q_heads=4, n_kv_heads=2, head_dim=16, vocab_sz=2048)
NORM, WEIGHT = 64, 2048 * 64
"""Elements of the final norm and of the head."""
SCHEDULES = {
    "1f1b": Pipeline("1F1B", "1f1b", 2, 1, 4),
    "1f1b, resharded": Pipeline("1F1B", "1f1b", 2, 1, 4, reshard=True),
    "1f1b of 4": Pipeline("1F1B", "1f1b", 4, 1, 8),
    "1f1b, bf16 reduction": Pipeline("1F1B", "1f1b", 2, 1, 4, reduce="bf16"),
    "gpipe": Pipeline("GPipe", "gpipe", 2, 1, 3),
    "interleaved": Pipeline("Interleaved1F1B", "interleaved", 2, 2, 4),
    "zero bubble": Pipeline("InterleavedZeroBubble", "zero_bubble", 2, 1, 4),
}


class Body(Part):
    """A chunk whose head the loss runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        return x if self.norm is None else self.norm(x)


class LastStage(Rank):
    """The last stage as torchtitan wraps it (torchtitan/distributed/fsdp.py@b5bcd76c, apply_fsdp_to_decoder)."""

    def __init__(self, model, kernels, of, rank, mesh, tokens) -> None:
        self.tokens, self.batch, self.seqlen = tokens, tokens.shape[0] // of.micro_batches, tokens.shape[1]
        depths = of.pp * of.vpp
        self.depths = [rank + of.pp * chunk for chunk in range(of.vpp)]
        policy = MixedPrecisionPolicy(kernels.dtype, DTYPES[of.reduce], cast_forward_inputs=False)
        whole, said = Transformer(model, kernels, self.seqlen), {"mesh": mesh["dp"], "mp_policy": policy}
        self.parts = [Body(whole, depth, depths, kernels.recompute) for depth in self.depths]
        head = self.parts[-1].head
        for part in self.parts:
            if part.head is not None:
                fully_shard([part.norm, part.head], **said, reshard_after_forward=False)
            for block in part.blocks:
                fully_shard(block, **said, reshard_after_forward=of.reshard)
            fully_shard(part, **said)
        self.stages = [
            PipelineStage(
                part, depth, depths, torch.device("cpu"), group=mesh["pp"].get_group(),
                input_args=self.shape(model, kernels), output_args=self.shape(model, kernels),
            )
            for part, depth in zip(self.parts, self.depths, strict=True)
        ]  # fmt: skip
        kind = get_schedule_class(of.torch)
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if several else self.stages[0],
            n_microbatches=of.micro_batches,
            loss_fn=lambda hidden, labels: chunked_loss(hidden, labels, head, by_token=True),
            scale_grads=False,
        )
        self.schedule._warmup_p2p = self.shapes_are_known
        self.first, self.last = False, True


def job_of(of: Pipeline) -> Job:
    said = of.job(MODEL, Kernels(), SEQLEN, BATCH, DP)
    performance = said.performance.model_copy(update={"software": "torchtitan", "loss_chunks": 8})
    return Job(
        model=said.model, parallelism=said.parallelism, performance=performance, data=said.data, hardware="mi300x-node"
    )


@cache
def last_stage(name: str) -> Step:
    """Its second step: in the first one the head is gathered once less."""
    of = SCHEDULES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_pipeline.Rank", LastStage)
        with rank_of(MODEL, Kernels(), of, of.pp - 1, dp=DP, seqlen=SEQLEN, batch=BATCH) as rank:
            rank.step()
            rank.forget()
            return watched(rank)


@pytest.mark.parametrize("name", [name for name, of in SCHEDULES.items() if of.name != "zero_bubble"])
def test_peak(name):
    """The loss is the worst moment: the head's sums of a micro-batch beside the reduction of the one before, and its shards.

    The labels' views, 1,024 bytes a micro-batch, and the norm's few gradients are not counted as torch's run does.
    """
    of = SCHEDULES[name]
    assembly = Assembly(job_of(of))
    states, moment = fsdp.states(assembly)[-1], fsdp.peak_moments(assembly)[-1]
    received = sum(buffer.bytes for buffer in of_pipeline(assembly, assembly.stages[-1]))
    ours = states.params_bytes + states.gradients_bytes + moment.added_bytes + received
    assert ours == pytest.approx(last_stage(name).peak, rel=0.001)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_head_is_gathered_and_reduced_with_each_micro_batch(name):
    """m micro-batches: 2 m + 1 gathers of the head and the norm; m reductions of the head, where only the first, and all of
    gpipe, lack the norm's gradient of the backward before; one of the norm alone, at the end, which is not counted (split
    backwards leave it out).
    """
    of, seen = SCHEDULES[name], gathered_and_reduced(last_stage(name).issued)
    found = step_time(Assembly(job_of(of)))
    inside = pipeline_fsdp(found.assembly, found.pricing, found.parts).calls(of.pp - 1)
    [(root, calls)] = [
        (group, calls) for (kind, group), calls in inside.items() if kind == "root" and group.elements > WEIGHT
    ]
    m = of.micro_batches
    assert (calls.gathers, calls.reductions) == (2 * m + 1, m)
    assert fsdp.buffers(found.assembly, root).gathered == 2 * (WEIGHT + NORM)
    assert seen["all_gather", 2 * (WEIGHT + NORM)] == calls.gathers
    reduced = {
        size: seen["reduce_scatter", DTYPES[of.reduce].itemsize * size] for size in (WEIGHT + NORM, WEIGHT, NORM)
    }
    assert reduced[WEIGHT + NORM] + reduced[WEIGHT] == calls.reductions
    assert reduced[NORM] == (of.name != "zero_bubble")
    layers = sum(calls.gathers for (kind, _), calls in inside.items() if kind == "block")
    assert layers == sum(n for (kind, size), n in seen.items() if kind == "all_gather" and size < 2 * WEIGHT)
