"""The examples of docs/checkpoints.md are what the command prints; pytest --update-golden rewrites them."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BLOCK = re.compile(r"```text\n\$ summarize-ckpt (.*)\n(?:[^`]*)```")


class Malicious:
    def __reduce__(self):
        return os.system, ("echo owned",)


@pytest.fixture
def examples(make, monkeypatch):
    """The checkpoints the page speaks of, in the working directory."""
    llama = make.folder / "llama"
    llama.mkdir()
    part = type(make)(llama)
    part.shards(make.llama(layers=32, hidden=128, inter=448, vocab=4096, kv=32))
    config = {"num_hidden_layers": 32, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    part.write("config.json", json.dumps(config).encode())
    torch.save(make.llama(), make.folder / "whole.pt")
    make.write("stopped.pt", (make.folder / "whole.pt").read_bytes()[:200_000])
    (make.folder / "megatron").mkdir()
    make.megatron(make.folder / "megatron")
    shutil.rmtree(make.folder / "megatron/iter_0005000/mp_rank_01_001")
    torch.save({"model": {"w": torch.ones(3, 4)}, "extra": Malicious()}, make.folder / "malicious.pt")
    monkeypatch.chdir(make.folder)
    return make.folder


def test_examples_are_what_the_command_prints(examples, command, request):
    def printed(match):
        out = command(*match[1].split())[1]
        return f"```text\n$ summarize-ckpt {match[1]}\n{re.sub(r' in [0-9]+ ms', ' in 1 ms', out)}```"

    page = PAGE.read_text(encoding="utf-8")
    fresh = BLOCK.sub(printed, page)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(fresh, encoding="utf-8")
    assert len(BLOCK.findall(page)) == 4
    assert page == fresh, "docs/checkpoints.md is out of date; if the new output is right: pytest --update-golden"


def test_python_example_runs(examples, capsys):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(code, {})
    assert capsys.readouterr().out == "7872640 True []\n"


def test_every_option_and_key_is_documented(command, examples):
    page = PAGE.read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z-]+", command("--help")[1])) - {"--help"}
    assert {option for option in options if option not in page} == set()
    assert {key for key in json.loads(command("llama", "--json")[1]) if f"`{key}`" not in page} == set()
