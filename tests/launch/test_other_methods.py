"""Reinforcement learning and other methods are told as such; configs that scripts and functions name."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import GPT, asked

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.read import read


def test_a_fragment_of_reinforcement_learning_is_told_as_such(tmp_path: Path) -> None:
    """Not by the size of its batch, which depends on a command."""
    fragment = (
        f'if [ "$(basename "$ENV")" = a.yaml ]; then G=16; else G=8; fi\nMODEL_OPTIONS="{GPT} --grpo-group-size $G"\n'
    )
    lines = asked(tmp_path, "qwen.sh", fragment)
    assert [line.partition(":")[2] for line in lines] == [
        " reinforcement learning; not modeled"  # leaving it out would still lack that size
    ]


def test_torchtitans_config_functions_are_named_by_their_module(tmp_path: Path) -> None:
    script = """\
        #!/bin/bash
        torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b
    """
    (line,) = asked(tmp_path, "run.sh", script)
    assert line.startswith("launches config function llama3_8b of llama3; give that module's config_registry.py")


def test_a_batch_that_is_a_list_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": [64]}', encoding="utf-8")
    script = f"deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json {GPT}\n"
    lines = asked(tmp_path, "ds.sh", script)
    assert any("train_batch_size [64] contradicts" in line for line in lines)


def test_a_config_above_its_script_is_not_one_of_the_same_name_below_it(tmp_path: Path) -> None:
    """../config/fsdp.yaml has 8 processes, scripts/config/fsdp.yaml 4."""
    for folder, ranks in (("config", 8), ("scripts/config", 4)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "fsdp.yaml").write_text(f"num_processes: {ranks}\n", encoding="utf-8")
    found = NearbyFiles(tmp_path / "scripts").path("../config/fsdp.yaml")
    assert found is not None
    assert found.resolve() == (tmp_path / "config" / "fsdp.yaml").resolve()


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("job.yaml", "base_model: Qwen/Qwen2.5-3B\nprocess_reward_model: true\n", "process_reward_model true: reinforcement"),
        ("job.yaml", "base_model: Qwen/Qwen2.5-3B\nrl: dpo\n", "rl dpo: another method than training on sequences"),
        ("sft.yaml", "model_name_or_path: Qwen/Qwen2.5-3B\nper_device_train_batch_size: 1\noptim: galore_adamw\n",
         "optim galore_adamw: states of an optimizer other than Adam"),
        ("mt.yml", "base_emb_dim: 64\nquantization: fp8\n", "quantization fp8: projections in 8 bits: those in bf16 are counted"),
    ],
)  # fmt: skip
def test_other_methods_are_told_by_what_they_are(tmp_path: Path, name: str, more: str, why: str) -> None:
    text = more + (
        "sequence_len: 2048\nmicro_batch_size: 1\ndatasets: []\n" if name == "job.yaml" else "max_length: 2048\n"
    )
    assert any(line.startswith(why) for line in asked(tmp_path, name, text))


def test_modules_of_another_optimizer_are_no_method(tmp_path: Path) -> None:
    """transformers trainer.py: optim_target_modules is read with GaLore and APOLLO alone."""
    said = "model_name_or_path: Qwen/Qwen2.5-3B\nper_device_train_batch_size: 1\nmax_length: 2048\noptim_target_modules: all\n"
    (tmp_path / "sft.yaml").write_text(f"{said}optim: adamw_torch\n", encoding="utf-8")
    reading = read("transformers", str(tmp_path / "sft.yaml"), {"devices": 8})
    assert not reading.of("unmodeled")


_TRAINER = "model_name_or_path: Qwen/Qwen2.5-3B\nper_device_train_batch_size: 1\nmax_length: 2048\noptim: adamw_torch\n"
_AXOLOTL = "base_model: Qwen/Qwen2.5-3B\nsequence_len: 2048\nmicro_batch_size: 1\ndatasets: []\n"
_MAXTEXT = "model_name: llama3-8b\nper_device_batch_size: 1\nmax_target_length: 2048\n"
_NEOX = """\
num_layers: 8
hidden_size: 256
num_attention_heads: 4
seq_length: 128
max_position_embeddings: 128
train_micro_batch_size_per_gpu: 4
fp16: {enabled: true}
"""
_OLMO = """\
model: {d_model: 256, n_heads: 4, n_layers: 4, mlp_ratio: 4, vocab_size: 1000, embedding_size: 1024, max_sequence_length: 128}
global_train_batch_size: 8
device_train_microbatch_size: 1
precision: amp_bf16
"""
_RUN = "torchrun --nproc_per_node 8 own.py --model_name_or_path Qwen/Qwen2.5-3B --bf16 --per_device_train_batch_size 1"
_RUN += " --gradient_accumulation_steps 1 --max_length 2048 --config_overrides"
_TUNE = "model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\ntokenizer: {max_seq_len: 2048}\nbatch_size: 1\n"
_SWIFT = "swift sft --model Qwen/Qwen2.5-3B --max_length 2048 --tuner_type full --torch_dtype bfloat16"


@pytest.mark.parametrize(
    ("kind", "text", "status"),
    [
        ("swift", f"{_SWIFT} --task_type causal_lm", "irrelevant"),
        ("swift", f"{_SWIFT} --task_type embedding", "unmodeled"),
        ("swift", f"{_SWIFT} --num_labels 2", "unmodeled"),
        ("swift", f"{_SWIFT} --tuner_backend unsloth", "unmodeled"),
        ("swift", f"{_SWIFT} --rlhf_type dpo", "unmodeled"),
        ("swift", f"{_SWIFT} --use_galore true", "unmodeled"),
        ("swift", f"{_SWIFT} --lisa_activated_layers 2", "unmodeled"),
        ("swift", f"{_SWIFT} --galore_rank 128", "irrelevant"),
        ("swift", f"{_SWIFT} --adapter_length 128", "irrelevant"),
        ("swift", f"{_SWIFT} --max_shard_size 5GB", "irrelevant"),
        ("transformers", f"{_TRAINER}bf16: true\ndpo_beta: 5", "unmodeled"),
        ("transformers", f"{_RUN} hidden_act=silu,num_hidden_layers=2", "unmodeled"),
        ("torchtune", f"{_TUNE}checkpointer.adapter_checkpoint: a.pt", "irrelevant"),
        ("axolotl", f"{_AXOLOTL}adapter: lora\nlora_target_parameters: [mlp.experts.gate_up_proj]", "unmodeled"),
        ("axolotl", f"{_AXOLOTL}adapter: lora\npeft_layers_to_transform: [0, 1]", "unmodeled"),
        ("axolotl", f"{_AXOLOTL}adapter: lora\nlora_mlp_kernel: true", "approximated"),
        ("axolotl", f"{_AXOLOTL}use_scattermoe: true", "approximated"),
        ("axolotl", f"{_AXOLOTL}ring_attn_func: varlen_llama3", "approximated"),
        ("axolotl", f"{_AXOLOTL}heads_k_stride: 1", "approximated"),
        ("axolotl", f"{_AXOLOTL}sequence_parallel_degree: 4", "approximated"),
        ("axolotl", f"{_AXOLOTL}sample_packing_group_size: 100000", "irrelevant"),
        ("axolotl", f"{_AXOLOTL}processor_type: AutoProcessor", "unmodeled"),
        ("axolotl", f"{_AXOLOTL}use_onebitllms: true", "unmodeled"),
        ("axolotl", f"{_AXOLOTL}bf16: false\nfp16: false\nfloat16: true", "unmodeled"),
        ("axolotl", f"{_AXOLOTL}bf16: false\nbfloat16: true", "unmodeled"),
        ("megatron", f"NPROC_PER_NODE=8 {_SWIFT.replace('swift', 'megatron')} --task_type embedding", "unmodeled"),
        ("megatron", f"NPROC_PER_NODE=8 {_SWIFT.replace('swift', 'megatron')} --rlhf_type gkd", "unmodeled"),
        ("gpt-neox", f"{_NEOX}train_impl: normal", "irrelevant"),
        ("gpt-neox", f"{_NEOX}train_impl: rm", "unmodeled"),
        ("olmo", f"{_OLMO}fused_loss: true", "approximated"),
        ("olmo", f"{_OLMO}data.generate_doc_lengths: true", "approximated"),
        ("maxtext", f"{_MAXTEXT}use_iota_embed: true", "approximated"),
        ("maxtext", f"{_MAXTEXT}compile_topology_num_slices: -1", "irrelevant"),
        ("maxtext", f"{_MAXTEXT}logits_dot_in_fp32: true", "approximated"),
    ],
)  # fmt: skip
def test_a_key_that_changes_cost_is_not_passed_over(tmp_path: Path, kind: str, text: str, status: str) -> None:
    """ms-swift get_model_info_meta, Axolotl resolve_dtype and kernels/args.py, GPT-NeoX neox_args.py, MaxText Embed."""
    name = "run.sh" if "--" in text else "job.yaml"
    (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    reading = read(kind, str(tmp_path / name), {"devices": 8, "hardware.node_type": "dgx-h100"})
    last = text.rpartition("--" if "--" in text else "\n")[2]
    key = last.replace(":", " ").partition(" ")[0]
    assert [flag.status for flag in reading.flags if flag.name.lstrip("-") == key] == [status]


@pytest.mark.parametrize(
    ("words", "refused"), [("bf16: true\nfloat16: true\n", []), ("", []), ("fp16: true\n", ["bfloat16"])]
)
def test_axolotls_bf16_goes_before_bfloat16(tmp_path: Path, words: str, refused: list[str]) -> None:
    """resolve_dtype: `cfg.bf16 or cfg.bfloat16`; autocast is by bf16 alone, auto where neither it nor fp16 is said."""
    (tmp_path / "job.yaml").write_text(f"{_AXOLOTL}bfloat16: true\n{words}", encoding="utf-8")
    reading = read("axolotl", str(tmp_path / "job.yaml"), {"devices": 8})
    assert [flag.name for flag in reading.of("unmodeled")] == refused
    assert refused or reading.config["performance"]["precision"] == "bf16"


@pytest.mark.parametrize(("word", "count"), [("default", 0), ("classification", 1)])
def test_another_loss_of_a_fork_of_torchtitan(tmp_path: Path, word: str, count: int) -> None:
    """nlpfollower/torchtitan config_manager.py: its own default is "default"."""
    job = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\nseq_len = 2048\n'
    (tmp_path / "job.toml").write_text(f'{job}loss_function = "{word}"\n', encoding="utf-8")
    reading = read("torchtitan", str(tmp_path / "job.toml"), {"devices": 8, "hardware.node_type": "dgx-h100"})
    assert [flag.name for flag in reading.of("unmodeled")] == ["training.loss_function"] * count


@pytest.mark.parametrize("key", ["final_logit_softcapping", "router_logit_softcapping"])
def test_soft_caps_of_primus_are_approximated(tmp_path: Path, key: str) -> None:
    section = "framework: megatron\n    config: pre_trainer.yaml\n    model: llama3_8B.yaml"
    text = f"modules:\n  pre_trainer:\n    {section}\n    overrides:\n      {key}: 30.0\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    reading = read("primus", str(tmp_path / "job.yaml"), {"devices": 8, "hardware.node_type": "dgx-h100"})
    assert key in [flag.name for flag in reading.of("approximated")]
