"""The effect of each pickle opcode: one function (state, offset after the opcode) -> next offset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.checkpoint.pickles.allowlist import OPCODES
from steptime.checkpoint.pickles.literals import (
    decimal,
    get,
    integer,
    lined,
    memo_binary,
    memo_text,
    memoize,
    need,
    new,
    put,
    readline,
    sized,
    skip,
    text,
    unpack,
)
from steptime.checkpoint.pickles.values import (
    COMPUTED,
    EXTENSION,
    CallRecord,
    Op,
    Opaque,
    Pairs,
    PickleState,
    Pid,
    Ref,
    Stop,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable


def _pop_mark(m: PickleState) -> list[Any]:
    start = m.marks.pop()
    if start > len(m.stack):
        raise ValueError("an opcode popped past a MARK")
    items = m.stack[start:]
    del m.stack[start:]
    return items


def _ref(m: PickleState, module: Any, name: Any, i: int) -> None:
    if type(module) is not str or type(name) is not str:
        module, name = COMPUTED, "global"  # named by the result of a call: only running it would tell
    ref = m.refs.get((module, name))
    if ref is None:
        ref = m.refs[module, name] = Ref(module, name, i - 1)
    m.stack.append(ref)


def call(m: PickleState, func: Any, args: Any, i: int) -> None:
    """Push the record of `func(*args)`; torch.Size(t) is the tuple t itself, which halves a large `.metadata`."""
    if type(args) is not tuple:
        raise TypeError("call arguments are not a tuple")
    if type(func) is Ref:
        if func.is_size and len(args) == 1 and type(args[0]) is tuple:
            func.called = func.called or i - 1
            m.stack.append(args[0])
            return
        if func.is_getattr and len(args) == 2 and type(args[0]) is Ref and type(args[1]) is str:
            func.resolved = True  # protocol 2 names nested classes so: the attribute is what counts
            _ref(m, args[0].module, f"{args[0].name}.{args[1]}", i)
            return
        if not func.called:
            func.called = i - 1
            func.argc = len(args)
    elif m.indirect is None:
        m.indirect = i - 1, len(args)
    m.stack.append(CallRecord(func, args))
    if type(func) is Ref and func.is_loader:
        m.nested.append(m.stack[-1])


def _reduce(m: PickleState, i: int) -> int:
    stack = m.stack
    args, func = stack.pop(), stack[-1]
    if type(func) is Ref and func.called and type(args) is tuple and not (func.is_size or func.is_loader):
        stack[-1] = CallRecord(func, args)  # the usual case, in place
    else:
        call(m, stack.pop(), args, i)
    return i


def _newobj_ex(m: PickleState, i: int) -> int:
    m.stack.pop()  # keyword arguments: no torch record uses them
    return _reduce(m, i)


def _obj(m: PickleState, i: int) -> int:
    func, *args = _pop_mark(m)
    call(m, func, tuple(args), i)
    return i


def _inst(m: PickleState, i: int) -> int:
    module, j = readline(m, i)
    name, j = readline(m, j)
    args = tuple(_pop_mark(m))
    _ref(m, module.decode(), name.decode(), i)
    call(m, m.stack.pop(), args, i)
    return j


def _global(m: PickleState, i: int) -> int:
    module, j = readline(m, i)
    name, j = readline(m, j)
    _ref(m, module.decode(), name.decode(), i)
    return j


def _stack_global(m: PickleState, i: int) -> int:
    name = m.stack.pop()
    _ref(m, m.stack.pop(), name, i)
    return i


def _extension(width: int) -> Op:
    def op(m: PickleState, i: int) -> int:
        end = need(m, i, width)
        _ref(m, EXTENSION, str(int.from_bytes(m.data[i:end], "little")), i)
        return end

    return op


def _build(m: PickleState, i: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is CallRecord:
        target.state = state
    elif type(target) is Ref:
        target.patched = target.patched or i - 1
    elif type(target) not in (Pairs, Pid, tuple, list):
        raise TypeError(f"BUILD on {type(target).__name__}")
    return i


def _add_pairs(m: PickleState, flat: list[Any]) -> None:
    target = m.stack[-1]
    if len(flat) % 2:
        raise ValueError("odd number of items for SETITEMS")
    if type(target) is Pairs:
        target.extend(flat)
    elif type(target) is CallRecord:
        if type(target.items) is not Pairs:
            target.items = Pairs()
        target.items.extend(flat)
    elif type(target) not in (Ref, Pid):
        raise TypeError(f"SETITEM on {type(target).__name__}")


def _add_items(m: PickleState, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target += items
    elif type(target) is CallRecord:
        if type(target.items) is not list:
            target.items = []
        target.items += items
    elif type(target) not in (Ref, Pid):
        raise TypeError(f"APPEND on {type(target).__name__}")


def _setitem(m: PickleState, i: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _add_pairs(m, [key, value])
    return i


def _setitems(m: PickleState, i: int) -> int:
    stack, start = m.stack, m.marks[-1]
    if 0 < start < len(stack) and type(stack[start - 1]) is Pairs and not (len(stack) - start) % 2:
        stack[start - 1] += stack[start:]  # the usual case, in place
        del stack[start:]
        m.marks.pop()
    else:
        _add_pairs(m, _pop_mark(m))
    return i


def _append(m: PickleState, i: int) -> int:
    item = m.stack.pop()
    _add_items(m, [item])
    return i


def _appends(m: PickleState, i: int) -> int:
    _add_items(m, _pop_mark(m))
    return i


def _dict(m: PickleState, i: int) -> int:
    flat = _pop_mark(m)
    m.stack.append(Pairs())
    _add_pairs(m, flat)
    return i


def _marked(build: Callable[[list[Any]], Any]) -> Op:
    def op(m: PickleState, i: int) -> int:
        m.stack.append(build(_pop_mark(m)))
        return i

    return op


def _top(n: int) -> Op:
    def op(m: PickleState, i: int) -> int:
        if len(m.stack) < n:
            raise IndexError
        m.stack[-n:] = [tuple(m.stack[-n:])]
        return i

    return op


def _mark(m: PickleState, i: int) -> int:
    m.marks.append(len(m.stack))
    return i


def _pop(m: PickleState, i: int) -> int:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()
    return i


def _pop_to_mark(m: PickleState, i: int) -> int:
    _pop_mark(m)
    return i


def _dup(m: PickleState, i: int) -> int:
    m.stack.append(m.stack[-1])
    return i


def _persid(m: PickleState, i: int) -> int:
    m.stack[-1] = Pid(m.stack[-1])
    return i


def _proto(m: PickleState, i: int) -> int:
    m.proto = max(m.proto, m.data[i])
    return i + 1


def _stop(m: PickleState, i: int) -> int:
    raise Stop(m.stack.pop(), i)


def _unknown(m: PickleState, i: int) -> int:
    raise ValueError(f"unknown opcode 0x{m.data[i - 1]:02x}")


_LATIN = sized(4, lambda data: data.decode("latin-1"))
_OPS: dict[str, Op] = {
    "(": _mark, ".": _stop, "0": _pop, "1": _pop_to_mark, "2": _dup, "F": lined(float), "I": lined(decimal),
    "J": unpack("<i"), "K": unpack("<B"), "L": lined(decimal), "M": unpack("<H"), "N": new(lambda: None),
    "P": lined(lambda line: Pid(line.decode("latin-1"))), "Q": _persid, "R": _reduce,
    "S": lined(lambda line: line.strip(b"\r")[1:-1].decode("latin-1")), "T": _LATIN,
    "U": sized(1, lambda data: data.decode("latin-1")), "V": lined(lambda line: line.decode("raw-unicode-escape")),
    "X": sized(4, text), "a": _append, "b": _build, "c": _global, "d": _dict, "}": new(Pairs), "e": _appends,
    "g": memo_text(get), "h": memo_binary(get, 1), "i": _inst, "j": memo_binary(get, 4), "l": _marked(list),
    "]": new(list), "o": _obj, "p": memo_text(put), "q": memo_binary(put, 1), "r": memo_binary(put, 4),
    "s": _setitem, "t": _marked(tuple), ")": new(tuple), "u": _setitems, "G": unpack(">d"),
    "\x80": _proto, "\x81": _reduce, "\x82": _extension(1), "\x83": _extension(2), "\x84": _extension(4),
    "\x85": _top(1), "\x86": _top(2), "\x87": _top(3), "\x88": new(lambda: True), "\x89": new(lambda: False),
    "\x8a": sized(1, integer), "\x8b": sized(4, integer, "int"), "B": sized(4, bytes, "bytes"),
    "C": sized(1, bytes), "\x8c": sized(1, text), "\x8d": sized(8, text), "\x8e": sized(8, bytes, "bytes"),
    "\x8f": new(list), "\x90": _appends, "\x91": _marked(tuple), "\x92": _newobj_ex, "\x93": _stack_global,
    "\x94": memoize, "\x95": skip(8), "\x96": sized(8, bytes, "bytes"), "\x97": new(lambda: Opaque("buffer", 0)),
    "\x98": lambda _m, i: i,
}  # fmt: skip


def _noting_foreign(number: int, op: Op) -> Op:
    """Record opcodes that torch's weights_only unpickler does not know."""
    if number in OPCODES:
        return op

    def noted(m: PickleState, i: int) -> int:
        m.foreign.add(number)
        return op(m, i)

    return noted


TABLE: list[Op] = [_noting_foreign(number, _OPS.get(chr(number), _unknown)) for number in range(256)]
