"""FSDP2 under CPUOffloadPolicy: what the device holds at its peak, what crosses the link, what the host holds. Zero tolerance.

Everything is on a CPU, so that a copy between host and device would be none: here it is a clone, and what FSDP2 takes down
counts as the host's.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from live_bytes import LiveBytes
from torch_blocks import Kernels
from torch_fsdp import Fsdp, run, sharded, world
from torch_jobs import Layout, covering, plain, torch_job

from steptime.answer.result import estimate
from steptime.base.config import build
from steptime.job.job import Job
from steptime.memory.on_host import on_host
from steptime.model.model import Model


class Seen(NamedTuple):
    """Bytes of a step after the first."""

    peak: int
    """On the device."""
    up: int
    """Copied to the device, all micro-batches."""
    down: int
    host: int
    """Parameters, gradients and moments on the host."""


def step(model: Model, kernels: Kernels, seqlen: int, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Seen:
    assert layout.fsdp is not None
    moved = {"up": 0, "down": 0}
    live: LiveBytes | None = None
    to = torch.Tensor.to

    def copied(tensor, *args, **said):
        """FSDP2 copies up without blocking, and down to memory that is not pinned with it."""
        if not isinstance(args[0] if args else None, torch.device) or "non_blocking" not in said:
            return to(tensor, *args, **said)
        way = "up" if said["non_blocking"] else "down"
        other = tensor.clone()
        moved[way] += other.nbytes
        if live is not None and way == "down":
            live.is_for(other, "host")
        return other

    with world(layout.dp) as mesh:
        module = sharded(model, kernels, layout.fsdp, seqlen, mesh)
        monkeypatch.setattr(torch.Tensor, "to", copied)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for param in module.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        moved.update(up=0, down=0)
        with LiveBytes([], log=True) as live:
            run(module, 1, seqlen, layout.micro_batches)
        grads = [plain(p.grad) for p in module.parameters()]
        states = [plain(t) for of in optimizer.state.values() for t in of.values() if t.dim()]
        whole = [plain(p.data) for p in module.parameters()]
        host = sum(t.nbytes for t in [*grads, *states, *whole])
        monkeypatch.undo()
    return Seen(max(m.total - m.role("host") for m in live.moments), moved["up"], moved["down"], host)


WIDE = {"n_layers": 3, "hidden_sz": 64, "inter_sz": 512, "n_q_heads": 8, "head_dim": 8, "vocab_sz": 80}
NARROW = {
    "n_layers": 2,
    "hidden_sz": 48,
    "inter_sz": 160,
    "n_q_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_sz": 251,
}
SHAPES = {"wide mlp": build(Model, WIDE), "gqa": build(Model, NARROW)}
HOST = {"accelerator.host_bytes_per_s": "50 GB/s", "host.memory_bytes_per_s": "400 GB/s"}
"""Figures that states on the host want, of no matter here."""
CASES = {
    "default": (Fsdp(offload=True), Kernels(), 1),
    "no reshard": (Fsdp(reshard_blocks=False, offload=True), Kernels(), 1),
    "bf16 reduction": (Fsdp(reduce="bf16", offload=True), Kernels(recompute="full"), 1),
    "bf16 parameters": (Fsdp(params="bf16", reduce="bf16", offload=True), Kernels(), 1),
    "fp32": (Fsdp(offload=True), Kernels(precision="fp32"), 1),
    "two micro-batches": (Fsdp(offload=True), Kernels(), 2),
}


def offloaded(model: Model, kernels: Kernels, seqlen: int, layout: Layout) -> Job:
    """The job with its states on the host."""
    said = {"performance.cpu_offload": {"params": True}, "hardware.overrides": HOST}
    return torch_job(model, kernels, seqlen, layout).replace(**said)


@pytest.mark.parametrize(("case", "seqlen", "shape"), covering(CASES, (8, 128), SHAPES))
def test_peak_of_the_device_and_what_crosses_the_link(case, seqlen, shape, monkeypatch):
    """Gathered parameters, gradients on their way and activations: no state, and every state on the host.

    Shards go up before each all-gather, twice for a block that is resharded; gradients come down once a micro-batch.
    """
    fsdp, kernels, micro_batches = CASES[case]
    model, layout = SHAPES[shape], Layout(8, micro_batches=micro_batches, fsdp=fsdp)
    seen = step(model, kernels, seqlen, layout, monkeypatch)
    plan = offloaded(model, kernels, seqlen, layout)
    ours = estimate(plan)
    (row,) = ours.memory.stages
    assert (row.params_bytes, row.gradients_bytes, row.optimizer_bytes) == (0.0, 0.0, 0.0)
    assert row.allocated_bytes == seen.peak
    assert ours.memory.host_bytes / 8 == seen.host
    per, fsdp_s = on_host(plan), ours.timing.fsdp
    assert fsdp_s is not None
    assert seen.up == sum(
        of.padded / of.ranks * per.gathered * calls.gathers for (_, of), calls in fsdp_s.calls.items()
    )
    assert seen.down == sum(
        of.trained_shard * per.reduced * calls.reductions for (_, of), calls in fsdp_s.calls.items()
    )
