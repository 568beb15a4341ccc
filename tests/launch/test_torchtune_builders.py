"""torchtune's builders that take the sizes of a model in the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params

BUILDER = """model:
  _component_: torchtune.models.%s
  vocab_size: 1024
  num_layers: 4
  num_heads: 8
  num_kv_heads: 4
  embed_dim: 512
  intermediate_dim: 1536
  max_seq_len: 4096
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 1024
batch_size: 2
dtype: bf16
optimizer:
  _component_: torch.optim.AdamW
"""


def planned(tmp_path: Path, text: str) -> Job:
    path, sets = tmp_path / "own.yaml", {**HARDWARE, "parallelism.dp": 8}
    path.write_text(text)
    return to_job(read("auto", str(path), sets), sets)


@pytest.mark.parametrize(
    ("builder", "tied", "bias"),
    [
        ("llama3.llama3", False, 0),
        ("llama3_2.llama3_2", True, 0),
        ("qwen2.qwen2", False, 1024),
        ("qwen3.qwen3", False, 1024),
        ("qwen3.qwen3\n  q_proj_bias: false\n  q_norm: true", False, 2 * 64),
        ("gemma.lora_gemma", True, 0),
    ],
)
def test_a_builder_with_sizes(tmp_path: Path, builder: str, tied: bool, bias: int) -> None:
    """A layer: 512 x (512 + 2 x 256 + 512) of attention, 3 x 512 x 1536, two norms.

    Qwen's have biases of 512 + 2 x 256, or two norms of heads.
    """
    layer = 512 * (512 + 2 * 256 + 512) + 3 * 512 * 1536 + 2 * 512 + bias
    model = planned(tmp_path, BUILDER % builder).model
    assert n_params(model) == 4 * layer + 512 + (1 if tied else 2) * 1024 * 512


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("num_experts: 16", "model.num_experts 16: experts"),
        ("num_classes: 2", "model.num_classes 2: a head of classes, not of the vocabulary"),
        ("fusion_interval: 4", "model.fusion_interval 4: layers that attend to images"),
    ],
)
def test_a_builder_of_another_kind_of_model_is_no_decoder(tmp_path: Path, key: str, why: str) -> None:
    """torchtune/models/llama4, mistral and llama3_2_vision, _component_builders.py: sizes under the names of a decoder's."""
    with pytest.raises(ConfigError, match=why):
        planned(tmp_path, BUILDER % f"llama4.llama4_decoder\n  {key}")
