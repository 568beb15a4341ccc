"""NeMo 1, NeMo 2.0 and Megatron-Bridge: configs and logs as plans."""

import ast
from importlib.metadata import files

import pytest
from launch_readings import DATA, HARDWARE, REFUSED, golden_text, one_line, read, saved_and_read_back, status

from steptime.base.config import ConfigError
from steptime.launch.interpolate import resolve
from steptime.launch.keys import load_table, rule_of, spelled
from steptime.launch.nemo.formats import read_nemo
from steptime.launch.reading import to_job
from steptime.model.presets import load_model

CASES = {
    "nemo/llama3_1_70b.yaml": None,
    "nemo/nemotron4_15b.yaml": None,
    "nemo/gpt3_175b_fp8.yaml": None,
    "nemo/gpt_2022.yaml": None,
    "nemo/gpt_20b.log": None,
    "nemo/llama3_70b_recipe.yaml": None,
    "nemo/llama31_8b_fp8.yaml": None,
    "nemo/llama3_8b_flat.txt": None,
    "nemo/llama3_70b_container.yaml": {"parallelism.dp": 4},
    "nemo/llama32_1b.log": None,
}


def changed(name, *changes, sets=None, env=None):
    """The reading of a fixture with text replaced."""
    text = (DATA / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_nemo("job", text, env or {}, sets)


def problem(name, *changes, sets=None):
    """The one error line of a fixture with text replaced."""
    text = (DATA / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return one_line(read_nemo, text, sets=sets)


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_the_plan_on_record(name, golden):
    found = read(read_nemo, name, CASES[name])
    golden(f"launch/{name.replace('/', '_').removesuffix('.yaml')}.yaml", golden_text(found))
    saved_and_read_back(found, CASES[name])


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("nemo/llama3_1_70b.yaml", "llama3-70b"),
        ("nemo/llama3_70b_recipe.yaml", "llama3-70b"),
        ("nemo/llama3_70b_container.yaml", "llama3-70b"),
        ("nemo/llama31_8b_fp8.yaml", "llama3-8b"),
        ("nemo/llama3_8b_flat.txt", "llama3-8b"),
        ("nemo/llama32_1b.log", "llama3-1b"),
        ("nemo/nemotron4_15b.yaml", "nemotron4-15b"),
    ],
)
def test_the_models_are_the_presets(name, preset):
    """Parameter for parameter, though each framework spells them out in its own words."""
    model = to_job(read(read_nemo, name, CASES[name]), HARDWARE | (CASES[name] or {}), allow_unmodeled=True).model
    named = {"name": "", "source": ""}
    assert model.model_copy(update=named) == load_model(preset).model_copy(update=named)


def test_references_are_filled_in():
    found = read(read_nemo, "nemo/nemotron4_15b.yaml").config["model"]
    assert found["inter_sz"] == 4 * 6144  # ${multiply:4, ${.hidden_size}}
    tree = {"a": {"b": "${..c}", "d": "${.b}/x", "e": "${missing}", "f": "${f.g}"}, "c": 2}
    assert resolve(tree)["a"] == {"b": 2, "d": "2/x", "e": "${missing}", "f": "${f.g}"}
    assert problem("nemo/nemotron4_15b.yaml", ("${multiply:4, ${.hidden_size}}", "${eval:4*6144}")) == (
        "job: model.ffn_hidden_size: expected a whole number of at least 1 (got '${eval:4*6144}')"
    )


