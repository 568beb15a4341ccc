"""Plans as torchtitan's job configs: what v0.2.2 would train is what the plan says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

from steptime import Job, estimate
from steptime.base.config import build
from steptime.commands.cli import main
from steptime.job.edit import read_model
from steptime.launch.keys import table_file
from steptime.launch.torchtitan.flavors import MODELS, NO_FAMILIES, known_models
from steptime.launch.write.export import notes, plain, read_back, refused, write
from steptime.launch.write.torchtitan_toml import flavor
from steptime.model.blocks import n_params
from steptime.model.model import Model

FAMILIES = ("llama3", "llama2", "qwen3", "deepseek_v3", "gpt_oss", "llama4")
FLOAT8 = "quantize.linear.float8"


def plan(
    model: str | dict[str, str | int] = "llama3-8b",
    devices=64,
    layout=None,
    data=None,
    hardware="dgx-h100",
    **performance,
):
    return Job(
        model=model,
        devices=devices,
        parallelism={"tp": 1, "pp": 1, "fsdp": {}} | (layout or {}),
        performance={"software": "torchtitan@0.2", "activation_checkpointing_type": "full"} | performance,
        data={"gbs": 128, "seqlen": 8192, "microbatch_sz": 2} | (data or {}),
        hardware=hardware,
    )


V3 = {"gbs": 2048, "seqlen": 4096, "microbatch_sz": 1}
EXPRESSIBLE = {
    "8B": plan,
    "8B compiled in float8": lambda: plan(
        compile="all", precision="fp8_tensorwise", activation_checkpointing_type="per-op"
    ),
    "8B gathered in float8": lambda: plan(compile="blocks", precision="fp8_tensorwise", fp8_params=True),
    "8B scaled by row": lambda: plan(compile="all", precision="fp8_rowwise"),
    "8B with weight gradients in bf16": lambda: plan(compile="all", precision="fp8_rowwise_gw_hp"),
    "8B in MX": lambda: plan(compile="all", precision="mxfp8_torchao", hardware="dgx-b200"),
    "8B with a compiled loss": lambda: plan(loss_impl="compiled"),
    "70B with asynchronous TP": lambda: plan(
        "llama3-70b", layout={"tp": 8, "sp": True}, data={"gbs": 16}, compile="all", overlap={"tp": True}
    ),
    "405B": lambda: plan("llama3-405b", 512, {"tp": 8}, {"gbs": 128}, compile="all"),
    "V3": lambda: plan("deepseek-v3", 512, {"ep": 1}, V3 | {"microbatch_sz": 4}, loss_impl="compiled"),
    "V3 with experts in MX": lambda: plan(
        "deepseek-v3", 512, {"ep": 64}, V3, "dgx-b200", compile="all", moe={"grouped_precision": "mxfp8_torchao"}
    ),
    "V3 in float8": lambda: plan(
        "deepseek-v3",
        512,
        {"ep": 64},
        V3,
        compile="all",
        precision="fp8_rowwise",
        moe={"grouped_precision": "fp8_rowwise"},
    ),
    "V3 in a pipeline": lambda: plan("deepseek-v3", 512, {"pp": 8, "ep": 64, "layers_per_stage": "auto"}, V3),
    "qwen3": lambda: plan("qwen3-32b", rope_impl="composite"),
    "scout": lambda: plan("llama4-scout", 256, data={"gbs": 512}),
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_file_and_the_machine_are_the_plan(name):
    job = EXPRESSIBLE[name]()
    written = write(job, "torchtitan")
    assert set(written.stated) == {"hardware"}
    machine = {"hardware": written.left_out["hardware"]}
    back, ours = estimate(read_back(written.text, written.reader, machine)), estimate(job)
    assert (back.step_s, back.memory.peak_reserved_bytes) == (ours.step_s, ours.memory.peak_reserved_bytes)


@pytest.mark.parametrize("name", ["llama3_8b_fsdp", "llama2_7b_hsdp"])
def test_a_config_of_fsdp2_as_one_of_torchtitan(name):
    job = Job.load(f"configs/{name}.yaml", ["performance.software=torchtitan@0.2"])
    assert set(write(job, "torchtitan").left_out) == {"hardware"}


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b", "hsdp_cp"])
def test_a_job_config_as_published_is_written_again(name):
    """Two of them are spelled as up to 0.1, which only those spellings say."""
    golden = yaml.safe_load(Path(f"tests/golden/launch/torchtitan_{name}.yaml").read_text())
    config = {key: value for key, value in golden["config"].items() if key != "notes"}
    config["performance"]["software"] = "torchtitan@0.2"
    job = Job(**config, hardware="dgx-h100")
    assert set(write(job, "torchtitan").left_out) == {"hardware"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_flavor_is_found_by_its_sizes(family):
    """The table that is read is the one that is written; functions alone have some of Llama's."""
    assert set(FAMILIES) == table_file(MODELS).keys() - NO_FAMILIES
    for name, section in table_file(MODELS)[family].items():
        if name in table_file(MODELS)["of_functions"].get(family, []):
            continue
        found = flavor(build(Model, read_model(dict(section))))
        assert found == {"model.name": family, "model.flavor": name}


def test_deepseek_v3_is_not_a_debug_model(tmp_path, capsys):
    """671 B parameters (v0.2.2 torchtitan/models/deepseek_v3/__init__.py); llama3 debugmodel, the default, has 6 million."""
    written = write(EXPRESSIBLE["V3"](), "torchtitan")
    assert tomllib.loads(written.text)["model"] == {"name": "deepseek_v3", "flavor": "671B"}
    assert n_params(read_back(written.text, "torchtitan", {"hardware": "dgx-h100"}).model) == pytest.approx(
        671e9, rel=1e-3
    )


