"""Launch files as repositories publish them: several programs in a script, arguments of forks, logs without a printed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steptime.base.config import ConfigError
from steptime.launch.logs.printed_config import read_dump
from steptime.launch.read import read
from steptime.launch.reading import Reading, to_job
from steptime.validation.logged import read_run

MACHINE = {"hardware.node_type": "dgx-h100"}


def written(folder: Path, name: str, text: str, **sets: Any) -> Reading:
    """What is read of a file with that text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read("auto", str(path), MACHINE | sets)


def refused(folder: Path, name: str, text: str) -> tuple[str, ...]:
    """The lines for a file with that text, without its path."""
    with pytest.raises(ConfigError) as caught:
        to_job(written(folder, name, text), MACHINE)
    return tuple(line.removeprefix(f"{folder / name}: ") for line in caught.value.problems)


LLAMA = """\
#!/bin/bash
#SBATCH --nodes 1
declare -a WHERE=(--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node 8)
declare -a MODEL=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 256
    --bf16 --vocab-size 32000 --tokenizer-type NullTokenizer --swiglu
)
if [ "$1" = "convert" ]; then
    srun -l torchrun "${WHERE[@]}" tools/hf_weight_converter.py --shards 3 "${MODEL[@]}"
else
    srun -l torchrun "${WHERE[@]}" finetune_own.py "${MODEL[@]}" %s
fi
"""


def test_a_script_that_also_converts_is_read_as_run_without_arguments(tmp_path: Path) -> None:
    """`[ "$1" = "convert" ]` is false without arguments: the program that trains runs, 8 devices over tp 4 and pp 2, dp 1."""
    plan = written(tmp_path, "job.sbatch", LLAMA % "").config
    assert (plan["parallelism"]["dp"], plan["data"]["gbs"]) == (1, 256)
    assert plan["model"]["inter_sz"] == 10880  # 4 * 4096 * 2 / 3 = 10922, down to a multiple of 64


def test_flagscales_arguments_on_a_command_line(tmp_path: Path) -> None:
    """10922 up to a multiple of 256 is 11008; times 1.3 it is 14199, up to 14336. --apply-layernorm-rms is RMSNorm."""
    more = "--multiple-of 256 --apply-layernorm-rms --rotary-interleaved-patch --rotary-position-embeddings-in-fp32"
    reading = written(tmp_path, "job.sbatch", LLAMA % more)
    assert (reading.config["model"]["inter_sz"], reading.config["model"]["norm"]) == (11008, "rmsnorm")
    assert not reading.of("unmodeled")
    assert {flag.name for flag in reading.of("approximated")} >= {"--rotary-interleaved-patch"}
    wide = written(tmp_path, "job.sbatch", LLAMA % f"{more} --hidden-dim-multiplier 1.3")
    assert wide.config["model"]["inter_sz"] == 14336


def test_settings_of_generation_do_not_count_in_nemo(tmp_path: Path) -> None:
    """`inference` in a config of fine-tuning is for text generated after it."""
    config = """\
exp_manager: {name: own}
trainer: {devices: 8, num_nodes: 1, precision: bf16}
inference: {greedy: true, compute_attention_mask: true, tokens_to_generate: 30}
model:
  {micro_batch_size: 1, global_batch_size: 8, encoder_seq_length: 512, max_position_embeddings: 512, num_layers: 2,
  hidden_size: 256, num_attention_heads: 4, tokenizer: {type: GPT2BPETokenizer}, optim: {name: fused_adam}}
"""
    assert not written(tmp_path, "job.yaml", config).of("unmodeled")


def test_a_dump_of_32_columns() -> None:
    """Until 2021 a name and its dots fill 32 columns, and a longer name has none: its value follows after two spaces."""
    name = "apply_residual_connection_post_layernorm"
    lines = [
        f"{'-' * 20} arguments {'-' * 20}",
        f"  num_layers {'.' * 22} 24",
        f"  {name}  False",
        f"  tokens {'.' * 42} 7",
        f"{'-' * 16} end of arguments {'-' * 16}",
    ]
    assert read_dump(lines) == {"num_layers": "24", name: "False"}  # 48 columns in a dump of 32 are no argument


BRIDGE = '''\
"""An own recipe."""
from megatron.bridge.models import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig, GPTDatasetConfig


def own_config(name: str = "meta-llama/Llama-3.2-1B") -> ConfigContainer:
    bridge = AutoBridge.from_hf_pretrained(name, torch_dtype="bf16")
    model = bridge.to_megatron_provider()
    model.tensor_model_parallel_size = 2
    model.seq_length = 512
    return ConfigContainer(
        model=model, train=TrainingConfig(micro_batch_size=4, global_batch_size=8), dataset=GPTDatasetConfig(seq_length=512)
    )
'''


