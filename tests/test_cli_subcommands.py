"""The command line: every subcommand, what is imported, and the page that documents it."""

import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from command_lines import close, process

from steptime import __version__
from steptime.commands import cli

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PLAN = ROOT / "configs" / "llama3_70b.yaml"


# --- subcommands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *cli.SUBCOMMANDS])
def test_every_subcommand_has_help_and_documentation(run, name):
    code, out, _ = run(*filter(None, [name]), "--help")
    assert code == 0
    assert out.startswith(f"usage: 3dtrn {name}".rstrip())
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"3dtrn {name}".rstrip() in page
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE):
        assert option in page or option in {"--help", "--version"}, option


def test_help_lists_what_there_is_and_no_more(run):
    _, out, _ = run("--help")
    listed = re.findall(r"^  (\w+)  +\w", out[out.index("subcommands") :], re.MULTILINE)
    assert listed == list(cli.SUBCOMMANDS)
    modules = {name: f"{name}_command" if name in cli.OWN_MODULE else "plans" for name in listed}
    assert all(callable(getattr(import_module(f"steptime.commands.{modules[name]}"), name)) for name in listed)


def test_help_fits_eighty_columns():
    for name in ["", *cli.SUBCOMMANDS]:
        done = process(*filter(None, [name]), "--help", env={"COLUMNS": "80"})
        assert max(map(len, done.stdout.decode().splitlines())) <= 80


def test_no_machine_has_a_rate_of_zero(run):
    """A CPU of 443 GFLOP/s."""
    (line,) = (line for line in run("machines")[1].splitlines() if line.startswith("  cpu-2core "))
    assert line.split()[4:6] == ["0.44", "24"]


def test_machines_and_models_are_all_listed(run):
    from steptime.hardware.machine import machine_names
    from steptime.model.presets import model_names

    for command, names in (("machines", machine_names()), ("models", model_names())):
        code, out, _ = run(command)
        assert code == 0
        assert {line.split()[0] for line in out.splitlines() if line.strip()} >= set(names)
        assert max(map(len, out.splitlines())) <= 80


def test_everything_listed_can_be_shown(run):
    from steptime.hardware.machine import machine_names
    from steptime.model.presets import model_names
    from steptime.software.profiles import profile_names

    for name in [*machine_names()[::9], *model_names()[::9], *profile_names()]:
        code, out, _ = run("show", name)
        assert code == 0
        assert yaml.safe_load(out)["name"] == name
    assert run("show", "meta-llama/Meta-Llama-3-70B-Instruct") == run("show", "llama3-70b")  # as in a plan
    assert run("show", "no/such.yaml") == (2, "", "no/such.yaml: no such file\n")


def test_a_shown_machine_is_a_machine_file(run, tmp_path):
    from steptime.hardware.machine import Machine, machine_names

    for name in machine_names():
        path = tmp_path / f"{name}.yml"
        path.write_text(run("show", name)[1], encoding="utf-8")
        shown, original = (m.model_dump(exclude={"provenance"}) for m in (Machine.load(str(path)), Machine.load(name)))
        assert str(shown) == str(original) or close(shown, original), name


def test_show_says_where_no_run_was_measured(run):
    from steptime.hardware.machine import Machine, machine_names

    for name in machine_names():
        assert run("show", name)[1].startswith("# no measured run on this machine") is not Machine.load(name).measured


def test_configs_obey_the_schema(run):
    import jsonschema

    schema = json.loads(run("schema")[1])
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for config in sorted((ROOT / "configs").rglob("*.yaml")):
        validator.validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    plan = yaml.safe_load(PLAN.read_text())
    shape = {"n_layers": 2, "hidden_sz": 64, "inter_sz": 256, "n_q_heads": 4, "vocab_sz": 100, "dropout": False}
    for model in (shape, {"preset": "llama3-70b", "n_layers": 40}, {"hf": "config.json"}):
        validator.validate(plan | {"model": model, "hardware": {"node_type": "dgx-h100"}})
    assert not validator.is_valid(plan | {"model": {"n_layers": 2}})
    assert not validator.is_valid(plan | {"parallelism": {"tp": 8, "pp": 1, "dp": 1, "tpp": 8}})


def test_scale_gives_weak_and_strong(run):
    code, out, _ = run("scale", PLAN)
    assert code == 0
    assert "weak scaling" in out
    assert "strong scaling" in out
    rows = json.loads(run("scale", PLAN, "--json")[1])
    gbs = json.loads(run(PLAN, "--json")[1])["config"]["data"]["gbs"]
    assert {row["gbs"] for row in rows["strong_scaling"]} == {gbs}
    assert rows["strong_scaling"][0]["efficiency"] == 1.0
    assert len({row["gbs"] / row["dp"] for row in rows["weak_scaling"]}) == 1


def test_diff_of_one_file_names_what_to_add(run):
    assert run("diff", "p.yaml") == (2, "", "3dtrn diff: needs two files or more; write 3dtrn diff p.yaml B.yaml\n")


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "steptime", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"3dtrn (steptime) {__version__}\n")


