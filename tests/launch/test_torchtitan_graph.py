"""torchtitan's GraphTrainer: its config functions convert a trainer's config and trace the step into one graph."""

import pytest
from launch_readings import DATA, HARDWARE
from test_torchtitan import REGISTRY, minimal

from steptime.base.config import ConfigError
from steptime.launch.read import read as launch_file
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.job_config import read_torchtitan

FUNCTIONS = """from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_8b_float8, llama3_8b_tp

from . import model_registry


def graph_trainer_llama3_8b_tp() -> GraphTrainer.Config:
    config = to_graph_trainer_config(llama3_8b_tp(), model_registry)
    config.compile = GraphTrainerCompileConfig(enable=True)
    return config


def long() -> GraphTrainer.Config:
    config = graph_trainer_llama3_8b_tp()
    config.training.seq_len = 32768
    config.compile = GraphTrainerCompileConfig(enable=True, inductor_compilation="full", memory_policy="full")
    return config


def slow() -> GraphTrainer.Config:
    config = to_graph_trainer_config(llama3_8b_float8(), model_registry)
    config.compile = GraphTrainerCompileConfig(enable=True, enable_passes=False)
    return config


def offloads() -> GraphTrainer.Config:
    config = graph_trainer_llama3_8b_tp()
    config.compile = GraphTrainerCompileConfig(enable=True, memory_policy="sac_and_offload", disable_passes=["cudagraph_pass"])
    return config


def untraced() -> GraphTrainer.Config:
    config = graph_trainer_llama3_8b_tp()
    config.compile = GraphTrainerCompileConfig(enable=False, mode=None)
    return config


def other() -> GraphTrainer.Config:
    config = graph_trainer_llama3_8b_tp()
    change(config)
    return config
"""


@pytest.fixture
def registry(tmp_path):
    """GraphTrainer's registry below a copy of torchtitan's own."""
    here = tmp_path / "torchtitan/experiments/graph_trainer/llama3"
    base = tmp_path / "torchtitan/models/llama3"
    for folder, text in ((here, FUNCTIONS), (base, (DATA / REGISTRY).read_text(encoding="utf-8"))):
        folder.mkdir(parents=True)
        (folder / "config_registry.py").write_text(text, encoding="utf-8")
    return here / "config_registry.py"


def reading(registry, function):
    return launch_file("torchtitan", f"{registry}:{function}", HARDWARE)


def test_a_traced_step_gathers_each_parameter_and_recomputes_only_what_backward_reads(registry):
    """The trainer's config has no checkpointing and tp 4 of 64 devices; a graph saves every matrix multiply by default."""
    found = reading(registry, "graph_trainer_llama3_8b_tp").config
    assert (found["parallelism"]["tp"], found["parallelism"]["dp"]) == (4, 16)
    assert found["parallelism"]["fsdp"] == {"reshard_after_forward": True, "reduce_dtype": "fp32", "wrap": "parameter"}
    expected = {"loss_impl": "traced", "cuda_graphs": True, "recompute_stops_early": True}
    assert expected.items() <= found["performance"].items()
    assert found["performance"]["recompute"] == {"granularity": "selective", "modules": ["per_op_all"]}
    assert "compile" not in found["performance"]
    fsdp = to_job(reading(registry, "graph_trainer_llama3_8b_tp"), HARDWARE).parallelism.fsdp
    assert fsdp is not None
    assert fsdp.wrap == "parameter"


@pytest.mark.parametrize(
    ("function", "section"),
    [
        ("long", {"compile": "all", "step_graph": None, "activation_checkpointing_type": "full", "cuda_graphs": True}),
        (
            "slow",
            {"loss_impl": "traced", "step_graph": "traced", "overlap": {"dp": False}, "precision": "fp8_tensorwise"},
        ),
        ("offloads", {"loss_impl": "traced", "step_graph": "simplified"}),
        ("untraced", {"step_graph": None, "activation_checkpointing_type": "none"}),
    ],
)
def test_passes_policies_and_inductor(registry, function, section):
    """Inductor over the whole graph fuses its kernels; without passes there are no CUDA graphs, and gathers are waited for."""
    found = reading(registry, function).config
    assert {key: found["performance"].get(key) for key in section} == section
    assert ("cuda_graphs" in found["performance"]) == (function == "long")
    assert found["parallelism"]["fsdp"]["wrap"] == ("block" if function == "untraced" else "parameter")
    assert found["data"]["seqlen"] == (32768 if function == "long" else 8192)


def test_offloaded_activations_are_not_modeled(registry):
    """They move within a budget that the trace determines."""
    with pytest.raises(ConfigError) as error:
        to_job(reading(registry, "offloads"), HARDWARE)
    assert "compile.memory_policy" in str(error.value)
    assert "activations offloaded to host memory within a budget" in str(error.value)


def test_what_is_not_read_is_one_line(registry):
    with pytest.raises(ConfigError) as error:
        reading(registry, "other")
    assert "other: calls change(config), which is not read; give a log of the job" in str(error.value)
    with pytest.raises(ConfigError) as error:
        read_torchtitan("config_registry.py:graph_trainer_llama3_8b_tp", FUNCTIONS)
    assert "the config that it converts is in another config_registry.py, which was not found" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "section"),
    [
        ('backend = "aot_eager"', {"compile": None, "loss_impl": "traced", "overlap": {"dp": False}}),
        (
            'backend = "aot_eager"\ngraph_passes = "transformer_block_bucketing"',
            {"compile": None, "loss_impl": "traced", "overlap": None},
        ),
        ("", {"compile": "all", "loss_impl": None, "overlap": {"dp": False}}),
    ],
)
def test_simple_fsdp_of_toml_files(lines, section):
    """Its compiler passes bucket and prefetch the gathers of single parameters; aot_eager keeps torch's own kernels."""
    text = minimal(("[model]", 'name = "simple_fsdp.llama3"')) + f"[compile]\nenable = true\n{lines}\n"
    found = read_torchtitan("job.toml", text).config
    assert found["parallelism"]["fsdp"]["wrap"] == "parameter"
    assert {key: found["performance"].get(key) for key in section} == section
    assert found["model"] == {"preset": "llama3-8b"}


def test_a_log_prints_the_settings_of_its_graph():
    """The config of a run as the log has it, with the compile section of GraphTrainer."""
    graph = '"compile": {"enable": true, "mode": "aot_fx_trace", "memory_policy": "eager", "disable_passes": ["cudagraph_pass"]}'
    config = (
        'Running with configs: {"model_spec": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, '
        f'"seq_len": 8192}}, "parallelism": {{"data_parallel_shard_degree": 8}}, "loss": {{}}, {graph}}}'
    )
    found = read_torchtitan("job.log", f"[titan] {config}\n").config
    assert found["parallelism"]["fsdp"]["wrap"] == "parameter"
    assert found["performance"]["activation_checkpointing_type"] == "per-op"
    assert "cuda_graphs" not in found["performance"]
