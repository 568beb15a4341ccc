"""torchtitan's own config functions: converters of a part of the layers, modules that a job overrides."""

from __future__ import annotations

import pytest
import yaml
from launch_readings import DATA, one_line

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.job_config import read_torchtitan

SETS = {"hardware.node_type": "dgx-h100", "devices": 8}
LLAMA = """
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192, steps=1000),
        activation_checkpoint=SelectiveAC.Config(),
    )
"""
TAIL = """
def llama3_8b_nvfp4() -> Trainer.Config:
    config = llama3_8b()
    assert config.model_spec is not None
    n_layers = len(cast(Llama3Model.Config, config.model_spec.model).layers)
    _TAIL = 0.15
    fqns = nvfp4_bf16_tail_fqns(n_layers, _TAIL)
    config.model_spec = model_registry(
        "8B", converters=[NVFP4LinearConverter.Config(fqns=fqns, model_compile_enabled=True)]
    )
    config.compile = CompileConfig(enable=True, components=["model"])
    return config
"""
FUSED = """
def enable_fused_swiglu(config: Trainer.Config) -> None:
    for override in (
        "torchtitan.overrides.fused_swiglu.fused_swiglu",
        "torchtitan.overrides.fused_swiglu.fused_grouped_experts",
    ):
        assert override not in config.override.imports
        config.override.imports.append(override)


def llama3_8b_fused() -> Trainer.Config:
    config = llama3_8b()
    enable_fused_swiglu(config)
    return config
"""
DEEPSEEK = """
def deepseek_v3_671b_float8() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry(
            "671B",
            converters=[
                Float8LinearConverter.Config(filter_fqns=["lm_head", "router.gate"]),
                Float8GroupedExpertsConverter.Config(model_compile_enabled=False),
            ],
        ),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 4096, max_context_length=4096, steps=10),
        parallelism=ParallelismConfig(expert_parallel_degree=2),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=True, components=["loss"]),
    )
"""
"""pytorch/torchtitan@b5bcd76c torchtitan/models/llama3/config_registry.py and deepseek_v3/config_registry.py, shortened."""


def reading(name: str, text: str):
    return read_torchtitan(f"llama3/config_registry.py:{name}", LLAMA + text, {"NGPU": "8"})


def performance(name: str, text: str):
    found = reading(name, text)
    job = to_job(found, {"hardware.node_type": "dgx-b200"})
    assert yaml.safe_dump(job.to_config())  # nothing in it is computed
    return found.config["performance"]


def test_the_last_layers_stay_in_bf16():
    """nvfp4_bf16_tail_fqns(32, 0.15) names all but the last ceil(32 * 0.15) = 5 layers."""
    found = performance("llama3_8b_nvfp4", TAIL)
    assert (found["precision"], found["bf16_layers_at_end"]) == ("nvfp4_torchao", 5)
    assert "bf16_layers_at_end" not in performance("llama3_8b", "")


def test_a_module_constant_is_the_share():
    """Qwen3's registry has the share as a module constant: ceil(32 * 0.5) = 16."""
    text = "_TAIL = 0.5\n" + TAIL.replace("    _TAIL = 0.15\n", "")
    assert performance("llama3_8b_nvfp4", text)["bf16_layers_at_end"] == 16


def test_an_unknown_share_is_an_error():
    text = TAIL.replace("_TAIL = 0.15", "_TAIL = share_of(config)")
    line = one_line(read_torchtitan, LLAMA + text, "llama3/config_registry.py:llama3_8b_nvfp4")
    assert "bf16_tail_fraction: computed (share_of(config))" in line


def test_experts_in_float8():
    """deepseek_v3_671b_float8: its projections and its experts' products in float8 by rows; or these alone."""
    found = read_torchtitan("deepseek_v3/config_registry.py:deepseek_v3_671b_float8", DEEPSEEK, {"NGPU": "256"})
    assert found.config["performance"]["precision"] == "fp8_rowwise"
    assert found.config["performance"]["moe"]["grouped_precision"] == "fp8_rowwise"
    assert "quantize.experts.converter" in [flag.name for flag in found.of("used")]
    assert found.of("unmodeled") == []
    alone = DEEPSEEK.replace('Float8LinearConverter.Config(filter_fqns=["lm_head", "router.gate"]),', "")
    found = read_torchtitan("deepseek_v3/config_registry.py:deepseek_v3_671b_float8", alone, {"NGPU": "256"})
    assert found.config["performance"]["precision"] == "bf16"
    assert found.config["performance"]["moe"]["grouped_precision"] == "fp8_rowwise"


