"""litgpt, MosaicML's llm-foundry and verl's fine-tuning: files of the form that their users have."""

import pytest
from launch_readings import job

from steptime.base.config import ConfigError
from steptime.model.blocks import n_params


def problems(tmp_path, name, text, **sets):
    with pytest.raises(ConfigError) as error:
        job(tmp_path, name, text, **sets)
    return " ".join(error.value.problems)


PRETRAIN = """model_name: Llama-3.2-1B
precision: %s
train:
  global_batch_size: 64
  micro_batch_size: 2
  max_seq_length: 1024
optimizer:
  class_path: torch.optim.AdamW
devices: %s
num_nodes: %d
"""


def test_litgpt_pretrains_with_shards_inside_a_node(tmp_path):
    """litgpt/pretrain.py: HYBRID_SHARD by Block and torch.compile; two nodes of 8 hold the parameters once each."""
    found = job(tmp_path, "pretrain.yaml", PRETRAIN % ("bf16-mixed", "auto", 2))
    layout, performance = found.parallelism, found.performance
    assert (layout.dp, layout.replicas, layout.fsdp.version) == (16, 2, 1)
    assert (found.data.gbs, found.data.microbatch_sz, found.data.seqlen) == (64, 2, 1024)
    assert (performance.compile, performance.param_dtype, performance.activation_checkpointing_type) == (
        "blocks",
        "fp32",
        None,
    )


def test_litgpt_clips_gradients_in_pretraining_alone(tmp_path):
    """litgpt/pretrain.py requires train.max_norm and clips in every step; litgpt/finetune refuses the key."""
    pretrain = job(tmp_path, "pretrain.yaml", PRETRAIN % ("bf16-mixed", "auto", 2))
    lora = job(tmp_path, "lora.yaml", LORA % ("", "true"))
    assert (pretrain.software.states.clip_grad, lora.software.states.clip_grad) == (True, False)


def test_litgpt_has_a_head_of_its_own(tmp_path):
    """litgpt/model.py: lm_head's weights are not the embedding's: Llama 3.2 1B's 128,256 x 2,048 once more."""
    found = job(tmp_path, "pretrain.yaml", PRETRAIN % ("bf16-true", 4, 1))
    assert n_params(found.model) == 1_235_814_400 + 128_256 * 2048
    assert (found.parallelism.dp, found.performance.param_dtype, found.performance.moment_dtype) == (4, "bf16", "bf16")


def test_litgpt_model_by_its_sizes(tmp_path):
    """litgpt/config.py, Config: where nothing else is said, LayerNorm and an MLP of two matrices, four times as wide."""
    sizes = "model_config:\n  n_layer: 4\n  n_embd: 256\n  n_head: 4\n  padded_vocab_size: 1024\n"
    text = PRETRAIN.replace("model_name: Llama-3.2-1B\n", "model_name:\n" + sizes) % ("bf16-mixed", 1, 1)
    model = job(tmp_path, "own.yaml", text).model
    assert (model.inter_sz, model.glu, model.norm, model.parallel_residual) == (1024, False, "layernorm", True)


LORA = """checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3.1-8B
precision: bf16-true
quantize: %s
devices: 1
num_nodes: 1
lora_r: 32
lora_query: true
lora_key: false
lora_value: true
lora_projection: %s
lora_mlp: false
lora_head: false
train:
  global_batch_size: 8
  micro_batch_size: 1
  max_seq_length: 512
"""


def test_litgpt_adapters_on_the_projections_that_are_on(tmp_path):
    """One device has no FSDP, and no activation checkpointing, which is a setting of its FSDP (litgpt/finetune/lora.py)."""
    found = job(tmp_path, "lora.yaml", LORA % ("", "true"))
    assert found.model.lora.targets == ["q_proj", "v_proj", "o_proj"]
    assert (found.model.lora.rank, found.model.lora.base_dtype) == (32, "bf16")
    assert (found.parallelism.dp, found.performance.activation_checkpointing_type, found.data.gbs) == (1, None, 8)


