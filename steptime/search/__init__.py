"""Search every layout of a plan: `steptime.search(job, devices=1024)` returns a `Search` with `.best`, `.top(n)`, `.pareto()`.

`job` is a `Job`, a path or a mapping. `devices`, `gbs`, `over`, `objective` ("step", "cost", "energy", "memory") and `axes` are
explained at `steptime.search.run.search`. Every layout that can run is screened in numpy columns, and the best are estimated in
full. The package has the name of its function and is called like it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """This module, called like `search.run.search`: the public name, which the report gives its tables for notebooks."""

    def __call__(self, *args: Any, **asked: Any) -> Any:
        return import_module("steptime").__getattr__("search")(*args, **asked)


sys.modules[__name__].__class__ = _Search