def test_diff_shows_the_heads_that_latent_attention_has(run):
    """Its queries and keys have 128 + 64 dims, its values 128; the head_dim of a grouped model stands beside nothing."""
    out = run("diff", ROOT / "configs" / "deepseek_v3.yaml", ROOT / "configs" / "llama3_405b.yaml")[1]
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines() if line.startswith("  model.")}
    assert rows["model.attention.qk_nope_head_dim"] == ["128", "-"]
    assert rows["model.attention.qk_rope_head_dim"] == ["64", "-"]
    every = run("diff", ROOT / "configs" / "deepseek_v3.yaml", ROOT / "configs" / "llama3_405b.yaml", "--json")[1]
    assert "model.head_dim" not in rows  # neither plan states it
    assert [row[1:] for row in json.loads(every)["sections"][0]["rows"] if row[0] == "model.head_dim"] == [["-", "128"]]


def test_diff_names_defaults_that_no_plan_states(run):
    """DeepSeek-V3's plan states its router's score, not that no z-loss is taken: a note names that key only."""
    out = run("diff", ROOT / "configs" / "llama3_70b.yaml", ROOT / "configs" / "deepseek_v3.yaml")[1]
    settings, _, _ = out.partition("\nanswer")
    rows = {line.split()[0] for line in settings.splitlines() if line.startswith("  ") and "." in line.split()[0]}
    assert {"model.moe.n_experts", "model.moe.score_function", "parallelism.ep", "performance.moe.dispatcher"} <= rows
    assert not rows & {"model.moe.z_loss", "performance.moe.permute_fusion", "parallelism.etp", "run.startup_s"}
    note = " ".join(settings.split()).partition("defaults that follow from these, in full with --json: ")[2]
    assert {"z_loss", "permute_fusion", "etp", "startup_s"} <= set(note.replace(",", "").split())


def test_diff_counts_one_default_as_one(run, tmp_path):
    """fsdp with and without tp: sequence parallelism, which neither plan states, is on with tp."""
    plans = []
    for tp in (1, 2):
        plans.append(tmp_path / f"tp{tp}.yaml")
        plans[-1].write_text(
            f"model: llama3-8b\ndevices: 16\nparallelism: {{fsdp: {{}}, tp: {tp}, pp: 1}}\n"
            "data: {gbs: 64, seqlen: 8192, microbatch_sz: 1}\nhardware: {node_type: h100}\n"
        )
    assert "  1 default that follows from these, in full with --json: sp\n" in run("diff", *plans)[1]


def test_diff_of_a_config_with_itself_and_another(run):
    assert run("diff", PLAN, "--set", "data.gbs=1024", PLAN)[0] == 0
    assert "no setting differs" in run("diff", PLAN, PLAN)[1]
    code, out, _ = run("diff", PLAN, ROOT / "configs" / "llama3_8b.yaml")
    assert code == 0
    assert "model.n_layers" in out
    assert max(map(len, out.splitlines())) <= 80


def test_explain_names_and_explains(run):
    names = run("explain", PLAN)[1].split("\n")[:-1]
    assert {"step", "mfu", "memory"} <= set(names)
    for name in names:
        code, out, _ = run("explain", PLAN, name)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80


# --- lean imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[str(PLAN)], ["--help"]])
def test_a_report_needs_neither_numpy_nor_torch_nor_tabulate(args):
    command = (
        "import sys; from steptime.commands.cli import main; main(); "
        "sys.stderr.write(' '.join({'numpy', 'torch', 'tabulate'} & sys.modules.keys()))"
    )
    done = process(*args, command=command)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_parser_needs_no_pydantic():
    done = process(
        command="import sys; from steptime.commands.cli import parser; parser(); print('pydantic_core' in sys.modules)"
    )
    assert done.stdout == b"False\n"


# --- the page that documents it --------------------------------------------------------------------------------------------

BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def test_blocks_of_the_page_are_as_they_run(run, update_golden):
    page = ROOT / "docs" / "cli.md"
    text = page.read_text(encoding="utf-8")
    fresh = BLOCK.sub(lambda block: f"```console\n{_replay(block[1], run)}```", text)
    if update_golden:
        page.write_text(fresh, encoding="utf-8")
        text = fresh
    assert text == fresh, "docs/cli.md is out of date; if the new output is right: pytest --update-golden"


def _replay(block, run):
    """A block with its outputs as they are now; an output that ends in "..." keeps its number of lines."""
    out = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *recorded = part.splitlines()
        program, *args = shlex.split(command)
        assert program == "3dtrn"
        code, printed, err = run(*args)
        assert (code, err) == (0, ""), command
        lines = printed.splitlines()
        if recorded and recorded[-1] == "...":
            lines = [*lines[: len(recorded) - 1], "..."]
        out += [f"$ {command}", *lines]
    return "\n".join(out) + "\n"
