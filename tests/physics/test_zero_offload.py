"""ZeRO-Offload at stages 1 and 2, worked out from DeepSpeed's source (stage_1_and_2.py) for Llama-3 8B on H100.

Source: deepspeedai/DeepSpeed@edaa7221 deepspeed/runtime/zero/stage_1_and_2.py. The link carries 55.6 GB/s, a host thread 12 GB/s,
device memory 0.887 x 3350 GB/s.
"""

from __future__ import annotations

import jobs
import pytest
import search_jobs as search

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.memory.on_host import OnHost, on_host
from steptime.report.explain_parts import gradient_bytes, host_copies
from steptime.timing.gradients_down import most_of_one

N = 8030261248
LINK, THREAD, DEVICE = 55.6e9, 12e9, 0.887 * 3350e9


def offloaded(stage, micro_batches=1, dp=8, overlap=None, said=None, **parallelism):
    performance = {"software": "deepspeed", "cpu_offload": {"optimizer": 1.0} | (said or {})}
    if overlap is not None:
        performance["overlap"] = {"dp": overlap}
    layout = {"dp": dp, "zero_level": stage} | parallelism
    return jobs.job("llama3-8b", gbs=dp * micro_batches, performance=performance, **layout)


@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_of_the_update(stage):
    """fp32 parameter, gradient and moments 4 + 4 + 8 and a rounded parameter 2; down 4, up 2.

    The host scales gradients (8), Adam reads four and writes three of fp32 (28), and rounds (4 + 2). The device takes the norm in
    double precision (2 + 8, 8), looks for inf and nan (2 + 4, 4 + 1, 4 + 4, 4 + 1, 1 + 1 + 1, 1 + 4, 4) and casts (2 + 4): 60.
    """
    assert on_host(offloaded(stage)) == OnHost(18, 42, down=4, up=2, readied=60, summed=2 if stage == 2 else 0)


def test_stage_1_adds_on_the_device():
    """The step's one reduction is the first for the optimizer (micro_step_id 0): 4 bytes go down however many micro-batches."""
    one, three = (estimate(offloaded(1, n)).timing.optimizer.host for n in (1, 3))
    assert three == one


ONE_BUCKET = {"n_param_buckets": 1}
DOWN = N / 8 * 2 / LINK
BOTH = N / 8 * (4 / LINK + 6 / DEVICE)


def test_sums_of_stage_2_come_and_go():
    """Of three micro-batches each sum goes down in 2 bytes, and two come up and are added to: 2 + 2 read, 2 written.

    Each rank's eighth at once: 0.0361 s down, twice 0.0743 s, on top of the last one's fp32 copy.
    """
    one, three = (estimate(offloaded(2, n, overlap=False, **ONE_BUCKET)).timing.optimizer.host for n in (1, 3))
    assert pytest.approx((0.03611, 0.07424), rel=1e-3) == (DOWN, BOTH)
    assert three.down_s - one.down_s == pytest.approx(DOWN + 2 * BOTH)
    assert three.copied_s - one.copied_s == pytest.approx(DOWN + 2 * BOTH)
    assert three.hidden_s == pytest.approx(0.0)


def test_sums_beside_backward():
    """With overlap_comm a backward hides what is shorter, and the host waits in the last micro-batch: 0.0743 s of 0.1846 s."""
    one, three = (estimate(offloaded(2, n, overlap=0.1, **ONE_BUCKET)) for n in (1, 3))
    assert three.timing.chunks[0][0].backward_s > BOTH
    host = three.timing.optimizer.host
    assert host.copied_s - one.timing.optimizer.host.copied_s == pytest.approx(BOTH)
    assert host.hidden_s == pytest.approx(DOWN + BOTH)


def test_sums_that_outlast_backward():
    """With small buckets and two ranks nearly all parameters go in turn: 0.289 s down, 0.594 s both ways.

    The first micro-batch's backward hides the way down, the second's a part of both, the last's nothing.
    """
    small = {"dp": 2, "bucket_size_mb": 0.002, "overlap": 0.1}
    one, three = (estimate(offloaded(2, n, **small)) for n in (1, 3))
    down, both, backward = (
        (N - 2048) * 2 / LINK,
        (N - 2048) * (4 / LINK + 6 / DEVICE),
        three.timing.chunks[0][0].backward_s,
    )
    assert (down, both) == pytest.approx((0.2889, 0.5940), rel=1e-3)
    assert backward < both
    more = three.timing.optimizer.host.copied_s - one.timing.optimizer.host.copied_s
    assert more == pytest.approx(max(0.0, down - backward) + (both - backward) + both)


def test_columns_of_the_search_are_the_rows():
    """Memory bit for bit that of an estimate, its step too: also with several micro-batches, whose sums come and go."""
    job = offloaded(2, 4).replace(model=search.MODEL)
    levels = set()
    for block, choice, row in search.sampled(search.blocks_of(job, 16), 24):
        changed = job.replace(**block.changes(choice, row))
        found = estimate(changed)
        levels.add((changed.zero_level, changed.microbatches > 1))
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + sum(
            found.memory.overhead_bytes
        )
        if found.memory.fits:
            assert block.step_s[choice, row] == pytest.approx(found.step_s, rel=1e-9)
    assert {(1, True), (2, True)} <= levels


