"""Figures of errors as text: shares in per cent, and rows of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = ["rows", "cells", "median", "mean", "p90", "bias"]


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share in per cent with one decimal."""
    if share is None:
        return "-"
    return f"{100.0 * share:+.1f} %" if signed else f"{100.0 * share:.1f} %"


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Rows, cells, median, mean, p90 and bias of one slice as text."""
    errors = [percent(figures[name]) for name in ("median", "mean", "p90")]
    return [f"{figures['rows']:,}", f"{figures['cells']:,}", *errors, percent(figures["bias"], signed=True)]


def rows_of(groups: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """One row per slice, its name first."""
    return [[name, *cells(figures)] for name, figures in groups.items()]
