"""The accelerators shipped with steptime: one file each, referenced by machines."""

from pathlib import Path

ACCELERATORS = Path(__file__).parents[1] / "data" / "accelerators"


def accelerator_names() -> list[str]:
    """The names of the shipped accelerators, sorted."""
    return sorted(path.stem for path in ACCELERATORS.glob("*.yaml"))


def accelerator_yaml(name: str) -> str:
    """The file of a shipped accelerator: YAML, each figure with its source."""
    return (ACCELERATORS / f"{name}.yaml").read_text(encoding="utf-8")
