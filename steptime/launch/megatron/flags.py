"""The flags of a command line, or of an argument dump, as Megatron-LM's arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import GivenKey, load_table, speaks_of_cost, spelled
from steptime.launch.megatron.model_section import TOKENIZERS
from steptime.launch.megatron.releases import is_legacy, of_older_release, own_layers_by_default, plain, takes
from steptime.launch.reading import Sets
from steptime.launch.shell.expansion import NOT_RUN
from steptime.launch.shell.processes import Word, split_words
from steptime.launch.shell.scope import DEVICES_OF_JOB, DEVICES_ON_NODE, NODES_OF_JOB, Unknown

_FILES = frozenset({*TOKENIZERS, "tokenizer_path"})
"""Arguments that name files: without a value they count as not set."""
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size")
"""Arguments without a default whose value is at least 1."""
_MISSING = Unknown("missing value")
_ARGUMENTS = "pass script and arguments as one string: 'SCRIPT ARG ...'"
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


def arguments_of(words: Iterable[Word], *, wordless: bool = False) -> CommandLine:
    """The arguments in the words after the program; the last of several wins, as in argparse.

    `wordless`: the script takes arguments and is given none.
    """
    line = CommandLine({}, {}, [], [], {})
    groups: list[list[Word]] = []
    known, undecided = _decided(split_words(list(words)))
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
    line.problems.extend(_unset(line.unset, wordless=wordless))
    return line


def _decided(words: list[Word]) -> tuple[list[Word], list[tuple[int, Unknown, str]]]:
    """The words, with variables to which an undecided test gives one of several texts replaced where their flags cost the same.

    Where the texts differ in flags that change cost, the variable's line, the reason, and those flags are returned too: what the
    job costs is then not known.
    """
    said, kept, open_ = set[str](), list[Word](), list[tuple[int, Unknown, str]]()
    for word in words:
        own = (reason for reason in word.unresolved if reason.why.startswith(f"{word.text} "))
        cause = next((reason for reason in own if reason.choices), None)
        if cause is None:
            kept.append(word)
            continue
        said = said or _said(words)
        texts = [[Word(text, word.line) for text in choice.split()] for choice in cause.choices]
        costs = [_costly(_with_flags(text), said) for text in texts]
        every = [{*cost.values()} for cost in costs]
        if differ := every[0].union(*every) - every[0].intersection(*every):
            open_.append((word.line, cause, ", ".join(dict.fromkeys(flag for flag, _ in sorted(differ)))))
        elif costs[0]:
            kept += next(text for text in texts if _with_flags(text))
        else:
            kept.append(word)
    return kept, open_


def _said(words: list[Word]) -> set[str]:
    """The arguments that the words give, whatever is undecided among them."""
    table = load_table("megatron")
    choices = {text for word in words for reason in word.unresolved for text in reason.choices}
    sure = [word for word in words if not any(reason.choices for reason in word.unresolved)]
    texts = [sure, *([Word(text, 0) for text in choice.split()] for choice in choices)]
    return {spelled(argument, table) for text in texts for argument in _with_flags(text)}


def _costly(arguments: Mapping[str, tuple[str, str]], said: set[str]) -> dict[str, tuple[str, str]]:
    """The arguments that may change what a job costs; one that matters only with another does not where that is off."""
    table = load_table("megatron")
    found = {}
    for argument, value in arguments.items():
        rule = table.rules.get(spelled(argument, table))
        needed = (rule.only_with if rule else "") or ("num_experts" if argument.startswith("moe_") else "")
        if needed and needed not in said and table.defaults.get(needed, ("", None))[1] in (None, False, 0, 1):
            continue
        if speaks_of_cost(argument) if rule is None else rule.status != "irrelevant":
            found[argument] = value
    return found


def _with_flags(words: list[Word]) -> dict[str, tuple[str, str]]:
    """The arguments in these words, each with its flag as written and its value."""
    said = arguments_of(words)
    return {argument: (said.names[argument], value) for argument, value in said.arguments.items()}


def _unset(unset: Mapping[tuple[int, Unknown], list[str]], *, wordless: bool) -> Iterator[str]:
    """One line for all unset variables, one for all missing arguments, one for all commands, and one per other reason."""
    groups: dict[str, list[tuple[int, Unknown, list[str]]]] = {}
    for (number, unknown), flags in unset.items():
        asked = unknown.variable not in {"", DEVICES_OF_JOB, DEVICES_ON_NODE, NODES_OF_JOB}
        kind = "" if not asked else "words" if unknown.variable.isdecimal() else "variables"
        kind = kind or ("commands" if NOT_RUN in unknown.why else unknown.why)
        groups.setdefault(kind, []).append((number, unknown, flags))
    for kind, found in groups.items():
        number, unknown, flags = found[0]
        named = dict.fromkeys(f"${other.variable}" for _, other, _ in found)
        if kind in {"words", "variables"} and len(named) > 1:
            fix = f"write {' '.join(f'{name[1:]}=...' for name in named)} before the command"
            if kind == "words":
                fix = _ARGUMENTS
                ordered = sorted(named, key=lambda one: int(one[1:]))
                named = dict.fromkeys(f"{name} ({_flags_with(name[1:], found)})" for name in ordered)
            yield f"line {number}: {', '.join(named)} have no value{unknown.because}; {fix}"
        else:
            more = f" (and {counted(len(found) - 1, 'other')})" if len(found) > 1 else ""
            fix = f"write the value{'s' if more else ''} into the script"
            told = unknown.told(_ARGUMENTS if wordless and unknown is _MISSING else fix)
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
    table = load_table("megatron")
    dashed = flag.text[2:].replace("_", "-")  # Megatron-LLM and ms-swift write --num_layers
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
    default = table.defaults.get(key, ("", None))[1]
    number = key in SIZES[:4] or (isinstance(default, int) and not isinstance(default, bool))  # --set gives a batch
    if not switch and not any(word.text for word in values) and (number or not values):
        line.unset.setdefault((flag.line, _MISSING), []).append(flag.text)
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
        older: dict[str, str | bool] = {"transformer_impl": "local", "use_legacy_models": True}
        older |= {} if takes("apply_rope_fusion", arguments) else {"apply_rope_fusion": False}
        found.defaults |= {key: (key, value) for key, value in older.items()}
    if found.on("bf16") and not found.on("grad_reduce_in_bf16"):  # arguments.py, validate_args
        key = "accumulate_allreduce_grads_in_fp32"
        found.defaults |= {key: (key, True)}
    return found
