"""ds_config.json files as plans."""

import json

import pytest
from launch_readings import DATA, HARDWARE, golden_text, one_line, read, saved_and_read_back, status

from steptime.base.config import ConfigError
from steptime.launch.deepspeed import read_deepspeed
from steptime.launch.keys import load_table
from steptime.launch.reading import to_job

MODEL = {"model": "llama3-8b", "data.seqlen": 4096}
CASES = {
    "deepspeed/zero3_bf16.json": {},
    "deepspeed/zero2_fp16.json": {"parallelism.dp": 16},
    "deepspeed/zero1_plain.json": {"parallelism.dp": 32},
    "deepspeed/zero3_offload.json": {},
    "deepspeed/hf_auto.json": {
        "data.gbs": 64,
        "data.microbatch_sz": 1,
        "parallelism.dp": 16,
        "performance.precision": "bf16",
        "parallelism.bucket_size_mb": 32,
    },
}


def config(changes, sets=None, env=None):
    base = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    text = json.dumps({key: value for key, value in (base | changes).items() if value is not None})
    return read_deepspeed("ds.json", text, env or {}, MODEL | (sets or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_plan_on_record(name, golden):
    sets = MODEL | CASES[name]
    found = read(read_deepspeed, name, sets)
    golden(f"launch/{name.replace('/', '_').removesuffix('.json')}.yaml", golden_text(found))
    saved_and_read_back(found, sets)


def test_the_batch_sizes_tell_the_ranks():
    """64 sequences in micro-batches of 2, 4 of them per rank: 8 ranks."""
    assert config({}).config["parallelism"]["dp"] == 8
    assert config({"train_batch_size": None}, {"parallelism.dp": 4}).config["data"]["gbs"] == 32
    assert config({"gradient_accumulation_steps": None}, env={"WORLD_SIZE": "16"}).config["parallelism"]["dp"] == 16
    found = config(
        {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}, {"parallelism.dp": 16}
    )
    assert found.config["data"]["microbatch_sz"] == 4  # one micro-batch, as DeepSpeed takes it
    assert config({}, {"parallelism.tp": 2}, {"WORLD_SIZE": "16"}).config["parallelism"]["dp"] == 8


@pytest.mark.parametrize(
    "sets", [{"parallelism.dp": 16}, {"devices": 16}, {"hardware": "dgx-h100", "hardware.nodes": 2}]
)
def test_the_user_tells_the_devices_in_any_way(sets):
    """64 sequences of 16 ranks in micro-batches of 2; `--devices N` is the setting `devices`."""
    found = config({"gradient_accumulation_steps": None}, sets)
    assert found.config["parallelism"]["dp"] == 16
    assert not any(flag.name == "data-parallel ranks" for flag in found.flags)  # nothing was derived


def test_overlap_and_buckets_follow_zero():
    """reduce_bucket_size is in elements: 5e8 of bf16 are 1,000 MB, of fp32 2,000."""
    third = config({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    assert "overlap" not in third.config["performance"]
    assert third.config["parallelism"]["bucket_size_mb"] == 1000
    first = config(
        {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}
    )
    assert first.config["performance"]["overlap"] == {"dp": False}
    assert first.config["parallelism"]["bucket_size_mb"] == 2000
    assert config({"zero_optimization": True}).config["parallelism"]["zero_level"] == 1
    assert config({}).config["performance"]["precision"] == "fp32"


def test_what_zero_offload_puts_on_the_host():
    found = read(read_deepspeed, "deepspeed/zero3_offload.json", MODEL)
    assert found.config["performance"]["cpu_offload"] == {"optimizer": 1.0}
    part = config({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}})
    assert part.config["performance"]["cpu_offload"] == {"optimizer": 0.3}
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert config({"zero_optimization": {"stage": 3} | both}).config["performance"]["cpu_offload"] == {
        "optimizer": 1.0, "params": True,
    }  # fmt: skip
    old = config({"zero_optimization": {"stage": 3, "cpu_offload": True}})
    assert old.config["performance"]["cpu_offload"] == {"optimizer": 1.0}


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_offload_below_stage_3(stage):
    """The states leave the device at every stage, parameters at stage 3 alone, and a share of the states too (zero/config.py)."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    half = {"bf16": {"enabled": True}}
    found = to_job(config({"zero_optimization": zero} | half), HARDWARE)
    assert (found.zero_level, found.performance.cpu_offload.share) == (stage, 1.0)
    assert not found.performance.cpu_offload.params
    assert not found.performance.cpu_offload.round_robin
    in_turn = to_job(config({"zero_optimization": zero | {"round_robin_gradients": True}} | half), HARDWARE)
    assert in_turn.performance.cpu_offload.round_robin
    with pytest.raises(
        ConfigError, match=rf"ratio: DeepSpeed needs stage 3 for less than 1 \(got 0.5, stage {stage}\)"
    ):
        config({"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})


@pytest.mark.parametrize(
    ("zero", "line"),
    [
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "optimizer states in host memory at stage 0"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "optimizer states on nvme"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "optimizer states on nvme"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "parameters in host memory without optimizer states"),
    ],
)
def test_other_offloading_is_an_error_until_it_is_allowed(zero, line):
    found = config({"zero_optimization": zero, "bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match=f"{line}; not modeled"):
        to_job(found, HARDWARE)
    assert to_job(found, HARDWARE, allow_unmodeled=True).performance.cpu_offload.share == 0.0


def test_zero_plus_plus():
    """At stage 3; at others DeepSpeed ignores it. A size of 0 or 1 is none (runtime/zero/config.py)."""
    asked = {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = config({"zero_optimization": {"stage": 3} | asked}, {"parallelism.dp": 8})
    assert found.config["parallelism"]["zero_plus_plus"] == {
        "hpz_partition_size": 8, "quantized_weights": True, "quantized_gradients": True,
    }  # fmt: skip
    for zero in ({"stage": 2} | asked, {"stage": 3, "zero_hpz_partition_size": 0, "zero_quantized_weights": False}):
        assert "zero_plus_plus" not in config({"zero_optimization": zero}).config["parallelism"]


def test_what_the_file_leaves_to_the_model_is_listed():
    found = config({})
    assert status(found, "activation checkpointing") == "default"
    told = config({}, {"performance.activation_checkpointing_type": "full"})
    assert "activation checkpointing" not in [flag.name for flag in told.flags]


def test_what_a_trainer_fills_in_is_asked_for_by_name():
    text = (DATA / "deepspeed/hf_auto.json").read_text()
    with pytest.raises(ConfigError) as error:
        read_deepspeed("ds.json", text, {}, HARDWARE | MODEL | {"parallelism.dp": 8})
    batch = 'train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: "auto" is filled in by the trainer'
    half = 'bf16.enabled: "auto" is filled in by the trainer'
    assert error.value.problems == [
        f"ds.json: {batch}; add --set data.gbs=N",
        f"ds.json: {batch}; add --set data.microbatch_sz=N",
        f"ds.json: {half}; add --set performance.precision=bf16",
    ]


def test_a_bucket_left_to_the_trainer_is_the_hidden_size_squared():
    """transformers integrations/deepspeed.py, trainer_config_finalize: llama3-8b's 4096 ** 2 elements of 2 bytes."""
    text = (DATA / "deepspeed/hf_auto.json").read_text()
    sets = {"data.gbs": 16, "data.microbatch_sz": 1, "performance.precision": "bf16", "parallelism.dp": 8}
    found = read_deepspeed("ds.json", text, {}, MODEL | sets)
    assert found.config["parallelism"]["bucket_size_mb"] == 4096**2 * 2 / 1e6


@pytest.mark.parametrize(
    ("changes", "sets", "line"),
    [
        (
            {"train_batch_size": 60},
            {},
            (
                "job: train_batch_size: must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
                "data-parallel ranks "
                "= 2 * 4 * N (got 60)"
            ),
        ),
        (
            {},
            {"parallelism.dp": 16},
            (
                "job: train_batch_size: must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * 16 "
                "data-parallel ranks "
                "= 2 * 4 * 16 (got 64); add --set data.gbs=N"
            ),
        ),
        (
            {"gradient_accumulation_steps": None},
            {},
            "job: number of devices unknown; add --set parallelism.dp=N, or set WORLD_SIZE",
        ),
        (
            {"gradient_accumulation_steps": None},
            {"parallelism.dp": 10},
            (
                "job: train_batch_size: must be a multiple of train_micro_batch_size_per_gpu * data-parallel ranks "
                "= 2 * 10 (got 64); add --set data.gbs=N"
            ),
        ),
        (
            {"zero_optimization": {"stage": 2, "overlap_com": True}},
            {},
            (
                "job: zero_optimization.overlap_com true: not an option of DeepSpeed 0.18; did you mean "
                "zero_optimization.overlap_comm?; "
                "not modeled; --allow-unmodeled ignores it"
            ),
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            {},
            "job: bf16.enabled and fp16.enabled are both true; use one",
        ),
        (
            {"zero_optimization": {"stage": "three"}},
            {},
            "job: zero_optimization.stage: expected a whole number of at least 0 (got 'three')",
        ),
    ],
)
def test_bad_settings_are_one_line(changes, sets, line):
    base = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    text = json.dumps({key: value for key, value in (base | changes).items() if value is not None})
    assert one_line(read_deepspeed, text, sets=MODEL | sets) == line


def test_the_model_is_the_users_to_name():
    text = (DATA / "deepspeed/zero3_bf16.json").read_text()
    line = one_line(read_deepspeed, text, "ds.json", {"data.seqlen": 4096})
    assert line == "ds.json: a ds_config.json names no model; add --set model=NAME (3dtrn models lists them)"
    line = one_line(read_deepspeed, text, "ds.json", {"model": "llama3-8b"})
    assert line == "ds.json: a ds_config.json has no sequence length; add --set data.seqlen=N"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"train_batch_size": 8', "line 1, column 23: not valid JSON"),
        ("[training]\nbatch_size = 8\n", "not valid JSON"),
        ("[1, 2]", "not a ds_config.json"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}', "not a ds_config.json (no batch size"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_other_files_are_one_line(text, words):
    assert words in one_line(read_deepspeed, text, sets=MODEL)


def test_what_a_key_costs_depends_on_the_job():
    """Checkpoints are shared out over tensor-parallel ranks; DeepSpeed's own limit of gathered parameters is no news."""
    shared = {"activation_checkpointing": {"partition_activations": True}}
    key = "activation_checkpointing.partition_activations"
    assert status(config(shared), key) == "irrelevant"
    assert status(config(shared, {"parallelism.tp": 2}), key) == "unmodeled"
    for limit, found in ((1e9, "irrelevant"), ("auto", "irrelevant"), (3e9, "approximated")):
        third = config({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": limit}})
        assert status(third, "zero_optimization.stage3_max_live_parameters") == found


def test_the_table_has_no_key_twice():
    table = load_table("deepspeed")
    raw = table.raw
    names = [*raw["used"], *raw["approximated"], *raw["unmodeled"], *raw["irrelevant"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_size_that_is_a_list_is_a_line(key):
    with pytest.raises(ConfigError, match=rf"ds\.json: {key}: expected a whole number"):
        config({key: [1]}, env={"WORLD_SIZE": "8"})


def test_a_batch_that_follows_from_the_others_is_not_asked_for():
    """runtime/config.py, _set_batch_related_parameters: 2 sequences x 4 accumulated x 8 ranks are 64."""
    found = config({"train_batch_size": "auto"}, {"parallelism.dp": 8}).config["data"]
    assert (found["gbs"], found["microbatch_sz"]) == (64, 2)
    with pytest.raises(ConfigError, match='train_batch_size: "auto" is filled in by the trainer'):
        config({"train_batch_size": "auto", "gradient_accumulation_steps": None}, {"parallelism.dp": 8})
