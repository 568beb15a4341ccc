"""Megatron-LM: its launch scripts, lists of flags, and the argument dump at the beginning of its logs, as a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse
from steptime.hardware.machine import Machine
from steptime.launch.deepspeed import put_deepspeed_config
from steptime.launch.devices import of_script, still_true, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import load_table
from steptime.launch.logs.after_dump import other_jobs, vocabulary_of, zero_stage_of
from steptime.launch.logs.printed_config import BEGIN, read_dump
from steptime.launch.megatron import yaml_arguments
from steptime.launch.megatron.env_variables import from_outside, put_backend, put_tokenizer, switched_on, with_variables
from steptime.launch.megatron.flags import arguments_of, keys_of, read_words
from steptime.launch.megatron.layer_kinds import hybrid_pattern
from steptime.launch.megatron.missing_facts import also_unknown, by_name, of_no_framework, of_options, without_layers
from steptime.launch.megatron.own_layers import put_own_layers, put_spec
from steptime.launch.megatron.programs import does_not_train, own_model
from steptime.launch.megatron.releases import fitting_release, is_legacy
from steptime.launch.megatron.translation import plan_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import NOT_MODELED, OTHER_MODEL, Env, LaunchFlag, Reading, Sets, is_other_model, refusals
from steptime.launch.shell.processes import Word
from steptime.launch.shell.scope import argument_asked
from steptime.launch.shell.script import Script, read_script

_STEP = r"\biteration\s+\d+\s*/\s*\d+\s*\|"
"""Of the line that Megatron-LM logs for a step."""
_STARTED = re.compile(
    r"^(?:\++ )?(?:torchrun|deepspeed|python3? -m torch\.distributed\.\w+) [^\n]*--num-layers[^\n]*$", re.MULTILINE
)
"""A log's line with the command that started the job: `set -x`, or `echo` of it."""
_DEFAULT_STAGE = "1.0"
"""--zero-stage where it is not given, otherwise a whole number (Megatron-DeepSpeed megatron/arguments.py)."""


def read_megatron(
    path: str, text: str, env: Env = None, sets: Sets = None, nearby: NearbyFiles | None = None
) -> Reading:
    """A launch script, a log that begins with a dump of arguments, or a file of flags only, as a config.

    A file of flags is the words of a command line, or a mapping `MODEL_ARGS: {--flag: value}` as in Megatron-LM's own functional
    tests. Variables of a script are filled in from `env`. `sets`: dotted keys that the user sets; parallelism.dp overrides the
    processes that a script starts.

    Raises:
        ConfigError: one line per problem.
    """
    if BEGIN.search(text):
        try:
            arguments = read_dump(text.splitlines())
        except ConfigError as error:
            raise ConfigError(f"{path}: {problem}" for problem in error.problems) from None
        said, notes = of_dump(arguments, zero_stage_of(text)), other_jobs(text, arguments)
        return from_arguments(said, path, vocab_size=vocabulary_of(text), sets=sets, notes=notes)
    if re.search(r"^\s*MODEL_ARGS:", text, re.MULTILINE):
        words = _yaml_words(text, _model_args(text, path))
        return _from_words(path, words, None, sets, launcher=load_table("megatron").raw["tests"])
    if re.search(yaml_arguments.MARK, text, re.MULTILINE):
        return from_arguments(yaml_arguments.arguments_in(path, text, env or {}), path, sets=sets)
    if re.search(yaml_arguments.FLAGSCALE, text, re.MULTILINE):
        flags, devices = yaml_arguments.flags_in(path, text, nearby or NearbyFiles())
        return _from_words(path, _yaml_words(text, flags), None, sets, devices=devices)
    if re.match(r"\s*(#[^!][^\n]*\n\s*)*--[A-Za-z]", text):
        return _from_words(path, read_words(text, path), None, sets)
    if path.endswith(".py"):
        raise ConfigError(f"{path}: a Python program, which is not run; give its launch script, or the log of a run")
    if not text.startswith("#!") and (path.endswith((".log", ".out")) or re.search(_STEP, text)):
        if (command := _STARTED.search(text)) is None:
            missing = "a log without its dump of arguments (a line 'arguments' between dashes)"
            raise ConfigError(f"{path}: {missing}; give the log from its beginning, or the launch script")
        text = command[0].lstrip("+ ")
    script = read_script(text, path, dict(env or {}), nearby)
    return _from_words(path, script.arguments, script, sets, nearby or NearbyFiles())


def _model_args(text: str, path: str) -> dict[str, Any]:
    given = parse(text, path, repeats=True)  # its own loader takes the last of several
    given = given.get("MODEL_ARGS") if isinstance(given, dict) else None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: MODEL_ARGS: expected a mapping of flags")
    if given and not any(str(flag).startswith("-") for flag in given):
        what = "MODEL_ARGS override a NeMo recipe that is not in the file"
        raise ConfigError(f"{path}: {what}; give the full config of the job with --from nemo")
    return given


