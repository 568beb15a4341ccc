"""Megatron-Bridge's recipes that compute their pipeline stages, build a hybrid, or resize another recipe."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

DEEPSEEK = """
from typing import cast
from megatron.bridge.training.config import ConfigContainer

KINDS = {"mtp": "mtp"}

def stages_for(pp, vp, mtp=1):
    last = [KINDS["mtp"]] * mtp + ["loss"]
    known = {
        (16, 1): [["embedding"] + ["decoder"] * 4] + [["decoder"] * 4] * 14 + [["decoder"] + last],
        (4, 2): [["embedding"] + ["decoder"] * 8] + [["decoder"] * 8] * 6 + [["decoder"] * 5 + last],
        (1, 1): None,
    }
    if (pp, vp or 1) not in known:
        raise ValueError(f"no stages for {pp} and {vp}")
    return known[(pp, vp or 1)]

def put_stages(model, layout=None):
    if layout is not None:
        model.pipeline_model_parallel_layout = layout
        return
    mtp = getattr(model, "mtp_num_layers", 1) or 0
    try:
        model.pipeline_model_parallel_layout = stages_for(
            model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size, mtp
        )
    except ValueError:
        pass

def pretrain_config() -> ConfigContainer:
    cfg = ConfigContainer(
        model=cast(Provider, AutoBridge.from_hf_pretrained("deepseek-ai/DeepSeek-V3").to_megatron_provider()),
        train=TrainingConfig(global_batch_size=4096, micro_batch_size=1),
        dataset=GPTDatasetConfig(seq_length=4096),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=129280),
        mixed_precision="bf16_mixed",
    )
    cfg.model.mtp_num_layers = 1
    cfg.model.pipeline_model_parallel_size = PP
    cfg.model.virtual_pipeline_model_parallel_size = VPP
    cfg.model.expert_model_parallel_size = 8
    cfg.model.seq_length = 4096
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["mla_up_proj"]
    put_stages(cfg.model)
    return cfg
