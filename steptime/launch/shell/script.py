"""A shell script read, never run: the launch command it ends in, with its variables filled in.

Understood: assignments, export, quotes, comments, line continuations, arrays, `${X}` with defaults, whole-number arithmetic,
tests, if, case, loops over known words, functions, here-documents, `bash -c "..."`, and the headers of sbatch. Nothing is
executed: what is known only at run time (`$(...)`, files, loops without a known end) has no value, which matters only where it is
needed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.launch.devices import LAUNCHED, OF_EXAMPLE, SET_DEVICES, is_default, taken
from steptime.launch.nearby_files import NearbyFiles, read_nearby
from steptime.launch.shell.dry_run import DryRun
from steptime.launch.shell.flag_variables import flags_in, unknown_flags, word_of
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.processes import COUNTS, Size, Word, size_of
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, NODES_OF_JOB, Scope, Value, clean
from steptime.launch.shell.slurm import headers_of, slurm_variables
from steptime.launch.shell.training_command import LINE, UNKNOWN, TrainingCommand, the_launch
from steptime.launch.shell.usage import Example, examples_of

_OFFICIAL = re.compile(
    r"^[^#\n]*tokenizer\w*=[^#\n]*#[^\n]*\boffici?al (llama[-_]?[23]?) tokenizer", re.IGNORECASE | re.MULTILINE
)
"""As Megatron-DeepSpeed's examples say: TOKENIZER_PATH=.../tokenizer.model # offical llama tokenizer.model"""
_CONTAINER = re.compile(r"^[^#\n]*nvcr\.io[/#]nvidia/pytorch:(\d\d\.\d\d)", re.MULTILINE)
_TAKES_WORDS = re.compile(r"\bgetopts\b|\$\{?[#@1]")


class Script(NamedTuple):
    """A launch script, as far as it can be read without running it."""

    program: str
    """What is launched: "pretrain_gpt.py", or a module ("torchtitan.train"); "" where nothing is."""
    arguments: list[Word]
    """The words after the program."""
    before: list[Word]
    """The words between the launcher and the program."""
    launchers: list[str]
    """What launches it, outermost first: ["srun", "torchrun"]."""
    nodes: int | None
    devices_per_node: int | None
    """Processes on each node, which take one device each."""
    devices: int | None
    """All processes, where the launcher sets them or nodes and devices per node are known."""
    line: int
    """Where the launch command begins."""
    variables: dict[str, str]
    """Plain variables with a value when it is launched, else after the script's last line, the environment's included."""
    problems: list[str]
    """Why the launch command cannot be read: one line each, with the script's name."""
    unclear: list[str]
    """Why its number of devices cannot be read, and the user's fix."""
    gpu: str
    """The kind of device that a header of sbatch asks for, or "": h100 of --gpus-per-node=h100:8, a100 of --constraint=a100."""
    environment: dict[str, str]
    """Environment variables that the script uses, except the usual ones of any shell."""
    notes: tuple[str, ...] = ()
    """What is assumed of the script."""
    alone: bool = False
    """Whether neither a launcher nor a variable with a number of processes starts more than one."""
    tokenizer: str = ""
    """Whose official tokenizer a comment says that the script has, else the number in its variable VOCAB_SIZE, or ""."""
    container: str = ""
    """The version of NVIDIA's PyTorch container that it names, or ""."""
    wordless: bool = False
    """Whether it takes arguments and is given none."""

    def launched(self) -> list[str]:
        """The note on the nodes and processes that its command states; none where one of them is a launcher's default."""
        if not (self.nodes and self.devices_per_node) or any(map(is_default, self.notes)):
            return []
        each = " each" if self.nodes > 1 else ""
        return [f"{LAUNCHED}{counted(self.nodes, 'node')} with {counted(self.devices_per_node, 'process')}{each}"]


USUAL = frozenset(["HOME", "PATH", "PWD", "USER", "HOSTNAME", "SHELL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"])
USUAL |= {DEVICES_ON_NODE, DEVICES_OF_JOB, NODES_OF_JOB}
"""Variables that every environment has, and those of the user's settings."""
_PLACEHOLDER = re.compile(r"(?<!<)<([A-Z][A-Z_]*(?:[ _][\w./-]+)+)>")
"""Placeholders (<PATH TO gpt-vocab.json>), which a shell would read as redirections."""


_COUNTS = re.compile(r"(?:^|\s)(?:--(?:n(?:nodes|proc|um|tasks)|devices|nodes)|-[Nn]\b)")
"""An option by which a launcher counts processes or nodes."""


