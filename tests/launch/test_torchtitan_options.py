"""Settings of torchtitan that few jobs have: a memory budget, layers of multi-token prediction, one device."""

from __future__ import annotations

import tomllib

import pytest
from launch_readings import REFUSED, one_line

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.graph_trainer import NO_CAPTURES
from steptime.launch.torchtitan.job_config import read_torchtitan
from steptime.launch.write.export import write

TOML = """
[model]
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = {shards}
[compile]
enable = {compiled}
[activation_checkpoint]
mode = "{mode}"
"""
MTP = """
def deepseek_v3_mtp() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("16B", num_mtp_layers={layers}),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4096, max_context_length=4096, steps=10),
        activation_checkpoint=None,
    )
"""


PIPELINE = """
[model]
flavor = "8B"
[training]
local_batch_size = 4
global_batch_size = {batch}
seq_len = 8192
[parallelism]
data_parallel_shard_degree = {shards}
pipeline_parallel_degree = 4
"""


@pytest.mark.parametrize(("batch", "passes"), [(16, None), (48, 3)])
def test_the_pipeline_runs_once_for_each_local_batch(batch, passes):
    """trainer.py, train_step: 48 / (4 * 4) = 3 local batches, each through the schedule; a file that is written says so."""
    reading = read_torchtitan("job.toml", PIPELINE.format(batch=batch, shards=4), {}, None)
    assert reading.config["parallelism"].get("pipeline_passes") == passes
    found = to_job(reading, {"hardware.node_type": "dgx-h100"})
    training = tomllib.loads(write(found, "torchtitan").text)["training"]
    assert (training["local_batch_size"], training.get("global_batch_size")) == (4, 48 if passes else None)


def test_a_pipeline_without_shards_is_counted_once():
    reading = read_torchtitan("job.toml", PIPELINE.format(batch=16, shards=1), {}, None)
    assert "pipeline_passes" not in reading.config["parallelism"]
    assert [flag.name for flag in reading.of("unmodeled")] == ["training.global_batch_size"]


def config_text(shards=8, compiled="true", mode="none", more=""):
    return TOML.format(shards=shards, compiled=compiled, mode=mode) + more


def test_a_memory_budget_is_that_of_the_plan():
    """torch._functorch.config.activation_memory_budget, with torchtitan's default of 0.5 (MemoryBudgetAC)."""
    found = read_torchtitan("job.toml", config_text(mode="memory_budget", more="memory_budget = 0.9"))
    assert found.config["performance"]["recompute"] == {"granularity": "selective", "memory_budget": 0.9}
    assert not found.of("unmodeled")
    usual = read_torchtitan("job.toml", config_text(mode="memory_budget"))
    assert "0.5" in next(flag.note for flag in usual.of("unmodeled") if flag.name == "activation_checkpoint.mode")
    assert usual.config["performance"]["recompute"]["memory_budget"] == 0.7


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            config_text(compiled="false", mode="memory_budget"),
            "job: activation_checkpoint.mode: memory_budget needs compile.enable, with model among compile.components",
        ),
        (
            config_text(mode="memory_budget", more="memory_budget = 1.5"),
            "job: activation_checkpoint.memory_budget: expected a number from 0 to 1 (got 1.5)",
        ),
    ],
)
def test_a_budget_that_torchtitan_refuses_is_one_line(text, line):
    assert one_line(read_torchtitan, text) == line


def test_float8_projections_are_no_job_of_one_rank():
    """torchtitan converts what FSDP gathers: 8 devices over tp 8 are one rank, so the launcher's default is not the job's."""
    text = (
        config_text(shards=-1)
        .replace("[model]", '[model]\nconverters = ["float8"]')
        .replace("[compile]", "tensor_parallel_degree = 8\n[compile]")
    )
    sets = {"hardware.node_type": "dgx-h100"}
    with pytest.raises(ConfigError, match="number of devices unknown"):
        to_job(read_torchtitan("a.toml", text, sets=sets), sets)
    found = to_job(read_torchtitan("a.toml", text, sets=sets | {"devices": 64}), sets | {"devices": 64})
    assert (found.parallelism.dp, found.performance.precision) == (8, "fp8_tensorwise")


def test_layers_of_multi_token_prediction_are_not_left_out_in_silence():
    found = read_torchtitan("config_registry.py:deepseek_v3_mtp", MTP.format(layers=1), {"WORLD_SIZE": "8"})
    (flag,) = found.of("unmodeled")
    assert (flag.name, flag.value) == ("model.num_mtp_layers", "1")
    line = one_line(read_torchtitan, MTP.format(layers=1), "a.py:deepseek_v3_mtp", env={"WORLD_SIZE": "8"})
    assert line.endswith("multi-token prediction: counted without them" + REFUSED)
    none = read_torchtitan("config_registry.py:deepseek_v3_mtp", MTP.format(layers=0), {"WORLD_SIZE": "8"})
    assert not none.of("unmodeled")


