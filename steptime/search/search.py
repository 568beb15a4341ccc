"""The result of a search: all layouts that may fit in columns; those requested are estimated in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp
from typing import Any, ClassVar, NamedTuple

from steptime.answer.ratio_interval import tied_within
from steptime.answer.result import Estimate, estimate
from steptime.answer.verdict import Candidate
from steptime.base.config import ConfigError, near
from steptime.base.rows import frame
from steptime.base.words import counted
from steptime.job.job import Job
from steptime.search.changes import fewest
from steptime.search.front import corners, shown
from steptime.search.objective import ranked
from steptime.search.pipeline_layouts import Block
from steptime.search.recompute import kind
from steptime.search.space import Axes, Counts

SLACK = 0.02
"""Tolerance over the last finalist's screened time within which a layout is also estimated."""


class Layout(NamedTuple):
    """One layout, estimated in full."""

    changes: dict[str, Any]
    """The settings that turn the plan into it, by dotted key."""
    estimate: Estimate
    value: float
    """The value of the objective."""

    @property
    def job(self) -> Job:
        """The layout as a job that states its number of devices: where `.job.replace` changes a degree, dp follows."""
        return self.estimate.job.replace(devices=self.estimate.devices)

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        return self.estimate.step_s

    @property
    def held_bytes(self) -> float:
        """Memory that its fullest device needs at most, which decides whether it fits."""
        return self.estimate.peaks.most_bytes


class FoundLayouts(NamedTuple):
    """Layouts of one block that may fit, in columns."""

    block: Block
    plan: Job
    extra: Mapping[str, Any]
    """Changes of other keys than the layout's."""
    choice: Any
    row: Any
    value: Any
    """The value of the objective."""
    step_s: Any
    held_bytes: Any

    def within(self, capacity_bytes: float) -> FoundLayouts:
        """Those that may fit in a device with this memory."""
        mine = self.held_bytes <= capacity_bytes
        columns = {name: getattr(self, name)[mine] for name in ("choice", "row", "value", "step_s", "held_bytes")}
        return self._replace(**columns)


@dataclass(frozen=True)
class Asked:
    """The request of a search."""

    devices: Sequence[int]
    gbs: Sequence[int]
    axes: Axes = field(default_factory=Axes)
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of other keys than the layout's."""
    objective: str = "step"
    said: bool = True
    """Whether the plan has its own layout."""
    command: str = "3dtrn PLAN"
    """The command line to which a layout's changes are appended."""


