"""`--from KIND FILE --set model=NAME`: what the file says of its model and the plan does not have is said."""

from __future__ import annotations

import pytest

from steptime import Job
from steptime.commands.cli import main

SCRIPT = """\
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers LAYERS --hidden-size 4096 --ffn-hidden-size 14336 \
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
--micro-batch-size 1 --global-batch-size 128 --swiglu --bf16 --tensor-model-parallel-size 2 --use-distributed-optimizer \
--normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 128256 \
--train-iters 10 --disable-bias-linear
"""
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'


@pytest.fixture
def report(tmp_path, capsys):
    def run(text, kind, *args):
        path = tmp_path / ("run.sh" if kind == "megatron" else "job.toml")
        path.write_text(text)
        words = ["--from", kind, str(path), "--machine", "dgx-h100", "--devices", "16", *args]
        code = main(words)
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return " ".join(out.partition("FITS")[0].split())

    return run


@pytest.mark.parametrize("way", [("--set", "model=llama3-8b"), ("--model", "llama3-8b")])
def test_a_layer_count_that_a_named_model_drops_is_said(report, way):
    """The script trains 16 of Llama 3 8B's 32 layers; its other sizes are those of the model."""
    said = "model set to llama3-8b, without the file's n_layers 16; to keep: --set model.n_layers=16"
    top = report(SCRIPT.replace("LAYERS", "16"), "megatron", *way, "--brief")
    assert said in top
    assert "8.03 B parameters" in top
    assert "model set to" not in report(SCRIPT.replace("LAYERS", "32"), "megatron", *way, "--brief")


def test_the_fix_keeps_the_layers(report):
    """16 layers and both ends: 16 x 218.1 M + 2 x 525.3 M + 4,096 = 4.54 B."""
    top = report(
        SCRIPT.replace("LAYERS", "16"), "megatron", "--set", "model=llama3-8b", "--set", "model.n_layers=16", "--brief"
    )
    assert "model set to" not in top
    assert "4.54 B parameters" in top


def test_another_model_is_named(report):
    top = report(TITAN, "torchtitan", "--set", "model=llama3-70b", "--brief")
    assert "model set to llama3-70b in place of the file's llama3-8b" in top
    assert "model set to" not in report(TITAN, "torchtitan", "--set", "model=llama3-8b", "--brief")


def test_a_file_that_does_not_tell_its_model_is_no_problem(report):
    top = report(TITAN.replace("8B", "mine"), "torchtitan", "--set", "model=llama3-8b", "--brief")
    assert "llama3-8b" in top
    assert "model set to" not in top


def test_the_note_is_saved_with_the_plan(report, tmp_path):
    plan = tmp_path / "plan.yaml"
    report(SCRIPT.replace("LAYERS", "16"), "megatron", "--set", "model=llama3-8b", "--save", str(plan))
    assert any(note.startswith("model set to llama3-8b") for note in Job.load(plan).notes)
