"""Files that a launch script copies or edits before it starts a job with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_flags_of_forks import GPT2, RUN

from steptime.base.config import ConfigError
from steptime.launch.read import read

SETS = {"hardware.node_type": "dgx-h100"}
INSIDE = f"cat > a.sh <<EOF\n{RUN} {GPT2} --micro-batch-size $MBS --global-batch-size 64\nEOF\n"
TRAIN = (
    "deepspeed --num_gpus 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-8B --deepspeed ds.json --bf16 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --max_seq_length 4096\n"
)
STAGE = '{"zero_optimization": {"stage": LEVEL}}'


def micro_batch(folder: Path, script: str) -> int:
    (folder / "run.sh").write_text(f"#!/bin/bash\n{script}\n")
    size: int = read("megatron", str(folder / "run.sh"), SETS).config["data"]["microbatch_sz"]
    return size


def test_a_copy_keeps_what_has_no_value(tmp_path: Path) -> None:
    assert micro_batch(tmp_path, f"MBS=2\n{INSIDE}cp a.sh b.sh\nbash b.sh") == 2
    with pytest.raises(ConfigError, match="MBS has no value; write MBS="):
        micro_batch(tmp_path, f"X=$Y\n{INSIDE}cp a.sh b.sh\nbash b.sh")


def test_an_edit_in_place_is_made_or_its_file_is_not_known(tmp_path: Path) -> None:
    assert micro_batch(tmp_path, f"MBS=WORD\n{INSIDE}sed -i 's/WORD/4/' a.sh\nbash a.sh") == 4
    with pytest.raises(ConfigError, match=r"runs a\.sh: give that script"):
        micro_batch(tmp_path, f"MBS=WORD\n{INSIDE}sed -i 's/W[A-Z]*/4/' a.sh\nbash a.sh")


def zero_level(folder: Path, script: str) -> int | None:
    (folder / "run.sh").write_text(f"#!/bin/bash\n{script}{TRAIN}")
    level: int | None = read("transformers", str(folder / "run.sh"), SETS).config["parallelism"].get("zero_level")
    return level


def test_copies_into_folders_have_the_names_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.json").write_text(STAGE.replace("LEVEL", "3"))
    assert zero_level(tmp_path, "cp configs/base.json ds.json\n") == 3
    assert zero_level(tmp_path, "cp configs/base.json ds.json\nsed -i 's/3}/2}/' ds.json\n") is None
    assert zero_level(tmp_path, "cp configs/none.json configs/base.json .\n") is None
    (tmp_path / "configs" / "ds.json").write_text(STAGE.replace("LEVEL", "1"))
    for to in (".", "./", "out/"):
        assert zero_level(tmp_path, f"cp configs/base.json configs/ds.json {to}\n") == 1
