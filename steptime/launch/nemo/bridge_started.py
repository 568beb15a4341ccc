"""Recipes of Megatron-Bridge that a script starts by name: run_recipe.py, the launchers of its benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.edit import put
from steptime.launch.devices import is_default, stated, still_true, told
from steptime.launch.keys import table_file
from steptime.launch.nearby_files import NearbyFiles, is_readable, read_nearby
from steptime.launch.nemo.bridge_recipe import BASES, bridge_reading
from steptime.launch.nemo.bridge_table import RECIPES, recipes
from steptime.launch.nemo.bridge_workloads import Chosen, whole, workload
from steptime.launch.nemo.nemo_programs import GIVE_LOG
from steptime.launch.python.config_functions import read_function
from steptime.launch.python.config_values import CLASS
from steptime.launch.reading import Reading, Sets
from steptime.launch.shell.processes import flags_of
from steptime.launch.shell.script import Script

STARTERS = ("run_recipe.py", "setup_experiment.py", "run_script.py", "bootstrap.py")
"""Programs of scripts/training and scripts/performance that start a recipe by name."""

_PLAIN = {"mode": {"pretrain", "sft", "finetune"}, "peft_scheme": {"none"}}
"""Option -> values with which the recipe stays as it is."""


def read_started(path: str, script: Script, sets: Sets, nearby: NearbyFiles) -> Reading:
    """A recipe that a script starts with run_recipe.py --recipe NAME section.key=value, or by model, devices and precision.

    Its function is looked for in the checkout of the framework that the script is in; else its main settings are known by name.

    Raises:
        ConfigError: it is not known, or is changed by an option that is not read.
    """
    table = table_file(RECIPES)["started"]
    options = {name: setting for setting, names in table["options"].items() for name in names}
    said = dict(flags_of([word.text.lstrip("+") for word in script.arguments]))
    program = script.program.rpartition("/")[2]
    at, submits = f"{path}: line {script.line}", program != STARTERS[0]
    for word, last in zip(script.arguments, ["", *(word.text for word in script.arguments)], strict=False):
        if word.unresolved and "=" not in word.text and (not last.startswith("-") or "=" in last):  # no option's value
            raise ConfigError(f"{path}: line {word.line}: {word.unresolved[0].told('write the value into the script')}")
    devices, notes = stated(script.devices, script.notes, sets), still_true(script.notes, sets)
    older = submits and not said.keys().isdisjoint({"s", "model_size"})  # as those of 0.1 and 0.2 choose a benchmark
    if submits:
        said = {table["selectors"].get(key, key): value for key, value in said.items()}
        each, nodes = whole(said.pop("gpus_per_node", None)), whole(said.pop("nodes", None))
        submitted = whole(said.get("num_gpus")) or (nodes * each if nodes and each else None)
        if submitted and (devices is None or any(map(is_default, notes))):
            devices, notes = submitted, [note for note in notes if not is_default(note)]
    said = {key: value for key, value in said.items() if "." in key or value not in (None, "None", False)}
    recipe = workload(at, said, devices) if older else _recipe(at, said, nearby, table)
    costless = {*table["without_cost"], *(table["submitting"] if submits else ())}
    said = {options.get(key, key): value for key, value in said.items() if key not in costless}
    for key, plain in _PLAIN.items():
        said.pop(key if str(said.get(key)).lower() in plain else "", None)
    if other := [key for key in said if "." not in key]:
        raise ConfigError(f"{at}: --{min(other)} of {program} is not read; {GIVE_LOG}")
    before = _degrees(recipe.tree)
    for key, value in said.items():
        put(recipe.tree, key, value)
    if recipe.devices and devices and _BATCH not in said and told(sets, "data.gbs") is None:
        _scale(at, recipe.tree, recipe.devices // prod(before), devices // prod(_degrees(recipe.tree)))
    reading = bridge_reading(path, (recipe.name, recipe.tree), sets, devices)
    reading.config.setdefault("notes", []).extend([*notes, *recipe.notes])
    return reading


def _recipe(at: str, said: dict[str, Any], nearby: NearbyFiles, table: dict[str, Any]) -> Chosen:
    """A recipe by its name, or the benchmark that the options choose; they are removed.

    Where no benchmark is for the number of devices, one for another number is resized (scripts/performance/run_script.py).
    """
    model, count = str(said.get("model_recipe_name")), str(said.get("num_gpus"))
    given = str(said.pop("recipe", ""))
    name = given or _chosen(said)
    texts = [(file, read_nearby(file)) for file in _modules(nearby) if is_readable(file)]
    imported = (re.search(rf"\b(\w+) as {re.escape(name)}\b", text) for _, text in texts)
    name = next((found[1] for found in imported if found), name)
    other = re.escape(name).replace(f"_{count}gpu_", r"_\d+gpu_", 1)
    for pattern in dict.fromkeys((re.escape(name), other)):
        found = [
            (call[1], file, text)
            for file, text in texts
            for call in re.finditer(rf"^def ({pattern})\(", text, re.MULTILINE)
        ]
        if found:
            found.sort(key=lambda each: _devices_of(each[0]), reverse=model not in table["smallest"])
            taken, file, text = found[0]
            tree = read_function(str(file), text, taken, "ConfigContainer", BASES, NearbyFiles(file.parent))[1]
            benchmark = _devices_of(taken) if "perf_recipes" in file.parts else 0
            adam = _said(tree, "optimizer.optimizer") in {None, "adam"}
            if benchmark and adam and "_bf16_" in taken:  # run_script.py, _run_training
                put(tree, "optimizer.use_precision_aware_optimizer", value=True)
            notes = [f"{taken}, resized to {count} devices"] if taken != name else []
            return Chosen(taken, tree, notes, benchmark if given or taken != name else 0)
    if name not in recipes():
        raise ConfigError(f"{at}: recipe {name} was not found; {GIVE_LOG}")
    return Chosen(name, {CLASS: name}, [])


def _chosen(said: dict[str, Any]) -> str:
    """The function of a benchmark's recipe (scripts/performance/utils/utils.py@a9497c6b, _recipe_function_name)."""
    model, gpu, count = (str(said.pop(key, "")) for key in ("model_recipe_name", "gpu", "num_gpus"))
    precision = str(said.pop("compute_dtype", "bf16")).lower().replace("_", "")
    variant = str(said.pop("config_variant", "v1")).lower()
    more = "" if variant in {"v1", "v2"} else f"_{variant}"
    return f"{model}_{said.pop('task', 'pretrain')}_{count}gpu_{gpu}_{precision}{more}_config"


