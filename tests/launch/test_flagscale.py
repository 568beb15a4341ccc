"""FlagScale's YAML (Megatron-LM's arguments in sections), and Primus over torchtitan."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

SETS = {"hardware.node_type": "dgx-h100"}
JOB = """
defaults:
  - _self_
  - train: 7b
experiment:
  exp_name: own
  seed: 42
  task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_gpt.py}
  runner: {nnodes: 2, hostfile: null}
  envs: {CUDA_VISIBLE_DEVICES: "0,1,2,3,4,5,6,7"}
action: run
"""
TRAIN = """
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  sequence_parallel: True
  use_distributed_optimizer: True
  precision: {bf16: True, attention_softmax_in_fp32: true}
  logging: {log_interval: 1, wandb_exp_name: "${experiment.exp_name}"}
model:
  num_layers: 32
  hidden_size: 4096
  multiple_of: 256
  num_attention_heads: 32
  seq_length: 2048
  max_position_embeddings: 2048
  use_rotary_position_embeddings: true
  no_position_embedding: true
  swiglu: true
  normalization: RMSNorm
  disable_bias_linear: true
  untie_embeddings_and_output_weights: true
  hidden_dropout: 0.0
  attention_dropout: 0.0
  seed: ${experiment.seed}
  micro_batch_size: 2
  global_batch_size: 512
  optimizer: {clip_grad: 1.0, lr_scheduler: {lr: 2.0e-5}}
data:
  tokenizer: {tokenizer_type: AquilaTokenizerFS, vocab_size: 100008}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "7b.yaml").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    return tmp_path


def test_a_job_with_the_arguments_that_it_names(folder):
    """2 nodes of 8 visible devices over tp 2 are dp 8; 4 * 4096 * 2 / 3 = 10922, up to a multiple of 256: 11008."""
    job = to_job(read("auto", str(folder / "job.yaml"), SETS), SETS)
    assert (job.parallelism.tp, job.parallelism.dp, job.parallelism.sp, job.parallelism.zero_level) == (2, 8, True, 1)
    model = job.model
    assert (model.n_layers, model.hidden_sz, model.inter_sz, model.vocab_sz) == (32, 4096, 11008, 100008)
    assert (model.glu, model.norm, model.bias, model.tie_embeddings, model.rotary_embeds) == (
        True,
        "rmsnorm",
        False,
        False,
        True,
    )
    assert (job.data.gbs, job.data.microbatch_sz, job.performance.precision) == (512, 2, "bf16")


def test_the_arguments_alone_ask_for_the_devices(folder):
    with pytest.raises(ConfigError, match=r"add --set parallelism\.dp=N"):
        to_job(read("auto", str(folder / "train" / "7b.yaml"), SETS), SETS)
    sets = SETS | {"devices": 4}
    assert to_job(read("auto", str(folder / "train" / "7b.yaml"), sets), sets).parallelism.dp == 2


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("- train: 7b", "- train: 13b", "reads train/13b.yaml, which was not found; put it in the same folder"),
        ("train_gpt.py", "train_rwkv.py", "entrypoint ./flagscale/train/train_rwkv.py: another kind of model"),
        ("hidden_size: 4096", "hidden_size: 4096\n  enable_hetero: true", "--enable-hetero true: stages on devices of several"),
    ],
)  # fmt: skip
def test_what_is_missing_or_not_modeled(folder, old, new, line):
    for name in ("job.yaml", "train/7b.yaml"):
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError, match=line):
        to_job(read("auto", str(folder / "job.yaml"), SETS), SETS)


PRIMUS = """
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      stderr_sink_level: INFO
      training: {batch_size: 4}
      parallelism: {tensor_parallel_degree: 2}
      primus_turbo: {enable_primus_turbo: true}
"""


def test_primus_over_torchtitan(tmp_path):
    """primus/configs/modules/torchtitan/pre_trainer.yaml: 8,192 tokens and selective checkpointing; 16 devices are dp 8."""
    (tmp_path / "job.yaml").write_text(PRIMUS, encoding="utf-8")
    sets = {"hardware.node_type": "mi300x-node", "devices": 16}
    job = to_job(read("auto", str(tmp_path / "job.yaml"), sets), sets)
    assert job.model.name == "llama3-8b"
    assert (job.parallelism.tp, job.parallelism.dp, job.data.microbatch_sz, job.data.seqlen) == (2, 8, 4, 8192)
    assert (job.performance.activation_checkpointing_type, job.performance.software) == ("per-op", "torchtitan@0.1")
    (tmp_path / "job.yaml").write_text(
        PRIMUS.replace("batch_size: 4", "local_batch_size: 4, seq_len: 4096"), encoding="utf-8"
    )
    later = to_job(read("auto", str(tmp_path / "job.yaml"), sets), sets)
    assert (later.data.microbatch_sz, later.data.seqlen, later.performance.software) == (4, 4096, "torchtitan@0.2")
    assert later.performance.activation_checkpointing_type in {None, "none"}


def test_a_framework_of_primus_that_is_no_word_is_one_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("work_group: own\nmodules:\n  pre_trainer:\n    framework: [[x]]\n    model: llama3.1_8B.yaml\n")
    with pytest.raises(ConfigError, match="only megatron's, torchtitan's and maxtext's are read"):
        read("primus", str(path), SETS)
    text = "modules:\n  post_trainer:\n    framework: megatron_bridge\n    model: qwen3_8b.yaml\n    overrides: {peft: lora}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"modules.post_trainer.framework megatron_bridge: only .*; write a plan"):
        read("auto", str(path), SETS)
