"""A pickle interpreter that builds inert records: it imports, calls, hashes and compares nothing.

Opcode meanings: CPython `Lib/pickle.py` and `Lib/pickletools.py`, protocols 0 to 5. The dozen opcodes that make up
nearly all of a large stream are handled in one loop, the others in `opcodes.TABLE`.
"""

from __future__ import annotations

import struct
from typing import Any

from steptime.checkpoint.pickles.opcodes import TABLE
from steptime.checkpoint.pickles.values import Pairs, PickleState, Stop

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from


class MalformedError(Exception):
    """The stream is not a valid pickle; `at` is the byte at which this was found."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(f"malformed pickle near byte {at}: {message}")
        self.at = at


def _reason(error: Exception, at_end: bool) -> str:
    if isinstance(error, struct.error) or (isinstance(error, IndexError) and at_end):
        return "no STOP at its end"
    return "an opcode found too few values on the stack" if isinstance(error, IndexError) else str(error)


class PickleInterpreter(PickleState):
    """Interprets one pickle of `data` from byte `at`."""

    def run(self) -> Any:
        """The value the stream describes, as records. Raises `MalformedError`."""
        try:
            return self._run(self.end)
        except Stop as stop:
            self.end = stop.at
            return stop.value
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
            raise MalformedError(_reason(error, self.end >= len(self.data)), min(self.end, len(self.data))) from None

    def _run(self, i: int) -> Any:
        data, stack, memo, far, marks = self.data, self.stack, self.memo, self.far, self.marks
        push, table = stack.append, TABLE
        try:
            while True:
                op = data[i]
                i += 1
                match op:
                    case 0x94 if not far:  # MEMOIZE
                        memo.append(stack[-1])
                        self.memoized = True
                    case 0x68 if (k := data[i]) < len(memo):  # BINGET
                        push(memo[k])
                        i += 1
                    case 0x4B:  # BININT1
                        push(data[i])
                        i += 1
                    case 0x71 if data[i] == len(memo) and not far:  # BINPUT
                        memo.append(stack[-1])
                        i += 1
                    case 0x72 if _u32(data, i)[0] == len(memo) and not far:  # LONG_BINPUT
                        memo.append(stack[-1])
                        i += 4
                    case 0x6A if (k := _u32(data, i)[0]) < len(memo):  # LONG_BINGET
                        push(memo[k])
                        i += 4
                    case 0x4D:  # BININT2
                        push(_u16(data, i)[0])
                        i += 2
                    case 0x4A:  # BININT
                        push(_i32(data, i)[0])
                        i += 4
                    case 0x86:  # TUPLE2
                        stack[-2:] = [(stack[-2], stack[-1])]
                    case 0x29:  # EMPTY_TUPLE
                        push(())
                    case 0x7D:  # EMPTY_DICT
                        push(Pairs())
                    case 0x28:  # MARK
                        marks.append(len(stack))
                    case _:
                        i = table[op](self, i)
        finally:
            self.end = i
