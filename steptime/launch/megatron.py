"""Megatron-LM: its launch scripts, lists of flags, and the dump of arguments that its logs begin with, as a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse
from steptime.hardware.machine import Machine
from steptime.launch.devices import told_whole
from steptime.launch.megatron_flags import OLD_RELEASE, Arguments, arguments_of, plain, read_words, table
from steptime.launch.megatron_layout import layout_section
from steptime.launch.megatron_model import data_section, model_section
from steptime.launch.megatron_run import is_legacy, performance_section
from steptime.launch.reading import Flag, Reading
from steptime.launch.shell import Script, Word, read_script

_BEGIN = re.compile(r"-{8,} arguments -{8,}")
_END = re.compile(r"-{8,} end of arguments -{8,}")
_LINE = re.compile(r"(?:^|\s|:)([A-Za-z_]\w*(?= \.)|[A-Za-z_]\w{47,}) (\.*) (.*)$")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WIDTH = 48
"""Columns that a name and its dots fill (Megatron-LM, arguments.py, _print_args)."""
_PADDED = re.compile(r"padded vocab \(size: (\d+)\) with \d+ dummy tokens")
_OTHER_MODELS = re.compile(r"pretrain_(bert|t5|mamba|hybrid|vlm|ict|retro|vision\w*)\b|train_multimodal")
"""Programs of Megatron-LM beside pretrain_gpt.py."""
_SET_DP = "add --set parallelism.dp=N"
_SET_VOCAB = "add --set model.vocab_sz=N"
_OTHERS = (
    (r"torchtitan|--job\.config|--training\.", "torchtitan"),
    (r"nemo|--config-name|trainer\.", "nemo"),
    (r"--deepspeed", "deepspeed"),
)


def read_megatron(
    path: str,
    text: str,
    env: dict[str, str] | None = None,
    sets: Mapping[str, Any] | None = None,
) -> Reading:
    """A launch script, a log that begins with a dump of arguments, or a file of flags alone, as a config.

    A file of flags is the words of a command line, or a mapping `MODEL_ARGS: {--flag: value}` as Megatron-LM's own functional
    tests have it. Variables of a script are filled in from `env`. `sets`: dotted keys that the user sets; parallelism.dp goes
    before the processes that a script starts.

    Raises:
        ConfigError: one line per problem.
    """
    if _BEGIN.search(text):
        try:
            arguments = read_dump(text.splitlines())
        except ConfigError as error:
            raise _located(error, path) from None
        return from_arguments(arguments, path, vocab_size=vocabulary_of(text))
    if re.search(r"^\s*MODEL_ARGS:", text, re.MULTILINE):
        return _from_words(path, _yaml_words(text, path), None)
    if re.match(r"\s*(#[^!][^\n]*\n\s*)*--[A-Za-z]", text):
        try:
            return _from_words(path, read_words(text), None)
        except ConfigError as error:
            raise _located(error, path) from None
    return _from_script(path, read_script(text, path, env), told_whole(sets, "parallelism.dp"))


def _located(error: ConfigError, path: str) -> ConfigError:
    return ConfigError(line if line.startswith(path) else f"{path}: {line}" for line in error.problems)


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
        line = next(
            (i for i, said in enumerate(text.splitlines(), 1) if re.match(rf"\s*{re.escape(flag)}\s*:", said)), 0
        )
        words.append(Word(str(flag), line))
        values = value if isinstance(value, list) else [] if value is True else str(value).split()
        words += [Word(str(item), line) for item in values]
    return words


def _from_script(path: str, script: Script, dp: int | None) -> Reading:
    if not script.program:
        raise ConfigError(script.problems or [f"{path}: no launch command"])
    flags = {word.text.partition("=")[0] for word in script.arguments}
    if not flags & {"--num-layers", "--encoder-num-layers", "--hidden-size", "--micro-batch-size"}:
        everything = " ".join([*script.launchers, script.program, *flags])
        other = next((kind for words, kind in _OTHERS if re.search(words, everything)), "")
        blank = next((why for word in script.arguments for why in word.unresolved), "")
        hint = f"; try --from {other}" if other else f"; {blank}" if blank else "; its flags have no --num-layers"
        raise ConfigError(
            f"{path}: line {script.line} launches {script.program}, which is no Megatron-LM training{hint}"
        )
    if dp is not None:  # the user tells the devices: a script may leave them to be edited
        script = script._replace(nodes=None, devices=None)
    return _from_words(path, script.arguments, script)


def _from_words(path: str, words: list[Word], script: Script | None) -> Reading:
    said = arguments_of(words)
    if said.problems:
        raise ConfigError(f"{path}: {problem}" for problem in said.problems)
    if not said.arguments.keys() & {"num_layers", "encoder_num_layers"}:
        raise ConfigError(f"{path}: --num-layers is missing; not a Megatron-LM training")
    notes = list(said.notes)
    extra: list[Flag] = []
    if script is not None:
        extra += _environment(script, said.arguments)
        if script.devices_per_node and script.nodes:
            nodes = "1 node" if script.nodes == 1 else f"{script.nodes} nodes"
            notes.append(f"launched on {nodes} with {script.devices_per_node} processes each")
        if outside := _from_outside(script.environment):
            notes.append(f"from the environment: {outside}")
    reading = _reading(Arguments(said.arguments, said.names), path, script.devices if script else None, notes, extra)
    if script is not None and script.problems and reading.left_open and "parallelism.dp" in reading.left_open:
        why = script.problems[0].removeprefix(f"{path}: ")
        reading = reading._replace(left_open={**reading.left_open, "parallelism.dp": f"{why}; {_SET_DP}"})
    return reading if script is None else _on_machine(reading, script)


def _from_outside(environment: dict[str, str]) -> str:
    """Variables of the environment in words: numbers and switches with their values, of all else (it may be secret) the name."""
    shown = re.compile(r"\d{1,6}|true|false", re.IGNORECASE)
    names = [name for name in sorted(environment) if not name.isdigit()]
    return ", ".join(f"{name}={environment[name]}" if shown.fullmatch(environment[name]) else name for name in names)


def _on_machine(reading: Reading, script: Script) -> Reading:
    """The reading with the machine that the script's headers name, where one is shipped under that name."""
    try:
        machine = Machine.load(script.gpu.lower())
    except ConfigError:
        return reading
    if script.devices_per_node and script.devices_per_node > machine.devices_per_node:
        raise ConfigError(
            f"{reading.source}: {script.devices_per_node} processes on each node, and {machine.name} has "
            f"{machine.devices_per_node} devices"
        )
    flag = Flag("#SBATCH", script.gpu, "used", f"hardware.node_type: {machine.name}")
    config = reading.config | {"hardware": {"node_type": machine.name}}
    return reading._replace(config=config, flags=[flag, *reading.flags])


