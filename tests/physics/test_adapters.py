"""Parameters of a model with adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): A of rank rows, B of rank columns."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.model.blocks import n_params, n_trained


@pytest.mark.parametrize(
    ("lora", "adapters"),
    [
        # q, k, v and output 4 * (128 + 128) each, gate, up and down 4 * (128 + 256) each, in two layers
        ({"rank": 4}, 2 * (4 * 1_024 + 3 * 1_536)),
        ({"rank": 8, "targets": ["q_proj", "down_proj"]}, 2 * 8 * (256 + 384)),
    ],
)
def test_adapters_alone_are_trained(lora, adapters):
    """The model's own 590,464 parameters stay, frozen."""
    plan = job("torch", model={"lora": lora})
    assert n_params(plan.model) == 590_464 + adapters
    assert n_trained(plan.model, 8, plan.software) == adapters
