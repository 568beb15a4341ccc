"""Documents: what YAML and JSON files may hold, and how one that cannot be read is told."""

import io
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from work import python_calls

import steptime
from steptime.base import document
from steptime.base.config import ConfigError
from steptime.base.document import MAX_BYTES, MAX_NODES, parse, parse_mapping, read_source, shipped
from steptime.job.job import Job

PLAN = "{model: llama2-7b, parallelism: {pp: 1, tp: 2}, devices: 8, hardware: h100, data: {gbs: 8, seqlen: 64, microbatch_sz: 1}}"


def bomb():
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for here, before in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n", "t: empty; expected a mapping of sections"),
        ("# nothing\n---\n", "t: empty; expected a mapping of sections"),
        ("- a\n- b\n", "t: expected a mapping at the top level (got a list of 2)"),
        ("just words\n", "t: expected a mapping at the top level (got 'just words')"),
        ("a: 1\nb: 2\na: 3\n", "t: line 3: duplicate key 'a' (first on line 1)"),
        ("m:\n  x: 1\n  x: 2\n", "t: line 3: duplicate key 'x' (first on line 2)"),
        ('{"a": 1, "a": 2}', "t: line 1: duplicate key 'a' (first on line 1)"),
        ("a: b: c\n", "t: line 1, column 5: a second ':' on the line; begin a new line, or quote the text"),
        ("a: 1\n\tb: 2\n", "t: line 2: a tab; YAML is indented with spaces"),
        ("a: 1\n---\nb: 2\n", "t: line 2: more than one YAML document; expected one"),
        ("a: *b\n", "t: line 1: alias 'b' is not defined"),
        ("a: &a [*a]\n", "t: line 1: alias 'a' is not defined"),
        ("[1, 2]: 3\n", "t: line 1: a key must be a word"),
        (
            "a: !!python/object:os.system 1\n",
            "t: line 1: tag 'tag:yaml.org,2002:python/object:os.system' is not allowed; write plain YAML",
        ),
        ("<<: 3\n", "t: line 1: '<<' can only merge mappings"),
        (bomb(), f"t: more than {MAX_NODES:,} values (aliases expanded); a plan is about a page of YAML"),
        ("[" * 100_000, "t: line 1: nested more than 40 deep"),
        ("- " * 100_000, "t: line 1: nested more than 40 deep"),
        ("{a: " * 100_000, "t: line 1: nested more than 40 deep"),
    ],
)
def test_bad_document(text, line):
    def told() -> list[str]:
        with pytest.raises(ConfigError) as error:
            parse_mapping(text, "t")
        return error.value.problems

    problems, calls = python_calls(told)
    assert problems == [line]
    assert calls < 500_000


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"\x80\x02}q\x00.", "not a text file (byte 0x80 at offset 0 is not UTF-8)"),
        (b"a: 1\x00b", "not a text file (NUL byte at offset 4)"),
        (b"PK\x03\x04\xff\xfe", "not a text file (byte 0xff at offset 4 is not UTF-8)"),
        (b"", "empty; expected a mapping of sections"),
        (b"a: 1\n" * (MAX_BYTES // 5 + 1), f"larger than {MAX_BYTES:,} bytes; a plan is about a page of YAML"),
        (b"a: [1, 2]\n" * 1_000_000, f"larger than {MAX_BYTES:,} bytes; a plan is about a page of YAML"),
    ],
)
def test_bad_file(tmp_path, raw, line):
    path = tmp_path / "plan.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        Job.load(path)
    assert error.value.problems == [f"{path}: {line}"]


def test_control_characters_are_told_in_one_line():
    with pytest.raises(ConfigError, match=r"^t: not valid YAML \(unacceptable character #x0001"):
        parse("a: \x01", "t")
    with pytest.raises(ConfigError, match=r"^t: holds half of a character"):
        parse("a: \ud800", "t")


def test_no_file(tmp_path):
    with pytest.raises(ConfigError) as error:
        Job.load(tmp_path / "none.yaml")
    assert error.value.problems == [f"{tmp_path}/none.yaml: no such file"]
    with pytest.raises(ConfigError) as error:
        Job.load(tmp_path)
    assert error.value.problems == [f"{tmp_path}: is a directory; give a YAML file"]
    with pytest.raises(ConfigError, match="empty text; give a path"):
        Job.load("")
    with pytest.raises(ConfigError, match="cannot be read"):
        Job.load("plan\0.yaml")


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PLAN.encode())))
    assert Job.load("-") == Job.load(PLAN)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ConfigError, match=r"^standard input: empty"):
        Job.load("-")


def test_byte_order_mark_and_json(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a":\t1e3,\n"b": "\\u00b5", "c": null, "d": -0.5e-3}')
    assert parse(*read_source(path)) == {"a": 1000.0, "b": "\u00b5", "c": None, "d": -0.0005}


def test_plain_yaml_means_what_pyyaml_says_where_both_are_sane():
    text = "a: {b: [1, -2, 3.5, x, 'y', \"z\", true, no, ~, 2.5e+3, .5]}\nc: |\n  two\n  lines\nd: &d {e: 1}\nf: {<<: *d, g: 2}\n"
    assert parse(text, "t") == yaml.safe_load(text)


def test_files_that_ship_mean_what_pyyaml_says():
    for path in sorted(Path(steptime.__file__).parent.rglob("*.yaml")):
        assert repr(shipped(path)) == repr(yaml.safe_load(path.read_bytes())), path


def test_where_yaml_is_loose_this_is_not():
    assert parse("{a: 1e12, b: 010, c: 1:30, d: 2026-01-01, e: 0x10, f: '1e3'}", "t") == {
        "a": 1e12,
        "b": 10,
        "c": "1:30",
        "d": "2026-01-01",
        "e": "0x10",
        "f": "1e3",
    }


def test_a_missing_plan_in_a_folder_without_end_is_told_at_once(monkeypatch, tmp_path):
    """Of a folder that never ends as many names are read as are compared."""
    read = []

    @contextmanager
    def endless(_folder):
        yield (read.append(number) or SimpleNamespace(name=f"{number}.log") for number in count())

    monkeypatch.setattr(document, "scandir", endless)
    with pytest.raises(ConfigError, match=r"plan\.yaml: no such file$"):
        Job.load(tmp_path / "plan.yaml")
    assert len(read) == document.MOST_FILES


def test_a_missing_plan_names_the_file_that_is_nearly_called_so(tmp_path):
    """A `.yml` of a `.yaml`, a letter too few; a folder is not a plan, and what is called otherwise is not named.

    "nope.yaml" and "bin.yaml" share little but their suffix: 2 x 6 / (9 + 8) = 0.71, "nope" and "bin" only n: 2 / 7 = 0.29.
    """
    (tmp_path / "deepseek_v3.yaml").write_text("model: deepseek-v3\n")
    (tmp_path / "bin.yaml").write_text("a: 1\n")
    (tmp_path / "deepseek_v2").mkdir()
    meant = f"; did you mean '{tmp_path}/deepseek_v3.yaml'?"
    for name, hint in (("deepseek_v3.yml", meant), ("deepseek_v.yaml", meant), ("nope.yaml", ""), ("llama.yaml", "")):
        with pytest.raises(ConfigError) as error:
            Job.load(tmp_path / name)
        assert error.value.problems == [f"{tmp_path}/{name}: no such file{hint}"]
