"""`3dtrn search PLAN`: the best layouts of a job, for a number of devices."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from steptime.base.config import ConfigError, closest
from steptime.base.document import parse
from steptime.commands import outputs, plan_defaults
from steptime.commands.console import Printer
from steptime.commands.search_plan import SearchPlan, numbers, plan_of, unplanned_search
from steptime.job.limits import NOT_MODELED
from steptime.job.names import meant_path
from steptime.launch.plan_yaml import plan_yaml
from steptime.report.output_files import write_file
from steptime.report.progress import ProgressLine
from steptime.schedule import SCHEDULES
from steptime.search.fastest import fastest
from steptime.search.run import run
from steptime.search.search import Asked, Search
from steptime.search.space import AXES, Axes

INTERRUPTED = 130
RECOMPUTE = ("performance.activation_checkpointing_type", "performance.recompute")
"""Keys whose values replace the usual recomputation settings."""
NOT_HERE = {
    "data.gbs": "use --gbs",
    "hardware.node_type": "use --machine",
    "devices": "use --devices",
    "parallelism.microbatch_group_sz": "it follows from the layout",
    "parallelism.pipeline_passes": "layouts run their whole batch in one pass",
    "parallelism.layers_per_stage": "it follows from the layout",
    "parallelism.embedding_and_loss_count_as_layers": "it follows from the layout",
}
"""Keys that cannot be axes here, with the reason."""


def search(options: Namespace, out: Printer) -> int:
    """The tables, JSON or CSV of a search; 1 where nothing fits, 130 where it was interrupted."""
    outputs.check(options)
    if options.save is not None:
        outputs.check_save(options.save)
    try:
        for machine in options.machine or [None]:
            plan_defaults.known(options.model, machine)
        if options.config is None:
            plan = unplanned_search(options)
        else:
            plan = plan_of(options.config, [*plan_defaults.sets(options.model, None, None), *options.sets])
    except ConfigError as error:
        raise ConfigError([*error.problems, *_chosen(options, {}, {})]) from None
    asked = asked_of(options, plan)
    with ProgressLine(sys.stderr, "searched") as line:
        found = run(plan.job, asked, lambda share: line.told("layouts", share))
    _print(found, options, out)
    if found.best is not None and options.save is not None:
        outputs.write_new(options.save, plan_yaml(found.best.job), f"--save {options.save}")
    if found.interrupted:
        return INTERRUPTED
    return 0 if found.best is not None else 1


def _print(found: Search, options: Namespace, out: Printer) -> None:
    from steptime.report import search_tables

    if options.json:
        out.json(search_tables.document(found, options.top))
    elif options.csv:
        out.text(search_tables.csv_text(found, options.top))
    elif options.pareto:
        out.sections(search_tables.front_sections(found))
    else:
        out.sections(search_tables.sections(found, options.top))
    if options.plot is not None and found.best is not None:
        from steptime.report import search_plot

        search_plot.draw(found, options.plot)
    if options.html is not None:
        from steptime.report.page.search_page import page

        write_file("--html", options.html, page(found, options.top).encode("utf-8"))


def asked_of(options: Namespace, plan: SearchPlan) -> Asked:
    """The search that the options describe.

    Raises:
        ConfigError: one line per problem.
    """
    problems = _undecided(plan)
    axes: dict[str, tuple[Any, ...]] = dict(plan.fixed)
    over: dict[str, list[Any]] = {}
    problems += _chosen(options, axes, over)
    if options.machine:
        over["hardware.node_type"] = list(options.machine)
    counts = numbers("--devices", options.devices, problems)
    if not counts and options.devices is None:
        counts = [plan.devices] if plan.devices else []
        if not counts:
            problems.append("--devices: the plan states none; give the number of devices")
    plan_defaults.check_devices(counts, plan.devices, options.sets)
    batches = numbers("--gbs", options.gbs, problems) or [plan.job.data.gbs]
    if problems:
        raise ConfigError(problems)
    return Asked(counts, batches, Axes(axes), over, options.objective, plan.said, plan.command)


def _chosen(options: Namespace, axes: dict[str, tuple[Any, ...]], over: dict[str, list[Any]]) -> list[str]:
    """Assign the values of --fix and --over to their axes; returns the problems."""
    problems: list[str] = []
    asked: set[str] = set()
    for option, texts, several in (("--fix", options.fix, False), ("--over", options.over, True)):
        for text in texts:
            try:
                key, values = _values(option, text, several=several)
            except ConfigError as error:
                problems += error.problems
                continue
            problems += _place(option, text, key, values, axes, over, asked)
    return problems


def _undecided(plan: SearchPlan) -> list[str]:
    """The problems of settings that follow from the layout where the plan has none."""
    why = {"performance.recompute": "its list of n_layers has one number per stage or chunk of the layout"} | NOT_HERE
    return [f"{key}: {why[key]}, which the plan does not state in full; remove it" for key in plan.kept]


def _values(option: str, text: str, *, several: bool) -> tuple[str, list[Any]]:
    """The key and the values of `k=v` or `k=a,b`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(f"{option} {text}: expected {'a.b=value,value' if several else 'a.b=value'}")
    found = parse(f"[{value}]", f"{option} {key}")
    if not isinstance(found, list) or (not several and len(found) != 1):
        raise ConfigError(f"{option} {text}: expected one value; use --over for several")
    return key.strip(), found