def test_nemo_1_in_its_own_words():
    """128 nodes of 8 over tp 4, pp 4, cp 2: 32 data-parallel ranks."""
    found = read(read_nemo, "nemo/llama3_1_70b.yaml")
    assert found.config["parallelism"] == {
        "tp": 4,
        "pp": 4,
        "dp": 32,
        "zero_level": 1,
        "sp": True,
        "cp": 2,
        "cp_comm_type": "p2p",
        "vpp": 10,
        "bucket_size_mb": 125,
    }
    assert found.config["performance"]["master_dtype"] == "remainder"
    assert status(found, "model.defer_embedding_wgrad_compute") == "used"
    autocast = changed("nemo/nemotron4_15b.yaml", ("megatron_amp_O2: true", "megatron_amp_O2: false"))
    assert status(autocast, "model.megatron_amp_O2") == "approximated"
    # Apex hides the reduction and not the gather, where nothing is said: 4 bytes of fp32 gradients of 4 + 2
    log = read(read_nemo, "nemo/gpt_20b.log")
    assert log.config["performance"]["overlap"] == {"tp": False, "dp": 0.667, "pp": False}
    assert log.config["parallelism"]["bucket_size_mb"] == 100
    assert status(log, "model.optim.overlap_param_sync") == "default"
    old = read(read_nemo, "nemo/gpt_2022.yaml").config["performance"]
    assert (old["software"], old["attention_impl"]) == ("nemo-2022", "unfused")
    fp8 = read(read_nemo, "nemo/gpt3_175b_fp8.yaml").config["performance"]
    assert (fp8["precision"], fp8["fp8_params"], fp8["main_grad_dtype"]) == ("fp8_delayed", True, "bf16")


@pytest.mark.parametrize("key", ["apply_embedding_scaling: true", "distributed_adam_bucket_merge_size: 4"])
def test_settings_with_a_small_cost_are_told(key):
    flags = changed("nemo/llama3_1_70b.yaml", ("\nmodel:\n", f"\nmodel:\n  {key}\n")).flags
    assert [flag.status for flag in flags if key.partition(":")[0] in flag.name] == ["approximated"]


@pytest.mark.parametrize(
    ("setting", "name", "named"),
    [
        ("attn_logit_softcapping: 50.0", "", 1),
        ("parallel_attention: true", "", 0),  # as the launcher's Mistral 7B
        ("parallel_attention: true", "megatron_falcon_gpt", 2),
        ("parallel_attention: false", "megatron_falcon_gpt", 1),
        ("parallel_attention: false", "", 0),
        ("parallel_attention: false", "te_gpt", 0),
    ],
)
def test_another_block_of_megatron_core_is_refused(setting, name, named):
    """megatron_gpt_model.py sets each on the config of its layers; only Falcon's (get_specs, by model.name) read the second."""
    key = f"\nmodel:\n  name: '{name}'\n  mcore_customization_config:\n    {setting}\n    query_pre_attn_scalar: 224\n"
    found = changed("nemo/llama3_1_70b.yaml", ("\nmodel:\n", key))
    assert len(found.of("unmodeled")) == named


def test_nemo_2_puts_the_strategy_over_the_model_and_the_plugin_over_ddp():
    found = read(read_nemo, "nemo/llama3_70b_recipe.yaml")
    assert found.config["parallelism"]["tp"] == 4
    # plugins.grad_reduce_in_fp32 false over strategy.ddp's true
    assert found.config["performance"]["main_grad_dtype"] == "bf16"
    # the callback's own: buckets of 128 Mi elements, sends hidden with virtual stages
    assert found.config["parallelism"]["bucket_size_mb"] == 2 * 2**27 / 1e6
    assert found.config["performance"]["overlap"] == {"tp": True, "dp": True, "pp": True}
    # the class's own settings are told as such
    flag = next(flag for flag in found.flags if flag.name == "model.config.num_layers")
    assert (flag.status, flag.value, flag.note) == ("default", "80", "Llama3Config70B: model.n_layers")


