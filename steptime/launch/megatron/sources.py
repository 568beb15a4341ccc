"""Megatron-LM: its launch scripts, lists of flags, and the dump of arguments that its logs begin with, as a config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from steptime.base.config import ConfigError
from steptime.base.document import parse
from steptime.hardware.machine import Machine
from steptime.launch.devices import told_whole
from steptime.launch.job_keys import JobKeys
from steptime.launch.logs.lines import vocabulary_of
from steptime.launch.logs.printed_config import BEGIN, read_dump
from steptime.launch.megatron.flags import arguments_of, is_legacy, keys_of, read_words
from steptime.launch.megatron.translation import plan_of
from steptime.launch.reading import LaunchFlag, Reading
from steptime.launch.shell.script import Script, Word, read_script

T = TypeVar("T")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that list the layers one by one, a letter each."""
_OTHER_MODELS = re.compile(r"pretrain_(bert|t5|mamba|hybrid|vlm|ict|retro|vision\w*)\b|train_multimodal")
"""Programs of Megatron-LM beside pretrain_gpt.py."""
_GPT = re.compile(r"(^|/)pretrain_gpt\.py$")
_MEMORY_VARIABLES = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("deterministic", {"0": True}),
    "CUBLAS_WORKSPACE_CONFIG": ("cublas_workspace", None),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments", {"expandable_segments:True": True}),
    "PYTORCH_ALLOC_CONF": ("expandable_segments", {"expandable_segments:True": True}),
}
"""Variable -> the key of the plan's performance section, and what its words mean there; None: as it stands."""


def read_megatron(
    path: str, text: str, env: Mapping[str, str] | None = None, sets: Mapping[str, Any] | None = None
) -> Reading:
    """A launch script, a log that begins with a dump of arguments, or a file of flags alone, as a config.

    A file of flags is the words of a command line, or a mapping `MODEL_ARGS: {--flag: value}` as Megatron-LM's own functional
    tests have it. Variables of a script are filled in from `env`. `sets`: dotted keys that the user sets; parallelism.dp goes
    before the processes that a script starts.

    Raises:
        ConfigError: one line per problem.
    """
    if BEGIN.search(text):
        arguments = _located(path, read_dump, text.splitlines())
        return from_arguments(arguments, path, vocab_size=vocabulary_of(text), sets=sets)
    if re.search(r"^\s*MODEL_ARGS:", text, re.MULTILINE):
        return _from_words(path, _yaml_words(text, path), None, sets)
    if re.match(r"\s*(#[^!][^\n]*\n\s*)*--[A-Za-z]", text):
        return _from_words(path, _located(path, read_words, text), None, sets)
    return _from_script(path, read_script(text, path, dict(env or {})), sets)


def _located(path: str, read: Callable[[Any], T], what: Any) -> T:
    """What a reader that does not know the file makes of it; its problems get the file's name."""
    try:
        return read(what)
    except ConfigError as error:
        raise ConfigError(f"{path}: {problem}" for problem in error.problems) from None


def _yaml_words(text: str, path: str) -> list[Word]:
    """The flags of a `MODEL_ARGS` mapping; true is a switch, false or null is not given."""
    given = parse(text, path)
    given = given.get("MODEL_ARGS") if isinstance(given, dict) else None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: MODEL_ARGS: expected a mapping of flags")
    words: list[Word] = []
    for flag, value in given.items():
        if value is False or value is None:
            continue
        lines = enumerate(text.splitlines(), 1)
        line = next((i for i, said in lines if re.match(rf"\s*{re.escape(flag)}\s*:", said)), 0)
        words.append(Word(str(flag), line))
        values = value if isinstance(value, list) else [] if value is True else str(value).split()
        words += [Word(str(item), line) for item in values]
    return words


def _from_script(path: str, script: Script, sets: Mapping[str, Any] | None) -> Reading:
    if not script.program:
        raise ConfigError(script.problems or [f"{path}: no launch command"])
    flags = {word.text.partition("=")[0] for word in script.arguments}
    if not flags & {"--num-layers", "--encoder-num-layers", "--hidden-size", "--micro-batch-size"}:
        blank = next((unknown.why for word in script.arguments for unknown in word.unresolved), "")
        what = f"line {script.line} launches {script.program}, which is not a Megatron-LM training script"
        raise ConfigError(f"{path}: {what}; {blank or 'its flags have no --num-layers'}")
    if told_whole(sets, "parallelism.dp") is not None:  # a script may leave its nodes to be edited
        script = script._replace(nodes=None, devices=None)
    return _from_words(path, script.arguments, script, sets)


