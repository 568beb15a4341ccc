"""Layouts of one job in columns: degrees and batch as numpy arrays, one value per candidate.

`Candidates` reads like the job: what is not a column is the job's own. The rules take all candidates at once, as the facts of
such a job. What makes ops, memory and collectives takes those that differ only in numbers (`alike`): the same chunks, the same
collectives, the same moments of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from steptime.base.num import Num, is_column, same
from steptime.job.job import Job
from steptime.model.blocks import layers

LAYOUT_COLUMNS = ("tp", "pp", "dp", "vpp", "cp", "ep", "etp", "replicas")
BATCH_COLUMNS = ("gbs", "microbatch_sz")


class SectionColumns:
    """A section of a plan with columns in place of some numbers."""

    whole: Num | None = None
    """All devices, where one number is given for all candidates."""

    def __init__(self, said: Any, columns: Mapping[str, Num]) -> None:
        self._said = said
        vars(self).update(columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._said, name)

    @property
    def devices(self) -> Num:
        """All devices of each candidate."""
        return self.tp * self.cp * self.pp * self.dp if self.whole is None else self.whole


class Candidates:
    """A job with columns in place of its LAYOUT_COLUMNS and BATCH_COLUMNS, each an array of float64.

    >>> import numpy as np
    >>> from steptime import Job
    >>> data = {"gbs": 256, "seqlen": 8192, "microbatch_sz": 1}
    >>> job = Job(model="llama3-8b", parallelism={"tp": 1, "pp": 1, "dp": 8}, data=data, hardware="dgx-h100")
    >>> Candidates(job, tp=np.array([1.0, 2.0, 3.0]), dp=np.array([8.0, 4.0, 2.0])).parallelism.devices.tolist()
    [8.0, 8.0, 6.0]
    """

    def __init__(self, job: Job, **columns: Num) -> None:
        """Take the numbers that are not given from the job.

        Raises:
            ValueError: a name that is no column.
        """
        if unknown := columns.keys() - {*LAYOUT_COLUMNS, *BATCH_COLUMNS}:
            raise ValueError(
                f"no columns: {', '.join(sorted(unknown))}; valid: {', '.join((*LAYOUT_COLUMNS, *BATCH_COLUMNS))}"
            )
        self.job = job
        self.columns = columns
        self.parallelism = SectionColumns(
            job.parallelism, {key: columns[key] for key in LAYOUT_COLUMNS if key in columns}
        )
        self.data = SectionColumns(job.data, {key: columns[key] for key in BATCH_COLUMNS if key in columns})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.job, name)

    def all_on(self, devices: Num) -> None:
        """Give every candidate so many devices, whatever its degrees: they share the link between data centers."""
        self.parallelism.whole = devices

    @property
    def microbatches(self) -> Num:
        """Micro-batches per step and pipeline."""
        return self.data.gbs // (self.parallelism.dp * self.data.microbatch_sz)

    @property
    def sp(self) -> bool:
        """Sequence parallelism, from the plan or the profile, where any candidate has tensor parallelism."""
        said = self.job.parallelism.sp
        return (self.job.software.layout.sp if said is None else said) and any_row(self.parallelism.tp > 1)

    @property
    def single_microbatch(self) -> bool:
        """Whether every candidate has one micro-batch per step."""
        return same(self.microbatches == 1)

    @property
    def as_job(self) -> Job:
        """Itself, for functions of one job whose formulas accept columns."""
        return cast("Job", self)

    def rows(self, which: Any) -> Candidates:
        """Some of the candidates, by index or mask."""
        import numpy as np

        size = max((np.size(column) for column in self.columns.values()), default=1)
        return Candidates(self.job, **{k: np.broadcast_to(c, (size,))[which] for k, c in self.columns.items()})

    def alike(self) -> Iterator[tuple[Any, Candidates]]:
        """(row indices, candidates) of every group whose members differ only in numbers; all must be legal.

        What they share is the group's own job's.
        """
        import numpy as np

        keys = np.stack(np.broadcast_arrays(*self._structure()), axis=-1)
        _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        for i, row in enumerate(first):
            which = np.flatnonzero(group.reshape(-1) == i)
            one = self.rows([row])
            said = {key: int(column[0]) for key, column in one.columns.items()}
            paths = {key: f"{'data' if key in BATCH_COLUMNS else 'parallelism'}.{key}" for key in said}
            job = self.job.replace(**{paths[key]: value for key, value in said.items()})
            columns = self.rows(which).columns
            yield which, Candidates(job, **{key: c for key, c in columns.items() if np.any(c != c[0])})

    def alike_parts(self) -> Iterator[tuple[Any, Candidates]]:
        """(row indices, candidates) of every group whose layers and ends have the same ops."""
        import numpy as np

        keys = np.stack(np.broadcast_arrays(*self._ops()), axis=-1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        for i in range(int(group.max()) + 1):
            which = np.flatnonzero(group.reshape(-1) == i)
            yield which, self.rows(which)

    def _ops(self) -> list[Num]:
        """The values that decide which ops exist."""
        p = self.parallelism
        kv = {layer.model.n_kv_heads for layer, _ in layers(self.job.model)}
        ones = [1.0 * (p.tp == 1), 1.0 * (p.cp == 1), 1.0 * (self.microbatches == 1)]
        experts = self.job.model.moe.n_experts if self.job.model.moe else 1
        ones += [1.0 * (p.ep == 1) + 2.0 * (p.ep == experts), 1.0 * (p.etp == 1)]
        layout = self.job.software.layout
        if self.job.parallelism.fsdp is not None or layout.no_sync:
            ones.append(1.0 * (self.microbatches == 2))  # no_sync: no micro-batch between the first and the last
        if layout.lone_experts == "plain":
            ones.append(1.0 * (p.dp * p.cp * p.tp == p.ep * p.etp * p.replicas))
        scans = self.job.model.mamba is not None or self.job.model.linear_attention is not None
        if scans or self.job.software.batch_first_attention:
            ones.append(1.0 * (self.data.microbatch_sz == 1))  # several sequences are reordered
        return [*ones, *(1.0 * (p.tp > n) + 2.0 * (p.tp == n) for n in sorted(kv))]

    def _structure(self) -> list[Num]:
        """The values that decide which ops, chunks and moments exist."""
        p = self.parallelism
        degrees = [1.0 * p.pp, 1.0 * p.vpp, 1.0 * p.replicas, self.microbatches, 1.0 * p.ep, 1.0 * p.etp]
        return [*degrees, 1.0 * (p.dp * p.cp == 1), *self._ops()]


def any_row(condition: Num) -> bool:
    """Whether it is true in any row of a column."""
    return bool(condition.any()) if is_column(condition) else bool(condition)
