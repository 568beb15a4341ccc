"""NeMo AutoModel's YAML: full fine-tuning, adapters, and its benchmark recipe with experts in a pipeline."""

from __future__ import annotations

import pytest
import yaml

from steptime.base.config import ConfigError
from steptime.launch.kinds import kind_of
from steptime.launch.read import read
from steptime.launch.reading import to_job

SETS = {"hardware.node_type": "dgx-h100"}
SFT = """
step_scheduler: {global_batch_size: 64, local_batch_size: 4, num_epochs: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed: {strategy: fsdp2, dp_size: none, dp_replicate_size: none, tp_size: 2, cp_size: 1, activation_checkpointing: true}
packed_sequence: {packed_sequence_size: 4096}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5, betas: [0.9, 0.999]}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, split: train}
"""
BENCHMARK = """
recipe: BenchmarkingRecipeForNextTokenPrediction
benchmark: {warmup_steps: 5, num_nodes: 4}
step_scheduler: {global_batch_size: 512, local_batch_size: 8}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config: {_target_: transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}
  backend: {attn: te, linear: te, dispatcher: deepep, fake_balanced_gate: true}
distributed:
  strategy: fsdp2
  tp_size: 1
  pp_size: 4
  ep_size: 8
  activation_checkpointing: true
  pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 1, layers_per_stage: 5, round_virtual_stages_to_pp_multiple: up}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy, fp32_upcast: false}
optimizer: {_target_: torch.optim.Adam}
dataset: {_target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset, seq_len: 4096}
"""


def reading_of(tmp_path, text, **changes):
    tree = yaml.safe_load(text)
    for path, value in changes.items():
        section, key = path.split("__")
        tree.setdefault(section, {})[key] = value
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return read("auto", str(tmp_path / "job.yaml"), SETS)


def test_its_files_are_told_from_those_of_nemo():
    assert kind_of("a.yaml", SFT) == kind_of("b.yaml", BENCHMARK) == "automodel"


def test_full_fine_tuning_on_one_node_is_read_at_once(tmp_path):
    """8 devices in pairs are 4 ranks of data; 64 sequences of which each rank runs 4 at a time."""
    job = to_job(reading_of(tmp_path, SFT), SETS)
    assert (job.parallelism.tp, job.parallelism.dp, job.parallelism.zero_level) == (2, 4, 3)
    assert (job.data.gbs, job.data.microbatch_sz, job.data.seqlen) == (64, 4, 4096)
    performance = job.performance
    assert (performance.precision, performance.param_dtype, performance.moment_dtype) == ("bf16", "bf16", "bf16")
    assert (performance.clip_grad, performance.loss_impl) == (True, "composite")  # max_norm 1.0, fp32_upcast true
    assert any("replayed one by one" in note for note in job.notes)


def test_states_of_transformer_engines_adam_are_fp32(tmp_path):
    """transformer_engine/pytorch/optimizers/fused_adam.py: exp_avg_dtype is float32 unless another is said."""
    target = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
    plain = reading_of(tmp_path, SFT, optimizer___target_=target).config["performance"]
    assert (plain["param_dtype"], plain["moment_dtype"]) == ("bf16", "fp32")
    said = reading_of(tmp_path, SFT, optimizer___target_=target, optimizer__exp_avg_dtype="torch.bfloat16")
    assert said.config["performance"]["moment_dtype"] == "bf16"
    with pytest.raises(ConfigError, match="master_weights true: fp32 master weights"):
        to_job(reading_of(tmp_path, SFT, optimizer___target_=target, optimizer__master_weights=True), SETS)


