"""A whole training step run and timed: forward, backward, AdamW, gradients set to None.

Steps are timed one by one, the device waited for before and after each, so that a step is what the slowest rank needs. Memory,
DDP's own logging and the trace come from separate steps, which are not timed.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from steptime.bench.host_memory import max_rss_bytes
from steptime.bench.reduce import gathered, over_ranks, slowest
from steptime.bench.runnable import as_run
from steptime.bench.runs.clock import Timing, summary, synchronize
from steptime.bench.runs.engines import Laid, lay_out
from steptime.bench.runs.operands import release
from steptime.bench.runs.probes import LiveBytes
from steptime.bench.runs.training import Trainer
from steptime.job.job import Job

DDP_TIMES = {
    "forward_s": "avg_forward_compute_time",
    "backward_s": "avg_backward_compute_time",
    "comm_s": "avg_backward_comm_time",
    "overlapped_s": "avg_backward_compute_comm_overlap_time",
}
"""Figures logged by torch's DDP [ns]: duration of its communication, and how much of it backward hides."""


class StepRow(NamedTuple):
    """Measured training steps of one layout. Lists have one entry per rank."""

    layout: str
    ranks: int
    tokens_per_step: int
    timing: Timing
    """Seconds of the slowest rank in each step."""
    slowest_rank: int
    """The rank with the longest median step."""
    rank_s: list[float]
    """Median step."""
    allocated_peak_bytes: list[int | None]
    """CUDA: max_memory_allocated; CPU: the most bytes of all storages alive after an op."""
    reserved_peak_bytes: list[int | None]
    """CUDA only: max_memory_reserved."""
    rss_peak_bytes: list[int]
    """Peak of the process over its whole life."""
    n_params: list[int]
    """Parameter elements held."""
    over_ranks: dict[str, dict[str, float]]
    """min, mean, max and std of step_s (medians), rss_bytes and, where known, allocated_bytes."""
    first_loss: float
    last_loss: float
    """Loss of the timed steps, on one batch: mean over the global batch."""
    ddp: dict[str, float] | None
    """This rank's, from DDP's own logging: forward_s, backward_s, comm_s, overlapped_s; None without DDP, and in a pipeline."""
    notes: list[str]
    """What the device runs differently from the job."""


def run_steps(
    job: Job,
    device: torch.device,
    *,
    steps: int = 10,
    warmup: int = 3,
    seed: int = 0,
    trace: Path | None = None,
    mark: Callable[[str], object] = str,
) -> StepRow:
    """Train for some steps after `warmup` others and time each; every rank calls this, in its process group, its device bound.

    `trace`: a folder for one profiler trace per rank, `rank0.json` and on, of two steps that are not timed. `mark`: called when
    "build" has ended, and "first_step".

    Raises:
        ConfigError: plain torch cannot run the job, or the world has another size.
        ValueError: the loss is not finite, or did not change.
    """
    job, notes = as_run(job, device.type)
    laid = laid_out(job, device, seed)
    trainer = Trainer(laid, seed)
    mark("build")
    for i in range(warmup):
        trainer.step()
        if i == 0:
            synchronize(device)
            mark("first_step")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    samples, losses = timed(trainer, steps)
    peaks = allocated(trainer)
    first, last = (mean_loss(laid, loss) for loss in (losses[0], losses[-1]))
    check(first, last, changed=steps > 1)
    ddp = ddp_times(trainer)
    if trace is not None:
        profile(trainer, trace)
    mine = {"samples": samples, "peaks": peaks, "rss": max_rss_bytes(), "params": laid.n_params}
    return row(laid, mine, (first, last), ddp, notes)


def laid_out(job: Job, device: torch.device, seed: int) -> Laid:
    """This rank's part, alone in the allocator: earlier layouts and weight initialization do not count as reserved."""
    gc.collect()  # modules with reference cycles
    laid = lay_out(job, device, seed)
    release(device)
    return laid


