"""The answer of a search: the best layout beside the plan, what is tied with it, and what was searched."""

from __future__ import annotations

from math import exp

from steptime.answer.ratio_interval import layouts_within
from steptime.answer.whole_run import price
from steptime.base.words import counted
from steptime.job.sections import Run
from steptime.report.format import percent, seconds
from steptime.report.headline import interval
from steptime.report.layout_rows import figures, lines, shape, varied
from steptime.report.table import Fact, FactList
from steptime.search.search import Layout, Search
from steptime.search.standing import COMPARED, Standing, standing

SHARED = {"hardware.node_type", "performance.precision", "performance.software"}
"""Keys in which two layouts share less of their error (`ratio_interval`)."""


def answer(found: Search, best: Layout) -> FactList:
    """The winner next to the given plan, the layouts tied with it, and what was searched."""
    by = found.asked.objective
    where = ", ".join(f"{name} {value}" for name, value in varied(found, best.job).items())
    name = "best so far" if found.interrupted else "best"
    mine = [*([where] if where else []), figures(best, by), shape(best), *interval(best.estimate, runs=False)]
    facts = [Fact(name, mine, "good")]
    paid = price(best.job, best.job.run or Run.model_validate({})) if by == "cost" else None
    if paid is not None and paid[0]:
        facts.append(Fact("price", [f"{paid[0]:g} per device-hour ({paid[1]})"]))
    if found.given is not None:
        given = Layout({}, found.given, 0.0)
        facts.append(Fact("the plan", [figures(given, by), shape(given), *interval(found.given, runs=False)]))
        facts.append(
            Fact("difference", [difference(found, best), *filter(None, [STANDINGS[standing(found) or "best"]])])
        )
    facts.append(Fact("change", lines(best.changes, 54) or ["none: the plan is the best"]))
    count, least = found.tied
    if count:
        facts.append(Fact("tied", [f"{counted(count, 'other layout')}, {_tied(found)}"]))
        if least is not None and least.held_bytes < best.held_bytes:
            facts.append(Fact("tied, least GiB", [figures(least, by), *lines(least.changes, 54)]))
    counts = found.counts
    looked = f"{counted(counts.points, 'layout')}: {counts.evaluated:,} can run, {counts.fitting:,} fit"
    looked += f"; {found.seconds:.2f} s" + (", interrupted" if found.interrupted else "")
    facts.append(Fact("searched", [looked]))
    return FactList(title(found), facts)


def _tied(found: Search) -> str:
    """What tied means, in one clause."""
    more = " (more on another machine or in another precision)" if set(found.asked.over) & SHARED else ""
    within = percent(exp(layouts_within()) - 1.0)
    return f"up to {within} slower{more}: what 80 % of measured pairs of layouts leave open"


STANDINGS: dict[Standing, str] = {
    "best": "",
    "within the error": f"the plan is as good: two layouts are compared with a median error of {100.0 * COMPARED:.0f} %",
    "tied": "the plan is among the tied",
    "slower": "",
    "does not fit": "",
}
"""How the plan stands beside the best layout, where the figures alone do not say it."""


def title(found: Search) -> str:
    """What was searched, in one line."""
    job, asked = found.plan, found.asked
    devices = ", ".join(f"{n:,}" for n in asked.devices[:-1]) + ", " * (len(asked.devices) > 1)
    devices += counted(asked.devices[-1], "device")
    machines = ", ".join(asked.over.get("hardware.node_type", ()) or [job.machine.name])
    batch = ", ".join(f"{n:,}" for n in asked.gbs)
    by = "" if asked.objective == "step" and len(asked.gbs) == 1 else f"; by {found.unit}"
    return f"{job.model.name or 'unnamed model'} on {devices} of {machines}, gbs {batch} x {job.data.seqlen:,}{by}"


def difference(found: Search, best: Layout) -> str:
    """The gain of the best layout over the plan."""
    given = found.given
    assert given is not None
    mine, theirs = best.estimate, given
    if best.job.data.gbs == given.job.data.gbs and mine.devices == theirs.devices:
        saved = theirs.step_s - mine.step_s
        share = percent(mine.step_s / theirs.step_s - 1.0, signed=True)
        return f"{seconds(abs(saved))} {'less' if saved >= 0 else 'more'} per step ({share})" if saved else "none"
    each = mine.throughput.tokens_per_s_per_device / theirs.throughput.tokens_per_s_per_device
    return f"{percent(each - 1.0, signed=True)} tokens/s/device; the plan has {counted(theirs.devices, 'device')}"