def test_one_device_keeps_copies_of_the_weights_under_autocast():
    """Llama 3 8B on one device: backward reads bf16 copies of all matrices but the embedding.

    8,030,261,248 parameters, less the embedding's 128,256 * 4,096 and 65 norms of 4,096: 7,504,658,432, two bytes each
    (torch/amp/autocast_mode.py; torchtitan/distributed/utils.py, maybe_enable_amp).
    """
    found = read_torchtitan("job.toml", config_text(shards=1, compiled="false"))
    kept = {}
    for dtype in ("fp32", "bf16"):
        plan = to_job(found, {"hardware.node_type": "b300", "performance.param_dtype": dtype})
        kept[dtype] = estimate(plan).memory.stages[0].activations_bytes
    assert kept["fp32"] - kept["bf16"] == 2 * (8_030_261_248 - 128_256 * 4_096 - 65 * 4_096)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("qwen3_5", "qwen3_5, another kind of model (it takes images in addition to text); not modeled"),
        (
            "muse_glimmer",
            "unknown model (got 'muse_glimmer'); valid: deepseek_v3, gpt_oss, llama2, llama3, llama4, qwen3",
        ),
    ],
)
def test_a_model_without_a_table_is_named_by_its_module(module, line):
    """torchtitan/models/qwen3_5@b5bcd76c has a vision encoder in every flavor, muse_glimmer in some."""
    text = REGISTRY.format(disable="", backend="", ep=1, pp=1).replace("deepseek_v3_16b", "job")
    path = f"torchtitan/models/{module}/config_registry.py:job"
    with pytest.raises(ConfigError) as error:
        read_torchtitan(path, text, {"WORLD_SIZE": "8"})
    assert error.value.problems[0].startswith(f"{path}: model.name: {line}")


def test_logits_without_loss_parallelism_are_gathered():
    """torchtitan/models/llama3/infra/parallelize.py (v0.2.2), apply_tp: output_layouts Replicate without loss_parallel."""
    tp = config_text().replace(
        "data_parallel_shard_degree = 8", "data_parallel_shard_degree = 4\ntensor_parallel_degree = 2"
    )
    for text in (
        tp.replace("tensor_parallel", "disable_loss_parallel = true\ntensor_parallel"),
        tp.replace("tensor_parallel", "enable_loss_parallel = false\ntensor_parallel"),
    ):
        found = read_torchtitan("job.toml", text)
        assert found.config["performance"]["gathered_logits"], text
        assert not found.of("unmodeled")
    assert "gathered_logits" not in read_torchtitan("job.toml", tp).config["performance"]
    alone = config_text().replace("data_parallel_shard", "disable_loss_parallel = true\ndata_parallel_shard")
    assert "gathered_logits" not in read_torchtitan("job.toml", alone).config["performance"]


@pytest.mark.parametrize(("word", "how"), [("fused", None), ("foreach", "foreach"), ("for-loop", "for_loop")])
def test_the_implementation_of_adamw(word, how):
    found = read_torchtitan("job.toml", config_text(more=f'[optimizer]\nimplementation = "{word}"'))
    assert found.config["performance"].get("optimizer_impl") == how
    assert to_job(found, {"hardware.node_type": "h100"}).software.states.optimizer_impl == (how or "fused")


REGISTRY = """
def deepseek_v3_16b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("16B", attn_backend="flex"{backend}),
        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=10{disable}),
        parallelism=ParallelismConfig(expert_parallel_degree={ep}, pipeline_parallel_degree={pp}),
        activation_checkpoint=None,
    )
"""
ON, OFF = ", disable_cuda_graphs=False", ", disable_cuda_graphs=True"
HYBRID = ', moe_comm_backend="hybridep", non_blocking_capacity_factor=1.0'


@pytest.mark.parametrize(
    ("disable", "backend", "ep", "pp", "captured"),
    [
        (ON, "", 1, 1, True),
        (OFF, "", 1, 1, False),
        ("", "", 1, 1, False),  # a release of before, whose configs do not have the switch
        (ON, "", 8, 1, False),  # torchtitan refuses: the host waits for counts of tokens
        (ON, HYBRID, 8, 1, True),
        (ON, ', moe_comm_backend="hybridep"', 8, 1, False),
        (ON, ', moe_comm_backend="minimal_async_ep"', 8, 1, True),
        (ON, "", 1, 2, False),  # nor with pipelines
    ],
)
def test_cuda_graphs_of_the_trainer(disable, backend, ep, pp, captured):
    """torchtitan/trainer.py@b5bcd76c, _validate_cuda_graphs and train_step: zero_grad(set_to_none=disable_cuda_graphs)."""
    text = REGISTRY.format(disable=disable, backend=backend, ep=ep, pp=pp)
    found = read_torchtitan("config_registry.py:deepseek_v3_16b", text, {"WORLD_SIZE": "16"})
    assert found.config["performance"].get("cuda_graphs", False) == captured
    assert found.config["parallelism"]["fsdp"].get("gradients_stay", False) == captured
    refused = disable == ON and not captured
    assert [flag.name for flag in found.of("approximated") if "cuda" in flag.name] == [NO_CAPTURES] * refused


def test_cuda_graphs_are_on_where_the_checkout_has_them(tmp_path):
    """TrainingConfig.disable_cuda_graphs is false unless it is set, since 2026-08-13 (pull request 3559)."""
    folder = tmp_path / "torchtitan" / "models" / "deepseek_v3"
    folder.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    configs = tmp_path / "torchtitan" / "config" / "configs.py"
    configs.parent.mkdir()
    text = REGISTRY.format(disable="", backend="", ep=1, pp=1)
    for known in (False, True):
        configs.write_text("disable_cuda_graphs: bool = False\n" if known else "gc_freq: int = 50\n")
        path = f"{folder / 'config_registry.py'}:deepseek_v3_16b"
        found = read_torchtitan(path, text, {"WORLD_SIZE": "16"}, nearby=NearbyFiles(folder))
        assert found.config["performance"].get("cuda_graphs", False) == known


def test_a_fork_that_states_its_vocabulary():
    """training.vocab_size, which its train.py puts over the flavor's: the embedding and the head of Llama 3 8B have 256 rows."""
    text = config_text().replace("[training]\n", "[training]\nvocab_size = 256\n")
    plan = to_job(read_torchtitan("job.toml", text), {"hardware.node_type": "b300"})
    assert (plan.model.vocab_sz, plan.model.hidden_sz) == (256, 4096)
    assert to_job(read_torchtitan("job.toml", config_text()), {"hardware.node_type": "b300"}).model.vocab_sz == 128256
