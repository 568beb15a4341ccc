"""Commands of a few lines: the report of a plan, its scaling and sensitivity, measured runs, what ships.

Imported after the command line is parsed; every function loads, estimates, prints and returns an exit code.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.commands import outputs, plan_defaults
from steptime.commands.console import Printer, load, tell

if TYPE_CHECKING:
    from steptime.job.job import Job
    from steptime.launch.reading import Reading

TIGHT = "tight: allocated memory fits, reserved memory or its 90th percentile does not"


def report(options: Namespace, out: Printer) -> int:
    """The report of one plan, or its JSON; the check."""
    from steptime.answer.result import estimate
    from steptime.search import lazy_fixes

    if options.watch:
        from steptime.commands.watch import watch

        options.watch = False
        return watch(options, out, report)
    outputs.check(options)
    lazy_fixes.attach()
    job, reading = _plan(options)
    if options.calibrate is not None:
        from steptime.validation.calibrate import calibrated

        job = calibrated(job, options.calibrate)
    if options.export is not None:
        from steptime.commands.launch_command import export

        return export(job, options, out)
    found = estimate(job)
    outputs.write(options, found)
    refusals = []
    if (options.check or options.min_mfu is not None) and not found.peaks.fits:
        refusals.append(TIGHT if found.peaks.verdict == "tight" else "does not fit")
    if options.min_mfu is not None and found.throughput.mfu < options.min_mfu:
        refusals.append(f"MFU {100 * found.throughput.mfu:.1f} % is below {100 * options.min_mfu:g} %")
    if options.json:
        out.json(found.to_dict() | _flags(reading))
    else:
        from steptime.report import estimate_text

        out.painted(estimate_text.report(found, out.style, brief=options.brief, assumed=options.assumed))
        if reading is not None and not options.brief:
            from steptime.report import launch_flags

            out.text("\n")
            out.sections(launch_flags.sections(reading))
    sys.stderr.writelines(f"check: {refusal}\n" for refusal in refusals)
    return 1 if refusals else 0


def _plan(options: Namespace) -> tuple[Job, Reading | None]:
    """The job of a config, or of a launch file together with its reading."""
    named = options.model, options.machine, options.devices
    plan_defaults.check(options.model, options.machine, options.sets)
    if options.kind is not None:
        from steptime.commands.launch_command import launched

        return launched(options)
    if options.save is not None or options.allow_unmodeled:
        raise ConfigError("--save and --allow-unmodeled: only with --from KIND")
    if options.config is None:
        from steptime.commands import quick

        return quick.job(*named, options.sets), None
    job = load(options.config, [*plan_defaults.sets(*named), *options.sets])
    plan_defaults.check_devices(options.devices, job.parallelism.devices, options.sets)
    plan_defaults.check_counts(job, options.sets)
    tell(plan_defaults.kept_overrides(options.machine, job.hardware.overrides, options.sets))
    return job, None


def _flags(reading: Reading | None) -> dict[str, Any]:
    """What each flag of a launch file was used for, for JSON."""
    if reading is None:
        return {}
    from steptime.report import launch_flags

    return {"launch": launch_flags.document(reading)}


def sensitivity(options: Namespace, out: Printer) -> int:
    """The gain from increasing each figure of the machine."""
    from steptime.report import sensitivity_tables
    from steptime.search import sensitivity as analysis

    outputs.check(options)
    found = analysis.sensitivity(load(options.config, options.sets))
    out.answer(lambda: analysis.document(found), lambda: sensitivity_tables.sections(found))
    if options.plot is not None:
        sensitivity_tables.draw(found, options.plot)
    return 0


def scale(options: Namespace, out: Printer) -> int:
    """Weak scaling as in the estimate, and strong scaling at the config's own batch; or the best layout of each size."""
    if options.best or options.devices is not None:
        from steptime.commands.search_command import scale_best

        return scale_best(options, out)
    from steptime.answer.result import estimate
    from steptime.report import scaling_tables

    outputs.check(options)
    found = estimate(load(options.config, options.sets))
    if options.plot is not None:
        from steptime.report import plot_estimate

        plot_estimate.draw_scaling(found, options.plot)
    kinds = {"weak_scaling": found.weak_scaling, "strong_scaling": found.strong_scaling}
    out.answer(
        lambda: {name: [row._asdict() for row in rows] for name, rows in kinds.items()},
        lambda: scaling_tables.tables(found),
    )
    return 0


def validate(options: Namespace, out: Printer) -> int:
    """Measured runs with their estimates; bad input only where no row could be judged."""
    from steptime.commands import log_command

    if options.log:
        return log_command.validate(options, out)
    log_command.refuse_without_log(options)
    from steptime.report import validation_tables as report_validation
    from steptime.validation.error_summary import summarize
    from steptime.validation.judgement import judge_rows
    from steptime.validation.select import select

    outputs.check(options)
    rows = select(options.measurements, options.source, options.gpu, options.split)
    judged = judge_rows(rows, known_release=options.profile == "known")
    if options.measurements:
        tell(f"{options.measurements}: line {j.row.line}, {j.row.id}: {j.skipped}" for j in judged if j.skipped)
    summary = summarize(judged, options.worst)
    if options.plot is not None:
        from steptime.report import plot

        plot.draw(judged, options.plot)
    if options.json:
        out.json({"summary": summary, "rows": [j.to_dict() for j in judged]})
    else:
        own = report_validation.each(j.to_dict() for j in judged) if options.measurements else []
        out.sections([*own, *report_validation.tables(summary)])
    return 0 if summary["judged"] else 2


def machines(options: Namespace, out: Printer) -> int:
    """The table of shipped machines."""
    from steptime.report import catalogue

    del options
    out.answer(catalogue.machine_rows, lambda: [catalogue.machines()])
    return 0


def models(options: Namespace, out: Printer) -> int:
    """The table of model presets."""
    from steptime.report import catalogue

    del options
    out.answer(catalogue.model_rows, lambda: [catalogue.models()])
    return 0


def show(options: Namespace, out: Printer) -> int:
    """One machine, accelerator, model or profile as YAML."""
    from steptime.answer.result import finite
    from steptime.report import catalogue

    text = catalogue.show(options.name)
    if options.json:
        import yaml

        out.json(finite(yaml.safe_load(text)))
    else:
        out.text(text)
    return 0


def schema(options: Namespace, out: Printer) -> int:
    """JSON Schema of a config file."""
    from steptime.report import catalogue

    del options
    out.json(catalogue.schema())
    return 0