def _environment(script: Script, arguments: dict[str, str]) -> list[Flag]:
    """What the program and the variables of the script decide beside its flags."""
    values = script.variables
    found: list[Flag] = []
    if values.get("NVTE_FLASH_ATTN") == "0" and values.get("NVTE_FUSED_ATTN") == "0":
        arguments.setdefault("attention_backend", "unfused")
        found.append(Flag("NVTE_FLASH_ATTN, NVTE_FUSED_ATTN", "0", "used", "performance.attention_impl"))
    if _OTHER_MODELS.search(script.program):
        found.append(
            Flag(script.program, "", "unmodelled", "another model than a decoder-only transformer: one is counted")
        )
    if values.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append(Flag("CUDA_LAUNCH_BLOCKING", "1", "unmodelled", "the host waits for every kernel"))
    return found


# --- the dump ----------------------------------------------------------------------------------------------------------


def read_dump(lines: Iterable[str]) -> dict[str, str]:
    """Argument -> text of the dump that a Megatron log begins with; reads no further than its end.

    Prefixes of ranks, time stamps and colours are taken off; lines of other ranks in between are passed over.

    Raises:
        ConfigError: there is no dump, or it is cut in the middle.
    """
    arguments: dict[str, str] = {}
    inside = False
    last = 0
    for number, raw in enumerate(lines, 1):
        line = _ANSI.sub("", raw).rstrip()
        if _BEGIN.search(line):
            inside, arguments = True, {}
        elif inside and _END.search(line):
            if not arguments:
                raise ConfigError(f"line {number}: the dump of arguments is empty")
            return arguments
        elif inside and (found := _LINE.search(f"{line} ")):
            name, dots, value = found.groups()
            if len(name) + len(dots) == max(_WIDTH, len(name)):
                arguments[name] = value.strip()
                last = number
    if inside:
        where = f" after line {last}" if last else ""
        raise ConfigError(f"the dump of arguments is cut{where}: no 'end of arguments' follows")
    raise ConfigError("no dump of arguments ('------ arguments ------') in it; not a Megatron-LM log")