def test_a_benchmark_of_experts_in_a_pipeline(tmp_path):
    """48 layers by 5 are 10 chunks, rounded up to 12 for 4 stages: 3 of 4 layers a stage. 4 nodes of 8 are dp 8."""
    reading = reading_of(tmp_path, BENCHMARK)
    layout, data = reading.config["parallelism"], reading.config["data"]
    assert (layout["dp"], layout["pp"], layout["ep"], layout["vpp"]) == (8, 4, 8, 3)
    assert "layers_per_stage" not in layout
    assert (data["microbatch_sz"], data["gbs"]) == (1, 512)
    performance = reading.config["performance"]
    assert (performance["moe"], performance["clip_grad"], performance["loss_impl"]) == (
        {"dispatcher": "flex"},
        False,
        "fused",
    )


@pytest.mark.parametrize(
    ("said", "moe", "status"),
    [
        ("deepep", {"dispatcher": "flex", "deepep_sms": 64}, "used"),
        ("hybridep", {"dispatcher": "flex", "flex_backend": "hybridep"}, "irrelevant"),
        ("torch", {"dispatcher": "alltoall"}, "irrelevant"),
    ],
)
def test_library_of_the_dispatcher_and_its_multiprocessors(tmp_path, said, moe, status):
    """components/models/common/utils.py, BackendConfig: dispatcher, dispatcher_num_sms."""
    found = reading_of(tmp_path, BENCHMARK.replace("dispatcher: deepep", f"dispatcher: {said}, dispatcher_num_sms: 64"))
    assert found.config["performance"]["moe"] == moe
    assert [flag.status for flag in found.flags if flag.name.endswith("num_sms")] == [status]


@pytest.mark.parametrize(("local", "passes"), [(64, None), (16, 4), (8, 8)])
def test_the_pipeline_runs_once_for_each_local_batch(tmp_path, local, passes):
    """benchmark.py, run_benchmark: ga_steps = global_batch_size // (local_batch_size * dp_size), 512 / (16 * 8) = 4."""
    tree = yaml.safe_load(BENCHMARK)
    tree["step_scheduler"]["local_batch_size"] = local
    reading = reading_of(tmp_path, yaml.safe_dump(tree))
    assert reading.config["parallelism"].get("pipeline_passes") == passes
    assert to_job(reading, SETS).schedule_microbatches == local


@pytest.mark.parametrize(("experts", "streams"), [(None, 0), ("torch_mm", 0), ("te", 4), ("gmm", 4)])
def test_which_library_multiplies_experts(tmp_path, experts, streams):
    """BackendConfig.experts is torch_mm, torch._grouped_mm, where CUDA is available; te and gmm multiply on four streams."""
    tree = yaml.safe_load(BENCHMARK)
    tree["model"]["backend"] |= {} if experts is None else {"experts": experts}
    found = reading_of(tmp_path, yaml.safe_dump(tree)).config["performance"]
    assert found["grouped_workspaces"] == streams


def test_experts_in_8_bits(tmp_path):
    """components/moe/mxfp8.py: torchao's function with wgrad_with_hp, on compute capability 10; on others bf16."""
    text = BENCHMARK.replace("dispatcher: deepep", "dispatcher: deepep, experts: torch_mm_mxfp8")
    found = reading_of(tmp_path, text)
    assert found.config["performance"]["grouped_workspaces"] == 0
    assert found.config["performance"]["moe"]["grouped_precision"] == "mxfp8_torchao_wgrad_hp"
    assert [flag.status for flag in found.flags if flag.name == "model.backend.experts"] == ["used"]
    assert to_job(found, SETS | {"hardware.node_type": "dgx-b200"}).software.moe.flex_backend == "deepep"
    with pytest.raises(ConfigError, match="needs a device with block scales, of compute capability 10; use none"):
        to_job(found, SETS)


def test_a_dense_model_has_no_experts_in_8_bits(tmp_path):
    found = backend(tmp_path, SFT, experts="torch_mm_mxfp8").config["performance"]
    assert "grouped_precision" not in found.get("moe", {})


