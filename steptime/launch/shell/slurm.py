"""The headers of a batch script, and the variables that Slurm, PBS or Grid Engine sets from them."""

from __future__ import annotations

import re

from steptime.launch.keys import table_file
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell.scope import LINES_OF_NODE, NODES_OF_JOB, Scope, Unknown, Value

_RUNNING = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PBS_JOBID")
"""Variables by which a script detects that it is running inside a job."""
_PBS = re.compile(r"^#PBS[ \t]+-l[ \t]+select=(\d{1,6})\b(?!\S*\+)(?:\S*:mpiprocs=(\d{1,6})\b)?", re.MULTILINE)


def headers_of(text: str) -> list[tuple[str, str]]:
    """Options and values of a script's #SBATCH lines."""
    lines = "\n".join(re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE))
    return re.findall(r"(?:^|\s)--?([A-Za-z-]+)(?:=|[ \t]+)?([^\s#-]\S*)", lines)


def slurm_variables(headers: list[tuple[str, str]], text: str) -> dict[str, str]:
    """The variables that Slurm, PBS or Grid Engine sets: those from headers, and those of a job that is running already."""
    by = {"SLURM": headers, "PBS": re.search(r"^#PBS ", text, re.MULTILINE)}
    found = {name: "0" for name in _RUNNING if by[name.partition("_")[0]]}
    if grid := re.search(r"^#\$[ \t]+-l[ \t]+(rt_\w+|node_[fhqo])=(\d+)", text, re.MULTILINE):
        # qsub of Grid Engine: kind and number of nodes, at ABCI (docs.abci.ai, job execution) and TSUBAME 4 (its handbook, jobs)
        found |= {"SGE_RESOURCE_TYPE": grid[1], "NHOSTS": grid[2], "JOB_ID": "0"}
    if pbs := _PBS.search(text):
        # PBS Professional's user guide: its node file has a line for each process of mpiprocs, which is 1 by default
        found |= {NODES_OF_JOB: pbs[1], LINES_OF_NODE: pbs[2] or "1"}
    known = table_file("launchers")["sbatch"]
    for option, value in headers:
        number = re.search(r"\bgpu(?::[^:,]+)?:(\d+)\b" if option == "gres" else r"(?:^|:)(\d+)$", value)
        if option in known and number:
            found[known[option]] = number[1]
        elif option in {"partition", "p"}:
            found["SLURM_JOB_PARTITION"] = value
    if "SLURM_NNODES" in found:
        found["SLURM_JOB_NUM_NODES"] = found["SLURM_NNODES"]
        if "SLURM_NTASKS_PER_NODE" in found:
            tasks = int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"])
            found.setdefault("SLURM_NTASKS", str(tasks))
            found["SLURM_TASKS_PER_NODE"] = f"{found['SLURM_NTASKS_PER_NODE']}(x{found['SLURM_NNODES']})"
    if on_node := _gpus_on_node(found, nodes_said=any(option in {"nodes", "N"} for option, _ in headers)):
        found["SLURM_GPUS_ON_NODE"] = str(on_node)
    if "SLURM_NTASKS" in found:
        found["SLURM_NPROCS"] = found["SLURM_NTASKS"]
    return found


_NODES = re.compile(r"\b(?:PBS_NODEFILE|SLURM_(?:JOB_)?NODELIST)\b|\bscontrol +show +hostname")
_EACH_NODE = re.compile(r"(?:scontrol show hostname|cat|echo|sort|uniq|tr|paste|wc|sed [\"']s|awk [\"']\{ ?print)")
"""Beginning of a command that prints every line, where `head`, `tail` or `grep` leave out some."""


def lists_nodes(command: str) -> bool:
    """Whether a command prints all nodes of the job.

    >>> lists_nodes("scontrol show hostnames $SLURM_JOB_NODELIST"), lists_nodes("sort -u $PBS_NODEFILE | head -n 2")
    (True, False)
    """
    parts = [" ".join(part.split()) for part in command.split("|")]
    return bool(_NODES.search(parts[0])) and all(map(_EACH_NODE.match, parts))


def nodes_listed(scope: Scope, command: str, shown: str, line: int) -> str:
    """How many nodes a command lists, from the headers or the user; without a value where neither tells it."""
    if counted := scope.get(NODES_OF_JOB) or scope.get("SLURM_NNODES"):
        once = "PBS_NODEFILE" not in command or re.search(r"\buniq\b|\bsort +-u", command)
        lines = None if once else scope.get(LINES_OF_NODE)
        return str(int(counted.text) * int(lines.text)) if lines else counted.text
    return scope.mark(shown, Unknown(f"number of nodes unknown, which {shown} in line {line} counts", NODES_OF_JOB))


def length_of(scope: Scope, name: str, values: list[Value], line: int) -> str:
    """How many elements an array has: as many as the job's nodes where it is what a command prints that lists them."""
    reasons = (reason for value in values for reason in scope.reasons_of(value.text))
    open_ = re.compile(rf"\$(?:\(|\{{\w+\[[@*]|{name}$)")
    several = next((one for one in reasons if one.unset or open_.match(one.shown)), None)
    if several is None or (several.unset and len(values) == 1):
        return "0" if several else str(len(values))
    listed = several.cause.nodes and [value.text for value in values] == [scope.mark(several.shown, several.cause)]
    if listed and name in scope.arrays:
        return nodes_listed(scope, several.cause.nodes, several.shown, line)
    return scope.mark(f"${{#{name}[@]}}", several.cause)


def submitted(scope: Scope, nearby: NearbyFiles, own: str, words: list[Value]) -> str:
    """The other script that sbatch is given, with the variables that Slurm sets in its job; "" where it is not found."""
    named = (word.text for word in words)
    name = next((word for word in named if word.endswith((".sh", ".slurm", ".sbatch")) or word in nearby.written), "")
    text = nearby.text(name) if name else None
    if text is None or name.endswith(own):
        return ""
    options = "#SBATCH " + " ".join(word.text for word in words)
    for key, value in slurm_variables(headers_of(f"{text}\n{options}"), text).items():
        scope.put(key, value, 0)
    return name


def _gpus_on_node(found: dict[str, str], *, nodes_said: bool) -> int:
    """The devices that a batch script is given on its node: as asked for a node, for each task of one, or in all; else 0."""
    said = {name: int(text) for name, text in found.items() if text.isdecimal()}
    by_task = said.get("SLURM_GPUS_PER_TASK", 0) * said.get("SLURM_NTASKS_PER_NODE", 0)
    each, rest = divmod(said.get("SLURM_GPUS", 0), max(said.get("SLURM_NNODES", 1), 1))
    uneven = rest or (nodes_said and "SLURM_NNODES" not in said)  # nodes=1-4 is any number of them
    return said.get("SLURM_GPUS_PER_NODE", 0) or by_task or (0 if uneven else each)
