"""Reads one YAML or JSON document into plain data: strict where YAML is ambiguous, and safe with any bytes.

In addition to PyYAML's safe loader: a duplicate key is an error, aliases may not explode, 1e12 is a number, 010 is ten, 1:30 is
text, no tag makes an object, and every failure is one line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from os import listdir, scandir
from pathlib import Path
from typing import Any, TypeVar

import yaml

from steptime.base.config import ConfigError, ConfigProblem, closest, show

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_BYTES = 1_000_000
"""Size of the largest document that is read [B]; real configs and machine files have a few pages."""
MAX_NODES = 50_000
"""Most values after aliases are expanded."""
MAX_DEPTH = 40
"""Deepest nesting."""
MOST_FILES = 1_000
"""Files of a folder that are compared with the name of a missing one: a few milliseconds."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys((".inf", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf",), float("-inf")),
    **dict.fromkeys((".nan",), float("nan")),
}
_TAGS = {None, "!"} | {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}


def shipped(path: Path) -> Any:
    """The content of a YAML file that ships with steptime; a key may be a number or a bool."""
    return _Builder(_Loader(path.read_bytes()), path.name, typed_keys=True).document()


def shipped_names(folder: Path) -> list[str]:
    """The names of the YAML files in a folder that ships with steptime, sorted."""
    return sorted([name.removesuffix(".yaml") for name in listdir(folder) if name.endswith(".yaml")])  # noqa: PTH208  faster


def read_each(items: Iterable[Item], read: Callable[[Item], Result]) -> list[Result]:
    """Every item read.

    Raises:
        ConfigError: the problems of all items that cannot be read.
    """
    found: list[Result] = []
    problems: list[ConfigProblem] = []
    for item in items:
        try:
            found.append(read(item))
        except ConfigError as error:
            problems += error.details
    if problems:
        raise ConfigError(problems)
    return found


def read_source(source: str | Path) -> tuple[str, str]:
    """The text of a source and its name for messages: a path, "-" for standard input, or the document itself.

    A string is the document where it has a line break or starts with "{"; else it is a path.

    Raises:
        ConfigError: if there is no such file, it is not text, or it is larger than MAX_BYTES.
    """
    if isinstance(source, str) and source == "-":
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  closed by the caller
            raise ConfigError("standard input is closed; pipe a plan into it")
        return _decode(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input"), "standard input"
    if source == "":
        raise ConfigError("plan: empty text; give a path, YAML text or a mapping")
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        if len(source) > MAX_BYTES:
            raise ConfigError(f"plan text: larger than {MAX_BYTES:,} bytes; a plan is about a page of YAML")
        return source, "plan text"
    name = str(source)
    told = name if len(name) <= 1000 else f"{name[:500]}...{name[-500:]}"
    if not isinstance(source, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]  callers may pass anything
        raise ConfigError(f"expected a path, YAML text or a mapping (got {show(source)})")
    try:
        with open(source, "rb") as file:  # noqa: PTH123  one call, and it reports directories and pipes alike
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable(told, error, "a YAML file") from None
    return _decode(raw, name), name


def unreadable(name: str, error: OSError | ValueError, wanted: str = "a file") -> ConfigError:
    """The problem of a file that cannot be opened; `wanted`: what to give in place of a directory."""
    if isinstance(error, IsADirectoryError):
        return ConfigError(f"{name}: is a directory; give {wanted}")
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{name}: no such file{_near_file(name)}")
    return ConfigError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})")


def _near_file(name: str) -> str:
    """The end of the line about a missing file: the file of its folder with nearly the same name, with and without suffix.

    >>> _near_file("no/such/folder.yaml")
    ''
    """
    path = Path(name)
    try:
        with scandir(path.parent) as entries:
            meant = closest(path.name, [each.name for each in islice(entries, MOST_FILES) if Path(each.name).suffix])
    except (OSError, ValueError):  # no such folder, or one that cannot be listed
        return ""
    near_stem = meant and closest(path.stem, [Path(meant).stem])
    return f"; did you mean {str(path.with_name(meant))!r}?" if near_stem else ""


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes; a plan is about a page of YAML")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not a text file (byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8)"
        ) from None
    if "\0" in text:
        raise ConfigError(f"{name}: not a text file (NUL byte at offset {text.index(chr(0))})")
    return text


def parse_mapping(text: str, name: str, *, repeats: bool = False) -> dict[str, Any]:
    """The document as a dict; with `repeats` the last of a repeated key counts, as in PyYAML and most frameworks' files.

    Raises:
        ConfigError: if it is not valid YAML or JSON, is empty, or is not a mapping.
    """
    data = parse(text, name, repeats=repeats)
    if data is None:
        raise ConfigError(f"{name}: empty; expected a mapping of sections")
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected a mapping at the top level (got {show(data)})")
    return data


