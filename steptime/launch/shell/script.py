"""A shell script read, never run: the launch command it ends in, with its variables filled in.

Understood: assignments, export, quotes, comments, line continuations, arrays, `${X}` with defaults, whole-number arithmetic,
tests, if, case, loops over known words, functions, here-documents, `bash -c "..."`, and the headers of sbatch. Nothing is
executed: what only a run could tell (`$(...)`, files, loops without a known end) has no value, and that matters only where
somebody asks for it.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from steptime.launch.shell.dry_run import Command, DryRun
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.scope import Scope, Unknown, Value, clean


class Word(NamedTuple):
    """One word of the launch command, as the shell would pass it."""

    text: str
    """What has no value stands as the script wrote it: `$NAME`, `$(...)`."""
    line: int
    unresolved: tuple[Unknown, ...] = ()
    """Why each thing without a value has none: "$X has no value"."""


class Script(NamedTuple):
    """A launch script, as far as it can be read without running it."""

    program: str
    """What is launched: "pretrain_gpt.py", or a module ("torchtitan.train"); "" where nothing is."""
    arguments: list[Word]
    """The words after the program."""
    launchers: list[str]
    """What launches it, outermost first: ["srun", "torchrun"]."""
    nodes: int | None
    devices_per_node: int | None
    """Processes on each node, which take one device each."""
    devices: int | None
    """All processes, where the launcher says so or nodes and devices per node are known."""
    line: int
    """Where the launch command begins."""
    variables: dict[str, str]
    """Plain variables with a value after the script's last line, the environment's included."""
    problems: list[str]
    """What keeps the launch command from being read: one line each, with the script's name."""
    unclear: list[str]
    """What keeps its number of devices from being read."""
    gpu: str
    """The kind of device that a header of sbatch asks for, or "": h100 of --gpus-per-node=h100:8, a100 of --constraint=a100."""

    environment: dict[str, str]
    """Variables of the environment that the script asked for, but for the usual ones of any shell."""


class _Launch(NamedTuple):
    """A command that launches a Python program."""

    command: Command
    at: int
    """Where the program stands among the words."""
    launchers: list[str]


class _Launcher(NamedTuple):
    """Options of a launcher."""

    nodes: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    """Processes on a node."""
    devices: tuple[str, ...] = ()
    """All processes."""


_LAUNCHERS = {
    "torchrun": _Launcher(("--nnodes",), ("--nproc-per-node", "--nproc_per_node")),
    "srun": _Launcher(("--nodes", "-N"), ("--ntasks-per-node", "--tasks-per-node"), ("--ntasks", "-n")),
    "deepspeed": _Launcher(("--num_nodes", "--num-nodes"), ("--num_gpus", "--num-gpus")),
    "accelerate": _Launcher(("--num_machines", "--num-machines"), (), ("--num_processes", "--num-processes")),
    "mpirun": _Launcher((), ("--npernode", "-npernode", "-ppn", "--ppn", "--ntasks-per-node"), ("-np", "-n", "--np")),
}
_COMMANDS = {name: name for name in _LAUNCHERS} | {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "mpiexec": "mpirun",
}
"""A word of a command -> the launcher that it is."""
_NO_LAUNCH = frozenset({"echo", "printf", "cat", "cp", "sed", "git", "cd", "mkdir", "pip", "tee", "ls", "rm"})
_USUAL = frozenset({"HOME", "PATH", "PWD", "USER", "HOSTNAME", "SHELL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"})
_SBATCH = {
    "nodes": "SLURM_NNODES", "N": "SLURM_NNODES", "ntasks-per-node": "SLURM_NTASKS_PER_NODE", "ntasks": "SLURM_NTASKS",
    "n": "SLURM_NTASKS", "gpus-per-node": "SLURM_GPUS_PER_NODE", "gres": "SLURM_GPUS_PER_NODE",
    "gpus": "SLURM_GPUS", "G": "SLURM_GPUS",
}  # fmt: skip
"""Headers of sbatch, and the variables that Slurm sets from them (slurm.schedmd.com/sbatch.html, output environment)."""


