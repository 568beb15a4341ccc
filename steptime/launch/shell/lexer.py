"""A shell script as words and operators, without expansion."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

from steptime.base.config import ConfigError

_OPERATOR = re.compile(r"<<[<-]|&>>|;;|&&|\|\||\|&|<<|>>|>&|<&|&>|>\||[;&|()<>]")
_BLANK = re.compile(r"[ \t\r]+|\\\r?\n")
_PLAIN = re.compile(r"""[^\\'"`$#(){};&|<>\s]+""")
"""Characters that mean nothing by themselves, outside of quotes and inside."""
REDIRECTIONS = frozenset({"<<<", "<<-", "&>>", "<<", ">>", ">&", "<&", "&>", ">|", "<", ">"})
_TO_FILL = re.compile(r"(?<=[\s=])<[A-Za-z][\w./:-]*(?: [A-Za-z][\w./:-]*){0,9}>(?=[\s;)\\]|\Z)")
"""A word or words that a template leaves to be filled in, which bash would take for two redirections."""
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_CLOSING = {'"': '"', "${": "}", "$(": ")", "`": "`", "(": ")"}


class Token(NamedTuple):
    """A word with its quotes and dollars, or an operator."""

    text: str
    line: int
    operator: bool = False
    body: str = ""
    """The text of a here-document, on its operator."""


class Lexer:
    """Reads one text; `line` is the number of its first line, `array` means that it is the inside of an array."""

    def __init__(self, text: str, name: str, line: int = 1, *, array: bool = False) -> None:
        self.text, self.name, self.line, self.array = text, name, line, array
        self._breaks = [found.start() for found in re.finditer("\n", text)]

    def line_at(self, i: int) -> int:
        """The line number of a position."""
        return self.line + bisect_left(self._breaks, i)

    def tokens(self) -> list[Token]:
        """Words and operators; in an array, line ends are ignored and operators are text.

        Raises:
            ConfigError: an unclosed quote or bracket.
        """
        found: list[Token] = []
        waiting: list[int] = []  # here-documents whose text comes after this line
        text, i = self.text, 0
        while i < len(text):
            if text[i] == "\n":
                if not self.array:
                    found.append(Token("\n", self.line_at(i), operator=True))
                i += 1
                for at in waiting:
                    body, i = self._here(i, found[at + 1].text if at + 1 < len(found) else "", found[at].text == "<<-")
                    found[at] = found[at]._replace(body=body)
                waiting = []
            elif blank := _BLANK.match(text, i):
                i = blank.end()
            elif text[i] == "#":
                i = self._line_end(i)
            elif word := _TO_FILL.match(text, i):
                found.append(Token(f"'{word[0]}'", self.line_at(i)))
                i = word.end()
            elif not self.array and (operator := _OPERATOR.match(text, i)) and not self._arithmetic(i):
                if operator[0] in {"<<", "<<-"}:
                    waiting.append(len(found))
                found.append(Token(operator[0], self.line_at(i), operator=True))
                i = operator.end()
            else:
                end = self._arithmetic(i) or self._word_end(i)
                if not (text[i:end].isdecimal() and text[end : end + 1] in {"<", ">"}):  # 2>&1
                    found.append(Token(text[i:end], self.line_at(i)))
                i = end
        return found

    def _line_end(self, i: int) -> int:
        found = self.text.find("\n", i)
        return found if found >= 0 else len(self.text)

    def _arithmetic(self, i: int) -> int:
        """The end of (( ... )); 0 where there is none."""
        end = self.text.find("))", i) if self.text.startswith("((", i) and not self.array else -1
        return end + 2 if end > 0 else 0

    def _here(self, i: int, word: str, tabs: bool) -> tuple[str, int]:
        """The here-document that begins at `i` and ends with `word`, and the position after it."""
        ends = word.replace("'", "").replace('"', "").replace("\\", "")
        lines: list[str] = []
        while i < len(self.text):
            end = self._line_end(i)
            line, i = self.text[i:end], end + 1
            if (line.lstrip("\t") if tabs else line).rstrip("\r") == ends:
                break
            lines.append(line)
        body = "\n".join(lines)
        if ends != word:  # quoted: nothing in it is expanded
            body = re.sub(r"([\\$`])", r"\\\1", body)
        return body, min(i, len(self.text))

    def _word_end(self, start: int) -> int:
        text, i = self.text, start
        while i < len(text):
            char = text[i]
            if plain := _PLAIN.match(text, i):
                i = plain.end()
            elif char == "\\":
                i += 2
            elif word := _TO_FILL.match(text, i):
                i = word.end()
            elif char in "'\"" or text.startswith(("${", "$("), i) or char == "`":
                i = self.skip(i)
            elif text.startswith("$[", i) and "\n" not in text[i : (end := text.find("]", i)) + 1] and end > 0:
                i = end + 1  # bash's older arithmetic
            elif char == "(" and text[i - 1] == "=" and _ARRAY.search(text, start, i):
                i = self._closed(i, "(")
            elif char in " \t\r\n" or (not self.array and char in ";&|()<>"):
                break
            else:
                i += 1
        return min(i, len(text))

    def skip(self, i: int) -> int:
        """The position after the quote or substitution that begins at `i`.

        Raises:
            ConfigError: it is not closed.
        """
        if self.text[i] == "'":
            end = self.text.find("'", i + 1)
            if end < 0:
                raise self._endless(i, "'")
            return end + 1
        return self._closed(i, next(word for word in _CLOSING if self.text.startswith(word, i)))

    def _closed(self, start: int, opening: str) -> int:
        """The position after the bracket that closes the `opening` at `start`."""
        text, closing, i = self.text, _CLOSING[opening], start + len(opening)
        while i < len(text):
            char = text[i]
            if plain := _PLAIN.match(text, i):
                i = plain.end()
            elif char == "\\":
                i += 2
            elif char == closing:
                return i + 1
            elif closing == ")" and char == "#" and text[i - 1] in " \t\n(":
                i = self._line_end(i)
            elif closing == ")" and char == "(":
                i = self._closed(i, "(")
            elif closing == "`" or (closing == '"' and char == "'"):
                i += 1
            elif char in "'\"`" or text.startswith(("${", "$("), i):
                i = self.skip(i)
            else:
                i += 1
        raise self._endless(start, opening)

    def _endless(self, i: int, what: str) -> ConfigError:
        return ConfigError(f"{self.name}: line {self.line_at(i)}: {what} is not closed")
