"""The effect of each pickle opcode: one function (state, offset after the opcode) -> next offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steptime.checkpoint.pickles import literals
from steptime.checkpoint.pickles.known_globals import OPCODES
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
)


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
    module, j = literals.line(m, i)
    name, j = literals.line(m, j)
    args = tuple(_pop_mark(m))
    _ref(m, module.decode(), name.decode(), i)
    call(m, m.stack.pop(), args, i)
    return j


def _global(m: PickleState, i: int) -> int:
    module, j = literals.line(m, i)
    name, j = literals.line(m, j)
    _ref(m, module.decode(), name.decode(), i)
    return j


def _stack_global(m: PickleState, i: int) -> int:
    name = m.stack.pop()
    _ref(m, m.stack.pop(), name, i)
    return i


def _extension(width: int) -> Op:
    def op(m: PickleState, i: int) -> int:
        end = literals.need(m, i, width)
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


def _setitems(m: PickleState, i: int) -> int:
    stack, start = m.stack, m.marks[-1]
    if 0 < start < len(stack) and type(stack[start - 1]) is Pairs and not (len(stack) - start) % 2:
        stack[start - 1] += stack[start:]  # the usual case, in place
        del stack[start:]
        m.marks.pop()
    else:
        _add_pairs(m, _pop_mark(m))
    return i


def _dict(m: PickleState) -> None:
    flat = _pop_mark(m)
    m.stack.append(Pairs())
    _add_pairs(m, flat)


def _acts(act: Callable[[PickleState], object]) -> Op:
    """An opcode without a literal."""

    def op(m: PickleState, i: int) -> int:
        act(m)
        return i

    return op


def _new(make: Callable[[], Any]) -> Op:
    return _acts(lambda m: m.stack.append(make()))


def _marked(build: Callable[[list[Any]], Any]) -> Op:
    return _acts(lambda m: m.stack.append(build(_pop_mark(m))))


def _top(n: int) -> Op:
    def op(m: PickleState, i: int) -> int:
        if len(m.stack) < n:
            raise IndexError
        m.stack[-n:] = [tuple(m.stack[-n:])]
        return i

    return op


def _pop(m: PickleState) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()


def _stop(m: PickleState, i: int) -> int:
    raise Stop(m.stack.pop(), i)


def _unknown(m: PickleState, i: int) -> int:
    raise ValueError(f"unknown opcode 0x{m.data[i - 1]:02x}")


_LATIN = literals.sized(4, lambda data: data.decode("latin-1"))
_APPENDS = _acts(lambda m: _add_items(m, _pop_mark(m)))
_TUPLE, _BYTES = _marked(tuple), literals.sized(8, bytes, "bytes")
_INT = literals.lined(literals.decimal)
_OPS: dict[str, Op] = {
    ".": _stop, "0": _acts(_pop), "1": _acts(_pop_mark), "2": _acts(lambda m: m.stack.append(m.stack[-1])),
    "F": literals.lined(float), "I": _INT, "L": _INT, "N": _new(lambda: None),
    "P": literals.lined(lambda line: Pid(line.decode("latin-1"))), "Q": _acts(lambda m: m.stack.append(Pid(m.stack.pop()))),
    "R": _reduce, "S": literals.lined(lambda line: line.strip(b"\r")[1:-1].decode("latin-1")), "T": _LATIN,
    "U": literals.sized(1, lambda data: data.decode("latin-1")),
    "V": literals.lined(lambda line: line.decode("raw-unicode-escape")),
    "X": literals.sized(4, literals.text), "a": _acts(lambda m: _add_items(m, [m.stack.pop()])), "b": _build, "c": _global,
    "d": _acts(_dict), "e": _APPENDS, "g": literals.memo(literals.get), "h": literals.memo(literals.get, 1), "i": _inst,
    "j": literals.memo(literals.get, 4), "l": _marked(list), "]": _new(list), "o": _obj,
    "p": literals.memo(literals.put), "q": literals.memo(literals.put, 1), "r": literals.memo(literals.put, 4),
    "s": _acts(lambda m: _add_pairs(m, [m.stack.pop(-2), m.stack.pop()])), "t": _TUPLE, "u": _setitems,
    "G": literals.binary_float, "\x80": lambda _m, i: i + 1, "\x81": _reduce, "\x82": _extension(1),
    "\x83": _extension(2), "\x84": _extension(4), "\x85": _top(1), "\x87": _top(3), "\x88": _new(lambda: True),
    "\x89": _new(lambda: False), "\x8a": literals.sized(1, literals.integer),
    "\x8b": literals.sized(4, literals.integer, "int"), "B": literals.sized(4, bytes, "bytes"), "C": literals.sized(1, bytes),
    "\x8c": literals.sized(1, literals.text), "\x8d": literals.sized(8, literals.text), "\x8e": _BYTES,
    "\x8f": _new(list), "\x90": _APPENDS, "\x91": _TUPLE, "\x92": _newobj_ex, "\x93": _stack_global,
    "\x94": _acts(lambda m: literals.put(m, len(m.memo) + len(m.far))), "\x96": _BYTES,
    "\x97": _new(lambda: Opaque("buffer", 0)), "\x98": lambda _m, i: i,
    "\x95": lambda m, i: literals.need(m, i, 8),  # FRAME is only a hint for buffering: its length may be anything
}  # fmt: skip
"""All but those that `interpreter` handles by itself."""


def _noting_foreign(number: int, op: Op) -> Op:
    """Record opcodes that torch's weights_only unpickler does not know."""
    if number in OPCODES:
        return op

    def noted(m: PickleState, i: int) -> int:
        m.foreign.add(number)
        return op(m, i)

    return noted


TABLE: list[Op] = [_noting_foreign(number, _OPS.get(chr(number), _unknown)) for number in range(256)]
