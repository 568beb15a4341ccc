"""Megatron-Core's TorchFullyShardedDataParallel on a CPU: what it wraps, gathers, reduces and holds, and its optimizer's states.

Two things differ from a GPU. Its device mesh is one of "cpu". And the layers are Megatron's own, whose projections are
ColumnParallelLinear as the head is: only the head is wrapped here, as with TransformerEngine's layers, which have other classes.
"""

from __future__ import annotations

import contextlib
import sys

import mcore_patches as patches
import torch
from live_bytes import LiveBytes, one_kernel
from mcore_peak import KERNELS
from mcore_record import Collectives
from torch.distributed import DeviceMesh


def wrapped(core, c):
    """The model under fully_shard."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig

    plain = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, _, **said: plain(group, "cpu", **said))
    core.output_layer.__class__ = type("Head", (type(core.output_layer),), {})
    core._fsdp_modules = [type(core.output_layer)]
    core.config.transformer_impl = "local"  # ColumnParallelLinear is not wrapped
    settings = TorchFullyShardedDataParallelConfig(reshard_after_forward=c.get("reshard", True))
    try:
        return TorchFullyShardedDataParallel(core.config, settings, core)
    finally:
        DeviceMesh.from_group = plain


def optimizer_of(core, model):
    """The optimizer that Megatron makes of these parameters: without the distributed one, which it refuses."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    patches.optimizer_types()
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=core.config.bf16, fp16=False, use_distributed_optimizer=False
    )
    with patches.CudaIsCpu():
        made = get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)
    return getattr(made, "chained_optimizers", [made])[0]


@contextlib.contextmanager
def fused():
    """Functions that a GPU runs as one kernel count as one op."""
    kept = [(module, name, getattr(sys.modules[module], name)) for module, names in KERNELS.items() for name in names]
    for module, name, plain in kept:
        setattr(sys.modules[module], name, _one_kernel(name, plain))
    try:
        yield
    finally:
        for module, name, plain in kept:
            setattr(sys.modules[module], name, plain)


def _one_kernel(name, plain):
    def run(*args):
        with one_kernel(name):
            return plain(*args)

    return run


def step(c, build, forward):
    """Two micro-batches and the update, after a first step that makes the states; `build` and `forward` are of the world."""
    from megatron.core import parallel_state

    shared = parallel_state.get_global_memory_buffer().buffer
    shared.clear()
    core = build()
    model = wrapped(core, c)
    optimizer = optimizer_of(core, model)
    forward(model, core).sum().backward()
    with patches.CudaIsCpu():
        optimizer.step()
    optimizer.zero_grad()
    groups, states = optimizer.optimizer.param_groups, optimizer.optimizer.state.values()
    masters = [p for group in groups for p in group["params"]]
    moments = [t for state in states for t in state.values() if torch.is_tensor(t) and t.dim()]
    ahead, back, update = Collectives(), Collectives(), Collectives()
    live = LiveBytes([*model.parameters(), *masters, *moments])
    peaks = {}
    with fused(), patches.bool_dropout_masks(), live:
        for _ in range(c["micro_batches"]):
            loss = forward(model, core).sum()
            peaks["forward"] = [live.peak.total, live.peak.op]
            live.forget()
            loss.backward()
            peaks["backward"] = [live.peak.total, live.peak.op]
            live.forget()
            del loss
    with ahead:
        loss = forward(model, core).sum()
    with back:
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    with patches.CudaIsCpu(), update:
        optimizer.step()
    return {
        "peaks": peaks,
        "buffer_bytes": sum(t.nbytes for t in shared.values()),
        "forward": ahead.calls,
        "backward": back.calls,
        "update": update.calls,
        "bytes": {
            "params": sum(p.to_local().nbytes for p in model.parameters()),
            "gradients": sum(g.to_local().nbytes for g in gradients),
            "masters": sum(p.to_local().nbytes for p in masters),
            "moments": sum(t.to_local().nbytes for t in moments),
        },
    }
