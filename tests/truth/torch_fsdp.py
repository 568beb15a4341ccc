"""FSDP (and TP) jobs of one process: torch's fake process group lets it be rank 0 of any world, with real, small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_blocks import DTYPES, Kernels, Transformer

from steptime.model.model import Model

POLICIES: dict[str, Callable[[Transformer], Any]] = {
    "block": lambda module: ModuleWrapPolicy({type(module.blocks[0])}),
    "model": lambda module: ModuleWrapPolicy(set()),
    "module": lambda module: CustomPolicy(lambda one: bool([*one.parameters(recurse=False)])),
}
"""Which modules the first FSDP wraps besides the whole."""


@contextmanager
def world(dp: int, tp: int = 1, replicas: int = 1) -> Iterator[DeviceMesh]:
    """A mesh (replicas, dp, tp) of which this process is rank 0; `dp` here are the ranks that share one copy."""
    dist.init_process_group("fake", rank=0, world_size=replicas * dp * tp, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (replicas, dp, tp), mesh_dim_names=("replicas", "dp", "tp"))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Fsdp:
    """How `fully_shard` is applied: None means torch's default, which does not reshard the root after forward."""

    reshard_blocks: bool | int | None = None
    reshard_root: bool | None = None
    params: str = "fp32"
    """What the sharded parameters are stored in; compute runs in the kernels' precision."""
    reduce: str = "fp32"
    wrap: str = "block"
    offload: bool = False
    """States on the host (CPUOffloadPolicy)."""
    version: int = 2
    """1: FullyShardedDataParallel, one flat parameter per group."""
    no_sync: bool = False
    """The last micro-batch alone reduces gradients."""
    reshard_after_backward: bool = True
    prefetch: int = 1
    """0: the first FSDP's backward_prefetch None. Above 1: each block and the root prefetch so many, forward and backward."""
    after: bool = False
    """The first FSDP's BACKWARD_POST."""
    original_params: bool = True
    limits_gathers: bool = True
    shard_dim: int = 0
    """The dimension of matrices that is cut."""


def sharded(model: Model, kernels: Kernels, fsdp: Fsdp, seqlen: int, mesh: DeviceMesh, *, sp: bool = True) -> nn.Module:
    """The model, each block and the root wrapped, tensor-parallel where the mesh is."""
    torch.set_default_dtype(DTYPES[fsdp.params])
    try:
        module = Transformer(model, kernels, seqlen)
    finally:
        torch.set_default_dtype(torch.float32)
    if mesh["tp"].size() > 1:
        tensor_parallel(module, mesh["tp"], sp=sp)
    if fsdp.version == 1:
        return flat_sharded(module, kernels, fsdp, mesh)
    if mesh["dp"].size() > 1:
        data = mesh["replicas", "dp"] if mesh["replicas"].size() > 1 else mesh["dp"]
        policy = MixedPrecisionPolicy(param_dtype=kernels.dtype, reduce_dtype=DTYPES[fsdp.reduce])
        where = CPUOffloadPolicy(pin_memory=False) if fsdp.offload else OffloadPolicy()
        said = {"mesh": data, "mp_policy": policy, "offload_policy": where}
        if fsdp.shard_dim:
            said["shard_placement_fn"] = lambda p: Shard(fsdp.shard_dim if p.ndim > 1 else 0)
        for block in module.blocks if fsdp.wrap == "block" else []:
            fully_shard(block, reshard_after_forward=fsdp.reshard_blocks, **said)
        fully_shard(module, reshard_after_forward=fsdp.reshard_root, **said)
        if fsdp.prefetch > 1:
            prefetch(module, fsdp.prefetch)
    return module


def prefetch(module: nn.Module, groups: int) -> None:
    """Explicit prefetch of the next `groups` blocks, in forward and in backward."""
    blocks = list(module.blocks)
    module.set_modules_to_forward_prefetch(blocks[:groups])
    module.set_modules_to_backward_prefetch(blocks[::-1][:groups])
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + groups])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - groups) : i][::-1])


def gathered_as_on_gpus(handle: FlatParamHandle, padded: torch.Tensor) -> torch.Tensor:
    """One all-gather into the flat parameter; on a CPU torch takes a list of pieces in its place."""
    dist.all_gather_single(padded, handle.flat_param.data, group=handle.process_group)
    return padded


def flat_sharded(module: Transformer, kernels: Kernels, fsdp: Fsdp, mesh: DeviceMesh) -> nn.Module:
    """The model under the first FSDP as accelerate wraps it: its blocks and the root, original parameters kept."""
    kept, whole = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD
    pre, post = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
    policy = MixedPrecision(kernels.dtype, DTYPES[fsdp.reduce], cast_forward_inputs=False)
    FlatParamHandle._all_gather_flat_param = gathered_as_on_gpus
    return FullyShardedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        sharding_strategy=kept if fsdp.reshard_blocks is False else whole,
        auto_wrap_policy=POLICIES[fsdp.wrap](module),
        mixed_precision=policy,
        backward_prefetch=(post if fsdp.after else pre) if fsdp.prefetch else None,
        limit_all_gathers=fsdp.limits_gathers,
        device_id=torch.device("cpu"),
        use_orig_params=fsdp.original_params,
    )


def tensor_parallel(module: Transformer, mesh: DeviceMesh, *, sp: bool = True) -> None:
    """Megatron's split, with sequence parallelism as torchtitan's Llama plan states it, or without."""
    rows = Shard(1) if sp else Replicate()
    outer: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, ParallelStyle] = {
        "attn": PrepareModuleInput(
            input_layouts=(rows, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "attn.o": RowwiseParallel(output_layouts=rows),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    columns = ["attn.q", "attn.k", "attn.v", "mlp.up"] + ([] if module.blocks[0].mlp.gate is None else ["mlp.gate"])
    inner |= {name: ColwiseParallel() for name in columns}
    if sp:
        outer["norm"] = SequenceParallel()
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    parallelize_module(module, mesh, outer)
    for block in module.blocks:
        parallelize_module(block, mesh, inner)


def run(
    module: nn.Module, batch: int, seqlen: int, micro_batches: int = 1, *, tp: bool = False, fsdp: Fsdp | None = None
) -> None:
    """Forward and backward of some micro-batches; gradients stay. Each batch is made here and held by nobody else."""
    for at in range(micro_batches):
        last = at + 1 == micro_batches
        with loss_parallel() if tp else nullcontext(), synced(module, fsdp or Fsdp(), last=last):
            tokens = torch.zeros(batch, seqlen, dtype=torch.long)
            loss = module(tokens, tokens)
            del tokens
            loss.backward()


@contextmanager
def synced(module: nn.Module, fsdp: Fsdp, *, last: bool) -> Iterator[None]:
    """A micro-batch that reduces gradients, or adds them up."""
    if fsdp.no_sync and fsdp.version == 1 and not last:
        with module.no_sync():
            yield
        return
    if fsdp.no_sync and fsdp.version == 2:
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        if not fsdp.reshard_after_backward:
            module.set_reshard_after_backward(last)
    yield


def padded(module: nn.Module, dp: int) -> int:
    """Elements of a module's own parameters, dimension 0 padded to a multiple of dp."""
    return sum(-(-p.shape[0] // dp) * dp * p[0].numel() for p in module.parameters())
