"""What is known of a public repository, model or launcher without being in the file that is read, and told in the notes."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.named_models import preset_of
from steptime.launch.read import read
from steptime.launch.reading import to_job


def job_of(folder, files, name, kind="auto"):
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return to_job(read(kind, str(folder / name), HARDWARE), HARDWARE)


def problems(folder, files, name, kind="auto"):
    with pytest.raises(ConfigError) as error:
        job_of(folder, files, name, kind)
    return [line.rpartition(f"{name}: ")[2] for line in error.value.problems]


RECIPE = """model_name_or_path: Qwen/Qwen3-8B
bf16: true
max_length: 4096
gradient_checkpointing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
"""
ACCELERATE = {
    "recipes/accelerate_configs/zero3.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n",
    "recipes/accelerate_configs/ddp.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
}


def test_a_recipe_is_started_with_the_config_of_its_repository(tmp_path):
    """README.md of open-r1: accelerate launch --config_file recipes/accelerate_configs/zero3.yaml: 2 x 4 x 8 = 64 sequences."""
    job = job_of(tmp_path, ACCELERATE | {"recipes/own/sft/config.yaml": RECIPE}, "recipes/own/sft/config.yaml")
    assert (job.parallelism.zero_level, job.parallelism.dp, job.data.gbs) == (3, 8, 64)
    assert any(note.startswith("zero3.yaml read, with which the README") for note in job.notes)


def test_the_devices_that_a_recipe_names_go_before_those_of_that_config(tmp_path):
    text = "# Config for 1 node of 4 x H100s (80GB)\n" + RECIPE
    job = job_of(tmp_path, ACCELERATE | {"recipes/own/sft/config.yaml": text}, "recipes/own/sft/config.yaml")
    assert (job.parallelism.dp, job.data.gbs) == (4, 32)


def test_a_recipe_with_adapters_is_not_started_with_it(tmp_path):
    text = RECIPE + "use_peft: true\nlora_r: 8\n"
    job = job_of(tmp_path, ACCELERATE | {"recipes/own/sft/config.yaml": text}, "recipes/own/sft/config.yaml")
    assert job.parallelism.zero_level != 3


def test_a_recipe_of_preferences_is_refused(tmp_path):
    told = problems(tmp_path, ACCELERATE | {"recipes/own/dpo/config.yaml": RECIPE}, "recipes/own/dpo/config.yaml")
    assert told == ["a recipe of dpo: training on preferences or rewards is not modeled"]


PYTHIA = """num_layers: 12
hidden_size: 768
num_attention_heads: 12
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
no_weight_tying: true
train_micro_batch_size_per_gpu: 4
precision: fp16
tokenizer_type: HFTokenizer
"""


def test_the_vocabulary_is_the_presets_whose_family_and_sizes_a_config_has(tmp_path):
    """Pythia 160M: 50,304 rows of embedding (config.json of EleutherAI/pythia-160m)."""
    job = job_of(tmp_path, {"pythia/160M.yml": PYTHIA}, "pythia/160M.yml", "gpt-neox")
    assert (job.model.vocab_sz, job.model.inter_sz) == (50304, 3072)
    assert "vocabulary not set, pythia-160m's, whose other sizes the job has, assumed: 50304" in job.notes


@pytest.mark.parametrize("text", [PYTHIA.replace("768", "1024"), PYTHIA + "vocab_file: own_tokenizer_of_ours.json\n"])
def test_other_sizes_or_an_own_tokenizer_leave_it_open(tmp_path, text):
    told = problems(tmp_path, {"pythia/160M.yml": text}, "pythia/160M.yml", "gpt-neox")
    assert told == ["vocabulary size unknown; add --set model.vocab_sz=N"]


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [("megatron_llama.yaml", 32000), ("llama_7b.yaml", 32000), ("llama-3.yaml", None), ("codellama.yaml", 32016)],
)
def test_a_family_without_its_version_is_that_of_the_sizes(tmp_path, name, vocabulary):
    """LLaMA and Llama 2 7B have 32,000 entries, Code Llama 7B 32,016; a name with another version says nothing."""
    text = PYTHIA.replace("hidden_size: 768", "hidden_size: 4096\nintermediate_size: 11008")
    text = text.replace(": 12\n", ": 32\n")
    if vocabulary is None:
        assert problems(tmp_path, {name: text}, name, "gpt-neox")
    else:
        assert job_of(tmp_path, {name: text}, name, "gpt-neox").model.vocab_sz == vocabulary


DS_CONFIG = """cat <<EOT > ds.json
{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
EOT
"""
FLAGS = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \\
  --micro-batch-size 4 --global-batch-size 32 --vocab-size 1000 --fp16"""


def test_the_batch_of_a_ds_config_has_the_ranks_that_no_hostfile_beside_says(tmp_path):
    """32 sequences = 4 x 2 x 4 data-parallel ranks, over tp 2."""
    more = "--tensor-model-parallel-size 2 --deepspeed --deepspeed_config ds.json"
    run = f"deepspeed --hostfile hosts pretrain_gpt.py {FLAGS} {more}\n"
    layout = job_of(tmp_path, {"run.sh": DS_CONFIG + run}, "run.sh").parallelism
    assert (layout.dp, layout.devices, layout.zero_level) == (4, 8, 1)


def test_the_batch_of_a_ds_config_goes_before_the_launchers_default(tmp_path):
    """32 sequences = 4 x 2 x 4 ranks, where DeepSpeed's launcher would start every device of a node."""
    job = job_of(
        tmp_path,
        {"run.sh": f"{DS_CONFIG}deepspeed pretrain_gpt.py {FLAGS} --deepspeed --deepspeed_config ds.json\n"},
        "run.sh",
    )
    assert (job.parallelism.dp, job.parallelism.devices) == (4, 4)
    assert not [note for note in job.notes if note.startswith("number of devices")]


def test_a_batch_that_variables_of_devices_do_not_divide_asks_for_their_number(tmp_path):
    """3 of WORLD_SIZE, which the one process that Python starts does not read, have no whole share of 32 sequences in fours."""
    run = f"WORLD_SIZE=3\nRANK=0\npython pretrain_gpt.py {FLAGS}\n"
    (told,) = problems(tmp_path, {"run.sh": run}, "run.sh")
    what = "3 devices (WORLD_SIZE of the script, whose command starts one process), 1 to a replica, do not divide the batch of 32"
    assert told.startswith(f"number of devices unknown: {what}; ")
    assert job_of(tmp_path, {"run.sh": run.replace("=3", "=4")}, "run.sh").parallelism.dp == 4


def test_a_fragment_of_flags_asks_for_the_script_that_reads_it(tmp_path):
    """As Megatron-LM's examples/post_training/modelopt/conf: the batch follows from the devices."""
    fragment = f'MODEL_ARGS=" {FLAGS.replace("--global-batch-size 32", "")} "\n'
    what = "no launch command: number of devices unknown; give the script that reads it --with this file, or"
    assert problems(tmp_path, {"conf.sh": fragment}, "conf.sh") == [f"{what} add --set parallelism.dp=N"]


def test_a_model_that_cannot_be_read_is_no_question_of_devices(tmp_path):
    text = "model_name_or_path: Qwen/Qwen3-30B-A3B\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\nbf16: true\n"
    told = problems(tmp_path, {"sft.yaml": text + "per_device_train_batch_size: 1\n"}, "sft.yaml")
    assert told[0].startswith("performance.software: mixtures of experts are modeled for")


def test_one_process_of_levanter_has_the_devices_of_its_host(tmp_path):
    text = (
        "model: {type: llama, num_layers: 4, hidden_dim: 256, num_heads: 4, num_kv_heads: 4, intermediate_dim: 512}\n"
    )
    text += "data: {tokenizer: gpt2}\ntrainer:\n  train_batch_size: 64\n"
    job = job_of(tmp_path, {"a.yaml": text}, "a.yaml", "levanter")
    assert (job.parallelism.dp, job.data.gbs) == (8, 64)
    more = "  replica_dcn_axis_size: 2\n"
    assert problems(tmp_path, {"a.yaml": text + more}, "a.yaml", "levanter") == [
        "number of devices unknown; add --set parallelism.dp=N"
    ]


DS = '{"train_batch_size": 32, "zero_optimization": {"stage": 2}}'
RUN = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --per_device_train_batch_size 4\n"


@pytest.mark.parametrize(
    ("name", "text"), [("ds.json", DS), ("ds.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")]
)
def test_a_config_of_the_launcher_alone_names_the_script_that_uses_it(tmp_path, name, text):
    told = problems(tmp_path, {name: text, "run.sh": RUN.replace("ds.json", name)}, name)
    assert told[0].partition(";")[2] == " run.sh beside it names it: give that script, or add --set model=NAME"
    asks = ["a ds_config.json has no sequence length; add --set data.seqlen=N"]
    asks += ["number of devices unknown; add --set parallelism.dp=N, or set WORLD_SIZE"]
    assert told[1:] == (asks if name == "ds.json" else [])  # in the same round as the model
    assert (
        len(problems(tmp_path, {"other.sh": RUN.replace("ds.json", name)}, name)) > 1
    )  # which of the two is not known


def test_a_config_of_the_folder_from_which_a_script_is_started(tmp_path):
    run = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path gpt2 --max_seq_length 64 --fp16\n"
    (tmp_path / "scripts").mkdir()
    assert job_of(tmp_path, {"ds.json": DS, "scripts/run.sh": run}, "scripts/run.sh").parallelism.zero_level == 2


def test_a_config_that_was_moved_is_named_where_the_repository_has_one_of_its_name(tmp_path):
    (tmp_path / ".git").mkdir()
    run = "#!/bin/bash\ntorchrun --nproc_per_node 8 -m torchtitan.train --job.config_file ./configs/own.toml\n"
    moved = {"old/own.toml": "[training]\nsteps = 1\n", "scripts/run.sh": run}
    [told] = problems(tmp_path, moved, "scripts/run.sh")
    assert told.endswith(f"which was not found; put it in the same folder, or add --with {tmp_path / 'old/own.toml'}")
    [told] = problems(tmp_path, {"older/own.toml": "", "scripts/run.sh": run}, "scripts/run.sh")
    assert told.endswith("or add --with FILE")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen-7B-Chat", "qwen1.5-7b"),
        ("google/gemma-1.1-7b-it", "gemma-7b"),
        ("/ckpt/hf_llama_7b/", "llama1-7b"),
        ("internlm/internlm2_5-7b-chat", "internlm2-7b"),
        ("codellama/CodeLlama-7b-Instruct-hf", "codellama-7b"),
        ("codellama/CodeLlama-13b-Python-hf", "llama2-13b"),  # without the tokens of infilling
        ("01-ai/Yi-1.5-9B-Chat", "yi-9b"),
        ("deepseek-ai/deepseek-coder-6.7b-instruct", "deepseek-coder-6.7b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b-v0.2"),
        ("openlm-research/open_llama_7b_v2", "llama1-7b"),
        ("/models/llama_2_7b_fixed_resized", None),  # of another vocabulary
        ("Qwen/Qwen1.5-MoE-A2.7B", "qwen1.5-moe-a2.7b"),
        ("Qwen/Qwen-1_8B-Chat", "qwen1.5-1.8b"),
        ("allenai/Llama-3.1-Tulu-3-8B-SFT", "tulu3-8b"),  # 128,264 entries
        ("allenai/Llama-3.1-Tulu-3.1-8B", "tulu3-8b"),
        ("allenai/llama-3-tulu-2-8b", None),  # its entries are not known
        ("teknium/OpenHermes-2.5-Mistral-7B", "openhermes-2.5-mistral-7b"),  # 32,002 entries
        ("mistralai/Devstral-Small-2505", "mistral-small-24b"),
        ("mistralai/Magistral-Small-2507", "mistral-small-24b"),
        ("mistralai/Magistral-Small-2509", None),  # takes images
        ("mistralai/Ministral-8B-Instruct-2410", "ministral-8b"),
        ("EleutherAI/pythia-14m", "pythia-14m"),
        ("yulan-team/YuLan-Mini-Instruct", "yulan-mini-2.4b"),
        ("cerebras/Cerebras-GPT-1.3B", "cerebras-gpt-1.3b"),
        ("nvidia/Minitron-4B-Base", "minitron-4b"),
        ("codellama/CodeLlama-70b-Python-hf", "codellama-70b"),
        ("stabilityai/stable-code-3b", "stablelm-3b"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama3-8b"),
        ("NousResearch/Hermes-2-Pro-Llama-3-8B", None),  # 128,288 entries
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", "llama3-8b"),
        ("open-thoughts/OpenThinker2-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-Prover-V1.5-SFT", "deepseek-llm-7b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("/home/own/mistral-7b-v0.1-pretrain", "mistral-7b-v0.2"),  # 32,000 entries, not v0.3's
        ("defog/llama-3-sqlcoder-8b", "llama3-8b"),
        ("alignment-handbook/zephyr-7b-sft-full", "mistral-7b-v0.2"),
        ("tokyotech-llm/Llama-3.1-Swallow-8B-Instruct-v0.2", "llama3-8b"),
        ("elyza/ELYZA-japanese-Llama-2-7b-fast", None),  # 45,043 entries
        ("MLP-KTLim/llama-3-Korean-Bllossom-8B", None),  # 145,088 entries
        ("allenai/OLMo-1.7-7B-hf", "olmo-7b"),
        ("allenai/Olmo-3-7B-Think", "olmo3-7b"),
        ("internlm/internlm2-chat-7b", "internlm2-7b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("BramVanroy/gpt2-cpt-dutch", "gpt2-small"),
        ("HuggingFaceTB/SmolLM-360M", "smollm2-360m"),
        ("google/codegemma-7b-it", "gemma-7b"),
        ("google/codegemma-1.1-2b", "gemma-2b"),
        ("microsoft/phi-1", "phi-1.5"),
        ("microsoft/Phi-4-reasoning-plus", "phi4"),
        ("microsoft/Phi-4-mini-reasoning", "phi4-mini"),
        ("garage-bAInd/Platypus2-70B-instruct", "llama2-70b"),
        ("codellama/CodeLlama-34b-Python-hf", "codellama-34b"),
        ("mistralai/mathstral-7B-v0.1", "mistral-7b"),
        ("deepseek-ai/deepseek-coder-7b-instruct-v1.5", "deepseek-llm-7b"),
        ("nvidia/OpenMath-Nemotron-7B", "qwen2.5-7b"),
        ("google/functiongemma-270m-it", "gemma3-270m"),
    ],
)
def test_models_by_the_names_of_their_repositories(name, preset):
    assert preset_of(name) == preset


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("hub/models--Qwen--Qwen3-8B/snapshots/main", "qwen3-8b"),
        ("/ckpt/Qwen2.5-7B-Instruct-sft/checkpoint-500", "qwen2.5-7b"),
        ("/models/baichuan7B", "baichuan-7b"),
        ("phi-4", "phi4"),
        ("/checkpoint/llama_2/llama2/7B-hf", "llama2-7b"),
        ("/out/qwen3_novel_full_pretrain", None),  # no size
    ],
)
def test_models_by_the_folders_that_hold_them(name, preset):
    assert preset_of(name) == preset


