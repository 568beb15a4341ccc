"""The layouts of a search: the cross product of its axes for a number of devices and a batch, and which of them can run."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Literal, NamedTuple

from steptime.job.job import Job, facts

EXCESS = (1.1, 1.5, 2.0, 4.0, float("inf"))
"""Upper ends of the classes of what does not fit, over what the device has."""
LARGEST_MICROBATCH = 64
UNEVEN = (2, 4, 8)
"""Numbers of chunks per stage, of one layer more or less, where none is even: the largest of them that has a layer for each."""
Split = Literal["even", "ends", "auto"]
"""How layers are distributed over chunks: equally, with embedding and loss counted as layers, or as evenly as possible."""
SPLIT_SETTINGS: dict[str, dict[str, Any]] = {
    "even": {"parallelism.layers_per_stage": None, "parallelism.embedding_and_loss_count_as_layers": False},
    "ends": {"parallelism.layers_per_stage": None, "parallelism.embedding_and_loss_count_as_layers": True},
    "auto": {"parallelism.layers_per_stage": "auto", "parallelism.embedding_and_loss_count_as_layers": False},
}


class DiscreteChoice(NamedTuple):
    """The non-numeric axes of one layout."""

    zero_level: int
    sp: bool
    schedule: str | None
    """As set; by default 1F1B, interleaved with several chunks per stage, or the profile's."""


@dataclass
class Counts:
    """Counts of the cross product by outcome."""

    rejected: dict[str, int] = field(default_factory=dict)
    """Layouts by the first rule that they break."""
    evaluated: int = 0
    """Layouts that can run: their step and memory were computed."""
    fitting: int = 0
    too_large: list[int] = field(default_factory=lambda: [0] * len(EXCESS))
    """Those that do not fit, by `EXCESS`: how much of what the device has they need."""

    @property
    def points(self) -> int:
        """The whole cross product."""
        return self.evaluated + sum(self.rejected.values())


class Grid(NamedTuple):
    """The rows of the numeric axes for one number of devices and one batch, in columns, and which of them can run."""

    devices: int
    gbs: int
    columns: Mapping[str, Any]
    splits: Any
    """Index into `SPLITS`, by row."""
    legal: Mapping[DiscreteChoice, Any]
    """Bools by row."""

    def can_run(self, rows: Any, schedule: str | None, zeros: Container[int], *, sp: bool) -> Any:
        """Which of some rows can run with this schedule under any of some ZeRO levels."""
        import numpy as np

        runs = np.zeros(len(self.splits), dtype=bool)[rows]
        for choice, legal in self.legal.items():
            if choice.schedule == schedule and choice.sp == sp and choice.zero_level in zeros:
                runs |= legal[rows]
        return runs


class Shape(NamedTuple):
    """A pipeline, and the rows of a grid that have it."""

    schedule: str | None
    pp: int
    vpp: int
    split: Split
    rows: Any


SPLITS: tuple[Split, ...] = ("even", "ends", "auto")


AXES = {
    **{
        name: f"parallelism.{name}"
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "sp", "zero_level", "schedule")
    },
    "microbatch_sz": "data.microbatch_sz",
}
"""The axes of a search by the names of their plan keys."""


@dataclass(frozen=True)
class Axes:
    """Values of the axes that the caller fixes; the others take all values that the job allows.

    Of the ways to distribute layers (`split`), one that is not among the values is left out.
    """

    said: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def values(self, name: str, usual: Sequence[Any]) -> list[Any]:
        """The values of an axis."""
        return list(self.said.get(name, usual))


def on_fewest_devices(job: Job) -> Job:
    """The job on as few devices as it takes, without settings that the search decides."""
    copies = lcm(job.cross_dc.n_dcs if job.cross_dc else 1, job.parallelism.replicas)
    changes: dict[str, Any] = {
        f"parallelism.{name}": 1 for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "pipeline_passes")
    }
    moe, woven = job.model.moe, bool(job.software.overlap.ep) and job.software.family == "megatron-core"
    if job.model.mtp and woven:  # which Megatron-Core runs in an interleaved pipeline alone
        changes |= {"parallelism.pp": 2, "parallelism.vpp": 2}
    if moe is not None and (woven or job.software.moe.dispatcher == "flex" or moe.expert_tp_degree):
        changes["parallelism.ep"] = divisors(moe.n_experts)[1]  # they want several
        changes["parallelism.etp"] = moe.expert_tp_degree or 1
        copies *= changes["parallelism.ep"] * changes["parallelism.etp"]
    copies *= 2 * job.facts.fsdp_ranks or 1  # shards that fewer ranks divide
    changes |= {"parallelism.dp": copies, "data.microbatch_sz": 1, "data.gbs": 4096 * copies}
    unsaid = (
        "layers_per_stage",
        "schedule",
        "microbatch_group_sz",
        "sp",
        *(() if job.parallelism.fsdp else ("zero_level",)),
    )
    changes |= {f"parallelism.{name}": None for name in unsaid if getattr(job.parallelism, name) is not None}
    changes |= {"parallelism.embedding_and_loss_count_as_layers": False}
    if job.model.n_layers % (changes["parallelism.pp"] * changes["parallelism.vpp"]):
        changes |= {"parallelism.layers_per_stage": "auto"}
    changes |= {"performance.activation_checkpointing_type": "none"}
    return job.replace(**changes)


