"""Tests in a script: [ ... ], [[ ... ]], as far as they are decidable without looking at files."""

from __future__ import annotations

import fnmatch
import glob
import re
from typing import Literal, TypeAlias

from steptime.launch.shell.arithmetic import arithmetic
from steptime.launch.shell.expansion import Expander
from steptime.launch.shell.lexer import Token
from steptime.launch.shell.scope import Scope

Outcome: TypeAlias = Literal["yes", "no", "ran", "unknown"]
"""Result of a command: a test's answer; "ran" counts as success, except as the condition of an if."""
_EQUAL = frozenset({"=", "==", "!="})
OPPOSITE: dict[Outcome, Outcome] = {"yes": "no", "no": "yes", "unknown": "unknown", "ran": "ran"}
_DECIDED_BY: tuple[tuple[str, Outcome], ...] = (("||", "yes"), ("-o", "yes"), ("&&", "no"), ("-a", "no"))
"""Operators, and the answer of one side that is also that of both."""
_SIGNS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_BINARY = _EQUAL | {*_SIGNS, "-a", "-o", "<", ">", "=~"}


def answer_of(expand: Expander, words: list[Token], *, double: bool) -> tuple[Outcome, list[str]]:
    """The result of a test of these words, and their texts; `double`: of [[ ... ]], where the right word is a pattern."""
    scope, texts, split = expand.scope, list[str](), False
    for at, word in enumerate(words):
        compared = at > 0 and words[at - 1].text in _EQUAL
        if word.operator:
            texts.append(word.text)
        elif double:
            texts.append((expand.pattern if compared else expand.text)(word.text, word.line))
        else:
            values = [value.text for value in expand.fields(word.text, word.line)]
            plain = not word.text.startswith(('"', "'"))
            if plain and len(words) - at == 1 and at and words[at - 1].text in {"-n", "-z"}:
                values = [text for text in values if not scope.unset_variable(text)]
            split = split or len(values) != 1
            texts += [glob.escape(text) if compared else text for text in values]
    return (_strict(texts, scope) if split else answer(texts, scope)), texts


def undecided(texts: list[str]) -> str:
    """Why a test of words that all have values has no result.

    >>> undecided(["extra", "-eq", "0"]), undecided(["-f", "x"])
    ('it compares a word as a number', 'it tests files')
    """
    return "it compares a word as a number" if _SIGNS.keys() & texts else "it tests files"


def _strict(words: list[str], scope: Scope) -> Outcome:
    """A test of [ ... ] where a variable without quotes is not one word: what its number of words means; an error is "no"."""
    if len(words) <= 1:
        return _filled("".join(words), scope)
    if words[0] == "!" and len(words) <= 4 and not (len(words) == 3 and words[1] in _BINARY):
        return OPPOSITE[_strict(words[1:], scope)]
    if len(words) == 2:
        return _unary(words[0], words[1], scope) if re.fullmatch(r"-[a-zA-Z]", words[0]) else "no"
    if len(words) == 3:
        return answer(words, scope) if words[1] in _BINARY else "no"
    return "no" if len(words) == 4 and not {"-a", "-o"} & set(words) else "unknown"


def answer(words: list[str], scope: Scope) -> Outcome:
    """The result of a test of these operands; a variable that is not set counts as empty only for -z, -n and == ""."""
    for operator, decided in _DECIDED_BY:
        if at := _outside(words, operator):
            sides = {answer(words[:at], scope), answer(words[at + 1 :], scope)}
            return decided if decided in sides else "unknown" if "unknown" in sides else OPPOSITE[decided]
    if words and words[0] == "!":
        return OPPOSITE[answer(words[1:], scope)]
    if len(words) >= 3 and words[0] == "(" and words[-1] == ")":
        return answer(words[1:-1], scope)
    if len(words) <= 1:
        return _filled("".join(words), scope)
    if len(words) == 2:
        return _unary(words[0], words[1], scope)
    if words[2:] == [""] and words[1] in _EQUAL:
        return _unary("-n" if words[1] == "!=" else "-z", words[0], scope)
    return _compared(words[0], words[1], ("" if words[1] == "=~" else " ").join(words[2:]), scope)


def _outside(words: list[str], operator: str) -> int:
    """Position of an operator outside all parentheses; 0 where there is none."""
    depth = 0
    for at, word in enumerate(words[:-1]):
        depth += (word == "(") - (word == ")")
        if word == operator and at and not depth:
            return at
    return 0


def _filled(text: str, scope: Scope) -> Outcome:
    if scope.unset_variable(text):
        return "no"
    if any(mark.unset is False for mark in scope.reasons_of(text)) and not scope.known(text):
        return "unknown"
    return "yes" if text else "no"


def _unary(operator: str, text: str, scope: Scope) -> Outcome:
    if operator in {"-n", "-z"}:
        filled = _filled(text, scope)
        return filled if operator == "-n" else OPPOSITE[filled]
    if operator == "-v":
        return "yes" if scope.get(text) is not None else "no"
    return "unknown"  # -f, -d and similar tests look at files


def _compared(left: str, operator: str, right: str, scope: Scope) -> Outcome:
    if operator in _EQUAL and scope.positional is not None and scope.unset_variable(left).isdecimal():
        left = ""  # a word that the script is not given
    name = scope.unset_variable(left[len(right) :]) if operator in _EQUAL and right and left.startswith(right) else ""
    if name and not (name.isdecimal() and scope.positional is None):
        return "no" if operator == "!=" else "yes"  # [ "x$NAME" = x ]
    if not scope.known(left + right):
        return "unknown"
    if operator == "=~":
        try:
            return "yes" if re.search(right, left) else "no"
        except re.error:
            return "unknown"
    if operator in _EQUAL and not re.search(r"[@+?!*]\(", right):
        same = fnmatch.fnmatchcase(left, right) if re.search(r"[*?\[]", right) else left == right
        return "yes" if same == (operator != "!=") else "no"
    if operator not in _SIGNS:
        return "unknown"
    left, right = (re.sub(r"^([-+]?)0+(?=\d)", r"\1", text.strip()) for text in (left, right))
    value = arithmetic(f"({left}) {_SIGNS[operator]} ({right})", lambda _: None)
    return "unknown" if value is None else "yes" if value else "no"
