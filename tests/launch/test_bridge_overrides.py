"""Settings over one of Megatron-Bridge's own recipes, and functions that start from one."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import asked, written

OVERRIDE = """\
    model: {seq_length: 4096}
    train: {train_iters: 20, global_batch_size: 8}
    checkpoint: {save: null}
    dataset: {seq_length: 4096}
"""


def test_an_override_is_put_over_the_recipe_of_its_name(tmp_path: Path) -> None:
    """llama3_8b_pretrain_config: cp 2 and micro-batch 1; 8 devices over cp 2 are 4 data-parallel ranks."""
    plan = written(tmp_path, "llama3_8b_pretrain_override_example.yaml", OVERRIDE, devices=8).config
    assert plan["model"] == "llama3-8b"
    assert (plan["parallelism"]["cp"], plan["parallelism"]["dp"]) == (2, 4)
    assert plan["data"] == {"gbs": 8, "microbatch_sz": 1, "seqlen": 4096}


def test_a_word_that_is_no_attention_backend_has_no_effect(tmp_path: Path) -> None:
    """_set_attention_backend (megatron-core, language_module.py) compares with AttnBackend's members.

    So "flash_attn", which Megatron-Bridge's documentation names, leaves the choice to TransformerEngine, as auto does.
    """
    name = "llama3_8b_pretrain_override_example.yaml"
    for word, backend in (("flash_attn", None), ("auto", None), ("flash", "flash"), ("AttnBackend.fused", "cudnn")):
        text = OVERRIDE.replace("seq_length: 4096}", f"seq_length: 4096, attention_backend: {word}}}", 1)
        found = written(tmp_path, name, text, devices=8)
        assert found.config["performance"].get("attention_backend") == backend
    (line,) = asked(tmp_path, name, OVERRIDE.replace("seq_length: 4096}", "attention_backend: '<word>'}", 1), devices=8)
    assert "model.attention_backend: expected one of" in line


def test_the_recipe_of_the_program_that_names_the_file(tmp_path: Path) -> None:
    """llama3_70b_pretrain_config: tp 4, pp 4 with 5 chunks on each stage, cp 2, sequence parallelism: 64 / 32 = 2."""
    (tmp_path / "train.py").write_text("from recipes import llama3_70b_pretrain_config\nFILE = 'own.yaml'\n")
    layout = written(tmp_path, "conf/own.yaml", OVERRIDE, devices=64).config["parallelism"]
    assert {key: layout[key] for key in ("tp", "pp", "vpp", "cp", "sp", "dp")} == {
        "tp": 4, "pp": 4, "vpp": 5, "cp": 2, "sp": True, "dp": 2,
    }  # fmt: skip


def test_an_override_asks_for_the_devices_only(tmp_path: Path) -> None:
    name = "llama32_1b_pretrain.yaml"
    assert asked(tmp_path, name, OVERRIDE) == ("number of devices unknown; add --set parallelism.dp=N",)


@pytest.mark.parametrize("name", ["own.yaml", "llama3_8b_finetune.yaml", "quantized_llama3_8b_pretrain.yaml"])
def test_an_override_of_an_unknown_recipe_is_told_as_such(tmp_path: Path, name: str) -> None:
    (line,) = asked(tmp_path, name, OVERRIDE)
    assert line.startswith("an override of a recipe, not the whole config")


def test_a_function_over_a_recipe_has_its_layout(tmp_path: Path) -> None:
    text = """\
        from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
        from megatron.bridge.training.config import ConfigContainer

        def own() -> ConfigContainer:
            cfg = llama3_8b_pretrain_config()
            cfg.train.global_batch_size = 16
            return cfg
    """
    plan = written(tmp_path, "own.py", text, devices=8).config
    assert (plan["parallelism"]["cp"], plan["parallelism"]["dp"]) == (2, 4)
    assert plan["data"] == {"gbs": 16, "microbatch_sz": 1, "seqlen": 8192}
    assert plan["performance"]["loss_impl"] == "fused"


def test_a_templates_placeholders_are_asked_for_by_the_plans_keys(tmp_path: Path) -> None:
    text = """\
        _target_: megatron.bridge.training.config.ConfigContainer
        model:
          num_layers: 4
          hidden_size: 256
          num_attention_heads: 4
          seq_length: 128
          vocab_size: <<<VOCAB_SIZE>>>
        train: {global_batch_size: 8, micro_batch_size: 1}
        mixed_precision: {bf16: true}
    """
    lines = asked(tmp_path, "template.yaml", text, devices=8)
    assert lines[0].endswith("(got '<<<VOCAB_SIZE>>>'); add --set model.vocab_sz=N")
    assert all(line.endswith("add --set model.vocab_sz=N") for line in lines)
    told = {"devices": 8, "model.vocab_sz": 1000}
    assert written(tmp_path, "template.yaml", text, **told).config["model"]["vocab_sz"] == 1000


RECIPES = """\
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer

