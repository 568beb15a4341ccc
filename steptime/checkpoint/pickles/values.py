"""Inert records of the objects that a pickle would build, and the state of the interpreter.

None of them is hashed, compared, called or imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

COMPUTED = "computed"  # module of a global whose name the stream computes
EXTENSION = "copyreg extension"  # module of a global that only a registry of the loading process could name
STORAGE_LOADER = "torch.storage._load_from_bytes"  # how torch pickles a storage outside an archive of its own
LOADERS = frozenset(
    {STORAGE_LOADER, "pickle.loads", "_pickle.loads", "cPickle.loads", "cloudpickle.loads", "dill.loads", "dill._dill.loads",
     "cloudpickle.cloudpickle.loads", "marshal.loads", "torch.load"}
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Ref:
    """A global named by the stream: `module.name`.

    `at` is the byte of its first import, `called` of its first call, with `argc` arguments, `patched` of the first BUILD on
    it, which sets its attributes; `resolved` says that it is a getattr whose calls were followed to the attribute they name.
    """

    module: str
    name: str
    at: int
    called: int = 0
    patched: int = 0
    argc: int = 0
    resolved: bool = False
    is_size: bool = field(init=False)
    is_getattr: bool = field(init=False)
    is_loader: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_size = self.path == "torch.Size"
        self.is_getattr = self.path in ("builtins.getattr", "__builtin__.getattr")
        self.is_loader = self.path in LOADERS

    @property
    def path(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"


class Pairs(list[Any]):
    """A dict, as the flat list key, value, key, value ... in stream order, since keys may not be hashable."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class CallRecord:
    """`func(*args)` followed by BUILD with `state`; `items` holds what SETITEMS (Pairs) or APPENDS (list) added."""

    func: Any
    args: Any
    state: Any = None
    items: Any = None

    @property
    def path(self) -> str:
        """Full name of what would be called, or "" when it is itself the result of a call."""
        return self.func.path if type(self.func) is Ref else ""


@dataclass(slots=True, eq=False)
class Pid:
    """A persistent id; torch writes ("storage", class, key, location, numel)."""

    value: Any


@dataclass(slots=True, eq=False)
class Opaque:
    """A value that is not kept: large bytes or a long integer, its size in bytes or digits, and its first byte."""

    kind: str
    size: int
    at: int = 0


class Stop(Exception):  # noqa: N818 - the end of the stream is no error
    """STOP was reached: `value` is the result, `at` the byte after it."""

    def __init__(self, value: Any, at: int) -> None:
        super().__init__()
        self.value = value
        self.at = at


@dataclass(eq=False)
class PickleState:
    """One stream of `data` being read, called `where` in messages.

    `end` is the byte at which it begins, and after STOP the byte behind it; `refs` the globals it names; `nested` the calls of
    loaders with their own bytes; `foreign` the opcodes torch's weights_only unpickler does not know; `indirect` the byte and the
    number of arguments of a call whose function is itself computed; `unread` counts nested byte strings that are not a stream.
    """

    data: bytes
    end: int = 0
    where: str = "the pickle"
    stack: list[Any] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)
    far: dict[int, Any] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    refs: dict[tuple[str, str], Ref] = field(default_factory=dict)
    nested: list[CallRecord] = field(default_factory=list)
    foreign: set[int] = field(default_factory=set)
    indirect: tuple[int, int] | None = None
    unread: int = 0
    memoized: bool = False

    def salvage(self) -> Any:
        """The value of an incomplete stream: pending items are added to the containers they belong to."""
        while self.marks:
            start = self.marks.pop()
            items = self.stack[start:]
            del self.stack[start:]
            below = self.stack[-1] if self.stack else None
            if type(below) is Pairs:
                below += items[: len(items) // 2 * 2]
            elif type(below) is list:
                below += items
            else:
                self.stack += items
        first = self.stack[0] if self.stack else None
        return first if type(first) in (Pairs, list, CallRecord) else self.stack


Op = Callable[[PickleState, int], int]
MAX_DIMS = 64
MAX_LENGTH = 1 << 63  # torch, numpy and ggml count in 64 bits


def shape_of(value: Any) -> tuple[int, ...] | None:
    """A shape: a tuple or list of integers that are not negative and below 2**63, else None."""
    if (
        type(value) in (tuple, list)
        and len(value) <= MAX_DIMS
        and all(type(n) is int and 0 <= n < MAX_LENGTH for n in value)
    ):
        return tuple(value)
    return None


def pairs(value: Any) -> list[tuple[Any, Any]]:
    """(key, value) of anything dict-like: a dict, an OrderedDict, an object's attributes; [] for the rest."""
    flat = [*_flat(value.items), *_flat(value.state)] if type(value) is CallRecord else _flat(value)
    return list(zip(flat[::2], flat[1::2], strict=False))


def mapping(value: Any) -> dict[str, Any]:
    """The string-keyed part of `pairs(value)`; later keys win, as in a dict."""
    return {key: item for key, item in pairs(value) if type(key) is str}


def _flat(value: Any) -> list[Any]:
    if type(value) is Pairs:
        return value
    if type(value) is tuple:  # (dict state, slots state), pickle protocol 2 and later
        return [item for part in value if type(part) is Pairs for item in part]
    return []
