"""What torch itself counts, compared with the estimate: rows whose two figures must be exactly equal.

On a CPU, without a clock: parameters and FLOPs on the meta device, saved storages with fake tensors, the peak of a step with
real, small ones; collectives on the ranks of the job.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from steptime import fsdp
from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.bench.reduce import gathered
from steptime.bench.runnable import RECOMPUTES, alone, as_run, unsupported
from steptime.bench.runs.block import OneBlock
from steptime.bench.runs.engines import lay_out
from steptime.bench.runs.modules import whole
from steptime.bench.runs.probes import Collectives, Saved
from steptime.bench.runs.step import allocated
from steptime.bench.runs.training import Trainer
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.part_memories import PartMemories

FEW = 2
"""Layers of a shortened model."""
CountUnit: TypeAlias = Literal["parameters", "FLOP", "B", "calls"]


CallCounts: TypeAlias = "Counter[tuple[str, int, int]]"
"""(kind, ranks, bytes of the full tensor) -> number of calls."""


class TorchCount(NamedTuple):
    """One figure: the estimate's, and torch's."""

    name: str
    unit: CountUnit
    predicted: float
    observed: float

    @property
    def difference(self) -> float:
        """Predicted minus observed: must be 0."""
        return self.predicted - self.observed


def truths(job: Job) -> list[TorchCount]:
    """Any config that plain torch has kernels for, in a few seconds of one process; the peak where there is only one.

    LayerNorm is counted in fp32: below it the CPU's kernel keeps narrower statistics than CUDA's.

    Raises:
        ConfigError: plain torch has no such kernels.
    """
    if problems := unsupported(as_run(job, "cpu")[0], "cpu"):
        raise ConfigError(problems)
    if job.model.norm == "layernorm":
        dtypes = ("precision", "param_dtype", "main_grad_dtype", "moment_dtype")
        job = job.replace(**{f"performance.{key}": "fp32" for key in dtypes})
    one = alone(job, job.recompute.granularity)
    short = one.replace(**{"model.n_layers": min(FEW, job.model.n_layers)})
    rows = [parameters(one), flops(short), *saved_by_block(one), saved_by_model(short)]
    return rows if dist.is_initialized() and dist.get_world_size() > 1 else [*rows, *peak(one)]


def few(job: Job) -> str:
    """Number of layers, in words."""
    return counted(job.model.n_layers, "layer")


def parameters(job: Job) -> TorchCount:
    """Parameter elements of the whole model."""
    found = sum(p.numel() for p in whole(job, "meta").parameters())
    return TorchCount("parameters of the model", "parameters", estimate(job).params.total, found)


def flops(job: Job) -> TorchCount:
    """Forward and backward of one micro-batch, attention in full; on the meta device it runs as matrix products."""
    job = job.replace(**{"performance.activation_checkpointing_type": "none"})
    module = whole(job, "meta")
    ids = torch.zeros(job.data.microbatch_sz, job.data.seqlen, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(ids, ids).backward()
    stated = estimate(job).flops.model_per_step_full_attention
    return TorchCount(f"FLOPs, {few(job)}, attention in full", "FLOP", stated, counter.get_total_flops())


def saved_by_block(job: Job) -> list[TorchCount]:
    """Bytes that one block keeps for backward, under each recomputation."""
    rows = []
    for recompute in RECOMPUTES:
        one = alone(job, recompute)
        assembly = Assembly(one)
        memories, layer = PartMemories(assembly), assembly.kinds[0]
        stated = memories.checkpointed(((layer, 1),)).saved if recompute == "full" else memories.selective[layer].saved
        with FakeTensorMode():
            found = OneBlock(one, torch.device("cpu")).saved().bytes
        rows.append(TorchCount(f"saved by a block, recompute {recompute}", "B", stated, found))
    return rows


def saved_by_model(job: Job) -> TorchCount:
    """Bytes that embedding, blocks, head and loss keep for backward of one micro-batch, without scalars."""
    assembly = Assembly(job)
    with FakeTensorMode():
        module = whole(job)
        tokens, targets = (torch.zeros(job.data.microbatch_sz, job.data.seqlen, dtype=torch.long) for _ in range(2))
        with Saved([*module.parameters(), *module.tables]) as saved:
            module(tokens, targets)
    found = sum(t.bytes for t in saved.tensors if t.shape)
    return TorchCount(
        f"saved by the model, {few(job)}", "B", PartMemories(assembly).chunk(assembly.chunks[0]).saved, found
    )


def peak(job: Job) -> list[TorchCount]:
    """The peak of a whole step, on a small copy of the model.

    None where the estimate is known to be off: under full recomputation torch sums a bias's gradient after its input is freed.
    """
    if job.recompute.granularity == "full" and job.model.bias:
        return []
    small = shrunk(job)
    trainer = Trainer(lay_out(small, torch.device("cpu")))
    trainer.step()
    found, _ = allocated(trainer)
    assert found is not None
    return [TorchCount("peak of a step, small model", "B", estimate(small).memory.peak_allocated_bytes, found)]


def shrunk(job: Job) -> Job:
    """A small model of the same kind: few layers, heads in the same groups, short sequences.

    Its MLP is wide, so that no temporary of the CPU's RMSNorm, which is a single kernel elsewhere, is the peak.
    """
    model = job.model
    groups = model.n_q_heads // model.n_kv_heads
    kv_heads = max(1, min(model.n_kv_heads, 4 // groups))
    heads, width = kv_heads * groups, min(model.head_dim, 16)
    positions = None if model.max_positions is None else min(model.max_positions, 64)
    small = {
        "n_layers": min(FEW, model.n_layers),
        "n_q_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": width,
        "hidden_sz": heads * width,
        "inter_sz": 8 * heads * width,
        "vocab_sz": min(model.vocab_sz, 251),
        "max_positions": positions,
    }
    length = min(job.data.seqlen, 64)
    data = {"data.seqlen": length, "data.microbatch_sz": 1, "data.gbs": 1}
    return job.replace(**{f"model.{key}": value for key, value in small.items()}, **data)


def layout_truths(trainer: Trainer) -> list[TorchCount]:
    """Parameters of the fullest rank of each stage, and the collectives of one step; every rank of the job calls this."""
    laid = trainer.laid
    with Collectives() as seen:
        trainer.step()
    calls: CallCounts = Counter({(c.kind, c.ranks, c.bytes): n for c, n in seen.calls.items()})
    ranks = gathered((laid.n_params, calls))
    assembly = Assembly(laid.job)
    per_stage = len(ranks) // laid.job.parallelism.pp
    rows = []
    for stage, chunks in enumerate(assembly.stages):
        fullest = max(count for count, _ in ranks[stage * per_stage : (stage + 1) * per_stage])
        sharded = fsdp.sharded_elements(assembly, chunks) if fsdp.applies(laid.job) else None
        stated = sum(assembly.local_params(c) for c in chunks) if sharded is None else sharded
        rows.append(TorchCount(f"parameters of a rank, stage {stage}", "parameters", stated, fullest))
    return [*rows, *collectives(laid.job, [calls for _, calls in ranks])]


def collectives(job: Job, seen: list[CallCounts]) -> list[TorchCount]:
    """Calls and bytes of a step by kind and group size: of one rank, or of one pipeline's boundaries and its heaviest rank.

    Left out: tensor-parallel calls in a pipeline, where the table lists the busiest stage's and both ends', which no rank sees
    together; and how often partial gradients of norms are reduced without FSDP2, which is the training loop's choice.
    """
    p = job.parallelism
    axes = {"pp"} | ({"dp"} if p.tp == 1 else set()) if p.pp > 1 else {"tp", "dp", "cp"}
    stated: CallCounts = Counter()
    names: dict[tuple[str, int], set[str]] = {}
    for row in estimate(job).collectives:
        if row.axis in axes:
            stated[row.kind, row.ranks, int(row.bytes)] += int(row.count_per_step)
            names.setdefault((row.kind, row.ranks), set()).add(row.axis)
    found = seen[0] if p.pp == 1 else in_pipeline(job, seen)
    rows = []
    for kind, ranks in sorted({key[:2] for key in stated + found}):
        axis = "+".join(sorted(names.get((kind, ranks), {"no axis"})))
        chosen = job.sp and not fsdp.applies(job) and kind == "all_reduce"
        name = f"{kind} over {ranks} ({axis})"
        both = [[(n, n * key[2]) for key, n in calls.items() if key[:2] == (kind, ranks)] for calls in (stated, found)]
        if not chosen:
            rows.append(TorchCount(f"{name}, calls", "calls", *(sum(n for n, _ in calls) for calls in both)))
        rows.append(TorchCount(f"{name}, bytes", "B", *(sum(size for _, size in calls) for calls in both)))
    return rows


def in_pipeline(job: Job, seen: list[CallCounts]) -> CallCounts:
    """Of all ranks' calls: what crosses the boundaries of one pipeline, and the reductions of the rank that sends most."""
    p = job.parallelism
    sent: CallCounts = Counter()
    for calls in seen:
        sent += Counter({key: n for key, n in calls.items() if key[0] == "send_recv"})
    # both sender and receiver report each call
    one: CallCounts = Counter({key: n // (2 * p.dp * p.tp) for key, n in sent.items()})
    if p.tp > 1:
        return one
    reduced: list[CallCounts] = [Counter({key: n for key, n in c.items() if key[0] != "send_recv"}) for c in seen]
    return one + max(reduced, key=lambda calls: sum(n * key[2] for key, n in calls.items()))
