"""Plans written as launch files: the readers read them back to the same plan, and what they cannot say is listed."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
import yaml
from drawn import drawn_job, plans
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.commands.cli import main
from steptime.launch.write.export import KINDS, plain, read_back, write
from steptime.launch.write.plain_keys import value_at

MOE = {"n_experts": 8, "expert_inter_sz": 512, "experts_per_token": 2}
MLA = {"kind": "mla", "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}

MODULES = {
    "dense": [["mlp"]], "experts": [["moe_act"], ["moe", "shared_experts"]], "latent": [["mla_up_proj"]], "window": [["mlp"]],
    "hybrid": [["layernorm"]],
}  # fmt: skip
"""Modules that a kind of layer can recompute beside attention and norms."""


@st.composite
def of_megatron(draw):
    """Plans of Megatron-Core of which every key has a flag."""
    norm, glu = draw(st.sampled_from(["rmsnorm", "layernorm"])), draw(st.booleans())
    tp, pp, vpp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    vpp = vpp if pp > 1 else 1
    precision = draw(st.sampled_from(["bf16", "bf16", "fp16", "fp32", "fp8_delayed", "fp8_current", "mxfp8"]))
    model = {
        "n_layers": 4, "hidden_sz": 512, "inter_sz": 1024, "n_q_heads": 8, "n_kv_heads": draw(st.sampled_from([2, 8])),
        "vocab_sz": draw(st.sampled_from([1000, 32000])), "norm": norm, "norm_bias": norm == "layernorm", "glu": glu,
        "activation": draw(st.sampled_from(["silu", "gelu"] if glu else ["gelu", "relu2"])),
        "tie_embeddings": draw(st.booleans()), "qk_norm": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.1])),
    }  # fmt: skip
    bias = draw(st.booleans())
    model |= {"bias": bias, "qkv_bias": bias or draw(st.booleans())}
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": 2, "sp": draw(st.booleans()) and tp > 1}
    layout["zero_level"] = draw(st.sampled_from([0, 1] if pp > 1 else [0, 1, 2, 3]))
    if draw(st.booleans()):
        layout |= {"cp": 2, "cp_comm_type": draw(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]))}
        layout |= {"cp": 4, "cp_a2a": 2} if layout["cp_comm_type"] == "a2a+p2p" else {}
    kind = draw(st.sampled_from(["dense", "dense", "experts", "latent", "window", "hybrid"]))
    if kind == "experts":
        shared = {"n_shared_experts": 1, "shared_expert_inter_sz": 512}
        model["moe"] = MOE | draw(st.sampled_from([{}, {"n_dense_layers": 1}, shared, {"load_balancing": "aux_loss"}]))
        layout |= {"ep": 2, "etp": draw(st.sampled_from([1, tp]))}
    model |= {"attention": MLA | {"q_lora_rank": 96}, "n_kv_heads": 8, "qk_norm": False} if kind == "latent" else {}
    model |= {"attention": {"window": 128}} if kind == "window" else {}
    model |= (
        {"hybrid_pattern": "M-M*", "mamba": {"n_heads": 16, "head_dim": 32, "state_dim": 64, "n_groups": 4}}
        if kind == "hybrid"
        else {}
    )
    performance = {
        "precision": precision,
        "recompute": draw(st.sampled_from([
            None, {"granularity": "selective", "modules": ["core_attn", "layernorm"]},
            {"granularity": "full", "method": "uniform", "n_layers": 1},
            {"granularity": "full", "method": "block", "n_layers": 1},
            *({"granularity": "selective", "modules": modules} for modules in MODULES[kind]),
        ])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "sgd", "muon"])),
        "fp8_params": draw(st.booleans()) and precision.startswith(("fp8", "mxfp8")),
        "quantized_head": draw(st.booleans()) and precision == "mxfp8",
        "loss_impl": draw(st.sampled_from(["composite", "native", "fused"])),
        "rope_impl": draw(st.sampled_from(["fused", "own_tables"])),
        "attention_backend": draw(st.sampled_from(["auto", "flash", "cudnn"])),
        "overlap": {"dp": draw(st.booleans())},
    }  # fmt: skip
    data = {"gbs": 8 * pp, "seqlen": 512, "microbatch_sz": draw(st.sampled_from([1, 2]))}
    return {"model": model, "parallelism": layout, "performance": performance, "data": data, "hardware": "gb200-nvl72"}


SAID = {
    "performance.activation_impl",
    "performance.attention_backend",
    "performance.rope_impl",
    "performance.softmax_impl",
}
"""Keys that mean nothing in some of these plans, so that no flag says them."""


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=of_megatron())
def test_megatron_says_all_of_its_own_plans(plan):
    try:
        job = Job(**plan)
    except ConfigError:
        assume(False)
        raise
    written = write(job, "megatron")
    # fused attention in fp32 is not Megatron's
    fused = {"performance.attention_impl"} if job.software.precision == "fp32" else set[str]()
    assert written.left_out.keys() <= {"hardware", *SAID, *fused}
    back = read_back(written.text, written.reader, written.left_out)
    assert plain(back) == plain(job)
    assert estimate(back).step_s == estimate(job).step_s


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans(), kind=st.sampled_from(sorted(KINDS)))
def test_any_plan_is_read_back(plan, kind):
    """Whatever the plan and the framework: what the file says and what is listed are the plan, key by key."""
    job = drawn_job(plan)
    written = write(job, kind)
    back = read_back(written.text, written.reader, written.left_out)
    assert plain(back) == plain(job)
    said = plain(job)
    assert all(value_at(said, path) == value for path, value in written.left_out.items())


@pytest.mark.parametrize("kind", ["bridge", "nemo"])
@pytest.mark.parametrize("name", ["llama3_70b", "mixtral_8x7b", "deepseek_v2_lite", "qwen25_32b"])
def test_config_objects_say_what_flags_say(kind, name):
    """Of a Megatron plan they leave open the profile, cuDNN's release, NeMo's mask and, if the launcher decides, the ranks."""
    written = write(Job.load(f"configs/{name}.yaml"), kind)
    usual = {
        "hardware",
        "parallelism.dp",
        "performance.software",
        "performance.attention_kernel",
        "model.attention.q_lora_rank",
    }
    assert written.left_out.keys() <= usual | ({"performance.attention_mask"} if kind == "nemo" else set())
    tree = yaml.safe_load(written.text)
    assert tree["_target_"].endswith("ConfigContainer" if kind == "bridge" else "pretrain")


@pytest.mark.parametrize("freq", [2, [1, 0, 0, 1]])
def test_linear_attention_prediction_and_muon_have_flags(freq):
    linear = {"n_key_heads": 4, "n_value_heads": 8, "freq": freq}
    job = Job(
        model={"n_layers": 4, "hidden_sz": 512, "inter_sz": 1024, "n_q_heads": 8, "vocab_sz": 1000, "mtp": 1}
        | {"linear_attention": linear},
        parallelism={"tp": 1, "pp": 2, "dp": 2, "zero_level": 0},
        performance={"optimizer": "muon"},
        data={"gbs": 8, "seqlen": 512, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    written = write(job, "megatron")
    assert not {path for path in written.left_out if path.startswith(("model", "performance.optimizer"))}
    assert plain(read_back(written.text, written.reader, written.left_out)) == plain(job)
    assert "--experimental-attention-variant gated_delta_net" in written.text
    assert "--optimizer muon" in written.text
    assert "--mtp-num-layers 1" in written.text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("megatron", "--moe-deepep-num-sms 32"),
        ("bridge", "moe_deepep_num_sms: 32"),
        ("nemo", "moe_deepep_num_sms: 32"),
    ],
)
def test_multiprocessors_of_deepep_are_written_and_read_back(kind, text):
    job = Job(
        model="qwen3-30b-a3b",
        parallelism={"tp": 1, "pp": 1, "dp": 8, "ep": 8},
        performance={"moe": {"dispatcher": "flex", "deepep_sms": 32}},
        data={"gbs": 64, "seqlen": 4096, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    written = write(job, kind)
    assert text in written.text
    assert (
        value_at(read_back(written.text, written.reader, written.left_out).to_config(), "performance.moe.deepep_sms")
        == 32
    )


def test_flags_of_llama_by_hand():
    """Llama-3 70B as Megatron-LM's arguments (arguments.py of megatron-core 0.16.1) say it."""
    text = write(Job.load("configs/llama3_70b.yaml"), "megatron").text
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:6] == ["torchrun", "--nnodes", "128", "--nproc-per-node", "8", "pretrain_gpt.py"]
    pairs = {
        "--num-layers": "80", "--hidden-size": "8192", "--ffn-hidden-size": "28672", "--num-attention-heads": "64",
        "--num-query-groups": "8", "--seq-length": "8192", "--tensor-model-parallel-size": "8",
        "--pipeline-model-parallel-size": "4", "--num-virtual-stages-per-pipeline-rank": "5",
        "--global-batch-size": "2048", "--micro-batch-size": "1", "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
    }  # fmt: skip
    assert {flag: words[words.index(flag) + 1] for flag in pairs} == pairs
    switches = {"--swiglu", "--bf16", "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"}
    switches |= {"--disable-bias-linear", "--untie-embeddings-and-output-weights", "--group-query-attention"}
    assert switches <= set(words)


