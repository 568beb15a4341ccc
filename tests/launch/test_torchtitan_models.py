"""Models of torchtitan by their names: those for debugging, of config functions, of forks and of transformers."""

from pathlib import Path

import pytest
from launch_readings import HARDWARE
from test_torchtitan_flavors import JOB, OF_FAMILY

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params


@pytest.mark.parametrize(("family", "total"), [("llama4", 15_017_216), ("gpt_oss", 183_000_000)])
def test_models_for_debugging(tmp_path, family, total):
    """llama4: 6 layers of 4 * 256^2, 3 MLPs of 3 * 256 * 768, 3 times 8 + 1 experts of 3 * 256 * 512 with a router, the norms."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(flavor="debugmodel").replace("llama3", family))
    model = to_job(read("torchtitan", str(path), HARDWARE), HARDWARE).model
    of_llama4 = 6 * 4 * 256**2 + 3 * 3 * 256 * 768 + 3 * (9 * 3 * 256 * 512 + 256 * 8) + 13 * 256 + 2 * 2048 * 256
    assert of_llama4 == 15_017_216
    assert round(n_params(model), -6 if family == "gpt_oss" else 0) == total
    assert model.attention.window == {"llama4": None, "gpt_oss": 128}[family]


@pytest.mark.parametrize(("code", "layers"), [(None, 48), ("def _build_llama4_layers(): ...", 48), ("", 24)])
def test_experts_of_the_maverick_of_config_functions(tmp_path, code, layers):
    """llama4/__init__.py@4b334746: interleave_moe_layer_step=1, so that each of 48 layers has experts, every second before."""
    folder = tmp_path / "torchtitan/models/llama4"
    folder.mkdir(parents=True)
    if code is not None:
        (folder / "__init__.py").write_text(code)
    function = 'def own() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry("17bx128e"),\n'
    rest = "        training=TrainingConfig(local_batch_size=1, seq_len=2048),\n"
    (folder / "config_registry.py").write_text(
        f"{function}{rest}        parallelism=ParallelismConfig(data_parallel_shard_degree=64),\n    )\n"
    )
    model = to_job(read("torchtitan", f"{folder / 'config_registry.py'}:own", HARDWARE), HARDWARE).model
    assert round(model.n_layers * model.moe.moe_frequency) == layers


def test_a_flavor_with_separate_projections_is_counted_as_its_base(tmp_path):
    """qwen3/__init__.py@b5bcd76c, _debugmodel_non_fused_qkv: the sizes of debugmodel."""
    flavors = []
    for flavor in ("debugmodel", "debugmodel_non_fused_qkv"):
        path = tmp_path / "qwen3" / "config_registry.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "def own() -> Trainer.Config:\n    return Trainer.Config(\n"
            f'        model_spec=model_registry("{flavor}"),\n'
            "        training=TrainingConfig(local_batch_size=1, seq_len=2048),\n"
            "        parallelism=ParallelismConfig(data_parallel_shard_degree=8),\n    )\n"
        )
        flavors.append(reading := read("torchtitan", f"{path}:own", HARDWARE))
        assert len(reading.of("approximated")) == (flavor != "debugmodel")
    assert flavors[0].config["model"] == flavors[1].config["model"]


def test_flavors_that_config_functions_have_otherwise(tmp_path):
    """llama4/__init__.py and gpt_oss/__init__.py of 2026: attention within blocks of 256, a vocabulary of 2,048."""
    for family, window, vocabulary in (("llama4", 256, 2048), ("gpt_oss", 128, 2048)):
        path = tmp_path / family / "config_registry.py"
        path.parent.mkdir()
        path.write_text(
            "def debug() -> Trainer.Config:\n    return Trainer.Config(\n"
            '        model_spec=model_registry("debugmodel"),\n'
            "        training=TrainingConfig(local_batch_size=1, seq_len=2048),\n"
            "        parallelism=ParallelismConfig(data_parallel_shard_degree=8),\n    )\n"
        )
        model = to_job(read("torchtitan", f"{path}:debug", HARDWARE), HARDWARE).model
        assert (model.attention.window, model.vocab_sz) == (window, vocabulary)


FUNCTION_OF = """
def {name}() -> Trainer.Config:
    return Trainer.Config(
        {tokenizer}model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=2048),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8),
    )
