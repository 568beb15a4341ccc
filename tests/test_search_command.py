"""`3dtrn search`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
import signal
from importlib import import_module

import pytest
import yaml

from steptime import Job
from steptime.commands.cli import main
from steptime.report.format import number
from steptime.report.search_tables import keyed
from steptime.report.table import PLAIN, Table, layout, wrapped

PLAN = """\
model: gpt3-1.3b
parallelism: {tp: 2, pp: 2, dp: 4}
data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}
hardware: dgx-a100-80
"""
BARE = "model: gpt3-1.3b\ndata: {gbs: 64, seqlen: 2048}\nhardware: dgx-a100-80\n"
NARROW = ("--fix", "pp=1", "--fix", "tp=2")
"""Beside `FEW`, where any few layouts do."""
FEW = ("--fix", "sp=false", "--fix", "performance.activation_checkpointing_type=none", "--over", "zero_level=0,1")


@pytest.fixture
def run(tmp_path, capsys):
    """Exit code, output and errors of a search of a plan's text."""

    def call(text, *args):
        path = tmp_path / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        code = main(["search", str(path), *args])
        done = capsys.readouterr()
        return code, done.out, done.err.replace(str(path), "plan.yaml")

    return call


def test_the_command_to_append_to_names_the_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    assert main(["search", "plan.yaml", *FEW]) == 0
    assert "append --set ... to: 3dtrn plan.yaml\n" in capsys.readouterr().out


def test_the_answer_comes_first(run):
    code, out, err = run(PLAN, *FEW)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "gpt3-1.3b on 16 devices of dgx-a100-80, gbs 64 x 2,048"
    assert [line.split()[0] for line in lines[1:12] if not line.startswith("      ")][:3] == [
        "best",
        "the",
        "difference",
    ]
    assert [line for line in lines if len(line) > 80] == []
    assert {"tp", "vpp"} < {line.strip() for line in lines}
    assert "etp" not in {line.strip() for line in lines}  # no experts to split


def test_a_plan_without_parallelism(run, tmp_path):
    """--devices or the plan's own `devices` say how many; the settings of a row are a whole layout."""
    code, out, _ = run(BARE, *FEW, "--devices", "8", "--json", "--save", str(tmp_path / "best.yaml"))
    found = json.loads(out)
    assert code == 0
    assert found["given"] is None
    best = found["best"][0]
    for key in ("parallelism.tp", "parallelism.pp", "parallelism.dp", "data.microbatch_sz"):
        assert f"--set {key}=" in best["set"]
    saved = Job.load(tmp_path / "best.yaml")
    assert saved == Job.load(json.dumps(best["config"]))
    assert run(f"devices: 8\n{BARE}", *FEW, "--json")[1] != ""
    assert run(BARE, *FEW)[::2] == (2, "--devices: the plan states none; give the number of devices\n")


def test_csv_has_a_line_for_each_layout(run):
    code, out, _ = run(PLAN, *FEW, "--csv", "--top", "3")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 3
    assert all(int(r["tp"]) * int(r["cp"]) * int(r["pp"]) * int(r["dp"]) == 16 for r in rows)
    seconds = [float(row["step_s"]) for row in rows]
    assert seconds == sorted(seconds)


def test_ranges_of_devices_and_other_settings(run):
    """4 and 8 devices of two precisions: the fastest per token is the larger number, by cost the numbers compete."""
    over = (*NARROW, "--over", "performance.precision=bf16,fp32", "--devices", "4:8", "--json")
    found = json.loads(run(PLAN, *FEW, *over)[1])
    assert found["best"][0]["config"]["performance"]["precision"] == "bf16"
    assert found["best"][0]["config"]["parallelism"]["dp"] <= 8
    assert {row["choice"] for row in found["choices"]["devices"]} == {4, 8}
    dear = json.loads(run(PLAN, *FEW, *over, "--objective", "cost")[1])
    assert dear["best"][0]["objective_value"] <= min(row["objective_value"] for row in dear["best"])


def test_nothing_fits(run):
    """175 B parameters do not fit on 4 devices: exit 1, with the layout that needs least and what it lacks."""
    code, out, _ = run(
        PLAN.replace("gpt3-1.3b", "gpt3-175b").replace("tp: 2, pp: 2, dp: 4", "tp: 4, pp: 1, dp: 1"), *FEW
    )
    assert code == 1
    assert "nothing fits" in out
    assert "missing" in out


