"""Sharding that neither a config nor its script states: asked for where another file may state it."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

RECIPE = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, offload_param_device: none}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
ASKED = (
    "ZeRO or FSDP unknown: acc.yaml may be the config of accelerate that starts it; "
    "add --with {}, or for none --set parallelism.zero_level=0"
)


def job_of(folder, files, name, added=(), **sets):
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    sets = HARDWARE | {key.replace("__", "."): value for key, value in sets.items()}
    return to_job(read("auto", str(folder / name), sets, added=[str(folder / file) for file in added]), sets)


def problems(folder, files, name):
    with pytest.raises(ConfigError) as error:
        job_of(folder, files, name)
    return [line.rpartition(f"{name}: ")[2] for line in error.value.problems]


def test_a_config_of_accelerate_beside_a_recipe_is_asked_for(tmp_path):
    """LLaMA-Factory's YAML names no sharding where accelerate has it: that of the file beside it is not assumed, nor none."""
    assert problems(tmp_path, {"sft.yaml": RECIPE, "acc.yaml": ACCELERATE}, "sft.yaml") == [
        ASKED.format(tmp_path / "acc.yaml")
    ]


def test_a_recipe_of_a_fork_without_the_usual_config_of_accelerate_is_asked_for(tmp_path):
    """alignment-handbook's README starts full training with ZeRO 3: of a fork that has ZeRO 2 in its place, it is not known."""
    recipe = RECIPE.replace("stage: sft\nfinetuning_type: full\ncutoff_len", "max_seq_length")
    other = tmp_path / "recipes" / "accelerate_configs" / "deepspeed_zero2.yaml"
    other.parent.mkdir(parents=True)
    other.write_text(ACCELERATE.replace("zero_stage: 3", "zero_stage: 2"), encoding="utf-8")
    folder = tmp_path / "recipes" / "own" / "sft"
    folder.mkdir(parents=True)
    (line,) = problems(folder, {"config.yaml": recipe}, "config.yaml")
    assert line == ASKED.format(other).replace("acc.yaml", "deepspeed_zero2.yaml")
    assert job_of(folder, {"config.yaml": recipe}, "config.yaml", [other]).parallelism.zero_level == 2
    adapters = {"config.yaml": f"{recipe}use_peft: true\n"}
    assert not job_of(folder, adapters, "config.yaml").parallelism.zero_level  # with multi_gpu.yaml there


def test_the_config_of_accelerate_or_its_absence_can_be_given(tmp_path):
    files = {"sft.yaml": RECIPE, "acc.yaml": ACCELERATE}
    assert job_of(tmp_path, files, "sft.yaml", ["acc.yaml"]).parallelism.zero_level == 3
    assert job_of(tmp_path, files, "sft.yaml", parallelism__zero_level=0).parallelism.zero_level == 0


@pytest.mark.parametrize(
    "command", ["llamafactory-cli train sft.yaml\n", "FORCE_TORCHRUN=1 llamafactory-cli train a/sft.yaml\n"]
)
def test_a_script_that_starts_the_recipe_without_accelerate_tells(tmp_path, command):
    files = {"sft.yaml": RECIPE, "acc.yaml": ACCELERATE, "train.sh": command}
    assert not job_of(tmp_path, files, "sft.yaml").parallelism.zero_level


def test_a_recipe_that_names_its_sharding_is_not_asked(tmp_path):
    files = {"sft.yaml": RECIPE + "deepspeed: ds_z2.json\n", "acc.yaml": ACCELERATE}
    files["ds_z2.json"] = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    assert job_of(tmp_path, files, "sft.yaml").parallelism.zero_level == 2


OWN = "torchrun --nproc_per_node=8 train_sft.py --model_name_or_path Qwen/Qwen3-32B --use_deepspeed --bf16 True\\\n"
OWN += "  --per_device_train_batch_size 1 --max_seq_length 1024 --gradient_accumulation_steps 4\n"


def test_a_switch_of_a_custom_program_has_no_default_stage(tmp_path):
    """accelerate's default stage is that of its own option; a program's own switch has whatever its code has."""
    why = "ZeRO stage unknown: use_deepspeed is an argument of train_sft.py; add --set parallelism.zero_level=N"
    assert problems(tmp_path, {"run.sh": OWN}, "run.sh") == [why]
    assert job_of(tmp_path, {"run.sh": OWN}, "run.sh", parallelism__zero_level=3).parallelism.zero_level == 3


@pytest.mark.parametrize(
    ("before", "devices"), [("unset HOSTFILE", 2), ("HOSTFILE=hosts", None), ("unset HOSTFILE; HOSTFILE=", None)]
)
def test_a_variable_that_is_unset_is_not_set(tmp_path, before, devices):
    """${HOSTFILE+x} is x where the variable is set, also to nothing (bash manual, Shell Parameter Expansion)."""
    script = f"""{before}
ARGS=(--num_gpus 2)
if [[ -n "${{HOSTFILE+x}}" ]]; then ARGS+=(--hostfile "$HOSTFILE"); fi
deepspeed "${{ARGS[@]}}" train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --deepspeed ds.json \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --model_max_length 2048
"""
    files = {"run.sh": script, "ds.json": '{"zero_optimization": {"stage": 2}}'}
    if devices is None:
        assert any("hostfile" in line for line in problems(tmp_path, files, "run.sh"))
    else:
        assert job_of(tmp_path, files, "run.sh").parallelism.dp == devices


def checkout(folder, files):
    (folder / ".git").mkdir()
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return folder / "configs" / "sft"


