"""`3dtrn explain`: a figure with its formula, a measured row with its derivation, a trace compared with the estimate."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.commands.console import Printer, load
from steptime.model.presets import model_names

if TYPE_CHECKING:
    from steptime.job.job import Job
    from steptime.validation.measurements import MeasuredRow


def explain(options: Namespace, out: Printer) -> int:
    """The formula of one name, or the list of names; for a measured row without a name, its full derivation."""
    from steptime.answer.result import estimate
    from steptime.report import explain as working
    from steptime.report.table import document
    from steptime.validation.select import find

    if options.key is not None:
        return _explain_key(options, out)
    if options.config is None:
        raise ConfigError("explain: a PLAN, the id of a measured row, or --key is required")
    name = options.config
    if name in model_names() and not Path(name).exists():
        raise ConfigError(f"{name}: a model preset, not a PLAN; 3dtrn init --model {name} writes a plan")
    row = find(options.config, options.measurements)
    if row is None and options.config != "-":
        _check_file(options.config)
    if row is not None and options.sets:
        raise ConfigError(
            f"--set: not valid for a measured row; 3dtrn explain {row.id} --yaml prints its plan, which you can change"
        )
    if options.trace:
        return _explain_trace(_row_job(row) if row is not None else load(options.config, options.sets), options, out)
    if row is not None and (options.yaml or options.name is None):
        return _explain_row(row, options, out)
    if options.yaml:
        raise ConfigError("--yaml: only for a measured row; a plan is YAML already")
    found = estimate(_row_job(row) if row is not None else load(options.config, options.sets))
    if options.name is None:
        names = working.names(found)
        if options.json:
            out.json({"names": names})
        else:
            out.text("\n".join(names) + "\n")
        return 0
    try:
        sections = list(working.explain(found, options.name))
    except working.UnknownNameError as error:
        raise ConfigError(str(error)) from None
    out.answer(lambda: document(sections), lambda: sections)
    return 0


def _check_file(name: str) -> None:
    """Raise where a name is neither a file's nor a plan's text, and no measured run has it, with what may stand there.

    Raises:
        ConfigError: one line.
    """
    if re.fullmatch(r"[\w@+-]+", name) and not Path(name).exists():
        ids = "3dtrn validate --json lists them"
        raise ConfigError(
            f"{name}: no such file, and no measured run has that id; give a PLAN, or the id of a run ({ids})"
        )


def _explain_key(options: Namespace, out: Printer) -> int:
    """The values and meaning of one key of a plan, or of all keys below it."""
    from steptime.base.config import near
    from steptime.job.names import meant_path
    from steptime.report.plan_keys import keys, page

    every = keys()
    path = options.key if any(key.path == options.key for key in every) else meant_path(options.key)
    found = (
        [key for key in every if key.path == path or key.path.startswith((f"{path}.", f"{path}[]."))] if path else []
    )
    if not found:
        meant = near(options.key, [key.path for key in every])
        tops = dict.fromkeys(key.path.partition(".")[0] for key in every)
        sections = f"; 3dtrn explain --key SECTION lists its keys: {', '.join(tops)}"
        raise ConfigError(f"--key {options.key}: not a key of a plan{meant if 'did you mean' in meant else sections}")
    out.answer(lambda: [key._asdict() for key in found], lambda: page(found))
    return 0


def _explain_trace(job: Job, options: Namespace, out: Printer) -> int:
    """A profiler's trace sorted into the parts of the estimate, and compared with it."""
    from steptime.answer.result import estimate
    from steptime.bench.profiler_trace.attribution import attribute
    from steptime.bench.profiler_trace.events import read_all
    from steptime.report import trace_tables as view

    if options.name is not None or options.yaml:
        raise ConfigError(f"--trace: not together with {'--yaml' if options.yaml else options.name}")
    predicted = estimate(job).time
    found = attribute(read_all(options.trace), job, predicted)
    out.answer(lambda: view.to_dict(found, predicted), lambda: view.sections(found, predicted))
    return 0


def _row_job(row: MeasuredRow) -> Job:
    """The job of a measured row.

    Raises:
        ConfigError: the row is skipped; the reason.
    """
    from steptime.validation.measurements import SkipRowError
    from steptime.validation.row_plan import to_config, to_job

    try:
        return to_job(to_config(row))
    except SkipRowError as problem:
        raise ConfigError(f"{row.id}: {problem}") from None


def _explain_row(row: MeasuredRow, options: Namespace, out: Printer) -> int:
    """A row as measured, the resulting config, prediction and measurement, and everything that the prediction uses."""
    from steptime.answer.result import estimate
    from steptime.report import row_tables as view
    from steptime.report.table import document
    from steptime.validation.judgement import judge

    if options.yaml:
        _row_job(row)  # raises where the row has none
        out.text(view.config_yaml(row))
        return 0
    judged = judge(row)
    if options.json:
        plan = {} if judged.config is None else {"config": judged.config}
        predicted = [] if judged.config is None else view.predicted(judged, estimate(_row_job(row)))
        out.json(document([*view.published(judged), *predicted]) | plan)
        return 0
    out.sections(view.published(judged))
    if judged.config is not None:
        out.text(f"\nthe resulting config\n{indent(view.config_yaml(row), '  ')}\n")
        out.sections(view.predicted(judged, estimate(_row_job(row))))
    return 0
