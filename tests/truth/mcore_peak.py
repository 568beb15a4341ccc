"""The most bytes alive at once while Megatron-Core runs: every storage from the op that makes it until it dies."""

from __future__ import annotations

import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KERNELS = {
    "megatron.core.fusions.fused_bias_gelu": ("bias_gelu", "bias_gelu_back"),
    "megatron.core.fusions.fused_bias_swiglu": ("swiglu", "bias_swiglu", "swiglu_back", "bias_swiglu_back"),
    "scaled_upper_triang_masked_softmax_cuda": ("forward", "backward"),
    "fused_weight_gradient_mlp_cuda": ("wgrad_gemm_accum_fp32",),
}
"""Functions that a GPU runs as one kernel: what they make inside are registers there, not memory."""


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and the most there have been; `known` ones (parameters, main gradients) do not count."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive = {}
        self.most, self.op, self.inside = 0, "", 0

    @classmethod
    def _should_skip_dynamo(cls):
        """Nothing is compiled in here, and torch's guard against that costs more than what is done."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dim():
                storage = t.untyped_storage()
                if storage._cdata not in self.known and self.alive.get(storage._cdata, lambda: None)() is None:
                    self.alive[storage._cdata] = weakref.ref(storage)
        if not self.inside:
            self.look(str(func))
        return out

    def look(self, op):
        """Note what is alive now."""
        self.alive = {key: ref for key, ref in self.alive.items() if ref() is not None}
        total = sum(ref().nbytes() for ref in self.alive.values())
        if total > self.most:
            self.most, self.op = total, op

    def restart(self):
        """Forget the peak, keep what is alive; returns the peak so far."""
        past, self.most, self.op = [self.most, self.op], 0, ""
        return past

    def fuse(self):
        """Count each of KERNELS as one op."""
        for module, names in KERNELS.items():
            for name in names:
                setattr(sys.modules[module], name, self.one_kernel(name, getattr(sys.modules[module], name)))

    def one_kernel(self, name, plain):
        """`plain`, looked at only when it is done."""
        plain = getattr(plain, "plain", plain)

        def fused(*args):
            self.inside += 1
            out = plain(*args)
            self.inside -= 1
            self.look(name)
            return out

        fused.plain = plain
        return fused