def test_a_script_at_the_top_of_the_checkout_tells_how_a_recipe_is_started(tmp_path):
    """Two GPUs, ZeRO 3 of the config that the script names."""
    script = (
        "accelerate launch --config_file configs/acc.yaml --num_processes 2 \\\n  src/train.py configs/sft/sft.yaml\n"
    )
    folder = checkout(tmp_path, {"configs/sft/sft.yaml": RECIPE, "configs/acc.yaml": ACCELERATE, "run.sh": script})
    found = job_of(folder, {}, "sft.yaml")
    assert (found.parallelism.zero_level, found.parallelism.dp, found.data.gbs) == (3, 2, 16)


def test_scripts_that_start_a_recipe_in_different_ways_tell_nothing(tmp_path):
    other = "accelerate launch --config_file configs/acc.yaml train.py configs/sft/sft.yaml\n"
    files = {"run.sh": other, "scripts/run.sh": other.replace("acc.yaml", "other.yaml"), "configs/acc.yaml": ACCELERATE}
    folder = checkout(tmp_path, {"configs/sft/sft.yaml": RECIPE} | files)
    assert not job_of(folder, {}, "sft.yaml").parallelism.zero_level


@pytest.mark.parametrize(
    ("options", "stage"), [("--use_deepspeed --zero_stage 3", 3), ("--use_deepspeed", 2), ("--num_processes 8", None)]
)
def test_options_of_accelerate_in_a_readme_are_read(tmp_path, options, stage):
    """accelerate utils/dataclasses.py, DeepSpeedPlugin: stage 2 unless it is told."""
    readme = f"Run `accelerate launch {options} train.py sft.yaml`.\n"
    found = job_of(tmp_path, {"sft.yaml": RECIPE, "README.md": readme}, "sft.yaml")
    assert found.parallelism.zero_level == stage


def test_a_line_that_repeats_words_of_a_command_is_read_in_time(tmp_path):
    """One line of 1 MB: a search of it from each such word to its end takes hours."""
    files = {"sft.yaml": RECIPE, "acc.yaml": ACCELERATE, "README.md": "accelerate launch train " * 40_000}
    assert any("acc.yaml may be the config" in line for line in problems(tmp_path, files, "sft.yaml"))


STARTED = "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\nllamafactory-cli train job.yaml\n"


@pytest.mark.parametrize(
    ("scripts", "sets", "batch", "told"),
    [
        ({"run.slurm": STARTED}, {}, 16, "2 assumed: run.slurm, which starts it"),
        ({"run.slurm": STARTED}, {"parallelism__dp": 4}, 32, ""),
        (
            {"run.slurm": STARTED.replace("job", "other")},
            {},
            64,
            "8 assumed: llamafactory-cli, every device of one node",
        ),
        ({"run.slurm": STARTED, "eval.sh": "grep loss job.yaml\n"}, {}, 64, "8 assumed: llamafactory-cli"),
    ],
)
def test_the_devices_of_a_config_are_those_of_the_one_script_that_starts_it(tmp_path, scripts, sets, batch, told):
    """1 sequence x 8 accumulations on each of the job's 2 devices: a batch of 16; on a whole node of 8 devices, 64."""
    job = job_of(tmp_path, scripts | {"job.yaml": RECIPE}, "job.yaml", **sets)
    assert job.data.gbs == batch
    stated = [note for note in job.notes if note.startswith("number of devices not set")]
    assert [told in note for note in stated] == ([True] if told else [])


def test_tensor_parallelism_of_a_ds_config(tmp_path):
    """DeepSpeed's AutoTP: 2 of 8 devices share each layer, so that 4 have batches: 4 x 1 x 8."""
    tensor = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "tensor_parallel": {"autotp_size": 2}}'
    found = job_of(tmp_path, {"sft.yaml": f"{RECIPE}deepspeed: z2.json\n", "z2.json": tensor}, "sft.yaml")
    assert (found.parallelism.tp, found.parallelism.dp, found.data.gbs) == (2, 4, 32)


def test_a_stage_that_is_a_programs_default_is_of_deepspeed(tmp_path):
    """The stage is no argument of its command; what runs the steps has stages up to 3 all the same."""
    program = 'parser.add_argument("--zero_stage", type=int, default=2)\nTrainingArguments(bf16=True)\n'
    script = OWN.replace(" --use_deepspeed", "").replace("train_sft.py", "own.py")
    found = job_of(tmp_path, {"run.sh": script, "own.py": program}, "run.sh")
    assert (found.performance.software, found.parallelism.zero_level) == ("deepspeed", 2)


def test_a_recipe_whose_comment_says_fsdp_is_started_with_its_config(tmp_path):
    """open-r1's OlympicCoder-32B: "Config for 16 nodes of 8 H100s with FSDP1", beside the zero3.yaml of the other recipes."""
    (folder := tmp_path / "recipes" / "coder" / "sft").mkdir(parents=True)
    (configs := tmp_path / "recipes" / "accelerate_configs").mkdir()
    (configs / "zero3.yaml").write_text(ACCELERATE, encoding="utf-8")
    fsdp = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"
    (configs / "fsdp.yaml").write_text(fsdp, encoding="utf-8")
    recipe = RECIPE.replace("stage: sft\nfinetuning_type: full\ncutoff_len", "max_seq_length")
    comment = "# Config for 16 nodes of 8 H100s with FSDP1\n"
    sharded = job_of(folder, {"config.yaml": comment + recipe}, "config.yaml").parallelism
    assert (sharded.fsdp is not None, sharded.dp) == (True, 128)
    assert job_of(folder, {"other.yaml": recipe}, "other.yaml").parallelism.zero_level == 3
