"""Megatron-Core's Muon on a CPU: in place of NVIDIA's emerging_optimizers a base class that keeps a momentum per matrix.

NVIDIA-NeMo/Emerging-Optimizers orthogonalized_optimizers/orthogonalized_optimizer.py: momentum_buffer = zeros_like(grad).
The updates are no orthogonal matrices.
"""

from __future__ import annotations

import sys
import types

import torch


class Orthogonalized(torch.optim.Optimizer):
    """As much of OrthogonalizedOptimizer as has to do with states."""

    def __init__(self, params, lr, momentum_beta, *, scaled_orthogonalize_fn, **_):
        super().__init__(params, {"lr": lr})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
            p.sub_(self.orthogonalize(p, momentum.add_(p.grad)))


def extensions():
    """The library, before Megatron's optimizers are imported."""
    whole = {
        "": {},
        ".orthogonalized_optimizers": {
            "OrthogonalizedOptimizer": Orthogonalized,
            "get_muon_scale_factor": lambda *_, **__: 1.0,
        },
        ".orthogonalized_optimizers.muon_utils": {"newton_schulz_tp": lambda x, **_: x},
    }
    for name, found in whole.items():
        sys.modules[f"emerging_optimizers{name}"] = types.ModuleType(name)
        vars(sys.modules[f"emerging_optimizers{name}"]).update(found)


def optimizer(settings, model):
    """Megatron-Core's Muon with Adam for what is no matrix."""
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(settings, [model], use_gloo_process_groups=False)
