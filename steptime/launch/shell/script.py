"""A shell script read, never run: the launch command it ends in, with its variables filled in.

Understood: assignments, export, quotes, comments, line continuations, arrays, `${X}` with defaults, whole-number arithmetic,
tests, if, case, loops over known words, functions, here-documents, `bash -c "..."`, and the headers of sbatch. Nothing is
executed: what is known only at run time (`$(...)`, files, loops without a known end) has no value, which matters only where it is
needed.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.beside import Beside, read_beside
from steptime.launch.devices import SET_DEVICES, taken
from steptime.launch.shell.dry_run import Command, DryRun
from steptime.launch.shell.expansion import DEVICES_ON_NODE, Expander
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.processes import LAUNCHERS, Word, size_of
from steptime.launch.shell.scope import DEVICES_OF_JOB, NODES_OF_JOB, Scope, Value, clean
from steptime.launch.shell.slurm import headers_of, slurm_variables

_OTHER_WORK = re.compile(
    r"^(?!.*(?:train|tune|sft|pretrain)).*(?:infer|predict|eval|export|generat|serve|merge|convert|chat|web_demo|cli_demo|api)",
    re.IGNORECASE,
)
"""Parts of the names of programs that run or convert a model and do not train it."""


_OFFICIAL = re.compile(
    r"^[^#\n]*tokenizer\w*=[^#\n]*#[^\n]*\boffici?al (llama[-_]?[23]?) tokenizer", re.IGNORECASE | re.MULTILINE
)
"""As Megatron-DeepSpeed's examples say: TOKENIZER_PATH=.../tokenizer.model # offical llama tokenizer.model"""


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
    """Plain variables with a value after the script's last line, the environment's included."""
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
    tokenizer: str = ""
    """Whose official tokenizer a comment says that the script has, or ""."""


class _Launch(NamedTuple):
    """A command that launches a Python program."""

    command: Command
    at: int
    """Position of the program among the words."""
    launchers: list[str]


_COMMANDS = {name: name for name in LAUNCHERS} | {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "mpiexec": "mpirun",
}
"""A word of a command -> the launcher that it is."""
_TRAINERS = frozenset({"swift", "megatron", "llamafactory-cli", "axolotl", "tune", "nemo"})
SUBCOMMANDS = frozenset({"sft", "pt", "rlhf", "train", "run", "llm"})
"""Programs that launch themselves, and their subcommands."""
_NO_LAUNCH = frozenset({"echo", "printf", "cat", "cp", "sed", "git", "cd", "mkdir", "pip", "tee", "ls", "rm"})
_USUAL = frozenset(["HOME", "PATH", "PWD", "USER", "HOSTNAME", "SHELL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"])
_USUAL |= {DEVICES_ON_NODE, DEVICES_OF_JOB, NODES_OF_JOB}

_PLACEHOLDER = re.compile(r"(?<!<)<([A-Z][A-Z_]*(?:[ _][\w./-]+)+)>")
"""Placeholders (<PATH TO gpt-vocab.json>), which a shell would read as redirections."""


def read_script(text: str, name: str, env: dict[str, str] | None = None, beside: Beside | None = None) -> Script:
    """The launch command of a shell script; `env` is the environment it would run in, and its own words: "1", "2" ...

    `beside`: the files that it may source. Without a launch command, the flags that its variables hold are the arguments. A
    script that is given no arguments and launches nothing while they are unknown is read as run without arguments.

    Raises:
        ConfigError: the text is no shell script that can be read (an unclosed quote), or has no one launch command.
    """
    found = _read(text, name, env, beside, None)
    unclear = found.problems or not found.program
    again = _read(text, name, env, beside, []) if unclear and "1" not in (env or {}) else found
    found = again if again.program and not again.problems else found
    if found.problems:
        raise ConfigError(found.problems)
    return found


