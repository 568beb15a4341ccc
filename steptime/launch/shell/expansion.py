"""Words of a script with quotes removed and variables filled in."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from itertools import groupby

from steptime.launch.shell.lexer import Lexer
from steptime.launch.shell.scope import DEVICES_OF_JOB, Scope, Unknown, Value
from steptime.launch.shell.slurm import length_of, lists_nodes, nodes_listed

_INDICES = re.compile(r"!([A-Za-z_]\w*)\[[@*]\]")
"""${!array[@]}; with named elements ([a]=1) they are not numbers."""
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9#@*?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[#@*?$!-])(\[(?:[^\[\]]|\[[^\]]*\])*\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_HERE = re.compile(r"\s*cat\s*<<-?\s*(['\"]?\w+['\"]?)[ \t]*\n(.*)\n\s*\w+\s*", re.DOTALL)
_SUM = re.compile(r"\s*expr\s+([^|;&<>\n]+)|\s*echo\s+\"?([^|;&<>\n\"]+)\"?\s*\|\s*bc\s*")
"""Whole-number arithmetic by other commands: $(expr 32 / $GPUS), $(echo "$A * $B" | bc)."""
_CUT = re.compile(r"\s*echo\s+([^|;&<>\n]+?)\s*\|\s*cut\s+-d\s*(['\"]?)(.)\2\s+-f\s*(\d{1,3})\s*")
"""One of the parts of a text: $(echo $SLURM_TASKS_PER_NODE | cut -d '(' -f 1)."""
_HERE_FOLDER = re.compile(r"pwd(?: -P)?|python3? -c (['\"])import os; *print\(os\.getcwd\(\)\)\1")
_FOLDER_OF = re.compile(
    r"\s*(?:builtin )?cd (?:-P )?(?:-- )?([^|;&<>\n]+?)\s*(?:(?:&|1)?>\s*/dev/null(?: 2>&1)?\s*)?(?:&&|;)\s*pwd(?: -P)?\s*"
)
"""A folder as a path: $(cd "$(dirname "$0")" && pwd)."""
_DEEPEST = 30
_COUNTS_DEVICES = re.compile(
    r"\bdevice_count\(\)|\b(?:nvidia|rocm|xpu)-smi\b.*(?:wc +-l|grep +-c)|\bSLURM_GPUS_ON_NODE\b"
)
"""Commands that print the number of devices of a node."""
_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
NOT_RUN = "is a command, and commands are not run"
DEVICES_ON_NODE = "devices on a node"
"""The name, invalid for a variable, under which a scope stores their output."""


class Expander:
    """Fills in words from a scope; `name` is the script's, for errors and for $0."""

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope, self.name, self.depth = scope, name, 0
        self.words_done = False
        """Whether the last substitution's values are already words: the default of a ${X:-...}."""

    def fields(self, raw: str, line: int) -> list[Value]:
        """The words that one raw word becomes: unquoted values are split at blanks, "${A[@]}" is one word per element."""
        pieces: list[Value | None] = []  # None separates words
        for values, quoted in self._parts(raw, line):
            for number, value in enumerate(values):
                pieces += [None] if number else []
                parts = [value.text] if quoted else re.split(r"([ \t\r\n]+)", value.text)
                pieces += [
                    None if part.isspace() and not quoted else Value(part, value.line)
                    for part in parts
                    if part or quoted
                ]
        words = (
            list(group) for parts_words, group in groupby(pieces, key=lambda piece: piece is None) if not parts_words
        )
        return [Value("".join(piece.text for piece in word if piece), word[0].line) for word in words if word[0]]

    def text(self, raw: str, line: int) -> str:
        """A raw word as one text, not split: the value of an assignment."""
        return "".join(" ".join(value.text for value in values) for values, _ in self._parts(raw, line))

    def _parts(self, raw: str, line: int, *, inside: bool = False) -> list[tuple[list[Value], bool]]:
        """Pieces of a raw word, or of the `inside` of double quotes: (values, quoted)."""
        lexer = Lexer(raw, self.name, line)
        found: list[tuple[list[Value], bool]] = []
        i = 0
        while i < len(raw):
            char = raw[i]
            if raw.startswith(("\\\n", "\\\r\n"), i):
                i = raw.index("\n", i) + 1
            elif char == "\\" and (not inside or raw[i + 1 : i + 2] in {"$", "`", '"', "\\"}):
                found.append(([Value(raw[i + 1 : i + 2], line)], True))
                i += 2
            elif char in "'\"" and not inside:
                end = lexer.skip(i)
                inner = raw[i + 1 : end - 1]
                found += self._quoted(inner, line) if char == '"' else [([Value(inner, line)], True)]
                i = end
            elif char in "$`":
                values, i = self._dollar(raw, i, line, quoted=inside)
                found.append((values, inside or self.words_done))
            else:
                ends = "\\$`" if inside else "\\'\"$`"
                end = next((j for j in range(i + 1, len(raw)) if raw[j] in ends), len(raw))
                found.append(([Value(raw[i:end], line)], True))
                i = end
        return found

    def _quoted(self, inner: str, line: int) -> list[tuple[list[Value], bool]]:
        """Pieces of text in double quotes: one word even if it is empty, except "${EMPTY[@]}", which is none."""
        found = self._parts(inner, line, inside=True)
        return found if len(found) == 1 and not found[0][0] else [([Value("", line)], True), *found]

    def _dollar(self, text: str, i: int, line: int, *, quoted: bool) -> tuple[list[Value], int]:
        """The values of the $ or ` at `i`, and its end."""
        self.words_done = False
        lexer = Lexer(text, self.name, line)
        if text[i] == "`":
            end = lexer.skip(i)
            return [Value(self._command(text[i + 1 : end - 1], line), line)], end
        if text.startswith("$((", i) and (end := lexer.skip(i)) and text[end - 2 : end] == "))":
            inner = self.text(text[i + 3 : end - 2], line)
            return [Value(self.scope.arithmetic(inner, text[i:end]), line)], end
        if text.startswith("$[", i) and (end := text.find("]", i) + 1):  # bash's older arithmetic
            return [Value(self.scope.arithmetic(self.text(text[i + 2 : end - 1], line), text[i:end]), line)], end
        if text.startswith("$(", i):
            end = lexer.skip(i)
            return [Value(self._command(text[i + 2 : end - 1], line), line)], end
        if text.startswith("${", i):
            end = lexer.skip(i)
            return self._braced(text[i + 2 : end - 1], line, quoted=quoted), end
        if not quoted and text.startswith("$'", i):
            end = lexer.skip(i + 1)
            return [Value(text[i + 2 : end - 1], line)], end
        found = _NAME.match(text, i + 1)
        if found is None:
            return [Value("$", line)], i + 1
        return self._variable(found[0], line), found.end()

    def _variable(self, name: str, line: int) -> list[Value]:
        scope = self.scope
        if name == "BASH_SOURCE":
            name = "0"
        if name in {"@", "*"}:
            return list(scope.positional or [])
        if name == "#":
            return [Value(str(len(scope.positional or [])), line)]
        if name.isdecimal() and scope.positional is not None and 0 < int(name) <= len(scope.positional):
            return [scope.positional[int(name) - 1]]
        if name == "0":
            return [Value(self.name, line)]
        if name == "PWD" and scope.get(name) is None:
            return [Value(".", line)]
        value = scope.get(name)
        return [value if value is not None else Value(scope.unset(name), line)]

    def _braced(self, inner: str, line: int, *, quoted: bool) -> list[Value]:
        if array := _INDICES.fullmatch(inner):
            of_array = self.scope.values.get(array[1], [])
            counted = array[1] not in self.scope.named and all(item.text[:1] != "[" for item in of_array)
            if of_array and counted and all(self.scope.known(item.text) for item in of_array):
                return [Value(str(i), line) for i in range(len(of_array))]
        found = _BRACED.fullmatch(inner)
        if found is None:
            return [Value(self.scope.mark(f"${{{inner}}}", Unknown(f"${{{inner}}} is not supported")), line)]
        count, name, index, rest = found.groups()
        values = self._elements(name, index, line)
        if quoted and (index == "[*]" or name == "*"):
            values = [Value(" ".join(value.text for value in values), values[0].line if values else line)]
        if count:
            if index in {"[@]", "[*]"}:
                return [Value(length_of(self.scope, name, values, line), line)]
            text = values[0].text if values else ""
            missing = [one for one in self.scope.reasons_of(text) if not one.unset]
            length = "0" if self.scope.unset_variable(text) else str(len(text))
            return [Value(self.scope.mark(f"${{{inner}}}", missing[0].cause.part) if missing else length, line)]
        if default := _DEFAULT.fullmatch(rest):
            return self._default(name, values, default[1], default[2], line, quoted=quoted)
        if not rest:
            return values
        return [Value(self._changed(value.text, rest, f"${{{inner}}}", line), value.line) for value in values]

    def _elements(self, name: str, index: str | None, line: int) -> list[Value]:
        if index in {"[@]", "[*]"}:
            found = self.scope.values.get(name)
            return list(found) if found is not None else [Value(self.scope.unset(name), line)]
        if index is None:
            return self._variable(name, line)
        number = self.scope.arithmetic(self.text(index[1:-1], line), index)
        elements = self.scope.values.get(name, [])
        if re.fullmatch(r"-?\d+", number) and -len(elements) <= int(number) < len(elements):
            element = elements[int(number)]
            listed = next((one.cause for one in self.scope.reasons_of(element.text) if one.cause.nodes), None)
            return [Value(self.scope.mark(f"${{{name}{index}}}", listed.part), line) if listed else element]
        if reasons := self.scope.reasons_of(number):
            return [Value(self.scope.mark(f"${{{name}{index}}}", reasons[0].cause), line)]
        return [Value(self.scope.unset(f"{{{name}{index}}}"), line)]

    def _default(self, name: str, values: list[Value], kind: str, word: str, line: int, *, quoted: bool) -> list[Value]:
        """${X:-word} and similar: a variable that is not set counts as empty."""
        whole = "".join(value.text for value in values)
        unset = self.scope.unset_variable(whole)
        empty = unset == name or name in self.scope.cleared or (kind[0] == ":" and (not whole or bool(unset)))
        self.depth += 1
        raw = f'"{word}"' if quoted and '"' not in word else word
        filled = self.fields(raw, line) if self.depth < _DEEPEST else []
        self.depth -= 1
        self.words_done = kind[-1] == "+" or empty
        if kind[-1] == "+":
            return [] if empty else filled
        if not empty:
            return values
        if kind[-1] == "?":
            self.scope.required += [name] if name.isdecimal() else []
            return [Value(self.scope.unset(name), line)]
        if name.isidentifier():
            filled = [value._replace(text=self.scope.given_outside(value.text, name, NOT_RUN)) for value in filled]
        if kind[-1] == "=":
            self.scope.put(name, " ".join(value.text for value in filled), line)
        return filled

    def _changed(self, text: str, rest: str, shown: str, line: int) -> str:
        """${X%pattern} and similar."""
        if reasons := self.scope.reasons_of(text):
            return self.scope.mark(shown, reasons[0].cause.part)
        if rest in {"^^", ",,"}:
            return text.upper() if rest == "^^" else text.lower()
        if found := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
            return _trimmed(text, found[1], self.text(found[2], line))
        if found := re.fullmatch(r"/(/?)((?:\\.|[^/\\])*)(?:/(.*))?", rest, re.DOTALL):
            old, new = self.text(found[2], line), self.text(found[3] or "", line)
            if old and not re.search(r"[*?\[]", old):
                return text.replace(old, new) if found[1] else text.replace(old, new, 1)
        if found := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
            start = int(found[1])
            return text[start : start + int(found[2])] if found[2] else text[start:]
        return self.scope.mark(shown, Unknown(f"{shown} is not supported"))

    def _command(self, inner: str, line: int) -> str:
        """$(...): paths that need no running; anything else has no value."""
        words = inner.split(None, 1)
        shown = f"$({' '.join(inner.split())})"
        self.depth += 1
        try:
            if sums := _SUM.fullmatch(inner):
                return self.scope.arithmetic(self.text(sums[1] or sums[2], line), shown)
            if cut := _CUT.fullmatch(inner):
                parts = self.text(cut[1], line).split(cut[3])
                if self.scope.known(self.text(cut[1], line)) and 0 < int(cut[4]) <= len(parts):
                    return parts[int(cut[4]) - 1]
            if folder := _FOLDER_OF.fullmatch(inner):
                path = self.text(re.sub(r"\$\{?BASH_SOURCE(?:\[0\])?\}?", "$0", folder[1]), line)
                if self.scope.known(path):
                    return path
            plain = len(words) == 2 and not re.search(r"[|;&<>\n]", words[1]) and self.depth < _DEEPEST
            if inner.lstrip().startswith("#"):
                return ""  # a comment amid continued lines
            if here := _HERE.fullmatch(inner):
                return here[2] if here[1][0] in "'\"" else self.text(quoted(here[2]), line)
            if _HERE_FOLDER.fullmatch(inner.strip()):
                return self._variable("PWD", line)[0].text
            alone = words and self.depth < _DEEPEST and not re.search(r"[|;&<>(`\n]", inner)
            given = [value for word in _WORDS.findall(inner) for value in self.fields(word, line)] if alone else []
            if (output := self.scope.prints(given)) is not None:
                return output
            if plain and words[0] in {"dirname", "basename", "echo"}:
                found = [value.text for value in self.fields(words[1], line)]
                text = " ".join(found)
                if found and all(map(self.scope.known, found)):
                    if words[0] == "echo" and not text.startswith("-"):
                        return text
                    if len(found) == 1 and words[0] != "echo":
                        return getattr(posixpath, words[0])(text.rstrip("/")) or "."
        finally:
            self.depth -= 1
        shown = shown if len(shown) <= 60 else shown[:56] + "...)"
        if (count := self._count(inner, shown, line)) is not None:
            return count
        nodes = inner if lists_nodes(inner) else ""
        return self.scope.mark(shown, Unknown(f"{shown} in line {line} {NOT_RUN}", nodes=nodes))

    def _count(self, inner: str, shown: str, line: int) -> str | None:
        """What a command that counts devices or nodes prints; None where it counts neither."""
        if _COUNTS_DEVICES.search(inner):
            everywhere = "ds_ssh" in inner
            if counted := self.scope.get(DEVICES_OF_JOB if everywhere else DEVICES_ON_NODE):
                return str(int(counted.text) + 2) if everywhere else counted.text  # pdsh's own two lines
            if everywhere:
                why = f"number of devices unknown, which {shown} in line {line} counts"
                return self.scope.mark(shown, Unknown(why, DEVICES_OF_JOB))
        lines = re.search(r"\bwc +-l\b", inner)
        return nodes_listed(self.scope, inner, shown, line) if lines and lists_nodes(inner) else None


def quoted(body: str) -> str:
    """A here-document as a quoted word: quotes inside it are plain characters."""
    return '"' + body.replace('"', '\\"') + '"'


def _trimmed(text: str, kind: str, pattern: str) -> str:
    """A text less the shortest or longest (doubled sign) prefix (#) or suffix (%) that fits the pattern."""
    cuts = range(len(text) + 1)
    if kind[0] == "#":
        order = reversed(cuts) if kind == "##" else cuts
        return next((text[i:] for i in order if fnmatch.fnmatchcase(text[:i], pattern)), text)
    order = cuts if kind == "%%" else reversed(cuts)
    return next((text[:i] for i in order if fnmatch.fnmatchcase(text[i:], pattern)), text)
