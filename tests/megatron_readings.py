"""What the tests of Megatron-LM's launch files share: fixtures, a small script with more flags, the lines of an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.reading import Reading

FOLDER = Path(__file__).parent / "data" / "launch" / "megatron"
TABLE = load_table("megatron")
RELEASE = "Megatron-LM (megatron-core 0.16.1)"
LEFT_OUT = "; not modeled; --allow-unmodeled ignores it"
H100 = {"hardware.node_type": "dgx-h100"}


def load(name: str, **env: str) -> Reading:
    """The reading of a fixture."""
    return read_megatron(name, (FOLDER / name).read_text(encoding="utf-8"), env)


def script(*flags: str, launch: str = "torchrun --nproc_per_node 8") -> str:
    """A script of a small model with more flags."""
    usual = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    batch = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 50257 --bf16"
    return f"{launch} pretrain_gpt.py {usual} {batch} {' '.join(flags)}\n"


def reading(*flags: str, launch: str = "torchrun --nproc_per_node 8", **env: str) -> Reading:
    return read_megatron("run.sh", script(*flags, launch=launch), env)


def problems(call, *args, **more) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


# --- the dump ---


def dump() -> list[str]:
    return (FOLDER / "log_core_0_16.txt").read_text(encoding="utf-8").splitlines()
