"""What the benchmark's torch modules build of a plan, and that everything else is refused before anything runs."""

from __future__ import annotations

import json

import pytest
from bench_jobs import GPT, config

from steptime.bench.built import PARTS_OF, PLAIN_KEYS, VALUES
from steptime.bench.runnable import unsupported
from steptime.bench.runs import bandwidth
from steptime.commands.cli import main
from steptime.job.job import Job
from steptime.model.model import AttentionKind, Model
from steptime.software.performance import OPTIONS

MOE = {"n_experts": 4, "expert_inter_sz": 64, "experts_per_token": 2}
FSDP = {
    "software": "fsdp2",
    "precision": "bf16",
    "param_dtype": "bf16",
    "main_grad_dtype": "bf16",
    "moment_dtype": "bf16",
}
MODELS = {
    "post_norms": {"post_norms": True},
    "pre_norms": {"pre_norms": False, "post_norms": True},
    "parallel_residual": {"parallel_residual": True},
    "shared_norm": {"parallel_residual": True, "shared_norm": True},
    "qk_norm_type": {"qk_norm": True, "qk_norm_type": "per_layer"},
    "swiglu_limit": {"swiglu_limit": 7.0},
    "layers": {"layers": [{"repeat": 2, "inter_sz": 128}]},
    "lora": {"lora": {"rank": 8}},
    "attention.window": {"attention": {"window": 16}},
    "attention.window with a pattern": {"attention": {"window": 16, "window_pattern": 2}},
    "attention.sinks": {"attention": {"sinks": True}},
    "attention.gated": {"attention": {"gated": True}},
}


@pytest.mark.parametrize("name", MODELS)
def test_other_blocks_are_refused(name):
    """One line for each key that is set, and without them the plan runs."""
    case = config(MODELS[name])
    lines = unsupported(Job(**case), "cpu")
    path = f"model.{name.partition(' ')[0]}"
    assert f"{path}: " in "\n".join(lines)
    assert unsupported(mended(case, lines), "cpu") == []


def mended(case, lines):
    """The job with what the lines say to set."""
    sets = [word for line in lines for word in line.rpartition("; ")[2].split() if word != "--set"]
    return Job.load(json.dumps(case), sets)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"moe": MOE}, "model.moe"),
        ({"attention": {"kind": "mla"}}, "model.attention.kind"),
        ({"linear_attention": {"n_key_heads": 2, "n_value_heads": 4}}, "model.linear_attention"),
        ({"hybrid_pattern": "M*", "mamba": {"n_heads": 4, "head_dim": 32, "n_groups": 2}}, "model.hybrid_pattern"),
        ({"mtp": 1}, "model.mtp"),
    ],
)
def test_models_of_other_frameworks_are_refused_with_their_profile(model, path):
    case = config(model, {"software": "megatron-core", "precision": "bf16"})
    lines = unsupported(Job(**case), "cpu")
    assert [line.partition(":")[0] for line in lines] == [path, "performance.software"]
    assert unsupported(mended(case, lines), "cpu") == []


SETTINGS = {
    "precision": (FSDP | {"precision": "fp8_rowwise"}, {"dp": 2}),
    "attention_kernel": ({"attention_kernel": "best"}, {}),
    "loss_impl": ({"loss_impl": "native"}, {}),
    "loss_chunks": ({"loss_chunks": 8}, {}),
    "vocab_multiple": ({"vocab_multiple": 128}, {}),
    "deterministic": ({"deterministic": True}, {}),
    "attention_mask": ({"attention_mask": True}, {}),
    "recompute_stops_early": ({"recompute_stops_early": False, "activation_checkpointing_type": "full"}, {}),
    "activation_offload": ({"activation_offload": True}, {}),
    "cpu_offload": (FSDP | {"cpu_offload": {"params": True}}, {"dp": 2}),
    "recompute.method": ({"recompute": {"granularity": "full", "method": "every", "n_layers": 2}}, {}),
    "overlap.dp": ({"overlap": {"dp": False}}, {"dp": 2}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_kernels_are_refused(name):
    performance, parallelism = SETTINGS[name]
    case = config(performance=performance, parallelism=parallelism)
    (line,) = unsupported(Job(**case), "cpu")
    assert line.startswith(f"performance.{name}: ")
    assert unsupported(mended(case, [line]), "cpu") == []


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_other_schedules_are_refused(schedule):
    layout = {"pp": 2, "vpp": 1 if schedule == "zero_bubble" else 2, "schedule": schedule}
    (line,) = unsupported(Job(**config({"n_layers": 4}, parallelism=layout)), "cpu")
    assert line.endswith(f"interleaved 1F1B (got {schedule}); --set parallelism.schedule=null")


def test_fsdp_1_is_refused():
    case = config(performance=FSDP, parallelism={"dp": 2, "fsdp": {"version": 1}})
    (line,) = unsupported(Job(**case), "cpu")
    assert line.endswith("; --set parallelism.fsdp.version=2")
    assert unsupported(mended(case, [line]), "cpu") == []


def test_a_window_as_long_as_the_sequence_hides_nothing():
    assert unsupported(Job(**config({"attention": {"window": 32}}, seqlen=32)), "cpu") == []
    assert len(unsupported(Job(**config({"attention": {"window": 31}}, seqlen=32)), "cpu")) == 1


FOLLOWED = frozenset({
    "attention_impl", "norm_impl", "activation_impl", "softmax_impl", "rope_impl", "sp_regather", "grad_accumulation_fusion",
    "cuda_graphs", "param_dtype", "main_grad_dtype", "master_dtype", "moment_dtype", "optimizer", "optimizer_impl",
    "muon_tp_mode", "deallocate_pipeline_outputs", "clip_grad", "cublas_workspace", "attention_backend", "expandable_segments",
})  # fmt: skip
"""Switches that the steps follow, or that have a limit of their own in `runnable`; the last two are TransformerEngine's and the
allocator's."""


def test_every_key_is_built_or_refused():
    """A key that plans gain must get a place here."""
    assert (PLAIN_KEYS | PARTS_OF.keys()) <= Model.model_fields.keys() | AttentionKind.model_fields.keys()
    assert FOLLOWED | VALUES.keys() == set(OPTIONS)
    assert not FOLLOWED & VALUES.keys()


def test_all_problems_together_and_nothing_runs(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(config(GPT | {"post_norms": True, "attention": {"window": 16}}, {"loss_chunks": 8})))
    assert main(["bench", str(file), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "model.post_norms",
        "model.attention.window",
        "performance.loss_chunks",
    ]
    assert all("; --set " in line and line.endswith("(or --only sweeps)") for line in lines[1:])
    assert not (tmp_path / "out" / "results.json").exists()


def test_sweeps_measure_what_is_refused(tmp_path, capsys, monkeypatch):
    """What `--only sweeps`, which every refusal names, does with experts: their shapes ended in a traceback of AdamW's sweep."""
    streams = bandwidth.streams
    monkeypatch.setattr(bandwidth, "streams", lambda _, dtype, device: streams(2**16, dtype, device))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(config({"moe": MOE}, {"software": "megatron-core", "precision": "bf16"})))
    out = tmp_path / "out"
    argv = ["bench", str(file), "--only", "sweeps", "--seconds", "0.1", "--device", "cpu", "--out", str(out)]
    assert main(argv) == 0, capsys.readouterr().err
    assert (out / "machine.yaml").exists()
