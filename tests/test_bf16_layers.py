"""Layers that a low-precision recipe leaves in bf16: Megatron's --first-last-layers-bf16."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.commands.cli import main
from steptime.job.assembly import Assembly
from steptime.launch.read import read
from steptime.memory.states import stage_states

SHAPE = {"n_layers": 8, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "vocab_sz": 1024}
WEIGHTS = 4 * 1024 * 1024 + 3 * 1024 * 4096
"""Of one layer: qkv, output projection, three of the gated MLP."""
FLAGS = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000 "
)


def plan(start=0, end=0, precision="fp8_current", **layout):
    said = {"precision": precision, "bf16_layers_at_start": start, "bf16_layers_at_end": end}
    return job(SHAPE, performance=said, gbs=8, **layout)


@pytest.mark.parametrize(("start", "end", "quantized"), [(0, 0, 8), (1, 1, 6), (0, 3, 5), (4, 4, 0), (8, 8, 0)])
def test_weights_of_some_layers_have_no_copies(start, end, quantized):
    """On H100 a quantized weight has two copies of one byte; the layers of both ends have none. Parameters are as ever."""
    found, none = plan(start, end), plan(precision="bf16")
    more = stage_states(Assembly(found))[0].params_bytes - stage_states(Assembly(none))[0].params_bytes
    assert more == 2.0 * quantized * WEIGHTS
    assert estimate(found).params == estimate(none).params


def test_their_place():
    """Of 8 layers on two stages of four the first one and the last two: one plain and three quantized, two and two."""
    first, last = Assembly(plan(1, 2, pp=2, dp=4)).stages
    assert [(part.n_quantized == 0.0, count) for part, count in first[0].runs] == [(True, 1), (False, 3)]
    assert [(part.n_quantized == 0.0, count) for part, count in last[0].runs] == [(False, 2), (True, 2)]


def test_products_of_some_layers_run_in_bf16():
    """Seconds of matrix products are linear in the number of layers in bf16: with four of eight halfway."""
    fast, mixed, slow = (estimate(made).time.parts_s["gemm"] for made in (plan(), plan(2, 2), plan(8, 8)))
    assert fast < slow
    assert mixed == pytest.approx((fast + slow) / 2)


def test_flags_of_megatron(tmp_path, capsys):
    """One layer at either end where their number is not said (transformer_config.py:480-483); and back as a script."""
    script = tmp_path / "run.sh"
    for flags, ends in (("", (1, 1)), ("--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", (0, 3))):
        script.write_text(f"{FLAGS} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 {flags}\n")
        reading = read("megatron", str(script))
        found = reading.config["performance"]
        assert (found["bf16_layers_at_start"], found["bf16_layers_at_end"]) == ends
        assert not reading.of("approximated")
    assert (
        main(["--from", "megatron", str(script), "--set", "hardware.node_type=dgx-h100", "--export", "megatron"]) == 0
    )
    out = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    for flag in ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16 0", "--num-layers-at-end-in-bf16 3"):
        assert flag in out
    script.write_text(f"{FLAGS} --first-last-layers-bf16\n")
    assert "bf16_layers_at_start" not in read("megatron", str(script)).config["performance"]


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_what_megatron_refuses(precision):
    """transformer_config.py:1528-1554: delayed scaling has none; no more at an end than a stage's layers."""
    with pytest.raises(ConfigError, match="recipe other than fp8_delayed"):
        plan(1, 1, precision=precision)
    with pytest.raises(ConfigError, match="got 1 and 5 of 8"):
        plan(1, 5, pp=2, dp=4)
