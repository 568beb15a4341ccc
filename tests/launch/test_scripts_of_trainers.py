"""Scripts and launchers of trainers: the config that they name, options of accelerate, whole batches."""

import pytest
from test_trainers_of_releases import job, problems

from steptime.launch.kinds import kind_of
from steptime.launch.read import read


def test_a_script_of_torchtitan_names_its_config(tmp_path):
    text = (
        '#!/bin/bash\nCONFIG_FILE=${CONFIG_FILE:-"./configs/llama3_8b.toml"}\n'
        "srun torchrun --nnodes 4 --nproc_per_node 8 ./train.py --job.config_file ${CONFIG_FILE} "
        "--training.local_batch_size 2 --parallelism.tensor_parallel_degree=2\n"
    )
    told = problems(tmp_path, "train.sh", text)
    assert told == [
        "reads ./configs/llama3_8b.toml, which was not found; put it in the same folder, or add --with FILE"
    ]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "llama3_8b.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 1\n"
    )
    found = job(tmp_path, "train.sh", text)
    layout = found.parallelism
    assert (layout.tp, layout.dp, found.data.microbatch_sz, found.data.gbs) == (2, 16, 2, 32)
    named = text.replace("${CONFIG_FILE} ", '"./configs/${NAME}.toml" ').replace("srun", "NAME=llama3_8b\nsrun")
    assert job(tmp_path, "train.sh", named).parallelism.tp == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--use_deepspeed --zero_stage 3 --mixed_precision bf16", ("deepspeed", 3, None, "bf16")),
        ("--use_deepspeed --mixed_precision bf16", ("deepspeed", 2, None, "bf16")),
        ("--use_fsdp --fsdp_sharding_strategy=FULL_SHARD --mixed_precision=bf16", ("accelerate", None, True, "bf16")),
        ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", ("accelerate", None, False, "fp32")),
        ("--mixed_precision fp16", ("accelerate-ddp", None, None, "fp16")),
    ],
)
def test_options_of_accelerate_stand_before_the_program(tmp_path, options, said):
    """commands/launch.py; its gradient_accumulation_steps is not the Trainer's, whose own stands behind the program."""
    text = f"accelerate launch --num_processes 8 --gradient_accumulation_steps 4 {options} train.py "
    text += "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --max_seq_length 4096\n"
    found = job(tmp_path, "train.sh", text)
    layout = found.parallelism
    resharded = layout.fsdp.reshard_after_forward if layout.fsdp else None
    assert (found.performance.software, layout.zero_level, resharded, found.performance.precision) == said
    assert (layout.dp, found.data.gbs) == (8, 16)


def test_of_two_jobs_of_one_program_the_first_is_read(tmp_path):
    """A name that says nothing of training, as sft.py; a second program is asked for."""
    command = "torchrun --nproc_per_node 8 {} --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 1024 --bf16 true "
    text = "".join(command.format("sft.py") + f"--per_device_train_batch_size {size}\n" for size in (2, 3))
    found = job(tmp_path, "run.sh", text)
    assert found.data.microbatch_sz == 2
    assert any(note.startswith("lines 1, 2 each launch a job, of which only the first is read") for note in found.notes)
    other = text + command.format("score.py") + "--per_device_train_batch_size 2\n"
    assert "cannot determine which one trains" in problems(tmp_path, "run.sh", other)[0]


def test_a_repeated_key_of_accelerates_config_counts_as_it_stands_last(tmp_path):
    """As PyYAML has it."""
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 2, zero_stage: 3}\n"
    )
    text = "accelerate launch --config_file zero.yaml sft.py --model_name_or_path Qwen/Qwen2.5-7B "
    text += "--max_seq_length 1024 --per_device_train_batch_size 1\n"
    found = job(tmp_path, "run.sh", text)
    assert (found.parallelism.zero_level, found.performance.precision) == (3, "bf16")


OPENRLHF = (
    "deepspeed --num_gpus 4 ../train_sft.py --pretrain meta-llama/Llama-2-7b-hf --micro_train_batch_size 2 --bf16 "
)


def test_openrlhf_says_the_whole_batch(tmp_path):
    """cli/train_sft.py: batch 128, 2048 tokens and ZeRO 2 by default; adapters in DeepSpeed's bf16."""
    found = job(tmp_path, "sft.sh", OPENRLHF + "--lora_rank 64 --gradient_checkpointing\n")
    assert (found.data.gbs, found.data.microbatch_sz, found.data.seqlen, found.parallelism.dp) == (128, 2, 2048, 4)
    assert (found.performance.software, found.parallelism.zero_level, found.performance.param_dtype) == (
        "deepspeed",
        2,
        None,
    )
    assert (found.model.lora.rank, len(found.model.lora.targets)) == (64, 7)
    assert "targets of the adapters not set, all assumed: the default of OpenRLHF" in found.notes
    told = problems(tmp_path, "sft.sh", OPENRLHF + "--adam_offload\n")
    assert told[0].startswith("adam_offload true: states in host memory; not modeled")


