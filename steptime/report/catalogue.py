"""The data shipped with steptime: lists of machines and models, one of them as YAML with its sources, the schema of a config."""

from __future__ import annotations

from difflib import get_close_matches
from math import isinf
from typing import Any

from steptime.answer.result import finite
from steptime.base.config import ConfigError
from steptime.hardware.machine import Machine
from steptime.model.blocks import n_params
from steptime.report.format import COUNT, number, quantity, whole
from steptime.report.table import Table

UNMEASURED = "no measured run on this machine: figures come from data sheets and third-party benchmarks"


def machine_rows() -> list[dict[str, Any]]:
    """All machines: accelerator, devices per node, memory, bandwidth of the innermost and outermost tier per device; SI."""
    from steptime.hardware.machine import Machine, machine_names

    rows = []
    for machine in map(Machine.load, machine_names()):
        device = machine.accelerator
        peak = device.peak_flops.get("bf16") or device.peak_flops.get("fp16") or max(device.peak_flops.values())
        inner, outer = (machine.tiers[i].bytes_per_s for i in (0, -1))
        rows.append(
            {
                "name": machine.name,
                "aliases": machine.aliases,
                "accelerator": device.name,
                "devices_per_node": machine.devices_per_node,
                "peak_flops": peak,
                "memory_bytes": device.memory_bytes,
                "inner_bytes_per_s": inner,
                "outer_bytes_per_s": outer,
                "measured": machine.measured,
            }
        )
    return rows


def machines() -> Table:
    """`machine_rows` as a table."""
    rows = []
    for row in machine_rows():
        links = [number(row[key] / 1e9) for key in ("inner_bytes_per_s", "outer_bytes_per_s")]
        peak = row["peak_flops"] / 1e12
        figures = [f"{peak:,.{0 if peak >= 1.0 else 2}f}", f"{row['memory_bytes'] / 2**30:,.0f}"]
        node = f"{row['devices_per_node']} x {row['accelerator']}"
        rows.append([row["name"], node, *figures, *links, "yes" if row["measured"] else ""])
    header = ["", "one node", "TFLOP/s", "GiB", "inner", "outer", "runs"]
    notes = [
        "TFLOP/s: dense bf16 (fp16 where there is none); inner, outer: GB/s per device and direction, node and network",
        "runs: validated against published runs; aliases and sources: 3dtrn show NAME",
    ]
    return Table("machines", header, rows, notes, left=2)


def model_rows() -> list[dict[str, Any]]:
    """All model presets: parameters and shape."""
    from steptime.model.presets import load_model, model_names

    fields = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads", "vocab_sz")
    found = [(name, load_model(name)) for name in model_names()]
    return [
        {"name": name, "params": n_params(model)} | {key: getattr(model, key) for key in fields}
        for name, model in found
    ]


