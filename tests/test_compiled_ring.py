"""torch's ring of context parallelism in a compiled graph: what it waits for, and when."""

from __future__ import annotations

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.model.ops import Attention

# h 4096 in 32 heads of 128, 8 key-value heads; 32,768 tokens on each of 4 ranks
MODEL = {
    "n_layers": 2, "hidden_sz": 4096, "inter_sz": 14336, "n_q_heads": 32, "n_kv_heads": 8, "vocab_sz": 32000
}  # fmt: skip


def answer(how: str = "all_gather", software: str = "fsdp2", **performance):
    return estimate(
        jobs.job(MODEL, gbs=2, seqlen=131072, software=software, dp=2, cp=4, cp_comm_type=how, performance=performance)
    )


def ring(of):
    """Exchanges of the ring: seconds of a step that each takes, and how many of them nothing hides."""
    return {r.name: (r.time_s * r.count_per_step, r.exposed_s) for r in of.collectives if r.axis == "cp"}


@pytest.mark.parametrize("how", ["all_gather", "p2p"])
@pytest.mark.parametrize("compiled", ["blocks", "all"])
def test_a_compiled_ring_hides_nothing(how, compiled):
    """A traced collective is waited for where it is issued (torch 2.13 torch/distributed/_functional_collectives.py,
    _maybe_wrap_tensor), before the block that an eager ring computes meanwhile.

    An eager ring: a layer gathers 2 * 4 * 32,768 * 8 * 128 elements of 2 B, 0.54 GB, of which 3/4 cross 450 GB/s of NVLink in
    no less than 0.9 ms; the first block alone is 2 * 32,768^2 * 4,096 multiply-adds of the half under the mask, 8.8 TFLOP, which
    no H100 does within 8.9 ms. So of all but the last exchange of gradients only what both lose by
    running at once is exposed.
    """
    for total, shown in ring(answer(how, compile=compiled)).values():
        assert shown == pytest.approx(total)
    eager = ring(answer(how, compile="none"))
    for name, (total, shown) in eager.items():
        assert shown == pytest.approx(total) if "last_grad" in name else shown < 0.35 * total


def test_a_plan_that_reorders_its_graph_says_so():
    """Inductor can move a wait behind the block (reorder_for_compute_comm_overlap): performance.overlap.cp stands."""
    shown = {
        share: sum(s for _, s in ring(answer(compile="blocks", overlap={"cp": share})).values()) for share in (0.25, 0)
    }
    assert shown[0.25] == pytest.approx(0.75 * shown[0])
    assert shown[0] == pytest.approx(answer(compile="blocks").time.parts_s["cp_comm"])


def test_a_compiled_ring_merges_in_one_kernel():
    """Four outputs of 32,768 * 4,096 elements are read in bf16 and the merged one written, 5 * 2 B an element; then keys and
    values are put in order, 2 * 2 * 32,768 * 1,024 elements. Kernels: that of outputs two of log-sum-exps, that order, and four
    that add and pack gradients: 2 for each block (inductor of torch 2.13; eager: 8 a block, 138 B an element).
    """
    op = next(op for op in answer(compile="blocks").assembly.kinds[0].ops if isinstance(op, Attention))
    assert op.merge_forward_bytes == 5 * 2 * 32768 * 4096 + 2 * 2 * 2 * 32768 * 1024
    assert op.merge_kernels == 2 * 4
