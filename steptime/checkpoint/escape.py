"""Escapes names from a file for a terminal: control characters, bidirectional marks and lone surrogates."""

from __future__ import annotations

import unicodedata

MAX_NAME = 400


def escaped(text: str, limit: int = MAX_NAME) -> str:
    r"""`text` with everything unprintable written as \\x1b, \\u202e ...; cut in the middle beyond `limit` characters."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 + 3 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() and unicodedata.category(c) != "Cf" else _code(c) for c in text)


def _code(char: str) -> str:
    number = ord(char)
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
