"""What other trainers do differently: kernels, launches, waits and links, each by a figure that a hand can check."""

import jobs
import pytest
from own_rows import own

from steptime import Job, estimate
from steptime.cost import compute
from steptime.cost.comm import collective
from steptime.cost.host import wait_for_host
from steptime.cost.network import one_link
from steptime.cost.pace import slower_rates
from steptime.cost.rates import attention_efficiency, plain_share, rates
from steptime.cost.work import Work
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group, group
from steptime.memory.buffers import earlier_logits_bytes
from steptime.model.ops import Gemm, Param
from steptime.software.performance import load_software
from steptime.timing.part_times import part_times, pricing
from steptime.validation.measurements import MeasuredRow
from steptime.validation.row_plan import to_config
from steptime.validation.row_software import framework_of

A100 = Machine.load("dgx-a100-80gb").accelerator
RATES = rates(A100, load_software("megatron-2021"))
RATE_FIELDS = [name for name in RATES._fields if name.endswith(("_flops", "_per_s"))]


def product(**changes):
    return Gemm("attn.core.scores", m=2048.0, n=2048.0, **changes)


def test_older_flash_kernels_are_slower_than_flash_attention_2_by_the_published_ratio():
    """FlashAttention-2 is 1.7 to 3.0 times as fast as the first, 1.3 to 2.5 times as Triton's (Dao 2023, section 4)."""
    now = attention_efficiency(A100, load_software("fsdp2"))
    for profile, kernel, slower in (("llm-foundry", "triton", 1.7), ("aleph-alpha", "fa1", 2.35)):
        software = load_software(profile).replace(attention_kernel=kernel)
        assert attention_efficiency(A100, software) == pytest.approx([share / slower for share in now])


def test_heads_whose_rows_are_no_multiple_of_16_bytes_do_without_tensor_cores():
    """104 elements of 2 bytes are 13 times 16 bytes; 108 are 13.5."""
    even, odd = (compute.forward(product(k=k), RATES, {}) for k in (104.0, 108.0))
    depth = (108 / 308) / (104 / 304)
    assert plain_share(A100, "fp16") == pytest.approx(19.5e12 / 253.7e12)  # over what is measured alone
    assert odd.compute_s / even.compute_s == pytest.approx(108 / 104 / depth / RATES.plain_share)
    weight = (Param("w", (108, 2048)),)
    assert compute.forward(product(k=108.0, params=weight), RATES, {}).compute_s < odd.compute_s / 5
    wide = compute.forward(product(k=108.0, itemsize=4.0), RATES, {})
    assert wide.compute_s < odd.compute_s / 5


def test_an_eager_norm_moves_ten_times_its_data_forward_and_twenty_times_back():
    """Of fp32 elements, against a fused kernel's two and three times half as much."""
    found = {}
    for norm in ("fused", "composite"):
        ops = {op.name: op for op in estimate(trainer_job("aleph-alpha", tp=1, norm_impl=norm)).assembly.kinds[0].ops}
        found[norm] = ops["attn.norm"]
    elements = 2048 * 4096
    assert found["composite"].forward_bytes == 10 * 4 * elements == (8 + 4 + 16 + 12) * elements
    assert found["composite"].backward_bytes == 20 * 4 * elements == (40 + 8 + 8 + 12 + 12) * elements
    assert found["fused"].forward_bytes is None  # what it reads and writes


def test_memory_bound_kernels_may_run_below_a_copy():
    slow = RATES._replace(move_rate=0.5)
    moved = [compute.move_pass(1e9, 0.0, r).time_s for r in (RATES, slow)]
    assert moved[1] == pytest.approx(2 * moved[0])
    assert compute.forward(product(k=64.0), slow, {}) == compute.forward(product(k=64.0), RATES, {})


@pytest.mark.parametrize(
    ("kernels", "blocking", "added"),
    [
        (100.0, False, 0.0),  # 100 x 10 us of launches under 2 ms of kernels
        (300.0, False, 1e-3),  # 3 ms of launches: the device waits for one
        (100.0, True, 1e-3),  # in turns
    ],
)
def test_the_device_waits_for_the_host(kernels, blocking, added):
    software = load_software("torch").replace(host_kernel_s=10e-6, blocking_launches=blocking)
    work = Work(gemm_s=2e-3, kernels=kernels)
    wait_for_host(work, software)
    assert work.launch_s == pytest.approx(added)
    wait_for_host(work := Work(gemm_s=2e-3, kernels=1e6), load_software("torch").replace(host_kernel_s=0.0))
    assert work.launch_s == 0.0


