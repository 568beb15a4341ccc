"""The list of flags names plan keys, not the words that trainers' tables use for their figures."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from steptime.launch.keys import load_table, plan_key
from steptime.launch.read import read

TABLES = [
    path.name.removesuffix(".yaml")
    for path in (files("steptime") / "data" / "launch").iterdir()
    if "\nused:" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_figure_of_a_table_decides_a_key_of_the_plan(table: str) -> None:
    for key, rule in load_table(table).rules.items():
        assert not plan_key(rule.note).startswith("@"), key


def test_the_flags_of_a_trainer(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "accelerate launch --num_processes 8 --use_fsdp train.py --model_name_or_path meta-llama/Meta-Llama-3-8B"
        " --per_device_train_batch_size 2 --gradient_checkpointing true --bf16 true --max_seq_length 4096\n"
    )
    notes = {flag.name: flag.note for flag in read("transformers", str(script), {"hardware.node_type": "h100"}).flags}
    assert notes["per_device_train_batch_size"] == "data.microbatch_sz"
    assert notes["gradient_checkpointing"] == "performance.recompute"
    assert not [note for note in notes.values() if "@" in note]
