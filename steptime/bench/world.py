"""This process among all processes, and its process group.

How it was launched is the first of these that applies; `environment` reads each:

1. torchrun: RANK, WORLD_SIZE or LOCAL_RANK is set (also by hand). LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE tell the nodes.
2. Slurm: a step (`srun python ...`) of more than one task: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID. Plain
`python` inside an allocation is not a step. A step that only started the daemons of an MPI launcher is MPI's. 3. MPI: Open MPI,
MVAPICH, or a PMI launcher (MPICH, Intel MPI, Cray PALS). 4. single: one process.

MASTER_ADDR and MASTER_PORT are used wherever the user set them. Else Slurm's are the step's first host and a port made from
the job's number, the same on every rank; MPI's are broadcast by mpi4py.

Backend by device: cuda nccl, cpu and mps gloo, as torch.distributed.get_default_backend_for_device. The device is bound
before the group is made, so that nccl's communicators and contexts land on it.
"""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.base.config import ConfigError, near
from steptime.base.words import counted
from steptime.bench.environment import Launch, Method, read_mpi, read_single, read_slurm, read_torchrun

if TYPE_CHECKING:
    import torch

DEVICES = ("cuda", "mps", "cpu")
"""In order of preference."""


class World(NamedTuple):
    """This process among all, once started."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: int
    device: torch.device
    backend: str | None
    """None: no process group."""
    method: Method

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def line(self) -> str:
        """As one line: "rank 0 of 2, local rank 0, node 0 of 1, cpu, gloo, by torchrun"."""
        how = "a single process" if self.method == "single" else f"by {self.method}"
        return (
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank}, node {self.node} of {self.nodes}, "
            f"{self.device}, {self.backend or 'no process group'}, {how}"
        )


# --- what the environment says -------------------------------------------------------------------------------------------


def find(env: Mapping[str, str] = os.environ) -> Launch:
    """How this process was launched, from its environment only.

    Raises:
        ConfigError: one line per variable that is missing, no whole number, or contradicts another.
    """
    return read_torchrun(env) or read_slurm(env) or read_mpi(env) or read_single(env)


# --- the process group ---------------------------------------------------------------------------------------------------


def start(launch: Launch, device_name: str | None = None, *, timeout_s: float = 600.0) -> World:
    """Bind the device (the first of `DEVICES` that torch has, if not named) and, where there are several processes, join them.

    `timeout_s`: how long to wait for the other ranks, here and in each collective.

    Raises:
        ConfigError: the device does not exist, the port is in use, rank 0 does not answer, the ranks cannot agree on an address.
    """
    device = _device(launch, device_name)
    backend = None
    if launch.world_size > 1:
        backend = _backend(device)
        _join(_agreed(launch), device, backend, timedelta(seconds=timeout_s))
    where = (launch.rank, launch.world_size, launch.local_rank, launch.node, launch.nodes)
    return World(*where, device, backend, launch.method)


def finish(world: World) -> None:
    """Leave the process group, if there is one; every rank must."""
    if world.backend is not None:
        import torch.distributed as dist

        dist.destroy_process_group()


def _device(launch: Launch, name: str | None) -> torch.device:
    """The device of this rank, bound where there are several."""
    import torch

    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    several = launch.world_size > 1
    if name is None:
        name = next(kind for kind in DEVICES if has[kind] and not (kind == "mps" and several))
    if name not in has:
        raise ConfigError(f"device: unknown (got {name!r}){near(name, DEVICES)}")
    if not has[name]:
        raise ConfigError(f"device: torch {torch.__version__} finds no {name} device; use cpu, or omit --device")
    if name == "mps" and several:
        raise ConfigError(f"device: mps runs one process only (got {launch.world_size}); use cpu")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", _gpu(launch, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _gpu(launch: Launch, visible: int) -> int:
    """The GPU of a rank among the visible ones; Slurm and MPI may show each rank only its own (--gpus-per-task)."""
    if launch.local_rank < visible:
        return launch.local_rank
    if visible == 1 and launch.method in {"slurm", "mpi"}:
        return 0
    ranks = f"{counted(launch.local_world_size, 'rank')} on this node, but {counted(visible, 'visible GPU')}"
    raise ConfigError(f"device: {ranks}; start at most one rank per GPU, or use cpu")


def _backend(device: torch.device) -> str:
    import torch.distributed as dist

    backend = dist.get_default_backend_for_device(device)
    if backend == "nccl" and not dist.is_nccl_available():
        backend = "gloo"
        warnings.warn("this torch has no nccl: gloo copies GPU data through host memory", stacklevel=3)
    return backend


def _join(launch: Launch, device: torch.device, backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist

    options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    where = f"{launch.master_addr}:{launch.master_port}"
    try:
        store = _store(launch, timeout)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout, **options
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).partition("\n")[0]
        advice = "check that rank 0 runs there and that no firewall blocks the port"
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: the ranks cannot connect at {where} ({reason}); {advice}"
        ) from error


def _store(launch: Launch, timeout: timedelta) -> Any:
    """The rendezvous of the ranks: torchrun's agent has one, else rank 0 opens one."""
    import torch.distributed as dist

    stores: Any = dist  # whose stubs do not export them
    from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = launch.rank == 0 and not from_agent
    if opens:
        _check_free(launch.master_port or 0)
    return stores.TCPStore(launch.master_addr, launch.master_port, launch.world_size, is_master=opens, timeout=timeout)


def _check_free(port: int) -> None:
    """Whether this host can listen on a port: torch's own error is a page of C++."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind(("", port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            fix = f"export another one, such as MASTER_PORT={_free_port()}"
            raise ConfigError(
                f"MASTER_PORT: {port} {why} on {socket.gethostname()}, the host of rank 0; {fix}"
            ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _agreed(launch: Launch) -> Launch:
    """The launch with an address and a port: under MPI rank 0 broadcasts it; values from the user are kept."""
    if launch.master_addr and launch.master_port:
        return launch
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # not installed, or its MPI library is not
        why = f"mpi4py could broadcast them, but: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"MASTER_ADDR, MASTER_PORT: export both for all ranks ({why})") from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != launch.world_size:
        size = f"{comm.Get_size()} of {launch.world_size} ranks"
        raise ConfigError(
            f"mpi4py: sees {size}; it was built for a different MPI: export MASTER_ADDR and MASTER_PORT instead"
        )
    mine = (launch.master_addr or socket.gethostname(), launch.master_port or _free_port())
    addr, port = comm.bcast(mine, root=0)
    return launch._replace(master_addr=addr, master_port=port)
