"""Notes on settings that are valid but unusual, or that another release, device or layer count gives another meaning."""

from __future__ import annotations

import pytest
import yaml
from jobs import node_job as job

from steptime import Job, estimate
from steptime.answer.assumptions import assumptions
from steptime.hardware.machine import Machine
from steptime.report.estimate_text import report


def told(plan, word):
    return [line for line in assumptions(plan) if word in line]


def test_a_profile_of_cudnn_takes_the_own_kernel_of_a_device_without_it():
    """The echo is a plan that runs, where cudnn-9.19 would be an error."""
    plan = job({"software": "megatron-bridge"}, hardware="mi300x")
    assert plan.software.kernels.attention_kernel == "best"
    assert Job.load(yaml.safe_dump(plan.to_config())).to_config() == plan.to_config()
    assert job({"software": "megatron-bridge"}).software.kernels.attention_kernel == "cudnn-9.19"


def test_a_machine_without_compute_capability_has_sdpa_as_flash_attention_2(tmp_path):
    device = Machine.load("dgx-h100").accelerator.model_dump(exclude={"compute_capability"}, exclude_none=True)
    tiers = [{"name": "nvlink", "size": 8, "bytes_per_s": 450e9}, {"name": "ib", "bytes_per_s": 50e9}]
    tiers = [tier | {"latency_s": 5e-6} for tier in tiers]
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"name": "own", "accelerator": device, "devices_per_node": 8, "tiers": tiers}))
    line = "attention_kernel sdpa is FlashAttention-2 here, because own states no accelerator.compute_capability"
    assert told(job({"software": "torchtitan@0.2"}, hardware=str(file)), line)
    assert not told(job({"software": "torchtitan@0.2"}), "FlashAttention-2 here")


@pytest.mark.parametrize(
    ("seqlen", "said", "size"),
    [
        (32768, {}, "1.1 GB"),
        (16384, {}, ""),
        (32768, {"attention_mask": False}, ""),
        (32768, {"software": "nemo"}, ""),
        (32768, {"software": "fsdp2"}, ""),
    ],
)
def test_large_masks_of_the_data_loader_are_told(seqlen, said, size):
    """A byte for each of 32,768^2 pairs is 1.07 GB, for 16,384^2 0.27 GB; NeMo's data sets make none."""
    plan = job({"software": "megatron-core"} | said).replace(**{"data.seqlen": seqlen})
    assert [size in line for line in told(plan, "the data loader makes an attention mask of")] == (
        [True] if size else []
    )


def test_weights_in_fp32_under_autocast_are_told():
    """torchtitan/distributed/utils.py, maybe_enable_amp: DDP and one device autocast; with fp32 products there is none."""
    (line,) = told(job({"software": "torchtitan-ddp"}), "autocast")
    assert "weights are fp32 under torch.autocast: matrix products run in bf16" in line
    assert not told(job({"software": "torchtitan-ddp", "precision": "fp32"}), "autocast")
    assert not told(job({"software": "torchtitan"}), "autocast")