def test_precision_aware_states():
    """bf16 moments; the master weight is whole beside tensorwise scaling, which the plugin hands to the optimizer too, and what
    bf16 drops beside delayed scaling (megatron-core 0.16.1 core/optimizer/optimizer_config.py)."""
    found = read(read_nemo, "nemo/llama31_8b_fp8.yaml").config["performance"]
    assert (found.get("master_dtype"), found["moment_dtype"]) == (None, "bf16")
    delayed = changed("nemo/llama31_8b_fp8.yaml", ("fp8_recipe: tensorwise", "fp8_recipe: delayed"))
    assert delayed.config["performance"]["master_dtype"] == "remainder"
    assert (found["precision"], found["fp8_params"]) == ("fp8_current", True)


def test_a_bridge_log_tells_release_devices_and_config():
    found = read(read_nemo, "nemo/llama32_1b.log")
    assert found.config["performance"]["software"] == "megatron-bridge@25.09"
    assert found.config["parallelism"]["dp"] == 8
    assert found.config["data"] == {"gbs": 512, "seqlen": 1024, "microbatch_sz": 1}
    assert found.config["parallelism"]["bucket_size_mb"] == 160  # 40e6 elements of fp32
    assert status(found, "model.some_switch_of_a_later_release") == "irrelevant"
    ranks = "\n".join(
        f"[rank{rank}]:{line}"
        for line in (DATA / "nemo/llama32_1b.log").read_text().splitlines()
        for rank in ((0, 1) if line.startswith(" ") or ":" in line else (0,))
    )
    assert read_nemo("nemo/llama32_1b.log", ranks).config == found.config


def test_bridge_sections_lie_over_each_other():
    name, sets = "nemo/llama3_70b_container.yaml", {"parallelism.dp": 4}
    overlap = ("comm_overlap: null", "comm_overlap:\n  tp_comm_overlap: false\n  bucket_size: 1000000")
    found = changed(name, overlap, sets=sets).config
    assert found["performance"]["overlap"]["tp"] is False
    assert found["parallelism"]["bucket_size_mb"] == 2
    sharded = changed(
        name,
        ("use_megatron_fsdp: false", "use_megatron_fsdp: true"),
        ("data_parallel_sharding_strategy: no_shard", "data_parallel_sharding_strategy: optim_grads_params"),
        ("  fp8: hybrid", "  fp8: null"),
        ("pipeline_model_parallel_size: 4", "pipeline_model_parallel_size: 1"),
        ("virtual_pipeline_model_parallel_size: 5", "virtual_pipeline_model_parallel_size: null"),
        sets=sets,
    )
    assert sharded.config["parallelism"]["zero_level"] == 3
    assert to_job(sharded, HARDWARE).zero_level == 3
    full = (
        "recompute_granularity: null",
        "recompute_granularity: full\n  recompute_method: block\n  recompute_num_layers: 2",
    )
    assert changed(name, full, sets=sets).config["performance"]["recompute"] == {
        "granularity": "full",
        "method": "block",
        "n_layers": 2,
    }
    modules = ("recompute_granularity: null", "recompute_granularity: selective")
    assert changed(name, modules, sets=sets).config["performance"]["recompute"]["modules"] == ["core_attn"]
    graphs = ("enable_cuda_graph: false", "cuda_graph_impl: local")
    assert changed(name, graphs, sets=sets).config["performance"]["cuda_graphs"]


