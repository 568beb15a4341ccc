"""How every plot of `--plot` is made and saved: one style, and equal bytes for equal figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.report.output_files import check_path

SUFFIXES = (".png", ".svg", ".pdf")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "steptime",
    "pdf.fonttype": 42,
}
EDGE: dict[str, Any] = {"edgecolor": "#59616c", "linewidth": 0.5}
"""Edges of bars, which separate them in grayscale."""
_META: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def check(path: str) -> None:
    """Whether a plot can be written there, checked before anything is estimated.

    Raises:
        ConfigError: no format of that suffix, no such folder, or no matplotlib.
    """
    check_path("--plot", path, SUFFIXES)
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; pip install 'steptime[plot]'") from None
    del mpl


@contextmanager
def picture(path: str, width: float, height: float) -> Iterator[Any]:
    """A figure of this size in inches, saved at the end.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        kind = Path(path).suffix.lower().lstrip(".")
        try:
            figure.savefig(path, format=kind, dpi=160, metadata=_META[kind])
        except OSError as error:
            raise ConfigError(f"--plot {path}: cannot be written ({error.strerror or error})") from None


def plain_numbers(axis: Any) -> None:
    """Numbers of a logarithmic axis as people write them, at round multiples of powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,g}")
