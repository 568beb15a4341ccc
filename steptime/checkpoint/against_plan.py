"""Comparison of a checkpoint with a training plan. The only module of this package that calls the estimator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from steptime.checkpoint.inventory import Inventory
from steptime.checkpoint.weight_names import EMBED, HEAD, POSITIONS

_ATTENTION = re.compile(r"attn|attention|\.w[qkvo]\.")
_MLP = re.compile(r"mlp|ffn|feed_forward|expert|moe|router|\.w[123]\.|\.fc\d\.|\.c_fc\.|dense_h|dense_4h")
_NORM = re.compile(r"norm|(?:^|\.)ln_")
KINDS = ("embedding", "positions", "attention", "mlp", "norms", "head", "other")


class KindRow(NamedTuple):
    """Parameters [elements] of one kind of module on both sides."""

    module: str
    checkpoint: int
    plan: int


class RankRow(NamedTuple):
    """Weights of one rank of a pipeline stage on both sides [bytes]."""

    stage: int
    checkpoint: int
    plan: int


@dataclass(slots=True)
class PlanCounts:
    """What the comparison needs of a job: parameters by kind, degrees, weights of one rank by stage [bytes]."""

    params: dict[str, int]
    degrees: dict[str, int]
    stages: list[int]
    vocab: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that a checkpoint's names and shapes tell: layers, hidden size."""


@dataclass(slots=True)
class Comparison:
    """Rows of both sides and hints. Parameters agree exactly; a rank's bytes up to the padding of buffers in memory."""

    rows: list[KindRow]
    ranks: list[RankRow] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether parameters are equal and, where ranks can be compared, their bytes are equal up to padding."""
        same = all(row.checkpoint == row.plan for row in self.rows)
        # buckets of a running job are padded, files are not
        padded = all(0 <= rank.plan - rank.checkpoint <= max(4096, rank.plan // 1000) for rank in self.ranks)
        return same and padded

    def to_dict(self) -> dict[str, Any]:
        """Plain values for --json."""
        return {
            "agrees": self.agrees,
            "params": [row._asdict() for row in self.rows],
            "ranks": [row._asdict() for row in self.ranks],
            "hints": self.hints,
        }


def kind_of(name: str) -> str:
    """The kind of module a checkpoint's tensor belongs to."""
    if POSITIONS.search(name):
        return "positions"
    if EMBED.search(name):
        return "embedding"
    if _NORM.search(name):
        return "norms"
    if HEAD.search(name) and "layers" not in name:
        return "head"
    return "attention" if _ATTENTION.search(name) else "mlp" if _MLP.search(name) else "other"


def load(path: str) -> PlanCounts:
    """The plan in a job file.

    Raises:
        ConfigError: one line per problem of the file.
    """
    from steptime import Job, estimate
    from steptime.model.blocks import params
    from steptime.model.shard import Shard
    from steptime.software.performance import load_software

    job = Job.load(path)
    model = job.model
    rows = float(model.max_positions or job.data.seqlen)
    whole = Shard(1.0, 1.0, rows, 1.0, sp=False, vocab=model.vocab_sz, software=load_software("megatron-core"))
    counts: dict[str, int] = {}
    for param in params(model, whole):
        kind = _planned(param.name)
        counts[kind] = counts.get(kind, 0) + int(param.elements)
    layout = job.parallelism
    stages = [round(stage.params_bytes) for stage in estimate(job).memory.stages]
    sizes = {"n_layers": model.n_layers, "hidden_sz": model.hidden_sz}
    return PlanCounts(counts, {"tp": layout.tp, "pp": layout.pp}, stages, model.vocab_sz, sizes)


def _planned(name: str) -> str:
    first, _, rest = name.partition(".")
    if "norm" in rest:
        return "norms"
    if first == "embedding":
        return "positions" if rest.startswith("positions") else "embedding"
    return {"attn": "attention"}.get(first, first if first in KINDS else "other")


def compare(summary: Inventory, plan: PlanCounts) -> Comparison:
    """Parameters by kind, exactly; weights per rank where both have the same degrees."""
    counts: dict[str, int] = {}
    for tensor in summary.restored.tensors:
        kind = kind_of(tensor.name)
        counts[kind] = counts.get(kind, 0) + tensor.unique
    rows = [KindRow(kind, counts.get(kind, 0), plan.params.get(kind, 0)) for kind in KINDS]
    found = Comparison([row for row in rows if row.checkpoint or row.plan])
    found.hints += _hints(summary, plan, {row.module: row for row in found.rows})
    main = summary.counted[0]
    degrees = {key: main.parallelism.get(key) for key in ("tp", "pp")}
    staged = [row for row in main.ranks if "pp" in row]
    if not staged:
        found.hints.append("bytes per rank: the checkpoint is not saved by pipeline and tensor rank")
    elif degrees != plan.degrees:
        found.hints.append(f"bytes per rank: the checkpoint has {_words(degrees)}, the plan {_words(plan.degrees)}")
    else:
        found.ranks = _rank_rows(staged, plan.stages)
    return found


def _rank_rows(staged: Iterable[dict[str, Any]], stages: list[int]) -> list[RankRow]:
    fullest: dict[int, int] = {}
    for row in staged:
        fullest[row["pp"]] = max(fullest.get(row["pp"], 0), row["model_bytes"])
    return [RankRow(stage, size, stages[stage]) for stage, size in fullest.items() if stage < len(stages)]


def _hints(summary: Inventory, plan: PlanCounts, rows: dict[str, KindRow]) -> list[str]:
    """Likely causes of the differences."""
    hints = []
    vocab = summary.architecture.get("vocab_sz", {}).get("value")
    if vocab and plan.vocab and vocab != plan.vocab:
        hints.append(f"embedding: {vocab} rows in the checkpoint, {plan.vocab} in the plan (padding?)")
    head = rows.get("head")
    differ = any(row.checkpoint != row.plan for row in rows.values())
    for key, planned in plan.sizes.items() if differ else ():
        stored = summary.architecture.get(key, {}).get("value")
        if isinstance(stored, int) and stored != planned:
            hints.append(f"{key}: {stored} in the checkpoint, {planned} in the plan")
    if head and bool(head.checkpoint) != bool(head.plan):
        side = "plan" if head.checkpoint else "checkpoint"
        hints.append(f"head: tied to the embedding in the {side} only")
    return hints


def _words(degrees: dict[str, Any]) -> str:
    return " ".join(f"{key.upper()} {value}" for key, value in degrees.items())
