"""Megatron-LM's --yaml-cfg: arguments in a YAML file, alone or named by a script."""

from __future__ import annotations

import pytest
from launch_readings import HARDWARE, job

from steptime.base.config import ConfigError
from steptime.launch.megatron.yaml_arguments import arguments_in
from steptime.launch.read import read

TEXT = """
language_model:
  num_layers: 6
  hidden_size: 1024
  num_attention_heads: 16
  num_query_groups: 4
  ffn_hidden_size: null
  activation_func: swiglu
  gated_linear_unit: False
  add_bias_linear: False
  bias_activation_fusion: False
  bias_swiglu_fusion: True
  normalization: RMSNorm
  num_moe_experts: null
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
model_parallel:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  context_parallel_size: 1
  sequence_parallel: True
  bf16: True
  fp16: False
micro_batch_size: 2
global_batch_size: 64
group_query_attention: False
swiglu: False
position_embedding_type: rope
untie_embeddings_and_output_weights: True
transformer_impl: transformer_engine
use_distributed_optimizer: True
accumulate_allreduce_grads_in_fp32: False
encoder_seq_length: null
seq_length: 2048
max_position_embeddings: 2048
vocab_size: 32000
tokenizer_type: ${KIND}
"""
COMMAND = "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py {}\n"


@pytest.fixture
def given(monkeypatch):
    monkeypatch.setenv("KIND", "Llama2Tokenizer")


def assert_is_the_job(found):
    """A gated MLP of 64 * floor(8 x 1024 / 3 / 64) = 2688; 4 key and value heads and SwiGLU, as the fields of the model say."""
    model, layout = found.model, found.parallelism
    assert (model.n_layers, model.inter_sz, model.n_kv_heads, model.glu) == (6, 2688, 4, True)
    assert (model.activation, model.norm, model.bias, model.tie_embeddings) == ("silu", "rmsnorm", False, False)
    assert (layout.tp, layout.dp, found.sp, found.zero_level) == (2, 4, True, 1)
    assert (found.data.gbs, found.data.seqlen, found.data.microbatch_sz) == (64, 2048, 2)
    assert found.performance.recompute.granularity == "full"
    assert found.performance.main_grad_dtype == "fp32"


def test_the_file_alone(given, tmp_path):
    assert_is_the_job(job(tmp_path, "gpt.yaml", TEXT, devices=8))
    with pytest.raises(ConfigError, match="number of devices unknown"):
        job(tmp_path, "gpt.yaml", TEXT)


def test_a_script_that_names_it(given, tmp_path):
    """argparse's arguments are ignored: 99 layers are not read."""
    (tmp_path / "gpt.yaml").write_text(TEXT)
    found = job(tmp_path, "run.sh", COMMAND.format("--yaml-cfg gpt.yaml --num-layers 99"))
    assert_is_the_job(found)
    assert any(
        note.startswith("--yaml-cfg replaces the other flags") and "--num-layers" in note for note in found.notes
    )


def test_a_script_whose_file_is_elsewhere(tmp_path):
    (tmp_path / "run.sh").write_text(COMMAND.format("--yaml-cfg conf/gpt.yaml"))
    with pytest.raises(ConfigError, match=r"--yaml-cfg reads conf/gpt.yaml, which was not found.*--with FILE"):
        read("megatron", str(tmp_path / "run.sh"), HARDWARE)
    (tmp_path / "run.sh").write_text(COMMAND.format("--yaml-cfg $FILE"))
    with pytest.raises(ConfigError, match=r"run\.sh: \$FILE has no value; write FILE=\.\.\. before the command$"):
        read("auto", str(tmp_path / "run.sh"))


def test_the_switches_of_each_activation():
    """Fields decide: the arguments swiglu and squared_relu have no effect (core_transformer_config_from_yaml)."""
    for word, on in (("swiglu", "swiglu"), ("squaredrelu", "squared_relu"), ("gelu", "")):
        said = arguments_in("x", TEXT.replace("activation_func: swiglu", f"activation_func: {word}"), {"KIND": "x"})
        assert {key for key in ("swiglu", "squared_relu", "openai_gelu") if said[key] == "True"} == ({on} - {""})


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            "activation_func: swiglu",
            "activation_func: silu",
            "activation_func: expected one of swiglu, squaredrelu, gelu",
        ),
        ("model_parallel:", "model_parallel: 1\nother:", "expected two mappings"),
        ("", "", "KIND: no such variable; write KIND=... before the command"),
    ],
)
def test_what_is_wrong_is_one_line(old, new, what):
    with pytest.raises(ConfigError, match=what) as error:
        arguments_in("x.yaml", TEXT.replace(old, new), {} if not old else {"KIND": "x"})
    assert len(error.value.problems) == 1
