"""All pickles in a byte string: consecutive ones, and those that a stream holds as bytes for a nested loader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.values import CallRecord, Opaque, PickleState

MAX_STREAMS = 1000
MAX_DEPTH = 4  # of streams inside streams; torch nests one


@dataclass(slots=True)
class Streams:
    """`roots` are the values in order, `states` the interpreter states, including nested streams.

    `end` is the offset after the last complete stream; `error` is why the next one could not be read.
    """

    where: str
    roots: list[Any] = field(default_factory=list)
    states: list[PickleState] = field(default_factory=list)
    end: int = 0
    error: MalformedError | None = None

    @property
    def root(self) -> Any:
        """The first value, which is what one call of a loader returns."""
        return self.roots[0] if self.roots else None


def read(data: bytes, where: str, at: int = 0, most: int = MAX_STREAMS) -> Streams:
    """Up to `most` pickles of `data` from byte `at`; the state of an incomplete one is the last of `states`."""
    found = Streams(where, end=at)
    while found.end < len(data) and len(found.roots) < most:
        name = where if not found.roots else f"stream {len(found.roots) + 1} of {where}"
        interpreter = PickleInterpreter(data, found.end, name)
        found.states.append(interpreter)
        try:
            found.roots.append(interpreter.run())
        except MalformedError as error:
            found.error = error
            break
        found.end = interpreter.end
    if not data:
        found.error = MalformedError("no bytes", 0)
    pending = [(state, 1) for state in found.states]
    while pending:
        state, depth = pending.pop()
        for call in state.nested if depth <= MAX_DEPTH else ():
            inner = _nested(call, state, depth)
            found.states += inner
            pending += [(each, depth + 1) for each in inner]
            if len(found.states) > MAX_STREAMS:
                return found
    return found


def _nested(call: CallRecord, outer: PickleState, depth: int) -> list[PickleState]:
    """The streams in the bytes passed to a loader; the value of the object stream becomes the call's argument.

    torch pickles a storage outside an archive as a call of `torch.storage._load_from_bytes` with a legacy torch file:
    the fourth of its five pickles is the object.
    """
    data = _payload(call.args[0] if call.args else None, outer.data)
    states: list[PickleState] = []
    at = 0
    for number in range(5):
        inner = PickleInterpreter(data, at, f"a stream inside {outer.where}" if depth == 1 else outer.where)
        states.append(inner)
        try:
            value = inner.run()
        except MalformedError:
            outer.unread += 1
            break
        if number in (0, 3):
            call.args = (value,)
        at = inner.end
        if at >= len(data):
            break  # bytes of a bare pickle, not of a torch file
    return states


def _payload(value: Any, data: bytes) -> bytes:
    """The payload: literal bytes, bytes too long to have been kept, or (protocol 2) encoded text."""
    if type(value) is Opaque and value.kind == "bytes":
        return data[value.at : value.at + value.size]
    if type(value) is CallRecord and value.path == "_codecs.encode" and value.args and type(value.args[0]) is str:
        return value.args[0].encode("latin-1", "replace")
    return value if type(value) is bytes else b""
