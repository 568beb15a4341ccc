"""Launch commands as text: what they say, that a shell can read them, and that torchrun takes their options."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from bench.launch import ROOT

from steptime.base.config import ConfigError
from steptime.bench.launch_script import emit
from steptime.bench.phases import job_start_s
from steptime.hardware.machine import Machine
from steptime.job.job import Job

PATH = ROOT / "configs" / "llama3_8b_fsdp.yaml"


def job_on(devices, per_node=8, **machine):
    hardware = Machine.load("dgx-h100", {"devices_per_node": per_node, "tiers.0.size": per_node, **machine})
    plan = Job.load(PATH)
    return plan.replace(parallelism={"tp": 1, "pp": 1, "dp": devices}, **{"data.gbs": devices}, hardware=hardware)


SLURM = r"""#!/bin/bash
#SBATCH --job-name=steptime-bench
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# remove one # if the cluster requires these:
##SBATCH --partition=NAME
##SBATCH --account=NAME
##SBATCH --time=01:00:00

# 64 devices on 8 nodes of dgx-h100; one torchrun per node starts its 8 ranks
set -euo pipefail
echo "Job started at: $(date -u +%Y-%m-%d-%H%M%S) on $(hostname)"
STEPTIME_JOB_STARTED=$(date +%s.%N)
export STEPTIME_JOB_STARTED

# the environment with steptime[bench], if it is not the one of sbatch:
# source /path/to/venv/bin/activate

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((10000 + SLURM_JOB_ID % 20000)) # the same on every node, different for each job

srun --kill-on-bad-exit=1 --cpu-bind=none torchrun \
    --nnodes=8 \
    --nproc-per-node=8 \
    --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="${nodes[0]}:$port" \
    -m steptime.bench plan.yaml --out results
"""

TORCHRUN = r"""# 64 devices on 8 nodes of dgx-h100; run on each of them, with HEAD_NODE the name of the first
STEPTIME_JOB_STARTED=$(date +%s) torchrun \
    --nnodes=8 \
    --nproc-per-node=8 \
    --rdzv-backend=c10d \
    --rdzv-id=steptime-bench \
    --rdzv-endpoint="${HEAD_NODE:?the name of the first node}:29500" \
    -m steptime.bench plan.yaml
"""

ONE_NODE = r"""# 2 devices on 1 node of dgx-h100; run there
STEPTIME_JOB_STARTED=$(date +%s) torchrun \
    --standalone \
    --nproc-per-node=2 \
    -m steptime.bench plan.yaml
"""


def test_texts():
    assert emit("slurm", job_on(64), "plan.yaml", arguments=["--out", "results"]) == SLURM
    assert emit("torchrun", job_on(64), "plan.yaml") == TORCHRUN
    assert emit("torchrun", job_on(2), "plan.yaml") == ONE_NODE


def test_a_config_of_the_repository():
    text = emit("slurm", Job.load(PATH), str(PATH))
    assert "#SBATCH --nodes=8\n" in text
    assert str(PATH) in text


def test_part_of_a_node():
    text = emit("slurm", job_on(4), "plan.yaml")
    assert "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "--nproc-per-node=4" in text


def test_without_gpus_slurm_is_asked_for_none():
    assert "gpus" not in emit("slurm", job_on(16), "plan.yaml", gpus=False)


def run(script, tmp_path, name="plan.yaml"):
    """The script in a shell where every tool it calls is a stand-in: the command line that torchrun gets, and its environment."""
    tools = {
        "scontrol": 'printf "nid003\\nnid004\\n"',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "torchrun": 'printf "%s\\n" "$STEPTIME_JOB_STARTED" "$@"',
    }
    for tool, body in tools.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / tool).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "54321", "SLURM_JOB_NODELIST": "nid[003-004]"}
    return subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
@pytest.mark.parametrize("devices", [1, 8, 64])
def test_a_shell_can_read_it(kind, devices):
    text = emit(kind, job_on(devices), "a plan's; rm -rf $HOME `x`.yaml")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert all(len(line) < 120 for line in text.splitlines())


def test_what_torchrun_gets_on_slurm(tmp_path):
    odd = "a plan's; $HOME `x`.yaml"
    done = run(emit("slurm", job_on(16), odd, arguments=["--set", "data.gbs=16"]), tmp_path)
    assert done.returncode == 0, done.stderr
    stamp, started, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"Job started at: \d{4}-\d\d-\d\d-\d{6} on \S+", stamp)
    at = job_start_s({"STEPTIME_JOB_STARTED": started})
    assert at is not None
    written = job_start_s({"STEPTIME_JOB_STARTED": stamp.split()[3]})
    assert written is not None
    assert 0 <= at - written < 60  # both say the same, in UTC
    # 10000 + 54321 % 20000 = 24321
    assert rest == [
        *("--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d", "--rdzv-id=54321", "--rdzv-endpoint=nid003:24321"),
        *("-m", "steptime.bench", odd, "--set", "data.gbs=16"),
    ]


def test_a_command_for_several_nodes_asks_for_the_first(tmp_path):
    done = run(emit("torchrun", job_on(16), "plan.yaml"), tmp_path)
    assert done.returncode != 0
    assert "HEAD_NODE: the name of the first node" in done.stderr


def test_torchrun_takes_these_options():
    """Its own parser, none of them unknown."""
    from torch.distributed.run import get_args_parser

    for text in (TORCHRUN, ONE_NODE):
        whole = text.replace("\\\n", " ").replace("${HEAD_NODE:?the name of the first node}", "head")
        words = shlex.split(whole, comments=True)
        found = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert found.module
        assert (found.training_script, found.training_script_args) == ("steptime.bench", ["plan.yaml"])


def test_no_deprecated_launcher_and_nothing_invented():
    text = emit("slurm", job_on(64), "plan.yaml")
    assert "torch.distributed.launch" not in text
    assert not re.search(r"^#SBATCH --(partition|account|qos|time)", text, re.MULTILINE)


def test_a_machines_name_stays_in_its_comment(tmp_path):
    text = emit("slurm", job_on(8, name="odd\nrm -rf important"), "plan.yaml")
    assert "# 8 devices on 1 node of odd rm -rf important; one torchrun" in text


@pytest.mark.parametrize(
    ("kind", "devices", "path", "message"),
    [
        ("pbs", 8, "plan.yaml", r"--emit: unknown kind \(got 'pbs'\); valid: slurm, torchrun"),
        ("slrum", 8, "plan.yaml", r"did you mean 'slurm'"),
        ("slurm", 8, "-", r"--emit: a plan from standard input cannot be opened"),
        (
            "slurm",
            12,
            "plan.yaml",
            r"--emit: 12 devices is not a multiple of 8 per node \(dgx-h100\); change parallelism",
        ),
    ],
)
def test_what_cannot_be_emitted(kind, devices, path, message):
    with pytest.raises(ConfigError, match=message):
        emit(kind, job_on(devices), path)


def test_a_path_is_no_option():
    assert "steptime.bench ./--plan.yaml" in emit("torchrun", job_on(8), "--plan.yaml")
