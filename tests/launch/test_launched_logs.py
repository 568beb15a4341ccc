"""Logs that begin with the command of DeepSpeed's launcher."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from time import process_time

import pytest

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import WorldSize
from steptime.launch.logs.lines import said
from steptime.launch.logs.printed_config import started_by
from steptime.validation.logged import read_run

MACHINE = ["hardware.node_type=dgx-h100"]
ZERO = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}  # fmt: skip
BARS = """\
  1%|1         | 1/100 [00:05<08:15,  5.00s/it]
  2%|2         | 2/100 [00:07<06:00,  3.60s/it]
  3%|3         | 3/100 [00:10<05:00,  3.00s/it]
  4%|4         | 4/100 [00:13<04:50,  2.00s/it]
"""


def log(hosts, more=""):
    """As deepspeed/launcher/runner.py prints it."""
    world = urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    return (
        "[2024-07-08 05:14:51,770] [INFO] [runner.py:568:main] cmd = /usr/bin/python3 -u -m deepspeed.launcher.launch "
        f"--world_info={world} --master_addr=node-1 --master_port=29500 --enable_each_rank_log=None run.py "
        "--model_name_or_path meta-llama/Llama-2-7b-hf --deepspeed zero.json --bf16 True --per_device_train_batch_size 2 "
        f"--gradient_accumulation_steps 4 --model_max_length 1024 --gradient_checkpointing True {more}\n{BARS}"
    )


def run(tmp_path, text):
    (tmp_path / "zero.json").write_text(json.dumps(ZERO), encoding="utf-8")
    (tmp_path / "train.log").write_text(text, encoding="utf-8")
    return read_run([str(tmp_path / "train.log")], MACHINE)


def test_the_job_is_that_of_the_command(tmp_path):
    """Two hosts of 8 processes: 16 ranks of 2 sequences, accumulated 4 times: 128."""
    found = run(tmp_path, log({"node-1": [*range(8)], "node-2": [*range(8)]}))
    assert (found.job.parallelism.dp, found.job.parallelism.zero_level) == (16, 2)
    assert (found.job.data.gbs, found.job.data.seqlen) == (128, 1024)
    assert found.steady.step_s == pytest.approx(2.5)


@pytest.mark.parametrize("hosts", [{"a": [0, 1], "b": [0]}, {}])
def test_hosts_with_different_numbers_of_processes_are_no_job(tmp_path, hosts):
    with pytest.raises(ConfigError, match="with --plan FILE"):
        run(tmp_path, log(hosts))


def test_a_word_that_is_no_world_is_no_command():
    assert started_by(log({"a": [0]}).replace("--world_info=", "--world_info=x")) == ""


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("[titan] 2025-10-28 - root - INFO - Building 2-D device mesh with ['pp', 'dp_shard'], [4, 2]", 8),
        # pytorch/torchtitan torchtitan/distributed/parallel_dims.py, build_mesh: ep is made of the others, 2 x 4 x 2 x 8 = 128
        ("Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=4, cp=2, tp=8, ep=4, etp=1", 128),
        ("[launch.py:164:main] dist_world_size=16", 16),
        (
            "using world size: 32, data-parallel-size: 4, tensor-model-parallel size: 2, pipeline-model-parallel size: 4",
            32,
        ),
    ],
)
def test_the_processes_that_a_log_states(line, size):
    assert list(said(line.encode())) == [WorldSize(size)]


def test_a_launch_file_beside_a_log_has_the_log_s_devices(tmp_path):
    """The config has none; the user's number is over the log's."""
    (tmp_path / "train.log").write_text(f"[launch.py:164:main] dist_world_size=16\n{BARS}", encoding="utf-8")
    (tmp_path / "zero.json").write_text(json.dumps(ZERO), encoding="utf-8")
    sets = [*MACHINE, "model=llama2-7b", "data.seqlen=1024"]
    paths, plan = [str(tmp_path / "train.log")], str(tmp_path / "zero.json")
    found = read_run(paths, sets, plan=plan)
    assert (found.job.parallelism.dp, found.job.data.gbs) == (16, 128)
    assert read_run(paths, [*sets, "parallelism.dp=8"], plan=plan).job.parallelism.dp == 8


def test_a_launch_file_of_other_devices_than_the_log_s_is_told(tmp_path):
    """Four nodes of 8 in the command, 16 processes in the log: the job that was measured has 16."""
    (tmp_path / "train.log").write_text(f"[launch.py:164:main] dist_world_size=16\n{BARS}", encoding="utf-8")
    flags = "--num-layers 16 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    command = (
        f"torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py {flags} --micro-batch-size 1 --global-batch-size 32"
    )
    (tmp_path / "run.sh").write_text(f"{command} --bf16 --vocab-size 128000\n", encoding="utf-8")
    found = read_run([str(tmp_path / "train.log")], MACHINE, plan=str(tmp_path / "run.sh"))
    assert found.job.parallelism.dp == 16
    assert any("a job of 32 devices; the log states 16" in note for note in found.notes)


def test_the_launcher_s_own_options_are_not_the_program():
    """deepspeed/launcher/runner.py, main: --save_pid has a word of its own, and --module is the program's."""
    text = log({"a": [0]}).replace("run.py", "--module --save_pid 4242 train.run")
    assert started_by(text).startswith("deepspeed --num_nodes 1 --num_gpus 1 --module train.run --model_name_or_path")


@pytest.mark.parametrize("sizes", ["2, , 4", "2 4", "9" * 5000, ", ", ""])
def test_a_mesh_without_sizes_is_none(sizes):
    assert list(said(f"Building 2-D device mesh with ['pp', 'tp'], [{sizes}]".encode())) == []


@pytest.mark.parametrize(
    "line",
    [
        "iter time (s): " + "steps: 1 loss: " * 4000,
        "Building 1-D device mesh with [" * 2000,
        "global_step=1, SamplesPerSec=1.0 " * 2000,
        "tps: " + "step: 1 " * 8000,
    ],
)
def test_a_line_of_repeated_marks_is_read_in_linear_time(line):
    """64 KiB, the longest line that is examined, four times: the patterns look at most some hundred characters ahead."""
    start = process_time()
    for _ in range(4):
        list(said(line.encode()))
    assert process_time() - start < 0.5


def test_a_head_of_repeated_marks_is_read_in_linear_time():
    start = process_time()
    for text in ("cmd = " * 150_000, "cmd = x -m deepspeed.launcher.launch --world_info= " * 18_000):
        assert started_by(text) == ""
    assert process_time() - start < 2.0
