"""Recipes of Megatron-Bridge whose settings are arguments: `**user_kwargs`, `{**recommended, **user}` and `_common(**all)`."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import SETS

from steptime.base.config import ConfigError
from steptime.launch.python.config_functions import read_function
from steptime.launch.read import read

RECIPES = """\
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig


def llama3_8b_own_pretrain_config(**user_kwargs: Unpack[Kwargs]) -> ConfigContainer:
    recommended: Kwargs = {"hf_path": "meta-llama/Meta-Llama-3-8B", "tensor_parallelism": 2, "lr": 1e-4}
    combined: Kwargs = {**recommended, "tensor_parallelism": 4, **user_kwargs}
    return _common(**combined)


def unknown_pretrain_config(**user_kwargs) -> ConfigContainer:
    return _common(**{**of_the_cluster(), **user_kwargs})


def _common(hf_path: str, tensor_parallelism: int = 1, context_parallelism: int = 1, gbs: int = 32, **more) -> ConfigContainer:
    bridge = AutoBridge.from_hf_pretrained(hf_path)
    model_cfg = bridge.to_megatron_provider(load_weights=False)
    model_cfg.tensor_model_parallel_size = tensor_parallelism
    model_cfg.context_parallel_size = context_parallelism
    cfg = ConfigContainer(
        model=model_cfg,
        train=TrainingConfig(global_batch_size=gbs, micro_batch_size=2),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=GPTDatasetConfig(sequence_length=4096),
        mixed_precision="bf16_mixed",
    )
    return cfg
"""


def test_settings_that_are_arguments(tmp_path: Path) -> None:
    """tp 4 is the later of the two; the others are the defaults of `_common`: 8 devices over tp 4 are 2 ranks."""
    (tmp_path / "own.py").write_text(RECIPES, encoding="utf-8")
    sets = SETS | {"devices": 8}
    plan = read("nemo", f"{tmp_path / 'own.py'}:llama3_8b_own_pretrain_config", sets).config
    assert plan["model"] == "llama3-8b"
    assert {key: plan["parallelism"][key] for key in ("tp", "zero_level")} == {"tp": 4, "zero_level": 1}
    assert plan["data"] == {"gbs": 32, "microbatch_sz": 2, "seqlen": 4096}


def test_kernels_of_the_frameworks_own_provider(tmp_path: Path) -> None:
    """models/gpt_provider.py: gradients accumulate in the GEMM, the loss is fused by Megatron-Core's own code.

    llama/llama_bridge.py gives a model of a repository the base class; only the classes of sizes (Llama3ModelProvider8B) and the
    recipes of later releases select Transformer Engine's loss.
    """
    (tmp_path / "own.py").write_text(RECIPES, encoding="utf-8")
    sets = SETS | {"devices": 8}
    performance = read("nemo", f"{tmp_path / 'own.py'}:llama3_8b_own_pretrain_config", sets).config["performance"]
    assert performance["grad_accumulation_fusion"] is True
    assert performance["loss_impl"] == "native"


def test_what_no_parameter_takes_is_collected() -> None:
    """`lr` is a parameter, and the call's value is over its default; `other` is one of the rest."""
    text = "def seen() -> Own:\n    return keep(lr=1, other=2)\n\n\ndef keep(lr=0, **more):\n    return Own(lr=lr, **more)\n"
    assert read_function("a.py", text, "seen", "Own")[1] == {"_class_": "Own", "lr": 1, "other": 2}


def test_settings_that_only_running_tells(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(RECIPES, encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown_pretrain_config does not return a config that can be read"):
        read("nemo", f"{tmp_path / 'own.py'}:unknown_pretrain_config", SETS)
