"""Files as people publish them: what forks, trainers and clusters write otherwise than the frameworks' own examples."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import Reading, to_job

SETS: dict[str, Any] = {"hardware.node_type": "dgx-h100"}
GPT = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \\
    --vocab-size 1000 --micro-batch-size 2 --global-batch-size 32 --fp16"""


def written(folder: Path, name: str, text: str, **sets: Any) -> Reading:
    """A file of that text, read by its marks."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return read("auto", str(path), SETS | sets)


def asked(folder: Path, name: str, text: str, **sets: Any) -> tuple[str, ...]:
    """What the errors of that file say after its name."""
    with pytest.raises(ConfigError) as error:
        to_job(written(folder, name, text, **sets), SETS | sets)
    return tuple(line.partition(f"{name}: ")[2] for line in error.value.problems)


# --- Axolotl, Hugging Face Trainer ------------------------------------------------------------------------------------------


def test_axolotls_fsdp_config_alone_is_fsdp(tmp_path: Path) -> None:
    """Axolotl src/axolotl/utils/schemas/config.py: `fsdp` is the older way to say it."""
    job = """\
        base_model: Qwen/Qwen2.5-0.5B
        sequence_len: 1024
        micro_batch_size: 2
        bf16: true
    """
    assert written(tmp_path, "ddp.yaml", job).config["performance"]["software"] == "accelerate-ddp"
    plan = written(tmp_path, "fsdp.yaml", textwrap.dedent(job) + "fsdp_config: {fsdp_version: 2}\n").config
    assert plan["performance"]["software"] == "accelerate"
    assert plan["parallelism"]["fsdp"]["version"] == 2


def test_a_base_model_alone_is_not_axolotls(tmp_path: Path) -> None:
    text = """\
        base_model: meta-llama/Llama-3.1-8B-Instruct
        per_device_train_batch_size: 1
        total_episodes: 10000
    """
    assert asked(tmp_path, "rl.yaml", text)[0].startswith("total_episodes 10000: reinforcement learning")


def test_merging_models_is_no_training(tmp_path: Path) -> None:
    text = """\
        base_model: own/model
        per_device_train_batch_size:
        merge_method: task_arithmetic
    """
    text = textwrap.dedent(text).replace("per_device_train_batch_size:\n", "") + "datasets: []\n"
    assert asked(tmp_path, "merge.yaml", text) == ("merge_method task_arithmetic: this job does not train",)


def test_without_accelerates_config_large_states_are_asked_for(tmp_path: Path) -> None:
    """8.0e9 parameters x 16 bytes = 120 GiB of states; a replica on each H100 has 80: the sharding is in another file."""
    text = """\
        model_name_or_path: meta-llama/Llama-3.1-8B
        per_device_train_batch_size: 1
        max_length: 2048
        bf16: true
    """
    (line,) = asked(tmp_path, "sft.yaml", text)
    assert line.startswith(
        "sharding unknown (no accelerate config is named, and 120 GiB of states do not fit on one device)"
    )
    assert line.endswith("; add --with FILE")
    small = text.replace("meta-llama/Llama-3.1-8B", "HuggingFaceTB/SmolLM2-135M")
    assert to_job(written(tmp_path, "small.yaml", small), SETS).parallelism.dp == 8


def test_adapters_that_only_the_code_sets_up(tmp_path: Path) -> None:
    script = """\
        #!/bin/bash
        torchrun --nproc_per_node 4 ../src/train_own.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 True \\
            --per_device_train_batch_size 1 --max_seq_length 512
    """
    program = tmp_path / "src" / "train_own.py"
    program.parent.mkdir()
    program.write_text("model = get_peft_model(model, LoraConfig(r=8))\n", encoding="utf-8")
    lora = written(tmp_path, "scripts/run.sh", script).config["model"]["lora"]
    assert (lora["rank"], lora["targets"]) == (8, ["q_proj", "v_proj"])  # peft's targets of Qwen2
    program.write_text("if args.use_lora:\n    model = get_peft_model(model, LoraConfig(r=8))\n", encoding="utf-8")
    assert "lora" not in written(tmp_path, "scripts/run.sh", script).config["model"]


def test_a_program_above_its_script_has_its_defaults(tmp_path: Path) -> None:
    """A script in training_scripts/single_node, run from the folder of main.py (as DeepSpeed-Chat's)."""
    (tmp_path / "main.py").write_text('parser.add_argument("--max_seq_len", type=int, default=384)\n', encoding="utf-8")
    script = """\
        deepspeed --num_gpus 4 main.py --model_name_or_path facebook/opt-1.3b --per_device_train_batch_size 4 \\
            --zero_stage 2 --bf16 --deepspeed
    """
    reading = written(tmp_path, "training_scripts/single_node/run.sh", script)
    assert reading.config["data"]["seqlen"] == 384


def test_srun_of_deepspeeds_launcher_leaves_the_devices_open(tmp_path: Path) -> None:
    """Each of the nodes has a launcher of its own, which without a hostfile sees its node alone."""
    script = """\
        srun --nodes=2 --gpus-per-node=8 deepspeed train.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 True \\
            --per_device_train_batch_size 1 --max_seq_length 512 --zero_stage 3
    """
    why = "srun starts DeepSpeed's launcher on each of 2 nodes: number of devices unknown"
    assert asked(tmp_path, "run.sh", script) == (f"{why}; add --set parallelism.dp=N",)


def test_a_word_of_the_script_in_the_name_of_a_config(tmp_path: Path) -> None:
    script = """\
        #!/bin/bash
        accelerate launch --config_file configs/$4.yaml train.py --model_name_or_path own/model
    """
    assert asked(tmp_path, "train.sh", script) == (
        "line 2: $4 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'",
    )


def test_the_log_of_ms_swifts_processes_begins_with_their_command(tmp_path: Path) -> None:
    flags = "--model Qwen/Qwen3-8B --max_length 1024 --per_device_train_batch_size 2 --torch_dtype bfloat16 --deepspeed zero2"
    text = f"""\
        run sh: `python -m torch.distributed.run --nproc_per_node 4 swift/cli/sft.py {flags}`
        [INFO:swift] args: SftArguments(
        adapters=[],
    """
    plan = written(tmp_path, "stdout.log", text).config
    assert (plan["parallelism"]["dp"], plan["parallelism"]["zero_level"]) == (4, 2)
    assert plan["data"] == {"seqlen": 1024, "gbs": 8, "microbatch_sz": 2}


# --- Megatron-LM and Megatron-DeepSpeed ------------------------------------------------------------------------------------


def test_a_task_after_pretraining_is_no_pretraining(tmp_path: Path) -> None:
    script = f"torchrun --nproc_per_node 8 tasks/main.py --task MNLI {GPT}\n"
    (line,) = asked(tmp_path, "mnli.sh", script)
    assert line.startswith("--task MNLI: another kind of model: a task of Megatron-LM's after pretraining")


def test_megatron_deepspeed_at_stage_2(tmp_path: Path) -> None:
    script = f"deepspeed --num_gpus 4 pretrain_gpt.py --deepspeed --zero-stage=2 --no-pipeline-parallel {GPT}\n"
    reading = written(tmp_path, "run.sh", script)
    assert reading.config["parallelism"]["zero_level"] == 2
    assert to_job(reading, SETS).parallelism.dp == 4
    without = written(tmp_path, "run.sh", script.replace("--deepspeed ", "")).flags  # its engine, whose stage it is
    assert [flag.status for flag in without if flag.name == "--zero-stage"] == ["irrelevant"]
    (line,) = asked(tmp_path, "run.sh", script.replace("=2", "=3"))
    assert line.startswith("--zero-stage 3: DeepSpeed's gathers of parameters (ZeRO stage 3) around Megatron's layers;")


def test_unfused_attention_around_ulysses_is_deepspeeds_own(tmp_path: Path) -> None:
    """deepspeed/sequence/layer.py runs any attention between its exchanges; Megatron-Core's refusal does not apply."""
    ranks = "--deepspeed --zero-stage 1 --no-pipeline-parallel --ds-sequence-parallel-size 2"
    script = f"deepspeed --num_gpus 4 pretrain_gpt.py {ranks} {GPT}\n"
    (line,) = asked(tmp_path, "run.sh", script)
    assert line.startswith(
        "parallelism.cp: megatron-deepspeed exchanges tokens for heads (Ulysses) around unfused attention"
    )


def test_ds_ssh_counts_the_devices_of_the_job(tmp_path: Path) -> None:
    """ds_ssh prints two lines of its own, which scripts subtract: 512 sequences over 16 devices are 32 on each."""
    flags = GPT.replace("batch-size 2 ", "batch-size $batch ").replace("32 ", "512 ")
    script = f"""\
        num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)-2))
        batch=$((512 / num_gpus))
        deepspeed pretrain_gpt.py --deepspeed --zero-stage 1 {flags}
    """
    (line,) = asked(tmp_path, "run.sh", script)
    assert "number of devices unknown, which $(ds_ssh nvidia-smi" in line
    assert line.endswith("counts; add --set devices=N")
    plan = written(tmp_path, "run.sh", script, devices=16).config
    assert (plan["data"]["gbs"], plan["data"]["microbatch_sz"], plan["parallelism"]["dp"]) == (512, 32, 16)


def test_a_ds_config_of_another_batch_is_a_contradiction(tmp_path: Path) -> None:
    inner = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(inner), encoding="utf-8")
    script = f"deepspeed --num_gpus 4 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --zero-stage 1 {GPT}\n"
    assert asked(tmp_path, "run.sh", script) == (
        "ds.json: train_batch_size 64 contradicts --global-batch-size 32; add --set data.gbs=N",
    )
    told = written(tmp_path, "run.sh", script, **{"data.gbs": 64})
    assert to_job(told, SETS | {"data.gbs": 64}).data.gbs == 64


