"""`3dtrn init`: a commented plan to start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.commands import quick
from steptime.commands.outputs import write_new

if TYPE_CHECKING:
    from argparse import Namespace

    from steptime.commands.console import Printer

MODEL = "llama3-8b"
EXPERTS = ("parallelism.ep", "parallelism.etp")


def init(options: Namespace, out: Printer) -> int:
    """Write the plan of `3dtrn --model --machine --devices` with its keys explained; "-" prints it.

    Raises:
        ConfigError: a name is unknown, or the file exists or cannot be written.
    """
    from steptime.report.key_pages import starter
    from steptime.report.plan_keys import keys

    job = quick.job(options.model or MODEL, options.machine, options.devices, [])
    recompute = job.performance.activation_checkpointing_type
    values = {
        "devices": job.parallelism.devices,
        "model": options.model or MODEL,
        "parallelism.tp": job.parallelism.tp,
        "parallelism.pp": job.parallelism.pp,
        **({key: getattr(job.parallelism, key.partition(".")[2]) for key in EXPERTS} if job.model.moe else {}),
        **({"parallelism.layers_per_stage": "auto"} if job.parallelism.layers_per_stage else {}),
        "performance.software": job.software.name,
        **({"performance.activation_checkpointing_type": recompute} if recompute else {}),
        **{f"data.{key}": getattr(job.data, key) for key in ("gbs", "seqlen", "microbatch_sz")},
        "hardware.node_type": options.machine or quick.MACHINE,
    }
    text = starter(values, keys())
    if options.path == "-":
        out.text(text)
        return 0
    write_new(options.path, text, options.path, "use another name, or - for standard output")
    out.text(f"{options.path} written; 3dtrn {options.path} reads it\n")
    return 0
