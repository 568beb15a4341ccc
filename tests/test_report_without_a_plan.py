"""A report without a plan file: the layout and batch that it takes, and the stated settings that it keeps."""

from __future__ import annotations

import json

import pytest
import yaml
from search_jobs import ONE, first_of

import steptime
from steptime.commands.cli import main
from steptime.commands.search_plan import unplanned
from steptime.job.job import Job


def run(capsys, *args):
    code = main(list(args))
    return (code, *capsys.readouterr())


def test_a_model_a_machine_and_a_number_are_a_plan(capsys):
    code, out, _ = run(capsys, "--model", "llama3-70b", "--machine", "h100", "--devices", "512", "--json")
    document = json.loads(out)
    assert (code, document["devices"], document["memory"]["verdict"]) == (0, 512, "fits")
    assert document["assumptions"][0].startswith("defaults without a plan: tp ")
    assert document["config"]["data"]["gbs"] * document["config"]["data"]["seqlen"] == 4 * 2**20


def test_the_layout_without_a_plan_is_the_fastest_that_fits(capsys):
    """405B on 2,304 devices of NVL72: no layout of tp, pp and recomputation that fits has more tokens per second.

    A machine's node has 4 devices, its NVLink domain 72: tp 8 is inside. 126 layers and two ends make 128, which pp 4 divides.
    """
    found = load_json(capsys, "llama3-405b", "gb200", 2304)
    assert found["memory"]["verdict"] == "fits"
    for tp, pp in ((4, 4), (4, 16), (4, 32), (8, 2), (8, 4), (8, 8), (8, 16)):
        for kind in ("none", "full"):
            change = {"parallelism": {"tp": tp, "pp": pp, "layers_per_stage": "auto"}}
            change["performance"] = {"activation_checkpointing_type": kind}
            data = {"gbs": 576, "seqlen": 8192, "microbatch_sz": 1}
            if 576 % (2304 // (tp * pp)) == 0:
                other = steptime.estimate(Job(model="llama3-405b", devices=2304, data=data, hardware="gb200", **change))
                fits = other.memory.verdict == "fits"
                assert not fits or other.throughput.tokens_per_s < found["throughput"]["tokens_per_s"]


@pytest.mark.parametrize(("model", "machine", "devices"), [("deepseek-v3", "h100", 256), ("llama3-70b", "h100", 500)])
def test_a_report_without_a_plan_is_near_the_best_of_a_search(capsys, model, machine, devices):
    """The same batch, and at least 95 % of the tokens per second; 61 layers of DeepSeek-V3 lie unevenly in both.

    500 = 4 * 125 H100: tp 4 alone does not fit 70 B, tp 4 with pp 5 does; 80 layers are 16 a stage.
    """
    found = load_json(capsys, model, machine, devices)
    if devices == 500:
        assert found["memory"]["verdict"] == "fits"
        assert found["config"]["parallelism"]["pp"] % 5 == 0
    named = ("--model", model, "--machine", machine, "--devices", str(devices))
    best = first_of(run(capsys, "search", *named, *ONE)[1])
    assert int(best["gbs"]) == found["config"]["data"]["gbs"]
    assert found["throughput"]["tokens_per_s"] > 0.95 * float(best["tokens_per_s"])


@pytest.mark.parametrize(
    ("settings", "sequences"),
    [
        ((), 500),
        (("data.seqlen=131072",), 125),
        (("data.gbs=250",), 250),
        (("devices=384",), 384),
        (("data.microbatch_sz=3",), 375),
    ],
)
def test_the_batch_of_a_report_and_of_a_search_has_one_rule(settings, sequences):
    """500 x 8,192 are 3.9 Mi tokens; 32 x 131,072 would be 4 Mi, and 500 is halved while it is even: to 125.

    384 x 8,192 = 3 Mi tokens are nearer to 4 Mi than 768 x 8,192 = 6 Mi. Micro-batches of 3 on 500 devices are 1,500 sequences,
    12 Mi tokens, halved to 375.
    """
    plan = unplanned("llama3-8b", "h100", None if "devices=384" in settings else 500, list(settings))
    assert plan.job.data.gbs == sequences


def test_a_search_takes_nodes_for_devices(capsys, tmp_path):
    """64 nodes of 8."""
    path = tmp_path / "plan.yaml"
    data = {"gbs": 512, "seqlen": 8192}
    path.write_text(yaml.safe_dump({"model": "llama3-8b", "data": data, "hardware": {"node_type": "h100", "nodes": 4}}))
    best = first_of(run(capsys, "search", str(path), *ONE)[1])
    assert int(best["devices"]) == int(best["dp"]) * int(best["tp"]) * int(best["cp"]) * int(best["pp"]) == 32


def test_a_stated_pp_is_interleaved_too(capsys):
    """Stating the value that would be chosen changes nothing."""
    named = ("--model", "llama3-70b", "--devices", "64", "--json")
    chosen, stated = (json.loads(run(capsys, *named, *more)[1]) for more in ((), ("--set", "parallelism.pp=4")))
    assert chosen["config"]["parallelism"]["pp"] == 4
    assert stated["time"]["step_s"] == chosen["time"]["step_s"]


def test_sequences_without_a_plan_are_those_that_tp_divides(capsys):
    """OPT's table has 2,050 positions, two of them before the first token."""
    assert load_json(capsys, "opt-6.7b", "h100", 8)["config"]["data"]["seqlen"] == 2048


def test_the_batch_without_a_plan_grows_with_the_cluster():
    """Llama 3 405B (arXiv 2407.21783, table 4): 16M tokens on 16,384 devices; 4M at first, here up to 4,096 of them."""
    for devices, tokens in ((512, 4), (4096, 4), (16384, 16)):
        data = unplanned("llama3-405b", "h100", devices, []).job.data
        assert data.gbs * data.seqlen == tokens * 2**20


def load_json(capsys, model, machine, devices):
    return json.loads(run(capsys, "--model", model, "--machine", machine, "--devices", str(devices), "--json")[1])


def test_only_defaults_are_told(capsys):
    """Machine, devices and layout are stated; the batch and its lengths are not."""
    stated = (
        "parallelism={tp: 8, pp: 1, dp: 1}",
        "data.microbatch_sz=1",
        "performance.activation_checkpointing_type=full",
    )
    layout = [word for setting in stated for word in ("--set", setting)]
    document = json.loads(run(capsys, "--model", "llama3-70b", "--machine", "h100", *layout, "--json")[1])
    assert document["assumptions"][0] == (
        "defaults without a plan: 8 devices, 8,192 tokens per sequence, gbs 512 (4 Mi tokens per step); change them with --set"
    )


FEW_LAYERS = "model.n_layers=8"
"""Of a model whose depth says nothing: fewer stages are tried."""
SHALLOW = ("--model", "llama3-8b", "--set", FEW_LAYERS)


def quick(capsys, *sets, named=SHALLOW):
    """The JSON of a report without a plan under some settings, and its note of defaults."""
    code, out, err = run(capsys, *named, *(word for setting in sets for word in ("--set", setting)), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    return document, document["assumptions"][0]


@pytest.mark.parametrize(
    "setting",
    [
        "performance.recompute.granularity=full",
        "performance={recompute: {granularity: full}}",
        "performance={activation_checkpointing_type: full}",
        "performance.activation_checkpointing_type=full",
    ],
)
def test_a_stated_recomputation_is_kept_however_it_is_written(capsys, setting):
    """Of every chunk all layers, one by one; it is no default."""
    document, note = quick(capsys, setting)
    said = document["config"]["performance"]["recompute"]
    assert said == {"granularity": "full", "method": "uniform", "n_layers": 1}
    assert "recomputation" not in note


def test_stated_layers_of_recomputation_are_kept(capsys):
    document, note = quick(
        capsys, "performance.recompute={granularity: full, method: block}", "performance.recompute.n_layers=5"
    )
    said = document["config"]["performance"]["recompute"]
    assert said == {"granularity": "full", "method": "block", "n_layers": 5}
    assert "recomputation" not in note


def test_a_stated_split_of_the_layers_is_kept(capsys):
    """1 + 3 + 3 + 1 = 8 layers of 4 stages, whether pp is stated or not."""
    named = (*SHALLOW, "--devices", "16")
    for more in (("parallelism.pp=4",), ()):
        layout = quick(capsys, *more, "parallelism.layers_per_stage=[1,3,3,1]", named=named)[0]["config"]["parallelism"]
        assert (layout["pp"], layout["vpp"], layout["layers_per_stage"]) == (4, 1, [1, 3, 3, 1])


@pytest.mark.parametrize("command", [(), ("search",)])
@pytest.mark.parametrize("setting", ["hardware.nodes=2", "devices=16"])
def test_a_number_of_devices_that_a_setting_contradicts_is_refused(capsys, command, setting):
    """Two nodes of 8 are 16 devices."""
    words = (*command, *SHALLOW, "--machine", "h100", "--set", setting)
    line = f"--devices: 8, but --set {setting} makes 16 devices; remove one\n"
    assert run(capsys, *words, "--devices", "8") == (2, "", line)
    if not command:
        assert run(capsys, *words, "--devices", "16", "--brief")[0] == 0


@pytest.mark.parametrize("command", [(), ("search",)])
@pytest.mark.parametrize(
    ("setting", "option"),
    [("hardware=a100", "--machine h100"), ("hardware.node_type=a100", "--machine h100"), ("model=gpt2", "--model llama3-8b")],
)  # fmt: skip
def test_a_model_or_machine_that_a_setting_contradicts_is_refused(capsys, command, setting, option):
    words = (*command, "--model", "llama3-8b", "--machine", "h100", "--devices", "8", "--set", setting)
    assert run(capsys, *words) == (2, "", f"{option}: --set {setting} states another; give one of them\n")


@pytest.mark.parametrize("command", [("--json",), ("search", *ONE)])
@pytest.mark.parametrize("key", ["hardware", "hardware.node_type"])
def test_two_names_of_one_machine_do_not_contradict(capsys, command, key):
    named = (*command, *SHALLOW, "--machine", "h100", "--devices", "8", "--set", f"{key}=dgx-h100")
    assert run(capsys, *named)[0] == 0


def test_another_machine_keeps_the_other_keys_of_hardware(capsys, tmp_path):
    """Two nodes of 4 GB200 are 8 devices; figures stated of the machine apply to the other one, and a line says so."""
    path = tmp_path / "plan.yaml"
    hardware = {"node_type": "dgx-h100", "nodes": 2, "overrides": {"accelerator.usable_memory_bytes": "60GiB"}}
    plan = {
        "model": "llama3-8b",
        "parallelism": {"tp": 2, "pp": 1},
        "data": {"gbs": 64, "seqlen": 4096, "microbatch_sz": 1},
    }
    path.write_text(yaml.safe_dump(plan | {"hardware": hardware}))
    code, out, err = run(capsys, str(path), "--machine", "gb200", "--json")
    document = json.loads(out)
    assert (code, document["devices"], document["memory"]["capacity_bytes"]) == (0, 8, 60 * 2**30)
    assert err == "--machine gb200: hardware.overrides of the plan (accelerator.usable_memory_bytes) apply to it, too\n"
    removed = run(capsys, str(path), "--machine", "gb200", "--set", "hardware.overrides={}", "--json")
    assert removed[2] == ""
    assert json.loads(removed[1])["memory"]["capacity_bytes"] > 100 * 2**30


def test_a_stated_list_of_recomputed_layers_is_kept(capsys):
    """One number per stage makes as many stages; with a single key, the missing one is told with its values."""
    named = (*SHALLOW, "--devices", "16")
    said = "performance.recompute={granularity: full, method: block, n_layers: [4, 2]}"
    for more in (("parallelism.pp=2",), ()):
        config = quick(capsys, *more, said, named=named)[0]["config"]
        assert (config["parallelism"]["pp"], config["parallelism"]["vpp"]) == (2, 1)
        assert config["performance"]["recompute"]["n_layers"] == [4, 2]
    _, _, err = run(capsys, *named, "--set", "performance.recompute.n_layers=[4, 2]")
    fix = "full (whole layers: method, n_layers) or selective (modules, memory_budget)"
    assert err == f"performance.recompute.granularity: required key is missing; {fix}\n"
    code, _, err = run(capsys, "search", *named, "--machine", "h100", "--set", said)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("performance.recompute: its list of n_layers has one number per stage or chunk")


@pytest.mark.parametrize(("ends", "whole"), [("true", 82), ("false", 80)])
def test_ends_that_are_stated_to_count_as_layers_do(capsys, ends, whole):
    """80 layers and two ends are 82; the fastest layout of either kind is not the one of the other."""
    named = ("--model", "llama3-70b", "--devices", "64")
    setting = f"parallelism.embedding_and_loss_count_as_layers={ends}"
    layout = quick(capsys, setting, named=named)[0]["config"]["parallelism"]
    assert layout["embedding_and_loss_count_as_layers"] == (ends == "true")
    assert whole % (layout["pp"] * layout["vpp"]) == 0


def test_a_stated_group_of_micro_batches_is_kept(capsys):
    """Only an interleaved schedule has groups."""
    named = ("--model", "llama3-70b", "--devices", "64")
    for more in (("parallelism.pp=4", "parallelism.vpp=2"), ("parallelism.pp=4",)):
        layout = quick(capsys, *more, "parallelism.microbatch_group_sz=8", named=named)[0]["config"]["parallelism"]
        assert (layout["pp"], layout["microbatch_group_sz"]) == (4, 8)
        assert layout["vpp"] > 1


def test_resharding_to_a_stated_number_of_ranks_is_kept(capsys):
    """4 of 8 shards, two copies of which are 16 devices: a single device has no shards that 4 would divide."""
    named = (*SHALLOW, "--devices", "16")
    layout = quick(capsys, "parallelism.fsdp.reshard_after_forward=4", "parallelism.replicas=2", named=named)[0][
        "config"
    ]
    said = layout["parallelism"]
    assert (said["fsdp"]["reshard_after_forward"], said["replicas"], said["dp"] * said["cp"]) == (4, 2, 16)


def test_a_stated_second_partition_is_kept(capsys):
    """hpZ's 8 of 16 shards, although the plan is first read on a single device."""
    named = (*SHALLOW, "--devices", "16")
    settings = ("performance.software=deepspeed", "parallelism.zero_plus_plus.hpz_partition_size=8")
    said = quick(capsys, *settings, named=named)[0]["config"]["parallelism"]
    assert said["zero_plus_plus"]["hpz_partition_size"] == 8
    assert said["dp"] * said["cp"] == 16


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("mixtral-8x7b", ("performance.moe.dispatcher=flex",)),
        ("mixtral-8x7b", ("performance.overlap.ep=true",)),
        ("mixtral-8x7b", ("model.moe.expert_tp_degree=2",)),
        ("deepseek-v3", ("performance.overlap.ep=true", "model.mtp=1")),
    ],
)
def test_settings_that_need_several_ranks_or_stages_are_kept(capsys, model, settings):
    """Of 8 devices; a single one has one rank of experts and one stage, on which none of them can run."""
    named = ("--model", model, "--devices", "8")
    config = quick(capsys, "model.n_layers=4", *settings, named=named)[0]["config"]
    layout, moe = config["parallelism"], config["model"]["moe"]
    assert layout["ep"] * layout["etp"] > 1
    assert layout["etp"] == moe.get("expert_tp_degree", layout["etp"])
    assert layout["pp"] > 1 or not config["model"].get("mtp")
    if model == "deepseek-v3":
        setting = [word for each in ("model.n_layers=4", *settings) for word in ("--set", each)]
        assert run(capsys, "search", *named, *setting, *ONE)[0] != 2  # it may not fit


