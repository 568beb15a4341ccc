"""The number of processes that a launch command starts, and the number of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from steptime.base.document import scalar
from steptime.launch.devices import SET_DEVICES
from steptime.launch.keys import KeyTable, is_costly, table_file
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, Unknown


class Word(NamedTuple):
    """One word of the launch command after expansion."""

    text: str
    """Parts without a value are shown as in the script: `$NAME`, `$(...)`."""
    line: int
    unresolved: tuple[Unknown, ...] = ()
    """Why each part without a value has none: "$X has no value"."""


def split_words(words: list[Word]) -> list[Word]:
    """The words, of which one that is a whole command line ("$ALL_ARGS", as wrappers pass it on) is the words of that.

    >>> [word.text for word in split_words([Word("--tp 8 --bf16", 1), Word("a b", 1)])]
    ['--tp', '8', '--bf16', 'a b']
    """
    found: list[Word] = []
    for word in words:
        whole = re.match(r"\s*--\w[^=\s]*\s+\S", word.text)
        parts = word.text.split() if whole else [word.text]
        found += [Word(text, word.line, word.unresolved if "$" in text or not whole else ()) for text in parts]
    return found


def blanks(path: str, words: Iterable[Word], table: KeyTable) -> list[str]:
    """A line for each word of a command without a value, unless it sets a key that changes no cost."""
    found = dict[str, None]()
    for word in words:
        if word.unresolved and is_costly(word.text.lstrip("-").partition("=")[0], table, unknown=True):
            found[f"{path}: line {word.line}: {word.unresolved[0].told('write the value into the script')}"] = None
    return [*found]


_OF_MODULES = re.compile(r"(?:target_modules|modules_to_save)$")
"""Options whose value is as many words as follow."""


def flags_of(words: list[str]) -> list[tuple[str, Any]]:
    """--key value, --key=value, --key alone, and key=value of hydra's kind; several in one word are the flag's value before it.

    >>> flags_of(["--lora_target_modules", "q_proj", "v_proj"])
    [('lora_target_modules', 'q_proj v_proj')]
    >>> flags_of(["--config_overrides", "n_embd=64,n_head=2", "trainer.devices=8"])
    [('config_overrides', 'n_embd=64,n_head=2'), ('trainer.devices', 8)]
    """
    found: list[tuple[str, Any]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w.-]*", name):
            found.append((name.lstrip("-").replace("-", "_"), scalar(value) if equals else True))
        elif found and found[-1][1] is True and re.fullmatch(r"\w+=[^=,]*(?:,\w+=[^=,]*)+", word):
            found[-1] = (found[-1][0], word)
        elif found and found[-1][1] is not True and _OF_MODULES.search(found[-1][0]) and not equals:
            found[-1] = (found[-1][0], f"{found[-1][1]} {word}")
        elif equals and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            found.append((name, scalar(value)))
        elif found and found[-1][1] is True:
            found[-1] = (found[-1][0], scalar(word))
    return found


def options_of(launcher: str) -> dict[str, list[str]]:
    """The options of a launcher for nodes, processes on each (per_node), and all of them (devices)."""
    found: dict[str, list[str]] = table_file("launchers")["launchers"][launcher]
    return found


@dataclass
class Size:
    """How many processes a launch starts, one per device."""

    nodes: int | None = None
    per_node: int | None = None
    devices: int | None = None
    unclear: list[str] = field(default_factory=list)
    """What is unclear about them, and the user's fix."""
    default: str = ""
    """The launcher's default that counts, where the command leaves nodes or processes per node to it."""
    in_devices: bool = False
    """Whether the number of devices is asked for where that of nodes is unknown: these may use a part of each node."""


