"""steptime: how long a transformer training step takes, and whether it fits.

    from steptime import estimate

    estimate("plan.yaml")

The public names are imported when they are first used (PEP 562), so `import steptime` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptime.answer.result import Estimate, estimate
    from steptime.base.config import ConfigError
    from steptime.checkpoint import Summary, summarize_checkpoint
    from steptime.commands.quick import quick
    from steptime.hardware.machine import Machine
    from steptime.job.job import Job
    from steptime.job.mesh import Parallelism
    from steptime.job.sections import Data
    from steptime.model.model import Model
    from steptime.search.run import search
    from steptime.search.search import Search
    from steptime.software.performance import Performance

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "Data",
    "Estimate",
    "Job",
    "Machine",
    "Model",
    "Parallelism",
    "Performance",
    "Search",
    "Summary",
    "estimate",
    "quick",
    "search",
    "summarize_checkpoint",
]

_HOMES = {
    "ConfigError": "steptime.base.config",
    "Data": "steptime.report.notebook",
    "Estimate": "steptime.report.notebook",
    "Job": "steptime.report.notebook",
    "Machine": "steptime.report.notebook",
    "Model": "steptime.report.notebook",
    "Parallelism": "steptime.report.notebook",
    "Performance": "steptime.report.notebook",
    "Search": "steptime.report.search_tables",
    "Summary": "steptime.report.checkpoint_summary",
    "estimate": "steptime.report.notebook",
    "quick": "steptime.commands.quick",
    "search": "steptime.report.search_tables",
    "summarize_checkpoint": "steptime.report.checkpoint_summary",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals().pop("search", None)  # the package of that name, which its import has put there
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, used or not."""
    return sorted({"__doc__", "__version__", *__all__})
