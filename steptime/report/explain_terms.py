"""What a term printed in a table of the report is explained by: the name of its page."""

from __future__ import annotations

import re
from collections.abc import Container

from steptime.job.mesh import comm_part
from steptime.report.breakdown import MEMORY_ROWS, RECEIVE_BUFFERS
from steptime.report.details import RUN
from steptime.report.headline import VERDICTS

_MEMORY = (
    *(label for label, _ in MEMORY_ROWS),
    *(word for word, _ in VERDICTS.values()),
    *("context, communicators", RECEIVE_BUFFERS, "needed at least", "needed at most", "needed at most (p90)"),
    *("states on the host, a node", "memory per device"),
)
_PAGES = {
    **dict.fromkeys(_MEMORY, "memory"),
    **dict.fromkeys(("sum", "TIME", "hidden", "exposed", "step time breakdown"), "step"),
    "WORK": "mfu",
    "HOST": "launch",
    **dict.fromkeys(("RUN", "the whole run", *(label.strip() for label, _ in RUN.values() if label)), "run"),
    **dict.fromkeys(("schedule", "in flight", "layers", "pipeline"), "bubble"),
    **dict.fromkeys(("forward", "dgrad", "wgrad"), "gemm"),
    **dict.fromkeys(("weak scaling", "efficiency"), "scaling"),
}
_FORMS = (
    (r"left of [\d.,]+ (usable|there)", "memory"),
    (r"each of \d+ boundaries", "pp_comm"),
    (r"dp [\d,]+", "scaling"),
)
"""Terms with a number in them."""
_BY_TERM = {term.lower(): page for term, page in _PAGES.items()}


def page_of(axes: Container[str], term: str) -> str:
    """The name of the page that explains a printed term, which may be one of the `axes` of a job; "" where there is none.

    >>> page_of({"edp"}, "needed at most (p90)"), page_of({"edp"}, "left of 79.2 usable"), page_of({"edp"}, "edp")
    ('memory', 'memory', 'dp_comm')
    """
    if page := _BY_TERM.get(term.lower()):
        return page
    for form, page in _FORMS:
        if re.fullmatch(form, term):
            return page
    return comm_part(term) if term in axes else ""