def models() -> Table:
    """`model_rows` as a table."""
    rows = []
    for row in model_rows():
        layers, hidden, inner, vocab = (whole(row[key]) for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz"))
        heads = f"{row['n_q_heads']}/{row['n_kv_heads']}"
        rows.append([row["name"], quantity(row["params"], COUNT), layers, hidden, inner, heads, vocab])
    return Table("models", ["", "parameters", "layers", "hidden", "mlp", "heads q/kv", "vocab"], rows)


def show(name: str) -> str:
    """One software profile, model, accelerator or machine as YAML, each figure with its source; a machine may be a path.

    Raises:
        ConfigError: nothing has that name, or the file is no machine.
    """
    from steptime.hardware.machine import Machine, machine_names
    from steptime.hardware.machine_tree import accelerator_names, accelerator_yaml
    from steptime.model.presets import load_model, model_names
    from steptime.software.performance import load_software
    from steptime.software.profiles import profile_names

    if name.partition("@")[0] in profile_names():
        profile = load_software(name)
        head = profile.model_dump(include={"name", "as_of", "family", "description"})
        return _profile_head(name) + _yaml(head | profile.settings() | {"sources": profile.sources}, inline=False)
    if name in accelerator_names():
        return accelerator_yaml(name)
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    if name not in model_names():
        try:
            return machine_yaml(Machine.load(name))
        except ValueError as error:
            if is_path and not _is_model(name):
                raise ConfigError(str(error).splitlines()) from None
    try:
        model = load_model(name)
    except ValueError:
        known = [*machine_names(), *model_names(), *profile_names(), *accelerator_names()]
        near = get_close_matches(name.lower(), known, n=4, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else "3dtrn machines and 3dtrn models list them"
        raise ConfigError(f"{name}: not a machine, model, accelerator or software profile; {hint}") from None
    return f"# {whole(n_params(model))} parameters\n" + _yaml(model.model_dump(exclude_none=True))


def _is_model(name: str) -> bool:
    """Whether a name with a slash is a preset's with its owner (meta-llama/Meta-Llama-3-70B), and no path."""
    from steptime.model.presets import load_model

    try:
        return bool(load_model(name))
    except ValueError:
        return False


def _profile_head(name: str) -> str:
    """Releases of a profile, and the factor fitted on its runs, which its own fields do not show."""
    from steptime.software.efficiency import compute_factor
    from steptime.software.profiles import profile_releases

    releases = profile_releases(name.partition("@")[0])
    lines = [f"releases: {', '.join(releases)}"] if releases else []
    lines.append(f"fitted on measured runs: kernel times x {compute_factor(name):g} (steptime/data/efficiency.yaml)")
    return "".join(f"# {line}\n" for line in lines)


def machine_yaml(machine: Machine) -> str:
    """A machine as a machine file: complete, each figure with its source."""
    tree = machine.model_dump(exclude_none=True, exclude={"provenance"})
    return ("" if machine.measured else f"# {UNMEASURED}\n") + _yaml(_sourced(tree, "", machine))


def _sourced(node: Any, path: str, machine: Machine) -> Any:
    """`node` with {value, source} wherever the machine has a source."""
    if isinstance(node, dict):
        return {
            key: _sourced(item, f"{path}.{key}".lstrip("."), machine)
            for key, item in node.items()
            if item not in ("", [])
        }
    if isinstance(node, list):
        return [_sourced(item, f"{path}.{i}", machine) for i, item in enumerate(node)]
    value = _figure(node, path) if isinstance(node, float) else node
    source = machine.provenance.get(path)
    return {"value": value, "source": source} if source else value


def _figure(value: float, path: str) -> Any:
    """A figure with its unit, as in a machine file."""
    if isinf(value):
        return "inf"
    if path.endswith("bytes_per_s"):
        return f"{value / 1e9:.10g} GB/s"
    if path.endswith("_bytes"):
        return f"{value / 2**30:.10g} GiB"
    if "_flops." in path:
        return f"{value / 1e12:.10g} TFLOP/s"
    if path.endswith("latency_s"):
        return f"{value * 1e6:.10g} us"
    return int(value) if value == int(value) else value


def _yaml(data: dict[str, Any], *, inline: bool = True) -> str:
    """YAML in the given order; `inline` puts the innermost mappings on one line, for {value, source} pairs."""
    import yaml

    style = None if inline else False
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=118, default_flow_style=style))


def schema() -> dict[str, Any]:
    """JSON Schema of a config file: the job's own, and the short forms that name a model or a machine."""
    from steptime.base.json_schema import json_schema
    from steptime.hardware.machine import machine_names
    from steptime.job.job import Job
    from steptime.model.presets import model_names
    from steptime.report.plan_keys import described

    document = described(json_schema(Job))
    fields = document["properties"]
    named: dict[str, Any] = {"type": "object", "required": ["preset"], "properties": {"preset": {"type": "string"}}}
    from_hf: dict[str, Any] = {"type": "object", "required": ["hf"], "properties": {"hf": {"type": "string"}}}
    fields["model"] = {"anyOf": [{"type": "string", "examples": model_names()}, named, from_hf, fields["model"]]}
    model = document["$defs"]["Model"]["properties"]
    layout = document["$defs"]["Parallelism"]
    for key in ("tp", "pp", "dp"):
        layout["required"].remove(key)
    layout["anyOf"] = [{"required": ["tp", "pp"]}, {"required": ["fsdp"]}]
    layout["properties"]["dp"] = {"anyOf": [layout["properties"]["dp"], {"const": "auto"}]}
    model["dropout"] = {"anyOf": [model["dropout"], {"type": "boolean"}]}
    fields["hardware"] = {"anyOf": [{"type": "string", "examples": machine_names()}, fields["hardware"]]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    plain: dict[str, Any] = finite(head | _numbers_as_text(document) | {"title": "3dtrn plan"})
    return plain


def _numbers_as_text(node: Any) -> Any:
    """A schema in which a number may be written as text: "450 GB/s", and 15e12, which most YAML parsers read as text."""
    if isinstance(node, list):
        return [_numbers_as_text(item) for item in node]
    if not isinstance(node, dict):
        return node
    inner = {key: _numbers_as_text(item) for key, item in node.items()}
    return {"anyOf": [inner, {"type": "string", "pattern": "^[-+]?[0-9.]"}]} if node.get("type") == "number" else inner
