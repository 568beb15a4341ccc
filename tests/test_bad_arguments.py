"""Arguments that cannot be: every subcommand answers with one line, exit code 2, nothing on standard output, and no traceback."""

from __future__ import annotations

import pytest
import yaml
from jobs import DEVICES_PLAN

from steptime.commands.cli import main

COMMANDS = [
    "serve --port 99999999", "serve --port -1", "serve --port abc", "serve --port 1.5", "serve nope.yaml",
    "serve --host 8.8.8.8 --port 0", "init nodir/x.yaml", "init there.yaml", "init folder", "init - --model nope",
    "init - --machine nope", "init - --devices 0", "init - --devices -4", "search a.yaml --top 0", "search a.yaml --top -3",
    "search a.yaml --top x", "search a.yaml --objective foo", "search a.yaml --fix tp", "search a.yaml --fix tp=0",
    "search a.yaml --fix tp=3", "search a.yaml --over foo=1", "search a.yaml --over data.gbs=4", "search a.yaml --devices 0",
    "search a.yaml --devices 8:4", "search a.yaml --gbs 0", "search a.yaml --machine nope", "search a.yaml --csv --json",
    "search a.yaml --save nodir/x.yaml", "search a.yaml --save there.yaml", "search a.yaml --plot x.foo",
    "search a.yaml --html nodir/x.html", "bench --layouts foo", "bench a.yaml --layouts foo", "bench nope.yaml",
    "a.yaml --html nodir/x.html", "a.yaml --plot x.foo", "a.yaml --plot nodir/x.png", "a.yaml --trace folder",
    "a.yaml --trace x.foo", "a.yaml --trace-memory nodir/x.pickle", "a.yaml --set foo", "a.yaml --set =3",
    "a.yaml --set data.gbs=", "a.yaml --set data.gbs=[1", "a.yaml --set data=3", "a.yaml --set model.foo=3",
    "a.yaml --set parallelism.tp=0", "a.yaml --set parallelism.tp=1.5", "a.yaml --set parallelism.tp=-1",
    "a.yaml --set data.seqlen=0", "a.yaml --set data.seqlen=-5", "a.yaml --set data.seqlen=1e18",
    "a.yaml --set data.microbatch_sz=0", "a.yaml --devices 0", "a.yaml --devices 1e9", "a.yaml --devices 1000000000",
    "a.yaml --devices -8", "--model llama3-8b --devices 1000000000", "--model llama3-8b --devices 0",
    "--model llama3-8b --set data.seqlen=0", "--model llama3-8b --set data.seqlen=abc", "--model llama3-8b --machine folder",
    "--model llama3-8b --machine nope.yaml", "--model folder", "--model nope.json", "a.yaml --machine folder",
    "a.yaml --calibrate nope.yaml", "a.yaml --calibrate a.yaml", "a.yaml --export foo", "a.yaml --from foo",
    "--from megatron nope.sh", "--from megatron", "--from megatron folder", "a.yaml --save x.yaml", "a.yaml --min-mfu -1",
    "a.yaml --min-mfu x", "a.yaml --json --brief", "- --watch", "folder", "nope.yaml", "sensitivity nope.yaml", "sensitivity",
    "sensitivity a.yaml --plot x.foo", "scale a.yaml --devices 16", "scale a.yaml --best --devices 0",
    "scale a.yaml --best --plot x.png", "scale a.yaml --plot nodir/x.png", "diff a.yaml", "diff", "diff a.yaml nope.yaml",
    "diff a.yaml a.yaml --html nodir/x.html", "explain", "explain a.yaml foo", "explain a.yaml step extra",
    "explain FOO-123", "explain --key", "explain --key foo", "explain a.yaml --trace there.yaml",
    "validate --measurements nope.csv", "validate --gpu nope", "validate --source nope", "validate --split nope",
    "validate --log nope.log", "validate --worst -1", "validate --plot x.foo", "machines foo", "models --foo", "show",
    "show nope", "show a b", "schema foo", "--completion foo", "--color foo a.yaml", "a.yaml there.yaml",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.yaml").write_text("x: 1\n", encoding="utf-8")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(DEVICES_PLAN | {"devices": 64}), encoding="utf-8")
    before = {path.name for path in tmp_path.iterdir()}
    code = main(command.split())
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert {path.name for path in tmp_path.iterdir()} == before
