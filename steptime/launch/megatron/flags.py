"""The flags of a command line, or of an argument dump, as Megatron-LM's arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping, read_source
from steptime.base.words import counted
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import FOLDER, GivenKey, load_table, spelled
from steptime.launch.megatron.model_section import TOKENIZERS
from steptime.launch.megatron.older_releases import OLD_ARGUMENTS, is_legacy, of_older_release, plain
from steptime.launch.megatron.undecided_flags import decided
from steptime.launch.reading import Sets
from steptime.launch.shell.expansion import NOT_RUN
from steptime.launch.shell.processes import Word, split_words
from steptime.launch.shell.scope import DEVICES_OF_JOB, NODES_OF_JOB, Unknown

_OF_OWN_LAYERS = {"23.04", "23.06", "core 0.4", "core 0.5"}
"""Releases whose parsers have Megatron's own layers by default."""
_OF_CORE = "core 0.8"
"""From here on models are Megatron-Core's unless --use-legacy-models is given."""
_FILES = frozenset({*TOKENIZERS, "tokenizer_path"})
"""Arguments that name files: without a value they count as not set."""
_OF_LAUNCHER = {"world_size", "distributed_backend"}
"""Arguments from the launcher's own variables, or the host's name: the user is asked for devices and names the machine."""
_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)


class CommandLine(NamedTuple):
    """The flags of a command line."""

    arguments: dict[str, str]
    names: dict[str, str]
    """Argument -> the flag as written."""
    problems: list[str]
    notes: list[str]
    """Words without a value where a flag may stand: assumed to be empty, as in a shell."""
    unset: dict[tuple[int, Unknown], list[str]]
    """Line, and the reason for a missing value -> the flags that need it."""


def arguments_of(words: Iterable[Word]) -> CommandLine:
    """The arguments in the words after the program; the last of several wins, as in argparse."""
    line = CommandLine({}, {}, [], [], {})
    groups: list[list[Word]] = []
    known, undecided = decided(split_words(list(words)), _with_flags)
    for word in known:
        if _FLAG.fullmatch(word.text):
            name, equals, value = word.text.partition("=")
            groups.append([word._replace(text=name), *([word._replace(text=value)] if equals else [])])
        elif groups:
            groups[-1].append(word)
        else:
            _stray(word, line)
    for flag, *values in groups:
        _add(flag, values, line)
    for number, cause, named in undecided:
        line.unset.setdefault((number, cause), []).append(named)
    line.problems.extend(_unset(line.unset))
    return line


def _with_flags(words: list[Word]) -> dict[str, tuple[str, str]]:
    """The arguments in these words, each with its flag as written and its value."""
    said = arguments_of(words)
    return {argument: (said.names[argument], value) for argument, value in said.arguments.items()}


def _unset(unset: Mapping[tuple[int, Unknown], list[str]]) -> Iterator[str]:
    """One line for all unset variables, one for all missing arguments, one for all commands, and one per other reason."""
    groups: dict[str, list[tuple[int, Unknown, list[str]]]] = {}
    for (number, unknown), flags in unset.items():
        asked = unknown.variable not in {"", DEVICES_OF_JOB, NODES_OF_JOB}
        kind = "" if not asked else "words" if unknown.variable.isdecimal() else "variables"
        kind = kind or ("commands" if NOT_RUN in unknown.why else unknown.why)
        groups.setdefault(kind, []).append((number, unknown, flags))
    for kind, found in groups.items():
        number, unknown, flags = found[0]
        named = dict.fromkeys(f"${other.variable}" for _, other, _ in found)
        if kind in {"words", "variables"} and len(named) > 1:
            fix = f"write {' '.join(f'{name[1:]}=...' for name in named)} before the command"
            if kind == "words":
                fix = "pass script and arguments as one string: 'SCRIPT ARG ...'"
                ordered = sorted(named, key=lambda one: int(one[1:]))
                named = dict.fromkeys(f"{name} ({_flags_with(name[1:], found)})" for name in ordered)
            yield f"line {number}: {', '.join(named)} have no value; {fix}"
        else:
            more = f" (and {counted(len(found) - 1, 'other')})" if len(found) > 1 else ""
            told = unknown.told(f"write the value{'s' if more else ''} into the script")
            yield f"line {number}: {', '.join(dict.fromkeys(flag for *_, named in found for flag in named))}: {told}{more}"


