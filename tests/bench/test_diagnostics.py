"""The header of a results file: every fact is there, and none of them is needed to get the others."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime

import pytest
from bench.launch import ROOT

import steptime
from steptime.bench import diagnostics as module
from steptime.bench.diagnostics import diagnostics, text
from steptime.bench.world import find, start

KEYS = {
    *("argv", "cwd", "host", "user", "date", "git", "steptime", "python", "platform", "world", "torch", "gpus"),
    *("nvidia_smi", "driver", "cpu", "memory_bytes", "slurm", "environment", "packages", "seed", "config"),
}


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A folder outside git on a machine without tools, names or a GPU driver."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("HOSTNAME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_every_fact_is_there():
    import torch

    found = diagnostics(start(find({}), "cpu"), {"model": "tiny"}, seed=1889)
    assert found.keys() == KEYS
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"].keys() >= {"cuda", "cudnn", "nccl", "threads"}
    assert found["steptime"]["version"] == steptime.__version__
    assert (found["seed"], found["config"]) == (1889, {"model": "tiny"})
    assert found["world"]["device"] == "cpu"
    assert found["cpu"]["model"]
    assert found["cpu"]["cores"] >= found["cpu"]["usable_cores"] >= 1
    assert found["memory_bytes"] > 2**28
    assert found["packages"]["torch"].startswith(torch.__version__.partition("+")[0])
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert 0 <= age.total_seconds() < 600
    json.dumps(found, allow_nan=False)


def test_outside_git_without_tools_and_names(bare):
    found = diagnostics(None)
    assert found.keys() == KEYS
    assert found["git"] is None
    assert found["nvidia_smi"] == []
    assert found["cwd"] == str(bare)
    assert found["host"]
    assert found["world"] is None
    json.dumps(found, allow_nan=False)


def test_a_folder_that_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = diagnostics(None)
    assert found["cwd"] is None
    assert found["git"] is None


def test_the_commit_of_the_folder_and_whether_it_has_changes(monkeypatch, tmp_path):
    def git(*args):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    monkeypatch.chdir(tmp_path)
    head = git("rev-parse", "HEAD").strip()
    assert diagnostics(None)["git"] == {"commit": head, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert diagnostics(None)["git"] == {"commit": head, "dirty": True}


def test_the_package_has_a_commit_only_as_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(steptime, "__file__", str(tmp_path / "steptime" / "__init__.py"))
    assert diagnostics(None)["steptime"] == {"version": steptime.__version__, "git": None}
    monkeypatch.setattr(steptime, "__file__", str(ROOT / "steptime" / "__init__.py"))
    assert (diagnostics(None)["steptime"]["git"] is not None) == (ROOT / ".git").exists()


def test_nvidia_smi_and_the_driver_where_they_are(bare):
    """A stand-in for the tool; torch's collect_env leaves the devices' numbers out."""
    tool = bare / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)";; *) echo "| Driver Version: 570.86.15 |";; esac\n'
    )
    tool.chmod(0o755)
    found = diagnostics(None)
    assert found["nvidia_smi"] == ["GPU 0: NVIDIA H200"]
    assert found["driver"] == "570.86.15"
    tool.write_text("#!/bin/sh\nexit 9\n")
    found = diagnostics(None)
    assert (found["nvidia_smi"], found["driver"]) == ([], None)


def test_the_variables_that_matter_and_no_secrets(monkeypatch):
    secrets = {
        "WANDB_API_KEY": "s3cret",
        "HF_TOKEN": "s3cret",
        "SLURM_JWT": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "TORCH_HUB_TOKEN": "s3cret",
    }
    matter = {"OMP_NUM_THREADS": "3", "NCCL_ALGO": "Ring", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    matter |= {"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name, value in (secrets | matter | {"SLURM_JOB_ID": "12", "SLURM_STEP_NODELIST": "n[1-2]"}).items():
        monkeypatch.setenv(name, value)
    found = diagnostics(None)
    assert found["environment"].items() >= matter.items()
    assert found["slurm"].items() >= {"SLURM_JOB_ID": "12", "SLURM_STEP_NODELIST": "n[1-2]"}.items()
    assert "s3cret" not in json.dumps(found)


def test_as_text():
    lines = text(diagnostics(start(find({}), "cpu"), {"model": "tiny"}, seed=0)).splitlines()
    assert "world: rank 0 of 1, local rank 0, node 0 of 1, cpu, no process group, a single process" in lines
    assert "seed: 0" in lines
    assert f"steptime: version {steptime.__version__}" in [line.partition(", git")[0] for line in lines]
    assert not [line for line in lines if line.endswith(": ") or "None" in line or "tiny" in line]


def test_a_tool_that_hangs_is_given_up(monkeypatch, bare):
    tool = bare / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    assert diagnostics(None)["nvidia_smi"] == []
