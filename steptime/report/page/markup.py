"""HTML made of elements: text is always escaped, except inside markup made by an element."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "input", "br", "link"})
_LINK = re.compile(
    r"(?P<url>https?://[^\s<>\"'),;]+[^\s<>\"'),;.:])"
    r"|(?P<arxiv>arXiv[: ]\s?(?P<paper>\d{4}\.\d{4,5}))"
    r"|(?P<repo>(?P<name>[\w-]+/[\w.-]+)@(?P<commit>[0-9a-f]{7,40})(?:,? (?P<path>[\w][\w./-]*\.[a-z]{1,5})\b)?)"
)
"""An address, a paper, or a file of a GitHub repository at a commit, as sources name them."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(tag: str, *children: str | None, **attributes: str | float | None) -> Html:
    """An element. `class_` is class, `data_v` is data-v; an attribute of None is left out, as is a child of None.

    >>> el("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Html(f"<{tag}{said}>")
    return Html(f"<{tag}{said}>{join(*children)}</{tag}>")


def join(*children: str | None) -> Html:
    """Children one after the other, escaped unless they are HTML."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def table(
    head: Iterable[tuple[str, str | None]], rows: Iterable[Html], css: str | None = None, foot: Html | None = None
) -> Html:
    """A table that scrolls sideways. `head`: text and class of each column; a column without a text has no heading."""
    columns = [el("th", text, scope="col", class_=kind or None) if text else el("td") for text, kind in head]
    whole = el("table", el("thead", el("tr", *columns)), el("tbody", *rows), foot, class_=css)
    return el("div", whole, class_="scroll")


def legend(keys: Iterable[tuple[str, str]], *more: Html) -> Html:
    """Classes of colors and their meanings, followed by `more`. With `hatched`: as the schedule draws idle time."""
    items = []
    for css, text in keys:
        color = el("rect", x=0, y=0, width=12, height=12, class_=f"{css} edge")
        hatch = el("rect", x=0, y=0, width=12, height=12, class_="hatch") if "hatched" in css.split() else None
        items.append(el("li", el("svg", color, hatch, viewBox="0 0 12 12"), text))
    return el("ul", *items, *more, class_="legend")


def tools() -> Html:
    """Dark or light, and print."""
    return el(
        "div",
        el("button", "dark / light", type="button", data_theme_toggle=""),
        el("button", "print", type="button", data_print=""),
        class_="tools",
    )


def to_copy(text: str, name: str) -> Html:
    """Text under a button that copies it; `name`: its id on the page."""
    button = el("div", el("button", "copy", type="button", data_copy=name), class_="tools")
    return join(button, el("pre", text, id=name, tabindex=0))


def _text(value: str | float) -> str:
    """An attribute's value; coordinates need no more than two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def linked(text: str) -> Html:
    """Text in which addresses, papers and files of repositories become links."""
    out, done = [], 0
    for found in _LINK.finditer(text):
        out += [join(text[done : found.start()]), _link(found)]
        done = found.end()
    return Html("".join([*out, join(text[done:])]))


def _link(found: re.Match[str]) -> Html:
    """The link target of one match."""
    if found["url"]:
        target = found["url"]
    elif found["arxiv"]:
        target = f"https://arxiv.org/abs/{found['paper']}"
    else:
        kind, path = ("blob", f"/{found['path']}") if found["path"] else ("tree", "")
        target = f"https://github.com/{found['name']}/{kind}/{found['commit']}{path}"
    return el("a", found[0], href=target, rel="noreferrer noopener")
