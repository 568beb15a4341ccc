"""The commands of shell scripts, as far as launch scripts use them."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from steptime.launch.shell.lexer import Token


class Simple(NamedTuple):
    """The words of one command, the text that it is given, and the file that its output goes to."""

    words: list[Token]
    line: int
    body: str | None = None
    """Its here-document, the word of <<<, or the command of < <( ... ), unexpanded."""
    to: Token | None = None
    piped: bool = False
    """Whether another command reads its output."""


class If(NamedTuple):
    """Conditions with their bodies, in order; an else has no condition."""

    arms: list[tuple[list[Statement] | None, list[Statement]]]
    line: int


class Loop(NamedTuple):
    """for NAME in words, or while or until a condition."""

    kind: str
    name: str
    words: list[Token]
    condition: list[Statement]
    body: list[Statement]
    line: int


class Case(NamedTuple):
    """A word and its arms: patterns and bodies."""

    word: Token
    arms: list[tuple[list[Token], list[Statement]]]
    line: int


class Function(NamedTuple):
    """A definition."""

    name: str
    body: list[Statement]
    line: int


class Chain(NamedTuple):
    """Commands with the && or || before each."""

    parts: list[tuple[str, Statement]]
    line: int


class Subshell(NamedTuple):
    """Commands in parentheses, in the background, or before a pipe: what they assign is theirs."""

    body: list[Statement]


Statement: TypeAlias = "Simple | If | Loop | Case | Function | Chain | Subshell | list[Statement]"
"""A list is the contents of braces."""

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
"""NAME=value, NAME+=value, NAME[i]=value."""