"""
DEVICES = HARDWARE | {"devices": 256}


def deepseek(tmp_path, pp, vpp, more=""):
    """The job of the recipe on so many stages."""
    text = DEEPSEEK.replace("PP\n", f"{pp}\n", 1).replace("VPP\n", f"{vpp}\n")
    (tmp_path / "recipe.py").write_text(text.replace("put_stages(cfg.model)", f"put_stages(cfg.model{more})"))
    return to_job(read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", DEVICES), DEVICES)


@pytest.mark.parametrize(
    ("pp", "vpp", "layers"), [(16, None, [4] * 15 + [1]), (4, 2, [8] * 7 + [5])], ids=["pp 16", "pp 4, vpp 2"]
)
def test_stages_that_a_function_looks_up(tmp_path, pp, vpp, layers):
    """By hand from the lists: 61 decoder layers, embedding before the first, prediction and loss after the last."""
    job = deepseek(tmp_path, pp, vpp)
    assert job.parallelism.layers_per_stage == layers
    assert sum(layers) == job.model.n_layers == 61
    assert (job.parallelism.pp, job.parallelism.vpp, job.model.mtp) == (pp, vpp or 1, 1)


def test_an_exception_that_the_recipe_catches_leaves_the_layers_even(tmp_path):
    """61 layers are not a multiple of 2 stages, and none are listed for 2: as Megatron-Core, which refuses it then."""
    with pytest.raises(ConfigError, match="must divide n_layers 61"):
        deepseek(tmp_path, 2, None)


def test_an_exception_of_another_kind_is_not_caught(tmp_path):
    """Python leaves the function then; what it would have set is told as not read."""
    text = (
        DEEPSEEK.replace("except ValueError:", "except KeyError:").replace("PP\n", "2\n", 1).replace("VPP\n", "None\n")
    )
    (tmp_path / "recipe.py").write_text(text.replace("put_stages", "set_pipeline_layout"))
    with pytest.raises(ConfigError, match=r"its stages are those of set_pipeline_layout\(\), which is not read"):
        to_job(read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", DEVICES), DEVICES)


def test_stages_that_are_given_go_before_those_looked_up(tmp_path):
    job = deepseek(tmp_path, 4, None, more=', "Et*16|t*16|t*16|t*13mL"')
    assert job.parallelism.layers_per_stage == [16, 16, 16, 13]


@pytest.mark.parametrize(
    ("given", "pp", "vpp", "layers"),
    [
        ("", 8, 2, [4] * 15 + [1]),
        (", 'Et|(tt|)*30mL'", 16, 2, [1] + [2] * 30 + [0]),
        ("", 2, 1, None),
    ],
)
def test_stages_of_the_frameworks_own_function_without_its_checkout(tmp_path, given, pp, vpp, layers):
    """deepseek_v3.py, set_deepseek_v3_pipeline_model_parallel_layout: 15 chunks of 4 layers and one of 1; 1 + 30 x 2 + 0 = 61."""
    (tmp_path / "recipe.py").write_text(
        "from megatron.bridge.perf_recipes.deepseek.common import *\n"
        "def deepseek_v3_pretrain_256gpu_b200_bf16_config() -> ConfigContainer:\n    cfg = deepseek_v3_pretrain_config()\n"
        f"    cfg.model.pipeline_model_parallel_size = {pp}\n    cfg.model.virtual_pipeline_model_parallel_size = {vpp}\n"
        "    cfg.model.expert_model_parallel_size = 8\n    cfg.train.global_batch_size = 2048\n"
        "    cfg.train.micro_batch_size = 1\n    cfg.tokenizer.vocab_size = 129280\n"
        f"    set_deepseek_v3_pipeline_model_parallel_layout(cfg.model{given})\n    return cfg\n"
    )
    path = f"{tmp_path / 'recipe.py'}:deepseek_v3_pretrain_256gpu_b200_bf16_config"
    if layers is None:
        with pytest.raises(ConfigError, match="must divide n_layers 61"):
            to_job(read("auto", path, HARDWARE), HARDWARE)
        return
    job = to_job(read("auto", path, HARDWARE), HARDWARE)
    assert (job.parallelism.layers_per_stage, job.model.mtp, job.performance.moment_dtype) == (layers, 1, "bf16")


def test_stages_that_a_comprehension_copies(tmp_path):
    """kimi_k2.py, _get_kimi_k2_pipeline_layout: list([list(x) for x in layout])."""
    text = DEEPSEEK.replace("return known[(pp, vpp or 1)]", "return known[(pp, vp or 1)]")
    text = text.replace(
        "    return known[(pp, vp or 1)]", "    found = known[(pp, vp or 1)]\n    return list([list(x) for x in found])"
    )
    (tmp_path / "recipe.py").write_text(text.replace("VPP\n", "None\n").replace("PP\n", "16\n", 1))
    job = to_job(read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", DEVICES), DEVICES)
    assert job.parallelism.layers_per_stage == [4] * 15 + [1]


@pytest.mark.parametrize(
    ("repository", "preset", "router", "shared"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", "fp32", True),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "nemotron-3-super-120b-a12b", "fp32", False),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", "compute", False),
        ("openai/gpt-oss-20b", "gpt-oss-20b", "compute", False),
    ],
)
def test_kernels_of_experts_are_those_of_the_familys_bridge(tmp_path, repository, preset, router, shared):
    """deepseek_v3_bridge.py, nemotron_h_bridge.py, qwen3_moe_bridge.py, gpt_oss_bridge.py: grouped, fused and all-to-all."""
    (tmp_path / "recipe.py").write_text(
        "def job() -> ConfigContainer:\n    cfg = ConfigContainer(\n"
        f"        model=AutoBridge.from_hf_pretrained({repository!r}).to_megatron_provider(load_weights=False),\n"
        "        train=TrainingConfig(global_batch_size=256, micro_batch_size=1), mixed_precision='bf16_mixed',\n"
        "        dataset=GPTDatasetConfig(seq_length=4096),\n    )\n"
        "    cfg.model.expert_model_parallel_size = 8\n    return cfg\n"
    )
    sets = HARDWARE | {"devices": 64}
    found = read("auto", f"{tmp_path / 'recipe.py'}:job", sets)
    moe = found.config["performance"]["moe"]
    assert to_job(found, sets).model.name.startswith(preset)
    assert (moe["dispatcher"], moe["permute_fusion"], moe["grouped_gemm"]) == ("alltoall", True, True)
    assert (moe["router_dtype"], moe.get("shared_expert_overlap")) == (router, shared)


@pytest.mark.parametrize("line", ["cfg.model.freeze_vision_model = False", "cfg.train.seed = 1"])
def test_a_model_that_takes_images_is_another_kind(tmp_path, line):
    (tmp_path / "recipe.py").write_text(
        "def qwen35_vl_35b_pretrain_8gpu_h100_bf16_config() -> ConfigContainer:\n    cfg = ConfigContainer(\n"
        "        model=AutoBridge.from_hf_pretrained('Qwen/Qwen3.5-35B-A3B').to_megatron_provider(load_weights=False),\n"
        "        train=TrainingConfig(global_batch_size=256, micro_batch_size=1), mixed_precision='bf16_mixed',\n"
        f"        dataset=GPTDatasetConfig(seq_length=4096),\n    )\n    {line}\n    return cfg\n"
    )
    path = f"{tmp_path / 'recipe.py'}:qwen35_vl_35b_pretrain_8gpu_h100_bf16_config"
    with pytest.raises(ConfigError, match="another kind of model: it takes images in addition to text"):
        to_job(read("auto", path, HARDWARE), HARDWARE)


def test_a_hybrid_by_the_name_of_its_recipe(tmp_path):
    """nemotronh.py of v0.3.1 to v0.6.0: 8,192 tokens, gradients alone overlapped; activations.py: squared ReLU is compiled."""
    (tmp_path / "recipe.py").write_text(
        "def nemotronh_8b_pretrain_16gpu_h100_bf16_config() -> ConfigContainer:\n    cfg = nemotronh_8b_pretrain_config()\n"
        "    cfg.model.tensor_model_parallel_size = 2\n    cfg.train.global_batch_size = 768\n"
        "    cfg.train.micro_batch_size = 1\n    return cfg\n# megatron.bridge\n"
    )
    path = f"{tmp_path / 'recipe.py'}:nemotronh_8b_pretrain_16gpu_h100_bf16_config"
    job = to_job(read("auto", path, HARDWARE), HARDWARE)
    assert (job.model.name, job.data.seqlen, job.performance.activation_impl) == ("nemotron-h-8b", 8192, "fused")
    assert job.performance.overlap.dp == 0.667  # 4 bytes of gradients, 2 of parameters
    assert job.performance.overlap.tp is True


def test_modules_of_latent_attention_are_recomputed_in_a_model_given_by_name(tmp_path):
    assert deepseek(tmp_path, 16, None).performance.recompute.modules == ["mla_up_proj"]


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        ([["embedding", "decoder"], ["decoder", "decoder", "loss"]], [1, 2]),
        ([["embedding"], ["decoder"] * 3, ["loss"]], [0, 3, 0]),
    ],
)
def test_a_layout_as_a_list_of_layers(tmp_path, stages, layers):
    """PipelineParallelLayerLayout takes a list of each stage's layers as it takes a text."""
    (tmp_path / "run_config.yaml").write_text(
        "_target_: megatron.bridge.training.config.ConfigContainer\n"
        "model: {_target_: megatron.bridge.models.gpt_provider.GPTModelProvider, num_layers: 3, hidden_size: 512,\n"
        f"  num_attention_heads: 8, vocab_size: 1024, seq_length: 512, pipeline_model_parallel_size: {len(stages)},\n"
        f"  pipeline_model_parallel_layout: {stages}}}\n"
        "train: {global_batch_size: 16, micro_batch_size: 1}\ndataset: {seq_length: 512}\nmixed_precision: {bf16: true}\n"
    )
    sets = HARDWARE | {"devices": 2 * len(stages)}
    job = to_job(read("auto", str(tmp_path / "run_config.yaml"), sets), sets)
    assert job.parallelism.layers_per_stage == layers


