"""What stands between Megatron-Core and a CPU, and how each gap is closed.

Megatron asks CUDA for a device and random states; torch's norms refuse sequence parallelism when they are built; CPU dropout
keeps a mask in the activation's dtype where CUDA's `native_dropout`, chosen here, keeps bools. Megatron's CUDA extensions are
replaced by a few lines of torch: the autograd functions that call them, and what those keep, are Megatron's own.
"""

from __future__ import annotations

import contextlib
import sys
import types

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def extensions():
    """Stand-ins for Megatron's CUDA extensions; Megatron looks for them when it is imported."""
    sys.modules["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=_wgrad, wgrad_gemm_accum_fp16=_wgrad
    )
    sys.modules["scaled_masked_softmax_cuda"] = types.SimpleNamespace(get_batch_per_block=lambda *_: 1)
    sys.modules["scaled_upper_triang_masked_softmax_cuda"] = types.SimpleNamespace(
        forward=_softmax, backward=_softmax_back
    )


def _wgrad(x, grad_output, main_grad):
    main_grad.add_(grad_output.t().matmul(x).to(main_grad.dtype))


def _softmax(x, scale):
    future = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax((x.float() * scale).masked_fill(future, -10000.0), -1).to(x.dtype)


def _softmax_back(grad, probs, scale):
    """In place, as apex's scaled_upper_triang_masked_softmax backward is."""
    return grad.copy_(torch.ops.aten._softmax_backward_data(grad, probs, -1, probs.dtype) * scale)


def device_and_random():
    """Device, random states and fp8 helpers that exist only with CUDA or TransformerEngine."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.get_rng_state = lambda *_, **__: torch.zeros(1)
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)
    random._set_all_rng_states = lambda cpu, *_: torch.set_rng_state(cpu)
    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    random.fp8_autocast = lambda **_: contextlib.nullcontext()


def norms():
    """Let torch's norms be built under sequence parallelism, marked as Megatron's FusedLayerNorm marks its weights."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def norm(cls, config, hidden_size, **kwargs):
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        module = build(cls, config, hidden_size, **kwargs)
        config.sequence_parallel = sequence_parallel
        for weight in module.parameters():
            weight.sequence_parallel = sequence_parallel
        return module

    WrappedTorchNorm.__new__ = norm


def optimizer_types():
    """The distributed optimizer knows parameters by the CUDA names of their types."""
    plain = torch.Tensor.type

    def cuda_name(self, *args, **kwargs):
        name = plain(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and "cuda" not in name else name

    torch.Tensor.type = cuda_name


class CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def bool_dropout_masks():
    """Dropout by `native_dropout`, as on CUDA."""
    plain = functional.dropout

    def native(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p > 0 and training else plain(x, p, training, inplace)

    functional.dropout = native
    try:
        yield
    finally:
        functional.dropout = plain