def size_of(words: list[Word], launchers: list[str], variables: Mapping[str, str]) -> Size:
    """Nodes, devices per node and devices of a launch.

    >>> size_of([Word("torchrun", 1), Word("--nproc-per-node=8", 1)], ["torchrun"], {})
    Size(nodes=1, per_node=8, devices=8, unclear=[], default='torchrun, one node without --nnodes', in_devices=False)
    """
    visible, on_node = _visible(variables), variables.get(DEVICES_ON_NODE)
    variables = {**variables, **({DEVICES_ON_NODE: str(visible)} if visible else {})}
    counts = {name: int(text) for name, text in variables.items() if re.fullmatch(r"\d{1,6}", text)}
    inner, size = (launchers or [""])[-1], _stated(words, launchers, variables, on_node)
    if size.nodes is None and "srun" in launchers:
        size.nodes = counts.get("SLURM_NNODES")
    if inner == "srun" and size.per_node is None:
        size.per_node = counts.get("SLURM_NTASKS_PER_NODE")
        size.devices = size.devices or (counts.get("SLURM_NTASKS") if size.per_node is None else None)
    if inner == "torchrun" and not size.unclear:
        _by_torchrun(size, words, counts)
    if inner == "deepspeed" and (size.nodes or 0) > 1 and _option(words, options_of(inner)["nodes"]) is None:
        each = f"srun starts DeepSpeed's launcher on each of {size.nodes} nodes"
        size.unclear.append(f"{each}: number of devices unknown; {SET_DEVICES}")
    if inner == "deepspeed" and size.nodes is None and not size.unclear:
        _by_hosts(size, words, variables)
    if "mason.py" in launchers and size.devices:  # which puts their product into accelerate's option
        size.devices *= size.nodes or 1
    if inner == "composer" and not size.per_node and not size.devices and not size.unclear:
        size.nodes, size.per_node, size.default = 1, visible, "composer, the visible devices"
    if inner == "accelerate" and size.devices is None and not size.unclear:
        size.per_node = visible  # commands/launch.py: torch.cuda.device_count()
    if not launchers and not size.unclear:
        _around(size, words, variables, counts)
        if size.devices is None:
            size.unclear.append(f"launched by python only: number of processes unknown; {SET_DEVICES}")
    if size.devices is None and size.nodes and size.per_node:
        size.devices = size.nodes * size.per_node
    elif size.devices and size.nodes and size.per_node is None and size.devices % size.nodes == 0:
        size.per_node = size.devices // size.nodes
    elif size.devices and size.per_node and size.nodes is None and size.devices % size.per_node == 0:
        size.nodes = size.devices // size.per_node
    return size


def _stated(words: list[Word], launchers: list[str], variables: Mapping[str, str], on_node: str | None) -> Size:
    """What the launchers' options state, and what to do about those without a value.

    The user's hardware.nodes are nodes with all `on_node` devices of the machine, so that for fewer, or for a number of processes
    in all, the devices are asked for.
    """
    missing, size = dict[str, Unknown](), Size()
    for launcher in launchers:
        for what, names in options_of(launcher).items():
            word = _option(words, names)
            if word is None or (what != "nodes" and launcher != launchers[-1]):
                continue
            text = word.text.partition(":")[2] if re.fullmatch(r"\d+:\d+", word.text) else word.text
            if text in {"gpu", "auto"}:  # torch/distributed/run.py, determine_local_world_size
                text = variables.get(DEVICES_ON_NODE, "")
            if text.isdecimal() and (int(text) or what != "nodes"):
                tasks = _option(words, ("--tasks_per_rs", "-a")) if launcher == "jsrun" else None
                setattr(size, what, int(text) * (int(tasks.text) if tasks and tasks.text.isdecimal() else 1))
            elif word.unresolved:
                missing[f"line {word.line}: {names[0]}"] = word.unresolved[0]
            elif word.text.startswith("<"):
                missing[f"line {word.line}: {names[0]}"] = Unknown(f"{word.text} is to be filled in")
            elif what == "nodes" and text != "-1":  # deepspeed launcher/runner.py: all nodes of the hostfile
                missing[f"line {word.line}: {names[0]}"] = Unknown(f"{word.text!r} is no number of nodes")
    each = str(size.per_node or variables.get("SLURM_NTASKS_PER_NODE", on_node))
    in_all = _option(words, options_of(launchers[-1]).get("devices", ())) if missing else None
    size.in_devices = bool(missing) and (each != on_node or in_all is not None)
    if size.in_devices:
        missing = {place: each.in_place_of_nodes(DEVICES_OF_JOB) for place, each in missing.items()}
    size.unclear = _asked(missing)
    return size


def _asked(missing: dict[str, Unknown]) -> list[str]:
    """What to do about options without a value, by their places: write all variables, or set the number of devices.

    >>> _asked({"line 1: --nnodes": Unknown("$N has no value", "N"), "line 1: --nproc-per-node": Unknown("$G has no value", "G")})
    ['line 1: --nnodes: $N has no value; write N=... G=... before the command, or add --set parallelism.dp=N']
    """
    variables = [each.variable for each in missing.values() if re.fullmatch(r"[A-Za-z_]\w*", each.variable)]
    for place, unknown in missing.items():
        if unknown.variable not in variables:  # which only a run tells, whatever the variables are
            told = unknown.told(SET_DEVICES)
            return [f"{place}: {told if '; add --set ' in told else f'{told}, or {SET_DEVICES}'}"]
    before = " ".join(f"{name}=..." for name in dict.fromkeys(variables))
    return [
        f"{place}: {each.why}; write {before} before the command, or {SET_DEVICES}" for place, each in missing.items()
    ][:1]


