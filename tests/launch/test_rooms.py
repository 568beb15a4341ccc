"""The shape of the launch room: its folders import downward, and its classes have names that the package has once."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "steptime"
ORDER = [
    *("nearby_files", "reading", "keys", "job_keys", "devices", "named_models", "vocabulary", "interpolate", "python"),
    *("shell", "logs", "zero_offload", "deepspeed", "trainers", "megatron", "nemo", "torchtitan", "primus"),
    *("replaced_model", "job_yaml", "kinds", "read", "plan_yaml", "write"),
]
"""Folders and modules, bottom to top."""


def imported(path):
    """The parts of the launch room that a module imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("steptime.launch."):
            yield str(node.module).split(".")[2]


def test_folders_import_downward():
    files = [path for path in sorted((PACKAGE / "launch").rglob("*.py")) if path.name != "__init__.py"]
    assert {path.relative_to(PACKAGE / "launch").with_suffix("").parts[0] for path in files} == set(ORDER)
    for path in files:
        own = ORDER.index(path.relative_to(PACKAGE / "launch").with_suffix("").parts[0])
        assert [part for part in imported(path) if ORDER.index(part) > own] == [], path
