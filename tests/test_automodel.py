"""NeMo AutoModel: experts without FSDP where no ranks share them, sums of gradients, and its balanced gate."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
from own_rows import own

from steptime import Job, estimate, fsdp
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.router_choice import ranks_in_turn
from steptime.software.performance import load_software
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config

MODEL = {
    "n_layers": 2, "hidden_sz": 64, "inter_sz": 128, "n_q_heads": 4, "vocab_sz": 256,
    "moe": {"n_experts": 8, "expert_inter_sz": 32, "experts_per_token": 2},
}  # fmt: skip
KEPT = {"reshard_after_forward": False, "reshard_after_backward": False}


def automodel_job(dp: int, micro_batches: int = 1, **performance: object) -> Job:
    gbs, settings = dp * micro_batches, {"software": "automodel", **performance}
    return jobs.job(MODEL, gbs=gbs, seqlen=32, performance=settings, dp=dp, ep=4, fsdp=KEPT)


def collectives(of: Job) -> dict[str, float]:
    return {row.name: row.count_per_step for row in estimate(of).collectives if row.axis in {"dp", "edp"}}


def test_experts_that_no_ranks_share_are_not_gathered():
    """4 ranks and ep 4: each expert lies on one rank, outside of FSDP. With 8 ranks two share it, and it is gathered."""
    assert "block experts parameters" not in collectives(automodel_job(4))
    assert collectives(automodel_job(8))["block experts parameters"] == 2.0
    row = next(row for row in estimate(automodel_job(8)).collectives if row.name == "block experts parameters")
    assert (row.axis, row.ranks) == ("edp", 2)


def test_sums_of_gradients_by_hand():
    """Expert: 2 experts of 3 x 64 x 32 in bf16, as they are, 2 layers: 2 x 2 x 6,144 x 2 B = 49,152 B.

    Dense, in fp32: embedding and head 2 x 256 x 64; two layers of q and output 2 x 64 x 64, k and v the same, router 8 x 64,
    norms 2 x 64; the final norm 64: 32,768 + 2 x (16,384 + 512 + 128) + 64 = 66,880 elements, 267,520 B.
    """
    assert fsdp.summed_bytes(Assembly(automodel_job(4, 2))) == 49_152 + 267_520


@pytest.mark.parametrize(("micro_batches", "gathers"), [(1, 1.0), (4, 1.0)])
def test_parameters_are_gathered_and_gradients_reduced_once_a_step(micro_batches, gathers):
    """reshard_after_forward and reshard_after_backward false, no_sync: 2 blocks, 1 root."""
    found = collectives(automodel_job(8, micro_batches))
    assert (found["root parameters"], found["root gradients"]) == (gathers, 1.0)
    assert (found["block parameters"], found["block gradients"]) == (2.0, 2.0)


def saved(of: Job) -> dict[str, tuple[str, ...]]:
    return {op.name: op.saves for op in Assembly(of).kinds[0].ops}


def test_scores_are_applied_in_the_activation():
    """With HybridEP: the experts' output is summed and sent as it is, and no row of it is kept; each row's score is."""
    found = saved(automodel_job(8, moe={"dispatcher": "flex"}))
    assert "moe.weigh" not in found
    assert found["experts.act"] == ("experts.gate_up", "moe.ranked")
    assert saved(automodel_job(8, moe={"dispatcher": "alltoall"}))["moe.weigh"] == ("moe.wide", "moe.ranked")


def test_sinks_are_part_of_the_kernel():
    """TransformerEngine's softmax_type learnable: the output projection keeps what attention keeps, no scaled copy."""
    sinks = automodel_job(8).replace(**{"model.attention": {"sinks": True}})
    assert "attn.core.sink" not in saved(sinks)
    assert saved(sinks)["attn.proj"] == ("attn.core.out",)
    assert "attn.core.sink" in saved(sinks.replace(**{"performance.attention_kernel": "flex"}))


def test_ranks_of_the_balanced_gate_by_hand():
    """Kimi K2 on 32 ranks, 12 experts each: starts at 0, 8, 16 = 4 of the next ... of 12, so 1, 2 and 1 ranks: 1.33."""
    assert ranks_in_turn(384, 8, 32) == 1
    assert ranks_in_turn(256, 8, 64) == 2
    assert ranks_in_turn(256, 8, 256) == 8


def ops(of: Job) -> dict[str, Any]:
    return {op.name: op for op in Assembly(of).kinds[0].ops}


def test_gate_and_up_are_one_product_by_hand():
    """gate_and_up_projs: for each expert one weight of 64 x 2 * 32, 8 experts; down 32 x 64."""
    found = ops(automodel_job(8, moe={"dispatcher": "flex"}))
    assert "experts.gate" not in found
    shapes = [found[name].params[0].shape for name in ("experts.gate_up", "experts.down")]
    assert shapes == [(8, 64, 64), (8, 64, 32)]
    apart = automodel_job(8).replace(**{"performance.software": "fsdp2", "parallelism.fsdp": {}})
    assert {"experts.gate", "experts.up"} <= ops(apart).keys()


