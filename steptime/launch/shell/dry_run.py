"""Interprets a script's commands without running any: assignments are made, decidable tests are decided."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell.assignments import LARGEST, assign, given_script, let, text_to_read
from steptime.launch.shell.conditions import OPPOSITE, Outcome, answer_of, undecided
from steptime.launch.shell.control_flow import Command, ControlFlow, ExitError, LeaveError
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.own_commands import own_command
from steptime.launch.shell.printed import output
from steptime.launch.shell.scope import Scope, Unknown, Value, clean
from steptime.launch.shell.slurm import submitted
from steptime.launch.shell.statements import ASSIGNMENT, Function, Simple, Statement, Subshell

_DEEPEST = 20
_NO_JOB = ("/activate", "conda.sh", ".bashrc", ".bash_profile", "/profile")  # files that set up the shell
_SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
_SHELLS = frozenset({"bash", "sh", "zsh"})


def script_of(words: list[Value]) -> tuple[list[Value], list[Value]]:
    """What launches the script that a command runs, and the script with its arguments; both empty of another command.

    >>> words = [Value(word, 1) for word in ("mpirun", "-np", "8", "bash", "train.sh", "7B")]
    >>> [[word.text for word in part] for part in script_of(words)]
    [['mpirun', '-np', '8'], ['train.sh', '7B']]
    """
    first, at = words[0].text, 0
    if first in {"srun", "mpirun", "mpiexec"} or any(word.text in {"--no-python", "--no_python"} for word in words):
        at = next((i for i, word in enumerate(words) if i and word.text.endswith(_SCRIPTS)), 0)
        before = words[at - 1].text
        if not at or (before.startswith("-") and "=" not in before):
            return [], []
        return words[: at - (before in _SHELLS)], words[at:]
    script = words[1:] if first in _SHELLS else words if "/" in first else []
    return [], script if script and script[0].text.endswith(_SCRIPTS) else []


class DryRun(ControlFlow):
    """The commands of a script, in order, and the variables they leave."""

    def __init__(self, name: str, scope: Scope, nearby: NearbyFiles) -> None:
        super().__init__(name, scope, nearby)
        self.scope.output = partial(output, self)
        self.last_exit = self.exit_line = 0  # lines of the last `exit`, and of the one that ended the script

    def script(self, nodes: list[Statement]) -> None:
        """Interpret a whole script."""
        try:
            self.block(nodes)
        except ExitError:
            self.exit_line = self.last_exit
        except LeaveError:
            pass

    def simple(self, node: Simple) -> Outcome:
        """Assignments, tests, and what else changes variables; anything else is kept as a command."""
        if node.words and node.words[0].text == "!":
            return OPPOSITE[self.simple(node._replace(words=node.words[1:]))]
        if node.words and node.words[0].text in {"[", "[[", "test"}:
            return self.test(node)
        if node.words and node.words[0].text.startswith("(("):
            return self.arithmetic(node)
        told = node.words[1:] if [word.text for word in node.words[:1]] == ["env"] else node.words
        count = next((i for i, word in enumerate(told) if not ASSIGNMENT.fullmatch(word.text)), len(told))
        # `env NAME=VALUE COMMAND` is `NAME=VALUE COMMAND`
        local, words = (told[:count], told[count:]) if count else ([], node.words)
        if not words:
            for word in local if not node.piped else []:
                assign(self.expand, word)
            return "ran" if any("$(" in word.text or "`" in word.text for word in local) else "yes"
        self.pipes += node.piped
        fields = list[Value]()
        for word in words:
            array = ASSIGNMENT.fullmatch(word.text) and "=(" in word.text
            fields += [Value(word.text, word.line)] if array else self.expand.fields(word.text, word.line)
        start = len(self.commands)
        own = {word.text.partition("=")[0]: self.expand.text(word.text.partition("=")[2], word.line) for word in local}
        before = {name: self.scope.kept(name) for name in own}
        for name, text in own.items():
            self.scope.put(name, text, node.line)
        outcome = self.command(fields, node) if fields else "ran"
        for name, kept in before.items():
            self.scope.restore(name, kept)
        ran = self.commands[start:]
        self.commands[start:] = [found._replace(variables=own | dict(found.variables)) for found in ran]
        return outcome

    def command(self, fields: list[Value], node: Simple) -> Outcome:
        """A command with its words filled in."""
        first, rest = fields[0].text, given_script(self.expand, node, self.nearby, fields[1:])
        launcher, script = script_of([fields[0], *rest])
        if (outcome := own_command(self, first, rest, node)) is not None:
            return outcome
        if first in {"source", "."} and rest:
            if not self.included(rest[0].text, rest[1:], []) and not rest[0].text.endswith(_NO_JOB):
                self.scope.sourced.append(f"line {node.line} sources {self.scope.shown(rest[0].text)}, which")
        elif first == "sbatch" and (job := submitted(self.scope, self.nearby, self.name, rest)):
            self.included(job, [], [])
        elif first == "exit" and (not rest or rest[0].text == "0" or self.within):
            self.last_exit = 0 if self.depth else node.line
            raise ExitError(rest[0].text if rest else "0")
        elif first == "exit":
            self.ends(rest[0].text, node.line)
        elif first in self.functions and self.depth < _DEEPEST:
            if node.piped:
                return self.subshell(Subshell([node._replace(piped=False)]))
            return self.call(self.functions[first], rest)
        elif first == "echo" and node.to is not None:
            pass  # to a file, or to stderr
        elif not (script and self.included(script[0].text, script[1:], launcher)) and not self.inner(fields, node.line):
            self.commands.append(Command(fields, node.line, self.doubt, values=dict(self.scope.values)))
        return "ran"

    def ends(self, status: str, line: int) -> None:
        """Record that the script ends with an error here."""
        if status.isdecimal():
            unset = self.blame.variable
            why = f"line {line} ends the script: exit {status}{f', since ${unset} has no value' if unset else ''}"
            self.stops(Unknown(why, unset))

    def call(self, function: Function, words: list[Value]) -> Outcome:
        """A function of the script with these words."""
        start, loops, self.loops = len(self.left), self.loops, 0
        self.locals.append({})
        outcome: Outcome = "ran"
        try:
            with self.deeper(words):
                outcome = self.block(function.body)
        except LeaveError as left:
            status = left.status
            outcome = "ran" if not status else "unknown" if not status.isdecimal() else "no" if int(status) else "yes"
        finally:
            self.loops, own = loops, self.locals.pop()
        left_early = self.join(start, "return")
        for name, kept in own.items():
            self.scope.restore(name, kept)
        return "unknown" if left_early else outcome

    def included(self, path: str, words: list[Value], launcher: list[Value]) -> bool:
        """Interpret another script, with its own arguments if given and `launcher` before each command; False: not found."""
        text, start = self.nearby.text(path) if self.depth < _DEEPEST else None, len(self.commands)
        if text is None:
            return False
        with self.deeper(words or self.scope.positional), suppress(LeaveError):
            own = text in self.nearby.written.values()  # which may have marks of missing values
            self.block(parse_shell(text if own else clean(text), self.scope.shown(path)))
        self.started_by(launcher, start)
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
        here = fields[at].text == "eval"
        own = [] if here else fields[given + 2 :]  # bash -c TEXT NAME ARGUMENT...
        with self.deeper(own or self.scope.positional):
            nodes = parse_shell(text, self.name, line)
            self.block(nodes) if here else self.subshell(Subshell(nodes))
        self.started_by(fields[:at], start)
        return True

    def arithmetic(self, node: Simple) -> Outcome:
        """(( ... )): an assignment or a comparison."""
        text = self.expand.text(node.words[0].text[2:-2], node.line)
        self.blame = self.scope.cause(text, "its value is unknown")
        return let(self.scope, text)

    def test(self, node: Simple) -> Outcome:
        """[ ... ], [[ ... ]] and test; `[ 1 -ge 1]` lacks its last word, at which bash complains and goes on as at "no"."""
        if node.words[0].text == "[" and node.words[-1].text != "]":
            return "no"
        words = node.words[1 : -1 if node.words[-1].text in {"]", "]]"} else None]
        outcome, texts = answer_of(self.expand, words, double=node.words[0].text == "[[")
        self.blame = self.scope.cause(" ".join(texts), undecided(texts))
        return outcome
