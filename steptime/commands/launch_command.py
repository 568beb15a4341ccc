"""`3dtrn --from KIND FILE`: the job of a launch script, a framework's config or a log."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.base.words import counted, flow
from steptime.commands import plan_defaults
from steptime.commands.console import Printer
from steptime.commands.outputs import write_new
from steptime.job.edit import read_settings
from steptime.launch.plan_yaml import plan_yaml
from steptime.launch.python.config_values import split_path
from steptime.launch.read import named, read, read_text
from steptime.launch.reading import LEAVE_OUT, to_job
from steptime.launch.shell.script import USUAL
from steptime.launch.shell.usage import most_words
from steptime.launch.write.export import notes, refused, write
from steptime.search.changes import words

if TYPE_CHECKING:
    from steptime.job.job import Job
    from steptime.launch.reading import Reading


def launched(options: Namespace) -> tuple[Job, Reading]:
    """The job of a launch file with the command's settings over it, saved where that is asked for.

    Raises:
        ConfigError: the file cannot be read, is another framework's, leaves something open, or cannot be saved.
    """
    if options.config is None:
        raise ConfigError(
            f"--from {options.kind}: needs a launch script, config or log: 3dtrn --from {options.kind} FILE"
        )
    named = plan_defaults.sets(options.model, options.machine, options.devices)
    try:
        job, reading = read_job(options, options.kind, options.config, [*named, *options.sets])
    except ConfigError as error:
        raise ConfigError([*error.problems, *retyped(options.typed, {options.config: error.problems})]) from None
    plan_defaults.check_devices(options.devices, job.parallelism.devices, options.sets)
    plan_defaults.check_counts(job, options.sets)
    if options.save is not None:
        write_new(options.save, plan_yaml(job), f"--save {options.save}")
    return job, reading


def read_job(options: Namespace, kind: str, source: str, changes: Sequence[str]) -> tuple[Job, Reading]:
    """The job of a launch file with settings over it, and its reading; `options`: those of --with and --allow-unmodeled.

    Raises:
        ConfigError: the file cannot be read, is another framework's, or leaves something open.
    """
    sets, unread = read_settings(changes)
    wrong = [problem.line for problem in unread]
    try:
        reading = _with_replaced(_read(options, kind, source, sets), options, kind, source, sets)
        job = to_job(reading, sets, allow_unmodeled=options.allow_unmodeled)
    except ConfigError as error:
        raise ConfigError([*wrong, *error.problems]) from None
    if wrong:
        raise ConfigError(wrong)
    return job, reading


def _read(options: Namespace, kind: str, source: str, sets: Mapping[str, Any]) -> Reading:
    """The reading of a file; flags that --allow-unmodeled cannot ignore are not reported as ones that it can.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return read(kind, source, sets, options.added)
    except ConfigError as error:
        lines = [line for line in error.problems if not (options.allow_unmodeled and line.endswith(LEAVE_OUT))]
        raise ConfigError(lines or [line.removesuffix(LEAVE_OUT) + "not modeled" for line in error.problems]) from None


def _with_replaced(reading: Reading, options: Namespace, kind: str, source: str, sets: Mapping[str, Any]) -> Reading:
    """The reading with a note on what the file says of its model, where the settings name another."""
    if "model" not in sets:
        return reading
    from steptime.launch.replaced_model import note, without_model

    try:
        own = read(kind, source, without_model(sets), options.added)
    except ConfigError:  # a file that does not say enough of its model to be read without it
        return reading
    told = note(own.config.get("model"), sets)
    return (
        reading._replace(config=reading.config | {"notes": [*told, *reading.config.get("notes", [])]})
        if told
        else reading
    )


_WORDS = "pass script and arguments as one string"
_VARIABLES = re.compile(r"write ((?:\w+=\.\.\. )+)before the command")


def retyped(typed: list[str], problems_of: Mapping[str, Sequence[str]]) -> list[str]:
    """The command as it was typed with what its problems ask for; nothing where one asks for something else.

    Nothing either for arguments without a number, and for $100 and beyond, which no script means.

    `problems_of`: those of each file, or of each script and its arguments as one string.

    >>> retyped(["--from", "auto", "my job.sh"], {"my job.sh": ["f: vocabulary size unknown; add --set model.vocab_sz=N (x)"]})
    ["to go on: 3dtrn --from auto 'my job.sh' --set model.vocab_sz=N"]
    >>> retyped(["diff", "a.sh", "b.sh"], {"b.sh": ["f: $2 has no value; pass script and arguments as one string"]})
    ["to go on: 3dtrn diff a.sh 'b.sh ARG1 ARG2'"]
    >>> retyped(["--from", "auto", "run.sh"], {"run.sh": ["f: $RANK has no value; write RANK=... before the command"]})
    ['to go on: RANK=... 3dtrn --from auto run.sh']
    >>> retyped(["run.sh", "--machine", "dgx-h100"], {"run.sh": ["f: 9 devices; add --set hardware.node_type=NAME"]})
    ['to go on: 3dtrn run.sh --set hardware.node_type=NAME']
    >>> retyped(["run.sh"], {"run.sh": ["f: world size 8 is no multiple; for other nodes add --devices N"]})
    ['to go on: 3dtrn run.sh --devices N']
    """
    problems = [line for lines in problems_of.values() for line in lines]
    left_out = [line.endswith(LEAVE_OUT) for line in problems]
    words = {source: _words_asked(source, lines) for source, lines in problems_of.items()}
    unset = " ".join(found[1] for line in problems if (found := _VARIABLES.search(line)))
    variables = _given(problems_of) | dict.fromkeys(re.findall(r"\w+", unset), "...")
    other = [_WORDS in line or bool(_VARIABLES.search(line)) for line in problems]
    asked = [[] if otherwise else _options(line) for line, otherwise in zip(problems, other, strict=True)]
    answered = all(map(max, map(bool, asked), left_out, other))
    if not (any(asked) or any(other)) or not answered or max(words.values()) > 99:
        return []
    if any(_WORDS in line for source, found in words.items() if not found for line in problems_of[source]):
        return []
    more = [
        fix.replace("--set parallelism.dp=", "--devices ").replace("--set devices=", "--devices ")
        for fix in dict.fromkeys(fix for fixes in asked for fix in fixes)
    ]
    filled = {
        source: " ".join([source, *(f"ARG{n}" for n in range(len(named(source)[1]) + 1, words[source] + 1))])
        for source in problems_of
    }
    typed = [filled.get(word, word) for word in typed]
    typed = _without(typed, {fix.split()[1].partition("=")[0] for fixes in asked for fix in fixes})
    before = [f"{name}={value}" for name, value in variables.items()]
    command = [*before, "3dtrn", shlex.join(typed), *more, *["--allow-unmodeled"][: any(left_out)]]
    return [f"to go on: {' '.join(command)}"]