def _yaml_words(text: str, given: Mapping[str, Any]) -> list[Word]:
    """Flags of a mapping as the words of a command line; true is a switch, false or null is not given."""
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


def _from_words(
    path: str,
    words: list[Word],
    script: Script | None,
    sets: Sets,
    nearby: NearbyFiles | None = None,
    launcher: Mapping[str, Any] | None = None,
    devices: int | None = None,
) -> Reading:
    said = yaml_arguments.over(arguments_of(words, wordless=bool(script and script.wordless)), path, script, nearby)
    swift = script is not None and script.program in {"sft", "pt", "rlhf"}  # `megatron sft`
    keys = keys_of(said.arguments, said.names, path, sets, "swift_megatron" if swift else "megatron")
    keys.launcher, keys.nearby, keys.tokenizer = launcher, nearby or NearbyFiles(), script.tokenizer if script else ""
    keys.notes += said.notes
    if script is not None:
        _of_environment(keys, script)
    deep = {"num_layers", "encoder_num_layers", "hybrid_layer_pattern"}
    if not said.arguments.keys() & deep:
        of_no_framework(keys, script, words)
        if not by_name(keys, ("load",) if swift or keys.on("use_checkpoint_args") else ()):
            without_layers(keys, script, words)
    problems = [*said.problems, *of_options(keys, script)]
    if problems:  # values are missing, so nothing further can be said about the rest except what it is
        flags = [*keys.flags(), *keys.assumed_flags]
        if any(map(is_other_model, flags)):
            raise ConfigError(refusals(path, flags, NOT_MODELED))
        stage = _unknown_stage(keys) if told(sets, "parallelism.zero_level") is None else ""
        asked = (*problems, *also_unknown(keys, script, problems), *[stage][: bool(stage) and "$" not in stage])
        raise ConfigError([*(f"{path}: {problem}" for problem in asked), *refusals(path, flags)])
    if script is not None:
        keys.devices_per_node = script.devices_per_node
        told_here = still_true([*script.launched(), *script.notes], sets)
        keys.notes += [note for note in told_here if note not in keys.notes]
        if outside := from_outside(script.environment):
            keys.notes.append(f"from the environment: {outside}")
        if script.unclear:
            keys.left_open["parallelism.dp"] = script.unclear[0]
    _put_engine(keys)
    if stage := _unknown_stage(keys):
        keys.left_open["parallelism.zero_level"] = stage
    devices = of_script(keys, script.devices, script.notes) if script else devices
    reading = _plan(keys, is_legacy(said.arguments), devices)
    reading = _of_release(reading, fitting_release(said.arguments.keys()))
    return reading if script is None else _on_machine(with_variables(reading, script.variables), script)


def _put_engine(keys: JobKeys) -> None:
    """What a ds_config says, with its half precision; a problem where that is another one than the flags'.

    DeepSpeed casts the module to its own (deepspeedai/DeepSpeed runtime/engine.py, _configure_distributed_model).
    """
    extras = put_deepspeed_config(keys)
    keys.assumed_flags += [LaunchFlag("deepspeed_config", "", "unmodeled", what) for what in extras.beyond]
    for half, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if not extras.engine.get(half) or keys.on(half) or told(keys.sets, "performance.precision"):
            continue
        by = f"{keys.get('deepspeed_config')}: {half}.enabled"
        if keys.on(other):
            keys.problem(f"{by} contradicts {keys.name(other)}; add --set performance.precision={half} or {other}")
        else:
            keys.put(half, True, by=by)


def _unknown_stage(keys: JobKeys) -> str:
    """A message that only a ds_config, which was not found, states the ZeRO stage; "" otherwise."""
    named = keys.get("deepspeed_config")
    found = named is not None and keys.nearby.text(str(named)) is not None
    if not keys.on("deepspeed") or "zero_stage" in keys.values or found:
        return ""
    if asked := argument_asked(str(named)):
        return f"ds_config: {asked}, or add --set parallelism.zero_level=N"
    said = "is not given" if named is None else "has no value" if named in ("", True) else ""
    what = f"--deepspeed_config {said}" if said else f"ds_config {named} was not found"
    fix = "add --set parallelism.zero_level=N" + ", or the file --with FILE" * (named is not None)
    return f"{what}, so the ZeRO stage is unknown; {fix}"


