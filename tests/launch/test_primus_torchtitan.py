"""Primus over torchtitan: its defaults, its models, Primus-Turbo's attention, and float8."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.primus import read_primus
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params

JOB = """
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: MODEL.yaml
    overrides:
      stderr_sink_level: INFO
      training: {local_batch_size: 4, seq_len: 8192, mock_data: true}
      activation_checkpoint: {mode: none}
"""
SETS = {"hardware.node_type": "mi300x-node", "devices": 8}


def job_of(model, more="", nearby=None):
    text = JOB.replace("MODEL", model) + "".join(f"      {line}\n" for line in more.splitlines())
    return to_job(read_primus("job.yaml", text, {}, SETS, nearby), SETS)


def test_primus_compiles_blocks_and_loss_unless_it_is_told_otherwise():
    """pre_trainer.yaml since October 2025: compile.enable true, components model and loss; torchtitan's own default is false.

    llama3.1_8B-BF16-pretrain.yaml for MI300X, of 4 sequences per device without checkpointing, has to fit 192 GiB.
    """
    kernels = [
        job_of("llama3.1_8B", more).software.kernels
        for more in ("", "compile: {components: [model]}", "compile: {components: [loss]}", "compile: {enable: false}")
    ]
    assert [(each.compile, each.loss_impl) for each in kernels[1:]] == [
        ("blocks", "composite"), ("none", "compiled"), ("none", "composite")
    ]  # fmt: skip
    assert kernels[0].compile == "all"


def test_primus_turbo_has_an_attention_of_its_own():
    """The defaults have enable_primus_turbo and use_turbo_attention: keys and values of fewer heads are not repeated."""

    def kernels(more=""):
        found = job_of("llama3.1_8B", more).software.kernels
        return found.attention_kernel, found.repeat_kv

    assert kernels() == ("best", False)
    assert kernels("primus_turbo: {enable_primus_turbo: true}") == ("best", False)
    assert kernels("primus_turbo: {use_turbo_attention: false}") == ("sdpa", True)
    assert kernels("primus_turbo: {enable_primus_turbo: false}") == ("sdpa", True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama3.1_8B", "llama3-8b"),
        ("llama3.1_405B-fp8", "llama3-405b"),
        ("deepseek_v3_671b", "deepseek-v3"),
        ("gpt_oss_20b-fp8", "gpt-oss-20b"),
        ("llama4_17Bx16E", "llama4-scout"),
        ("qwen3_14b", "qwen3-14b"),
    ],
)
def test_models_by_the_names_of_their_files(model, name):
    """primus/configs/models/torchtitan: without them these jobs had torchtitan's debug model, of 6 M parameters."""
    assert job_of(model).model.name == name


def test_a_models_file_in_the_repository_of_the_job(tmp_path):
    folder = tmp_path / "primus/configs/models/torchtitan"
    folder.mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    text = "model: {name: qwen3, flavor: 4B, converters: [primus_turbo, quantize.linear.float8]}\n"
    (folder / "own.yaml").write_text(text, encoding="utf-8")
    job = job_of("own", nearby=NearbyFiles(tmp_path / "examples"))
    assert (job.model.name, job.performance.precision) == ("qwen3-4b", "fp8_tensorwise")
    with pytest.raises(ConfigError, match=r"^job.yaml: modules.pre_trainer.model: not among the models of Primus"):
        job_of("own")


@pytest.mark.parametrize("text", ["model: [1, 2]", "model: text", "model: {flavor: 8B}", "job: {}"])
def test_a_models_file_that_names_no_model(tmp_path, text):
    folder = tmp_path / "primus/configs/models/torchtitan"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^job.yaml: modules.pre_trainer.model: not among the models of Primus"):
        job_of("own", nearby=NearbyFiles(tmp_path))


@pytest.mark.parametrize(
    ("model", "section", "layers", "precision"),
    [
        ("llama3.1_8B", "{flavor: 70B}", 80, "bf16"),
        ("llama3.1_8B", "{name: qwen3, flavor: 4B}", 36, "bf16"),
        ("llama3.1_8B", "{flavor: 8B}", 32, "bf16"),
        ("llama3.1_8B", "{flavor: null}", 32, "bf16"),
        ("own", "{name: llama3, flavor: 8B}", 32, "bf16"),
        ("llama3.1_8B", "{converters: [primus_turbo]}", 32, "bf16"),
        ("llama3.1_8B", "{converters: [primus_turbo, quantize.linear.float8]}", 32, "fp8_tensorwise"),
        ("llama3.1_8B-fp8", "{converters: [primus_turbo]}", 32, "bf16"),
        ("llama3.1_8B", "{converters: quantize.linear.float8}", 32, "fp8_tensorwise"),
        ("llama3.1_8B-fp8", "{converters: primus_turbo}", 32, "bf16"),
    ],
)
def test_what_a_job_says_of_its_model_wins_over_the_models_file(model, section, layers, precision):
    """Primus merges the overrides of a job into its model's file; Llama 3 70B has 80 layers, Qwen3 4B 36."""
    job = job_of(model, f"model: {section}")
    assert (job.model.n_layers, job.performance.precision) == (layers, precision)


