"""What each pickle opcode does to the machine: one function (machine, byte after the opcode) -> next byte."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.pickles.values import COMPUTED, Call, Opaque, Pairs, Pid, Ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.checkpoint.pickles.machine import Machine

    Op = Callable[[Machine, int], int]

KEEP_BYTES = 4096  # longer byte strings are tensor data or images: only their length matters here
KEEP_DIGITS = 40

# The opcodes of torch 2.13 `_weights_only_unpickler.Unpickler.load`.
TORCH_OPCODES = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")


class Stop(Exception):  # noqa: N818 - the end of the stream is no error
    """STOP was reached: `value` is the result, `at` the byte after it."""

    def __init__(self, value: Any, at: int) -> None:
        super().__init__()
        self.value = value
        self.at = at


def _pop_mark(m: Machine) -> list[Any]:
    start = m.marks.pop()
    if start > len(m.stack):
        raise ValueError("an opcode popped past a MARK")
    items = m.stack[start:]
    del m.stack[start:]
    return items


def _need(m: Machine, i: int, length: int) -> int:
    left = len(m.data) - i
    if length > left:
        raise ValueError(f"opcode at {i} wants {length} bytes, {max(left, 0)} left")
    return i + length


def _put(m: Machine, k: int) -> None:
    if k < 0:
        raise ValueError("negative memo index")
    if k < len(m.memo):
        m.memo[k] = m.stack[-1]
    elif k == len(m.memo) and k not in m.far:
        m.memo.append(m.stack[-1])
    else:
        m.far[k] = m.stack[-1]


def _get(m: Machine, k: int) -> None:
    if k >= len(m.memo) and k not in m.far:
        raise ValueError(f"memo entry {k} was never written")
    m.stack.append(m.memo[k] if 0 <= k < len(m.memo) else m.far[k])


def _line(m: Machine, i: int) -> tuple[bytes, int]:
    end = m.data.find(b"\n", i)
    if end < 0:
        raise IndexError
    return m.data[i:end], end + 1


def _ref(m: Machine, module: Any, name: Any, i: int) -> None:
    if type(module) is not str or type(name) is not str:
        module, name = COMPUTED, "global"  # named by the result of a call: only running it would tell
    ref = m.refs.get((module, name))
    if ref is None:
        ref = m.refs[module, name] = Ref(module, name, i - 1)
    m.stack.append(ref)


def call(m: Machine, func: Any, args: Any, i: int) -> None:
    """Push the record of `func(*args)`; torch.Size(t) is the tuple t itself, which halves a large `.metadata`."""
    if type(args) is not tuple:
        raise TypeError("call arguments are not a tuple")
    if type(func) is Ref:
        if func.is_size and len(args) == 1 and type(args[0]) in (tuple, list):
            func.called = func.called or i - 1
            m.stack.append(tuple(args[0]))
            return
        if not func.called:
            func.called = i - 1
            func.argc = len(args)
    elif not m.indirect:
        m.indirect = i - 1
    m.stack.append(Call(func, args))


def _reduce(m: Machine, i: int) -> int:
    args = m.stack.pop()
    call(m, m.stack.pop(), args, i)
    return i


def _newobj_ex(m: Machine, i: int) -> int:
    m.stack.pop()  # keyword arguments: no torch record uses them
    return _reduce(m, i)


def _obj(m: Machine, i: int) -> int:
    func, *args = _pop_mark(m)
    call(m, func, tuple(args), i)
    return i


def _inst(m: Machine, i: int) -> int:
    module, j = _line(m, i)
    name, j = _line(m, j)
    args = tuple(_pop_mark(m))
    _ref(m, module.decode(), name.decode(), i)
    call(m, m.stack.pop(), args, i)
    return j


def _global(m: Machine, i: int) -> int:
    module, j = _line(m, i)
    name, j = _line(m, j)
    _ref(m, module.decode(), name.decode(), i)
    return j


def _stack_global(m: Machine, i: int) -> int:
    name = m.stack.pop()
    _ref(m, m.stack.pop(), name, i)
    return i


def _extension(width: int) -> Op:
    def op(m: Machine, i: int) -> int:
        end = _need(m, i, width)
        _ref(m, "copyreg extension", str(int.from_bytes(m.data[i:end], "little")), i)
        return end

    return op


def _build(m: Machine, i: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Call:
        target.state = state
    elif type(target) not in (Ref, Pairs, Pid, tuple, list):
        raise TypeError(f"BUILD on {type(target).__name__}")
    return i


def _add_pairs(m: Machine, flat: list[Any]) -> None:
    target = m.stack[-1]
    if len(flat) % 2:
        raise ValueError("odd number of items for SETITEMS")
    if type(target) is Pairs:
        target.flat += flat
    elif type(target) is Call:
        if type(target.items) is not Pairs:
            target.items = Pairs()
        target.items.flat += flat
    elif type(target) not in (Ref, Pid):
        raise TypeError(f"SETITEM on {type(target).__name__}")


def _add_items(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target += items
    elif type(target) is Call:
        if type(target.items) is not list:
            target.items = []
        target.items += items
    elif type(target) not in (Ref, Pid):
        raise TypeError(f"APPEND on {type(target).__name__}")


def _setitem(m: Machine, i: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _add_pairs(m, [key, value])
    return i


def _setitems(m: Machine, i: int) -> int:
    _add_pairs(m, _pop_mark(m))
    return i


def _append(m: Machine, i: int) -> int:
    item = m.stack.pop()
    _add_items(m, [item])
    return i


def _appends(m: Machine, i: int) -> int:
    _add_items(m, _pop_mark(m))
    return i


def _dict(m: Machine, i: int) -> int:
    flat = _pop_mark(m)
    m.stack.append(Pairs())
    _add_pairs(m, flat)
    return i


def _marked(build: Callable[[list[Any]], Any]) -> Op:
    def op(m: Machine, i: int) -> int:
        m.stack.append(build(_pop_mark(m)))
        return i

    return op


def _top(n: int) -> Op:
    def op(m: Machine, i: int) -> int:
        if len(m.stack) < n:
            raise IndexError
        m.stack[-n:] = [tuple(m.stack[-n:])]
        return i

    return op


def _new(make: Callable[[], Any]) -> Op:
    def op(m: Machine, i: int) -> int:
        m.stack.append(make())
        return i

    return op


def _unpack(code: str) -> Op:
    reader = struct.Struct(code)

    def op(m: Machine, i: int) -> int:
        m.stack.append(reader.unpack_from(m.data, i)[0])
        return i + reader.size

    return op


def _sized(width: int, keep: Callable[[bytes], Any], kind: str = "") -> Op:
    """A length of `width` bytes, then that many bytes; those of `kind` longer than is useful stay unread."""

    def op(m: Machine, i: int) -> int:
        start = _need(m, i, width)
        length = int.from_bytes(m.data[i:start], "little")
        end = _need(m, start, length)
        big = kind and length > KEEP_BYTES
        m.stack.append(Opaque(kind, length) if big else keep(m.data[start:end]))
        return end

    return op


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _integer(data: bytes) -> Any:
    return int.from_bytes(data, "little", signed=True) if len(data) <= KEEP_DIGITS else Opaque("int", len(data))


def _lined(keep: Callable[[bytes], Any]) -> Op:
    def op(m: Machine, i: int) -> int:
        line, j = _line(m, i)
        m.stack.append(keep(line))
        return j

    return op


def _decimal(line: bytes) -> Any:
    if line in (b"00", b"01"):
        return line == b"01"
    digits = line.rstrip(b"L")
    return int(digits) if len(digits) <= KEEP_DIGITS else Opaque("int", len(digits))


def _memo_text(act: Callable[[Machine, int], None]) -> Op:
    def op(m: Machine, i: int) -> int:
        line, j = _line(m, i)
        act(m, int(line))
        return j

    return op


def _memo_binary(act: Callable[[Machine, int], None], width: int) -> Op:
    def op(m: Machine, i: int) -> int:
        end = _need(m, i, width)
        act(m, int.from_bytes(m.data[i:end], "little"))
        return end

    return op


def _memoize(m: Machine, i: int) -> int:
    _put(m, len(m.memo) + len(m.far))
    return i


def _mark(m: Machine, i: int) -> int:
    m.marks.append(len(m.stack))
    return i


def _pop(m: Machine, i: int) -> int:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()
    return i


def _pop_to_mark(m: Machine, i: int) -> int:
    _pop_mark(m)
    return i


def _dup(m: Machine, i: int) -> int:
    m.stack.append(m.stack[-1])
    return i


def _persid(m: Machine, i: int) -> int:
    m.stack[-1] = Pid(m.stack[-1])
    return i


def _proto(m: Machine, i: int) -> int:
    m.proto = max(m.proto, m.data[i])
    return i + 1


def _skip(width: int) -> Op:
    """FRAME is only a hint for buffering: its length may be anything."""

    def op(m: Machine, i: int) -> int:
        return _need(m, i, width)

    return op


def _stop(m: Machine, i: int) -> int:
    raise Stop(m.stack.pop(), i)


def _unknown(m: Machine, i: int) -> int:
    raise ValueError(f"unknown opcode 0x{m.data[i - 1]:02x}")


_LATIN = _sized(4, lambda data: data.decode("latin-1"))
_OPS: dict[str, Op] = {
    "(": _mark, ".": _stop, "0": _pop, "1": _pop_to_mark, "2": _dup, "F": _lined(float), "I": _lined(_decimal),
    "J": _unpack("<i"), "K": _unpack("<B"), "L": _lined(_decimal), "M": _unpack("<H"), "N": _new(lambda: None),
    "P": _lined(lambda line: Pid(line.decode("latin-1"))), "Q": _persid, "R": _reduce,
    "S": _lined(lambda line: line.strip(b"\r")[1:-1].decode("latin-1")), "T": _LATIN,
    "U": _sized(1, lambda data: data.decode("latin-1")), "V": _lined(lambda line: line.decode("raw-unicode-escape")),
    "X": _sized(4, _text), "a": _append, "b": _build, "c": _global, "d": _dict, "}": _new(Pairs), "e": _appends,
    "g": _memo_text(_get), "h": _memo_binary(_get, 1), "i": _inst, "j": _memo_binary(_get, 4), "l": _marked(list),
    "]": _new(list), "o": _obj, "p": _memo_text(_put), "q": _memo_binary(_put, 1), "r": _memo_binary(_put, 4),
    "s": _setitem, "t": _marked(tuple), ")": _new(tuple), "u": _setitems, "G": _unpack(">d"),
    "\x80": _proto, "\x81": _reduce, "\x82": _extension(1), "\x83": _extension(2), "\x84": _extension(4),
    "\x85": _top(1), "\x86": _top(2), "\x87": _top(3), "\x88": _new(lambda: True), "\x89": _new(lambda: False),
    "\x8a": _sized(1, _integer), "\x8b": _sized(4, _integer, "int"), "B": _sized(4, bytes, "bytes"),
    "C": _sized(1, bytes), "\x8c": _sized(1, _text), "\x8d": _sized(8, _text), "\x8e": _sized(8, bytes, "bytes"),
    "\x8f": _new(list), "\x90": _appends, "\x91": _marked(tuple), "\x92": _newobj_ex, "\x93": _stack_global,
    "\x94": _memoize, "\x95": _skip(8), "\x96": _sized(8, bytes, "bytes"), "\x97": _new(lambda: Opaque("buffer", 0)),
    "\x98": lambda _m, i: i,
}  # fmt: skip


def _noting_foreign(number: int, op: Op) -> Op:
    """Opcodes torch's weights_only unpickler does not know are remembered."""
    if number in TORCH_OPCODES:
        return op

    def noted(m: Machine, i: int) -> int:
        m.foreign.add(number)
        return op(m, i)

    return noted


TABLE: list[Op] = [_noting_foreign(number, _OPS.get(chr(number), _unknown)) for number in range(256)]
