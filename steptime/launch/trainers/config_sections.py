"""Where a trainer's keys are besides the top of a file: a section, a subcommand, a file of defaults, a README, a launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steptime.base.document import parse_mapping
from steptime.launch.devices import SET_DEVICES
from steptime.launch.keys import KeyTable, flatten, is_costly
from steptime.launch.nearby_files import NearbyFiles, is_readable, read_nearby
from steptime.launch.python.program_values import defaults_in
from steptime.launch.shell.processes import flags_of
from steptime.launch.shell.script import Script
from steptime.launch.shell.training_command import SUBCOMMANDS

BY_README = "{} read, with which the README, script or comment of this recipe starts it; for another add --with FILE"
"""The note on a config of accelerate that a recipe does not name."""


def of_section(tree: dict[str, Any], table: KeyTable) -> dict[str, Any]:
    """The config of a file whose job is one section (the table's `sections`), with the sections beside it on how it runs."""
    for section, kept in (table.raw.get("sections") or {}).items():
        if isinstance(inside := tree.get(section), dict):
            tree = {key: tree[key] for key in kept if key in tree} | inside
    return tree


def of_subcommand(script: Script, table: KeyTable) -> dict[str, Any]:
    """The subcommand of a trainer's own launcher, and its first word where that is no option (litgpt finetune_lora MODEL)."""
    if not (named := table.raw.get("subcommand")) or {*script.launchers} - {"srun"} or script.program.endswith(".py"):
        return {}
    first = next((word.text for word in script.arguments[:1] if not word.text.startswith("-")), None)
    return {named["key"]: script.program} | ({named["first"]: first} if first else {})


def of_defaults(table: KeyTable, nearby: NearbyFiles, program: str) -> dict[str, Any]:
    """The trainer's own file of defaults, where it is in the repository of the job: the keys that the table knows.

    The table's `defaults_of` is the program whose defaults they are, where the trainer has several. Of a Python file the defaults
    of its dataclasses count.
    """
    name = str(table.raw.get("defaults_file") or "") if table.raw.get("defaults_of", "") in program else ""
    text = nearby.text(name) if name else None
    said = (defaults_in(text) if name.endswith(".py") else flatten(parse_mapping(text, name))) if text else {}
    return {key: value for key, value in said.items() if is_costly(key, table)}


def of_readme(path: str, top: Path | None = None) -> dict[str, Any]:
    """Options of `accelerate launch` in the README of a recipe's folder, or of the one above, or in the one script beside it.

    Where none has it: those of the scripts between it and `top`, the top of its checkout, if all that start it agree.
    """
    here = Path(path).resolve()
    own, above = here.parent / "README.md", here.parent.parent / "README.md"
    started = [_started(own, here.name), _started(above, "/".join(here.parts[-2:]))]
    starts = [found for script in sorted(here.parent.glob("*.sh"))[:20] if (found := _started(script, here.name))]
    if (near := next(filter(None, started), starts[0] if len(starts) == 1 else {})) or starts or top is None:
        return near
    folders = [folder for folder in here.parents[1:7] if folder == top or top in folder.parents]
    scripts = {
        script: here.relative_to(folder).as_posix()
        for folder in folders
        for script in sorted([*folder.glob("*.sh"), *folder.glob("scripts/*.sh")])[:40]
    }
    told = [options for script, name in scripts.items() if (options := _started(script, name))]
    return told[0] if told and all(options == told[0] for options in told) else {}


def _started(file: Path, name: str) -> dict[str, Any]:
    """Options of the first `accelerate launch` in a file that names a config."""
    text = read_nearby(file).replace("\\\n", " ") if is_readable(file) else ""
    for line in text.split("\n"):
        if _is_told(line, r"\baccelerate launch\b", name):
            before = line.partition("accelerate launch")[2].partition(name)[0]
            before = re.split(r"\s(?:\S+\.py|-m)(?=\s)", before)[0]  # what follows is the program's own
            return dict(flags_of(before.replace('"', "").replace("'", "").split()))
    return {}


def _is_told(line: str, words: str, name: str) -> bool:
    r"""Whether a line has a command's words, and after them a file's name; in time proportional to the line.

    >>> [_is_told(line, r"\btrain\b", "a.yaml") for line in ("cli train a.yaml", "a.yaml to train", "train my-a.yaml")]
    [True, False, False]
    """
    first = re.search(words, line)
    return first is not None and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", line[first.end() :]) is not None


_COUNTED = frozenset({"num_processes", "num_machines", "gradient_accumulation_steps"})
"""Options of accelerate launch that set its devices, or that the Trainer has itself."""


def of_accelerate(script: Script, table: KeyTable) -> dict[str, Any]:
    """Options of accelerate's launcher before the program: DeepSpeed, FSDP, precision (accelerate commands/launch.py)."""
    if "accelerate" not in script.launchers:
        return {}
    return costly(dict(flags_of([word.text for word in script.before])), table)


def costly(options: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """Those options of accelerate's launcher that change the plan, but for its devices."""
    return {name: value for name, value in options.items() if name not in _COUNTED and is_costly(name, table)}


_OWN_CONFIGS = frozenset({"model_name_or_path", "base_model"})
"""The key of the model in configs that `accelerate launch` may start: of LLaMA-Factory and Hugging Face Trainer, of Axolotl."""
_STARTS = r"\b(?:launch|train|torchrun|deepspeed|python3?)\b"
"""Words of a command that starts a config."""


def may_launch(path: str, said: Mapping[str, Any], others: Sequence[Path] = ()) -> str:
    """Why the sharding of a config is not known: it names none, and a config of accelerate lies beside it, or is of `others`.

    "" where it is known, also by a README or a script in its folder, or a README in the one above, that starts it.
    """
    sharded = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "distributed_type")
    if not said.keys() & _OWN_CONFIGS or any(said.get(key) for key in sharded):
        return ""
    here = Path(path).resolve()
    files = [found for found in sorted(Path(path).parent.glob("*.y*ml"))[:100] if is_readable(found)]
    named = [file for file in files if re.search(r"^distributed_type:", read_nearby(file), re.MULTILINE)] or others
    starting = [here.parent / "README.md", here.parent.parent / "README.md", *sorted(here.parent.glob("*.sh"))[:20]]
    texts = [read_nearby(file).replace("\\\n", " ") for file in starting if is_readable(file)]
    started = (_is_told(line, _STARTS, here.name) for text in texts for line in text.split("\n"))
    if not named or any(started):
        return ""
    fix = f"add --with {named[0]}, or for none --set parallelism.zero_level=0"
    return f"ZeRO or FSDP unknown: {named[0].name} may be the config of accelerate that starts it; {fix}"


def of_wandb(tree: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config that Weights & Biases stores of a run (each key a mapping with its value), and the run's program."""
    said = {key: kept["value"] for key, kept in tree.items() if isinstance(kept, dict) and "value" in kept}
    programs = re.findall(r"'codePath': '([^']+)'", str(said.pop("_wandb", "")))
    return said, programs[0] if programs else ""


_NO_TRAINING = (
    "infer_backend", "merge_method", "export_dir", "export_size", "do_predict", "predict_with_generate", "vllm_maxlen",
)  # fmt: skip
"""Keys of jobs that run or export a model, unless do_train is also set."""


def without_training(said: Mapping[str, Any]) -> str:
    """The key that says that a job does not train; "" where it may train.

    >>> without_training({"infer_backend": "vllm"}), without_training({"do_predict": True, "do_train": True})
    ('infer_backend', '')
    """
    if str(said.get("do_train")).lower() == "true" or "per_device_train_batch_size" in said:
        return ""
    return next((key for key in _NO_TRAINING if str(said.get(key) or "false").lower() not in {"false", "none"}), "")


def devices_of(script: Script, table: KeyTable, said: dict[str, Any], unclear: dict[str, str]) -> int | None:
    """The devices; what is unclear about them goes into `unclear`, and a number on each node alone into `said`."""
    alone = table.raw.get("launcher", {}).get("one_process")
    others = script.unclear and (script.launchers or script.program not in SUBCOMMANDS)
    if script.launchers if alone else others:
        unclear["devices"] = script.unclear[0] if script.unclear else f"number of devices unknown; {SET_DEVICES}"
    if script.launchers[-1:] == ["deepspeed"] and script.devices is None and not script.unclear:
        unclear["devices"] = f"number of devices unknown: those of its hostfile; {SET_DEVICES}"
    if one := _one_process(script, table):
        unclear["devices"] = one
        return None
    if script.devices is None and not script.unclear and "devices" not in unclear and script.devices_per_node:
        said["nproc"] = script.devices_per_node
    return script.devices


def _one_process(script: Script, table: KeyTable) -> str:
    """What is unclear about the devices of a job that one process runs although it sees several; "" where that is not so.

    Hugging Face's Trainer splits its batch over them (torch.nn.DataParallel, transformers training_args.py, _n_gpu), ms-swift
    the layers of the model (device_map; swift/cli/main.py, use_torchrun); other programs start processes themselves.
    """
    whole = table.raw.get("launcher", {}).get("one_process") or not script.alone or script.devices in (None, 1)
    spread = script.program.endswith(".py") or table.raw.get("one_process")
    if whole or not spread:
        return ""
    what = f"one process sees {script.devices} devices: DataParallel, or layers spread over them, is not modeled"
    return f"{what}; for a process on each device add --set parallelism.dp={script.devices}"
