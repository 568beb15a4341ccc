"""HTML made of elements: text is always escaped, except inside markup made by an element."""

from __future__ import annotations

import re
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
