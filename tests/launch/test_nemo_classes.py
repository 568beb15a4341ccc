"""NeMo 2.0: the kernels that a class of a model's config sets, and callbacks that change what a step costs.

Expected: NVIDIA/NeMo@8cfedd72 nemo/collections/llm/gpt/model/*.py and nemo/lightning/pytorch/callbacks/*.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_readings import status
from test_files_of_forks import SETS, asked, written

from steptime.launch.nemo.models import class_preset, classes, kernels
from steptime.launch.reading import Reading, to_job

RECIPE = """\
    import nemo_run as run

    def own_recipe() -> run.Partial:
        return run.Partial(
            llm.pretrain,
            model=run.Config(llm.GPTModel, config=run.Config({config})),
            trainer=run.Config(nl.Trainer, devices=8, num_nodes=1, plugins=bf16_mixed(), callbacks=[{callbacks}],
                strategy=run.Config(nl.MegatronStrategy, {strategy})),
            data=run.Config(llm.MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=1),
        )
"""
EXPERTS = "expert_model_parallel_size=8, expert_tensor_parallel_size=1"


def recipe(folder: Path, config: str, callbacks: str = "", strategy: str = EXPERTS, **sets: Any) -> Reading:
    text = RECIPE.format(config=config, callbacks=callbacks, strategy=strategy)
    return written(folder, "recipe.py", text, **sets)


@pytest.mark.parametrize(
    ("name", "moe"),
    [
        ("Qwen3Config30B_A3B", {"dispatcher": "alltoall", "permute_fusion": True, "grouped_gemm": True,
            "router_dtype": "compute", "shared_expert_overlap": False}),
        ("MixtralConfig8x7B", {"dispatcher": "alltoall", "permute_fusion": False, "grouped_gemm": False,
            "router_dtype": "compute", "shared_expert_overlap": False}),
        ("DeepSeekV2LiteConfig", {"dispatcher": "alltoall", "permute_fusion": True, "grouped_gemm": True,
            "router_dtype": "fp32", "shared_expert_overlap": True}),
        ("DeepSeekV3Config", {"dispatcher": "alltoall", "permute_fusion": True, "grouped_gemm": True,
            "router_dtype": "fp32", "shared_expert_overlap": True}),
        ("GPTOSSConfig20B", {"dispatcher": "alltoall", "permute_fusion": True, "grouped_gemm": True,
            "router_dtype": "compute", "shared_expert_overlap": False}),
    ],
)  # fmt: skip
def test_experts_of_a_class(tmp_path: Path, name: str, moe: dict[str, Any]) -> None:
    """Not Megatron-Core's defaults: all-gather, one product for each expert, no fused permutation."""
    found = recipe(tmp_path, f"llm.{name}").config["performance"]["moe"]
    assert {key: found[key] for key in moe} == moe


KERNELS = ("attention_impl", "attention_backend", "activation_impl", "rope_impl", "loss_impl", "vocab_multiple")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MistralConfig7B", ("flash", None, "composite", "own_tables", "native", 128)),
        ("MixtralConfig8x7B", ("flash", None, "fused", "fused", "native", 128)),
        ("Qwen25Config7B", ("flash", None, "composite", "own_tables", "native", 1)),
        ("Qwen2Config500M", ("flash", None, "composite", "own_tables", "native", 1)),
        ("Qwen3Config8B", ("flash", None, "composite", "own_tables", "native", 1)),
        ("DeepSeekV2Config", ("flash", None, "fused", "own_tables", "fused", 3200)),
        ("DeepSeekV3Config", ("flash", None, "fused", "own_tables", "fused", 1280)),
        ("GemmaConfig7B", ("flash", "flash", "composite", "own_tables", "native", 128)),
        ("Gemma2Config9B", ("unfused", None, "composite", "own_tables", "native", 1)),
        ("Gemma3Config1B", ("flash", "flash", "composite", "own_tables", "native", 1)),
        ("Phi3ConfigMini", ("flash", None, "composite", "own_tables", "native", 1)),
        ("Starcoder2Config7B", ("flash", None, "fused", "own_tables", "native", 128)),
        ("CodeLlamaConfig34B", ("flash", None, "fused", "fused", "native", 128)),
        ("ChatGLM3Config6B", ("flash", None, "composite", "own_tables", "native", 65024)),
        ("GPTOSSConfig20B", ("unfused", None, "fused", "own_tables", "native", 1)),
        ("NemotronHConfig8B", ("flash", "flash", "fused", None, "native", 128)),
        ("NemotronNano9Bv2", ("flash", "flash", "fused", None, "native", 128)),
    ],
)
def test_kernels_of_a_class(tmp_path: Path, name: str, expected: tuple[object, ...]) -> None:
    found = recipe(tmp_path, f"llm.{name}", strategy="").config["performance"]
    assert tuple(found.get(key) for key in KERNELS) == expected