def read_script(text: str, name: str, env: dict[str, str] | None = None, nearby: NearbyFiles | None = None) -> Script:
    """The launch command of a shell script; `env` is the environment it would run in, and its own words: "1", "2" ...

    `nearby`: the files that it may source. Without a launch command, the flags that its variables hold are the arguments. A
    script that is given no arguments is read as run without arguments if, while they are unknown, it launches nothing or a test
    of them decides about flags; not where it stops without them (${1:?...}). Else those of an example in its comments are taken.

    Raises:
        ConfigError: the text is no shell script that can be read (an unclosed quote), or has no one launch command.
    """
    read = partial(_read, text, name, env or {}, nearby)
    found = read(None)
    if "1" not in (env or {}):
        found = _without_words(found, read, next(iter(examples_of(text, name)), None))
        found = found._replace(wordless=_TAKES_WORDS.search(text) is not None)
    if found.problems:
        raise ConfigError(found.problems)
    return found


def _without_words(found: Script, read: Callable[[list[Value]], Script], example: Example | None) -> Script:
    """The reading of a script that the user gives no arguments: run without any, else with those of a comment's example."""
    unclear = bool(found.problems) or not found.program
    again = read([]) if unclear or _lacks_words(found, of_flags=True) else found
    # a loop over no words leaves all empty
    whole = unclear or not (_lacks_words(again) or _missing(again) < _missing(found))
    found = again if again.program and not again.problems and whole else found
    if example is None or not _lacks_words(found):
        return found
    given = read([Value(clean(word), 0) for word in example.words])
    if given.problems or not given.program or _lacks_words(given):
        return found
    shown = " ".join(example.words)
    why = f"{OF_EXAMPLE}: those of the example in line {example.line} taken ({shown[:60]}{'...' * (len(shown) > 60)})"
    return given._replace(notes=(*given.notes, f"{why}; for others pass script and arguments as one string"))


def _missing(found: Script) -> int:
    """How many words of the arguments have no value, those apart whose texts are known."""
    return sum(any(not reason.choices for reason in word.unresolved) for word in found.arguments)


def _lacks_words(found: Script, *, of_flags: bool = False) -> bool:
    """Whether arguments that the script is not given are part of what it launches; `of_flags`: by a test that chooses flags."""
    reasons = (reason for word in found.arguments for reason in word.unresolved)
    return any(reason.variable.isdecimal() and (reason.choices or not of_flags) for reason in reasons)


def _read(
    text: str, name: str, env: dict[str, str], nearby: NearbyFiles | None, positional: list[Value] | None
) -> Script:
    text = _PLACEHOLDER.sub(lambda found: f"[{'_'.join(found[1].split())}]", clean(text))
    headers = headers_of(text)
    scope = Scope(slurm_variables(headers, text) | env)
    scope.positional = positional
    if "1" in env:
        count = next(i for i in range(1, len(env) + 2) if str(i) not in env)
        scope.positional = [Value(clean(env[str(i)]), 0) for i in range(1, count)]
    walk = DryRun(posixpath.basename(name), scope, nearby or NearbyFiles())
    walk.script(parse_shell(text, name))
    launch, problems = the_launch(walk, name, env.get(LINE, ""))
    if launch is not None and UNKNOWN.fullmatch(launch.program):
        shown = word_of(launch.command.words[launch.at], walk.scope)
        why = shown.unresolved[0].told("write the program into the script")
        problems.append(f"{name}: line {launch.command.line} launches {shown.text}: {why}")
    notes = walk.told
    if launch is not None and launch.command.doubt:
        notes += [f"line {launch.command.line} is assumed to run: it depends on {launch.command.doubt.why}"]
    earlier = walk.commands[: walk.before_end]
    if launch is not None and (ended := walk.scope.ended).why and not ended.variable and launch.command not in earlier:
        notes.append(f"{ended.why}; what follows is read all the same")
    if scope.required and positional is not None:
        problems.append(f"{name}: ${scope.required[0]} has no value, and the script stops without it")
    if walk.full:
        problems.append(f"{name}: too many commands for a launch script; put its flags in a file (args.txt)")
    variables = {key: text for scope in (*walk.inside, walk.scope) for key, text in scope.plain().items()}
    said = variables.get("VOCAB_SIZE", "")
    official, container = (next(iter(pattern.findall(text)), "") for pattern in (_OFFICIAL, _CONTAINER))
    tokenizer = official.lower() or (said if re.fullmatch(r"\d{4,6}", said) else "")
    nothing = Script("", [], [], [], None, None, None, 0, variables, problems, [], _gpu(headers), {})
    nothing = nothing._replace(tokenizer=tokenizer, container=container)
    if launch is None and (flags := _of_fragments(nothing, walk, name)):
        return flags
    if launch is None or problems:
        return nothing
    read = {key: env[key] for key in scope.read if key in env and key not in USUAL}
    return _launched(nothing._replace(environment=read, notes=tuple(notes)), launch, walk.scope)