def _from_words(path: str, words: list[Word], script: Script | None, sets: Mapping[str, Any] | None) -> Reading:
    said = arguments_of(words)
    if said.problems:
        raise ConfigError(f"{path}: {problem}" for problem in said.problems)
    if not said.arguments.keys() & {"num_layers", "encoder_num_layers", *_PATTERNS}:
        raise ConfigError(f"{path}: --num-layers is missing; not a Megatron-LM training")
    keys = keys_of(said.arguments, said.names, path, sets)
    keys.notes += said.notes
    if not said.arguments.keys() & {"num_layers", "encoder_num_layers"}:
        pattern = next(said.arguments[name] for name in _PATTERNS if name in said.arguments)
        keys.put("num_layers", len(re.sub(r"[|\s]", "", pattern.partition("/")[0])))
    if script is not None:
        _of_environment(keys, script)
        if script.devices_per_node and script.nodes:
            nodes = "1 node" if script.nodes == 1 else f"{script.nodes} nodes"
            keys.notes.append(f"launched on {nodes} with {script.devices_per_node} processes each")
        if outside := _from_outside(script.environment):
            keys.notes.append(f"from the environment: {outside}")
    reading = _plan(keys, is_legacy(said.arguments), script.devices if script else None)
    if script is None:
        return reading
    reading = _with_variables(reading, script.variables)
    if script.unclear:
        left_open = {**(reading.left_open or {}), "parallelism.dp": f"{script.unclear[0]}; add --set parallelism.dp=N"}
        reading = reading._replace(left_open=left_open)
    return _on_machine(reading, script)


def _from_outside(environment: dict[str, str]) -> str:
    """Variables of the environment in words: numbers and switches with their values, of all else (it may be secret) the name."""
    shown = re.compile(r"\d{1,6}|true|false", re.IGNORECASE)
    names = [name for name in sorted(environment) if not name.isdigit()]
    return ", ".join(f"{name}={environment[name]}" if shown.fullmatch(environment[name]) else name for name in names)


def _with_variables(reading: Reading, variables: Mapping[str, str]) -> Reading:
    """The reading with what variables of the environment say of kernels and workspaces."""
    performance, flags = dict(reading.config["performance"]), list(reading.flags)
    for variable, (key, words) in _MEMORY_VARIABLES.items():
        said = variables.get(variable)
        value = said if words is None else words.get(said or "")
        if value is not None and not (key == "cublas_workspace" and not re.fullmatch(r"(:\d+:\d+)+", str(value))):
            performance[key] = value
            flags.append(LaunchFlag(variable, str(said), "used", f"performance.{key}"))
    return reading._replace(config=reading.config | {"performance": performance}, flags=flags)


def _on_machine(reading: Reading, script: Script) -> Reading:
    """The reading with the machine that the script's headers name, where one is shipped under that name."""
    if not script.gpu:
        return reading
    try:
        machine = Machine.load(script.gpu.lower())
    except ConfigError:
        return reading
    if script.devices_per_node and script.devices_per_node > machine.devices_per_node:
        raise ConfigError(
            f"{reading.source}: {script.devices_per_node} processes on each node, and {machine.name} has "
            f"{machine.devices_per_node} devices"
        )
    flag = LaunchFlag("#SBATCH", script.gpu, "used", f"hardware.node_type: {machine.name}")
    config = reading.config | {"hardware": {"node_type": machine.name}}
    return reading._replace(config=config, flags=[flag, *reading.flags])


def _of_environment(keys: JobKeys, script: Script) -> None:
    """What the program and the variables of the script decide beside its flags."""
    values, found = script.variables, keys.beside_flags
    if values.get("NVTE_FLASH_ATTN") == "0" and values.get("NVTE_FUSED_ATTN") == "0":
        if "attention_backend" not in keys.values:
            keys.put("attention_backend", "unfused")
        found.append(LaunchFlag("NVTE_FLASH_ATTN, NVTE_FUSED_ATTN", "0", "used", "performance.attention_impl"))
    elif "attention_backend" not in keys.values:
        for variable, other in (("NVTE_FUSED_ATTN", "flash"), ("NVTE_FLASH_ATTN", "fused")):
            if values.get(variable) == "0":
                keys.put("attention_backend", other)
                found.append(LaunchFlag(variable, "0", "used", "performance.attention_backend"))
    if _GPT.search(script.program) and keys.get("tokenizer_type") is None and keys.get("vocab_size") is None:
        keys.put("tokenizer_type", "GPT2BPETokenizer")
        found.append(
            LaunchFlag(script.program, "", "used", "model.vocab_sz: its tokenizer where none is named is GPT-2's")
        )
    if _OTHER_MODELS.search(script.program):
        why = "another model than a decoder-only transformer: one is counted"
        found.append(LaunchFlag(script.program, "", "unmodelled", why))
    if values.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append(LaunchFlag("CUDA_LAUNCH_BLOCKING", "1", "unmodelled", "the host synchronizes after every kernel"))


def from_arguments(
    arguments: Mapping[str, str],
    source: str,
    *,
    world_size: int | None = None,
    vocab_size: int | None = None,
    sets: Mapping[str, Any] | None = None,
) -> Reading:
    """The config that Megatron-LM's arguments stand for, by the names that its dump prints.

    A log's own words on the vocabulary (`vocabulary_of`) go before what its arguments say of the tokenizer.

    Raises:
        ConfigError: one line per problem: missing arguments, a world size that contradicts the layout.
    """
    said = dict(arguments)
    if vocab_size is not None:
        said |= {"vocab_size": str(vocab_size), "vocab_extra_ids": "0", "tokenizer_type": "None"}
    return _plan(keys_of(said, {}, source, sets), is_legacy(arguments), world_size)


def _plan(keys: JobKeys, legacy: bool, devices: int | None) -> Reading:
    said = keys.whole("world_size")
    if said is not None and devices is not None and said != devices:
        keys.problem(
            f"{keys.name('world_size')} {said} contradicts the launch command, which starts {devices} processes"
        )
    return plan_of(keys, "megatron-2021" if legacy else "megatron-core", said or devices)
