"""What torchrun, Slurm and MPI launchers set in the environment of a process. Pure functions: no torch, no network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Literal, NamedTuple

from steptime.base.config import ConfigError

Method = Literal["torchrun", "slurm", "mpi", "single"]
_LAST_STEP = 0xFFFFFFF0
"""Slurm's batch, interactive and extern steps have numbers above it (slurm.h, SLURM_MAX_NORMAL_STEP_ID)."""
_MPI = (  # rank, size, local rank, local size
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


class Launch(NamedTuple):
    """The launch of this process according to the environment."""

    method: Method
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    master_addr: str | None
    master_port: int | None
    """None where the ranks still have to agree on it (MPI), or a single process needs none."""


def read_torchrun(env: Mapping[str, str]) -> Launch | None:
    """Settings from torchrun (torch.distributed.run, "Environment Variables") or by hand; None where none of them is set.

    Raises:
        ConfigError: one line per variable that is missing, no whole number, or contradicts another.
    """
    if not env.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return None
    alone = env.get("WORLD_SIZE") == "1"
    if alone:
        env = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **env}
    rank, world, local = _whole(env, "RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not alone and (missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]):
        raise ConfigError(f"{name}: missing; torchrun sets it, other launchers must export it" for name in missing)
    groups = _whole(env, "GROUP_WORLD_SIZE")[0] if env.get("GROUP_WORLD_SIZE") else 0
    if env.get("LOCAL_WORLD_SIZE"):
        per_node = max(*_whole(env, "LOCAL_WORLD_SIZE"), 1)
    elif groups or rank == local:
        per_node = -(-world // max(groups, 1))
    else:
        where = f"rank {rank} with local rank {local} is not on the first node"
        raise ConfigError(f"LOCAL_WORLD_SIZE: missing, but {where}; export the number of ranks on each node")
    node = _whole(env, "GROUP_RANK")[0] if env.get("GROUP_RANK") else rank // per_node
    nodes = groups or -(-world // per_node)
    found = Launch("torchrun", rank, world, local, per_node, node, nodes, env["MASTER_ADDR"], _port(env))
    return _checked(found, "RANK", "WORLD_SIZE", "LOCAL_RANK")


def read_slurm(env: Mapping[str, str]) -> Launch | None:
    """Settings from srun (srun(1), "Output environment variables"); None outside a step of several tasks.

    Raises:
        ConfigError: one line per variable that is missing, cannot be read, or contradicts another.
    """
    if not _is_step(env) or _only_daemons(env):
        return None
    rank, world, local, node = _whole(env, "SLURM_PROCID", _tasks(env), "SLURM_LOCALID", "SLURM_NODEID")
    per_node = _per_node(env, world)
    if node >= len(per_node):
        raise ConfigError(f"SLURM_NODEID: must be less than the number of nodes, {len(per_node)} (got {node})")
    hosts = _first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    addr = env.get("MASTER_ADDR") or (first_host(env[hosts], hosts) if hosts else env.get("SLURM_SRUN_COMM_HOST"))
    if not addr and len(per_node) > 1:
        raise ConfigError("SLURM_STEP_NODELIST: missing; without it export MASTER_ADDR, the host of rank 0")
    port = _port(env)
    if port is None:  # below Linux's ephemeral ports, and different for each step of a job
        job, step = *_whole(env, "SLURM_JOB_ID"), *_whole({"SLURM_STEP_ID": "0", **env}, "SLURM_STEP_ID")
        port = 10_000 + (16 * job + step) % 20_000
    found = Launch("slurm", rank, world, local, per_node[node], node, len(per_node), addr or "127.0.0.1", port)
    return _checked(found, "SLURM_PROCID", _tasks(env), "SLURM_LOCALID")


def _is_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks."""
    number = env.get("SLURM_STEP_ID", "")
    if number.isdecimal() and int(number) > _LAST_STEP:
        return False
    in_step = number or any(name.startswith("SLURM_STEP_") for name in env) or "SLURM_SRUN_COMM_HOST" in env
    return bool(in_step) and "SLURM_PROCID" in env and env.get(_tasks(env)) != "1"


def _tasks(env: Mapping[str, str]) -> str:
    return _first(env, "SLURM_STEP_NUM_TASKS") or "SLURM_NTASKS"


def _only_daemons(env: Mapping[str, str]) -> bool:
    """Whether the step runs mpirun's daemons, whose variables the ranks inherit; srun --mpi=pmi2 sets PMI_RANK too."""
    names = _mpi_names(env)
    if names is None:
        return False
    rank, world = env.get(names[0]), env.get(names[1])
    return names[0] != "PMI_RANK" or (rank, world) != (env["SLURM_PROCID"], env.get(_tasks(env)))


def _per_node(env: Mapping[str, str], world: int) -> list[int]:
    """Number of tasks on each node."""
    name = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name:
        per_node = tasks_per_node(env[name], name)
    else:
        name = _first(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        nodes = max(*_whole(env, name), 1) if name else 1
        per_node = [world // nodes] * nodes
    if sum(per_node) != world:
        raise ConfigError(f"{name}: {sum(per_node)} tasks on {len(per_node)} nodes, but {_tasks(env)} is {world}")
    return per_node


def read_mpi(env: Mapping[str, str]) -> Launch | None:
    """Settings from mpirun of Open MPI, MVAPICH or a PMI launcher; None where none is set.

    Nodes are counted as if ranks filled one after the other, the launchers' default.

    Raises:
        ConfigError: one line per variable that is missing, no whole number, or contradicts another.
    """
    names = _mpi_names(env)
    if names is None:
        return None
    if env.get(names[1]) == "1":
        env = {names[2]: "0", names[3]: "1", **env}
    rank, world, local, per_node = _whole(env, *names)
    per_node = max(per_node, 1)
    nodes = -(-world // per_node)
    addr = env.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else None)
    found = Launch("mpi", rank, world, local, per_node, rank // per_node, nodes, addr, _port(env))
    return _checked(found, *names[:3])


def _mpi_names(env: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """The variables of the launcher that set the most of them."""
    there = [names for names in _MPI if names[0] in env]
    return max(there, key=lambda names: sum(name in env for name in names), default=None)


def read_single(env: Mapping[str, str]) -> Launch:
    """One process, without rendezvous."""
    return Launch("single", 0, 1, 0, 1, 0, 1, env.get("MASTER_ADDR") or "127.0.0.1", _port(env))


def _checked(found: Launch, rank: str, world: str, local: str) -> Launch:
    """The launch, or an error about contradicting variables."""
    problems = []
    if found.rank >= found.world_size:
        problems.append(f"{rank}: must be less than {world}, {found.world_size} (got {found.rank})")
    if found.local_rank >= found.local_world_size:
        ranks = f"the ranks on this node, {found.local_world_size}"
        problems.append(f"{local}: must be less than {ranks} (got {found.local_rank})")
    if found.local_world_size > found.world_size:
        problems.append(
            f"{world}: must be at least the ranks on this node, {found.local_world_size} (got {found.world_size})"
        )
    if found.node >= found.nodes:
        problems.append(f"{rank}: rank {found.rank} would be on node {found.node} of {found.nodes}")
    if problems:
        raise ConfigError(problems)
    return found


def _first(env: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set; "" if none is."""
    return next((name for name in names if env.get(name)), "")


def _whole(env: Mapping[str, str], *names: str) -> list[int]:
    """Required variables, as whole numbers."""
    there = [name for name in names if env.get(name, "").strip()]
    problems = []
    for name in names:
        text = env.get(name, "").strip()
        if not text:
            why = f", but {there[0]} is set; set both, or neither" if there else "; set it"
            problems.append(f"{name}: missing{why}")
        elif not text.isdecimal():
            problems.append(f"{name}: expected a whole number of 0 or more (got {text[:40]!r})")
    if problems:
        raise ConfigError(problems)
    return [int(env[name]) for name in names]


def _port(env: Mapping[str, str]) -> int | None:
    if not env.get("MASTER_PORT"):
        return None
    (port,) = _whole(env, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT: expected a port from 1 to 65535 (got {port})")
    return port


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Slurm's short form with one entry per node (sbatch(1), SLURM_TASKS_PER_NODE).

    >>> tasks_per_node("8(x2),4")
    [8, 8, 4]

    Raises:
        ConfigError: it is not a list of tasks in this form.
    """
    found = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip()) for part in text.split(",")]
    if None in found:
        raise ConfigError(f"{name}: expected tasks by node such as 8(x2),4 (got {text[:40]!r})")
    return list(chain.from_iterable(repeat(int(part[1]), int(part[2] or 1)) for part in found if part))


def first_host(nodelist: str, name: str = "SLURM_STEP_NODELIST") -> str:
    """The first host of Slurm's short form; `scontrol show hostnames` would list all.

    >>> first_host("node[003-008,12],login1")
    'node003'

    Raises:
        ConfigError: it is not a list of hosts in this form.
    """
    found = re.match(r"\s*((?:[^\s,\[\]]|\[[^\s\[\]]+\])+)\s*(?:,|$)", nodelist)
    if found is None:
        raise ConfigError(f"{name}: expected hosts such as node[003-008,12] (got {nodelist[:40]!r})")
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", found[1])
