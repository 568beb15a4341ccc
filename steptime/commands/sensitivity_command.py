"""`3dtrn sensitivity CONFIG`: the gain from increasing each figure of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.commands.console import Printer, load

if TYPE_CHECKING:
    from argparse import Namespace


def sensitivity(options: Namespace, out: Printer) -> int:
    """The tables, or JSON, and the plot."""
    from steptime.report import sensitivity_tables
    from steptime.search import sensitivity as found_by

    if options.plot is not None:
        from steptime.report import plot_style

        plot_style.check(options.plot)
    found = found_by.sensitivity(load(options.config, options.sets))
    if options.json:
        out.json(found_by.document(found))
    else:
        out.sections(sensitivity_tables.sections(found))
    if options.plot is not None:
        sensitivity_tables.draw(found, options.plot)
    return 0
