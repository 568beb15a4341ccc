"""A rank of a pipeline of FSDP2 stages in one process: torch's own schedules under the fake process group, with small tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from live_bytes import LiveCalls
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.pipelining.stage import InferenceMode
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch_blocks import DTYPES, Kernels, Transformer
from torch_fsdp import prefetch

from steptime.bench.runs.probes import IssuedCollective
from steptime.job.job import Job
from steptime.model.model import Model
from steptime.schedule import placement


class Pipeline(NamedTuple):
    """A schedule by torch's name, and the job's words for it."""

    torch: str
    name: str
    pp: int
    vpp: int
    micro_batches: int
    reshard: bool = False
    reduce: str = "fp32"
    prefetch: int = 1
    """Above 1: each block prefetches so many explicitly, forward and backward."""

    def job(self, model: Model, kernels: Kernels, seqlen: int, batch: int, dp: int) -> Job:
        """As a plan would say it."""
        performance = {
            "software": "fsdp2",
            "precision": kernels.precision,
            "attention_impl": kernels.attention,
            "norm_impl": kernels.norm,
            "activation_impl": kernels.activation,
            "loss_impl": "composite",
            "activation_checkpointing_type": kernels.recompute,
        }
        fsdp = {"reshard_after_forward": self.reshard, "reduce_dtype": self.reduce, "prefetch": self.prefetch}
        layout = {"tp": 1, "pp": self.pp, "vpp": self.vpp, "dp": dp, "schedule": self.name, "fsdp": fsdp}
        data = {"gbs": batch * dp * self.micro_batches, "seqlen": seqlen, "microbatch_sz": batch}
        return Job(model=model, parallelism=layout, performance=performance, data=data, hardware="mi300x-node")


class Part(nn.Module):
    """The consecutive layers of a model chunk, with the end of the model that it holds."""

    def __init__(self, whole: Transformer, depth: int, depths: int, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        each = len(whole.blocks) // depths
        self.tokens = whole.tokens if depth == 0 else None
        self.blocks = nn.ModuleList(list(whole.blocks)[depth * each : (depth + 1) * each])
        self.norm, self.head = (whole.norm, whole.head) if depth == depths - 1 else (None, None)
        for name in ("cos", "sin", "mask"):
            self.register_buffer(name, getattr(whole, name), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            again = self.recompute == "full"
            tables = self.cos, self.sin, self.mask
            x = checkpoint(block, x, *tables, use_reentrant=False) if again else block(x, *tables)
        return x if self.head is None else self.head(self.norm(x))


class Rank:
    """One rank's chunks, wrapped as torchtitan wraps them, and its schedule."""

    def __init__(
        self, model: Model, kernels: Kernels, of: Pipeline, rank: int, mesh: DeviceMesh, tokens: Tensor
    ) -> None:
        self.tokens, self.batch, self.seqlen = tokens, tokens.shape[0] // of.micro_batches, tokens.shape[1]
        depths = of.pp * of.vpp
        places = placement(of.name, of.pp, of.vpp)
        mine = sorted((place.chunk, depth) for depth, place in enumerate(places) if place.stage == rank)
        self.depths = [depth for _, depth in mine]
        whole, policy = (
            Transformer(model, kernels, self.seqlen),
            MixedPrecisionPolicy(param_dtype=kernels.dtype, reduce_dtype=DTYPES[of.reduce]),
        )
        self.parts = [Part(whole, depth, depths, kernels.recompute) for depth in self.depths]
        for part in self.parts:
            for block in part.blocks:
                fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=of.reshard)
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
            if of.prefetch > 1:
                prefetch(part, of.prefetch)
        self.stages = [
            PipelineStage(
                part, depth, depths, torch.device("cpu"), group=mesh["pp"].get_group(),
                input_args=self.shape(model, kernels, ids=depth == 0),
                output_args=self.shape(model, kernels, logits=depth == depths - 1),
            )
            for part, depth in zip(self.parts, self.depths, strict=True)
        ]  # fmt: skip
        kind = get_schedule_class(of.torch)
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if several else self.stages[0], n_microbatches=of.micro_batches, loss_fn=loss, scale_grads=False
        )
        self.schedule._warmup_p2p = self.shapes_are_known
        self.first, self.last = 0 in self.depths, depths - 1 in self.depths

    def shape(self, model: Model, kernels: Kernels, *, ids: bool = False, logits: bool = False) -> Tensor:
        """What a stage is given or gives."""
        if ids:
            return torch.empty(self.batch, self.seqlen, dtype=torch.long, device="meta")
        width = model.vocab_sz if logits else model.hidden_sz
        return torch.empty(self.batch, self.seqlen, width, dtype=kernels.dtype, device="meta").requires_grad_()

    @staticmethod
    def shapes_are_known(stages: list[PipelineStage], *_: object) -> None:
        """In place of asking the other ranks."""
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def step(self) -> None:
        """One step; gradients stay."""
        args = (self.tokens,) if self.first else ()
        labels = {"target": self.tokens} if self.last else {}
        self.schedule.step(*args, **labels, return_outputs=False)

    def forget(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad()

    @property
    def apart(self) -> list[Tensor]:
        """What is counted apart: parameters, tables, the batch, and the buffers for what is received."""
        infos = [
            info
            for stage in self.stages
            for chunks in (stage.args_recv_info, stage.grad_recv_info)
            for received in chunks.values()
            for info in received
        ]
        buffers = [info.buffer for info in infos if info.buffer is not None]
        modules = [t for part in self.parts for t in (*part.parameters(), *part.buffers())]
        return [*modules, *buffers, self.tokens]

    @property
    def uncounted(self) -> int:
        """Bytes of the tables and of the batch."""
        every = [*(t for part in self.parts for t in part.buffers()), self.tokens]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in every}.values())


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan's: cross entropy in fp32."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@contextmanager
def rank_of(
    model: Model, kernels: Kernels, of: Pipeline, rank: int, *, dp: int, seqlen: int, batch: int
) -> Iterator[Rank]:
    """A rank before its first step."""
    dist.init_process_group("fake", rank=rank * dp, world_size=of.pp * dp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (of.pp, dp), mesh_dim_names=("pp", "dp"))
        tokens = torch.zeros(batch * of.micro_batches, seqlen, dtype=torch.long)
        made = Rank(model, kernels, of, rank, mesh, tokens)
        yield made
    finally:
        dist.destroy_process_group()


class Step(NamedTuple):
    """What was seen of a step. Tables and the batch do not count."""

    issued: dict[IssuedCollective, int]
    peak: int
    """The most bytes alive."""
    op: str
    """The op that reaches it."""


def watched(rank: Rank) -> Step:
    """A step of a rank."""
    with LiveCalls(rank.apart) as live:
        rank.step()
    return Step(dict(live.calls), live.peak.total - rank.uncounted, live.peak.op)