def test_the_tokenizer_of_argument_files_is_the_variable_that_their_script_passes_on(tmp_path: Path) -> None:
    """As in Megatron-LM's examples/post_training/modelopt/conf."""
    text = f"""\
        #!/bin/bash
        if [ -z ${{CKPT}} ]; then
            TOKENIZER_MODEL=Qwen/Qwen3-8B
        fi
        MODEL_ARGS="{GPT.replace("--vocab-size 1000 ", "--tokenizer-type HuggingFaceTokenizer ")}"
    """
    assert written(tmp_path, "conf.sh", text).config["model"]["vocab_sz"] == 151669


def test_flags_of_another_program_are_told_in_one_line(tmp_path: Path) -> None:
    script = """\
        mpirun -np 16 python examples/finetuning.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 \\
            --low-cpu-fsdp --sharding-strategy FULL_SHARD --mixed-precision
    """
    (line,) = asked(tmp_path, "run.sh", script)
    assert line.startswith("line 1 launches examples/finetuning.py, whose flags are not Megatron-LM's (--low-cpu-fsdp,")


def test_values_by_commands_are_told_in_one_line(tmp_path: Path) -> None:
    script = """\
        layers=$(yq .layers model.yaml)
        hidden=$(yq .hidden model.yaml)
        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $layers --hidden-size $hidden --micro-batch-size 1
    """
    (line,) = asked(tmp_path, "run.sh", script)
    assert line.startswith("line 1: --num-layers, --hidden-size: $(yq .layers model.yaml) in line 1 is a command")
    assert line.endswith("write the values into the script (and 1 other)")


