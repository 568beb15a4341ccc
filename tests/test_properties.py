"""What holds for every job: drawn models, layouts, frameworks and machines."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from steptime.config import ConfigError
from steptime.job import Job
from steptime.stage_memory import PartMemories
from steptime.step import estimate

patient = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
EPS = 1e-9
"""Relative rounding of long sums."""


@st.composite
def models(draw):
    """Small decoder models of every kind that is modelled."""
    heads = draw(st.sampled_from([8, 16]))
    learned = draw(st.booleans())
    return {
        "hidden_sz": draw(st.sampled_from([256, 1024])),
        "inter_sz": draw(st.sampled_from([768, 2816])),
        "n_q_heads": heads,
        "n_kv_heads": draw(st.sampled_from([2, 8])),
        "head_dim": draw(st.sampled_from([32, 128])),
        "vocab_sz": draw(st.sampled_from([1024, 50256])),
        "glu": draw(st.booleans()),
        "activation": draw(st.sampled_from(["silu", "gelu", "relu"])),
        "learned_positions": learned,
        "max_positions": 4096 if learned else None,
        "dropout": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }


@st.composite
def plans(draw):
    """The sections of a config: most combinations run; those that cannot are skipped by `job`."""
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 8], [1, 2, 4], [1, 2, 8]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    batch, rounds = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    microbatches = rounds * pp if vpp > 1 else draw(st.integers(1, 5))
    software = draw(st.sampled_from(["megatron-core", "megatron-core", "megatron-2021", "torch", "fsdp2", "deepspeed"]))
    machine = draw(st.sampled_from(["dgx-h100", "dgx-a100-80", "mi300x-node", "gb200-nvl72"]))
    performance = {
        "software": software,
        "activation_checkpointing_type": draw(st.sampled_from(["none", "selective", "super-selective", "full"])),
        "attention_impl": draw(st.sampled_from(["flash", "unfused"])),
        "norm_impl": draw(st.sampled_from(["fused", "composite"])),
        "loss_impl": draw(st.sampled_from(["fused", "composite"])),
        "overlap": {axis: draw(st.sampled_from([True, False, 0.5])) for axis in ("tp", "dp", "pp")},
    }
    layout = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}
    if software == "megatron-core":
        layout["zero_level"] = draw(st.integers(0, 3 if pp == 1 else 1))
        layout["sp"] = draw(st.booleans())
    return {
        "model": {**draw(models()), "n_layers": pp * vpp * draw(st.integers(1, 3))},
        "parallelism": layout,
        "performance": performance,
        "data": {
            "gbs": dp * batch * microbatches,
            "seqlen": draw(st.sampled_from([256, 2048])),
            "microbatch_sz": batch,
        },
        "hardware": machine,
    }


def job(plan, **changes) -> Job:
    """The job of a drawn plan; a layout that its framework cannot run is drawn again."""
    try:
        return Job(**plan).replace(**changes)
    except ConfigError:
        assume(False)
        raise


@patient
@given(plans())
def test_parts_are_seconds_and_sum_to_the_step(plan):
    answer = estimate(job(plan))
    parts = answer.time.parts_s
    assert sum(parts.values()) == pytest.approx(answer.step_s, rel=EPS)
    assert min(parts.values()) >= -EPS * answer.step_s
    assert all(seconds >= 0 for seconds in answer.time.hidden_s.values())


@patient
@given(plans())
def test_no_step_beats_the_peak(plan):
    answer = estimate(job(plan))
    rates = answer.throughput
    assert answer.step_s >= answer.flops.hardware_per_step / (answer.devices * rates.peak_flops_used)
    assert 0 < rates.mfu <= rates.hfu < 1
    assert rates.mfu <= rates.mfu_full_attention


@patient
@given(plans())
def test_memory_is_the_sum_of_its_parts(plan):
    answer = estimate(job(plan))
    for stage in answer.memory.stages:
        states = stage.params_bytes + stage.gradients_bytes + stage.optimizer_bytes
        assert stage.allocated_bytes == pytest.approx(states + stage.activations_bytes + stage.transient_bytes, rel=EPS)
        assert stage.reserved_bytes >= stage.allocated_bytes * (1 - EPS)
        assert min(stage[1:8]) >= 0, stage
        assert stage.peak_op
    assert answer.memory.peak_allocated_bytes == max(s.allocated_bytes for s in answer.memory.stages)
    assert answer.memory.peak_reserved_bytes == answer.memory.stages[answer.memory.worst_stage].reserved_bytes


@patient
@given(plans())
def test_stages_hold_the_model_and_one_more_tied_table(plan):
    answer = estimate(job(plan))
    params, model = answer.params, answer.job.model
    assert sum(params.per_stage) == params.total + params.tied_copies
    assert params.total == params.active == model.n_params
    tied = model.tie_embeddings and answer.job.parallelism.pp > 1
    assert params.tied_copies == (model.vocab_sz * model.hidden_sz if tied else 0)


@patient
@given(plans())
def test_an_axis_of_one_does_not_communicate(plan):
    answer = estimate(job(plan))
    layout, parts = answer.job.parallelism, answer.time.parts_s
    axes = {row.axis for row in answer.collectives}
    for axis in ("tp", "pp", "dp"):
        if getattr(layout, axis) == 1:
            assert axis not in axes
            assert parts.get(f"{axis}_comm", 0.0) == pytest.approx(0.0, abs=EPS * answer.step_s)
    if layout.pp == 1:
        assert parts.get("bubble", 0.0) == 0.0
        assert "embedding" not in axes
    assert all(row.ranks > 1 and row.time_s > 0 and row.count_per_step > 0 for row in answer.collectives)


@patient
@given(plans())
def test_more_zero_never_adds_states(plan):
    plan["performance"]["software"] = "megatron-core"
    plan["parallelism"]["pp"] = plan["parallelism"]["vpp"] = 1
    held = []
    for level in range(4):
        stage = estimate(job(plan, **{"parallelism.zero_level": level})).memory.stages[0]
        held.append((stage.params_bytes, stage.gradients_bytes, stage.optimizer_bytes))
    for less, more in pairwise(held):
        # level 1 pads its buffers: 64 elements a parameter and lcm(dp, 128) a bucket
        assert sum(more) <= sum(less) * 1.02


@patient
@given(plans())
def test_recomputing_more_never_keeps_more(plan):
    """Saved for backward: none, selective, super-selective, full.

    Not with more ranks than key-value heads: a checkpoint then holds the whole gathered projection that q, k and v are views of.
    """
    assume(plan["parallelism"]["tp"] <= plan["model"]["n_kv_heads"])
    kept = []
    for word in ("none", "selective", "super-selective", "full"):
        changed = {**plan, "performance": {**plan["performance"], "activation_checkpointing_type": word}}
        answer = estimate(job(changed))
        memories = PartMemories(answer.assembly)
        kept.append([memories.chunk(chunk).saved for chunk in answer.assembly.chunks])
        assert (answer.time.parts_s.get("recompute", 0.0) > 0.0) == (word != "none")
    for less, more in pairwise(kept):
        assert all(b <= a * (1 + EPS) for a, b in zip(less, more, strict=True))


FASTER = {
    "memory": ("accelerator.memory_bytes_per_s",),
    "inside": ("tiers.0.bytes_per_s", "tiers.0.link_bytes_per_s"),
    "outside": ("tiers.1.bytes_per_s",),
}


@patient
@given(plans(), st.sampled_from(sorted(FASTER)), st.floats(1.0, 8.0))
def test_a_faster_link_or_memory_never_slows_a_step(plan, what, factor):
    slow = job(plan)
    changes = {}
    for path in FASTER[what]:
        node = slow.machine.model_dump()
        for key in path.split("."):
            node = node[int(key)] if isinstance(node, list) else node[key]
        if node is not None:
            changes[path] = node * factor
    fast = slow.replace(hardware={"node_type": plan["hardware"], "overrides": changes})
    assert estimate(fast).step_s <= estimate(slow).step_s * (1 + EPS)


@patient
@given(plans(), st.floats(1.0, 8.0))
def test_a_faster_device_never_slows_a_step(plan, factor):
    slow = job(plan)
    device = slow.machine.accelerator
    changes = {f"accelerator.peak_flops.{k}": v * factor for k, v in device.peak_flops.items()}
    changes |= {f"accelerator.sustained_flops.{k}": v * factor for k, v in device.sustained_flops.items()}
    fast = slow.replace(hardware={"node_type": plan["hardware"], "overrides": changes})
    assert estimate(fast).step_s <= estimate(slow).step_s * (1 + EPS)


@patient
@given(plans())
def test_more_replicas_never_speed_up_a_step_of_the_same_work(plan):
    """True where all states are replicated and rings carry the gradients.

    Elsewhere it can: a sharded optimizer has less to update per rank, buckets grow with dp, a switch that adds sends
    (n + 1)/n of the bytes, and a mesh of links has more of them.
    """
    plan["performance"]["software"], plan["hardware"] = "megatron-2021", "dgx-a100-80"
    plan["parallelism"] = {key: plan["parallelism"][key] for key in ("tp", "pp", "dp", "vpp")}
    few = job(plan)
    many = few.replace(**{"parallelism.dp": few.parallelism.dp * 2, "data.gbs": few.data.gbs * 2})
    assert estimate(many).step_s >= estimate(few).step_s * (1 - EPS)


def plain(value):
    """Every number of a document, walked: no NaN, no infinity."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or isinstance(value, str | bool | int) or (value == value and abs(value) != float("inf"))  # noqa: PLR0124


