"""What each subcommand does: load, estimate, print, answer with an exit code. Imported once a command line is parsed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from steptime.config import ConfigError
from steptime.report.table import Section, Style, layout, wants_color

if TYPE_CHECKING:
    from argparse import Namespace

    from steptime.job import Job
    from steptime.validation.measurements import Row


TIGHT = "tight: fits as allocated; not as the allocator reserves, or not in one run of ten"


class Printer:
    """Standard output with its style: never a character that the terminal's encoding cannot hold, quiet when closed."""

    def __init__(self, color: str, *, ascii_only: bool) -> None:
        encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
        tty = bool(getattr(sys.stdout, "isatty", bool)())
        self.style = Style(wants_color(color, tty=tty), ascii_only or not encoding.startswith("utf"))

    def text(self, text: str) -> None:
        """Print text that brings its own line end."""
        try:
            sys.stdout.write(self.style.fold(text))
            sys.stdout.flush()
        except BrokenPipeError:
            _abandon_stdout()
        except OSError as error:  # a full disk
            _abandon_stdout()
            raise ConfigError(f"standard output: cannot be written ({error.strerror})") from None

    def sections(self, sections: list[Section]) -> None:
        """Print sections with an empty line between."""
        self.text("\n\n".join("\n".join(layout(section, self.style)) for section in sections) + "\n")

    def json(self, document: Any) -> None:
        """Print a JSON document; a figure that JSON has no number for is an error of ours, not an output."""
        import json

        self.text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def load(source: str, sets: list[str]) -> Job:
    """The job of a config, its problems led by the file's name.

    Raises:
        ConfigError: `plan.yaml: parallelism.tpp: ...`, one line per problem.
    """
    from steptime.job import Job

    label = "standard input" if source == "-" else source
    # bytes of the command line that are no UTF-8 arrive as lone surrogates, which nothing downstream can encode
    sets = [setting.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for setting in sets]
    try:
        return Job.load(source, sets=sets)
    except ConfigError as error:
        raise ConfigError(p if p.startswith(label) else f"{label}: {p}" for p in error.problems) from None


def report(options: Namespace, out: Printer) -> int:
    """The report of one config, or its JSON; the check."""
    from steptime.step import estimate

    job = load(options.config, options.sets)
    if options.calibrate is not None:
        from steptime.validation.calibrate import calibrated

        job = calibrated(job, options.calibrate)
    found = estimate(job)
    refusals = []
    if (options.check or options.min_mfu is not None) and not found.memory.fits:
        refusals.append(TIGHT if found.memory.verdict == "tight" else "does not fit")
    if options.min_mfu is not None and found.throughput.mfu < options.min_mfu:
        refusals.append(f"MFU {100 * found.throughput.mfu:.1f} % is below {100 * options.min_mfu:g} %")
    if options.json:
        out.json(found.to_dict())
    else:
        from steptime.report import text

        out.text(text.report(found, out.style, brief=options.brief))
    sys.stderr.writelines(f"check: {refusal}\n" for refusal in refusals)
    return 1 if refusals else 0


def scale(options: Namespace, out: Printer) -> int:
    """Weak scaling as the estimate has it, and strong scaling at the config's own batch."""
    from steptime.report import scaling
    from steptime.step import estimate

    found = estimate(load(options.config, options.sets))
    weak, strong = found.weak_scaling, scaling.strong_scaling(found.job, estimate)
    if options.json:
        out.json({"weak_scaling": [row._asdict() for row in weak], "strong_scaling": [row._asdict() for row in strong]})
    else:
        out.sections([scaling.weak_table(found), scaling.strong_table(found, strong)])
    return 0


def diff(options: Namespace, out: Printer) -> int:
    """Two configs side by side; --set changes both. A training log stands for its job, and for what it measured."""
    from steptime import log_commands
    from steptime.report.compare import diff as compare
    from steptime.step import estimate
    from steptime.validation.kind import is_log

    if is_log(options.a) or is_log(options.b):
        return log_commands.diff(options, out, load, _labels(options.a, options.b))
    log_commands.refuse(
        {"from": options.kind, "allow-unmodelled": options.allow_unmodelled}, "goes with a training log"
    )
    a, b = (load(path, options.sets) for path in (options.a, options.b))
    labels = _labels(options.a, options.b)
    notes = [
        f"{label}: {path}" for label, path in zip(labels, (options.a, options.b), strict=True) if label in {"A", "B"}
    ]
    out.sections(list(compare(estimate(a), estimate(b), labels, notes)))
    return 0


