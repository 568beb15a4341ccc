"""Primus: the arguments of Megatron-LM in YAML, or the config of torchtitan or MaxText, with Primus's defaults and model's file.

Source: AMD-AGI/Primus@fd1eeabb primus/configs/modules/torchtitan/ and maxtext/pre_trainer.yaml (the defaults),
primus/configs/models/torchtitan/ (a model's name, flavor and converters), primus/configs/models/maxtext/ (model_name),
primus/backends/torchtitan/models/deepseek_v3/__init__.py (the classic attention).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

from steptime.base.config import ConfigError, near, show
from steptime.base.document import parse, parse_mapping
from steptime.job.edit import put
from steptime.launch.devices import stated, still_true, told
from steptime.launch.keys import flatten, is_costly, load_table, speaks_of_cost, table_file
from steptime.launch.megatron.sources import from_arguments
from steptime.launch.named_models import preset_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import Env, Reading, Sets
from steptime.launch.shell.processes import flags_of, split_words
from steptime.launch.shell.script import read_script
from steptime.launch.torchtitan.flavors import MODELS
from steptime.launch.torchtitan.job_config import read_torchtitan
from steptime.launch.trainers.trainer_plan import read_trainer

_FLOAT8 = "-fp8"
"""The end of a model's file that adds torchao's float8 to the one without it."""
_DEFAULTS = ("training", "parallelism", "activation_checkpoint", "compile", "primus_turbo")
"""Sections whose defaults are read from the file of them in the repository of the job."""
_OF_TURBO = ("enable_primus_turbo", "use_turbo_attention", "use_classic_attention")
"""Those of the section primus_turbo: the others are of experts and of converters, which few jobs have."""
_NAMED = ("name", "flavor")
"""Keys of the section `model` that say which model of torchtitan it is; the job's own win over its model's file."""


def read_over_torchtitan(
    path: str, trainer: Mapping[str, Any], name: str, env: Env, sets: Sets, nearby: NearbyFiles
) -> Reading:
    """The job of the overrides of `trainer`, which hold sections of torchtitan's config, with the model's file `name`.

    Raises:
        ConfigError: as `read_torchtitan`, or an unknown model.
    """
    table = load_table("primus").raw
    said_by = trainer.get("overrides") or {}
    tree: dict[str, Any] = {key: dict(section) for key, section in said_by.items() if isinstance(section, dict)}
    for key, value in _defaults(str(trainer.get("config", "")), tree, table, nearby).items():
        section, _, word = key.partition(".")
        tree[section] = {word: value} | tree.get(section, {})
    own = {key: value for key, value in tree.get("model", {}).items() if value is not None}
    file = _titan_model(path, name, table, own, sets, nearby)
    said = file | own
    model = _classic(said, tree.get("primus_turbo", {}), table)
    if model is None and all(said.get(key) == file.get(key) for key in _NAMED):
        model = preset_of(name.removesuffix(_FLOAT8))
    shown = own | {key: said[key] for key in (*_NAMED, "converters") if said.get(key)}
    if model is not None or "name" not in said:
        shown = {key: value for key, value in shown.items() if key not in _NAMED}
    tree["model"] = shown | {"converters": _of_torchtitan(said.get("converters") or [])}
    plain = {key: value for key, value in flatten(tree).items() if value is not None and value != {}}
    sets = ({} if model is None else {"model": model}) | dict(sets or {})
    return read_torchtitan(path, "", env, sets, tree=plain)


def _titan_model(
    path: str, name: str, table: Mapping[str, Any], own: Mapping[str, Any], sets: Sets, nearby: NearbyFiles
) -> dict[str, Any]:
    """The section `model` of the model's file; `own` is that of the job.

    Raises:
        ConfigError: the file is not in the repository of the job or names no model, its own name is not a known one, and the
            job names no model.
    """
    text = nearby.text(f"primus/configs/models/torchtitan/{name}.yaml")
    bare = name.removesuffix(_FLOAT8)
    known: dict[str, list[str]] = table["torchtitan_models"]
    if text is not None:
        found = _yaml(text, f"{name}.yaml").get("model")
        if isinstance(found, dict) and found.get("name"):
            return found
    if bare in known:
        family, flavor = known[bare]
        return {"name": family, "flavor": flavor, "converters": ["quantize.linear.float8"] if bare != name else []}
    if preset_of(bare) or told(sets, "model") is not None or all(own.get(key) for key in _NAMED):
        return {}
    raise ConfigError(
        f"{path}: modules.pre_trainer.model: not among the models of Primus (got {show(name)})"
        f"{near(bare, known)}; or add --set model=NAME"
    )


def _of_torchtitan(converters: Any) -> Any:
    """Converters without the one that stands for Primus-Turbo; what is no list of names is left to torchtitan's reader.

    >>> _of_torchtitan(["primus_turbo", "quantize.linear.float8"]), _of_torchtitan("primus_turbo"), _of_torchtitan(5)
    (['quantize.linear.float8'], [], 5)
    """
    words = [converters] if isinstance(converters, str) else converters
    return [word for word in words if word != "primus_turbo"] if isinstance(words, list) else words


def _classic(said: Mapping[str, Any], turbo: Mapping[str, Any], table: Mapping[str, Any]) -> Any:
    """The model section of a plan of DeepSeek with Primus's classic attention; else None."""
    classic = table["classic_attention"].get(str(said.get("flavor")))
    switched = turbo.get("enable_primus_turbo") and turbo.get("use_classic_attention")
    if classic and switched and said.get("name") == "deepseek_v3":
        return dict(table_file(MODELS)["deepseek_v3"][said["flavor"]]) | classic | {"attention": {"kind": "gqa"}}
    return None