@pytest.mark.parametrize(
    ("said", "recipe", "told"),
    [
        ("pad_multiple=128", "mxfp8_torchao", []),
        ('recipe_name="mxfp8_rceil"', "mxfp8_torchao", []),
        ('recipe_name="mxfp8_wgrad_with_hp"', "mxfp8_torchao_wgrad_hp", []),
        ('recipe_name="mxfp4"', "mxfp8_torchao", ["quantize.experts.recipe_name"]),
        ("pad_multiple=32", "mxfp8_torchao", ["quantize.experts.pad_multiple"]),
    ],
)
def test_experts_in_mxfp8(said, recipe, told):
    """MXFP8GroupedExpertsConverter.Config: recipe_name, and pad_multiple, 128 on compute capability 10."""
    text = DEEPSEEK.replace("Float8GroupedExpertsConverter.Config(", f"MXFP8GroupedExpertsConverter.Config({said}, ")
    found = read_torchtitan("deepseek_v3/config_registry.py:deepseek_v3_671b_float8", text, {"NGPU": "256"})
    assert found.config["performance"]["moe"]["grouped_precision"] == recipe
    assert [flag.name for flag in found.of("approximated") if "experts" in flag.name] == told
    assert found.of("unmodeled") == []


OWN_CONVERTERS = """
def llama3_8b_converted() -> Trainer.Config:
    config = llama3_8b()
    config.model_converters = ModelConvertersContainer.Config(converters=[Float8LinearConverter.Config({})])
    return config
"""


@pytest.mark.parametrize(
    ("arguments", "precision", "gathered"),
    [
        ("", "fp8_tensorwise", None),
        ("enable_fsdp_float8_all_gather=True", "fp8_tensorwise", True),
        ('recipe_name="rowwise"', "fp8_rowwise", None),
    ],
)
def test_a_converter_of_the_config_itself_scales_by_tensor_unless_it_names_a_recipe(arguments, precision, gathered):
    """float8.py before pytorch/torchtitan@6348d93d: recipe_name None, a Float8LinearConfig that scales by tensor."""
    found = performance("llama3_8b_converted", OWN_CONVERTERS.format(arguments))
    assert (found.get("precision"), found.get("fp8_params")) == (precision, gathered)


@pytest.mark.parametrize(
    ("backend", "ep", "said"),
    [("hybridep", 8, 1.0), ("hybridep", 1, None), ("deepep", 8, None)],
)
def test_room_for_rows_that_hybridep_does_not_wait_for(backend, ep, said):
    """deepseek_v3_16b_hybridep: non_blocking_capacity_factor 1.0; the other dispatchers of torchtitan have none.

    DeepEP pads no rows, so that swap_token_dispatcher refuses the converter of experts: left out.
    """
    text = DEEPSEEK.replace("Float8GroupedExpertsConverter.Config(model_compile_enabled=False),", "")
    text = text.replace('"671B",', f'"16B", moe_comm_backend="{backend}", non_blocking_capacity_factor=1.0,')
    text = text.replace("expert_parallel_degree=2", f"expert_parallel_degree={ep}")
    found = read_torchtitan("deepseek_v3/config_registry.py:deepseek_v3_671b_float8", text, {"NGPU": "8"})
    moe = found.config["performance"].get("moe", {})
    assert moe.get("non_blocking_capacity_factor") == said
    assert found.of("unmodeled") == []
    assert to_job(found, {"hardware.node_type": "dgx-h100"})


def test_a_function_that_grows_a_list_of_overrides():
    """Both names of fused_swiglu.py put gate, SiLU and product into one kernel; without them torchtitan has torch's own."""
    assert performance("llama3_8b_fused", FUSED)["activation_impl"] == "fused"
    assert "activation_impl" not in performance("llama3_8b", "")


def test_other_overrides_are_told():
    text = FUSED.replace("fused_swiglu.fused_grouped_experts", "helion_rope.helion_rope")
    assert [flag.name for flag in reading("llama3_8b_fused", text).of("approximated")] == ["override.imports"]
    assert [flag.name for flag in reading("llama3_8b_fused", FUSED).of("approximated")] == []


@pytest.mark.parametrize(
    "body",
    [
        "    for name in names_of(config):\n        config.job.x = name\n",
        "    for name in {'x': 1}:\n        config.job.x = name\n",
        "    log(config)\n",
        "    print(1)\n",
    ],
)
def test_what_cannot_be_followed_is_refused(body):
    text = f"def llama3_8b_other() -> Trainer.Config:\n    config = llama3_8b()\n{body}    return config\n"
    line = one_line(read_torchtitan, LLAMA + text, "llama3/config_registry.py:llama3_8b_other")
    assert "cannot be evaluated statically" in line


def test_a_loop_over_what_is_known_sets_each():
    """The fixture's loop over (config.training,) sets 4,096 tokens, where its base has 8,192."""
    text = (DATA / "torchtitan" / "config_registry.py").read_text(encoding="utf-8")
    assert read_torchtitan("config_registry.py:llama3_8b_looped", text).config["data"]["seqlen"] == 4096