@pytest.mark.parametrize(
    ("name", "fused"), [("Gemma2Config2B", False), ("Gemma3Config4B", False), ("GemmaConfig2B", True)]
)
def test_gradients_of_gemma(tmp_path: Path, name: str, fused: bool) -> None:
    """gemma2.py and gemma3.py turn off what base.py has on."""
    assert recipe(tmp_path, f"llm.{name}", strategy="").config["performance"]["grad_accumulation_fusion"] is fused


@pytest.mark.parametrize(("name", "kind"), [("MistralConfig7B", "a2a"), ("MistralNeMoConfig12B", "p2p")])
def test_context_parallelism_of_mistral(tmp_path: Path, name: str, kind: str) -> None:
    found = recipe(tmp_path, f"llm.{name}", strategy="context_parallel_size=2")
    assert found.config["parallelism"]["cp_comm_type"] == kind


def test_a_softmax_with_sinks_is_torchs(tmp_path: Path) -> None:
    found = recipe(tmp_path, "llm.GPTOSSConfig120B").config["performance"]
    assert (found["attention_impl"], found["softmax_impl"]) == ("unfused", "composite")


def test_what_a_recipe_says_goes_before_its_class(tmp_path: Path) -> None:
    """A null too: with it, the class's own fp32 router computes as the rest does."""
    said = "llm.DeepSeekV3Config, moe_grouped_gemm=False, moe_router_dtype=None, make_vocab_size_divisible_by=128"
    found = recipe(tmp_path, said)
    performance = found.config["performance"]
    assert (performance["moe"]["grouped_gemm"], performance["moe"]["router_dtype"]) == (False, "compute")
    assert (performance["vocab_multiple"], performance["moe"]["permute_fusion"]) == (128, True)
    assert status(found, "model.config.moe_grouped_gemm") == "used"
    assert status(found, "model.config.moe_permute_fusion") == "default"


def test_a_dump_that_names_the_class(tmp_path: Path) -> None:
    text = """\
        _target_: nemo.collections.llm.api.pretrain
        _partial_: true
        model:
          _target_: nemo.collections.llm.gpt.model.qwen3.Qwen3Model
          config: {_target_: nemo.collections.llm.gpt.model.qwen3.Qwen3Config30B_A3B, moe_permute_fusion: false}
        trainer:
          _target_: nemo.lightning.pytorch.trainer.Trainer
          devices: 8
          num_nodes: 1
          strategy:
            _target_: nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy
            expert_model_parallel_size: 8
        data:
          _target_: nemo.collections.llm.gpt.data.mock.MockDataModule
          seq_length: 4096
          global_batch_size: 64
          micro_batch_size: 1
    """
    found = written(tmp_path, "recipe.yaml", text).config["performance"]["moe"]
    assert (found["dispatcher"], found["grouped_gemm"], found["permute_fusion"]) == ("alltoall", True, False)


def test_nemos_command_line(tmp_path: Path) -> None:
    """mistral_7b has no class in the table of sizes; its recipe has cp 2."""
    script = "#!/bin/bash\nnemo llm pretrain --factory mistral_7b model.config.apply_rope_fusion=True\n"
    plan = written(tmp_path, "run.sh", script).config
    assert plan["parallelism"]["cp_comm_type"] == "a2a"
    assert (plan["performance"]["rope_impl"], plan["performance"]["activation_impl"]) == ("fused", "composite")


def test_a_model_of_the_user_has_the_kernels_of_the_recipes_class(tmp_path: Path) -> None:
    """llama.py, Llama4Config, of which no preset is known; Llama3Config8B, whose sizes are."""
    scout = recipe(tmp_path, "llm.Llama4Experts16Config", model="llama4-scout").config["performance"]
    assert (scout["rope_impl"], scout["activation_impl"], scout["vocab_multiple"]) == ("own_tables", "fused", 1)
    keys = ("dispatcher", "grouped_gemm", "permute_fusion", "shared_expert_overlap")
    assert tuple(scout["moe"][key] for key in keys) == ("alltoall", True, False, True)
    dense = recipe(tmp_path, "llm.Llama3Config8B", strategy="", model="qwen3-8b").config
    assert dense["model"] == "qwen3-8b"
    assert (dense["performance"]["rope_impl"], dense["performance"]["activation_impl"]) == ("fused", "fused")