def _on_machine(reading: Reading, script: Script) -> Reading:
    """The reading with the machine that the script's headers name, if it is shipped."""
    if not script.gpu:
        return reading
    try:
        machine = Machine.load(script.gpu.lower())
    except ConfigError:
        return reading
    flag = LaunchFlag("#SBATCH", script.gpu, "used", f"hardware.node_type: {machine.name}")
    config = reading.config | {"hardware": {"node_type": machine.name}}
    return reading._replace(config=config, flags=[flag, *reading.flags])


def _of_environment(keys: JobKeys, script: Script) -> None:
    """Settings that follow from the program and the variables of the script.

    Raises:
        ConfigError: the program does not train.
    """
    if does_not_train(script.program, keys.nearby):
        raise ConfigError(f"{keys.source}: line {script.line} runs {script.program}, which does not train")
    values, found = script.variables, keys.assumed_flags
    found += own_model(script.program, keys.nearby, values)
    put_backend(keys, values)
    put_tokenizer(keys, script.program, values)
    put_own_layers(keys, script)
    if re.search(r"gpt|llama", script.program) and "decoder_seq_length" in keys.values:
        keys.without_effect("decoder_seq_length", "of models with an encoder")
    for words, what in load_table("megatron").raw["other_programs"].items():
        if "hybrid" in words and hybrid_pattern(keys):
            continue
        if re.search(words, script.program.rpartition("/")[2]):
            found.append(LaunchFlag(script.program, "", "unmodeled", f"{what}, {OTHER_MODEL}"))
            break
    found += switched_on(values)


def from_arguments(
    arguments: Mapping[str, str],
    source: str,
    *,
    world_size: int | None = None,
    vocab_size: int | None = None,
    sets: Sets = None,
    table: str = "megatron",
    notes: Iterable[str] = (),
) -> Reading:
    """The config of Megatron-LM's arguments, under the names in its dump; `table` may extend Megatron-LM's.

    A log's own words on the vocabulary (`vocabulary_of`) override the tokenizer of its arguments.

    Raises:
        ConfigError: one line per problem: missing arguments, a world size that contradicts the layout.
    """
    said = dict(arguments)
    if vocab_size is not None:
        said |= {"vocab_size": str(vocab_size), "vocab_extra_ids": "0", "tokenizer_type": "None"}
    keys = keys_of(said, {}, source, sets, table)
    keys.notes += notes
    if keys.on("deepspeed") and said.get("zero_stage") == _DEFAULT_STAGE:
        what = "--zero-stage is not given, and the log does not print DeepSpeed's config"
        keys.left_open["parallelism.zero_level"] = f"ZeRO stage unknown: {what}; add --set parallelism.zero_level=N"
    reading = _plan(keys, is_legacy(arguments), world_size)
    return _of_release(reading, fitting_release(arguments.keys(), dump=True))


def of_dump(arguments: Mapping[str, str], zero_stage: int | None = None) -> dict[str, str]:
    """The arguments of a dump, which has all of its parser: without --transformer-impl there are only Megatron's own layers.

    `zero_stage`: of DeepSpeed's engine, which the log prints after the dump and which --zero-stage does not change.
    """
    alone = "transformer_impl" not in arguments and not is_legacy(arguments)
    found = {**arguments, "transformer_impl": "local"} if alone else dict(arguments)
    return found if zero_stage is None else found | {"zero_stage": str(zero_stage)}


def _of_release(reading: Reading, release: str) -> Reading:
    """The reading, with the releases whose parsers have its flags in addition to the one whose defaults are used."""
    told = f"{reading.framework.removesuffix(')')}; flags of {release})"
    return reading._replace(framework=told) if release and reading.framework.endswith(")") else reading


def _plan(keys: JobKeys, legacy: bool, devices: int | None) -> Reading:
    put_spec(keys)
    said = keys.whole("world_size")
    if said is not None and devices is not None and said != devices:
        contradicted = f"the launch command, which starts {devices} processes"
        keys.problem(f"{keys.name('world_size')} {said} contradicts {contradicted}")
    profile = "megatron-deepspeed" if keys.on("deepspeed") else "megatron-2021" if legacy else "megatron-core"
    if profile == "megatron-2021" and _keeps_gradients_twice(keys):
        profile = "megatron-2021@2021-03"
    return plan_of(keys, profile, said or devices)


def _keeps_gradients_twice(keys: JobKeys) -> bool:
    """Whether a dump is from code that keeps gradients twice, which it did from March to July 2021.

    use_contiguous_buffers_in_ddp came with it (NVIDIA/Megatron-LM@b4bc51b1); log_memory_to_tensorboard came two days before
    zero_grad freed the copies (24b7c3c0, 3202f237).
    """
    buffers = "use_contiguous_buffers_in_ddp"
    later = "log_memory_to_tensorboard" in keys.values or keys.get("DDP_impl") == "torch"
    if later or buffers not in keys.values or keys.on(buffers):
        return False
    keys.becomes(buffers, "performance.software")
    return True
