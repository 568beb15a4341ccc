"""Asking: a plan by number of devices, without a file, all problems at once, and hints for other frameworks' names."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import DEVICES_PLAN

import steptime
from steptime.base.config import ConfigError
from steptime.commands.cli import main
from steptime.hardware.machine import Machine, machine_names
from steptime.hardware.machine_tree import FAR, SHIPPED
from steptime.job.job import Job
from steptime.job.names import PATHS, meant_path
from steptime.report.plan_keys import keys

NODE = "{name: box, accelerator: h100, devices_per_node: 8, tiers: [{name: link, size: 8, bytes_per_s: %s, latency_s: %s}]}"


def load(*sets, **changes):
    return Job.load(json.dumps(DEVICES_PLAN | changes), sets)


def problems(*sets, **changes):
    with pytest.raises(ConfigError) as error:
        load(*sets, **changes)
    return error.value.problems


def run(capsys, *args):
    code = main(list(args))
    return (code, *capsys.readouterr())


# --- a number of devices -------------------------------------------------------------------------------------------------


def test_dp_is_what_the_other_degrees_leave():
    """512 / (8 * 4) = 16; tp 16 leaves 8, and the cluster is what it was."""
    assert load().parallelism.dp == 16
    found = load("parallelism.tp=16")
    assert (found.parallelism.dp, found.parallelism.devices) == (8, 512)
    assert load().replace(**{"parallelism.tp": 16}) == found
    assert load(parallelism={"tp": 8, "pp": 4, "dp": "auto"}) == load()


def test_nodes_are_devices():
    """64 nodes of 8."""
    assert load("hardware.nodes=64") == load()
    assert load("hardware.nodes=32").parallelism.devices == 256
    assert load("hardware.nodes=32").replace(**{"parallelism.pp": 2}).parallelism.devices == 256


def test_a_degree_of_its_own_replaces_the_number():
    assert load("parallelism.dp=4").parallelism.devices == 128
    assert load().replace(**{"parallelism.dp": 4}).parallelism.devices == 128


def test_numbers_that_contradict():
    assert (
        problems("parallelism.pp=3")[0]
        == "devices: 512 devices are not a multiple of tp*cp*pp = 24; nearest: 504 or 528"
    )
    both = problems(parallelism={"tp": 8, "pp": 4, "dp": 32})
    assert both == ["devices: 512 devices, but tp*cp*pp*dp = 1,024; remove one, or set parallelism.dp to auto"]
    plan = {key: value for key, value in DEVICES_PLAN.items() if key != "devices"}
    with pytest.raises(ConfigError, match="auto needs a number of devices"):
        Job.load(json.dumps(plan | {"parallelism": {"tp": 1, "pp": 1, "dp": "auto"}}))


def test_a_degree_that_is_a_list_is_one_line():
    with pytest.raises(ConfigError, match=r"parallelism\.dp: "):
        load(parallelism={"tp": 8, "pp": 4, "dp": [1]})


@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), devices=st.sampled_from([64, 128, 512]))
def test_the_cluster_never_changes_under_a_fixed_number(tp, pp, devices):
    found = load(f"devices={devices}").replace(**{"parallelism.tp": tp, "parallelism.pp": pp})
    assert found.parallelism.devices == devices
    assert Job.load(yaml.safe_dump(found.to_config())) == found


# --- without a file ------------------------------------------------------------------------------------------------------


def test_a_search_needs_no_file_and_its_rows_run_as_printed(capsys):
    """The last line of the best layouts is the command that its changes are appended to."""
    named = ("--model", "llama3-8b", "--devices", "24")
    few = ("--top", "1", "--fix", "pp=1", "--fix", "performance.activation_checkpointing_type=full")
    code, out, _ = run(capsys, "search", *named, *few, "--json")
    best = json.loads(out)["best"][0]
    assert code == 0
    assert best["config"]["data"]["gbs"] == 504  # of the multiples of 24 the nearest to 512
    text = run(capsys, "search", *named, *few)[1]
    command = " ".join(text.split("append --set ... to: ")[1].split("(")[0].split())
    assert command == "3dtrn --model llama3-8b --machine dgx-h100 --devices 24"
    again = json.loads(run(capsys, *shlex.split(f"{command} {best['set']}")[1:], "--json")[1])
    assert again["time"]["step_s"] == best["step_s"]


def test_a_search_without_a_plan_asks_in_one_line(capsys):
    assert run(capsys, "search")[2].startswith("3dtrn search needs a PLAN file, or --model NAME")
    assert run(capsys, "search", "--model", "llama3-8b")[2] == "--devices: required without a PLAN file\n"


def test_options_over_a_file(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(DEVICES_PLAN))
    document = json.loads(run(capsys, str(path), "--devices", "256", "--json")[1])
    assert (document["devices"], document["config"]["parallelism"]["dp"]) == (256, 8)


def test_no_model_is_one_line(capsys):
    assert run(capsys, "--devices", "8") == (
        2,
        "",
        "--model: required without a PLAN file (3dtrn models lists the presets)\n",
    )


SECTIONS = "model, parallelism, performance, data, hardware, cross_dc, run, notes, devices"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("x.yaml", "--min-mfu", "50"), "3dtrn: --min-mfu: invalid fraction '50'; use 0.5 or 50%"),
        (("x.yaml", "--min-mfu", "101%"), "3dtrn: --min-mfu: invalid fraction '101%'; use 0.4 or 40%"),
        (("--model", "llama3-8b", "--devices", "7.5"), "3dtrn: --devices: expected a whole number (got 7.5)"),
        (
            ("search", "configs/llama3_8b.yaml", "--devices", "7.5"),
            "--devices 7.5: expected a whole number, a comma-separated list, or LOW:HIGH",
        ),
        (("x.yaml", "--jsn"), "3dtrn: unrecognized arguments: --jsn; did you mean '--json'?"),
        (
            ("scale", "--model", "llama3-8b", "--machine", "h100", "--devices", "64"),
            "3dtrn scale: takes a PLAN, not --model; 3dtrn init plan.yaml --model NAME --machine NAME --devices N writes one",
        ),
        (
            ("models", "--model=llama3-8b"),
            "3dtrn models: unrecognized arguments: --model=llama3-8b; 3dtrn models --help lists all",
        ),
        (("machines", "--foo"), "3dtrn machines: unrecognized arguments: --foo; 3dtrn machines --help lists all"),
        (("schema", "--json"), "3dtrn schema: unrecognized arguments: --json; 3dtrn schema --help lists all"),
        (
            ("explain", "--key", "parallelism.tpp"),
            "--key parallelism.tpp: not a key of a plan; did you mean 'parallelism.tp'?",
        ),
        (
            ("explain", "--key", "foo.bar"),
            f"--key foo.bar: not a key of a plan; 3dtrn explain --key SECTION lists its keys: {SECTIONS}",
        ),
    ],
)
def test_a_wrong_option_is_one_line(capsys, args, line):
    """Not a page of usage before it."""
    try:
        code = main(list(args))
    except SystemExit as left:
        code = left.code
    assert (code, *capsys.readouterr()) == (2, "", f"{line}\n")


def test_what_is_no_launch_file_or_one_plan_too_many_is_told(capsys, tmp_path, monkeypatch):
    """A plan under --from; two plans, which diff compares; a trace that is missing or a directory."""
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "a.yaml"
    plan.write_text(yaml.safe_dump(DEVICES_PLAN))
    for kind in ("auto", "megatron", "nemo", "axolotl"):
        assert run(capsys, "--from", kind, "a.yaml") == (2, "", "a.yaml: is a plan already; run 3dtrn a.yaml\n")
    several = "3dtrn: one PLAN at a time; to compare: 3dtrn diff a.yaml b.yaml\n"
    assert run(capsys, "a.yaml", "b.yaml", "--brief") == (2, "", several)
    assert run(capsys, "explain", "a.yaml", "--trace", "no.json") == (2, "", "no.json: no such file\n")
    told = f"{tmp_path}: is a directory; give the file of a trace\n"
    assert run(capsys, "explain", "a.yaml", "--trace", str(tmp_path)) == (2, "", told)


def test_a_machine_without_the_default_precision_names_the_setting(capsys):
    """V100 has no bf16."""
    line = (
        "performance.precision: dgx-1v does not support bf16; use one of fp16, fp32 (--set performance.precision=...)\n"
    )
    assert run(capsys, "--model", "llama3-8b", "--machine", "v100") == (2, "", line)
    code, out, _ = run(capsys, "--model", "llama3-8b", "--machine", "v100", "--set", "performance.precision=fp16")
    assert (code, "fp16 dense" in out) == (0, True)


def test_the_bare_command_prints_help(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "usage: 3dtrn" in out


def test_init_writes_a_plan_that_runs(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    assert run(capsys, "init", str(path), "--model", "llama3-8b", "--devices", "16")[0] == 0
    job = Job.load(path)
    assert (job.parallelism.devices, job.model.name) == (16, "llama3-8b")
    assert "# Sequence length. [tokens]" in path.read_text()
    assert run(capsys, "init", str(path))[0] == 2  # never over a file
    assert run(capsys, "init", "-")[1].startswith("# A training plan")


def test_experts_are_spread_where_no_plan_says_how(capsys, tmp_path):
    """DeepSeek-V3's 671 B parameters, 256 experts: all on a device they need 489 GiB; 61 layers do not divide by pp 2."""
    named = ("--model", "deepseek-v3", "--machine", "h100", "--devices", "1024")
    document = json.loads(run(capsys, *named, "--json")[1])
    layout = document["config"]["parallelism"]
    assert (document["memory"]["verdict"], layout["ep"] in {8, 64}, layout["etp"]) == ("fits", True, 1)
    assert f"ep {layout['ep']}, etp 1, recomputation" in document["assumptions"][0]
    assert run(capsys, "init", str(tmp_path / "plan.yaml"), *named)[0] == 0
    made = Job.load(tmp_path / "plan.yaml")
    assert {key: getattr(made.parallelism, key) for key in ("tp", "pp", "dp", "ep", "etp")}.items() <= layout.items()
    assert steptime.estimate(made).step_s == pytest.approx(document["time"]["step_s"])