def _of_fragments(nothing: Script, walk: DryRun, name: str) -> Script | None:
    """A script without a launch command whose variables hold flags, with the processes of torchrun's among them."""
    fragments, starts = flags_in(walk.scope, name)
    if not fragments:
        return None
    if unknown := unknown_flags(walk.scope):
        return nothing._replace(problems=[f"{name}: no launch command, and {unknown}"])
    size = size_of([Word("torchrun", 1), *starts], ["torchrun"], {})
    found = nothing._replace(arguments=fragments, problems=[])
    if starts and size.devices and not size.default:
        return found._replace(nodes=size.nodes, devices_per_node=size.per_node, devices=size.devices)
    fix = SET_DEVICES if walk.commands else f"give the script that reads it --with this file, or {SET_DEVICES}"
    return found._replace(unclear=[f"no launch command: number of devices unknown; {fix}"])


def _launched(found: Script, launch: TrainingCommand, scope: Scope) -> Script:
    """A script with its launch command."""
    words = [word_of(value, scope) for value in launch.command.words]
    values = {key: said[0].text for key, said in launch.command.values.items() if said and key not in scope.arrays}
    variables = {key: text for key, text in (values | dict(launch.command.variables)).items() if scope.known(text)}
    size = size_of(words[: launch.at], launch.launchers, variables)
    counts = (one for word in words[: launch.at] for one in word.unresolved if _COUNTS.search(" ".join(one.choices)))
    if (one := next(counts, None)) is not None:
        size = Size(unclear=[f"number of devices unknown: {one.why}; {SET_DEVICES}"])
    if size.in_devices:
        words = [
            word._replace(unresolved=tuple(one.in_place_of_nodes("") for one in word.unresolved)) for word in words
        ]
    return found._replace(
        program=words[launch.at].text,
        arguments=words[launch.at + 1 :],
        before=words[: launch.at],
        launchers=launch.launchers,
        nodes=size.nodes,
        devices_per_node=size.per_node,
        devices=size.devices,
        variables=variables,
        line=launch.command.line,
        unclear=size.unclear,
        alone=not launch.launchers and not variables.keys() & COUNTS,
        notes=(
            *found.notes,
            *([taken(size.devices, size.default)] if size.devices and size.default else []),
            *_of_commands(words[launch.at :]),
            *_of_job(size, variables, launch.command.line),
        ),
    )


def _of_job(size: Size, variables: dict[str, str], line: int) -> Iterator[str]:
    """A line where the command starts other nodes than the job has, or more processes on them than it has devices."""
    nodes, devices = (variables.get(name, "") for name in ("SLURM_NNODES", "SLURM_GPUS_PER_NODE"))
    if size.nodes and nodes.isdecimal() and int(nodes) != size.nodes and not size.default:
        yield f"line {line} starts {counted(size.nodes, 'node')}, which the report counts; Slurm gives the job {nodes}"
    if size.per_node and devices.isdecimal() and 0 < int(devices) < size.per_node and not size.default:
        told = f"line {line} starts {counted(size.per_node, 'process')} on a node, which the report counts"
        yield f"{told}; Slurm gives the job {counted(int(devices), 'device')} there"


def _of_commands(words: list[Word]) -> Iterator[str]:
    """A line for each word of the program that is what a command prints, which may be any option, or nothing."""
    for before, word in pairwise(words):
        if re.fullmatch(r"(?s)\$\(.*\)|`.*`", word.text) and word.unresolved and not before.text.startswith("-"):
            yield f"line {word.line}: {word.unresolved[0].why}: taken as empty"


def variables_of(nearby: NearbyFiles | None) -> dict[str, str]:
    """Variables of the shell files added to a config (MLPerf's config_*.sh), one after the other.

    Raises:
        ConfigError: one of them sources another config that was not found.
    """
    scope, added = Scope({}), nearby.added if nearby is not None else []
    for path in added:
        if path.suffix in {".sh", ".bash", ".env", ""}:
            walk = DryRun(path.name, scope, NearbyFiles(path.parent, map(str, added)))
            walk.script(parse_shell(clean(read_nearby(path)), path.name))
            scope = walk.scope
            if missing := next((line for line in scope.sourced if re.search(r"config\w*\.sh", line)), ""):
                raise ConfigError(f"{path}: {missing} was not found; put it in the same folder, or add --with FILE")
    return scope.plain(arrays=True)


def _gpu(headers: list[tuple[str, str]]) -> str:
    """The kind of device that a script's headers name: asked for (gpu:h100:8), else the one constraint."""
    asked, constraint = r"(?:gpu:)?((?!gpu:)[A-Za-z][\w-]*):\d.*", r"([A-Za-z][\w-]*)"
    options = {asked: ("gpus-per-node", "gpus", "gpus-per-task", "gres"), constraint: ("constraint", "C")}
    said = (re.fullmatch(pattern, value) for pattern in options for name, value in headers if name in options[pattern])
    return next((found[1] for found in said if found), "")
