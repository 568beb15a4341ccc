"""Known defects of dlcalc, one by one, each with the right number here.

dlcalc is jfc4050/dlcalc@cda3963: dlcalc/training_3d.py, dlcalc/utils/model_3d.py, comms.py, compute.py, hardware.py, printing.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.cost.comm import collective
from steptime.cost.network import network
from steptime.hardware.machine import Machine
from steptime.job.mesh import Group, Parallelism
from steptime.memory.states import shard_ranks

ROOT = Path(__file__).parents[1]
T, H = 8192, 8192


job = jobs.usually("llama3-70b", gbs=256, seqlen=T, tp=8, pp=4, dp=4)


def rows(answer, axis):
    return [row for row in answer.collectives if row.axis == axis]


def test_dlcalc_1_sends_are_per_boundary():
    """training_3d.py:696-697, 773-774 charge a pipeline send per block: 2.69 of 16.40 s where 0.045 s are true."""
    answer = estimate(job(gbs=128))  # 32 micro-batches, as its llama3_70b.yaml
    assert [row.count_per_step for row in rows(answer, "pp")] == [2 * 32] * 3
    assert answer.time.parts_s["pp_comm"] < 0.06


def test_dlcalc_2_causal_attention_is_half_and_backward_five_halves():
    """utils/compute.py:60-78 has no causal factor; training_3d.py:826-832 takes twice the forward for flash's backward."""
    timing = estimate(job()).timing
    core = next(op for op in timing.assembly.kinds[0].ops if op.name == "attn.core")
    linear = sum(
        op.flops
        for op in timing.assembly.kinds[0].ops
        if op.name in {"attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down"}
    )
    assert timing.parts.layer.forward.flops - linear == pytest.approx(core.full_flops / 2)
    assert timing.parts.layer.backward.flops - 2 * linear == pytest.approx(core.full_flops / 2 * 2.5)
    assert core.full_flops == 4 * T * T * 64 / 8 * 128


@pytest.mark.parametrize(
    ("level", "kinds"),
    [(0, {"all_reduce"}), (1, {"reduce_scatter", "all_gather"}), (2, {"reduce_scatter", "all_gather"})],
)
def test_dlcalc_3_every_zero_level_and_no_sequence_parallelism(level, kinds):
    """training_3d.py:407-408, model_3d.py:306-307 raise NotImplementedError for ZeRO 0, 2, 3; training_3d.py:354 needs SP."""
    for sp in (True, False):
        answer = estimate(job("llama3-8b", pp=1, zero_level=level, sp=sp))
        assert {row.kind for row in rows(answer, "dp")} == kinds
        tp_kinds = {row.kind for row in rows(answer, "tp") if row.name.startswith("mlp")}
        assert tp_kinds == ({"all_gather", "reduce_scatter"} if sp else {"all_reduce"})


def test_dlcalc_3_zero_3():
    """Parameters are gathered for forward and backward of every micro-batch, each rank's 1/tp of them."""
    answer = estimate(job("llama3-8b", tp=2, pp=1, dp=8, gbs=32, zero_level=3))
    gathers = next(row for row in rows(answer, "dp") if row.name == "block parameters")
    assert gathers.count_per_step == 2 * 32 * 4
    block = (218_112_000 - 8192) / 2 + 8192
    assert gathers.bytes == pytest.approx(2 * block, rel=1e-3)


def test_dlcalc_4_recomputation_changes_time_and_memory():
    """training_3d.py:829-830 and model_3d.py:508-511: selective equals none in both; full repeats the pipeline sends too."""
    answers = {
        word: estimate(job(gbs=128, performance={"activation_checkpointing_type": word, "attention_impl": "unfused"}))
        for word in ("none", "selective", "full")
    }
    steps = [a.step_s for a in answers.values()]
    held = [a.memory.stages[0].activations_bytes for a in answers.values()]
    assert steps == sorted(steps)
    assert held == sorted(held, reverse=True)
    assert len(set(steps)) == len(set(held)) == 3
    sends = [[row.count_per_step for row in rows(a, "pp")] for a in answers.values()]
    assert sends[0] == sends[1] == sends[2]


def test_dlcalc_5_norms_and_residuals_see_a_shard():
    """training_3d.py:623-625 let norm, residual and RoPE read all s*b*h though sequence parallelism shards them."""
    sizes = estimate(job()).assembly.kinds[0].sizes
    assert sizes["attn.norm.out"] == sizes["x2"] == T * H * 2 / 8
    assert sizes["attn.rope.q"] == T * 64 / 8 * 128 * 2


