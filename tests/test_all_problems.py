"""All problems of a plan are reported in one round, whatever their kinds."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.base.config import ConfigError, closest
from steptime.commands.cli import main
from steptime.job.job import Job
from steptime.launch.keys import load_table
from steptime.launch.kinds import KINDS, TABLES
from steptime.software.profiles import TRAINERS, profile_names

PLAN = {
    "model": "llama3-70b",
    "parallelism": {"tp": 8, "pp": 4, "dp": 16},
    "data": {"gbs": 1024, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": {"node_type": "h100"},
}
COUNTED = {key: value for key, value in PLAN.items() if key != "parallelism"} | {
    "devices": 512,
    "parallelism": {"tp": 8, "pp": 4},
}
EXPERTS = PLAN | {"model": "mixtral-8x7b", "parallelism": {"tp": 1, "pp": 4, "dp": 16, "ep": 8}}
OWN = {"n_layers": 32, "hidden_sz": 4096, "inter_sz": 14336, "n_q_heads": 32, "n_kv_heads": 8, "vocab_sz": 128256}
BOTH = {"checkpoint_write_s": 10, "checkpoint_bytes_per_s": "1 GB/s"}
ERRORS = {
    "data.seqlen": "8k",  # types
    "parallelism.sp": "maybe",
    "notes": 5,
    "cross_dc.interconnect_bandwidth_gbps": "x",
    "run.startup_s": -3,  # ranges
    "parallelism.zero_level": 7,
    "performance.precision": "fp9",  # names
    "performance.software": "megatronn",
    "hardware.node_type": "nope",
    "parallelism.ttp": 2,  # keys
    "runn": {"tokens": 1},
    "parallelism.tp": 6,  # rules of the layout: 64 heads, dp 16, 80 layers
    "data.gbs": 1000,
    "parallelism.ep": 2,
    "parallelism.layers_per_stage": [10, 10, 10, 10],
}
"""Errors that are one each, whichever others are there: none needs the value that another spoils."""


def planted(plan, errors):
    """The keys of the problems of a plan with errors put into it."""
    plan = deepcopy(plan)
    for path, value in errors.items():
        *sections, key = path.split(".")
        node = plan
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    with pytest.raises(ConfigError) as error:
        Job.load(plan)
    return [line.partition(": ")[0] for line in error.value.problems]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(ERRORS)), min_size=3, max_size=6, unique=True))
def test_every_planted_error_is_reported_in_one_round(paths):
    assert set(paths) <= set(planted(PLAN, {path: ERRORS[path] for path in paths}))


@pytest.mark.parametrize(
    ("plan", "errors"),
    [
        (COUNTED, {"data.seqlen": "8k", "parallelism.tp": 6}),
        (COUNTED, {"devices": 500, "performance.precision": "fp9", "data.seqlen": 0}),
        (COUNTED, {"devices": "x", "parallelism.tp": 6, "parallelism.micro_batch_size": 1, "performance.flash": True}),
        (COUNTED, {"devices": 0, "run.tokens": "15T", "hardware.node_type": "nope"}),
        (EXPERTS, {"parallelism.ep": 3, "data.gbs": 1001, "run.tokens": "x"}),
        (EXPERTS, {"parallelism.ep": 16, "data.seqlen": -1, "performance.moe": {"x": 1}}),
        (PLAN, {"model": "llama3-70bb", "data.gbs": 0, "parallelism.ttp": 2, "hardware.node_type": "h10"}),
        (PLAN, {"model": OWN | {"n_kv_heads": 5}, "parallelism.dp": 0, "run.tokens": -1}),
        (PLAN, {"model": OWN | {"hidden": 3}, "data.gbs": 1000, "hardware.node_type": "nope"}),
        (PLAN, {"cross_dc": {"n_dcs": 3, "interconnect_bandwidth_gbps": 8, "interconnect_latency_s": 0.01}, "data.gbs": 1000}),
        (PLAN, {"run": BOTH, "data.gbs": 1000, "parallelism.tp": 6, "data.seq": 1}),
        (PLAN, {"hardware.overrides": {"tiers.0.latency_s": 14}, "parallelism.tp": 6, "data.gbs": 1000}),
        (PLAN, {"performance.precision": "fp8", "hardware.node_type": "a100", "parallelism.tp": 6, "data.gbs": 1000}),
        (PLAN, {"performance.attention_impl": "fast", "performance.software": "megatronn", "data.gbs": 1000}),
        (PLAN, {"parallelism.fsdp": {"version": 3}, "performance.recompute": "half", "parallelism.tp": 6}),
    ],
)  # fmt: skip
def test_errors_of_several_kinds_are_all_reported(plan, errors):
    """The section's name stands for a key inside a mapping that is wrong (`cross_dc`, `run`, `hardware.overrides`)."""
    seen = planted(plan, errors)
    for path in errors:
        # a machine that exists but lacks the format is a problem of the format
        if path != "hardware.node_type" or errors[path] != "a100":
            assert any(key == path or key.startswith((f"{path}.", f"{path}:")) for key in seen), path