def test_a_preset_is_not_a_plan():
    with pytest.raises(ConfigError) as error:
        Job.load("llama3-8b")
    assert error.value.problems == [
        "llama3-8b: no such file; it is a model preset: use --model llama3-8b, or model: llama3-8b in a plan"
    ]


def test_a_misspelt_subcommand_is_told(capsys):
    assert run(capsys, "serch", "plan.yaml") == (
        2,
        "",
        "serch: no such file, and no subcommand; did you mean search?\n",
    )
    assert run(capsys, "no.yaml")[2] == "no.yaml: no such file\n"


def test_replicas_of_one_are_no_second_problem():
    """128 devices of a stage are no multiple of ep 7, which says it all."""
    with pytest.raises(ConfigError) as error:
        Job.load("configs/deepseek_v3.yaml", ["parallelism.ep=7"])
    assert {problem.split(": ")[0].split("/")[-1] for problem in error.value.problems} == {"parallelism.ep"}


def test_what_no_layout_can_have_is_told_of_the_least_split_one(capsys):
    """Not that 8 x cp 2 are more ranks than there are devices, which only the most split one hits."""
    code, _, err = run(capsys, "--model", "qwen3-next-80b-a3b", "--devices", "8", "--set", "parallelism.cp=2")
    assert (code, err) == (2, "parallelism.cp: not modeled yet together with model.linear_attention (got 2); use 1\n")


