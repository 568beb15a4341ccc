"""Whole-number arithmetic of the shell: $(( ... )), evaluated without running anything."""

from __future__ import annotations

import re
from collections.abc import Callable

_WORDS = re.compile(r"\s*(0[xX][\da-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|\*\*|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%()<>!?:])")
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
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


class _Evaluator:
    """Recursive descent; raises what `arithmetic` turns into None."""

    def __init__(self, words: list[str], lookup: ValueOf) -> None:
        self.words, self.lookup, self.i = words, lookup, 0

    def at(self, *words: str) -> bool:
        return self.i < len(self.words) and self.words[self.i] in words

    def choice(self) -> int:
        value = self.level(0)
        if not self.at("?"):
            return value
        self.i += 1
        yes = self.choice()
        if not self.at(":"):
            raise ValueError
        self.i += 1
        no = self.choice()
        return yes if value else no

    def level(self, depth: int) -> int:
        if depth == len(_LEVELS):
            return self.power()
        value = self.level(depth + 1)
        while self.at(*_LEVELS[depth]):
            operator = self.words[self.i]
            self.i += 1
            value = _apply(operator, value, self.level(depth + 1))
        return value

    def power(self) -> int:
        base = self.unary()
        if not self.at("**"):
            return base
        self.i += 1
        exponent = self.power()
        if not 0 <= exponent <= 64:
            raise ValueError
        return _bounded(base**exponent)

    def unary(self) -> int:
        word = self.words[self.i]
        self.i += 1
        if word in {"-", "+", "!"}:
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value)}[word]
        if word == "(":
            value = self.choice()
            if not self.at(")"):
                raise ValueError
            self.i += 1
            return value
        value_of = whole(word) if word[0].isdecimal() else self.lookup(word)
        if value_of is None:
            raise ValueError
        return value_of


def _apply(operator: str, a: int, b: int) -> int:
    if operator in {"/", "%"}:
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if operator == "/" else a - quotient * b
    if operator in {"<<", ">>"}:
        if not 0 <= b < 64:
            raise ValueError
        return _bounded(a << b) if operator == "<<" else a >> b
    results = {
        "||": int(bool(a or b)), "&&": int(bool(a and b)), "==": int(a == b), "!=": int(a != b),
        "<": int(a < b), ">": int(a > b), "<=": int(a <= b), ">=": int(a >= b), "+": a + b, "-": a - b, "*": a * b,
    }  # fmt: skip
    return _bounded(results[operator])


def _bounded(value: int) -> int:
    if abs(value) >= _LARGEST:
        raise ValueError
    return value
