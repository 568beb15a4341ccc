"""Who a process is: every launcher's environment faked, and real ranks by hand; by torchrun they are in test_rank_log.py."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
from bench.launch import fork

from steptime.base.config import ConfigError
from steptime.bench import world
from steptime.bench.environment import first_host, tasks_per_node
from steptime.bench.world import Launch, find, finish, start

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29512",
}
SLURM = {  # 20 tasks on three nodes: 8, 8, 4; this is the second of the last node
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "17",
    "SLURM_NTASKS": "20",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[003-004,12]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_SRUN_COMM_HOST": "login1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SINGLE = Launch("single", 0, 1, 0, 1, 0, 1, "127.0.0.1", None)


def without(env, *names):
    return {key: value for key, value in env.items() if key not in names}


# --- each launcher ---


def test_torchrun():
    assert find(TORCHRUN) == Launch("torchrun", 9, 16, 1, 8, 1, 2, "head", 29512)


def test_torchrun_by_hand_on_one_node():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert find(env) == Launch("torchrun", 1, 2, 1, 2, 0, 1, "localhost", 29500)


def test_one_rank_needs_no_address():
    assert find({"RANK": "0", "WORLD_SIZE": "1"}) == Launch("torchrun", 0, 1, 0, 1, 0, 1, "127.0.0.1", None)


def test_torchrun_comes_before_slurm_and_slurm_before_mpi():
    assert find(SLURM | TORCHRUN).method == "torchrun"
    pmi2 = {"PMI_RANK": "17", "PMI_SIZE": "20"}  # as srun --mpi=pmi2 sets them
    assert find(SLURM | pmi2).method == "slurm"


def test_slurm_with_uneven_nodes():
    # port: 10000 + (16 * 1234 + 0) % 20000 = 29744; the host is the step's first, not that of srun
    assert find(SLURM) == Launch("slurm", 17, 20, 1, 4, 2, 3, "node003", 29744)


def test_two_steps_of_a_job_meet_at_different_ports():
    assert find(SLURM).master_port != find(SLURM | {"SLURM_STEP_ID": "1"}).master_port


def test_slurm_keeps_the_address_and_port_that_the_user_gave():
    found = find(SLURM | {"MASTER_ADDR": "ib-node003", "MASTER_PORT": "4242"})
    assert (found.master_addr, found.master_port) == ("ib-node003", 4242)


def test_slurm_without_tasks_per_node_or_node_list():
    env = without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST") | {"SLURM_NNODES": "4"}
    assert find(env)[:8] == ("slurm", 17, 20, 1, 5, 2, 4, "login1")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 in an allocation of 20 tasks
    ],
)
def test_a_slurm_step_of_one_process_is_single(change):
    assert find(SLURM | change) == SINGLE


def test_plain_python_in_an_allocation_is_single():
    env = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert find(env | {"SLURM_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)"}) == SINGLE


def test_open_mpi():
    assert find(OPENMPI) == Launch("mpi", 5, 8, 1, 4, 1, 2, None, None)
    assert find(OPENMPI | {"MASTER_ADDR": "head", "MASTER_PORT": "4242"})[7:] == ("head", 4242)


def test_mpirun_inside_a_slurm_step_is_mpi():
    """Its daemons are the step's tasks: two of them here, for eight ranks."""
    daemons = SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert find(daemons | OPENMPI).method == "mpi"
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert find(daemons | hydra) == Launch("mpi", 5, 8, 1, 4, 1, 2, None, None)


@pytest.mark.parametrize(
    "env",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ],
)
def test_other_mpi_launchers(env):
    assert find(env) == Launch("mpi", 1, 2, 1, 2, 0, 1, "127.0.0.1", None)


def test_a_single_process():
    assert find({}) == SINGLE
    assert find({"MASTER_PORT": "4242"}).master_port == 4242