HYBRID = """
from megatron.bridge.training.config import ConfigContainer

def pretrain_config() -> ConfigContainer:
    return ConfigContainer(
        model=HybridModelProvider(
            hybrid_layer_pattern="M-M*-", hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16,
            num_query_groups=4, mamba_num_heads=32, mamba_head_dim=64, mamba_state_dim=64,
            activation_func=squared_relu, seq_length=2048, tensor_model_parallel_size=1,
        ),
        train=TrainingConfig(global_batch_size=64, micro_batch_size=1),
        dataset=GPTDatasetConfig(seq_length=2048MASK),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32000),
        mixed_precision="bf16_mixed",
    )
"""


def hybrid(tmp_path, mask=""):
    """The job of the hybrid recipe on one node."""
    (tmp_path / "recipe.py").write_text(HYBRID.replace("MASK", mask))
    sets = HARDWARE | {"devices": 8}
    return to_job(read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", sets), sets)


def test_a_hybrid_has_what_its_provider_sets(tmp_path):
    """hybrid_provider.py: RMSNorm, no bias, no positions, untied, no gate; 8 groups of states unless it is told."""
    model = hybrid(tmp_path).model
    assert (model.hybrid_pattern, model.n_layers, model.norm) == ("M-M*-", 5, "rmsnorm")
    assert (model.bias, model.tie_embeddings, model.glu) == (False, False, False)
    assert (model.rotary_embeds, model.learned_positions, model.activation) == (False, False, "relu2")
    assert (model.mamba.n_heads, model.mamba.head_dim, model.mamba.state_dim, model.mamba.n_groups) == (32, 64, 64, 8)


@pytest.mark.parametrize(
    ("mask", "held"), [("", False), (", skip_getting_attention_mask_from_dataset=False", True)], ids=["default", "not"]
)
def test_data_without_a_mask_is_the_default(tmp_path, mask, held):
    """training/config.py, GPTDatasetConfig: the mask is skipped unless it is told not to be."""
    assert hybrid(tmp_path, mask).performance.attention_mask is held


def test_a_recipe_over_another_one_with_another_batch(tmp_path):
    """perf_recipes/llama/common.py, _with_global_batch_size(config, N), which a single file does not contain."""
    (tmp_path / "recipe.py").write_text(
        "from megatron.bridge.perf_recipes.llama.common import _with_global_batch_size, llama3_8b_pretrain_config\n"
        "def llama3_8b_pretrain_8gpu_h100_bf16_config() -> ConfigContainer:\n"
        "    cfg = llama3_8b_pretrain_config()\n    cfg.train.global_batch_size = 128\n"
        "    cfg.model.context_parallel_size = 1\n    return cfg\n"
        "def llama3_8b_pretrain_64gpu_h100_bf16_config() -> ConfigContainer:\n"
        "    cfg = _with_global_batch_size(llama3_8b_pretrain_8gpu_h100_bf16_config(), 1024)\n"
        "    cfg.model.recompute_granularity = None\n    return cfg\n"
    )
    path = f"{tmp_path / 'recipe.py'}:llama3_8b_pretrain_64gpu_h100_bf16_config"
    job = to_job(read("auto", path, HARDWARE), HARDWARE)
    assert (job.model.name, job.data.gbs, job.parallelism.cp, job.parallelism.dp) == ("llama3-8b", 1024, 1, 64)