def test_uneven_stages():
    """80 layers over 4 stages, 17 on the first: 21 on each of the others."""
    flat = ("virtual_pipeline_model_parallel_size: 5", "virtual_pipeline_model_parallel_size: null")
    uneven = ("num_layers: 80", "num_layers: 80\n  num_layers_in_first_pipeline_stage: 17")
    found = changed("nemo/llama3_70b_container.yaml", flat, uneven, sets={"parallelism.dp": 4})
    assert found.config["parallelism"]["layers_per_stage"] == [17, 21, 21, 21]
    ends = ("num_layers: 80", ("num_layers: 80\n  account_for_embedding_in_pipeline_split: true\n"
            "  account_for_loss_in_pipeline_split: true"))  # fmt: skip
    found = changed("nemo/llama3_70b_container.yaml", flat, ends, sets={"parallelism.dp": 4})
    assert found.config["parallelism"]["embedding_and_loss_count_as_layers"]


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "nemo/llama3_1_70b.yaml",
            [("micro_batch_size: 1\n", "micro_batch_size: 3\n")],
            (
                "job: model.global_batch_size: must be a multiple of micro-batch size * data-parallel ranks = 3 * 32 "
                "(got 2048); add --set data.gbs=N"
            ),
        ),
        (
            "nemo/llama3_1_70b.yaml",
            [("num_nodes: 128", "num_nodes: 3")],
            (
                "job: world size 24 is not a multiple of tp 4 x pp 4 x cp 2 = 32 (32, 64, 96 ... are)"
                "; for other nodes add --devices N"
            ),
        ),
        (
            "nemo/llama3_1_70b.yaml",
            [("tensor_model_parallel_size: 4\n", "tensor_model_paralel_size: 4\n")],
            "job: model.tensor_model_paralel_size 4: not an option of NeMo 1.23; did you mean tensor_model_parallel_size?"
            + REFUSED,
        ),
        (
            "nemo/llama3_70b_recipe.yaml",
            [("Llama3Config70B", "Llama3Config71B")],
            "job: model.config: unknown class (got 'Llama3Config71B'); add --set model=NAME; did you mean 'Llama3Config70B'?",
        ),
        (
            "nemo/llama3_70b_container.yaml",
            [("some_switch_of_a_later_release: false", "hidden_of_a_later_release: 3")],
            (
                "job: model.hidden_of_a_later_release 3: not an option of Megatron-Bridge (megatron-core 0.16.1); "
                "its name suggests a cost; not modeled; --allow-unmodeled ignores it"
            ),
        ),
        (
            "nemo/llama32_1b.log",
            [("optimizer:\n  _target_", "\noptimizer:\n  _target_")],
            "job: the printed config is truncated; give the whole log",
        ),
        (
            "nemo/gpt_20b.log",
            [("      optim:", "\n      optim:")],
            "job: the printed config is truncated; give the whole log",
        ),
        (
            "nemo/override.yaml",
            [],
            (
                "job: an override of a recipe, not the whole config: no model.num_layers; give the log that prints the job's "
                "Task Configuration, or the run_config.yaml of a checkpoint"
            ),
        ),
    ],
)
def test_bad_settings_are_one_line(name, changes, line):
    assert problem(name, *changes, sets={"parallelism.dp": 8} if "hidden_of" in line else None) == line


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "nemo/nemotron4_15b.yaml",
            [("/stage/nemotron_2_256k.model", "/stage/my.model")],
            "job: vocabulary size unknown; add --set model.vocab_sz=N",
        ),
        (
            "nemo/llama3_70b_container.yaml",
            [],
            "job: number of devices unknown; add --set parallelism.dp=N",
        ),
    ],
)
def test_what_keeps_a_config_from_being_a_plan_is_one_line(name, changes, line):
    with pytest.raises(ConfigError) as error:
        to_job(changed(name, *changes), HARDWARE)
    assert error.value.problems == [line]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {n_layers: 2}\n", "not a config of NeMo or Megatron-Bridge"),
        ('{"train_batch_size": 8}', "not a config of NeMo or Megatron-Bridge"),
        ("[training]\nbatch_size = 8\n", "line 2"),
        (
            "trainer: {devices: -1}\nmodel: {preprocessor: {window_size: 0.025}, optim: {name: adamw}}\n",
            "model.preprocessor: another kind of model",
        ),
        ("a: [1\n", "line 2"),
        ("a: 1\na: 2\n", "duplicate key 'a'"),
        ("", "empty"),
        ("[NeMo I 2024-03-11 09:12:02 exp_manager:1] hello\n", "the log does not print the job's config"),
        ("------- Task Configuration -------\n", "truncated after its heading"),
    ],
)
def test_other_files_are_one_line(text, words):
    assert words in one_line(read_nemo, text)


