"""Scripts whose flags lack values, or the number of layers: what to ask for, or that they start another program."""

from __future__ import annotations

import re
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.devices import states_devices, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.expert_layers import trained_with
from steptime.launch.megatron.flags import SIZES
from steptime.launch.megatron.model_section import TOKENIZERS, vocabulary
from steptime.launch.named_models import preset_of
from steptime.launch.reading import NO_OPTION, NOT_MODELED, is_other_model, refusals
from steptime.launch.shell.processes import Word
from steptime.launch.shell.script import Script
from steptime.model.presets import load_model

NAMED = ("model", "model_id", "hf_checkpoint", "model_type")
"""Flags of forks that give the model by the name of a repository."""
_TELLING = frozenset({"global_batch_size", "hidden_size", "use_checkpoint_args", "tensor_model_parallel_size"})
_TELLING |= {"pipeline_model_parallel_size", "num_attention_heads", "hf_checkpoint"}
"""Flags of which a script of Megatron-LM has at least one; --micro-batch-size and --seq-length are those of many programs."""

_FIX = re.compile(r"pass script and arguments|\b\w+=\.\.\.")
"""A user's fix: one for missing values serves for devices of the same source too."""


def _is_foreign(program: str) -> bool:
    """Whether a program's name is that of none of Megatron-LM's.

    >>> [_is_foreign(name) for name in ("pretrain_gpt.py", "sft", "src/train_sft.py", "own.sft_trainer")]
    [False, False, True, True]
    """
    return "." in program and not re.search("pretrain_|megatron", program)


def _blank(words: list[Word]) -> str:
    """Why the first word without a value has none, with all variables of the environment that are not set."""
    unknown = [one for word in words for one in word.unresolved]
    if not unknown:
        return ""
    plain = [
        one.variable for one in unknown if one.why == f"${one.variable} has no value" and not one.variable.isdecimal()
    ]
    named = list(dict.fromkeys(plain))
    if unknown[0].variable not in named or len(named) == 1:
        return unknown[0].told("write the value")
    fix = f"write {' '.join(f'{name}=...' for name in named)} before the command"
    return f"{', '.join(f'${name}' for name in named)} have no value{unknown[0].because}; {fix}"


def of_no_framework(keys: JobKeys, script: Script | None, words: list[Word]) -> None:
    """Report a program of another kind, or one with none of Megatron-LM's flags, whose model may be known by name.

    Raises:
        ConfigError: it is one.
    """
    if any(map(is_other_model, keys.assumed_flags)):
        raise ConfigError(refusals(keys.source, keys.assumed_flags, NOT_MODELED))
    named = {item.name.lstrip("-").replace("-", "_") for item in keys.given}
    open_ = [word for word in words if not word.text.startswith("-")]  # which may be flags
    if script is not None and _is_foreign(script.program) and not _blank(open_) and not _TELLING & named:
        runs = f"line {script.line} launches {script.program}, which is of no framework that is read"
        fix = "write a plan with its settings, or name its framework with --from KIND"
        raise ConfigError(f"{keys.source}: {runs}; {fix}")


def by_name(keys: JobKeys, more: tuple[str, ...] = ()) -> bool:
    """Whether the model is given by the name of a repository, as in ms-swift and slime; it then counts as the user's setting."""
    named = (keys.get(key) for key in (*NAMED, *more))
    preset = next((found for name in named if name and (found := preset_of(str(name)))), None)
    if preset is not None and told(keys.sets, "model") is None:
        keys.sets = {"model": _as_trained(keys, preset), **(keys.sets or {})}
        keys.notes.append(f"model {preset}, from its name")
    return preset is not None


def _as_trained(keys: JobKeys, preset: str) -> dict[str, Any]:
    """A named model with what flags say of its training: losses of the router, a capacity, multi-token prediction."""
    experts = load_model(preset).moe
    more = {"moe": experts.model_dump(exclude_unset=True) | trained_with(keys)} if experts else dict[str, Any]()
    if depths := keys.whole("mtp_num_layers", least=0):
        more |= {"mtp": depths, "mtp_repeated": keys.on("mtp_use_repeated_layer")}
    return {"preset": preset} | more


def without_layers(keys: JobKeys, script: Script | None, words: list[Word]) -> None:
    """Report what is missing where no flag gives the number of layers: a variable, a sourced file, or a checkpoint."""
    blank = _blank(words)
    if told(keys.sets, "model") is not None:
        return
    if "$" not in (name := str(next((found for key in NAMED if (found := keys.get(key))), "$"))):
        keys.left_open["model"] = f"model {name!r} is not among the presets; add --set model=NAME"
        return
    own = [flag.name for flag in keys.flags() if flag.status == "unmodeled" and flag.note.startswith(NO_OPTION)]
    if script is not None and len(own) > 2:
        runs = f"line {script.line} launches {script.program}, whose flags are not Megatron-LM's"
        raise ConfigError(f"{keys.source}: {runs} ({', '.join(own[:3])} ...)")
    fix = "add --set model=NAME (3dtrn models), or the file that contains it with --with FILE"
    if "use_checkpoint_args" in keys.values or {"micro_batch_size", "hidden_size", "seq_length"} & keys.values.keys():
        lines = [*([blank] if blank else []), f"its flags have no --num-layers; {fix}"]
        flags = [*keys.flags(), *keys.assumed_flags]
        raise ConfigError([*(f"{keys.source}: {line}" for line in lines), *refusals(keys.source, flags)])
    in_yaml = any(word.text.startswith("--yaml-cfg") for word in words)  # which may have them
    where = f"line {script.line} launches {script.program}" if script is not None else ""
    if script is not None:
        foreign = _is_foreign(script.program)
        where += f"{', which is not a Megatron-LM training script' if foreign else ' with no flags of a model'}; "
    raise ConfigError(f"{keys.source}: {'' if in_yaml else where}{blank or f'its flags have no --num-layers; {fix}'}")


def of_options(keys: JobKeys, script: Script | None) -> list[str]:
    """A line for sizes that are 0 since a script is given none of its arguments; none where there are none."""
    zeros = [keys.name(key) for key in SIZES if script and script.wordless and str(keys.get(key)) == "0"]
    fix = "pass script and arguments as one string: 'SCRIPT ARG ...'"
    return [f"{', '.join(zeros)}: 0 without the script's arguments; {fix}"] if zeros else []


def also_unknown(keys: JobKeys, script: Script | None, problems: list[str]) -> list[str]:
    """The facts that a job lacks besides the missing values of these problems, so that all are asked for at once."""
    found: list[str] = []
    devices = script.unclear[0] if script is not None and script.unclear and not states_devices(keys.sets) else ""
    if devices and not set(_FIX.findall(devices)) & set(_FIX.findall(" ".join(problems))):
        found.append(devices)
    named = any("vocab" in problem or "tokenizer" in problem for problem in problems)
    named = named or any("$" in str(keys.get(key)) for key in TOKENIZERS)  # of which the same variable may be a part
    if not named and told(keys.sets, "model") is None and vocabulary(keys) is None:
        found.append("vocabulary size unknown; add --set model.vocab_sz=N")
    return found