def for_one(typed: list[str], kind: str, paths: Sequence[str], problems_of: Mapping[str, Sequence[str]]) -> list[str]:
    """How to complete one of the files that are compared alone: settings change all of them, also those that lack nothing."""
    asked = {path: [fix for line in problems_of.get(path, ()) for fix in _options(line)] for path in paths}
    lines = []
    for path, fixes in asked.items():
        own = [
            fix for fix in dict.fromkeys(fixes) if "--set" in fix and any(fix not in other for other in asked.values())
        ]
        words = ["--from", kind, path, *(word for word in typed[1:] if word not in paths)]
        if own and (again := retyped(words, {path: problems_of[path]})):
            plan = f"{Path(named(path)[0]).stem}.yaml"
            command = f"{again[0].removeprefix('to go on: ')} --save {plan}"
            lines.append(f"({' '.join(own)} changes all files; for {path} alone: {command}, then compare {plan})")
    return lines


_SECRET = re.compile(r"(?i)(?:key|token|secret|pass|passwd|password|credentials?)$")
"""Names of variables whose values are not printed (HF_TOKEN, WANDB_API_KEY)."""


def _given(sources: Iterable[str]) -> dict[str, str]:
    """Variables of the environment that these files read, but for secrets, as they are typed before a command."""
    files = (split_path(named(source)[0])[0] for source in sources)
    texts = [read_text(file) for file in files if Path(file).is_file()]
    names = dict.fromkeys(name for text in texts for name in re.findall(r"(?:\$\{?|oc\.env:)(\w+)", text))
    own = (name for name in names if name in os.environ and name not in USUAL and not _SECRET.search(name))
    return {name: shlex.quote(os.environ[name]) for name in own}


def _words_asked(source: str, problems: Sequence[str]) -> int:
    """The number of a script's positional arguments, where its problems ask for one of them; else 0."""
    asked = [int(n[:3]) for line in problems if _WORDS in line for n in re.findall(r"\$(\d+)", line)]
    file = split_path(named(source)[0])[0]
    return max(*asked, most_words(read_text(file)) if Path(file).is_file() else 0) if asked else 0


def _without(typed: list[str], asked: set[str]) -> list[str]:
    """The command without the settings that a problem asks for otherwise, which would contradict them.

    >>> _without(["run.sh", "--set", "hardware.nodes=1", "--set=data.gbs=2", "--json"], {"parallelism.dp", "data.gbs"})
    ['run.sh', '--json']
    """
    short = {"--machine": "hardware.node_type"}
    short |= dict.fromkeys(("--devices", "devices", "hardware.nodes"), "parallelism.dp")
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        option, joined, value = word.partition("=")
        if option not in {"--set", "--machine", "--devices"}:
            kept.append(word)
            continue
        value = value if joined else next(words, "")
        key = option if option in short else value.partition("=")[0]
        if short.get(key, key) not in {short.get(name, name) for name in asked}:
            kept += [word] if joined else [word, value]
    return kept


def _options(line: str) -> list[str]:
    """The options that a problem asks for: the first of several ways."""
    line = line.replace("--devices N", "--set parallelism.dp=N")
    asked = re.search(r"[;,] (?:or |for other nodes )?add (--(?:set|with) .*)", line)
    found = re.findall(r"(--(?:set|with)) ((?:[^\s,;]|,(?=\S))+)", asked[1].partition(", or ")[0]) if asked else []
    return [f"{option} {shlex.quote(value)}" for option, value in found]


def export(job: Job, options: Namespace, out: Printer) -> int:
    """Print a plan as a framework's launch file, with a list of the settings that have no equivalent in it.

    The list is in comments at its top or, since JSON has none, on standard error.

    Raises:
        ConfigError: an option that asks for an estimate, too.
    """
    if options.json or options.check or options.min_mfu is not None:
        raise ConfigError("--export: not together with --json, --check or --min-mfu")
    kind = options.export
    written = write(job, kind)
    lines = [
        f"{kind} launch file of a plan for {counted(job.parallelism.devices, 'device')} of {job.machine.name}",
        *(f"no equivalent: {path} = {flow(value)}" for path, value in written.stated.items()),
        *refused(job, kind),
        *notes(job, kind),
        f"read back by: 3dtrn --from {written.reader} --allow-unmodeled FILE {words(written.left_out)}",
    ]
    if kind == "deepspeed":
        out.text(written.text)
        sys.stderr.writelines(f"{line}\n" for line in lines)
    else:
        out.text("".join(f"# {line}\n" for line in lines) + written.text)
    return 0