def test_value_of_an_unknown_key_is_not_held_against_the_key_that_is_suggested():
    with pytest.raises(ConfigError) as error:
        Job.load(PLAN | {"performance": {"attention": "flash3"}})
    assert error.value.problems == ["performance.attention: unknown key (got 'flash3'); did you mean 'attention_mask'?"]


SHORT = ["--set", "mbs=2", "--set", "seqlen=4096", "--set", "parallelism.tp=3"]
TOLD = [
    "--set mbs=2: unknown key; did you mean --set data.microbatch_sz=2?",
    "--set seqlen=4096: unknown key; did you mean --set data.seqlen=4096?",
]


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ([], "parallelism.tp: "),
        (["sensitivity"], "parallelism.tp: "),
        (["search"], "parallelism.tp: "),
        (["search", "--fix", "tp=q", "--over", "schedule=dualpipe"], "--over schedule=dualpipe: "),
    ],
)
def test_a_setting_of_an_unknown_key_hides_no_other_problem(command, last, tmp_path, capsys):
    """Each setting that cannot be read has its line, and so have the plan with the others and the command's own options."""
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama3-8b\ndevices: 8\nparallelism: {tp: 1, pp: 1}\n"
        "data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}\nhardware: dgx-h100\n"
    )
    assert main([*command[:1], str(path), *SHORT, *command[1:]]) == 2
    lines = capsys.readouterr().err.replace(f"{path}: ", "").splitlines()
    assert lines[:2] == TOLD
    assert any(line.startswith("parallelism.tp: must divide n_q_heads 32 (got 3)") for line in lines)
    assert any(line.startswith(last) for line in lines)
    assert ("--fix tp=q: expected whole numbers of at least 1 (got 'q')" in lines) == (len(command) > 1)


def test_without_a_plan_each_setting_has_its_line(capsys):
    assert main(["--model", "llama3-8b", *SHORT[:4]]) == 2
    assert capsys.readouterr().err.splitlines() == TOLD
    assert main(["search", "--model", "llama3-8b", "--devices", "8", *SHORT[:4], "--fix", "tp=q"]) == 2
    assert capsys.readouterr().err.splitlines()[:2] == TOLD
    assert main(["--from", "megatron", "no-such-file.sh", *SHORT[:4]]) == 2
    assert capsys.readouterr().err.splitlines() == [*TOLD, "no-such-file.sh: no such file"]


def test_a_trainer_without_a_profile_is_told_which_to_use():
    """Every name that --from reads is a profile, or close to one, or has those that its files are read as."""
    assert {profile for used in TRAINERS.values() for profile in used} <= set(profile_names())
    assert not TRAINERS.keys() & {*profile_names()}
    for kind in (*KINDS, *TABLES):
        assert kind in TRAINERS or closest(kind, profile_names()), kind
        if kind in TRAINERS and "software" in (raw := load_table(kind.replace("-", "_")).raw):
            assert {*raw["software"].values()} <= {*TRAINERS[kind]}, kind


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("primus", "megatron-core or torchtitan"),
        ("verl", "accelerate or accelerate-ddp or megatron-core"),
        ("Olmo_Core", "fsdp2 or torch"),
    ],
)
def test_a_trainer_without_a_profile_is_told_of_those_to_use(name, use):
    with pytest.raises(ConfigError) as error:
        Job.load(PLAN | {"performance": {"software": name}})
    assert error.value.problems == [f"performance.software: unknown profile (got '{name}'); use {use}"]
