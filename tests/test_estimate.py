"""An estimate as a whole: counts, FLOPs, rates, pipeline, data parallelism and scaling, by hand."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import jobs
import pytest

import steptime
from steptime import estimate
from steptime.job.job import Job
from steptime.schedule import bubble_fraction

SMALL = {"preset": "llama3-8b", "vocab_sz": 128}
"""Next to no embedding and head: stages of equal layers are equal."""


job = partial(jobs.job, gbs=16)


# --- what estimates share ---


def test_replicas_of_the_same_parts_are_priced_once():
    """Of two jobs that differ in dp and global batch alone every part takes as long: the second one has it from the first."""
    first, second = (estimate(job(SMALL, tp=2, pp=2, dp=dp, gbs=8 * dp)) for dp in (2, 4))
    assert second.timing.parts.of is first.timing.parts.of
    assert second.timing.states[0].optimizer_bytes < first.timing.states[0].optimizer_bytes


# --- parameters ---


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama3-70b", 70_553_706_496),
        ("gpt2-small", 124_439_808),
        ({"preset": "gpt2-small", "bias": False, "qkv_bias": False, "norm_bias": False}, 124_337_664),
        ("megatron-1t", 1_008_038_758_400),
    ],
)
def test_parameters(model, count):
    """Published totals: Meta's 70B, Hugging Face's gpt2, nanoGPT without biases, Narayanan et al. 2021's 1008.0 billion."""
    assert estimate(job(model, seqlen=1024)).params.total == count


def test_parameters_by_stage():
    params = estimate(job("llama3-70b", pp=4, tp=8)).params
    block, table = 855_654_400, 128_256 * 8192
    assert params.per_stage == [20 * block + table, 20 * block, 20 * block, 20 * block + table + 8192]
    tied = estimate(job("gpt2-small", seqlen=1024, pp=2)).params
    assert tied.tied_copies == 50257 * 768
    assert sum(tied.per_stage) == 124_439_808 + tied.tied_copies


# --- FLOPs and rates ---


@pytest.mark.parametrize(
    ("model", "halved", "full"),
    [("llama3-8b", 48.25, 51.47), ("llama3-70b", 433.12, 449.22), ("qwen3-32b", 204.79, 217.67)],
)
def test_megatrons_count_of_flops(model, halved, full):
    """GFLOP per token at 4,096 as num_floating_point_operations gives them (NVIDIA/Megatron-LM@d98e8a6), attention halved."""
    answer = estimate(job(model, tp=8))
    tokens = 16 * 4096
    assert answer.flops.model_per_step / tokens / 1e9 == pytest.approx(halved, abs=0.006)
    assert answer.flops.model_per_step_full_attention / tokens / 1e9 == pytest.approx(full, abs=0.006)


def test_torchtitans_count_of_flops():
    """6 N without the embedding + 6 L a (d + d) s, attention in full (torchtitan/models/utils.py); its N has the norms too."""
    flops = estimate(job(tp=2)).flops.model_per_step_full_attention / (16 * 4096)
    without_table = 8_030_261_248 - 128_256 * 4096
    assert flops == pytest.approx(6 * without_table + 6 * 32 * 32 * 256 * 4096, rel=1e-4)


def test_hardware_flops_add_flashs_fifth_product_and_padding():
    """Backward of causal flash attention is 2.5 forwards where the model counts 2; the head multiplies the padded vocabulary."""
    flops = estimate(job(tp=8)).flops
    tokens, attention = 16 * 4096, 2 * 32 * 4096 * 4096
    padding = 6 * (129_024 - 128_256) * 4096
    assert flops.hardware_per_step == pytest.approx(flops.model_per_step + tokens * (0.5 * attention + padding))


