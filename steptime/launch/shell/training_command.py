"""Which command of a script launches training."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from steptime.launch.devices import FIRST_OF_SEVERAL
from steptime.launch.keys import table_file
from steptime.launch.shell.control_flow import Command
from steptime.launch.shell.dry_run import DryRun

_OTHER_WORK = re.compile(
    r"(?i)^(?!.*(?:train|tune|sft)).*(?:infer|predict|eval|export|generat|serve|merge|convert|chat|web_demo|cli_demo|api)"
)
"""Parts of the names of programs that run or convert a model and do not train it."""


class TrainingCommand(NamedTuple):
    """A command that launches a Python program."""

    command: Command
    at: int
    """Position of the program among the words."""
    launchers: list[str]

    @property
    def program(self) -> str:
        """What is launched, in the script's spelling after expansion."""
        return self.command.words[self.at].text


_WITH_RUN = frozenset({"lightning", "fabric"})
"""Launchers only with their subcommand: an environment may have their name."""
_TRAINERS = frozenset({"swift", "megatron", "llamafactory-cli", "axolotl", "tune", "nemo", "litgpt"})
SUBCOMMANDS = frozenset({"sft", "pt", "rlhf", "train", "run", "llm", "pretrain"})
SUBCOMMANDS |= {f"finetune{method}" for method in ("", "_full", "_lora", "_adapter", "_adapter_v2")}
"""Programs that launch themselves, and their subcommands."""
_PRINTS = frozenset({"echo", "printf"})
_NO_LAUNCH = frozenset({"cat", "cp", "sed", "git", "cd", "mkdir", "pip", "tee", "ls", "rm"})
_RECIPE = re.compile(r"[\w./-]+\.py|\w+_(?:distributed|single_device|multinode)|(?:full|lora|qat|dpo|ppo)_\w+")
"""Recipes of torchtune, and custom ones."""
UNKNOWN = re.compile("\ue000[^\ue001]*\ue001")
"""A word without a value (Scope.mark)."""
LINE = "LAUNCH_LINE"
"""Variable of the environment that chooses one of a script's launch commands."""


def the_launch(walk: DryRun, name: str, line: str) -> tuple[TrainingCommand | None, list[str]]:
    """The command that launches training, or why there is none; of several, one after the other, that of `line` or the first."""
    found = [launch for command in walk.commands if (launch := launch_of(command)) is not None]
    launched = [launch for launch in found if launch.launchers]
    found = launched or [launch for launch in found if _trains(launch)] or found
    works = [launch for launch in found if not _OTHER_WORK.search(posixpath.basename(launch.program))]
    if found and not works:
        return None, [f"{name}: line {found[0].command.line} runs {found[0].program}, which does not train"]
    distinct = dict[tuple[str, ...], TrainingCommand]()
    for launch in sorted(works, key=lambda launch: launch.command.doubt is not None):
        distinct.setdefault(tuple(value.text for value in launch.command.words), launch)
    sure = {words: launch for words, launch in distinct.items() if not launch.command.doubt} or distinct
    trains = {words: launch for words, launch in sure.items() if _trains(launch)} or sure
    if not trains:
        return None, [f"{name}: {_nothing_found(walk)}"]
    if len(trains) > 1:
        lines = sorted({launch.command.line for launch in trains.values()})
        where = f"lines {', '.join(map(str, lines))}"
        if line and line not in map(str, lines):
            return None, [f"{name}: {LINE}={line} is no line that launches a job; use one of {where}"]
        if line:
            trains = {words: launch for words, launch in trains.items() if launch.command.line == int(line)}
        elif len(lines) > 1 and not _alike(list(trains.values())):
            fix = f"write {LINE}=N before the command, N one of these"
            return None, [f"{name}: {len(trains)} launch commands ({where}), cannot determine which one trains; {fix}"]
        elif len(lines) > 1:
            fix = f"write {LINE}=N before the command for another"
            walk.told.append(f"{where} each launch a job{FIRST_OF_SEVERAL}; {fix}")
        else:
            walk.told.append(f"line {lines[0]} launches {len(trains)} jobs{FIRST_OF_SEVERAL}")
    launch = next(iter(trains.values()))
    if (doubt := launch.command.doubt) is not None and (doubt.variable or not _trains(launch)):
        told = doubt.told("put the flags in a file (args.txt)")
        return None, [f"{name}: line {launch.command.line}: whether it runs depends on {told}"]
    return launch, []


def _alike(found: list[TrainingCommand]) -> bool:
    """Whether commands that surely run all train: by the names of their programs, or as jobs of one program."""
    started = len({launch.program for launch in found}) == 1 and all(launch.launchers for launch in found)
    return (started or all(map(_trains, found))) and not any(launch.command.doubt for launch in found)


