"""Scripts that start a config of Primus: the config that EXP names, the script's options over it, its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.read import read
from steptime.launch.reading import to_job

MEGATRON = """modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      micro_batch_size: 4
      global_batch_size: 512
      seq_length: ${SEQ:8192}
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 5
"""
TITAN = """modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      training: {local_batch_size: 4, seq_len: 8192, mock_data: true}
"""
SETS = {"hardware.node_type": "mi300x-node"}


def job_of(folder: Path, config: str, script: str, **sets: int) -> Job:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "job.yaml").write_text(config)
    (folder / "run.sh").write_text(f"#!/bin/bash\n{script}\n")
    said = SETS | sets
    return to_job(read("auto", str(folder / "run.sh"), said), said)


def test_a_script_puts_its_options_over_its_config(tmp_path: Path) -> None:
    """AMD-AGI/Primus examples/run_pretrain.sh: NNODES (1), GPUS_PER_NODE 8; --recompute_method null unsets it."""
    script = """export NNODES=2 SEQ=4096
export EXP=configs/job.yaml
bash ./examples/run_slurm_pretrain.sh --micro_batch_size 2 --global_batch_size 64 \\
  --recompute_granularity selective --recompute_method null --recompute_num_layers null 2>&1 | tee log.txt"""
    job = job_of(tmp_path, MEGATRON, script)
    assert (job.parallelism.devices, job.data.gbs, job.data.microbatch_sz, job.data.seqlen) == (16, 64, 2, 4096)
    assert job.performance.recompute is not None
    assert job.performance.recompute.granularity == "selective"
    assert "launched on 2 nodes with 8 processes each" in job.notes


def test_options_by_section_and_devices_that_the_user_gives(tmp_path: Path) -> None:
    script = "EXP=configs/job.yaml bash examples/run_pretrain.sh --training.local_batch_size 2"
    job = job_of(tmp_path, TITAN, script)
    assert (job.parallelism.devices, job.data.microbatch_sz, job.data.gbs) == (8, 2, 16)
    assert job_of(tmp_path, TITAN, script, devices=16).parallelism.devices == 16


def test_options_of_a_job_after_pretraining(tmp_path: Path) -> None:
    """primus/train.py puts options into the trainer that the config has, of either name."""
    config = MEGATRON.replace("pre_trainer:", "post_trainer:", 1)
    job = job_of(tmp_path, config, "EXP=configs/job.yaml bash examples/run_pretrain.sh --global_batch_size 64")
    assert (job.data.gbs, job.data.microbatch_sz) == (64, 4)
    for modules in ("modules: [1]", "modules:\n  pre_trainer: 3"):
        with pytest.raises(ConfigError, match=r"configs/job\.yaml: modules\.pre_trainer is missing"):
            job_of(tmp_path, modules, "EXP=configs/job.yaml bash examples/run_pretrain.sh --global_batch_size 64")


@pytest.mark.parametrize("option", ["--micro_batch_size $MBS", "--micro_batch_size=$MBS"])
def test_an_option_without_a_value_is_asked_for(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=r"--micro_batch_size: \$MBS has no value; write MBS="):
        job_of(tmp_path, MEGATRON, f"EXP=configs/job.yaml bash examples/run_pretrain.sh {option}")


def test_a_key_that_is_there_twice_counts_as_the_last(tmp_path: Path) -> None:
    assert (
        job_of(tmp_path, f"{MEGATRON}      micro_batch_size: 1\n", "EXP=configs/job.yaml sh run_pretrain.sh").data.gbs
        == 512
    )


def test_a_script_without_its_config_says_so(tmp_path: Path) -> None:
    for script, told in (
        ("EXP=configs/job.yml sh run_pretrain.sh # configs/job.yaml", "configs/job.yml, which was not found"),
        (
            "EXP=configs/job.yaml sh run_pretrain.sh --micro_batch_size $MBS",
            r"micro_batch_size: \$MBS has no value; write",
        ),
        ("sh run_pretrain.sh", "starts a config of Primus that is not known"),
    ):
        (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{script}\n")
        with pytest.raises(ConfigError, match=told):
            read("primus", str(tmp_path / "run.sh"), SETS)
