"""The entry point of the readers of launch files: a kind and a path in, a `Reading` out."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from steptime.base.config import ConfigError, near
from steptime.launch.devices import on_node, told_whole
from steptime.launch.job_yaml import command_in
from steptime.launch.kinds import KINDS, STARTS, TABLES, another, is_plan, kind_of, names_its_config
from steptime.launch.logs.files import open_plain
from steptime.launch.logs.job_log import PRINTED
from steptime.launch.nearby_files import NearbyFiles, with_numbers
from steptime.launch.python.config_values import split_path
from steptime.launch.reading import Reading, Sets, cut
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, NODES_OF_JOB

_READERS = {**KINDS, "primus": ("steptime.launch.primus", "read_primus")}
MAX_BYTES = 8_000_000
"""Bytes read of a longer file, which can only be a log, from where its arguments begin."""
_DUMP = re.compile(rb"(?<!-)-{8,} arguments -{8,}|" + PRINTED.pattern)
"""Marks of the beginning of a log's config: Megatron-LM's, torchtitan's, NeMo's and Megatron-Bridge's."""
_NODES = "DGXNNODES"  # of MLPerf's jobs
_SUBMITTED = "export SLURM_NNODES=$DGXNNODES SLURM_JOB_NUM_NODES=$DGXNNODES SLURM_NTASKS_PER_NODE=$DGXNGPU"  # by sbatch


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
            kind = kind_of(path, _with_configs(text, env), nearby)
        if kind == "deepspeed" and names_its_config(text):
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
        if other := another(kind.removesuffix("-script"), path, text, nearby):
            raise ConfigError(f"{path}: {other}") from None
        raise cut(error) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep to be read") from None
    return found


def _with_configs(text: str, env: Mapping[str, str]) -> str:
    """A script with the configs that variables of the environment name (`CONFIG=job.yaml`), which may tell its kind.

    >>> _with_configs("torchrun train.py $CONFIG $N", {"CONFIG": "job.yaml", "N": "2"})
    'torchrun train.py job.yaml $N'
    """
    named = {name: value for name, value in env.items() if value.endswith((".yaml", ".yml"))}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: named.get(found[1], found[0]), text) if named else text


def _only_sizes(text: str) -> bool:
    """Whether a file only sets variables of a job (MLPerf's config_*.sh), which a config or a script beside it reads."""
    starts = re.search(rf"{STARTS}|--config-name", text)
    return bool(re.search(rf"^\s*(?:export\s+)?{_NODES}=", text, re.MULTILINE)) and not starts


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
