"""Reads the sections of a config that may be written in several ways, and changes them by dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from steptime.base.config import Config, ConfigError, ConfigProblem, show
from steptime.base.document import parse, parse_mapping, read_source
from steptime.hardware.machine import Machine
from steptime.job.device_count import AUTO
from steptime.job.names import meant_path
from steptime.model.model import Model

_EITHER = {
    "performance.recompute": "performance.activation_checkpointing_type",
    "performance.activation_checkpointing_type": "performance.recompute",
    "parallelism.bucket_size_mb": "parallelism.n_param_buckets",
    "parallelism.n_param_buckets": "parallelism.bucket_size_mb",
    "run.checkpoint_write_s": "run.checkpoint_bytes_per_s",
    "run.checkpoint_bytes_per_s": "run.checkpoint_write_s",
    "devices": "hardware.nodes",
    "hardware.nodes": "devices",
}
"""Pairs of keys for the same setting: setting one removes the other."""
_LAUNCH = {
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), "a shell script"),
    ".toml": "a TOML file",
    **dict.fromkeys((".log", ".out"), "a log"),
}
"""Suffixes of files that --from reads, which are never plans but may be given in place of one."""
_PROSE = {".md": "Markdown", ".rst": "reStructuredText", ".html": "HTML"}
"""Suffixes of texts that may be given in place of a plan."""


def read_model(value: Any) -> Any:
    """A model section: a preset's name, {preset: NAME, changes}, {hf: PATH, changes}, fields, or a `Model`.

    Raises:
        ConfigError: the preset is unknown, or the HF config cannot be read.
    """
    if isinstance(value, str):
        value = {"preset": value}
    if isinstance(value, list | tuple | bool | int | float):
        raise ConfigError(f"model: expected a name (3dtrn models) or a mapping (got {show(value)})")
    if not isinstance(value, Mapping) or not value.keys() & {"preset", "hf"}:
        return value
    changes = {key: item for key, item in value.items() if key not in {"preset", "hf"}}
    if "preset" in value and "hf" in value:
        raise ConfigError("model: preset and hf are both given; use one")
    for key in ("preset", "hf"):
        if key in value and not isinstance(value[key], str):
            raise ConfigError(f"model.{key}: expected a name (got {show(value[key])})")
    if "preset" in value:
        return _preset(value["preset"], changes)
    from steptime.model.hf import read_hf_config

    if not Path(value["hf"]).exists():
        raise ConfigError(f"model.hf: {value['hf']}: no such file; {_instead_of_hf(value['hf'])}")
    try:
        return read_hf_config(value["hf"]) | changes
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.hf: {line}" for line in str(error).splitlines()) from None


def _instead_of_hf(name: str) -> str:
    """What to give in place of a config that is not on this machine."""
    from steptime.model.presets import load_model

    try:
        return f"give the path of a downloaded config.json, or model: {load_model(name).name}"
    except ConfigError:
        return "give the path of a downloaded config.json, or a preset as model: NAME (3dtrn models)"


def _preset(name: str, changes: dict[str, Any]) -> Any:
    from steptime.model.presets import load_model

    try:
        model = load_model(name)
    except ValueError as error:
        raise ConfigError(f"model.preset: {line}" for line in str(error).splitlines()) from None
    if not changes:
        return model
    fields = model.model_dump(exclude_unset=True)
    return fields | changes | {"source": f"{model.source} (changed: {', '.join(changes)})"}


def read_hardware(value: Any) -> Any:
    """A hardware section: a name, a `Machine`, a machine's mapping, or {node_type, overrides}."""
    if isinstance(value, str | Machine) or (isinstance(value, Mapping) and "accelerator" in value):
        return {"node_type": value}
    return value


def one_line(text: str) -> str:
    """Text without line breaks of any kind, which YAML would not preserve.

    >>> one_line("left  out ")
    'left out'
    """
    return " ".join(text.split())