@pytest.fixture
def signal_at(monkeypatch):
    """Sends this process a real SIGINT once so many blocks of layouts are kept."""

    def at(blocks):
        room, seen = import_module("steptime.search.run"), []
        keep = room._keep

        def kept(*of):
            keep(*of)
            seen.append(of)
            if len(seen) == blocks:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(room, "_keep", kept)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield at
    signal.signal(signal.SIGINT, before)


def test_a_signal_prints_the_best_so_far(run, signal_at):
    """Fewer layouts than the whole search has, the best of them as it is by itself, exit 130."""
    whole = json.loads(run(PLAN, *FEW, "--json")[1])
    signal_at(3)
    code, out, err = run(PLAN, *FEW, "--json")
    found = json.loads(out)
    assert (code, err) == (130, "")
    assert found["interrupted"]
    assert not whole["interrupted"]
    assert 0 < found["evaluated"] < whole["evaluated"]
    assert found["best"][0]["step_s"] >= whole["best"][0]["step_s"]
    signal_at(3)
    assert "best so far" in run(PLAN, *FEW)[1]


def test_a_signal_before_anything_fits_says_so_far(run, signal_at):
    """One block of 175 B parameters on 4 devices: what is not looked at may fit for all that is known."""
    signal_at(1)
    large = PLAN.replace("gpt3-1.3b", "gpt3-175b").replace("tp: 2, pp: 2, dp: 4", "tp: 4, pp: 1, dp: 1")
    code, out, _ = run(large, *FEW)
    assert code == 130
    assert "nothing fits so far" in out
    assert "before the interrupt" in out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--devices", "0"], "--devices 0: expected at least 1"),
        (["--devices", "4,0"], "--devices 4,0: expected at least 1"),
        (["--devices", "0:4"], "--devices 0:4: expected at least 1, and LOW at most HIGH"),
        (["--devices", "8:4"], "--devices 8:4: expected at least 1, and LOW at most HIGH"),
        (["--devices", "many"], "--devices many: expected a whole number, a comma-separated list, or LOW:HIGH"),
        (["--fix", "tp"], "--fix tp: expected a.b=value"),
        (["--fix", "tp=x"], "--fix tp=x: expected whole numbers of at least 1 (got 'x')"),
        (["--fix", "tp=1,2"], "--fix tp=1,2: expected one value; use --over for several"),
        (["--fix", "sp=3"], "--fix sp=3: expected true or false (got 3)"),
        (["--fix", "data.gbs=3"], "--fix data.gbs=3: use --gbs"),
        (
            ["--over", "width=3"],
            (
                "--over width=3: no axis 'width'; one of tp, pp, vpp, cp, dp, ep, etp, sp, zero_level, schedule, "
                "microbatch_sz, or a dotted key such as performance.precision"
            ),
        ),
        (["--save", "nowhere/best.yaml"], "--save nowhere/best.yaml: folder nowhere does not exist"),
        (["--save", __file__], f"--save {__file__}: file exists; remove it or use another name"),
        (["--fix", "tp=3"], "search: no layout of 16 devices has tp 3: tp*cp*pp must divide the devices"),
        (
            ["--machine", "dgx-zero"],
            "--machine: unknown machine 'dgx-zero'; did you mean dgx-2? 3dtrn machines lists them",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(run, args, line):
    assert run(PLAN, *args) == (2, "", line + "\n")


def test_a_space_that_the_rules_empty(run):
    """tp 16 divides 16 devices, yet 24 heads do not divide by it."""
    code, out, err = run(PLAN, "--fix", "tp=16", "--set", "model.n_q_heads=24", "--set", "model.hidden_sz=1536")
    assert (code, out) == (2, "")
    assert err.startswith("search: no layout of 16 devices can run with tp 16; rejected by: tp divides n_q_heads (")


@pytest.mark.parametrize(
    ("objective", "column", "value"),
    [("cost", "cost/B tokens", 2.0 / 3600.0), ("energy", "MJ/B tokens", 700.0 / 1e6), ("step", None, None)],
)
def test_the_objective_is_a_column(run, objective, column, value):
    """8 devices at 2 per hour, or 700 W each (H100): per billion tokens what they take for step / (16 x 2,048 tokens)."""
    data = (
        "{model: llama3-8b, devices: 8, data: {gbs: 16, seqlen: 2048}, hardware: h100, run: {price_per_device_hour: 2}}"
    )
    asked = ("--objective", objective, "--top", "1", *FEW, *NARROW[:2])
    code, out, _ = run(data, *asked)
    best = json.loads(run(data, *asked, "--json")[1])["best"][0]
    lines = out.splitlines()
    heads = next(lines[i + 1] for i, line in enumerate(lines) if line == "best layouts")
    assert code == 0
    if column is None:
        assert "tokens" not in heads
    else:
        paid = 1e9 * 8 * value * best["step_s"] / (16 * 2048)
        assert column in heads
        assert f"{column} {number(paid)}" in " ".join(out.split())


def test_a_saved_plan_keeps_its_devices(run, tmp_path):
    """devices: 8 and no dp, so that another tp changes dp and not the cluster."""
    best = tmp_path / "best.yaml"
    text = "{model: llama3-8b, data: {gbs: 16, seqlen: 2048}, hardware: h100}"
    assert run(text, "--devices", "8", *FEW, "--save", str(best))[0] == 0
    saved = yaml.safe_load(best.read_text())
    assert saved["devices"] == 8
    assert "dp" not in saved["parallelism"]
    changed = Job.load(best, ["parallelism.tp=8", "parallelism.pp=1", "parallelism.cp=1"])
    assert (changed.parallelism.devices, changed.parallelism.dp) == (8, 1)


def test_choices_of_yes_and_no(run):
    plan = "{model: llama3-8b, devices: 8, data: {gbs: 16, seqlen: 2048}, hardware: h100}"
    out = run(plan, "--fix", "pp=1", "--fix", "performance.activation_checkpointing_type=none")[1]
    rows = out.split("sequence parallelism\n")[1].splitlines()[:2]
    assert {row.split()[0] for row in rows} == {"yes", "no"}


def test_a_long_recomputation_is_a_letter_with_a_note():
    """Beside 2 + 1 + 1 + 66 + 1 columns of 80, 9 are left: enough for `mlp`, not for 30; rows of one cell stay."""
    header, wide, short = ["", "x" * 66, "recompute"], "layernorm+mla_up_proj+moe_act", "mlp"
    table = keyed(Table("t", header, [["1", "", wide], ["  --set a=b"], ["2", "", short], ["3", "", wide]], ["append"]))
    assert table.rows == [["1", "", "a"], ["  --set a=b"], ["2", "", short], ["3", "", "a"]]
    assert list(table.notes) == [f"recompute a: {wide}", "append"]
    assert max(map(len, layout(table, PLAIN))) <= 80
    narrow = Table("t", ["", "step", "recompute"], [["1", "2 s", wide]])
    assert keyed(narrow) == narrow._replace(notes=[])


def test_a_search_of_experts_names_every_recomputation_in_80_columns(run):
    """Each recomputation is in the last column in full, not cut in the first."""
    text = "{model: deepseek-v2-lite, devices: 16, data: {gbs: 128, seqlen: 4096}, hardware: h100}"
    out = run(text, "--fix", "tp=1", "--fix", "pp=1", "--fix", "ep=8")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    choices = out.split("best layout for each value of one choice")[1].split("\n\n")[0]
    listed = {line.split()[-1] for line in choices.split("\n  recompute\n")[1].splitlines()}
    assert {"none", "layernorm", "layernorm+moe_act", "mla_up_proj"} <= listed


def test_a_continued_line_keeps_its_backslash():
    """A setting that just fits its column is not parted from the backslash that continues the command."""
    setting = "--set parallelism.embedding_and_loss_count_as_layers=true \\"
    for width in range(40, 80):  # 57 columns and 2
        assert wrapped(setting, width) == [setting]


def test_cost_names_its_price_once(run):
    """--objective cost: the rental price of the machine with its currency and source, or the plan's own."""
    plan = PLAN.replace("dgx-a100-80", "dgx-h100")
    asked = (*FEW, *NARROW, "--objective", "cost")
    out = run(plan, *asked)[1]
    assert " ".join(out.split()).count("per device-hour (US dollars; dgx-h100: ") == 1
    out = run(plan + "run: {price_per_device_hour: 2.5}\n", *asked)[1]
    assert "2.5 per device-hour (run.price_per_device_hour)" in out
    out = run(plan + "run: {price_per_device_hour: 0}\n", *asked)[1]
    assert "device-seconds per token (no price known" in " ".join(out.split())
    assert "per device-hour" not in out
