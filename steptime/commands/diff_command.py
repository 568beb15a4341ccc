"""`3dtrn diff A B ...`: plans or training logs side by side."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.commands import log_command, outputs
from steptime.commands.console import Printer, load
from steptime.report.diff_tables import diff as compare
from steptime.report.diff_tables import diff_many, letter
from steptime.report.output_files import write_file
from steptime.report.table import document
from steptime.validation.log_file import is_log

if TYPE_CHECKING:
    from steptime.answer.result import Estimate
    from steptime.report.table import ReportSection


def diff(options: Namespace, out: Printer) -> int:
    """Two configs side by side; --set changes both. A training log provides its job and its measurements."""
    if len(options.files) < 2:
        one = next(iter(options.files), "A.yaml")
        raise ConfigError(f"3dtrn diff: needs two files or more; write 3dtrn diff {one} B.yaml")
    outputs.check(options)
    if len(options.files) > 2:
        return _many(options, out)
    a, b = options.files
    if options.html is not None and (is_log(a) or is_log(b)):
        raise ConfigError("--html: not for a training log")
    if is_log(a) or is_log(b):
        return log_command.diff(options, out, _labels(a, b))
    log_command.refuse({"from": options.kind, "allow-unmodeled": options.allow_unmodeled}, "only with a training log")
    both = estimate(load(a, options.sets)), estimate(load(b, options.sets))
    labels = _labels(a, b)
    notes = [f"{label}: {path}" for label, path in zip(labels, (a, b), strict=True) if label in {"A", "B"}]
    return _shown(options, out, both, labels, lambda whole: compare(both, labels, notes, whole=whole))


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


def _many(options: Namespace, out: Printer) -> int:
    """Three or more plans, one column each."""
    paths = options.files
    if logs := [path for path in paths if is_log(path)]:
        raise ConfigError(f"{logs[0]}: a training log is compared with one plan or log; give two files")
    if options.kind is not None or options.allow_unmodeled:
        raise ConfigError("--from and --allow-unmodeled: only with a training log")
    found = [estimate(load(path, options.sets)) for path in paths]
    labels = [f"{letter(i)}: {path}" for i, path in enumerate(paths)]
    return _shown(options, out, found, labels, lambda whole: diff_many(found, paths, whole=whole))


def _labels(a: str, b: str) -> tuple[str, str]:
    """Short names for two paths: their file names where these differ and are short, else A and B."""
    names = tuple(path.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml") for path in (a, b))
    if names[0] == names[1] or max(map(len, names)) > 20:
        return "A", "B"
    return names[0], names[1]