def test_llamas_tokenizer_type_says_nothing_of_another_models_vocabulary(tmp_path: Path) -> None:
    """Llama2Tokenizer reads any SentencePiece model: Yi's scripts (64,000 entries) have it too."""
    flags = GPT.replace(
        "--vocab-size 1000 ", '--tokenizer-type Llama2Tokenizer --tokenizer-model "your tokenizer path" '
    )
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}\n"
    assert asked(tmp_path, "yi/pretrain_yi_6b.sh", script) == ("vocabulary size unknown; add --set model.vocab_sz=N",)
    for name in ("llama2/pretrain_7b.sh", "mixtral-8x7b/pretrain.sh", "mistral/mistral-7b.sh"):
        assert written(tmp_path, name, script).config["model"]["vocab_sz"] == 32000
    (line,) = asked(tmp_path, "mistral/mistral-7b-v0.3.sh", script)  # 32,768 entries
    assert line.startswith("vocabulary size unknown")


def test_mindspeeds_list_of_layers(tmp_path: Path) -> None:
    flags = f"--pipeline-model-parallel-size 2 --num-layer-list 3,1 --stage sft {GPT}"
    script = f"torchrun --nproc_per_node 8 posttrain_gpt.py {flags}\n"
    assert written(tmp_path, "run.sh", script).config["parallelism"]["layers_per_stage"] == [3, 1]
    (line,) = asked(tmp_path, "wrong.sh", script.replace("3,1", "3,2"))
    assert line == "--num-layer-list does not distribute 4 layers over 2 stages"
    (line,) = asked(tmp_path, "orm.sh", script.replace("--stage sft", "--stage orm"))
    assert line.startswith("--stage orm: reinforcement learning, or a reward model")


