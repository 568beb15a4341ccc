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


AXOLOTL = (
    "base_model: Qwen/Qwen3-1.7B\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nsequence_len: 8192\nbf16: true\n"
)


@pytest.mark.parametrize("section", ["overrides_of_model_config", "model_config"])
def test_positions_that_axolotl_changes_cost_nothing_and_layers_do(tmp_path, section):
    """Axolotl src/axolotl/loaders/utils.py sets each on the model's config: rotary positions have no weights."""
    yarn = "rope_scaling: {type: yarn, factor: 2.0, original_max_position_embeddings: 32768}, max_position_embeddings: 65536"
    assert job(tmp_path, "job.yaml", f"{AXOLOTL}{section}: {{{yarn}}}\n").model.n_layers == 28
    (told,) = problems(tmp_path, f"{AXOLOTL}{section}: {{num_hidden_layers: 4}}\n")
    assert told.startswith(f"{section}.num_hidden_layers 4: not an option of Axolotl; its name suggests a cost")


def test_kernels_of_flash_attention_beside_attention_are_told(tmp_path):
    notes = job(tmp_path, "job.yaml", f"{AXOLOTL}flash_attn_rms_norm: true\nflash_attn_cross_entropy: false\n").notes
    assert [note.split()[1] for note in notes if "flash_attn" in note] == ["flash_attn_rms_norm"]


@pytest.mark.parametrize(("value", "told"), [("fa2", False), ("eager", True)])
def test_attention_of_llamafactory_by_a_forks_name(tmp_path, value, told):
    text = "model_name_or_path: Qwen/Qwen3-1.7B\nfinetuning_type: full\nstage: sft\ncutoff_len: 4096\nbf16: true\n"
    text += f"per_device_train_batch_size: 1\ngradient_accumulation_steps: 1\nattn: {value}\n"
    notes = [note for note in job(tmp_path, "job.yaml", text).notes if note.startswith("approximated: attn")]
    assert bool(notes) == told