@pytest.mark.parametrize(("precision", "base"), [("bf16-true", "bf16"), ("bf16-mixed", "fp32"), ("16-mixed", "fp32")])
def test_litgpt_frozen_weights_are_in_the_precision_of_the_others(tmp_path, precision, base):
    """lightning/fabric/plugins/precision: only the -true words load weights in half precision."""
    found = job(tmp_path, "lora.yaml", (LORA % ("", "true")).replace("bf16-true", precision))
    assert (found.model.lora.base_dtype, found.performance.param_dtype) == (base, base)
    assert found.performance.precision == ("fp16" if precision == "16-mixed" else "bf16")
    text = (LORA % ("", "true")).replace("bf16-true", "16-true")
    assert "weights, gradients and moments in fp16; not modeled" in problems(tmp_path, "lora.yaml", text)


def test_litgpt_on_more_devices_than_the_file_has(tmp_path):
    """devices: 1 has no FSDP; eight have it."""
    text = PRETRAIN % ("bf16-true", 1, 1)
    assert job(tmp_path, "pretrain.yaml", text).parallelism.fsdp is None
    assert job(tmp_path, "pretrain.yaml", text, parallelism__dp=8).parallelism.fsdp.version == 1


def test_litgpt_quantized_weights_are_an_error(tmp_path):
    assert "quantize bnb.nf4: quantized frozen weights" in problems(tmp_path, "lora.yaml", LORA % ("bnb.nf4", "false"))


def test_litgpt_command(tmp_path):
    """`litgpt finetune_full MODEL --devices 4`: 16 sequences of one each, replayed under FSDP (litgpt/finetune/full.py)."""
    text = "#!/bin/bash\nlitgpt finetune_full meta-llama/Llama-3.2-3B --devices 4 --train.max_seq_length 2048\n"
    found = job(tmp_path, "run.sh", text)
    assert (found.parallelism.dp, found.data.gbs, found.data.microbatch_sz) == (4, 16, 1)
    assert found.performance.activation_checkpointing_type == "full"
    assert "sequence length unknown" in problems(tmp_path, "run.sh", text.replace("--train.max_seq_length 2048", ""))


def test_litgpt_command_that_slurm_starts(tmp_path):
    """Slurm starts one process for each device, and litgpt is told both numbers: 2 nodes of 4."""
    command = "srun litgpt finetune_full meta-llama/Llama-3.2-3B --devices 4 --num_nodes 2 --train.max_seq_length 2048"
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n{command}\n"
    found = job(tmp_path, "run.sh", text)
    assert (found.model.hidden_sz, found.parallelism.dp, found.data.microbatch_sz) == (3072, 8, 1)


def test_litgpt_adapter_methods_other_than_lora_are_an_error(tmp_path):
    text = "litgpt finetune_adapter_v2 meta-llama/Llama-3.2-3B --devices 1 --train.max_seq_length 512\n"
    assert "partial training by a method other than LoRA" in problems(tmp_path, "run.sh", text)


MPT = """max_seq_len: 1024
model:
  name: mpt_causal_lm
  d_model: 512
  n_heads: 8
  n_layers: 6
  expansion_ratio: 4
  max_seq_len: ${max_seq_len}
  vocab_size: 50368
  attn_config:
    attn_impl: flash
    alibi: %s
train_loader:
  name: text
optimizer:
  name: decoupled_adamw
global_train_batch_size: 128
device_train_microbatch_size: %s
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: %s
  activation_checkpointing: true
"""


def test_llm_foundry(tmp_path):
    """Positions and words, 51,392 x 512 (the words are the head's too); a layer has 12 x 512^2, 13 x 512 of biases and norms."""
    found = job(tmp_path, "mpt.yaml", MPT % ("false", 8, "PURE"), parallelism__dp=8)
    layer = 12 * 512**2 + 13 * 512
    assert n_params(found.model) == 6 * layer + (50368 + 1024 + 2) * 512
    assert (found.data.gbs, found.data.microbatch_sz, found.data.seqlen) == (128, 8, 1024)
    assert (found.parallelism.fsdp.version, found.parallelism.fsdp.reduce_dtype) == (1, "bf16")
    assert found.performance.activation_checkpointing_type == "full"


def test_llm_foundry_reduces_in_fp32_unless_pure(tmp_path):
    found = job(tmp_path, "mpt.yaml", MPT % ("false", 8, "DEFAULT"), parallelism__dp=8)
    assert found.parallelism.fsdp.reduce_dtype != "bf16"


