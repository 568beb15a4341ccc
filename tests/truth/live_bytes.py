"""What was alive at every moment of a run, and its purpose; several ops as one kernel."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from steptime.bench.runs import probes

# Where an op's arguments tell storages' roles: paths to the tensors, and the role
_ROLES: dict[str, list[tuple[Callable[[Any, Any], Any], str]]] = {
    "c10d._allgather_base_": [(lambda a, _: [a[0]], "all_gather_output")],
    "c10d._reduce_scatter_base_": [(lambda a, _: [a[0]], "reduce_output"), (lambda a, _: [a[1]], "reduce_input")],
    "fsdp.split_with_sizes_copy": [(lambda _, k: k["out"], "unsharded_param")],
    "fsdp.chunk_cat": [(lambda a, _: a[0], "unsharded_grad")],
    "fsdp.all_gather_copy_in": [(lambda a, _: a[0], "copy_in")],
}


class Held(weakref.ref):
    """A storage, and its purpose as far as known from the ops that used it, later ones included."""

    role = "activation"


class Moment(NamedTuple):
    """The storages alive just after an op."""

    op: str
    total: int
    alive: list[tuple[Held, int]]

    def role(self, role: str) -> int:
        """Bytes with one role."""
        return sum(size for held, size in self.alive if held.role == role)


class LiveBytes(probes.LiveBytes):
    """`probes.LiveBytes` that also takes several ops for one kernel (`one_kernel`); with `log` it keeps every moment."""

    _active: ClassVar[list[LiveBytes]] = []
    _inside_kernel: ClassVar[int] = 0
    reference = Held

    def __init__(self, known: Iterable[Tensor] = (), *, log: bool = False) -> None:
        self._log = self.looks_at_views = log
        known = list(known)
        super().__init__(known)
        for tensor in known:
            self.is_for(tensor, "known")

    def is_for(self, tensor: Tensor, role: str) -> None:
        """Note the role of a storage, unless it was known from the start."""
        self._watch(tensor)
        held = self._alive[probes.local(tensor).untyped_storage()._cdata]
        held.role = held.role if held.role == "known" else role

    def forget(self) -> None:
        super().forget()
        self.moments: list[Moment] = []

    def look(self, op: str) -> None:
        if self._inside_kernel:
            return
        super().look(op)
        if self._log:
            alive = [(held, storage.nbytes()) for held in self._alive.values() if (storage := held()) is not None]
            self.moments.append(Moment(op, sum(size for _, size in alive), alive))

    def saw(self, func, args, kwargs, out):
        for tensors, role in _ROLES.get(probes.op_name(func), ()):
            for tensor in tensors(args, kwargs or {}):
                self.is_for(tensor, role)
        super().saw(func, args, kwargs, out)

    def __enter__(self) -> Self:
        super().__enter__()
        self._active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._active.remove(self)
        super().__exit__(*exception)


@contextmanager
def one_kernel(name: str) -> Iterator[None]:
    """Ops that a GPU would run as one kernel: their temporaries are registers there and use no memory."""
    LiveBytes._inside_kernel += 1
    try:
        yield
    finally:
        LiveBytes._inside_kernel -= 1
        for live in LiveBytes._active:
            live.look(name)


class LiveCalls(LiveBytes):
    """`LiveBytes` that counts collectives too, as `probes.Collectives` does."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(known)
        self.calls: Counter[probes.IssuedCollective] = Counter()

    def saw(self, func, args, kwargs, out):
        super().saw(func, args, kwargs, out)
        if (call := probes.collective(func, args, out)) is not None:
            self.calls[call] += 1
