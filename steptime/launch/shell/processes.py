"""The number of processes that a launch command starts, and the number of nodes."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from steptime.base.document import scalar
from steptime.launch.devices import SET_DEVICES
from steptime.launch.shell.expansion import DEVICES_ON_NODE
from steptime.launch.shell.scope import Unknown


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
        found += [
            word._replace(text=text, unresolved=word.unresolved if "$" in text or not whole else ()) for text in parts
        ]
    return found


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


class _Launcher(NamedTuple):
    """Options of a launcher."""

    nodes: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    """Processes on each node."""
    devices: tuple[str, ...] = ()
    """All processes."""


LAUNCHERS = {
    "torchrun": _Launcher(("--nnodes",), ("--nproc-per-node", "--nproc_per_node")),
    "srun": _Launcher(("--nodes", "-N"), ("--ntasks-per-node", "--tasks-per-node"), ("--ntasks", "-n")),
    "deepspeed": _Launcher(("--num_nodes", "--num-nodes"), ("--num_gpus", "--num-gpus")),
    "accelerate": _Launcher(("--num_machines", "--num-machines"), (), ("--num_processes", "--num-processes")),
    # lightning/fabric/cli.py: lightning run model, fabric run
    "lightning": _Launcher(("--num-nodes", "--num_nodes"), ("--devices",)),
    "fabric": _Launcher(("--num-nodes", "--num_nodes"), ("--devices",)),
    # composer/cli/launcher.py
    "composer": _Launcher((), ("-n", "--nproc"), ("--world_size",)),
    # allenai/open-instruct mason.py
    "mason.py": _Launcher(("--num_nodes",)),
    "msrun": _Launcher((), ("--local_worker_num",), ("--worker_num",)),
    # IBM's Job Step Manager: sets of resources, on each host and in all
    "jsrun": _Launcher((), ("--rs_per_host", "-r"), ("--nrs", "-n")),
    "aprun": _Launcher((), ("--pes-per-node", "-N"), ("--pes", "-n")),
    "mpirun": _Launcher((), ("--npernode", "-npernode", "-ppn", "--ppn", "--ntasks-per-node"), ("-np", "-n", "--np")),
}


class Size(NamedTuple):
    """How many processes a launch starts, one per device."""

    nodes: int | None
    per_node: int | None
    devices: int | None
    unclear: list[str]
    """What is unclear about them, and the user's fix."""
    default: str = ""
    """The launcher's default that counts, where the command leaves nodes or processes per node to it."""


def size_of(words: list[Word], launchers: list[str], variables: dict[str, str]) -> Size:
    """Nodes, devices per node and devices of a launch.

    >>> size_of([Word("torchrun", 1), Word("--nproc-per-node=8", 1)], ["torchrun"], {})
    Size(nodes=1, per_node=8, devices=8, unclear=[], default='torchrun, one node without --nnodes')
    """
    visible, on_node = _visible(variables), variables.get(DEVICES_ON_NODE)
    variables = variables | ({DEVICES_ON_NODE: str(visible)} if visible else {})
    inner = (launchers or [""])[-1]
    said, unclear = _stated(words, launchers, variables, on_node)
    slurm = {key: int(text) for key, text in variables.items() if key.startswith("SLURM_") and text.isdecimal()}
    nodes, per_node, devices = said.get("nodes"), said.get("per_node"), said.get("devices")
    default = ""
    if nodes is None and "srun" in launchers:
        nodes = slurm.get("SLURM_NNODES")
    if inner == "srun" and per_node is None:
        per_node = slurm.get("SLURM_NTASKS_PER_NODE")
        devices = devices or (slurm.get("SLURM_NTASKS") if per_node is None else None)
    if inner == "torchrun" and not unclear:
        nodes, per_node, default = _by_torchrun(words, nodes, per_node, variables)
    if inner == "deepspeed" and (nodes or 0) > 1 and _option(words, LAUNCHERS[inner].nodes) is None:
        unclear.append(
            f"srun starts DeepSpeed's launcher on each of {nodes} nodes: number of devices unknown; {SET_DEVICES}"
        )
    if inner == "deepspeed" and nodes is None and not unclear:
        nodes, per_node, devices, default = _by_hosts(words, per_node, variables)
    if "mason.py" in launchers and devices:  # which puts their product into accelerate's option
        devices *= nodes or 1
    if inner == "composer" and not per_node and not devices and not unclear:
        nodes, per_node, default = 1, visible, "composer, the visible devices"
    if inner == "accelerate" and devices is None and not unclear:  # commands/launch.py: torch.cuda.device_count()
        per_node = visible
    if not launchers and not unclear:
        devices, nodes, per_node, default = _around(words, variables)
        if devices is None:
            unclear.append(f"launched by python only: number of processes unknown; {SET_DEVICES}")
    if devices is None and nodes and per_node:
        devices = nodes * per_node
    elif devices and nodes and per_node is None and devices % nodes == 0:
        per_node = devices // nodes
    elif devices and per_node and nodes is None and devices % per_node == 0:
        nodes = devices // per_node
    return Size(nodes, per_node, devices, unclear, default if devices else "")


