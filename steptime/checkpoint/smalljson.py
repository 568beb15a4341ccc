"""Small JSON files beside the weights: config.json, metadata.json, index files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.records import UnreadableError
from steptime.checkpoint.source import Source

if TYPE_CHECKING:
    from steptime.checkpoint.scan import Folder

MAX_BYTES = 4 << 20


def load(folder: Folder, name: str) -> Any:
    """The JSON in a file of at most 4 MiB, or None when there is none that can be read."""
    try:
        with Source(folder.join(name), folder.named(name)) as source:
            return json.loads(source.exactly(0, source.size)) if source.size <= MAX_BYTES else None
    except (UnreadableError, ValueError, RecursionError):
        return None
