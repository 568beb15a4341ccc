"""The entry point of the readers of launch files: a kind and a path in, a `Reading` out."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from steptime.base.config import ConfigError, near
from steptime.base.document import parse
from steptime.job.job import Job
from steptime.launch.devices import on_node, told_whole
from steptime.launch.job_yaml import command_in
from steptime.launch.keys import load_table, table_file
from steptime.launch.logs.files import open_plain
from steptime.launch.logs.job_log import PRINTED
from steptime.launch.nearby_files import NearbyFiles, with_numbers
from steptime.launch.python.config_values import split_path
from steptime.launch.python.program_calls import kind_started
from steptime.launch.reading import Reading, Sets, cut
from steptime.launch.shell.grammar import PROGRAM
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, NODES_OF_JOB

KINDS = {
    "megatron": ("steptime.launch.megatron.sources", "read_megatron"),
    "torchtitan": ("steptime.launch.torchtitan.job_config", "read_torchtitan"),
    "nemo": ("steptime.launch.nemo.formats", "read_nemo"),
    "deepspeed": ("steptime.launch.deepspeed", "read_deepspeed"),
}
"""Kind of launch file -> module and function (path, text, env, sets, beside) that read it, imported when asked for."""
TABLES = (
    "llamafactory", "axolotl", "swift", "litgpt", "nanotron", "gpt-neox", "maxtext", "llm-foundry", "olmo", "primus",
    "torchtune", "automodel", "levanter", "openrlhf", "verl", "transformers",
)  # fmt: skip
"""Kinds that are translated by a table of keys only; Primus by those of Megatron-LM or torchtitan."""
_READERS = {**KINDS, "primus": ("steptime.launch.primus", "read_primus")}
MAX_BYTES = 8_000_000
"""Bytes read of a longer file, which can only be a log, from where its arguments begin."""
_DUMP = re.compile(rb"(?<!-)-{8,} arguments -{8,}|" + PRINTED.pattern)
"""Marks of the beginning of a log's config: Megatron-LM's, torchtitan's, NeMo's and Megatron-Bridge's."""
_BEGINS = re.compile(r"^[^#\n]*?(?<!-)-{8,} arguments -{8,}", re.MULTILINE)
_SIZE = re.compile(r"\bhidden_size \.{3,} \d+[ \t\r]*$", re.MULTILINE)  # of Megatron's dump; GPT-NeoX's lines say more
_NODES, _LAUNCHED = "DGXNNODES", r"\b(?:accelerate|torchrun|deepspeed|srun|deepy\.py)\b"  # the first: of MLPerf's jobs
_SUBMITTED = "export SLURM_NNODES=$DGXNNODES SLURM_JOB_NUM_NODES=$DGXNNODES SLURM_NTASKS_PER_NODE=$DGXNGPU"  # by sbatch
_DS_KEYS = "zero_optimization|train_batch_size|train_micro_batch_size_per_gpu"
_STARTS = r"\b(?:srun|mpirun|torchrun|python3?|deepspeed)\s"


def read(kind: str, path: str, sets: Sets = None, added: Iterable[str] = ()) -> Reading:
    """The launch file at `path` ("-" is standard input) as a config, its variables filled in from the environment.

    A script that takes arguments is given with them, as on the command line: "run.sh 8B 16"; a config function as
    FILE.py:FUNCTION. `sets`: dotted keys that the user sets, for settings that no file gives (a model, data-parallel ranks).
    `added`: files that it sources or names, where they are not in its folder.

    Raises:
        ConfigError: the kind is unknown, the file cannot be read, or it is no launch file of that framework.
    """
    if kind not in (known := [*KINDS, *TABLES, "auto"]):
        raise ConfigError(f"--from {kind}: unknown kind{near(kind, known)}")
    path, words = named(path)
    file = split_path(path)[0]
    text = command_in(file, read_text(file))
    nearby = NearbyFiles(None if path == "-" else Path(file).parent, added)
    path = "standard input" if path == "-" else path
    if not text.strip():
        raise ConfigError(f"{path}: is empty; expected a launch script, config or log")
    numbered = {str(number): word for number, word in enumerate(words, 1)}
    counts = {
        DEVICES_ON_NODE: on_node(sets),
        DEVICES_OF_JOB: told_whole(sets, "devices"),
        NODES_OF_JOB: told_whole(sets, "hardware.nodes"),
    }
    counted = {name: str(count) for name, count in counts.items() if count}
    here = {name: value for name, value in os.environ.items() if name not in {"PWD", "OLDPWD"}}  # not the script's
    return read_as(kind, path, text, {**here, **numbered, **counted}, sets, nearby)