@pytest.mark.parametrize(("said", "sharded"), [("{}", True), ("null", False)])
def test_an_empty_fsdp_config_of_llm_foundry_is_fsdp_with_its_defaults(tmp_path, said, sharded):
    """Composer builds FSDPConfig(**{}) where the section is not null (composer/trainer/trainer.py): FULL_SHARD."""
    text = f"{MPT.partition('fsdp_config:')[0]}fsdp_config: {said}\n" % ("false", 8)
    found = job(tmp_path, "mpt.yaml", text, parallelism__dp=8).parallelism
    assert (found.fsdp is not None and found.fsdp.reshard_after_forward) == sharded


@pytest.mark.parametrize("word", ["FULL", "{reduce_dtype: bf16}"])
def test_llm_foundry_in_other_dtypes_is_an_error(tmp_path, word):
    assert "not modeled" in problems(tmp_path, "mpt.yaml", MPT % ("false", 8, word), parallelism__dp=8)


def test_llm_foundry_asks(tmp_path):
    """The devices; and the micro-batch that Composer looks for at run time."""
    said = problems(tmp_path, "mpt.yaml", MPT % ("false", "auto", "PURE"))
    assert "number of devices unknown" in said
    assert "add --set data.microbatch_sz=N" in problems(
        tmp_path, "mpt.yaml", MPT % ("false", "auto", "PURE"), parallelism__dp=8
    )


def test_llm_foundry_alibi_is_an_error(tmp_path):
    assert "ALiBi positions" in problems(tmp_path, "mpt.yaml", MPT % ("true", 8, "PURE"), parallelism__dp=8)


def test_llm_foundry_sizes_beside_a_named_model(tmp_path):
    """llm-foundry scripts/train/yamls/pretrain/gpt2-small.yaml: positions over GPT-2's own 1,024; other sizes are not GPT-2's."""
    named = (
        "  name: hf_causal_lm\n  pretrained_model_name_or_path: gpt2\n  config_overrides: {%s}\n  pretrained: false\n"
    )
    head, _, rest = (MPT % ("false", 8, "PURE")).partition("train_loader:")
    file = f"{head.partition('model:')[0].replace('1024', '2048')}model:\n{named}train_loader:{rest}"
    model = job(tmp_path, "gpt2.yaml", file % "n_positions: 2048", parallelism__dp=8).model
    assert (model.max_positions, model.n_layers) == (2048, 12)
    said = problems(tmp_path, "gpt2.yaml", file % "n_positions: 2048, n_layer: 48", parallelism__dp=8)
    assert "model.config_overrides.n_layer 48: a setting that differs from the named model's" in said


def test_job_whose_config_is_one_section(tmp_path):
    """MosaicML's platform: `parameters` is the config, `compute` has the devices, and ${} names keys of the section."""
    inside = "".join(f"  {line}\n" for line in (MPT % ("false", 8, "PURE")).splitlines())
    text = f"name: job\ncommand: composer train/train.py parameters.yaml\ncompute:\n  gpus: 16\nparameters:\n{inside}"
    found = job(tmp_path, "mcli.yaml", text)
    assert (found.parallelism.dp, found.data.seqlen, found.model.max_positions) == (16, 1024, 1024)


VERL = """torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer \\
  data.max_length=2048 data.train_batch_size=64 data.micro_batch_size_per_gpu=4 \\
  model.partial_pretrain=Qwen/Qwen2.5-1.5B trainer.total_epochs=1 %s
"""


def test_verl(tmp_path):
    """64 sequences of all devices; fp32 weights, reduced in fp32, every layer replayed (verl/trainer/fsdp_sft_trainer.py)."""
    found = job(tmp_path, "sft.sh", VERL % "")
    assert (found.parallelism.dp, found.data.gbs, found.data.microbatch_sz) == (4, 64, 4)
    assert (found.parallelism.fsdp.version, found.parallelism.fsdp.reduce_dtype) == (2, "fp32")
    assert found.performance.activation_checkpointing_type == "full"


def test_verl_takes_the_defaults_of_its_repository(tmp_path):
    defaults = tmp_path / "verl/trainer/config/sft_trainer.yaml"
    defaults.parent.mkdir(parents=True)
    defaults.write_text("data: {max_length: 512}\nmodel: {enable_gradient_checkpointing: false, strategy: fsdp}\n")
    found = job(tmp_path, "scripts/sft.sh", VERL % "")
    assert (found.parallelism.fsdp.version, found.performance.activation_checkpointing_type, found.data.seqlen) == (
        1,
        None,
        2048,
    )


