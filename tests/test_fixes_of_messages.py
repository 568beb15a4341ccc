"""Messages that name a fix: following it leads to a plan that runs."""

from __future__ import annotations

import re
import shlex

import pytest

from steptime import Job
from steptime.base.config import ConfigError
from steptime.commands.cli import main
from steptime.job.edit import read_setting
from steptime.job.suggested import suggested

PLAN = """\
model: llama3-8b
devices: 48
parallelism: {tp: 1, pp: 1}
data: {gbs: 96, seqlen: 8192, microbatch_sz: 1}
hardware: dgx-h100
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)
    return file


@pytest.mark.parametrize(
    ("wrong", "end", "right"),
    [
        ("parallelism.fsdp=true", "write {} for the defaults of the software profile", "parallelism.fsdp={}"),
        ("parallelism.fsdp=false", "leave it out: without it zero_level decides", None),
        (
            "performance.recompute=full",
            "whole layers: performance.activation_checkpointing_type: full, or {granularity: full, method: uniform, n_layers: 1}",
            "performance.recompute={granularity: full, method: uniform, n_layers: 1}",
        ),
        (
            "performance.recompute=selective",
            "write performance.activation_checkpointing_type: selective",
            "performance.activation_checkpointing_type=selective",
        ),
        (
            "performance.activation_checkpointing_type=true",
            "write full for whole layers (gradient checkpointing)",
            "performance.activation_checkpointing_type=full",
        ),
        ("performance.activation_checkpointing_type=false", "write none", "performance.activation_checkpointing_type=none"),
        (
            "performance.precision=float8",
            "which fp8: fp8_tensorwise or fp8_rowwise (torchao), fp8_delayed, fp8_current or fp8_blockwise (TransformerEngine)",
            "performance.precision=fp8_delayed",
        ),
        ("performance.loss_impl=chunked", "chunks of tokens are performance.loss_chunks, such as 8", None),
        (
            "performance.loss_impl=liger",
            "write fused, and performance.loss_chunks for a head that takes part of the tokens at a time",
            "performance.loss_impl=fused",
        ),
        (
            "performance.overlap=true",
            "give its keys: 3dtrn explain --key performance.overlap",
            "performance.overlap={dp: true}",
        ),
        ("parallelism.pp=5", "valid pp*vpp: 1, 2, 4, 8, 16, 32; or set parallelism.layers_per_stage to auto", "parallelism.pp=4"),
    ],
)  # fmt: skip
def test_the_fix_of_a_wrong_value_runs(path, wrong, end, right):
    with pytest.raises(ConfigError) as error:
        Job.load(path, [wrong])
    (line,) = [line for line in error.value.problems if wrong.partition("=")[0] in line]
    assert line.endswith(f"; {end}")
    Job.load(path, [right] if right else [])


def test_layers_that_do_not_divide_are_a_problem_of_the_pipeline(path):
    """32 layers over 3 stages: the pipeline is what was changed, and what the page shows the problem beside."""
    with pytest.raises(ConfigError) as error:
        Job.load(path, ["parallelism.pp=3"])
    assert error.value.problems[0].startswith(
        "parallelism.pp: pp*vpp = 3 must divide n_layers 32 (got pp 3, vpp 1); valid pp*vpp: 1, 2, 4, 8, 16, 32; or set"
    )
    assert [problem.path for problem in error.value.details] == ["parallelism.pp"]
    Job.load(path, ["parallelism.pp=3", "parallelism.layers_per_stage=auto"])


def test_a_tp_that_does_not_divide_is_told_the_degrees_that_do(path):
    """Lower than 7 is 6, 5 and 3, none of which divide 32 query or 8 key-value heads."""
    with pytest.raises(ConfigError) as error:
        Job.load(path, ["parallelism.tp=7", "devices=56"])
    about = [line for line in error.value.problems if "parallelism.tp" in line]
    assert len(about) == 2
    assert all(line.endswith("; valid: 1, 2, 4, 8, 16, 32") for line in about)
    assert "lower" not in " ".join(about)
    for tp in re.findall(r"\d+", about[0].rpartition("valid: ")[2]):
        Job.load(path, [f"parallelism.tp={tp}", "devices=32"])


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("optimizer=adam", "performance.optimizer=adamw"),
        ("dtype=bfloat16", "performance.precision=bf16"),
        ("tensor_parallel=2", "parallelism.tp=2"),
        ("activation_checkpointing=full", "performance.activation_checkpointing_type=full"),
    ],
)
def test_a_suggested_setting_runs(path, said, meant):
    with pytest.raises(ConfigError) as error:
        read_setting(said)
    (line,) = error.value.problems
    assert line == f"--set {said}: unknown key; did you mean --set {meant}?"
    Job.load(path, shlex.split(line.rpartition("--set ")[2].removesuffix("?")))


def test_a_value_without_a_near_word_is_told_all_words():
    words = "none, selective, super-selective, per-op, full"
    assert suggested("performance.activation_checkpointing_type", "offload") == (
        f"did you mean --set performance.activation_checkpointing_type=VALUE, one of {words}?"
    )
    assert suggested("performance.activation_checkpointing_type", "true") == (
        "the key is performance.activation_checkpointing_type; write full for whole layers (gradient checkpointing)"
    )


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "README.md",
            "# A title\n\n`code` and text\n",
            "Markdown, not a plan, which is YAML; to begin one: 3dtrn init",
        ),
        ("plan.yaml", "model: @llama\n", "line 1, column 8: '@' cannot begin a value in YAML; quote the text"),
        ("plan.yaml", "a: 1\n\n`b`: 2\n", "line 3, column 1: '`' cannot begin a value in YAML; quote the text"),
    ],
)
def test_what_is_no_yaml_is_said_in_plain_words(tmp_path, capsys, name, text, line):
    path = tmp_path / name
    path.write_text(text)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: {line}\n"
