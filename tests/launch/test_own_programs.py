"""Files of programs of one's own: names, defaults and configs that the trainer's own table does not have."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from steptime.base.config import ConfigError
from steptime.job.assembly import Assembly
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.read import read
from steptime.launch.reading import Reading, to_job
from steptime.launch.vocabulary import entries_of

SETS: dict[str, Any] = {"hardware.node_type": "dgx-h100"}


def from_text(folder: Path, name: str, text: str, kind: str = "auto", **sets: Any) -> Reading:
    """A file of that text, read."""
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return read(kind, str(path), SETS | sets)


def test_a_config_that_the_script_writes_is_read(tmp_path: Path) -> None:
    """`cat <<EOT > FILE`, as in Megatron-DeepSpeed's examples: the stage stands in the file alone."""
    script = """\
        STAGE=3
        CONFIG="out/zero.json"
        cat <<EOT > $CONFIG
        {"zero_optimization": {"stage": $STAGE}, "bf16": {"enabled": true}}
        EOT
        deepspeed --num_gpus 8 train.py --deepspeed $CONFIG --bf16 true --model_name_or_path Qwen/Qwen2.5-7B \\
            --per_device_train_batch_size 2 --max_seq_length 2048
    """
    plan = from_text(tmp_path, "run.sh", script).config
    assert plan["parallelism"] | {"zero_level": 3, "dp": 8} == plan["parallelism"]
    assert plan["performance"]["software"] == "deepspeed"


def test_a_written_config_with_an_open_value_is_no_config(tmp_path: Path) -> None:
    script = """\
        cat <<EOT > zero.json
        {"zero_optimization": {"stage": $STAGE}}
        EOT
        deepspeed --num_gpus 8 train.py --deepspeed zero.json --bf16 true --model_name_or_path Qwen/Qwen2.5-7B \\
            --per_device_train_batch_size 2 --max_seq_length 2048
    """
    found = from_text(tmp_path, "run.sh", script).left_open
    assert found is not None
    assert "zero.json was not found" in found["parallelism.zero_level"]


def test_a_deepspeed_config_within_the_yaml(tmp_path: Path) -> None:
    """TrainingArguments.deepspeed takes a path or the config itself (transformers training_args.py, deepspeed)."""
    text = """\
        model_name_or_path: Qwen/Qwen2.5-7B
        per_device_train_batch_size: 1
        max_length: 1024
        bf16: true
        num_processes: 4
        deepspeed:
          zero_optimization: {stage: 2}
          bf16: {enabled: true}
    """
    plan = from_text(tmp_path, "job.yaml", text, "transformers").config
    assert plan["parallelism"]["zero_level"] == 2
    assert plan["performance"]["software"] == "deepspeed"


@pytest.mark.parametrize("option", ["ds_config", "deepspeed_config_path"])
def test_a_ds_config_by_the_name_of_a_program_of_ones_own(tmp_path: Path, option: str) -> None:
    (tmp_path / "zero.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}', encoding="utf-8"
    )
    script = f"""\
        deepspeed --num_gpus 8 train.py --{option} zero.json --bf16 true --model_name_or_path Qwen/Qwen2.5-7B \\
            --per_device_train_batch_size 2 --max_seq_length 2048
    """
    plan = from_text(tmp_path, "run.sh", script).config
    assert (plan["parallelism"]["zero_level"], plan["performance"]["software"]) == (3, "deepspeed")


def test_a_module_after_the_long_option(tmp_path: Path) -> None:
    """deepspeed --module PACKAGE.MODULE (deepspeed/launcher/runner.py), and a stage without any other word for DeepSpeed."""
    script = """\
        if [ -z "${BASH_VERSION}" ]; then echo "use bash" >&2; exit 1; fi
        deepspeed --num_gpus 4 --module safe_rlhf.finetune --model_name_or_path huggyllama/llama-7b --max_length 2048 \\
            --per_device_train_batch_size 4 --zero_stage 2 --offload none --bf16 True
    """
    plan = from_text(tmp_path, "sft.sh", script).config
    assert plan["model"]["preset"] == "llama1-7b"
    assert (plan["parallelism"]["dp"], plan["parallelism"]["zero_level"]) == (4, 2)
    assert plan["performance"]["software"] == "deepspeed"