def test_what_the_device_keeps():
    """Parameters 2 B; a bucket of 5e8 elements, two where the reduction overlaps; the largest parameter, 128,256 x 4,096.

    At stage 1 gradients too, 2 B. Nothing of the 12 B of the states.
    """
    largest = 128256 * 4096
    for stage, kept in ((1, 2 * N), (2, 0)):
        for overlap, buckets in ((False, 1), (0.1, 2)):
            (row,) = estimate(offloaded(stage, 2, overlap=overlap)).memory.stages
            assert row.params_bytes == pytest.approx(2 * N)
            assert row.gradients_bytes == pytest.approx(kept + 2 * (buckets * 5e8 + largest))
            assert row.optimizer_bytes == 0.0


def test_what_the_host_holds():
    """18 B a parameter of all 8 devices of a node; 20 B at stage 2 with sums."""
    held = {(stage, n): estimate(offloaded(stage, n)).memory.host_bytes for stage in (1, 2) for n in (1, 2)}
    assert held == pytest.approx({(1, 1): 18 * N, (1, 2): 18 * N, (2, 1): 18 * N, (2, 2): 20 * N})


def test_a_node_that_the_states_do_not_fit_into():
    """18 x 8.03e9 = 144.5 GB."""
    small = {"hardware.overrides": {"host.memory_bytes": "144 GB"}}
    enough = {"hardware.overrides": {"host.memory_bytes": "145 GB"}}
    assert estimate(offloaded(2).replace(**small)).memory.verdict == "does_not_fit"
    assert estimate(offloaded(2).replace(**enough)).memory.verdict != "does_not_fit"


def test_one_bucket_is_copied_by_all_ranks_at_once():
    """Each of 8 ranks copies its eighth: N/8 x (4 B / 55.6 GB/s + 60 B / 2.97 TB/s); 42 B at 12 GB/s; up N/8 x 2 B."""
    host = estimate(offloaded(2, n_param_buckets=1)).timing.optimizer.host
    assert host.down_s == pytest.approx(N / 8 * (4 / LINK + 60 / DEVICE), rel=1e-6)
    assert host.down_s == pytest.approx(0.09249, rel=1e-3)
    assert host.waited_s == pytest.approx(N / 8 * 42 / THREAD)
    assert host.up_s == pytest.approx(N / 8 * 2 / LINK)
    assert host.copied_s == host.down_s + host.up_s


def test_small_buckets_are_copied_one_after_another():
    """With a bucket for each tensor and 2 ranks all of N is copied in turn but 2,048 elements, which both ranks copy at once.

    From the back: head and norm, 525,340,672, and 16 layers of 218,112,000 end at 4,015,132,672, 2,048 behind N/2.
    """
    host = estimate(offloaded(2, dp=2, bucket_size_mb=0.002)).timing.optimizer.host
    assert host.down_s == pytest.approx((N - 2048) * (4 / LINK + 60 / DEVICE), rel=1e-9)
    assert host.up_s == pytest.approx(N / 2 * 2 / LINK)


def test_tensors_in_turn_are_copied_at_once():
    """With round_robin each of 2 ranks copies N/2, whatever the buckets."""
    host = estimate(offloaded(2, dp=2, bucket_size_mb=0.002, said={"round_robin": True})).timing.optimizer.host
    assert host.down_s == pytest.approx(N / 2 * (4 / LINK + 60 / DEVICE), rel=1e-9)


@pytest.mark.parametrize(("bucket", "in_turn"), [(5, 40), (8, 8 + 6 + 4 + 6 + 8), (20, 20), (40, 10)])
def test_the_most_of_one_rank(bucket, in_turn):
    """40 elements of 4 ranks, 10 each: buckets of 8 start at 0, 8, 16, 24, 32 and have at most 8, 6, 4, 6, 8 of one rank."""
    starts = range(0, 40, bucket)
    assert sum(most_of_one(float(start), float(bucket), 10.0) for start in starts) == in_turn


def test_a_share_or_parameters_need_stage_3():
    for said in ({"optimizer": 0.5}, {"params": True}):
        with pytest.raises(ConfigError, match=r"DeepSpeed with 1 or 2 and only \{optimizer: 1\}"):
            offloaded(2).replace(**{"performance.cpu_offload": said})


def test_explanations_of_the_copies():
    """Of three micro-batches sums of 2 B come and go; the device keeps buckets alone at stage 2."""
    found = estimate(offloaded(2, 3, n_param_buckets=1))
    facts = {fact.label: " ".join(fact.lines) for fact in host_copies(found).facts}
    assert facts["states"].startswith("4 B a parameter down, 2 B of its sum each way in every micro-batch: ")
    assert facts["in turn"] == "gradients of 1,003,782,656 parameters go down one after another"
    assert gradient_bytes(found.job).startswith("buckets of the reduction")
    assert gradient_bytes(offloaded(1)).startswith("2 B each, sharded at zero_level 2 and above; buckets of")