LOOPS = """
TEN = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def many() -> Trainer.Config:
    for a in TEN:
        for b in TEN:
            for c in TEN:
                for d in TEN:
                    for e in TEN:
                        x = e
    return llama3_8b()


def doubled() -> Trainer.Config:
    x = [1]
    for a in TEN:
        for b in TEN:
            x.extend(x)
    return llama3_8b()


def word() -> Trainer.Config:
    word = "x"
    for a in TEN:
        for b in TEN:
            word = word + word
    config = llama3_8b()
    config.dump_folder = word
    return config
"""


@pytest.mark.parametrize(
    ("name", "why"), [("many", "statements to follow"), ("doubled", "a list longer than any job's")]
)
def test_what_never_ends_is_refused(name, why):
    """Ten to the fifth assignments; a list that doubles a hundred times."""
    assert why in one_line(read_torchtitan, LLAMA + LOOPS, f"llama3/config_registry.py:{name}")


def test_values_do_not_grow_without_bound():
    """A text doubled a hundred times would have 10^30 letters; beyond a hundred thousand it is only computed."""
    assert reading("word", LOOPS).config == reading("llama3_8b", "").config


SFT = """
def sft_debugmodel() -> Trainer.Config:
    model_spec = model_registry("8B")
    model_spec.model.layer.attention.attn_backend = "flex"
    model_spec.model.layer.attention.dim = 64
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192, steps=1000),
    )
"""


def test_what_a_function_sets_inside_its_model_is_told(tmp_path, monkeypatch):
    """The family is the folder's, also where the file is named from inside it."""
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(SFT, encoding="utf-8")
    monkeypatch.chdir(folder)
    flags = {flag.name: flag.status for flag in read("torchtitan", "config_registry.py:sft_debugmodel", SETS).flags}
    assert flags["model.name"] == "used"
    assert flags["model.attn_backend"] == "approximated"
    assert flags["model.dim"] == "unmodeled"


@pytest.mark.parametrize(("loss", "chunks"), [("", 1), ("loss=ChunkedCELoss.Config(),", None)])
def test_a_function_without_a_loss_has_one_over_all_tokens(loss: str, chunks: int | None) -> None:
    """Functions name ChunkedCELoss since 2026-04-27; before, the loss was one over all tokens. None is the profile's 8."""
    text = (
        f'def llama3_8b() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry("8B"), {loss}\n'
        "        training=TrainingConfig(local_batch_size=1, seq_len=8192))\n"
    )
    reading = read_torchtitan("config_registry.py:llama3_8b", text, sets=SETS)
    assert reading.config["performance"].get("loss_chunks") == chunks


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("Controller", "reinforcement learning: a trainer that waits for generators"),
        ("RLTrainer", "reinforcement learning: a trainer that waits for generators"),
        ("FluxTrainer", "flux, another kind of model (it makes images)"),
    ],
)
def test_a_function_of_another_program_is_refused_before_its_model(returned, why):
    """torchtitan/experiments/rl/examples/alphabet_sort/config_registry.py and models/flux/config_registry.py@b5bcd76c."""
    text = f"def qwen3_run() -> {returned}.Config:\n    return {returned}.Config(model_spec=registry('0.6B'))\n"
    with pytest.raises(ConfigError) as raised:
        read_torchtitan("config_registry.py:qwen3_run", text, {})
    assert str(raised.value) == f"config_registry.py:qwen3_run: {why}; not modeled"


def test_a_length_that_a_function_raises():
    """8,192 tokens, and 4,096 more."""
    name = "torchtitan/config_registry.py"
    reading = read_torchtitan(f"{name}:llama3_8b_grown", (DATA / name).read_text(), {}, SETS)
    assert reading.config["data"]["seqlen"] == 12288


@pytest.mark.parametrize(("default", "replayed"), [("", "per-op"), ('    selective_ac_option: str = "2"\n', None)])
def test_selective_checkpointing_that_a_function_leaves_unsaid(tmp_path, default, replayed):
    """torchtitan/config/configs.py of February and March 2026: every second block; later releases have it by operation alone."""
    models = tmp_path / "torchtitan" / "models" / "llama3"
    models.mkdir(parents=True)
    (tmp_path / "torchtitan" / "config").mkdir()
    configs = f'@dataclass\nclass ActivationCheckpointConfig:\n    mode: str = "selective"\n{default}'
    (tmp_path / "torchtitan" / "config" / "configs.py").write_text(configs, encoding="utf-8")
    function = LLAMA.replace(
        "num_tokens_per_microbatch_per_dp_rank=8192, max_context_length", "local_batch_size=1, seq_len"
    )
    function = function.replace("        activation_checkpoint=SelectiveAC.Config(),\n", "")
    (models / "config_registry.py").write_text(function, encoding="utf-8")
    performance = read("torchtitan", f"{models / 'config_registry.py'}:llama3_8b", SETS).config["performance"]
    assert performance.get("activation_checkpointing_type") == replayed
    every_second = {"granularity": "full", "method": "every", "n_layers": 2}
    assert performance.get("recompute") == (every_second if default else None)
