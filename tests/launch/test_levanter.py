"""Levanter's YAML: sizes and defaults of its Llama, its batch over all devices, its precision in words."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params

SETS = {"hardware.node_type": "gcp-tpu-v4", "devices": 16}
JOB = """
data: !include data/own.yaml
model:
  type: llama
  seq_len: 4096
  hidden_dim: 2048
  intermediate_dim: 8192
  num_layers: 16
  num_heads: 16
  num_kv_heads: 8
trainer:
  tracker: {type: wandb, project: own}
  mp: p=f32,c=bfloat16
  train_batch_size: 256
  num_train_steps: 10000
  per_device_parallelism: -1
optimizer: {learning_rate: 4E-4, weight_decay: 0.1}
"""


def test_a_batch_runs_at_once_on_all_devices(tmp_path):
    """256 sequences over 16 devices are 16 each, as -1 is all of them; tensors in shards over the axis embed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text(
        "tokenizer: NousResearch/Llama-2-7b-hf\ncache_dir: gs://own\n", encoding="utf-8"
    )
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    job = to_job(read("auto", str(tmp_path / "job.yaml"), SETS), SETS)
    assert (job.data.gbs, job.data.microbatch_sz, job.data.seqlen, job.parallelism.dp) == (256, 16, 4096, 16)
    model = job.model
    assert (model.n_layers, model.hidden_sz, model.n_kv_heads, model.vocab_sz, model.tie_embeddings) == (
        16,
        2048,
        8,
        32000,
        False,
    )
    assert (job.parallelism.zero_level, job.performance.precision) == (3, "bf16")
    assert job.performance.activation_checkpointing_type == "full"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("type: llama", "type: backpack", "model.type backpack: another kind of model than Llama's"),
        ("p=f32,c=bfloat16", "p=bfloat16,c=bfloat16", "trainer.mp: expected one of f32"),
        ("num_train_steps: 10000", "replica_ici_axis_size: 4", "replicas of shards"),
        ("trainer:\n", "use_hf_model_config: true\ntrainer:\n", "use_hf_model_config true: sizes of a repository"),
    ],
)
def test_what_is_not_modeled(tmp_path, old, new, line):
    (tmp_path / "job.yaml").write_text(JOB.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError, match=line):
        to_job(read("auto", str(tmp_path / "job.yaml"), SETS), SETS)


def test_gpt2_has_its_own_layers_and_defaults(tmp_path):
    """Gpt2Config: 4 x hidden, biases, LayerNorm, learned positions, a tied head: GPT-2 large has 774,030,080 parameters."""
    text = """data: {tokenizer: gpt2}
model: {type: gpt2, hidden_dim: 1280, num_heads: 20, num_layers: 36}
trainer:
  mp: p=f32,c=bfloat16
  train_batch_size: 256
"""
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    job = to_job(read("auto", str(tmp_path / "job.yaml"), SETS), SETS)
    assert (n_params(job.model), job.data.seqlen, job.model.max_positions) == (774_030_080, 1024, 1024)
    assert (job.model.norm, job.model.bias, job.model.glu, job.model.tie_embeddings) == ("layernorm", True, False, True)
    assert job.performance.activation_checkpointing_type == "full"
