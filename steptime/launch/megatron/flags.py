"""The flags of a command line, and what a dump prints, as Megatron-LM's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import GivenKey, load_table, spelled
from steptime.launch.shell.script import Word

OLD_RELEASE = "Megatron-LM (2021 and 2022)"
_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_WORDS = {"": None, "None": None, "[]": None, "{}": None, "()": None, "True": True, "False": False}
_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}


class CommandLine(NamedTuple):
    """The flags of a command line."""

    arguments: dict[str, str]
    names: dict[str, str]
    """Argument -> the flag as it stands there."""
    problems: list[str]
    notes: list[str]
    """Words without a value that stand where a flag may: taken as empty, as the shell does."""


def arguments_of(words: Iterable[Word]) -> CommandLine:
    """The arguments that the words after the program stand for; the last one of several wins, as in argparse."""
    line = CommandLine({}, {}, [], [])
    groups: list[list[Word]] = []
    for word in words:
        if _FLAG.fullmatch(word.text):
            name, equals, value = word.text.partition("=")
            groups.append([word._replace(text=name), *([word._replace(text=value)] if equals else [])])
        elif groups:
            groups[-1].append(word)
        else:
            _stray(word, line)
    for flag, *values in groups:
        _add(flag, values, line)
    return line


def _stray(word: Word, line: CommandLine) -> None:
    if word.unresolved:
        line.notes.append(f"line {word.line}: {word.unresolved[0].why}: taken as empty")
    elif word.text:
        line.problems.append(f"line {word.line}: {word.text!r} is not a flag")


def _add(flag: Word, values: list[Word], line: CommandLine) -> None:
    """Add a flag with its values."""
    table, bare = load_table("megatron"), flag.text[2:]
    off = table.raw["negations"].get(bare)
    argument = off or table.raw["flag_names"].get(bare) or bare.replace("-", "_")
    rule = table.rules.get(spelled(argument, table))
    switch = off is not None or argument in table.raw["switches"]
    if switch or rule is None:
        kept = [] if switch else values
        for word in values[len(kept) :]:
            _stray(word, line)
        values = kept
    while len(values) > 1 and values[-1].unresolved:
        _stray(values[-1], line)
        values = values[:-1]
    line.names[argument] = flag.text
    line.arguments[argument] = "False" if off else " ".join(word.text for word in values) if values else "True"
    if rule is None or rule.status == "irrelevant":
        return
    if not switch and not values:
        line.problems.append(f"line {flag.line}: {flag.text}: a value is missing")
    for word in values:
        for unknown in word.unresolved:
            line.problems.append(f"line {word.line}: {flag.text}: {unknown.told('write the value into the script')}")


def read_words(text: str) -> list[Word]:
    """The words of a list of flags alone, one or more on a line.

    Raises:
        ConfigError: a quote that never ends.
    """
    import shlex

    found: list[Word] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += [Word(word, number) for word in shlex.split(line.removesuffix("\\"), comments=True)]
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None
    return found


def plain(value: Any) -> Any:
    """A value without Python's clothes: torch.bfloat16 is bf16, AttnBackend.auto is auto, None is nothing, True is true."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if found := re.fullmatch(r"<?(?:torch|[A-Z]\w+)\.(\w+)(?:: .*>)?", text):
        return _DTYPES.get(found[1], found[1])
    return text


def is_legacy(arguments: Mapping[str, str]) -> bool:
    """Whether the arguments are of Megatron-LM before Megatron-Core and TransformerEngine: those of 2021 and 2022."""
    if "transformer_impl" in arguments or "recompute_granularity" in arguments:
        return False
    alone = {"DDP_impl", "activations_checkpoint_method", "data_impl"}
    return plain(arguments.get("checkpoint_activations")) is True or bool(alone & arguments.keys())


def keys_of(
    arguments: Mapping[str, str], names: Mapping[str, str], source: str, sets: Mapping[str, Any] | None = None
) -> JobKeys:
    """Arguments as settings; `names` are the flags that said them, none for a dump."""
    table = load_table("megatron")
    negations, flags = table.raw["negations"], {argument: flag for flag, argument in table.raw["flag_names"].items()}
    if is_legacy(arguments):
        listed = {key: table.defaults[key] for key in table.raw["of_2021"]}
        unlisted = {key: value for key, (_, value) in table.defaults.items() if key not in listed}
        table = table._replace(framework=OLD_RELEASE, defaults=listed, unlisted=unlisted)

    def spell(argument: str) -> str:
        plain_name = not names or argument in negations.values()  # a flag only turns it off
        return argument if plain_name else "--" + flags.get(argument, argument.replace("_", "-"))

    given = [
        GivenKey(name, spelled(argument, table), plain(text), "true" if name[2:] in negations else "")
        for argument, text in arguments.items()
        for name in [names.get(argument, argument)]
    ]
    found = JobKeys(source, table, given, sets=sets, spell=spell)
    if found.on("bf16") and not found.on("grad_reduce_in_bf16"):  # arguments.py, validate_args
        key = "accumulate_allreduce_grads_in_fp32"
        found.defaults |= {key: (key, True)}
    return found
