"""The site: every page is in the navigation, and where mkdocs is installed it builds strictly and its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
MADE = {"index.md", "accuracy.md", "changelog.md", "constants.md"} | {f"{path.stem}.md" for path in NOTEBOOKS}
"""Pages that docs/site_hooks.py adds."""


def leaves(node):
    """Files of a navigation."""
    if isinstance(node, str):
        return [node]
    return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]


def test_every_page_is_in_the_navigation():
    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(nav) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} | MADE)


class Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self):
        super().__init__()
        self.links, self.anchors = [], set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    pages = {}
    for path in out.rglob("*.html"):
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path.relative_to(out).as_posix()] = page
    return out, pages


if find_spec("mkdocs") and find_spec("material"):  # the extra docs

    def test_links_and_anchors_lead_somewhere(site):
        out, pages = site
        assert {name.replace(".md", ".html") for name in MADE} <= pages.keys()
        wrong = []
        for name, page in pages.items():
            if name == "404.html":  # its links are absolute
                continue
            for link in page.links:
                if re.match(r"[a-z]+:", link):
                    continue
                target, _, anchor = unquote(link).partition("#")
                file = (out / name).parent / target if target else out / name
                here = pages.get(os.path.relpath(file, out))
                if not file.exists() or (anchor and here and anchor not in here.anchors):
                    wrong.append((name, link))
        assert not wrong

    def test_every_constant_has_a_source_on_its_page(site):
        out, _ = site
        text = (out / "constants.html").read_text(encoding="utf-8")
        assert "timing.step_time.STRAGGLER" in text
        assert "0.0036" in text

    @pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
    def test_a_notebook_is_a_page_with_its_outputs(site, path):
        out, _ = site
        text = (out / f"{path.stem}.html").read_text(encoding="utf-8")
        shown = re.sub(r"<[^>]+>", "", text)
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        printed = ["".join(one["text"]) for cell in cells for one in cell.get("outputs", []) if "text" in one]
        assert printed
        assert all(words.strip().splitlines()[-1].strip() in unescape(shown) for words in printed)
        assert text.count('class="output"') == sum(
            "text/html" in one.get("data", {}) for cell in cells for one in cell.get("outputs", [])
        )