def test_kernels_of_a_block_are_counted():
    """A block without tensor parallelism: every op once, moves as often as they have kernels."""
    found = estimate(trainer_job("torch", tp=1))
    ops = found.assembly.kinds[0].ops
    listed = sum(getattr(op, "kernels", 1.0) for op in ops)
    assert found.timing.parts.layer.forward.kernels == listed
    assert found.timing.parts.layer.backward.kernels > listed


def test_one_link_of_a_node_carries_what_eight_did():
    tiers = Machine.load("dgx-a100-80gb").tiers
    over = Group("dp", 64.0, 1.0)
    shared, single = (
        collective("all_gather", 1e10, over, tiers),
        collective("all_gather", 1e10, over, one_link(over, tiers)),
    )
    assert single.bandwidth_s == pytest.approx(8 * shared.bandwidth_s)
    assert single.bandwidth_s == pytest.approx(1e10 * 63 / 64 / (tiers[1].bytes_per_s * tiers[1].efficiency))


def trainer_job(software, tp=8, dp=2, **performance):
    usual = {"gbs": 16, "seqlen": 2048, "hardware": "dgx-a100-80gb"}
    return jobs.job("llama2-7b", software=software, performance=performance, tp=tp, dp=dp, sp=False, **usual)


def changed(monkeypatch, software, **fields):
    """An estimate under a profile with other fields."""
    whole = load_software(software).replace(**fields)
    monkeypatch.setattr("steptime.software.performance.load_software", lambda _: whole)
    return estimate(trainer_job(software))


def test_ranks_that_wait_for_each_other_lengthen_tensor_parallel_collectives_alone(monkeypatch):
    once = changed(monkeypatch, "aleph-alpha", tp_comm_factor=1.0).time.parts_s
    twice = changed(monkeypatch, "aleph-alpha", tp_comm_factor=2.0).time.parts_s
    assert twice["tp_comm"] == pytest.approx(2 * once["tp_comm"])
    for part in ("gemm", "attention", "memory_bound", "dp_comm"):
        assert twice[part] == once[part]
    row = changed(monkeypatch, "aleph-alpha", tp_comm_factor=2.0).collectives[0]
    ramp_s = row.time_s - row.latency_s - row.bandwidth_s
    alone = changed(monkeypatch, "aleph-alpha", tp_comm_factor=1.0).collectives[0]
    assert ramp_s == pytest.approx(2 * (alone.time_s - alone.latency_s - alone.bandwidth_s))


def test_sharded_states_with_all_reduced_fp32_gradients_send_four_times_as_much(monkeypatch):
    """bf16 gradients, reduce-scattered: 2 bytes a parameter. All-reduced in fp32: 8."""
    first = changed(monkeypatch, "aleph-alpha", sharded_reduction="reduce_scatter", reduce_dtype="main").timing.dp
    other = changed(monkeypatch, "aleph-alpha").timing.dp
    plain, full = first.reductions[0][0][0], other.reductions[0][0][0]
    assert (plain.kind, full.kind) == ("reduce_scatter", "all_reduce")
    assert full.bytes == 2 * plain.bytes
    assert full.cost.bandwidth_s == pytest.approx(4 * plain.cost.bandwidth_s)
    assert [c.bytes for c in first.gathers[0][0]] == [c.bytes for c in other.gathers[0][0]]


def test_all_reduced_gradients_of_replicated_shards_are_all_reduced_between_the_replicas_too():
    """ZeRO-1 over 4 of 8 ranks: the reduction over these 4 leaves whole sums, which the 2 replicas add up."""
    of = trainer_job("aleph-alpha", tp=1, dp=8).replace(**{"parallelism.replicas": 2})
    timing = estimate(of).timing
    call = timing.dp.reductions[0][0][0]
    inside, between = (
        collective("all_reduce", call.bytes, group(of.parallelism, name), timing.context.tiers)
        for name in ("shards", "replicas")
    )
    assert (inside.tier, between.tier) == ("nvlink", "nvlink")
    assert call.cost.time_s == pytest.approx(inside.time_s + between.time_s)


