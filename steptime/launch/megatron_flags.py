"""Megatron-LM's arguments: the table of what each becomes, and their values by the name that its dump prints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping, read_source
from steptime.launch.reading import Flag
from steptime.launch.shell import Word
from steptime.launch.shell_scope import way_out

_TABLE = Path(__file__).parents[1] / "data" / "launch" / "megatron.yaml"
OLD_RELEASE = "Megatron-LM (2021 and 2022)"
_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}
_NOTHING = frozenset({"", "None", "False", "[]", "{}", "()"})


class Table(NamedTuple):
    """Every argument, by the name that the dump prints (data/launch/megatron.yaml)."""

    release: str
    used: dict[str, dict[str, Any]]
    """Argument -> the config key it becomes (to), what it is where unsaid (default), the argument beside which alone that
    matters (with), and whether the release of 2021 had it (old)."""
    unmodelled: dict[str, dict[str, Any]]
    """Argument -> values that change nothing (neutral), and what else it does (why)."""
    irrelevant: dict[str, str]
    """Argument -> why it changes no cost."""
    prefixes: tuple[str, ...]
    switches: frozenset[str]
    negations: dict[str, str]
    """Flag without dashes -> the argument that it turns off."""
    renames: dict[str, str]

    def known(self, argument: str) -> bool:
        """Whether the table says what becomes of an argument."""
        return argument in self.used or argument in self.unmodelled or argument in self.irrelevant


@cache
def table() -> Table:
    """The table of the release named in it."""
    data = parse_mapping(*read_source(_TABLE))
    irrelevant = {name: reason for reason, names in data["irrelevant"].items() for name in names}
    return Table(
        f"{data['framework']} ({data['release']})",
        data["used"],
        data["unmodelled"],
        irrelevant,
        tuple(data["prefixes"]),
        frozenset(data["switches"]),
        data["negations"],
        data["renames"],
    )


class Arguments:
    """The arguments of one job; what is unsaid is the release's default.

    `names` are the flags as the script spells them, `lines` where each stands.
    """

    def __init__(self, said: dict[str, str], names: dict[str, str] | None = None) -> None:
        self.said = said
        self.names = names or {}
        self.problems: list[str] = []
        self.old = False
        """They are of 2021 or 2022: before Megatron-Core."""
        self.left_out: dict[str, str] = {}
        """Arguments whose value no config expresses, and why."""
        self.moot: dict[str, str] = {}
        """Arguments that change nothing beside the others, and why."""

    def name(self, argument: str) -> str:
        """An argument as the source spells it."""
        known = table()
        if argument in self.names or not self.names or argument in known.negations.values():
            return self.names.get(argument, argument)
        renamed = next((flag for flag, other in known.renames.items() if other == argument), "")
        return "--" + (renamed or argument.replace("_", "-"))

    def text(self, argument: str) -> str | None:
        """What is said of an argument, else its default; None where it is unset. Enums and dtypes are plain words."""
        if argument not in self.said:
            default = table().used.get(argument, {}).get("default")
            return None if default is None else str(default)
        return plain(self.said[argument])

    def on(self, argument: str) -> bool:
        """Whether a switch is on."""
        return (self.text(argument) or "False").lower() in {"true", "1", "yes"}

    def whole(self, argument: str) -> int | None:
        """A whole number; what is none is a problem, told once."""
        text = self.text(argument)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            self.problems.append(f"{self.name(argument)}: expected a whole number (got {text!r})")
            return None

    def at_least_one(self, argument: str) -> int | None:
        """A whole number that is 1 or more."""
        number = self.whole(argument)
        if number is not None and number < 1:
            self.problems.append(f"{self.name(argument)}: must be at least 1 (got {number})")
            return None
        return number

    def number(self, argument: str) -> float:
        """A number; 0 where there is none."""
        text = self.text(argument)
        try:
            return float(text or 0)
        except ValueError:
            self.problems.append(f"{self.name(argument)}: expected a number (got {text!r})")
            return 0.0

    def words(self, argument: str) -> list[str]:
        """The words of an argument that takes several: ['a', 'b'] of a dump, a b of a script."""
        return re.findall(r"[\w.+-]+", self.text(argument) or "")

    def leave_out(self, argument: str, why: str) -> None:
        """Note that what an argument says changes cost and is not in the config."""
        self.left_out[argument] = why

    def without_effect(self, argument: str, why: str) -> None:
        """Note that what an argument says changes nothing in this job."""
        self.moot[argument] = why

    def flags(self) -> list[Flag]:
        """Every argument said, and the defaults of those that are used and unsaid."""
        found = [flag for argument in self.said if (flag := self._flag(argument)) is not None]
        return found + [self._default(argument) for argument in table().used if self._fills_in(argument)]

    def _fills_in(self, argument: str) -> bool:
        """Whether an argument is unsaid and its default matters."""
        entry = table().used[argument]
        there = "default" in entry and argument not in self.said
        return there and ("with" not in entry or entry["with"] in self.said) and (not self.old or "old" in entry)

    def _default(self, argument: str) -> Flag:
        entry = table().used[argument]
        release = OLD_RELEASE if self.old else table().release
        return Flag(self.name(argument), _shown(str(entry["default"])), "default", f"{release}: {entry['to']}")

    def _flag(self, argument: str) -> Flag | None:
        text, name, known = plain(self.said[argument]), self.name(argument), table()
        shown = "true" if name[2:] in known.negations else _shown(text or "")
        if argument in self.left_out:
            return Flag(name, shown, "unmodelled", self.left_out[argument])
        if argument in self.moot:
            return Flag(name, shown, "irrelevant", self.moot[argument])
        if argument in known.used:
            return None if text is None else Flag(name, shown, "used", known.used[argument]["to"])
        if argument in known.unmodelled:
            entry = known.unmodelled[argument]
            if text is None or text in {"[]", "{}", "()"} or any(_same(text, value) for value in entry["neutral"]):
                return Flag(name, shown, "irrelevant", f"off: {entry['why']}")
            return Flag(name, shown, "unmodelled", entry["why"])
        if argument in known.irrelevant:
            return Flag(name, shown, "irrelevant", known.irrelevant[argument])
        if text is None or text in _NOTHING:
            return Flag(name, shown, "irrelevant", f"off; unknown to {known.release}")
        if argument.startswith(known.prefixes):
            return Flag(name, shown, "irrelevant", f"by its name; unknown to {known.release}")
        close = get_close_matches(argument, {**known.used, **known.unmodelled, **known.irrelevant}, n=1, cutoff=0.8)
        said = f"; did you mean {self.name(close[0])}?" if close else ""
        return Flag(name, shown, "unmodelled", f"unknown to {known.release}{said}")


def plain(text: str) -> str | None:
    """A value without Python's clothes: torch.bfloat16 is bf16, AttnBackend.auto is auto, None is nothing."""
    text = text.strip()
    if text in {"None", ""}:
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if found := re.fullmatch(r"<?(?:torch|[A-Z]\w+)\.(\w+)(?:: .*>)?", text):
        return _DTYPES.get(found[1], found[1])
    return text


