"""The accelerators shipped with steptime: one file each, referenced by machines."""

from pathlib import Path

from steptime.base.document import shipped_names

ACCELERATORS = Path(__file__).parents[1] / "data" / "accelerators"


def accelerator_names() -> list[str]:
    """The names of the shipped accelerators, sorted."""
    return shipped_names(ACCELERATORS)


def accelerator_yaml(name: str) -> str:
    """The file of a shipped accelerator: YAML, each figure with its source."""
    return (ACCELERATORS / f"{name}.yaml").read_text(encoding="utf-8")