def test_broadcasts_from_every_owner_show_whole_and_cost_a_hop_per_rank(monkeypatch):
    """The ring of a broadcast passes every rank once, so its latency grows with them; nothing hides it."""
    dp = changed(monkeypatch, "internevo").timing.dp
    call = dp.gathers[0][0][0]
    assert call.kind == "broadcast"
    assert dp.gather_exposed_s == pytest.approx(sum(c.cost.time_s for c in dp.gathers[0][0]))
    tiers = Machine.load("dgx-a100-80gb").tiers
    few, many = (collective("broadcast", 0.0, Group("dp", n, 1.0), tiers).latency_s for n in (64.0, 128.0))
    hops = 56 * tiers[0].latency_s + 8 * tiers[1].latency_s  # 8 more nodes of 8
    assert many - few == pytest.approx(hops)


@pytest.mark.parametrize(
    ("words", "precision", "profile"),
    [
        ("Aleph Alpha in-house (Megatron-style 3D)", "bf16", "aleph-alpha"),
        ("llm-foundry v0.0.4 (torch 2.x FSDP, flash attention)", "bf16", "llm-foundry"),
        ("Megatron-DeepSpeed (ZeRO-1, BigScience tr11 prep, Feb 2022)", "fp16", "bloom"),
        ("Megatron-LM + DeepSpeed 3D (Megatron-DeepSpeed), Jun-Jul 2021", "fp16", "megatron-deepspeed-2021"),
        ("Megatron-LM (May-Jul 2021)", "fp16", "megatron-deepspeed"),
        ("Megatron-DeepSpeed (vTrain validation runs)", "fp16", "megatron-2021"),
        ("DeepSpeed ZeRO-3", "fp16", "deepspeed-2021"),
        ("XTuner (MMEngine + DeepSpeed ZeRO-3, flash-attn, Ulysses SP)", "fp16/bf16", "deepspeed"),
        ("InternEvo v0.2.1dev20231121", "bf16", "internevo"),
        ("PaddlePaddle 2.5.1 / PaddleNLP", "fp16 O2", "paddle"),
        ("nanotron", "bf16", "nanotron"),
    ],
)
def test_a_framework_finds_its_profile(words, precision, profile):
    assert framework_of(MeasuredRow({"framework": words, "precision": precision}, "other", 1)).profile == profile


def test_cuda_graphs_halve_a_layers_launch_gaps():
    """Llama 2 7B: 16 micro-batches through 32 layers, half of the gap of each saved; nothing else changes."""
    gap_s = load_software("megatron-core").timing.layer_gap_s
    assert gap_s > 0.0
    layers = (estimate(trainer_job("megatron-core", dp=1, cuda_graphs=on)).timing.parts.layer for on in (False, True))
    plain, graphed = (sum(work.launch_s - work.host_s for work in layer[:2]) for layer in layers)
    assert plain - graphed == pytest.approx(gap_s / 2.0, rel=1e-9)


@pytest.mark.parametrize(
    ("notes", "graphed"),
    [
        ("cuda_graph full_iteration", True),
        ("cuda_graph transformer_engine ['attn', 'moe_router']", ["attn", "moe_router"]),
        ("cuda_graph transformer_engine mlp", ["mlp"]),
        ("HybridEP; TE CUDA graphs", ["attn", "moe_router", "moe_preprocess"]),
        ("cuda_graph none full_iteration", False),
        ("", False),
    ],
)
def test_a_row_says_whether_it_ran_in_cuda_graphs(notes, graphed):
    config = to_config(own(framework="Megatron-Bridge 25.09", overlap_notes=notes)).config
    assert config["performance"].get("cuda_graphs", False) == graphed


def test_gathered_logits_cost_one_gather_of_all_of_them_and_no_sums_in_the_loss(monkeypatch):
    """2,048 tokens by Llama 2's vocabulary, padded from 32,000 to a multiple of 128 x tp, in bf16; the loss then asks nobody."""
    gathered = {row.name: row for row in changed(monkeypatch, "aleph-alpha", gathered_logits=True).collectives}
    split = {row.name: row for row in changed(monkeypatch, "aleph-alpha", gathered_logits=False).collectives}
    sums = {"loss.max", "loss.target", "loss.sum"}
    assert gathered["head.concat"].bytes == 2048 * 32_768 * 2
    assert gathered["head.concat"].kind == "all_gather"
    assert not sums & gathered.keys()
    assert sums <= split.keys()
    assert "head.concat" not in split