@pytest.mark.parametrize(
    ("name", "preset"),
    [("own/Qwen25-1p5B-Memory", "qwen2.5-1.5b"), ("/ckpt/Mistral-7B-v0.1-own", "mistral-7b-v0.2"), ("own/model", "")],
)
def test_a_model_whose_name_begins_like_a_presets_is_asked_for_with_it(tmp_path, name, preset):
    run = f"torchrun --nproc_per_node 8 sft.py --model_name_or_path {name} --max_seq_length 64 --bf16"
    run += " --per_device_train_batch_size 1\n"
    [told] = problems(tmp_path, {"run.sh": run}, "run.sh")
    hint = f" ({preset}, if it has the sizes and vocabulary that its name begins with)" if preset else ""
    assert told.startswith(f"model '{name}' is not among the presets{hint}; add --set model=NAME")


def test_a_script_that_runs_another_is_of_its_kind(tmp_path):
    """Slurm's job starts the script of the training under srun; a script without marks beside it says nothing."""
    inner = "torchrun --nproc_per_node=$SLURM_GPUS_ON_NODE --nnodes=$SLURM_JOB_NUM_NODES run_sft.py sft.yaml\n"
    job = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsource ${HERE}/util.sh\nsrun container bash ${HERE}/train.sh\n"
    files = {
        "job.sh": f"#!/bin/bash\n{job}",
        "train.sh": f"#!/bin/bash\n{inner}",
        "util.sh": "#!/bin/bash\nPORT=1\n",
        "sft.yaml": "model_name_or_path: Qwen/Qwen2.5-7B\nmax_length: 2048\nper_device_train_batch_size: 1\nbf16: true\n",
    }
    found = job_of(tmp_path, files, "job.sh")
    assert (found.parallelism.dp, found.data.seqlen) == (8, 2048)