def test_programs_and_logs_that_say_no_config(tmp_path: Path) -> None:
    assert asked(tmp_path, "run.py", f"cmd = 'pretrain_gpt.py {GPT}'\n")[0].startswith(
        "a Python program, which is not run"
    )
    log = "INFO llamafactory-cli train job\n{'loss': 1.2}\n{'loss': 1.1}\n"
    assert asked(tmp_path, "job.out", log)[0].startswith("a log that does not print the job's config")


def test_the_folder_that_the_reader_is_in_is_not_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/somewhere/else")
    script = "#!/bin/bash\naccelerate launch --config_file $PWD/fsdp.yaml train.py --model_name_or_path own/model\n"
    assert asked(tmp_path, "run.sh", script)[0].startswith("line 2 reads ./fsdp.yaml, which was not found")


# --- GPT-NeoX, Levanter, MaxText, torchtitan ---------------------------------------------------------------------------------

NEOX = """\
    {
      # "of its own"
      "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
      "max_position_embeddings": 128, "checkpoint_factor": 100, "precision": "bfloat16",
      "train_micro_batch_size_per_gpu": 4, "te_layernorm_mlp": true, "te_fp8_format": "hybrid",
      "vocab_file": "/data/neox_tokenizer/tokenizer.json", "tokenizer_type": "HFTokenizer", "launcher": "%s",
    }
"""


def test_gpt_neox_under_another_launcher_asks_for_the_devices(tmp_path: Path) -> None:
    """DeepSpeed's pdsh takes the node that it is on, Slurm the job's allocation; TransformerEngine's fp8 needs te_fp8_mha."""
    assert asked(tmp_path, "job.yml", NEOX % "slurm") == ("number of devices unknown; add --set parallelism.dp=N",)
    plan = written(tmp_path, "job.yml", NEOX % "pdsh").config
    assert plan["parallelism"]["dp"] == 8
    assert plan["performance"]["precision"] == "bf16"
    assert plan["model"]["vocab_sz"] == 50277