def own_sft_config() -> ConfigContainer:
    cfg = ConfigContainer(
        train=TrainingConfig(global_batch_size=32, micro_batch_size=1),
        optimizer=OptimizerConfig(optimizer="adam", use_distributed_optimizer=True),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=True),
        mixed_precision="bf16_mixed",
    )
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-0.6B").to_megatron_provider(load_weights=False)
    cfg.model.context_parallel_size = 4
    cfg.model.seq_length = 4096
    cfg.dataset = Packed(seq_length=4096)
    return cfg
"""
STARTED = """\
#!/bin/bash
NAME=own_sft
python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py --recipe ${NAME}_config \\
    train.global_batch_size=16 model.context_parallel_size=2
"""


def test_a_script_that_starts_a_recipe_of_its_checkout(tmp_path: Path) -> None:
    """8 devices over cp 2 are 4 ranks. mixed_precision.py, bf16_mixed: grad_reduce_in_fp32 is put over that of ddp."""
    written(tmp_path, "src/megatron/bridge/recipes/own/own.py", RECIPES)
    plan = written(tmp_path, "examples/long/run.sh", STARTED).config
    assert plan["model"] == "qwen3-0.6b"
    assert (plan["parallelism"]["dp"], plan["parallelism"]["cp"], plan["parallelism"]["zero_level"]) == (4, 2, 1)
    assert plan["data"] == {"gbs": 16, "microbatch_sz": 1, "seqlen": 4096}
    assert plan["performance"]["main_grad_dtype"] == "fp32"


def test_a_recipe_whose_model_takes_images(tmp_path: Path) -> None:
    """Qwen3-VL has a tower for images before its layers: no preset's name stands for it."""
    recipe = RECIPES.replace("Qwen/Qwen3-0.6B", "/models/Qwen3-VL-4B-Instruct")
    first, other = asked(tmp_path, "own.py", recipe, devices=8)
    assert first.endswith("which is not among the presets; add --set model=NAME")
    why = (
        "another kind of model: it takes images or audio in addition to text; not modeled; --allow-unmodeled ignores it"
    )
    assert other == f"/models/Qwen3-VL-4B-Instruct: {why}"


