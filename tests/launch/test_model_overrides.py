"""Sizes of a model that a config changes: read, or refused by name; none is passed over."""

import pytest
from launch_readings import job

from steptime.base.config import ConfigError
from steptime.model.blocks import n_params

OLMO = """model: {{d_model: 2048, n_heads: 16, n_layers: 16, mlp_ratio: 8, max_sequence_length: 2048, embedding_size: 50304,
  weight_tying: true, rope: true, include_bias: false, layer_norm_type: default, activation_type: swiglu, {extra}}}
optimizer: {{name: adamw}}
global_train_batch_size: 64
device_train_microbatch_size: 4
precision: amp_bf16
fsdp: {{wrapping_strategy: by_block, precision: mixed}}
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {{global_batch_size: 64, local_batch_size: 8}}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config:
    _target_: transformers.AutoConfig.from_pretrained
    pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
    {config}
  {extra}
distributed: {{strategy: fsdp2}}
packed_sequence: {{packed_sequence_size: 4096}}
optimizer: {{_target_: torch.optim.AdamW}}
"""


def problems(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        job(tmp_path, "job.yaml", text)
    return [line.rpartition("job.yaml: ")[2] for line in error.value.problems]


def test_olmos_multi_query_attention_has_one_head_of_keys_and_values(tmp_path):
    """OLMo olmo/config.py, effective_n_kv_heads: 1 with multi_query_attention, else n_heads.

    Of each layer the projections of keys and values have 2 * 2048 * 2048 * (1 - 1/16) = 7,864,320 weights less.
    """
    every = job(tmp_path, "job.yaml", OLMO.format(extra="multi_query_attention: false"))
    one = job(tmp_path, "job.yaml", OLMO.format(extra="multi_query_attention: true"))
    assert (every.model.n_kv_heads, one.model.n_kv_heads) == (16, 1)
    assert n_params(every.model, 2048) - n_params(one.model, 2048) == 16 * 7_864_320


def test_a_forks_size_of_olmos_model_is_refused(tmp_path):
    told = "model.n_shared_layers 4: not an option of OLMo; its name suggests a cost; not modeled; --allow-unmodeled ignores it"
    assert problems(tmp_path, OLMO.format(extra="n_shared_layers: 4")) == [told]


@pytest.mark.parametrize(
    ("config", "extra", "layers", "vocabulary"),
    [
        ("num_hidden_layers: 4", "", 4, 128256),
        ("", "num_hidden_layers: 2", 2, 128256),
        ("vocab_size: 32000", "", 32, 32000),
    ],
)
def test_layers_and_vocabulary_that_automodel_changes_are_read(tmp_path, config, extra, layers, vocabulary):
    model = job(tmp_path, "job.yaml", AUTOMODEL.format(config=config, extra=extra)).model
    assert (model.n_layers, model.vocab_sz, model.hidden_sz) == (layers, vocabulary, 4096)


@pytest.mark.parametrize(
    ("config", "extra", "named"),
    [
        (
            "hidden_size: 2048",
            "",
            "model.config.hidden_size 2048: not an option of NeMo AutoModel; its name suggests a cost",
        ),
        ("num_key_value_heads: 2", "", "model.config.num_key_value_heads 2: not an option of NeMo AutoModel"),
        ("", "n_layer: 12", "model.n_layer 12: not an option of NeMo AutoModel; its name suggests a cost"),
        ("", "dtype: float32", "model.dtype float32: weights of another dtype than bf16"),
        ("", "num_labels: 2", "model.num_labels 2: another kind of model: a head that classifies"),
    ],
)
def test_other_sizes_that_automodel_changes_are_refused(tmp_path, config, extra, named):
    told = problems(tmp_path, AUTOMODEL.format(config=config, extra=extra))
    assert len(told) == 1
    assert told[0].startswith(named)