def test_rates():
    answer = estimate(job(tp=2, dp=4))
    rates = answer.throughput
    assert rates.tokens_per_s == pytest.approx(16 * 4096 / answer.step_s)
    assert rates.tokens_per_s_per_device == pytest.approx(rates.tokens_per_s / 8)
    assert rates.mfu == pytest.approx(answer.flops.model_per_step / answer.step_s / 8 / 989e12)
    assert rates.model_tflops_per_device == pytest.approx(rates.mfu * 989)
    assert rates.hfu == pytest.approx(rates.mfu * answer.flops.hardware_per_step / answer.flops.model_per_step)
    assert (rates.peak_dtype, rates.peak_flops_used) == ("bf16", 989e12)
    assert (answer.devices, answer.nodes) == (8, 1)
    assert estimate(job(dp=16)).nodes == 2
    assert estimate(job(dp=8, tp=1, pp=1, hardware="gb200-nvl72")).nodes == 2  # four devices a node


# --- pipeline ---


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(2, 1, 8), (4, 1, 8), (4, 1, 2), (4, 2, 8), (4, 4, 16), (8, 4, 8)]
)
def test_the_walk_is_the_closed_form_where_stages_are_equal(pp, vpp, microbatches):
    """(p - 1) / (v m + p - 1); what embedding, head and sends add is at most a tenth of it.

    Eight sequences a micro-batch: layers long beside the launches of the two ends.
    """
    pipeline = estimate(job(SMALL, gbs=8 * microbatches, microbatch_sz=8, pp=pp, vpp=vpp)).pipeline
    assert 1.0 <= pipeline.bubble_fraction / bubble_fraction(pp, vpp, microbatches) < 1.1
    assert (pipeline.stages, pipeline.microbatches) == (pp, microbatches)
    assert pipeline.schedule == ("interleaved" if vpp > 1 else "1f1b")


