"""How much of a collection of launch files is read: `python benchmarks/launch_corpus.py FOLDER`.

FOLDER has an index.tsv with the columns file, kind, expected (a JSON of what the file says) and note ("with words: ..." are the
words that a script takes, "refuse" says that it is to be refused). Each file is read with nothing but a machine said. A file
gives a report at once, asks for something by `--set`, is refused, or is wrong: it says something else than what is expected.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.validation.logged import read_run

MACHINE = {"hardware.node_type": "dgx-h100"}
MODEL = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads", "bias", "glu", "norm")
TREE = {
    "hidden_sz": ("hidden_size",),
    "n_layers": ("num_layers",),
    "n_q_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_query_groups",),
    "gbs": ("global_batch_size", "train_batch_size"),
    "mbs": ("micro_batch_size", "micro", "batch"),
    "seqlen": ("seq_length", "encoder_seq_length", "seq_len"),
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
}
"""Our word -> the same in an index."""
SINCE_MODELED = ("mixture of experts", "hybrid Mamba model")
"""Kinds of models that an index may say are to be refused, and that are read."""


def said(job: Job) -> dict[str, Any]:
    """What a job says, by the words of the index."""
    model, layout, data, performance = job.model, job.parallelism, job.data, job.performance
    found: dict[str, Any] = {key: getattr(model, key) for key in MODEL}
    recompute = (
        performance.recompute.granularity if performance.recompute else performance.activation_checkpointing_type
    )
    return found | {
        "pos": "learned" if model.learned_positions else "rope" if model.rotary_embeds else "none",
        "tie": model.tie_embeddings,
        "gbs": data.gbs,
        "mbs": data.microbatch_sz,
        "seqlen": data.seqlen,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "vpp": layout.vpp,
        "sp": layout.sp,
        "zero": layout.zero_level,
        "stage": layout.zero_level,
        "precision": str(performance.precision),
        "recompute": str(recompute),
    }


def differences(job: Job, expected: dict[str, Any]) -> list[str]:
    """Expected values that the job does not have; those that are expressions or left open are not compared."""
    found, wrong = said(job), []
    for key, value in expected.items():
        ours = next((word for word, others in TREE.items() if key in others), key)
        if ours not in found or value is None or value == "auto" or "$" in str(value):
            continue
        if ours in {"sp", "tp", "mbs"} and key == "sp" and job.parallelism.tp == 1:
            continue
        if any(f"{key} {value}" in note for note in job.notes):
            continue
        if str(found[ours]).lower() != str(value).lower() and not (ours == "pos" and value == "alibi"):
            wrong.append(f"{key}: expected {value}, got {found[ours]}")
    return wrong


def _logged(path: Path) -> Job:
    """The job of a log; of one that ends before the first step, by the arguments that it prints."""
    try:
        return read_run([str(path)], [f"{key}={value}" for key, value in MACHINE.items()]).job
    except ConfigError as error:
        if "no iterations logged" not in str(error):
            raise
        return to_job(read("auto", str(path), MACHINE), MACHINE)


def fate(path: Path, kind: str, expected: dict[str, Any], note: str) -> tuple[str, list[str]]:
    """At once, asks, refused, wrong or crash; and the lines that say why."""
    words = re.search(r"with words: (.*)", note)
    name = f"'{path}' {words[1]}" if words else str(path)
    try:
        if kind == "logs":
            job = _logged(path)
        else:
            job = to_job(read("auto" if kind == "other" or "primus" in name.lower() else kind, name, MACHINE), MACHINE)
    except ConfigError as error:
        asks = [
            problem
            for problem in error.problems
            if re.search(r"--set |--devices |:FUNCTION|name the script|write \w+=|--with |--plan ", problem)
        ]
        return ("asks" if len(asks) == len(error.problems) else "refused"), list(error.problems)
    except Exception as error:  # noqa: BLE001  a traceback is what is looked for
        return "crash", [repr(error)]
    wrong = differences(job, expected)
    refused = "refuse" in note and not note.startswith(SINCE_MODELED)
    return ("wrong", wrong) if wrong or refused else ("at once", [])


GROUPS = {
    r"reinforcement learning|--num-rollout": "reinforcement learning",
    r"adapters|LoRA|peft": "adapters",
    r"BERT|T5|an encoder|vision": "other models",
    r"mixture of experts|expert|moe|\bMoE\b|_a3b|deepseek|Xexperts": "experts",
    r"Mamba|mamba|hybrid": "hybrid",
}
"""Words of a file's name, its note and of what is said of it -> what it trains; any other file trains a dense model."""


def group_of(name: str, note: str, why: list[str]) -> str:
    """What a file trains, as far as its name, the index's note or the reader's lines say."""
    told = " ".join([name, note, *why])
    return next((group for words, group in GROUPS.items() if re.search(words, told)), "dense")


def main() -> None:
    """Every file of the index, and how many of each kind of model came to what."""
    folder, counts = Path(sys.argv[1]), dict[str, Counter[str]]()
    with (folder / "index.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            expected, note = json.loads(row["expected"] or "{}"), row["note"] or ""
            found, why = fate(folder / row["file"], row["kind"], expected, note)
            group = group_of(row["file"], note, why)
            counts.setdefault(group, Counter())[found] += 1
            print(f"{found:8} {group:10} {row['file']}")
            for line in why:
                print(f"           {line.replace(str(folder) + '/', '')[:240]}")
    for group, fates in {**counts, "all": sum(counts.values(), Counter())}.items():
        told = ", ".join(f"{n} {what}" for what, n in fates.items())
        print(f"{group}: {fates['at once'] / fates.total():.0%} of {fates.total()} at once ({told})")


if __name__ == "__main__":
    main()