def test_one_device_has_no_ranks_of_experts(capsys):
    """Nothing can run; what several ranks would allow is no problem of the settings."""
    code, _, err = run(capsys, "--model", "mixtral-8x7b", "--devices", "1", "--set", "performance.moe.dispatcher=flex")
    assert code == 2
    assert err.startswith("search: no layout of 1 device can run; rejected by: ")


def test_the_limit_of_micro_batches_is_that_of_the_layout(capsys):
    """160,000 sequences on 8 devices of pp 1 are 20,000 micro-batches; 900,000 devices have as many sequences."""
    config = quick(capsys, "data.gbs=160000")[0]["config"]
    assert config["data"]["gbs"] == 160_000
    assert 160_000 // (config["parallelism"]["dp"] * config["data"]["microbatch_sz"]) <= 100_000
    assert unplanned("llama3-8b", "h100", 900_000, []).job.data.gbs > 100_000


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("parallelism.tp=x", "parallelism.tp: expected a whole number (got 'x')"),
        ("parallelism.tp={a: 1}", "parallelism.tp: expected a whole number (got a mapping)"),
        ("parallelism.tp=[1]", "parallelism.tp: expected a whole number (got a list of 1)"),
        ("parallelism.tp=null", "parallelism.tp: expected a whole number (got nothing)"),
        ("data.microbatch_sz=auto", "data.microbatch_sz: expected a whole number (got 'auto')"),
        ("parallelism.zero_level=x", "parallelism.zero_level: expected one of 0, 1, 2, 3 (got 'x')"),
        ("parallelism.schedule=zero-bubble", "parallelism.schedule: use zero_bubble (got 'zero-bubble')"),
        (
            "performance.moe.dispatcher=deepep",
            "performance.moe.dispatcher: use flex, which is DeepEP and HybridEP (got 'deepep')",
        ),
        ("parallelism.sp=x", "parallelism.sp: expected true or false (got 'x')"),
        ("data=3", "data: expected a mapping (got 3); give its keys: 3dtrn explain --key data"),
        ("devices=auto", "devices: expected a whole number (got 'auto')"),
        ("parallelism=3", "parallelism: expected a mapping (got 3); give its keys: 3dtrn explain --key parallelism"),
    ],
)
def test_an_invalid_value_without_a_layout_is_the_only_problem(capsys, tmp_path, setting, line):
    """In a report without a plan, and in a search of a file."""
    assert run(capsys, "--model", "llama3-8b", "--set", setting) == (2, "", f"{line}\n")
    path = tmp_path / "plan.yaml"
    plan = {"model": "llama3-8b", "devices": 8, "data": {"gbs": 8, "seqlen": 4096}, "hardware": "h100"}
    key, _, value = setting.partition("=")
    section, _, name = key.partition(".")
    read = yaml.safe_load(value)
    plan[section] = {**plan.get(section, {}), name: read} if name else read
    path.write_text(yaml.safe_dump(plan))
    assert run(capsys, "search", str(path)) == (2, "", f"{path}: {line}\n")


