"""Recipes of Megatron-Bridge that a script starts by name: run_recipe.py, the launchers of its benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.edit import put
from steptime.launch.devices import is_default, stated, still_true
from steptime.launch.nearby_files import NearbyFiles, is_readable, read_nearby
from steptime.launch.nemo.bridge_recipe import BASES, bridge_reading, recipe_table, recipes
from steptime.launch.nemo.nemo_programs import GIVE_LOG
from steptime.launch.python.config_functions import read_function
from steptime.launch.python.config_values import CLASS
from steptime.launch.reading import Reading, Sets
from steptime.launch.shell.processes import flags_of
from steptime.launch.shell.script import Script

STARTERS = ("run_recipe.py", "setup_experiment.py", "run_script.py", "bootstrap.py")
"""Programs of scripts/training and scripts/performance that start a recipe by name."""


def read_started(path: str, script: Script, sets: Sets, nearby: NearbyFiles) -> Reading:
    """A recipe that a script starts with run_recipe.py --recipe NAME section.key=value, or by model, devices and precision.

    Its function is looked for in the checkout of the framework that the script is in; else its main settings are known by name.

    Raises:
        ConfigError: it is not known, or is changed by an option that is not read.
    """
    table = recipe_table()["started"]
    options = {name: setting for setting, names in table["options"].items() for name in names}
    said = dict(flags_of([word.text.lstrip("+") for word in script.arguments]))
    program = script.program.rpartition("/")[2]
    devices, notes = stated(script, sets), still_true(script.notes, sets)
    if program != STARTERS[0]:
        said = {table["selectors"].get(key, key): value for key, value in said.items()}
        each, nodes = _count(said.pop("gpus_per_node", None)), _count(said.pop("nodes", None))
        submitted = _count(said.get("num_gpus")) or (nodes * each if nodes and each else None)
        if submitted and (devices is None or any(map(is_default, notes))):
            devices, notes = submitted, [note for note in notes if not is_default(note)]
    name = str(said.pop("recipe", "")) or _chosen(said)
    costless = {*table["without_cost"], *(table["submitting"] if program != STARTERS[0] else ())}
    said = {key: value for key, value in said.items() if key not in costless and value not in (None, "None", False)}
    said.pop("mode" if said.get("mode") in {"pretrain", "sft", "finetune"} else "", None)
    if other := [key for key in said if "." not in key and key not in options]:
        raise ConfigError(f"{path}: line {script.line}: --{min(other)} of {program} is not read; {GIVE_LOG}")
    texts = ((file, read_nearby(file)) for file in _modules(nearby) if is_readable(file))
    file, text = next(
        (found for found in texts if re.search(rf"^def {re.escape(name)}\(", found[1], re.MULTILINE)), (None, "")
    )
    if file is None and name not in recipes():
        raise ConfigError(f"{path}: line {script.line}: recipe {name} was not found; {GIVE_LOG}")
    tree: dict[str, Any] = {CLASS: name}
    if file is not None:
        tree = read_function(str(file), text, name, "ConfigContainer", BASES, NearbyFiles(file.parent))[1]
    for key, value in said.items():
        put(tree, options.get(key, key), value)
    reading = bridge_reading(path, (name, tree), sets, devices)
    reading.config.setdefault("notes", []).extend(notes)
    return reading


def _chosen(said: dict[str, Any]) -> str:
    """The function of a benchmark's recipe (scripts/performance/utils/utils.py@a9497c6b, _recipe_function_name)."""
    model, gpu, count = (str(said.pop(key, "")) for key in ("model_recipe_name", "gpu", "num_gpus"))
    precision = str(said.pop("compute_dtype", "bf16")).lower().replace("_", "")
    variant = str(said.pop("config_variant", "v1")).lower()
    more = "" if variant in {"v1", "v2"} else f"_{variant}"
    return f"{model}_{said.pop('task', 'pretrain')}_{count}gpu_{gpu}_{precision}{more}_config"


def _count(value: Any) -> int | None:
    return int(str(value)) if str(value).isdecimal() else None


def _modules(nearby: NearbyFiles) -> Iterator[Path]:
    """The modules of recipes: added ones, and those of the checkout that the script is in."""
    yield from (file for file in nearby.added if file.suffix == ".py")
    here = nearby.folder.resolve() if nearby.folder is not None else None
    for folder in [here, *here.parents[:6]] if here is not None else []:
        for recipes_of in ("recipes", "perf_recipes"):
            yield from sorted((folder / "src/megatron/bridge" / recipes_of).rglob("*.py"))
