"""What holds for every job: drawn models, layouts, frameworks and machines."""

from __future__ import annotations

import contextlib
import json
import random
from itertools import pairwise

import fuzz_plans
import pytest
from drawn import drawn_job, models, plans
from fuzz_plans import keys as drawable
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.memory.part_memories import PartMemories
from steptime.model.blocks import n_params
from steptime.report import plan_keys

patient = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
FEATURES = fuzz_plans.FEATURES
EPS = 1e-9  # rounding of long sums


def parts_are_seconds_and_sum_to_the_step(answer):
    parts = answer.time.parts_s
    assert sum(parts.values()) == pytest.approx(answer.step_s, rel=EPS)
    assert min(parts.values()) >= -EPS * answer.step_s
    assert all(seconds >= 0 for seconds in answer.time.hidden_s.values())


def no_step_beats_the_peak(answer):
    rates = answer.throughput
    assert answer.step_s >= answer.flops.hardware_per_step / (answer.devices * rates.peak_flops_used)
    assert 0 < rates.mfu <= rates.hfu < 1
    assert rates.mfu <= rates.mfu_full_attention


def memory_is_the_sum_of_its_parts(answer):
    for stage in answer.memory.stages:
        states = stage.params_bytes + stage.gradients_bytes + stage.optimizer_bytes
        assert stage.allocated_bytes == pytest.approx(states + stage.activations_bytes + stage.transient_bytes, rel=EPS)
        assert stage.reserved_bytes >= stage.allocated_bytes * (1 - EPS)
        assert min(stage[1:8]) >= 0, stage
        assert stage.peak_op
    assert answer.memory.peak_allocated_bytes == max(s.allocated_bytes for s in answer.memory.stages)
    assert answer.memory.peak_reserved_bytes == answer.memory.stages[answer.memory.worst_stage].reserved_bytes


def stages_hold_the_model_and_one_more_tied_table(answer):
    params, model = answer.params, answer.job.model
    assert sum(params.per_stage) == params.total + params.tied_copies
    assert params.total == params.active == n_params(model)
    tied = model.tie_embeddings and answer.job.parallelism.pp > 1
    assert params.tied_copies == (model.vocab_sz * model.hidden_sz if tied else 0)


def an_axis_of_one_does_not_communicate(answer):
    layout, parts = answer.job.parallelism, answer.time.parts_s
    axes = {row.axis for row in answer.collectives}
    ranks = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp * layout.cp}  # cp shares the gradients
    for axis, size in ranks.items():
        if size == 1:
            assert axis not in axes
            assert parts.get(f"{axis}_comm", 0.0) == pytest.approx(0.0, abs=EPS * answer.step_s)
    if layout.pp == 1:
        assert parts.get("bubble", 0.0) == 0.0
        assert "embedding" not in axes
    assert all(row.ranks > 1 and row.time_s > 0 and row.count_per_step > 0 for row in answer.collectives)


def rows_show_what_the_parts_show(answer):
    """What is exposed of data-parallel and pipeline rows is the step's part, and no more than they take.

    Under FSDP stages of a pipeline gather one after the other as it fills, and rows are those of one stage.
    """
    stages = answer.job.parallelism.pp if answer.job.parallelism.fsdp else 1
    for axis in ("dp", "pp"):
        rows = [row for row in answer.collectives if row.axis == axis]
        part = answer.time.parts_s.get(f"{axis}_comm", 0.0)
        assert sum(row.exposed_s for row in rows) == pytest.approx(part, rel=1e-6, abs=EPS * answer.step_s)
        sent = sum(row.time_s * row.count_per_step for row in rows)
        assert axis == "pp" or part <= stages * sent * (1 + EPS) + EPS * answer.step_s


@settings(patient, max_examples=40)
@given(plans())
def test_what_holds_of_any_estimate(plan):
    answer = estimate(drawn_job(plan))
    parts_are_seconds_and_sum_to_the_step(answer)
    no_step_beats_the_peak(answer)
    memory_is_the_sum_of_its_parts(answer)
    stages_hold_the_model_and_one_more_tied_table(answer)
    an_axis_of_one_does_not_communicate(answer)
    rows_show_what_the_parts_show(answer)


@settings(patient, max_examples=5)
@given(st.sampled_from(FEATURES), st.integers(0, 2**32))
def test_no_figure_of_any_feature_is_impossible(feature, seed):
    """Experts, adapters, multi-token prediction and all ways of context parallelism, with keys drawn anew beside them.

    `fuzz_plans.wrong` says what is impossible: NaN, infinity, a negative number, MFU above 100 %, parts that miss their sum.
    """
    draw = random.Random(seed)
    for _ in range(40):
        plan = fuzz_plans.plan(draw, feature)
        with contextlib.suppress(ConfigError):
            accepted = Job.load(plan)
            break
    else:
        assume(False)
    assert fuzz_plans.wrong(estimate(accepted)) is None