def _read(
    text: str, name: str, env: dict[str, str] | None, beside: Beside | None, positional: list[Value] | None
) -> Script:
    text = _PLACEHOLDER.sub(lambda found: f"[{'_'.join(found[1].split())}]", clean(text))
    headers = headers_of(text)
    scope = Scope(slurm_variables(headers, text) | (env or {}))
    scope.positional = positional
    if env and "1" in env:
        count = next(i for i in range(1, len(env) + 2) if str(i) not in env)
        scope.positional = [Value(clean(env[str(i)]), 0) for i in range(1, count)]
    walk = DryRun(posixpath.basename(name), scope, beside or Beside())
    walk.script(parse_shell(text, name))
    launch, problems = _the_launch(walk, name)
    doubt = launch.command.doubt if launch is not None else None
    notes = (f"line {launch.command.line} is assumed to run: it depends on {doubt.why}",) if launch and doubt else ()
    notes = (*walk.told, *notes)
    if walk.full:
        problems.append(f"{name}: too many commands for a launch script; put its flags in a file (args.txt)")
    variables = {
        key: found[0].text
        for key, found in walk.scope.values.items()
        if key not in walk.scope.arrays and found and walk.scope.known(found[0].text)
    }
    official = _OFFICIAL.search(text)
    nothing = Script("", [], [], [], None, None, None, 0, variables, problems, [], _gpu(headers), {})
    nothing = nothing._replace(tokenizer=official[1].lower() if official else "")
    if launch is None and (fragments := _fragments(walk.scope, name)):
        fix = SET_DEVICES if walk.commands else f"give the script that reads it --with this file, or {SET_DEVICES}"
        unclear = [f"no launch command: number of devices unknown; {fix}"]
        return nothing._replace(arguments=fragments, problems=[], unclear=unclear)
    if launch is None or problems:
        return nothing
    read = {key: env[key] for key in scope.read if env and key in env and key not in _USUAL}
    return _launched(nothing._replace(environment=read, notes=notes), launch, walk.scope)


def _launched(found: Script, launch: _Launch, scope: Scope) -> Script:
    """A script with its launch command."""
    words = [_word(value, scope) for value in launch.command.words]
    variables = found.variables | {key: text for key, text in launch.command.variables.items() if scope.known(text)}
    size = size_of(words[: launch.at], launch.launchers, variables)
    return found._replace(
        program=words[launch.at].text,
        arguments=words[launch.at + 1 :],
        before=words[: launch.at],
        launchers=launch.launchers,
        nodes=size.nodes,
        devices_per_node=size.per_node,
        devices=size.devices,
        line=launch.command.line,
        unclear=size.unclear,
        notes=(*found.notes, *([taken(size.devices, size.default)] if size.devices and size.default else [])),
    )


def variables_of(beside: Beside | None) -> dict[str, str]:
    """Variables of the shell files added to a config (MLPerf's config_*.sh), one after the other."""
    scope = Scope({})
    for path in beside.added if beside is not None else []:
        if path.suffix in {".sh", ".bash", ".env", ""}:
            walk = DryRun(path.name, scope, beside or Beside())
            walk.script(parse_shell(clean(read_beside(path)), path.name))
            scope = walk.scope
    return {key: found[0].text for key, found in scope.values.items() if found and scope.known(found[0].text)}


def _gpu(headers: list[tuple[str, str]]) -> str:
    """The kind of device that a script's headers name: asked for (gpu:h100:8), else the one constraint."""
    asked = (
        re.fullmatch(r"(?:gpu:)?((?!gpu:)[A-Za-z][\w-]*):\d.*", value)
        for option, value in headers
        if option in {"gpus-per-node", "gpus", "gpus-per-task", "gres"}
    )
    constraints = (
        re.fullmatch(r"([A-Za-z][\w-]*)", value) for option, value in headers if option in {"constraint", "C"}
    )
    return next((found[1] for found in (*asked, *constraints) if found), "")


def _fragments(scope: Scope, name: str) -> list[Word]:
    """The flags in variables, without variables that another one contains; none where they are not training flags."""
    expand = Expander(scope, name)
    held = [(key, values) for key, values in scope.values.items() if key not in scope.outside]
    texts = [" ".join(value.text for value in values) for _, values in held]
    words: list[Value] = []
    for i, (key, values) in enumerate(held):
        again = any(
            texts[i].strip() in other for j, other in enumerate(texts) if j != i and other.strip() != texts[i].strip()
        )
        if values and not again and texts[i].lstrip().startswith("--"):
            words += expand.fields(f"${{{key}[@]}}" if key in scope.arrays else f"${key}", values[0].line)
    flags = {value.text.replace("_", "-") for value in words}
    return [_word(value, scope) for value in words] if "--num-layers" in flags else []


def _word(value: Value, scope: Scope) -> Word:
    return Word(scope.shown(value.text), value.line, tuple(reason.cause for reason in scope.reasons_of(value.text)))


# --- which command it is -----------------------------------------------------------------------------------------------


