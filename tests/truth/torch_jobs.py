"""A `Job` that says what `torch_blocks` and `torch_fsdp` build, and the bytes that torch holds while it runs a step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any, NamedTuple

import jobs
import torch
from live_bytes import LiveBytes
from torch import nn
from torch.distributed.tensor import DTensor
from torch_blocks import Kernels
from torch_fsdp import Fsdp, run, sharded, world
from torch_ours import built

from steptime.bench.runs.probes import local
from steptime.job.job import Job
from steptime.model.model import Model


class Layout(NamedTuple):
    """How a small job is spread: ranks, micro-batches, and FSDP where it is used."""

    dp: int = 1
    """Data-parallel ranks, all copies together."""
    tp: int = 1
    micro_batches: int = 1
    fsdp: Fsdp | None = None
    replicas: int = 1


def torch_job(model: Model, kernels: Kernels, seqlen: int, layout: Layout, batch: int = 1) -> Job:
    """The job as a config would say it; the machine is of no matter here."""
    performance = {
        "software": "torch" if layout.fsdp is None else "accelerate" if kernels.reentrant else "fsdp2",
        "precision": kernels.precision,
        "attention_impl": kernels.attention,
        "norm_impl": kernels.norm,
        "activation_impl": kernels.activation,
        "loss_impl": "composite" if kernels.loss == "fp32" else "fused",
        "activation_checkpointing_type": kernels.recompute,
        "recompute_stops_early": not kernels.reentrant,
    }
    parallelism = {"tp": layout.tp, "pp": 1, "dp": layout.dp, "replicas": layout.replicas}
    if layout.fsdp is not None:
        dtype = layout.fsdp.params
        performance |= {"param_dtype": dtype, "main_grad_dtype": dtype, "moment_dtype": dtype}
        parallelism["fsdp"] = {
            "reshard_after_forward": True if layout.fsdp.reshard_blocks is None else layout.fsdp.reshard_blocks,
            "reduce_dtype": layout.fsdp.reduce,
            "wrap": layout.fsdp.wrap,
            "prefetch": layout.fsdp.prefetch,
            "version": layout.fsdp.version,
            "backward_prefetch": "post" if layout.fsdp.after else "pre",
            "original_params": layout.fsdp.original_params,
            "shard_dim": layout.fsdp.shard_dim,
            "no_sync": layout.fsdp.no_sync,
            "reshard_after_backward": layout.fsdp.reshard_after_backward,
        }
    gbs, where = batch * layout.dp * layout.micro_batches, "mi300x-node"
    return jobs.job(
        model, gbs=gbs, seqlen=seqlen, microbatch_sz=batch, hardware=where, performance=performance, **parallelism
    )


def covering(
    *axes: Iterable[Any], meet: int = 2, allowed: Callable[[tuple[Any, ...]], bool] = lambda _: True
) -> list[tuple[Any, ...]]:
    """Few combinations of values along the axes, in which any two of different axes meet, or any three.

    The one that brings most of them together for the first time, again and again.
    """
    groups = {case: {*combinations(enumerate(case), meet)} for case in product(*axes) if allowed(case)}
    missing = set().union(*groups.values())
    chosen = []
    while missing:
        chosen.append(max(groups, key=lambda case: len(groups[case] & missing)))
        missing -= groups[chosen[-1]]
    return chosen


class Held(NamedTuple):
    """Bytes of torch's storages: the most in a whole step, and of the Adam states alone."""

    peak: int
    optimizer: int
    op: str
    updating: int
    """The most while Adam runs."""


def held(
    model: Model,
    kernels: Kernels,
    seqlen: int,
    layout: Layout,
    batch: int = 1,
    *,
    dtensors: bool = False,
    after: bool = False,
) -> Held:
    """A whole step of the second kind, when Adam's states are there: forward, backward, optimizer.

    FSDP2's is its first one, which holds as much as one `after` another does (test_torch_peaks.py compares the two).
    """
    if layout.fsdp is None:
        return step(built(model, kernels, seqlen), batch, seqlen, layout)
    with world(layout.dp // layout.replicas, layout.tp, layout.replicas) as mesh:
        return step(
            sharded(model, kernels, layout.fsdp, seqlen, mesh), batch, seqlen, layout, dtensors=dtensors, after=after
        )


class Adam:
    """AdamW over parameters, or over the local tensors of those that are DTensors unless `dtensors`.

    The same ops run on the same storages (test_torch_peaks.py compares the two), without DTensor's search for the placements of
    lists of tensors, which would take as long as the rest of a step.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, dtensors: bool) -> None:
        self.params = list(params)
        self.updated = self.params if dtensors else [own(p) for p in self.params]
        self.inner = torch.optim.AdamW(self.updated, foreach=True)

    def step(self) -> None:
        """Update; then drop the gradients."""
        for param, updated in zip(self.params, self.updated, strict=True):
            if updated is not param and param.grad is not None:
                updated.grad = local(param.grad)
        self.inner.step()
        for param in (*self.params, *self.updated):
            param.grad = None

    @property
    def states(self) -> list[torch.Tensor]:
        """The moments."""
        return [t for state in self.inner.state.values() for t in state.values() if t.dim()]


def own(param: nn.Parameter) -> nn.Parameter:
    """A parameter, or the local one of a DTensor, in the same storage."""
    return nn.Parameter(local(param).detach(), param.requires_grad) if isinstance(param, DTensor) else param


def step(
    module: nn.Module, batch: int, seqlen: int, layout: Layout, *, dtensors: bool = False, after: bool = False
) -> Held:
    """Make the states, then watch a step. Buffers (rotary tables, mask) are not counted.

    Gradients of zeros are enough to make states; the first FSDP, and any step `after` another, has run forward and backward.
    """
    optimizer = Adam(module.parameters(), dtensors=dtensors)
    tp = layout.tp > 1
    if layout.fsdp is None or (layout.fsdp.version == 2 and not after):
        for param in (p for p in module.parameters() if p.requires_grad):
            param.grad = torch.zeros_like(param)
    else:
        run(module, batch, seqlen, tp=tp)
    optimizer.step()
    states, buffers = optimizer.states, list(module.buffers())
    with LiveBytes([*module.parameters(), *buffers, *states]) as live:
        run(module, batch, seqlen, layout.micro_batches, tp=tp, fsdp=layout.fsdp)
        before = live.peak
        live.forget()
        optimizer.step()
    most = max(before, live.peak, key=lambda peak: peak.total)
    tables = sum(t.untyped_storage().nbytes() for t in buffers)
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(plain, states)}
    return Held(most.total - tables, sum(sizes.values()), most.op, live.peak.total - tables)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor."""
    return getattr(tensor, "_local_tensor", tensor)
