"""Recipes of torchtune: what each says, worked out by hand from recipes/*.py of pytorch/torchtune."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.devices import of_comment
from steptime.launch.named_models import preset_of
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.lora import EVERY, QKV

BODY = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: {length}
model:
  _component_: {model}
{adapters}
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: True
batch_size: 4
gradient_accumulation_steps: 8
optimizer:
  _component_: {optimizer}
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
compile: {compiled}
dtype: {dtype}
enable_activation_checkpointing: True
enable_activation_offloading: False
{more}
"""
LORA = """
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: {mlp}
  lora_rank: 64
  lora_dropout: 0.0"""
TWO, ONE = (
    "# tune run --nproc_per_node 2 lora_finetune_distributed",
    "# tune run full_finetune_single_device --config x",
)


def recipe(tmp_path, comment=TWO, **said):
    usual = {"model": "torchtune.models.llama3_1.llama3_1_8b", "adapters": "", "optimizer": "torch.optim.AdamW"}
    usual |= {"length": 8192, "compiled": False, "dtype": "bf16", "more": ""}
    path = tmp_path / "recipe.yaml"
    path.write_text(comment + BODY.format(**usual | said))
    return to_job(read("auto", str(path), HARDWARE), HARDWARE)


def problems(tmp_path, **said):
    with pytest.raises(ConfigError) as error:
        recipe(tmp_path, **said)
    return [line.rpartition("recipe.yaml: ")[2] for line in error.value.problems]


def test_a_recipe_of_two_devices_shards_by_fsdp_2_and_holds_everything_in_bf16(tmp_path):
    """4 sequences x 8 steps x 2 devices; set_default_dtype(bf16), so states too; gradients are reduced in the weights' dtype."""
    job = recipe(tmp_path, compiled=True)
    performance, fsdp = job.performance, job.parallelism.fsdp
    assert (job.model.n_layers, job.model.vocab_sz, job.data.seqlen) == (32, 128256, 8192)
    assert (job.parallelism.dp, job.data.microbatch_sz, job.data.gbs) == (2, 4, 64)
    assert (fsdp.version, fsdp.reshard_after_forward, fsdp.reduce_dtype) == (2, True, "bf16")
    assert (performance.param_dtype, performance.main_grad_dtype, performance.moment_dtype) == ("bf16",) * 3
    assert (performance.loss_chunks, performance.compile) == (8, "all")  # cross_entropy_loss.py, num_output_chunks


def test_a_recipe_of_one_device_has_no_fsdp(tmp_path):
    job = recipe(tmp_path, comment=ONE, optimizer="bitsandbytes.optim.PagedAdamW8bit")
    assert (job.parallelism.dp, job.parallelism.fsdp, job.data.gbs) == (1, None, 32)
    assert (job.performance.software, job.performance.optimizer) == ("torch", "adamw_8bit")


def test_fp32_is_no_pure_bf16(tmp_path):
    performance = recipe(tmp_path, dtype="fp32").performance
    assert (performance.precision, performance.param_dtype) == ("fp32", None)


@pytest.mark.parametrize(
    ("mlp", "targets"),
    [(True, [name for name in EVERY if name != "k_proj"]), (False, [QKV[0], QKV[2], "o_proj"])],
)
def test_adapters_are_those_of_attention_and_where_it_is_said_of_the_mlp(tmp_path, mlp, targets):
    lora = recipe(
        tmp_path, model="torchtune.models.llama3_2.lora_llama3_2_3b", adapters=LORA.format(mlp=mlp)
    ).model.lora
    assert (lora.rank, list(lora.targets), lora.base_dtype) == (64, targets, "bf16")


def test_a_builder_of_qlora_packs_the_frozen_weights(tmp_path):
    name = "torchtune.models.llama3_2.qlora_llama3_2_3b"
    assert recipe(tmp_path, comment=ONE, model=name, adapters=LORA.format(mlp=True)).model.lora.base_dtype == "nf4"


def test_what_no_plan_says_is_one_line(tmp_path):
    assert problems(tmp_path, more="optimizer_in_bwd: True") == [
        "optimizer_in_bwd true: gradients that are freed layer by layer in backward; not modeled; --allow-unmodeled ignores it"
    ]
    assert problems(tmp_path, length="null", comment="") == [
        "number of devices unknown; add --set parallelism.dp=N",
        "sequence length unknown; add --set data.seqlen=N",
    ]


@pytest.mark.parametrize(
    ("comment", "devices"),
    [
        (TWO, 2),
        (ONE, 1),
        ("#   tune run --nnodes 2 --nproc_per_node 8 full_finetune_distributed", 16),
        ("# a preset for 64 A100 GPUs", 64),
        ("# Hardware: Single node (4 GPUs), micro_batch=4", 4),
        ("# Hardware: 2 nodes (4 GPUs each)", None),
        ("# as it was trained on 96x 40GB A100\n# GPUs. Depending on", None),
        ("# batch size (trained on 32 gpus)", 32),
        ("# preset for 64 A100 GPUs\n# validated on 256 H100 GPUs too", None),
        ("# tune run --nproc_per_node 2 full_finetune_distributed\n# or on 4 GPUs", None),
        ("# tune run full_finetune_distributed", None),
    ],
)
def test_the_command_in_a_comment_tells_the_devices(comment, devices):
    assert of_comment(comment) == devices


