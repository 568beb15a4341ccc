"""Words of a script with quotes removed and variables filled in."""

from __future__ import annotations

import glob
import posixpath
import re
from functools import partial
from itertools import groupby

from steptime.launch.shell.changed_texts import SLICE, ansi, changed, in_braces, sliced
from steptime.launch.shell.known_outputs import simple_output
from steptime.launch.shell.lexer import Lexer
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, Scope, Unknown, Value
from steptime.launch.shell.slurm import length_of, lists_nodes, nodes_listed

_INDICES = re.compile(r"!([A-Za-z_]\w*)\[[@*]\]")
"""${!array[@]}; with named elements ([a]=1) they are not numbers."""
_INDIRECT = re.compile(r"!([A-Za-z_]\w*)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9#@*?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[#@*?$!-])(\[(?:[^\[\]]|\[[^\]]*\])*\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_HERE = re.compile(r"\s*cat\s*<<-?\s*(['\"]?\w+['\"]?)[ \t]*\n(.*)\n\s*\w+\s*", re.DOTALL)
_HERE_FOLDER = re.compile(r"pwd(?: -P)?|python3? -c (['\"])import os; *print\(os\.getcwd\(\)\)\1")
_FOLDER_OF = re.compile(
    r"\s*(?:builtin )?cd (?:-P )?(?:-- )?([^|;&<>\n]+?)\s*(?:(?:&|1)?>\s*/dev/null(?: 2>&1)?\s*)?(?:&&|;)\s*pwd(?: -P)?\s*"
)
"""A folder as a path: $(cd "$(dirname "$0")" && pwd)."""
_DEEPEST = 30
_COUNTS_DEVICES = re.compile(r"\bdevice_count\(\)|\b(nvidia|rocm|xpu)-smi\b.*(wc +-l|grep +-c)|\bSLURM_GPUS_ON_NODE\b")
"""Commands that print the number of devices of a node."""
_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
NOT_RUN = "is a command, and commands are not run"


class Expander:
    """Fills in words from a scope; `name` is the script's, for errors and for $0."""

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope, self.name, self.depth = scope, name, 0
        self.words_done = False
        """Whether the last substitution's values are already words: the default of a ${X:-...}."""

    def fields(self, raw: str, line: int) -> list[Value]:
        """The words that one raw word becomes: unquoted values are split at blanks, "${A[@]}" is one word per element."""
        if "{" in raw and len(several := in_braces(raw)) > 1:
            return [value for part in several for value in self.fields(part, line)]
        said = self.scope.get("IFS")
        ifs = " \t\r\n" if said is None or not self.scope.known(said.text) else said.text
        pieces: list[Value | None] = []  # None separates words
        for values, quoted in self._parts(raw, line):
            splits = re.compile(f"([{re.escape(ifs)}]+)" if ifs and not quoted else r"(?!)")
            for number, value in enumerate(values):
                parts = [part for part in splits.split(value.text) if part or quoted]
                pieces += [None] if number else []
                pieces += [None if splits.fullmatch(part) else Value(part, value.line) for part in parts]
        words = (list(group) for between, group in groupby(pieces, key=lambda piece: piece is None) if not between)
        return [Value("".join(piece.text for piece in word if piece), word[0].line) for word in words if word[0]]

    def pattern(self, raw: str, line: int) -> str:
        """A raw word as a pattern: what is in quotes stands for itself."""
        lexer, found, start, i = Lexer(raw, self.name, line), "", 0, 0
        while i < len(raw):
            if raw[i] in "'\"":
                end = lexer.skip(i)
                found += self.text(raw[start:i], line).replace("[^", "[!") + glob.escape(self.text(raw[i:end], line))
                start = i = end
            else:
                i = lexer.skip(i) if raw.startswith(("${", "$(", "`"), i) else i + 1 + (raw[i] == "\\")
        return found + self.text(raw[start:], line).replace("[^", "[!")

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
        if text.startswith("$[", i) and (end := text.find("]", i) + 1):  # bash's older arithmetic
            return [Value(self.scope.arithmetic(self.text(text[i + 2 : end - 1], line), text[i:end]), line)], end
        if text.startswith(("`", "$(", "${"), i):
            end = lexer.skip(i)
            inner = text[i + (1 if text[i] == "`" else 2) : end - 1]
            if text.startswith("${", i):
                return self._braced(inner, line, quoted=quoted), end
            if text.startswith("$((", i) and inner[-1] == ")":
                return [Value(self.scope.arithmetic(self.text(inner[1:-1], line), text[i:end]), line)], end
            return [Value(self._command(inner, line), line)], end
        if not quoted and text.startswith("$'", i):
            end = lexer.skip(i + 1)
            return [Value(ansi(text[i + 2 : end - 1]), line)], end
        found = _NAME.match(text, i + 1)
        return (self._variable(found[0], line), found.end()) if found else ([Value("$", line)], i + 1)

    def _variable(self, name: str, line: int) -> list[Value]:
        given = self.scope.positional or []
        if name in {"@", "*"}:
            return list(given)
        if name.isdecimal() and 0 < int(name) <= len(given):
            return [given[int(name) - 1]]
        if name not in {"#", "0", "BASH_SOURCE"} and (value := self.scope.get(name)) is not None:
            return [value]
        known = {"#": str(len(given)), "0": self.name, "BASH_SOURCE": self.name, "PWD": "."}
        return [Value(known[name] if name in known else self.scope.unset(name), line)]

    def _braced(self, inner: str, line: int, *, quoted: bool) -> list[Value]:
        if (array := _INDICES.fullmatch(inner)) and array[1] not in self.scope.named:
            of_array = self.scope.values.get(array[1], [])
            if of_array and all(item.text[:1] != "[" and self.scope.known(item.text) for item in of_array):
                return [Value(str(i), line) for i in range(len(of_array))]
        if (other := _INDIRECT.fullmatch(inner)) and (said := self.scope.get(other[1])) and said.text.isidentifier():
            return self._variable(said.text, line)
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
        if part := SLICE.fullmatch(rest) if index in {"[@]", "[*]"} or name in {"@", "*"} else None:
            here = [Value(self.name, line), *values] if name in {"@", "*"} else values
            numbers = [self.text(number, line) for number in part.groups() if number]
            return sliced(self.scope, here, numbers, f"${{{inner}}}", line)
        fill, shown = partial(self.text, line=line), f"${{{inner}}}"
        return [Value(changed(self.scope, fill, value.text, rest, shown), value.line) for value in values]

    def _elements(self, name: str, index: str | None, line: int) -> list[Value]:
        if index in {"[@]", "[*]"}:
            found = [] if name in self.scope.cleared else self.scope.values.get(name)
            return list(found) if found is not None else [Value(self.scope.unset(name), line)]
        if index is None:
            return self._variable(name, line)
        if name in self.scope.named:
            why = Unknown(f"${name} has indices that are not 0, 1, 2 and so on")
            return [Value(self.scope.mark(f"${{{name}{index}}}", why), line)]
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
        apart = not quoted and re.search(r"\s", raw)
        words = [token.text for token in Lexer(raw, self.name, line, array=True).tokens()] if apart else [raw]
        filled = [value for text in words for value in self.fields(text, line)] if self.depth < _DEEPEST else []
        self.depth -= 1
        self.words_done = kind[-1] == "+" or empty
        if kind[-1] == "+":
            return filled if not empty else [Value("", line)] if quoted else []
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

    def _command(self, inner: str, line: int) -> str:
        """$(...): paths that need no running; anything else has no value."""
        words, shown = inner.split(None, 1), f"$({' '.join(inner.split())})"
        self.depth += 1
        try:
            if (simple := simple_output(self.scope, partial(self.text, line=line), inner, shown)) is not None:
                return simple
            if folder := _FOLDER_OF.fullmatch(inner):
                path = self.text(re.sub(r"\$\{?BASH_SOURCE(?:\[0\])?\}?", "$0", folder[1]), line)
                if self.scope.known(path):
                    return path
            if inner.lstrip().startswith("#"):
                return ""  # a comment amid continued lines
            if here := _HERE.fullmatch(inner):
                return here[2] if here[1][0] in "'\"" else self.text(quoted(here[2]), line)
            if _HERE_FOLDER.fullmatch(inner.strip()):
                return self._variable("PWD", line)[0].text
            alone = words and self.depth < _DEEPEST and not re.search(r"[|;&<>(`\n]", inner)
            given = [value for word in _WORDS.findall(inner) for value in self.fields(word, line)] if alone else []
            if (output := self.scope.output(given, inner, line)) is not None:
                return output
            plain = len(words) == 2 and not re.search(r"[|;&<>\n]", words[1]) and self.depth < _DEEPEST
            if plain and words[0] in {"dirname", "basename", "echo"}:
                apart = _WORDS.findall(words[1]) if words[0] == "basename" and "(" not in inner else words[1:]
                found = [value.text for word in apart for value in self.fields(word, line)]
                if found and all(map(self.scope.known, found)):
                    if words[0] == "echo" and not found[0].startswith("-"):
                        return " ".join(found)
                    if words[0] == "basename" and len(found) == 2:
                        return posixpath.basename(found[0].rstrip("/")).removesuffix(found[1])
                    if len(found) == 1 and words[0] != "echo":
                        return getattr(posixpath, words[0])(found[0].rstrip("/")) or "."
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
            why = f"number of devices unknown, which {shown} in line {line} counts"
            return self.scope.mark(shown, Unknown(why, DEVICES_OF_JOB if everywhere else DEVICES_ON_NODE))
        lines = re.search(r"\bwc +-l\b", inner)
        return nodes_listed(self.scope, inner, shown, line) if lines and lists_nodes(inner) else None


def quoted(body: str) -> str:
    """A here-document as a quoted word: quotes inside it are plain characters."""
    return '"' + body.replace('"', '\\"') + '"'
