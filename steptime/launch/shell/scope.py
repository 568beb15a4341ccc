"""The variables of a script, and why some have no value."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import NamedTuple, TypeAlias

from steptime.launch.shell.arithmetic import arithmetic, whole

OPEN, CLOSE = "\ue000", "\ue001"
"""Encloses the number of a reason in the middle of a text, in place of a missing value."""
NODES_OF_JOB = "nodes of the job"
"""The name, invalid for a variable, of what commands over the job's list of nodes count."""
LINES_OF_NODE = "lines of a node"
"""The name, invalid for a variable, of the lines that each node has in PBS's list: one for each process of mpiprocs."""
DEVICES_OF_JOB = "devices of the job"
"""The name, invalid for a variable, of what ds_ssh counts: all devices of the job."""
DEVICES_ON_NODE = "devices on a node"
"""The name, invalid for a variable, of what nvidia-smi and torch.cuda.device_count() count: those of the chosen machine."""
_MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
_SOURCES_ARGUMENT = re.compile(r" sources \$\{?(\d)\b")
"""Of the note on a file that was not found, where its name is an argument that the script is not given."""
Kept: TypeAlias = "tuple[list[Value] | None, bool, bool, set[str]]"
"""A variable as it was: its values, whether it is an array, whether it has indices of its own, and `Scope.same`."""


class Value(NamedTuple):
    """A text, and the line that gave it."""

    text: str
    line: int


class Unknown(NamedTuple):
    """Why something is unknown."""

    why: str
    variable: str = ""
    """The variable that is not set, where that is the cause."""
    choices: tuple[str, ...] = ()
    """The texts that it may be, where an undecided test gives it one of several and some of them are flags."""
    nodes: str = ""
    """The command that prints it, where that lists the nodes of the job."""
    because: str = ""
    """What may be behind it, in brackets, or ""."""

    @property
    def part(self) -> Unknown:
        """The reason for a part of it."""
        return self._replace(nodes="")

    def within(self, place: str) -> Unknown:
        """The same as the reason for something else."""
        return self._replace(why=f"{place} ({self.why})")

    def in_place_of_nodes(self, variable: str) -> Unknown:
        """The same, of which the user tells `variable` where the number of nodes was asked for; "": nothing."""
        return self._replace(variable=variable) if self.variable == NODES_OF_JOB else self

    def told(self, otherwise: str) -> str:
        """The reason, and the user's fix.

        >>> Unknown("$RANK has no value", "RANK").told("write it out")
        '$RANK has no value; write RANK=... before the command'
        """
        known = {"": otherwise, NODES_OF_JOB: "add --set hardware.nodes=N", DEVICES_OF_JOB: "add --set devices=N"}
        known[DEVICES_ON_NODE] = "add --set hardware.node_type=NAME"
        words = "pass script and arguments as one string: 'SCRIPT ARG ...'" if self.variable.isdecimal() else ""
        return f"{self.why}{self.because}; {known.get(self.variable) or words or f'write {self.variable}=... before the command'}"


class Reason(NamedTuple):
    """A missing value, as an error shows it, and why."""

    shown: str
    cause: Unknown
    unset: bool = False
    """Whether it is a variable that is not set: tests treat it as empty."""


def argument_asked(text: str) -> str:
    """Asks for the first of the script's arguments that a text, as an error shows it, still names; "" where it names none.

    >>> argument_asked("conf/${2}.json")
    "$2 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'"
    """
    found = re.search(r"\$\{?([1-9]\d*)", text)
    return Unknown(f"${found[1]} has no value", found[1]).told("") if found else ""


def clean(text: str) -> str:
    """A text without the characters that mark missing values."""
    return text.replace(OPEN, "").replace(CLOSE, "")


