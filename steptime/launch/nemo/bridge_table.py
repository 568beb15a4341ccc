"""What Megatron-Bridge's own recipes, and the functions that all of them call, set: the table of data/launch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from steptime.job.edit import put
from steptime.launch.keys import table_file
from steptime.launch.python.config_values import CLASS, merged

RECIPES = "megatron_bridge_recipes"
"""The table of the framework's recipes, and of the programs that start one."""


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """What the framework's own recipes set, by the name of their function."""
    names = table_file(RECIPES)["names"]
    return {
        name: kernels(name, "families", "recipes_of") | {names[key]: value for key, value in own.items()}
        for name, own in table_file(RECIPES)["recipes"].items()
    }


def kernels(model: str, *sections: str) -> dict[str, Any]:
    """Fusions of the framework's provider of a model's repository, and of its recipes, by the beginning of the model's name."""
    found = dict(table_file(RECIPES)["all"])
    for family, fusions in (item for section in sections for item in table_file(RECIPES)[section].items()):
        found |= fusions if model.replace("_", "-").startswith(family.replace("_", "-")) else {}
    return found


def settings_of(base: str, lengths: Mapping[str, int]) -> dict[str, Any]:
    """What the recipe that a function starts from sets, by its name: all of one in the table, else what its family has."""
    found: dict[str, Any] = table_file(RECIPES)["each"] | kernels(base, "families", "recipes_of")
    if own := recipes().get(base.rpartition(".")[2]):
        return found | own
    length = re.search(r"_(\d+)k_", base)
    of_family = [size for family, size in lengths.items() if base.startswith(family)]
    return found | (
        {"dataset.seq_length": int(length[1]) * 1024 if length else of_family[0]} if length or of_family else {}
    )


def set_by_calls(calls: Iterable[str]) -> dict[str, Any]:
    """What the framework's own functions set, of calls as the code has them ("_benchmark_common(cfg)").

    >>> set_by_calls(["_perf_precision", "my_own(cfg)"])
    {'mixed_precision.grad_reduce_in_fp32': False}
    """
    known: Mapping[str, dict[str, Any]] = table_file(RECIPES)["calls"]
    return {key: value for call in calls for key, value in known.get(call.removesuffix("(cfg)"), {}).items()}


def unwrapped(tree: dict[str, Any]) -> dict[str, Any]:
    """The config that a function of the framework is given, with the field that the function sets; any other one as it is.

    >>> unwrapped({"_class_": "_with_global_batch_size", "_args_": [{"_class_": "a", "train": {"x": 1}}, 8]})
    {'_class_': 'a', 'train': {'x': 1, 'global_batch_size': 8}}
    """
    field, given = table_file(RECIPES)["wrappers"].get(tree[CLASS]), tree.get("_args_", [])
    if field is None or len(given) != 2 or not isinstance(given[0], dict):
        return tree
    inner = merged(given[0], {key: value for key, value in tree.items() if key not in {CLASS, "_args_"}})
    put(inner, field, given[1])
    return inner


def put_stages(model: dict[str, Any], called: Sequence[str]) -> list[str]:
    """Put the stages that a function of the framework lays out, given or looked up, into the model; the calls that are left.

    >>> put_stages(found := {"pipeline_model_parallel_size": 4}, ["set_deepseek_v3_pipeline_model_parallel_layout(cfg.model)"])
    []
    >>> found["pipeline_model_parallel_layout"]
    'Et*16|t*16|t*16|t*13mL'
    """
    left = []
    for call in called:
        name, _, given = call.partition("(")
        if (known := table_file(RECIPES)["stages"].get(name)) is None or not re.fullmatch(
            r"[\w.]+(?:, '[^']*')?\)", given
        ):
            left.append(call)
            continue
        pp, vpp = (model.get(f"{axis}pipeline_model_parallel_size") or 1 for axis in ("", "virtual_"))
        layout = given.split("'")[1] if "'" in given else known.get(f"{pp}x{vpp}")
        depths = model.get("mtp_num_layers", 1) or 0
        model["pipeline_model_parallel_layout"] = layout if layout is None else layout.replace("m", "m" * int(depths))
    return left


def put_arguments(tree: dict[str, Any]) -> list[str]:
    """Put the arguments that a recipe is called with into the sections that they set; the result: those that are not read.

    >>> put_arguments(found := {"tensor_parallelism": 2, "lr": 0.1, "train": {"x": 1}, "hf_path": "a/b"}), found
    (['hf_path'], {'train': {'x': 1}, 'model': {'tensor_model_parallel_size': 2}})
    """
    table, unread = table_file(RECIPES), list[str]()
    own = {name for name, value in tree.items() if isinstance(value, dict) and CLASS not in value}
    for name in [name for name in tree if name not in {*own, *table["sections"], "_args_"}]:
        value = tree.pop(name)
        section, _, field = table["arguments"].get(name, "").partition(".")
        if section in own or (section and section not in tree):  # an object that takes the section's place has its own
            tree[section] = {field: value} | tree.get(section, {})
            own.add(section)
        elif not section and name not in table["arguments_without_cost"] and value not in (None, False):
            unread.append(name)
    return unread
