"""What is not read, by name: compiled graphs and TensorFlow's own files, so that a refusal says what a file is.

Marks: TensorFlow Lite `tflite/schema.fbs` (file identifier TFL3), ExecuTorch `schema/program.fbs` (ET and two digits), ONNX
`onnx/onnx.proto` (ir_version is field 1), TensorFlow `saved_model.pb` and `tensor_bundle` (.index, .data-00000-of-00001).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SAVED_MODEL = "a TensorFlow SavedModel"
_BUNDLE = "a TensorFlow checkpoint"
_BY_NAME = (
    (re.compile(r"(?:^|/)saved_model\.pb(?:txt)?$"), _SAVED_MODEL),
    (re.compile(r"\.data-\d{5}-of-\d{5}$|\.ckpt(?:-\d+)?\.(?:index|meta)$|(?:^|/)variables\.index$"), _BUNDLE),
    (re.compile(r"\.onnx$"), "an ONNX model"),
    (re.compile(r"\.pte$"), "an ExecuTorch program"),
    (re.compile(r"\.tflite$"), "a TensorFlow Lite model"),
    (re.compile(r"\.mlmodel$|\.mlpackage/?$"), "a Core ML model"),
    (re.compile(r"\.(?:engine|plan)$"), "a TensorRT engine"),
)


def of_file(name: str, head: bytes) -> str | None:
    """What the file is, in words; None where it is none of these."""
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model"
    if head[4:6] == b"ET" and head[6:8].isdigit():
        return "an ExecuTorch program"
    return next((what for pattern, what in _BY_NAME if pattern.search(name.lower())), None)


def of_folder(names: Iterable[str]) -> str | None:
    """What a folder of these files is, in words."""
    found = [what for name in names if (what := of_file(name, b"")) is not None]
    return next((what for what in (_SAVED_MODEL, _BUNDLE) if what in found), found[0] if found else None)


def refusal(what: str) -> str:
    """The message for it."""
    return f"{what}: it is not read; give the checkpoint that it was made from"