OWN = """\
    torchrun --nproc_per_node 4 sft.py --model_path Qwen/Qwen2.5-3B --batch_size 2 --grad_accum 4 --max_len 1024 \\
        --no_gradient_checkpointing {more}
"""


def test_a_program_with_names_of_its_own(tmp_path: Path) -> None:
    """A batch beside steps of accumulation is that of a device: 2 x 4 x 4 devices."""
    plan = from_text(tmp_path, "run.sh", OWN.format(more="--bf16")).config
    assert plan["data"] == {"seqlen": 1024, "gbs": 32, "microbatch_sz": 2}
    assert "activation_checkpointing_type" not in plan["performance"]


def test_its_precision_is_asked_for(tmp_path: Path) -> None:
    """The trainer's default (fp32) is not that of a program with other arguments."""
    found = from_text(tmp_path, "run.sh", OWN.format(more=""))
    assert found.left_open is not None
    assert "precision unknown" in found.left_open["performance.precision"]
    assert "precision" not in found.config["performance"]


def test_a_batch_without_steps_stays_refused(tmp_path: Path) -> None:
    """Without steps of accumulation a batch may be that of all devices."""
    script = OWN.format(more="--bf16 --per_device_train_batch_size 4").replace("--grad_accum 4", "")
    flags = from_text(tmp_path, "run.sh", script).of("unmodeled")
    assert [flag.name for flag in flags] == ["batch_size"]


