"""A job distributed over ranks by torch's own engines: DDP, FSDP2, tensor and sequence parallelism, pipelining.

Axes are (pp, dp, tp), tp innermost; with replicas dp is (replicas, shards). Modules are laid out on the meta device, made where
they run, and filled parameter by parameter from the seed and the parameter's name: every layout starts from the same weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from steptime.base.config import ConfigError
from steptime.base.grouping import grouped
from steptime.bench.runnable import layout_name, unsupported
from steptime.bench.runs.chunks import ModelSlice, plan_of, slices
from steptime.bench.runs.modules import INIT_STD, Transformer, building, tables
from steptime.bench.runs.operands import torch_dtype
from steptime.fsdp import options
from steptime.fsdp.of_job import reduced_in
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.local_params import Pieces
from steptime.memory.states import bucket_size
from steptime.model.model import Model
from steptime.software.performance import ITEMSIZE

MIB = 2**20
LEARNING_RATE = 3e-4
"""Learning rate at which the loss falls within a few steps for any size."""


class Laid(NamedTuple):
    """One rank's part of a job, ready to run."""

    job: Job
    name: str
    device: torch.device
    mesh: DeviceMesh | None
    """None with one rank."""
    parts: list[Transformer]
    """The model chunks of this rank, not wrapped."""
    runs: list[nn.Module]
    """The same as called: wrapped by DDP, or themselves."""
    schedule: Any
    """torch's pipeline schedule, or None."""

    def rank(self, axis: str) -> int:
        """This rank's place along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def data_rank(self) -> int:
        """This rank's part of the global batch."""
        p = self.job.parallelism
        if p.replicas == 1 or self.mesh is None:
            return self.rank("dp")
        return self.rank("replicas") * (p.dp // p.replicas) + self.rank("shards")

    @property
    def last(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self.parts[-1].head is not None

    def parallel_loss(self) -> AbstractContextManager[Any]:
        """Context for forward and backward: the cross entropy of split logits."""
        context: AbstractContextManager[Any] = loss_parallel() if self.job.parallelism.tp > 1 else nullcontext()
        return context

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters of all parts, each once."""
        return list(dict.fromkeys(p for part in self.parts for p in part.parameters()))

    @property
    def n_params(self) -> int:
        """Parameter elements on this rank."""
        return sum(local(p).numel() for p in self.params)


def local(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lay_out(job: Job, device: torch.device, seed: int = 0) -> Laid:
    """Build this rank's part of a job. The process group must exist where the job has more than one device.

    Raises:
        ConfigError: plain torch cannot run the job (one line per problem), or the world has another size.
    """
    problems = unsupported(job, device.type)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != job.parallelism.devices:
        problems.append(f"parallelism: tp*pp*dp is {job.parallelism.devices}, but {world} ranks are running")
    if problems:
        raise ConfigError(problems)
    mesh = make_mesh(job, device.type)
    stage = 0 if mesh is None else mesh.get_local_rank("pp")
    parts = [materialized(job, chunk, mesh, device, seed) for chunk in slices(job)[stage :: job.parallelism.pp]]
    wrap = job.software.family == "torch" and job.parallelism.dp > 1
    runs = [distributed(part, job, mesh, device) if wrap and mesh is not None else part for part in parts]
    schedule = pipeline(job, parts, runs, mesh, device) if mesh is not None and job.parallelism.pp > 1 else None
    return Laid(job, layout_name(job), device, mesh, parts, runs, schedule)


def make_mesh(job: Job, device_type: str) -> DeviceMesh | None:
    """The mesh of a job; None for one device."""
    p = job.parallelism
    if p.devices == 1:
        return None
    if p.replicas > 1:
        names = ("pp", "replicas", "shards", "tp")
        return init_device_mesh(device_type, (p.pp, p.replicas, p.dp // p.replicas, p.tp), mesh_dim_names=names)
    return init_device_mesh(device_type, (p.pp, p.dp, p.tp), mesh_dim_names=("pp", "dp", "tp"))


def materialized(job: Job, chunk: ModelSlice, mesh: DeviceMesh | None, device: torch.device, seed: int) -> Transformer:
    """One model chunk: split by tp, sharded by FSDP2, then given storage and weights."""
    with building(torch_dtype(job.software.states.param_dtype), "meta"):
        part = Transformer(plan_of(job), chunk)
    if mesh is not None and job.parallelism.tp > 1:
        tensor_parallel(part, mesh["tp"], sp=job.sp)
    if mesh is not None and job.software.family == "fsdp2" and job.parallelism.dp > 1:
        fully_sharded(part, job, mesh)
    part.to_empty(device=device)
    part.tie()  # separate storage for each module would undo it
    fill(part, seed)
    return part


def tensor_parallel(part: Transformer, mesh: DeviceMesh, *, sp: bool) -> None:
    """Megatron's split (Shoeybi et al. 2019), with sequence parallelism as torchtitan's Llama plan states it, or without."""
    rows = Shard(1) if sp else Replicate()
    outer: dict[str, ParallelStyle] = {}
    if part.tokens is not None:
        outer["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if part.head is not None:
        outer["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)
        if sp:
            outer["norm"] = SequenceParallel()
    if outer:
        parallelize_module(part, mesh, outer)
    part.tie()
    for block in part.blocks.values():
        parallelize_module(block, mesh, block_plan(part.plan.model, rows, sp=sp))


def block_plan(model: Model, rows: Shard | Replicate, *, sp: bool) -> dict[str, ParallelStyle]:
    """How one block is split; `rows` is the layout of its input."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "attn": PrepareModuleInput(
            input_layouts=(rows, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        "attn.o": RowwiseParallel(output_layouts=rows),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    columns = ["attn.q", "attn.k", "attn.v", "mlp.up"] + (["mlp.gate"] if model.glu else [])
    plan |= {name: ColwiseParallel() for name in columns}
    if sp:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    if model.qk_norm:  # one weight for the heads of all ranks (torchtitan's Qwen3 plan)
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"attn.q_norm": heads, "attn.k_norm": heads}
    return plan


def fully_sharded(part: Transformer, job: Job, mesh: DeviceMesh) -> None:
    """FSDP2: each block a group, and the root with the rest; torch's default keeps the root gathered after forward."""
    said = options(Assembly(job))
    data = mesh["replicas", "shards"] if job.parallelism.replicas > 1 else mesh["dp"]
    policy = MixedPrecisionPolicy(param_dtype=part.plan.dtype, reduce_dtype=torch_dtype(reduced_in(job)))
    cut = (lambda param: Shard(min(said.shard_dim, param.ndim - 1))) if said.shard_dim else None
    for block in part.blocks.values() if said.wrap == "block" else []:
        after = said.reshard_after_forward
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=after, shard_placement_fn=cut)
    root = None if said.reshard_after_forward else False
    fully_shard(part, mesh=data, mp_policy=policy, reshard_after_forward=root, shard_placement_fn=cut)


def fill(part: Transformer, seed: int) -> None:
    """Weights from the seed and their names, norms one, biases zero; and the rotary and mask tables."""
    device = next(part.parameters()).device
    with torch.no_grad():
        for name, param in part.named_parameters():
            if name.endswith("bias"):
                local(param).zero_()
            elif param.dim() == 1:
                local(param).fill_(1.0)
            else:
                generator = torch.Generator(device).manual_seed(seed * 2**32 + crc32(name.encode()))
                full = torch.empty(param.shape, dtype=torch.float32, device=device)
                full.normal_(0.0, INIT_STD, generator=generator)
                local(param).copy_(own_part(full, param))
    part.cos, part.sin, part.mask = (t if t is None else t.to(device) for t in tables(part.plan))


def own_part(full: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a whole parameter."""
    if not isinstance(param, DTensor):
        return full
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(full.shape, param.device_mesh, param.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), size)
    return full


def distributed(part: Transformer, job: Job, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """DistributedDataParallel over dp, with the job's bucket size; gradients are views of the buckets or separate."""
    tensors = [Pieces(float(p.numel()), 1) for p in part.parameters()]
    mib = bucket_size(job, [(tensors, 1)]) * ITEMSIZE[job.software.states.main_grad_dtype] / MIB
    ids = None if device.index is None else [device.index]
    return DistributedDataParallel(
        part,
        device_ids=ids,
        process_group=mesh["dp"].get_group(),
        bucket_cap_mb=mib,
        gradient_as_bucket_view=not job.software.states.reducer_buckets,
    )


def pipeline(job: Job, parts: list[Transformer], runs: list[nn.Module], mesh: DeviceMesh, device: torch.device) -> Any:
    """Torch's schedule over this rank's chunks; the loss is the last chunk's."""
    p, group = job.parallelism, mesh["pp"].get_group()
    stages = [
        PipelineStage(run, part.chunk.depth, p.pp * p.vpp, device, group=group, **boundaries(job, part))
        for run, part in zip(runs, parts, strict=True)
    ]
    loss = parts[-1].loss
    if job.schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, job.microbatches, loss_fn=loss)  # type: ignore[arg-type]
    kind = ScheduleGPipe if job.schedule == "gpipe" else Schedule1F1B
    return kind(stages[0], job.microbatches, loss_fn=loss)


def boundaries(job: Job, part: Transformer) -> dict[str, Any]:
    """Shapes of a chunk's input and output; without them torch runs it once to find out, which DDP's reducer would count.

    Split logits are found by running: they are DTensors.
    """
    if job.parallelism.tp > 1:
        return {}
    b, s = job.data.microbatch_sz, job.data.seqlen
    ids = torch.empty(b, s, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"dtype": part.plan.dtype, "device": "meta", "requires_grad": True}
    hidden = torch.empty(b, s, job.model.hidden_sz, **options)
    logits = torch.empty(b, s, job.model.vocab_sz, **options)
    return {
        "input_args": hidden if part.tokens is None else ids,
        "output_args": hidden if part.head is None else logits,
    }


def optimizer(laid: Laid) -> torch.optim.Optimizer:
    """AdamW in one kernel where the plan's update works in place, else by torch's foreach kernels or tensor by tensor.

    One group per mesh: foreach kernels take tensors of one kind.
    """
    groups = grouped(laid.params, lambda param: param.device_mesh if isinstance(param, DTensor) else None)
    how, each = laid.job.software.states.optimizer_impl, [{"params": g} for g in groups.values()]
    return torch.optim.AdamW(each, lr=LEARNING_RATE, fused=how == "fused", foreach=how == "foreach")