def test_more_virtual_chunks_shorten_the_bubble():
    bubbles = [estimate(job(SMALL, gbs=16, pp=4, vpp=vpp)).pipeline.bubble_s for vpp in (1, 2, 4, 8)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[1] == pytest.approx(bubbles[0] / 2, rel=0.05)


def test_uneven_stages_go_through_the_walk():
    """Two layers more on one stage: every micro-batch waits for it, so the step follows the busiest stage."""
    even = estimate(job(SMALL, gbs=32, pp=4))
    uneven = estimate(job(SMALL, gbs=32, pp=4, layers_per_stage=[8, 10, 7, 7]))
    assert uneven.timing.busiest == 1
    busy, usual = (found.step_s - found.timing.optimizer.around_s for found in (uneven, even))
    assert busy / usual == pytest.approx((32 * 10 + 8 + 7 + 7) / (32 * 8 + 3 * 8), rel=0.03)


def test_embedding_and_head_may_count_as_layers():
    """A large vocabulary on the last stage: taking layers off it is faster."""
    plain = estimate(job("llama3-8b", gbs=32, pp=4, layers_per_stage=[8, 8, 8, 8]))
    moved = estimate(job("llama3-8b", gbs=32, pp=4, layers_per_stage=[9, 9, 9, 5]))
    assert moved.step_s < plain.step_s
    assert plain.timing.busiest == 3


def test_sends_that_overlap_cost_less_than_sends_that_wait():
    steps = [
        estimate(job("llama3-8b", gbs=16, pp=4, tp=8, performance={"overlap": {"pp": share}})).step_s
        for share in (True, 0.5, False)
    ]
    assert steps[0] <= steps[2]
    assert steps[1] <= steps[2]


# --- data parallelism ---


def dp_comm(**changes) -> float:
    return estimate(job(dp=16, gbs=64, hardware="dgx-a100-80", **changes)).time.parts_s["dp_comm"]


def test_overlap_hides_gradients_and_a_share_scales_them():
    off, half, on = (dp_comm(performance={"overlap": {"dp": share}}) for share in (False, 0.5, True))
    assert half == pytest.approx(off / 2)
    assert on < off / 2


def test_gradients_of_zero_0_and_1_move_the_same_bytes():
    """An all-reduce is a reduce-scatter and an all-gather, but gradients are fp32 and parameters bf16: 4 + 2 against 2 * 4."""
    moved = {}
    for level in (0, 1):
        rows = estimate(job(dp=16, gbs=64, zero_level=level, hardware="dgx-a100-80")).collectives
        moved[level] = sum(row.bandwidth_s * row.count_per_step for row in rows if row.axis == "dp")
    assert moved[0] / moved[1] == pytest.approx(8 / 6, rel=0.01)


def test_buckets_cut_the_first_stage_only():
    """Megatron's max(40e6, 1e6 dp) elements: four times as many calls where buckets are a quarter; later stages have one."""

    def calls(**layout):
        timing = estimate(job(pp=2, dp=8, gbs=64, **layout)).timing
        return [len(chunks[0]) for chunks in timing.dp.reductions]

    first, last = calls(n_param_buckets=10)
    assert 8 <= first <= 10
    assert last == 1
    assert calls(bucket_size_mb=1e6) == [1, 1]
    assert calls()[0] > 10


def test_a_tied_table_is_reduced_between_the_ends():
    answer = estimate(job("gpt2-small", seqlen=1024, pp=2))
    row = next(row for row in answer.collectives if row.axis == "embedding")
    assert (row.kind, row.ranks, row.count_per_step) == ("all_reduce", 2, 1)
    assert row.bytes == 50304 * 768 * 4  # padded, fp32 gradients
    assert answer.time.parts_s["embedding_comm"] == row.time_s
    assert not [row for row in estimate(job("gpt2-small", seqlen=1024)).collectives if row.axis == "embedding"]


def test_fsdp_gathers_twice_and_reduces_once_a_micro_batch():
    def counts(**fsdp):
        rows = estimate(job(dp=8, gbs=32, fsdp=fsdp)).collectives
        return {row.name: row.count_per_step for row in rows if row.name.startswith("block")}

    assert counts() == {"block parameters": 2 * 32 * 4, "block gradients": 32 * 4}
    assert counts(reshard_after_forward=False) == {"block parameters": 32 * 4, "block gradients": 32 * 4}


def test_the_first_gather_is_the_embeddings():
    """Megatron gathers parameters in the order of forward: the first of them is exposed."""
    timing = estimate(job(pp=2, dp=8, gbs=64)).timing
    buckets = timing.dp.gathers[0][0]
    first, last = buckets[0].cost.time_s, buckets[-1].cost.time_s
    assert last > 2 * first
    assert timing.dp.gather_exposed_s >= last


def test_sharded_gradients_are_reduced_every_micro_batch():
    """ZeRO-2 keeps no whole gradient to accumulate in; ZeRO-1 reduces once a step."""
    counts = {}
    for level in (1, 2):
        rows = estimate(job(dp=8, gbs=32, zero_level=level, n_param_buckets=1)).collectives
        counts[level] = {row.name: row.count_per_step for row in rows}
    assert counts == {1: {"gradients": 1, "parameters": 1}, 2: {"gradients": 4, "parameters": 1}}


def test_replicas_reduce_inside_then_between():
    """HSDP: gather and reduce-scatter over the 4 ranks of a copy, an all-reduce of the shard between the 2 copies."""
    rows = {row.name: row for row in estimate(job(dp=8, gbs=32, replicas=2, fsdp={})).collectives}
    assert rows["block parameters"].ranks == rows["block gradients"].ranks == 4
    between = rows["block gradients, replicas"]
    assert (between.kind, between.ranks) == ("all_reduce", 2)
    assert between.bytes == rows["block gradients"].bytes / 4


def test_fsdp_obeys_the_overlap_that_is_asked_for():
    def exposed(share):
        answer = estimate(job(dp=8, gbs=32, fsdp={}, performance={"overlap": {"dp": share}}))
        return answer.time.parts_s["dp_comm"], sum(row.time_s * row.count_per_step for row in answer.collectives)

    part, sent = exposed(share=False)
    assert part == pytest.approx(sent)
    assert exposed(share=0.5)[0] == pytest.approx(sent / 2)
    assert exposed(share=True)[0] < sent / 2


# --- scaling ---


@pytest.mark.parametrize(
    "said", [{"tp": 8, "pp": 4}, {"model": "mixtral-8x7b", "tp": 2, "ep": 4}, {"software": "fsdp2", "fsdp": {}}]
)
def test_weak_scaling_is_the_estimate_of_each_size(said):
    """Parts that rows share are priced once; each row's step is that of its job alone."""
    plan = job(dp=4, gbs=64, **({"model": "llama3-8b"} | said))
    rows = estimate(plan).weak_scaling
    alone = [estimate(plan.replace(**{"parallelism.dp": row.dp, "data.gbs": row.gbs})) for row in rows]
    assert [(row.step_s, row.verdict) for row in rows] == [(found.step_s, found.memory.verdict) for found in alone]


def test_weak_scaling_keeps_the_work_of_a_device():
    rows = estimate(job("llama3-70b", tp=8, pp=4, dp=6, gbs=6 * 16)).weak_scaling
    assert [row.dp for row in rows] == [1, 2, 4, 6, 8, 16]
    assert {row.gbs / row.dp for row in rows} == {16}
    assert {row.devices / row.dp for row in rows} == {32}
    assert rows[0].efficiency == 1.0
    assert all(row.efficiency == pytest.approx(rows[0].step_s / row.step_s) for row in rows)
    assert 0.8 < rows[-1].efficiency <= 1.0


def test_efficiency_is_relative_to_the_least_size_that_fits():
    """70.6 B parameters on tp 4, pp 4: 12 B of optimizer states each do not fit on one or two replicas' ranks of 80 GB."""
    rows = estimate(job("llama3-70b", tp=4, pp=4, dp=32, gbs=512, seqlen=8192)).weak_scaling
    first = next(row for row in rows if row.verdict != "does_not_fit")
    assert first is not rows[0]
    assert [row.efficiency for row in rows] == pytest.approx([first.step_s / row.step_s for row in rows])


def test_a_slow_link_between_centers_shows():
    here = job(tp=8, dp=16, gbs=256)
    link = {"n_dcs": 2, "interconnect_bandwidth_gbps": 100, "interconnect_latency_s": 0.02}
    far = here.replace(cross_dc=link)
    assert estimate(far).step_s > estimate(here).step_s + 2 * 0.02
    assert {row.tier for row in estimate(far).collectives if row.axis == "dp"} == {"cross-dc"}
    assert estimate(far).weak_scaling[0].dp == 2  # one replica cannot be in two places


# --- as an object ---


def test_an_estimate_answers_as_rows_and_as_a_document():
    answer = estimate(job(tp=2, dp=4))
    document = answer.to_dict()
    assert document["time"]["step_s"] == answer.step_s == answer.time.step_s
    assert document["gemms"][0]["pass"] == answer.gemms[0].pass_
    assert document["collectives"] == [row._asdict() for row in answer.collectives]
    assert document["assumptions"] == answer.assumptions
    assert "MFU" in repr(answer)
    assert answer._repr_html_().count("<table") >= 2


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


def test_every_public_object_has_a_form_for_notebooks():
    """What a plan, its sections and its machine say, key by key, escaped; colors are the notebook's, light or dark."""
    job = steptime.Job.load(Path(__file__).parents[1] / "configs" / "llama3_70b.yaml", ["notes=[<script>]"])
    parts = {"Data": job.data, "Job": job, "Model": job.model, "Parallelism": job.parallelism, "Machine": job.machine}
    parts["Performance"] = job.performance
    for name, part in parts.items():
        drawn = part._repr_html_()
        assert type(part) is getattr(steptime, name)
        assert f"<b>{name}</b>" in drawn
        assert "color:" not in drawn
        assert "<script>" not in drawn
    assert re.search(r"<td [^>]*>parallelism\.tp\s*</td><td [^>]*>8\s*</td>", job._repr_html_())
    assert "&lt;script&gt;" in job._repr_html_()
    rest = set(steptime.__all__) - parts.keys() - {"ConfigError", "estimate", "quick", "search", "summarize_checkpoint"}
    assert all(hasattr(getattr(steptime, name), "_repr_html_") for name in rest)