# --- bad environments ---


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE: missing, but RANK is set", "LOCAL_RANK: missing, but RANK is set"]),
        ({"WORLD_SIZE": "2"}, ["RANK: missing", "LOCAL_RANK: missing"]),
        (TORCHRUN | {"RANK": "16"}, ["RANK: must be less than WORLD_SIZE, 16 (got 16)"]),
        (TORCHRUN | {"LOCAL_RANK": "8"}, ["LOCAL_RANK: must be less than the ranks on this node, 8 (got 8)"]),
        (TORCHRUN | {"RANK": "one"}, ["RANK: expected a whole number of 0 or more (got 'one')"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK: expected a whole number of 0 or more (got '-1')"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT: expected a port from 1 to 65535 (got 70000)"]),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), ["MASTER_ADDR: missing", "MASTER_PORT: missing"]),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), ["LOCAL_WORLD_SIZE: missing, but rank 9"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "32"}, ["WORLD_SIZE: must be at least the ranks on this node, 32 (got 16)"]),
        (TORCHRUN | {"GROUP_RANK": "2"}, ["RANK: rank 9 would be on node 2 of 2"]),
        (SLURM | {"SLURM_PROCID": "20"}, ["SLURM_PROCID: must be less than SLURM_NTASKS, 20 (got 20)"]),
        (SLURM | {"SLURM_NODEID": "3"}, ["SLURM_NODEID: must be less than the number of nodes, 3 (got 3)"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, ["SLURM_STEP_TASKS_PER_NODE: 24 tasks on 3 nodes, but SLURM"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8x2"}, ["SLURM_STEP_TASKS_PER_NODE: expected tasks by node such as"]),
        (SLURM | {"SLURM_STEP_NODELIST": "node[1-"}, ["SLURM_STEP_NODELIST: expected hosts such as"]),
        (without(SLURM, "SLURM_LOCALID"), ["SLURM_LOCALID: missing, but SLURM_PROCID is set"]),
        (without(SLURM, "SLURM_JOB_ID"), ["SLURM_JOB_ID: missing"]),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_SRUN_COMM_HOST"), ["SLURM_STEP_NODELIST: missing; without it"]),
        (
            without(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
            ["OMPI_COMM_WORLD_SIZE: missing, but OMPI_COMM_WORLD_RANK is set"],
        ),
    ],
)
def test_a_bad_environment_is_told_line_by_line(env, lines):
    with pytest.raises(ConfigError) as caught:
        find(env)
    assert len(caught.value.problems) == len(lines)
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert problem.startswith(line)


@pytest.mark.parametrize(
    ("text", "expected"), [("8(x2)", [8, 8]), ("8(x2),4", [8, 8, 4]), ("1", [1]), ("2,3(x1),4", [2, 3, 4])]
)
def test_tasks_per_node(text, expected):
    assert tasks_per_node(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[003-008,12]", "node003"),
        ("node[003-008,12],other7", "node003"),
        ("nid001,nid[002-004]", "nid001"),
        ("rack[2,4]-node[07-09]", "rack2-node07"),
        ("gpu-17.cluster.edu", "gpu-17.cluster.edu"),
        ("[10-12]", "10"),
    ],
)
def test_the_first_host(text, expected):
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", "node[1-3", "node]1", "node[]", "a b"])
def test_no_host(text):
    with pytest.raises(ConfigError, match="expected hosts"):
        first_host(text)


# --- devices ---


def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match=r"device: unknown.*did you mean 'cuda'"):
        start(SINGLE, "cuds")
    several = SINGLE._replace(world_size=2)
    with pytest.raises(ConfigError, match=r"device: torch .* finds no mps device|mps runs one process only"):
        start(several, "mps")


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_it_is_shown():
    launch = find(SLURM)  # local rank 1 of 4
    assert world._gpu(launch, visible=4) == 1
    assert world._gpu(launch, visible=1) == 0
    with pytest.raises(ConfigError, match="8 ranks on this node, but 1 visible GPU; start at most one rank per GPU"):
        world._gpu(find(TORCHRUN), visible=1)


def test_backends_by_device(monkeypatch):
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert [world._backend(torch.device(kind)) for kind in ("cuda", "cpu", "mps")] == ["nccl", "gloo", "gloo"]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.warns(UserWarning, match="no nccl: gloo copies GPU data"):
        assert world._backend(torch.device("cuda")) == "gloo"


def test_the_gpu_is_bound_before_the_group_is_made(monkeypatch):
    """And nccl is told which one it is."""
    import torch
    import torch.distributed as dist

    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("bind", str(device))))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **kw: calls.append((backend, str(kw["device_id"]), kw["rank"]))
    )
    monkeypatch.setattr(world, "_store", lambda launch, timeout: None)
    found = start(find(TORCHRUN))
    assert calls == [("bind", "cuda:1"), ("nccl", "cuda:1", 9)]
    assert found.line == "rank 9 of 16, local rank 1, node 1 of 2, cuda:1, nccl, by torchrun"


# --- the group ---


def test_one_process_makes_no_group():
    import torch.distributed as dist

    alone = start(SINGLE, "cpu")
    assert alone.line == "rank 0 of 1, local rank 0, node 0 of 1, cpu, no process group, a single process"
    assert alone.is_root
    assert not dist.is_initialized()
    finish(alone)


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = find(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "MASTER_PORT": str(port)})
        with pytest.raises(ConfigError) as caught:
            start(launch, "cpu")
    (problem,) = caught.value.problems
    assert problem.startswith(f"MASTER_PORT: {port} is in use on {socket.gethostname()}, the host of rank 0; export")


def test_nobody_at_the_address_is_one_line():
    with socket.socket() as closed:
        closed.bind(("", 0))
        port = closed.getsockname()[1]
    launch = find(SLURM | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with pytest.raises(ConfigError) as caught:
        start(launch, "cpu", timeout_s=1.0)
    (problem,) = caught.value.problems
    assert problem.startswith(f"MASTER_ADDR, MASTER_PORT: the ranks cannot connect at 127.0.0.1:{port} (")


class Comm:
    """mpi4py's, of rank 0."""

    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size

    def bcast(self, value, root):
        assert root == 0
        return value


def test_mpi_ranks_agree_on_what_the_user_left_out(monkeypatch):
    launch = find(OPENMPI)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=Comm(8))))
    found = world._agreed(launch)
    assert found.master_addr == socket.gethostname()
    assert found.master_port
    kept = world._agreed(find(OPENMPI | {"MASTER_PORT": "4242"}))
    assert (kept.master_addr, kept.master_port) == (socket.gethostname(), 4242)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=Comm(1))))
    with pytest.raises(ConfigError, match="mpi4py: sees 1 of 8 ranks"):
        world._agreed(launch)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"export both for all ranks \(mpi4py could broadcast them, but: "):
        world._agreed(launch)


SCRIPT = """
import sys, torch, torch.distributed as dist
from steptime.bench.world import find, finish, start

world = start(find(), "cpu")
ranks = torch.tensor([float(world.rank)])
if world.backend:
    dist.all_reduce(ranks)
sys.stdout.write(f"{world.line} sum {ranks.item()}\\n")  # at once: two ranks write to one pipe
sys.stdout.flush()
finish(world)
"""


def test_two_ranks_by_slurm(tmp_path):
    """The variables that srun -n 2 sets, by hand: the ranks meet at the port that the user gave."""
    script = tmp_path / "who.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
    ranks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    done = fork(script, ranks=ranks)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 2, local rank {rank}, node 0 of 1, cpu, gloo, by slurm sum 1.0" for rank in range(2)
    ]