def test_plans_are_drawn_over_every_key():
    """Nothing of what a plan may say is left out but names, a pattern, a calibration; machines have a door of their own.

    Entries of a list are drawn with it."""
    sections = {"model", "parallelism", "performance", "data", "run", "cross_dc"}
    named = {
        path for path in plan_keys.texts() if path.partition(".")[0] in sections and "." in path and "[]" not in path
    }
    drawn = {".".join(path) for path, _ in drawable()}
    left = {path for path in named - drawn if not path.startswith("performance.calibration")}
    assert left == {"model.name", "model.hybrid_pattern"}


@st.composite
def with_states(draw):
    """Models some of whose layers carry a state: Mamba-2 hybrids, and linear attention."""
    kind = draw(st.sampled_from(["mamba", "gated_delta_net", "kda", "lightning"]))
    model = draw(models()) | {"learned_positions": False, "max_positions": None, "n_layers": 4, "dropout": False}
    if kind != "mamba":
        return model | {"linear_attention": {"kind": kind, "freq": draw(st.sampled_from([2, 4]))}}
    sizes = {"head_dim": [32, 64], "n_groups": [1, 8], "state_dim": [16, 128, 256, 1024], "chunk_sz": [64, 256]}
    mamba = {name: draw(st.sampled_from(values)) for name, values in sizes.items()}
    return model | {"hybrid_pattern": draw(st.sampled_from(["MMMM", "M-M-", "M-M*"])), "mamba": mamba | {"n_heads": 8}}


@patient
@given(with_states(), st.sampled_from([1, 8]), st.sampled_from(["none", "full"]))
def test_the_hardware_runs_what_the_model_counts(model, tp, recomputed):
    plan = {
        "model": model,
        "parallelism": {"tp": tp, "pp": 1, "dp": 2},
        "performance": {"activation_checkpointing_type": recomputed},
        "data": {"gbs": 4, "seqlen": 1024, "microbatch_sz": 1},
        "hardware": "dgx-h100",
    }
    rates = estimate(drawn_job(plan)).throughput
    assert 0 < rates.mfu <= rates.hfu * (1 + EPS)
    assert rates.hfu < 1


@patient
@given(plans())
def test_more_zero_never_adds_states(plan):
    plan["performance"]["software"] = "megatron-core"
    plan["parallelism"] = {"tp": plan["parallelism"]["tp"], "pp": 1, "dp": plan["parallelism"]["dp"]}
    held = []
    for level in range(4):
        stage = estimate(drawn_job(plan, **{"parallelism.zero_level": level})).memory.stages[0]
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
        said = {key: value for key, value in plan["performance"].items() if key != "recompute"}
        changed = {**plan, "performance": {**said, "activation_checkpointing_type": word}}
        answer = estimate(drawn_job(changed))
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
    slow = drawn_job(plan)
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
    slow = drawn_job(plan)
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
    few = drawn_job(plan)
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
    """Deterministic, JSON without NaN or infinity, and the echoed config estimates to the same figures.

    Not what other settings would save: the echo states each kernel, and torch.compile leaves those that a plan states.
    """
    first = drawn_job(plan)
    document = estimate(first).to_dict()
    assert plain(document)
    text = json.dumps(document, allow_nan=False)
    assert json.dumps(estimate(drawn_job(plan)).to_dict(), allow_nan=False) == text
    again = Job.load(json.dumps(json.loads(text)["config"]))
    assert again == first
    second = estimate(again).to_dict()
    for key in document.keys() - {"assumptions", "settings"}:
        assert second[key] == document[key], key


@patient
@given(plans())
def test_every_micro_batch_is_the_same_work(plan):
    """Without a pipeline each micro-batch adds what the one before added (a first one alone has no gradient to add to).

    Under Megatron-FSDP the root's parameters are gathered once a step, so that their copies stand in the first micro-batch alone.
    """
    plan["parallelism"] |= {"pp": 1, "vpp": 1}
    one = drawn_job(plan)
    batch = one.parallelism.dp * one.data.microbatch_sz
    answers = [estimate(one.replace(**{"data.gbs": batch * m})) for m in (2, 3, 4)]
    for name in ("gemm", "attention", "memory_bound", "recompute"):
        first, second, third = (answer.time.parts_s.get(name, 0.0) for answer in answers)
        assert third - second == pytest.approx(second - first, rel=1e-6)
        if name != "memory_bound" or one.zero_level < 3 or one.software.family != "megatron-core":
            assert second - first >= first / 2 * (1 - EPS)
    for name in ("model_per_step", "model_per_step_full_attention", "hardware_per_step"):
        flops = [getattr(answer.flops, name) for answer in answers]
        assert flops == pytest.approx([flops[0], 1.5 * flops[0], 2 * flops[0]], rel=EPS)