def test_a_router_of_its_own_is_listed_beside_the_flavor():
    """Qwen3's own configuration has no bias per expert; torchtitan's load_balance_coeff keeps one."""
    job = plan("qwen3-30b-a3b", layout={"ep": 8}, rope_impl="composite")
    written = write(job, "torchtitan")
    assert tomllib.loads(written.text)["model"] == {"name": "qwen3", "flavor": "30B-A3B"}
    assert written.left_out.keys() == {"hardware", "model.moe.expert_bias"}
    assert plain(read_back(written.text, "torchtitan", written.left_out)) == plain(job)


def test_a_model_that_torchtitan_lacks_stops_at_the_file(tmp_path, capsys):
    """get_train_spec of v0.2.2 raises for a name that it does not know; without one it trains llama3 debugmodel."""
    job = plan({"preset": "llama3-8b", "n_layers": 31})
    text = write(job, "torchtitan").text
    assert tomllib.loads(text)["model"]["name"] not in known_models()
    assert "flavor" not in tomllib.loads(text)["model"]
    assert notes(job, "torchtitan")[0].startswith("model: give name and flavor")
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert main(["--from", "torchtitan", str(file)]) != 0
    assert "unknown model (got give name and flavor" in capsys.readouterr().err.replace('"', "").replace("'", "")


def test_float8_names_a_recipe_or_gathers():
    """float8.py of v0.2.2 asserts not both; without a recipe it scales by tensor. The head stays in bf16."""
    gathers = tomllib.loads(write(EXPRESSIBLE["8B gathered in float8"](), "torchtitan").text)
    assert gathers["quantize"]["linear"]["float8"] == {
        "filter_fqns": ["output"],
        "enable_fsdp_float8_all_gather": True,
    }
    assert gathers["model"]["converters"] == [FLOAT8]
    assert gathers["compile"] == {"enable": True, "components": ["model"]}
    rows = tomllib.loads(write(EXPRESSIBLE["8B scaled by row"](), "torchtitan").text)
    assert rows["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise", "filter_fqns": ["output"]}


@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_asynchronous_tp_only_with_a_compiled_model(compiled):
    """tensor_parallel.py of v0.2.2: "Async TP requires 'model' in --compile.components and --compile.enable"."""
    job = plan("llama3-70b", layout={"tp": 8}, data={"gbs": 16}, overlap={"tp": True}, compile=compiled)
    written = write(job, "torchtitan")
    on = tomllib.loads(written.text)["parallelism"].get("enable_async_tensor_parallel")
    assert (on, "performance.overlap.tp" in written.stated) == ((None, True) if compiled == "none" else (True, False))


def test_stages_are_dealt_with_the_ends_counted():
    """61 layers, one less on the first: 62 over 8 stages are 6 of 8 and 2 of 7; the first is left with 7."""
    written = write(EXPRESSIBLE["V3 in a pipeline"](), "torchtitan")
    said = tomllib.loads(written.text)["parallelism"]
    assert said["pipeline_parallel_last_stage_less_layers"] == 0
    assert "pipeline_parallel_first_stage_less_layers" not in said  # 1 is the default
    back = read_back(written.text, "torchtitan", written.left_out)
    assert list(back.layers_per_chunk) == [7, 8, 8, 8, 8, 8, 7, 7]


def test_mx_of_a_compiled_model_with_tp_is_refused():
    """mx.py of v0.2.2 asserts: TP not yet supported with torch.compile for mxfp8."""
    job = plan(layout={"tp": 2}, precision="mxfp8_torchao", hardware="dgx-b200", compile="all")
    assert refused(job, "torchtitan")[0].startswith("refused by torchtitan v0.2.2: mxfp8_torchao")
    assert refused(EXPRESSIBLE["8B in MX"](), "torchtitan") == []


def test_parameters_that_pipelines_free_are_noted():
    """FSDP of torchtitan keeps them by default where pp > 1 (torchtitan/models/llama3/infra/parallelize.py, apply_fsdp)."""
    said = "parallelism.fsdp.reshard_after_forward is true; torchtitan's own default with pipeline stages is false"
    assert said in notes(EXPRESSIBLE["V3 in a pipeline"](), "torchtitan")
    assert said not in notes(EXPRESSIBLE["V3"](), "torchtitan")


def test_no_key_that_the_last_job_config_lacks():
    """enable_sequence_parallel is a key of config functions; ConfigManager of v0.2.2 stops at an "Invalid field name"."""
    written = write(plan(layout={"tp": 2, "sp": False}), "torchtitan")
    assert "sequence_parallel" not in written.text
    assert written.stated["parallelism.sp"] is False


def test_experts_with_weight_gradients_in_bf16_are_left_out():
    """torchtitan v0.2.2 has one recipe of quantize.grouped_mm.mx, mxfp8 (torchtitan/config/job_config.py, MXGroupedMM)."""
    said = {"compile": "all", "moe": {"grouped_precision": "mxfp8_torchao_wgrad_hp"}}
    written = write(plan("deepseek-v3", 512, {"ep": 64}, V3, "dgx-b200", **said), "torchtitan")
    assert written.left_out["performance.moe.grouped_precision"] == "mxfp8_torchao_wgrad_hp"
