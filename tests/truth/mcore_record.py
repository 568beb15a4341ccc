"""What a run did: its collectives, and the storages it kept for backward."""

from __future__ import annotations

import contextlib
import os
import traceback
import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
}
UNEVEN = {"allgather_": "all_gather", "reduce_scatter_": "reduce_scatter"}
"""Collectives of a tensor and a list of its parts, of any sizes."""


class Collectives(TorchDispatchMode):
    """Writes down every c10d collective: kind, ranks of its group, bytes of the full tensor, dtype."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @classmethod
    def _should_skip_dynamo(cls):
        """Nothing is compiled in here, and torch's guard against that costs more than what is done."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.write_down(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def write_down(self, name, args):
        objects = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
        ranks = dist.ProcessGroup.unbox(objects[0]).size()
        lists = [tensors(a) for a in args if tensors(a)]
        if name in UNEVEN:
            full = max(sum(t.nbytes for t in found) for found in lists)
            self.calls.append([UNEVEN[name], ranks, full, str(lists[0][0].dtype).removeprefix("torch.")])
            return
        # one coalesced call carries several collectives: position k of its inputs and outputs belong together
        for call in zip(*lists, strict=True):
            full = max(call, key=torch.Tensor.numel)
            self.calls.append([COLLECTIVES[name], ranks, full.nbytes, str(full.dtype).removeprefix("torch.")])


def tensors(a):
    """All tensors in nested lists."""
    if isinstance(a, torch.Tensor):
        return [a]
    return [t for x in a for t in tensors(x)] if isinstance(a, list | tuple) else []


class Kept:
    """What autograd holds in place of a saved tensor: it dies when its graph does."""

    def __init__(self, tensor, module):
        self.tensor, self.module = tensor, module
        self.saver = caller() if "MCORE_TRACE" in os.environ else ""


class Saved:
    """Storages saved for backward that are not parameters, with the module that was running when each was first saved."""

    def __init__(self, model):
        self.params = {p.untyped_storage()._cdata for p in model.parameters()}
        self.names = {m: name for name, m in model.named_modules()}
        self.stack = [""]
        self.kept = []

    def pack(self, t):
        kept = Kept(t, self.stack[-1])
        self.kept.append(weakref.ref(kept))
        return kept

    def rows(self):
        """[module, shape, dtype, bytes, savers] of each storage that autograd still holds.

        Bytes are those of now: a storage discarded for recomputation counts 0.
        """
        rows = {}
        for kept in filter(None, (reference() for reference in self.kept)):
            t = kept.tensor
            storage = t.untyped_storage()
            if storage._cdata not in self.params:
                row = [kept.module, list(t.shape), str(t.dtype).removeprefix("torch."), storage.nbytes(), []]
                rows.setdefault(storage._cdata, row)[4].append(kept.saver)
        return list(rows.values())

    def storages(self):
        """Those that autograd still holds."""
        return {kept.tensor.untyped_storage()._cdata for kept in filter(None, (r() for r in self.kept))}

    @contextlib.contextmanager
    def watch(self):
        nn = torch.nn.modules.module
        enter = nn.register_module_forward_pre_hook(lambda m, _: self.stack.append(self.names.get(m, self.stack[-1])))
        leave = nn.register_module_forward_hook(lambda *_: self.stack.__delitem__(-1), always_call=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor):
                yield
        finally:
            enter.remove()
            leave.remove()


def caller():
    """file:line of the innermost frame of Megatron or torch.nn (MCORE_TRACE=1, for people who look for a difference)."""
    frames = [f for f in traceback.extract_stack() if "megatron" in f.filename or "torch/nn" in f.filename]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
