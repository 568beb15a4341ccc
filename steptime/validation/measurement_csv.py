"""Writes a compared log as a row of a measurement CSV, which `3dtrn validate --measurements` reads back."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.memory.overhead import GIB
from steptime.validation.logged import Compared
from steptime.validation.measurements import REQUIRED

COLUMNS = (
    *REQUIRED, "model_name", "n_kv_heads", "head_dim", "vocab", "glu", "tied_embeddings", "cp", "dp", "vpp", "sp",
    "zero_or_fsdp", "recompute", "precision", "framework", "machine", "step_time_s", "step_time_kind", "tokens_per_s_per_gpu",
    "peak_memory_gb", "mem_metric", "tflops_per_gpu_reported", "split", "note", "config",
)  # fmt: skip
"""`config` holds the whole plan as JSON, since columns cannot express all of it. A row with a config is estimated from that."""


def cells(compared: Compared) -> dict[str, str]:
    """The row: dimensions and layout for readers, the measured figures, and the plan."""
    run = compared.run
    job, steady = run.job, run.steady
    memory, metric = _peak(compared)
    measured = {
        "id": re.sub(r"\W+", "-", Path(run.log.files[0]).name.split(".")[0]) or "log",
        "framework": run.reading.framework,
        "step_time_kind": f"median of {steady.used} lines of {steady.interval} iterations",
        "peak_memory_gb": memory,
        "mem_metric": metric,
        "tflops_per_gpu_reported": steady.tflops or None,
        "note": "; ".join([f"from {', '.join(run.log.files)}", *run.notes]),
    }
    return job_cells(job, steady.step_s) | _texts(measured)


def job_cells(job: Job, step_s: float) -> dict[str, str]:
    """All columns, filled from a job and its measured step [s]; the others are empty."""
    values = _dimensions(job) | {
        "framework": job.software.name,
        "step_time_s": step_s,
        "tokens_per_s_per_gpu": job.data.gbs * job.data.seqlen / step_s / job.parallelism.devices,
        "config": json.dumps(job.to_config(), separators=(",", ":")),
    }
    return dict.fromkeys(COLUMNS, "") | _texts(values)


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}


def _dimensions(job: Job) -> dict[str, Any]:
    model, p, data = job.model, job.parallelism, job.data
    return {
        "gpu": job.hardware.node_type if isinstance(job.hardware.node_type, str) else job.machine.name,
        "machine": job.machine.name,
        "n_gpus": p.devices,
        "model_name": model.name,
        "n_layers": model.n_layers,
        "hidden": model.hidden_sz,
        "ffn_hidden": model.inter_sz,
        "n_heads": model.n_q_heads,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab_sz,
        "glu": int(model.glu),
        "tied_embeddings": int(model.tie_embeddings),
        "seq_len": data.seqlen,
        "global_batch_size": data.gbs,
        "micro_batch_size": data.microbatch_sz,
        **{axis: getattr(p, axis) for axis in ("tp", "pp", "cp", "dp", "vpp")},
        "sp": int(job.sp),
        "zero_or_fsdp": "fsdp" if p.fsdp is not None else f"zero{job.zero_level}",
        "recompute": _recompute(job),
        "precision": job.software.precision,
    }


def _recompute(job: Job) -> str:
    """Recomputation in the words that the column accepts."""
    said = job.performance.recompute
    if said is None:
        return job.performance.activation_checkpointing_type or "none"
    if said.granularity == "selective":
        return f"selective({', '.join(said.modules or ['core_attn'])})"
    if said.method == "block" and isinstance(said.n_layers, int):
        chunks = job.parallelism.pp * job.parallelism.vpp
        return f"block({said.n_layers * chunks} of {job.model.n_layers} layers)"
    return "full"


def _peak(compared: Compared) -> tuple[float | None, str]:
    """The largest allocated peak, else reserved [GiB], where every stage reports one, since the estimate covers all stages."""
    stages = range(compared.run.job.parallelism.pp)
    for what in ("allocated", "reserved"):
        found = {row.stage: getattr(row, f"{what}_bytes") for row in compared.memory if getattr(row, f"{what}_bytes")}
        if set(stages) <= set(found):
            peaks = [getattr(row, f"{what}_bytes") or 0.0 for row in compared.memory]
            return max(peaks) / GIB, f"{what}, GiB"
    return None, ""


def _text(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def append(row: dict[str, str], path: str) -> str:
    """Append a row to a CSV, which is created if missing; returns the row's id, made unique.

    `row`: cells by column, `job_cells` with what else is known; columns beyond COLUMNS are last.

    Raises:
        ConfigError: the file cannot be read or written, or its header lacks a column that the row needs.
    """
    target = Path(path)
    try:
        text = target.read_bytes().decode("utf-8-sig") if target.exists() else ""
        rows = list(csv.reader(io.StringIO(text, newline="")))
        header = [name.strip().lower() for name in rows[0]] if rows else list(row)
        if missing := [name for name in row if row[name] and name not in header]:
            raise ConfigError(f"{path}: has no column {missing[0]}; use a new file, or one written by --save-csv")
        row["id"] = _unlike(
            row["id"], {line[header.index("id")] for line in rows[1:] if len(line) > header.index("id")}
        )
        out = io.StringIO(newline="")
        writer = csv.writer(out, lineterminator="\n")
        if not rows:
            writer.writerow(header)
        elif not text.endswith("\n"):
            out.write("\n")
        writer.writerow([row.get(name, "") for name in header])
        with target.open("a", encoding="utf-8", newline="") as file:
            file.write(out.getvalue())
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; give another file to --save-csv") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {reason.lower()}; give another file to --save-csv") from None
    return row["id"]


def _unlike(name: str, taken: set[str]) -> str:
    """`name`, or with the first free number appended."""
    number, found = 2, name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found
