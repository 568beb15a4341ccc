"""Small jobs for the benchmark's tests, and a launch of several of them on real gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.launch import fork_ranks

from steptime.job.job import Job

RANKS = Path(__file__).parent / "bench" / "ranks.py"
LLAMA = {
    "n_layers": 2,
    "hidden_sz": 64,
    "inter_sz": 160,
    "n_q_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 8,
    "vocab_sz": 96,
}
GPT = LLAMA | {
    "n_kv_heads": 8,
    "glu": False,
    "norm": "layernorm",
    "bias": True,
    "learned_positions": True,
    "tie_embeddings": True,
}


def config(
    model: dict[str, Any] | None = None,
    performance: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    gbs: int = 4,
    seqlen: int = 32,
) -> dict[str, Any]:
    """A job as a config file holds it: micro-batches of one sequence, fp32 unless said otherwise."""
    return {
        "model": LLAMA | (model or {}),
        "parallelism": {"tp": 1, "pp": 1, "dp": 1} | (parallelism or {}),
        "performance": {"software": "torch", "precision": "fp32"} | (performance or {}),
        "data": {"gbs": gbs, "seqlen": seqlen, "microbatch_sz": 1},
        "hardware": {"node_type": "dgx-h100"},
    }


def job(*args: Any, **kwargs: Any) -> Job:
    """The same as a `Job`."""
    return Job(**config(*args, **kwargs))


def launch(folder: Path, ranks: int, cases: dict[str, dict[str, Any]], *, rows: bool = False) -> dict[str, Any]:
    """Run every case on `ranks` gloo ranks, one after another; what rank 0 saw of each.

    `rows`: steps are timed and traced (folder/trace/CASE/rank0.json) instead.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    done = fork_ranks(RANKS, ranks, folder, *(["rows"] if rows else []))
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "seen.json").read_text())
