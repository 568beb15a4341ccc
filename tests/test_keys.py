"""Every key of a plan is described once: docs/config.md, the schema and `3dtrn explain --key` say the same."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from config_table import markdown

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.report.catalogue import schema
from steptime.report.plan_keys import keys, texts

ROOT = Path(__file__).parents[1]


def test_every_key_has_a_meaning_and_an_example():
    every = keys()
    assert not [key.path for key in every if not key.means or not key.example]
    assert set(texts()) == {key.path for key in every}
    assert {field for text in texts().values() for field in text} <= {"means", "example", "default", "unit", "type"}


def test_no_comma_splits_a_text_of_the_data():
    """An unquoted comma between braces starts another key, without a value: its text would end there."""

    def split(node, path):
        if isinstance(node, list):
            return [found for one in node for found in split(one, path)]
        if not isinstance(node, dict):
            return []
        found = [f"{path}: {key}" for key, value in node.items() if value is None and " " in str(key)]
        return found + [one for key, value in node.items() for one in split(value, f"{path}: {key}")]

    files = sorted((ROOT / "steptime" / "data").rglob("*.yaml"))
    assert [
        found
        for file in files
        for found in split(yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader), file.name)
    ] == []


def test_no_text_is_cut_at_a_comma():
    """In a flow mapping of YAML a comma without quotes ends a text, and what follows reads as another field."""
    fields = {"means", "type", "unit", "default", "example"}
    assert {path: rest for path, text in texts().items() if (rest := text.keys() - fields)} == {}


def test_defaults_are_in_a_plan_s_syntax():
    assert not [key.path for key in keys() if key.default in {"True", "False", "None"}]


def test_the_page_is_current(update_golden):
    path = ROOT / "docs" / "config.md"
    if update_golden:
        path.write_text(markdown(keys()), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == markdown(keys())


def test_examples_are_what_the_keys_take():
    """Examples of the usual sections put over a plan are read; other keys of a mapping may be missing beside them."""
    base = {
        "model": {"preset": "llama3-70b"},
        "parallelism": {"tp": 8, "pp": 4, "dp": 32},
        "performance": {},
        "data": {"gbs": 2048, "seqlen": 8192, "microbatch_sz": 1},
        "hardware": {"node_type": "dgx-h100"},
    }
    found = []
    for key in keys():
        section, *names = key.path.split(".")
        if section in {"parallelism", "performance", "data"} and names:
            plan = {at: dict(item) for at, item in base.items()}
            inner = plan[section]
            for name in names[:-1]:
                inner = inner.setdefault(name, {})
            inner[names[-1]] = yaml.safe_load(key.example)
            found += [(key.path, line) for line in unsound(plan) if "required" not in line]
    assert found == []


def unsound(plan):
    """Problems of a section's own; an example need not go with this layout, which rules over several sections check."""
    try:
        Job.load(json.dumps(plan))
    except ConfigError as error:
        return [problem.line for problem in error.details if not problem.by_rule]
    return []


def test_the_schema_says_the_same():
    section = schema()["$defs"]["Parallelism"]
    layout = section["properties"]
    assert layout["pipeline_passes"]["description"].startswith("Local batches")
    assert {"const": "auto"} in layout["dp"]["anyOf"]
    assert section["required"] == []
    assert section["anyOf"] == [{"required": ["tp", "pp"]}, {"required": ["fsdp"]}]


def test_every_bound_of_the_schema_is_one_that_editors_check():
    """`ge` is no keyword of JSON Schema; peak_flops: a number of at least 0, memory_bytes one above 0."""
    found = schema()
    assert not {"ge", "gt", "le", "lt"} & {key for node in nodes(found) if "type" in node for key in node}
    chip = found["$defs"]["Accelerator"]["properties"]
    assert chip["peak_flops"]["additionalProperties"]["anyOf"][0] == {"type": "number", "minimum": 0}
    number = chip["memory_bytes"]["anyOf"][0]
    assert (number["type"], number["exclusiveMinimum"], "minimum" in number) == ("number", 0, False)


def nodes(node):
    """Every mapping of a document."""
    if isinstance(node, dict):
        yield node
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(item)
