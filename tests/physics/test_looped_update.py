"""An update that runs op by op over each tensor: torch's kernels, and the host's time to launch them, by hand."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.answer.result import estimate

# a layer has 9 tensors (q, k, v, out, gate, up, down, two norms), the ends 3 (embedding, norm, head): 4 * 9 + 3 = 39
MODEL = {"n_layers": 4, "hidden_sz": 256, "inter_sz": 512, "n_q_heads": 4, "vocab_sz": 1024}


def optimizer_s(software: str, how: str, **layout: Any) -> float:
    performance = {"optimizer_impl": how}
    return estimate(
        jobs.job(MODEL, gbs=8, seqlen=512, software=software, performance=performance, **layout)
    ).time.parts_s["optimizer"]


class Counted(TorchDispatchMode):
    """Counts what runs on tensors of the parameters' shape, which are kernels on a device."""

    kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += any(isinstance(a, torch.Tensor) and a.ndim == 2 for a in args)
        return func(*args, **(kwargs or {}))


def test_kernels_of_one_tensor():
    """torch.optim.AdamW with foreach false: mul, lerp, mul, addcmul, sqrt, div, add and addcdiv of each of 3 tensors."""
    params = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]
    of = torch.optim.AdamW(params, foreach=False, fused=False)
    for p in params:
        p.grad = torch.ones(4, 4)
    of.step()
    with Counted() as counted:
        of.step()
    assert counted.kernels == 3 * 8


@pytest.mark.parametrize(
    ("software", "layout", "seconds"),
    [
        ("torch", {"dp": 8}, 8 * 39 * 50e-6),  # a launch of eager torch takes 50 us, here of 3 million parameters
        ("fsdp2", {"dp": 8}, 8 * 39 * 65e-6 * 2.5),  # 65 us, and 2.5 times as long on DTensors
        # a rank owns an eighth of the tensors
        ("torch", {"dp": 8, "zero_level": 1}, 8 * 39 / 8 * 50e-6),
        # FSDP1: an eighth of each flat parameter: a piece, and one more for each end of a tensor in it: 4 layers of 9 tensors,
        # 1 + 8 / 8 each, the embedding, 1, norm and head, 1 + 1 / 8; no DTensors
        ("fsdp2", {"dp": 8, "fsdp": {"version": 1}}, 8 * (4 * 2 + 1 + 1.125) * 65e-6),
        ("fsdp2", {"dp": 8, "fsdp": {"version": 1, "original_params": False}}, 8 * 6 * 65e-6),
    ],
)
def test_the_host_launches_all_kernels_of_all_tensors(software, layout, seconds):
    """16 and 51 ms; one fused kernel of at most 3 million parameters in 0.1 ms."""
    assert optimizer_s(software, "for_loop", **layout) == pytest.approx(seconds)
    assert optimizer_s(software, "fused", **layout) < 1e-3
    assert optimizer_s(software, "foreach", **layout) < 1e-3


def test_a_large_update_takes_the_devices_time():
    """Llama-3 8B on one device: 291 tensors are launched in 8 * 291 * 50 us = 0.116 s. The device takes longer, as long as with
    foreach, which moves the same bytes.
    """
    both = {}
    for how in ("for_loop", "foreach"):
        said = jobs.job("llama3-8b", gbs=1, seqlen=512, software="torch", dp=1, performance={"optimizer_impl": how})
        both[how] = estimate(said).time.parts_s["optimizer"]
    assert both["for_loop"] == both["foreach"] > 8 * 291 * 50e-6
