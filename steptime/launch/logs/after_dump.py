"""What a log of Megatron-LM or Megatron-DeepSpeed states after its dump of arguments, and which those do not decide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table, rule_of, spelled
from steptime.launch.logs.entries import Vocabulary, ZeroStage
from steptime.launch.logs.printed_config import BEGIN, read_dump

_VOCABULARY = re.compile(r"padded vocab \(size: (\d{1,15})\) with \d+ dummy tokens(?: \(new size: (\d{1,15})\))?")
"""Megatron-LM megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding: printed after the arguments, which lack it."""
_STAGE = re.compile(r"\bzero_optimization_stage \.{2,40} +(\d)\b")
"""deepspeedai/DeepSpeed deepspeed/runtime/config.py, DeepSpeedConfig.print: of its ds_config, whatever the arguments say."""


def vocabulary(text: str) -> Iterator[Vocabulary]:
    """Sizes of the vocabulary."""
    yield from (Vocabulary(int(found[1]), int(found[2] or 0)) for found in _VOCABULARY.finditer(text))


def zero_stage(text: str) -> Iterator[ZeroStage]:
    """The ZeRO stage of DeepSpeed's engine."""
    yield from (ZeroStage(int(found[1])) for found in _STAGE.finditer(text))


def vocabulary_of(text: str) -> int | None:
    """Size of the vocabulary that a log states after its dump: " > padded vocab (size: 50257) with 943 dummy tokens ..."."""
    return next((entry.size for entry in vocabulary(text)), None)


def zero_stage_of(text: str) -> int | None:
    """ZeRO stage that a log states so; None where it does not."""
    return next((entry.stage for entry in zero_stage(text)), None)


def _counts(argument: str) -> bool:
    """Whether an argument of a dump becomes a setting of a plan.

    >>> _counts("num_layers"), _counts("wandb_project")
    (True, False)
    """
    table = load_table("megatron")
    rule = rule_of(spelled(argument, table), table)
    return rule is not None and rule.status == "used"


def other_jobs(text: str, arguments: Mapping[str, str]) -> list[str]:
    """What to note of a log with a later dump, where arguments that count have other values than in the first, which is read."""
    names: set[str] = set()
    begins = [*(found.start() for found in BEGIN.finditer(text)), len(text)][1:]
    for begin, end in pairwise(begins):
        with suppress(ConfigError):  # a truncated dump
            later = read_dump(text[begin:end].splitlines())
            names |= {name for name, value in later.items() if arguments.get(name) != value and _counts(name)}
    told = ", ".join(sorted(names)[:4]) + (" ..." if len(names) > 4 else "")
    return [f"the log is of several jobs, which differ in {told}; the first is read"] if names else []
