"""What torch itself reports about a run: tensors saved for backward, bytes alive after each op, collectives issued.

Nothing here needs a GPU: autograd's hooks and the dispatcher see what runs on any device.
"""

# storages and process groups have no public names for what is needed here
# ruff: noqa: SLF001
# mypy: disable-error-code="no-untyped-call, override, attr-defined, arg-type"

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from time import sleep
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class Collectives(TorchDispatchMode):
    """Every collective of the rank, counted by kind, dtype, group size and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[IssuedCollective] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor unfold into the local op and its collectives first
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is None and (call := collective(func, args, out)) is not None:
            self.calls[call] += 1
        return out


class Storage:
    """One storage alive, and its purpose (`role`), as far as known from the ops that used it."""

    def __init__(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        self.ref, self.op, self.role, self.shape = weakref.ref(storage), op, "activation", tuple(tensor.shape)


# Where an op's arguments tell storages' roles: paths to the tensors, and the role
_Pick = Callable[[Any, Any], Any]
_ROLES: dict[str, list[tuple[_Pick, str]]] = {
    "c10d._allgather_base_": [(lambda a, _: [a[0]], "all_gather_output")],
    "c10d._reduce_scatter_base_": [(lambda a, _: [a[0]], "reduce_output"), (lambda a, _: [a[1]], "reduce_input")],
    "fsdp.split_with_sizes_copy": [(lambda _, k: k["out"], "unsharded_param")],
    "fsdp.chunk_cat": [(lambda a, _: a[0], "unsharded_grad")],
    "fsdp.all_gather_copy_in": [(lambda a, _: a[0], "copy_in")],
}


@cache
def _name(func: Any) -> str:
    """An op's name without the overload called default."""
    return str(func).removesuffix(".default")


class Moment(NamedTuple):
    """The storages alive just after an op."""

    op: str
    total: int
    alive: list[tuple[Storage, int]]

    def role(self, role: str) -> int:
        """Bytes with one role."""
        return sum(size for storage, size in self.alive if storage.role == role)


LET_GO_S = 2e-3
"""Seconds, with a wide margin, that a thread of the process group needs to release a finished collective's tensors."""


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages alive after each dispatched op; the peak; with `log`, what was alive at every moment.

    `known` are tensors made outside (parameters, buffers, gradients, states), counted from the start. Scalars do not
    count. Allocations inside a kernel and copies by gloo are not seen; `one_kernel` makes several ops count as one kernel.
    """

    _active: ClassVar[list[LiveBytes]] = []
    _inside_kernel: ClassVar[int] = 0

    def __init__(self, known: Iterable[Tensor] = (), *, log: bool = False) -> None:
        super().__init__()
        self.moments: list[Moment] = []
        self.peak = Moment("", 0, [])
        self._log = log
        self._alive: dict[int, Storage] = {}
        for tensor in known:
            self._watch(local(tensor), "known").role = "known"

    def _watch(self, tensor: Tensor, op: str) -> Storage:
        key = tensor.untyped_storage()._cdata
        storage = self._alive.get(key)
        if storage is None or storage.ref() is None:
            storage = self._alive[key] = Storage(tensor, op)
        return storage

    def _foreign(self, tensor: Tensor, op: str) -> bool:
        """Whether a storage is gloo's own: its reduce-scatter copies the input, which first appears when that is split."""
        return op == "aten.split.Tensor" and local(tensor).untyped_storage()._cdata not in self._alive

    def look(self, op: str) -> None:
        """Record what is alive now, after `op`."""
        total = self._bytes()
        if total > self.peak.total and distributed_c10d.is_initialized() and distributed_c10d.get_backend() != "fake":
            # gloo's worker releases what it has sent a moment after its caller continues: not part of the peak
            sleep(LET_GO_S)
            total = self._bytes()
        if self._log or total > self.peak.total:
            alive = [
                (storage, held.nbytes()) for storage in self._alive.values() if (held := storage.ref()) is not None
            ]
            moment = Moment(op, sum([size for _, size in alive]), alive)
            self.peak = max(self.peak, moment, key=lambda one: one.total)
            if self._log:
                self.moments.append(moment)

    def _bytes(self) -> int:
        """Of every storage alive now, read anew: FSDP frees a parameter by resizing its storage to zero."""
        total, gone = 0, list[int]()
        for key, storage in self._alive.items():
            held = storage.ref()
            if held is None:
                gone.append(key)
            else:
                total += held.nbytes()
        for key in gone:
            del self._alive[key]
        return total

    def forget(self) -> None:
        """Start again with these storages known."""
        self.moments, self.peak = [], Moment("", 0, [])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is None:
            name = _name(func)
            for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.dim() and not self._foreign(tensor, name):
                    self._watch(local(tensor), name)  # an asynchronous result wraps its storage
            for tensors, role in _ROLES.get(name, ()):
                for tensor in tensors(args, kwargs or {}):
                    storage = self._watch(local(tensor), name)
                    storage.role = storage.role if storage.role == "known" else role
            if not self._inside_kernel:
                self.look(name)
        return out

    def __enter__(self) -> Self:
        super().__enter__()
        self._active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._active.remove(self)
        super().__exit__(*exception)

    @classmethod
    @contextmanager
    def one_kernel(cls, name: str) -> Iterator[None]:
        """Ops that a GPU would run as one kernel: their temporaries are registers there and use no memory."""
        cls._inside_kernel += 1
        try:
            yield
        finally:
            cls._inside_kernel -= 1
            for live in cls._active:
                live.look(name)