@pytest.mark.parametrize(
    ("builder", "preset"),
    [
        ("torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct", "qwen2.5-7b"),
        ("torchtune.models.qwen3.qwen3_0_6b_instruct", "qwen3-0.6b"),
        ("torchtune.models.qwen2.lora_qwen2_1_5b", "qwen2.5-1.5b"),
        ("torchtune.models.llama3_3.qlora_llama3_3_70b", "llama3-70b"),
        ("torchtune.models.llama3.llama3_8b", "llama3-8b"),
        ("torchtune.models.mistral.mistral_7b", "mistral-7b-v0.2"),  # vocab_size=32_000
        ("torchtune.models.phi4.phi4_14b", "phi4"),
        ("torchtune.models.gemma2.gemma2_9b", "gemma2-9b"),
        ("torchtune.models.llama3_2_vision.llama3_2_vision_11b", None),
    ],
)
def test_builders_name_presets(builder, preset):
    assert preset_of(builder) == preset


def started(tmp_path, command, recipe_file):
    """A script with `tune run`, beside a recipe."""
    config = tmp_path / recipe_file
    config.parent.mkdir(parents=True, exist_ok=True)
    usual = {"model": "torchtune.models.llama3_1.llama3_1_8b", "adapters": "", "optimizer": "torch.optim.AdamW"}
    config.write_text(BODY.format(**usual, length=8192, compiled=False, dtype="bf16", more=""))
    path = tmp_path / "run.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n{command}\n")
    return to_job(read("auto", str(path), HARDWARE), HARDWARE)


def test_tune_run_has_torchruns_options_and_changes_the_recipe(tmp_path):
    """torchtune/_cli/run.py: torchrun's options, then the recipe, and KEY=VALUE: 2 x 4 devices, 3 x 8 x 8 sequences."""
    command = "srun tune run --nnodes 2 --nproc_per_node 4 full_finetune_distributed --config job.yaml batch_size=3"
    job = started(tmp_path, command, "job.yaml")
    assert (job.parallelism.dp, job.data.microbatch_sz, job.data.gbs) == (8, 3, 192)


def test_a_config_by_its_name_is_in_recipes_configs(tmp_path):
    command = "tune run --nproc_per_node 4 full_finetune_distributed --config llama3_1/8B_own"
    assert started(tmp_path, command, "recipes/configs/llama3_1/8B_own.yaml").parallelism.dp == 4
    with pytest.raises(ConfigError, match=r"recipes/configs/llama3_1/none\.yaml, which was not found"):
        started(tmp_path, command.replace("8B_own", "none"), "recipes/configs/llama3_1/8B_own.yaml")


@pytest.mark.parametrize(
    ("switch", "words", "kind", "each"),
    [
        ("False", "ac_mode: selective\nac_option: 2", None, 2),
        ("False", "ac_mode: selective\nac_option: 1", "full", None),
        ("False", "ac_mode: full", "full", None),
        ("False", "ac_mode: null", None, None),
        ("True", "ac_mode: null", "full", None),
        ("True", "ac_mode: full", None, None),
    ],
)
def test_checkpoints_of_some_layers(tmp_path, switch, words, kind, each):
    """full_finetune_distributed.py: `(not enable) and ac_mode is not None`, `enable and ac_mode is None`: neither with both."""
    path = tmp_path / "recipe.yaml"
    text = BODY.replace("enable_activation_checkpointing: True", f"enable_activation_checkpointing: {switch}")
    usual = {"model": "torchtune.models.llama3_1.llama3_1_8b", "adapters": "", "optimizer": "torch.optim.AdamW"}
    path.write_text(TWO + text.format(**usual, length=8192, compiled=False, dtype="bf16", more=words))
    performance = to_job(read("auto", str(path), HARDWARE), HARDWARE).performance
    assert performance.activation_checkpointing_type == kind
    found = performance.recompute
    assert (found and (found.method, found.n_layers)) == (("every", each) if each else None)


@pytest.mark.parametrize("mode", ["[full]", "blocks"])
def test_an_unknown_mode_of_checkpoints_is_refused(tmp_path, mode):
    """torchtune/training/activations.py, checkpoint_wrapper: NotImplementedError for modes but full and selective."""
    path = tmp_path / "recipe.yaml"
    usual = {"model": "torchtune.models.llama3_1.llama3_1_8b", "adapters": "", "optimizer": "torch.optim.AdamW"}
    path.write_text(TWO + BODY.format(**usual, length=8192, compiled=False, dtype="bf16", more=f"ac_mode: {mode}"))
    with pytest.raises(ConfigError, match="ac_mode: expected full or selective"):
        read("auto", str(path), HARDWARE)