_STARTED = dict.fromkeys(
    (f"run_{where}pretrain{cli}.sh" for where in ("", "local_", "slurm_", "k8s_") for cli in ("", "_cli")),
    'torchrun --nproc_per_node=${GPUS_PER_NODE:-8} --nnodes=${NNODES:-1} primus/train.py --exp $EXP "$@"\n',
)
"""What Primus's own examples/run_pretrain.sh launches, and those that start it on the nodes of a job."""


def read_primus(path: str, text: str, env: Env, sets: Sets, nearby: NearbyFiles | None = None) -> Reading:
    """The framework's settings under the trainer's overrides, and its model's file, or the model of that name.

    A script that starts a config (EXP=...) is read with it; its options override those settings.
    """
    nearby = nearby or NearbyFiles()
    if not path.endswith((".sh", ".slurm", ".sbatch")):
        return _of_tree(path, _yaml(_filled(text, env), path), env, sets, nearby, None)
    nearby.written |= _STARTED
    script = read_script(text, path, dict(env or {}), nearby)
    words = split_words(script.arguments)
    said = dict(flags_of([word.text for word in words]))
    if not isinstance(file := said.pop("exp", None), str) or "$" in file:
        raise ConfigError(f"{path}: starts a config of Primus that is not known; write EXP=... before the command")
    env = {**(env or {}), **script.variables}
    for word, following in zip_longest(words, words[1:]):
        name, joined, _ = word.text.partition("=")
        missing = word.unresolved if joined or following is None else following.unresolved
        key = name.lstrip("-")
        if missing and is_costly(key, load_table("primus"), unknown=speaks_of_cost(key)):
            raise ConfigError(f"{path}: {name}: {missing[0].told('write the value into the script')}")
    tree = _yaml(_filled(nearby.needed(file, f"{path}: reads"), env), file)
    kind = _trainer(file, tree)[0]
    for key, value in said.items():
        plain = isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value)
        put(tree, f"modules.{kind}.overrides.{key}", parse(value, path) if plain else value)
    devices = stated(script.devices, script.notes, sets)
    reading = _of_tree(path, tree, {**env, "WORLD_SIZE": str(devices)} if devices else env, sets, nearby, devices)
    notes = still_true([*script.launched(), *script.notes], sets)
    return reading._replace(config=reading.config | {"notes": [*notes, *reading.config.get("notes", [])]})


