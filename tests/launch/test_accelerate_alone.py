"""A config of accelerate without its program: what it says, and what is asked for in one round."""

import json

import pytest
from launch_readings import job

from steptime.base.config import ConfigError

SAID = {"model": "llama3-8b", "data__seqlen": 512}


def config(kind, *more):
    return "\n".join(["compute_environment: LOCAL_MACHINE", f"distributed_type: {kind}", "num_machines: 1", *more, ""])


def problems(tmp_path, text, **sets):
    with pytest.raises(ConfigError) as error:
        job(tmp_path, "accelerate.yaml", text, **sets)
    return [line.rpartition("accelerate.yaml: ")[2] for line in error.value.problems]


def test_all_that_it_lacks_is_asked_for_at_once(tmp_path):
    """The program's arguments may set the precision that a ds_config leaves "auto" and no mixed_precision states."""
    (tmp_path / "zero.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}')
    text = config("DEEPSPEED", "num_processes: 8", "deepspeed_config: {deepspeed_config_file: zero.json}")
    asked = problems(tmp_path, text)
    assert [line.rpartition("--set ")[2].partition("=")[0] for line in asked] == [
        *("performance.precision", "model.hf", "data.seqlen"),
    ]  # fmt: skip
    found = job(tmp_path, "accelerate.yaml", text, **SAID, performance__precision="bf16")
    assert (found.zero_level, found.parallelism.dp) == (2, 8)


def test_its_no_is_its_default(tmp_path):
    """accelerate takes "no" where nothing is said, and bf16 of TrainingArguments overrides both (__post_init__)."""
    (line,) = problems(tmp_path, config("FSDP", "num_processes: 8", "mixed_precision: 'no'"), **SAID)
    assert line.endswith("leaves the precision to its program; add --set performance.precision=bf16")


def test_replicas_that_it_states_are_not_asked_for(tmp_path):
    """MULTI_GPU is DDP: that 16 bytes x 8.0e9 parameters do not fit on an H100 is the answer, not a question."""
    found = job(tmp_path, "accelerate.yaml", config("MULTI_GPU", "mixed_precision: bf16"), **SAID)
    assert (found.zero_level, found.parallelism.dp) == (0, 8)


def test_an_empty_section_sets_nothing(tmp_path):
    text = config("MULTI_GPU", "num_processes: 2", "fp16: true", "deepspeed_config: {}")
    found = job(tmp_path, "accelerate.yaml", text, **SAID)
    assert (found.zero_level, found.parallelism.dp, found.performance.precision) == (0, 2, "fp16")


def test_its_fp8_is_not_fp32(tmp_path):
    text = config("FSDP", "num_processes: 8", "mixed_precision: fp8")
    (line,) = problems(tmp_path, text, **SAID)
    assert (
        line
        == "mixed_precision fp8: projections in fp8: those in bf16 are counted; not modeled; --allow-unmodeled ignores it"
    )


@pytest.mark.parametrize("said", ["--model_name_or_path <path-to-model>", "--model_name_or_path=<path-to-model>"])
def test_a_word_to_fill_in_is_no_redirection(tmp_path, said):
    """To bash "> --data_path" would write to a file of that name, and the option after it would lose its own."""
    options = "--per_device_train_batch_size 4 --bf16 True --model_max_length 512"
    script = f"torchrun --nproc_per_node 8 train.py {said} \\\n {options}\n"
    with pytest.raises(ConfigError, match="model '<path-to-model>' is not among the presets"):
        job(tmp_path, "train.sh", script)
    assert job(tmp_path, "train.sh", script, model="llama3-8b", parallelism__zero_level=0).data.microbatch_sz == 4


@pytest.mark.parametrize(("share", "gbs"), [("0.125", 1), ("4", 32)])
def test_maxtexts_batch_is_that_of_each_device(tmp_path, share, gbs):
    """8 devices of tp 8 share each sequence: the global batch is 8 x per_device_batch_size (calculate_global_batch_sizes)."""
    text = f"model_name: llama2-7b\nper_device_batch_size: {share}\nmax_target_length: 512\nici_fsdp_parallelism: 1\n"
    found = job(tmp_path, "job.yml", f"{text}ici_tensor_parallelism: 8\n")
    assert (found.data.gbs, found.data.microbatch_sz, found.parallelism.dp) == (gbs, gbs, 1)
    with pytest.raises(ConfigError, match=r"whole number of sequences on each device, since .*\(got 0\.5\)"):
        job(tmp_path, "job.yml", text.replace(share, "0.5"), devices=8)
    with pytest.raises(ConfigError, match=r"whole number of sequences on the 4 devices .*\(got 0\.5\)"):
        job(tmp_path, "job.yml", f"{text.replace(share, '0.125')}ici_tensor_parallelism: 4\n")


def test_arguments_as_indented_json(tmp_path):
    said = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 4, "max_seq_length": 512, "bf16": True}
    text = json.dumps(said, indent=4)
    assert job(tmp_path, "args.json", text).data.microbatch_sz == 4