def test_levanters_mistral_is_llama_with_defaults_of_its_own(tmp_path: Path) -> None:
    """Levanter models/mistral.py: LlamaTransformer, MLP 14336 wide, 8 key and value heads, sequences of 8192 tokens."""
    text = """\
        data: {tokenizer: mistralai/Mistral-7B-v0.1}
        model: {type: mistral, num_layers: 32, hidden_dim: 4096, num_heads: 32, sliding_window: 4096}
        trainer:
          train_batch_size: 64
          mp: p=f32,c=bfloat16
          replica_dcn_axis_size: 2
    """
    reading = written(tmp_path, "job.yaml", text, devices=16)
    model = reading.config["model"]
    assert (model["inter_sz"], model["n_kv_heads"], model["vocab_sz"]) == (14336, 8, 32000)
    assert reading.config["data"]["seqlen"] == 8192
    job = to_job(reading, SETS)
    assert (job.parallelism.dp, job.parallelism.replicas, job.zero_level) == (16, 2, 3)


def test_maxtexts_model_name_goes_before_the_sizes_of_base_yml(tmp_path: Path) -> None:
    """MaxText/pyconfig.py reads models/NAME.yml over base.yml; dcn_data replicates what ici_fsdp shards: 8 x 4 devices."""
    base = """\
        model_name: "default"
        base_emb_dim: 2048
        base_num_decoder_layers: 16
        base_mlp_dim: 7168
        base_num_query_heads: 16
        base_num_kv_heads: 16
        vocab_size: 32_000
        dtype: "bfloat16"
        weight_dtype: "float32"
        kv_lora_rank: 512
        num_experts: 1
        num_experts_per_tok: 1
        dcn_data_parallelism: -1
        ici_fsdp_parallelism: -1
        ici_data_parallelism: 1
        ici_fsdp_transpose_parallelism: 1
    """
    configs = tmp_path / "MaxText" / "configs"
    configs.mkdir(parents=True)
    (configs / "base.yml").write_text(textwrap.dedent(base), encoding="utf-8")
    script = """\
        python3 -m MaxText.train MaxText/configs/base.yml model_name=llama2-7b per_device_batch_size=2 \\
            max_target_length=4096 dcn_data_parallelism=4 ici_fsdp_parallelism=8
    """
    reading = written(tmp_path, "run.sh", script)
    assert reading.config["model"] == {"preset": "llama2-7b"}
    assert reading.config["parallelism"] == {"tp": 1, "pp": 1, "dp": 32, "replicas": 4}
    assert to_job(reading, SETS).data.gbs == 64


def test_torchtitans_seed_checkpoint_is_no_training(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 128\n', encoding="utf-8"
    )
    script = """\
        #!/bin/bash
        torchrun --nproc_per_node=1 train.py --job.config_file ./job.toml --checkpoint.create_seed_checkpoint
    """
    assert asked(tmp_path, "seed.sh", script) == ("checkpoint.create_seed_checkpoint: this job does not train",)


def test_a_script_of_torchtitan_is_given_the_config_as_its_argument(tmp_path: Path) -> None:
    script = '#!/bin/bash\ntorchrun --nproc_per_node 8 \\\n    -m torchtitan.train "$@"\n'
    fix = "give script and arguments in one string: 'run.sh --job.config_file JOB.toml'"
    assert asked(tmp_path, "run.sh", script) == (f"names no config; {fix}",)
    job = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[parallelism]\n"
    (tmp_path / "job.toml").write_text(job, encoding="utf-8")
    found = read("auto", f"{tmp_path / 'run.sh'} --job.config_file {tmp_path / 'job.toml'}", SETS)
    assert to_job(found, SETS).parallelism.devices == 8


def test_a_run_that_is_kept_by_wandb_says_its_program(tmp_path: Path) -> None:
    kept = """\
        _wandb: {value: {e: {x1: {codePath: train_dpo.py}}}}
        model_name_or_path: {value: Qwen/Qwen2.5-7B}
        deepspeed: {value: ds.json}
        per_device_train_batch_size: {value: 4}
    """
    told = "runs train_dpo.py: training on preferences or rewards is not modeled"
    assert asked(tmp_path, "config.yaml", kept) == (told,)
    lines = asked(tmp_path, "config.yaml", kept.replace("train_dpo", "train_sft"))
    assert any("ds.json was not found" in line for line in lines)