def read_as(
    kind: str, path: str, text: str, env: Mapping[str, str], sets: Sets, nearby: NearbyFiles | None = None
) -> Reading:
    """A text by the reader of its kind, one of KINDS; `path` is for messages.

    Raises:
        ConfigError: it is no launch file of that framework; the message names the framework that it seems to be of.
    """
    nearby = nearby or NearbyFiles()
    with_numbers(text, path)
    if is_plan(text):
        raise ConfigError(f"{path}: is a plan already; run 3dtrn {path}")
    try:
        if kind == "auto":
            kind = kind_of(path, text, nearby)
        if kind == "deepspeed" and _names_its_config(text, nearby):
            kind = "deepspeed-script"
        if kind in {*TABLES, "deepspeed-script"} - _READERS.keys():
            table: Reading = import_module("steptime.launch.trainers.trainer_plan").read_trainer(
                kind, path, text, env, sets, nearby
            )
            return table
        if kind in {"megatron", "nemo"} and _only_sizes(text):
            if config := nearby.config_of_nodes(_NODES):
                added = NearbyFiles(nearby.folder, [path, *map(str, nearby.added)])
                return read_as("nemo", str(config), read_text(str(config)), env, sets, added)
            if "--config-name" in (started := nearby.text("run_and_time.sh") or ""):
                return read_as("nemo", path, f"{text}\n{_SUBMITTED}\n{started}", env, sets, nearby)
        module, function = _READERS[kind]
        found: Reading = getattr(import_module(module), function)(path, text, env, sets, nearby)
    except ConfigError as error:
        if other := another(kind, path, text, nearby):
            raise ConfigError(f"{path}: {other}") from None
        raise cut(error) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep to be read") from None
    return found


def _only_sizes(text: str) -> bool:
    """Whether a file only sets variables of a job (MLPerf's config_*.sh), which a config or a script beside it reads."""
    starts = re.search(rf"{_STARTS}|--config-name", text)
    return bool(re.search(rf"^\s*(?:export\s+)?{_NODES}=", text, re.MULTILINE)) and not starts


def is_plan(text: str) -> bool:
    """Whether a text is a plan: only sections of one, among them a model and where it runs.

    >>> is_plan("{model: llama3-8b, devices: 8, data: {gbs: 8}}"), is_plan("{model: {}, trainer: {}}")
    (True, False)
    """
    if len(text) > 100_000 or not re.search(r"\b(?:parallelism|hardware|devices)\b", text):
        return False
    try:
        found = parse(text, "")
    except ConfigError:
        return False
    sections = found.keys() if isinstance(found, dict) else set()
    runs = bool({"parallelism", "hardware", "devices"} & sections)
    return "model" in sections and runs and sections <= {*Job.model_fields}


def another(kind: str, path: str, text: str, nearby: NearbyFiles | None = None) -> str:
    """The message for a text that is not of this kind: another kind's, or not text at all; "" where neither is clear.

    >>> another("deepspeed", "a.toml", "[training]"), another("torchtitan", "a.toml", "[training]")
    ('is a file of torchtitan; try --from torchtitan', '')
    """
    kinds = _kinds(text)
    if kind in kinds:
        return ""
    if kinds:
        other = kind_of(path, text, nearby)
        return f"is a file of {other}; try --from {other}" if other != kind else ""
    return "is not a text file; expected a launch script, config or log" if _garbled(text) else ""


def _kinds(text: str) -> list[str]:
    """The kinds whose marks a text has."""
    marks = {kind: "|".join(patterns) for kind, patterns in table_file("kinds").items()}
    marks |= {kind: load_table(kind.replace("-", "_")).raw["marks"] for kind in TABLES}
    return [kind for kind, pattern in marks.items() if re.search(pattern, text, re.MULTILINE)]


def kind_of(path: str, text: str, nearby: NearbyFiles | None = None, *, outer: bool = True) -> str:
    """The kind of a file for `--from auto`: the most specific whose marks it has; in comments, if nowhere else.

    A script of accelerate, torchrun or srun is of the kind of the config that it names, where that is found `nearby` it; an
    `outer` one without marks is of the kind of the scripts that it runs.

    Raises:
        ConfigError: it has no marks of any kind.
    """
    nearby = nearby or NearbyFiles()
    bare = re.sub(r"^[ \t]*#.*", "", text, flags=re.MULTILINE) if _is_shell(path, text) else text
    dump = (begins := _BEGINS.search(text)) and _SIZE.search(text, begins.end())
    kinds = ["megatron"] if dump else _kinds(bare) or _kinds(text)
    if set(kinds) <= {"transformers", "deepspeed"} and re.search(_LAUNCHED, text):
        named = (nearby.text(name) for name in re.findall(r"[\w./-]+\.ya?ml\b", text))
        kinds += [kind for inside in named if inside for kind in _kinds(inside) if kind in TABLES]
    ordered = ("primus", *TABLES[:-1], "torchtitan", "nemo", "megatron", "transformers", "deepspeed")
    telling = [kind for kind in ordered if kind in kinds]
    if telling[:1] == ["swift"] and re.search(r"\bmegatron (?:sft|pt|rlhf)\b", text):
        return "swift" if _runs_swift(path, text, nearby) else "megatron"  # ms-swift's own launcher of Megatron-Core
    if telling[:1] == ["transformers"] and _is_ds_config(text):
        return "deepspeed"
    if not telling and _is_shell(path, text):  # which reports what it launches
        return kind_started(text, nearby) or (_kind_within(path, text, bare, nearby) if outer else "megatron")
    if not telling and ":::MLLOG" in text:  # github.com/mlcommons/logging
        raise ConfigError(f"{path}: a log that does not print the job's config; give the config or the script")
    if not telling:
        _complete(path, text)
        known = f"unknown framework; use --from {', '.join([*KINDS, *TABLES])}"
        raise ConfigError(f"{path}: {PROGRAM if path.endswith('.py') else known}")
    return telling[0]