def test_layers_that_are_not_dealt_evenly():
    """126 layers with the ends counted are said by switches, a list by a layout that the reader takes apart again."""
    job = Job.load("configs/llama3_70b.yaml", ["parallelism.vpp=1", "parallelism.layers_per_stage=[19, 21, 21, 19]"])
    written = write(job, "megatron")
    assert "--pipeline-model-parallel-layout 'Et*19|(t*21|)*2t*19L'" in written.text
    assert written.left_out.keys() == {"hardware"}


@pytest.mark.parametrize("kind", ["megatron", "bridge", "nemo"])
def test_a_layout_names_the_depths_of_prediction(kind):
    """Megatron asserts as many m as --mtp-num-layers (pipeline_parallel_layer_layout.py, validate_layer_layout).

    Embedding, 61 layers, one depth and the loss are 64 units, 4 for each of 16 stages.
    """
    job = Job.load("configs/deepseek_v3.yaml", ["model.mtp=1"])
    written = write(job, kind)
    assert "Et*3|(t*4|)*14t*2mL" in written.text
    assert plain(read_back(written.text, written.reader, written.left_out)) == plain(job)


def test_torchtitan_and_deepspeed_by_hand():
    toml = tomllib.loads(write(Job.load("configs/llama2_7b_hsdp.yaml"), "torchtitan").text)
    assert toml["model"] == {"name": "llama2", "flavor": "7B"}
    assert toml["parallelism"] == {"data_parallel_replicate_degree": 12, "data_parallel_shard_degree": 8}
    assert toml["training"]["mixed_precision_reduce"] == "bfloat16"
    job = Job.load("configs/llama3_8b.yaml", ["performance.software=deepspeed", "parallelism.zero_level=2"])
    found = json.loads(write(job, "deepspeed").text)
    assert found["zero_optimization"]["stage"] == 2
    assert found["train_batch_size"] == job.data.gbs
    assert found["gradient_accumulation_steps"] == job.microbatches