def test_dp_may_be_open(capsys):
    assert quick(capsys, "parallelism.dp=auto")[0] == quick(capsys)[0]


def test_nodes_of_a_stated_machine_are_the_devices(capsys, tmp_path):
    """Two nodes of 8; a plan that also has another number contradicts itself."""
    document, note = quick(capsys, "hardware={node_type: dgx-a100, nodes: 2}")
    assert (document["devices"], document["config"]["hardware"]["node_type"]) == (16, "dgx-a100-80")
    assert "16 devices" not in note
    plan = {"model": "llama3-8b", "data": {"gbs": 8, "seqlen": 4096}, "devices": 8}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan | {"hardware": {"node_type": "dgx-a100", "nodes": 2}}))
    line = f"{path}: devices: 8, but hardware.nodes: 2 nodes of 8 = 16; remove one\n"
    assert run(capsys, "search", str(path)) == (2, "", line)
    path.write_text(yaml.safe_dump(plan | {"hardware": {"node_type": "dgx-a100", "nodes": 1}}))
    assert run(capsys, "search", str(path), *ONE)[0] == 0


def test_a_search_refuses_what_follows_from_the_layout(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    plan = {"model": "llama3-8b", "data": {"gbs": 8, "seqlen": 4096}, "devices": 8, "hardware": "h100"}
    path.write_text(yaml.safe_dump(plan | {"parallelism": {"pp": 2, "layers_per_stage": [16, 16]}}))
    code, out, err = run(capsys, "search", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("parallelism.layers_per_stage: it follows from the layout")


def test_many_stages_of_fsdp_do_not_end_a_search(capsys):
    """44 layers in up to 44 stages on 88 devices: whatever batch stands in for that of the rows has a step that can be walked."""
    document, note = quick(capsys, "parallelism.pp=44", named=("--model", "gpt-neox-20b", "--devices", "88"))
    assert document["config"]["parallelism"]["pp"] == 44
    assert "pp" not in note.split("(fastest")[0].split()


def test_only_a_key_of_the_same_section_is_a_degree(capsys):
    """The overlap of tp's communication is not the degree of tp."""
    assert ", tp 1, pp 1" in quick(capsys, "performance.overlap.tp=0.5")[1]
    note = quick(capsys, "parallelism={tp: 2}")[1]
    assert ", pp 1" in note
    assert "tp 2" not in note


@pytest.mark.parametrize("command", [(), ("search",)])
def test_ranks_that_no_layout_can_reshard_to_are_named(capsys, command):
    """3 does not divide 8 devices, whatever their layout; the batch is not the cause."""
    sets = ("--set", "performance.software=fsdp2", "--set", "parallelism.fsdp.reshard_after_forward=3")
    code, _, err = run(capsys, *command, "--model", "llama3-8b", "--machine", "h100", "--devices", "8", *sets)
    line = "a number of ranks must divide the 8 shards and be below them (got 3); true is all shards"
    assert (code, err) == (2, f"parallelism.fsdp.reshard_after_forward: {line}\n")
