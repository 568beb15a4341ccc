"""Whole matrices that are dealt out over ranks, and what an update holds for the tensor it works on, by hand.

The two layers' matrices (`physics_jobs`): q, k, v 49,152 elements, projection 16,384, gate and up 65,536, down 32,768, together
327,680 in two layers; embedding and head have 131,072 each.
"""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.job.assembly import Assembly
from steptime.memory.optimizer_moments import mean_moments, tensor_moments, unevenness, update_temporaries
from steptime.model.ops import Param
from steptime.timing.optimizer import optimizer_step
from steptime.timing.orthogonalize import orthogonalize_s
from steptime.timing.part_times import pricing


def planned(optimizer: str) -> Assembly:
    software = "torch" if optimizer in {"adafactor", "adamw_8bit"} else "megatron-core"
    performance = {"optimizer": optimizer} | ({} if optimizer == "adamw_8bit" else {"moment_dtype": "fp32"})
    return Assembly(job(software, dp=2, performance=performance, zero_level=1 * (optimizer == "dist_muon")))


@pytest.mark.parametrize(
    ("optimizer", "ranks", "more"),
    [
        ("dist_muon", 4, 0),  # 81,920 each, more than the largest
        ("dist_muon", 5, 0),  # 65,536 each, as many
        ("dist_muon", 16, 65_536 - 20_480),
        ("adamw", 16, 0),
    ],
)
def test_a_rank_has_no_less_than_a_matrix(optimizer, ranks, more):
    """megatron/core/optimizer/layer_wise_optimizer.py, _compute_per_buffer_param_layout."""
    assembly = planned(optimizer)
    held = assembly.counted_params(assembly.stages[0])
    assert unevenness(assembly.job, held, {"dense": ranks}) == {"dense": more}


@pytest.mark.parametrize(
    ("optimizer", "bytes_"),
    [("adamw", 0), ("muon", 12 * 65_536), ("dist_muon", 12 * 65_536), ("adafactor", 4 * 131_072)],
)
def test_temporaries_of_an_update(optimizer, bytes_):
    """Muon: three fp32 copies of a matrix; Adafactor: the fp32 update of any tensor, of which the embedding is the largest."""
    assembly = planned(optimizer)
    assert update_temporaries(assembly.job, assembly.counted_params(assembly.stages[0]), {}) == bytes_


@pytest.mark.parametrize(
    ("param", "elements", "values"),
    [
        (Param("w", (6, 10)), 60, 6 + 10),
        (Param("w", (6, 10), 0), 30, 3 + 10),  # tensor parallelism leaves half of the rows
        (Param("w", (6, 10), 1), 30, 6 + 5),  # or of the columns
        (Param("b", (10,)), 10, 10),
        (Param("w", (4, 6, 10), group="expert", n_experts=4), 60, 6 + 10),  # of each expert
        (Param("b", (4, 10), group="expert", n_experts=4), 10, 10),
    ],
)
def test_moments_of_adafactor(param, elements, values):
    """An fp32 mean square of each row and each column of a matrix; of a vector, of each element."""
    assert tensor_moments(planned("adafactor").job, param, elements) == pytest.approx(4 * values)


@pytest.mark.parametrize(("elements", "bytes_"), [(4_095, 8), (4_096, 2 + 8 / 256)])
def test_short_tensors_keep_whole_moments(elements, bytes_):
    """Two fp32 moments below 4,096 elements; else two codes of a byte and two fp32 scales for each 256 of them."""
    assert tensor_moments(planned("adamw_8bit").job, Param("w", (elements,)), elements) == elements * bytes_


def test_matrices_of_experts():
    """Of 8 experts a device of ep 2 has 4: gate and up 128 x 128, down 128 x 64, one fp32 momentum each, 4 B a parameter. Five
    iterations of 4 m^2 n + 2 m^3: 12,582,912 and 4 * 64 * 64 * 128 + 2 * 64^3 = 2,621,440 for each of 4 experts in 2 layers. Of
    the rest: q, k, v 29,360,128, the projection 12,582,912, the router's 8 x 128 rows 4 * 64 * 128 + 2 * 512 = 33,792.
    """
    moe = {"n_experts": 8, "experts_per_token": 2, "expert_inter_sz": 64}
    performance = {"optimizer": "muon"}
    plan = job(
        on=machine(flops=1.0), dp=2, ep=2, microbatches=2, model={"moe": moe}, performance=performance, zero_level=0
    )
    assembly = Assembly(plan)
    held = assembly.counted_params(assembly.stages[0])
    assert mean_moments(plan, held)["expert"] == 4.0
    flops = 2 * 5 * (4 * (12_582_912 + 2_621_440) + 29_360_128 + 12_582_912 + 33_792)
    assert orthogonalize_s(plan, held, pricing(plan).context) == pytest.approx(flops, rel=1e-3)


@pytest.mark.parametrize("layers", [[1, 3], [3, 1]])
def test_the_stage_with_the_most_parameters_decides(layers):
    """Three layers with the head's 131,200 parameters, or the embedding's 131,072, at 1 B/s: matrices have one fp32 momentum,
    4 B, all others two. An update moves 4 + 2 * 4 + 2 * moments + 2 and Muon's 52, clipping 12; 4 are zeroed.
    """
    on = machine(memory=1.0)
    plan = job(
        on=on, pp=2, layers_per_stage=layers, model={"n_layers": 4}, performance={"optimizer": "muon"}, zero_level=0
    )
    assembly, context = Assembly(plan), pricing(plan).context
    matrices, ends = 3 * 163_840, 3 * 256 + (131_200 if layers[1] == 3 else 131_072)
    bytes_ = (matrices + ends) * (4 + 8 + 2 + 52 + 12 + 4) + 2 * (4 * matrices + 8 * ends)
    turned = max(orthogonalize_s(plan, assembly.counted_params(stage), context) for stage in assembly.stages)
    assert optimizer_step(assembly, context).device_s - turned == pytest.approx(bytes_)