def test_a_key_of_the_section_model_that_changes_cost_is_not_dropped():
    with pytest.raises(ConfigError, match=r"model\.n_layers"):
        job_of("llama3.1_8B", "model: {n_layers: 4}")


def test_converters_that_are_no_list_of_names():
    with pytest.raises(ConfigError, match=r"model\.converters 5: "):
        job_of("llama3.1_8B", "model: {converters: 5}")


def test_float8_of_nested_sections():
    """Files that end in -fp8 add the converter quantize.linear.float8; its section scales by tensor without a recipe."""
    more = "quantize: {linear: {float8: {enable_fsdp_float8_all_gather: true, filter_fqns: [output]}}}"
    named, plain, bf16 = (
        job_of(model, section).performance
        for model, section in (("llama3.1_8B-fp8", more), ("llama3.1_8B-fp8", ""), ("llama3.1_8B", more))
    )
    assert [each.precision for each in (named, plain, bf16)] == ["fp8_tensorwise", "fp8_tensorwise", "bf16"]
    assert [bool(each.fp8_params) for each in (named, plain, bf16)] == [True, False, False]


def test_the_classic_attention_of_deepseek():
    """use_classic_attention: 16 heads of 128 for queries, keys and values instead of latent attention, in all 27 layers.

    Per layer 4 * 2048 * 2048 and two norms of 2048: 16,781,312. 26 layers of 64 routed and 2 shared experts of 3 * 2048 * 1408
    with a router of 64 * 2048: 571,080,704. One dense layer of 3 * 2048 * 10944: 67,239,936. Embedding and head of
    102,400 * 2048 and a norm: 419,432,448. In all 453,095,424 + 14,848,098,304 + 67,239,936 + 419,432,448.
    """
    classic = job_of("deepseek_v3_16b", "primus_turbo: {use_classic_attention: true}").model
    assert (classic.attention.kind, classic.n_q_heads, classic.n_kv_heads, classic.head_dim) == ("gqa", 16, 16, 128)
    assert n_params(classic) == 15_787_866_112
    assert job_of("deepseek_v3_16b").model.attention.kind == "mla"
    off = "primus_turbo: {enable_primus_turbo: false, use_classic_attention: true}"
    assert job_of("deepseek_v3_16b", off).model.attention.kind == "mla"


def test_products_that_checkpointing_is_told_to_recompute():
    """A list of modules beyond the router means that their products are recomputed too: said, and counted as saved."""
    more = "activation_checkpoint: {mode: selective, selective_ac_option: op, LIST: [WHAT]}".replace(
        "LIST", "per_op_sac_force_recompute_mm_shapes_by_fqns"
    )
    text = JOB.replace("MODEL", "llama3.1_8B").replace("activation_checkpoint: {mode: none}", more)
    key, statuses = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", {}
    for what in ("moe.router.gate", "feed_forward.w1"):
        reading = read_primus("job.yaml", text.replace("WHAT", what), {}, SETS)
        statuses[what] = next(flag.status for flag in reading.flags if flag.name == key)
    assert statuses == {"moe.router.gate": "used", "feed_forward.w1": "approximated"}


OLDER = """
includes: [../module_base.yaml]
training: {batch_size: 1, seq_len: 8192, compile: false, dataset: c4}
activation_checkpoint: {mode: selective, selective_ac_option: op}
primus_turbo: {enable_primus_turbo: true}
experimental: {custom_args_module: primus.backends.torchtitan.config_extension}
"""


def test_defaults_of_the_repository_of_the_job(tmp_path):
    """The file that `config` names in the job's checkout: of an older version, one sequence of 8,192 per device."""
    text = JOB.replace("MODEL", "llama3.1_8B")
    bare = text[: text.index("      training:")]

    def data(nearby):
        job = to_job(read_primus("job.yaml", bare, {}, SETS, nearby), SETS)
        return job.data.microbatch_sz, job.data.seqlen, job.software.kernels.compile

    assert data(None) == data(NearbyFiles(tmp_path)) == (8, 2048, "all")
    folder = tmp_path / "primus/configs/modules/torchtitan"
    folder.mkdir(parents=True)
    (folder / "pre_trainer.yaml").write_text(OLDER, encoding="utf-8")
    assert data(NearbyFiles(tmp_path)) == (1, 8192, "none")
    between = (
        "training: {local_batch_size: 2, deterministic: false}\ncompile: {enable: true, components: [model, loss]}\n"
    )
    (folder / "pre_trainer.yaml").write_text(between, encoding="utf-8")
    assert data(NearbyFiles(tmp_path)) == (2, 2048, "all")