def _stated(
    words: list[Word], launchers: list[str], variables: dict[str, str], on_node: str | None
) -> tuple[dict[str, int | None], list[str]]:
    """What the launchers' options state, by field of `_Launcher`, and what to do about those without a value.

    The user's hardware.nodes are nodes with all `on_node` devices of the machine, so that for fewer the devices are asked for.
    """
    missing: dict[str, Unknown] = {}
    said: dict[str, int | None] = {}
    for launcher in launchers:
        for what, names in LAUNCHERS[launcher]._asdict().items():
            word = _option(words, names)
            if word is None or (what != "nodes" and launcher != launchers[-1]):
                continue
            text = word.text.partition(":")[2] if re.fullmatch(r"\d+:\d+", word.text) else word.text
            if text in {"gpu", "auto"}:  # torch/distributed/run.py, determine_local_world_size
                text = variables.get(DEVICES_ON_NODE, "")
            if text.isdecimal():
                tasks = _option(words, ("--tasks_per_rs", "-a")) if launcher == "jsrun" else None
                said[what] = int(text) * (int(tasks.text) if tasks and tasks.text.isdecimal() else 1)
            elif word.unresolved:
                missing[f"line {word.line}: {names[0]}"] = word.unresolved[0]
            elif word.text.startswith("<"):
                missing[f"line {word.line}: {names[0]}"] = Unknown(f"{word.text} is to be filled in")
    if "per_node" in said and str(said["per_node"]) != on_node:
        missing = {place: each.in_devices() for place, each in missing.items()}
    return said, _asked(missing)


def _asked(missing: dict[str, Unknown]) -> list[str]:
    """What to do about options without a value, by their places: write all variables, or set the number of devices.

    >>> _asked({"line 1: --nnodes": Unknown("$N has no value", "N"), "line 1: --nproc-per-node": Unknown("$G has no value", "G")})
    ['line 1: --nnodes: $N has no value; write N=... G=... before the command, or add --set parallelism.dp=N']
    """
    variables = [each.variable for each in missing.values() if re.fullmatch(r"[A-Za-z_]\w*", each.variable)]
    for place, unknown in missing.items():
        if unknown.variable not in variables:  # which only a run tells, whatever the variables are
            return [f"{place}: {unknown.told_or(SET_DEVICES)}"]
    before = " ".join(f"{name}=..." for name in dict.fromkeys(variables))
    return [
        f"{place}: {each.why}; write {before} before the command, or {SET_DEVICES}" for place, each in missing.items()
    ][:1]


