"""The note of a release, from its section of CHANGELOG.md: `python docs/release_notes.py [VERSION]`.

Paragraphs stand on one line each, since a release page shows every line break.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
NOTE = """\
# steptime {version}

{date}. `pip install steptime=={version}`; Python 3.11 or later.

{body}
"""


def notes(version: str) -> str:
    """The note of a version.

    Raises:
        SystemExit: the changelog has no such section.
    """
    text = CHANGELOG.read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"{CHANGELOG.name} has no section [{version}]")
    body = re.sub(r"\n {2}(?=\S)|(?<=\S)\n(?=[^\s#-])", " ", found[2].strip())
    return NOTE.format(version=version, date=found[1], body=body)


def main() -> None:
    """Print the note of the version asked for, or of this one."""
    from steptime import __version__

    sys.stdout.write(notes(sys.argv[1] if len(sys.argv) > 1 else __version__))


if __name__ == "__main__":
    main()