def parse(text: str, name: str, *, repeats: bool = False) -> Any:
    """The document as dicts, lists, text, numbers, bools and None.

    Raises:
        ConfigError: if it is not valid YAML or JSON, repeats a key (but with `repeats`), or expands too far.
    """
    try:
        loader = _Loader(text)
    except UnicodeEncodeError:  # JSON's \ud800 alone
        raise ConfigError(f"{name}: holds half of a character (a surrogate without its pair); remove it") from None
    try:
        return _Builder(loader, name, repeats=repeats).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context or ""
        if mark and "maximum nesting depth" in problem:  # libyaml's own limit, reached before any event is told
            where, problem = f"line {mark.line + 1}: ", f"nested more than {MAX_DEPTH} deep"
        tab = "cannot start any token" in problem and mark and "\t" in _indent(text, mark.line)
        if mark and (tab or "tab character" in problem):
            where, problem = f"line {mark.line + 1}: ", "a tab; YAML is indented with spaces"
        first = text.split("\n")[mark.line : mark.line + 1] if mark else []
        if mark and "cannot start any token" in problem and mark.column < len("".join(first)):
            problem = f"{first[0][mark.column]!r} cannot begin a value in YAML; quote the text"
        if "<document start>" in problem:
            problem = "text after the end of the document; not YAML, or wrongly indented"
        if problem.startswith("mapping values are not allowed"):
            problem = "a second ':' on the line; begin a new line, or quote the text"
        raise ConfigError(f"{name}: {where}{problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML ({' '.join(str(error).split())[:120]})") from None
    finally:
        loader.dispose()


def _indent(text: str, line: int) -> str:
    """The white space at the start of a line, counted from 0; "" after the last one."""
    found = "".join(text.split("\n")[line : line + 1])
    return found[: len(found) - len(found.lstrip())]


class _Builder:
    """Builds plain data from the parser's events (PyYAML's own composer overflows the C stack on deep nesting)."""

    def __init__(self, loader: Any, name: str, *, repeats: bool = False, typed_keys: bool = False) -> None:
        self.loader = loader
        self.name = name
        self.repeats = repeats
        self.typed_keys = typed_keys
        self.nodes = 0
        self.anchors: dict[str, tuple[Any, int]] = {}

    def fail(self, event: Any, message: str) -> ConfigError:
        return ConfigError(f"{self.name}: line {self.line(event)}: {message}")

    def line(self, event: Any) -> int:
        return int(event.start_mark.line) + 1

    def document(self) -> Any:
        get = self.loader.get_event
        get()  # stream start
        if isinstance(get(), yaml.StreamEndEvent):
            return None
        value = self.value(get(), 0)
        get()  # document end
        if not isinstance(event := get(), yaml.StreamEndEvent):
            raise self.fail(event, "more than one YAML document; expected one")
        return value

    def value(self, event: Any, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.fail(event, f"alias {event.anchor!r} is not defined")
            found, size = self.anchors[event.anchor]
            self.count(size)
            return found
        before = self.nodes
        self.count(1)
        if event.tag not in _TAGS:
            raise self.fail(event, f"tag {event.tag!r} is not allowed; write plain YAML")
        if depth > MAX_DEPTH:
            raise self.fail(event, f"nested more than {MAX_DEPTH} deep")
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = scalar(event.value) if event.implicit[0] else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := self.loader.get_event(), yaml.SequenceEndEvent):
                value.append(self.value(item, depth + 1))
        else:
            value = self.mapping(depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise ConfigError(
                f"{self.name}: more than {MAX_NODES:,} values (aliases expanded); a plan is about a page of YAML"
            )

    def mapping(self, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first: dict[str, Any] = {}
        while not isinstance(event := self.loader.get_event(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                flow = isinstance(event, yaml.MappingStartEvent) and event.flow_style
                hint = "; the {{name}} of a template must be filled in first" if flow else ""
                raise self.fail(event, f"a key must be a word{hint}")
            key = scalar(event.value) if self.typed_keys and event.implicit[0] else event.value
            value = self.value(self.loader.get_event(), depth + 1)
            if key == "<<" and event.implicit[0]:
                for part in value if isinstance(value, list) else [value]:
                    if not isinstance(part, dict):
                        raise self.fail(event, "'<<' can only merge mappings")
                    merged = part | merged
            elif key in own and not self.repeats:
                raise self.fail(event, f"duplicate key {key!r} (first on line {self.line(first[key])})")
            else:
                own[key] = value
                first[key] = event
        return merged | own


def scalar(text: str) -> Any:
    """An unquoted YAML scalar: null, a bool, a number (1e12 too), else text.

    >>> scalar("1e12"), scalar("010"), scalar("1:30"), scalar("28_16_"), scalar("1_.5_")
    (1000000000000.0, 10, '1:30', 2816, 1.5)
    """
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(text) and len(text) < 300:
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text
