"""What stands between Megatron-Core's Mamba layers and a CPU, and how each gap is closed.

mamba_ssm's kernels are stand-ins that keep what the real ones keep (mamba_ssm/ops/triton/ssd_combined.py,
MambaSplitConv1dScanCombinedFn; layernorm_gated.py, LayerNormFn); the numbers they compute are not a scan's.
"""

from __future__ import annotations

import sys
import types
from unittest.mock import MagicMock

import torch


class Scan(torch.autograd.Function):
    """Keeps its input, the convolution's weight and bias, its output before the gate, A, D and dt_bias."""

    @staticmethod
    def forward(ctx, zx, weight, bias, dt_bias, a, d, head_dim):
        heads = a.numel()
        inner = heads * head_dim
        before = zx[..., inner : 2 * inner].clone().view(*zx.shape[:2], heads, head_dim)
        ctx.save_for_backward(zx, weight, bias, before, a, d, dt_bias)
        return before.flatten(2) * zx[..., :inner]

    @staticmethod
    def backward(ctx, grad):
        zx, weight, bias, _, a, d, dt_bias = (torch.zeros_like(t) for t in ctx.saved_tensors)
        return zx, weight, bias, dt_bias, a, d, None


class GroupNorm(torch.autograd.Function):
    """Keeps its input, its weight, and one fp32 number per token and group."""

    @staticmethod
    def forward(ctx, x, weight, group):
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight, rows.float().view(-1, group).pow(2).mean(-1).rsqrt())
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad), torch.zeros_like(ctx.saved_tensors[1]), None


class RMSNormGated(torch.nn.Module):
    """mamba_ssm's module."""

    def __init__(self, width, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.group_size = group_size

    def forward(self, x):
        return GroupNorm.apply(x, self.weight, self.group_size)


def scan(zx, weight, bias, dt_bias, a, D=None, headdim=None, **_):
    """In place of mamba_split_conv1d_scan_combined."""
    return Scan.apply(zx, weight, bias, dt_bias, a, D, headdim)


def extensions():
    """mamba_ssm, before Megatron's ssm modules are imported."""
    names = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": scan,
        },
    }
    for name, found in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(found)


def hybrid(c, config, **said):
    """Megatron's MambaModel of a hybrid pattern, with local kernels for its other layers."""
    mock = {name: MagicMock() for name in ("triton", "triton.language")}  # it decorates kernels of inference alone
    sys.modules.update(mock)
    from megatron.core.models.mamba import MambaModel
    from megatron.core.post_training.modelopt.mamba import model_specs
    from megatron.core.ssm import mamba_block

    for name in mock:
        del sys.modules[name]
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = model_specs.Norm = WrappedTorchNorm
    spec = model_specs.get_mamba_stack_modelopt_spec(local_core_attention=True)
    return MambaModel(config=config, mamba_stack_spec=spec, hybrid_override_pattern=c["hybrid"], **said)