def test_a_model_too_big_for_its_devices_is_not_said_to_fit(capsys):
    """405 B parameters in bf16 on 8 devices: 94 GiB of weights alone on each."""
    document = json.loads(run(capsys, "--model", "llama3-405b", "--devices", "8", "--json")[1])
    assert document["memory"]["verdict"] == "does_not_fit"
    assert "layouts fits, this needs least memory; 3dtrn search tries more" in document["assumptions"][0]
    assert "fastest of" not in document["assumptions"][0]


# --- problems ------------------------------------------------------------------------------------------------------------


def test_a_bad_value_hides_no_other_problem():
    """seqlen stops the batch from being read; tp 6 divides neither heads nor MLP, and 1000 is no multiple of dp 32."""
    found = problems(
        devices=None,
        parallelism={"tp": 6, "pp": 4, "dp": 32},
        data=DEVICES_PLAN["data"] | {"gbs": 1000, "seqlen": "8k"},
    )
    assert found[0] == "data.seqlen: expected a whole number (got '8k'); write 8192"
    assert [line.partition(":")[0] for line in found[1:]] == ["parallelism.tp"] * 3 + ["data.gbs"]
    assert found[-1].startswith("data.gbs: must be a multiple of dp*microbatch_sz = 32 (got 1000)")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("data.seqlen=128k", "(got '128k'); write 131072"),  # 128 * 1024
        ("data.gbs=1,024", "(got '1,024'); write 1024"),
        ("run.tokens=15T", "(got '15T'); write 1.5e+13"),  # 15 * 1000**4
        ("data.seqlen=long", "(got 'long')"),
    ],
)
def test_an_abbreviated_number_is_spelled_out(setting, hint):
    (line,) = problems(setting)
    assert line.endswith(hint)
    if "write" in hint:
        assert load(f"{setting.partition('=')[0]}={hint.rpartition(' ')[2]}")


@pytest.mark.parametrize("setting", ["devices=0", "devices=many", "hardware.nodes=0"])
def test_a_number_of_devices_that_is_none_is_one_line(setting):
    (line,) = problems(setting)
    assert line.startswith(f"{setting.partition('=')[0]}: ")