def test_the_user_names_what_the_file_does_not():
    found = changed(
        "nemo/nemotron4_15b.yaml", ("/stage/nemotron_2_256k.model", "/my.model"), sets={"model.vocab_sz": 1000}
    )
    assert found.config["model"]["vocab_sz"] == 1000


def test_a_residual_in_kernels_of_its_own_costs_where_there_is_bias_or_dropout():
    """torch's dropout of probability 0 returns its input, so that without bias both ways add the residual alone."""
    name, key = "nemo/gpt3_175b_fp8.yaml", "model.bias_dropout_add_fusion"
    apart = ("  hidden_dropout: 0.1", "  bias_dropout_add_fusion: false\n  hidden_dropout: 0.1")
    assert status(changed(name, apart), key) == "approximated"
    bare = ("  hidden_dropout: 0.1", "  bias_dropout_add_fusion: false\n  bias: false\n  hidden_dropout: 0.0")
    assert status(changed(name, bare, ("attention_dropout: 0.1", "attention_dropout: 0.0")), key) == "irrelevant"


def test_an_override_of_a_recipe_is_no_plan_whatever_the_user_sets():
    """Precision, states and overlap are the recipe's own: with a model alone the plan would be of another job."""
    named = {"model": "llama3-8b", "parallelism.dp": 8, "data.seqlen": 4096}
    assert "an override of a recipe" in problem("nemo/override.yaml", sets=named)
    bare = (
        "model: {tensor_model_parallel_size: 4}\ntrain: {global_batch_size: 8}\nddp: {check_for_nan_in_grad: false}\n"
    )
    assert "an override of a recipe" in one_line(read_nemo, bare, sets=named)


def fields_of(path, name):
    """The annotated fields of a class of the installed megatron-core, by its syntax."""
    file = next(file for file in files("megatron-core") if str(file) == f"megatron/core/{path}")
    tree = ast.parse(file.locate().read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]


@pytest.mark.parametrize(
    ("section", "path", "name"),
    [
        ("model", "transformer/transformer_config.py", "TransformerConfig"),
        ("model", "model_parallel_config.py", "ModelParallelConfig"),
        ("ddp", "distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        ("optimizer", "optimizer/optimizer_config.py", "OptimizerConfig"),
    ],
)
def test_every_setting_of_megatron_core_is_known(section, path, name):
    table = load_table("megatron_bridge")
    fields = fields_of(path, name)
    assert len(fields) > 20
    assert [field for field in fields if rule_of(spelled(f"{section}.{field}", table), table) is None] == []


def test_the_tables_spell_what_they_know():
    for name in ("nemo1", "nemo2"):
        table = load_table(name)
        for old in table.renamed:
            if not old.endswith("."):
                assert rule_of(spelled(old, table), table), (name, old)


def test_a_mamba_model_without_a_pattern_is_no_gpt():
    """NeMo 1's megatron_mamba_config.yaml: the layers' kinds come from elsewhere, so nothing else of the file matters."""
    with pytest.raises(ConfigError) as error:
        to_job(
            changed("nemo/llama3_1_70b.yaml", ("  num_layers: ", "  mamba_ssm_ngroups: 8\n  num_layers: ")), HARDWARE
        )
    assert [line.partition(": ")[2] for line in error.value.problems] == [
        f"model.mamba_ssm_ngroups 8: Mamba layers without a pattern, another kind of model{REFUSED}"
    ]


@pytest.mark.parametrize("model", ["1.5", "[1, 2]", "llama", "true"])
def test_a_model_that_is_no_section_is_one_line(model):
    """Random input found a number in the model's place, in a Megatron-Bridge config."""
    text = (
        f"_target_: megatron.bridge.training.config.ConfigContainer\nmodel: {model}\ntrain: {{global_batch_size: 8}}\n"
    )
    assert "no model.num_layers" in one_line(read_nemo, text)
