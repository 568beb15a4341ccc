"""What expansions do to a text: ${X%pattern}, ${X/old/new}, ${A[@]:1:2}, {a,b} and $'...'."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TypeAlias

from steptime.launch.shell.scope import Scope, Unknown, Value

SLICE = re.compile(r":\s*([^:]+?)(?::\s*([^:]+))?")
"""Some of the elements of an array, or of the script's words: ${A[@]:1:2}."""
_BRACES = re.compile(r"(?<!\$)\{([^{}\s'\"\\$`]*,[^{}\s'\"\\$`]*|-?\d{1,9}(?:\.\.-?\d{1,9}){1,2})\}")
_MOST_BRACES = 1000
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
Fill: TypeAlias = Callable[[str], str]
"""A raw word as one text."""


def changed(scope: Scope, fill: Fill, text: str, rest: str, shown: str) -> str:
    """${X%pattern} and similar: what `rest` makes of a variable's text."""
    if reasons := scope.reasons_of(text):
        return scope.mark(shown, reasons[0].cause.part)
    if rest in {"^", ",", "^^", ",,"}:
        end = len(text) if rest[1:] else 1
        return (text[:end].upper() if rest[0] == "^" else text[:end].lower()) + text[end:]
    if found := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
        return _trimmed(text, found[1], fill(found[2]))
    if found := re.fullmatch(r"/([/#%]?)((?:\\.|[^/\\])*)(?:/(.*))?", rest, re.DOTALL):
        old, new = fill(found[2]), fill(found[3] or "")
        if old and not re.search(r"[*?\[]", old):
            if found[1] == "#":
                return new + text[len(old) :] if text.startswith(old) else text
            if found[1] == "%":
                return text[: -len(old)] + new if text.endswith(old) else text
            return text.replace(old, new) if found[1] else text.replace(old, new, 1)
    if found := re.fullmatch(r":\s*(\d+|(?<= )-\d+)(?::\s*(\d+))?", rest):
        start = int(found[1])
        part = text[start:] if start >= 0 or -start <= len(text) else ""
        return part[: int(found[2])] if found[2] else part
    return scope.mark(shown, Unknown(f"{shown} is not supported"))


def sliced(scope: Scope, values: list[Value], part: list[str], shown: str, line: int) -> list[Value]:
    """The elements that a slice takes: from a number on, so many of them if given."""
    causes = (one.cause for value in values for one in scope.reasons_of(value.text))
    if listed := next((cause for cause in causes if cause.nodes), None):
        return [Value(scope.mark(shown, listed.part), line)]
    numbers = [scope.arithmetic(text, shown) for text in part]
    if unknown := next((text for text in numbers if not re.fullmatch(r"-?\d+", text)), None):
        return [Value(unknown, line)]
    first = int(numbers[0])
    kept = values[first:] if first >= 0 or -first <= len(values) else []
    return kept[: int(numbers[1])] if numbers[1:] else kept


def _trimmed(text: str, kind: str, pattern: str) -> str:
    """A text less the shortest or longest (doubled sign) prefix (#) or suffix (%) that fits the pattern."""
    cuts = range(len(text) + 1)
    ordered = cuts if kind in {"#", "%%"} else reversed(cuts)
    if kind[0] == "#":
        return next((text[i:] for i in ordered if fnmatch.fnmatchcase(text[:i], pattern)), text)
    return next((text[:i] for i in ordered if fnmatch.fnmatchcase(text[i:], pattern)), text)


def in_braces(raw: str) -> list[str]:
    """The words that braces outside of quotes make of one: a{1,2} is a1 a2, {1..3} is 1 2 3, {1..5..2} is 1 3 5.

    >>> in_braces("--x={1,2}"), in_braces("'{1,2}'"), in_braces("{1..3}"), in_braces("{5..1..2}")
    (['--x=1', '--x=2'], ["'{1,2}'"], ['1', '2', '3'], ['5', '3', '1'])
    """
    found = next((part for part in _BRACES.finditer(raw) if not _inside_quotes(raw, part.start())), None)
    if found is None:
        return [raw]
    choices = found[1].split(",")
    if ".." in found[1] and "," not in found[1]:
        first, last, *by = map(int, found[1].split(".."))
        sign = 1 if first <= last else -1
        numbers = range(first, last + sign, sign * (abs(by[0]) if by and by[0] else 1))
        choices = [str(number) for number in numbers[:_MOST_BRACES]]
    before, after = raw[: found.start()], raw[found.end() :]
    return [word for choice in choices for word in in_braces(before + choice + after)][:_MOST_BRACES]


def _inside_quotes(raw: str, at: int) -> bool:
    """Whether a position of a raw word is in quotes, an expansion or a command."""
    before = re.sub(r"\\.", "", raw[:at])
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1 or bool(re.search(r"\$[{(]|`", before))


def ansi(text: str) -> str:
    r"""The text of $'...': its backslashes decoded.

    >>> ansi(r"it\'s") + ansi(r"a\\b")
    "it'sa\\b"
    """
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text, flags=re.DOTALL)
