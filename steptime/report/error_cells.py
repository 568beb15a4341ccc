"""Figures of errors as cells and rows of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report.format import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = ["rows", "cells", "median", "mean", "p90", "bias"]


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Rows, cells, median, mean, p90 and bias of one slice as text."""
    errors = [percent(figures[name]) for name in ("median", "mean", "p90")]
    return [f"{figures['rows']:,}", f"{figures['cells']:,}", *errors, percent(figures["bias"], signed=True)]


def rows_of(groups: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """One row per slice, its name first."""
    return [[name, *cells(figures)] for name, figures in groups.items()]