def _flags_with(variable: str, found: Iterable[tuple[int, Unknown, list[str]]]) -> str:
    """The first flag that needs a variable's value, and whether others do."""
    named = ", ".join(flag for _, unknown, flags in found if unknown.variable == variable for flag in flags)
    flags = dict.fromkeys(named.split(", "))
    return f"{next(iter(flags), '')}{' ...' * (len(flags) > 1)}"


def _stray(word: Word, line: CommandLine) -> None:
    if word.unresolved:
        line.notes.append(f"line {word.line}: {word.unresolved[0].why}: taken as empty")
    elif word.text:
        line.problems.append(f"line {word.line}: {word.text!r} is not a flag")


def _add(flag: Word, values: list[Word], line: CommandLine) -> None:
    """Add a flag with its values."""
    table, dashed = (
        load_table("megatron"),
        flag.text[2:].replace("_", "-"),
    )  # Megatron-LLM and ms-swift write --num_layers
    off = table.raw["negations"].get(dashed)
    argument = off or table.raw["flag_names"].get(dashed) or dashed.replace("-", "_")
    key = spelled(argument, table)
    rule = table.rules.get(key)
    on_or_off = rule is not None and (False in rule.off or isinstance(table.defaults.get(key, ("", 0))[1], bool))
    said = len(values) == 1 and values[0].text.lower() in {"true", "false"}  # ms-swift's switches take a value
    always = off is not None or {argument, key} & set(table.raw["switches"])
    switch = (always or (on_or_off and not values)) and not said
    if switch:
        for word in values:
            _stray(word, line)
        values = []
    while len(values) > 1 and values[-1].unresolved:
        _stray(values[-1], line)
        values = values[:-1]
    if argument in _OF_LAUNCHER and any(word.unresolved for word in values):
        return
    line.names[argument] = flag.text
    line.arguments[argument] = "False" if off else " ".join(word.text for word in values) if values else "True"
    if rule is None or rule.status == "irrelevant" or argument in _FILES:
        return
    if not switch and not values:
        line.problems.append(f"line {flag.line}: {flag.text}: missing value")
    for word in values:
        for unknown in word.unresolved:
            line.unset.setdefault((word.line, unknown), []).append(flag.text)


def read_words(text: str, path: str) -> list[Word]:
    """The words of a list of flags only, one or more on a line.

    Raises:
        ConfigError: an unclosed quote.
    """
    found: list[Word] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += [Word(word, number) for word in shlex.split(line.removesuffix("\\"), comments=True)]
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
    return found


def fitting_release(arguments: Collection[str], *, dump: bool = False) -> str:
    """The releases whose parsers have all of the arguments, from first to last; for a dump, the one with the nearest parser.

    "" where no release has them all, or, for a dump, nearly all.

    >>> fitting_release(["DDP_impl", "num_layers"]), fitting_release(["num_layers", "muon_momentum"])
    ('2.0 to 23.06', 'core 0.16 to core 0.19')
    """
    said = set(arguments) - _derived() - {"world_size", "rank"}
    apart = {release: len(said - names) + (len(names - said) if dump else 0) for release, names in _parsed().items()}
    if dump:
        nearest = min(apart, key=lambda release: apart[release])
        return nearest if apart[nearest] <= len(said) // 5 else ""
    fits = [release for release, count in apart.items() if not count]
    return "" if not fits else fits[0] if len(fits) == 1 else f"{fits[0]} to {fits[-1]}"


@cache
def _parsed() -> dict[str, frozenset[str]]:
    """The arguments that each release's parser takes: it stops at those that 2.0 replaced."""
    names: frozenset[str] = frozenset()
    found: dict[str, frozenset[str]] = {}
    for release, change in releases().items():
        names = names.union(change.get("adds") or []).difference(change.get("drops") or [], OLD_ARGUMENTS)
        found[release] = names
    return found


