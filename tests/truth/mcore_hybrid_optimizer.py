"""Megatron-Core's HybridDeviceOptimizer on a CPU: what each side holds, and what an update reads and writes.

Tensors of a subclass stand for those on the device; what comes out of `.cpu()` is a plain tensor. Streams and events stand still.
"""

from __future__ import annotations

import contextlib

import jobs
import mcore_imports  # noqa: F401  Megatron is imported without CUDA
import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from steptime.memory.on_host import on_host

SIZES = [(32, 64), (64, 16), (64,), (16, 128)]  # 2048, 1024, 64, 2048 elements


class OnDevice(torch.Tensor):
    """A tensor on the device."""

    @property
    def is_cuda(self):
        return True

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


class Still:
    """A stream or an event that does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", Still)
    monkeypatch.setattr(torch.cuda, "Stream", Still)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **said: empty(*size, **said | {"pin_memory": False}))


def stepped(share, *, masters):
    """The optimizer after one step over bf16 shards (precision-aware) or fp32 masters, with fp32 gradients."""
    dtype = torch.float32 if masters else torch.bfloat16
    params = [torch.randn(size).to(dtype).as_subclass(OnDevice) for size in SIZES]
    for param in params:
        gradient = torch.randn(param.shape).as_subclass(OnDevice)
        if masters:
            param.requires_grad_()
            param.grad = gradient
        else:
            param.decoupled_grad = gradient
    hybrid = HybridDeviceOptimizer(
        [{"params": params}],
        offload_fraction=share,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
        lr=1e-3,
    )
    hybrid.step()
    return hybrid, params


def state(optimizer):
    """Bytes of an optimizer's moments."""
    found = [of[key] for of in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")] if optimizer else []
    return sum(t.nbytes for t in found)


def both_sides(hybrid, params):
    """Bytes of optimizer states on the host and on the device, parameters' and gradients' own buffers left out."""
    copies = list(hybrid.gpu_params_map_cpu_copy.values())
    gradients = sum(t.nbytes for t in hybrid.cpu_copy_map_grad.values())
    host = sum(t.nbytes for t in copies) + gradients + sum(state(of) for of in hybrid.cpu_optimizers)
    mine = [t for t in hybrid.param_to_fp32_param.values() if t.is_cuda]
    masters = params if params[0].dtype == torch.float32 else mine
    return host, sum(t.nbytes for t in masters) + state(hybrid.gpu_optimizer)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_each_side_holds_what_megatron_puts_there(share, masters):
    """Whole tensors go in order until their elements reach the share: 0.3 of 5184 takes the first, 0.6 the first three."""
    hybrid, params = stepped(share, masters=masters)
    moved = sum(p.numel() for p in hybrid.gpu_params_map_cpu_copy)
    assert moved == {0.3: 2048, 0.6: 2048 + 1024 + 64, 1.0: 5184}[share]
    said = {"optimizer": share, "keep_masters": masters}
    ours = jobs.job("llama3-8b", dp=2, performance={"cpu_offload": said})
    host, device = both_sides(hybrid, params)
    assert host == on_host(ours).stored * moved
    size = ours.software.state_bytes
    assert device == (size.master + size.moments) * (5184 - moved) + (size.master * moved if masters else 0.0)


def test_copies_are_as_wide_as_the_hosts_tensors():
    """4 bytes each way: copies that do not block are cast on the device, so that fp32 crosses the link."""
    hybrid, _ = stepped(1.0, masters=False)
    per = on_host(jobs.job("llama3-8b", dp=2, performance={"cpu_offload": {"optimizer": 1.0}}))
    for param in hybrid.gpu_params_map_cpu_copy.values():
        assert (hybrid.cpu_copy_map_grad[param].element_size(), param.element_size()) == (per.down, per.up)
