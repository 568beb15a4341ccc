"""Writes the shipped GPU-memory rows: steptime/data/measurements/megatron_ci.csv.gz and megatron_ci_configs.jsonl.gz.

    python benchmarks/build_megatron_ci.py FOLDER

FOLDER holds runs.csv and configs.jsonl, as collected from the golden values of NVIDIA/Megatron-LM's functional tests. Every run
becomes one row, every configuration one line that rows refer to. A record that repeats another one to the byte and to the
microsecond is the same run, renamed or moved: `first_recorded` is the date at which it first appeared, from which the container
follows. The same input gives the same bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

from steptime.validation.measurements import FOLDER

SOURCE = "NVIDIA/Megatron-LM@d98e8a64d tests/functional_tests/test_cases, golden values and model_config.yaml of the row's commit"
SAME = ("gpu", "container", "first_iteration_peak_bytes", "peak_allocated_bytes", "allocated_bytes", "iteration_s")
COPIED = (
    "id", "split", "family", "kind", "config", "gpu", "n_gpus", "container", "date", "first_iteration_peak_bytes",
    "peak_allocated_bytes", "allocated_bytes",
)  # fmt: skip
DEVICES = {"nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200_2N8G": "8"}
"""Tests whose records do not say it: nodes x gpus of tests/test_utils/recipes/gb200/nemotron.yaml at d2715d78a8 (2 x 4). Recipes
of the others without a count (tests of Mixtral, DeepSeek-V3 and Nemotron 3 releases) are in no public commit."""
STATED = {
    "source": SOURCE,
    "source_group": "megatron-ci",
    "framework": "Megatron-LM",
    "quality": "A",
    "task": "pretrain",
}


def packed(text: str) -> bytes:
    """Gzip without a date."""
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def rows_of(runs: list[dict[str, str]]) -> str:
    """The CSV, rows of one configuration together."""
    first: dict[tuple[str, ...], str] = {}
    for run in runs:
        run["n_gpus"] = run["n_gpus"] or DEVICES.get(run["id"].partition("/")[0], "")
        key = tuple(run[column] for column in SAME)
        first[key] = min(first.get(key, run["date"]), run["date"])
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COPIED, "model_name", "first_recorded", *STATED])
    for run in sorted(runs, key=lambda run: (run["config"], run["id"])):
        when = first[tuple(run[column] for column in SAME)]
        writer.writerow([*(run[column] for column in COPIED), run["family"], when, *STATED.values()])
    return out.getvalue()


def main(folder: Path) -> None:
    """Read, check that every run has its configuration, write."""
    with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    lines = (folder / "configs.jsonl").read_text(encoding="utf-8").splitlines()
    configs = sorted((json.loads(line) for line in lines if line), key=lambda found: found["config"])
    if missing := {run["config"] for run in runs} - {found["config"] for found in configs}:
        sys.exit(f"{len(missing)} configurations are missing: {', '.join(sorted(missing)[:5])}")
    text = "".join(json.dumps(found, separators=(",", ":")) + "\n" for found in configs)
    (FOLDER / "megatron_ci_configs.jsonl.gz").write_bytes(packed(text))
    (FOLDER / "megatron_ci.csv.gz").write_bytes(packed(rows_of(runs)))
    print(f"{len(runs):,} runs of {len(configs):,} configurations")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/build_megatron_ci.py FOLDER")
    main(Path(sys.argv[1]))
