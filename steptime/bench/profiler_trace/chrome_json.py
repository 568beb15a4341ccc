"""The events of a Chrome trace, decoded one by one: a file of any size is never in memory as a whole."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from steptime.base.config import ConfigError

_CHUNK = 1 << 22
_LONGEST = 1 << 24
"""Longest event in characters; longer text without an event is not a trace."""
_HEAD = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def unpacked(path: str) -> TextIO:
    """A text stream, decompressed where the file begins with gzip's magic number."""
    with Path(path).open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return Path(path).open(encoding="utf-8", errors="replace")


def events(stream: TextIO, path: str, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events, one by one; the keys around them go to `head`.

    Raises:
        ConfigError: it is no trace, or ends early. A packed stream that ends early raises EOFError or zlib.error.
    """
    text, at = _seek(stream, path, head)
    decode = json.JSONDecoder().raw_decode
    count = 0
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            break
        try:
            event, at = decode(text, at)
        except json.JSONDecodeError:
            more = stream.read(_CHUNK)
            if not more:
                raise ConfigError(
                    f"{path}: event {count + 1} is truncated or not JSON; was the profiler still writing?"
                ) from None
            if len(text) - at > _LONGEST:
                raise ConfigError(f"{path}: event {count + 1} is not JSON") from None
            text, at = text[at:] + more, 0
            continue
        count += 1
        if not isinstance(event, dict):
            raise ConfigError(f"{path}: event {count} is not an object; not a torch.profiler trace")
        yield event
    tail = (text[at + 1 :] + stream.read(_LONGEST)).strip().lstrip(",")
    try:
        head.update(json.loads("{" + tail) if tail else {})
    except json.JSONDecodeError:
        return  # a reader's note after the events


def _seek(stream: TextIO, path: str, head: dict[str, Any]) -> tuple[str, int]:
    """Text read so far, and where the first event begins; keys before it go to `head`."""
    text = stream.read(_CHUNK)
    begin = text.lstrip()
    if begin.startswith("["):
        return begin, 1
    while (found := _HEAD.search(text)) is None:
        more = stream.read(_CHUNK) if begin.startswith("{") and len(text) < _LONGEST else ""
        if not more:
            raise ConfigError(f"{path}: not a trace: no traceEvents; give a file written by export_chrome_trace")
        text += more
    try:
        head.update(json.loads(text[: found.start()].rstrip().rstrip(",") + "}"))
    except json.JSONDecodeError:
        raise ConfigError(f"{path}: not a trace: the part before its events is not JSON") from None
    return text, found.end()
