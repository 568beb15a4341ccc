"""What stands between Megatron-Core's Gated DeltaNet and a CPU, and how each gap is closed.

The kernels of flash-linear-attention and causal_conv1d are stand-ins that keep what the real ones keep (fla v0.5.2 fla/modules/
l2norm.py, L2NormFunction; fla/ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction; causal_conv1d_interface.py,
CausalConv1dFn); the numbers they compute are not a delta rule's. The gate after the output's norm, which Megatron-Core has
compiled, keeps what it reads: test_mcore_linear.py asks torch's own partitioner.
"""

from __future__ import annotations

import copy
import sys
import types

import torch

CHUNK = 64


class UnitLength(torch.autograd.Function):
    """Keeps its output and one fp32 number per row."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.save_for_backward(y, x.new_ones(x.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class Convolution(torch.autograd.Function):
    """Keeps its input and its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), torch.zeros_like(ctx.saved_tensors[1])


class DeltaRule(torch.autograd.Function):
    """Keeps q, k, v, beta, the summed decays, and one matrix of chunk by chunk a chunk and head."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        matrix = k.new_zeros(*k.shape[:3], CHUNK)
        ctx.save_for_backward(q, k, v, g.cumsum(1), beta, matrix)
        return v.clone()

    @staticmethod
    def backward(ctx, grad):
        q, k, v, g, beta, _ = (torch.zeros_like(t) for t in ctx.saved_tensors)
        return q, k, v, g, beta


class Gate(torch.autograd.Function):
    """Keeps both factors."""

    @staticmethod
    def forward(ctx, y, gate):
        ctx.save_for_backward(y, gate)
        return y * gate

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


def extensions():
    """The libraries, before Megatron's ssm modules are imported."""
    rule = lambda q, k, v, g, beta, **_: (DeltaRule.apply(q, k, v, g, beta), None)  # noqa: E731
    convolve = lambda x, weight, bias=None, activation=None: Convolution.apply(x, weight)  # noqa: E731
    names = {
        "fla": {},
        "fla.modules": {},
        "fla.modules.l2norm": {"l2norm": UnitLength.apply},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": rule},
        "causal_conv1d": {"causal_conv1d_fn": convolve, "causal_conv1d_update": None},
    }
    for name, found in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(found)


def gated_norm(self, x, gate):
    """In place of GatedDeltaNet._apply_gated_norm."""
    return Gate.apply(self.out_norm(x.reshape(-1, x.shape[-1])), gate.reshape(-1, gate.shape[-1]))


def layers(specs, pattern):
    """The specs of a model's layers, one each, with linear attention where the pattern has a 1."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    GatedDeltaNet._apply_gated_norm = gated_norm
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    found = []
    for spec, linear in zip(specs, pattern, strict=True):
        own = copy.deepcopy(spec)
        if linear:
            own.submodules.self_attention = mixer
        found.append(own)
    return found