def test_dlcalc_6_embedding_looks_rows_up_and_the_head_is_on_the_last_stage():
    """training_3d.py:841-857 read the whole unsharded table per micro-batch, and add head and embedding to every stage's path."""
    timing = estimate(job()).timing
    assert timing.assembly.embedding.ops[0].forward_bytes == 2 * T * H * 2  # the rows of T tokens, read and written
    forward = [stage[0].forward_s for stage in timing.chunks]
    blocks = 20 * timing.parts.layer.forward.seconds
    assert forward[1] == forward[2] == pytest.approx(blocks)
    assert forward[0] == pytest.approx(blocks + timing.parts.embedding.forward.seconds)
    assert forward[3] == pytest.approx(blocks + timing.parts.head.forward.seconds)
    assert timing.parts.head.forward.seconds > timing.parts.embedding.forward.seconds


def test_dlcalc_7_stages_differ():
    """model_3d.py:386 counts one embedding on every stage; 431-475 leave out the final norm and biases."""
    block = 8192 * (64 + 16) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28672 + 2 * 8192
    table = 128256 * 8192
    assert estimate(job()).params.per_stage == [20 * block + table, 20 * block, 20 * block, 20 * block + table + 8192]
    assert estimate(job()).params.total == 70_553_706_496


def test_dlcalc_8_heads_times_head_size_may_differ_from_hidden():
    """model_3d.py:229-232 and 524 take hidden for n_q*head_dim: gpt-oss has 64 heads of 64 and a hidden size of 2880."""
    model = {
        "n_layers": 36,
        "hidden_sz": 2880,
        "inter_sz": 2880,
        "n_q_heads": 64,
        "n_kv_heads": 8,
        "head_dim": 64,
        "vocab_sz": 201088,
    }
    answer = estimate(job(model, tp=4, pp=1, dp=2, seqlen=4096))
    params = {p.name: p.elements for p in answer.assembly.kinds[0].params}
    assert params["attn.proj.weight"] == 4096 * 2880
    assert params["attn.qkv.weight"] == (64 + 2 * 8) * 64 * 2880
    assert next(row.k for row in answer.gemms if row.name == "attn.proj" and row.pass_ == "forward") == 4096 / 4
    assert answer.assembly.kinds[0].sizes["attn.core.out"] == 4096 * 4096 / 4 * 2


def test_dlcalc_9_logits_are_in_memory_and_a_full_device_says_so():
    """model_3d.py:484-583 has no logits or loss; training_3d.py:268 prints a green tick for 51.2 GiB on 40 GiB."""
    answer = estimate(job("llama3-8b", tp=1, pp=1, dp=8, hardware="dgx-a100-40"))
    memory = answer.memory
    assert memory.peak_allocated_bytes > memory.capacity_bytes
    assert (memory.verdict, memory.fits) == ("does_not_fit", False)
    assert answer.assembly.head.sizes["loss.softmax"] == T * 128256 * 4


def test_dlcalc_10_the_bubble_has_the_head_in_it():
    """training_3d.py:839: blocks only. The last stage's head makes the others wait, micro-batch by micro-batch."""
    with_head = estimate(job("llama3-8b", tp=1, pp=4, dp=1, gbs=16)).pipeline
    assert with_head.bubble_fraction > 3 / (16 + 3)
    small = {"preset": "llama3-8b", "vocab_sz": 128}
    graphs = {"cuda_graphs": True}  # no stage waits for its host
    without = estimate(job(small, tp=1, pp=4, dp=1, gbs=16, performance=graphs)).pipeline
    assert without.bubble_fraction == pytest.approx(3 / (16 + 3), rel=0.02)


def test_dlcalc_10_fewer_micro_batches_than_stages():
    """No check there: with m = 2 on 4 stages 3 of 5 slots are idle; 1F1B holds no more than two."""
    few = estimate(job({"preset": "llama3-8b", "vocab_sz": 128}, tp=1, pp=4, dp=1, gbs=2)).pipeline
    assert few.bubble_fraction == pytest.approx(3 / 5, rel=0.02)
    assert few.in_flight == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="at least pp 4"):
        job("llama3-8b", tp=1, pp=4, vpp=2, dp=1, gbs=3)


def test_dlcalc_11_the_optimizer_is_sharded_over_dp_and_cp():
    """model_3d.py:327 divides by dp only."""
    layout = Parallelism(tp=2, pp=1, dp=4, cp=2)
    assert shard_ranks(SimpleNamespace(parallelism=layout)) == 8


