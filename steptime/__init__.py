"""steptime: how long a transformer training step takes, and whether it fits.

    from steptime import Job, estimate

    estimate(Job.load("plan.yaml"))

The public names are imported when they are first used (PEP 562), so `import steptime` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptime.checkpoint import Summary, summarize_checkpoint
    from steptime.job import Data, Job
    from steptime.machine import Machine
    from steptime.mesh import Parallelism
    from steptime.model.model import Model
    from steptime.performance import Performance
    from steptime.step import Estimate, estimate

__version__ = "0.1.0"

__all__ = [
    "Data",
    "Estimate",
    "Job",
    "Machine",
    "Model",
    "Parallelism",
    "Performance",
    "Summary",
    "estimate",
    "summarize_checkpoint",
]

_HOMES = {
    "Data": "steptime.job",
    "Estimate": "steptime.step",
    "Job": "steptime.job",
    "Machine": "steptime.machine",
    "Model": "steptime.model.model",
    "Parallelism": "steptime.mesh",
    "Performance": "steptime.performance",
    "Summary": "steptime.checkpoint",
    "estimate": "steptime.step",
    "summarize_checkpoint": "steptime.checkpoint",
}

# The function `estimate` and the module of that name share one attribute of the package. Python binds the module to it once, when
# it is first loaded: loaded and unbound here, the attribute is the function's, in whatever order others import.
import_module("steptime.estimate")
del globals()["estimate"]


def __getattr__(name: str) -> Any:
    """Import a public name's module at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, used or not."""
    return sorted({*globals(), *__all__})