def test_the_provider_of_a_repositorys_model_takes_settings(tmp_path: Path) -> None:
    """AutoBridge's provider is the model of its repository, to which the recipe then gives its layout."""
    plan = written(tmp_path, "own.py", BRIDGE, **{"parallelism.dp": 2}).config
    assert plan["model"] == "llama3-1b" or plan["model"]["preset"] == "llama3-1b"
    assert (plan["parallelism"]["tp"], plan["data"]["gbs"]) == (2, 8)


def test_a_nemo_run_script_without_a_recipe_function_is_known_as_nemos(tmp_path: Path) -> None:
    """A recipe that a module elsewhere builds is not followed, and the line says what is needed."""
    text = "import nemo_run as run\nfrom nemo.collections import llm\nfrom mine import built\nrecipe = built()\n"
    (line,) = refused(tmp_path, "job.py", text)
    assert line.startswith("no function that returns run.Partial; add the function to the path")


def test_a_model_that_is_built_from_its_type(tmp_path: Path) -> None:
    """run_clm.py without a model's name: GPT-2 with other sizes, GPT-2's tokenizer, blocks of 1,024; 2 * 4 devices * 4 = 32."""
    text = """\
torchrun --nnodes 2 --nproc_per_node 4 examples/language-modeling/run_clm.py \\
  --model_type gpt2 --tokenizer_name gpt2 --config_overrides "n_embd=1024,n_head=16,n_layer=24,n_positions=1024" \\
  --per_device_train_batch_size 4 --fp16 --do_train
"""
    plan = written(tmp_path, "run.sh", text).config
    model = plan["model"]
    assert written(tmp_path, "run.sh", text.replace("--model_type", "--config_name")).config["model"] == model
    assert (model["n_layers"], model["hidden_sz"], model["n_q_heads"], model["vocab_sz"]) == (24, 1024, 16, 50257)
    assert (plan["data"]["seqlen"], plan["data"]["gbs"], plan["parallelism"]["dp"]) == (1024, 32, 8)
    # run_clm.py stops at overrides of a named model, so that a program with both has a length of its own
    other = text.replace("--model_type gpt2", "--model_name_or_path gpt2").replace(
        "n_embd=1024,n_head=16,n_layer=24,", ""
    )
    assert refused(tmp_path, "run.sh", other) == ("sequence length unknown; add --set data.seqlen=N",)


TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
"""
STEPS = "".join(
    f"[rank0]: step: {i}  loss: 2.0  memory: 40.00GiB(50.00%)  tps: 6,000  tflops: 280.0\n" for i in range(1, 40)
)


def test_a_log_of_torchtitan_has_the_config_of_the_command_at_its_head(tmp_path: Path) -> None:
    """A shell that shows its commands (set -x) names the TOML; the command's own settings go over it: dp 8 / tp 2 = 4."""
    (tmp_path / "job.toml").write_text(TITAN, encoding="utf-8")
    log = tmp_path / "run.log"
    command = '+ torchrun --nproc_per_node=8 -m own.train --job.config_file=/old/place/job.toml --job.description="two\nlines"'
    log.write_text(f"{command} --parallelism.tensor_parallel_degree=2\n{STEPS}", encoding="utf-8")
    job = read_run([str(log)], ["hardware.node_type=dgx-h100"]).job
    assert (job.parallelism.tp, job.parallelism.dp, job.data.gbs) == (2, 4, 8)
    log.write_text(f"{command} --freezing.freeze\n{STEPS}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"freezing\.freeze true: not an option of torchtitan"):
        read_run([str(log)], ["hardware.node_type=dgx-h100"])
    log.write_text(STEPS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"does not print the job's config.*or add --plan FILE"):
        read_run([str(log)], ["hardware.node_type=dgx-h100"])


def test_a_comment_that_quotes_a_step_makes_no_log(tmp_path: Path) -> None:
    """A TOML is read as one, and a script keeps its variables: 16 / 8 = 2 nodes of 8 processes, tp 2, dp 8."""
    toml = f"# step: 100  loss: 7.1\n{TITAN}tensor_parallel_degree = 2\n"
    plan = written(tmp_path, "job.toml", toml, **{"parallelism.dp": 8}).config
    assert (plan["parallelism"]["tp"], plan["data"]["seqlen"]) == (2, 4096)
    text = """\
#!/bin/bash
  # throughput at step: 100 was 5,800 tps
NGPU=${NGPU:-16}
torchrun --nproc_per_node=8 --nnodes=$((NGPU/8)) -m torchtitan.train --job.config_file=job.toml
"""
    plan = written(tmp_path, "run.sh", text).config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (2, 8)


def test_the_batch_of_a_ds_config_goes_before_the_trainers_default(tmp_path: Path) -> None:
    """An own program: 2 sequences on each of 8 devices, 3 steps of accumulation, 48; by the whole batch alone 80 / 8 = 10."""
    config = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, %s}'
    text = "torchrun --nproc_per_node 8 own.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-2-7b-hf %s"
    (tmp_path / "ds.json").write_text(
        config % '"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3', encoding="utf-8"
    )
    plan = written(tmp_path, "run.sh", text % "").config
    assert (plan["data"]["gbs"], plan["data"]["microbatch_sz"], plan["performance"]["precision"]) == (48, 2, "bf16")
    (tmp_path / "ds.json").write_text(config % '"train_batch_size": 80', encoding="utf-8")
    plan = written(tmp_path, "run.sh", text % "").config
    assert (plan["data"]["gbs"], plan["data"]["microbatch_sz"]) == (80, 10)
    (tmp_path / "ds.json").write_text(config % '"train_micro_batch_size_per_gpu": "auto"', encoding="utf-8")
    plan = written(tmp_path, "run.sh", text % "--per_device_train_batch_size 4").config
    assert (plan["data"]["gbs"], plan["data"]["microbatch_sz"]) == (32, 4)