def _labels(a: str, b: str) -> tuple[str, str]:
    """Short names for two paths: their file names where these differ and are short, else A and B."""
    names = tuple(path.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml") for path in (a, b))
    if names[0] == names[1] or max(map(len, names)) > 20:
        return "A", "B"
    return names[0], names[1]


def explain(options: Namespace, out: Printer) -> int:
    """One name's working, or the names there are; of a measured row its whole way, where no name is asked for."""
    from steptime.report import explain as working
    from steptime.step import estimate
    from steptime.validation.find import find

    row = find(options.config, options.measurements)
    if row is not None and options.sets:
        raise ConfigError(f"--set: not for a measured row; 3dtrn explain {row.id} --yaml prints a config to change")
    if row is not None and (options.yaml or options.name is None):
        return _explain_row(row, out, only_yaml=options.yaml)
    if options.yaml:
        raise ConfigError("--yaml: for a measured row; a config is YAML already")
    found = estimate(_row_job(row) if row is not None else load(options.config, options.sets))
    if options.name is None:
        out.text("\n".join(working.names(found)) + "\n")
        return 0
    try:
        out.sections(list(working.explain(found, options.name)))
    except working.UnknownNameError as error:
        raise ConfigError(str(error)) from None
    return 0


def _row_job(row: Row) -> Job:
    """The job of a measured row.

    Raises:
        ConfigError: the row is skipped; the reason.
    """
    from steptime.validation.measurements import SkipRowError
    from steptime.validation.rows import to_config, to_job

    try:
        return to_job(to_config(row))
    except SkipRowError as problem:
        raise ConfigError(f"{row.id}: {problem}") from None


def _explain_row(row: Row, out: Printer, *, only_yaml: bool) -> int:
    """A row as measured, the config it became, prediction beside measurement, and all that the prediction rests on."""
    from steptime.report import row as view
    from steptime.step import estimate
    from steptime.validation.compare import judge

    if only_yaml:
        _row_job(row)  # raises where there is none
        out.text(view.config_yaml(row))
        return 0
    judged = judge(row)
    out.sections(view.published(judged))
    if judged.config is not None:
        out.text(f"\nthe config it became\n{view.indented(view.config_yaml(row))}\n")
        out.sections(view.predicted(judged, estimate(_row_job(row))))
    return 0


def validate(options: Namespace, out: Printer) -> int:
    """Measured runs beside their estimates; bad input only where no row could be judged."""
    from steptime import log_commands

    if options.log:
        return log_commands.validate(options, out)
    log_commands.refuse_without_log(options)
    from steptime.report import validation as report_validation
    from steptime.validation.parallel import judge_rows
    from steptime.validation.select import select
    from steptime.validation.summary import summarise

    if options.plot is not None:
        from steptime.report import plot

        plot.check(options.plot)
    rows = select(options.measurements, options.source, options.gpu, options.split)
    judged = judge_rows(rows, known_release=options.profile == "known")
    if options.measurements:
        sys.stderr.writelines(
            f"{options.measurements}: line {j.row.line}, {j.row.id}: {j.skipped}\n" for j in judged if j.skipped
        )
    summary = summarise(judged, options.worst)
    if options.plot is not None:
        from steptime.report import plot

        plot.draw(judged, options.plot)
    if options.json:
        out.json({"summary": summary, "rows": [j.to_dict() for j in judged]})
    else:
        own = report_validation.each(j.to_dict() for j in judged) if options.measurements else []
        out.sections([*own, *report_validation.sections(summary)])
    return 0 if summary["judged"] else 2


def machines(options: Namespace, out: Printer) -> int:
    """The table of shipped machines."""
    from steptime.report import catalogue

    del options
    out.sections([catalogue.machines()])
    return 0


def models(options: Namespace, out: Printer) -> int:
    """The table of model presets."""
    from steptime.report import catalogue

    del options
    out.sections([catalogue.models()])
    return 0


def show(options: Namespace, out: Printer) -> int:
    """One machine, model or profile as YAML."""
    from steptime.report import catalogue

    out.text(catalogue.show(options.name))
    return 0


def schema(options: Namespace, out: Printer) -> int:
    """JSON Schema of a config file."""
    from steptime.report import catalogue

    del options
    out.json(catalogue.schema())
    return 0


def _abandon_stdout() -> None:
    """Nobody reads any more (`3dtrn x | head -1`): the rest, and the interpreter's own last flush, go nowhere."""
    with suppress(OSError, ValueError):  # where stdout is a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
