"""The best layouts of a job: every layout that can run, screened in numpy columns, the finalists walked by `estimate`.

The package has the name of its function, so it can be called like it: `steptime.search(job, devices=1024)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """This module, which `search.run.search` answers for where it is called."""

    def __call__(self, *args: Any, **asked: Any) -> Any:
        from steptime.search.run import search

        return search(*args, **asked)


sys.modules[__name__].__class__ = _Search