_BATCH = "train.global_batch_size"
_DEVICES = re.compile(r"_(\d+)gpu_")


def _devices_of(name: str) -> int:
    found = _DEVICES.search(name)
    return int(found[1]) if found else 0


def _degrees(tree: dict[str, Any]) -> list[int]:
    """tp, pp and cp of a recipe, as far as they are known."""
    keys = [f"model.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")]
    return [whole(_said(tree, key)) or 1 for key in keys]


def _said(tree: dict[str, Any], key: str) -> Any:
    """A setting of a recipe, or of the one that it begins with."""
    section, _, name = key.partition(".")
    own = tree.get(section)
    return own[name] if isinstance(own, dict) and name in own else recipes().get(str(tree[CLASS]), {}).get(key)


def _scale(at: str, tree: dict[str, Any], usual: int, replicas: int) -> None:
    """As many sequences on each replica as in the benchmark (scripts/common/benchmark_parallelism.py, weak scaling).

    Raises:
        ConfigError: that is not a whole batch.
    """
    batch = whole(_said(tree, _BATCH))
    if batch is None or not usual or usual == replicas:
        return
    if batch * replicas % usual:
        what = f"a batch of {batch} for dp {usual} does not scale to dp {replicas}"
        raise ConfigError(f"{at}: {what}; add --set data.gbs=N")
    put(tree, _BATCH, batch * replicas // usual)


def _modules(nearby: NearbyFiles) -> Iterator[Path]:
    """The modules of recipes: added ones, and those of the checkout that the script is in."""
    yield from (file for file in nearby.added if file.suffix == ".py")
    here = nearby.folder.resolve() if nearby.folder is not None else None
    for folder in [here, *here.parents[:6]] if here is not None else []:
        for recipes_of in ("recipes", "perf_recipes"):
            yield from sorted((folder / "src/megatron/bridge" / recipes_of).rglob("*.py"))
