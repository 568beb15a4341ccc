"""Factor by which a team's own steps are longer than estimated: the `performance.calibration` section of a config."""

from collections.abc import Iterable
from math import exp, fsum, log
from typing import NamedTuple, Self

from steptime.base.config import Config
from steptime.base.core_schemas import Field
from steptime.base.defaults import no_items

LOWEST, HIGHEST = 0.67, 1.5
"""Bounds of a factor (assumed). Correct configs on a known machine err by less; beyond, the run differs from its config."""
DOUBT = 0.25
"""Weight of the uncalibrated estimate, in runs: n runs count n / (n + 0.25). Of 0, 0.1, 0.25, 0.5, 1 and 2 this gives the
smallest mean error where one run of a model, accelerator, precision and release calibrates its siblings, over all rows marked
fit (benchmarks/calibrate.py)."""


class Factor(NamedTuple):
    """A factor on the step time, and whether a bound limits it."""

    value: float
    bounded: bool


def factor_of(ratios: list[float]) -> Factor:
    """The geometric mean of measured / estimated, shrunk towards 1 and limited by the bounds.

    >>> round(factor_of([1.2]).value, 4), factor_of([3.0])
    (1.157, Factor(value=1.5, bounded=True))

    Raises:
        ValueError: a ratio is not positive.
    """
    shrunk = exp(fsum(map(log, ratios)) / (len(ratios) + DOUBT))
    return Factor(min(max(shrunk, LOWEST), HIGHEST), not LOWEST <= shrunk <= HIGHEST)


class Calibration(Config, allow_inf_nan=False):
    """A factor on the seconds of kernels, launch gaps, links and hops. Fixed costs of collectives and the host are unchanged."""

    factor: float = Field(ge=LOWEST, le=HIGHEST)
    ratios: list[float] = Field(default_factory=no_items)
    """Measured over estimated step time, one per run."""
    source: str = ""
    """The file of these runs."""
    covers: list[str] = Field(default_factory=no_items)
    """Keys of what some of these runs have and no published run had: performance.cpu_offload, model.linear_attention."""

    @classmethod
    def of(cls, ratios: list[float], source: str, covers: Iterable[str] = ()) -> Self:
        """The calibration from some runs."""
        return cls(factor=factor_of(ratios).value, ratios=ratios, source=source, covers=sorted(covers))

    @property
    def words(self) -> list[str]:
        """What the calibration is based on, as lines of the assumptions."""
        centered = "calibrated: the 80 % interval keeps its width and is centered on the calibrated step"
        if not self.ratios:
            return [f"calibrated: modeled kernel and link times x {self.factor:.3f}, set in the plan", centered]
        n, low, high = len(self.ratios), min(self.ratios), max(self.ratios)
        span = f"{low:.3f}" if n == 1 else f"{low:.3f} to {high:.3f}"
        runs = f"{n} {'run' if n == 1 else 'runs'}"
        lines = [
            (
                f"calibrated: modeled kernel and link times x {self.factor:.3f}, from {runs} of {self.source} "
                f"(measured / modeled {span}, shrunk by {n} / ({n} + {DOUBT:g}))"
            ),
            centered,
        ]
        if factor_of(self.ratios).bounded:
            lines.append(
                f"note: these runs need more than the allowed calibration range ({LOWEST:g} to {HIGHEST:g}); check that they "
                "ran with their plans"
            )
        return lines


def slowdown(calibration: Calibration | None) -> float:
    """Factor on modeled seconds: 1, or the calibration's."""
    return 1.0 if calibration is None else calibration.factor
