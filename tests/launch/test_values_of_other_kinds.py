"""Lists and numbers where a file has words: a line or a plan, no traceback."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

SETS = {
    "hardware.node_type": "dgx-h100", "parallelism.dp": 8, "model": "llama3-8b", "data.gbs": 8, "data.microbatch_sz": 1,
    "data.seqlen": 1024,
}  # fmt: skip
CONTAINER = """_target_: megatron.bridge.training.config.ConfigContainer
model: {num_layers: 4, hidden_size: 1024, num_attention_heads: 16, seq_length: 1024, vocab_size: 32000, use_megatron_fsdp: true,
  KEY: VALUE}
train: {micro_batch_size: 1, global_batch_size: 64}
"""
LAUNCH = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nKEY: VALUE\n"
TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[compile]\nenable = true\nKEY = VALUE\n'
)


@pytest.mark.parametrize("stage", ["nan", "inf", "1e999"])
def test_numbers_are_finite(tmp_path: Path, stage: str) -> None:
    flags = (
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    )
    more = f"--micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 --deepspeed --zero-stage {stage}"
    (tmp_path / "run.sh").write_text(f"deepspeed --num_gpus 8 pretrain_gpt.py {flags} {more}\n")
    with pytest.raises(ConfigError, match=r"--zero-stage: expected a number \(got"):
        read("megatron", str(tmp_path / "run.sh"), SETS)


@pytest.mark.parametrize(
    ("kind", "text", "key"),
    [
        ("nemo", CONTAINER, "megatron_fsdp_grad_comm_dtype"),
        ("nemo", CONTAINER, "megatron_fsdp_main_grads_dtype"),
        ("transformers", LAUNCH, "mixed_precision"),
        ("torchtitan", TITAN, "components"),
    ],
    ids=["comm", "grads", "accelerate", "compile"],
)
def test_values_of_other_kinds(tmp_path: Path, kind: str, text: str, key: str) -> None:
    path = tmp_path / ("job.toml" if kind == "torchtitan" else "job.yaml")
    for value in ("[1]", "-1", "[]"):
        path.write_text(text.replace("KEY", key).replace("VALUE", value))
        with suppress(ConfigError):
            assert to_job(read(kind, str(path), SETS), SETS, allow_unmodeled=True).model.n_layers == 32


@pytest.mark.parametrize("key", ["zero_optimization.stage", "tensor_parallel.autotp_size"])
def test_problems_of_a_ds_config_are_those_of_the_job(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    said = {"zero_optimization": {"stage": 2}} | {section: {name: "x"}}
    (tmp_path / "ds.json").write_text(json.dumps(said))
    flags = "--model_name_or_path meta-llama/Meta-Llama-3-8B --bf16 --max_seq_length 2048 --deepspeed ds.json"
    (tmp_path / "run.sh").write_text(f"torchrun --nnodes 1 --nproc-per-node 8 run_clm.py {flags}\n")
    with pytest.raises(ConfigError, match=f"ds.json: {key}: expected a whole number"):
        read("transformers", str(tmp_path / "run.sh"), SETS)
