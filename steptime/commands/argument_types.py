"""Types of option values: fractions, counts, lists."""

from __future__ import annotations

import argparse


def share(text: str) -> float:
    """A fraction between 0 and 1, as 0.4 or 40%."""
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"invalid fraction {text!r}; use 0.4 or 40%")
    return value


def words(text: str) -> list[str]:
    """Words separated by commas."""
    return [word for word in text.replace(" ", "").split(",") if word]


def parts(text: str) -> frozenset[str]:
    """Parts of a benchmark; by default all."""
    known = ("sweeps", "block", "step", "exact")
    if unknown := [word for word in words(text) if word not in known]:
        raise argparse.ArgumentTypeError(f"unknown benchmark part {unknown[0]!r}; use {', '.join(known)}")
    return frozenset(words(text) or known)


def positive_count(text: str) -> int:
    """A number of rows, 1 or more."""
    if not count(text):
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def count(text: str) -> int:
    """A number of rows, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid count {text!r}; use a whole number such as 10")
    return int(text)