def zero_levels(job: Job, axes: Axes) -> list[int]:
    """ZeRO levels that the framework runs; FSDP's options set their own."""
    if job.parallelism.fsdp is not None:
        return [job.zero_level]
    return axes.values("zero_level", facts(job).framework.zero_levels)


def divisors(n: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def chunk_counts(layers: int, pps: Sequence[int], *, ends: bool) -> list[int]:
    """Virtual chunks per stage that distribute the layers evenly for some number of stages, with or without the ends."""
    even = [even_chunks(layers, pp, ends=ends) for pp in pps]
    uneven = {v for pp in pps for v in uneven_chunks(layers, pp)} if ends else set[int]()
    return sorted(set[int]().union(*even) | uneven | {1})


def even_chunks(layers: int, pp: int, *, ends: bool) -> set[int]:
    """Virtual chunks per stage that distribute the layers evenly over `pp` > 1 stages, with or without the ends."""
    wholes = (layers, layers + 2) if ends else (layers,)
    return {v for whole in wholes if pp > 1 and whole % pp == 0 for v in divisors(whole // pp)}


def uneven_chunks(layers: int, pp: int) -> set[int]:
    """Virtual chunks per stage that are tried where no number of them distributes the layers evenly: 8 of 61 over 4 stages."""
    tried = {v for v in UNEVEN if pp * v <= layers}
    return {max(tried)} if tried and pp > 1 and max(even_chunks(layers, pp, ends=True), default=1) == 1 else set()


def numbers(job: Job, plan: Job, axes: Axes, devices: int, gbs: int) -> dict[str, Any]:
    """The cross product of the numeric axes, in columns of float64; `plan`: as the user gave it, whose values are tried too."""
    import numpy as np

    whole, layers = divisors(devices), job.model.n_layers
    tps, cps = axes.values("tp", whole), axes.values("cp", whole)
    alone = plan.parallelism.fsdp is not None and plan.parallelism.pp == 1  # FSDP without a pipeline stays so
    pps = axes.values("pp", [1] if alone else [pp for pp in whole if pp <= layers])
    vpps = axes.values("vpp", chunk_counts(layers, pps, ends=True) if len(pps) else [1])
    batches = axes.values("microbatch_sz", [b for b in divisors(gbs) if b <= LARGEST_MICROBATCH])
    lists = [np.array(values, dtype=float) for values in (tps, cps, pps, vpps, batches)]
    tp, cp, pp, vpp, batch = (axis.ravel() for axis in np.meshgrid(*lists, indexing="ij"))
    ranks = tp * cp * pp
    keep = devices % ranks == 0
    columns = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": devices / ranks, "microbatch_sz": batch}
    columns = spread_experts(job, axes, {name: column[keep] for name, column in columns.items()})
    if "dp" in axes.said:
        keep = np.isin(columns["dp"], np.array(axes.said["dp"], dtype=float))
        columns = {name: column[keep] for name, column in columns.items()}
    return columns


def spread_experts(job: Job, axes: Axes, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The rows times the ways to spread experts: ep by the divisors of their number, etp 1 or tp (tp where ep is 1)."""
    import numpy as np

    size = len(columns["tp"])
    eps = axes.values("ep", divisors(job.model.moe.n_experts) if job.model.moe else [1])
    parts = []
    for ep in eps:
        etps = [np.full(size, float(etp)) for etp in axes.said["etp"]] if "etp" in axes.said else []
        etps = etps or ([columns["tp"]] if ep == 1 else [np.ones(size), columns["tp"]])
        for at, etp in enumerate(etps):
            rows = columns["tp"] > 1 if at and "etp" not in axes.said else np.ones(size, dtype=bool)
            part = {name: column[rows] for name, column in columns.items()}
            parts.append(part | {"ep": np.full(int(rows.sum()), float(ep)), "etp": etp[rows]})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def split_of(plan: Job) -> Split:
    """How the plan distributes its layers."""
    if plan.parallelism.layers_per_stage is not None:
        return "auto"
    return "ends" if plan.parallelism.embedding_and_loss_count_as_layers else "even"


def splits(plan: Job, columns: Mapping[str, Any]) -> Any:
    """How every row distributes its layers: as the plan does where that divides them, else equally, else with the ends counted.

    Layers that divide in none of these ways are distributed as evenly as possible; with interleaving, if they are the plan's own
    chunks or `uneven_chunks`.
    """
    import numpy as np

    layers, chunks, usual = plan.model.n_layers, columns["pp"] * columns["vpp"], split_of(plan)
    even, ends = layers % chunks == 0, (layers + 2) % chunks == 0
    rest = np.where(columns["vpp"] == 1, 2, 0)
    for pp in sorted({*columns["pp"].tolist()}):  # `np.unique` without indices imports `numpy.ma`
        rest[(columns["pp"] == pp) & np.isin(columns["vpp"], list(uneven_chunks(layers, int(pp))))] = 2
    if usual == "auto":
        mine = (columns["pp"] == plan.parallelism.pp) & (columns["vpp"] == plan.parallelism.vpp)
        return np.where(even, 0, np.where(mine, 2, np.where(ends, 1, rest)))
    if usual == "ends":
        return np.where(ends, 1, np.where(even, 0, rest))
    return np.where(even, 0, np.where(ends, 1, rest))
