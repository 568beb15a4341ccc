"""The order in which a script's commands run: sequences, tests, loops, functions' ends, as far as they can be decided."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, NamedTuple

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell.assignments import let
from steptime.launch.shell.conditions import Outcome
from steptime.launch.shell.expansion import Expander
from steptime.launch.shell.scope import Kept, Scope, Unknown, Value
from steptime.launch.shell.statements import Case, Chain, Function, If, Loop, Simple, Statement, Subshell
from steptime.launch.shell.undecided import merged

_MOST_COMMANDS = 50_000
_MOST_ROUNDS = 100
_ALWAYS = frozenset({"while true", "while :", "while ((1))", "while [ 1 ]", "until false", "for ((;;))"})
"""Loops that only their bodies end."""


class Command(NamedTuple):
    """A command that would run, with variables filled in."""

    words: list[Value]
    line: int
    doubt: Unknown | None
    """Why it may not run; None where it certainly does."""
    variables: Mapping[str, str] = MappingProxyType({})
    """Assignments in front of it, visible to it only."""
    values: Mapping[str, list[Value]] = MappingProxyType({})
    """The script's variables when it runs."""


def _head(node: Loop) -> str:
    """A loop's words up to its body."""
    words = [word.text for part in node.condition for word in (part.words if isinstance(part, Simple) else [])]
    return " ".join(filter(None, (node.kind, node.name, *words)))


class ExitError(Exception):
    """The script ends here, with this status."""


Left = Literal["break", "continue", "return"]
"""Commands that leave a loop, its round, or a function."""


class LeaveError(Exception):
    """A loop, its round, or a function ends here."""

    def __init__(self, kind: Left, status: str = "") -> None:
        super().__init__(kind)
        self.kind: Left = kind
        self.status = status
        """What `return` gives back, or ""."""