@pytest.mark.parametrize(
    ("every", "pp", "start", "end"),
    [
        (33, 1, "no effect: performance.recompute.n_layers 33 ", " (the model has 32 layers, so none is recomputed)"),
        (17, 2, "no effect: performance.recompute.n_layers 17 ", " (no chunk has more than 16 layers, so none is recomputed)"),
        ([16, 17], 2, "note: performance.recompute.n_layers [16, 17] ", " recomputes nothing in model chunks of fewer layers"),
        (16, 2, "", ""),
    ],
)  # fmt: skip
def test_every_nth_layer_beyond_the_layers_is_told(every, pp, start, end):
    """Of 32 layers on one stage, or 16 on each of two, each n-th is recomputed: none where n is more."""
    recompute = {"granularity": "full", "method": "every", "n_layers": every}
    plan = job({"software": "torchtitan", "recompute": recompute}, pp=pp, dp=8 // pp)
    assert told(plan, "method every") == ([f"{start}with method every{end}"] if start else [])


@pytest.mark.parametrize(
    ("zero_level", "since"), [(1, "since 0.16.4"), (3, "with ZeRO stage 3, in DeepSpeed since 0.19.4")]
)
def test_tensor_parallelism_of_deepspeed_is_auto_tp(zero_level, since):
    """v0.16.4 has autotp_size, and refuses stage 3 with it until v0.19.3."""
    (line,) = told(job({"software": "deepspeed"}, tp=2, dp=4, zero_level=zero_level), "AutoTP")
    assert line.startswith("note: tp 2 is AutoTP (tensor_parallel.autotp_size)")
    assert line.endswith(since)
    assert not told(job({"software": "deepspeed"}), "AutoTP")


@pytest.mark.parametrize(
    ("layout", "idle"),
    [
        ({}, False),
        ({"fsdp": {"version": 1, "ends": "apart"}}, True),
        ({"fsdp": {"wrap": "model", "ends": "apart"}}, True),
        ({"fsdp": {"no_sync": True, "ends": "apart"}}, True),
        ({"pp": 2}, True),
        ({"fsdp": {"wrap": "model", "ends": "root"}}, False),
    ],
)
def test_groups_of_embedding_and_head_that_change_nothing_are_told(layout, idle):
    plan = job({"software": "fsdp2"}, **{"tp": 1, "pp": 1, "dp": 4, "fsdp": {"ends": "apart"}} | layout)
    assert len(told(plan, "no effect: parallelism.fsdp.ends apart")) == idle


@pytest.mark.parametrize(
    ("performance", "tp", "line"),
    [
        (
            {"gathered_logits": True},
            1,
            "no effect: performance.gathered_logits true (there is no tensor parallelism (tp 1))",
        ),
        ({"gathered_logits": True}, 2, ""),
        ({"optimizer_impl": "foreach", "optimizer": "sgd"}, 1, "no effect: performance.optimizer_impl foreach"),
        ({"optimizer_impl": "foreach"}, 1, ""),
    ],
)
def test_switches_of_torch_that_change_nothing_are_told(performance, tp, line):
    found = told(job({"software": "fsdp2"} | performance, tp=tp, pp=1, dp=4), "no effect: performance.")
    assert [one.startswith(line) for one in found] == ([True] if line else [])


@pytest.mark.parametrize(
    ("software", "word"),
    [
        *((name, "selective") for name in ("torchtitan", "torchtitan@0.2", "torchtitan-ddp", "fsdp2", "megatron-core")),
        *(("torchtitan", word) for word in ("per-op", "full", "none")),
    ],
)
def test_selective_in_torchtitan_is_another_recomputation(software, word):
    """torchtitan's SelectiveAC saves the outputs of single ops: per-op. Said above the answer, once."""
    plan = job({"software": software, "activation_checkpointing_type": word})
    meant = word == "selective" and software.startswith("torchtitan")
    line = "for torchtitan's mode selective write per-op: --set performance.activation_checkpointing_type=per-op"
    assert len(told(plan, line)) == meant
    found = estimate(plan)
    for brief in (False, True):
        text = " ".join(report(found, brief=brief).split())
        assert text.count(line) == meant
        assert line not in text.partition("STEP")[2]
    if meant:  # that frees next to nothing is said with it, not again
        assert not told(plan, "frees only its log-sum-exp")


@pytest.mark.parametrize(
    ("software", "pp", "vpp", "lines"),
    [("torchtitan@0.2", 4, 2, 1), ("torchtitan@0.2", 4, 1, 0), ("torchtitan@0.2", 2, 2, 1), ("torchtitan", 4, 2, 0)],
)
def test_stages_on_one_stream(software, pp, vpp, lines):
    """pytorch/pytorch pull request 165664: a receive blocks the sends after it, in schedules of several chunks."""
    plan = job({"software": software}, pp=pp, dp=8 // pp, vpp=vpp)
    assert len(told(plan, "on one stream per stage")) == lines
