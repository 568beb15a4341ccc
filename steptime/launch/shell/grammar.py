"""The grammar of shell scripts, as far as launch scripts use it: words into commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from steptime.base.config import ConfigError
from steptime.launch.shell.lexer import REDIRECTIONS, Lexer, Token
from steptime.launch.shell.statements import Case, Chain, Function, If, Loop, Simple, Statement, Subshell

PROGRAM = "a Python program, which is not run; give its launch script, or a file with the command that starts it"
_BREAKS = frozenset({"\n", ";", "&"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_DEEPEST = 60
_QUOTED = re.compile(r"\A\"(.*)\"\Z", re.DOTALL)


def parse_shell(text: str, name: str, line: int = 1) -> list[Statement]:
    """The commands of a script.

    Raises:
        ConfigError: an unclosed quote or block, or a program.
    """
    try:
        return _parsed(text, name, line)
    except ConfigError:
        if name.endswith(".py"):
            raise ConfigError(f"{name}: {PROGRAM}") from None
        raise


def _parsed(text: str, name: str, line: int) -> list[Statement]:
    parser = _Parser(Lexer(text, name, line).tokens(), name)
    found = parser.block(frozenset())
    if (token := parser.peek()) is not None:
        raise parser.fail(token, f"unexpected {token.text!r}")
    return found


def _joined(first: Statement, after: Statement) -> Statement:
    """Two commands of a pipeline in one: what reads the here-document of a cat, or a sed with the expressions of both."""
    if isinstance(first, Simple) and isinstance(after, Simple) and not first.to and first.words and after.words:
        if first.body is not None and after.body is None and [word.text for word in first.words] == ["cat"]:
            return after._replace(body=first.body)
        if first.words[0].text == after.words[0].text == "sed":
            return first._replace(words=[*first.words, *after.words[1:]], to=after.to)
    return first


_Way: TypeAlias = Callable[[Token], Statement]


class _Parser:
    def __init__(self, tokens: list[Token], name: str) -> None:
        self.tokens, self.name, self.i, self.depth = tokens, name, 0, 0

    def peek(self) -> Token | None:
        return self.tokens[self.i] if self.i < len(self.tokens) else None

    def fail(self, token: Token | None, what: str) -> ConfigError:
        line = token.line if token else (self.tokens[-1].line if self.tokens else 1)
        return ConfigError(f"{self.name}: line {line}: {what}; not a shell script that can be read")

    def skip(self, texts: frozenset[str] = _BREAKS) -> None:
        while (token := self.peek()) is not None and token.operator and token.text in texts:
            self.i += 1

    def at(self, text: str) -> bool:
        token = self.peek()
        return token is not None and token.text == text

    def expect(self, text: str, start: Token) -> None:
        self.skip()
        if not self.at(text):
            raise self.fail(start, f"{start.text!r} has no {text!r}")
        self.i += 1

    def block(self, ends: frozenset[str]) -> list[Statement]:
        """Commands up to one of `ends`, which is left for the caller."""
        found: list[Statement] = []
        self.skip()
        while (token := self.peek()) is not None and token.text not in ends:
            if (token.operator and token.text in {")", ";;"}) or (not token.operator and token.text in _CLOSING):
                return found
            before = self.i
            statement = self.chain()  # what runs in the background keeps what it assigns
            found.append(Subshell([statement]) if self.at("&") else statement)
            self.skip()
            if self.i == before:
                raise self.fail(token, f"unexpected {token.text!r}")
        return found

    def body(self, closing: str, start: Token) -> list[Statement]:
        """Commands up to the word that closes `start`; that word is consumed."""
        found = self.block(frozenset({closing}))
        self.expect(closing, start)
        return found

    def chain(self) -> Statement:
        start = self.peek()
        parts: list[tuple[str, Statement]] = [("", self.pipeline())]
        while (token := self.peek()) is not None and token.operator and token.text in {"&&", "||"}:
            self.i += 1
            self.skip(frozenset({"\n"}))
            parts.append((token.text, self.pipeline()))
        return parts[0][1] if len(parts) == 1 else Chain(parts, start.line if start else 0)

    def pipeline(self) -> Statement:
        """The first command of a pipeline, with what `_joined` makes of the next ones: the rest changes nothing here."""
        first = self.command()
        while (token := self.peek()) is not None and token.operator and token.text in {"|", "|&"}:
            self.i += 1
            self.skip(frozenset({"\n"}))
            first = _joined(first, self.command())
            first = first._replace(piped=True) if isinstance(first, Simple) else Subshell([first])
        return first

    def command(self) -> Statement:
        token = self.peek()
        if token is None:
            raise self.fail(None, "a command is missing")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.fail(token, "blocks are nested too deeply")
        try:
            return self._compound(token) or self.simple()
        finally:
            self.depth -= 1

    def _compound(self, token: Token) -> Statement | None:
        after = [(t.text, t.operator) for t in self.tokens[self.i + 1 : self.i + 3]]
        ways: dict[str, _Way] = {"if": self.branches, "case": self.case, "function": self.function}
        ways |= dict.fromkeys(("for", "while", "until"), self.loop) | dict.fromkeys("{(", self.group)
        way = ways.get(token.text) or (self.function if after == [("(", True), (")", True)] else None)
        if way is None:
            return None
        found = way(token)
        while (word := self.peek()) is not None and word.operator and word.text in REDIRECTIONS:
            self._redirection()
        return found

    def group(self, token: Token) -> Statement:
        self.i += 1
        return self.body("}", token) if token.text == "{" else Subshell(self.body(")", token))

    def function(self, token: Token) -> Function:
        self.i += token.text == "function"
        name = self.peek()
        self.i += 1
        self.i += 2 if self.at("(") else 0
        self.skip(frozenset({"\n"}))
        start = self.peek()
        if name is None or start is None or start.text not in {"{", "("}:
            raise self.fail(token, "a function has no body")
        return Function(name.text, [self.group(start)], token.line)

    def branches(self, start: Token) -> If:
        arms: list[tuple[list[Statement] | None, list[Statement]]] = []
        self.i += 1
        condition: list[Statement] | None = self.body("then", start)
        while True:
            arms.append((condition, self.block(frozenset({"elif", "else", "fi"}))))
            word = self.peek()
            self.i += 1
            if word is None or word.text not in {"elif", "else", "fi"}:
                raise self.fail(start, "'if' has no 'fi'")
            if word.text == "fi":
                return If(arms, start.line)
            condition = self.body("then", start) if word.text == "elif" else None

    def loop(self, start: Token) -> Loop:
        self.i += 1
        name, words, condition = "", list[Token](), list[Statement]()
        if start.text == "for":
            token = self.peek()
            name = token.text if token and not token.operator else ""
            self.i += 1
            if self.at("in"):
                self.i += 1
                while (token := self.peek()) is not None and not token.operator:
                    words.append(token)
                    self.i += 1
            self.expect("do", start)
        else:
            condition = self.body("do", start)
        return Loop(start.text, name, words, condition, self.body("done", start), start.line)

    def case(self, start: Token) -> Case:
        self.i += 1
        word = self.peek()
        self.i += 1
        self.expect("in", start)
        arms: list[tuple[list[Token], list[Statement]]] = []
        while True:
            self.skip()
            if self.at("esac") or word is None:
                self.i += 1
                return Case(word or start, arms, start.line)
            patterns: list[Token] = []
            while (token := self.peek()) is not None and token.text != ")":
                self.i += 1
                if not token.operator:
                    patterns.append(token)
            if token is None:
                raise self.fail(start, "'case' has no 'esac'")
            self.i += 1
            arms.append((patterns, self.block(frozenset({";;", "esac"}))))
            self.skip(frozenset({";;"}))

    def simple(self) -> Simple:
        words: list[Token] = []
        body: str | None = None
        to: Token | None = None
        first, inside = self.peek(), False  # [[ ... ]] has operators of its own
        while (token := self.peek()) is not None:
            inside = (inside or token.text == "[[") and token.text != "]]"
            if token.operator and not inside:
                if token.text not in REDIRECTIONS:
                    break
                body, at = token.body if token.text in {"<<", "<<-"} else body, self.i + 1
                self._redirection()
                if token.text == "<" and [word.text for word in self.tokens[at : at + 1]] == ["("]:
                    body = f"$({' '.join(word.text for word in self.tokens[at + 1 : self.i - 1])})"
                if token.text in {">", ">|", ">&"}:
                    to = next(iter(self.tokens[self.i - 1 : self.i]), None)
                if token.text == "<<<":  # what follows it, if anything does
                    body = "".join(_QUOTED.sub(r"\1", word.text) for word in self.tokens[self.i - 1 : self.i])
                    if plain := re.fullmatch(r"'([^']*)'", body):
                        body = re.sub(r"([\\$`])", r"\\\1", plain[1])
                continue
            if inside and token.text == "\n":
                break
            words.append(token)
            self.i += 1
        return Simple(words, first.line if first else 0, body, to)

    def _redirection(self) -> None:
        """Passes over an operator and what it names: a file, or the commands of <( ... )."""
        self.i += 1
        if (name := self.peek()) is not None and name.operator and name.text == "(":
            self.group(name)
        elif not (name is not None and name.operator and name.text in {"<", ">"}):  # > >(tee log)
            self.i += 1