def test_a_recipe_by_name_and_one_that_is_not_there(tmp_path: Path) -> None:
    """llama3_8b_pretrain_config: cp 2; 8 devices are 4 ranks."""
    named = STARTED.replace("own_sft", "llama3_8b_pretrain").replace(" model.context_parallel_size=2", "")
    plan = written(tmp_path, "run.sh", named).config
    assert (plan["model"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == ("llama3-8b", 4, 16)
    (line,) = asked(tmp_path, "run.sh", STARTED)
    assert line == "line 3: recipe own_sft_config was not found; give the log that prints the job's config"
    (line,) = asked(tmp_path, "run.sh", named.strip() + " --peft_scheme lora\n")
    assert line.startswith("line 3: --peft_scheme of run_recipe.py is not read;")


def test_options_of_the_program_that_starts_recipes(tmp_path: Path) -> None:
    """COMMON_OVERRIDE_FIELDS of run_recipe.py: 8 devices over tp 2 and cp 1 are 4 ranks."""
    named = STARTED.replace("own_sft", "llama3_8b_pretrain").replace(" model.context_parallel_size=2", "")
    options = "--context_parallel_size 1 -tp 2 -mb 2 --global_batch_size 32 --lr 1e-4 --mode pretrain"
    plan = written(tmp_path, "run.sh", named.replace("train.global_batch_size=16", options)).config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"], plan["parallelism"].get("cp", 1)) == (2, 4, 1)
    assert (plan["data"]["gbs"], plan["data"]["microbatch_sz"]) == (32, 2)
    for option in ("--packed_sequence", "--mode lora"):
        (line,) = asked(tmp_path, "run.sh", named.strip() + f" {option}\n")
        assert line.startswith(f"line 3: {option.split()[0]} of run_recipe.py is not read;")


BENCHMARK = """\
    from megatron.bridge.perf_recipes._common import _benchmark_common, _perf_precision
    from megatron.bridge.recipes.llama import llama3_70b_pretrain_config

    def own_64gpu_h100_bf16_config() -> ConfigContainer:
        cfg = llama3_70b_pretrain_config()
        {lines}
        return cfg
"""


def test_overlap_of_a_recipe(tmp_path: Path) -> None:
    """recipes/llama/h100/llama3.py: CommOverlapConfig(tp_comm_overlap=True); the sends of virtual stages overlap by its setup."""

    def overlap_of(line: str) -> dict[str, bool]:
        return dict(written(tmp_path, "own.py", BENCHMARK.format(lines=line)).config["performance"]["overlap"])

    assert overlap_of("pass") == {"tp": True, "dp": True, "pp": True}
    assert overlap_of("cfg.comm_overlap.tp_comm_overlap = False") == {"tp": False, "dp": True, "pp": True}
    assert overlap_of("cfg.comm_overlap = CommOverlapConfig()")["pp"] is True
    assert overlap_of("cfg.comm_overlap = None") == {"tp": False, "dp": True, "pp": False}
    assert overlap_of("cfg.model.virtual_pipeline_model_parallel_size = None")["pp"] is False


@pytest.mark.parametrize(
    ("line", "gradients"),
    [
        ("pass", "fp32"),
        ('cfg.mixed_precision = _perf_precision("bf16")', "bf16"),
        ("_benchmark_common(cfg)", "bf16"),
        ("_benchmark_common(cfg); cfg.mixed_precision.grad_reduce_in_fp32 = True", "fp32"),
    ],
)
def test_functions_of_its_benchmarks(tmp_path: Path, line: str, gradients: str) -> None:
    """perf_recipes/_common.py: both set grad_reduce_in_fp32 to false, which bf16_mixed has true."""
    reading = written(tmp_path, "own.py", BENCHMARK.format(lines=line))
    assert reading.config["performance"]["main_grad_dtype"] == gradients
    assert [flag.name for flag in reading.of("approximated")] == ["llama3_70b_pretrain_config()"]


def test_arguments_of_a_recipe(tmp_path: Path) -> None:
    """recipes/llama/llama3.py, Llama3CommonKwargs: those of the first releases too; what is set over them goes before."""

    def text_of(arguments: str, lines: str = "pass") -> str:
        return BENCHMARK.format(lines=lines).replace(
            "llama3_70b_pretrain_config()", f"llama3_70b_pretrain_config({arguments})"
        )

    given = "tensor_parallelism=8, context_parallel_size=1, seq_length=4096, global_batch_size=64, lr=1e-4, mock=True"
    plan = written(tmp_path, "own.py", text_of(given)).config
    assert {key: plan["parallelism"].get(key) for key in ("tp", "pp", "cp", "dp")} == {
        "tp": 8,
        "pp": 4,
        "cp": None,
        "dp": 2,
    }
    assert (plan["data"]["seqlen"], plan["data"]["gbs"]) == (4096, 64)
    over = text_of(given, "cfg.train.global_batch_size = 128")
    assert written(tmp_path, "own.py", over).config["data"]["gbs"] == 128
    (problem,) = asked(tmp_path, "own.py", text_of("seq_length=int(own(2))"))
    assert problem == "dataset.seq_length is computed (int(own(2))); add --set data.seqlen=N"
    (problem,) = asked(tmp_path, "own.py", text_of("hf_path='own/model'"))
    assert problem.startswith("argument hf_path of llama3_70b_pretrain_config() is not read; give the log")


def test_the_layers_of_a_recipe_with_embedding_and_head_among_them(tmp_path: Path) -> None:
    """Llama 3.1 405B: 126 layers, embedding and head are 128 on 8 stages of 8; 1,024 / (8 * 8 * 2) = 8 ranks."""
    lines = "cfg.model.virtual_pipeline_model_parallel_size = 8; cfg.model.context_parallel_size = 2"
    text = BENCHMARK.format(lines=lines).replace("llama3_70b", "llama31_405b").replace("64gpu", "1024gpu")
    layout = written(tmp_path, "own.py", text).config["parallelism"]
    assert (layout["pp"], layout["vpp"], layout["dp"]) == (8, 8, 8)
    assert layout["embedding_and_loss_count_as_layers"] is True


def test_experts_of_a_recipe_are_not_split_over_tp(tmp_path: Path) -> None:
    """expert_tensor_parallel_size 1 in all of its recipes of experts: 16 devices of a stage are 8 of experts, twice."""
    lines = (
        "cfg.model.tensor_model_parallel_size = 2; cfg.model.expert_model_parallel_size = 8; cfg.dataset.seq_length = 4096;"
        " cfg.train.global_batch_size = 64; cfg.train.micro_batch_size = 1; cfg.model.pipeline_model_parallel_size = 4"
    )
    text = BENCHMARK.format(lines=lines).replace("llama3_70b", "qwen3_30b_a3b")
    layout = written(tmp_path, "own.py", text).config["parallelism"]
    assert {key: layout[key] for key in ("tp", "dp", "ep", "etp")} == {"tp": 2, "dp": 8, "ep": 8, "etp": 1}


def test_a_benchmark_over_one_of_another_file_is_asked_for_its_log(tmp_path: Path) -> None:
    """perf_recipes/kimi/b300/kimi_k2.py: kimi_k2_pretrain_256gpu_b200_fp8cs_config() with another batch."""
    text = BENCHMARK.format(lines="cfg.train.micro_batch_size = 2").replace("64gpu_h100", "256gpu_b300")
    (line,) = asked(tmp_path, "own.py", text.replace("llama3_70b_pretrain", "kimi_k2_pretrain_256gpu_b200_fp8cs"))
    assert line.startswith(
        "its layout and precision are those of kimi_k2_pretrain_256gpu_b200_fp8cs_config(), which is not"
    )


def test_a_flex_dispatchers_library_that_is_none(tmp_path: Path) -> None:
    """perf_recipes/qwen/b200/qwen3_moe.py: no library where tokens are sent by all-to-all; 94 layers and two on 8 stages."""
    said = (
        'cfg.model.moe_token_dispatcher_type = "alltoall"; cfg.model.moe_flex_dispatcher_backend = None;'
        " cfg.model.pipeline_model_parallel_size = 8; cfg.train.global_batch_size = 64; cfg.train.micro_batch_size = 1"
    )
    text = BENCHMARK.format(lines=said).replace("llama3_70b", "qwen3_235b_a22b")
    plan = written(tmp_path, "own.py", text).config
    assert (plan["performance"]["moe"]["dispatcher"], plan["data"]["seqlen"]) == ("alltoall", 4096)
    assert plan["parallelism"]["embedding_and_loss_count_as_layers"] is True


@pytest.mark.parametrize(
    ("recipe", "line", "function"),
    [
        ("deepseek_v3", "{}(cfg.model, 'Et|(tt|)*30mL')", "set_deepseek_v3_pipeline_model_parallel_layout"),
        ("kimi_k2", "cfg.model.pipeline_model_parallel_layout = {}(16, 1)", "_get_kimi_k2_pipeline_layout"),
    ],
)
def test_stages_that_a_function_lays_out_are_asked_for_in_a_log(
    tmp_path: Path, recipe: str, line: str, function: str
) -> None:
    """perf_recipes/deepseek/h100/deepseek_v3.py and kimi/b200/kimi_k2.py: the function is in another file."""
    text = BENCHMARK.format(lines=line.format(function)).replace("llama3_70b", recipe)
    (problem,) = asked(tmp_path, "own.py", text)
    assert problem.startswith(f"its stages are those of {function}(), which is not read; give the log"), problem


def test_kimi_k2_trains_with_muon(tmp_path: Path) -> None:
    """recipes/kimi/h100/kimi_k2.py: _apply_kimi_k2_optimizer(cfg, "muon"), "dist_muon" of optimizer_utils.py."""
    lines = (
        "cfg.model.pipeline_model_parallel_size = 16; cfg.model.virtual_pipeline_model_parallel_size = 2;"
        " cfg.model.tensor_model_parallel_size = 8; cfg.model.expert_model_parallel_size = 64;"
        " cfg.train.global_batch_size = 8192; cfg.train.micro_batch_size = 1;"
        " cfg.model.pipeline_model_parallel_layout = 'Et|(tt|)*30L'"
    )
    text = BENCHMARK.format(lines=lines).replace("llama3_70b", "kimi_k2").replace("64gpu", "1024gpu")
    plan = written(tmp_path, "own.py", text).config
    assert (plan["performance"]["optimizer"], plan["parallelism"]["zero_level"]) == ("dist_muon", 1)