def test_a_suggestion_does_not_suggest_itself():
    """80 layers cannot be 81 stages, with layers_per_stage auto or without."""
    plan = {"devices": None, "parallelism": {"tp": 1, "pp": 81, "dp": 1}}
    wanted = ["parallelism.pp: pp*vpp = 81 is more than n_layers 80; lower pp or vpp (got pp 81, vpp 1)"]
    assert problems(**plan) == wanted
    assert problems("parallelism.layers_per_stage=auto", **plan) == wanted
    ends = {"devices": None, "parallelism": {"tp": 1, "pp": 41, "vpp": 2, "dp": 1}}  # 80 layers, embedding and loss
    assert problems(**ends)[0].endswith(
        "lower pp or vpp, or set parallelism.embedding_and_loss_count_as_layers to true (got pp 41, vpp 2)"
    )


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("parallelism.tensor_model_parallel_size=8", "did you mean 'tp'?"),
        ("parallelism.tensor_parallel=8", "did you mean 'tp'?"),
        ("model.num_layers=8", "did you mean 'n_layers'?"),
        ("data.micro_batch_size=1", "did you mean 'microbatch_sz'?"),
        ("parallelism.micro_batch_size=1", "did you mean data.microbatch_sz?"),
        ("tp=4", "did you mean --set parallelism.tp=4?"),
        ("cuda_graphs=true", "did you mean --set performance.cuda_graphs=true?"),
        ("lora.rank=16", "did you mean model.lora?"),
        ("seq_length=4096", "did you mean --set data.seqlen=4096?"),
    ],
)
def test_names_of_other_frameworks(setting, hint):
    assert any(line.endswith(hint) for line in problems(setting))


def test_every_name_leads_to_a_key():
    known = {key.path for key in keys()} | {"model.preset", "model.hf"}
    assert set(PATHS.values()) <= known
    assert all(meant_path(path.rpartition(".")[2]) == path for path in PATHS.values())


# --- machine files -------------------------------------------------------------------------------------------------------


def test_figures_without_a_unit_are_told(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text(NODE % ("450", "14"))
    with pytest.raises(ConfigError) as error:
        Machine.load(str(path))
    assert error.value.problems == [
        "tiers.0.bytes_per_s: 450 B/s is not plausible; write the unit, for example '450 GB/s'",
        "tiers.0.latency_s: 14 s is not plausible; write the unit, for example '14 us'",
    ]
    path.write_text(NODE % ("450 GB/s", "14 us"))
    assert Machine.load(str(path)).accelerator.name == "h100-sxm5-80"  # an alias


def test_the_bounds_are_those_of_the_shipped_machines():
    """Each bound lies within a factor of two outside of what ships, so that a factor of a thousand is one."""
    found: dict[str, list[float]] = {}
    for machine in map(Machine.load, machine_names()):
        for key, _, value in machine.figures():
            found.setdefault(key, []).append(value)
    for key, (low, high, _) in SHIPPED.items():
        assert low <= min(found[key]) <= 2 * low, key
        assert high / 2.5 <= max(found[key]) <= high, key
    assert FAR == 1000.0


def test_show_knows_accelerators(capsys):
    assert run(capsys, "show", "h100-sxm5-80")[1].startswith("name: h100-sxm5-80")
    assert "not a machine, model, accelerator or software profile" in run(capsys, "show", "foo")[2]


def test_other_commands_speak_json(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(DEVICES_PLAN))
    assert any(row["name"] == "dgx-h100" for row in json.loads(run(capsys, "machines", "--json")[1]))
    assert any(row["params"] == 70_553_706_496 for row in json.loads(run(capsys, "models", "--json")[1]))
    assert json.loads(run(capsys, "show", "h100", "--json")[1])["name"] == "dgx-h100"
    found = json.loads(run(capsys, "explain", str(path), "mfu", "--json")[1])["sections"]
    assert [fact["label"] for fact in found[0]["facts"]] == ["mfu", "full", "hfu", "model"]
    assert json.loads(run(capsys, "explain", "--key", "data.gbs", "--json")[1])[0]["unit"] == "sequences per step"


def test_an_alias_is_no_difference(capsys, tmp_path):
    for name, machine in (("a", "h100"), ("b", "dgx-h100")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(DEVICES_PLAN | {"hardware": machine}))
    found = json.loads(run(capsys, "diff", *(str(tmp_path / f"{name}.yaml") for name in "ab"), "--json")[1])
    assert found["sections"][0]["title"] == "no setting differs"


def test_an_attention_kernel_that_a_gpu_has_not_is_told():
    """V100 has compute capability 7.0, FlashAttention asks for 8.0; fp8 has no rate on A100."""
    plan = {"hardware": "dgx-1v", "performance": {"precision": "fp16"}}
    notes = steptime.estimate(load(**plan)).assumptions
    assert any("FlashAttention has no kernel for v100-sxm2-32" in line for line in notes)
    plan["performance"] = {"precision": "fp16", "attention_impl": "unfused"}
    assert not any("FlashAttention" in line for line in steptime.estimate(load(**plan)).assumptions)
    assert any("does not support fp8" in line for line in problems(hardware="a100", performance={"precision": "fp8"}))