def test_dlcalc_12_groups_side_by_side_share_the_nics():
    """utils/comms.py:55-60 promises it, 105-108 compute it unused: eight groups of one rank a node have one NIC each."""
    tiers = network(Machine.load("dgx-h100"))
    alone = collective("reduce_scatter", 1e9, Group("dp", 16, 1), tiers)
    shared = collective("reduce_scatter", 1e9, Group("dp", 16, 8), tiers)
    nic = tiers[1].bytes_per_s * tiers[1].efficiency
    assert shared.bandwidth_s == pytest.approx(15 / 16 * 1e9 / nic)
    assert alone.bandwidth_s == pytest.approx(15 / 16 * 1e9 / min(8 * nic, tiers[0].bytes_per_s * tiers[0].efficiency))


def test_dlcalc_13_small_products_are_slower_per_flop():
    """utils/compute.py:26 has one rate for all shapes."""
    rates = {
        tp: next(r for r in estimate(job("llama3-8b", tp=tp, pp=1, seqlen=512)).gemms if r.name == "mlp.down")
        for tp in (1, 8)
    }
    assert rates[8].flops / rates[8].time_s < 0.9 * rates[1].flops / rates[1].time_s


def test_dlcalc_13_trn1n_is_finite():
    """utils/hardware.py:163: an endless NVLink latency kills tp 8 with 'cannot convert float NaN to integer'."""
    assert isfinite(estimate(job("llama3-8b", pp=1, hardware="trn1n")).step_s)


def test_dlcalc_14_a_machine_is_a_file_and_one_gpu_is_enough(tmp_path):
    """utils/hardware.py:40 knows six names, else KeyError; training_3d.py:141 wants whole nodes."""
    path = tmp_path / "box.yaml"
    path.write_text(
        "accelerator: {name: card, peak_flops: {bf16: 100 TFLOP/s}, memory_bytes: 48 GiB, usable_memory_bytes: 47 GiB,\n"
        "  memory_bytes_per_s: 1 TB/s}\ndevices_per_node: 1\ntiers: [{name: pcie, bytes_per_s: 32 GB/s, latency_s: 5 us}]\n"
    )
    answer = estimate(job("gpt2-small", tp=1, pp=1, dp=1, gbs=4, seqlen=1024, hardware=str(path)))
    assert (answer.devices, answer.nodes, answer.collectives) == (1, 1, [])
    with pytest.raises(ConfigError, match=r"hardware\.node_type: unknown machine 'h1000'; did you mean h100") as error:
        job(hardware="h1000")
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("dp", [2, 4])
def test_dlcalc_15_one_or_two_replicas_a_center(dp):
    """utils/comms.py:514-518: hops inside a center go negative where dp <= n_dcs."""
    link = {"n_dcs": 2, "interconnect_bandwidth_gbps": 800, "interconnect_latency_s": 0.01}
    answer = estimate(job("llama3-8b", pp=1, dp=dp).replace(cross_dc=link))
    for row in rows(answer, "dp"):
        assert row.latency_s >= 0.01
        assert row.bandwidth_s > 0
        assert row.tier == "cross-dc"


def test_dlcalc_16_mfu_has_attention_and_no_embedding():
    """training_3d.py:937-946: 6 N tokens, with the table and without attention; peak of bf16 whatever the precision."""
    answer = estimate(job())
    tokens = 256 * T
    linear = 80 * (8192 * 80 * 128 + 8192 * 8192 + 3 * 8192 * 28672) + 128256 * 8192
    attention = 80 * 2 * T * 8192  # forward, halved
    assert answer.flops.model_per_step == pytest.approx(tokens * (6 * linear + 3 * attention))
    assert answer.throughput.mfu == pytest.approx(answer.flops.model_per_step / answer.step_s / 128 / 989e12)
    single = estimate(job("llama3-8b", pp=1, performance={"precision": "fp32"})).throughput
    assert (single.peak_dtype, single.peak_flops_used) == ("fp32", 67e12)


def test_dlcalc_17_plain_text_in_a_pipe_and_json():
    """utils/printing.py colors whatever it writes to; there is not JSON; a typo is a KeyError."""
    plan = str(ROOT / "configs" / "llama3_8b.yaml")

    def run(*args):
        command = [
            sys.executable,
            "-c",
            "from steptime.commands.cli import main; raise SystemExit(main())",
            plan,
            *args,
        ]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    text, document, typo = run(), run("--json"), run("--set", "parallelism.tpp=2")
    assert "\x1b" not in text.stdout
    assert json.loads(document.stdout)["schema"] == "3dtrn/1"
    assert (typo.returncode, typo.stdout) == (2, "")
    assert "did you mean 'tp'" in typo.stderr
    assert "Traceback" not in typo.stderr
