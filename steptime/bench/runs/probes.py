"""What torch itself reports about a run: tensors saved for backward, bytes alive after each op, collectives issued.

Nothing here needs a GPU: autograd's hooks and the dispatcher see what runs on any device.
"""

# storages and process groups have no public names for what is needed here
# ruff: noqa: SLF001
# mypy: disable-error-code="no-untyped-call, override, attr-defined, arg-type"

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from functools import cache
from time import sleep
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode as get_dispatch_mode
from torch._C import _TorchDispatchModeKey
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAKE = _TorchDispatchModeKey.FAKE
"""Tensors without data, on which DTensor tries an op out: such an op did not run."""


class SavedTensor(NamedTuple):
    """One storage that autograd keeps."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """The storages saved for backward inside the `with`, each once; those of `exclude` (parameters, buffers) do not count."""

    def __init__(self, exclude: Iterable[Tensor]) -> None:
        self._exclude = {local(t).untyped_storage()._cdata for t in exclude}
        self._storages: dict[int, SavedTensor] = {}
        self._alive: list[Any] = []  # a freed storage's address may be reused
        super().__init__(self._pack, lambda t: t)

    def __enter__(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self._exclude and storage._cdata not in self._storages:
            self._alive.append(storage)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._storages[storage._cdata] = SavedTensor(storage.nbytes(), tuple(tensor.shape), dtype)
        return tensor

    @property
    def tensors(self) -> list[SavedTensor]:
        """Every storage, in the order in which it was first kept."""
        return list(self._storages.values())

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.bytes for t in self.tensors)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor under a DTensor or an asynchronous collective's result."""
    while (
        type(tensor) is not Tensor
        and (inner := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None
    ):
        tensor = inner
    return tensor


class IssuedCollective(NamedTuple):
    """One call: `bytes` is the full tensor (output of an all-gather, input of a reduction, message of a send)."""

    kind: str
    dtype: str
    ranks: int
    bytes: int


_KINDS = {
    **dict.fromkeys(("_allgather_base_", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("allreduce_", "all_reduce", "all_reduce_"), "all_reduce"),
    **dict.fromkeys(("all_to_all_single", "alltoall_base_"), "all_to_all"),
    **dict.fromkeys(("send", "recv_"), "send_recv"),
    "broadcast_": "broadcast",
}


def collective(func: Any, args: Any, out: Any) -> IssuedCollective | None:
    """What a dispatched op sends, None where it is no collective. An unknown op is an error."""
    if func.namespace not in {"c10d", "_c10d_functional"}:
        return None
    name = func._schema.name.split("::")[1]
    if name in {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}:
        return None
    tensors = [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
    sizes = [t.numel() * t.element_size() for t in tensors]
    kind, dtype = _KINDS[name], str(tensors[0].dtype).removeprefix("torch.")
    ranks = max(sizes) // min(sizes)
    if kind in {"all_reduce", "all_to_all", "broadcast", "send_recv"}:
        ranks = 2 if kind == "send_recv" else group_size(args)
    return IssuedCollective(kind, dtype, ranks, max(sizes))


def group_size(args: Any) -> int:
    """Ranks of the process group among an op's arguments: a group name, or a boxed ProcessGroup."""
    leaves: list[Any] = tree_leaves(args)
    for arg in leaves:
        if isinstance(arg, str) and arg not in {"sum", "avg", "max", "min"}:
            resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
            return int(resolve(arg).size())
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(cast("Any", arg)._type()):
            return int(ProcessGroup.unbox(arg).size())
    raise ValueError("no process group among the arguments")


class Probe(TorchDispatchMode, ABC):
    """Every op that runs on real tensors inside the `with`, after it has run (`saw`): a DTensor's own ops are its local ones."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and torch's guard against that costs more than what a probe does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor unfold into the local op and its collectives first
        out = func(*args, **(kwargs or {}))
        if get_dispatch_mode(FAKE) is None:
            self.saw(func, args, kwargs, out)
        return out

    @abstractmethod
    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        """Note what an op did."""


class Collectives(Probe):
    """Every collective of the rank, counted by kind, dtype, group size and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[IssuedCollective] = Counter()

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:  # noqa: ARG002
        """Count a collective."""
        if (call := collective(func, args, out)) is not None:
            self.calls[call] += 1


class LivePeak(NamedTuple):
    """The most bytes alive, and the op after which they were."""

    op: str
    total: int


LET_GO_S = 2e-3
"""Seconds, with a wide margin, that a thread of the process group needs to release a finished collective's tensors."""


class LiveBytes(Probe):
    """Bytes of all storages alive after each dispatched op, and the peak.

    `known` are tensors made outside (parameters, buffers, gradients, states), counted from the start. Scalars do not
    count. Allocations inside a kernel and copies by gloo are not seen.
    """

    looks_at_views = False
    """Whether to look again after a view of a known storage, which allocates nothing."""
    reference: type[weakref.ref[Any]] = weakref.ref
    """What holds a storage."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.forget()
        for tensor in known:
            self._watch(tensor)

    def forget(self) -> None:
        """Start again with these storages known."""
        self.peak = LivePeak("", 0)

    def _watch(self, tensor: Tensor) -> bool:
        """Hold a storage; whether it is a new one."""
        storage = local(tensor).untyped_storage()  # an asynchronous result wraps its storage
        if (known := self._alive.get(storage._cdata)) is None or known() is None:
            self._alive[storage._cdata] = self.reference(storage)
            return True
        return False

    def _foreign(self, tensor: Tensor, op: str) -> bool:
        """Whether a storage is gloo's own: its reduce-scatter copies the input, which first appears when that is split."""
        if op != "aten.split.Tensor":
            return False
        storage = self._alive.get(local(tensor).untyped_storage()._cdata)
        return storage is None or storage() is None

    def look(self, op: str) -> None:
        """Record what is alive now, after `op`."""
        total = self._bytes()
        if total > self.peak.total and distributed_c10d.is_initialized() and distributed_c10d.get_backend() != "fake":
            # gloo's worker releases what it has sent a moment after its caller continues: not part of the peak
            sleep(LET_GO_S)
            total = self._bytes()
        if total > self.peak.total:
            self.peak = LivePeak(op, total)

    def _bytes(self) -> int:
        """Of every storage alive now, read anew: FSDP frees a parameter by resizing its storage to zero."""
        alive = [storage for ref in self._alive.values() if (storage := ref()) is not None]
        if 2 * len(alive) < len(self._alive):  # most are gone
            self._alive = {key: ref for key, ref in self._alive.items() if ref() is not None}
        return sum(map(torch.UntypedStorage.nbytes, alive))

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:  # noqa: ARG002
        """Hold what an op returns, then look."""
        name, new = op_name(func), False
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dim() and not self._foreign(tensor, name):
                new |= self._watch(tensor)
        if new or self.looks_at_views or not func.is_view:
            self.look(name)


@cache
def op_name(func: Any) -> str:
    """An op's name without the overload called default."""
    return str(func).removesuffix(".default")
