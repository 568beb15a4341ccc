"""Model presets: one small YAML per model in `data/models`, each with its source."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from os.path import isfile
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError, build, show
from steptime.base.document import shipped, shipped_names
from steptime.model.model import Model

FOLDER = Path(__file__).parent.parent / "data" / "models"
_NO_SHAPE = frozenset({"meta", "hf", "instruct", "chat", "base", "it"})
"""Words in published names that carry no information about shapes: Meta-Llama-3-8B-Instruct."""


def model_names() -> list[str]:
    """Names of all presets, sorted by family and size."""
    return sorted(shipped_names(FOLDER), key=_sort_key)


def load_model(name: str, **changes: object) -> Model:
    """The preset `name`, with fields of `Model` changed on request.

    Spelling is lenient: llama3-70b, llama-3-70b, Llama3_70B and meta-llama/Meta-Llama-3-70B are one model. One file is read,
    once, when the name is a file's; for aliases all are read.

    Raises:
        ConfigError: the name is unknown (one line, with near matches), or a change is not one that `Model` takes.
    """
    path = _find(name)
    if not changes:
        return _read(path)
    fields = _fields(path)
    fields["source"] = f"{fields['source']} (changed: {', '.join(changes)})"
    return build(Model, fields | changes, "model")


@cache
def _read(path: Path) -> Model:
    """The model of a preset's file, which ships with steptime: one object for all plans that name it."""
    return build(Model, _fields(path), "model")


def _fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = shipped(path)
    fields.pop("aliases", None)
    return fields | {"name": path.stem}


def _key(name: str) -> tuple[str, ...]:
    """The common key of all spellings of a name: its words and numbers, without the owner and without words like instruct.

    Numbers keep their dots, so that qwen2.5-7b and qwen2-57b stay distinct.
    """
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)*", name.rpartition("/")[2].lower())
    return tuple(word for word in words if word not in _NO_SHAPE)


@lru_cache(maxsize=256)
def _find(name: str) -> Path:
    exact = FOLDER / f"{name}.yaml"
    if re.fullmatch(r"[\w.-]+", name) and isfile(exact):  # noqa: PTH113  not an error for a long name
        return exact
    key = _key(name)
    files = sorted(FOLDER.glob("*.yaml"))
    by_key = {_key(path.stem): path for path in files}
    if key in by_key:
        return by_key[key]
    by_key |= {_key(alias): FOLDER / f"{stem}.yaml" for alias, stem in aliases().items()}
    if key in by_key:
        return by_key[key]
    from difflib import get_close_matches

    spelt = "-".join(key) or name.lower()
    near = [each for each in model_names() if _key(each)[: len(key)] == key][:3] if key else []
    near = near or get_close_matches(spelt, model_names()) or get_close_matches(spelt, aliases())
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if name.endswith((".json", ".yaml", ".yml", "/")):  # a path
        hint = "; a Hugging Face config is model: {hf: config.json} in a plan"
    raise ConfigError(f"unknown model {show(name)}{hint} (3dtrn models lists them)")


@cache
def aliases() -> dict[str, str]:
    """Other names of models -> the preset that has their shapes."""
    said = {path.stem: shipped(path).get("aliases", []) for path in sorted(FOLDER.glob("*.yaml"))}
    return {str(name): stem for stem, names in said.items() if isinstance(names, list) for name in names}


def _sort_key(name: str) -> tuple[object, ...]:
    """Sort key: family, then size in parameters: 8b before 70b, 1t last; sizes in words are in alphabetical order."""
    size = re.search(r"(\d+(?:\.\d+)?)([mbt])$", name)
    if size is None:
        return (name, 0.0)
    return (name[: size.start()], float(size[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[2]])