def test_a_profiles_factor_slows_every_kernel_alike():
    """Products, attention, scans, convolutions, chunks and element-wise kernels, with or without a number of SMs."""
    software = load_software("megatron-2021")
    for device in (A100, A100.model_copy(update={"sm_count": None})):
        usual, slower = rates(device, software), rates(device, software.replace(compute_factor=2.0))
        for field in RATE_FIELDS:
            assert getattr(slower, field) == pytest.approx(getattr(usual, field) / 2), field
    slower = rates(A100, software.replace(compute_factor=2.0))
    assert slower.gemm_kernel_s == pytest.approx(2 * RATES.gemm_kernel_s)
    assert slower.move_kernel_s == pytest.approx(2 * RATES.move_kernel_s)


def test_a_calibrations_factor_slows_every_kernel_alike():
    """1.25 times the seconds: every rate by 1 / 1.25, every fixed time and the gaps between kernels by 1.25; shares stay."""
    slower = slower_rates(RATES, 1.25)
    times = ("gemm_kernel_s", "move_kernel_s", "slowness")
    factors = dict.fromkeys(RATE_FIELDS, 1 / 1.25) | dict.fromkeys(times, 1.25)
    for name in RATES._fields:
        if name in factors:
            assert getattr(slower, name) == pytest.approx(factors[name] * getattr(RATES, name)), name
        else:
            assert getattr(slower, name) == getattr(RATES, name), name


def test_backward_hides_tensor_parallel_collectives_only_where_the_profile_overlaps_them(monkeypatch):
    hidden = changed(monkeypatch, "megatron-core", tp_backward_overlap=True).time
    shown = changed(monkeypatch, "megatron-core", tp_backward_overlap=False).time
    assert hidden.hidden_s["tp_comm"] > 0.0
    assert shown.hidden_s.get("tp_comm", 0.0) == 0.0
    assert shown.parts_s["tp_comm"] > hidden.parts_s["tp_comm"]
    assert shown.parts_s["gemm"] == pytest.approx(hidden.parts_s["gemm"])


def test_paddle_runs_flash_attention_1_and_waits_for_its_collectives():
    """1 / 2.35 of FlashAttention-2's rate (Dao 2023); an all-reduce of tp 2 takes 2.1 times its time alone, nothing hidden."""
    paddle, plain = load_software("paddle"), load_software("megatron-core")
    fa2 = attention_efficiency(A100, plain.replace(attention_kernel="fa2"))
    assert attention_efficiency(A100, paddle) == pytest.approx([share / 2.35 for share in fa2])
    found = {}
    for software in ("paddle", "megatron-core"):
        job = Job(
            model="llama2-7b",
            parallelism={"tp": 2, "pp": 1, "dp": 4, "sp": False},
            data={"gbs": 16, "seqlen": 2048, "microbatch_sz": 4},
            performance={"software": software, "precision": "fp16"},
            hardware="dgx-a100-80",
        )
        times = part_times(Assembly(job), pricing(job))
        [found[software]] = [call for call in times.layer.forward.calls if call.name.startswith("mlp")]
    assert found["paddle"].cost.time_s == pytest.approx(2.1 * found["megatron-core"].cost.time_s)
    assert found["paddle"].hidden_s == 0.0


def test_a_root_mean_square_norm_that_is_not_fused_is_said_in_a_row():
    row = own(framework="PaddlePaddle 2.5.1", precision="fp16", note="memory cell: 28.4 GB; fused rms norm off")
    assert to_config(row).config["performance"]["norm_impl"] == "composite"


def test_the_logits_of_the_micro_batch_before_stay_in_their_output_buffer(monkeypatch):
    """2,048 tokens in bf16, gathered over tp: 32,000 words padded to 32,768 (a multiple of 128 x 8)."""
    stay, gone = (changed(monkeypatch, "aleph-alpha", logits_stay=held).memory for held in (True, False))
    assert stay.peak_allocated_bytes - gone.peak_allocated_bytes == 2048 * 32768 * 2
    split = load_software("aleph-alpha").replace(gathered_logits=False)
    monkeypatch.setattr("steptime.software.performance.load_software", lambda _: split)
    several = Assembly(trainer_job("aleph-alpha"))
    assert earlier_logits_bytes(several, several.stages[0]) == 2048 * 32768 * 2 / several.job.parallelism.tp
    monkeypatch.undo()
    alone = trainer_job("aleph-alpha").replace(**{"data.gbs": 2})
    assert earlier_logits_bytes(Assembly(alone), Assembly(alone).stages[0]) == 0.0