def _place(
    option: str,
    text: str,
    key: str,
    values: Sequence[Any],
    axes: dict[str, tuple[Any, ...]],
    over: dict[str, list[Any]],
    asked: set[str],
) -> Iterable[str]:
    """Assign values to their axes; returns the problems."""
    name = key.rpartition(".")[2] if key in AXES.values() else key
    if key in NOT_HERE:
        return [f"{option} {text}: {NOT_HERE[key]}"]
    if name in AXES:
        allowed, expected = _allowed(name)
        bad = [value for value in values if not allowed(value)]
        if bad:
            hint = NOT_MODELED.get(f"{AXES[name]}={bad[0]}", "")
            return [f"{option} {text}: expected {expected} (got {bad[0]!r}){f'; {bad[0]}: {hint}' if hint else ''}"]
        if name in asked:
            return [f"{option} {text}: {name} is given twice; put all values in one --over"]
        asked.add(name)
        axes[name] = tuple(dict.fromkeys(values))
        return []
    if key in RECOMPUTE or key in {"activation_checkpointing_type", "recompute"}:
        axes[key if "." in key else f"performance.{key}"] = tuple(values)
        return []
    if "." not in key:
        meant = meant_path(key).rpartition(".")[2]
        meant = meant if meant in AXES else closest(key, AXES)
        valid = f"one of {', '.join(AXES)}, or a dotted key such as performance.precision"
        return [f"{option} {text}: no axis {key!r}; {f'did you mean {meant!r}?' if meant else valid}"]
    over[key] = list(values)
    return []


def _allowed(name: str) -> tuple[Callable[[Any], bool], str]:
    """The valid values of an axis, as a test and in words."""
    if name == "sp":
        return lambda value: type(value) is bool, "true or false"
    if name == "schedule":
        return lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}"
    least = 0 if name == "zero_level" else 1
    return lambda value: type(value) is int and value >= least, f"whole numbers of at least {least}"


def scale_best(options: Namespace, out: Printer) -> int:
    """The best layout of every size for the plan's own batch; sizes that cannot hold it are marked. 1 where none can."""
    from steptime.report import scaling_tables

    if not options.best or options.plot is not None:
        raise ConfigError("--devices: only with --best" if not options.best else "--plot: not with --best")
    plan = plan_of(options.config, options.sets)
    problems = _undecided(plan)
    sizes = numbers("--devices", options.devices, problems)
    if problems:
        raise ConfigError(problems)
    if not sizes and not plan.devices:
        raise ConfigError("--devices: the plan states none; give the number of devices")
    sizes = sizes or [(plan.devices or 1) * factor for factor in (1, 2, 4, 8)]
    found: list[tuple[int, Search | str]] = []
    with ProgressLine(sys.stderr, "searched") as line:
        for at, size in enumerate(sizes):
            asked = Asked((size,), (plan.job.data.gbs,), Axes(plan.fixed), said=plan.said)
            try:
                found.append((size, fastest(plan.job, asked)))
            except ConfigError as error:
                found.append((size, error.problems[0].removeprefix("search: ")))
            line.told("sizes", (at + 1) / len(sizes))
    out.answer(
        lambda: {"sizes": scaling_tables.best_rows(found)}, lambda: [scaling_tables.best_of_each(plan.job, found)]
    )
    return 0 if any(isinstance(one, Search) and one.best for _, one in found) else 1
