"""The shape of the launch room: its folders import downward, and its classes have names that the package has once."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "steptime"
ORDER = [
    *(
        "nearby_files",
        "reading",
        "keys",
        "figure_names",
        "job_keys",
        "devices",
        "named_models",
        "vocabulary",
        "figures",
        "fsdp_options",
        "adapters",
        "half_precision",
        "config_values",
        "program_defaults",
        "call_arguments",
        "config_functions",
        "interpolate",
        "shell",
        "logs",
        "automodel_backend",
        "replaced_kernels",
        "zero_offload",
        "deepspeed",
        "megatron",
        "nemo",
    ),
    "torchtitan",
    *(
        "program_setup",
        "program_values",
        "program_calls",
        "trl_defaults",
        "config_sections",
        "script_devices",
        "trainer_files",
        "zero_stage",
        "primus_torchtitan",
        "olmo_core",
        "primus",
    ),
    "trainers",
    *("replaced_model", "job_yaml", "read", "plan_yaml", "write"),
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