@cache
def _derived() -> frozenset[str]:
    """Arguments that no parser has and that Megatron-LM derives from others."""
    derived = {key for key, rule in load_table("megatron").rules.items() if rule.note.startswith("derived")}
    return frozenset(derived.difference(*_parsed().values()))


def _has_core(release: str) -> bool:
    """Whether a release is one whose models are Megatron-Core's."""
    order = list(releases())
    return release in order and order.index(release) >= order.index(_OF_CORE)


def is_of_core(arguments: Collection[str]) -> bool:
    """Whether only releases whose models are Megatron-Core's have all of the arguments, and none asks for the legacy ones.

    The own layers of these have one attention, with all scores: --use-flash-attn is read by the legacy models only
    (NVIDIA/Megatron-LM core models/gpt/gpt_layer_specs.py, get_gpt_layer_local_spec; legacy/model/transformer.py).

    >>> is_of_core(["attention_backend"]), is_of_core(["num_layers"]), is_of_core(["attention_backend", "use_legacy_models"])
    (True, False, False)
    """
    return _has_core(fitting_release(arguments).partition(" to ")[0]) and "use_legacy_models" not in arguments


def may_be_of_core(arguments: Collection[str]) -> bool:
    """Whether a release whose models are Megatron-Core's has all of the arguments, as older ones may.

    >>> may_be_of_core(["use_flash_attn"]), may_be_of_core(["data_impl"])
    (True, False)
    """
    return _has_core(fitting_release(arguments).rpartition("to ")[2])


def own_layers_by_default(arguments: Collection[str]) -> bool:
    """Whether Megatron's own layers are the default: those of `--transformer-impl local`, up to core 0.5.

    NVIDIA/Megatron-LM megatron/arguments.py at the tags 23.04 to core_v0.5.0: the default of --transformer-impl is local;
    only the models of Megatron-Core (--use-mcore-models, pretrain_gpt.py) have TransformerEngine's layers in any case.

    >>> own_layers_by_default(["data_impl", "recompute_granularity"]), own_layers_by_default(["num_layers"])
    (True, False)
    """
    if {"transformer_impl", "use_mcore_models", "deprecated_use_mcore_models"} & set(arguments):
        return False
    return fitting_release(arguments).rpartition("to ")[2] in _OF_OWN_LAYERS


@cache
def releases() -> dict[str, dict[str, list[str]]]:
    """The arguments that each release adds to and removes from the previous one's parser."""
    found: dict[str, dict[str, list[str]]] = parse_mapping(*read_source(FOLDER / "megatron_releases.yaml"))["releases"]
    return {str(name): change for name, change in found.items()}


def keys_of(
    arguments: Mapping[str, str], names: Mapping[str, str], source: str, sets: Sets = None, kind: str = "megatron"
) -> JobKeys:
    """Arguments as settings of a table of this kind; `names` are the flags that gave them, none for a dump."""
    table, raw = load_table(kind), load_table("megatron").raw
    negations, flags = raw["negations"], {argument: flag for flag, argument in raw["flag_names"].items()}
    if is_legacy(arguments):
        table = of_older_release(table, arguments)

    def spell(argument: str) -> str:
        plain_name = not names or argument in negations.values()  # the flag only turns it off
        return argument if plain_name else "--" + flags.get(argument, argument.replace("_", "-"))

    given = [
        GivenKey(name, spelled(argument, table), plain(text), "true" if name[2:] in negations else "")
        for argument, text in arguments.items()
        for name in [names.get(argument, argument)]
    ]
    found = JobKeys(source, table, given, sets=sets, spell=spell)
    if not is_legacy(arguments) and own_layers_by_default(arguments):
        found.defaults |= {"transformer_impl": ("--transformer-impl", "local")}
    if found.on("bf16") and not found.on("grad_reduce_in_bf16"):  # arguments.py, validate_args
        key = "accumulate_allreduce_grads_in_fp32"
        found.defaults |= {key: (key, True)}
    return found