"""


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [("qwen3_vl_8b", ""), ("own", "tokenizer=MultiModalTokenizer.Config(**SPECIAL_TOKENS),\n        ")],
)
def test_models_of_images_are_not_those_of_text(tmp_path, name, tokenizer):
    """torchtitan/models/qwen3_vl@22104149 has qwen3's flavors and a vision encoder."""
    path = tmp_path / "config_registry.py"
    path.write_text(FUNCTION_OF.format(name=name, tokenizer=tokenizer))
    with pytest.raises(ConfigError) as error:
        read("torchtitan", f"{path}:{name}", HARDWARE)
    assert "(it takes images in addition to text); not modeled" in error.value.problems[0]


def test_a_function_is_of_the_family_of_the_others(tmp_path):
    """sft_math says no model, and all others of its file are named after one."""
    path = tmp_path / "config_registry.py"
    names = ("qwen3_8b", "qwen3_moe_debug", "sft_math")
    path.write_text("".join(FUNCTION_OF.format(name=name, tokenizer="") for name in names))
    model = to_job(read("torchtitan", f"{path}:sft_math", HARDWARE), HARDWARE).model
    assert (model.name, model.n_layers) == ("qwen3-8b", 36)


def test_a_flavor_of_the_fork_whose_key_the_file_has(tmp_path):
    """LambdaLabsML/torchtitan: 3/2 of 2/3 of 4 * 8192, rounded up to 4096; without a key of that fork the flavor is unknown."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(flavor="32B") + "[infra]\nset_gpu_affinity = true\n")
    job = to_job(read("torchtitan", str(path), HARDWARE), HARDWARE)
    assert job.model.inter_sz == 4096 * -(-int(1.5 * int(8 * 8192 / 3)) // 4096)
    assert "model 32B, of the fork of torchtitan that has infra.set_gpu_affinity" in job.notes
    path.write_text(JOB.format(flavor="32B"))
    with pytest.raises(ConfigError, match="unknown flavor of llama3"):
        read("torchtitan", str(path), HARDWARE)


@pytest.mark.parametrize(("given", "reshards"), [("False", False), ("option == 'always'", True)])
def test_a_fork_whose_code_shards_blocks_without_the_option(tmp_path: Path, given: str, reshards: bool) -> None:
    """A constant given to fully_shard() of each block goes before the option; what the option decides is the default's, True."""
    at = tmp_path / "torchtitan" / "models" / "llama3"
    (at / "infra").mkdir(parents=True)
    (at / "infra" / "parallelize.py").write_text(
        "def apply_fsdp(model, option):\n    for block in model.layers.values():\n"
        f"        fully_shard(block, reshard_after_forward={given})\n    fully_shard(model, reshard_after_forward=False)\n"
    )
    config = at / "job.toml"
    config.write_text(JOB.format(flavor="8B"))
    found = to_job(read("torchtitan", str(config), HARDWARE), HARDWARE)
    assert found.parallelism.fsdp is not None
    assert found.parallelism.fsdp.reshard_after_forward is reshards
    assert any("reshard_after_forward False, from" in note for note in found.notes) is not reshards


@pytest.mark.parametrize(("flavor", "layers", "entries"), [("7B", 30, 32000), ("1B", 18, 40000)])
def test_a_flavor_of_llama_2_that_a_fork_has(tmp_path: Path, flavor: str, layers: int, entries: int) -> None:
    """One that it changes has the vocabulary of torchtitan's, one of its own says it; not Llama 3's in the file."""
    at = tmp_path / "torchtitan" / "models" / "llama"
    at.mkdir(parents=True)
    (at / "__init__.py").write_text(
        'llama2_configs = {\n    "7B": ModelArgs(dim=4096, n_layers=30, n_heads=32),\n'
        '    "1B": ModelArgs(dim=2048, n_layers=18, n_heads=16, vocab_size=40000),\n}\n'
        'llama3_configs = {"7B": ModelArgs(dim=1024, n_layers=3, n_heads=8)}\n'
    )
    config = tmp_path / "job.toml"
    config.write_text(OF_FAMILY.format("llama2", flavor, "batch_size = 1\ndata_parallel_degree = 8"))
    sets = HARDWARE | {"devices": 8}
    model = to_job(read("torchtitan", str(config), sets), sets).model
    assert (model.n_layers, model.vocab_sz) == (layers, entries)


DEEPSEEK = """
deepseekv3_configs = {{
    "5B": DeepSeekV3ModelArgs(
        vocab_size=1000, dim=4 * 128, inter_dim=1536, moe_inter_dim=256, n_layers=9, n_dense_layers=1, n_heads=8,
        moe_args=MoEArgs(num_experts=16, num_shared_experts=2, top_k=4, score_func="softmax", route_norm=False{more}),
        q_lora_rank=0, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, mscale=0.7,
    ),
}}
"""