def _same(text: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text.lower() == str(value).lower()
    try:
        return float(text) == float(value)
    except ValueError:
        return False


def _shown(text: str) -> str:
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."


# --- flags of a command line -------------------------------------------------------------------------------------------

_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)


class Said(NamedTuple):
    """The flags of a command line."""

    arguments: dict[str, str]
    names: dict[str, str]
    """Argument -> the flag as it stands there."""
    problems: list[str]
    notes: list[str]
    """Words without a value that stand where a flag may: taken as empty, as the shell does."""


def arguments_of(words: Iterable[Word]) -> Said:
    """The arguments that the words after the program stand for; the last one of several wins, as in argparse."""
    said = Said({}, {}, [], [])
    flag, values = None, list[Word]()
    for word in words:
        if _FLAG.fullmatch(word.text):
            _close(flag, values, said)
            name, equals, value = word.text.partition("=")
            flag, values = word._replace(text=name), [word._replace(text=value)] if equals else []
        elif flag is None:
            _stray(word, said)
        else:
            values.append(word)
    _close(flag, values, said)
    return said


def _stray(word: Word, said: Said) -> None:
    if word.unresolved:
        said.notes.append(f"line {word.line}: {word.unresolved[0]}: taken as empty")
    elif word.text:
        said.problems.append(f"line {word.line}: {word.text!r} stands where a flag is expected")


def _close(flag: Word | None, values: list[Word], said: Said) -> None:
    """Add a flag with its values."""
    if flag is None:
        return
    known, bare = table(), flag.text[2:]
    off = known.negations.get(bare)
    argument = off or known.renames.get(bare) or bare.replace("-", "_")
    switch = off is not None or argument in known.switches
    if switch or not known.known(argument):
        kept = [] if switch else values
        for word in values[len(kept) :]:
            _stray(word, said)
        values = kept
    while len(values) > 1 and values[-1].unresolved:
        _stray(values[-1], said)
        values = values[:-1]
    said.names[argument] = flag.text
    said.arguments[argument] = "False" if off else " ".join(word.text for word in values) if values else "True"
    matters = argument in known.used or argument in known.unmodelled
    unresolved = [(word, why) for word in values for why in word.unresolved]
    if not matters:
        return
    if not switch and not values:
        said.problems.append(f"line {flag.line}: {flag.text}: a value is missing")
    for word, why in unresolved:
        fix = way_out(why, "write the value into the script")
        said.problems.append(f"line {word.line}: {flag.text}: {why}; {fix}")


def read_words(text: str) -> list[Word]:
    """The words of a list of flags alone, one or more on a line.

    Raises:
        ConfigError: a quote that never ends.
    """
    import shlex

    found: list[Word] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += [Word(word, number) for word in shlex.split(line.removesuffix("\\"), comments=True)]
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None
    return found