def row(
    laid: Laid, mine: dict[str, Any], losses: tuple[float, float], ddp: dict[str, float] | None, notes: list[str]
) -> StepRow:
    """All ranks' figures combined; every rank calls this with its own."""
    ranks = gathered(mine)
    known = {"step_s": median(mine["samples"]), "rss_bytes": mine["rss"], "allocated_bytes": mine["peaks"][0]}
    spread = over_ranks({name: value for name, value in known.items() if value is not None})
    medians = [median(rank["samples"]) for rank in ranks]
    data = laid.job.data
    return StepRow(
        layout=laid.name,
        ranks=len(ranks),
        tokens_per_step=data.gbs * data.seqlen,
        timing=summary(slowest(mine["samples"])),
        slowest_rank=medians.index(max(medians)),
        rank_s=medians,
        allocated_peak_bytes=[rank["peaks"][0] for rank in ranks],
        reserved_peak_bytes=[rank["peaks"][1] for rank in ranks],
        rss_peak_bytes=[rank["rss"] for rank in ranks],
        n_params=[rank["params"] for rank in ranks],
        over_ranks={name: found._asdict() for name, found in spread.items()},
        first_loss=losses[0],
        last_loss=losses[1],
        ddp=ddp,
        notes=notes,
    )


def timed(trainer: Trainer, steps: int) -> tuple[list[float], list[Tensor | None]]:
    """Seconds of each step on this rank, after one barrier; the losses stay on the device until the end."""
    device = trainer.laid.device
    samples, losses = list[float](), list[Tensor | None]()
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" and device.index is not None else None)
    for _ in range(steps):
        start = perf_counter()
        losses.append(trainer.step())
        synchronize(device)
        samples.append(perf_counter() - start)
    return samples, losses


def mean_loss(laid: Laid, loss: Tensor | None) -> float:
    """Mean over the data-parallel ranks; every rank gets it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert loss is not None
        return float(loss)
    has_loss = laid.last and laid.rank("tp") == 0
    value = float(loss) if has_loss and loss is not None else 0.0
    total = torch.tensor([value, float(has_loss)], dtype=torch.float32, device=laid.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def check(first: float, last: float, *, changed: bool) -> None:
    """A loss that is not a number, or does not change, means that nothing was learned."""
    if not (math.isfinite(first) and math.isfinite(last)):
        raise ValueError(f"the loss is not finite: {first} in the first timed step, {last} in the last")
    if changed and first == last and first != 0.0:
        raise ValueError(f"the loss stayed at {first}; no training progress")


def allocated(trainer: Trainer) -> tuple[int | None, int | None]:
    """Peak of allocated and of reserved bytes on this rank.

    CUDA: what the allocator saw in the timed steps. CPU: one more step, all storages watched, and DDP's buckets; tables
    (rotary, mask) and the batch, which the model leaves out, are taken off.
    """
    device = trainer.laid.device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    if device.type != "cpu":
        return None, None
    with watched(trainer) as live:
        trainer.step()
    tables = [*(t for part in trainer.laid.parts for t in part.tables), *trainer.batch]
    return live.peak.total - sum({key(t): t.untyped_storage().nbytes() for t in tables}.values()), None


def watched(trainer: Trainer) -> LiveBytes:
    """A probe that knows all storages that persist between steps of a trainer that has made one.

    DDP's buckets are known from a further forward and backward, in which it uses them.
    """
    laid = trainer.laid
    states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
    tables = [t for part in laid.parts for t in part.tables]
    live = LiveBytes([*laid.params, *states, *tables, *trainer.batch])
    if any(isinstance(run, DistributedDataParallel) for run in laid.runs):  # FSDP2 would show copies made by gloo
        with live, laid.parallel_loss():
            trainer.forward_backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    live.forget()
    return live


def key(tensor: Tensor) -> int:
    """Address of a storage: tensors of one storage share it."""
    return int(tensor.untyped_storage().data_ptr())


def ddp_times(trainer: Trainer) -> dict[str, float] | None:
    """Three steps with DDP's logging on: seconds of forward, backward, communication, and its hidden part."""
    runs = [run for run in trainer.laid.runs if isinstance(run, DistributedDataParallel)]
    if not runs:
        return None
    for run in runs:
        run._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001
    for _ in range(3):
        trainer.step()
    synchronize(trainer.laid.device)
    logs = [run._get_ddp_logging_data() for run in runs]  # noqa: SLF001
    times = {name: sum(float(log.get(field, 0)) for log in logs) / 1e9 for name, field in DDP_TIMES.items()}
    return times if times["backward_s"] else None  # a pipeline bypasses what DDP times


def profile(trainer: Trainer, folder: Path) -> None:
    """Two profiled steps after one of warm-up, written as Chrome trace; steps are marked ProfilerStep#."""
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    rank = dist.get_rank() if dist.is_initialized() else 0
    device = trainer.laid.device
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    path = str(folder / f"rank{rank}.json")
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profiler(
        activities=activities, schedule=plan, on_trace_ready=lambda prof: prof.export_chrome_trace(path)
    ) as prof:
        for _ in range(3):
            trainer.step()
            synchronize(device)
            prof.step()
