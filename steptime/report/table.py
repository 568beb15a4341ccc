"""Tables and facts as data, and their layout as lines of text: the one layout of every command, checkpoints included.

Sections are built once as `Table` or `FactList`; text and HTML lay out the same objects. HTML is tabulate's (`report.html`);
text is not. Imported after `3dtrn configs/llama3_70b.yaml` tabulate took 26.0 ms, of them 11.9 ms for wcwidth where that is
installed (IPython brings it), and 6.5 ms without it (python -X importtime, least of 12, tabulate 0.10, two busy cores on which
all imports of the run took 517 ms). Tabulate also has no page width: narrower gaps, cut columns and heading rows would have to be
written here anyway.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any, Literal, NamedTuple, TextIO

WIDTH = 80
Tone = Literal["plain", "good", "warn", "bad", "head", "dim"]
_LEAST = 8
"""Characters to which a column may be cut."""
_LABEL = 32
"""Longest label that widens the column of labels."""
_BOUND = re.compile(
    r"(?<=\d) (?=(?:%|[num]?s|min|h|days|[KMGT]?i?B|[kMGTPE]?FLOP)(?:[\s/,;:.)]|$))|(?<=--set) | (?=\\$)"
)
"""Blanks at which a line must not break."""
_ANSI: dict[Tone, str] = {"good": "1;32", "warn": "1;33", "bad": "1;31", "head": "1", "dim": "2"}
ASCII = str.maketrans({"█": "#", "▌": "#", "─": "-", "…": "~"})
"""ASCII replacements of the characters used in layouts."""
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in xterm's colors 16 to 231; grays 232 to 255 are 8, 18, ... 238 (xterm, 256colres.pl)."""


def printable(text: str) -> str:
    r"""Text without control characters, which names in an input file may contain; colors, tabs and line breaks stay.

    >>> printable("a\x1b[2Jb\x7f\n")
    'a?[2Jb?\n'
    """
    return _CONTROL.sub("?", text)


def unstyled(text: str) -> str:
    r"""The same for text that has no style yet: any color code in it comes from the input file.

    >>> unstyled("a\x1b[31mb")
    'a?[31mb'
    """
    return printable(text.replace("\x1b", "?"))


