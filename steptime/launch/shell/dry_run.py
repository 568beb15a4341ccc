"""Interprets a script's commands without running any: assignments are made, decidable tests are decided."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from steptime.launch.beside import Beside
from steptime.launch.shell import grammar
from steptime.launch.shell.assignments import LARGEST, assign, given_script, let, read_names, text_to_read, write_file
from steptime.launch.shell.commands import Command, ExitError
from steptime.launch.shell.conditions import Outcome, answer
from steptime.launch.shell.expansion import Expander
from steptime.launch.shell.lexer import Token
from steptime.launch.shell.printed import printed
from steptime.launch.shell.scope import Scope, Unknown, Value, clean, merged
from steptime.launch.shell.slurm import launcher_of, started, submitted

_DECLARE = frozenset({"export", "local", "declare", "typeset", "readonly"})
_MOST_COMMANDS = 50_000
_MOST_ROUNDS = 100
_DEEPEST = 20
_NO_JOB = ("/activate", "conda.sh", ".bashrc", ".bash_profile", "/profile")  # files that set up the shell
_SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")


def _script_of(words: list[Value]) -> list[Value]:
    """The script that a command runs, with its arguments: `bash train.sh 8`, `./train.sh 8`; empty of another command."""
    script = words[1:] if words[0].text in {"bash", "sh", "zsh"} else words if "/" in words[0].text else []
    return script if script and script[0].text.endswith(_SCRIPTS) else []


class DryRun:
    """The commands of a script, in order, and the variables they leave."""

    def __init__(self, name: str, scope: Scope, beside: Beside) -> None:
        self.name, self.scope, self.beside = name, scope, beside
        self.commands, self.told = list[Command](), list[str]()  # told: what is assumed about which of them runs
        self.functions: dict[str, grammar.Function] = {}
        self.scope.prints = partial(printed, self)
        self.doubt: Unknown | None = None
        self.depth, self.count, self.full = 0, 0, False
        self.pipes = 0
        self.blame = Unknown("")  # why the last undecided test could not be decided

    @property
    def expand(self) -> Expander:
        """Fills in words from the current variables."""
        return Expander(self.scope, self.name)

    def script(self, nodes: list[grammar.Statement]) -> None:
        """Interpret a whole script."""
        try:
            self.block(nodes)
        except ExitError:
            return

    def block(self, nodes: list[grammar.Statement]) -> Outcome:
        """Interpret commands one after another; the result is the last one's."""
        outcome: Outcome = "ran"
        for node in nodes:
            outcome = self.node(node)
        return outcome

    def node(self, node: grammar.Statement) -> Outcome:
        """Interpret one command."""
        self.count += 1
        if self.count > _MOST_COMMANDS:
            self.full = True
            raise ExitError
        if isinstance(node, grammar.Simple | grammar.Chain):
            return self.simple(node) if isinstance(node, grammar.Simple) else self.chain(node)
        if isinstance(node, grammar.If):
            self.branches(node)
        elif isinstance(node, grammar.Loop):
            self.loop(node)
        elif isinstance(node, grammar.Case):
            self.case(node)
        elif isinstance(node, grammar.Function):
            self.functions[node.name] = node
        else:
            return self.block(node)
        return "ran"

    def chain(self, chain: grammar.Chain) -> Outcome:
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

    def side_by_side(self, bodies: list[list[grammar.Statement]], cause: Unknown, *, one_runs: bool = False) -> Outcome:
        """Interpret bodies of which one runs, or possibly none unless `one_runs`, each from the current variables."""
        start, doubt = self.scope, self.doubt
        scopes = [] if one_runs else [start]
        outcome: Outcome = "ran"
        self.doubt = doubt or cause
        for body in bodies:
            self.scope = start.copy()
            try:
                outcome = self.block(body)
            except ExitError:
                if self.full:
                    raise
                outcome = "ran"
            scopes.append(self.scope)
        self.doubt, self.scope = doubt, merged(scopes, cause)
        return outcome

    def branches(self, node: grammar.If) -> None:
        """The branch whose test is true; where that is undecidable, all branches in parallel."""
        maybe, blame, outcome = list[list[grammar.Statement]](), Unknown("it runs a command"), "no"
        for condition, body in node.arms:
            outcome = "yes" if condition is None else self.block(condition)
            if outcome == "yes" and not maybe:
                self.block(body)
                return
            if outcome == "unknown" and not maybe:
                blame = self.blame
            maybe += [body] if outcome != "no" else []
            if outcome == "yes":
                break
        if maybe:
            self.side_by_side(maybe, blame.within(f"the test in line {node.line}"), one_runs=outcome == "yes")

    def loop(self, node: grammar.Loop) -> None:
        """A for loop over known words is interpreted; another loop may run any number of times."""
        if node.kind == "for" and node.words:
            values = [value for word in node.words for value in self.expand.fields(word.text, word.line)]
            if all(self.scope.known(value.text) for value in values):
                for value in values:
                    self.scope.put(node.name, value.text, value.line)
                    self.block(node.body)
                return
        elif node.kind != "for" and self.repeated(node):
            return
        self.side_by_side([node.body], Unknown(f"the loop in line {node.line} (how often it runs is not known)"))

    def repeated(self, node: grammar.Loop) -> bool:
        """Interpret a while or until loop; False where the number of iterations is unknown or large."""
        ends: Outcome = "no" if node.kind == "while" else "yes"
        for _ in range(_MOST_ROUNDS):
            outcome = self.block(node.condition)
            if outcome not in {"yes", "no"}:
                return False
            if outcome == ends:
                return True
            self.block(node.body)
        return False

    def case(self, node: grammar.Case) -> None:
        """The first matching arm; all of them in parallel where the word has no value."""
        text = self.expand.text(node.word.text, node.line)
        if self.scope.known(text):
            for patterns, body in node.arms:
                words = [self.expand.text(pattern.text, pattern.line) for pattern in patterns]
                if any(fnmatch.fnmatchcase(text, word) for word in words):
                    self.block(body)
                    return
            return
        cause = self.scope.cause(text, "").within(f"the case in line {node.line}")
        self.side_by_side([body for _, body in node.arms], cause)

    def simple(self, node: grammar.Simple) -> Outcome:
        """Assignments, tests, and what else changes variables; anything else is kept as a command."""
        if node.words and node.words[0].text in {"[", "[[", "test"}:
            return self.test(node)
        if node.words and node.words[0].text.startswith("(("):
            return self.arithmetic(node)
        words = list(node.words)
        local: list[Token] = []
        while words and grammar.ASSIGNMENT.fullmatch(words[0].text):
            local.append(words.pop(0))
        if not words:
            for word in local:
                assign(self.expand, word)
            return "ran"
        self.pipes += node.piped
        fields = [value for word in words for value in self._argument(word)]
        start = len(self.commands)
        own = {word.text.partition("=")[0]: self.expand.text(word.text.partition("=")[2], word.line) for word in local}
        before = self.scope.shadowed(own, node.line)
        outcome = self.command(fields, node) if fields else "ran"
        self.scope.values = {name: kept for name, kept in (self.scope.values | before).items() if kept is not None}
        self.commands[start:] = [
            found._replace(variables=own | dict(found.variables)) for found in self.commands[start:]
        ]
        return outcome

    def _argument(self, word: Token) -> list[Value]:
        if grammar.ASSIGNMENT.fullmatch(word.text) and "=(" in word.text:
            return [Value(word.text, word.line)]
        return self.expand.fields(word.text, word.line)

    def command(self, fields: list[Value], node: grammar.Simple) -> Outcome:
        """A command with its words filled in."""
        first, rest = fields[0].text, given_script(self.expand, node, self.beside, fields[1:])
        if first in {":", "true", "false"}:
            return "no" if first == "false" else "yes"
        if first in _DECLARE:
            for word in (word for word in node.words[1:] if grammar.ASSIGNMENT.fullmatch(word.text)):
                assign(self.expand, word)
            return "ran"
        if first == "unset":
            for value in rest:
                self.scope.clear(value.text, node.line)
        elif rest and (first in {"mapfile", "readarray"} or (first == "read" and node.body is not None)):
            read_names(self.expand, node, [word.text for word in rest])
        elif first in {"cat", "sed"} and node.to is not None:
            write_file(self.expand, node, self.beside)
        elif first == "let":
            for value in rest:
                let(self.scope, value.text)
        elif first == "shift" and self.scope.positional:
            count = int(rest[0].text) if rest and rest[0].text.isdecimal() else 1
            self.scope.positional = self.scope.positional[count:]
        elif first == "set" and rest and rest[0].text == "--":
            self.scope.positional = rest[1:]
        elif first in {"source", "."} and rest:
            if not self.included(rest[0].text, rest[1:]) and not rest[0].text.endswith(_NO_JOB):
                self.scope.sourced.append(f"line {node.line} sources {self.scope.shown(rest[0].text)}, which")
        elif script := _script_of([fields[0], *rest]):
            if not self.included(script[0].text, script[1:]):
                self.commands.append(Command(fields, node.line, self.doubt))
        elif first == "sbatch" and (job := submitted(self.scope, self.beside, self.name, rest)):
            self.included(job, [])
        elif first == "exit" and (not rest or rest[0].text == "0"):
            raise ExitError
        elif first in self.functions and self.depth < _DEEPEST:
            with self.deeper(rest):
                return self.block(self.functions[first].body)
        elif first == "echo" and node.to is not None:
            pass  # to a file, or to stderr
        elif (at := started(fields)) and self.included(fields[at].text, fields[at + 1 :], launcher_of(fields, at)):
            pass
        elif not self.inner(fields, node.line):
            self.commands.append(Command(fields, node.line, self.doubt))
        return "ran"

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

    def included(self, path: str, words: list[Value], launcher: list[Value] | None = None) -> bool:
        """Interpret another script, with its own arguments if given, `launcher` before each command; False: not found."""
        text, start = self.beside.text(path) if self.depth < _DEEPEST else None, len(self.commands)
        if text is None:
            return False
        with self.deeper(words or self.scope.positional):
            own = text in self.beside.written.values()  # which may have marks of missing values
            self.block(grammar.parse_shell(text if own else clean(text), self.scope.shown(path)))
        self.started_by(launcher or [], start)
        return True

    def started_by(self, words: list[Value], start: int) -> None:
        """Put words before the commands from number `start` on."""
        self.commands[start:] = [found._replace(words=words + found.words) for found in self.commands[start:]]

    def inner(self, fields: list[Value], line: int) -> bool:
        """Interpret the text given to `bash -c` or `eval`; words in front of it launch each of its commands."""
        at, text = text_to_read([value.text for value in fields])
        if not text or self.depth >= _DEEPEST or len(text) > LARGEST:
            return False
        start = len(self.commands)
        given = next((i for i, value in enumerate(fields[at:], at) if value.text == text), len(fields))
        own = fields[given + 2 :] if fields[at].text != "eval" else []  # bash -c TEXT NAME ARGUMENT...
        with self.deeper(own or self.scope.positional):
            self.block(grammar.parse_shell(text, self.name, line))
        self.started_by(fields[:at], start)
        return True

    def arithmetic(self, node: grammar.Simple) -> Outcome:
        """(( ... )): an assignment or a comparison."""
        text = self.expand.text(node.words[0].text[2:-2], node.line)
        self.blame = self.scope.cause(text, "its value is unknown")
        return let(self.scope, text)

    def test(self, node: grammar.Simple) -> Outcome:
        """[ ... ], [[ ... ]] and test; `[ 1 -ge 1]` lacks its last word, at which bash complains and goes on as at "no"."""
        if node.words[0].text == "[" and node.words[-1].text != "]":
            return "no"
        words = node.words[1 : -1 if node.words[-1].text in {"]", "]]"} else None]
        operands = [word.text if word.operator else self.expand.text(word.text, word.line) for word in words]
        self.blame = self.scope.cause(" ".join(operands), "it tests files")
        return answer(operands, self.scope)