class Scope:
    """Variables and arrays; unknown values are marks in the text."""

    def __init__(self, env: dict[str, str]) -> None:
        self.values: dict[str, list[Value]] = {name: [Value(clean(text), 0)] for name, text in env.items()}
        self.outside = frozenset(env)
        self.read: set[str] = set()
        """Variables of the environment that the script reads."""
        self.arrays: set[str] = set()
        self.same: dict[str, set[str]] = {}
        """The names that stand for one variable, by each of them: of a reference (declare -n) and what it refers to."""
        self.named: set[str] = set()
        """Arrays whose indices are not 0, 1, 2 and so on, as far as is known."""
        self.cleared: set[str] = set()
        """Variables that the script unsets: empty wherever they are used, and not set for ${X+word} and ${X-word}."""
        self.integers: set[str] = set()
        """Variables declared to hold whole numbers: what is assigned to them is arithmetic."""
        self.positional: list[Value] | None = None
        """The words after the script's name; None: none were given, and it is unknown whether there are any."""
        self.reasons: list[Reason] = []
        self.output: Callable[[list[Value], str, int], str | None] = lambda _words, _text, _line: None
        """What $(...), its words and text, in a line prints: a function of the script, or tests; None where that is not known."""
        self.sourced: list[str] = []
        """Files that the script sources and that are not read."""
        self.ended = Unknown("")
        """Where and why the script surely gets no further, after which it is read on; "" where it does not."""
        self.required: list[str] = []
        """Arguments of the script without which it stops: those of ${1:?...} that are not given."""

    def copy(self) -> Scope:
        """A copy of the variables for independent changes; reasons are shared."""
        other = copy(self)
        other.values, other.arrays = dict(self.values), set(self.arrays)
        other.named, other.cleared, other.same = set(self.named), set(self.cleared), dict(self.same)
        return other

    def mark(self, shown: str, cause: Unknown, *, unset: bool = False) -> str:
        """The text that represents a missing value."""
        reason = Reason(shown, cause, unset)
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"{OPEN}{self.reasons.index(reason)}{CLOSE}"

    def unset(self, name: str) -> str:
        """The mark of a variable that is not set."""
        cause = Unknown(f"${name} has no value", name if re.fullmatch(r"\w+", name) else "")
        if argument := next((found[1] for line in self.sourced if (found := _SOURCES_ARGUMENT.search(line))), ""):
            cause = Unknown(f"${name} has no value, and the script sources ${argument}", argument)
        elif self.ended.why:
            cause = cause._replace(because=f" ({self.ended.why})")
        elif self.sourced:
            missing = f"{self.sourced[0]} was not found; put it in the same folder, or add --with FILE"
            cause = cause._replace(why=f"{cause.why} ({missing})")
        return self.mark(f"${name}", cause, unset=True)

    def reasons_of(self, text: str) -> list[Reason]:
        """Why parts of a text have no value; empty where all values are known."""
        return [self.reasons[int(number)] for number in _MARK.findall(text)]

    def cause(self, text: str, otherwise: str) -> Unknown:
        """Why the first missing value of a text is missing."""
        return reasons[0].cause if (reasons := self.reasons_of(text)) else Unknown(otherwise)

    def _alone(self, text: str) -> Reason | None:
        """The reason of a text that is one missing value and nothing else."""
        return self.reasons[int(found[1])] if (found := _MARK.fullmatch(text)) else None

    def given_outside(self, text: str, name: str, why: str) -> str:
        """A default that is one missing value for this reason: the user may give the variable in its place."""
        reason = self._alone(text)
        if reason is None or reason.cause.variable or why not in reason.cause.why:
            return text
        return self.mark(reason.shown, reason.cause._replace(variable=name))

    def unset_variable(self, text: str) -> str:
        """The name of a variable that is not set, if the text is just that variable; "" otherwise."""
        return reason.shown[1:] if (reason := self._alone(text)) and reason.unset else ""

    def shown(self, text: str) -> str:
        """A text with its marks in the script's spelling."""
        return _MARK.sub(lambda found: self.reasons[int(found[1])].shown, text)

    def known(self, text: str) -> bool:
        """Whether all parts of a text have a value."""
        return OPEN not in text

    def get(self, name: str) -> Value | None:
        """The value of a variable, for an array its first element; None where it is not set."""
        found = self.values.get(name)
        if found and found[0].line == 0 and name in self.outside:
            self.read.add(name)
        return found[0] if found else (Value("", 0) if found is not None else None)

    def plain(self, *, arrays: bool = False) -> dict[str, str]:
        """The variables that have a value; with `arrays` the first element of those too."""
        found = {key: held[0].text for key, held in self.values.items() if held and (arrays or key not in self.arrays)}
        return {key: text for key, text in found.items() if self.known(text)}

    def put(self, name: str, text: str, line: int) -> None:
        """Set a plain variable."""
        names = self.same.get(name, {name})
        self.values |= {one: [Value(text, line)] for one in names}
        self.arrays -= names
        self.cleared -= names

    def kept(self, name: str) -> Kept:
        """A variable as it is, for `restore`."""
        return self.values.get(name), name in self.arrays, name in self.named, self.same.get(name, {name})

    def restore(self, name: str, kept: Kept) -> None:
        """Make a variable what it was."""
        values, array, named, same = kept
        self.refer(name, same)
        self.values.pop(name, None)
        self.values |= {name: values} if values is not None else {}
        self.cleared.discard(name)
        self.arrays = self.arrays - {name} | ({name} if array else set())
        self.named = self.named - {name} | ({name} if named else set())

    def put_array(self, name: str, elements: list[Value]) -> None:
        """Set an array."""
        names = self.same.get(name, {name})
        self.values |= dict.fromkeys(names, elements)
        self.arrays |= names
        self.named -= names
        self.cleared -= names

    def refer(self, name: str, same: set[str]) -> None:
        """Make a name one of these for one variable, and no longer one of others."""
        others = self.same.pop(name, set()) - {name}
        self.same |= dict.fromkeys(others, others)
        self.same |= dict.fromkeys(same | {name}, same | {name}) if same != {name} else {}

    def clear(self, name: str, line: int) -> None:
        """What `unset` does."""
        self.put(name, "", line)
        self.cleared |= self.same.get(name, {name})

    def arithmetic(self, text: str, shown: str) -> str:
        """The value of a whole-number expression, or a mark."""
        if reasons := self.reasons_of(text):
            return self.mark(shown, reasons[0].cause)
        blamed: list[Unknown] = []

        def lookup(name: str, depth: int = 0) -> int | None:
            value = self.get(name)
            if value is not None and re.fullmatch(r"\s*[-+]?(?:0|[1-9]\d*|0[0-7]+)\s*", value.text):
                return whole(value.text.strip())
            if value is not None and not value.text.strip():
                return 0
            if value is not None and depth < 10 and self.known(value.text):
                return arithmetic(value.text, lambda inner: lookup(inner, depth + 1))
            reasons = self.reasons_of(value.text) if value is not None else []
            blamed.append(reasons[0].cause if reasons else Unknown(f"${name} has no value", name))
            return None

        if (result := arithmetic(text, lookup)) is not None:
            return str(result)
        return self.mark(shown, blamed[0] if blamed else Unknown(f"{shown} is not integer arithmetic"))