@pytest.mark.parametrize("graphs", [False, True])
def test_passes_of_graph_trainer_are_not_written(graphs):
    """torchtitan's job_config.py ends at a key that it does not have; GraphTrainer's configs are Python, not TOML."""
    job = Job.load("configs/llama3_8b_fsdp.yaml").replace(
        **{"performance.cuda_graphs": graphs, "performance.overlap.dp": False}
    )
    assert "compile" not in tomllib.loads(write(job, "torchtitan").text)


@pytest.mark.parametrize("kernel", ["fused", "composite"])
def test_an_activation_kernel_is_no_module_to_import(kernel):
    """override.imports lists Python modules; no word of a plan is one."""
    job = Job.load("configs/llama3_8b_fsdp.yaml").replace(**{"performance.activation_impl": kernel})
    assert "override" not in tomllib.loads(write(job, "torchtitan").text)


@pytest.mark.parametrize("kind", ["megatron", "nemo", "torchtitan"])
def test_the_command_it_prints_reads_it_back(tmp_path, capsys, kind):
    assert main(["configs/llama3_8b_fsdp.yaml", "--export", kind]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "exported"
    file.write_text(text)
    command = next(line for line in text.splitlines() if "read back by: 3dtrn" in line).partition("3dtrn ")[2]
    words = [str(file) if word == "FILE" else word for word in shlex.split(command)]
    assert main([*words, "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert main(["configs/llama3_8b_fsdp.yaml", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert back["time"]["step_s"] == ours["time"]["step_s"]
    assert back["memory"]["peak_reserved_bytes"] == ours["memory"]["peak_reserved_bytes"]


def test_what_json_cannot_list_goes_to_standard_error(capsys):
    assert main(["configs/llama3_8b.yaml", "--export", "deepspeed"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["train_micro_batch_size_per_gpu"] == 1
    assert "no equivalent: data.seqlen = 8192" in err


@pytest.mark.parametrize("kind", ["megatron", "bridge", "nemo"])
def test_an_overlap_that_megatron_core_refuses_is_said_at_the_top(capsys, kind):
    """DeepSeek-V3's plan overlaps the exchange of experts in a pipeline of one chunk a stage, in place of DualPipe.

    transformer_config.py (core_v0.16.1): with pipeline stages the overlap needs virtual stages.
    """
    said = "# refused by Megatron-Core: performance.overlap.ep with pp 16 and no virtual stages (vpp 1)"
    assert main(["configs/deepseek_v3.yaml", "--export", kind]) == 0
    assert said in capsys.readouterr().out
    assert main(["configs/deepseek_v3.yaml", "--export", kind, "--set", "performance.overlap.ep=false"]) == 0
    assert "refused by" not in capsys.readouterr().out


def test_other_frameworks_do_not_refuse_what_megatron_core_refuses(capsys):
    assert main(["configs/deepseek_v3.yaml", "--export", "torchtitan"]) == 0
    assert "refused by" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bridge", "nemo"])
def test_what_nvidia_s_profiles_refuse_is_read_back_with_the_plan_s_own(kind):
    """Model and performance are in the file, not left out as whole sections."""
    left_out = write(Job.load("configs/deepseek_v3.yaml"), kind).left_out
    assert left_out.keys() & {"model", "performance"} == set()
    assert left_out["performance.software"] == "megatron-core"


TITAN = """\
model: llama3-8b
devices: 64
parallelism: {tp: 1, pp: 1}
performance: {software: torchtitan, activation_checkpointing_type: WORD}
data: {gbs: 128, seqlen: 8192, microbatch_sz: 1}
hardware: dgx-h100
"""


def test_only_what_the_plan_states_is_listed(tmp_path, capsys):
    """The kernels and loss of today's torchtitan come with its profile, which the command sets: the plan states none of them."""
    path = tmp_path / "plan.yaml"
    path.write_text(TITAN.replace("WORD", "per-op"))
    job = Job.load(path)
    written = write(job, "torchtitan")
    assert set(written.stated) == {"hardware", "performance.software"}
    assert plain(read_back(written.text, written.reader, written.left_out)) == plain(job)
    assert main([str(path), "--export", "torchtitan"]) == 0
    out = capsys.readouterr().out
    listed = [line for line in out.splitlines() if line.startswith("# no equivalent: ")]
    assert listed == [
        "# no equivalent: hardware = {node_type: dgx-h100}",
        "# no equivalent: performance.software = torchtitan",
    ]
    assert (
        "# torchtitan reads job configs in TOML up to v0.2.2 of February 2026; the plan's profile is of August 2026"
        in out
    )
    assert "null" not in "".join(listed)


def test_what_the_plan_states_and_the_file_lacks_is_listed(tmp_path):
    """A kernel, a share of overlap, super-selective recomputation; of a whole section only what is stated."""
    path = tmp_path / "plan.yaml"
    path.write_text(TITAN.replace("WORD", "super-selective, rope_impl: fused, overlap: {dp: 0.5}"))
    written = write(Job.load(path), "torchtitan")
    kept = written.stated.pop("performance.recompute", None) or written.stated.pop(
        "performance.activation_checkpointing_type"
    )
    assert kept
    assert written.stated == {
        "hardware": {"node_type": "dgx-h100"},
        "performance.software": "torchtitan",
        "performance.rope_impl": "fused",
        "performance.overlap.dp": 0.5,
    }
    sections = write(Job.load("configs/deepseek_v3.yaml"), "torchtitan")
    assert "model" not in sections.stated  # a flavor
    assert write(Job.load("configs/mixtral_8x7b.yaml"), "torchtitan").stated["model"] == "mixtral-8x7b"
    assert sections.stated["performance"].keys() < sections.left_out["performance"].keys()
    assert "vpp" not in sections.stated["parallelism"]
    assert "vpp" in sections.left_out["parallelism"]


def test_a_release_of_its_own_needs_no_profile(tmp_path):
    """torchtitan@0.2 is what a job config in TOML is read as."""
    path = tmp_path / "plan.yaml"
    path.write_text(TITAN.replace("WORD", "per-op").replace("torchtitan,", "torchtitan@0.2,"))
    assert set(write(Job.load(path), "torchtitan").stated) == {"hardware"}