def _the_launch(walk: DryRun, name: str) -> tuple[_Launch | None, list[str]]:
    """The one command that launches training, or why there is none."""
    found = [launch for command in walk.commands if (launch := _launch_of(command)) is not None]
    launched = [launch for launch in found if launch.launchers]
    found = launched or [launch for launch in found if _trains(launch)] or found
    if found and all(map(_works_otherwise, found)):
        ran = found[0].command
        return None, [f"{name}: line {ran.line} runs {ran.words[found[0].at].text}, which does not train"]
    found = [launch for launch in found if not _works_otherwise(launch)]
    distinct = {tuple(value.text for value in launch.command.words): launch for launch in found}
    sure = {words: launch for words, launch in distinct.items() if not launch.command.doubt} or distinct
    trains = {words: launch for words, launch in sure.items() if _trains(launch)} or sure
    if not trains:
        return None, [f"{name}: {_nothing_found(walk)}"]
    if len(trains) > 1:
        lines = sorted({launch.command.line for launch in trains.values()})
        if len(lines) > 1:
            where = f"lines {', '.join(map(str, lines))}"
            return None, [
                f"{name}: {len(trains)} launch commands ({where}), cannot determine which one runs; keep only one"
            ]
        walk.told.append(f"line {lines[0]} launches {len(trains)} jobs in a loop: only the first is read")
    launch = next(iter(trains.values()))
    if (doubt := launch.command.doubt) is not None and (doubt.variable or not _trains(launch)):
        told = doubt.told("put the flags in a file (args.txt)")
        return None, [f"{name}: line {launch.command.line}: whether it runs depends on {told}"]
    return launch, []


def _works_otherwise(launch: _Launch) -> bool:
    """Whether the program's name says that it does not train."""
    return bool(_OTHER_WORK.search(posixpath.basename(launch.command.words[launch.at].text)))


def _trains(launch: _Launch) -> bool:
    word, before = (launch.command.words[at].text for at in (launch.at, launch.at - 1))
    return "train" in posixpath.basename(word) or (word in SUBCOMMANDS and posixpath.basename(before) in _TRAINERS)


_OF_A_JOB = (
    *("DGXNNODES", "DGXNGPU", "TP", "PP", "CP", "MINIBS", "MBS", "GBS"),
    *("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "MICRO_BATCH_SIZE"),
)
"""Variables by which MLPerf's config_*.sh size a job that another file launches."""


def _nothing_found(walk: DryRun) -> str:
    for command in walk.commands:
        scripts = [value.text for value in command.words[1:] if value.text.endswith((".sh", ".slurm", ".sbatch"))]
        if command.words[0].text in {"bash", "sh", "sbatch", "srun"} and scripts:
            what = f"line {command.line} runs {walk.scope.shown(scripts[0])}"
            return f"no launch command (torchrun, python, srun ...); {what}: give that script"
    if len(named := [name for name in _OF_A_JOB if name in walk.scope.values and name not in walk.scope.outside]) > 2:
        fix = "give the config that reads them: --from nemo FILE, with this file as --with"
        return f"sets variables of a job ({', '.join(named)}) and has no launch command; {fix}"
    if walk.scope.sourced:
        missing = f"{walk.scope.sourced[0]} was not found; put it in the same folder, or add --with FILE"
        return f"no launch command (torchrun, python, srun ...); {missing}"
    return "no launch command (torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed ...)"


def _launch_of(command: Command) -> _Launch | None:
    """A command that has a Python program in it, and what launches that."""
    words = [value.text for value in command.words]
    launchers: list[str] = []
    python = False
    for i, text in enumerate(words):
        word, after = posixpath.basename(text), next(iter(words[i + 1 :]), "")
        if word in _NO_LAUNCH and not launchers:
            return None
        if re.fullmatch(r"python[\d.]*", word):
            python = True
        elif (launcher := _COMMANDS.get(word)) and launchers[-1:] != [launcher]:
            launchers.append(launcher)
            python = python or launcher in {"torchrun", "deepspeed", "accelerate"}
        elif (word in _TRAINERS and after in SUBCOMMANDS) or (
            text in {"-m", "--module"} and python and after and after not in _COMMANDS
        ):
            return _Launch(command, i + 1, launchers)
        elif word.endswith(".py") and not word.startswith("-") and (python or launchers):
            return _Launch(command, i, launchers)
    return None
