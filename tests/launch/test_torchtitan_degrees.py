"""What torchtitan's readings say of degrees, schedules and functions that make no job that can be counted."""

from __future__ import annotations

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.job_config import read_torchtitan

LLAMA = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 4
"""
DEEPSEEK = LLAMA.replace("llama3", "deepseek_v3").replace("8B", "16B").replace("seq_len = 8192", "seq_len = 4096")
FUNCTIONS = """
def {}() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"))
"""


def problem(text, path="job.toml", sets=None):
    with pytest.raises(ConfigError) as error:
        read_torchtitan(path, text, {}, sets)
    (line,) = error.value.problems
    return line


def test_devices_that_the_user_asks_for_are_those_of_the_job():
    """64 devices where the file shards over 4: 64 ranks of one sequence, and a note that says so; none where both agree."""
    sets = HARDWARE | {"devices": 64}
    found = read_torchtitan("job.toml", LLAMA, {}, sets)
    assert (found.config["parallelism"]["dp"], found.config["data"]["gbs"]) == (64, 64)
    assert "number of devices set to 64, while the file starts 4" in found.config["notes"]
    assert to_job(found, sets).parallelism.devices == 64
    same = read_torchtitan("job.toml", LLAMA, {}, HARDWARE | {"devices": 4})
    assert "notes" not in same.config


def test_the_devices_in_the_name_of_a_config_go_before_those_of_a_comment():
    """A copy of the example for 64 devices keeps its comment; either number is told as assumed, and the user's goes before."""
    text = "# NOTE: this toml config is a preset for 64 A100 GPUs.\n" + LLAMA.replace("degree = 4", "degree = -1")
    for name, devices, by in (
        ("llama3_8b.toml", 64, "a comment of the file"),
        ("llama3_8b_16_gpus.toml", 16, "the name of the file"),
        ("runs/llama3_8b-32xb200-8k.toml", 32, "the name of the file"),
    ):
        found = read_torchtitan(name, text, {}, HARDWARE)
        assert found.config["parallelism"]["dp"] == devices
        (note,) = found.config["notes"]
        assert note == f"number of devices not set, {devices} assumed: {by}; else add --set parallelism.dp=N"
    sets = HARDWARE | {"devices": 8}
    assert to_job(read_torchtitan("llama3_8b.toml", text, {}, sets), sets).parallelism.devices == 8


def test_degrees_that_make_another_number_than_a_launcher_starts():
    with pytest.raises(ConfigError, match="the product of the degrees is 4 devices, not 8"):
        read_torchtitan("job.toml", LLAMA, {"WORLD_SIZE": "8"})


def test_experts_without_shards_are_refused_by_the_degree_that_does_not_shard():
    """One shard: torchtitan applies no FSDP (parallel_dims.py, fsdp_enabled), and experts are counted with it only."""
    text = DEEPSEEK.replace("data_parallel_shard_degree = 4", "data_parallel_shard_degree = 1")
    assert problem(text) == (
        "job.toml: parallelism.data_parallel_shard_degree: mixtures of experts are modeled only with sharded parameters; "
        "give -1 and at least 2 devices, or at least 2"
    )
    assert read_torchtitan("job.toml", DEEPSEEK, {}).config["performance"]["software"] == "torchtitan@0.2"


def test_devices_that_would_not_shard_experts_are_asked_for():
    """run_train.sh starts 8 processes unless NGPU is set; with tp 8 they are one data-parallel rank."""
    text = DEEPSEEK.replace(
        "data_parallel_shard_degree = 4", "data_parallel_shard_degree = -1\ntensor_parallel_degree = 8"
    )
    found = read_torchtitan("job.toml", text, {}, {"hardware.node_type": "dgx-h100"})
    assert found.left_open["parallelism.dp"].startswith(
        "number of devices unknown; add --set parallelism.dp=N (devices / 8)"
    )


def test_a_schedule_that_torch_does_not_have_is_refused():
    """torch/distributed/pipelining/schedules.py, get_schedule_class: "Unknown schedule name"; case is ignored."""
    text = LLAMA + 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{}"\n'
    text = text.replace("local_batch_size = 1", "local_batch_size = 8")
    assert problem(text.format("Bogus")) == (
        "job.toml: parallelism.pipeline_parallel_schedule: expected one of 1F1B, GPipe, LoopedBFS, Interleaved1F1B, "
        "interleaved_1f1b, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV (got 'Bogus')"
    )
    assert read_torchtitan("job.toml", text.format("gpipe")).config["parallelism"]["schedule"] == "gpipe"
    own = text.format("PipelineScheduleMulti") + 'pipeline_parallel_schedule_csv = "own.csv"\n'
    named = {flag.name for flag in read_torchtitan("job.toml", own).of("unmodeled")}
    assert named == {"parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"}


def test_functions_to_choose_from_begin_with_those_of_whole_models():
    names = [f"llama3_debugmodel_{letter}" for letter in "abcdefgh"] + ["llama3_8b", "llama3_70b"]
    line = problem("".join(map(FUNCTIONS.format, names)), "config_registry.py")
    assert "several config functions: llama3_8b, llama3_70b, llama3_debugmodel_a, " in line
    assert "llama3_debugmodel_h; add the function to the path: config_registry.py:FUNCTION" in line