def test_verl_sequences_over_ranks_are_an_error(tmp_path):
    assert "Ulysses" in problems(tmp_path, "sft.sh", VERL % "ulysses_sequence_parallel_size=2")
    assert "a number of tokens" in problems(tmp_path, "sft.sh", VERL % "data.use_dynamic_bsz=True")


def test_nodes_that_a_submitting_program_multiplies(tmp_path):
    """open-instruct's mason.py puts the product of --num_nodes and --num_processes into accelerate's option: 4 x 8."""
    text = (
        "python mason.py --num_nodes 4 --gpus 8 -- accelerate launch --mixed_precision bf16 --num_processes 8 \\\n"
        "  --use_deepspeed --zero_stage 3 open_instruct/finetune.py --model_name_or_path Qwen/Qwen3-8B --max_seq_length 4096 \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 2\n"
    )
    found = job(tmp_path, "run.sh", text)
    assert (found.parallelism.dp, found.data.gbs) == (32, 64)


RECIPE = """model_name_or_path: Qwen/Qwen2.5-1.5B
bf16: true
torch_dtype: bfloat16
max_seq_length: 1024
per_device_train_batch_size: 4
"""


def test_recipe_is_started_as_its_readme_does(tmp_path):
    """Four processes without DeepSpeed, although the repository has the config of ZeRO 3 with which others start."""
    configs = tmp_path / "recipes/accelerate_configs"
    configs.mkdir(parents=True)
    (configs / "deepspeed_zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n"
    )
    (configs / "multi_gpu.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    assert job(tmp_path, "recipes/own/cpt/config.yaml", RECIPE).parallelism.zero_level == 3
    (tmp_path / "recipes/own/README.md").write_text(
        "```shell\naccelerate launch \\\n    --config_file recipes/accelerate_configs/multi_gpu.yaml \\\n"
        "    --num_processes 4 \\\n    scripts/run_cpt.py \\\n    recipes/own/cpt/config.yaml\n```\n"
    )
    found = job(tmp_path, "recipes/own/cpt/config.yaml", RECIPE)
    assert (found.parallelism.dp, found.parallelism.zero_level) == (4, None)


def test_maxtext_weights_in_bf16(tmp_path):
    text = (
        'base_config: "base.yml"\nmodel_name: "qwen3-14b"\nhardware: gpu\nper_device_batch_size: 2\nmax_target_length: 4096\n'
        "ici_fsdp_parallelism: 8\nremat_policy: full\ndtype: bfloat16\nweight_dtype: bfloat16\n"
    )
    performance = job(tmp_path, "qwen3.gpu.yml", text).performance
    assert {performance.param_dtype, performance.main_grad_dtype, performance.moment_dtype} == {"bf16"}
    assert (
        job(tmp_path, "q.yml", text.replace("weight_dtype: bfloat16", "weight_dtype: float32")).performance.param_dtype
        == "fp32"
    )


@pytest.mark.parametrize(("policy", "noted"), [("full", False), ("save_qkv_proj", True), ("save_out_proj", True)])
def test_maxtext_policies_that_save_a_projection_are_said_to_be_counted_without(tmp_path, policy, noted):
    text = 'base_config: "base.yml"\nmodel_name: "qwen3-14b"\nper_device_batch_size: 2\nmax_target_length: 4096\n'
    text += f"hardware: gpu\nici_fsdp_parallelism: 8\nremat_policy: {policy}\n"
    found = job(tmp_path, "run.yml", text)
    assert found.performance.activation_checkpointing_type == "full"
    assert any(f"remat_policy {policy}" in note for note in found.notes) is noted
    assert "data.seqlen: expected a whole number (got a list of 1)" in problems(
        tmp_path, "run.yml", text.replace("4096", "[4096]")
    )


@pytest.mark.parametrize(
    "command",
    [
        "python finetune.py --model_name_or_path Qwen/Qwen2.5-1.5B --max_seq_length 1024 --per_device_train_batch_size 2",
        "swift sft --model Qwen/Qwen2.5-1.5B --max_length 1024 --train_type lora --per_device_train_batch_size 2",
    ],
)
def test_one_process_that_sees_several_devices(tmp_path, command):
    """torch.nn.DataParallel, or layers spread over the devices: no process on each; one device, or a count of processes, is."""
    text = "export CUDA_VISIBLE_DEVICES=%s\n%s\n"
    said = problems(tmp_path, "run.sh", text % ("0,1,2,3", command))
    assert "one process sees 4 devices" in said
    assert "add --set parallelism.dp=4" in said
    assert job(tmp_path, "run.sh", text % ("0", command)).parallelism.dp == 1
    assert job(tmp_path, "run.sh", text % ("0,1", f"NPROC_PER_NODE=2 {command}")).parallelism.dp == 2
    assert job(tmp_path, "run.sh", text % ("0,1", command), parallelism__dp=2).parallelism.dp == 2


@pytest.mark.parametrize("said", ["", " --gradient_accumulation_steps null"])
def test_swifts_own_batch(tmp_path, said):
    """swift/trainers/arguments.py: ceil(16 / 1 sequence / 8 devices) = 2 micro-batches, also where the argument is null."""
    text = f"NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-1.5B --max_length 1024 --per_device_train_batch_size 1{said}\n"
    assert job(tmp_path, "run.sh", text).data.gbs == 16


def test_lightnings_launcher(tmp_path):
    """lightning run model --devices=8 --num-nodes=2: the processes of a program whose own settings are in its code."""
    text = "#!/bin/bash\nlightning run model --accelerator=cuda --devices=8 --num-nodes=2 train.py --model_name_or_path %s\n"
    said = "Qwen/Qwen2.5-1.5B --max_seq_length 1024 --bf16 True --per_device_train_batch_size 2"
    assert job(tmp_path, "run.sh", text % said).parallelism.dp == 16
    alone = f"conda run -n lightning python train.py --model_name_or_path {said}\n"
    assert "launched by python only" in problems(tmp_path, "run.sh", alone)


FSDP = """distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_processes: 2
"""


def test_config_is_started_as_the_script_beside_it_does(tmp_path):
    """Alone llamafactory-cli takes a process for each device of the node; the script takes two, under FSDP."""
    text = "model_name_or_path: Qwen/Qwen2.5-1.5B\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\nbf16: true\n"
    text += "per_device_train_batch_size: 1\n"
    assert job(tmp_path, "examples/own/sft.yaml", text).parallelism.dp == 8
    (tmp_path / "examples/own/train.sh").write_text(
        "accelerate launch \\\n    --config_file examples/accelerate/fsdp.yaml \\\n    src/train.py examples/own/sft.yaml\n"
    )
    assert "examples/accelerate/fsdp.yaml, which was not found" in problems(tmp_path, "examples/own/sft.yaml", text)
    (tmp_path / "examples/accelerate").mkdir()
    (tmp_path / "examples/accelerate/fsdp.yaml").write_text(FSDP)
    layout = job(tmp_path, "examples/own/sft.yaml", text).parallelism
    assert (layout.dp, layout.fsdp.version) == (2, 1)


def test_processes_of_the_script_beside_a_config(tmp_path):
    """Two processes, of a script that names no config of accelerate; as many as a variable says are asked for."""
    text = "model_name_or_path: Qwen/Qwen2.5-1.5B\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\nbf16: true\n"
    text += "per_device_train_batch_size: 1\n"
    script = tmp_path / "train.sh"
    script.write_text("accelerate launch --num_processes 2 src/train.py sft.yaml\n")
    assert job(tmp_path, "sft.yaml", text).parallelism.dp == 2
    script.write_text("accelerate launch --num_processes $N src/train.py sft.yaml\n")
    assert "number of devices unknown ($N processes" in problems(tmp_path, "sft.yaml", text)


OWN = """method: %s
model: {name: Qwen/Qwen2.5-1.5B}
data: {max_seq_length: 1024}
training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 2, %s}
"""


def test_sections_of_a_config_of_ones_own(tmp_path):
    """The Trainer's arguments in sections of a program's own config; what precision it has, only it says."""
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    script = "accelerate launch --config_file fsdp.yaml --module src.train --config own.yaml\n"
    (tmp_path / "own.yaml").write_text(OWN % ("full_ft", "bf16: true"))
    found = job(tmp_path, "run.sh", script)
    assert (found.parallelism.dp, found.data.gbs, found.data.seqlen) == (2, 8, 1024)
    (tmp_path / "own.yaml").write_text(OWN % ("blockwise", "bf16: true"))
    assert "method blockwise: training by a method of its own program" in problems(tmp_path, "run.sh", script)
    (tmp_path / "fsdp.yaml").write_text(FSDP.replace("mixed_precision: bf16\n", ""))
    (tmp_path / "own.yaml").write_text(OWN % ("full_ft", "seed: 1"))
    assert "precision unknown" in problems(tmp_path, "run.sh", script)