def _by_torchrun(size: Size, words: list[Word], counts: Mapping[str, int]) -> None:
    """Its defaults of one node and one process on each (torch/distributed/run.py), and their names.

    It takes options from the environment too (torch/distributed/argparse_util.py, env).
    """
    nodes, per_node = size.nodes or counts.get("PET_NNODES"), size.per_node or counts.get("PET_NPROC_PER_NODE")
    alone = nodes is None and not any(word.text == "--standalone" for word in words)
    told = per_node or _option(words, options_of("torchrun")["per_node"]) or any(word.unresolved for word in words)
    if not told:
        where = "on one node without --nproc-per-node and --nnodes" if alone else "per node without --nproc-per-node"
        size.default = f"torchrun, one process {where}"
    elif alone:
        size.default = "torchrun, one node without --nnodes"
    size.nodes, size.per_node = nodes or 1, per_node if told else 1


def _included(text: str) -> tuple[int | None, int | None]:
    """Nodes, and the devices named on them, of DeepSpeed's --include (launcher/runner.py, parse_resource_filter).

    >>> _included("worker-0:0,1,2@worker-1:5"), _included("worker-0@worker-1")
    ((2, 4), (2, None))
    """
    named = [len(found[1].split(",")) for found in re.finditer(r"(?:^|@)[^:@]+:(\d[\d,]*)(?=@|$)", text)]
    return (hosts := text.count("@") + 1), sum(named) if len(named) == hosts else None


def _by_hosts(size: Size, words: list[Word], variables: Mapping[str, str]) -> None:
    """The same for DeepSpeed's launcher by its host options, and without a hostfile: every visible device; and that default.

    A script that counts its devices itself (NUM_GPUS, WORLD_SIZE) leaves the nodes to the cluster (deepspeed/launcher/runner.py).
    """
    if (included := _option(words, ("--include", "-i"))) is not None:
        size.nodes, size.devices = _included(included.text)
    elif _option(words, ("--hostfile", "-H", "-hostfile")) is None:
        counts = (name for name in variables if name.lower() in {"num_gpus", "world_size"} and not size.per_node)
        counted = next((name for name in counts if re.fullmatch(r"[1-9]\d{0,6}", variables[name])), None)
        every = "" if size.per_node else "every device of "
        there = _visible(variables) or int(variables.get(DEVICES_ON_NODE, 0)) or None
        size.per_node = size.per_node or (None if counted else there)
        if size.per_node:
            size.nodes, size.default = 1, f"deepspeed, {every}one node without a hostfile"
        elif counted:
            size.devices = int(variables[counted])
            size.default = f"{counted} of the script, which deepspeed is not given"


_PER_NODE, _SEEN = ("NPROC_PER_NODE", "GPUS_PER_NODE"), ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
COUNTS = frozenset({*_PER_NODE, "WORLD_SIZE"})


def _around(size: Size, words: list[Word], variables: Mapping[str, str], said: Mapping[str, int]) -> None:
    """Devices, nodes and devices per node by the usual variables, where a script starts one process; and what is assumed.

    ms-swift's commands start NPROC_PER_NODE of them (swift/cli/main.py); Python starts one, whatever these say.
    """
    each = next((name for name in _PER_NODE if name in said), "")
    per_node, nodes = said.get(each), said.get("NNODES", 1 if each else None)
    devices = said.get("WORLD_SIZE") or (nodes * per_node if nodes and per_node else None)
    default = "one node, since NNODES is not set" if per_node and not said.keys() & {"NNODES", "WORLD_SIZE"} else ""
    names = ["WORLD_SIZE"] if "WORLD_SIZE" in said else [name for name in (each, "NNODES") if name in said]
    if devices is None and said.get("SLURM_NNODES", 1) == 1 and (visible := _visible(variables)):
        names = [*filter(variables.get, _SEEN), "the Slurm options"][:1]
        devices, nodes, per_node, default = visible, 1, visible, ""
    if (devices or 0) > 1 and any(re.fullmatch(r"(?:.*/)?python[\d.]*", word.text) for word in words):
        default = f"{' and '.join(names)} of the script, whose command starts one process"
    size.devices, size.nodes, size.per_node, size.default = devices, nodes, per_node, default


def _visible(variables: Mapping[str, str]) -> int | None:
    """Devices of a node that a script leaves its processes, or that Slurm gives it by its headers."""
    said, given = next(filter(None, map(variables.get, _SEEN)), ""), variables.get("SLURM_GPUS_ON_NODE", "")
    return len(said.split(",")) if said else int(given) if re.fullmatch(r"[1-9]\d{0,3}", given) else None


def _option(words: list[Word], names: Iterable[str]) -> Word | None:
    """The value of an option: --name value, --name=value, -Nvalue; the last one counts."""
    found: Word | None = None
    for i, word in enumerate(words):
        key, equals, value = word.text.partition("=")
        if key in names and equals:
            found = word._replace(text=value)
        elif word.text in names and i + 1 < len(words):
            found = words[i + 1]
        elif word.text[:2] in names and word.text[2:].isdecimal():
            found = word._replace(text=word.text[2:])
    return found