def test_a_script_is_of_the_kind_of_the_config_that_it_names(tmp_path):
    """Else finetuning_type would be no option of the Trainer, and every weight counted as trained."""
    (tmp_path / "lora.yaml").write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\nfinetuning_type: lora\nstage: sft\ncutoff_len: 1024\n"
        "per_device_train_batch_size: 1\nbf16: true\n"
    )
    found = job(tmp_path, "train.sh", "torchrun --nproc_per_node 4 src/train.py lora.yaml\n")
    assert (found.model.lora.rank, found.parallelism.dp, found.data.seqlen) == (8, 4, 1024)


@pytest.mark.parametrize(
    ("wrapped", "flags", "said"),
    [
        ("false", "--gradient_checkpointing true", "full"),
        ("true", "", "full"),
        ("false", "", None),  # the profile: none
    ],
)
def test_either_checkpointing_under_fsdp_recomputes(tmp_path, wrapped, flags, said):
    """transformers trainer.py: gradient_checkpointing_enable() whatever accelerate's config says; both at once are an error."""
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\n"
        f"fsdp_config: {{fsdp_version: 2, fsdp_activation_checkpointing: {wrapped}}}\n"
    )
    text = "accelerate launch --config_file fsdp.yaml train.py --model_name_or_path meta-llama/Llama-3.1-8B "
    text += f"--max_seq_length 4096 --per_device_train_batch_size 2 --bf16 true {flags}\n"
    assert job(tmp_path, "run.sh", text).performance.activation_checkpointing_type == said


@pytest.mark.parametrize(
    "program",
    ["-m MaxText.train", "MaxText/train.py", "MaxText/${PROGRAM:-train.py}", "-m maxtext.trainers.pre_train.train"],
)
def test_a_command_of_maxtext_is_its_own(tmp_path, program):
    text = f"python3 {program} base.yml model_name=llama2-7b per_device_batch_size=2 max_target_length=2048\n"
    (tmp_path / "run.sh").write_text(text)
    (tmp_path / "base.yml").write_text("remat_policy: full\nici_fsdp_parallelism: -1\n")
    assert kind_of(str(tmp_path / "run.sh"), text) == "maxtext"


def test_a_program_over_olmo_core_is_of_its_table():
    assert kind_of("train.py", "from olmo_core.train import TrainerConfig\n") == "olmo"


def test_the_kind_of_a_model_under_swift_is_not_its_name(tmp_path):
    """swift/arguments: --model names the weights, --model_type how they are loaded."""
    flags = "--model_type qwen3 --tuner_type full --max_length 512 --per_device_train_batch_size 1\n"
    text = f"NPROC_PER_NODE=8 swift sft --model /weights/Qwen3-0.6B {flags}"
    assert job(tmp_path, "run.sh", text).model.name == "qwen3-0.6b"


def test_processes_that_take_a_part_of_each_node_are_told(tmp_path):
    """2 nodes of 4 processes each, which one node of the machine has: the report says both."""
    flags = "--model Qwen/Qwen2.5-7B --tuner_type full --max_length 512 --per_device_train_batch_size 1"
    found = job(tmp_path, "run.sh", f"NNODES=2 NODE_RANK=0 NPROC_PER_NODE=4 swift sft {flags}\n")
    assert (found.parallelism.dp, "launched on 2 nodes with 4 processes each" in found.notes) == (8, True)


_OLMO = """model: {d_model: 256, n_heads: 4, n_layers: 4, mlp_ratio: 4, embedding_size: 1024, max_sequence_length: 128}
global_train_batch_size: 32
device_train_microbatch_size: 2
precision: amp_bf16
"""


def test_a_config_that_a_variable_names_tells_the_kind(tmp_path, monkeypatch):
    """`config=job.yaml 3dtrn ...`, as the question for the variable says; the same name as a word of the command."""
    (tmp_path / "job.yaml").write_text(_OLMO)
    text = "#!/bin/bash\nsrun torchrun --nnodes=2 --nproc_per_node=8 scripts/train.py $config --wandb.run_id=1\n"
    assert "$config has no value; write config=... before the command" in problems(tmp_path, "run.sh", text)[0]
    monkeypatch.setenv("config", "job.yaml")
    found = job(tmp_path, "run.sh", text)
    assert (found.parallelism.dp, found.data.gbs, found.data.microbatch_sz) == (16, 32, 2)


def test_a_copy_of_a_config_has_its_text(tmp_path):
    """A script that copies its config for each run; the name of the copy has the number of the job."""
    (tmp_path / "job.yaml").write_text(_OLMO)
    text = "#!/bin/bash\n#SBATCH --nodes=2\nC=/home/me/job.yaml\nD=/scratch/job_$SLURM_JOB_ID.yaml\ncp $C $D\n"
    text += "srun torchrun --nnodes=2 --nproc_per_node=8 OLMo/scripts/train.py $D\n"
    (tmp_path / "run.sh").write_text(text)
    data = read("olmo", str(tmp_path / "run.sh"), {}).config["data"]
    assert (data["gbs"], data["microbatch_sz"]) == (32, 2)