def test_arguments_of_llamafactory_as_indented_json(tmp_path):
    """Its names go before those that it shares with Hugging Face's Trainer, as in its YAML."""
    said = {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "gpt2", "per_device_train_batch_size": 4}
    text = json.dumps(said | {"cutoff_len": 512, "bf16": True}, indent=4)
    assert job(tmp_path, "args.json", text).data.seqlen == 512


def test_the_processes_in_the_arguments_that_ms_swift_saves(tmp_path):
    """swift/utils/env.py, get_dist_setting: WORLD_SIZE of the launcher; 1 also for one process that sees several devices."""
    said = {"model": "Qwen/Qwen2.5-7B", "train_type": "full", "per_device_train_batch_size": 1, "max_length": 512}
    of_run = said | {"global_world_size": 4, "local_world_size": 4}
    found = job(tmp_path, "args.json", json.dumps(of_run, indent=2))
    assert (found.parallelism.devices, found.data.gbs) == (4, 16)
    with pytest.raises(ConfigError, match=r"number of devices unknown; add --set parallelism\.dp=N"):
        job(tmp_path, "args.json", json.dumps(of_run | {"global_world_size": 1, "local_world_size": 1}, indent=2))


@pytest.mark.parametrize(
    ("flags", "gbs"),
    [
        ("", 16),  # ceil(16 / 1 / 4) = 4 steps of 4 sequences
        ("--per_device_train_batch_size 3", 24),  # ceil(16 / 3 / 4) = 2 of 12
        ("--per_device_train_batch_size 8", 32),  # at least 1 of 32
        ("--gradient_accumulation_steps 1", 4),
        ("--sequence_parallel_size 2", 8),  # world_size counts the ranks that share a sequence: 4 of 2
    ],
)
def test_ms_swift_accumulates_to_sixteen_sequences(tmp_path, flags, gbs):
    """swift/trainers/arguments.py, __post_init__: max(1, ceil(16 / per_device_train_batch_size / world_size))."""
    text = f"NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-7B --train_type full --max_length 512 {flags}\n"
    found = job(tmp_path, "train.sh", text)
    assert found.data.gbs == gbs
    assert any("gradient_accumulation_steps not set" in note for note in found.notes) == ("accumulation" not in flags)


def test_ranks_of_a_sequence_of_ms_swift_exchange_heads(tmp_path):
    """With 4 key/value heads, 4 ranks exchange heads as DeepSpeed does; 8 are two such groups in a ring."""
    text = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --max_length 512 --sequence_parallel_size "
    assert "exchange of the profile is counted" in " ".join(job(tmp_path, "ddp.sh", f"{text}8").notes)
    few = job(tmp_path, "few.sh", f"{text}4 --deepspeed zero2")
    assert (few.parallelism.cp, few.cp_comm_type) == (4, "a2a")
    assert "exchange of the profile" not in " ".join(few.notes)
    with pytest.raises(
        ConfigError, match=r"4 of its ranks .* to count one group alone, add --set parallelism\.cp=4"
    ) as refused:
        job(tmp_path, "many.sh", f"{text}8 --deepspeed zero2")
    assert "lower cp" not in str(refused.value)
