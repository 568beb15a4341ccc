"""`3dtrn init`: a commented plan to start from."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from steptime.base.config import Config
from steptime.commands import plan_defaults, quick
from steptime.commands.console import Printer
from steptime.commands.outputs import write_new


def init(options: Namespace, out: Printer) -> int:
    """Write the plan of `3dtrn --model --machine --devices` with its keys explained; "-" prints it.

    Raises:
        ConfigError: a name is unknown, or the file exists or cannot be written.
    """
    from steptime.report.plan_keys import keys, starter

    job = quick.job(options.model or plan_defaults.MODEL, options.machine, options.devices, [])
    values = {
        "devices": job.parallelism.devices,
        "model": options.model or plan_defaults.MODEL,
        **_stated("parallelism", job.parallelism),
        "performance.software": job.software.name,
        **_stated("performance", job.performance),
        **{f"data.{key}": getattr(job.data, key) for key in ("gbs", "seqlen", "microbatch_sz")},
        "hardware.node_type": options.machine or plan_defaults.MACHINE,
    }
    text = starter(values, keys())
    if options.path == "-":
        out.text(text)
        return 0
    write_new(options.path, text, options.path, "use another name, or - for standard output")
    out.text(f"{options.path} written; 3dtrn {options.path} reads it\n")
    return 0


def _stated(section: str, said: Config) -> dict[str, Any]:
    """The keys of a section that the plan states, but for dp, which follows from the devices."""
    found = said.model_dump(exclude_unset=True)
    return {
        f"{section}.{key}": value if isinstance(value, str) else json.dumps(value)
        for key, value in found.items()
        if key != "dp"
    }