def test_a_flavor_of_deepseek_that_a_fork_has(tmp_path: Path) -> None:
    """Its devices are those of the file's name; an argument that is not known leaves the flavor unknown."""
    at = tmp_path / "torchtitan" / "models" / "deepseek_v3"
    at.mkdir(parents=True)
    (at / "__init__.py").write_text(DEEPSEEK.format(more=""))
    config = at / "deepseek_5b_4x_a100.toml"
    config.write_text(OF_FAMILY.format("deepseek_v3", "5B", "local_batch_size = 2"))
    found = to_job(read("auto", str(config), HARDWARE), HARDWARE)
    model = found.model
    assert (model.n_layers, model.hidden_sz, model.inter_sz, model.n_q_heads, model.vocab_sz) == (9, 512, 1536, 8, 1000)
    assert model.moe is not None
    moe = (model.moe.n_experts, model.moe.expert_inter_sz, model.moe.experts_per_token, model.moe.n_shared_experts)
    assert moe == (16, 256, 4, 2)
    assert (model.attention.kind, model.attention.kv_lora_rank, model.attention.q_lora_rank) == ("mla", 128, None)
    assert found.parallelism.dp == 4
    for groups, limit, said in ((1, 1, (None, None)), (8, 4, (8, 4))):
        more = f", num_expert_groups={groups}, num_limited_groups={limit}"
        (at / "__init__.py").write_text(DEEPSEEK.format(more=more))
        experts = to_job(read("auto", str(config), HARDWARE), HARDWARE).model.moe
        assert experts is not None
        assert (experts.n_groups, experts.node_limit) == said
    (at / "__init__.py").write_text(DEEPSEEK.format(more=", capacity=2"))
    with pytest.raises(ConfigError, match=r"unknown flavor of deepseek_v3 \(got '5B'\)"):
        read("auto", str(config), HARDWARE)


def test_the_model_of_transformers_that_a_job_names(tmp_path: Path) -> None:
    """torchtitan/experiments/transformers_modeling_backend: flavor full is the repository's model."""
    config = tmp_path / "full.toml"
    job = OF_FAMILY.format("transformers_modeling_backend", "full", "local_batch_size = 2")
    config.write_text(f'{job}[hf_transformers]\nmodel = "Qwen/Qwen3-4B"\n')
    found = to_job(read("torchtitan", str(config), HARDWARE), HARDWARE)
    assert (found.model.name, found.model.n_layers) == ("qwen3-4b", 36)
    assert any(note.startswith("approximated: model.name") for note in found.notes)
    config.write_text(config.read_text().replace("full", "debugmodel"))
    with pytest.raises(ConfigError, match="unknown model"):
        read("torchtitan", str(config), HARDWARE)


def test_sizes_of_a_fork_may_be_products_and_grouped_digits(tmp_path: Path) -> None:
    """4 * 512 is 2,048, not 4; 2 x 4 x 2048 / 3 = 5,461, up to a multiple of 256: 5,632."""
    at = tmp_path / "torchtitan" / "models" / "llama3"
    (at / "train_configs").mkdir(parents=True)
    sizes = "dim=4 * 512, n_layers=16, n_heads=32, vocab_size=128_000"
    (at / "__init__.py").write_text(f'llama3_configs = {{"1B": TransformerModelArgs({sizes})}}\n')
    config = at / "train_configs" / "job.toml"
    config.write_text(JOB.format(flavor="1B"))
    model = to_job(read("torchtitan", str(config), HARDWARE), HARDWARE).model
    assert (model.hidden_sz, model.inter_sz, model.vocab_sz) == (2048, 5632, 128000)


def test_a_comment_that_starts_a_job_makes_no_log_of_its_config(tmp_path: Path) -> None:
    """A comment of a TOML with torchtitan.train in it; its keys of experts are those of a fork."""
    config = tmp_path / "job.toml"
    job = OF_FAMILY.format("deepseek_v3", "16B", "local_batch_size = 2")
    config.write_text(
        f"# torchrun --nproc_per_node=8 -m torchtitan.train --job.config-file job.toml\n{job}[llep]\nenabled = true\n"
    )
    found = to_job(read("auto", str(config), HARDWARE), HARDWARE)
    assert found.model.n_layers == 27
    assert any(note.startswith("approximated: llep.enabled") for note in found.notes)