def test_chunks_rounded_down_are_one_layer_apart(tmp_path):
    """10 chunks are rounded down to 8: 6 layers each; by 7, 7 chunks to 4; by 10, 5 over 5 stages."""
    text = BENCHMARK.replace("multiple: up", "multiple: down")
    assert reading_of(tmp_path, text).config["parallelism"]["vpp"] == 2
    layout = reading_of(tmp_path, text.replace("stage: 5", "stage: 7")).config["parallelism"]
    assert layout["vpp"] == 1
    odd = (
        text.replace("pp_size: 4", "pp_size: 5")
        .replace("stage: 5", "stage: 10")
        .replace("num_nodes: 4", "num_nodes: 5")
    )
    assert reading_of(tmp_path, odd).config["parallelism"]["layers_per_stage"] == [10, 10, 10, 9, 9]


def test_adapters_in_the_weights_dtype(tmp_path):
    """_peft/lora.py, PeftConfig: dim 8 and no dropout unless said, adapters in the dtype of the layer."""
    reading = reading_of(tmp_path, SFT.replace("tp_size: 2", "tp_size: 1"), peft__target_modules="*_proj", peft__dim=16)
    job = to_job(reading, SETS)
    assert job.model.lora is not None
    assert (job.model.lora.rank, len(job.model.lora.targets), job.model.lora.base_dtype) == (16, 7, "bf16")
    assert job.performance.param_dtype == "bf16"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"fp8__enabled": True}, "fp8.enabled true: torchao's float8 projections"),
        ({"model__torch_dtype": "float32"}, "weights of another dtype than bf16"),
        ({"distributed__strategy": "megatron_fsdp"}, "distributed.strategy: expected one of fsdp2"),
        ({"packed_sequence__packed_sequence_size": 0}, "sequence length unknown; add --set data.seqlen=N"),
    ],
)
def test_what_is_left_open_or_not_modeled(tmp_path, change, line):
    with pytest.raises(ConfigError, match=line):
        to_job(reading_of(tmp_path, SFT, **change), SETS)


def backend(tmp_path, text, **said):
    """The reading of a file with these entries in `model.backend`."""
    tree = yaml.safe_load(text)
    tree["model"].setdefault("backend", {}).update(said)
    return reading_of(tmp_path, yaml.safe_dump(tree))


def flag(reading, name):
    return next((item.status, item.note) for item in reading.flags if item.name == name)


@pytest.mark.parametrize(
    ("text", "rotation"),
    [
        (SFT, "eager"),
        (BENCHMARK, None),
        (BENCHMARK.replace("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"), "complex"),
    ],
)
def test_the_rotary_embedding_is_the_models(tmp_path, text, rotation):
    """rope_fusion is forced off: llama/rope_utils.py over transposed views, gpt_oss' (the profile's), deepseek_v3's complex."""
    reading = backend(tmp_path, text, rope_fusion=True)
    assert reading.config["performance"].get("rope_impl") == rotation
    assert flag(reading, "model.backend.rope_fusion") == ("irrelevant", "forced off by NeMo AutoModel")
    assert to_job(reading, SETS).software.kernels.rope_impl == (rotation or "composite")


@pytest.mark.parametrize(
    ("attention", "key", "value"),
    [
        ("te", "attention_kernel", "cudnn-9.19"),
        ("sdpa", "attention_kernel", "sdpa-9.19"),
        ("flex", "attention_kernel", "flex"),
        ("eager", "attention_impl", "unfused"),
    ],
)
def test_the_attention_of_the_backend(tmp_path, attention, key, value):
    reading = backend(tmp_path, BENCHMARK, attn=attention)
    assert reading.config["performance"][key] == value
    assert flag(reading, "model.backend.attn") == ("used", f"performance.{key}")


def test_attention_without_a_word_of_a_plan_is_noted(tmp_path):
    assert flag(backend(tmp_path, BENCHMARK, attn="magi"), "model.backend.attn") == (
        "approximated",
        "flash attention is counted",
    )