def read_script(text: str, name: str, env: dict[str, str] | None = None) -> Script:
    """The launch command of a shell script; `env` is the environment it would run in, and its own words: "1", "2" ...

    Raises:
        ConfigError: the text is no shell script that can be read (a quote that never ends).
    """
    text = clean(text)
    headers = _headers(text)
    scope = Scope(_slurm(headers) | (env or {}))
    if env and "1" in env:
        count = next(i for i in range(1, len(env) + 2) if str(i) not in env)
        scope.positional = [Value(clean(env[str(i)]), 0) for i in range(1, count)]
    walk = DryRun(posixpath.basename(name), scope)
    walk.script(parse_shell(text, name))
    launch, problems = _the_launch(walk, name)
    if walk.full:
        problems.append(f"{name}: too many commands for a launch script; put its flags in a file (args.txt)")
    variables = {
        key: found[0].text
        for key, found in walk.scope.values.items()
        if key not in walk.scope.arrays and found and walk.scope.known(found[0].text)
    }
    if launch is None or problems:
        return Script("", [], [], None, None, None, 0, variables, problems, [], _gpu(headers), {})
    words = [_word(value, walk.scope) for value in launch.command.words]
    nodes, per_node, devices, unclear = _size(words[: launch.at], launch.launchers, variables)
    return Script(
        program=words[launch.at].text,
        arguments=words[launch.at + 1 :],
        launchers=launch.launchers,
        nodes=nodes,
        devices_per_node=per_node,
        devices=devices,
        line=launch.command.line,
        variables=variables,
        problems=[],
        unclear=unclear,
        gpu=_gpu(headers),
        environment={key: env[key] for key in scope.read if env and key in env and key not in _USUAL},
    )


def _headers(text: str) -> list[tuple[str, str]]:
    """Options and values of a script's #SBATCH lines."""
    lines = "\n".join(re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE))
    return re.findall(r"(?:^|\s)--?([A-Za-z-]+)(?:=|[ \t]+)?([^\s#-]\S*)", lines)


def _slurm(headers: list[tuple[str, str]]) -> dict[str, str]:
    """The variables that Slurm sets from a script's headers."""
    found: dict[str, str] = {}
    for option, value in headers:
        number = re.search(r"(?:^|:)(\d+)$", value)
        if option in _SBATCH and number and (option != "gres" or "gpu" in value):
            found[_SBATCH[option]] = number[1]
    if "SLURM_NNODES" in found:
        found["SLURM_JOB_NUM_NODES"] = found["SLURM_NNODES"]
        if "SLURM_NTASKS_PER_NODE" in found:
            tasks = int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"])
            found.setdefault("SLURM_NTASKS", str(tasks))
    if "SLURM_NTASKS" in found:
        found["SLURM_NPROCS"] = found["SLURM_NTASKS"]
    return found


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


def _word(value: Value, scope: Scope) -> Word:
    return Word(scope.shown(value.text), value.line, tuple(reason.cause for reason in scope.reasons_of(value.text)))


# --- which command it is -----------------------------------------------------------------------------------------------


def _the_launch(walk: DryRun, name: str) -> tuple[_Launch | None, list[str]]:
    """The one command that launches training, or why there is none."""
    found = [launch for command in walk.commands if (launch := _launch_of(command)) is not None]
    launched = [launch for launch in found if launch.launchers]
    found = launched or [launch for launch in found if _trains(launch)] or found
    distinct = {tuple(value.text for value in launch.command.words): launch for launch in found}
    sure = {words: launch for words, launch in distinct.items() if not launch.command.doubt} or distinct
    trains = {words: launch for words, launch in sure.items() if _trains(launch)} or sure
    if not trains:
        return None, [f"{name}: {_nothing_found(walk)}"]
    if len(trains) > 1:
        lines = sorted({launch.command.line for launch in trains.values()})
        where = f"lines {', '.join(map(str, lines))}" if len(lines) > 1 else f"line {lines[0]}"
        return None, [f"{name}: {len(trains)} launch commands ({where}), cannot determine which one runs; keep one"]
    launch = next(iter(trains.values()))
    if launch.command.doubt:
        doubt = launch.command.doubt.told("put the flags in a file (args.txt)")
        return None, [f"{name}: line {launch.command.line}: whether it runs depends on {doubt}"]
    return launch, []


