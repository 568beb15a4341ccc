"""Pages of the site that lie outside of docs/, or are made from the code: `mkdocs build` runs these.

README.md is the first page, benchmarks/accuracy.md and CHANGELOG.md are pages, the table of shared constants is read from the
modules that define them, and every notebook is a page with its outputs. Links between these follow. Needs the extra `docs`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from steptime.report.constants import shared_constants

ROOT = Path(__file__).parents[1]
OUTSIDE = {"index.md": "README.md", "accuracy.md": "benchmarks/accuracy.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site to file of the repository."""
LINKS = [
    (re.compile(r"\]\(docs/"), "]("),
    (re.compile(r"\]\(\.\./docs/"), "]("),
    (re.compile(r"\]\((?:\.\./)?benchmarks/accuracy\.md"), "](accuracy.md"),
    (re.compile(r"\]\((?:\.\./)?README\.md"), "](index.md"),
    (re.compile(r"\]\((\w+)\.ipynb"), r"](\1.md"),
]
STATIC = ("CITATION.cff",)


def constants() -> str:
    """The page of shared constants, each with its value and the text that says where it comes from."""
    rows = [f"| `{one.name}` | {one.value:g} | {one.source.replace('|', '/')} |" for one in shared_constants()]
    head = (
        "# Constants and their sources\n\nThe numbers that all estimates share, read from the modules that define them. Those "
        "of a machine or a profile stand in their files; `3dtrn explain ROW_ID` lists all that one estimate rests on.\n\n"
        "| constant | value | what it is, and where it comes from |\n|---|---:|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def notebook(path: Path) -> str:
    """A notebook as Markdown: its cells, and below each its output as recorded; a table stays HTML."""
    pieces = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(source)
            continue
        pieces.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                pieces.append(f'<div class="output">\n{"".join(data["text/html"])}\n</div>')
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                pieces.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join([*pieces, f"[This page as a notebook](./{path.name})"]) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for path in STATIC:
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "constants.md", content=constants()))
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(File.generated(config, f"{path.stem}.md", content=notebook(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository become links to pages of the site."""
    for pattern, replacement in LINKS:
        markdown = pattern.sub(replacement, markdown)
    return markdown
