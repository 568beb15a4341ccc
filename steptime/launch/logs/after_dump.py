"""What a log of Megatron-LM or Megatron-DeepSpeed states after its dump of arguments, and which those do not decide."""

from __future__ import annotations

import re
from collections.abc import Iterator

from steptime.launch.logs.entries import Vocabulary, ZeroStage

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