@pytest.mark.parametrize(("software", "sums"), [("automodel", False), ("fsdp2", True)])
def test_one_product_has_one_gradient_of_its_rows(software, sums):
    """Those of two are added, which a torch that has room for more rows than arrive does over all of them."""
    room = {"dispatcher": "flex", "flex_backend": "hybridep", "non_blocking_capacity_factor": 1.0}
    found = ops(automodel_job(8, moe=room).replace(**{"performance.software": software, "parallelism.fsdp": {}}))
    assert ("experts.sum" in found) == sums


def test_permutation_of_hybrid_ep_by_hand():
    """32 tokens of each of 4 ranks, top 2 of 8, two experts a rank: N = 64 rows here, 32 * 4 / 4 * 2.

    A token wants 4 * (1 - C(6, 2) / C(8, 2)) = 13/7 of the ranks, so 32 * 13/7 = 59.43 rows arrive. Each row of 64 in bf16 is
    read once and written once, both ways, by one kernel: (59.43 + 64) * 128 B = 15,799 B. torch's gather moves 2 and 3 times 64
    rows: 16,384 and 24,576 B.
    """
    hybrid, deep = (
        ops(automodel_job(8, moe={"dispatcher": "flex", "flex_backend": name})) for name in ("hybridep", "deepep")
    )
    for name in ("moe.local_permute", "moe.scatter"):
        assert hybrid[name].forward_bytes == pytest.approx((32 * 13 / 7 + 64) * 128)
        assert (hybrid[name].backward_bytes, hybrid[name].kernels) == (hybrid[name].forward_bytes, 1.0)
    assert (deep["moe.local_permute"].forward_bytes, deep["moe.local_permute"].backward_bytes) == (16_384.0, 24_576.0)


def test_rotation_is_unfused_since_july_2026_by_hand():
    """BackendConfig.__post_init__ forces rope_fusion off; q and k of 32 tokens, 4 heads of 16 each: 2 * 32 * 64 * 2 = 8,192 B.

    apply_rotary_emb of gpt_oss reads and writes them 10 times in forward (`rotary.ROTATIONS`), TransformerEngine's kernel twice.
    """
    now, before = (ops(automodel_job(4, software=name))["attn.rope"] for name in ("automodel", "automodel@2026-06"))
    assert (now.forward_bytes, before.forward_bytes) == (10 * 8_192, 2 * 8_192)


@pytest.mark.parametrize("name", ["automodel-n001", "automodel-n006", "automodel-oom-n001", "automodel-oom-n003"])
def test_rows_of_june_2026_are_fused(name):
    """Commits of 2026-06-03 to 2026-06-08; those of 2025 are older than rope_fusion (tests/test_row_scripts.py)."""
    assert to_config(next(row for row in shipped() if row.id == name)).config["performance"]["rope_impl"] == "fused"


def test_a_release_differs_in_its_switches_alone():
    """Gate and up are one product, and the activation applies the scores, in automodel@2026-06 as in automodel."""
    now, before = (
        ops(automodel_job(8, software=name, moe={"dispatcher": "flex"})) for name in ("automodel", "automodel@2026-06")
    )
    assert now.keys() == before.keys()
    assert "experts.gate_up" in before
    assert "moe.weigh" not in before


@pytest.mark.parametrize(("streams", "share"), [(4, 1.0), (1, 1.0), (0, 0.36 * 2500 / 1366)])
def test_experts_multiply_by_cublas_or_by_torch_on_blackwell(streams, share):
    """cuBLAS on streams of its own keeps the rate of a long product on GB200, 1,366 TFLOP/s in bf16; torch._grouped_mm reaches
    0.36 of the peak of 2,500: 900. Its step takes 190 ms more than with grouped_gemm and 371 more than with TransformerEngine
    (DeepSeek-V3, 64 GB200: 3.281, 3.091 and 2.910 s; NVIDIA-NeMo/Automodel@36044ad3 examples/llm_benchmark/deepseek).
    """
    software = load_software("automodel").replace(grouped_workspaces=streams)
    assert rates(Machine.load("gb200-nvl72").accelerator, software).grouped_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"overlap_notes": "HybridEP; experts gmm"}, (None, None)),
        ({"overlap_notes": "HybridEP; experts torch._grouped_mm"}, (0, None)),
        ({"note": "expert backend torch_mm at this commit's measurement"}, (0, None)),
        ({"overlap_notes": "attention and its projections compiled; experts TE GroupedLinear"}, (None, "blocks")),
    ],
)
def test_what_rows_say_of_experts_and_compilation(cells, said):
    """Experts of torch._grouped_mm have no streams of their own; the whole latent attention is compiled where a row says so."""
    found = to_config(own(framework="NeMo AutoModel (FSDP2 + hybridep)", zero_or_fsdp="fsdp2", **cells))
    performance = found.config["performance"]
    assert (performance.get("grouped_workspaces"), performance.get("compile")) == said