@pytest.mark.parametrize(
    ("attention", "compiled", "status"), [("sdpa", "blocks", "approximated"), ("te", None, "irrelevant")]
)
def test_attention_is_compiled_with_sdpa_only(tmp_path, attention, compiled, status):
    """deepseek_v3/layers.py: compile_attn is ignored, with a warning, where attn is not sdpa. Inductor fuses the rotation."""
    text = BENCHMARK.replace("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")
    reading = backend(tmp_path, text, attn=attention, linear="torch", rms_norm="torch", compile_attn=True)
    assert reading.config["performance"].get("compile") == compiled
    assert flag(reading, "model.backend.compile_attn")[0] == status
    assert to_job(reading, SETS).software.kernels.rope_impl == ("fused" if compiled else "complex")


def test_cuda_graphs_of_modules(tmp_path):
    """CudaGraphConfig.modules has Megatron-Core's names, and te_dpa, which no plan has."""
    both = backend(tmp_path, BENCHMARK, cuda_graph={"modules": ["moe_router", "moe_preprocess"]})
    assert both.config["performance"]["cuda_graphs"] == ["moe_router", "moe_preprocess"]
    reading = backend(tmp_path, BENCHMARK, cuda_graph={"modules": ["te_dpa", "moe_router"]})
    assert reading.config["performance"]["cuda_graphs"] == ["moe_router"]
    said = flag(reading, "model.backend.cuda_graph.modules")
    assert said == ("approximated", "CUDA graphs of te_dpa: launched kernel by kernel")


def test_quacks_products_are_noted_and_norms_are_one_kernel(tmp_path):
    reading = backend(tmp_path, BENCHMARK, linear="quack", rms_norm="torch_fp32")
    assert reading.config["performance"]["norm_impl"] == "fused"
    assert flag(reading, "model.backend.linear") == ("approximated", "QuACK's products: cuBLAS's are counted")
    with pytest.raises(ConfigError, match=r"model\.backend\.rms_norm: expected one of torch, torch_fp32, te, quack"):
        to_job(backend(tmp_path, BENCHMARK, rms_norm="apex"), SETS)


@pytest.mark.parametrize(("text", "rotation", "status"), [(SFT, "fused", "used"), (BENCHMARK, None, "irrelevant")])
def test_quack_rotates_in_llamas_family(tmp_path, text, rotation, status):
    """BackendConfig: QuACK is integrated for Llama-family rotary embeddings."""
    reading = backend(tmp_path, text, rope="quack")
    assert reading.config["performance"].get("rope_impl") == rotation
    assert flag(reading, "model.backend.rope")[0] == status


def test_the_name_of_a_config_may_say_its_devices(tmp_path):
    """examples/llm_finetune/gpt_oss/gpt_oss_20b_single_gpu.yaml; another key of the devices goes before the name."""
    (tmp_path / "a_single_gpu.yaml").write_text(SFT.replace("tp_size: 2", "tp_size: 1"), encoding="utf-8")
    reading = read("auto", str(tmp_path / "a_single_gpu.yaml"), SETS)
    assert to_job(reading, SETS).parallelism.dp == 1
    assert "number of devices not set, 1 assumed: the name of the file" in " ".join(reading.config["notes"])
    (tmp_path / "b_single_gpu.yaml").write_text(BENCHMARK, encoding="utf-8")
    assert to_job(read("auto", str(tmp_path / "b_single_gpu.yaml"), SETS), SETS).parallelism.dp == 8  # of 4 nodes


def test_an_adapter_of_names_is_not_one_of_weights(tmp_path):
    """enable_hf_state_dict_adapter, which most examples say, translates the names in checkpoints: no LoRA."""
    reading = backend(tmp_path, BENCHMARK, enable_hf_state_dict_adapter=True)
    assert flag(reading, "model.backend.enable_hf_state_dict_adapter")[0] == "irrelevant"
    assert to_job(reading, SETS).model.lora is None