def _complete(path: str, text: str) -> None:
    """Check that a file with the name of a config is one.

    Raises:
        ConfigError: it is not valid YAML, JSON or TOML.
    """
    if path.endswith((".yaml", ".yml", ".json")):
        parse(text, path, repeats=True)
    elif path.endswith(".toml"):
        try:
            tomllib.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML ({error})") from None


_SCRIPT = re.compile(r"[\w./-]+\.(?:sh|slurm|sbatch)\b")


def _kind_within(path: str, text: str, bare: str, nearby: NearbyFiles) -> str:
    """The kind of the first script with marks of one that a script runs; `bare`: the script without its comments."""
    inside = (found for name in _SCRIPT.findall(bare) if (found := nearby.text(name)) and found != text)
    kinds = (kind_of(path, script, nearby, outer=False) for script in inside)
    return next((kind for kind in kinds if kind != "megatron"), "megatron")


def _runs_swift(path: str, text: str, nearby: NearbyFiles) -> bool:
    """Whether a script that may start ms-swift with or without Megatron-Core starts it without, as its variables are."""
    if not re.search(r"\bswift (?:sft|pt)\b", text):
        return False
    from steptime.launch.shell.script import read_script

    try:
        before = read_script(text, path, {}, nearby).before
    except ConfigError:
        return False
    return bool(before) and before[-1].text == "swift"


def _is_shell(path: str, text: str) -> bool:
    """Whether a file is a shell script, by its name or its first line."""
    return path.endswith((".sh", ".slurm", ".sbatch")) or bool(re.match(r"#!.*\b(?:ba|z)?sh\b|#SBATCH", text))


def _names_its_config(text: str, nearby: NearbyFiles) -> bool:
    """Whether a script starts a custom program with a ds_config that is there, or that the script writes."""
    if text.lstrip().startswith("{") or not re.search(_STARTS, text):
        return False
    named = re.findall(r"--deepspeed(?:_config)?[= ]+(?!--)\"?(\$?[\w{}$./-]+)", text)
    return any(re.fullmatch(r"\$\{?\w+\}?", name) or nearby.text(name) is not None for name in named)


def _is_ds_config(text: str) -> bool:
    """Whether a text is a ds_config.json, even if it contains flags of a trainer (for the autotuner)."""
    try:
        tree = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and any(key in tree for key in _DS_KEYS.split("|"))


def _garbled(text: str) -> bool:
    """Whether at least one character in ten of the beginning is not text."""
    head = text[:4096]
    return 10 * sum(not (letter.isprintable() or letter.isspace()) or letter == "\ufffd" for letter in head) > len(head)


def named(path: str) -> tuple[str, list[str]]:
    """A file and the words after its name, given in one string.

    >>> named("run.sh")
    ('run.sh', [])
    """
    try:
        first, *words = [path] if path == "-" or os.path.lexists(path) else shlex.split(path)
    except ValueError:
        return path, []
    return (first, words) if os.path.lexists(first) else (path, [])


def read_text(path: str) -> str:
    """The text of a launch file or the beginning of a log, plain or gzip, in bounded memory; what is not UTF-8 is replaced.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    if path == "-" and sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  closed by the caller
        raise ConfigError("standard input is closed; pipe a launch file into it")
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else open_plain(path) as file:
            return _beginning(file).decode("utf-8-sig", errors="replace").replace("\0", "")
    except EOFError:
        raise ConfigError(f"{path}: damaged gzip file") from None


def _beginning(file: BinaryIO) -> bytes:
    """The whole of a short file; for a long one MAX_BYTES from where a dump of arguments begins, else from its start."""
    head = file.read(MAX_BYTES)
    if len(head) < MAX_BYTES or _DUMP.search(head):
        return head + (file.read(MAX_BYTES) if len(head) == MAX_BYTES else b"")
    tail = head[-200:]
    while more := file.read(MAX_BYTES):
        block = tail + more
        if found := _DUMP.search(block):
            return block[found.start() :] + file.read(MAX_BYTES)
        tail = block[-200:]
    return head