def _trains(launch: _Launch) -> bool:
    return bool(re.search(r"train", posixpath.basename(launch.command.words[launch.at].text)))


def _nothing_found(walk: DryRun) -> str:
    for command in walk.commands:
        scripts = [value.text for value in command.words[1:] if value.text.endswith((".sh", ".slurm", ".sbatch"))]
        if command.words[0].text in {"bash", "sh", "sbatch", "srun"} and scripts:
            what = f"line {command.line} runs {walk.scope.shown(scripts[0])}"
            return f"no launch command (torchrun, python, srun ...); {what}: give that one"
    return "no launch command (torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed ...)"


def _launch_of(command: Command) -> _Launch | None:
    """A command that has a Python program in it, and what launches that."""
    words = [value.text for value in command.words]
    launchers: list[str] = []
    python = False
    for i, text in enumerate(words):
        word = posixpath.basename(text)
        if word in _NO_LAUNCH and not launchers:
            return None
        if re.fullmatch(r"python[\d.]*", word):
            python = True
        elif (launcher := _COMMANDS.get(word)) and launchers[-1:] != [launcher]:
            launchers.append(launcher)
            python = python or launcher in {"torchrun", "deepspeed", "accelerate"}
        elif text == "-m" and python and i + 1 < len(words) and words[i + 1] not in _COMMANDS:
            return _Launch(command, i + 1, launchers)
        elif word.endswith(".py") and not word.startswith("-") and (python or launchers):
            return _Launch(command, i, launchers)
    return None


# --- how many devices --------------------------------------------------------------------------------------------------


def _size(
    words: list[Word], launchers: list[str], variables: dict[str, str]
) -> tuple[int | None, int | None, int | None, list[str]]:
    """Nodes, devices per node and devices of a launch, and what is unclear about them."""
    unclear: list[str] = []
    said: dict[str, int | None] = {}
    inner = launchers[-1] if launchers else ""
    for launcher in launchers:
        for what, names in _LAUNCHERS[launcher]._asdict().items():
            word = _option(words, names)
            if word is None or (what != "nodes" and launcher != inner):
                continue
            text = word.text.partition(":")[2] if re.fullmatch(r"\d+:\d+", word.text) else word.text
            if text.isdigit():
                said[what] = int(text)
            elif word.unresolved:
                unclear.append(f"line {word.line}: {names[0]}: {word.unresolved[0].why}")
    slurm = {key: int(text) for key, text in variables.items() if key.startswith("SLURM_") and text.isdigit()}
    nodes = said.get("nodes")
    if nodes is None and "srun" in launchers:
        nodes = slurm.get("SLURM_NNODES")
    per_node, devices = said.get("per_node"), said.get("devices")
    if inner == "srun" and per_node is None:
        per_node = slurm.get("SLURM_NTASKS_PER_NODE")
        devices = devices or (slurm.get("SLURM_NTASKS") if per_node is None else None)
    if inner == "torchrun" and nodes is None and not unclear:
        nodes = 1
    if not launchers and not unclear:
        nodes = per_node = 1
    if devices is None and nodes and per_node:
        devices = nodes * per_node
    if devices and nodes and per_node is None and devices % nodes == 0:
        per_node = devices // nodes
    return nodes, per_node, devices, unclear


def _option(words: list[Word], names: tuple[str, ...]) -> Word | None:
    """The value of an option: --name value, --name=value, -Nvalue; the last one given."""
    found: Word | None = None
    for i, word in enumerate(words):
        key, equals, value = word.text.partition("=")
        if key in names and equals:
            found = word._replace(text=value)
        elif word.text in names and i + 1 < len(words):
            found = words[i + 1]
        else:
            short = next((n for n in names if len(n) == 2 and re.fullmatch(re.escape(n) + r"\d+", word.text)), "")
            if short:
                found = word._replace(text=word.text[2:])
    return found
