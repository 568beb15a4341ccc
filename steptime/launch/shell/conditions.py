"""Tests in a script: [ ... ], [[ ... ]], as far as they are decidable without looking at files."""

from __future__ import annotations

import fnmatch
import re
from typing import Literal, TypeAlias

from steptime.launch.shell.arithmetic import arithmetic
from steptime.launch.shell.scope import Scope

Outcome: TypeAlias = Literal["yes", "no", "ran", "unknown"]
"""Result of a command: a test's answer; "ran" counts as success, except as the condition of an if."""


def answer(words: list[str], scope: Scope) -> Outcome:
    """The result of a test of these operands; a variable that is not set counts as empty only for -z, -n and == ""."""
    for operator, decided in (("||", "yes"), ("-o", "yes"), ("&&", "no"), ("-a", "no")):
        if at := _outside(words, operator):
            sides = {answer(words[:at], scope), answer(words[at + 1 :], scope)}
            if decided in sides:
                return "yes" if decided == "yes" else "no"
            return "unknown" if "unknown" in sides else "no" if decided == "yes" else "yes"
    if words and words[0] == "!":
        opposite: dict[Outcome, Outcome] = {"yes": "no", "no": "yes"}
        return opposite.get(answer(words[1:], scope), "unknown")
    if len(words) >= 3 and words[0] == "(" and words[-1] == ")":
        return answer(words[1:-1], scope)
    if len(words) <= 1:
        return _filled(words[0] if words else "", scope)
    if len(words) == 2:
        return _unary(words[0], words[1], scope)
    if words[2:] == [""] and words[1] in {"=", "==", "!="}:
        return _unary("-n" if words[1] == "!=" else "-z", words[0], scope)
    return _compared(words[0], words[1], " ".join(words[2:]), scope)


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
    filled = _filled(text, scope)
    if operator == "-n":
        return filled
    if operator == "-z":
        return "unknown" if filled == "unknown" else "no" if filled == "yes" else "yes"
    if operator == "-v":
        return "yes" if scope.get(text) is not None else "no"
    return "unknown"  # -f, -d and similar tests look at files


def _compared(left: str, operator: str, right: str, scope: Scope) -> Outcome:
    if operator in {"=", "==", "!="} and scope.positional is not None and scope.unset_variable(left).isdecimal():
        left = ""  # a word that the script is not given
    if not scope.known(left + right):
        return "unknown"
    if operator in {"=", "==", "!="}:
        same = fnmatch.fnmatchcase(left, right) if re.search(r"[*?]", right) else left == right
        return "yes" if same == (operator != "!=") else "no"
    signs = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if operator in signs:
        value = arithmetic(f"({left}) {signs[operator]} ({right})", lambda _: None)
        return "unknown" if value is None else "yes" if value else "no"
    return "unknown"
