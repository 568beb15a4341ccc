"""Opcodes with a literal in the stream, and the memo; every length is checked against the stream."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from steptime.checkpoint.pickles.values import Op, Opaque, PickleState

KEEP_BYTES = 4096  # longer byte strings are tensor data or images: only their length matters here
KEEP_DIGITS = 40


def need(m: PickleState, i: int, length: int) -> int:
    """Offset after the next `length` bytes. Raises ValueError, with both numbers, if the stream has fewer."""
    left = len(m.data) - i
    if length > left:
        raise ValueError(f"opcode at {i} needs {length} bytes, {max(left, 0)} left")
    return i + length


def put(m: PickleState, k: int) -> None:
    """Store the top of the stack as memo entry `k`; entries far out of order go to a dict."""
    if k < 0:
        raise ValueError("negative memo index")
    if k < len(m.memo):
        m.memo[k] = m.stack[-1]
    elif k == len(m.memo) and k not in m.far:
        m.memo.append(m.stack[-1])
    else:
        m.far[k] = m.stack[-1]


def get(m: PickleState, k: int) -> None:
    """Push memo entry `k`."""
    if k >= len(m.memo) and k not in m.far:
        raise ValueError(f"memo entry {k} was never written")
    m.stack.append(m.memo[k] if 0 <= k < len(m.memo) else m.far[k])


def line(m: PickleState, i: int) -> tuple[bytes, int]:
    """The text up to the next newline, and the offset after it."""
    end = m.data.find(b"\n", i)
    if end < 0:
        raise IndexError
    return m.data[i:end], end + 1


def binary_float(m: PickleState, i: int) -> int:
    """BINFLOAT: eight bytes, the highest first."""
    m.stack.append(struct.unpack_from(">d", m.data, i)[0])
    return i + 8


def sized(width: int, keep: Callable[[bytes], Any], kind: str = "") -> Op:
    """A length of `width` bytes, then that many bytes; long values of `kind` are not kept."""

    def op(m: PickleState, i: int) -> int:
        start = need(m, i, width)
        length = int.from_bytes(m.data[i:start], "little")
        end = need(m, start, length)
        big = kind and length > KEEP_BYTES
        m.stack.append(Opaque(kind, length, start) if big else keep(m.data[start:end]))
        return end

    return op


def text(data: bytes) -> str:
    """UTF-8, lone surrogates let through as the unpickler does."""
    return str(data, "utf-8", "surrogatepass")


def integer(data: bytes) -> Any:
    """A little-endian signed integer; a very long one is not built."""
    return int.from_bytes(data, "little", signed=True) if len(data) <= KEEP_DIGITS else Opaque("int", len(data))


def lined(keep: Callable[[bytes], Any]) -> Op:
    """An opcode whose literal ends at a newline."""

    def op(m: PickleState, i: int) -> int:
        raw, j = line(m, i)
        m.stack.append(keep(raw))
        return j

    return op


def decimal(line: bytes) -> Any:
    """A decimal integer or the old spelling of a bool; a very long one is not built."""
    if line in (b"00", b"01"):
        return line == b"01"
    digits = line.rstrip(b"L")
    return int(digits) if len(digits) <= KEEP_DIGITS else Opaque("int", len(digits))


def memo(act: Callable[[PickleState, int], None], width: int = 0) -> Op:
    """A memo opcode, whose index has `width` bytes or is a line of text."""

    def op(m: PickleState, i: int) -> int:
        if not width:
            raw, j = line(m, i)
            act(m, int(raw))
            return j
        end = need(m, i, width)
        act(m, int.from_bytes(m.data[i:end], "little"))
        return end

    return op
