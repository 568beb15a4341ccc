"""`3dtrn diff A B ...`: plans, launch files or training logs side by side."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.commands import log_command, outputs, plan_defaults
from steptime.commands.compared_jobs import ComparedJob, notes_of, read_jobs
from steptime.commands.console import Printer
from steptime.report.diff_tables import diff as compare
from steptime.report.diff_tables import diff_many, letter
from steptime.report.output_files import write_file
from steptime.report.table import document
from steptime.validation.log_file import is_log

if TYPE_CHECKING:
    from steptime.answer.result import Estimate
    from steptime.report.table import ReportSection


def diff(options: Namespace, out: Printer) -> int:
    """Jobs side by side; --set changes all. A training log provides its job and its measurements."""
    if len(options.files) < 2:
        one = next(iter(options.files), "A.yaml")
        raise ConfigError(f"3dtrn diff: needs two files or more; write 3dtrn diff {one} B.yaml")
    outputs.check(options)
    plan_defaults.check(options.model, options.machine, options.sets)
    named = plan_defaults.sets(options.model, options.machine, options.devices)
    options.stated, options.sets = options.sets, [*named, *options.sets]
    logs = [path for path in options.files if is_log(path)]
    if len(options.files) > 2:
        return _many(options, out, logs)
    labels = _labels(*options.files)
    if logs:
        if options.html is not None:
            raise ConfigError("--html: not for a training log")
        return log_command.diff(options, out, labels)
    jobs = read_jobs(options.files, options)
    notes = [f"{label}: {path}" for label, path in zip(labels, options.files, strict=True) if label in {"A", "B"}]
    if all(job.reading is None for job in jobs):
        both = [estimate(job.job) for job in jobs]
        return _shown(options, out, both, labels, lambda whole: compare(both, labels, notes, whole=whole))
    return _of_launch_files(options, out, jobs, labels, notes)


def _of_launch_files(
    options: Namespace, out: Printer, jobs: Sequence[ComparedJob], labels: tuple[str, str], notes: Sequence[str]
) -> int:
    """Two jobs of which at least one is a launch file: also what each difference costs, and flags that no plan has."""
    from steptime.report.setting_tables import costs
    from steptime.validation.setting_costs import differences

    found = differences(*(job.job for job in jobs))
    notes = [*notes, *notes_of(jobs, labels, (found.a, found.b))]

    def sections(whole: bool) -> list[ReportSection]:
        changed, *rest = compare((found.a, found.b), labels, notes, whole=whole)
        return [changed, *([costs(found, labels)] if found.each else []), *rest]

    return _shown(options, out, (found.a, found.b), labels, sections)


def _shown(
    options: Namespace,
    out: Printer,
    found: Sequence[Estimate],
    labels: Sequence[str],
    sections: Callable[[bool], Sequence[ReportSection]],
) -> int:
    """Write the page of `--html`, then print. `sections`: the comparison, with long settings in full or cut to the terminal."""
    if options.html is not None:
        from steptime.report.page.diff_page import page

        write_file("--html", options.html, page(found, labels, sections(True)).encode("utf-8"))
    out.answer(lambda: document(sections(True)), lambda: sections(False))
    return 0


def _many(options: Namespace, out: Printer, logs: Sequence[str]) -> int:
    """Three jobs or more, one column each."""
    paths = options.files
    if logs:
        raise ConfigError(f"{logs[0]}: a training log is compared with one plan or log; give two files")
    jobs = read_jobs(paths, options)
    found = [estimate(job.job) for job in jobs]
    letters = [letter(i) for i in range(len(paths))]
    labels = [f"{name}: {path}" for name, path in zip(letters, paths, strict=True)]
    notes = notes_of(jobs, letters, found)
    return _shown(options, out, found, labels, lambda whole: diff_many(found, paths, notes, whole=whole))


def _labels(a: str, b: str) -> tuple[str, str]:
    """Short names for two paths: their file names where these differ and are short, else A and B."""
    names = tuple(path.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml") for path in (a, b))
    if names[0] == names[1] or max(map(len, names)) > 20:
        return "A", "B"
    return names[0], names[1]