@dataclass
class Search:
    """What `search` returns. Layouts are estimated when asked for; `columns` holds the screen's figures of all that may fit."""

    plan: Job
    asked: Asked
    counts: Counts = field(default_factory=Counts)
    found: list[FoundLayouts] = field(default_factory=list)
    nearest: tuple[float, Job, dict[str, Any]] | None = None
    """The layout that needs the least memory where none fits: bytes, plan and changes."""
    unit: str = "seconds per token"
    """Description of the objective."""
    seconds: float = 0.0
    interrupted: bool = False
    _estimated: dict[tuple[int, int], Layout | None] = field(default_factory=dict)

    draw: ClassVar[Callable[..., str] | None] = None
    """How a notebook displays a search; set by `report.search_tables`."""

    @cached_property
    def given(self) -> Estimate | None:
        """The plan as given, where it has a layout."""
        return estimate(self.plan) if self.asked.said else None

    @property
    def best(self) -> Layout | None:
        """The layout that the objective ranks first; None where nothing fits."""
        return next(iter(self.top(1)), None)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Every layout that may fit, from the screen: axes, step_s and held_bytes, one numpy array each."""
        import numpy as np

        names = ("tp", "cp", "ep", "etp", "microbatch_sz", "dp", "sp")
        lists: dict[str, list[Any]] = {}
        for of in self.found:
            block, size = of.block, len(of.row)
            for name in names:
                lists.setdefault(name, []).append(getattr(block.rows, name)[of.row])
            shape: dict[str, int | str] = {"devices": block.devices, "gbs": block.gbs, "zero_level": block.zero_level}
            shape |= {"pp": block.stages.pp, "vpp": block.stages.vpp}
            shape["schedule"] = block.stages.schedule if block.stages.pp > 1 else ""
            for name, value in shape.items():
                dtype = object if isinstance(value, str) else None
                lists.setdefault(name, []).append(np.full(size, value, dtype=dtype))
            texts = np.array([kind(choice.form(1)) for choice in block.choices], dtype=object)
            lists.setdefault("recompute", []).append(texts[of.choice])
            for name in ("value", "step_s", "held_bytes"):
                lists.setdefault(name, []).append(getattr(of, name))
        return {name: np.concatenate(columns) for name, columns in lists.items()}

    @cached_property
    def _places(self) -> tuple[Any, Any, Any]:
        """For every layout that may fit: value, bytes, and its block and position there."""
        import numpy as np

        if not self.found:
            empty = np.zeros(0)
            return empty, empty, np.zeros((0, 2), dtype=int)
        value, memory = (np.concatenate([getattr(of, n) for of in self.found]) for n in ("value", "held_bytes"))
        sizes = [len(of.row) for of in self.found]
        place = [np.stack([np.full(size, i), np.arange(size)], axis=-1) for i, size in enumerate(sizes)]
        return value, memory, np.concatenate(place)

    @property
    def several_schedules(self) -> bool:
        """Whether layouts differ in more of their schedule than their chunks."""
        return any(of.block.stages.said is not None for of in self.found)

    @property
    def ranking(self) -> tuple[Any, Any]:
        """The objective's value of every layout that may fit, and its position for `estimated`."""
        value, _, places = self._places
        return value, places

    def fewest(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a layout's changes that have an effect."""
        return fewest(self.plan, changes, said=self.asked.said)

    def estimated(self, place: Sequence[int]) -> Layout | None:
        """One layout, estimated; None where it does not fit after all."""
        at = int(place[0]), int(place[1])
        if at not in self._estimated:
            of = self.found[at[0]]
            changes = {**of.extra, **of.block.changes(int(of.choice[at[1]]), int(of.row[at[1]]))}
            self._estimated[at] = self.layout(changes)
        return self._estimated[at]

    def layout(self, changes: Mapping[str, Any], *, fitting: bool = True) -> Layout | None:
        """A layout from its changes; None where it does not fit."""
        tried = Candidate(self.plan.replace(**(mine := self.fewest(changes))))
        if fitting and not tried.peaks.fits:
            return None
        result = Estimate(tried.job, tried.assembly, tried.timing, tried.peaks)  # equals that of `estimate`
        return Layout(mine, result, ranked(result, self.asked.objective))

    def top(self, n: int = 10) -> list[Layout]:
        """The best layouts by the objective, estimated, best first."""
        import numpy as np

        value, _, places = self._places
        order = np.argsort(value, kind="stable")
        return self._first(value, places, order, n)

    def _first(self, value: Any, places: Any, order: Any, n: int) -> list[Layout]:
        """The first `n` layouts of an order that fit; those that the screen calls nearly as good are estimated, too."""
        kept: list[Layout] = []
        extra = 0
        for i in order:
            if len(kept) >= n:
                worst = sorted(layout.value for layout in kept)[n - 1]
                if value[i] > worst * (1.0 + SLACK) or extra >= max(5, n // 2, 15 - n):
                    break
                extra += 1
            layout = self.estimated(places[i])
            if layout is not None:
                kept.append(layout)
        return sorted(kept, key=lambda layout: (layout.value, layout.held_bytes))[:n]

    def pareto(self) -> list[Layout]:
        """Layouts that no other one beats in both memory and the objective, best first; of a long front a selection."""
        _, _, places = self._places
        corner_layouts = [layout for i in shown(self._corners) if (layout := self.estimated(places[i])) is not None]
        return _front([*corner_layouts, *self.top(1)])

    @cached_property
    def _corners(self) -> Any:
        value, memory, _ = self._places
        return corners(value, memory)

    @property
    def front_size(self) -> int:
        """Layouts of the whole front as screened; `pareto` estimates a selection of a long one."""
        return int(self._corners.size)

    def best_of(self, name: str, most: int = 100) -> list[tuple[Any, Layout]]:
        """The best layout for each value of an axis, the others free: of the `most` best values, by value."""
        import numpy as np

        value, _, places = self._places
        if self.found and name not in self.columns:
            raise ConfigError(f"best_of: no axis {name!r}{near(name, self.columns)}")
        column = self.columns[name] if self.found else np.zeros(0)
        ones, which = np.unique(column, return_inverse=True)
        least = np.full(ones.size, np.inf)
        np.minimum.at(least, which, value)
        found = []
        for i in sorted(np.argsort(least, kind="stable")[:most]):
            rows = np.flatnonzero(which == i)
            first = rows[np.argsort(value[rows], kind="stable")[:NEAR]]
            best = self._first(value, places, first, 1)
            found += [(_plain(ones[i]), layout) for layout in best]
        return found

    @cached_property
    def tied(self) -> tuple[int, Layout | None]:
        """How many layouts are tied with the best (`ratio_interval`), and of these the one that needs least memory."""
        import numpy as np

        best = self.best
        if best is None or self.asked.objective == "memory":
            return 0, None
        value, memory, places = self._places
        plans = {id(of.plan): of.plan for of in self.found}  # one for each value of `over`
        within = {key: exp(tied_within(best.job, plan)) for key, plan in plans.items()}
        ends = [best.value * within[id(of.plan)] for of in self.found]
        rows = np.flatnonzero(value <= np.repeat(ends, [len(of.row) for of in self.found]))
        if rows.size < 2:
            return max(0, rows.size - 1), None
        order = rows[np.argsort(memory[rows], kind="stable")[:20]]
        return rows.size - 1, next((x for i in order if (x := self.estimated(places[i])) is not None), None)

    def to_frame(self) -> Any:
        """`columns` as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame(self.columns)

    def __repr__(self) -> str:
        """One line: what was searched, and the best."""
        first = f"best {self.best.step_s:,.4g} s a step" if self.best else "nothing fits"
        return f"<Search of {counted(self.counts.points, 'layout')}, {self.counts.fitting:,} fit: {first}>"

    def _repr_html_(self) -> str | None:
        """HTML tables for a notebook, where `report.search_tables` is loaded."""
        draw = type(self).draw
        return draw(self) if draw else None


NEAR = 20
"""Number of layouts tried where the first does not fit after all."""


def _plain(value: Any) -> Any:
    """A numpy value as a plain one, whole numbers without a point."""
    one = value.item() if hasattr(value, "item") else value
    return int(one) if isinstance(one, float) and one.is_integer() else one


def _front(layouts: Sequence[Layout]) -> list[Layout]:
    """Those that none before them beats in memory, best first."""
    kept: list[Layout] = []
    for layout in sorted(layouts, key=lambda layout: (layout.value, layout.held_bytes)):
        if not kept or layout.held_bytes < kept[-1].held_bytes:
            kept.append(layout)
    return kept