def _trains(launch: TrainingCommand) -> bool:
    """Whether the program's name, or the subcommand of a trainer, says that it trains."""
    before = posixpath.basename(launch.command.words[launch.at - 1].text)
    return _names_training(launch.program) or (launch.program in SUBCOMMANDS and before in _TRAINERS)


def _names_training(program: str) -> bool:
    return bool(re.search("finetune|train", posixpath.basename(program)))


_OF_A_JOB = (
    *("DGXNNODES", "DGXNGPU", "TP", "PP", "CP", "MINIBS", "MBS", "GBS"),
    *("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "MICRO_BATCH_SIZE"),
)
"""Variables by which MLPerf's config_*.sh size a job that another file launches."""
_PRINTED = re.compile(r"(?:echo|printf) +(((?:[A-Z_]\w*=[\w.-]+ +)+)(?:bash |sh |sbatch |\./)\S+)")
"""A line by which a script, which otherwise only checks its job, says with what variables it launches it."""


def _nothing_found(walk: DryRun) -> str:
    for command in walk.commands:
        scripts = [value.text for value in command.words[1:] if value.text.endswith((".sh", ".slurm", ".sbatch"))]
        if command.words[0].text in {"bash", "sh", "sbatch", "srun"} and scripts:
            what = f"line {command.line} runs {walk.scope.shown(scripts[0])}"
            return f"no launch command (torchrun, python, srun ...); {what}: give that script"
        if said := _PRINTED.match(" ".join(value.text for value in command.words)):
            what = f"line {command.line} prints how it is started: {said[1]}"
            return f"no launch command runs; {what}; write {said[2].strip()} before the command"
    named = [name for name in _OF_A_JOB if name in walk.scope.values and name not in walk.scope.outside]
    if len(named) > 2 and (named[0].startswith("DGX") or not walk.scope.sourced):
        fix = "give the config that reads them: --from nemo FILE, with this file as --with"
        return f"sets variables of a job ({', '.join(named)}) and has no launch command; {fix}"
    if walk.scope.sourced:
        missing = f"{walk.scope.sourced[0]} was not found; put it in the same folder, or add --with FILE"
        return f"no launch command (torchrun, python, srun ...); {missing}"
    if walk.exit_line:
        fix = "pass the arguments and variables that it expects"
        return f"no launch command runs: line {walk.exit_line} ends the script (exit); {fix}"
    return "no launch command (torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed ...)"


def launch_of(command: Command) -> TrainingCommand | None:
    """A command that has a Python program in it, and what launches that."""
    words = [value.text for value in command.words]
    launchers, table = list[str](), table_file("launchers")
    known = {name: name for name in table["launchers"]} | table["commands"]
    python = False
    for i, text in enumerate(words):
        word, after = posixpath.basename(text), next(iter(words[i + 1 :]), "")
        module = text in {"-m", "--module"} and python and after and after not in known
        if word in _PRINTS or (word in _NO_LAUNCH and not launchers):
            return None
        if re.fullmatch(r"python[\d.]*", word):
            python = True
        elif word in _WITH_RUN and after != "run":
            continue
        elif (launcher := known.get(word)) and launchers[-1:] != [launcher]:
            launchers.append(launcher)
            python = python or launcher in {"torchrun", "deepspeed", "accelerate", "composer", "lightning", "fabric"}
        elif word == "tune" and after == "run":
            return _of_tune(command, i + 2, launchers)
        elif module or (word in _TRAINERS and after in SUBCOMMANDS):
            return TrainingCommand(command, i + 1, launchers)
        elif word.endswith(".py") and not word.startswith("-") and (python or launchers):
            if _names_training(after) and after.endswith(".py") and not _names_training(word):
                continue  # a program that runs another one: profile.py pretrain_gpt.py
            return TrainingCommand(command, i, launchers)
        elif python and UNKNOWN.fullmatch(text) and after.startswith("--") and _sizes_alone(words, i):
            return TrainingCommand(command, i, launchers)  # a program in a variable without a value, and its sizes
    return None


def _sizes_alone(words: list[str], at: int) -> bool:
    """Whether the word at that place is followed by a model's sizes, and neither an option's value nor before a program."""
    later = any(word.endswith(".py") for word in words[at:])
    return "--num-layers" in words[at:] and not later and not re.match("-[^=]*$", words[at - 1])


def _of_tune(command: Command, start: int, launchers: list[str]) -> TrainingCommand | None:
    """`tune run [options of torchrun] RECIPE --config NAME`; without options it starts one process (torchtune/_cli/run.py)."""
    words = [value.text for value in command.words]
    at = next((i for i in range(start, len(words)) if _RECIPE.fullmatch(words[i])), None)
    several = any(re.match("--n(?:nodes|proc)", word) for word in words[start:at])
    return TrainingCommand(command, at, [*launchers, *(["torchrun"] if several else [])]) if at is not None else None