class ControlFlow(ABC):
    """Interprets statements one after another; a DryRun interprets the simple commands in them."""

    def __init__(self, name: str, scope: Scope, nearby: NearbyFiles) -> None:
        self.name, self.scope, self.nearby = name, scope, nearby
        self.commands = list[Command]()
        self.before_end = 0  # commands until the script surely gets no further, and is read on
        self.told = list[str]()  # what is assumed about which of the commands runs
        self.functions: dict[str, Function] = {}
        self.doubt: Unknown | None = None
        self.count, self.full = 0, False
        self.blame = Unknown("")  # why the last undecided test could not be decided
        self.left = list[tuple[Left, Scope, Unknown]]()  # variables where an undecided test leaves a loop or a function
        self.locals = list[dict[str, Kept]]()
        self.depth = self.pipes = 0
        self.loops = self.within = 0  # loops of the function, and subshells
        self.inside = list[Scope]()  # of subshells that ran commands

    @property
    def expand(self) -> Expander:
        """Fills in words from the current variables."""
        return Expander(self.scope, self.name)

    @contextmanager
    def deeper(self, positional: list[Value] | None) -> Iterator[None]:
        """One level down, with its own positional arguments."""
        before, self.scope.positional = self.scope.positional, positional
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            self.scope.positional = before

    @abstractmethod
    def simple(self, node: Simple) -> Outcome:
        """A command that is no block."""

    def block(self, nodes: list[Statement]) -> Outcome:
        """Interpret commands one after another; the result is the last one's."""
        outcome: Outcome = "ran"
        for node in nodes:
            outcome = self.node(node)
        return outcome

    def node(self, node: Statement) -> Outcome:
        """Interpret one command."""
        self.count += 1
        if self.count > _MOST_COMMANDS:
            self.full = True
            raise ExitError
        if isinstance(node, Simple | Chain):
            return self.simple(node) if isinstance(node, Simple) else self.chain(node)
        if isinstance(node, If):
            self.branches(node)
        elif isinstance(node, Loop):
            self.loop(node)
        elif isinstance(node, Case):
            return self.case(node)
        elif isinstance(node, Function):
            self.functions[node.name] = node
        else:
            return self.subshell(node) if isinstance(node, Subshell) else self.block(node)
        return "ran"

    def subshell(self, node: Subshell) -> Outcome:
        """Commands whose assignments end with them."""
        outer, start = self.scope, len(self.commands)
        self.scope = outer.copy()
        self.within += 1
        try:
            return self.block(node.body)
        except LeaveError:
            return "ran"
        except ExitError as exited:
            if self.full:
                raise
            return "ran" if str(exited) in {"", "0"} else "no"
        finally:
            self.within -= 1
            self.inside += [self.scope] if len(self.commands) > start else []
            self.scope = outer

    def chain(self, chain: Chain) -> Outcome:
        """Commands joined by && and ||."""
        outcome = self.node(chain.parts[0][1])
        for operator, node in chain.parts[1:]:
            if outcome == "unknown":
                found = self.side_by_side([[node]], self.blame.within(f"the test in line {chain.line}"))
                outcome = "unknown" if found != "ran" else "ran"
            elif (outcome != "no") == (operator == "&&"):
                outcome = self.node(node)
        return outcome

    # --- commands that may or may not run ------------------------------------------------------------------------------

    def side_by_side(self, bodies: list[list[Statement]], cause: Unknown, *, one_runs: bool = False) -> Outcome:
        """Interpret bodies of which one runs, or possibly none unless `one_runs`, each from the current variables."""
        start, doubt = self.scope, self.doubt
        scopes = [] if one_runs else [start]
        outcome: Outcome = "ran"
        self.doubt = doubt or cause
        for body in bodies:
            self.scope = start.copy()
            try:
                outcome = self.block(body)
            except LeaveError as left:
                self.left.append((left.kind, self.scope, cause))
                continue
            except ExitError:
                if self.full:
                    raise
                outcome = "ran"
            scopes.append(self.scope)
        self.doubt = doubt
        if not scopes:  # each of them leaves
            kind, self.scope, _ = self.left.pop()
            raise LeaveError(kind)
        self.scope = merged(scopes, cause)
        return outcome

    def join(self, start: int, *kinds: Left) -> bool:
        """Merge in the variables where undecided tests have left since number `start`; whether there were any."""
        here = [(scope, cause) for kind, scope, cause in self.left[start:] if kind in kinds]
        self.left[start:] = [found for found in self.left[start:] if found[0] not in kinds]
        if here:
            self.blame = here[0][1]
            self.scope = merged([self.scope, *(scope for scope, _ in here)], here[0][1])
        return bool(here)

    def branches(self, node: If) -> None:
        """The branch whose test is true; where that is undecidable, all branches in parallel."""
        maybe, blame, outcome = list[list[Statement]](), Unknown("it runs a command"), "no"
        for condition, body in node.arms:
            outcome = "yes" if condition is None else self.block(condition)
            if outcome == "unknown" and not maybe:
                blame = self.blame
            maybe += [body] if outcome != "no" else []
            if outcome == "yes":
                break
        if outcome == "yes" and len(maybe) == 1:
            self.block(maybe[0])
        elif maybe:
            self.side_by_side(maybe, blame.within(f"the test in line {node.line}"), one_runs=outcome == "yes")

    def loop(self, node: Loop) -> None:
        """A for loop over known words is interpreted; another loop may run any number of times."""
        start = len(self.left)
        if not self.rounds(node):
            cause = Unknown(f"the loop in line {node.line} (how often it runs is not known)")
            self.loops += 1
            self.side_by_side([node.body], cause)
            self.loops -= 1
            if _head(node) in _ALWAYS and not self.within and all(kind == "continue" for kind, *_ in self.left[start:]):
                self.stops(Unknown(f"the end of the loop in line {node.line} is not known"))
        self.join(start, "break", "continue")

    def stops(self, why: Unknown) -> None:
        """Record that the script surely gets no further; it is read on, since its variables may be others in its job."""
        if not self.doubt and not self.scope.ended.why:
            self.scope.ended, self.before_end = why, len(self.commands)

    def rounds(self, node: Loop) -> bool:
        """Interpret a loop; False where the number of its rounds is unknown or large."""
        if node.kind != "for" or node.name.startswith("(("):
            return self.repeated(node)
        values = [value for word in node.words for value in self.expand.fields(word.text, word.line)]
        if not node.words or not all(self.scope.known(value.text) for value in values):
            return False
        for value in values:
            self.scope.put(node.name, value.text, value.line)
            if not self.round(node.body):
                break
        return True

    def round(self, body: list[Statement]) -> bool:
        """One round of a loop; False where it is the last."""
        start = len(self.left)
        self.loops += 1
        try:
            self.block(body)
        except LeaveError as left:
            if left.kind == "return":
                raise
            if left.status.isdecimal() and int(left.status) > 1 and self.loops > 1:
                raise LeaveError(left.kind, str(int(left.status) - 1)) from None
            return left.kind == "continue"
        finally:
            self.loops -= 1
            self.join(start, "continue")
        return True

    def repeated(self, node: Loop) -> bool:
        """A while or until loop, or for ((i = 0; i < 8; i++)); False where the number of its rounds is unknown or large."""

        def said(text: str) -> Outcome:
            return let(self.scope, self.expand.text(text, node.line)) if text.strip() else "yes"

        first, until, step = [*node.name[2:-2].split(";"), "", ""][:3]
        said(first)
        for _ in range(_MOST_ROUNDS):
            outcome = said(until) if node.kind == "for" else self.block(node.condition)
            if outcome not in {"yes", "no"}:
                return False
            if outcome == ("yes" if node.kind == "until" else "no") or not self.round(node.body):
                return True
            said(step)
        return False

    def case(self, node: Case) -> Outcome:
        """The first matching arm; all of them in parallel where the word has no value."""
        text = self.expand.text(node.word.text, node.line)
        if self.scope.known(text):
            for patterns, body in node.arms:
                words = [self.expand.pattern(pattern.text, pattern.line) for pattern in patterns]
                if any(fnmatch.fnmatchcase(text, word) for word in words):
                    return self.block(body)
            return "yes"
        cause = self.scope.cause(text, "").within(f"the case in line {node.line}")
        self.side_by_side([body for _, body in node.arms], cause)
        return "ran"