@settings(patient, max_examples=15)
@given(plans())
def test_a_document_is_plain_and_its_config_gives_it_again(plan):
    """Deterministic, JSON without NaN or infinity, and the echoed config estimates to the same figures."""
    first = job(plan)
    document = estimate(first).to_dict()
    assert plain(document)
    text = json.dumps(document, allow_nan=False)
    assert json.dumps(estimate(job(plan)).to_dict(), allow_nan=False) == text
    again = Job.load(json.dumps(json.loads(text)["config"]))
    assert again == first
    second = estimate(again).to_dict()
    for key in document.keys() - {"assumptions"}:
        assert second[key] == document[key], key


@patient
@given(plans(), st.integers(2, 4))
def test_work_scales_with_the_batch(plan, factor):
    """Without a pipeline, `factor` times the micro-batches is `factor` times the work, and the optimizer steps once."""
    plan["parallelism"]["pp"] = plan["parallelism"]["vpp"] = 1
    one = job(plan)
    one_step, more_steps = estimate(one), estimate(one.replace(**{"data.gbs": one.data.gbs * factor}))
    few, many = one_step.time.parts_s, more_steps.time.parts_s
    for name in ("gemm", "attention", "memory_bound", "recompute"):
        assert many.get(name, 0.0) == pytest.approx(factor * few.get(name, 0.0), rel=EPS)
    assert many["optimizer"] == few["optimizer"]
    for a, b in zip(more_steps.flops, one_step.flops, strict=True):
        assert a == pytest.approx(factor * b, rel=EPS)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("tiers.1.bytes_per_s", "25 GB/s", 25e9),
        ("tiers.1.bytes_per_s", "200 Gbit/s", 25e9),
        ("accelerator.peak_flops.bf16", "0.989 PFLOP/s", 989e12),
        ("accelerator.memory_bytes_per_s", "3.35 TB/s", 3350e9),
        ("accelerator.usable_memory_bytes", "80 GiB", 80 * 2**30),
    ],
)
def test_units_are_read_as_they_are_written(key, text, value):
    jobs = [
        Job(
            model="llama3-8b",
            parallelism={"tp": 4, "pp": 1, "dp": 16},
            data={"gbs": 64, "seqlen": 4096, "microbatch_sz": 1},
            hardware={"node_type": "h100", "overrides": {key: figure}},
        )
        for figure in (text, value)
    ]
    assert estimate(jobs[0]).step_s == pytest.approx(estimate(jobs[1]).step_s, rel=1e-12)
    assert estimate(jobs[0]).memory == estimate(jobs[1]).memory