_CONTROL = re.compile("(?!\x1b\\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Style(NamedTuple):
    """Output style: with or without colors, Unicode or ASCII only, number of columns."""

    color: bool = False
    ascii: bool = False
    width: int = WIDTH

    def paint(self, text: str, tone: Tone) -> str:
        """`text` in the color of its tone only."""
        text = unstyled(text)
        code = _ANSI.get(tone) if self.color and text else None
        return f"\x1b[{code}m{text}\x1b[0m" if code else text

    def tint(self, text: str, color: str) -> str:
        """`text` in the one of a terminal's 240 fixed colors nearest to an #rrggbb."""
        text = unstyled(text)
        if not self.color or not text.strip():
            return text
        return f"\x1b[38;5;{_nearest(color)}m{text.rstrip()}\x1b[0m"

    def fold(self, text: str) -> str:
        """`text` in ASCII where required; characters without a replacement, and control characters, become "?"."""
        text = printable(text)
        return text.translate(ASCII).encode("ascii", "replace").decode("ascii") if self.ascii else text


PLAIN = Style()


def _nearest(color: str) -> int:
    """The number, of xterm's 256 colors, of the nearest color of the cube (16 to 231) or gray (232 to 255)."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    steps = [min(range(6), key=lambda step: abs(_CUBE[step] - part)) for part in wanted]
    gray = min(range(24), key=lambda step: sum((8 + 10 * step - part) ** 2 for part in wanted))
    in_cube = sum((_CUBE[step] - part) ** 2 for step, part in zip(steps, wanted, strict=True))
    if sum((8 + 10 * gray - part) ** 2 for part in wanted) < in_cube:
        return 232 + gray
    return 16 + 36 * steps[0] + 6 * steps[1] + steps[2]


def wants_color(choice: str, *, tty: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to color: --color first, then NO_COLOR (no-color.org), FORCE_COLOR, then whether the stream is a terminal."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return tty and environ.get("TERM") != "dumb"


def style_of(stream: TextIO, color: str = "auto", *, ascii_only: bool = False) -> Style:
    """The style for a stream: only characters that its encoding has."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    tty = bool(getattr(stream, "isatty", bool)())
    return Style(wants_color(color, tty=tty), ascii_only or not encoding.startswith("utf"))


class Fact(NamedTuple):
    """A label and the lines that belong to it."""

    label: str
    lines: list[str]
    tone: Tone = "plain"


class FactList(NamedTuple):
    """Labeled lines, one below the other."""

    title: str
    facts: list[Fact]


class Table(NamedTuple):
    """Rows of text under a header. A row of one cell heads those after it; an empty row is a rule."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: Sequence[str] = ()
    left: int = 1
    """How many leading columns are aligned left."""
    tails: bool = False
    """Whether cells that are too long keep their end, for names that differ there."""
    bar_colors: Sequence[str] = ()
    """By row, the #rrggbb of the bar in its last cell, where rows have one."""


ReportSection = Table | FactList


def document(sections: Iterable[ReportSection]) -> dict[str, Any]:
    """Sections as plain data, for commands whose output is tables; cells are the text that is printed."""
    return {"sections": [_plain(section) for section in sections]}


def _plain(section: ReportSection) -> dict[str, Any]:
    if isinstance(section, FactList):
        return {"title": section.title, "facts": [{"label": fact.label, "lines": fact.lines} for fact in section.facts]}
    rows = [row for row in section.rows if row]
    return {"title": section.title, "header": section.header, "rows": rows, "notes": list(section.notes)}


def to_text(sections: Sequence[ReportSection], style: Style = PLAIN) -> str:
    """Sections separated by an empty line."""
    return "\n\n".join("\n".join(layout(section, style)) for section in sections) + "\n"


def layout(section: ReportSection, style: Style) -> list[str]:
    """The lines of one section, title first, within the columns of `style`."""
    plain = _unstyled(section)
    lines = _facts(plain, style) if isinstance(plain, FactList) else _table(plain, style)
    return [style.fold(line).rstrip() for line in lines]


def _unstyled(part: Any) -> Any:
    """A section whose texts, which may be an input file's, have no color codes."""
    if isinstance(part, str):
        return unstyled(part) if "\x1b" in part else part
    if isinstance(part, list | tuple):
        parts = [_unstyled(each) for each in part]
        return type(part)(*parts) if isinstance(part, FactList | Fact | Table) else parts
    return part


def _facts(section: FactList, style: Style) -> list[str]:
    """Labels in one column, their lines wrapped in the next; a long label is on its own line."""
    start = 4 + max((len(fact.label) for fact in section.facts if len(fact.label) <= _LABEL), default=0)
    out = [style.paint(section.title, "head")] if section.title else []
    for fact in section.facts:
        lead = (2 + len(fact.label) + 2) - start
        first = True
        for line in fact.lines:
            for piece in wrapped(" " * max(lead, 0) * first + line, style.width - start):
                label = fact.label if first else ""
                out.append("  " + style.paint(label, fact.tone) + " " * max(start - 2 - len(label), 2) + piece.lstrip())
                first = False
    return out


def wrapped(text: str, width: int = WIDTH, hang: str = "") -> list[str]:
    """Lines of at most `width`; a name with hyphens, a number with its unit, and a setting with its `--set` stay whole."""
    bound = _BOUND.sub("\xa0", text)
    lines = wrap(bound, width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False) or [""]
    return [line.replace("\xa0", " ") for line in lines]


def _table(section: Table, style: Style) -> list[str]:
    """Columns as wide as their widest cell, numbers to the right."""
    cells = [section.header, *(row for row in section.rows if len(row) > 1)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(section.header))]
    gap, widths = _fit(widths, section.left, style.width)
    head = _line(section.header, widths, gap, section)
    out = [style.paint(line, "head") for line in _title(section.title, head)]
    for i, row in enumerate(section.rows):
        if not row:
            out.append(style.paint("  " + "─" * (sum(widths) + gap * (len(widths) - 1)), "dim"))
        elif len(row) == 1:
            out += wrapped("  " + row[0], style.width, "      ")
        else:
            begun, row = _folded(row, widths, section)  # noqa: PLW2901 (the same row)
            out += begun
            line = _line(row, widths, gap, section)
            if i < len(section.bar_colors):
                line = line[: -widths[-1]] + style.tint(line[-widths[-1] :], section.bar_colors[i])
            out.append(line)
    for note in section.notes:
        out += [style.paint(line, "dim") for line in wrapped("  " + note, style.width, "    ")]
    return out


def _fit(widths: list[int], left: int, width: int) -> tuple[int, list[int]]:
    """The gap between columns, and widths that fit the page: the gap shrinks first, then the widest of the left columns."""
    gap = next((gap for gap in (3, 2, 1) if 2 + sum(widths) + gap * (len(widths) - 1) <= width), 1)
    for _ in range(2 + sum(widths) + gap * (len(widths) - 1) - width):
        widest = max(range(min(left, len(widths))), key=lambda i: widths[i], default=0)
        if widths and widths[widest] > _LEAST:
            widths[widest] -= 1
    return gap, widths


def _folded(row: list[str], widths: list[int], section: Table) -> tuple[list[str], list[str]]:
    """The first lines of a label of several words wider than its column, and the row with the last of its lines."""
    if section.tails or section.left < 1 or len(row[0]) <= widths[0] or " " not in row[0].strip():
        return [], row
    *begun, last = wrapped(row[0], widths[0], "  ")
    return [f"  {_cut(line, widths[0], tail=False)}" for line in begun], [last, *row[1:]]


def _line(row: list[str], widths: list[int], gap: int, section: Table) -> str:
    """One row, indented by two."""
    cells = []
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        shown = _cut(cell, width, tail=section.tails and i < section.left)
        cells.append(shown.ljust(width) if i < section.left else shown.rjust(width))
    return "  " + (" " * gap).join(cells)


def _cut(cell: str, width: int, *, tail: bool) -> str:
    """`cell` cut to `width` characters: its beginning, or its indentation and its end."""
    if len(cell) <= width:
        return cell
    indent = len(cell) - len(cell.lstrip())
    keep = width - indent - 1
    return cell[:indent] + "…" + cell[len(cell) - keep :] if tail and keep > 0 else cell[: width - 1] + "…"


def _title(title: str, head: str) -> list[str]:
    """The title on the header's own line where the header leaves room, else above it."""
    if not head.strip():
        return [title]
    room = len(head) - len(head.lstrip())
    return [title + head[len(title) :]] if room >= len(title) + 2 else [title, head]