def test_a_class_of_kernels_has_no_sizes() -> None:
    assert kernels("Qwen2Config500M").keys() == kernels("Qwen25Config7B").keys()
    assert kernels("GPTConfig")["bias_activation_fusion"] is False  # base.py: the sizes turn it on
    assert kernels("GPTConfig5B") == {"bias_activation_fusion": True}
    assert kernels("OwnConfig") == {}
    assert "Qwen25Config7B" not in classes()
    assert class_preset("Qwen25Config7B")


DEEPEP = "run.Config(DeepEPCallback)"


@pytest.mark.parametrize(
    ("machine", "dispatcher", "overlap"),
    [("dgx-h100", "flex", False), ("dgx-a100", "flex", False), ("dgx-b200", "alltoall", True)],
)
def test_deepeps_callback(tmp_path: Path, machine: str, dispatcher: str, overlap: bool) -> None:
    """deepep.py: compute capability 8 and 9; else it returns before it sets anything."""
    found = recipe(tmp_path, "llm.DeepSeekV3Config", DEEPEP, **{"hardware.node_type": machine})
    moe = found.config["performance"]["moe"]
    assert (moe["dispatcher"], moe["shared_expert_overlap"]) == (dispatcher, overlap)
    assert "notes" not in found.config
    if machine == "dgx-b200":
        assert status(found, "trainer.callbacks.DeepEPCallback") == "irrelevant"


def test_deepeps_callback_overrides_the_config(tmp_path: Path) -> None:
    """A machine that is not known is told."""
    said = "llm.DeepSeekV3Config, moe_token_dispatcher_type='alltoall', moe_shared_expert_overlap=True"
    unknown: dict[str, Any] = {"hardware.node_type": None}
    found = recipe(tmp_path, said, DEEPEP, **unknown)
    moe = found.config["performance"]["moe"]
    assert (moe["dispatcher"], moe["shared_expert_overlap"]) == ("flex", False)
    assert found.config["notes"] == [
        "trainer.callbacks.DeepEPCallback: counted as on Ampere or Hopper; elsewhere it sets nothing"
    ]


@pytest.mark.parametrize(
    ("fields", "factor", "pad"),
    [("", 1.0, True), (", moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=False", 1.5, False),
     (", moe_expert_capacity_factor=-1.0, moe_pad_expert_input_to_capacity=False", None, False)],
)  # fmt: skip
def test_dropped_tokens(tmp_path: Path, fields: str, factor: float | None, pad: bool) -> None:
    """moe_token_drop.py: 1.0 and padding by default; over the config; a negative factor drops none."""
    said = "llm.MixtralConfig8x7B, moe_expert_capacity_factor=4.0"
    found = recipe(tmp_path, said, f"run.Config(MegatronTokenDropCallback{fields})")
    moe = to_job(found, SETS).model.moe
    assert moe is not None
    assert (moe.capacity_factor, moe.pad_to_capacity) == (factor, pad)
    named = to_job(recipe(tmp_path, said, model="mixtral-8x22b"), SETS).model
    assert named.moe is not None
    assert (named.n_layers, named.moe.capacity_factor) == (56, 4.0)


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        ("LayerFreezer, {}", "trainer.callbacks.LayerFreezer ...: layers are frozen"),
        ("LoRA, dim=8", "trainer.callbacks.LoRA ...: adapters as a callback; give them as the recipe's peft"),
        (
            "JitTransform, run.Config(JitConfig, use_torch=True)",
            "trainer.callbacks.JitTransform.config.use_torch true:",
        ),
        ("EMA, decay=0.9", "trainer.callbacks.EMA ...: averaged weights"),
        ("CUDAGraphCallback", "trainer.callbacks.CUDAGraphCallback ...: a step in a CUDA graph"),
    ],
)
def test_callbacks_that_are_not_modeled(tmp_path: Path, callback: str, told: str) -> None:
    text = RECIPE.format(config="llm.Llama3Config8B", callbacks=f"run.Config({callback})", strategy="")
    (line,) = asked(tmp_path, "recipe.py", text)
    assert line.startswith(told)


@pytest.mark.parametrize(
    "callback", ["JitTransform, run.Config(JitConfig)", "FLOPsMeasurementCallback, model='llama3'"]
)
def test_callbacks_without_cost(tmp_path: Path, callback: str) -> None:
    plain = recipe(tmp_path, "llm.Llama3Config8B", strategy="").config
    assert recipe(tmp_path, "llm.Llama3Config8B", f"run.Config({callback})", strategy="").config == plain