def vocabulary_of(text: str) -> int | None:
    """Entries of the vocabulary that a log states after its dump: " > padded vocab (size: 50257) with 943 dummy tokens ..."."""
    found = _PADDED.search(text)
    return int(found[1]) if found else None


def from_arguments(
    arguments: dict[str, str], source: str, *, world_size: int | None = None, vocab_size: int | None = None
) -> Reading:
    """The config that Megatron-LM's arguments stand for, by the names that its dump prints.

    A log's own words on the vocabulary (`vocabulary_of`) go before what its arguments say of the tokenizer.

    Raises:
        ConfigError: one line per problem: missing arguments, a world size that contradicts the layout.
    """
    said = dict(arguments)
    if vocab_size is not None:
        said |= {"vocab_size": str(vocab_size), "vocab_extra_ids": "0", "tokenizer_type": "None"}
    if said.get("sequence_parallel") == "True":  # validate_args turns it off then: reduce-scatters take its place
        said.pop("async_tensor_model_parallel_allreduce", None)
    return _reading(Arguments(said), source, world_size, [], [])


def _reading(arguments: Arguments, source: str, devices: int | None, notes: list[str], extra: list[Flag]) -> Reading:
    a = arguments
    a.old = is_legacy(a)
    said = a.whole("world_size") if "world_size" in a.said else None
    if said is not None and devices is not None and said != devices:
        a.problems.append(
            f"{a.name('world_size')} {said} contradicts the launch command, which starts {devices} processes"
        )
    layout = layout_section(a, said or devices)
    model = model_section(a, notes)
    performance = performance_section(a, layout, glu=bool(model["glu"]))
    if "bucket_size_mb" in layout:  # said in elements of the gradient buffer
        layout["bucket_size_mb"] *= (4 if performance["main_grad_dtype"] == "fp32" else 2) / 1e6
    data = data_section(a, layout.get("dp"), notes)
    a.problems += _missing(a, model, data)
    if a.problems:
        raise ConfigError(f"{source}: {problem}" for problem in dict.fromkeys(a.problems))
    release = OLD_RELEASE if a.old else table().release
    config: dict[str, Any] = {"model": model, "parallelism": layout, "performance": performance, "data": data}
    if notes:
        config["notes"] = notes
    open_keys = {
        key: why
        for key, why, there in (
            ("parallelism.dp", f"does not say how many devices there are; {_SET_DP}", "dp" in layout),
            ("model.vocab_sz", f"does not say the vocabulary; {_SET_VOCAB}", "vocab_sz" in model),
            ("data.gbs", "does not say the global batch; add --set data.gbs=N", "gbs" in data),
        )
        if not there
    }
    return Reading(source, release, config, [*extra, *a.flags()], open_keys)


def _missing(a: Arguments, model: dict[str, Any], data: dict[str, Any]) -> Iterator[str]:
    """What Megatron-LM itself asks for."""
    needed = {
        "num_layers": "n_layers" in model,
        "hidden_size": "hidden_sz" in model,
        "num_attention_heads": "n_q_heads" in model,
        "seq_length": "seqlen" in data,
        "micro_batch_size": "microbatch_sz" in data,
    }
    for argument, there in needed.items():
        if not there and plain(a.said.get(argument, "")) is None:
            yield f"{a.name(argument)} is missing"


__all__ = ["from_arguments", "read_dump", "read_megatron", "vocabulary_of"]