def _trainer(path: str, tree: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of the section of a config that trains, that section, and the settings in it.

    Raises:
        ConfigError: there is none, or it is no mapping.
    """
    modules = tree.get("modules")
    kind = "post_trainer" if isinstance(modules, dict) and "post_trainer" in modules else "pre_trainer"
    trainer = modules.get(kind) if isinstance(modules, dict) else None
    if not isinstance(trainer, dict):
        raise ConfigError(f"{path}: modules.{kind} is missing; not a Primus training config")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{path}: modules.{kind}.overrides: expected a mapping (got {show(overrides)})")
    return kind, trainer, overrides


_yaml = partial(parse_mapping, repeats=True)
"""Primus reads with PyYAML, for which the last of a repeated key counts."""


def _of_tree(
    path: str, tree: Mapping[str, Any], env: Env, sets: Sets, nearby: NearbyFiles, devices: int | None
) -> Reading:
    """The job of a config; `devices`: those that its script starts."""
    kind, trainer, overrides = _trainer(path, tree)
    framework = trainer.get("framework", "megatron")
    if framework not in ("megatron", "torchtitan", "maxtext"):
        what = f"modules.{kind}.framework {framework}: only megatron's, torchtitan's and maxtext's are read"
        raise ConfigError(f"{path}: {what}; write a plan with its settings (3dtrn init)")
    name = str(trainer.get("model", "")).removesuffix(".yaml")
    if framework == "torchtitan":
        return read_over_torchtitan(path, trainer, name, env, sets, nearby)
    if framework == "maxtext":
        return _read_over_maxtext(path, overrides, name, env, sets, nearby)
    preset = preset_of(name)
    both = _model_file(f"{name}.yaml", env, nearby) | overrides
    said = {key: str(value) for key, value in flatten(both).items() if value is not None}
    own = load_table("primus").raw["own_models"]
    with_own = {"preset": preset} | own["with"] if re.search(own["names"], name) else preset
    model = {"model": with_own} if preset and "num_layers" not in said else {}
    return from_arguments(said, path, world_size=devices, sets=model | dict(sets or {}), table="primus")


def _read_over_maxtext(
    path: str, overrides: Mapping[str, Any], name: str, env: Env, sets: Sets, nearby: NearbyFiles
) -> Reading:
    """The job of MaxText's keys in `overrides`, with its model's file `name`, or the model of that name."""
    usual: dict[str, Any] = load_table("primus").raw["maxtext"]
    defaults, model = (nearby.text(f"primus/configs/{f}") for f in (_MAXTEXT, f"models/maxtext/{name}.yaml"))
    own = {} if model is None else _yaml(_filled(model, env), f"{name}.yaml")
    module = {} if defaults is None else _yaml(defaults, _MAXTEXT)
    said: dict[str, Any] = {**usual, **{key: module[key] for key in usual if key in module}, **own, **overrides}
    said.pop("extends", None)
    others = [said[key] for key in said if key.startswith("ici_") and key != _REST and isinstance(said[key], int)]
    if said.get(_REST) == -1 and prod(others) == _OF_NODE:
        said.pop(_REST)  # what the other axes leave of the devices of a node (MaxText's fill_unspecified_mesh_axes): 1
    preset = preset_of(name) if model is None else None
    return read_trainer(
        "maxtext", path, json.dumps(said), env, ({"model": preset} if preset else {}) | dict(sets or {})
    )


_MAXTEXT = "modules/maxtext/pre_trainer.yaml"
_REST = "ici_tensor_sequence_parallelism"
_OF_NODE = 8
"""GPUS_PER_NODE of examples/run_pretrain.sh."""


def _filled(text: str, env: Env) -> str:
    """The text with ${NAME:default} replaced by the variable or the default."""
    return re.sub(r"\$\{(\w+):([^}]*)\}", lambda found: (env or {}).get(found[1], found[2]), text)


def _defaults(file: str, tree: Mapping[str, Any], table: Mapping[str, Any], nearby: NearbyFiles) -> Mapping[str, Any]:
    """Key -> the default: of the `file` of the module in the job's repository, else of the version whose words the job uses."""
    text = nearby.text(f"primus/configs/modules/torchtitan/{file}") if file else None
    if text is None:
        return table["older_torchtitan" if "batch_size" in tree.get("training", {}) else "torchtitan"]  # type: ignore[no-any-return]
    said = _yaml(text, file)
    items = ((name, *item) for name in _DEFAULTS if isinstance(said.get(name), dict) for item in said[name].items())
    return {
        f"{name}.{key}": value
        for name, key, value in items
        # switches that are off are off without it, too: where an older version has them says nothing of the job's
        if value is not False and value not in (None, [], "") and (name != "primus_turbo" or key in _OF_TURBO)
    }


def _model_file(
    name: str,
    env: Env,
    nearby: NearbyFiles,
    above: tuple[str, ...] = (),
    known: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The arguments in a model's file and in those that it extends, where they are in the repository of the job.

    The last one, language_model.yaml, has the defaults, which are in the table. `above`: the files that extend it; `known`: what
    those read so far say.

    Raises:
        ConfigError: a file that another one extends was not found, or extends itself.
    """
    file = f"primus/configs/models/megatron/{name}"
    if name == "language_model.yaml" or (not above and nearby.text(file) is None):
        return {}
    known = {} if known is None else known
    if name in known:
        return known[name]
    if name in above:
        raise ConfigError(f"{above[-1]}: extends: {name} extends itself")
    found = _yaml(_filled(nearby.needed(file, f"{(*above, name)[-2 if above else -1]}: extends"), env), name)
    below: dict[str, Any] = {}
    bases = found.pop("extends", None) or found.pop("bases", None) or []  # its name up to November 2025
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{name}: extends: expected names of files (got {show(base)})")
        below |= _model_file(base, env, nearby, (*above, name), known)
    known[name] = below | found
    return known[name]