def test_a_program_that_names_only_its_ds_config_is_deepspeeds(tmp_path: Path) -> None:
    """--deepspeed_config without --deepspeed: no script of Megatron-LM."""
    lines = refused(tmp_path, "run.sh", "torchrun --nproc_per_node 8 own.py --deepspeed_config ds.json\n")
    assert lines[0] == "ds.json was not found; add --with FILE, or --set parallelism.zero_level=N"
    assert "sequence length unknown; add --set data.seqlen=N" in lines
    assert "model unknown; add --set model=NAME (3dtrn models), or --set model.hf=CONFIG.json" in lines


def test_what_a_ds_config_lacks_and_what_is_wrong_in_it_are_told_in_one_round(tmp_path: Path) -> None:
    """Two values that are no sizes, a stage that does not exist, and the three settings that only the user has."""
    text = """{"train_batch_size": -4, "train_micro_batch_size_per_gpu": "x", "zero_optimization": {"stage": 9}}"""
    assert refused(tmp_path, "ds.json", text) == (
        "a ds_config.json names no model; add --set model=NAME (3dtrn models lists them)",
        "a ds_config.json has no sequence length; add --set data.seqlen=N",
        "number of devices unknown; add --set parallelism.dp=N, or set WORLD_SIZE",
        "train_batch_size: expected a whole number of at least 1 (got -4)",
        "train_micro_batch_size_per_gpu: expected a whole number of at least 1 (got 'x')",
        "zero_optimization.stage: expected one of 0, 1, 2, 3 (got 9)",
    )


@pytest.mark.parametrize(("layers", "noted"), [(32, False), (30, True)])
def test_a_flavor_is_that_of_the_registry_beside_the_config(tmp_path: Path, layers: int, noted: bool) -> None:
    """A fork may keep the name 8B for another depth: its own registry goes before torchtitan's, and is noted where it differs."""
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    sizes = f"dim=4096, n_layers={layers}, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=5e5"
    (folder / "__init__.py").write_text(f'llama3_configs = {{\n    "8B": ModelArgs({sizes}),\n}}\n', encoding="utf-8")
    reading = written(folder, "job.toml", TITAN, **{"parallelism.dp": 8})
    job = to_job(reading, MACHINE)
    assert (job.model.n_layers, job.model.inter_sz, job.model.vocab_sz) == (layers, 14336, 128256)
    assert any("from torchtitan/models/llama3" in note for note in job.notes) is noted


def test_dominos_layers_are_no_megatron_lms(tmp_path: Path) -> None:
    """DeepSpeed-Domino has flags of Megatron-LM, another order of exchange, and a head that is not tied."""
    line, _ = sorted(refused(tmp_path, "job.sbatch", LLAMA % "--llama-model --causal-lm"), reverse=True)
    assert line.startswith("--llama-model true: DeepSpeed-Domino's layers")


def test_gpt_neoxs_dump_is_no_megatron_lms() -> None:
    """Its names and dots may fill as many columns; its lines end in where a value is from."""
    rule = "-" * 20
    lines = [
        f"{rule} arguments {rule}",
        f"  num_layers {'.' * 22} 12{'.' * 26}updated",
        f"{rule} end of arguments {rule}",
    ]
    with pytest.raises(ConfigError, match="the dump of arguments is empty"):
        read_dump(lines)


def test_a_log_of_deepspeed_is_no_config(tmp_path: Path) -> None:
    """DeepSpeed-Chat's actor_opt-1.3b log: its launcher's command and steps, but no config."""
    text = (
        "cmd = deepspeed main.py --actor_zero_stage 0 --deepspeed\n[INFO] [runner.py:550:main] deepspeed_config zero\n"
    )
    path = tmp_path / "training.log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read("deepspeed", str(path), {})
    assert (
        error.value.problems[0].partition("training.log: ")[2].startswith("a log that does not print the job's config")
    )
