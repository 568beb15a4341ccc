"""`3dtrn validate --log`, and `3dtrn diff` where one side is a training log."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.commands import plan_defaults
from steptime.commands.compared_jobs import ComparedJob, notes_of, read_jobs
from steptime.commands.console import Printer

if TYPE_CHECKING:
    from steptime.job.sections import Hardware
    from steptime.validation.logged import LoggedRun


def validate(options: Namespace, out: Printer) -> int:
    """One job's training logs: its plan, measured vs. predicted; optionally saved as a row of a CSV.

    Raises:
        ConfigError: one line per problem.
    """
    from steptime.report import log_tables
    from steptime.validation.logged import compare

    rows_only = {name: getattr(options, name) for name in ("measurements", "source", "gpu", "plot")}
    rows_only |= {"split": options.split != "all", "profile": options.profile != "known"}
    refuse(rows_only, "only for rows, not for a log")
    plan_defaults.check(None, options.machine, options.sets)
    options.sets = [*plan_defaults.sets(None, options.machine, options.devices), *options.sets]
    found = compare(run(options.log, options))
    if options.save_csv is not None:
        from steptime.validation.measurement_csv import append, cells

        name = append(cells(found), options.save_csv)
        sys.stderr.write(f"{options.save_csv}: row {name}\n")
    if options.json:
        out.json(log_tables.to_dict(found))
    else:
        out.painted(log_tables.report(found, out.style))
    return 0


def diff(options: Namespace, out: Printer, labels: tuple[str, str]) -> int:
    """Two jobs of which at least one is a log: what each difference costs, and what all of them together did cost.

    Raises:
        ConfigError: one line per problem.
    """
    from steptime.report import diff_tables, setting_tables
    from steptime.report.table import document
    from steptime.validation.log_file import is_log
    from steptime.validation.logged import compare as compare_run
    from steptime.validation.setting_costs import differences as setting_costs

    paths = options.files
    others = [path for path in paths if not is_log(path)]
    plans = dict(zip(others, read_jobs(others, options), strict=True))
    hardware = next((plan.job.hardware for plan in plans.values()), None)
    runs = {path: run([path], options, hardware) for path in paths if path not in plans}
    jobs = {path: ComparedJob(run.job, run.reading, run.notes) for path, run in runs.items()} | plans
    found = setting_costs(*(jobs[path].job for path in paths))
    notes = [f"{label}: {path}" for label, path in zip(labels, paths, strict=True) if label in {"A", "B"}]
    notes += notes_of([jobs[path] for path in paths], labels)
    a, b = (compare_run(runs[path]) if path in runs else None for path in paths)
    changed, *rest = diff_tables.diff((found.a, found.b), labels, notes)
    sections = [*setting_tables.sections(found, (a, b), labels), changed, *rest]
    out.answer(lambda: document(sections), lambda: sections)
    return 0


def run(paths: list[str], options: Namespace, hardware: Hardware | None = None) -> LoggedRun:
    """The job of training logs and their measurements, with progress on a terminal; `hardware` where none is named.

    Raises:
        ConfigError: one line per problem.
    """
    from steptime.report.progress import ProgressLine
    from steptime.validation.logged import read_run

    with ProgressLine(sys.stderr) as progress:
        return read_run(
            paths,
            options.sets,
            kind=options.kind,
            plan=getattr(options, "plan", None),
            allow_unmodeled=options.allow_unmodeled,
            hardware=hardware,
            progress=progress.told,
        )


def refuse_without_log(options: Namespace) -> None:
    """Raise for options of `3dtrn validate` that need a log.

    Raises:
        ConfigError: one line per option.
    """
    given = {"set": options.sets, "from": options.kind, "save-csv": options.save_csv, "plan": options.plan}
    given |= {"machine": options.machine, "devices": options.devices, "allow-unmodeled": options.allow_unmodeled}
    refuse(given, "only with --log")


def refuse(given: dict[str, Any], why: str) -> None:
    """Raise for options that have no meaning here.

    Raises:
        ConfigError: one line per option that is given.
    """
    if problems := [f"--{option}: {why}" for option, value in given.items() if value]:
        raise ConfigError(problems)