def read_plan(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a plan: from a file, from text, or as given; paths in a file are relative to it.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    if isinstance(source, Mapping):
        data, base = deepcopy(dict(source)), Path()
    else:
        try:
            text, name = read_source(source)
        except ConfigError as error:
            raise ConfigError(f"{problem}{_preset_hint(source)}" for problem in error.problems) from None
        data, base = plan_mapping(text, name), Path(name).parent if str(source) == name else Path()
    anchor(data, base)
    return data


def plan_mapping(text: str, name: str) -> dict[str, Any]:
    """The mapping of a plan's text; `name` is its file's, for messages.

    Raises:
        ConfigError: it is not valid YAML or JSON, or is another kind of file, in one line that says how to use it.
    """
    kind = "a shell script" if text.startswith("#!") else _LAUNCH.get(Path(name).suffix.lower())
    try:
        data = parse_mapping(text, name)
    except ConfigError:
        if prose := _PROSE.get(Path(name).suffix.lower()):
            raise ConfigError(f"{name}: {prose}, not a plan, which is YAML; to begin one: 3dtrn init") from None
        if kind is None or not text.strip():
            raise
        raise ConfigError(f"{name}: {kind}, not a plan; to read it: 3dtrn --from auto {name}") from None
    if str(data.get("schema", "")).startswith("3dtrn/") and "model" not in data:
        raise ConfigError(f"{name}: the output of --json, not a plan; its plan is under config")
    if "model_type" in data and data.keys().isdisjoint({"model", "data", "hardware"}):
        raise ConfigError(f"{name}: a Hugging Face config, not a plan; name it in a plan as model: {{hf: {name}}}")
    return data


def _preset_hint(source: str | Path) -> str:
    """A hint where a model's name, or one line of YAML, is given in place of a plan."""
    from steptime.model.presets import model_names

    if ": " in str(source):
        return "; YAML text on one line ends with a line break"
    return (
        f"; it is a model preset: use --model {source}, or model: {source} in a plan" if source in model_names() else ""
    )


def anchor(data: dict[str, Any], base: Path) -> None:
    """Make the paths inside a config relative to the folder of its file."""
    model, hardware = data.get("model"), data.get("hardware")
    if isinstance(model, dict) and isinstance(model.get("hf"), str):
        model["hf"] = str(base / model["hf"])
    if isinstance(hardware, str):
        data["hardware"] = hardware = {"node_type": hardware}
    if (
        isinstance(hardware, dict)
        and isinstance(name := hardware.get("node_type"), str)
        and name.endswith((".yaml", ".yml"))
    ):
        hardware["node_type"] = str(base / name)


def read_setting(setting: str) -> tuple[str, Any]:
    """The dotted key of one `a.b=c`, and its value, which is YAML.

    Raises:
        ConfigError: it has no "=", no key, or no sound value.
    """
    path, equals, value = setting.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError(_of_setting(f"{setting}: expected a.b=value"))
    if "." not in path and (meant := meant_path(path)) not in {"", path}:
        from steptime.job.suggested import suggested

        line = f"--set {setting}: unknown key; {suggested(meant, value)}"
        raise ConfigError(ConfigProblem(line, keys_only=f"{setting}: unknown key; {suggested(meant, value, '')}"))
    try:
        return path, parse(value, path)
    except ConfigError as error:
        raise ConfigError(_of_setting(line) for line in error.problems) from None


def _of_setting(line: str) -> ConfigProblem:
    return ConfigProblem(f"--set {line}", keys_only=line)


def read_settings(settings: Iterable[str]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The values of several `a.b=c` by their keys, and the problems of those that cannot be read."""
    found: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for setting in settings:
        try:
            key, value = read_setting(setting)
        except ConfigError as error:
            problems += error.details
        else:
            found[key] = value
    return found, problems


def apply_settings(data: dict[str, Any], settings: Iterable[str]) -> list[ConfigProblem]:
    """Set each `a.b=c` in a config; returns the problems of those that are none, or go below a plain value."""
    problems: list[ConfigProblem] = []
    for setting in settings:
        try:
            put(data, *read_setting(setting))
        except ConfigError as error:
            problems += error.details
    return problems


def value_at(data: Any, path: str) -> Any:
    """The value at a dotted path of a plan, of plain data or of sections; None where it has none.

    >>> value_at({"data": {"gbs": 8}}, "data.gbs"), value_at({"data": 8}, "data.gbs")
    (8, None)
    """
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else getattr(data, key, None)
    return data


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a dotted path of nested mappings, creating those that are missing.

    Raises:
        ConfigError: the path goes below a plain value.
    """
    *parents, last = path.split(".")
    if parents[:2] == ["hardware", "overrides"]:
        parents, last = parents[:2], ".".join([*parents[2:], last])
    node = data
    for depth, key in enumerate(parents):
        child = node.get(key)
        if depth == 0 and isinstance(child, str | Machine | Model):
            child = _spelled_out(key, child)
        elif isinstance(child, Config):
            child = child.model_dump(exclude_unset=True)
        elif child is not None and not isinstance(child, dict):
            raise ConfigError(
                f"{path}: {'.'.join(parents[: depth + 1])} is a single value, not a section (got {show(child)})"
            )
        if depth == 1 and child is None and parents[0] == "model" and isinstance(node.get("preset"), str):
            child = _of_preset(node["preset"], key)
        node[key] = node = dict(child or {})
    node[last] = value
    for key, other in _EITHER.items():
        if path == key or path.startswith(key + "."):
            _take(data, other)
    if path in {"devices", "hardware.nodes"}:
        _take(data, "parallelism.dp")
    if path == "parallelism" or (path == "parallelism.dp" and value != AUTO):
        _take(data, "devices")
        _take(data, "hardware.nodes")


def _take(data: dict[str, Any], path: str) -> None:
    """Remove a key, if it exists."""
    section, _, name = path.partition(".")
    node = data.get(section)
    if not name:
        data.pop(section, None)
    elif isinstance(node, Config) and name in node.model_fields_set:
        data[section] = {key: getattr(node, key) for key in node.model_fields_set if key != name}
    elif isinstance(node, dict):
        data[section] = {key: value for key, value in node.items() if key != name}


def _of_preset(name: str, section: str) -> dict[str, Any]:
    """A section of a preset (moe, attention ...), of which a setting then changes one key; empty where it has none."""
    from steptime.model.presets import load_model

    try:
        found = getattr(load_model(name), section, None)
    except ConfigError:  # said when the model is read
        return {}
    return found.model_dump(exclude_unset=True) if isinstance(found, Config) else {}


def _spelled_out(section: str, value: str | Machine | Model) -> dict[str, Any]:
    """The mapping that a section's short form abbreviates."""
    if isinstance(value, Model):
        return value.model_dump(exclude_unset=True)
    return {"preset" if section == "model" else "node_type": value}
