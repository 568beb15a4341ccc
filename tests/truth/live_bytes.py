"""What was alive at every moment of a run, and its purpose; several ops as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor
from torch._guards import active_fake_mode

from steptime.bench.runs import probes

# Where an op's arguments tell storages' roles: paths to the tensors, and the role
_ROLES: dict[str, list[tuple[Callable[[Any, Any], Any], str]]] = {
    "c10d._allgather_base_": [(lambda a, _: [a[0]], "all_gather_output")],
    "c10d._reduce_scatter_base_": [(lambda a, _: [a[0]], "reduce_output"), (lambda a, _: [a[1]], "reduce_input")],
    "fsdp.split_with_sizes_copy": [(lambda _, k: k["out"], "unsharded_param")],
    "fsdp.chunk_cat": [(lambda a, _: a[0], "unsharded_grad")],
    "fsdp.all_gather_copy_in": [(lambda a, _: a[0], "copy_in")],
}


class Moment(NamedTuple):
    """The storages alive just after an op, with the role of each ("" where no op told one)."""

    op: str
    alive: list[tuple[str, int]]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.alive)

    def role(self, role: str) -> int:
        """Bytes with one role."""
        return sum(size for of, size in self.alive if of == role)


class LiveBytes(probes.LiveBytes):
    """`probes.LiveBytes` that also makes several ops count as one kernel (`one_kernel`); `log` keeps every moment."""

    _active: ClassVar[list[LiveBytes]] = []
    _inside_kernel: ClassVar[int] = 0

    def __init__(self, known: Iterable[Tensor] = (), *, log: bool = False) -> None:
        self._log = log
        self._roles: dict[int, tuple[Any, str]] = {}
        """By storage: the reference of `_alive` that it was told of, since an address may be used again, and the role."""
        known = list(known)
        super().__init__(known)
        for tensor in known:
            self.is_for(tensor, "known")

    def is_for(self, tensor: Tensor, role: str) -> None:
        """Note the role of a storage, unless it was known from the start."""
        self._watch(tensor)
        key = probes.local(tensor).untyped_storage()._cdata
        if self._role(key) != "known":
            self._roles[key] = (self._alive[key], role)

    def _role(self, key: int) -> str:
        held, role = self._roles.get(key, (None, ""))
        return role if held is self._alive[key] else ""

    def forget(self) -> None:
        super().forget()
        self.moments: list[Moment] = []

    def look(self, op: str) -> None:
        if self._inside_kernel:
            return
        super().look(op)
        if self._log:
            held = [(key, storage) for key, ref in self._alive.items() if (storage := ref()) is not None]
            self.moments.append(Moment(op, [(self._role(key), storage.nbytes()) for key, storage in held]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        told = _ROLES.get(probes.op_name(func), ()) if active_fake_mode() is None else ()
        looked, self._log = self._log, self._log and not told  # once, when the roles are known
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._log = looked
        if told and out is not NotImplemented:
            for tensors, role in told:
                for tensor in tensors(args, kwargs or {}):
                    self.is_for(tensor, role)
            self.look(probes.op_name(func))
        return out

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
