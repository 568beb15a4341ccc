"""Whole-number arithmetic of the shell: $(( ... )), evaluated without running anything."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

_WORDS = re.compile(r"\s*(0[xX][\da-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|\*\*|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%()<>!?:])")
_LARGEST = 1 << 63

ValueOf = Callable[[str], int | None]


def arithmetic(text: str, lookup: ValueOf) -> int | None:
    """The value of an expression; None where a name has no whole number as its value, or the syntax is not supported.

    Division rounds towards zero, as the shell's does.

    >>> arithmetic("GPUS * 4 / 3", {"GPUS": 8}.get)
    10
    """
    words: list[str] = []
    i = 0
    text = text.strip()
    while i < len(text):
        found = _WORDS.match(text, i)
        if found is None:
            return None
        words.append(found[1])
        i = found.end()
    try:
        reader = _Evaluator(words, lookup)
        value = reader.choice()
    except (ArithmeticError, LookupError, RecursionError, ValueError):
        return None
    return value if reader.i == len(words) else None


def whole(word: str) -> int:
    """A number as the shell reads it: 010 is octal, 0x10 hexadecimal, 10#08 of that base.

    Raises:
        ValueError: it is none, such as 08.

    >>> whole("010"), whole("0x10"), whole("10#08")
    (8, 16, 8)
    """
    base, of_base, digits = word.partition("#")
    if of_base:
        return int(digits, int(base))
    sign, plain = (word[0], word[1:]) if word[:1] in {"+", "-"} else ("", word)
    octal = len(plain) > 1 and plain[0] == "0" and plain[1] not in "xX"
    return int(sign + plain, 8 if octal else 16 if plain[:2].lower() == "0x" else 10)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _within(value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError
    return value


_POWER = 7
_OPERATORS: dict[str, tuple[int, Callable[[int, int], Any]]] = {
    "||": (0, lambda a, b: bool(a or b)), "&&": (1, lambda a, b: bool(a and b)), "==": (2, operator.eq),
    "!=": (2, operator.ne), "<": (3, operator.lt), ">": (3, operator.gt), "<=": (3, operator.le), ">=": (3, operator.ge),
    "<<": (4, lambda a, b: a << _within(b, 0, 63)), ">>": (4, lambda a, b: a >> _within(b, 0, 63)),
    "+": (5, operator.add), "-": (5, operator.sub), "*": (6, operator.mul), "/": (6, _quotient),
    "%": (6, lambda a, b: a - _quotient(a, b) * b), "**": (_POWER, lambda a, b: a ** _within(b, 0, 64)),
}  # fmt: skip
"""Operator -> how strongly it binds, and what it does; each binds to the left except **."""


class _Evaluator:
    """Recursive descent; raises what `arithmetic` turns into None."""

    def __init__(self, words: list[str], lookup: ValueOf) -> None:
        self.words, self.lookup, self.i = words, lookup, 0

    def expect(self, word: str) -> None:
        if self.words[self.i] != word:
            raise ValueError
        self.i += 1

    def choice(self) -> int:
        value = self.level(0)
        if self.words[self.i : self.i + 1] != ["?"]:
            return value
        self.i += 1
        yes = self.choice()
        self.expect(":")
        no = self.choice()
        return yes if value else no

    def level(self, least: int) -> int:
        value = self.unary()
        while self.i < len(self.words) and (found := _OPERATORS.get(self.words[self.i])) and found[0] >= least:
            self.i += 1
            right = self.level(found[0] + (found[0] != _POWER))
            value = _within(int(found[1](value, right)), 1 - _LARGEST, _LARGEST - 1)
        return value

    def unary(self) -> int:
        word = self.words[self.i]
        self.i += 1
        if word in {"-", "+", "!"}:
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value)}[word]
        if word == "(":
            value = self.choice()
            self.expect(")")
            return value
        value_of = whole(word) if word[0].isdecimal() else self.lookup(word)
        if value_of is None:
            raise ValueError
        return value_of
