"""README and pages: their commands, programs, plans and tables are what they say; `--update-golden` writes them anew."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import sympy

from steptime import Job, Machine
from steptime.commands import cli
from steptime.job import limits
from steptime.job.assembly import Assembly
from steptime.model.segments import kept_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

CONSOLE = re.compile(r"```console\n(\$ .*\n)(?:.*\n)*?```")
PYTHON = re.compile(r"```python\n((?:.*\n)*?)```\n\n```text\n(?:.*\n)*?```")
OUTPUT = re.compile(r"<!-- output of: python (\S+) -->\n(?:.*\n)*?<!-- end of output -->")


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def printed(call, *args):
    """What a call writes to standard output."""
    out = StringIO()
    with redirect_stdout(out):
        result = call(*args)
    assert result in {None, 0}
    return out.getvalue()


def script(path):
    """A script of docs or benchmarks as a module, its `main` not run."""
    return import_module(Path(path).stem)


def console(match):
    """A console block with the output of now."""
    program, *args = shlex.split(match[1].removeprefix("$ "))
    assert program == "3dtrn"
    return f"```console\n{match[1]}{printed(cli.main, args)}```"


def python(match):
    """A program with the output of now."""
    out = printed(exec, compile(match[1], "example", "exec"), {})
    return f"```python\n{match[1]}```\n\n```text\n{out}```"


def output(match):
    """A table with the output of its script now."""
    return f"<!-- output of: python {match[1]} -->\n{printed(script(match[1]).main)}<!-- end of output -->"


def fresh(text, page):
    """A page with every generated piece made anew; docs/cli.md has a test of its own."""
    if page.name != "cli.md":
        text = CONSOLE.sub(console, text)
    return OUTPUT.sub(output, PYTHON.sub(python, text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_outputs_are_those_of_now(page, update_golden):
    text = page.read_text(encoding="utf-8")
    made = fresh(text, page)
    if update_golden:
        page.write_text(made, encoding="utf-8")
        text = made
    assert text == made, (
        f"{page.name} is out of date; if the new output is right: pytest tests/test_docs.py --update-golden"
    )


def test_the_readme_has_a_piece_of_every_kind():
    text = README.read_text(encoding="utf-8")
    assert [len(kind.findall(text)) for kind in (CONSOLE, PYTHON, OUTPUT)] == [1, 1, 1]
    assert len(text.splitlines()) < 160
    for commands in ("pip install . && 3dtrn configs/llama3_70b.yaml ", "pip install -e '.[test]' && pytest "):
        assert commands in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_package_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:steptime|benchmarks|docs)/[a-z0-9_/]+\.\w+)", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def yaml_blocks():
    return re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_plan_of_the_readme_loads():
    plan = next(text for text in yaml_blocks() if text.startswith("model:"))
    assert Job.load(plan).parallelism.devices == 1024


def test_the_machine_of_the_page_loads(tmp_path):
    path = tmp_path / "mine.yaml"
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path.write_text(next(text for text in blocks if text.startswith("name:")), encoding="utf-8")
    machine = Machine.load(str(path))
    assert (machine.devices_per_node, machine.tiers[1].bytes_per_s) == (8, 50e9)


def test_commands_of_the_readme_are_those_there_are():
    text = README.read_text(encoding="utf-8")
    for name in cli.SUBCOMMANDS:
        assert f"`3dtrn {name}" in text


# --- what is not modeled ------------------------------------------------------------------------------------------------


def test_the_page_names_all_that_is_refused():
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    refused = [piece for path in limits.NOT_MODELED for piece in path.split("=")]
    refused += [rule.path for rule in limits.MODELED]
    assert not [piece for piece in refused if f"`{piece}`" not in page]


def test_the_page_names_every_refused_feature():
    text = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split()).lower()
    words = {
        "moe framework": "experts and mla** outside megatron-core and fsdp2",
        "FSDP2's experts without sp": "experts with tp but without sequence parallelism",
        "AutoModel's experts with tp": "experts with tp in nemo automodel",
        "experts of Megatron": "under fsdp2, capacity and balancing losses",
        "flex with capacity": "flex dispatcher with a capacity factor",
        "mla framework": "experts and mla** outside megatron-core and fsdp2",
        "window with cp": "context parallelism** of sliding windows by a ring, or in torch",
        "sinks with cp": "attention sinks by anything but all-to-all",
        "mtp framework": "multi-token prediction** outside megatron-core",
        "mtp with ZeRO": "outside megatron-core, under fsdp or zero 2 and 3",
        "mtp with window_pattern": "with a pattern of windows",
        "recipe with ZeRO": "under zero 3 with experts, in nvfp4, or without fp8 parameters",
        "resharding with split backward": "zero-bubble with resharding, under fsdp",
        "resharding to fewer ranks with pp or cpu_offload": "resharding to fewer ranks with pipelines or cpu offload",
        "tied embeddings of FSDP stages": "tied embeddings, or zero-bubble with resharding, under fsdp",
        "pp and ep with FSDP 1": "fsdp 1 with pipelines or expert parallelism",
        "linear attention framework": "linear attention** outside megatron-core",
        "linear attention with ZeRO": "or under zero 2 and 3",
        "linear attention with cp": "with context parallelism or windows",
        "linear attention with a window": "with context parallelism or windows",
        "linear attention with tp": "kimi's and lightning attention with tensor parallelism",
        "recomputation with split backward": "recomputation or tied embeddings with zero-bubble schedules",
        "recomputation preset with split backward": "recomputation or tied embeddings with zero-bubble schedules",
        "tied embeddings with a V schedule": "recomputation or tied embeddings with zero-bubble schedules",
    }
    assert set(words) == {rule.name for rule in limits.MODELED}
    assert all(word in text for word in words.values())


# --- formulas of docs/notation.md ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters():
    return script("docs/block_table.py")


@pytest.mark.parametrize("plan", ["llama3_70b", "llama3_8b", "mistral_nemo_12b"])
def test_formulas_give_what_the_estimate_uses(letters, plan):
    """The sums of the Llama tables, with a plan's numbers for the letters, are the plan's own parts."""
    job = Job.load(ROOT / "configs" / f"{plan}.yaml").replace(**{"parallelism.tp": 4, "parallelism.sp": True})
    model, shard, assembly = job.model, Assembly(job).shard, Assembly(job)
    numbers = {
        "T": shard.tokens,
        "s": job.data.seqlen,
        "h": model.hidden_sz,
        "i": model.inter_sz,
        "n": model.n_q_heads,
        "k": model.n_kv_heads,
        "d": model.head_dim,
        "V": shard.vocab,
        "t": 4,
    }
    tables = letters.parts()
    for title, part in (
        ("A Llama block", assembly.kinds[0]),
        ("The embedding", assembly.embedding),
        ("Final", assembly.head),
    ):
        found = letters.rows(*next(table for name, table in tables.items() if name.startswith(title)))

        def value(column, found=found):
            total = sum(getattr(row, column) for row in found)
            return float(sympy.sympify(total).subs({letters.SYMBOLS[key]: int(v) for key, v in numbers.items()}))

        assert value("saved") == sum(part.sizes[name] for name in kept_names(part.ops, []))
        assert value("params") == part.n_params
        assert value("flops") == sum(
            float(getattr(op, "flops", 0.0) or getattr(op, "full_flops", 0.0) * getattr(op, "causal_share", 0.0))
            for op in part.ops
        )


def test_the_old_block_saves_what_korthikanti_et_al_count(letters):
    """Equation 2 of Korthikanti et al. 2022, s b h (10 + 24/t + 5 a s / (h t)), beside LayerNorm's statistics: 16 T."""
    found = letters.rows(*letters.parts()["A GPT block in Megatron-LM of 2021"])
    T, s, h, n, t, d, i = (letters.SYMBOLS[name] for name in "Tshntdi")
    saved = sum(row.saved for row in found).subs({d: h / n, i: 4 * h})
    paper = T * h * (10 + 24 / t + 5 * n * s / (h * t))
    assert sympy.simplify(saved - paper - 16 * T) == 0


def test_formulas_are_written_as_on_paper(letters):
    T, h, n, k, t = (letters.SYMBOLS[name] for name in "Thnkt")
    assert letters.write(2 * T * h * (n + 2 * k) / t) == "2 T h (n + 2 k) / t"
    assert letters.write(T * h**2 / 2) == "T h² / 2"
    assert letters.write(sympy.Integer(0)) == ""