def _by_torchrun(
    words: list[Word], nodes: int | None, per_node: int | None, variables: dict[str, str]
) -> tuple[int, int | None, str]:
    """Nodes and processes per node with torchrun's defaults of one each, and their names (torch/distributed/run.py).

    It takes options from the environment too (torch/distributed/argparse_util.py, env).
    """
    said = {name: int(text) for name, text in variables.items() if re.fullmatch(r"\d{1,6}", text)}
    nodes, per_node = nodes or said.get("PET_NNODES"), per_node or said.get("PET_NPROC_PER_NODE")
    default = "torchrun, "
    alone = nodes is None and not any(word.text == "--standalone" for word in words)
    told = per_node or _option(words, LAUNCHERS["torchrun"].per_node) or any(word.unresolved for word in words)
    one_each = not told
    if one_each:
        default += f"one process {'on one' if alone else 'per'} node without --nproc-per-node"
        default += " and --nnodes" if alone else ""
    elif alone:
        default += "one node without --nnodes"
    return nodes or 1, 1 if one_each else per_node, default if one_each or alone else ""


def _included(text: str) -> tuple[int | None, int | None]:
    """Nodes, and the devices named on them, of DeepSpeed's --include (launcher/runner.py, parse_resource_filter).

    >>> _included("worker-0:0,1,2@worker-1:5"), _included("worker-0@worker-1")
    ((2, 4), (2, None))
    """
    named = [len(found[1].split(",")) for found in re.finditer(r"(?:^|@)[^:@]+:(\d[\d,]*)(?=@|$)", text)]
    return (hosts := text.count("@") + 1), sum(named) if len(named) == hosts else None


def _by_hosts(
    words: list[Word], per_node: int | None, variables: dict[str, str]
) -> tuple[int | None, int | None, int | None, str]:
    """The same for DeepSpeed's launcher by its host options, and without a hostfile: every visible device; and that default.

    A script that counts its devices itself (NUM_GPUS, WORLD_SIZE) leaves the nodes to the cluster (deepspeed/launcher/runner.py).
    """
    if (included := _option(words, ("--include", "-i"))) is not None:
        nodes, named = _included(included.text)
        return nodes, per_node, named, ""
    if _option(words, ("--hostfile", "-H", "-hostfile")) is not None:
        return None, per_node, None, ""
    counted, devices = ("", None) if per_node else _counted(variables)
    there = _visible(variables) or int(variables.get(DEVICES_ON_NODE, 0))
    default = f"deepspeed, {'' if per_node else 'every device of '}one node without a hostfile"
    default = f"{counted} of the script" if devices else default
    per_node = per_node or (None if devices else there or None)
    return (1, per_node, devices, default) if per_node else (None, per_node, devices, "")


def _counted(variables: dict[str, str]) -> tuple[str, int | None]:
    """Devices that a script counts itself, and the variable that has them."""
    counts = (name for name in variables if name.lower() in {"num_gpus", "world_size"})
    named = next((name for name in counts if re.fullmatch(r"[1-9]\d{0,6}", variables[name])), "")
    return named, int(variables[named]) if named else None


_PER_NODE, _SEEN = ("NPROC_PER_NODE", "GPUS_PER_NODE"), ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
COUNTS = frozenset({*_PER_NODE, "WORLD_SIZE"})


def _around(words: list[Word], variables: dict[str, str]) -> tuple[int | None, int | None, int | None, str]:
    """Devices, nodes and devices per node by the usual variables, where a script starts one process; and what is assumed.

    ms-swift's commands start NPROC_PER_NODE of them (swift/cli/main.py); Python starts one, whatever these say.
    """
    said = {name: int(text) for name, text in variables.items() if re.fullmatch(r"\d{1,6}", text)}
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
    return devices, nodes, per_node, default


def _visible(variables: dict[str, str]) -> int | None:
    """Devices of a node that a script leaves its processes, or that Slurm gives it by its headers."""
    said, given = next(filter(None, map(variables.get, _SEEN)), ""), variables.get("SLURM_GPUS_ON_NODE", "")
    return len(said.split(",")) if said else int(given) if re.fullmatch(r"[1-9]\d{0,3}", given) else None


def _option(words: list[Word], names: tuple[str, ...]) -> Word | None:
    """The value of an option: --name value, --name=value, -Nvalue; the last one counts."""
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