def test_python_alone_is_no_launcher(tmp_path: Path) -> None:
    """Without accelerate or torchrun, the default of neither tells the devices."""
    script = "python -m own.sft --model_name_or_path Qwen/Qwen2.5-3B --per_device_train_batch_size 2 --bf16 true\n"
    found = from_text(tmp_path, "run.sh", script)
    assert found.left_open is not None
    assert (
        found.left_open["parallelism.dp"]
        == "launched by python only: number of processes unknown; add --set parallelism.dp=N"
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B-Instruct", "llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2-Audio-7B"])
def test_a_model_of_images_or_sound_is_one_line(tmp_path: Path, name: str) -> None:
    text = f"model_name_or_path: {name}\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\n"
    found = from_text(tmp_path, "job.yaml", text)
    notes = [flag.note for flag in found.of("unmodeled") if flag.name == "model_name_or_path"]
    assert notes == ["another kind of model: it takes images or audio in addition to text"]


def test_nanotron_without_a_dtype_is_bf16(tmp_path: Path) -> None:
    """huggingface/nanotron src/nanotron/config/config.py, ModelArgs.__post_init__: dtype None is torch.bfloat16."""
    text = """\
        model:
          model_config: {hidden_size: 1024, num_hidden_layers: 4, num_attention_heads: 16, num_key_value_heads: 4,
                         intermediate_size: 2816, vocab_size: 32000, tie_word_embeddings: true, is_llama_config: true}
        parallelism: {dp: 4, tp: 1, pp: 1}
        optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
        tokens: {sequence_length: 1024, micro_batch_size: 4, batch_accumulation_per_replica: 2}
    """
    plan = from_text(tmp_path, "config.yaml", text, "nanotron").config
    assert plan["performance"]["precision"] == "bf16"


def test_a_tokenizer_in_the_cache_of_the_hub() -> None:
    """models--ORGANIZATION--NAME/snapshots/COMMIT (huggingface_hub file_download.py, repo_folder_name)."""
    path = "/home/u/.cache/huggingface/hub/models--Qwen--Qwen2.5-14B/snapshots/97e1e76335b7017d8f67c08a19d103c0504298c9"
    found = entries_of("HFTokenizer", [path])
    assert found is not None
    assert found[0] == 151665


@pytest.mark.parametrize("said", ["make_vocab_size_divisible_by: 1", "dtype: bfloat16"])
def test_nanotron_pads_a_vocabulary_to_its_ranks(tmp_path: Path, said: str) -> None:
    """src/nanotron/helpers.py, _vocab_size_with_padding: to a multiple of tp times make_vocab_size_divisible_by, 1 by default."""
    text = """\
        model:
          model_config: {hidden_size: 1024, num_hidden_layers: 4, num_attention_heads: 16, num_key_value_heads: 4,
                         intermediate_size: 2816, vocab_size: 50277, tie_word_embeddings: true, is_llama_config: true}
          {said}
        parallelism: {dp: 4, tp: 2, pp: 1}
        optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
        tokens: {sequence_length: 1024, micro_batch_size: 4, batch_accumulation_per_replica: 2}
    """
    job = to_job(from_text(tmp_path, "config.yaml", text.replace("{said}", said), "nanotron"), SETS)
    assert Assembly(job).shard.vocab == 50278


def test_another_kind_of_layers_under_nanotron_is_refused(tmp_path: Path) -> None:
    """A GPT of a fork has activation_function where Llama's config has hidden_act: its MLP has no gate."""
    text = """\
        model:
          dtype: bfloat16
          model_config: {activation_function: gelu, hidden_size: 1024, num_hidden_layers: 4, num_attention_heads: 16,
                         intermediate_size: 4096, vocab_size: 32000}
        parallelism: {dp: 4, tp: 1, pp: 1}
        tokens: {sequence_length: 1024, micro_batch_size: 4, batch_accumulation_per_replica: 2}
    """
    flags = from_text(tmp_path, "config.yaml", text, "nanotron").of("unmodeled")
    assert [flag.name for flag in flags] == ["model.model_config.activation_function"]
    fork = text.replace(
        "activation_function: gelu", "is_tt_config: true, tt_rank: 128, rope_theta: 1.0e4, use_cache: true"
    )
    flags = from_text(tmp_path, "config.yaml", fork, "nanotron").of("unmodeled")
    assert [flag.name for flag in flags] == ["model.model_config.is_tt_config", "model.model_config.tt_rank"]


def test_a_reward_model_is_no_training_on_sequences(tmp_path: Path) -> None:
    script = (
        "accelerate launch --num_processes 4 train_rm.py --model_name Qwen/Qwen2.5-7B --max_length 512 --batch_size 1\n"
    )
    with pytest.raises(ConfigError, match=r"runs train_rm.py: training on preferences or rewards is not modeled"):
        from_text(tmp_path, "rm.sh", script)


AXOLOTL = """\
    base_model: Qwen/Qwen2.5-7B
    sequence_len: 2048
    micro_batch_size: 1
    gradient_accumulation_steps: 16
    num_epochs: 1
    datasets: [{path: a.jsonl, type: chat_template}]
    bf16: true
    optimizer: adamw_torch_fused
    deepspeed: ds/zero3.json
"""


def test_a_script_that_writes_a_ds_config_is_of_the_yaml_that_it_names(tmp_path: Path) -> None:
    """A ds_config in the text makes no DeepSpeed file of a script of Axolotl; optimizer states on the host are read from it."""
    (tmp_path / "job.yaml").write_text(textwrap.dedent(AXOLOTL), encoding="utf-8")
    script = """\
        if [ ! -f ds/zero3.json ]; then
        cat > ds/zero3.json << 'EOF'
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_micro_batch_size_per_gpu": "auto"}
        EOF
        fi
        accelerate launch --num_processes 4 --mixed_precision bf16 -m axolotl.cli.train job.yaml
    """
    found = from_text(tmp_path, "run.sh", script)
    assert found.framework == "Axolotl"
    assert found.config["parallelism"]["zero_level"] == 3
    assert found.config["performance"]["cpu_offload"] == {"optimizer": 1.0}
    assert found.config["data"] == {"seqlen": 2048, "gbs": 64, "microbatch_sz": 1}


TEMPLATE = """\
{"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": STAGE},
 "fp16": {"enabled": true}, "tensorboard": {"output_path": "OUTPUT"}}
"""


@pytest.mark.parametrize(("stage", "level"), [("$ZERO", 2), ("0", 0)])
def test_a_ds_config_that_sed_fills_in(tmp_path: Path, stage: str, level: int) -> None:
    """The template with its words replaced, as in Megatron-DeepSpeed's examples: 8 devices, 64 sequences of 2 each time."""
    (tmp_path / "TEMPLATE.json").write_text(TEMPLATE, encoding="utf-8")
    script = f"""\
        ZERO=2; TEMPLATE=TEMPLATE.json; CONFIG=ds_$ZERO.json
        sed "s/BATCH/64/" $TEMPLATE | sed "s/MICRO/2/" \\
          | sed -e "s/STAGE/{stage}/" -e "s#OUTPUT#/out\\/own#g" > $CONFIG
        deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \\
          --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 --fp16 --vocab-file gpt2-vocab.json \\
          --merge-file gpt2-merges.txt --no-pipeline-parallel --deepspeed --deepspeed_config $CONFIG
    """
    found = from_text(tmp_path, "run.sh", script)
    assert (found.config["parallelism"]["zero_level"], found.config["parallelism"]["dp"]) == (level, 8)
    changed = from_text(tmp_path, "run.sh", script.replace("s/BATCH/", "s/BAT.*/"))
    assert "zero_level" not in changed.config["parallelism"]  # a pattern: what it replaces is not worked out
    with pytest.raises(
        ConfigError, match="a template: BATCH, MICRO, STAGE have no value; give the script that fills it in"
    ):
        read("auto", str(tmp_path / "TEMPLATE.json"))


def test_deepspeed_starts_what_the_job_was_given(tmp_path: Path) -> None:
    """Without a hostfile DeepSpeed takes the devices that it sees: four of sbatch's header, not the machine's eight."""
    script = """\
        #!/bin/bash
        #SBATCH --nodes=1
        #SBATCH --gpus-per-node=4
        deepspeed --module own.train_sft --pretrain Qwen/Qwen2.5-7B --max_len 1024 --train_batch_size 128 \\
            --micro_train_batch_size 8 --zero_stage 3 --bf16
    """
    assert from_text(tmp_path, "job.sh", script).config["parallelism"]["dp"] == 4


NEMO = """\
    trainer: {devices: 4, num_nodes: 1, precision: bf16, accumulate_grad_batches: 1}
    model:
      mcore_gpt: true
      micro_batch_size: 1
      global_batch_size: 8
      tensor_model_parallel_size: 1
      encoder_seq_length: 1024
      num_layers: 4
      hidden_size: 1024
      ffn_hidden_size: 4096
      num_attention_heads: 16
      tokenizer: {library: megatron, type: GPT2BPETokenizer}
      optim: {name: distributed_fused_adam}
"""


def test_a_script_over_a_nemo_config(tmp_path: Path) -> None:
    """hydra's overrides on the command line stand above the config that --config-path and --config-name name."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "gpt.yaml").write_text(textwrap.dedent(NEMO), encoding="utf-8")
    script = """\
        #!/bin/bash
        torchrun --nproc_per_node=4 examples/megatron_gpt_pretraining.py --config-path=/home/u/conf --config-name=gpt \\
            model.tensor_model_parallel_size=2 model.global_batch_size=64 ++trainer.num_nodes=2
    """
    plan = from_text(tmp_path, "run.sh", script, "nemo").config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (2, 4)
    assert plan["data"] == {"gbs": 64, "seqlen": 1024, "microbatch_sz": 1}


def test_a_script_over_a_nemo_config_that_is_not_there(tmp_path: Path) -> None:
    script = "#!/bin/bash\ntorchrun --nproc_per_node=4 pretrain.py --config-name=gpt model.global_batch_size=64\n"
    with pytest.raises(ConfigError, match=r"line 2 reads conf/gpt.yaml, which was not found"):
        from_text(tmp_path, "run.sh", script, "nemo")


def test_a_stage_on_the_command_line_is_of_a_program_of_ones_own(tmp_path: Path) -> None:
    """DeepSpeed-Chat's --zero_stage comes with its --dtype, fp16 by default (DeepSpeedExamples training/step1 main.py)."""
    script = """\
        deepspeed --num_gpus 1 --module dse_sft.sft --model_name_or_path huggyllama/llama-7b --per_device_train_batch_size 4 \\
            --max_seq_len 2048 --gradient_accumulation_steps 32 --zero_stage 2 --deepspeed
    """
    found = from_text(tmp_path, "sft.sh", script).left_open
    assert found is not None
    assert "precision unknown" in found["performance.precision"]


BATCH = """\
    torchrun --nproc_per_node 4 tune.py --base_model Qwen/Qwen2.5-7B --bf16 true --max_seq_length 2048 \\
        --batch_size 32 --gradient_accumulation_steps 2
"""


def test_a_batch_beside_accumulation_is_each_device_s_unless_the_program_divides_it(tmp_path: Path) -> None:
    """32 x 2 steps x 4 devices = 256 sequences; where tune.py divides them, 32 in all: 4 at a time on each device."""
    plan = from_text(tmp_path, "run.sh", BATCH).config
    assert plan["data"] == {"gbs": 256, "seqlen": 2048, "microbatch_sz": 32}
    assert any(
        "batch_size read as the batch of each device; for the global batch add --set data.gbs=N" in note
        for note in plan["notes"]
    )
    (tmp_path / "tune.py").write_text("per_device = args.batch_size // args.gradient_accumulation_steps // world\n")
    assert from_text(tmp_path, "run.sh", BATCH).config["data"] == {"gbs": 32, "seqlen": 2048, "microbatch_sz": 4}


def test_a_batch_of_all_devices_of_a_program_of_one_s_own(tmp_path: Path) -> None:
    script = BATCH.replace("--batch_size 32", "--global_batch_size 64 --per_device_train_batch_size 8")
    assert from_text(tmp_path, "run.sh", script).config["data"] == {"gbs": 64, "seqlen": 2048, "microbatch_sz": 8}


def test_adapters_that_lie_in_another_file_are_no_full_training(tmp_path: Path) -> None:
    script = BATCH.replace("--batch_size 32", "--per_device_train_batch_size 4 --lora_path_prefix /adapters/")
    with pytest.raises(ConfigError, match="lora_path_prefix /adapters/: adapters of a file that is not read"):
        to_job(from_text(tmp_path, "run.sh", script), SETS)


def test_the_folder_of_a_tokenizer_in_a_copy_of_the_repository_is_counted(tmp_path: Path) -> None:
    """Found below the top of the repository; a config.json that lies beside the script is not the tokenizer's."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text('{"vocab_size": 7}', encoding="utf-8")
    nearby = NearbyFiles(tmp_path / "runs")
    named = "/home/other/project/tokenizers/own_flat"
    assert entries_of("HFTokenizer", [named], nearby) is None
    (tmp_path / "tokenizers" / "own_flat").mkdir(parents=True)
    (tmp_path / "tokenizers" / "own_flat" / "config.json").write_text('{"vocab_size": 5120}', encoding="utf-8")
    assert entries_of("HFTokenizer", [named], nearby) == (5120, "as counted in config.json")


CHAT = """\
    deepspeed main.py --model_name_or_path facebook/opt-1.3b --per_device_train_batch_size 4 --max_seq_len 512 \\
        --zero_stage 2 --deepspeed
"""


@pytest.mark.parametrize(("half", "precision"), [("fp16", "fp16"), ("bf16", "bf16"), (None, None)])
def test_the_precision_of_deepspeed_chat_is_in_its_utilities(tmp_path: Path, half: str | None, precision: str) -> None:
    """Not the one that a comment has; asked for where the file is not there."""
    (tmp_path / "step1/scripts").mkdir(parents=True)
    (tmp_path / "utils").mkdir()
    (tmp_path / "step1/main.py").write_text("ds_config = get_train_ds_config(stage=args.zero_stage)\n")
    if half:
        other = {"fp16": "bf16", "bf16": "fp16"}[half]
        config = f'# "{other}": {{"enabled": True}},\n"{half}": {{\n    "enabled": True,\n}},\n'
        (tmp_path / "utils/ds_utils.py").write_text(config)
    found = from_text(tmp_path / "step1/scripts", "run.sh", CHAT)
    assert found.config["performance"].get("precision") == precision
    assert ("performance.precision" in (found.left_open or {})) == (half is None)
