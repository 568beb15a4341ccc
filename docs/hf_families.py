"""The list of docs/models.md: the values of model_type that are read from a Hugging Face config.json.

python docs/hf_families.py
"""

from __future__ import annotations

import sys
import textwrap

from steptime.model.hf_families import FAMILIES


def main() -> None:
    """Print the names in alphabetical order."""
    sys.stdout.write(textwrap.fill(", ".join(sorted(FAMILIES)) + ".", 120) + "\n")


if __name__ == "__main__":
    main()
