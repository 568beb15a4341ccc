"""Checkpoints by the libraries that write them, as they install from PyPI; those that are not here are left out.

    pip install transformers peft accelerate deepspeed torchao bitsandbytes hqq optimum-quanto compressed-tensors diffusers \
        lightning orbax-checkpoint flax optax equinox keras mlx
    pytest -m libraries tests/checkpoint/test_libraries.py

The llama by hand (test_quantized.py): 524,928 parameters, 393,216 of them in the matrices of its layers. The perceptron:
4 x 8 + 8 + 8 x 2 + 2 = 58. LoRA of rank 8 on q (128 x 128) and v (64 x 128): 2 x 8 x (256 + 192) = 7,168.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries
SCRIPT = Path(__file__).parent / "writers.py"
LLAMA, IN_LAYERS = 524_928, 393_216
TRAINED = {  # writer: (libraries, parameters, problems)
    "transformers": ("transformers", LLAMA), "transformers_shards": ("transformers", LLAMA),
    "transformers_trainer": ("transformers accelerate", LLAMA), "peft": ("peft", 7_168), "accelerate": ("accelerate", 58),
    "lightning": ("lightning", 58), "deepspeed_1": ("deepspeed", 58), "deepspeed_2": ("deepspeed", 58),
    "deepspeed_3": ("deepspeed", 58), "orbax": ("orbax", 40), "flax": ("flax optax orbax", 40),
    "flax_msgpack": ("flax optax orbax", 40), "equinox": ("equinox", 58), "keras": ("keras", 58), "gguf": ("gguf", 512),
}  # fmt: skip
QUANTIZED = {  # writer: (libraries, method, bits, group)
    "bitsandbytes_4": ("transformers bitsandbytes accelerate", "bitsandbytes NF4", 4, 64),
    "bitsandbytes_8": ("transformers bitsandbytes accelerate", "bitsandbytes LLM.int8()", 8, None),
    "torchao_int8": ("transformers torchao accelerate", "torchao", 8, None),
    "torchao_fp8": ("transformers torchao accelerate", "torchao FP8", 8, None),
    "torchao_pickled": ("transformers torchao", "torchao Int8Tensor", 8, None),
    "hqq": ("transformers hqq", "HQQ", 4, 64), "quanto": ("transformers optimum.quanto", "quanto", 8, None),
    "quanto_4": ("transformers optimum.quanto", "quanto", 4, 128),
    "compressed_int4": ("transformers compressed_tensors", "compressed-tensors", 4, 128),
    "compressed_nvfp4": ("transformers compressed_tensors", "NVFP4", 4, 16),
    "compressed_mxfp4": ("transformers compressed_tensors", "MXFP4", 4, 32),
    "compressed_fp8": ("transformers compressed_tensors", "FP8", 8, None), "mlx": ("transformers mlx", "MLX", 4, 64),
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {  # family: further options of its config
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "mistral": {}, "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16},
    "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "cohere": {}, "starcoder2": {}, "stablelm": {}, "granite": {}, "glm": {},
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 4}, "gpt_neox": {}, "opt": {"ffn_dim": 96}, "bert": {}, "roberta": {},
}  # fmt: skip


def here(libraries):
    return all(find_spec(name.partition(".")[0]) and find_spec(name) for name in libraries.split())


def write(folder, *argv):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *argv], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", [name for name, (libraries, _) in TRAINED.items() if here(libraries)])
def test_totals_are_those_by_hand(tmp_path, summarize, name):
    write(tmp_path, name, tmp_path)
    summary = summarize(tmp_path)
    assert [problem.message for problem in summary.all_problems if problem.severity == "error"] == []
    assert (summary.params, summary.complete) == (TRAINED[name][1], True)
    if TRAINED[name][1] == LLAMA:
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert (found["n_layers"], found["inter_sz"], found["n_q_heads"], found["n_kv_heads"]) == (2, 384, 4, 2)
        assert found["kv_cache_bytes_per_token"] == 2 * 2 * 64 * 2
    assert (summary.adapter is not None) == (name == "peft")


@pytest.mark.parametrize("name", [name for name, (libraries, *_) in QUANTIZED.items() if here(libraries)])
def test_quantized_models_are_what_they_were(tmp_path, summarize, name):
    _, *about = QUANTIZED[name]
    write(tmp_path, name, tmp_path)
    folder = tmp_path / "model" if (tmp_path / "model").exists() else tmp_path
    summary = summarize(folder)
    assert [problem.message for problem in summary.all_problems if problem.severity == "error"] == []
    assert summary.restored.params == LLAMA
    assert [list(row[:3]) for row in summary.restored.rows] == [about]
    assert summary.restored.rows[0].params == IN_LAYERS
    assert summary.architecture["inter_sz"]["value"] == 384


@pytest.mark.parametrize("name", [name for name in ("diffusers",) if here("diffusers transformers")])
def test_pipeline_has_the_parameters_of_its_models(tmp_path, summarize, name):
    """As torch counts them in the three models before they are saved."""
    expected = int(write(tmp_path, name, tmp_path).split()[-1])
    assert summarize(tmp_path).params == expected


@pytest.mark.parametrize("family", [family for family in FAMILIES if here("transformers")])
def test_families_of_transformers(tmp_path, summarize, codes, family):
    """Random weights, the config's own numbers, without the config and with it."""
    write(tmp_path, "family", tmp_path, family, json.dumps(SMALL | FAMILIES[family]))
    config = json.loads((tmp_path / "config.json").read_text())
    with_config = summarize(tmp_path)
    assert codes(with_config) == set()
    (tmp_path / "config.json").unlink()
    for summary in (with_config, summarize(tmp_path)):
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert (found["n_layers"], found["hidden_sz"], found["vocab_sz"]) == (3, 64, 128)
        assert found["inter_sz"] == config.get("moe_intermediate_size", 96)
        assert (found.get("moe") or {}).get("n_experts") == (4 if family in ("mixtral", "olmoe", "qwen3_moe") else None)
